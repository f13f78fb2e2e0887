/* t_train.c - tests the parts of the example trainer: flags, schedules, JSON, safetensors, llm.c and IDX files, bigrams and
 * sampling.  examples.sh tests the whole program, and t_model.c its model. */
#define main train_gpt_main
#include "../examples/train_gpt.c"
#include "../examples/mnist.h"
#undef main
#include "golden.h"
#include "test.h"
#include "configs.h"
#include <fcntl.h>
#if !defined(_WIN32)
#  include <sys/resource.h>
#endif

#if defined(__has_feature)
#  if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#    define SANITIZED 1
#  endif
#elif defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#  define SANITIZED 1
#endif

static amp_context *open_fp32(void) {
    amp_context *amp = NULL;
    amp_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.dtype = AMP_F32;
    desc.threads = 1;
    CHECK_OK(amp_open(&amp, &desc));
    return amp;
}

static gpt_config odd_config(void) {
    gpt_config c;
    memset(&c, 0, sizeof c);
    c.vocab = 61; c.positions = 7; c.channels = 20; c.heads = 4; c.layers = 2; c.batch = 2; c.seq = 5;
    return c;
}

static const char *scratch(const char *name) {
    static char paths[4][256];
    static int next;
    char *path = paths[next++ & 3];
    snprintf(path, sizeof paths[0], "%s/ampt_train_%ld_%s", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp", (long)getpid(), name);
    return path;
}

static void write_file(const char *path, const void *data, size_t bytes) {
    CHECK_OK(amp_file_write_atomic(NULL, path, data, bytes));
}

/* 1 if both models have the same weights, bit for bit. */
static int same_weights(const gpt *a, const gpt *b) {
    for (int64_t i = 0; i < a->n_params; i++)
        if (memcmp(a->params[i].weight.data, b->params[i].weight.data, (size_t)amp_tensor_count(&a->params[i].weight) * 4) != 0) return 0;
    return 1;
}

/* ---- Flags */

TEST(defaults_are_legal) {
    settings set;
    memset(&set, 0, sizeof set);
    for (int i = 0; i < flag_count(); i++)
        if (flag_at(i)->type != FLAG_HEADING) CHECK_MSG(flag_parse(i, flag_at(i)->initial, &set) == AMP_OK, "%s", ex_text);
    CHECK(set.seq == 128 && set.training.amp.clip_norm == 1.0 && set.training.amp.dtype == AMP_DTYPE_DEFAULT && set.training.amp.log_interval == 10 && set.steps == -1 && set.min_lr == -1);
}

TEST(bad_values_are_refused_by_name) {
    static const char *const bad[] = {"x", "", "1x", "nan", "inf", "-5", "1e30", "99999999999999999999", "0x", " "};
    settings set;
    for (int i = 0; i < flag_count(); i++) {
        const flag_row *o = flag_at(i);
        char flag[64];
        snprintf(flag, sizeof flag, "--%s", o->name);
        if (o->type != FLAG_INTEGER && o->type != FLAG_NUMBER && o->type != FLAG_CHOICE && o->type != FLAG_SETTING) continue;
        for (size_t k = 0; k < sizeof bad / sizeof *bad; k++) {
            if (o->type == FLAG_SETTING && bad[k][0] >= '0' && bad[k][1] != 'x') continue;       /* may be legal */
            if (o->highest > 1e29 && strcmp(bad[k], "1e30") == 0) continue;
            if (o->highest > 1e20 && bad[k][0] == '9') continue;
            CHECK_MSG(flag_parse(i, bad[k], &set) != AMP_OK, "%s accepts \"%s\"", flag, bad[k]);
            CHECK(strstr(ex_text, flag) != NULL);
        }
    }
}

TEST(words_stand_for_numbers) {
    settings set;
    double value = 0;
    CHECK_OK(flag_parse(flag_index("min-scale"), "none", &set));
    CHECK(set.training.amp.scaler.min_scale == AMP_NO_FLOOR);
    CHECK_OK(flag_parse(flag_index("growth-interval"), "none", &set));
    CHECK_EQ(set.training.amp.scaler.growth_interval, AMP_NO_INTERVAL);
    CHECK_OK(flag_parse(flag_index("min-lr"), "auto", &set));
    CHECK(set.min_lr == -1);
    CHECK(!flag_word_value("preset=0 none=-1", "non", &value) && !flag_word_value("preset=0 none=-1", "set", &value));
    CHECK_EQ(ex_word_place("a bb c", "bb"), 1);
    CHECK_EQ(ex_word_place("a bb c", "b"), -1);
    CHECK_EQ(ex_word_place("a bb c", ""), -1);
}

TEST(unknown_flags_get_a_suggestion) {
    flag_unknown("--presicion");
    CHECK(strstr(ex_text, "--precision") != NULL);
    flag_unknown("--zzzzzzzzzzzz");
    CHECK(strstr(ex_text, "did you mean") == NULL);
}

TEST(paths_come_in_pairs) {
    static char program[] = "train_gpt", flag[] = "--tokenizer", a[] = "v.json", b[] = "m.txt", together[] = "--tokenizer=x,y", steps[] = "--steps";
    char *both[] = {program, flag, a, b}, *one[] = {program, flag, a}, *next[] = {program, flag, a, steps, b}, *equals[] = {program, together};
    int at = flag_index("tokenizer");
    CHECK_OK(flag_read(4, both));
    CHECK(strcmp(flag_given.text[at], "v.json,m.txt") == 0);
    CHECK_OK(flag_read(2, equals));
    CHECK(strcmp(flag_given.text[at], "x,y") == 0);
    CHECK(flag_read(3, one) != AMP_OK && strstr(ex_text, "--tokenizer") != NULL);
    CHECK(flag_read(5, next) != AMP_OK);
    memset(flag_given.text, 0, sizeof flag_given.text);
    memset(flag_given.on_command_line, 0, sizeof flag_given.on_command_line);
    ex_text[0] = 0;
}

/* ---- Schedules, bigrams, sampling */

/* The flags' schedule; a run shorter than its warmup ends within it. */
TEST(schedules) {
    run *r = (run *)calloc(1, sizeof *r);
    double lr = 0;
    r->set.schedule = "cosine"; r->set.lr = 1; r->set.min_lr = -1; r->set.warmup = 10; r->steps = 100;
    amp_schedule s = schedule_of(r);
    CHECK(amp_schedule_lr(&s, 0, &lr) == AMP_OK && lr == 0.1);
    CHECK(amp_schedule_lr(&s, 10, &lr) == AMP_OK && lr == 1);
    CHECK(amp_schedule_lr(&s, 55, &lr) == AMP_OK && fabs(lr - 0.55) < 1e-6);
    CHECK(amp_schedule_lr(&s, 100, &lr) == AMP_OK && lr == 0.1);
    r->steps = 5;
    s = schedule_of(r);
    CHECK(amp_schedule_lr(&s, 4, &lr) == AMP_OK && lr == 0.5);
    r->set.schedule = "constant"; r->set.lr = 0; r->steps = 100;
    s = schedule_of(r);
    CHECK(amp_schedule_lr(&s, 99, &lr) == AMP_OK && lr == 0);
    free(r);
}

/* Training pairs ab ab ac ba, text ab ca, of 4 tokens: by hand, p(b|a) = (2 + 2 * 3/8) / (3 + 2), and c was never
   followed: p(a|c) = p(a) = (1 + 1) / (4 + 4). */
TEST(bigrams_by_hand) {
    uint64_t train[] = {1, 1, 2, (uint64_t)1 << 32}, text[] = {1, (uint64_t)2 << 32};
    bigram_pairs counts, held;
    double entropy = 0;
    counts.key = train; counts.n = 4;
    held.key = text; held.n = 2;
    CHECK_OK(bigram_entropy(&counts, &held, 4, 0, &entropy));
    CHECK_MSG(fabs(entropy + (log(2.75 / 5) + log(0.25)) / 2) < 1e-12, "%.15g", entropy);
    CHECK_OK(bigram_entropy(&counts, &counts, 4, 1, &entropy));         /* 3 pairs after a: 2/3, 2/3, 1/3; after b: 1 */
    CHECK_MSG(fabs(entropy + (2 * log(2.0 / 3) + log(1.0 / 3)) / 4) < 1e-12, "%.15g", entropy);
}

TEST(sampling) {
    float logits[4] = {0, 2, 1, -1}, room[4];
    int64_t counts[4] = {0, 0, 0, 0};
    sampler s;
    s.temperature = 0; s.top_k = 0; s.seed = 0;
    CHECK_EQ(sample_token(&s, logits, room, 4, 0.999), 1);
    s.temperature = 1; s.top_k = 2;
    for (int i = 0; i < 1000; i++) counts[sample_token(&s, logits, room, 4, (i + 0.5) / 1000)]++;
    CHECK(counts[0] == 0 && counts[3] == 0);
    CHECK_EQ(counts[1], 731);               /* e / (e + 1) = 0.7311 */
    s.top_k = 0;
    memset(counts, 0, sizeof counts);
    for (int i = 0; i < 1000; i++) counts[sample_token(&s, logits, room, 4, (i + 0.5) / 1000)]++;
    CHECK(counts[0] > 0 && counts[3] > 0 && counts[1] > counts[2]);
    for (int i = 0; i < 4; i++) {                                       /* a model that computes NaN writes nothing */
        float kept = logits[i];
        int32_t token = 0;
        logits[i] = i % 2 == 0 ? NAN : INFINITY;
        CHECK_EQ(sample_next(&s, logits, room, 4, 0.5, &token), AMP_ERR_RANGE);
        CHECK(token == -1 && strstr(ex_error(), "NaN or infinite") != NULL);
        logits[i] = kept;
    }
}

/* ---- JSON */

TEST(json_values) {
    static const char text[] = " { \"a\\n\\u00e9\" : 12 , \"b\": [1, {\"n\": \"}]\"}, -3], \"n\" : \"x\\\"y\", \"m\": 7 }";
    char value[16];
    json j = json_open(text, sizeof text - 1);
    CHECK(json_find(j, "a\n\xc3\xa9", value, sizeof value) && strcmp(value, "12") == 0);
    CHECK(json_find(j, "n", value, sizeof value) && strcmp(value, "x\"y") == 0);
    CHECK(json_find(j, "m", value, sizeof value) && strcmp(value, "7") == 0);
    CHECK(!json_find(j, "z", value, sizeof value));
    CHECK(!json_find(j, "n", value, 3));
}

TEST(json_surrogates) {
    static const char text[] = "{\"a\": \"\\ud83d\\ude00\", \"b\": \"\\u20ac\"}";
    static const char *const bad[] = {"{\"a\":\"\\ud83d\"}", "{\"a\":\"\\ude00\"}", "{\"a\":\"\\ud83d\\u0041\"}", "{\"a\":\"\\ud83dx\"}", "{\"a\":\"\\ud83d\\"};
    char value[16];
    CHECK(json_find(json_open(text, sizeof text - 1), "a", value, sizeof value) && strcmp(value, "\xf0\x9f\x98\x80") == 0);
    CHECK(json_find(json_open(text, sizeof text - 1), "b", value, sizeof value) && strcmp(value, "\xe2\x82\xac") == 0);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) CHECK(!json_find(json_open(bad[i], strlen(bad[i])), "a", value, sizeof value));
}

/* What the metrics have of a text is read back as it was; bytes that are no UTF-8 become U+FFFD each. */
TEST(json_of_any_text) {
    static const char *const texts[][2] = {
        {"caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80 \"q\" \\ \t\x7f", "caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80 \"q\" \\ \t\x7f"},
        {"\xe9 \xc3", "\xef\xbf\xbd \xef\xbf\xbd"}, {"\xed\xa0\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"}, {"", ""},
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        char line[256] = "", value[64];
        const char *path = scratch("line.json");
        size_t bytes;
        FILE *file = fopen(path, "w+b");
        CHECK(file != NULL);
        if (file == NULL) return;
        metrics_begin(file, "text");
        metrics_text(file, "a", texts[i][0]);
        metrics_end(file);
        rewind(file);
        bytes = fread(line, 1, sizeof line - 1, file);
        fclose(file);
        remove(path);
        CHECK_MSG(json_find(json_open(line, bytes), "a", value, sizeof value) && strcmp(value, texts[i][1]) == 0, "%s", line);
    }
}

TEST(json_errors_do_not_run_away) {
    static const char *const bad[] = {"", "{", "{\"", "{\"a", "{\"a\"", "{\"a\":", "{\"a\":[", "{\"a\":1", "{a:1}", "[", "{\"\\u12\":1}", "{\"\\q\":1}", "]"};
    char value[16];
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) CHECK(!json_find(json_open(bad[i], strlen(bad[i])), "b", value, sizeof value));
}

/* Operators of GPT-2 by hand: 2 layers of 12 C^2 weights, C V output weights, T (T + 1) / 2 pairs of positions. */
TEST(flops_by_hand) {
    gpt g;
    memset(&g, 0, sizeof g);
    g.config = odd_config();
    CHECK(gpt_flops(&g, PROFILE_LINEAR) == 2.0 * 10 * 2 * 12 * 20 * 20);
    CHECK(gpt_flops(&g, PROFILE_HEAD) == 2.0 * 10 * 20 * 61);
    CHECK(gpt_flops(&g, PROFILE_ATTENTION) == 2.0 * 2 * (2 * 15) * 20 * 2);
    CHECK(gpt_flops(&g, PROFILE_LOADER) == 0);
}

/* Bytes of the same model with 16-bit activations, an fp32 stream, and products in bf16. */
TEST(traffic_by_hand) {
    amp_parameter_bytes bytes = {.parameters = 1000, .weight = 2, .gradient = 2, .master = 2, .moments = 8};
    amp_param wte;
    gpt g;
    memset(&g, 0, sizeof g);
    memset(&wte, 0, sizeof wte);
    wte.weight.dtype = wte.grad.dtype = AMP_F32;
    g.config = odd_config();
    g.config.activations = AMP_BF16;
    g.params = &wte;
    double n = 10 * 20, w = 12 * 20 * 20;
    CHECK(gpt_bytes(&g, PROFILE_EMBEDDING, 0, AMP_BF16).bytes == n * (4 + 4));
    CHECK(gpt_bytes(&g, PROFILE_NORM, 0, AMP_BF16).bytes == n * (5 * (4 + 2) + 4 * (2 + 4)));
    CHECK(gpt_bytes(&g, PROFILE_NORM, 1, AMP_BF16).bytes == n * (5 * (2 + 2 * 4) + 4 * (4 + 2)));
    CHECK(gpt_bytes(&g, PROFILE_LINEAR, 0, AMP_BF16).bytes == 2 * (n * 2 * (2 + 4 + 12 + 2) + w * 2));
    CHECK(gpt_bytes(&g, PROFILE_LINEAR, 1, AMP_BF16).bytes == 2 * (n * (2 * (4 + 5 + 16) + 2 * 2) + w * (2 + 4)));
    CHECK(gpt_bytes(&g, PROFILE_ATTENTION, 1, AMP_BF16).bytes == 2 * n * 2 * 8);
    CHECK(gpt_bytes(&g, PROFILE_DROPOUT, 0, AMP_BF16).bytes == 0);
    g.config.dropout = 0.1f;
    CHECK(gpt_bytes(&g, PROFILE_DROPOUT, 1, AMP_BF16).bytes == 5 * 2 * n * 2);
    CHECK(gpt_bytes(&g, PROFILE_HEAD, 0, AMP_BF16).bytes == n * 2 + 61 * 20 * 2 + 10 * 61 * 2);
    CHECK(gpt_bytes(&g, PROFILE_LOSS, 0, AMP_BF16).bytes == 2 * 10 * 61 * 2 && gpt_bytes(&g, PROFILE_LOSS, 1, AMP_BF16).calls == 0);
    CHECK(profile_optimizer(&bytes).bytes == 1000 * (2 + 2 * (2 + 2 + 8)));
}

/* ---- Model files */

TEST(safetensors_round_trip) {
    amp_context *amp = open_fp32();
    gpt_config c = odd_config();
    const char *path = scratch("model.safetensors");
    gpt a, b;
    gpt_file file;
    CHECK_OK(gpt_create(&a, amp, &c));
    CHECK_OK(gpt_init(&a, 3));
    CHECK_OK(gpt_save_safetensors(&a, path, 17));
    CHECK_OK(gpt_file_open(&file, path));
    CHECK(file.config.vocab == 61 && file.config.positions == 7 && file.config.channels == 20 && file.config.layers == 2 && file.config.heads == 4);
    amp_param_forget(amp, a.params, a.n_params);        /* names are unique in a context */
    CHECK_OK(gpt_create(&b, amp, &c));
    CHECK_OK(gpt_file_load(&file, &b));
    CHECK(same_weights(&a, &b));
    const st_tensor *t = st_find(&file.weights.tensors, "transformer.h.1.attn.c_attn.weight");
    CHECK(t != NULL && t->ndim == 2 && t->shape[0] == 20 && t->shape[1] == 60);
    CHECK((t->data - (const unsigned char *)file.weights.parts[0].data) % 4 == 0);
    float first, transposed = ((const float *)a.params[2 + GPT_PARTS + 2].weight.data)[20];     /* [out 1, in 0] */
    memcpy(&first, t->data + 4, 4);                                                             /* [in 0, out 1] */
    CHECK(first == transposed);
    gpt_file_close(&file);
    gpt_destroy(&b);
    gpt_destroy(&a);
    remove(path);
    amp_close(amp);
}

/* A safetensors file of one tensor "t". */
static size_t one_tensor(unsigned char *file, const char *entry, const void *data, size_t bytes) {
    char header[256];
    size_t n = (size_t)snprintf(header, sizeof header, "{\"t\":%s}", entry);
    memset(file, 0, 8);
    file[0] = (unsigned char)n;
    memcpy(file + 8, header, n);
    memcpy(file + 8 + n, data, bytes);
    return 8 + n + bytes;
}

TEST(safetensors_dtypes) {
    static const unsigned char halves[] = {0x00, 0x3c, 0x00, 0xc0}, brains[] = {0x80, 0x3f, 0x00, 0xc0};
    static const char *const names[] = {"F16", "BF16"};
    for (int k = 0; k < 2; k++) {
        unsigned char bytes[512];
        char entry[128];
        float values[2] = {0, 0};
        st_file file;
        snprintf(entry, sizeof entry, "{\"dtype\":\"%s\",\"shape\":[1,2],\"data_offsets\":[0,4]}", names[k]);
        CHECK_OK(st_open(&file, bytes, one_tensor(bytes, entry, k == 0 ? halves : brains, 4)));
        CHECK_OK(st_floats(&file.tensors[0], values));
        CHECK(values[0] == 1 && values[1] == -2);
        st_close(&file);
    }
}

TEST(safetensors_entries_that_lie) {
    static const char *const bad[] = {
        "{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}", "{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}",
        "{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}", "{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}",
        "{\"dtype\":\"F32\",\"shape\":[4611686018427387904,4],\"data_offsets\":[0,4]}", "{\"dtype\":\"X\",\"shape\":[1],\"data_offsets\":[0,4]}",
        "{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,4]}", "{\"dtype\":\"F32\",\"data_offsets\":[0,4]}",
        "{\"dtype\":\"F32\",\"shape\":[1]}", "{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}", "{}", "[]", "3", "\"x\"",
        "{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},\"t\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}",
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        unsigned char bytes[512];
        st_file file;
        CHECK_MSG(st_open(&file, bytes, one_tensor(bytes, bad[i], "\0\0\0\0", 4)) != AMP_OK, "accepted: %s", bad[i]);
    }
}

/* Every prefix, and random changes of the header: an error, or tensors that lie within the file. */
TEST(safetensors_fuzz) {
    amp_context *amp = open_fp32();
    gpt_config c = odd_config();
    st_writer w;
    gpt g;
    memset(&w, 0, sizeof w);
    CHECK_OK(gpt_create(&g, amp, &c));
    CHECK_OK(gpt_init(&g, 1));
    CHECK_OK(gpt_write(&g, 1, &w));
    size_t bytes = w.bytes;
    unsigned char *whole = w.file, *copy = (unsigned char *)malloc(bytes);
    st_file file;
    int accepted = 0;
    memcpy((char *)strstr((const char *)whole + 8, "crc32c"), "others", 6);     /* as other programs' files, without a checksum */
    for (size_t n = 0; n < bytes; n += n < 8 + w.header.used ? 1 : 997) CHECK(st_open(&file, whole, n) != AMP_OK);
    for (uint64_t round = 0; round < 20000; round++) {
        static const char pieces[] = "{}[]\",:0123456789\\u\xff";
        uint32_t words[4];
        amp_philox(1, 0, round, words);
        memcpy(copy, whole, bytes);
        for (uint32_t k = 0; k <= words[0] % 4; k++) {
            amp_philox(2, k, round, words);
            copy[words[1] % (8 + w.header.used)] = (unsigned char)pieces[words[2] % (sizeof pieces - 1)];
        }
        if (st_open(&file, copy, bytes) != AMP_OK) continue;
        accepted++;
        for (int64_t i = 0; i < file.n; i++) {
            const st_tensor *t = &file.tensors[i];
            CHECK(t->data >= copy && t->count >= 0 && t->data + t->count <= copy + bytes);
        }
        st_close(&file);
    }
    CHECK(accepted > 0 && accepted < 20000);
    st_write_close(&w); free(copy);
    gpt_destroy(&g);
    amp_close(amp);
}

static void put_i32(unsigned char *p, int64_t value) {
    for (int i = 0; i < 4; i++) p[i] = (unsigned char)((uint64_t)value >> (8 * i));
}

/* An llm.c file of g's weights in its own order, written apart from the reader.  Returns its size. */
static size_t llmc_file(const gpt *g, int version, int64_t padded, unsigned char *out) {
    static const int order[GPT_PARTS] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
    const gpt_config *c = &g->config;
    const int64_t header[] = {20240326, version, c->positions, c->vocab, c->layers, c->heads, c->channels, padded};
    unsigned char *p = out + 1024;
    memset(out, 0, 1024);
    for (int i = 0; i < 8; i++) put_i32(out + 4 * i, header[i]);
    for (int64_t k = -2; k < GPT_PARTS + 2; k++) {
        for (int64_t layer = 0; layer < (k < 0 || k >= GPT_PARTS ? 1 : c->layers); layer++) {
            int64_t i = k < 0 ? k + 2 : k >= GPT_PARTS ? g->n_params - 2 + k - GPT_PARTS : 2 + GPT_PARTS * layer + order[k];
            int64_t n = amp_tensor_count(&g->params[i].weight), rest = i == 0 ? (padded - c->vocab) * c->channels : 0;
            for (int64_t e = 0; e < n + rest; e++, p += version == 3 ? 4 : 2) {
                float x = e < n ? ((const float *)g->params[i].weight.data)[e] : 99.0f;
                uint16_t low = amp_bf16_from_f32(x, 0);
                if (version == 3) memcpy(p, &x, 4);
                else memcpy(p, &low, 2);
            }
        }
    }
    return (size_t)(p - out);
}

TEST(llmc_files) {
    amp_context *amp = open_fp32();
    gpt_config c = odd_config();
    gpt a, b;
    CHECK_OK(gpt_create(&a, amp, &c));
    CHECK_OK(gpt_init(&a, 5));
    for (int64_t i = 0; i < a.n_params; i++) {          /* distinct values everywhere, exact in bf16 */
        float *w = (float *)a.params[i].weight.data;
        for (int64_t e = 0; e < amp_tensor_count(&a.params[i].weight); e++) w[e] = (float)((i * 131 + e * 7) % 251) / 256;
    }
    amp_param_forget(amp, a.params, a.n_params);
    CHECK_OK(gpt_create(&b, amp, &c));
    unsigned char *bytes = (unsigned char *)malloc((size_t)a.own.count * 4 + 8192);
    const char *path = scratch("llmc.bin");
    gpt_file file;
    for (int version = 3; version <= 5; version += 2) {
        size_t n = llmc_file(&a, version, 64, bytes);
        write_file(path, bytes, n);
        CHECK_OK(gpt_init(&b, 6));
        CHECK_OK(gpt_file_open(&file, path));
        CHECK(file.config.heads == 4 && file.config.vocab == 61);
        CHECK_OK(gpt_file_load(&file, &b));
        CHECK(same_weights(&a, &b));
        gpt_file_close(&file);
        write_file(path, bytes, n - 1);
        CHECK_ERR(gpt_file_open(&file, path), AMP_ERR_TRUNCATED);
        write_file(path, bytes, 1000);
        CHECK_ERR(gpt_file_open(&file, path), AMP_ERR_TRUNCATED);
        for (int field = 1; field < 8; field++) {       /* version, dimensions and padding that make no sense */
            llmc_file(&a, version, 64, bytes);
            put_i32(bytes + 4 * field, field == 7 ? 60 : -1);
            write_file(path, bytes, n);
            CHECK(gpt_file_open(&file, path) != AMP_OK);
            put_i32(bytes + 4 * field, 2147483647);
            write_file(path, bytes, n);
            if (field != 5) CHECK(gpt_file_open(&file, path) != AMP_OK);
        }
    }
    remove(path);
    free(bytes);
    gpt_destroy(&b);
    gpt_destroy(&a);
    amp_close(amp);
}

/* ---- config.json */

static const char gpt_description[] =
    "{\n  \"model_type\": \"gpt2\",\n  \"n_head\": 4, \"n_layer\": 2, \"n_embd\": 20, \"n_positions\": 7, \"vocab_size\": 61,\n"
    "  \"n_inner\": null, \"resid_pdrop\": 0.1, \"attn_pdrop\": 0.25, \"activation_function\": \"relu\", \"layer_norm_epsilon\": 2E-3,\n"
    "  \"scale_attn_weights\": true, \"my_key\": {\"a\": [1, 2.50, \"\\u00e9\"]}, \"dtype\": \"float16\", \"task\": \"x\"\n}\n";

/* The description with `member` in it: in place of the same key, or behind all others. */
static void describe_gpt(const char *member) {
    json_buffer b = {NULL, 0, 0, 0};
    char key[64];
    const char *at, *next;
    snprintf(key, sizeof key, "%.*s", (int)strcspn(member, ":") + 1, member);
    at = strstr(gpt_description, key);
    next = at != NULL ? strpbrk(at, at[strlen(key) + 1] == '{' ? "}" : ",\n") : NULL;
    if (at != NULL) {
        json_put(&b, gpt_description, (size_t)(at - gpt_description));
        json_put(&b, member, strlen(member));
        json_put(&b, next, strlen(next));
    } else {
        json_put(&b, gpt_description, sizeof gpt_description - 4);
        json_add(&b, ", %s}", member);
    }
    ampt_put("config.json", b.text, b.used);
    free(b.text);
}

static void write_gpt(amp_context *amp) {
    gpt_config c = odd_config();
    gpt g;
    CHECK_OK(gpt_create(&g, amp, &c));
    CHECK_OK(gpt_init(&g, 3));
    CHECK_OK(gpt_save_safetensors(&g, ampt_in_folder("model.safetensors"), 0));
    gpt_destroy(&g);
    ampt_forget_origin();
}

/* Writes the tensors first, first + step, ... of a file as another file. */
static void write_shard(const st_file *from, int64_t first, int64_t step, const char *path) {
    st_writer w;
    memset(&w, 0, sizeof w);
    for (int64_t i = first; i < from->n; i += step) st_write_tensor(&w, from->tensors[i].name, from->tensors[i].ndim, from->tensors[i].shape);
    CHECK_OK(st_write_begin(&w));
    for (int64_t i = first; i < from->n; i += step) {
        float *values = (float *)malloc((size_t)from->tensors[i].count * sizeof *values + 1);
        CHECK_OK(st_floats(&from->tensors[i], values));
        st_write_floats(&w, values, from->tensors[i].count);
        free(values);
    }
    CHECK_OK(st_write_file(&w, path));
    st_write_close(&w);
}

/* The folder's index, of the tensors of both shards. */
static void write_index(const st_file *from, const char *second, const char *extra) {
    json_buffer b = {NULL, 0, 0, 0};
    json_add(&b, "{\"metadata\": {\"total_size\": 1}, \"weight_map\": {");
    for (int64_t i = 0; i < from->n; i++)
        json_add(&b, "%s\"%s\": \"%s\"", i > 0 ? ", " : "", from->tensors[i].name, i % 2 == 0 ? "shard-1.safetensors" : second);
    json_add(&b, "%s}}", extra);
    CHECK_OK(amp_file_write_atomic(NULL, ampt_in_folder("model.safetensors.index.json"), b.text, b.used));
    free(b.text);
}

/* A folder whose weights are in two files loads as the file of both; an index that is wrong is refused by what it says. */
TEST(shards) {
    static const struct { const char *second, *extra, *why; } bad[] = {
        {"none.safetensors", "", "none.safetensors"}, {"../shard-2.safetensors", "", "must be a name without a folder"},
        {"shard-1.safetensors", "", "is in none of the files"}, {"shard-2.safetensors", ", \"odd\": \"shard-1.safetensors\"", "odd is in none of the files"},
        {"shard-2.safetensors", ", 5", "there is no \"weight_map\""}, {"shard-1.safetensors", ", \"x\": \"model2.safetensors\"", "is in two files"}};
    static const char *const made[] = {"model2.safetensors", "shard-1.safetensors", "shard-2.safetensors", "model.safetensors.index.json", "config.json"};
    amp_context *amp = open_fp32();
    gpt_config c = odd_config();
    gpt whole, parts;
    gpt_file file;
    model_weights all;
    CHECK_OK(gpt_create(&whole, amp, &c));
    CHECK_OK(gpt_init(&whole, 5));
    CHECK_OK(gpt_save_safetensors(&whole, ampt_in_folder("model2.safetensors"), 0));
    CHECK_OK(gpt_save_config(&whole, ampt_in_folder("config.json")));
    CHECK_OK(weights_open(&all, ampt_in_folder("model2.safetensors")));
    (void)remove(ampt_in_folder("model.safetensors"));
    write_shard(&all.tensors, 0, 2, ampt_in_folder("shard-1.safetensors"));
    write_shard(&all.tensors, 1, 2, ampt_in_folder("shard-2.safetensors"));
    write_index(&all.tensors, "shard-2.safetensors", "");
    CHECK_OK(gpt_file_open(&file, ampt_in_folder("")));
    CHECK_EQ(file.weights.n_parts, 2);
    amp_param_forget(amp, whole.params, whole.n_params);
    CHECK_OK(gpt_create(&parts, amp, &c));
    CHECK_OK(gpt_file_load(&file, &parts));
    CHECK(same_weights(&whole, &parts));
    gpt_file_close(&file);
    ex_text[0] = 0;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        write_index(&all.tensors, bad[i].second, bad[i].extra);
        CHECK_MSG(gpt_file_open(&file, ampt_in_folder("")) != AMP_OK, "accepted: %s", bad[i].why);
        CHECK_MSG(strstr(ex_error(), bad[i].why) != NULL, "%s; expected: %s", ex_error(), bad[i].why);
        ex_text[0] = 0;
    }
    CHECK(gpt_file_open(&file, ampt_in_folder("missing.safetensors")) == AMP_ERR_OPEN && strstr(ex_error(), "missing.safetensors") != NULL);
    ex_text[0] = 0;
    for (size_t i = 0; i < 5; i++) remove(ampt_in_folder(made[i]));
    weights_close(&all);
    gpt_destroy(&parts);
    gpt_destroy(&whole);
    amp_close(amp);
}

static void refused_gpt(const char *why) {
    gpt_file file;
    CHECK_MSG(gpt_file_open(&file, ampt_in_folder("model.safetensors")) != AMP_OK, "accepted, must be refused: %s", why);
    CHECK_MSG(strstr(ex_text, why) != NULL && strstr(ex_text, "config.json") != NULL, "%s; expected: %s", ex_text, why);
    CHECK(file.weights.parts == NULL && file.described.text == NULL);
}

/* What is known is read, what is not is kept; the weights are fp32 from now on. */
/* Tensors that would change the logits are refused, masks and their like are not mentioned, those of other heads are. */
TEST(tensors_without_a_place) {
    static const struct { const char *more, *refused, *note; } cases[] = {
        {"transformer.h.0.attn.bias transformer.h.1.attn.masked_bias", NULL, ""},
        {"h.1.attn.bias score.weight", NULL, "does not mention score.weight"},
        {"a b c d e", NULL, "does not mention a, b, c and 2 more of the weights"},
        {"lm_head.bias", "lm_head.bias", NULL}, {"transformer.h.0.crossattention.c_attn.bias", "transformer.h.0.crossattention.c_attn.bias", NULL},
        {"h.0.attn.q_norm.weight", "h.0.attn.q_norm.weight", NULL}};
    amp_context *amp = open_fp32();
    gpt_config c = odd_config();
    gpt g;
    gpt_file file;
    CHECK_OK(gpt_create(&g, amp, &c));
    CHECK_OK(gpt_init(&g, 5));
    CHECK_OK(gpt_save_safetensors(&g, ampt_in_folder("model2.safetensors"), 0));
    CHECK_OK(gpt_save_config(&g, ampt_in_folder("config.json")));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ampt_add_tensors(ampt_in_folder("model2.safetensors"), cases[i].more);
        CHECK_OK(gpt_file_open(&file, ampt_in_folder("")));
        if (cases[i].refused != NULL) {
            CHECK_ERR(gpt_file_load(&file, &g), AMP_ERR_UNSUPPORTED);
            CHECK_MSG(strstr(ex_error(), cases[i].refused) != NULL, "%s", ex_error());
        } else {
            CHECK_OK(gpt_file_load(&file, &g));
            CHECK_MSG(strcmp(file.described.note, cases[i].note) == 0, "%s", file.described.note);
        }
        gpt_file_close(&file);
    }
    gpt_destroy(&g);
    remove(ampt_in_folder("model2.safetensors"));
    ampt_folder_remove();
    amp_close(amp);
    ex_text[0] = 0;
}

/* The same of a Llama, as generate.c's and llama.c's kinds of loading see it. */
TEST(tensors_without_a_place_in_a_llama) {
    static const char *const refused[] = {"model.layers.0.self_attn.q_proj.bias", "model.layers.1.self_attn.q_norm.weight", "lm_head.bias"};
    llama_config c = {32, 16, 16, 24, 2, 2, 1, 10000, 1e-5};
    amp_context *amp = open_fp32();
    char note[400] = "";
    gpt_file file;
    llama m, again;
    gpt g;
    CHECK_OK(llama_create(&m, amp, c, 1));
    CHECK_OK(llama_save(&m, ampt_in_folder("model2.safetensors"), ampt_in_folder("config.json")));
    llama_free(&m);
    for (size_t i = 0; i < 3; i++) {
        ampt_add_tensors(ampt_in_folder("model2.safetensors"), refused[i]);
        CHECK_ERR(llama_load(&again, amp, ampt_in_folder(""), note), AMP_ERR_UNSUPPORTED);
        CHECK_MSG(strstr(ex_error(), refused[i]) != NULL, "%s", ex_error());
    }
    CHECK_OK(gpt_file_open(&file, ampt_in_folder("")));
    file.config.batch = file.config.seq = 1;
    CHECK_OK(gpt_create(&g, amp, &file.config));
    CHECK_ERR(gpt_file_load(&file, &g), AMP_ERR_UNSUPPORTED);
    gpt_destroy(&g);
    gpt_file_close(&file);
    ampt_add_tensors(ampt_in_folder("model2.safetensors"), "model.layers.0.self_attn.rotary_emb.inv_freq score.weight");
    CHECK_OK(llama_load(&again, amp, ampt_in_folder(""), note));
    CHECK_MSG(strcmp(note, "does not mention score.weight") == 0, "%s", note);
    llama_free(&again);
    remove(ampt_in_folder("model2.safetensors"));
    ampt_folder_remove();
    amp_close(amp);
    ex_text[0] = 0;
}

/* What transformers 4 and 5 say of the rotation and of heads; another rotation is refused by the key that asks for it. */
TEST(llama_configs) {
    static const struct { const char *keys, *refused; double base; } cases[] = {
        {"\"num_key_value_heads\": null, \"head_dim\": null", NULL, 10000},
        {"\"rope_theta\": 500000.0, \"rope_scaling\": null", NULL, 500000},
        {"\"rope_parameters\": {\"rope_theta\": 2e4, \"rope_type\": \"default\"}", NULL, 20000},
        {"\"rope_parameters\": null", NULL, 10000},
        {"\"rope_parameters\": {\"rope_theta\": 2e4, \"partial_rotary_factor\": 0.5}", "partial_rotary_factor = 0.5 is not supported", 0},
        {"\"rope_parameters\": {\"type\": \"linear\", \"factor\": 2.0}", "type = linear is not supported", 0},
        {"\"rope_parameters\": {\"rope_type\": \"llama3\"}", "rope_type = llama3 is not supported", 0},
        {"\"rope_parameters\": {\"rope_theta\": 1e999}", "rope_theta must be a number", 0},
        {"\"rope_parameters\": [1]", "must be an object", 0},
        {"\"rope_theta\": 1e4, \"rope_parameters\": {\"rope_theta\": 2e4}", "rope_parameters has another, 2e4", 0},
        {"\"num_attention_heads\": null", "appears twice", 0}, {"\"hidden_act\": \"gelu\"", "hidden_act", 0}};
    llama_config c = {32, 16, 16, 24, 1, 2, 2, 10000, 1e-5};
    amp_context *amp = open_fp32();
    llama m;
    CHECK_OK(llama_create(&m, amp, c, 1));
    CHECK_OK(llama_save(&m, ampt_in_folder("model.safetensors"), NULL));
    llama_free(&m);
    ampt_forget_origin();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        json_buffer b = {NULL, 0, 0, 0};
        amp_result result;
        json_add(&b, "{\"model_type\": \"llama\", \"vocab_size\": 32, \"max_position_embeddings\": 16, \"hidden_size\": 16, \"intermediate_size\": 24, "
                     "\"num_hidden_layers\": 1, \"num_attention_heads\": 2, \"rms_norm_eps\": 1e-5, %s}", cases[i].keys);
        ampt_put("config.json", b.text, b.used);
        free(b.text);
        result = llama_load(&m, amp, ampt_in_folder(""), NULL);
        if (cases[i].refused != NULL) {
            CHECK_MSG(result != AMP_OK && strstr(ex_error(), cases[i].refused) != NULL, "%s: %s", cases[i].keys, ex_error());
            continue;
        }
        CHECK_MSG(result == AMP_OK, "%s: %s", cases[i].keys, ex_error());
        CHECK(m.config.base >= cases[i].base && m.config.base <= cases[i].base && m.config.kv_heads == 2);
        llama_free(&m);
    }
    ampt_folder_remove();
    amp_close(amp);
    ex_text[0] = 0;
}

TEST(gpt_configs_are_kept) {
    amp_context *amp = open_fp32();
    gpt_file file;
    gpt g;
    void *text;
    size_t bytes;
    json expected = json_open(gpt_description, sizeof gpt_description - 1);
    char other[2048], *at;
    write_gpt(amp);
    ampt_put("config.json", gpt_description, sizeof gpt_description - 1);
    CHECK_OK(gpt_file_open(&file, ampt_in_folder("model.safetensors")));
    CHECK(file.config.act == AMP_ACT_RELU && fabs((double)file.config.eps - 2e-3) < 1e-9 && file.config.heads == 4 && !file.config.unscaled);
    CHECK_MSG(strcmp(file.described.note, "unknown keys, kept: my_key, task; --dropout sets dropout, not resid_pdrop 0.1, attn_pdrop 0.25") == 0,
              "%s", file.described.note);
    file.config.batch = 1; file.config.seq = 5;
    CHECK_OK(gpt_create(&g, amp, &file.config));
    CHECK_OK(gpt_file_load(&file, &g));
    gpt_file_close(&file);
    CHECK_OK(gpt_save_config(&g, ampt_in_folder("config.json")));
    CHECK_OK(amp_file_read_all(NULL, ampt_in_folder("config.json"), &text, &bytes));
    snprintf(other, sizeof other, "%s", gpt_description);
    at = strstr(other, "float16");
    memcpy(at, "float32", 7);
    expected = json_open(other, strlen(other));
    CHECK(ampt_has_members(expected, (char *)text, bytes));
    CHECK(strstr((char *)text, "\"scale_attn_by_inverse_layer_idx\": false") != NULL);
    amp_file_free(NULL, text, bytes);
    file.config.act = AMP_ACT_SILU;
    gpt_destroy(&g);
    file.config = odd_config();                             /* a model of another kind takes none of it */
    CHECK_OK(gpt_create(&g, amp, &file.config));
    CHECK_OK(gpt_file_open(&file, ampt_in_folder("model.safetensors")));
    CHECK_ERR(gpt_file_load(&file, &g), AMP_ERR_MISMATCH);
    gpt_file_close(&file);
    gpt_destroy(&g);
    ampt_folder_remove();
    amp_close(amp);
    ex_text[0] = 0;
}

TEST(gpt_configs_are_refused_by_key_and_value) {
    static const struct { const char *member, *why; } bad[] = {
        {"\"activation_function\": \"quick_gelu\"", "activation_function = \"quick_gelu\": must be one of gelu_new, gelu, relu, silu, tanh"},
        {"\"activation_function\": \"gelu_10\"", "activation_function = \"gelu_10\""},
        {"\"activation_function\": \"linear\"", "activation_function = \"linear\""},
        {"\"activation_function\": null", "activation_function = null: must be a string"},
        {"\"activation_function\": 3", "activation_function = 3: must be a string"},
        {"\"layer_norm_epsilon\": 0", "layer_norm_epsilon = 0: must be a number from 1e-37"},
        {"\"layer_norm_epsilon\": -1e-5", "layer_norm_epsilon = -1e-5"},
        {"\"layer_norm_epsilon\": 1e999", "layer_norm_epsilon = 1e999"},
        {"\"layer_norm_epsilon\": \"1e-5\"", "layer_norm_epsilon = \"1e-5\": must be a number"},
        {"\"layer_norm_epsilon\": true", "layer_norm_epsilon = true: must be a number"},
        {"\"scale_attn_weights\": 1", "scale_attn_weights = 1: must be true or false"},
        {"\"scale_attn_weights\": \"false\"", "scale_attn_weights = \"false\": must be true or false"},
        {"\"scale_attn_by_inverse_layer_idx\": null", "scale_attn_by_inverse_layer_idx = null: must be true or false"},
        {"\"n_head\": 3", "n_head = 3: 3 heads do not divide 20 channels"},
        {"\"n_head\": 0", "n_head = 0: must be a whole number from 1"},
        {"\"n_head\": -4", "n_head = -4"},
        {"\"n_head\": 4.0", "n_head = 4.0: must be a whole number"},
        {"\"n_head\": \"4\"", "n_head = \"4\": must be a whole number"},
        {"\"n_head\": null", "n_head = null"},
        {"\"n_head\": 99999999999999999999999", "n_head = 99999999999999999999999"},
        {"\"n_head\": 4294967300", "n_head = 4294967300"},
        {"\"num_attention_heads\": 5", "num_attention_heads = 5: n_head is 4"},
        {"\"n_layer\": 3", "n_layer = 3: the weights have 2"},
        {"\"num_hidden_layers\": 1", "num_hidden_layers = 1: the weights have 2"},
        {"\"vocab_size\": 62", "vocab_size = 62: the weights have 61"},
        {"\"n_positions\": 8", "n_positions = 8"},
        {"\"n_embd\": 24", "n_embd = 24"},
        {"\"n_inner\": 40", "n_inner = 40: the weights have 80"},
        {"\"resid_pdrop\": 2", "resid_pdrop = 2: must be a number from 0 to 1"},
        {"\"model_type\": \"gpt_neo\"", "model_type = \"gpt_neo\": must be gpt2"},
        {"\"add_cross_attention\": true", "add_cross_attention = true: this kind of model is not supported"},
        {"\"is_encoder_decoder\": true", "is_encoder_decoder = true"},
        {"\"tie_word_embeddings\": false", "tie_word_embeddings = false"},
        {"\"quantization_config\": {\"bits\": 8}", "quantization_config = {\"bits\": 8}"},
        {"\"auto_map\": {\"AutoModel\": \"own.Model\"}", "auto_map = "},
        {"\"pruned_heads\": {\"0\": [1]}", "pruned_heads = "},
        {"\"aa\": 1, \"n_ctx\": 7, \"aa\": 2", "aa = 1: appears twice, the second time as 2"},
        {"\"my_other\": NaN", "line 5: not a JSON object"},
        {"\"my_other\": 01", "not a JSON object"},
        {"\"my_other\": [1, 2", "not a JSON object"},
        {"\"my_other\": tru", "not a JSON object"},
        {"\"my_other\": \"\n\"", "not a JSON object"},
        {"my_other: 1", "not a JSON object"},
        {"\"my_other\" 1", "not a JSON object"},
        {"\"my_other\": 1,", "not a JSON object"},
    };
    amp_context *amp = open_fp32();
    json_buffer b = {NULL, 0, 0, 0};
    write_gpt(amp);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        describe_gpt(bad[i].member);
        refused_gpt(bad[i].why);
    }
    describe_gpt("\"num_attention_heads\": 4, \"n_ctx\": 7, \"pruned_heads\": {}, \"add_cross_attention\": false, \"n_inner \": 80");
    gpt_file file;
    CHECK_OK(gpt_file_open(&file, ampt_in_folder("model.safetensors")));
    gpt_file_close(&file);
    for (size_t n = 0; n < sizeof gpt_description - 3; n++) {       /* every prefix */
        ampt_put("config.json", gpt_description, n);
        refused_gpt("not a JSON object");
    }
    json_put(&b, gpt_description, sizeof gpt_description - 1);
    json_add(&b, "{}");
    ampt_put("config.json", b.text, b.used);
    refused_gpt("line 7: not a JSON object");
    b.used = 0;
    for (int i = 0; i < 1001; i++) json_add(&b, "%s\"k%d\": 0", i > 0 ? ", " : "{", i);
    json_add(&b, "}");
    ampt_put("config.json", b.text, b.used);
    refused_gpt("more than 1000 keys");
    b.used = 0;
    for (int i = 0; i < 100000; i++) json_put(&b, "{\"a\":", 5);      /* deeper than any stack */
    ampt_put("config.json", b.text, b.used);
    refused_gpt("not a JSON object");
    remove(ampt_in_folder("config.json"));
    refused_gpt("no config.json beside it");
    CHECK(mkdir(ampt_in_folder("config.json"), 0777) == 0);
    CHECK(gpt_file_open(&file, ampt_in_folder("model.safetensors")) != AMP_OK);
    CHECK_MSG(strstr(ex_error(), "config.json") != NULL, "%s", ex_error());
    CHECK(rmdir(ampt_in_folder("config.json")) == 0);
    free(b.text);
    ampt_folder_remove();
    amp_close(amp);
    ex_text[0] = 0;
}

/* A file of ours beside a config.json that says something else is of two models, unless it has another name. */
TEST(two_descriptions) {
    amp_context *amp = open_fp32();
    gpt_config c = odd_config();
    gpt_file file;
    gpt g;
    CHECK_OK(gpt_create(&g, amp, &c));
    CHECK_OK(gpt_init(&g, 3));
    CHECK_OK(gpt_save_safetensors(&g, ampt_in_folder("model.safetensors"), 0));
    CHECK_OK(gpt_save_safetensors(&g, ampt_in_folder("other.safetensors"), 0));
    describe_gpt("\"n_ctx\": 7");
    refused_gpt("activation_function = \"relu\"");
    refused_gpt("model.safetensors was saved with activation_function = gelu_new");
    CHECK_OK(gpt_file_open(&file, ampt_in_folder("other.safetensors")));
    CHECK(file.config.act == AMP_ACT_GELU);
    gpt_file_close(&file);
    CHECK_OK(gpt_save_config(&g, ampt_in_folder("config.json")));
    CHECK_OK(gpt_file_open(&file, ampt_in_folder("model.safetensors")));
    gpt_file_close(&file);
    remove(ampt_in_folder("other.safetensors"));
    ampt_folder_remove();
    gpt_destroy(&g);
    amp_close(amp);
    ex_text[0] = 0;
}

TEST(untied_output_weights_are_refused) {
    float wte[4] = {1, 2, 3, 4}, head[4] = {1, 2, 3, 5};
    st_tensor tensors[2];
    gpt_file file;
    memset(&file, 0, sizeof file);
    memset(tensors, 0, sizeof tensors);
    snprintf(tensors[0].name, sizeof tensors[0].name, "lm_head.weight");
    snprintf(tensors[1].name, sizeof tensors[1].name, "transformer.wte.weight");
    for (int i = 0; i < 2; i++) {
        tensors[i].type = ST_F32;
        tensors[i].count = 4;
        tensors[i].bytes = sizeof wte;
        tensors[i].data = (const unsigned char *)(i == 0 ? head : wte);
    }
    file.weights.tensors.tensors = tensors;
    file.weights.tensors.n = 2;
    CHECK_ERR(gpt_file_check_tied(&file), AMP_ERR_UNSUPPORTED);
    head[3] = 4;
    CHECK_OK(gpt_file_check_tied(&file));
}

TEST(model_limits) {
    static const int32_t ids[14];
    amp_context *amp = open_fp32();
    gpt_config c = odd_config();
    gpt g;
    c.heads = 3;
    CHECK_ERR(gpt_create(&g, amp, &c), AMP_ERR_SHAPE);
    c = odd_config(); c.seq = 8;
    CHECK_ERR(gpt_create(&g, amp, &c), AMP_ERR_SHAPE);
    c = odd_config(); c.layers = 0;
    CHECK_ERR(gpt_create(&g, amp, &c), AMP_ERR_RANGE);
    c = odd_config(); c.channels = 65536; c.layers = 1000;
    CHECK_ERR(gpt_create(&g, amp, &c), AMP_ERR_MEMORY);
    c = odd_config();
    CHECK_OK(gpt_create(&g, amp, &c));
    CHECK_OK(gpt_forward(&g, ids, 2, 7, 0));
    CHECK_ERR(gpt_forward(&g, ids, 1, 8, 0), AMP_ERR_SHAPE);    /* it has seven positions */
    gpt_destroy(&g);
    amp_close(amp);
}

/* ---- IDX files */

TEST(idx_files) {
    static const unsigned char good[] = {0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 3, 1, 2, 3, 4, 5, 6};
    const char *path = scratch("images-idx3-ubyte");
    unsigned char bad[sizeof good];
    mnist_idx file;
    write_file(path, good, sizeof good);
    CHECK_OK(mnist_idx_open(&file, path));
    CHECK(file.count == 2 && file.size == 3 && memcmp(file.data, good + 16, 6) == 0);
    mnist_idx_close(&file);
    for (size_t n = 0; n < sizeof good; n++) {
        write_file(path, good, n);
        CHECK(mnist_idx_open(&file, path) != AMP_OK);
    }
    for (int k = 0; k < 16; k++) {                      /* a header byte of 255: a wrong format, or more than there is */
        memcpy(bad, good, sizeof good);
        bad[k] = 255;
        write_file(path, bad, sizeof bad);
        CHECK(mnist_idx_open(&file, path) != AMP_OK);
    }
    remove(path);
    CHECK_ERR(mnist_idx_open(&file, path), AMP_ERR_OPEN);
}

/* 8 GiB by the header and 6 bytes in the file take no more memory than 6 bytes. */
TEST(idx_header_that_lies) {
#if defined(SANITIZED)
    SKIP("a sanitizer needs the memory that this test takes away");
#elif defined(_WIN32)
    SKIP_ON_WINDOWS("limit on the memory of a process");
#else
    static const unsigned char lie[] = {0, 0, 8, 2, 0, 2, 0, 0, 0, 1, 0, 0, 1, 2, 3, 4, 5, 6};
    const char *path = scratch("lie-idx2-ubyte");
    struct rlimit before, tight;
    mnist_idx file;
    write_file(path, lie, sizeof lie);
    CHECK(getrlimit(RLIMIT_DATA, &before) == 0);
    tight = before;
    tight.rlim_cur = (rlim_t)1 << 31;
    CHECK(setrlimit(RLIMIT_DATA, &tight) == 0);
    CHECK_ERR(mnist_idx_open(&file, path), AMP_ERR_TRUNCATED);
    CHECK(setrlimit(RLIMIT_DATA, &before) == 0);
    remove(path);
#endif
}

/* ---- Where memory ends */

/* stdout and stderr to nowhere, and back. */
static void silence(int on) {
    static int saved[2];
    fflush(stdout);
    for (int i = 0; i < 2; i++) {
        int nowhere = on ? open("/dev/null", O_WRONLY) : saved[i];
        if (on) saved[i] = dup(i + 1);
        CHECK(dup2(nowhere, i + 1) == i + 1);
        close(nowhere);
    }
}

static void open_small(run *r, char **argv, int argc) {
    settings set;
    amp_state *resumed = NULL;
    free(saved_options);            /* of the run before, which is closed */
    saved_options = NULL;
    memset(flag_given.text, 0, sizeof flag_given.text);
    memset(flag_given.on_command_line, 0, sizeof flag_given.on_command_line);
    CHECK_MSG(read_settings(argc, argv, &set, &resumed) == AMP_OK, "%s", ex_error());
    CHECK_MSG(open_run(r, &set, resumed) == AMP_OK, "%s", ex_error());
    amp_state_destroy(resumed);
}

/* The step is done again from the same batch, then in halves of it, which hold the same tokens; training goes on. */
TEST(smaller_pieces) {
    static char program[] = "train_gpt", all[] = "--data=PATH --steps=3 --batch=4 --seq=8 --layers=1 --heads=1 --channels=8 --precision=fp32 "
                            "--nan-action=recover --save=none --metrics=none --threads=1 --workers=0 --validation=0.2";
    char *argv[16] = {program}, data[300], text[600];
    int32_t before[64], after[64];
    amp_optimizer_desc optimizer;
    progress bar;
    amp_batch batch;
    run r;
    int argc = 1, i;
    for (i = 0; i < 600; i++) text[i] = (char)(97 + i * i % 23);
    write_file(scratch("pieces"), text, sizeof text);
    snprintf(data, sizeof data, "--data=%s", scratch("pieces"));
    for (char *flag = strtok(all, " "); flag != NULL; flag = strtok(NULL, " ")) argv[argc++] = strstr(flag, "PATH") ? data : flag;
    silence(1);
    open_small(&r, argv, argc);
    progress_open(&bar, r.steps);
    CHECK_OK(train(&r, &bar));
    CHECK_EQ(r.step, 3);
    CHECK_OK(next_batch(&r, 0, &batch));
    memcpy(before, batch.inputs, sizeof before / 2);
    CHECK_OK(answer_memory(&r, &bar));
    CHECK(r.anomaly[0] == 0 && r.set.batch == 4);
    CHECK_OK(next_batch(&r, 0, &batch));
    CHECK_EQ(batch.batch, 4);
    CHECK(memcmp(before, batch.inputs, sizeof before / 2) == 0);
    CHECK_OK(answer_memory(&r, &bar));
    CHECK(r.anomaly[0] == 0 && r.set.batch == 2 && r.set.accumulation == 2);
    CHECK_OK(amp_optimizer_query(r.optimizer, &optimizer));
    CHECK_EQ(optimizer.accumulation, 2);
    for (i = 0; i < 2; i++) {
        CHECK_OK(next_batch(&r, i, &batch));
        CHECK_EQ(batch.batch, 2);
        memcpy(after + 16 * i, batch.inputs, sizeof after / 4);
    }
    CHECK(memcmp(before, after, sizeof before / 2) == 0);
    r.steps = 6;
    CHECK_OK(train(&r, &bar));
    CHECK_EQ(r.step, 6);
    CHECK(r.recovery != NULL && r.result.applied_steps == 6);
    close_run(&r);
    silence(0);
    remove(scratch("pieces"));
}

/* A run of 4 sequences a step that is opened with these flags beside its own, from text of `bytes` tokens. */
static void open_pieces(run *r, int bytes, const char *flags) {
    static char program[] = "train_gpt", all[900];
    char *argv[32] = {program}, text[1200];
    int argc = 1;
    for (int i = 0; i < bytes; i++) text[i] = (char)(97 + i * i % 23);
    write_file(scratch("pieces"), text, (size_t)bytes);
    if (strstr(flags, "--resume") != NULL) snprintf(all, sizeof all, "%s", flags);
    else snprintf(all, sizeof all, "--data=%s --batch=4 --seq=8 --layers=1 --heads=1 --channels=8 --precision=fp32 --metrics=none --threads=1 "
             "--validation=0.2 --lr=1e-3 --schedule=constant --warmup=0 %s", scratch("pieces"), flags);
    for (char *flag = strtok(all, " "); flag != NULL; flag = strtok(NULL, " ")) argv[argc++] = flag;
    open_small(r, argv, argc);
}

/* Trains to a step; memory ends twice before step `bad` (0: never), so that the batch is halved.  *back: after which step
   the batch had its size again, 0: not yet. */
static void train_pieces(run *r, int64_t to, int64_t bad, int64_t *back) {
    progress bar;
    progress_open(&bar, to);
    while (r->step < to && ampt.failures == 0) {
        r->steps = r->set.steps = r->step + 1;
        if (r->step + 1 == bad) {
            amp_loader_info info;
            CHECK_OK(amp_loader_info_get(r->loader, &info));
            r->epoch = info.epoch; r->index = info.index;
            CHECK_OK(answer_memory(r, &bar));
            CHECK_OK(answer_memory(r, &bar));
            CHECK(r->set.batch == 2 && r->set.accumulation == 2);
        }
        CHECK_OK(train(r, &bar));
        if (back != NULL && *back == 0 && bad > 0 && r->step >= bad && r->set.batch == 4) *back = r->step;
    }
}

static int same_model(const run *a, const run *b, double bound) {
    double worst = 0;
    for (int64_t p = 0; p < a->model.n_params; p++) {
        const float *x = (const float *)a->model.params[p].weight.data, *y = (const float *)b->model.params[p].weight.data;
        for (int64_t i = 0; i < amp_tensor_count(&a->model.params[p].weight); i++) worst = fmax(worst, fabs((double)x[i] - (double)y[i]));
    }
    return worst <= bound;
}

/* A batch that was halved is doubled after so many good steps: every step has the tokens of the undisturbed run, and the
   mean of their gradients, also where an epoch ends in between; the same once more, and when resumed in between. */
TEST(larger_pieces_again) {
    static const struct { int bytes, interval; int64_t back; } rows[] = {
        {600, 4, 7},    /* 59 samples: 14 batches of 4, and 29 of 2 */
        {370, 4, 7},    /* 36 samples: 9, and 18 */
        {150, 3, 10}};  /* 14 samples: 3, and 7: after step 6 only the last of these is left, then they begin in the middle */
    static const char *const ends[] = {".state", ".safetensors", ".tokenizer.json"};
    char flags[200], saved[400], resumed[500];
    int64_t back[3] = {0, 0, 0};
    amp_loader_info a, b;
    run whole, pieces, again;
    SKIP_ON_WINDOWS("replacing of an open file before version 10");
    silence(1);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        back[0] = back[1] = 0;
        snprintf(flags, sizeof flags, "--nan-action=recover --batch-growth-interval=%d --save=none --workers=0", rows[i].interval);
        open_pieces(&whole, rows[i].bytes, flags);
        train_pieces(&whole, 12, 0, NULL);
        open_pieces(&pieces, rows[i].bytes, flags);
        train_pieces(&pieces, 12, 4, &back[0]);
        open_pieces(&again, rows[i].bytes, flags);
        train_pieces(&again, 12, 4, &back[1]);
        CHECK(same_model(&pieces, &again, 0) && back[0] == back[1]);
        CHECK_MSG(back[0] == rows[i].back, "after step %lld", (long long)back[0]);
        CHECK(pieces.set.batch == 4 && pieces.set.accumulation == 1 && pieces.recovery != NULL);
        CHECK_OK(amp_loader_info_get(whole.loader, &a));
        CHECK_OK(amp_loader_info_get(pieces.loader, &b));
        /* Other tokens make a difference of 2e-3 here, another order of sums one of 5e-7. */
        if (i < 2) CHECK(a.epoch == b.epoch && a.index == b.index && same_model(&whole, &pieces, 1e-5));
        CHECK(!same_model(&whole, &pieces, 0));         /* sums in another order */
        close_run(&whole); close_run(&pieces); close_run(&again);
    }
    /* Saved while the batch is half of itself. */
    snprintf(saved, sizeof saved, "--nan-action=recover --batch-growth-interval=4 --save=%s", scratch("saved"));
    open_pieces(&pieces, 600, saved);
    train_pieces(&pieces, 5, 4, &back[2]);
    CHECK_OK(save_run(&pieces));
    train_pieces(&pieces, 12, 0, NULL);
    snprintf(resumed, sizeof resumed, "--metrics=none --threads=1 --save=none --resume=%s", scratch("saved"));
    open_pieces(&again, 600, resumed);
    CHECK(again.step == 5);
    train_pieces(&again, 12, 0, NULL);
    CHECK(again.set.batch == 4 && same_model(&pieces, &again, 0));
    close_run(&pieces); close_run(&again);
    silence(0);
    remove(scratch("pieces"));
    for (int i = 0; i < 3; i++) {
        snprintf(saved, sizeof saved, "%s%s", scratch("saved"), ends[i]);
        CHECK(remove(saved) == 0);
    }
}

/* The dtype of the last such operator's result on the tape. */
static amp_dtype stored_as(run *r, const char *op, const char *layer) {
    amp_dtype dtype = AMP_DTYPE_DEFAULT;
    amp_tape_node_info node;
    amp_tensor t;
    for (int64_t i = 0; amp_tape_node(r->model.tape, i, &node) == AMP_OK; i++)
        if (strcmp(node.op, op) == 0 && (*layer == 0 || (node.layer != NULL && strstr(node.layer, layer) != NULL))) {
            CHECK_OK(amp_tape_tensor(r->model.tape, node.value, &t));
            dtype = t.dtype;
        }
    return dtype;
}

/* --activations stores tensors apart, and a 16-bit residual stream costs less of the loss than bf16 does. */
TEST(activations_by_tensor) {
    static const char *const storage[] = {"bf16", "auto,stream=bf16,mlp=fp32", "attention=bf16,branch=fp32,norm=fp32"};
    float losses[4];
    char flags[500];
    run r;
    silence(1);
    for (int i = 0; i < 4; i++) {
        snprintf(flags, sizeof flags, "--save=none --layers=2 --precision=%s --steps=3 --activations=%s", i < 3 ? "bf16" : "fp32", i < 3 ? storage[i] : "auto");
        open_pieces(&r, 600, flags);
        amp_dtype stream = i == 1 ? AMP_BF16 : AMP_F32, mlp = i == 1 || i == 3 ? AMP_F32 : AMP_BF16, rest = i >= 2 ? AMP_F32 : AMP_BF16;
        CHECK(stored_as(&r, "embedding", "wte") == stream && stored_as(&r, "add", "") == stream);
        CHECK(stored_as(&r, "linear", "h.1.mlp.c_fc") == mlp);
        CHECK(stored_as(&r, "layernorm", "h.1.ln_1") == rest && stored_as(&r, "linear", "h.1.mlp.c_proj") == rest);
        CHECK(stored_as(&r, "layernorm", "ln_f") == rest);
        CHECK(stored_as(&r, "attention", "") == (i == 3 ? AMP_F32 : AMP_BF16));
        train_pieces(&r, 3, 0, NULL);
        losses[i] = r.loss;
        close_run(&r);
    }
    CHECK(losses[0] != losses[1] && fabsf(losses[0] - losses[1]) <= 2 * fabsf(losses[0] - losses[3]) + 0.001f);
    CHECK(fabsf(losses[2] - losses[0]) < 0.01f);
    silence(0);
}

/* What a settings file says of the loader and of the logits reaches them; flags win. */
TEST(settings_reach_loader_and_logits) {
    char flags[500];
    amp_loader_desc d;
    float losses[2];
    run r;
    FILE *file = fopen(scratch("settings"), "w");
    CHECK(file != NULL);
    fprintf(file, "workers = 3\nprefetch = 5\npin = off\ncast_outputs = fp32\ndtype = bf16\n");
    fclose(file);
    silence(1);
    for (int i = 0; i < 2; i++) {
        snprintf(flags, sizeof flags, "--save=none --precision=bf16 --steps=2 --config=%s %s", scratch("settings"), i == 0 ? "" : "--workers=0 --cast-outputs=off");
        open_pieces(&r, 600, flags);
        CHECK_OK(amp_loader_query(r.loader, &d));
        CHECK(d.workers == (i == 0 ? 3 : AMP_NO_WORKERS) || (i == 1 && d.workers == 0));
        CHECK(d.prefetch == 5 && d.disable_pinned == 1);
        CHECK(r.model.config.activations == AMP_BF16 && stored_as(&r, "linear", "wte") == (i == 0 ? AMP_F32 : AMP_BF16));
        train_pieces(&r, 2, 0, NULL);
        losses[i] = r.loss;
        close_run(&r);
    }
    CHECK(losses[0] > 0 && losses[0] != losses[1] && fabsf(losses[0] - losses[1]) < 0.01f);     /* rounded logits, and not */
    silence(0);
    remove(scratch("settings"));
}

/* The masters as the optimizer would save them: fp32, however they are kept. */
static float *masters_of(run *r, int64_t i, int64_t n) {
    float *values = (float *)calloc((size_t)n, sizeof *values);
    amp_state *state = NULL;
    char key[64];
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_OK(amp_optimizer_save(r->optimizer, state, "o"));
    snprintf(key, sizeof key, "o.master.%d", (int)i);
    CHECK_OK(amp_state_get(state, key, AMP_F32, values, n));
    amp_state_destroy(state);
    return values;
}

static void open_level(run *r, const char *flags) {
    static char texts[10][1000];        /* the settings point into them */
    static int next;
    char *argv[32] = {(char *)"train_gpt"}, *words = texts[next++ % 10];
    int argc = 1;
    snprintf(words, sizeof texts[0], "--data=%s --steps=3 --batch=2 --seq=8 --metrics=none --threads=1 --workers=0 --precision=bf16 %s",
             scratch("level"), flags);
    for (char *flag = strtok(words, " "); flag != NULL && argc < 32; flag = strtok(NULL, " ")) argv[argc++] = flag;
    open_small(r, argv, argc);
}

/* Level O2: masters are the fp32 numbers of the initialisation, of a file, and of a checkpoint; not what bf16 left of them. */
TEST(masters_begin_as_fp32) {
    static const char *const kinds[] = {"fp32", "remainder"}, model[] = "--layers=1 --heads=1 --channels=8";
    char text[600], flags[800], file[320], save[300];
    run r, whole;
    progress bar;
    int i, kind, way, narrow;
    for (i = 0; i < 600; i++) text[i] = (char)(97 + i * i % 23);
    write_file(scratch("level"), text, sizeof text);
    snprintf(file, sizeof file, "%s", scratch("level_file.safetensors"));
    snprintf(save, sizeof save, "%s", scratch("level_save"));
    silence(1);
    snprintf(flags, sizeof flags, "--level=O1 --save=none %s", model);
    open_level(&whole, flags);                                      /* fp32 weights of the same seed */
    CHECK_OK(gpt_save_safetensors(&whole.model, file, 0));
    for (kind = 0; kind < 2; kind++)
        for (way = 0; way < 3; way++) {                             /* seed, file, checkpoint */
            float *before[32] = {NULL};
            if (way < 2) snprintf(flags, sizeof flags, "--level=O2 --masters=%s --save=%s --seed=%s %s%s", kinds[kind], save,
                                  way ? "9" : "1", way ? "--heads=1 --init=" : model, way ? file : "");
            else {
                snprintf(flags, sizeof flags, "--level=O2 --masters=%s --save=%s %s", kinds[kind], save, model);
                open_level(&r, flags);
                progress_open(&bar, r.steps);
                CHECK_OK(train(&r, &bar));
                CHECK_OK(save_run(&r));
                for (i = 0; i < r.model.n_params && i < 32; i++)
                    if (r.model.params[i].weight.dtype == AMP_BF16) before[i] = masters_of(&r, i, amp_tensor_count(&r.model.params[i].weight));
                close_run(&r);
                snprintf(flags, sizeof flags, "--level=O2 --masters=%s --resume=%s", kinds[kind], save);
            }
            open_level(&r, flags);
            CHECK_EQ(r.model.n_params, whole.model.n_params);
            for (i = narrow = 0; i < r.model.n_params && i < 32; i++) {
                int64_t n = amp_tensor_count(&r.model.params[i].weight);
                float *masters, *expected;
                if (r.model.params[i].weight.dtype != AMP_BF16) continue;       /* those of norms stay in fp32 */
                narrow++;
                masters = masters_of(&r, i, n);
                expected = before[i] ? before[i] : (float *)calloc((size_t)n, 4);
                if (way < 2) CHECK_OK(gpt_get(&whole.model, i, expected));
                CHECK_MSG(memcmp(masters, expected, (size_t)n * 4) == 0, "%s, way %d: %s", kinds[kind], way, r.model.params[i].name);
                free(masters);
                free(expected);
            }
            CHECK(narrow >= 10);
            close_run(&r);
        }
    close_run(&whole);
    silence(0);
    remove(file);
    remove(scratch("level"));
    snprintf(file, sizeof file, "%s.state", save);
    remove(file);
    snprintf(file, sizeof file, "%s.safetensors", save);
    remove(file);
    snprintf(file, sizeof file, "%s.json", save);
    remove(file);
    snprintf(file, sizeof file, "%s.tokenizer.json", save);
    CHECK(remove(file) == 0);
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(defaults_are_legal);
    RUN(bad_values_are_refused_by_name);
    RUN(words_stand_for_numbers);
    RUN(unknown_flags_get_a_suggestion);
    RUN(paths_come_in_pairs);
    RUN(schedules);
    RUN(bigrams_by_hand);
    RUN(sampling);
    RUN(json_values);
    RUN(json_surrogates);
    RUN(json_of_any_text);
    RUN(json_errors_do_not_run_away);
    RUN(flops_by_hand); RUN(traffic_by_hand);
    RUN(safetensors_round_trip);
    RUN(safetensors_dtypes);
    RUN(safetensors_entries_that_lie);
    RUN(safetensors_fuzz);
    RUN(llmc_files);
    RUN(shards);
    RUN(tensors_without_a_place);
    RUN(llama_configs);
    RUN(tensors_without_a_place_in_a_llama);
    RUN(gpt_configs_are_kept);
    RUN(gpt_configs_are_refused_by_key_and_value);
    RUN(two_descriptions);
    RUN(untied_output_weights_are_refused);
    RUN(model_limits);
    RUN(idx_files);
    RUN(idx_header_that_lies);
    RUN(smaller_pieces);
    RUN(larger_pieces_again);
    RUN(activations_by_tensor);
    RUN(settings_reach_loader_and_logits);
    RUN(masters_begin_as_fp32);
    free(saved_options);
    return TEST_END();
}
