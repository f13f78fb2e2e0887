/* t_settings.c - tests the effect of every setting, and reading settings from text, files and the environment.  Invalid
 * settings must return an error.  A setting that changes during training is compared with a run that resumed from the state
 * saved at the change. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "test.h"
#include "recording_backend.h"
#include "comma.h"

static int says(const char *text) {
    if (strstr(amp_last_error(), text) != NULL) return 1;
    printf("      last error: %s\n      expected:   %s\n", amp_last_error(), text);
    return 0;
}

/* Settings from lines; they must be right. */
static amp_settings settings_of(const char *lines) {
    amp_settings s;
    memset(&s, 0, sizeof s);
    CHECK_OK(amp_settings_read_text(&s, "test", lines, strlen(lines)));
    CHECK_OK(amp_settings_check(&s));
    return s;
}

static const char *temporary(const char *name) {
    static char path[512];
    const char *folder = getenv("TMPDIR");
    snprintf(path, sizeof path, "%s/amp_settings_%ld_%s", folder ? folder : "/tmp", (long)getpid(), name);
    return path;
}

/* ---- Keys and values */

static const char *const keys[] = {
    "enabled", "dtype", "autocast_dtype", "cast_inputs", "cast_outputs", "level", "policy", "mode", "memory_efficient", "cache", "saturate_inputs", "layers", "fallback", "tf32",
    "fp8_format", "fp8_scaling", "fp8_amax", "fp8_history", "fp8_margin", "autotune", "threads", "rates", "scaler",
    "scaler_preset", "frozen", "init_scale", "growth_factor", "backoff_factor", "growth_interval", "min_scale", "max_scale",
    "hysteresis", "tolerance", "clip_norm", "accumulation", "moments", "log_interval", "memory_interval", "cleanup_interval",
    "tensor_stats_interval", "memory_warning", "nan_action", "max_skips", "max_retries",
    "batch_growth_interval", "workers", "prefetch", "pin", "debug"};
enum { KEYS = sizeof keys / sizeof *keys };

/* A value of each key that is not the default, and the line it stands in. */
static const char *const other_values[] = {
    "false", "bf16", "tf32", "true", "fp32", "O2", "torch", "inference", "true", "off", "on", "h.* bf16, head fp32", "fp32", "yes", "e4m3", "delayed", "recent", "16", "3", "on", "3", "scalar bf16 0.5, scalar fp16 1.25", "on",
    "apex", "1", "1024", "1.5", "0.25", "77", "2", "4096",
    "3", "0.125", "1.5", "4", "8bit", "10", "off", "50",
    "200", "0.75", "recover", "7", "0",
    "100", "0", "8", "off", "true"};

TEST(every_key_is_set_written_and_read) {
    char text[2048], line[64];
    amp_settings s, zero;
    memset(&zero, 0, sizeof zero);
    for (int i = 0; i < KEYS; i++) {
        memset(&s, 0, sizeof s);
        CHECK_OK(amp_settings_set(&s, keys[i], other_values[i]));
        CHECK_MSG(memcmp(&s, &zero, sizeof s) != 0, "%s", keys[i]);
        CHECK(amp_settings_text(&s, text, sizeof text) < sizeof text);
        snprintf(line, sizeof line, "%s%s = ", i ? "\n" : "", keys[i]);
        CHECK_MSG(strstr(text, line) != NULL, "%s is not in the text", keys[i]);
        CHECK_OK(amp_settings_set(&s, keys[i], "Default"));
        CHECK_MSG(memcmp(&s, &zero, sizeof s) == 0, "default does not take %s back", keys[i]);
    }
    CHECK_EQ(amp_settings_text(&zero, text, sizeof text), strlen(text));
    int lines = 0;
    for (const char *at = text; *at; at++) lines += *at == '\n';
    CHECK_EQ(lines, KEYS);
}

/* Unless the key is set, an optimizer's desc keeps its own; once it is open they cannot change. */
TEST(moments_are_an_optimizers_for_good) {
    static float w[4096], g[4096];
    amp_context *amp = NULL;
    amp_optimizer *o = NULL;
    amp_optimizer_desc d;
    amp_desc desc;
    amp_param p;
    amp_settings s;
    memset(&desc, 0, sizeof desc);
    memset(&d, 0, sizeof d);
    memset(&p, 0, sizeof p);
    memset(&s, 0, sizeof s);
    p.name = "w"; p.weight = amp_tensor1(w, AMP_F32, 4096); p.grad = amp_tensor1(g, AMP_F32, 4096);
    d.params = &p; d.n_params = 1; d.moments = AMP_BF16;
    CHECK_OK(amp_settings_fill(&s, NULL, NULL, NULL, &d, NULL));
    CHECK_EQ(d.moments, AMP_BF16);
    CHECK_OK(amp_settings_set(&s, "moments", "8bit"));
    CHECK_OK(amp_settings_fill(&s, NULL, NULL, NULL, &d, NULL));
    CHECK_EQ(d.moments, AMP_MOMENTS_8BIT);
    CHECK_ERR(amp_settings_set(&s, "moments", "fp16"), AMP_ERR_RANGE);
    CHECK_EQ(s.moments, AMP_MOMENTS_8BIT);
    CHECK_OK(amp_open(&amp, &desc));
    CHECK_OK(amp_optimizer_create(amp, &o, &d));
    CHECK_OK(amp_settings_apply(&s, amp, NULL, o, NULL));
    CHECK_OK(amp_settings_set(&s, "moments", "bf16"));
    CHECK_ERR(amp_settings_apply(&s, amp, NULL, o, NULL), AMP_ERR_CONFLICT);
    CHECK(strstr(amp_last_error(), "moments = bf16, but 8bit is in force") != NULL);
    amp_optimizer_destroy(o);
    amp_close(amp);
}

/* Unless the key is set, a context's desc keeps its own; once it is open they cannot change. */
TEST(threads_are_a_contexts_for_good) {
    amp_context *amp = NULL;
    amp_desc desc, effective;
    amp_settings s;
    memset(&desc, 0, sizeof desc);
    memset(&s, 0, sizeof s);
    desc.threads = 3;
    CHECK_OK(amp_settings_fill(&s, NULL, &desc, NULL, NULL, NULL));
    CHECK_EQ(desc.threads, 3);
    CHECK_OK(amp_settings_set(&s, "threads", "2"));
    CHECK_OK(amp_settings_fill(&s, NULL, &desc, NULL, NULL, NULL));
    CHECK_EQ(desc.threads, 2);
    CHECK_OK(amp_open(&amp, &desc));
    CHECK_OK(amp_query(amp, &effective));
    CHECK_EQ(effective.threads, 2);
    CHECK_OK(amp_settings_apply(&s, amp, NULL, NULL, NULL));
    CHECK_OK(amp_settings_set(&s, "threads", "1"));
    CHECK_ERR(amp_settings_apply(&s, amp, NULL, NULL, NULL), AMP_ERR_CONFLICT);
    CHECK(strstr(amp_last_error(), "threads = 1, but 2 is in force") != NULL);
    CHECK_OK(amp_settings_set(&s, "threads", "ALL"));
    CHECK_OK(amp_settings_apply(&s, amp, NULL, NULL, NULL));
    amp_close(amp);
}

/* Measured rates decide in place of the table's.  What is no such line, and a path that this CPU lacks, is refused. */
TEST(rates_are_a_setting) {
    static const char *const wrong[] = {"", "avx2", "avx2 bf16", "avx2 bf16 0", "avx2 bf16 -1", "avx2 bf16 nan", "avx2 bf16 inf", "avx2 bf16 1e9", "avx2 bf16 0x1p1",
        "avx9 bf16 1", "avx2 fp32 1", "avx2 fp7 1", "avx2 bf16 1 2", "avx2 bf16 1; scalar bf16 1", "AVX2 bf16 1", "avx2 bf16 1,5", "default bf16 1"};
    amp_desc d = {.cpu_path = AMP_CPU_SCALAR, .threads = 1}, none = {.threads = 1};
    amp_settings s = {0};
    amp_context *amp;
    amp_machine machine;
    amp_choice choice;
    char text[2048];
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        CHECK_ERR(amp_settings_set(&s, "rates", wrong[i]), AMP_ERR_RANGE);
        CHECK_MSG(says("rates = ") && says("must be a path, a dtype and products"), "%s: %s", wrong[i], amp_last_error());
        d.rates = wrong[i];
        if (i > 0) CHECK_ERR(amp_open(&amp, &d), AMP_ERR_RANGE);
        memcpy(s.rates, wrong[i], strlen(wrong[i]) + 1);
        if (i > 0) CHECK_ERR(amp_settings_check(&s), AMP_ERR_RANGE);
        memset(&s, 0, sizeof s);
    }
    memset(s.rates, 'x', sizeof s.rates);
    CHECK_ERR(amp_settings_check(&s), AMP_ERR_RANGE);
    memset(&s, 0, sizeof s);
    CHECK_OK(amp_settings_set(&s, "rates", "scalar bf16 1.5,scalar  fp16 0.25 , "));
    CHECK_OK(amp_settings_fill(&s, NULL, &d, NULL, NULL, NULL));
    CHECK_OK(amp_open(&amp, &d));
    CHECK_OK(amp_query_choice(amp, &choice));
    CHECK_MSG(choice.dtype == AMP_BF16 && choice.rate == 1.5f && strstr(choice.reason, "1.5 times fp32's products here (scalar)"), "%s", choice.reason);
    CHECK_OK(amp_query_machine(amp, &machine));
    CHECK(machine.rates[AMP_CPU_SCALAR].bf16 == 1.5f && machine.rates[AMP_CPU_SCALAR].fp16 == 0.25f && machine.cpu.path == AMP_CPU_SCALAR);
    CHECK(amp_machine_text(&machine, text, sizeof text) < sizeof text && strstr(text, "bf16 1.50, fp16 0.25   (in use)") != NULL);
    CHECK_OK(amp_settings_apply(&s, amp, NULL, NULL, NULL));                /* those in force */
    CHECK_OK(amp_settings_set(&s, "rates", "scalar bf16 1.25"));
    CHECK_ERR(amp_settings_apply(&s, amp, NULL, NULL, NULL), AMP_ERR_CONFLICT);
    CHECK(says("rates = scalar bf16 1.25") && says("cannot change"));
    CHECK_OK(amp_settings_set(&s, "rates", "none"));
    CHECK_OK(amp_settings_apply(&s, amp, NULL, NULL, NULL));
    amp_close(amp);
    for (int path = AMP_CPU_AVX2; path < AMP_CPU_PATHS; path++) {           /* bf16 by the fastest of the widest */
        CHECK_OK(amp_machine_probe(&machine));
        snprintf(text, sizeof text, "%s bf16 9", ampi_path_words[path]);
        none.rates = text;
        if (!ampi_cpu_has(&machine.cpu, (amp_cpu_path)path)) {
            CHECK_ERR(amp_open(&amp, &none), AMP_ERR_UNSUPPORTED);
            CHECK_MSG(says(ampi_path_words[path]) && says("which this CPU lacks"), "%s", amp_last_error());
            continue;
        }
        CHECK_OK(amp_open(&amp, &none));
        CHECK_OK(amp_query_machine(amp, &machine));
        CHECK(path < AMP_CPU_AVX512 || machine.cpu.path == (amp_cpu_path)path);
        CHECK_OK(amp_query_choice(amp, &choice));
        CHECK_EQ(choice.dtype, machine.cpu.path == (amp_cpu_path)path || ampi_rate_of(&machine, AMP_BF16) > 1 ? AMP_BF16 : AMP_F32);
        amp_close(amp);
    }
}

TEST(the_defaults_are_those_documented) {
    static const char expected[] =
        "enabled = true\ndtype = auto\nautocast_dtype = auto\ncast_inputs = false\ncast_outputs = false\nlevel = O1\npolicy = fused\nmode = training\nmemory_efficient = false\ncache = true\nsaturate_inputs = false\nlayers = none\n"
        "fallback = none\ntf32 = false\nfp8_format = hybrid\nfp8_scaling = current\nfp8_amax = max\nfp8_history = 1024\nfp8_margin = 0\nautotune = off\nthreads = all\nrates = none\nscaler = auto\nscaler_preset = default\nfrozen = false\n"
        "init_scale = 65536\ngrowth_factor = 2\nbackoff_factor = 0.5\ngrowth_interval = 2000\nmin_scale = 1\n"
        "max_scale = 8.507059e+37\nhysteresis = 1\ntolerance = 0\nclip_norm = none\naccumulation = 1\nmoments = fp32\nlog_interval = 100\n"
        "memory_interval = 100\ncleanup_interval = off\ntensor_stats_interval = off\nmemory_warning = 0.9\nnan_action = skip\n"
        "max_skips = 25\nmax_retries = 3\nbatch_growth_interval = off\nworkers = 2\nprefetch = 2\npin = true\n"
        "debug = false\n";
    char text[2048], part[20];
    amp_settings s;
    memset(&s, 0, sizeof s);
    CHECK_EQ(amp_settings_text(&s, text, sizeof text), sizeof expected - 1);
    CHECK_MSG(strcmp(text, expected) == 0, "%s", text);
    CHECK_EQ(amp_settings_text(&s, part, sizeof part), sizeof expected - 1);      /* as snprintf */
    CHECK(memcmp(part, expected, sizeof part - 1) == 0 && part[sizeof part - 1] == 0);
    CHECK_EQ(amp_settings_text(&s, NULL, 0), sizeof expected - 1);
    CHECK_EQ(amp_settings_text(NULL, part, sizeof part), 0);
    CHECK(part[0] == 0);
}

TEST(words_come_in_either_case_and_switches_in_four_ways) {
    amp_settings s;
    memset(&s, 0, sizeof s);
    CHECK_OK(amp_settings_set(&s, "dtype", "BF16"));            CHECK_EQ(s.dtype, AMP_BF16);
    CHECK_OK(amp_settings_set(&s, "level", "o3"));              CHECK_EQ(s.level, AMP_LEVEL_O3);
    CHECK_OK(amp_settings_set(&s, "scaler_preset", "MegaTron")); CHECK_EQ(s.scaler.preset, AMP_SCALER_MEGATRON);
    CHECK_OK(amp_settings_set(&s, "fallback", "None"));         CHECK_EQ(s.fallback, AMP_DTYPE_DEFAULT);
    static const char *const on[] = {"true", "on", "yes", "1", "ON"}, *const off[] = {"false", "off", "no", "0", "No"};
    for (int i = 0; i < 5; i++) {
        CHECK_OK(amp_settings_set(&s, "tf32", on[i]));          CHECK_EQ(s.allow_tf32, 1);
        CHECK_OK(amp_settings_set(&s, "enabled", on[i]));       CHECK_EQ(s.disable, 0);
        CHECK_OK(amp_settings_set(&s, "tf32", off[i]));         CHECK_EQ(s.allow_tf32, 0);
        CHECK_OK(amp_settings_set(&s, "enabled", off[i]));      CHECK_EQ(s.disable, 1);
    }
    CHECK_OK(amp_settings_set(&s, "min_scale", "none"));        CHECK(s.scaler.min_scale == AMP_NO_FLOOR);
    CHECK_OK(amp_settings_set(&s, "max_scale", "none"));        CHECK(s.scaler.max_scale == AMP_NO_CEILING);
    CHECK_OK(amp_settings_set(&s, "growth_interval", "none"));  CHECK_EQ(s.scaler.growth_interval, AMP_NO_INTERVAL);
    CHECK_OK(amp_settings_set(&s, "tolerance", "0.0"));         CHECK(s.scaler.tolerance == (double)AMP_EXPLICIT_ZERO);
    CHECK_OK(amp_settings_set(&s, "max_retries", "0"));         CHECK_EQ(s.max_retries, AMP_NO_RETRIES);
    CHECK_OK(amp_settings_set(&s, "log_interval", "off"));      CHECK_EQ(s.log_interval, AMP_INTERVAL_OFF);
    CHECK_OK(amp_settings_set(&s, "clip_norm", "none"));        CHECK(s.clip_norm == 0);
}

static void numbers_are_right(void) {
    static const struct { const char *text; double value; } rows[] = {
        {"1", 1}, {"+1.5", 1.5}, {".5", 0.5}, {"5.", 5}, {"1e3", 1000}, {"2.5E-3", 2.5e-3}, {"1e+2", 100},
        {"0.1", 0.1}, {"1.7976931348623157e308", 1.7976931348623157e308}, {"00012.50", 12.5}};
    static const char *const bad[] = {
        "inf", "nan", "infinity", "-inf", "1e999", "0x10", "1.5x", "1 5", "1,5", "1.5.", "1e", "1e+", "e5", ".", "+", "-", "--1",
        "1e1.5", "1'000", "2^16", "65536f", "0", "-1", "1e-400", "1_0", "\xd9\xa3",
        "0000000000000000000000000000000000000000000000000000000000000001"};
    amp_settings s, before, back;
    char text[2048];
    memset(&s, 0, sizeof s);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        CHECK_OK(amp_settings_set(&s, "clip_norm", rows[i].text));
        CHECK_MSG(s.clip_norm == rows[i].value, "%s", rows[i].text);
        amp_settings_text(&s, text, sizeof text);
        memset(&back, 0, sizeof back);
        CHECK_OK(amp_settings_read_text(&back, "t", text, strlen(text)));
        CHECK_MSG(back.clip_norm == rows[i].value, "%s", text);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        before = s;
        CHECK_MSG(amp_settings_set(&s, "clip_norm", bad[i]) == AMP_ERR_RANGE, "%s", bad[i]);
        CHECK(memcmp(&s, &before, sizeof s) == 0);
    }
}

TEST(numbers_are_read_whole) { numbers_are_right(); }

TEST(numbers_are_the_same_with_a_decimal_comma) {
    if (!comma_begin()) SKIP(NO_COMMA);
    numbers_are_right();
    comma_end();
}

TEST(every_key_refuses_what_is_out_of_range) {
    static const struct { const char *key, *value; } rows[] = {
        {"enabled", "maybe"}, {"enabled", "2"}, {"dtype", "bf17"}, {"dtype", "fp64"}, {"dtype", "fp8_e4m3"}, {"dtype", "3"},
        {"level", "O4"}, {"level", "1"}, {"policy", "apex"}, {"mode", "eval"}, {"memory_efficient", "y"}, {"cache", ""},
        {"fallback", "auto"}, {"tf32", "tf32"}, {"autotune", "maybe"}, {"scaler", "fp16"}, {"scaler_preset", "pytorch"},
        {"frozen", "-1"}, {"init_scale", "0"}, {"init_scale", "-1"}, {"init_scale", "1e38"}, {"init_scale", "1e-38"},
        {"init_scale", "none"}, {"growth_factor", "1"}, {"growth_factor", "0.5"}, {"backoff_factor", "1"}, {"backoff_factor", "0"},
        {"growth_interval", "0"}, {"growth_interval", "1.5"}, {"growth_interval", "2147483648"}, {"min_scale", "1e39"},
        {"max_scale", "off"}, {"hysteresis", "0"}, {"hysteresis", "99999999999999999999"}, {"tolerance", "1.01"},
        {"tolerance", "-0.1"}, {"clip_norm", "0"}, {"accumulation", "0"}, {"accumulation", "1000001"}, {"log_interval", "0"},
        {"log_interval", "-1"}, {"memory_interval", "none"}, {"cleanup_interval", "1e3"}, {"tensor_stats_interval", "1000000000000001"},
        {"memory_warning", "1.1"}, {"memory_warning", "0"}, {"nan_action", "ignore"}, {"max_skips", "0"}, {"max_retries", "1001"},
        {"max_retries", "-1"}, {"debug", "debug"}, {"autocast_dtype", "fp64"}, {"cast_inputs", "bf16"}, {"cast_outputs", "2"},
        {"workers", "65"}, {"workers", "-1"}, {"prefetch", "0"}, {"prefetch", "1025"}, {"pin", "pinned"}, {"threads", "0"}, {"threads", "1025"}, {"threads", "-1"}, {"batch_growth_interval", "0"}};
    amp_settings s, before;
    char label[64];
    memset(&s, 0x5a, sizeof s);
    before = s;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        CHECK_MSG(amp_settings_set(&s, rows[i].key, rows[i].value) == AMP_ERR_RANGE, "%s = %s", rows[i].key, rows[i].value);
        snprintf(label, sizeof label, ".%s = %s, must be ", rows[i].key, rows[i].value[0] ? rows[i].value : "(nothing)");
        CHECK(says(label));
    }
    CHECK_ERR(amp_settings_set(&s, "dtpye", "bf16"), AMP_ERR_NAME);
    CHECK(says(".dtpye is not a setting; the nearest is .dtype"));
    CHECK_ERR(amp_settings_set(&s, "accumulation_steps", "4"), AMP_ERR_NAME);
    CHECK(says("the nearest is .accumulation"));
    CHECK_ERR(amp_settings_set(&s, "", "4"), AMP_ERR_NAME);
    CHECK_ERR(amp_settings_set(&s, "DTYPE", "bf16"), AMP_ERR_NAME);
    CHECK_ERR(amp_settings_set(NULL, "dtype", "bf16"), AMP_ERR_NULL);
    CHECK_ERR(amp_settings_set(&s, NULL, "bf16"), AMP_ERR_NULL);
    CHECK_ERR(amp_settings_set(&s, "dtype", NULL), AMP_ERR_NULL);
    CHECK(memcmp(&s, &before, sizeof s) == 0);
    CHECK_ERR(amp_settings_set(&s, "dtype", "bf17"), AMP_ERR_RANGE);
    CHECK(strcmp(amp_last_error(), "AMP0102 amp_settings_set: .dtype = bf17, must be one of auto, fp32, tf32, fp16, bf16 or fp8") == 0);
}

/* ---- Text, files, environment */

TEST(text_is_read_with_comments_blank_lines_and_any_line_ends) {
    amp_settings s, t;
    memset(&s, 0, sizeof s);
    static const char unix_text[] = "# head\n\n dtype=bf16 # the fast one\n\tclip_norm =\t1.5\nscaler= off";
    static const char dos_text[] = "\xef\xbb\xbf# head\r\n\r\ndtype = bf16\r\nclip_norm = 1.5   \r\nscaler = off\r\n";
    CHECK_OK(amp_settings_read_text(&s, "a", unix_text, sizeof unix_text - 1));
    CHECK_EQ(s.dtype, AMP_BF16);
    CHECK(s.clip_norm == 1.5);
    CHECK_EQ(s.use_scaler, AMP_SCALER_USE_OFF);
    memset(&t, 0, sizeof t);
    CHECK_OK(amp_settings_read_text(&t, NULL, dos_text, sizeof dos_text - 1));
    CHECK(memcmp(&s, &t, sizeof s) == 0);
    CHECK_OK(amp_settings_read_text(&t, "empty", NULL, 0));
    CHECK_OK(amp_settings_read_text(&t, "empty", "", 0));
    CHECK(memcmp(&s, &t, sizeof s) == 0);           /* what is not named stays */
}

static void refused_text(const char *text, size_t bytes, amp_result result, const char *why) {
    amp_settings s, before;
    memset(&s, 0x5a, sizeof s);
    before = s;
    CHECK_MSG(amp_settings_read_text(&s, "max.conf", text, bytes) == result, "%s", amp_last_error());
    CHECK(says(why));
    CHECK(memcmp(&s, &before, sizeof s) == 0);
}
#define REFUSED(text, result, why) refused_text(text, sizeof text - 1, result, why)

TEST(malformed_text_is_refused_with_name_line_and_key) {
    char many[9000];
    REFUSED("dtype = fp16\n\ndtype = bf17\n", AMP_ERR_CONFLICT, "max.conf: line 3: .dtype is given already in line 1");
    REFUSED("# x\ntf32 = on\ndtype = bf17\n", AMP_ERR_RANGE, "amp_settings_read_text: max.conf: line 3: .dtype = bf17, must be one of auto, fp32");
    REFUSED("tf32 = on\nprecision = bf16\n", AMP_ERR_NAME, "max.conf: line 2: .precision is not a setting; the nearest is .");
    REFUSED("cilp_norm = 1\n", AMP_ERR_NAME, "the nearest is .clip_norm");
    REFUSED("tf32 = on\nbf16\n", AMP_ERR_FORMAT, "max.conf: line 2 is neither \"key = value\" nor a # comment");
    REFUSED("= 3\n", AMP_ERR_FORMAT, "line 1 is neither");
    REFUSED("dtype =\n", AMP_ERR_RANGE, "max.conf: line 1: .dtype = (nothing), must be");
    REFUSED("dtype = bf16 fp16\n", AMP_ERR_RANGE, ".dtype = bf16 fp16, must be");
    REFUSED("dtype = \"bf16\"\n", AMP_ERR_RANGE, ".dtype = \"bf16\", must be");
    REFUSED("dtype = bf\0" "16\n", AMP_ERR_RANGE, ".dtype = bf?16, must be");
    REFUSED("dtype = bf16\0", AMP_ERR_RANGE, ".dtype = bf16?, must be");
    REFUSED("dt\0ype = bf16\n", AMP_ERR_NAME, ".dt?ype is not a setting; the nearest is .dtype");
    REFUSED("\0\0\0\0", AMP_ERR_FORMAT, "line 1 is neither");
    REFUSED("dtype = bf16\rtf32 = on\n", AMP_ERR_RANGE, ".dtype = bf16?tf32 = on, must be");
    REFUSED("a = b = c\n", AMP_ERR_NAME, ".a is not a setting");
    memset(many, 'x', sizeof many);
    refused_text(many, sizeof many, AMP_ERR_FORMAT, "line 1 is neither");
    many[5000] = '=';
    refused_text(many, sizeof many, AMP_ERR_NAME, ".xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx is not a setting");
    memcpy(many, "dtype=", 6);
    refused_text(many, sizeof many, AMP_ERR_RANGE, ".dtype = xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx..., must be");
    memset(many, '\n', sizeof many);
    memcpy(many + sizeof many - 6, "dtype=", 6);
    refused_text(many, sizeof many, AMP_ERR_RANGE, "max.conf: line 8995: .dtype = (nothing)");
    CHECK_ERR(amp_settings_read_text(NULL, "a", "", 0), AMP_ERR_NULL);
    amp_settings s;
    memset(&s, 0, sizeof s);
    CHECK_ERR(amp_settings_read_text(&s, "a", NULL, 3), AMP_ERR_NULL);
}
#undef REFUSED

/* Settings with random legal values, through the keys. */
static amp_settings random_settings(uint64_t seed) {
    static const char *const words[] = {"default", "true", "off", "fp32", "tf32", "fp16", "bf16", "O0", "O1", "O2", "O3", "fused", "torch",
                                        "training", "inference", "none", "auto", "on", "apex", "megatron", "fairseq", "metaseq", "flax",
                                        "keras", "deepspeed", "recover", "stop", "report", "skip", "0"};
    amp_settings s;
    memset(&s, 0, sizeof s);
    for (uint32_t i = 0; i < 120; i++) {
        uint32_t a = amp_random_u32(seed, 3 * i), b = amp_random_u32(seed, 3 * i + 1), c = amp_random_u32(seed, 3 * i + 2);
        char number[64];
        double value = b * 2.3283064365386963e-10 * (c % 5 ? 1 : c % 1000);
        snprintf(number, sizeof number, c % 3 ? "%.*e" : "%.*f", c % 3 ? (int)(b % 18) : 0, value);
        (void)amp_settings_set(&s, keys[a % KEYS], c % 2 ? words[b % (sizeof words / sizeof *words)] : number);
    }
    return s;
}

TEST(text_comes_back_as_the_same_bytes) {
    char first[2048], second[2048];
    amp_settings s, t;
    int differ = 0;
    for (uint64_t seed = 1; seed <= 2000; seed++) {
        s = random_settings(seed);
        CHECK(amp_settings_text(&s, first, sizeof first) < sizeof first);
        memset(&t, 0, sizeof t);
        CHECK_OK(amp_settings_read_text(&t, "round trip", first, strlen(first)));
        amp_settings_text(&t, second, sizeof second);
        CHECK_MSG(strcmp(first, second) == 0, "%s---\n%s", first, second);
        differ += strcmp(first, second) == 0 && strstr(first, "clip_norm = none") == NULL;
    }
    CHECK(differ > 500);            /* the numbers do vary */
}

/* Text with random damage: it is read or refused, and then nothing has changed. */
TEST(no_bytes_do_harm) {
    char text[2048], damaged[4096];
    int read = 0, refused = 0;
    for (uint64_t seed = 1; seed <= 6000; seed++) {
        amp_settings s = random_settings(seed), before = s;
        size_t n = amp_settings_text(&s, text, sizeof text), length = 0;
        uint32_t rate = 2 + amp_random_u32(seed, 1) % 900;
        for (size_t i = 0; i < n && length + 8 < sizeof damaged; i++) {
            uint32_t r = amp_random_u32(seed, 1000 + i);
            if (r % rate != 0) { damaged[length++] = text[i]; continue; }
            switch (r / rate % 5) {
                case 0: damaged[length++] = (char)(r >> 24); break;
                case 1: break;
                case 2: damaged[length++] = "=\n#\r\0 -.e"[r >> 20 & 7]; damaged[length++] = text[i]; break;
                case 3: i += r >> 22 & 31; break;
                default: damaged[length++] = text[r >> 12 & 255]; break;
            }
        }
        if (amp_settings_read_text(&s, "damaged", damaged, length) == AMP_OK) {
            CHECK_EQ(amp_settings_text(&s, text, 2), amp_settings_text(&s, NULL, 0));
            read++;
        } else {
            CHECK(memcmp(&s, &before, sizeof s) == 0);
            refused++;
        }
    }
    CHECK(read > 100 && refused > 1000);
}

static void *no_alloc(void *user, size_t size, size_t align) { (void)user; (void)size; (void)align; return NULL; }
static void no_free(void *user, void *ptr, size_t size) { (void)user; (void)ptr; (void)size; }

TEST(files_are_read_and_refused) {
    const char *path = temporary("file.conf");
    amp_settings s, before;
    amp_system system;
    memset(&s, 0, sizeof s);
    before = s;
    CHECK_ERR(amp_settings_read_file(&s, NULL, path), AMP_ERR_OPEN);
    CHECK(says(path));
    CHECK_ERR(amp_settings_read_file(&s, NULL, "/tmp"), AMP_ERR_READ);
    CHECK_OK(amp_file_write_atomic(NULL, path, "tf32 = on\ndtype = half\n", 23));
    CHECK_ERR(amp_settings_read_file(&s, NULL, path), AMP_ERR_RANGE);
    CHECK(says("amp_settings_read_file: ") && says(path) && says(": line 2: .dtype = half, must be"));
    memset(&system, 0, sizeof system);
    system.alloc = no_alloc; system.free = no_free;
    CHECK_ERR(amp_settings_read_file(&s, &system, path), AMP_ERR_MEMORY);
    CHECK_ERR(amp_settings_read_file(NULL, NULL, path), AMP_ERR_NULL);
    CHECK_ERR(amp_settings_read_file(&s, NULL, NULL), AMP_ERR_NULL);
    CHECK(memcmp(&s, &before, sizeof s) == 0);
    CHECK_OK(amp_file_write_atomic(NULL, path, "tf32 = on\ndtype = fp16", 22));
    CHECK_OK(amp_settings_read_file(&s, NULL, path));
    CHECK_EQ(s.dtype, AMP_F16);
    CHECK_EQ(s.allow_tf32, 1);
    remove(path);
}

/* The name of a variable; put together, since names of amp.h are looked for in the tests. */
#define ENV(key) "AMP_" key

TEST(the_environment_is_read_when_asked_for) {
    amp_settings s, before;
    memset(&s, 0, sizeof s);
    s.clip_norm = 3;
    setenv(ENV("DTYPE"), "bf16", 1);
    setenv(ENV("GROWTH_INTERVAL"), "500", 1);
    setenv(ENV("ENABLED"), "off", 1);
    setenv("AMPLE_DTYPE", "x", 1);
    setenv("X" ENV("DTYPE"), "x", 1);
    setenv("AMP", "x", 1);
    setenv(ENV("CLIP_NORM"), "", 1);            /* as if not set */
    CHECK_OK(amp_settings_read_env(&s));
    CHECK_EQ(s.dtype, AMP_BF16);
    CHECK_EQ(s.scaler.growth_interval, 500);
    CHECK_EQ(s.disable, 1);
    CHECK(s.clip_norm == 3);
    before = s;
    static const struct { const char *name, *value; amp_result result; const char *why; } rows[] = {
        {ENV("DTYP"), "bf16", AMP_ERR_NAME, "amp_settings_read_env: " ENV("DTYP is not a setting; the nearest is ") ENV("DTYPE")},
        {ENV("dtype"), "bf16", AMP_ERR_NAME, "the nearest is " ENV("DTYPE")},
        {"AMP_", "bf16", AMP_ERR_NAME, "AMP_ is not a setting"},
        {ENV("INITIAL_SCALE"), "8", AMP_ERR_NAME, "the nearest is " ENV("INIT_SCALE")},
        {ENV("TF32"), "bf16", AMP_ERR_RANGE, ENV("TF32 = bf16, must be one of true, false")},
        {ENV("A_NAME_THAT_IS_LONGER_THAN_ANY_KEY_COULD_EVER_BE_AND_GOES_ON_AND_ON_AND_ON"), "1", AMP_ERR_NAME, "is not a setting"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        setenv(rows[i].name, rows[i].value, 1);
        CHECK_ERR(amp_settings_read_env(&s), rows[i].result);
        CHECK(says(rows[i].why));
        CHECK(memcmp(&s, &before, sizeof s) == 0);
        unsetenv(rows[i].name);
    }
    CHECK_ERR(amp_settings_read_env(NULL), AMP_ERR_NULL);
    unsetenv(ENV("DTYPE")); unsetenv(ENV("GROWTH_INTERVAL")); unsetenv(ENV("ENABLED")); unsetenv(ENV("CLIP_NORM"));
    unsetenv("AMPLE_DTYPE"); unsetenv("X" ENV("DTYPE")); unsetenv("AMP");
    CHECK_OK(amp_settings_read_env(&s));
    CHECK(memcmp(&s, &before, sizeof s) == 0);
}

/* Nothing else reads it: a context opened under nonsense is the same. */
TEST(nothing_is_read_silently) {
    amp_context *amp;
    amp_desc d;
    setenv(ENV("DTYPE"), "bf16", 1);
    setenv(ENV("NONSENSE"), "1", 1);
    memset(&d, 0, sizeof d);
    d.dtype = AMP_F32;
    CHECK_OK(amp_open(&amp, &d));
    CHECK_OK(amp_query(amp, &d));
    CHECK_EQ(d.dtype, AMP_F32);
    amp_close(amp);
    unsetenv(ENV("DTYPE"));
    unsetenv(ENV("NONSENSE"));
}

/* ---- The manual's table of what trainers in Python call the settings */

/* Every key, flag and call of the five descriptions that the library is to answer. */
static const char *const python_names[] = {
    "use_amp", "amp_enabled", "use_mixed_precision", "mixed_precision_enabled", "mixed_precision_autocast_enabled", "mixed_precision",
    "mixed_precision_dtype", "amp_dtype", "fp_precision", "PRECISION", "mixed_precision_autocast_dtype",
    "mixed_precision_autocast_fast_dtype", "mixed_precision_autocast_fallback_dtype", "mixed_precision_autocast_mode",
    "mixed_precision_autocast_cache_enabled", "mixed_precision_cast_inputs", "mixed_precision_cast_outputs", "amp_opt_level",
    "mixed_precision_cast_model", "mixed_precision_memory_efficient", "grad_ckpt", "mixed_precision_grad_scaler",
    "mixed_precision_grad_scaler_enabled", "mixed_precision_grad_scaler_init_scale", "grad_scaler_init",
    "mixed_precision_grad_scaler_growth_factor", "mixed_precision_grad_scaler_backoff_factor", "grad_scaler_backoff",
    "mixed_precision_grad_scaler_growth_interval", "grad_scaler_growth_interval", "allow_tf32", "cudnn_benchmark", "compile",
    "max_norm", "grad_accum_steps", "num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "non_blocking",
    "gpu_log_interval", "log_gpu_memory", "empty_cache", "debug", "batch_size", "BATCH_SIZE", "seq_len", "epochs", "max_steps",
    "learning_rate", "enable_mixed_precision", "disable_mixed_precision", "optimize_mixed_precision_for_hardware",
    "get_mixed_precision_status", "_setup_mixed_precision", "_get_optimal_mixed_precision_dtype", "get_scale", "gradient_scaler_scale",
    "_verify_autocast_compatibility", "GPUDeviceManager", "_causal_mask_cache", "clear_mask_cache", "cast_model_outputs",
    "gradient_checkpointing", "initial_scale_power", "loss_scale_window", "min_loss_scale", "hysteresis", "max_grad_norm",
    "gradient_accumulation_steps", "logging_steps", "detect_anomaly", "terminate_on_nan", "auto_find_batch_size"};
enum { PYTHON_NAMES = sizeof python_names / sizeof *python_names };

static char *whole_file(const char *path) {
    void *text = NULL;
    size_t bytes = 0;
    CHECK_OK(amp_file_read_all(NULL, path, &text, &bytes));
    return (char *)text;
}

static int is_name(char c) { return c == '_' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

/* Whether text has the name, whole, before one of these characters. */
static int declares(const char *text, const char *name, const char *before) {
    size_t n = strlen(name);
    for (const char *at = strstr(text, name); at != NULL; at = strstr(at + 1, name))
        if (!is_name(at[-1]) && at[n] != 0 && strchr(before, at[n]) != NULL) return 1;
    return 0;
}

/* A word of a row's right side: a key, a field, a call or a flag.  1: it is there; 0: it is not; -1: it is none of these. */
static int answers(const char *word, const char *api, const char *trainer) {
    char name[80];
    size_t n = strlen(word);
    if (word[0] == '"') return n > 2 && word[n - 1] == '"' && ampi_setting_find(word + 1, n - 2) != NULL;
    if (word[0] == '.') return declares(api, word + 1, ";,[");
    if (strncmp(word, "amp_", 4) == 0) return declares(api, word, "(");
    if (strncmp(word, "--", 2) != 0) return -1;
    snprintf(name, sizeof name, "{\"%.60s\",", word + 2);
    return strstr(trainer, name) != NULL;
}

TEST(manual_maps_every_name_of_python_trainers) {
    SKIP_ON_WINDOWS("strtok that ends twice, and the manual is the same");
    char *header = whole_file("amp.h"), *manual = whole_file("amp.h"), *trainer = whole_file("examples/train_gpt_flags.h");
    char *shared = whole_file("examples/training_flags.h");     /* its flags are the trainer's too */
    char *end, *row, *next, *word, *arrow, *table = strstr(manual, "\n   SETTINGS ");
    char *stop = strstr(header, "/* Stop here");
    int seen[PYTHON_NAMES] = {0}, rows = 0, ours, keys_seen = 0;
    trainer = (char *)realloc(trainer, strlen(trainer) + strlen(shared) + 1);
    strcat(trainer, shared);
    free(shared);
    if (stop != NULL) *stop = 0;
    if (table != NULL) table = strstr(table, "\n\n     use_amp ");
    CHECK(stop != NULL && table != NULL);
    if (table == NULL) return;
    end = strstr(table, "\n   WHAT DIFFERS FROM PYTORCH'S DEFAULTS\n");
    CHECK(end != NULL);
    *end = 0;
    for (word = strstr(header, "/*"); word != NULL; word = strstr(word, "/*"))     /* comments declare nothing */
        memset(word, ' ', (size_t)(strstr(word, "*/") + 2 - word));
    for (row = strchr(table + 1, '\n'); row != NULL; row = next) {
        next = strchr(++row, '\n');
        if (next != NULL) *next = 0;
        arrow = strstr(row, "->");
        if (arrow == NULL) { CHECK_MSG(strspn(row, " ") == strlen(row), "%s", row); continue; }
        rows++;
        *arrow = 0;
        for (word = strtok(row, " "); word != NULL; word = strtok(NULL, " ")) {
            int i = 0;
            while (i < PYTHON_NAMES && strcmp(python_names[i], word) != 0) i++;
            CHECK_MSG(i < PYTHON_NAMES, "%s is no name of the descriptions", word);
            if (i < PYTHON_NAMES) seen[i]++;
        }
        char *note = strchr(arrow + 2, ';');        /* words behind it are for the reader */
        if (note != NULL) *note = 0;
        for (word = strtok(arrow + 2, " "), ours = 0; word != NULL; word = strtok(NULL, " "), ours++) {
            CHECK_MSG(answers(word, header, trainer) == 1, "%s", word);
            keys_seen += word[0] == '"';
        }
        CHECK(ours > 0);
    }
    for (int i = 0; i < PYTHON_NAMES; i++) CHECK_MSG(seen[i] == 1, "%s stands there %d times", python_names[i], seen[i]);
    CHECK(rows > 20 && keys_seen > 20);
    CHECK(answers("\"dtpye\"", header, trainer) == 0 && answers("amp_nothing", header, trainer) == 0 && answers(".nothing", header, trainer) == 0 &&
          answers("--nothing", header, trainer) == 0 && answers("words", header, trainer) == -1);
    amp_file_free(NULL, header, 0);
    amp_file_free(NULL, manual, 0);
    amp_file_free(NULL, trainer, 0);
}

/* ---- Contradictions */

TEST(contradictions_are_refused_with_both_keys) {
    static const struct { const char *lines; amp_result result; const char *a, *b; } rows[] = {
        {"level=O0\ndtype=bf16\n", AMP_ERR_CONFLICT, "level = O0", "dtype = bf16"},
        {"level=O0\ntf32=on\n", AMP_ERR_CONFLICT, "level = O0", "tf32 = true"},
        {"level=O0\nscaler=on\n", AMP_ERR_CONFLICT, "level = O0", "scaler = on"},
        {"level=O0\nautocast_dtype=bf16\n", AMP_ERR_CONFLICT, "level = O0", "autocast_dtype = bf16"},
        {"level=O2\ndtype=bf16\nautocast_dtype=fp32\n", AMP_OK, "", ""},
        {"level=O2\ndtype=fp32\n", AMP_OK, "", ""},
        {"level=O3\ndtype=tf32\n", AMP_OK, "", ""},
        {"min_scale=16\nmax_scale=8\ninit_scale=8\n", AMP_ERR_CONFLICT, "min_scale = 16", "max_scale = 8"},
        {"init_scale=2\nmin_scale=4\n", AMP_ERR_CONFLICT, "init_scale = 2", "min_scale = 4"},
        {"max_scale=1024\n", AMP_ERR_CONFLICT, "init_scale = 65536", "max_scale = 1024"},
        {"max_scale=3e38\n", AMP_ERR_SCALE, ".max_scale = 3e+38", "2^126"},
        {"level=O0\n", AMP_OK, "", ""}, {"level=O0\ndtype=fp32\nscaler=off\n", AMP_OK, "", ""},
        {"level=O2\n", AMP_OK, "", ""}, {"level=O3\ndtype=bf16\n", AMP_OK, "", ""},
        {"enabled=off\nscaler=on\n", AMP_OK, "", ""}, {"mode=inference\nscaler=on\naccumulation=4\n", AMP_OK, "", ""},
        {"cache=off\nmemory_efficient=on\n", AMP_OK, "", ""}, {"nan_action=report\nscaler=on\ndtype=bf16\n", AMP_OK, "", ""},
        {"max_scale=1024\ninit_scale=1024\nmin_scale=1024\n", AMP_OK, "", ""}, {"min_scale=none\nmax_scale=none\n", AMP_OK, "", ""},
        {"scaler_preset=flax\n", AMP_OK, "", ""}, {"scaler_preset=fairseq\n", AMP_OK, "", ""}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        amp_settings s;
        amp_desc d, before;
        memset(&s, 0, sizeof s);
        CHECK_OK(amp_settings_read_text(&s, "t", rows[i].lines, strlen(rows[i].lines)));
        CHECK_MSG(amp_settings_check(&s) == rows[i].result, "%s", rows[i].lines);
        if (rows[i].result != AMP_OK) CHECK(says(rows[i].a) && says(rows[i].b));
        memset(&d, 0x5a, sizeof d);
        before = d;
        CHECK_ERR(amp_settings_fill(&s, NULL, &d, NULL, NULL, NULL), rows[i].result);
        CHECK_EQ(memcmp(&d, &before, sizeof d) == 0, rows[i].result != AMP_OK);
    }
    CHECK_ERR(amp_settings_check(NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_settings_fill(NULL, NULL, NULL, NULL, NULL, NULL), AMP_ERR_NULL);
}

/* Structs that a program filled. */
TEST(fields_out_of_range_are_refused) {
    uint32_t nan_bits = 0x7fc00000u;
    amp_settings s;
    memset(&s, 0, sizeof s);
#define FIELD(assignment, why) \
    do { memset(&s, 0, sizeof s); assignment; CHECK_ERR(amp_settings_check(&s), AMP_ERR_RANGE); CHECK(says(why)); } while (0)
    FIELD(s.dtype = AMP_F64, ".dtype = 2, must be one of auto");
    FIELD(s.level = (amp_level)9, ".level = 9, must be one of O0, O1, O2 or O3");
    FIELD(s.policy = (amp_policy)-1, ".policy = -1");
    FIELD(s.fallback = AMP_E4M3, ".fallback = 6");
    FIELD(s.scaler.preset = (amp_scaler_preset)10, ".scaler_preset = 10, must be one of default, torch");
    FIELD(s.scaler.preset = (amp_scaler_preset)-3, ".scaler_preset = -3");
    FIELD(s.scaler.disable = 1, ".scaler.disable = 1, must be 0: .use_scaler decides");
    FIELD(memcpy(&s.scaler.init_scale, &nan_bits, 4), ".init_scale = not finite");
    FIELD(s.scaler.init_scale = -2, ".init_scale = -2");
    FIELD(s.scaler.growth_factor = 0.5, ".growth_factor = 0.5, must be a number above 1");
    FIELD(s.clip_norm = -1, ".clip_norm = -1");
    FIELD(s.accumulation = -1, ".accumulation = -1, must be a whole number from 1 to 1000000");
    FIELD(s.log_interval = -2, ".log_interval = -2, must be a whole number from 1 to 1e15, or off");
    FIELD(s.memory_warning = 1.5, ".memory_warning = 1.5");
    FIELD(s.max_retries = -2, ".max_retries = -2, must be a whole number from 0 to 1000");
    FIELD(s.nan_action = (amp_nan_action)5, ".nan_action = 5, must be one of report, skip, stop or recover");
}

/* ---- What each setting does: through amp_settings_fill to what is created from it */

static amp_context *open_with(const amp_settings *s) {
    amp_context *amp = NULL;
    amp_desc d;
    memset(&d, 0, sizeof d);
    d.threads = 1;
    CHECK_OK(amp_settings_fill(s, NULL, &d, NULL, NULL, NULL));
    CHECK_OK(amp_open(&amp, &d));
    return amp;
}
static amp_context *open_lines(const char *lines) {
    amp_settings s = settings_of(lines);
    return open_with(&s);
}

static amp_dtype computes(amp_context *amp, int32_t op) {
    CHECK_OK(amp_autocast_begin(amp, NULL));
    amp_dtype dtype = amp_autocast_compute(amp, op, NULL, AMP_F32, AMP_F32);
    CHECK_OK(amp_autocast_end(amp));
    return dtype;
}

TEST(enabled_and_dtype_decide_what_regions_compute_in) {
    static const struct { const char *lines; amp_dtype dtype; } rows[] = {
        {"dtype=fp32", AMP_F32}, {"dtype=tf32", AMP_TF32}, {"dtype=fp16", AMP_F16}, {"dtype=bf16", AMP_BF16},
        {"dtype=bf16\nenabled=false", AMP_F32}, {"level=O0", AMP_F32}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        amp_context *amp = open_lines(rows[i].lines);
        CHECK_MSG(computes(amp, AMP_OP_LINEAR) == rows[i].dtype, "%s", rows[i].lines);
        amp_close(amp);
    }
    amp_context *amp = open_lines("dtype=fp16\nenabled=false");
    amp_desc d;
    CHECK_OK(amp_query(amp, &d));
    CHECK_EQ(d.dtype, AMP_F16);
    CHECK_EQ(d.disable, 1);
    CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK_EQ(amp_autocast_active(amp, NULL), 0);
    CHECK_OK(amp_set_enabled(amp, 1));
    CHECK_EQ(amp_autocast_active(amp, NULL), 0);        /* regions that begin from now on */
    CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK_EQ(amp_autocast_active(amp, NULL), 1);
    CHECK_OK(amp_autocast_end(amp));
    CHECK_OK(amp_autocast_end(amp));
    CHECK_ERR(amp_set_enabled(NULL, 1), AMP_ERR_NULL);
    amp_close(amp);
}

/* Regions compute in it, weights stay in the context's; a scaler comes when either is fp16; amp_set_dtype sets both. */
TEST(autocast_dtype_is_that_of_regions) {
    static const struct { const char *lines; amp_dtype weights, regions; int scaler; } rows[] = {
        {"dtype=bf16\nlevel=O2\nautocast_dtype=fp32", AMP_BF16, AMP_F32, 0}, {"dtype=bf16\nlevel=O2\nautocast_dtype=fp16", AMP_BF16, AMP_F16, 1},
        {"dtype=fp16\nlevel=O3\nautocast_dtype=bf16", AMP_F16, AMP_BF16, 1}, {"dtype=fp32\nautocast_dtype=bf16", AMP_F32, AMP_BF16, 0},
        {"dtype=bf16\nlevel=O2", AMP_BF16, AMP_BF16, 0}};
    char text[20000];
    amp_status status;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        amp_settings s = settings_of(rows[i].lines);
        amp_context *amp = open_with(&s);
        amp_scaler_desc scaler;
        amp_autocast_desc region;
        amp_desc d;
        CHECK_OK(amp_query(amp, &d));
        CHECK_EQ(d.autocast_dtype, rows[i].regions);
        CHECK_EQ(amp_param_dtype(amp, 0), rows[i].weights);
        CHECK_EQ(computes(amp, AMP_OP_LINEAR), rows[i].regions);
        memset(&region, 0, sizeof region);
        region.dtype = AMP_TF32;                            /* a region that names its own */
        CHECK_OK(amp_autocast_begin(amp, &region));
        CHECK_EQ(amp_autocast_compute(amp, AMP_OP_LINEAR, NULL, AMP_F32, AMP_F32), AMP_TF32);
        CHECK_OK(amp_autocast_end(amp));
        memset(&scaler, 0, sizeof scaler);
        CHECK_OK(amp_settings_fill(&s, amp, NULL, &scaler, NULL, NULL));
        CHECK_MSG(scaler.disable != rows[i].scaler, "%s", rows[i].lines);
        CHECK_OK(amp_settings_fill(&s, NULL, NULL, &scaler, NULL, NULL));
        CHECK_MSG(scaler.disable != rows[i].scaler, "%s", rows[i].lines);
        CHECK_OK(amp_status_get(amp, NULL, 0, &status));
        CHECK_EQ(status.autocast_dtype, rows[i].regions);
        amp_status_json(&status, text, sizeof text);
        CHECK(strstr(text, "\"autocast_dtype\": \"") != NULL && strstr(text, "\"cast_inputs\": \"false\"") != NULL);
        amp_close(amp);
    }
    amp_settings s = settings_of("dtype=fp32\nautocast_dtype=bf16");
    amp_context *amp = open_with(&s);
    CHECK_OK(amp_set_dtype(amp, AMP_F16));
    CHECK_EQ(computes(amp, AMP_OP_LINEAR), AMP_F16);
    CHECK_OK(amp_settings_apply(&s, amp, NULL, NULL, NULL));
    CHECK_EQ(computes(amp, AMP_OP_LINEAR), AMP_BF16);
    s.autocast_dtype = AMP_DTYPE_DEFAULT;
    CHECK_OK(amp_settings_apply(&s, amp, NULL, NULL, NULL));
    CHECK_EQ(computes(amp, AMP_OP_LINEAR), AMP_F32);
    amp_close(amp);
}

TEST(level_decides_what_weights_are_stored_in) {
    static const struct { const char *lines; amp_dtype weight, norm; } rows[] = {
        {"dtype=bf16\nlevel=O1", AMP_F32, AMP_F32}, {"dtype=bf16\nlevel=O2", AMP_BF16, AMP_F32},
        {"dtype=fp16\nlevel=O3", AMP_F16, AMP_F16}, {"level=O0", AMP_F32, AMP_F32}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        amp_context *amp = open_lines(rows[i].lines);
        CHECK_EQ(amp_param_dtype(amp, 0), rows[i].weight);
        CHECK_EQ(amp_param_dtype(amp, 1), rows[i].norm);
        amp_close(amp);
    }
}

TEST(policy_decides_result_dtypes) {
    for (int torch = 0; torch < 2; torch++) {
        amp_context *amp = open_lines(torch ? "dtype=bf16\npolicy=torch" : "dtype=bf16\npolicy=fused");
        CHECK_OK(amp_autocast_begin(amp, NULL));
        CHECK_EQ(amp_autocast_result(amp, AMP_OP_SOFTMAX, NULL, AMP_BF16, AMP_BF16), torch ? AMP_F32 : AMP_BF16);
        CHECK_OK(amp_autocast_end(amp));
        amp_close(amp);
    }
}

TEST(mode_decides_whether_dropout_drops) {
    float x[256], y[256];
    for (int inference = 0; inference < 2; inference++) {
        amp_context *amp = open_lines(inference ? "mode=inference" : "mode=training");
        amp_dropout_op op;
        int zeros = 0;
        memset(&op, 0, sizeof op);
        for (int i = 0; i < 256; i++) x[i] = (float)(i + 1);
        op.x = amp_tensor1(x, AMP_F32, 256);
        op.y = amp_tensor1(y, AMP_F32, 256);
        op.p = 0.5f;
        CHECK_OK(amp_dropout(amp, &op));
        for (int i = 0; i < 256; i++) zeros += y[i] == 0;
        if (inference) CHECK(memcmp(x, y, sizeof x) == 0);
        else CHECK(zeros > 64 && zeros < 192);
        amp_close(amp);
    }
}

/* ---- A small network: linear with GELU, dropout, linear, cross-entropy */

enum { BATCH = 16, SETTINGS_IN = 24, SETTINGS_HIDDEN = 40, CLASSES = 5, SETTINGS_PARAMS = 4 };

typedef struct net {
    amp_context *amp;
    amp_scaler *scaler;
    amp_optimizer *optimizer;
    amp_param params[SETTINGS_PARAMS];
    float w1[SETTINGS_HIDDEN * SETTINGS_IN], b1[SETTINGS_HIDDEN], w2[CLASSES * SETTINGS_HIDDEN], b2[CLASSES];
    float grads[SETTINGS_PARAMS][SETTINGS_HIDDEN * SETTINGS_IN];
    float x[BATCH * SETTINGS_IN], pre[BATCH * SETTINGS_HIDDEN], h[BATCH * SETTINGS_HIDDEN], dropped[BATCH * SETTINGS_HIDDEN], dh[BATCH * SETTINGS_HIDDEN], logits[BATCH * CLASSES];
    int32_t labels[BATCH];
    float loss;
    amp_linear_op first, second;
    amp_dropout_op dropout;
    amp_cross_entropy_op ce;
    int step;                       /* of the data */
} net;

static void random_values(float *x, int n, uint64_t seed, float scale) {
    for (int i = 0; i < n; i++) x[i] = (amp_random_uniform(seed, (uint64_t)i) - 0.5f) * 2 * scale;
}

static void net_param(net *n, int i, const char *name, float *w, int rows, int cols) {
    amp_param *p = &n->params[i];
    random_values(w, rows * (cols ? cols : 1), (uint64_t)i + 10, 0.3f);
    p->name = name;
    p->weight = cols ? amp_tensor2(w, AMP_F32, rows, cols) : amp_tensor1(w, AMP_F32, rows);
    p->grad = cols ? amp_tensor2(n->grads[i], AMP_F32, rows, cols) : amp_tensor1(n->grads[i], AMP_F32, rows);
}

static void net_wire(net *n) {
    amp_tensor h = amp_tensor2(n->h, AMP_F32, BATCH, SETTINGS_HIDDEN), dh = amp_tensor2(n->dh, AMP_F32, BATCH, SETTINGS_HIDDEN);
    net_param(n, 0, "first.weight", n->w1, SETTINGS_HIDDEN, SETTINGS_IN);
    net_param(n, 1, "first.bias", n->b1, SETTINGS_HIDDEN, 0);
    net_param(n, 2, "second.weight", n->w2, CLASSES, SETTINGS_HIDDEN);
    net_param(n, 3, "second.bias", n->b2, CLASSES, 0);
    n->first.x = amp_tensor2(n->x, AMP_F32, BATCH, SETTINGS_IN);
    n->first.weight = &n->params[0]; n->first.bias = &n->params[1];
    n->first.pre = amp_tensor2(n->pre, AMP_F32, BATCH, SETTINGS_HIDDEN);
    n->first.act = AMP_ACT_GELU; n->first.y = h; n->first.dy = dh;
    n->dropout.x = h; n->dropout.y = amp_tensor2(n->dropped, AMP_F32, BATCH, SETTINGS_HIDDEN);
    n->dropout.p = 0.25f; n->dropout.dy = n->dropout.dx = dh;
    n->second.x = n->dropout.y; n->second.weight = &n->params[2]; n->second.bias = &n->params[3];
    n->second.y = n->second.dy = amp_tensor2(n->logits, AMP_F32, BATCH, CLASSES);
    n->second.dx = dh;
    n->ce.logits = n->second.y;
    n->ce.labels = n->labels;
    n->ce.loss = &n->loss;
}

static net *net_open(const amp_settings *s) {
    net *n = (net *)calloc(1, sizeof *n);
    amp_scaler_desc scaler;
    amp_optimizer_desc optimizer;
    n->amp = open_with(s);
    net_wire(n);
    CHECK_OK(amp_param_register(n->amp, n->params, SETTINGS_PARAMS));
    memset(&scaler, 0, sizeof scaler);
    memset(&optimizer, 0, sizeof optimizer);
    CHECK_OK(amp_settings_fill(s, n->amp, NULL, &scaler, &optimizer, NULL));
    optimizer.params = n->params; optimizer.n_params = SETTINGS_PARAMS;
    optimizer.lr = 0.01; optimizer.weight_decay = 0.01; optimizer.result_lag = AMP_LAG_NONE;
    CHECK_OK(amp_scaler_create(n->amp, &n->scaler, &scaler));
    CHECK_OK(amp_optimizer_create(n->amp, &n->optimizer, &optimizer));
    return n;
}
static net *net_lines(const char *lines) {
    amp_settings s = settings_of(lines);
    return net_open(&s);
}

static void net_close(net *n) {
    amp_optimizer_destroy(n->optimizer);
    amp_scaler_destroy(n->scaler);
    amp_close(n->amp);
    free(n);
}

/* The loss of the step's data; with training the logits become their gradient. */
static float net_forward(net *n, int step, int training) {
    random_values(n->x, BATCH * SETTINGS_IN, 1000 + (uint64_t)step, 1);
    for (int i = 0; i < BATCH; i++) n->labels[i] = (int32_t)(n->x[i * SETTINGS_IN] > 0) + 2 * (int32_t)(n->x[i * SETTINGS_IN + 1] > 0);
    n->ce.grad_scale = training ? amp_scaler_scale_ptr(n->scaler) : NULL;
    n->ce.dlogits = n->second.y;
    if (!training) n->ce.dlogits.data = NULL;
    CHECK_OK(amp_autocast_begin(n->amp, NULL));
    CHECK_OK(amp_linear(n->amp, &n->first));
    CHECK_OK(amp_dropout(n->amp, &n->dropout));
    CHECK_OK(amp_linear(n->amp, &n->second));
    CHECK_OK(amp_cross_entropy(n->amp, &n->ce));
    CHECK_OK(amp_autocast_end(n->amp));
    return n->loss;
}

static void net_backward(net *n) {
    CHECK_OK(amp_linear_backward(n->amp, &n->second));
    CHECK_OK(amp_dropout_backward(n->amp, &n->dropout));
    CHECK_OK(amp_linear_backward(n->amp, &n->first));
}

static void net_train(net *n, int steps, float *losses) {
    for (int i = 0; i < steps; i++) {
        float loss = net_forward(n, n->step++, 1);
        net_backward(n);
        CHECK_OK(amp_step(n->optimizer, n->scaler));
        if (losses) losses[i] = loss;
    }
}

static int same_weights(const net *a, const net *b) {
    return memcmp(a->w1, b->w1, sizeof a->w1) == 0 && memcmp(a->b1, b->b1, sizeof a->b1) == 0 &&
           memcmp(a->w2, b->w2, sizeof a->w2) == 0 && memcmp(a->b2, b->b2, sizeof a->b2) == 0;
}

TEST(autocast_dtype_trains_as_dtype_does) {
    float a[8], b[8];
    net *one = net_lines("dtype=bf16"), *other = net_lines("dtype=fp32\nautocast_dtype=bf16"), *plain = net_lines("dtype=fp32");
    net_train(one, 8, a);
    net_train(other, 8, b);
    CHECK(memcmp(a, b, sizeof a) == 0 && same_weights(one, other));
    net_train(plain, 8, b);
    CHECK(!same_weights(one, plain));
    net_close(one); net_close(other); net_close(plain);
}

/* A source of floats, with one that fp16 has not, halves and labels. */
static int give_sample(void *user, const amp_sample *sample, void *const *fields) {
    static const uint16_t half = 0x3c00;        /* 1 */
    float x[3] = {(float)sample->sample + 0.1f, -1e6f, 0.333333333f};
    int32_t label = (int32_t)sample->sample;
    (void)user;
    memcpy(fields[0], x, sizeof x);
    memcpy(fields[1], &half, sizeof half);
    memcpy(fields[2], &label, sizeof label);
    return 0;
}

static int casts_logged;
static void count_casts(void *user, amp_log_level level, int id, const char *text) {
    (void)user; (void)level;
    if (id == 1151 && strstr(text, "field 0 of a sample: 1 values became infinite in fp16") != NULL)
        __atomic_add_fetch(&casts_logged, 1, __ATOMIC_RELAXED);          /* workers tell it */
}

static amp_loader *loader_of(amp_context *amp, const char *npy, int workers) {
    amp_source source;
    amp_loader_desc d;
    amp_loader *l = NULL;
    memset(&source, 0, sizeof source);
    memset(&d, 0, sizeof d);
    source.read = give_sample; source.samples = 6; source.n_fields = 3;
    source.fields[0].dtype = AMP_F32; source.fields[0].count = 3;
    source.fields[1].dtype = AMP_F16; source.fields[1].count = 1;
    source.fields[2].dtype = AMP_I32; source.fields[2].count = 1;
    if (npy) { d.arrays = &npy; d.n_arrays = 1; }
    else d.source = &source;
    d.batch = 3;
    d.workers = workers ? workers : AMP_NO_WORKERS;
    d.epochs = 1;
    CHECK_OK(amp_loader_create(amp, &l, &d));
    return l;
}

TEST(cast_inputs_decides_what_loaders_deliver) {
    static const struct { const char *lines; amp_dtype x, half; } rows[] = {
        {"dtype=bf16", AMP_F32, AMP_F16}, {"dtype=bf16\ncast_inputs=true", AMP_BF16, AMP_BF16}, {"dtype=fp16\ncast_inputs=on", AMP_F16, AMP_F16},
        {"dtype=bf16\ncast_inputs=fp32", AMP_F32, AMP_F32}, {"dtype=tf32\ncast_inputs=true", AMP_F32, AMP_F32},
        {"dtype=fp32\nautocast_dtype=bf16\ncast_inputs=true", AMP_BF16, AMP_BF16},
        {"dtype=bf16\ncast_inputs=true\nenabled=false", AMP_F32, AMP_F16}, {"level=O0\ncast_inputs=true", AMP_F32, AMP_F16}};
    float table[6][3], back[9];
    const char *path = temporary("x.npy");
    char head[128];
    FILE *file = fopen(path, "wb");
    for (int i = 0; i < 18; i++) table[i / 3][i % 3] = (float)i / 7;
    memset(head, ' ', sizeof head);
    memcpy(head, "\x93NUMPY\1\0\x76\0", 10);
    memcpy(head + 10, "{'descr': '<f4', 'fortran_order': False, 'shape': (6, 3), }", 59);
    head[127] = '\n';
    CHECK(file != NULL && fwrite(head, 1, sizeof head, file) == sizeof head && fwrite(table, 1, sizeof table, file) == sizeof table);
    fclose(file);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (int workers = 0; workers < 4; workers++) {         /* with 3: into a device's memory */
            amp_settings s = settings_of(rows[i].lines);
            amp_context *amp = NULL;
            amp_desc context;
            amp_loader_info info;
            amp_loader_desc d;
            amp_batch batch;
            float x[3], expected;
            memset(&context, 0, sizeof context);
            CHECK_OK(amp_settings_fill(&s, NULL, &context, NULL, NULL, NULL));
            context.backend = workers == 3 ? recording_backend() : NULL;
            CHECK_OK(amp_open(&amp, &context));
            casts_logged = 0;
            amp->desc.logger.write = count_casts;
            amp_loader *l = loader_of(amp, NULL, workers);
            CHECK_OK(amp_loader_info_get(l, &info));
            CHECK_MSG(info.fields[0].dtype == rows[i].x && info.fields[1].dtype == rows[i].half, "%s", rows[i].lines);
            CHECK_EQ(info.fields[2].dtype, AMP_I32);
            CHECK_OK(amp_loader_query(l, &d));
            CHECK_EQ(d.source->fields[0].dtype, AMP_F32);           /* as the callback gives it */
            for (int b = 0; b < 2; b++) {
                CHECK_OK(amp_loader_next(l, &batch));
                CHECK_EQ(batch.batch, 3);
                CHECK(batch.inputs == NULL);
                CHECK_OK(amp_convert(back, AMP_F32, batch.fields[0], rows[i].x, 9, NULL, NULL));
                for (int k = 0; k < 9; k++) {
                    x[0] = (float)(3 * b + k / 3) + 0.1f; x[1] = -1e6f; x[2] = 0.333333333f;
                    uint16_t bits = rows[i].x == AMP_BF16 ? amp_bf16_from_f32(x[k % 3], 0) : amp_f16_from_f32(x[k % 3], 0);
                    expected = rows[i].x == AMP_F32 ? x[k % 3] : rows[i].x == AMP_BF16 ? amp_f32_from_bf16(bits) : amp_f32_from_f16(bits);
                    CHECK_MSG(memcmp(&back[k], &expected, 4) == 0, "%s: %g and %g", rows[i].lines, (double)back[k], (double)expected);
                }
                CHECK_OK(amp_convert(back, AMP_F32, batch.fields[1], rows[i].half, 3, NULL, NULL));
                CHECK(back[0] == 1 && back[2] == 1);
                for (int k = 0; k < 3; k++) CHECK_EQ(((const int32_t *)batch.fields[2])[k], 3 * b + k);
            }
            amp_loader_destroy(l);
            CHECK_MSG((casts_logged > 0) == (rows[i].x == AMP_F16), "%s: %d", rows[i].lines, casts_logged);
            l = loader_of(amp, path, workers);
            for (int b = 0; b < 2; b++) {
                CHECK_OK(amp_loader_next(l, &batch));
                CHECK_OK(amp_convert(back, AMP_F32, batch.fields[0], rows[i].x, 9, NULL, NULL));
                for (int k = 0; k < 9; k++) {
                    float was = table[3 * b + k / 3][k % 3];
                    uint16_t bits = rows[i].x == AMP_BF16 ? amp_bf16_from_f32(was, 0) : amp_f16_from_f32(was, 0);
                    expected = rows[i].x == AMP_F32 ? was : rows[i].x == AMP_BF16 ? amp_f32_from_bf16(bits) : amp_f32_from_f16(bits);
                    CHECK(memcmp(&back[k], &expected, 4) == 0);
                }
            }
            amp_loader_destroy(l);
            amp_close(amp);
        }
    remove(path);
}

/* Inputs that were cast give the bits that autocast gives fp32 ones. */
TEST(cast_inputs_train_the_same) {
    net *plain = net_lines("dtype=bf16"), *cast = net_lines("dtype=bf16\ncast_inputs=true");
    uint16_t x[BATCH * SETTINGS_IN];
    for (int step = 0; step < 4; step++) {
        (void)net_forward(plain, step, 1);
        net_backward(plain);
        CHECK_OK(amp_step(plain->optimizer, plain->scaler));
        random_values(cast->x, BATCH * SETTINGS_IN, 1000 + (uint64_t)step, 1);
        CHECK_EQ(amp_autocast_input(cast->amp, AMP_F32), AMP_BF16);
        CHECK_OK(amp_convert(x, AMP_BF16, cast->x, AMP_F32, BATCH * SETTINGS_IN, NULL, NULL));
        cast->first.x = amp_tensor2(x, AMP_BF16, BATCH, SETTINGS_IN);
        (void)net_forward(cast, step, 1);
        net_backward(cast);
        CHECK_OK(amp_step(cast->optimizer, cast->scaler));
        CHECK(memcmp(&plain->loss, &cast->loss, sizeof plain->loss) == 0);
    }
    CHECK(same_weights(plain, cast));
    net_close(plain); net_close(cast);
}

TEST(cast_inputs_and_outputs_say_which_dtype) {
    static const amp_dtype kept[] = {AMP_F64, AMP_I32, AMP_U8, AMP_E4M3, AMP_TF32, AMP_DTYPE_DEFAULT};
    amp_context *amp = open_lines("dtype=bf16\ncast_inputs=fp32\ncast_outputs=true");
    amp_settings s = settings_of("dtype=fp16\nscaler=off\ncast_inputs=true\ncast_outputs=fp32");
    amp_desc d;
    CHECK_OK(amp_query(amp, &d));
    CHECK(d.cast_inputs == AMP_IO_F32 && d.cast_outputs == AMP_IO_REGION);
    CHECK_EQ(amp_autocast_input(amp, AMP_BF16), AMP_F32);
    CHECK_EQ(amp_autocast_input(amp, AMP_F32), AMP_F32);
    CHECK_EQ(amp_autocast_output(amp, AMP_F32), AMP_BF16);
    CHECK_EQ(amp_autocast_output(amp, AMP_F16), AMP_BF16);
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++)
        CHECK(amp_autocast_input(amp, kept[i]) == kept[i] && amp_autocast_output(amp, kept[i]) == kept[i]);
    CHECK_OK(amp_settings_apply(&s, amp, NULL, NULL, NULL));
    CHECK_EQ(amp_autocast_input(amp, AMP_F32), AMP_F16);
    CHECK_EQ(amp_autocast_output(amp, AMP_F16), AMP_F32);
    CHECK_OK(amp_set_enabled(amp, 0));
    CHECK_EQ(amp_autocast_output(amp, AMP_F16), AMP_F16);
    CHECK(amp_autocast_input(NULL, AMP_F32) == AMP_DTYPE_DEFAULT && amp_autocast_output(NULL, AMP_F32) == AMP_DTYPE_DEFAULT);
    amp_close(amp);
    memset(&d, 0, sizeof d);
    d.cast_inputs = (amp_io_cast)4;
    CHECK_ERR(amp_open(&amp, &d), AMP_ERR_RANGE);
    d.cast_inputs = AMP_IO_DEFAULT; d.cast_outputs = (amp_io_cast)-1;
    CHECK_ERR(amp_open(&amp, &d), AMP_ERR_RANGE);
    d.cast_outputs = AMP_IO_DEFAULT; d.autocast_dtype = AMP_I32;
    CHECK(amp_open(&amp, &d) != AMP_OK);
}

TEST(workers_prefetch_and_pin_reach_the_loader) {
    static const struct { const char *lines; int workers, prefetch, unpinned; } rows[] = {
        {"", 2, 2, 0}, {"workers=0", AMP_NO_WORKERS, 2, 0}, {"workers=5\nprefetch=7\npin=off", 5, 7, 1}, {"prefetch=1024\npin=on", 2, 1024, 0}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        amp_settings s = settings_of(rows[i].lines);
        amp_context *amp = open_with(&s);
        amp_source source;
        amp_loader_desc d;
        amp_loader *l = NULL;
        memset(&source, 0, sizeof source);
        memset(&d, 0, sizeof d);
        source.read = give_sample; source.samples = 6; source.n_fields = 3;
        for (int k = 0; k < 3; k++) { source.fields[k].dtype = k == 0 ? AMP_F32 : k == 1 ? AMP_F16 : AMP_I32; source.fields[k].count = k == 0 ? 3 : 1; }
        d.source = &source; d.batch = 2; d.timeout_ms = 1234;
        CHECK_OK(amp_settings_fill_loader(&s, &d));
        CHECK_OK(amp_loader_create(amp, &l, &d));
        CHECK_OK(amp_loader_query(l, &d));
        CHECK_MSG(d.workers == rows[i].workers || (rows[i].workers < 0 && d.workers <= 0), "%s: %d", rows[i].lines, d.workers);
        CHECK_EQ(d.prefetch, rows[i].prefetch);
        CHECK_EQ(d.disable_pinned, rows[i].unpinned);
        CHECK_EQ(d.timeout_ms, 1234);               /* all else is the host's */
        amp_loader_destroy(l);
        amp_close(amp);
    }
    amp_settings s = settings_of("");
    amp_loader_desc d, before;
    memset(&d, 0x5a, sizeof d);
    before = d;
    s.workers = 65;
    CHECK_ERR(amp_settings_fill_loader(&s, &d), AMP_ERR_RANGE);
    CHECK(says(".workers = 65, must be a whole number from 0 to 64"));
    CHECK(memcmp(&d, &before, sizeof d) == 0);
    CHECK_ERR(amp_settings_fill_loader(NULL, &d), AMP_ERR_NULL);
    CHECK_ERR(amp_settings_fill_loader(&s, NULL), AMP_ERR_NULL);
}

/* ---- Memory */

TEST(cache_and_memory_efficient_decide_what_is_kept) {
    static const char *const lines[] = {"dtype=bf16", "dtype=bf16\nmemory_efficient=on", "dtype=bf16\ncache=off"};
    net *nets[3];
    for (int i = 0; i < 3; i++) {
        amp_cache_info info;
        net *n = nets[i] = net_lines(lines[i]);
        net_train(n, 3, NULL);
        for (int again = 0; again < 3; again++) net_forward(n, 9, 0);       /* a copy is kept from the second use on */
        CHECK_OK(amp_cast_cache_info(n->amp, &info));
        CHECK_MSG((info.entries > 0) == (i == 0), "%s: %lld", lines[i], (long long)info.entries);
        CHECK_MSG((info.misses > 0) == (i < 2), "%s", lines[i]);
        amp_memory_info memory;
        CHECK_OK(amp_memory(n->amp, &memory));
        CHECK_EQ(memory.cast_cache > 0, i == 0);
    }
    CHECK(same_weights(nets[0], nets[1]) && same_weights(nets[0], nets[2]));
    for (int i = 0; i < 3; i++) net_close(nets[i]);
}

/* With memory_efficient copies live as long as the outermost region. */
TEST(memory_efficient_waits_for_the_outermost_region) {
    net *n = net_lines("dtype=bf16\nmemory_efficient=on");
    amp_cache_info info;
    amp_tensor copy;
    CHECK_OK(amp_autocast_begin(n->amp, NULL));
    net_forward(n, 0, 0);
    net_forward(n, 0, 0);
    CHECK_OK(amp_autocast_cast(n->amp, &n->params[0], AMP_F16, &copy));
    CHECK_OK(amp_cast_cache_info(n->amp, &info));
    CHECK(info.entries > 1);
    CHECK_OK(amp_cleanup(n->amp, NULL));                /* what the host holds stays */
    CHECK_OK(amp_cast_cache_info(n->amp, &info));
    CHECK_EQ(info.entries, 1);
    CHECK_EQ(((uint16_t *)copy.data)[0], amp_f16_from_f32(n->w1[0], 0));
    CHECK_OK(amp_autocast_end(n->amp));
    CHECK_OK(amp_cast_cache_info(n->amp, &info));
    CHECK_EQ(info.entries, 0);
    net_close(n);
}

TEST(cleanup_gives_back_what_can_be_made_again) {
    net *n = net_lines("dtype=bf16"), *same = net_lines("dtype=bf16");
    amp_mask mask;
    amp_mask_view held, given;
    amp_tensor copy;
    amp_cache_info casts, kept, masks;
    amp_memory_info before, after;
    int64_t freed = -1;
    memset(&mask, 0, sizeof mask);
    mask.kind = AMP_MASK_CAUSAL;
    net_train(n, 3, NULL);
    net_train(same, 6, NULL);
    CHECK_OK(amp_autocast_begin(n->amp, NULL));
    CHECK_OK(amp_autocast_cast(n->amp, &n->params[0], AMP_BF16, &copy));
    CHECK_OK(amp_autocast_end(n->amp));
    CHECK_OK(amp_mask_get(n->amp, &mask, 1, 64, 64, AMP_F32, &held));
    CHECK_OK(amp_mask_get(n->amp, &mask, 1, 32, 32, AMP_F32, &given));
    amp_mask_release(n->amp, &given);
    CHECK_OK(amp_memory(n->amp, &before));
    CHECK_OK(amp_cast_cache_info(n->amp, &kept));
    CHECK_OK(amp_cleanup(n->amp, &freed));
    CHECK_OK(amp_memory(n->amp, &after));
    CHECK_OK(amp_cast_cache_info(n->amp, &casts));
    CHECK_OK(amp_mask_cache_info(n->amp, &masks));
    CHECK_EQ(casts.entries, 0);
    CHECK_EQ(masks.entries, 1);
    CHECK(kept.bytes > 0);
    CHECK_EQ(freed, before.reserved - after.reserved);
    CHECK_MSG(freed > kept.bytes + 32 * 32 * 4, "scratch too: %lld", (long long)freed);
    CHECK(((const float *)held.tensor.data)[0] == 0);
    CHECK_OK(amp_cleanup(n->amp, &freed));
    CHECK_EQ(freed, 0);
    net_train(n, 3, NULL);
    CHECK(same_weights(n, same));
    amp_mask_release(n->amp, &held);
    CHECK_ERR(amp_cleanup(NULL, &freed), AMP_ERR_NULL);
    net_close(n);
    net_close(same);
}

/* ---- Fallback and TF32 */

/* A device without bf16 and TF32. */
static amp_result poor_describe(void *dev, amp_device *out) {
    amp_result result = recording_describe(dev, out);
    out->bf16 = out->tf32 = 0;
    return result;
}
static const amp_backend *poor_backend(void) {
    static amp_backend table;
    table = *recording_backend();
    table.describe = poor_describe;
    return &table;
}

TEST(fallback_replaces_a_dtype_the_device_lacks) {
    amp_settings s = settings_of("dtype=bf16\nfallback=fp16");
    amp_context *amp;
    amp_desc d, now;
    amp_choice choice;
    memset(&d, 0, sizeof d);
    d.backend = poor_backend();
    d.logger.level = AMP_LOG_OFF;
    CHECK_OK(amp_settings_fill(&s, NULL, &d, NULL, NULL, NULL));
    CHECK_OK(amp_open(&amp, &d));
    CHECK_OK(amp_query_choice(amp, &choice));
    CHECK_EQ(choice.dtype, AMP_F16);
    CHECK(choice.fell_back && choice.scaler);
    CHECK_MSG(strcmp(choice.reason, "bf16 requested: recording device lacks it; the fallback fp16 instead") == 0, "%s", choice.reason);
    CHECK_OK(amp_query(amp, &now));
    CHECK_EQ(now.fallback, AMP_F16);
    CHECK_EQ(now.dtype, AMP_F16);
    CHECK_EQ(computes(amp, AMP_OP_LINEAR), AMP_F16);
    CHECK_OK(amp_set_dtype(amp, AMP_F32));
    CHECK_OK(amp_set_dtype(amp, AMP_TF32));             /* lacking too */
    CHECK_EQ(computes(amp, AMP_OP_LINEAR), AMP_F16);
    amp_close(amp);
    d.fallback = AMP_DTYPE_DEFAULT;
    CHECK_ERR(amp_open(&amp, &d), AMP_ERR_UNSUPPORTED);
    d.fallback = AMP_TF32;                              /* what it falls back on must be there */
    CHECK_ERR(amp_open(&amp, &d), AMP_ERR_UNSUPPORTED);
    d.dtype = AMP_F32;
    CHECK_ERR(amp_open(&amp, &d), AMP_ERR_UNSUPPORTED);
    d.fallback = AMP_F64;
    CHECK_ERR(amp_open(&amp, &d), AMP_ERR_DTYPE);
}

TEST(fallback_is_what_overridden_operators_compute_in) {
    static const struct { const char *lines; amp_dtype linear; } rows[] = {
        {"dtype=bf16", AMP_F32}, {"dtype=bf16\nfallback=fp16", AMP_F16}, {"dtype=bf16\nfallback=tf32", AMP_TF32},
        {"dtype=bf16\nfallback=fp32", AMP_F32}, {"dtype=bf16\ntf32=on", AMP_TF32}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        amp_context *amp = open_lines(rows[i].lines);
        CHECK_OK(amp_operator_override(amp, AMP_OP_LINEAR, AMP_CAST_FP32));
        CHECK_OK(amp_operator_override(amp, AMP_OP_LAYERNORM, AMP_CAST_FP32));
        CHECK_MSG(computes(amp, AMP_OP_LINEAR) == rows[i].linear, "%s", rows[i].lines);
        CHECK_EQ(computes(amp, AMP_OP_MATMUL), AMP_BF16);
        CHECK_EQ(computes(amp, AMP_OP_LAYERNORM), AMP_F32);
        CHECK_OK(amp_autocast_begin(amp, NULL));
        CHECK_EQ(amp_autocast_result(amp, AMP_OP_LINEAR, NULL, AMP_F32, AMP_F32), rows[i].linear == AMP_F16 ? AMP_F16 : AMP_F32);
        CHECK_OK(amp_autocast_end(amp));
        amp_close(amp);
    }
}

/* 1 + 2^-12 has more digits than TF32: the product with 1 loses them. */
static float product(amp_context *amp, int region) {
    const float a = 1.000244140625f, b = 1;
    float c = 0;
    if (region) CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK_OK(amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 1, 1, 1, 1, &a, 1, &b, 1, 0, &c, 1));
    if (region) CHECK_OK(amp_autocast_end(amp));
    return c;
}

TEST(tf32_takes_the_low_bits_of_products_left_in_fp32) {
    static const struct { const char *lines; int rounded; } rows[] = {
        {"dtype=fp32", 0}, {"dtype=fp32\ntf32=on", 1}, {"level=O0", 0}, {"enabled=off\ndtype=bf16\ntf32=on", 1}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        amp_context *amp = open_lines(rows[i].lines);
        CHECK_EQ(product(amp, 1) == 1.0f, rows[i].rounded);
        CHECK_EQ(product(amp, 0) == 1.0f, rows[i].rounded);
        CHECK_EQ(computes(amp, AMP_OP_LAYERNORM), AMP_F32);
        CHECK_EQ(computes(amp, AMP_OP_ACTIVATION), AMP_F32);
        amp_close(amp);
    }
    amp_context *amp = open_lines("dtype=bf16\ntf32=on");
    amp_plan plan;
    amp_dtype wide[2] = {AMP_F64, AMP_F64};
    CHECK_OK(amp_layer_override(amp, "head*", AMP_F32));
    CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK_EQ(amp_autocast_compute(amp, AMP_OP_LINEAR, "head", AMP_F32, AMP_F32), AMP_TF32);
    CHECK_EQ(amp_autocast_result(amp, AMP_OP_LINEAR, "head", AMP_F32, AMP_F32), AMP_F32);
    CHECK_EQ(amp_autocast_compute(amp, AMP_OP_ATTENTION, "body", AMP_F32, AMP_F32), AMP_BF16);
    CHECK_OK(amp_autocast_decide(amp, AMP_OP_MATMUL, NULL, wide, 2, &plan));
    CHECK_EQ(plan.compute, AMP_F64);
    CHECK_OK(amp_autocast_end(amp));
    amp_close(amp);
}

/* Without TF32 in the device, and at level O0, allow_tf32 does nothing and says so. */
TEST(tf32_where_there_is_none) {
    amp_context *amp;
    amp_desc d;
    memset(&d, 0, sizeof d);
    d.dtype = AMP_F32;
    d.allow_tf32 = 1;
    d.backend = poor_backend();
    CHECK_OK(amp_open(&amp, &d));
    CHECK_EQ(computes(amp, AMP_OP_LINEAR), AMP_F32);
    CHECK_OK(amp_query(amp, &d));
    CHECK_EQ(d.allow_tf32, 0);
    amp_close(amp);
    memset(&d, 0, sizeof d);
    d.level = AMP_LEVEL_O0;
    d.allow_tf32 = 1;
    CHECK_OK(amp_open(&amp, &d));
    CHECK(product(amp, 1) != 1.0f);
    CHECK_OK(amp_query(amp, &d));
    CHECK_EQ(d.allow_tf32, 0);
    amp_close(amp);
}

static int asked_autotune;
static amp_result open_recorded(void **dev, const amp_host *host, const amp_backend_desc *desc) {
    asked_autotune = desc->autotune;
    return amp_cpu()->open(dev, host, desc);
}

TEST(autotune_reaches_the_device) {
    for (int on = 0; on < 2; on++) {
        amp_settings s = settings_of(on ? "autotune=on" : "autotune=off");
        amp_backend table = *recording_backend();
        amp_context *amp;
        amp_desc d;
        memset(&d, 0, sizeof d);
        table.open = open_recorded;
        d.backend = &table;
        CHECK_OK(amp_settings_fill(&s, NULL, &d, NULL, NULL, NULL));
        CHECK_OK(amp_open(&amp, &d));
        CHECK_EQ(asked_autotune, on);
        amp_close(amp);
    }
}

/* ---- The scaler */

static amp_scaler *scaler_of(amp_context *amp, const char *lines) {
    amp_settings s = settings_of(lines);
    amp_scaler *scaler = NULL;
    amp_scaler_desc d;
    CHECK_OK(amp_settings_fill(&s, amp, NULL, &d, NULL, NULL));
    CHECK_OK(amp_scaler_create(amp, &scaler, &d));
    return scaler;
}

TEST(scaler_is_there_when_asked_for) {
    static const char *const dtypes[] = {"dtype=fp32\n", "dtype=tf32\n", "dtype=fp16\n", "dtype=bf16\n"};
    static const char *const uses[] = {"scaler=auto", "scaler=on", "scaler=off"};
    for (int d = 0; d < 4; d++)
        for (int u = 0; u < 3; u++) {
            amp_context *amp = open_lines(dtypes[d]);
            amp_scaler *scaler = scaler_of(amp, uses[u]);
            int wanted = u == 1 || (u == 0 && d == 2);
            CHECK_MSG(amp_scaler_scale(scaler) == (wanted ? 65536.0f : 1.0f), "%s%s", dtypes[d], uses[u]);
            amp_scaler_destroy(scaler);
            amp_close(amp);
        }
    amp_settings s = settings_of("dtype=fp16");
    amp_scaler_desc desc;
    CHECK_OK(amp_settings_fill(&s, NULL, NULL, &desc, NULL, NULL));     /* before a context is open: by what is asked for */
    CHECK_EQ(desc.disable, 0);
    s = settings_of("dtype=auto");
    CHECK_OK(amp_settings_fill(&s, NULL, NULL, &desc, NULL, NULL));
    CHECK_EQ(desc.disable, 1);
}

/* Scales after updates, one per letter: o overflow, c clean. */
static void scales_are(const char *lines, const char *updates, const float *expected) {
    amp_context *amp = open_lines("dtype=fp16");
    amp_scaler *scaler = scaler_of(amp, lines);
    amp_grad_set *set;
    amp_grad_set_desc d;
    amp_range range;
    float value;
    memset(&range, 0, sizeof range);
    memset(&d, 0, sizeof d);
    range.data = &value; range.count = 1; range.dtype = AMP_F32;
    d.ranges = &range; d.n_ranges = 1;
    CHECK_OK(amp_grad_set_create(amp, &set, &d));
    for (int i = 0; updates[i]; i++) {
        uint32_t infinite = 0x7f800000u;
        value = 1;
        if (updates[i] == 'o') memcpy(&value, &infinite, 4);
        CHECK_OK(amp_scaler_check(scaler, set, AMP_CHECK_READ));
        CHECK_OK(amp_scaler_update(scaler));
        CHECK_MSG(amp_scaler_scale(scaler) == expected[i], "%s: update %d: %g, expected %g", lines, i, (double)amp_scaler_scale(scaler), (double)expected[i]);
    }
    amp_grad_set_destroy(set);
    amp_scaler_destroy(scaler);
    amp_close(amp);
}

TEST(every_number_of_the_scaler_does_what_it_says) {
    static const float growth[] = {1024, 1024, 1536, 1536, 1536, 2304}, backoff[] = {256, 64}, floor_[] = {4, 2, 2},
                       ceiling[] = {512, 600, 600}, hysteresis[] = {1024, 1024, 512}, never[] = {1024, 1024, 1024}, rate[] = {1024, 1024, 1024, 512},
                       frozen[] = {1024, 1024, 1024, 1024}, none[] = {0.5f, 0.25f}, apex[] = {16777216, 16777216}, mega[] = {1024, 512, 512, 256};
    scales_are("init_scale=1024\ngrowth_factor=1.5\ngrowth_interval=3", "cccccc", growth);
    scales_are("init_scale=1024\nbackoff_factor=0.25", "oo", backoff);
    scales_are("init_scale=8\nmin_scale=2", "ooo", floor_);
    scales_are("init_scale=256\nmax_scale=600\ngrowth_interval=1", "ccc", ceiling);
    scales_are("init_scale=1024\nhysteresis=3\ntolerance=0", "ooo", hysteresis);
    scales_are("init_scale=1024\ngrowth_interval=none", "ccc", never);
    scales_are("init_scale=1024\nhysteresis=100\ntolerance=0.25\ngrowth_interval=none", "ccco", rate);
    scales_are("init_scale=1024\nfrozen=on\ngrowth_interval=1", "coco", frozen);
    scales_are("init_scale=1\nmin_scale=none", "oo", none);
    scales_are("scaler_preset=apex\ninit_scale=8388608\ngrowth_interval=1", "cc", apex);
    scales_are("scaler_preset=megatron\ninit_scale=1024\nbackoff_factor=0.5", "ooco", mega);
}

/* ---- Steps */

TEST(clip_norm_bounds_the_step) {
    net *free_ = net_lines("dtype=fp32"), *clipped = net_lines("dtype=fp32\nclip_norm=0.125");
    amp_step_result a, b;
    net_train(free_, 1, NULL);
    net_train(clipped, 1, NULL);
    CHECK_EQ(amp_step_result_next(free_->optimizer, &a), 1);
    CHECK_EQ(amp_step_result_next(clipped->optimizer, &b), 1);
    CHECK(a.norm == b.norm && a.norm > 0.125f);
    CHECK(a.clip_coef == 1.0f);
    CHECK(b.clip_coef * b.norm <= 0.125f && b.clip_coef * b.norm > 0.1249f);
    CHECK_OK(amp_optimizer_set_clip(clipped->optimizer, 0));            /* from the next check on */
    net_train(clipped, 1, NULL);
    CHECK_EQ(amp_step_result_next(clipped->optimizer, &b), 1);
    CHECK(b.clip_coef == 1.0f);
    CHECK_OK(amp_optimizer_set_clip(clipped->optimizer, 0.25));
    net_train(clipped, 1, NULL);
    CHECK_EQ(amp_step_result_next(clipped->optimizer, &b), 1);
    CHECK(b.clip_coef * b.norm <= 0.25f && b.clip_coef < 1);
    amp_optimizer_desc d;
    memset(&d, 0, sizeof d);
    CHECK_OK(amp_optimizer_query(clipped->optimizer, &d));
    CHECK(d.clip_norm == 0.25);
    CHECK_ERR(amp_optimizer_set_clip(clipped->optimizer, -1), AMP_ERR_RANGE);
    CHECK_ERR(amp_optimizer_set_clip(clipped->optimizer, 1e300 * 1e300), AMP_ERR_RANGE);
    CHECK_ERR(amp_optimizer_set_clip(NULL, 1), AMP_ERR_NULL);
    net_close(free_);
    net_close(clipped);
}

TEST(accumulation_decides_when_amp_step_steps) {
    net *n = net_lines("dtype=fp32\naccumulation=3");
    amp_step_result outcome;
    float before[SETTINGS_HIDDEN * SETTINGS_IN];
    int steps = 0;
    for (int i = 1; i <= 9; i++) {
        memcpy(before, n->w1, sizeof before);
        net_train(n, 1, NULL);
        while (amp_step_result_next(n->optimizer, &outcome)) steps++;
        CHECK_EQ(steps, i / 3);
        CHECK_EQ(memcmp(before, n->w1, sizeof before) != 0, i % 3 == 0);
    }
    net_train(n, 2, NULL);              /* two of three are dropped by a new cycle of two */
    CHECK_OK(amp_optimizer_set_accumulation(n->optimizer, 2));
    memcpy(before, n->w1, sizeof before);
    net_train(n, 1, NULL);
    CHECK(memcmp(before, n->w1, sizeof before) == 0);
    net_train(n, 1, NULL);
    CHECK(memcmp(before, n->w1, sizeof before) != 0);
    CHECK_ERR(amp_optimizer_set_accumulation(n->optimizer, 0), AMP_ERR_RANGE);
    CHECK_ERR(amp_optimizer_set_accumulation(NULL, 1), AMP_ERR_NULL);
    net_close(n);
}

/* What was accumulated is gone, and the average is over the new number: as in a run that only ever had the new cycle. */
TEST(a_new_cycle_is_as_if_the_old_one_had_not_begun) {
    net *n = net_lines("dtype=fp32\naccumulation=4"), *other = net_lines("dtype=fp32\naccumulation=2");
    net_train(n, 3, NULL);
    CHECK_OK(amp_optimizer_set_accumulation(n->optimizer, 2));
    amp_state *state;
    CHECK_OK(amp_state_create(&state, NULL));           /* the same random numbers and data from here on */
    CHECK_OK(amp_random_save(n->amp, state, "net"));
    CHECK_OK(amp_random_load(other->amp, state, "net"));
    amp_state_destroy(state);
    other->step = n->step;
    net_train(n, 4, NULL);
    net_train(other, 4, NULL);
    CHECK(same_weights(n, other));
    net_close(n);
    net_close(other);
}

TEST(nan_action_reaches_optimizer_and_monitor) {
    static const struct { const char *lines; amp_nan_action action; } rows[] = {
        {"nan_action=report", AMP_NAN_REPORT}, {"nan_action=skip", AMP_NAN_SKIP}, {"nan_action=stop", AMP_NAN_STOP},
        {"nan_action=recover", AMP_NAN_RECOVER}, {"", AMP_NAN_SKIP}};
    uint32_t nan_bits = 0x7fc00000u;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char lines[64];
        snprintf(lines, sizeof lines, "dtype=fp32\n%s", rows[i].lines);
        amp_settings s = settings_of(lines);
        amp_monitor_desc monitor;
        amp_step_result outcome;
        net *n = net_open(&s);
        memset(&monitor, 0, sizeof monitor);
        CHECK_OK(amp_settings_fill(&s, n->amp, NULL, NULL, NULL, &monitor));
        CHECK_EQ(monitor.nan_action, rows[i].action);
        net_forward(n, 0, 1);
        memcpy(&n->logits[0], &nan_bits, 4);
        net_backward(n);
        CHECK_OK(amp_step(n->optimizer, n->scaler));
        CHECK_EQ(amp_step_result_next(n->optimizer, &outcome), 1);
        CHECK_EQ(outcome.applied, rows[i].action == AMP_NAN_REPORT);
        net_close(n);
    }
}

TEST(intervals_reach_the_monitor) {
    amp_settings s = settings_of("log_interval=7\nmemory_interval=off\ncleanup_interval=50\nmemory_warning=0.5\nmax_skips=4");
    amp_monitor_desc d;
    memset(&d, 0x5a, sizeof d);
    CHECK_OK(amp_settings_fill(&s, NULL, NULL, NULL, NULL, &d));
    CHECK_EQ(d.log_interval, 7);
    CHECK_EQ(d.memory_interval, AMP_INTERVAL_OFF);
    CHECK_EQ(d.cleanup_interval, 50);
    CHECK(d.memory_warning == 0.5);
    CHECK_EQ(d.max_skips, 4);
    CHECK_EQ(d.append, 0x5a5a5a5a);                     /* what is no setting stays */
    memset(&s, 0, sizeof s);
    CHECK_OK(amp_settings_fill(&s, NULL, NULL, NULL, NULL, &d));
    CHECK_EQ(d.log_interval, 100);
    CHECK_EQ(d.cleanup_interval, AMP_INTERVAL_OFF);
}

static int logged[6];
static void count_log(void *user, amp_log_level level, int id, const char *text) { (void)user; (void)id; (void)text; logged[level]++; }

TEST(debug_makes_the_log_detailed) {
    for (int debug = 0; debug < 2; debug++) {
        amp_settings s = settings_of(debug ? "dtype=fp32\ndebug=on" : "dtype=fp32");
        amp_context *amp;
        amp_desc d;
        memset(&d, 0, sizeof d);
        memset(logged, 0, sizeof logged);
        d.backend = poor_backend();
        d.allow_tf32 = 1;
        d.logger.write = count_log;
        CHECK_OK(amp_settings_fill(&s, NULL, &d, NULL, NULL, NULL));
        d.allow_tf32 = 1;
        CHECK_OK(amp_open(&amp, &d));
        CHECK_EQ(logged[AMP_LOG_INFO], debug);
        CHECK_OK(amp_query(amp, &d));
        CHECK_EQ(d.logger.level, debug ? AMP_LOG_DEBUG : AMP_LOG_WARNING);
        s.debug = 1;
        CHECK_OK(amp_settings_apply(&s, amp, NULL, NULL, NULL));
        CHECK_OK(amp_query(amp, &d));
        CHECK_EQ(d.logger.level, AMP_LOG_DEBUG);
        s.debug = 0;
        CHECK_OK(amp_settings_apply(&s, amp, NULL, NULL, NULL));
        CHECK_OK(amp_query(amp, &d));
        CHECK_EQ(d.logger.level, AMP_LOG_WARNING);
        amp_close(amp);
    }
}

TEST(debug_tells_each_decision_once) {
    for (int debug = 0; debug < 2; debug++) {
        amp_settings s = settings_of("dtype=bf16");
        net *n = net_open(&s);
        memset(logged, 0, sizeof logged);
        n->amp->desc.logger.write = count_log;
        s.debug = debug;
        CHECK_OK(amp_settings_apply(&s, n->amp, n->scaler, n->optimizer, NULL));
        net_train(n, 5, NULL);
        CHECK_MSG(debug ? logged[AMP_LOG_DEBUG] >= 4 && logged[AMP_LOG_DEBUG] < 10 : logged[AMP_LOG_DEBUG] == 0, "%d", logged[AMP_LOG_DEBUG]);
        net_close(n);
    }
}

/* ---- What the monitor does by them */

/* Steps with a monitor; step `bad` (from 0) has a NaN in its gradients.  Counts records by what they say. */
typedef struct seen { int records, skipped, memory, actions[5], anomalies[5]; int64_t cleaned; } seen;

static amp_monitor *monitor_of(net *n, const amp_settings *s, const char *path) {
    amp_monitor *monitor = NULL;
    amp_monitor_desc d;
    memset(&d, 0, sizeof d);
    CHECK_OK(amp_settings_fill(s, n->amp, NULL, NULL, NULL, &d));
    d.path = path; d.optimizer = n->optimizer; d.scaler = n->scaler;
    CHECK_OK(amp_monitor_create(n->amp, &monitor, &d));
    return monitor;
}

static seen monitored(net *n, amp_monitor *monitor, int steps, int first_bad, int last_bad) {
    uint32_t nan_bits = 0x7fc00000u;
    amp_step_info info;
    amp_step_record record;
    amp_cache_info cache;
    seen count;
    memset(&count, 0, sizeof count);
    memset(&info, 0, sizeof info);
    for (int i = 0; i < steps; i++) {
        info.loss = (double)net_forward(n, n->step++, 1);
        if (i >= first_bad && i <= last_bad) memcpy(&n->logits[0], &nan_bits, 4);
        net_backward(n);
        CHECK_OK(amp_step(n->optimizer, n->scaler));
        (void)net_forward(n, 0, 0);
        (void)net_forward(n, 0, 0);             /* which keeps casts */
        CHECK_OK(amp_monitor_step(monitor, &info));
        CHECK_OK(amp_cast_cache_info(n->amp, &cache));
        count.cleaned += cache.entries == 0;
        while (amp_monitor_next(monitor, &record)) {
            count.records++;
            count.skipped += !record.result.applied;
            count.memory += record.has_memory;
            count.actions[record.action]++;
            count.anomalies[record.anomaly]++;
        }
    }
    return count;
}

static int lines_of(const char *path) {
    void *text;
    size_t bytes;
    int lines = 0;
    CHECK_OK(amp_file_read_all(NULL, path, &text, &bytes));
    for (size_t i = 0; i < bytes; i++) lines += ((const char *)text)[i] == '\n';
    amp_file_free(NULL, text, bytes);
    return lines;
}

TEST(nan_action_decides_what_is_done) {
    static const struct { const char *lines; amp_nan_action action; } rows[] = {
        {"nan_action=report", AMP_NAN_REPORT}, {"nan_action=skip", AMP_NAN_SKIP}, {"nan_action=stop", AMP_NAN_STOP}, {"nan_action=recover", AMP_NAN_RECOVER}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char lines[64];
        snprintf(lines, sizeof lines, "dtype=fp32\n%s", rows[i].lines);
        amp_settings s = settings_of(lines);
        net *n = net_open(&s);
        n->amp->desc.logger.write = count_log;
        amp_monitor *monitor = monitor_of(n, &s, NULL);
        seen count = monitored(n, monitor, 6, 5, 5);
        CHECK_EQ(count.anomalies[AMP_ANOMALY_GRADIENTS], 1);
        CHECK_EQ(count.actions[rows[i].action], 1);
        CHECK_EQ(count.skipped, rows[i].action != AMP_NAN_REPORT);
        amp_monitor_destroy(monitor);
        net_close(n);
    }
}

TEST(max_skips_decides_when_skips_are_trouble) {
    for (int most = 2; most <= 4; most++) {
        char lines[96];
        snprintf(lines, sizeof lines, "dtype=fp16\ninit_scale=65536\nnan_action=stop\nmax_skips=%d", most);
        amp_settings s = settings_of(lines);
        net *n = net_open(&s);
        n->amp->desc.logger.write = count_log;
        amp_monitor *monitor = monitor_of(n, &s, NULL);
        seen count = monitored(n, monitor, 6, 1, 3);
        CHECK_EQ(count.skipped, 3);
        CHECK_EQ(count.actions[AMP_NAN_STOP] > 0, most <= 3);
        CHECK_EQ(count.anomalies[AMP_ANOMALY_SKIPS] > 0, most <= 3);
        amp_monitor_destroy(monitor);
        net_close(n);
    }
}

TEST(intervals_decide_when_the_monitor_acts) {
    const char *path = temporary("monitor.jsonl");
    amp_settings s = settings_of("dtype=bf16\nlog_interval=4\nmemory_interval=3\ncleanup_interval=5");
    net *n = net_open(&s);
    amp_monitor *monitor = monitor_of(n, &s, path);
    seen count = monitored(n, monitor, 30, -1, -1);
    CHECK_EQ(count.records, 30);
    CHECK_EQ(count.memory, 10);
    CHECK_EQ(count.cleaned, 6);
    amp_monitor_destroy(monitor);
    int lines = lines_of(path);
    CHECK_MSG(lines >= 7 && lines <= 8, "%d lines", lines);
    monitor = monitor_of(n, &s, path);
    s = settings_of("dtype=bf16\nlog_interval=1\nmemory_interval=off\ncleanup_interval=off");      /* while training runs */
    CHECK_OK(amp_settings_apply(&s, n->amp, n->scaler, n->optimizer, monitor));
    count = monitored(n, monitor, 30, -1, -1);
    CHECK_EQ(count.memory, 0);
    CHECK_EQ(count.cleaned, 0);
    amp_monitor_destroy(monitor);
    CHECK_EQ(lines_of(path), 30);
    remove(path);
    net_close(n);
}

TEST(memory_warning_is_a_share_of_the_device) {
    for (int warns = 0; warns < 2; warns++) {
        amp_settings s = settings_of(warns ? "dtype=fp32\nmemory_interval=1\nmemory_warning=1e-9" : "dtype=fp32\nmemory_interval=1\nmemory_warning=1");
        net *n = net_open(&s);
        memset(logged, 0, sizeof logged);
        n->amp->desc.logger.write = count_log;
        amp_monitor *monitor = monitor_of(n, &s, NULL);
        (void)monitored(n, monitor, 5, -1, -1);
        CHECK_EQ(logged[AMP_LOG_WARNING], warns);
        amp_monitor_destroy(monitor);
        net_close(n);
    }
}

TEST(max_retries_bounds_recoveries) {
    static const struct { const char *value; int restored; } rows[] = {{"0", 0}, {"1", 1}, {"default", 3}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char lines[96];
        snprintf(lines, sizeof lines, "dtype=fp32\nnan_action=recover\nmax_retries=%s", rows[i].value);
        amp_settings s = settings_of(lines);
        net *n = net_open(&s);
        uint32_t nan_bits = 0x7fc00000u;
        amp_recovery *recovery;
        amp_recovery_desc d;
        amp_recovery_event event;
        amp_step_info info;
        amp_step_record record;
        int restored = 0, stopped = 0;
        n->amp->desc.logger.write = count_log;
        amp_monitor *monitor = monitor_of(n, &s, NULL);
        memset(&d, 0, sizeof d);
        memset(&info, 0, sizeof info);
        d.params = n->params; d.n_params = SETTINGS_PARAMS; d.optimizer = n->optimizer; d.scaler = n->scaler;
        d.max_retries = s.max_retries;
        CHECK_OK(amp_recovery_create(n->amp, &recovery, &d));
        for (int step = 0; step < 12 && !stopped; step++) {
            (void)net_forward(n, step, 1);
            memcpy(&n->logits[0], &nan_bits, 4);
            net_backward(n);
            CHECK_OK(amp_step(n->optimizer, n->scaler));
            CHECK_OK(amp_monitor_step(monitor, &info));
            while (!stopped && amp_monitor_next(monitor, &record)) {
                CHECK_OK(amp_recovery_step(recovery, &record, &event));
                restored += event.action == AMP_RECOVERY_RESTORED;
                stopped = event.action == AMP_RECOVERY_STOP;
            }
        }
        CHECK_EQ(restored, rows[i].restored);
        CHECK_EQ(stopped, 1);
        amp_recovery_destroy(recovery);
        amp_monitor_destroy(monitor);
        net_close(n);
    }
}

/* A batch that was halved for memory comes back after so many good steps, and after twice as many when that failed. */
TEST(batch_growth_interval_takes_halving_back) {
    static const struct { const char *value; int64_t interval; } rows[] = {{"off", 0}, {"3", 3}, {"default", 0}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char lines[96];
        snprintf(lines, sizeof lines, "dtype=fp32\nnan_action=recover\nbatch_growth_interval=%s", rows[i].value);
        amp_settings s = settings_of(lines);
        net *n = net_open(&s);
        amp_recovery *recovery;
        amp_recovery_desc d;
        amp_recovery_event event;
        amp_step_info info;
        amp_step_record record;
        int grown[4] = {0, 0, 0, 0}, n_grown = 0;
        memset(logged, 0, sizeof logged);
        n->amp->desc.logger.write = count_log;
        amp_monitor *monitor = monitor_of(n, &s, NULL);
        memset(&d, 0, sizeof d);
        memset(&info, 0, sizeof info);
        d.params = n->params; d.n_params = SETTINGS_PARAMS; d.optimizer = n->optimizer; d.scaler = n->scaler;
        d.batch_growth_interval = s.batch_growth_interval;
        CHECK_OK(amp_recovery_create(n->amp, &recovery, &d));
        for (int step = 1; step <= 24; step++) {
            if (step == 2 || step == 7) {           /* memory ends: a cleanup, then half of the batch */
                CHECK_OK(amp_recovery_memory(recovery, &event));
                CHECK_OK(amp_recovery_memory(recovery, &event));
                CHECK_EQ(event.action, AMP_RECOVERY_HALVE_BATCH);
            }
            for (int micro = 0; micro < n->optimizer->desc.accumulation; micro++) {
                info.loss = (double)net_forward(n, n->step++, 1);
                net_backward(n);
                CHECK_OK(amp_step(n->optimizer, n->scaler));
            }
            CHECK_OK(amp_monitor_step(monitor, &info));
            while (amp_monitor_next(monitor, &record)) {
                CHECK_OK(amp_recovery_step(recovery, &record, &event));
                if (event.action != AMP_RECOVERY_DOUBLE_BATCH) continue;
                CHECK(strstr(event.text, "good steps") != NULL && n_grown < 4);
                if (n_grown < 4) grown[n_grown++] = step;
            }
        }
        if (rows[i].interval == 0) CHECK(n_grown == 0 && n->optimizer->desc.accumulation == 4);
        else CHECK_MSG(n_grown == 2 && grown[0] == 4 && grown[1] == 12 && n->optimizer->desc.accumulation == 1, "%d: %d %d", n_grown, grown[0], grown[1]);
        amp_recovery_destroy(recovery);
        amp_monitor_destroy(monitor);
        net_close(n);
    }
}

TEST(tensor_stats_interval_is_that_of_the_looks) {
    amp_settings s = settings_of("dtype=fp16\ntensor_stats_interval=4");
    net *n = net_open(&s);
    amp_tensor_stats *stats;
    amp_tensor_stats_desc d;
    amp_tensor_stats_report report;
    int due = 0;
    memset(&d, 0, sizeof d);
    d.params = n->params; d.n_params = SETTINGS_PARAMS;
    d.interval = s.tensor_stats_interval;
    CHECK_OK(amp_tensor_stats_create(n->amp, &stats, &d));
    for (int i = 0; i < 12; i++) {
        CHECK_OK(amp_tensor_stats_step(stats, &report));
        due += report.due;
    }
    CHECK_EQ(due, 3);
    amp_tensor_stats_destroy(stats);
    net_close(n);
}

/* ---- Switching while training runs */

static amp_state *net_save(const net *n) {
    amp_state *state;
    CHECK_OK(amp_state_create(&state, NULL));
    for (int i = 0; i < SETTINGS_PARAMS; i++)
        CHECK_OK(amp_state_put(state, n->params[i].name, AMP_F32, n->params[i].weight.data, amp_tensor_count(&n->params[i].weight)));
    CHECK_OK(amp_optimizer_save(n->optimizer, state, "adamw"));
    CHECK_OK(amp_scaler_save(n->scaler, state, "scaler"));
    CHECK_OK(amp_random_save(n->amp, state, "net"));
    return state;
}

/* A new run from the state of another; scaled: it had an enabled scaler. */
static net *net_resume(const amp_settings *s, const amp_state *state, int step, int scaled) {
    net *n = net_open(s);
    for (int i = 0; i < SETTINGS_PARAMS; i++)
        CHECK_OK(amp_state_get(state, n->params[i].name, AMP_F32, n->params[i].weight.data, amp_tensor_count(&n->params[i].weight)));
    CHECK_OK(amp_optimizer_load(n->optimizer, state, "adamw"));
    if (scaled) CHECK_OK(amp_scaler_load(n->scaler, state, "scaler"));
    CHECK_OK(amp_random_load(n->amp, state, "net"));
    n->step = step;
    return n;
}

enum { SEGMENT = 12 };

/* Each segment of a run that switches is the run resumed from the state at the switch, bit for bit. */
TEST(switching_is_resuming) {
    static const char *const segments[] = {
        "dtype=fp32", "dtype=bf16", "dtype=fp16\ninit_scale=16777216\ngrowth_interval=4", "dtype=fp16\ninit_scale=16777216\ngrowth_interval=4\nclip_norm=0.25",
        "dtype=tf32", "dtype=fp16\ninit_scale=1024\ngrowth_interval=4", "dtype=bf16\nscaler=on", "dtype=bf16\nenabled=off",
        "dtype=fp32\ntf32=on\nmemory_efficient=on", "dtype=bf16\ncache=off\naccumulation=2", "dtype=fp32"};
    static const int scaled[] = {0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0};      /* the scaler goes on from the segment before */
    amp_settings s = settings_of(segments[0]);
    net *run = net_open(&s);
    float losses[SEGMENT], again[SEGMENT], last = 0;
    amp_step_result outcome;
    int skipped = 0;
    for (size_t i = 0; i < sizeof segments / sizeof *segments; i++) {
        amp_state *state = net_save(run);
        int step = run->step;
        s = settings_of(segments[i]);
        CHECK_OK(amp_settings_apply(&s, run->amp, run->scaler, run->optimizer, NULL));
        net *other = net_resume(&s, state, step, scaled[i]);
        if (scaled[i]) CHECK_OK(amp_settings_apply(&s, other->amp, other->scaler, other->optimizer, NULL));
        net_train(run, SEGMENT, losses);
        net_train(other, SEGMENT, again);
        CHECK_MSG(memcmp(losses, again, sizeof losses) == 0, "losses differ after %s", segments[i]);
        CHECK_MSG(same_weights(run, other), "weights differ after %s", segments[i]);
        CHECK(amp_scaler_scale(run->scaler) == amp_scaler_scale(other->scaler));
        CHECK(losses[SEGMENT - 1] != last);
        last = losses[SEGMENT - 1];
        while (amp_step_result_next(run->optimizer, &outcome)) skipped += !outcome.applied;
        amp_state_destroy(state);
        net_close(other);
    }
    CHECK_MSG(skipped > 0, "the large scale overflowed in no step");
    net_close(run);
}

TEST(a_switch_of_dtype_empties_the_cast_cache) {
    amp_settings s = settings_of("dtype=bf16");
    net *n = net_open(&s);
    amp_cache_info info;
    for (int i = 0; i < 2; i++) {
        net_forward(n, 0, 0);
        net_forward(n, 0, 0);
        CHECK_OK(amp_cast_cache_info(n->amp, &info));
        CHECK(info.entries > 0);
        s = settings_of(i == 0 ? "dtype=fp16\nscaler=off" : "dtype=fp16\nscaler=off\ncache=off");
        CHECK_OK(amp_settings_apply(&s, n->amp, n->scaler, n->optimizer, NULL));
        CHECK_OK(amp_cast_cache_info(n->amp, &info));
        CHECK_EQ(info.entries, 0);
    }
    net_close(n);
}

/* The formats do give different numbers, or the test above could not fail. */
TEST(formats_differ) {
    static const char *const lines[] = {"dtype=fp32", "dtype=tf32", "dtype=bf16", "dtype=fp16\nscaler=off"};
    net *nets[4];
    for (int i = 0; i < 4; i++) { nets[i] = net_lines(lines[i]); net_train(nets[i], 3, NULL); }
    for (int i = 0; i < 4; i++) for (int j = 0; j < i; j++) CHECK_MSG(!same_weights(nets[i], nets[j]), "%s and %s", lines[i], lines[j]);
    for (int i = 0; i < 4; i++) net_close(nets[i]);
}

/* Off for validation and back: the training does not notice, and the validation is fp32's. */
TEST(validation_in_fp32_leaves_no_trace) {
    for (int way = 0; way < 2; way++) {
        amp_settings s = settings_of("dtype=fp16\ninit_scale=1024\ngrowth_interval=3"), off = s, plain = settings_of("dtype=fp32\nmode=inference");
        net *with = net_open(&s), *without = net_open(&s), *fp32 = net_open(&plain);
        amp_cache_info before, after;
        off.disable = 1;
        off.mode = AMP_MODE_INFERENCE;
        net_train(with, 7, NULL);
        net_train(without, 7, NULL);
        CHECK_OK(amp_cast_cache_info(with->amp, &before));
        if (way == 0) CHECK_OK(amp_settings_apply(&off, with->amp, with->scaler, with->optimizer, NULL));
        else CHECK_OK(amp_set_enabled(with->amp, 0));
        CHECK_OK(amp_cast_cache_info(with->amp, &after));
        CHECK_EQ(before.entries, after.entries);            /* caches stay */
        memcpy(fp32->w1, with->w1, sizeof with->w1); memcpy(fp32->b1, with->b1, sizeof with->b1);
        memcpy(fp32->w2, with->w2, sizeof with->w2); memcpy(fp32->b2, with->b2, sizeof with->b2);
        with->dropout.p = way == 0 ? 0.25f : 0;
        for (int i = 0; i < 3; i++) {
            float loss = net_forward(with, 500 + i, 0), exact = net_forward(fp32, 500 + i, 0);
            CHECK_MSG(memcmp(&loss, &exact, 4) == 0, "%g %g", (double)loss, (double)exact);
        }
        with->dropout.p = 0.25f;
        if (way == 0) CHECK_OK(amp_settings_apply(&s, with->amp, with->scaler, with->optimizer, NULL));
        else CHECK_OK(amp_set_enabled(with->amp, 1));
        if (way == 1) {                                     /* dropout with p 0 took random numbers in training mode */
            amp_state *state;
            CHECK_OK(amp_state_create(&state, NULL));
            CHECK_OK(amp_random_save(with->amp, state, "r"));
            CHECK_OK(amp_random_load(without->amp, state, "r"));
            amp_state_destroy(state);
        }
        net_train(with, 7, NULL);
        net_train(without, 7, NULL);
        CHECK(same_weights(with, without));
        CHECK(amp_scaler_scale(with->scaler) == amp_scaler_scale(without->scaler));
        net_close(with); net_close(without); net_close(fp32);
    }
}

/* Evaluation is in the training's precision unless it says otherwise. */
TEST(evaluation_is_in_the_trainings_precision) {
    net *n = net_lines("dtype=bf16");
    amp_autocast_desc d;
    memset(&d, 0, sizeof d);
    d.mode = AMP_MODE_INFERENCE;
    CHECK_OK(amp_autocast_begin(n->amp, &d));
    CHECK_EQ(amp_autocast_compute(n->amp, AMP_OP_LINEAR, NULL, AMP_F32, AMP_F32), AMP_BF16);
    CHECK_OK(amp_autocast_end(n->amp));
    net_close(n);
}

/* A scaler that goes on takes the new rule in place: its interval, and overflows left before it shrinks. */
TEST(the_scalers_rule_changes_in_place) {
    amp_settings s = settings_of("dtype=fp16\ninit_scale=1024\ngrowth_interval=10");
    net *n = net_open(&s);
    amp_k_scaler state;
    amp_scaler_desc d;
    memset(&d, 0, sizeof d);
    net_train(n, 6, NULL);
    CHECK_OK(amp_scaler_get(n->scaler, &state));
    CHECK_EQ(state.growth_tracker, 6);
    s = settings_of("dtype=fp16\ngrowth_interval=8\nhysteresis=2\ngrowth_factor=4\nmax_scale=3072\ninit_scale=512");
    CHECK_OK(amp_settings_apply(&s, n->amp, n->scaler, n->optimizer, NULL));
    CHECK_OK(amp_scaler_get(n->scaler, &state));
    CHECK_EQ(state.growth_tracker, 6);
    CHECK_EQ(state.hysteresis_left, 2);
    CHECK(state.scale == 1024.0f);
    net_train(n, 2, NULL);
    CHECK(amp_scaler_scale(n->scaler) == 3072.0f);      /* 1024 times 4, up to the new ceiling */
    CHECK_OK(amp_scaler_query(n->scaler, &d));
    CHECK(d.growth_factor == 4 && d.max_scale == 3072.0f && d.tolerance == 0.25);
    net_train(n, 5, NULL);
    s = settings_of("dtype=fp16\ngrowth_interval=3");   /* below the tracker, so the count begins anew */
    CHECK_OK(amp_settings_apply(&s, n->amp, n->scaler, n->optimizer, NULL));
    net_train(n, 2, NULL);
    CHECK(amp_scaler_scale(n->scaler) == 3072.0f);
    net_train(n, 1, NULL);
    CHECK(amp_scaler_scale(n->scaler) == 6144.0f);
    net_close(n);
}

TEST(what_cannot_change_is_refused_and_nothing_changes) {
    static const struct { const char *lines; amp_result result; const char *why; } rows[] = {
        {"dtype=fp32\nlevel=O0", AMP_ERR_CONFLICT, "level = O0, but O1 is in force"},
        {"dtype=bf16\nlevel=O2", AMP_ERR_CONFLICT, "level = O2, but O1 is in force"},
        {"dtype=bf16\npolicy=torch", AMP_ERR_CONFLICT, "policy = torch, but fused is in force"},
        {"dtype=bf16\nautotune=on", AMP_ERR_CONFLICT, "autotune = on, but off is in force"},
        {"dtype=bf16\nscaler_preset=apex", AMP_ERR_CONFLICT, "scaler_preset = apex, but default is in force"}};
    amp_settings s = settings_of("dtype=fp16\ninit_scale=1024\nclip_norm=2");
    net *n = net_open(&s), *other = net_open(&s);
    amp_desc before, after;
    amp_scaler_desc scaler, scaler_after;
    amp_optimizer_desc optimizer, optimizer_after;
    CHECK_OK(amp_query(n->amp, &before));
    CHECK_OK(amp_scaler_query(n->scaler, &scaler));
    CHECK_OK(amp_optimizer_query(n->optimizer, &optimizer));
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        s = settings_of(rows[i].lines);
        CHECK_ERR(amp_settings_apply(&s, n->amp, n->scaler, n->optimizer, NULL), rows[i].result);
        CHECK(says(rows[i].why));
    }
    s = settings_of("dtype=bf16");
    CHECK_ERR(amp_settings_apply(&s, n->amp, other->scaler, n->optimizer, NULL), AMP_ERR_CONFLICT);
    CHECK_ERR(amp_settings_apply(&s, n->amp, n->scaler, other->optimizer, NULL), AMP_ERR_CONFLICT);
    CHECK_ERR(amp_settings_apply(NULL, n->amp, NULL, NULL, NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_settings_apply(&s, NULL, NULL, NULL, NULL), AMP_ERR_NULL);
    s.clip_norm = -1;
    CHECK_ERR(amp_settings_apply(&s, n->amp, n->scaler, n->optimizer, NULL), AMP_ERR_RANGE);
    CHECK_OK(amp_query(n->amp, &after));
    CHECK_OK(amp_scaler_query(n->scaler, &scaler_after));
    CHECK_OK(amp_optimizer_query(n->optimizer, &optimizer_after));
    CHECK(memcmp(&before, &after, sizeof before) == 0);
    CHECK(memcmp(&scaler, &scaler_after, sizeof scaler) == 0);
    CHECK(memcmp(&optimizer, &optimizer_after, sizeof optimizer) == 0);
    net_close(n);
    net_close(other);
}

TEST(a_device_without_the_dtype_refuses_the_switch) {
    amp_settings s = settings_of("dtype=fp16");
    amp_context *amp;
    amp_desc d, before, after;
    memset(&d, 0, sizeof d);
    d.backend = poor_backend();
    CHECK_OK(amp_settings_fill(&s, NULL, &d, NULL, NULL, NULL));
    CHECK_OK(amp_open(&amp, &d));
    CHECK_OK(amp_query(amp, &before));
    s = settings_of("dtype=bf16\nmode=inference");
    CHECK_ERR(amp_settings_apply(&s, amp, NULL, NULL, NULL), AMP_ERR_UNSUPPORTED);
    s = settings_of("dtype=fp32\nfallback=tf32");
    CHECK_ERR(amp_settings_apply(&s, amp, NULL, NULL, NULL), AMP_ERR_UNSUPPORTED);
    CHECK_OK(amp_query(amp, &after));
    CHECK(memcmp(&before, &after, sizeof before) == 0);
    amp_close(amp);
}

TEST(a_cycle_must_be_whole_before_settings_change) {
    amp_settings s = settings_of("dtype=fp32\naccumulation=3"), other = settings_of("dtype=bf16");
    net *n = net_open(&s);
    net_train(n, 1, NULL);
    CHECK_ERR(amp_settings_apply(&other, n->amp, n->scaler, n->optimizer, NULL), AMP_ERR_STATE);
    CHECK(says("first.weight has a gradient that no step has used"));
    CHECK_EQ(computes(n->amp, AMP_OP_LINEAR), AMP_F32);
    net_train(n, 2, NULL);
    CHECK_OK(amp_settings_apply(&other, n->amp, n->scaler, n->optimizer, NULL));
    CHECK_EQ(computes(n->amp, AMP_OP_LINEAR), AMP_BF16);
    net_forward(n, 0, 1);                               /* a step that has begun is no time either */
    net_backward(n);
    CHECK_ERR(amp_settings_apply(&s, n->amp, n->scaler, n->optimizer, NULL), AMP_ERR_STATE);
    CHECK_OK(amp_optimizer_set_accumulation(n->optimizer, 1));
    CHECK_OK(amp_settings_apply(&s, n->amp, n->scaler, n->optimizer, NULL));
    net_close(n);
}

/* Levels O2 and O3 stay in their dtype; everything else may change there too. */
TEST(levels_with_16_bit_weights_keep_their_dtype) {
    amp_settings s = settings_of("dtype=bf16\nlevel=O2");
    amp_context *amp = open_with(&s);
    amp_desc d;
    s = settings_of("dtype=fp16\nlevel=O2");
    CHECK_ERR(amp_settings_apply(&s, amp, NULL, NULL, NULL), AMP_ERR_CONFLICT);
    s = settings_of("dtype=bf16\nmode=inference\nenabled=off");
    CHECK_OK(amp_settings_apply(&s, amp, NULL, NULL, NULL));
    CHECK_OK(amp_query(amp, &d));
    CHECK(d.mode == AMP_MODE_INFERENCE && d.disable == 1 && d.level == AMP_LEVEL_O2);
    amp_close(amp);
}

TEST(fp16_without_a_scaler_is_said) {
    amp_settings s = settings_of("dtype=fp32");
    amp_context *amp;
    amp_desc d;
    memset(&d, 0, sizeof d);
    memset(logged, 0, sizeof logged);
    d.logger.write = count_log;
    CHECK_OK(amp_settings_fill(&s, NULL, &d, NULL, NULL, NULL));
    CHECK_OK(amp_open(&amp, &d));
    s = settings_of("dtype=fp16");
    CHECK_OK(amp_settings_apply(&s, amp, NULL, NULL, NULL));
    CHECK_EQ(logged[AMP_LOG_WARNING], 1);
    s = settings_of("dtype=fp16\nscaler=off");
    CHECK_OK(amp_settings_apply(&s, amp, NULL, NULL, NULL));
    CHECK_EQ(logged[AMP_LOG_WARNING], 1);
    amp_close(amp);
}

/* ---- The files in examples */

static void trains_with(const char *file, amp_settings *s) {
    char path[256];
    float losses[60];
    net *n;
    snprintf(path, sizeof path, "examples/%s", file);
    memset(s, 0, sizeof *s);
    CHECK_OK(amp_settings_read_file(s, NULL, path));
    CHECK_OK(amp_settings_check(s));
    n = net_open(s);
    n->amp->desc.logger.write = count_log;
    net_train(n, 60, losses);
    CHECK_MSG(losses[59] < losses[0] && amp_count_nonfinite(losses, AMP_F32, 60, NULL) == 0, "%s: %g to %g", file, (double)losses[0], (double)losses[59]);
    net_close(n);
}

TEST(example_files_train) {
    amp_settings s;
    trains_with("max.conf", &s);
    CHECK(s.autotune == AMP_AUTOTUNE_ON && s.allow_tf32 && s.dtype == AMP_DTYPE_DEFAULT);
    trains_with("stable.conf", &s);
    CHECK(s.scaler.init_scale == 2048.0f && s.scaler.backoff_factor == 0.25 && s.clip_norm == 1 && s.nan_action == AMP_NAN_RECOVER);
    trains_with("debug.conf", &s);
    CHECK(s.log_interval == 1 && s.debug && s.fallback == AMP_F32 && s.tensor_stats_interval > 0);
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(every_key_is_set_written_and_read); RUN(moments_are_an_optimizers_for_good); RUN(threads_are_a_contexts_for_good); RUN(rates_are_a_setting); RUN(the_defaults_are_those_documented);
    RUN(words_come_in_either_case_and_switches_in_four_ways); RUN(numbers_are_read_whole);
    RUN(numbers_are_the_same_with_a_decimal_comma); RUN(every_key_refuses_what_is_out_of_range);
    RUN(text_is_read_with_comments_blank_lines_and_any_line_ends); RUN(malformed_text_is_refused_with_name_line_and_key);
    RUN(text_comes_back_as_the_same_bytes); RUN(no_bytes_do_harm); RUN(files_are_read_and_refused);
    RUN(the_environment_is_read_when_asked_for); RUN(nothing_is_read_silently);
    RUN(manual_maps_every_name_of_python_trainers); RUN(contradictions_are_refused_with_both_keys); RUN(fields_out_of_range_are_refused);
    RUN(enabled_and_dtype_decide_what_regions_compute_in); RUN(autocast_dtype_is_that_of_regions);
    RUN(autocast_dtype_trains_as_dtype_does); RUN(cast_inputs_decides_what_loaders_deliver); RUN(cast_inputs_train_the_same);
    RUN(cast_inputs_and_outputs_say_which_dtype); RUN(workers_prefetch_and_pin_reach_the_loader); RUN(level_decides_what_weights_are_stored_in);
    RUN(policy_decides_result_dtypes); RUN(mode_decides_whether_dropout_drops);
    RUN(cache_and_memory_efficient_decide_what_is_kept); RUN(memory_efficient_waits_for_the_outermost_region);
    RUN(cleanup_gives_back_what_can_be_made_again);
    RUN(fallback_replaces_a_dtype_the_device_lacks); RUN(fallback_is_what_overridden_operators_compute_in);
    RUN(tf32_takes_the_low_bits_of_products_left_in_fp32); RUN(tf32_where_there_is_none); RUN(autotune_reaches_the_device);
    RUN(scaler_is_there_when_asked_for); RUN(every_number_of_the_scaler_does_what_it_says);
    RUN(clip_norm_bounds_the_step); RUN(accumulation_decides_when_amp_step_steps);
    RUN(a_new_cycle_is_as_if_the_old_one_had_not_begun); RUN(nan_action_reaches_optimizer_and_monitor);
    RUN(intervals_reach_the_monitor); RUN(debug_makes_the_log_detailed);
    RUN(debug_tells_each_decision_once); RUN(nan_action_decides_what_is_done); RUN(max_skips_decides_when_skips_are_trouble);
    RUN(intervals_decide_when_the_monitor_acts); RUN(memory_warning_is_a_share_of_the_device);
    RUN(max_retries_bounds_recoveries); RUN(batch_growth_interval_takes_halving_back);
    RUN(tensor_stats_interval_is_that_of_the_looks);
    RUN(switching_is_resuming); RUN(a_switch_of_dtype_empties_the_cast_cache); RUN(formats_differ); RUN(validation_in_fp32_leaves_no_trace);
    RUN(evaluation_is_in_the_trainings_precision); RUN(the_scalers_rule_changes_in_place);
    RUN(what_cannot_change_is_refused_and_nothing_changes); RUN(a_device_without_the_dtype_refuses_the_switch);
    RUN(a_cycle_must_be_whole_before_settings_change); RUN(levels_with_16_bit_weights_keep_their_dtype);
    RUN(fp16_without_a_scaler_is_said); RUN(example_files_train);
    return TEST_END();
}
