/* make_seeds.c - writes the fuzzers' seeds that are made by programs.  `make fuzz-seeds` runs it in the project root.
 * Inputs that once caused a failure are kept beside them as found_*.  These cannot be made again. */
#define AMP_IMPLEMENTATION
#include "../../../amp.h"
#define LLVMFuzzerTestOneInput fuzz_state
#include "fuzz_state.c"

typedef struct seed { const char *name; uint8_t bytes[8192]; size_t used; } seed;

static void add(seed *s, const void *data, size_t n) {
    CLAIM(s->used + n <= sizeof s->bytes);
    memcpy(s->bytes + s->used, data, n);
    s->used += n;
}
static void add_text(seed *s, const char *text) { add(s, text, strlen(text)); }
/* With what zeros are in it. */
#define add_literal(s, text) add(s, text, sizeof(text) - 1)
static void add_number(seed *s, uint64_t x, int bytes) {
    for (; bytes > 0; bytes--, x >>= 8) { uint8_t byte = (uint8_t)x; add(s, &byte, 1); }
}
static seed begin(const char *name) { seed s; memset(&s, 0, sizeof s); s.name = name; return s; }
static void end(const seed *s) {
    char path[128];
    snprintf(path, sizeof path, "tests/hostile/fuzz/seeds/%s", s->name);
    CLAIM(amp_file_write_atomic(NULL, path, s->bytes, s->used) == AMP_OK);
}

static void config_seeds(void) {
    char text[4096];
    amp_settings settings;
    seed s = begin("config/defaults");
    memset(&settings, 0, sizeof settings);
    amp_settings_text(&settings, text, sizeof text);
    add_text(&s, text);
    end(&s);
    s = begin("config/comments");
    add_text(&s, "\xef\xbb\xbf# fp16 with a scaler\r\n\r\n dtype=FP16 # as here\nscaler = on\nmin_scale = none\ninit_scale = 1.5e3\nclip_norm = 0x1p-3\n");
    end(&s);
    s = begin("config/set");
    add_text(&s, "growth_interval 2000");
    end(&s);
    s = begin("config/json");
    add_text(&s, "{\"model_type\": \"gpt2\", \"x\": [1, {\"y\": \"\\u00e9\\\"\"}], \"n_head\": 12, \"layer_norm_epsilon\": 1e-05, \"n_inner\": null,\n"
                 "\"activation_function\": \"silu\", \"scale_attn_weights\": false, \"attn_pdrop\": 0.1, \"is_decoder\": false}");
    end(&s);
    s = begin("config/longformer");
    add_text(&s, "{\"attention_window\": [4, 8], \"hidden_act\": \"relu\", \"pad_token_id\": 1, \"num_attention_heads\": 3, \"dtype\": \"float16\"}");
    end(&s);
}

static void npy(seed *s, const char *descr, const char *shape, int version) {
    char dict[128];
    int n = snprintf(dict, sizeof dict, "{'descr': '%s', 'fortran_order': False, 'shape': %s, }\n", descr, shape);
    add_text(s, "\x93NUMPY");
    add_number(s, (uint64_t)version, 2);
    add_number(s, (uint64_t)n, version == 1 ? 2 : 4);
    add(s, dict, (size_t)n);
}
static void numbers(seed *s, int n, int bytes) { for (int i = 0; i < n; i++) add_number(s, (uint64_t)(i * 7 % 199), bytes); }

static void token_seeds(void) {
    static const struct { const char *name, *descr; uint32_t options; uint32_t magic, version; int bytes; } kinds[] = {
        {"tokens/bytes", NULL, 0x06030203, 0, 0, 1}, {"tokens/u16", NULL, 0x04020102, 0, 0, 2}, {"tokens/llmc", NULL, 0x05016200, 20240520, 1, 2},
        {"tokens/llama", NULL, 0x03022c01, 20240801, 7, 4}, {"tokens/npy_u1", "|u1", 0x05030000, 0, 0, 1}, {"tokens/npy_u2", "<u2", 0x04020304, 0, 0, 2},
        {"tokens/npy_u4", "<u4", 0x02021000, 0, 0, 4}, {"tokens/npy_i8", "<i8", 0x03018404, 0, 0, 8}};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        seed s = begin(kinds[i].name);
        add_number(&s, kinds[i].options, 4);
        if (kinds[i].descr != NULL) npy(&s, kinds[i].descr, "(50,)", 1);
        if (kinds[i].magic != 0) {
            add_number(&s, kinds[i].magic, 4); add_number(&s, kinds[i].version, 4); add_number(&s, 50, 4);
            while (s.used < 4 + 1024) add_number(&s, 0, 4);
        }
        numbers(&s, 50, kinds[i].bytes);
        end(&s);
    }
}

static void array_seeds(void) {
    static const struct { const char *name, *descr, *shape; int version, options, n, bytes; } kinds[] = {
        {"array/f4", "<f4", "(5, 2)", 1, 0x10, 10, 4}, {"array/f2", "<f2", "(4,)", 2, 0x08, 4, 2}, {"array/f8", "<f8", "(2, 1, 2)", 3, 0x02, 4, 8},
        {"array/b1", "|b1", "(7,)", 1, 0x05, 7, 1}, {"array/i8", "<i8", "(3L, 1L)", 1, 0x01, 3, 8}};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        seed s = begin(kinds[i].name);
        add_number(&s, (uint64_t)kinds[i].options, 1);
        npy(&s, kinds[i].descr, kinds[i].shape, kinds[i].version);
        numbers(&s, kinds[i].n, kinds[i].bytes);
        end(&s);
    }
    seed s = begin("array/idx");
    add_literal(&s, "\0\0\0\x08\x03\0\0\0\2\0\0\0\2\0\0\0\3");
    numbers(&s, 12, 1);
    end(&s);
}

static void safetensors_seeds(void) {
    static const char mixed[] = "{\"__metadata__\":{\"format\":\"pt\"},\"a\":{\"dtype\":\"F16\",\"shape\":[2,2],\"data_offsets\":[0,8]},"
        "\"b\":{\"dtype\":\"BF16\",\"shape\":[3],\"data_offsets\":[8,14]},\"c\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[14,22]},"
        "\"d\":{\"dtype\":\"I64\",\"shape\":[0],\"data_offsets\":[22,22]}}";
    gpt_config config;
    encoder_config ec;
    gpt g;
    encoder e;
    seed s = begin("safetensors/mixed");
    add_number(&s, sizeof mixed - 1, 8); add(&s, mixed, sizeof mixed - 1); numbers(&s, 22, 1);
    end(&s);
    memset(&config, 0, sizeof config);
    config.vocab = 3; config.positions = 2; config.channels = 2; config.heads = config.layers = config.batch = config.seq = 1;
    CLAIM(gpt_create(&g, fuzz_context(), &config) == AMP_OK && gpt_init(&g, 1) == AMP_OK);
    CLAIM(gpt_save_safetensors(&g, "tests/hostile/fuzz/seeds/safetensors/gpt", 1) == AMP_OK);
    s = begin("safetensors/llmc");
    { const uint32_t header[8] = {GPT_LLMC_MAGIC, 5, 2, 3, 1, 1, 2, 4}; for (int i = 0; i < 256; i++) add_number(&s, i < 8 ? header[i] : 0, 4); }
    numbers(&s, (int)g.own.count + 2, 2);
    end(&s);
    gpt_destroy(&g);
    memset(&ec, 0, sizeof ec);
    ec.family = ENCODER_BERT; ec.vocab = 3; ec.positions = 2; ec.types = 2; ec.layers = ec.heads = 1; ec.hidden = 2; ec.intermediate = 3;
    ec.classes = 2; ec.batch = ec.seq = 1;
    CLAIM(encoder_create(&e, fuzz_context(), &ec) == AMP_OK && encoder_init(&e, 1) == AMP_OK);
    CLAIM(encoder_save(&e, "tests/hostile/fuzz/seeds/safetensors/bert") == AMP_OK);
    encoder_destroy(&e);
}

static void tokenizer_seeds(void) {
    seed s = begin("tokenizer/gpt2");
    add_literal(&s, "\0");
    add_literal(&s, "\"th\": 256, \"the\": 257, \"\\u0120t\": 258, \"\\u0120the\": 259, \"er\": 260, \"he\": 261");
    add_literal(&s, "\0#version: 0.2\nt h\n\xc4\xa0 t\nth e\n\xc4\xa0t he\nh e\ne r\n");
    add_literal(&s, "\0the other, the 3rd they're \xc3\xa9\xff  \n");
    end(&s);
    s = begin("tokenizer/end_of_text");
    add_literal(&s, "\0\"<|endoftext|>\": 50256, \"aa\": 300\0a a\n\0aaa<|endoftext|>aa");
    end(&s);
    s = begin("tokenizer/raw");
    add_literal(&s, "\1{\"a\": 0, \"\\ud83d\\ude00\": 1}\0a a\n\0aa");
    end(&s);
    s = begin("tokenizer/bert");
    add_text(&s, "\2[PAD]\n[UNK]\n[CLS]\n[SEP]\nthe\nun\n##aff\n##able\ncaf\n##e\n,\n\xe4\xb8\x80");
    add_literal(&s, "\0The unaffable, caf\xc3\xa9 \xe4\xb8\x80 \xea\xb0\x81x");
    end(&s);
    s = begin("tokenizer/bert_cased");
    add_literal(&s, "\3[PAD]\r\n[UNK]\n[CLS]\n[SEP]\nA\n##b\n\0Ab aB");
    end(&s);
}

static void state_seeds(void) {
    static const amp_dtype dtypes[] = {AMP_F32, AMP_F64, AMP_F16, AMP_BF16, AMP_U8, AMP_U16, AMP_I32, AMP_I64};
    static const char *const names[] = {"state/scaler", "state/optimizer", "state/loader", "state/random", "state/fp8", "state/adapt",
                                       "state/optimizer_8bit"};
    static const uint8_t values[64] = {1, 2, 3};
    static const float scale = 0.5f;
    void *data;
    size_t bytes;
    amp_state *state;
    seed s;
    state_make_objects();
    for (int kind = -2; kind <= STATE_KINDS; kind++) {
        CLAIM(amp_state_create(&state, NULL) == AMP_OK);
        if (kind == -2) {                                       /* format version 2 */
            char key[256];
            memset(key, 'k', sizeof key - 1);
            key[255] = 0;
            CLAIM(amp_state_put(state, key, AMP_U8, values, 3) == AMP_OK);
            CLAIM(amp_state_put(state, "x.scale", AMP_F32, &scale, 1) == AMP_OK);
        }
        for (int i = 0; i < 8 && kind == -1; i++) CLAIM(amp_state_put(state, amp_dtype_name(dtypes[i]), dtypes[i], values, i) == AMP_OK);
        if (kind == 1) { (void)amp_param_accumulate(&objects.params[0]); CLAIM(amp_step(objects.optimizer, objects.scaler) == AMP_OK); }
        if (kind == STATE_ADAPT) for (int i = 0; i < 4; i++) { state_layer_step(&objects.adapted); CLAIM(amp_adapt_step(objects.adapt) == AMP_OK); }
        if (kind >= 0) CLAIM(state_save_object(kind < STATE_KINDS ? kind : STATE_OPTIMIZER, state) == AMP_OK);
        for (int k = 0; k < 4 && kind == STATE_KINDS; k++) {        /* moments in 8 bits: codes, and a scale for each block */
            static const char *const codes[] = {"x.m.0", "x.v.0", "x.m.1", "x.v.1"},
                              *const scales[] = {"x.m_scales.0", "x.v_scales.0", "x.m_scales.1", "x.v_scales.1"};
            CLAIM(amp_state_put(state, codes[k], AMP_U8, values, k < 2 ? 6 : 4) == AMP_OK);
            CLAIM(amp_state_put(state, scales[k], AMP_F32, &scale, 1) == AMP_OK);
        }
        CLAIM(amp_state_encode(state, &data, &bytes) == AMP_OK);
        s = begin(kind == -2 ? "state/long_key" : kind < 0 ? "state/records" : names[kind]);
        add(&s, data, bytes);
        end(&s);
        amp_file_free(NULL, data, bytes);
        amp_state_destroy(state);
    }
}

int main(void) {
    config_seeds();
    token_seeds();
    array_seeds();
    safetensors_seeds();
    tokenizer_seeds();
    state_seeds();
    return 0;
}
