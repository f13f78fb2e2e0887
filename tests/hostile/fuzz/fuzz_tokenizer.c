/* fuzz_tokenizer.c - fuzzes the readers of the vocabularies and merges of GPT-2 and BERT, and their tokenizers.
 *
 * The first byte says which.  Then come the files' texts and a text to encode, with a 0 between them.  GPT-2's tokens must
 * give back the bytes of the text, and must be those that the simplest way of merging finds.  BERT's must be numbers of the
 * vocabulary. */
#include "fuzz.h"

enum { TOKENIZER_TEXT_MOST = 512 };

/* The text up to the next 0, or the rest. */
static const char *tokenizer_part(const char **at, const char *end, size_t *bytes) {
    const char *start = *at, *stop = (const char *)memchr(start, 0, (size_t)(end - start));
    *bytes = (size_t)((stop != NULL ? stop : end) - start);
    *at = stop != NULL ? stop + 1 : end;
    return start;
}

/* The entries of the 256 bytes, as GPT-2 writes them, and after them those of the input. */
static char *tokenizer_with_bytes(const char *entries, size_t n, size_t *bytes) {
    static char head[8192];
    static size_t used;
    bpe t;
    char *out = (char *)malloc(sizeof head + n);
    bpe_alphabet(&t);
    if (used == 0)
        for (int code = 0; code < BPE_ALPHABET; code++)
            if (t.byte_of[code] >= 0)
                used += (size_t)snprintf(head + used, sizeof head - used, "%c\"\\u%04x\": %d", used > 0 ? ',' : '{', code, t.byte_of[code]);
    *bytes = 0;
    if (out == NULL) return NULL;
    memcpy(out, head, used);
    *bytes = used;
    if (n > 0) { out[(*bytes)++] = ','; memcpy(out + *bytes, entries, n); *bytes += n; }
    out[(*bytes)++] = '}';
    return out;
}

/* A word's tokens by joining, again and again, the leftmost pair of the lowest rank. */
static int64_t tokenizer_plainly(const bpe *t, const char *text, int64_t n, int32_t *id) {
    for (int64_t i = 0; i < n; i++) id[i] = t->byte_token[(unsigned char)text[i]];
    for (;;) {
        const bpe_merge *best = NULL;
        int64_t at = 0;
        for (int64_t i = 0; i + 1 < n; i++) {
            const bpe_merge *m = bpe_pair(t, id[i], id[i + 1]);
            if (m->result >= 0 && (best == NULL || m->rank < best->rank)) { best = m; at = i; }
        }
        if (best == NULL) return n;
        id[at] = best->result;
        memmove(id + at + 1, id + at + 2, (size_t)(n - at - 2) * sizeof *id);
        n--;
    }
}

static void tokenizer_encode_check(bpe *t, const char *text, int64_t n) {
    int32_t tokens[TOKENIZER_TEXT_MOST];
    int32_t plain[TOKENIZER_TEXT_MOST];
    int64_t count = 0, at = 0, length, i;
    CLAIM(bpe_encode(t, text, n, tokens, &count) == AMP_OK && count <= n);
    for (i = 0; i < count; i++) {
        const char *piece = bpe_text(t, tokens[i], &length);
        CLAIM(piece != NULL && at + length <= n && memcmp(piece, text + at, (size_t)length) == 0);
        at += length;
    }
    CLAIM(at == n);
    if (t->end_of_text >= 0) return;        /* a token of its own, which is not merged */
    for (at = i = 0; at < n; at += length) {
        length = bpe_word_length(text + at, n - at);
        int64_t k, more = tokenizer_plainly(t, text + at, length, plain);
        for (k = 0; k < more; k++, i++) CLAIM(i < count && tokens[i] == plain[k]);
    }
    CLAIM(i == count);
}

static void tokenizer_gpt2(const char *at, const char *end, int with_bytes) {
    size_t bytes, merges_bytes, text_bytes;
    const char *entries = tokenizer_part(&at, end, &bytes), *merges = tokenizer_part(&at, end, &merges_bytes), *text = at;
    char *vocab = with_bytes ? tokenizer_with_bytes(entries, bytes, &bytes) : (char *)fuzz_copy(entries, bytes);
    char *merges_copy = (char *)fuzz_copy(merges, merges_bytes);
    amp_result result;
    bpe t;
    text_bytes = (size_t)(end - at);
    if (text_bytes > TOKENIZER_TEXT_MOST) text_bytes = TOKENIZER_TEXT_MOST;
    memset(&t, 0, sizeof t);
    bpe_alphabet(&t);
    if (vocab != NULL && merges_copy != NULL) {
        result = ex_st(bpe_vocab(&t, "vocab", vocab, bytes));
        if (result == AMP_OK) result = ex_st(bpe_merges(&t, "merges", merges_copy, merges_bytes));
        fuzz_told(result);
        if (result == AMP_OK) tokenizer_encode_check(&t, text, (int64_t)text_bytes);
    }
    bpe_close(&t);
    free(vocab);
    free(merges_copy);
}

static void tokenizer_bert(const char *at, const char *end, int cased) {
    int32_t tokens[64];
    size_t bytes;
    const char *lines = tokenizer_part(&at, end, &bytes);
    wordpiece w;
    memset(&w, 0, sizeof w);
    w.text = (char *)malloc(bytes + 1);
    if (w.text == NULL) return;
    memcpy(w.text, lines, bytes);
    w.text[bytes] = 0;
    w.text_bytes = bytes;
    w.cased = cased;
    amp_result result = ex_st(wordpiece_parse(&w, "vocab"));
    fuzz_told(result);
    if (result == AMP_OK) {
        int64_t all = wordpiece_encode(&w, at, end - at, tokens, 64), i;
        CLAIM(all >= 0 && all <= 64);
        for (i = 0; i < all; i++) CLAIM(tokens[i] >= 0 && tokens[i] < w.n);
        int32_t fewer[3];
        CLAIM(wordpiece_encode(&w, at, end - at, fewer, 3) == (all < 3 ? all : 3) && memcmp(fewer, tokens, (size_t)(all < 3 ? all : 3) * 4) == 0);
    }
    wordpiece_close(&w);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const char *at, *end;
    char *copy;
    if (size < 1) return 0;
    copy = (char *)fuzz_copy(data + 1, size - 1);
    if (copy == NULL) return 0;
    at = copy;
    end = copy + size - 1;
    ex_text[0] = 0;
    switch (data[0] & 3) {
        case 0: tokenizer_gpt2(at, end, 1); break;
        case 1: tokenizer_gpt2(at, end, 0); break;
        case 2: tokenizer_bert(at, end, 0); break;
        default: tokenizer_bert(at, end, 1); break;
    }
    free(copy);
    return 0;
}
