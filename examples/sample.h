/* sample.h - text from a GPT: the next token drawn by temperature and top-k; prompts into tokens, tokens into text. */
#ifndef EXAMPLE_SAMPLE_H
#define EXAMPLE_SAMPLE_H

#include "gpt.h"
#include "model_folder.h"

/* How the next token is drawn.  temperature 0: the most likely one; top_k 0: from all tokens. */
typedef struct sampler {
    double temperature;
    int64_t top_k;
    uint64_t seed;
} sampler;

static inline int sample_falling(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return x < y ? 1 : x > y ? -1 : 0;
}

/* Draws from softmax(logits / temperature), restricted to the top_k largest; u is uniform in [0, 1).  -1: a logit is
   NaN or infinite. */
static inline int32_t sample_token(const sampler *s, float *logits, float *scratch, int64_t vocab, double u) {
    float best = logits[0], least = -3.4e38f;
    double total = 0, sum = 0;
    int64_t i, at = 0;
    for (i = 0; i < vocab; i++) {
        if (!amp_is_finite_f32(&logits[i])) return -1;
        if (logits[i] > best) { best = logits[i]; at = i; }
    }
    if (s->temperature <= 0) return (int32_t)at;
    if (s->top_k > 0 && s->top_k < vocab) {
        memcpy(scratch, logits, (size_t)vocab * sizeof *scratch);
        qsort(scratch, (size_t)vocab, sizeof *scratch, sample_falling);
        least = scratch[s->top_k - 1];
    }
    for (i = 0; i < vocab; i++) {
        double weight = logits[i] < least ? 0 : exp((double)(logits[i] - best) / s->temperature);
        scratch[i] = (float)weight;
        total += (double)scratch[i];
    }
    for (i = 0; i < vocab; i++) {
        sum += (double)scratch[i];
        if (scratch[i] > 0 && sum > u * total) return (int32_t)i;
    }
    return (int32_t)at;
}

/* The same, but an error if there is no such token. */
static inline amp_result sample_next(const sampler *s, float *logits, float *scratch, int64_t vocab, double u,
                                     int32_t *token) {
    *token = sample_token(s, logits, scratch, vocab, u);
    return *token >= 0 ? AMP_OK : ex_fail(AMP_ERR_RANGE, "the model's output is NaN or infinite: its weights are "
                                          "damaged, or its numbers leave the range of the precision");
}

/* The logits after `tokens`, from the last config.seq of them, on the host. */
static inline amp_result gpt_next_logits(gpt *g, const int32_t *tokens, int64_t n, int32_t *ids, float *logits) {
    int64_t seq = n < g->config.seq ? n : g->config.seq;
    EX_TRY(amp_copy(g->amp, ids, tokens + n - seq, seq * (int64_t)sizeof *ids, AMP_COPY_TO_DEVICE));
    EX_TRY(gpt_forward(g, ids, 1, seq, 1));
    return amp_tape_read(g->tape, g->logits, logits, g->config.vocab);
}

/* Continues tokens[0..n-1] up to `wanted` tokens.  Random numbers: Philox stream 0 of the sampler's seed. */
static inline amp_result gpt_sample(gpt *g, const sampler *s, int32_t *tokens, int64_t n, int64_t wanted) {
    float *logits = (float *)malloc((size_t)g->config.vocab * 2 * sizeof *logits);
    void *ids = NULL;
    amp_result result = logits != NULL ? AMP_OK : ex_fail(AMP_ERR_MEMORY, "no memory for logits");
    if (result == AMP_OK) result = amp_alloc(g->amp, &ids, g->config.seq * (int64_t)sizeof(int32_t));
    for (; n < wanted && result == AMP_OK && !ex_stop_requested; n++) {
        result = gpt_next_logits(g, tokens, n, (int32_t *)ids, logits);
        if (result == AMP_OK)
            result = sample_next(s, logits, logits + g->config.vocab, g->config.vocab,
                                 (double)amp_random_uniform(s->seed, (uint64_t)n), &tokens[n]);
    }
    amp_free(g->amp, ids);
    free(logits);
    return result;
}

/* ---- Text.  t: the tokenizer; with t->n 0 the tokens are bytes if the vocabulary is 256, else they are not text. */

static inline int sample_is_bytes(const words_model *t, int64_t vocab) { return t->n == 0 && vocab == 256; }

/* Turns SentencePiece's U+2581 into spaces, in place, without the one at the start. */
static inline void words_spaces(char *text) {
    char *out = text, *at;
    for (at = text; *at != 0; at++) {
        if (strncmp(at, "\xe2\x96\x81", 3) != 0) { *out++ = *at; continue; }
        if (at > text) *out++ = ' ';
        at += 2;
    }
    *out = 0;
}

/* The tokens as text, to be freed; NULL if they are not text, or without memory.  Zeros become spaces. */
static inline char *sample_text(const words_model *t, int64_t vocab, const int32_t *tokens, int64_t n) {
    json_buffer b = {NULL, 0, 0, 0};
    int64_t i, length;
    char room[8];
    if (t->n == 0 && !sample_is_bytes(t, vocab)) return NULL;
    json_put(&b, "", 0);
    for (i = 0; i < n; i++) {
        const char *piece = room;
        room[0] = (char)tokens[i];
        length = 1;
        if (t->n > 0) piece = words_text(t, tokens[i], room, &length);
        json_put(&b, piece != NULL ? piece : "", (size_t)length);
    }
    for (i = 0; i < (int64_t)b.used && !b.failed; i++) if (b.text[i] == 0) b.text[i] = ' ';
    if (t->pairs.characters && !b.failed) words_spaces(b.text);
    if (b.failed) free(b.text);
    return b.failed ? NULL : b.text;
}

/* Prints a text with '?' for what is no character, or one that moves the cursor. */
static inline void sample_print(const char *text) {
    int64_t left = (int64_t)strlen(text), n;
    uint32_t code;
    for (; left > 0; text += n, left -= n) {
        n = utf8_read(text, left, &code);
        if (code == '\n' || code == '\t' || (code >= 0x20 && code != 0x7f && !(code == 0xfffd && n == 1)))
            printf("%.*s", (int)n, text);
        else putchar('?');
    }
}

/* A prompt's tokens; of an empty one the separator of texts, or a line's end.  tokens: space for the prompt's bytes and
   WORDS_PARTS more. */
static inline amp_result sample_prompt(words_model *t, int64_t vocab, const char *prompt, int32_t *tokens, int64_t *n) {
    const char *text = *prompt != 0 ? prompt : "\n";
    int64_t i, bytes = (int64_t)strlen(text);
    *n = 1;
    tokens[0] = (int32_t)vocab - 1;
    if (sample_is_bytes(t, vocab)) for (i = 0, *n = bytes; i < bytes; i++) tokens[i] = (unsigned char)text[i];
    if (t->n == 0) return AMP_OK;
    if (*prompt == 0 && words_find(t, "<|endoftext|>") >= 0) {
        tokens[0] = words_find(t, "<|endoftext|>");
        return AMP_OK;
    }
    *n = words_encode(t, text, bytes, NULL, 0, bytes + WORDS_PARTS, tokens, NULL);
    if (*n == 0) return ex_fail(AMP_ERR_RANGE, "the prompt has no tokens");
    if (*n == bytes + WORDS_PARTS) return ex_fail(AMP_ERR_RANGE, "the prompt has more tokens than bytes");
    return *n > 0 ? AMP_OK : AMP_ERR_MEMORY;
}

#endif
