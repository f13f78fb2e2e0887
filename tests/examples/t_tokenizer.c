/* t_tokenizer.c - tests the tokenizer of the example trainer.  It must give the same tokens as transformers, and must give
 * the same bytes back.  Damaged files must be rejected with a message that names the file.  The golden data comes from
 * tests/torch/oracle/tokenizer.py. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "../examples/gpt_files.h"
#include "../examples/token_files.h"
#include "test.h"
#ifndef AMPT_GOLDEN
#define AMPT_GOLDEN "tests/torch/golden"
#endif

static const char *const vocab_path = AMPT_GOLDEN "/tokenizer_vocab.json", *const merges_path = AMPT_GOLDEN "/tokenizer_merges.txt";

static const char *scratch(const char *name) {
    static char paths[4][256];
    static int next;
    char *path = paths[next++ & 3];
    snprintf(path, sizeof paths[0], "%s/ampt_tokenizer_%ld_%s", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp", (long)getpid(), name);
    return path;
}

static void write_text(const char *path, const char *text, size_t bytes) { CHECK_OK(amp_file_write_atomic(NULL, path, text, bytes)); }

/* The bytes of the tokens; returns how many. */
static int64_t decode(const bpe *t, const int32_t *tokens, int64_t n, char *out) {
    int64_t used = 0, i, length;
    for (i = 0; i < n; i++) {
        const char *text = bpe_text(t, tokens[i], &length);
        CHECK(text != NULL);
        if (text != NULL) memcpy(out + used, text, (size_t)length);
        used += length;
    }
    return used;
}

static int hex_digit(int c) { return c <= '9' ? c - '0' : c - 'a' + 10; }

TEST(same_tokens_as_transformers) {
    static char line[1 << 16], text[1 << 14], back[1 << 16];
    static int32_t tokens[1 << 14];
    bpe t;
    FILE *file = fopen(AMPT_GOLDEN "/tokenizer.txt", "r");
    int cases = 0;
    CHECK(file != NULL);
    CHECK_OK(bpe_open(&t, vocab_path, merges_path));
    CHECK_EQ(t.n, 900);
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        int64_t n = 0, count = 0, wrong = 0, i, word;
        char *at = line;
        if (*at == '-') at++;
        for (; at[0] > ' '; at += 2) text[n++] = (char)(hex_digit(at[0]) * 16 + hex_digit(at[1]));
        CHECK_OK(bpe_encode(&t, text, n, tokens, &count));
        CHECK_MSG(strtol(at, &at, 10) == count, "case %d: %lld tokens", cases, (long long)count);
        for (i = 0; i < count; i++) wrong += strtol(at, &at, 10) != tokens[i];
        for (i = 0; i < n && wrong == 0; i += word) {
            word = bpe_word_length(text + i, n - i);
            CHECK_MSG((wrong = strtol(at, &at, 10) != word) == 0, "case %d: the word at byte %lld", cases, (long long)i);
        }
        CHECK_MSG(wrong == 0 && *at == '\n', "case %d", cases);
        CHECK(decode(&t, tokens, count, back) == n && memcmp(back, text, (size_t)n) == 0);
        cases++;
    }
    CHECK(cases > 300);
    if (file != NULL) fclose(file);
    bpe_close(&t);
}

/* Bytes that are no UTF-8 come back; a word as long as the text does not take quadratic time. */
TEST(any_bytes_come_back) {
    enum { LONG = 1 << 20 };
    char *text = (char *)malloc(LONG), *back = (char *)malloc(LONG);
    int32_t *tokens = (int32_t *)malloc(LONG * sizeof *tokens);
    int64_t count, n, round, i;
    bpe t;
    CHECK_OK(bpe_open(&t, vocab_path, merges_path));
    for (round = 0; round < 500; round++) {
        uint32_t words[4];
        n = 1 + round % 97;
        for (i = 0; i < n; i++) {
            amp_philox(3, (uint64_t)round, (uint64_t)i, words);
            text[i] = (char)(round % 2 ? words[0] & 255 : 0x80 | (words[0] & 0x7f));
        }
        char *exact = (char *)malloc((size_t)n);        /* so that a sanitizer sees a byte too many */
        memcpy(exact, text, (size_t)n);
        CHECK_OK(bpe_encode(&t, exact, n, tokens, &count));
        CHECK(count <= n && decode(&t, tokens, count, back) == n && memcmp(back, text, (size_t)n) == 0);
        free(exact);
    }
    memset(text, 'e', LONG);
    CHECK_OK(bpe_encode(&t, text, LONG, tokens, &count));
    CHECK(decode(&t, tokens, count, back) == LONG && memcmp(back, text, LONG) == 0);
    free(text); free(back); free(tokens);
    bpe_close(&t);
}

/* A vocabulary of the 256 bytes as \u escapes, then `more`. */
static size_t small_vocab(char *out, size_t size, const char *more) {
    static const char safe[] = "!#$%&()*+,-./0123456789:;<=>?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[]^_`abcdefghijklmnopqrstuvwxyz{|}~";
    size_t used = (size_t)snprintf(out, size, "{");
    int byte, next = 256;
    for (byte = 0; byte < 256; byte++) {
        int printable = (byte > 32 && byte < 127) || (byte > 160 && byte != 173), code = printable ? byte : next++;
        if (code < 127 && strchr(safe, code) != NULL) used += (size_t)snprintf(out + used, size - used, "\"%c\": %d, ", code, byte);
        else used += (size_t)snprintf(out + used, size - used, "\"\\u%04x\": %d, ", (unsigned)code, byte);
    }
    return used + (size_t)snprintf(out + used, size - used, "%s}", more);
}

TEST(escapes_and_added_tokens) {
    static char text[1 << 14];
    const char *vocab = scratch("vocab.json"), *merges = scratch("merges.txt");
    int32_t tokens[16];
    int64_t count, length;
    bpe t;
    write_text(vocab, text, small_vocab(text, sizeof text, "\"\\ud83d\\ude00 x\": 300, \"ab\": 256, \"\\u0120ab\": 400"));
    write_text(merges, "a b\r\n\xc4\xa0 ab\n", 11);
    CHECK_OK(bpe_open(&t, vocab, merges));
    if (t.n == 0) return;
    CHECK(t.n == 401 && t.end_of_text == -1);
    CHECK_OK(bpe_encode(&t, "ab ab\"\\<|endoftext|>", 7, tokens, &count));
    CHECK(count == 4 && tokens[0] == 256 && tokens[1] == 400 && tokens[2] == '"' && tokens[3] == '\\');
    const char *added = bpe_text(&t, 300, &length);
    CHECK(length == 6 && memcmp(added, "\xf0\x9f\x98\x80 x", 6) == 0);
    CHECK(bpe_text(&t, 299, &length) == NULL && length == 0);
    CHECK(bpe_text(&t, 401, &length) == NULL && bpe_text(&t, -1, &length) == NULL);
    bpe_close(&t);
    remove(vocab); remove(merges);
}

/* Refused, with the file's name and the word in the text. */
static void refused(const char *vocab, const char *merges, const char *named, const char *why) {
    bpe t;
    int accepted = bpe_open(&t, vocab, merges) == AMP_OK;
    CHECK_MSG(!accepted && strstr(st_error(), named) != NULL && strstr(st_error(), why) != NULL, "%s, expected: %s", accepted ? "accepted" : st_error(), why);
    if (accepted) bpe_close(&t);
    st_text[0] = 0;
}

TEST(bad_files_are_refused_by_name) {
    static const struct { const char *more, *why; } vocabs[] = {
        {"\"ab\": 7", "this number"}, {"\"ab\": -1", "0 to 4194303"}, {"\"ab\": 4194304", "0 to 4194303"}, {"\"ab\": 99999999999999999999", "followed by"},
        {"\"ab\": \"7\"", "followed by"}, {"\"ab\" 300", "followed by"}, {"\"a\": 300", "twice"}, {"\"\": 300", "empty"}, {"\"\\ud83d\": 300", "not a string"},
        {"\"\\ud83dx\": 300", "not a string"}, {"\"\\ude00\": 300", "not a string"}, {"\"\\u00g0\": 300", "not a string"}, {"\"\\q\": 300", "not a string"},
        {"\"ab\": 300,", "not a string"}, {"\"ab\": 300 \"c\": 301", "JSON object"}, {"\"ab\": 300} x", "JSON object"}, {"ab: 300", "not a string"},
    };
    static const struct { const char *text, *why; } merges[] = {
        {"a\n", "line 1: must be two tokens"}, {"#version: 0.2\n\na b c\n", "line 3: must be two"}, {"a  b\n", "must be two"}, {" ab\n", "must be two"}, {"ab \n", "must be two"},
        {"a c\n", "merged token is not"}, {"a b\na b\n", "line 2: this merge"}, {"ab b\n", "merged token is not"}, {"abc d\n", "not in the vocabulary"}, {"a \xff\n", "writing of bytes"},
    };
    static char text[1 << 14];
    const char *vocab = scratch("vocab.json"), *list = scratch("merges.txt");
    for (size_t i = 0; i < sizeof vocabs / sizeof *vocabs; i++) {
        write_text(vocab, text, small_vocab(text, sizeof text, vocabs[i].more));
        refused(vocab, merges_path, "vocab.json: byte ", vocabs[i].why);
    }
    write_text(vocab, text, small_vocab(text, sizeof text, "\"ab\": 300"));
    for (size_t i = 0; i < sizeof merges / sizeof *merges; i++) {
        write_text(list, merges[i].text, strlen(merges[i].text));
        refused(vocab, list, "merges.txt: line ", merges[i].why);
    }
    write_text(vocab, "{\"a\": 0}", 8);
    refused(vocab, list, "vocab.json", "byte-level");
    refused("/nonexistent/v.json", list, "/nonexistent/v.json", "");
    refused(vocab_path, "/nonexistent/m.txt", "/nonexistent/m.txt", "");
    refused(merges_path, vocab_path, "tokenizer_merges.txt", "byte 0");
    remove(vocab); remove(list);
}

/* Every prefix and random changes of both files: an error with the file's name, or a tokenizer that works. */
TEST(damaged_files) {
    static const char pieces[] = "{}[]\",:09\\u \n\xff\xc4";
    const char *paths[2] = {vocab_path, merges_path};
    const char *broken[2] = {scratch("v"), scratch("m")};
    for (int which = 0; which < 2; which++) {
        void *data;
        size_t bytes;
        int accepted = 0;
        CHECK_OK(amp_file_read_all(NULL, paths[which], &data, &bytes));
        for (uint64_t round = 0; round < 300; round++) {
            char *copy = (char *)malloc(bytes);
            uint32_t words[4];
            bpe t;
            amp_philox(9, (uint64_t)which, round, words);
            memcpy(copy, data, bytes);
            copy[words[0] % bytes] = pieces[words[1] % (sizeof pieces - 1)];
            write_text(broken[which], copy, round % 2 ? bytes : words[2] % bytes);
            if (bpe_open(&t, which == 0 ? broken[0] : vocab_path, which == 1 ? broken[1] : merges_path) == AMP_OK) {
                int32_t tokens[64];
                int64_t count;
                CHECK_OK(bpe_encode(&t, "the model's layers", 18, tokens, &count));
                bpe_close(&t);
                accepted++;
            } else CHECK_MSG(strstr(st_error(), which == 0 ? broken[0] : broken[1]) != NULL || strstr(st_error(), merges_path) != NULL, "%s", st_error());
            st_text[0] = 0;
            free(copy);
        }
        CHECK(accepted < 300);
        amp_file_free(NULL, data, bytes);
        remove(broken[which]);
    }
}

TEST(token_files) {
    static const char text[] = "the model's layers";
    const char *a = scratch("a.txt"), *out = scratch("tokens.bin");
    char *paths[2];
    int32_t tokens[64];
    int64_t count = 0;
    unsigned char *file;
    void *data = NULL;
    size_t bytes = 0;
    words_model t;
    CHECK_OK(words_open_file(&t, vocab_path, merges_path, 0));
    write_text(a, text, sizeof text - 1);
    paths[0] = paths[1] = (char *)(size_t)a;
    CHECK_OK(bpe_encode(&t.pairs, text, sizeof text - 1, tokens, &count));
    CHECK_OK(token_files_write(&t, paths, 2, out));
    CHECK_OK(amp_file_read_all(NULL, out, &data, &bytes));
    file = (unsigned char *)data;
    CHECK_EQ(bytes, 1024 + 2 * 2 * (size_t)(count + 1));
    CHECK(gpt_file_i32(file) == 20240520 && gpt_file_i32(file + 4) == 1 && gpt_file_i32(file + 8) == 2 * (count + 1));
    for (int64_t i = 0; i < 2 * (count + 1); i++) {
        int64_t k = i % (count + 1);
        CHECK_EQ(file[1024 + 2 * i] | file[1025 + 2 * i] << 8, k == 0 ? t.pairs.end_of_text : tokens[k - 1]);
    }
    amp_file_free(NULL, data, bytes);
    remove(a); remove(out);
    words_close(&t);
}

/* A word of hex digits as bytes, to be freed; "+" is an empty text, "-" none. */
static char *unhex(const char *word, int64_t *n) {
    int64_t i, digits = (int64_t)strlen(word) / 2;
    char *text = (char *)calloc((size_t)digits + 1, 1), two[3] = "";
    for (i = 0; i < digits; i++) {
        memcpy(two, word + 2 * i, 2);
        text[i] = (char)strtol(two, NULL, 16);
    }
    *n = digits;
    return text;
}

/* The tokens and types of the tokenizers library for every kind of tokenizer.json.  Golden data:
   tests/torch/oracle/tokenizers_of_folders.py */
TEST(same_tokens_as_a_folder) {
    static char line[1 << 16];
    static int32_t ids[1 << 12], types[1 << 12];
    FILE *golden = fopen(AMPT_GOLDEN "/tokenizers.txt", "r");
    char open[32] = "", path[256];
    int64_t lines = 0;
    words_model w;
    memset(&w, 0, sizeof w);
    CHECK(golden != NULL);
    while (golden != NULL && fgets(line, sizeof line, golden) != NULL) {
        char *name = strtok(line, " "), *a = strtok(NULL, " "), *b = strtok(NULL, " "), *word;
        int64_t n, m, count, i = 0;
        char *first = unhex(a, &n), *second = unhex(b, &m);
        if (strcmp(name, open) != 0) {
            words_close(&w);
            snprintf(path, sizeof path, AMPT_GOLDEN "/tokenizers/%s.json", name);
            CHECK_OK(words_open_file(&w, path, NULL, 0));
            snprintf(open, sizeof open, "%s", name);
        }
        count = words_encode(&w, first, n, *b == '-' ? NULL : second, m, 1 << 12, ids, types);
        while ((word = strtok(NULL, " \n")) != NULL && *word != '|') {
            CHECK_MSG(i < count && ids[i] == atoi(word), "%s %s: token %d", name, a, (int)i);
            i++;
        }
        CHECK_MSG(i == count, "%s %s: %d tokens, expected %d", name, a, (int)count, (int)i);
        for (word = strtok(NULL, " \n"), i = 0; word != NULL && word[i] != 0; i++) CHECK_EQ(types[i], word[i] - '0');
        free(first); free(second);
        lines++;
    }
    CHECK_EQ(lines, 7 * 60);
    words_close(&w);
    if (golden != NULL) fclose(golden);
}

/* A row of two texts that is too long loses the ends of the longer one, and keeps what stands around them. */
TEST(rows_are_cut) {
    int32_t ids[16], types[16];
    words_model w;
    CHECK_OK(words_bytes(&w, 1));
    CHECK_EQ(words_encode(&w, "abcdef", 6, "xy", 2, 8, ids, types), 8);
    CHECK(ids[0] == 2 && ids[1] == 4 + 'a' && ids[3] == 4 + 'c' && ids[4] == 3 && ids[5] == 4 + 'x' && ids[7] == 3);
    CHECK(types[4] == 0 && types[5] == 1 && types[7] == 1);
    CHECK_EQ(words_encode(&w, "ab[SEP]", 7, NULL, 0, 16, ids, NULL), 5);
    CHECK(ids[3] == 3 && ids[4] == 3);
    words_close(&w);
}

/* The golden tokenizer `name` with `was` replaced, as tokenizer.json. */
static const char *changed(const char *name, const char *was, const char *is) {
    const char *path = scratch("tokenizer.json");
    char from[256], *text = NULL, *at;
    size_t bytes = 0;
    json_buffer b = {NULL, 0, 0, 0};
    snprintf(from, sizeof from, AMPT_GOLDEN "/tokenizers/%s.json", name);
    CHECK_OK(st_read_file(from, &text, &bytes));
    at = strstr(text, was);
    CHECK_MSG(at != NULL, "%s has no %s", name, was);
    if (at != NULL) json_add(&b, "%.*s%s%s", (int)(at - text), text, is, at + strlen(was));
    write_text(path, b.text, b.used);
    free(b.text); free(text);
    return path;
}

/* What would change tokens is refused by its name. */
TEST(unknown_tokenizers_are_refused) {
    static const struct { const char *file, *was, *is, *why; } cases[] = {
        {"bert", "\"strip_accents\":null", "\"strip_accents\":false", "strip_accents = false is not supported"},
        {"bert", "\"clean_text\":true", "\"clean_text\":false", "clean_text"},
        {"bert", "\"lowercase\":true", "\"lowercase\":true,\"odd\":1", "the BertNormalizer has the key odd"},
        {"bert", "\"type\":\"BertPreTokenizer\"", "\"type\":\"Whitespace\"", "the pre-tokenizer Whitespace"},
        {"bert", "\"type\":\"WordPiece\",\"unk_token\"", "\"type\":\"WordLevel\",\"unk_token\"", "the model WordLevel"},
        {"bert", "\"unk_token\":\"[UNK]\"", "\"unk_token\":\"[PAD]\"", "unk_token [UNK]"},
        {"bert", "\"version\"", "\"odd\":1,\"version\"", "the file has the key odd"},
        {"bert", "\"single_word\":false", "\"single_word\":true", "single_word = true"},
        {"bert", "\"normalized\":false", "\"normalized\":true", "normalized = true"},
        {"bert", "\"ids\":[2]", "\"ids\":[-2]", "[CLS] has no number"},
        {"bert", "\"ids\":[2]", "\"ids\":[400]", "token 400 is not in the vocabulary"},
        {"roberta", "\"sep\":[\"</s>\",3]", "\"sep\":[\"</s>\",4000]", "RobertaProcessing.sep is no token"},
        {"bert", "{\"version\"", "{{\"version\"", "not a JSON object"},
        {"roberta", "RobertaProcessing", "OddProcessing", "the post-processor OddProcessing"},
        {"roberta", "\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"trim_offsets\":true,\"use_regex\":true},\"post", "\"type\":\"Digits\"},\"post",
         "the pre-tokenizer Digits"},
        {"roberta", "\"end_of_word_suffix\":\"\"", "\"end_of_word_suffix\":\"x\"", "end_of_word_suffix"},
        {"qwen2", "\"behavior\":\"Isolated\"", "\"behavior\":\"Removed\"", "not Isolated"},
        {"qwen2", "\\\\p{N}|", "\\\\p{N}{2}|", "the Split of the pattern"},
        {"qwen2", "\"NFC\"", "\"NFKD\"", "the normalizer NFKD"},
        {"xlmr", "\"unk_id\":3", "\"unk_id\":400000", "no unk_id"},
        {"deberta", "\\\\s{2,}|", "\\\\s{3,}|", "the Replace of the pattern"},
        {"mapped", "\"precompiled_charsmap\":\"", "\"precompiled_charsmap\":\"////", "map of characters is damaged"},
        {"llama", "<0x41>", "<0x4G>", "no token for byte 65"},
        {"bert", "\"normalizer\":{\"type\":\"BertNormalizer\"", "\"normalizer\":null,\"decoder\":{\"type\":\"BertNormalizer\"",
         "WordPiece without a BertNormalizer"},
        {"bert", "{\"Sequence\":{\"id\":\"A\"", "{\"Sequence\":{\"id\":\"B\"", "the template \"single\" lacks its text"},
        {"roberta", "\"dropout\":null", "\"dropout\":0.1", "a BPE with dropout"},
        {"deberta", "\"content\":\" \"", "\"content\":\"0123456789abcdef\"", "content: a text of more than 15 bytes"}};
    words_model w;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *path = changed(cases[i].file, cases[i].was, cases[i].is);
        CHECK_MSG(words_open_file(&w, path, NULL, 0) != AMP_OK, "accepted: %s", cases[i].why);
        CHECK_MSG(strstr(ex_error(), cases[i].why) != NULL && strstr(ex_error(), path) != NULL, "%s; expected: %s", ex_error(), cases[i].why);
        CHECK(w.n_files == 0 && w.added == NULL);
        remove(path);
    }
    ex_text[0] = 0;
}

/* What is saved beside weights is what their path opens: each name's own in one folder, and no older one. */
TEST(saved_beside_weights) {
    static const char lines[] = "[PAD]\n[UNK]\n[CLS]\n[SEP]\na\n", *const names[] = {"model", "book", "book.v2"};
    static const char *const made[] = {"model.vocab.txt", "tokenizer.json", "vocab.txt", "tokenizer_config.json", "book.tokenizer.json",
                                       "book.tokenizer_config.json", "book.v2.vocab.json", "book.v2.merges.txt"};
    char folder[256], path[400], vocab[300];
    int64_t expected[3];
    words_model w, again;
    snprintf(folder, sizeof folder, "%s", scratch("folder"));
    (void)mkdir(folder, 0777);
    snprintf(vocab, sizeof vocab, "%s", scratch("lines.txt"));
    write_text(vocab, lines, sizeof lines - 1);
    for (int round = 0; round < 2; round++) {       /* the second time the first two have each other's */
        for (int i = 0; i < 3; i++) {
            if (i == 2) CHECK_OK(words_open_file(&w, vocab_path, merges_path, 0));
            else if (i == round) CHECK_OK(words_bytes(&w, 1));
            else CHECK_OK(words_open_file(&w, vocab, NULL, 0));
            expected[i] = w.n;
            snprintf(path, sizeof path, "%s/%s.safetensors", folder, names[i]);
            CHECK_OK(words_save(&w, path));
            words_close(&w);
        }
        for (int i = 0; i < 6; i++) {
            snprintf(path, sizeof path, "%s/%s%s", folder, names[i / 2], i % 2 ? i < 4 ? ".state" : "" : ".safetensors");
            CHECK_OK(words_open(&again, path, 0));
            CHECK_MSG(again.n == expected[i / 2], "%s: %d tokens", path, (int)again.n);
            words_close(&again);
        }
        snprintf(path, sizeof path, "%s/tokenizer_config.json", folder);
        CHECK(access(path, F_OK) != 0);
        write_text(path, "{\"do_lower_case\": false}", 24);      /* of an older tokenizer */
        snprintf(path, sizeof path, "%s/other.safetensors", folder);
        CHECK_OK(words_open(&again, path, 0));      /* without its own: the folder's, which is in round 1 vocab.txt */
        CHECK_EQ(again.piece.cased, round);
        words_close(&again);
    }
    for (size_t i = 0; i < sizeof made / sizeof *made; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, made[i]);
        remove(path);
    }
    snprintf(path, sizeof path, "%s/book.vocab.txt", folder);
    remove(path);
    CHECK(rmdir(folder) == 0);
    remove(vocab);
    ex_text[0] = 0;
}

/* A number between those of the vocabulary and of added tokens has no text. */
TEST(numbers_without_a_token) {
    words_model w;
    char room[8];
    int64_t length = 1;
    const char *path = changed("bert", "\"id\":4,\"content\":\"[MASK]\"", "\"id\":40000,\"content\":\"[MASK]\"");
    CHECK_OK(words_open_file(&w, path, NULL, 0));
    CHECK_EQ(w.n, 40001);
    CHECK(words_text(&w, 39999, room, &length) == NULL && length == 0);
    words_close(&w);
    remove(path);
}

/* Only a vocabulary whose numbers are the bytes' counts as bytes. */
TEST(other_orders_are_no_bytes) {
    const char *path = scratch("tokenizer.json");
    words_model w;
    char *a;
    CHECK_OK(words_bytes(&w, 0));
    CHECK(words_are_bytes(&w));
    a = strstr(w.files[0].text, "\"a\": 97, \"b\": 98");
    CHECK(a != NULL);
    if (a != NULL) { a[1] = 'b'; a[10] = 'a'; }
    write_text(path, w.files[0].text, w.files[0].bytes);
    words_close(&w);
    CHECK_OK(words_open_file(&w, path, NULL, 0));
    CHECK(w.n == 256 && !words_are_bytes(&w));
    words_close(&w);
    CHECK(words_open_file(&w, changed("mapped", "{\"type\":\"Precompiled\"", "{\"type\":\"Precompiled\",\"precompiled_charsmap\":\"AAAAAA==\"},"
                                      "{\"type\":\"Precompiled\""), NULL, 0) != AMP_OK);
    CHECK_MSG(strstr(ex_error(), "two maps of characters") != NULL, "%s", ex_error());
    remove(path);
    ex_text[0] = 0;
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(same_tokens_as_transformers);
    RUN(any_bytes_come_back);
    RUN(escapes_and_added_tokens);
    RUN(bad_files_are_refused_by_name);
    RUN(damaged_files);
    RUN(token_files);
    RUN(same_tokens_as_a_folder);
    RUN(rows_are_cut);
    RUN(unknown_tokenizers_are_refused);
    RUN(saved_beside_weights);
    RUN(numbers_without_a_token);
    RUN(other_orders_are_no_bytes);
    return TEST_END();
}
