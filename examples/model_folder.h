/* model_folder.h - the folder of a model as transformers writes it: its weights in one file or in several, and its
 * tokenizer.
 *
 *     model_weights weights;                           model.safetensors, or its index and all shards
 *     EX_TRY(weights_open(&weights, "bert"));          the folder, or a file; weights.tensors are those of all files
 *     words_model tokenizer;                           tokenizer.json; or vocab.txt; or vocab.json and merges.txt
 *     EX_TRY(words_open(&tokenizer, weights.path, 0)); beside the weights
 *     count = words_encode(&tokenizer, text, n, NULL, 0, 128, ids, NULL);  with [CLS] and [SEP], or what it has
 *     EX_TRY(words_save(&tokenizer, "out/model"));     the files that it came from, beside what a program saves:
 *                                                      of out/book.safetensors out/book.tokenizer.json and so on
 *
 * A tokenizer.json is WordPiece, BPE of bytes or of characters, or Unigram.  Nothing in a file is trusted.  What would
 * change a token and is not known here is refused by its name; what changes none stands in words_ignored. */
#ifndef EXAMPLE_MODEL_FOLDER_H
#define EXAMPLE_MODEL_FOLDER_H

#include "bpe.h"
#include "config.h"
#include "model_files.h"
#include "nfc.h"
#include "wordpiece.h"

/* ==== Weights ==================================================================================== */

enum { WEIGHTS_MOST_FILES = 1000 };
typedef struct weights_part { char name[256]; void *data; size_t bytes; } weights_part;
typedef struct model_weights {
    char path[PATH_MAX];            /* model.safetensors in its folder, or the file that was asked for */
    weights_part *parts;            /* the files */
    int64_t n_parts;
    st_file tensors;                /* of all files, by name */
} model_weights;

static inline void weights_close(model_weights *w) {
    int64_t i;
    for (i = 0; i < w->n_parts; i++) amp_file_free(NULL, w->parts[i].data, w->parts[i].bytes);
    free(w->parts);
    st_close(&w->tensors);
    memset(w, 0, sizeof *w);
}

/* The folder of a path, with its last '/'; a path without one is in "". */
static inline void folder_beside(const char *path, const char *name, char out[PATH_MAX]) {
    const char *slash = strrchr(path, '/');
    snprintf(out, PATH_MAX, "%.*s%s", slash != NULL ? (int)(slash - path) + 1 : 0, path, name);
}
static inline int folder_has(const char *path, const char *name, char out[PATH_MAX]) {
    folder_beside(path, name, out);
    return access(out, R_OK) == 0;
}

/* Reads one file, whose name is kept, and joins its tensors to the others. */
static inline amp_result weights_add(model_weights *w, const char *name) {
    char path[PATH_MAX];
    weights_part *part = &w->parts[w->n_parts];
    st_tensor *more;
    st_file file;
    folder_beside(w->path, name, path);
    snprintf(part->name, sizeof part->name, "%s", name);
    EX_TRY(amp_file_read_all(NULL, path, &part->data, &part->bytes));
    w->n_parts++;
    EX_TRY(ex_st(st_open(&file, part->data, part->bytes)));
    if (w->tensors.n == 0) {
        st_close(&w->tensors);
        w->tensors = file;
        return AMP_OK;
    }
    more = (st_tensor *)realloc(w->tensors.tensors, (size_t)(w->tensors.n + file.n) * sizeof *more);
    if (more != NULL) {
        if (file.n > 0) memcpy(more + w->tensors.n, file.tensors, (size_t)file.n * sizeof *more);
        w->tensors.tensors = more;
        w->tensors.n += file.n;
    }
    st_close(&file);
    return more != NULL ? AMP_OK : ex_fail(AMP_ERR_MEMORY, "%s: no memory for its tensors", path);
}

/* The files of an index: {"weight_map": {"tensor": "file", ...}}, each once. */
static inline amp_result weights_of_index(model_weights *w, const char *path, const char *text, size_t bytes) {
    json map, value;
    char name[128], file[256];
    int64_t i;
    int more;
    if (!json_value(json_open(text, bytes), "weight_map", &map) || !json_take(&map, '{'))
        return ex_fail(AMP_ERR_FORMAT, "%s: there is no \"weight_map\"", path);
    for (more = json_peek(&map) == '"'; more && json_member(&map, name, &value); more = json_take(&map, ',')) {
        if (!json_text(value, file, sizeof file) || *value.at != '"' || *file == 0 || strchr(file, '/') != NULL)
            return ex_fail(AMP_ERR_FORMAT, "%s: the file of %s must be a name without a folder", path, name);
        for (i = w->n_parts - 1; i >= 0 && strcmp(w->parts[i].name, file) != 0; i--) {}
        if (i >= 0) continue;
        if (w->n_parts == WEIGHTS_MOST_FILES)
            return ex_fail(AMP_ERR_SIZE, "%s: more than %d files", path, WEIGHTS_MOST_FILES);
        EX_TRY(weights_add(w, file));
    }
    if (map.bad || w->n_parts == 0) return ex_fail(AMP_ERR_FORMAT, "%s: the \"weight_map\" is damaged or empty", path);
    qsort(w->tensors.tensors, (size_t)w->tensors.n, sizeof *w->tensors.tensors, st_by_name);
    for (i = 1; i < w->tensors.n; i++)
        if (st_by_name(&w->tensors.tensors[i - 1], &w->tensors.tensors[i]) == 0)
            return ex_fail(AMP_ERR_FORMAT, "%s: %s is in two files", path, w->tensors.tensors[i].name);
    if (!json_value(json_open(text, bytes), "weight_map", &map) || !json_take(&map, '{')) return AMP_OK;
    for (more = json_peek(&map) == '"'; more && json_member(&map, name, &value); more = json_take(&map, ','))
        if (st_find(&w->tensors, name) == NULL)
            return ex_fail(AMP_ERR_FORMAT, "%s: %s is in none of the files", path, name);
    return AMP_OK;
}

static inline amp_result weights_open_files(model_weights *w, const char *path) {
    char index[PATH_MAX];
    const char *slash = strrchr(w->path, '/'), *name = slash != NULL ? slash + 1 : w->path;
    int missing = access(w->path, R_OK) != 0 && strcmp(name, "model.safetensors") == 0;
    void *text;
    size_t bytes;
    amp_result result;
    if (!missing || !folder_has(w->path, "model.safetensors.index.json", index)) {
        if (missing && folder_has(w->path, "pytorch_model.bin", index))
            return ex_fail(AMP_ERR_OPEN, "%s: has pytorch_model.bin, which is not read: save the model as safetensors",
                           path);
        return weights_add(w, name);
    }
    EX_TRY(amp_file_read_all(NULL, index, &text, &bytes));
    result = weights_of_index(w, index, (const char *)text, bytes);
    amp_file_free(NULL, text, bytes);
    return result;
}

/* The file that a path stands for: of a folder its model.safetensors. */
static inline amp_result weights_path(const char *path, char out[PATH_MAX]) {
    struct stat info;
    size_t n = strlen(path);
    int folder = stat(path, &info) == 0 && S_ISDIR(info.st_mode);
    if (n > PATH_MAX - 100) return ex_fail(AMP_ERR_OPEN, "%.60s...: the path is too long", path);
    snprintf(out, PATH_MAX, "%s%s%s", path, folder && n > 0 && path[n - 1] != '/' ? "/" : "",
             folder ? "model.safetensors" : "");
    return AMP_OK;
}

/* Opens the weights of a folder, or one file. */
static inline amp_result weights_open(model_weights *w, const char *path) {
    amp_result result;
    memset(w, 0, sizeof *w);
    EX_TRY(weights_path(path, w->path));
    w->parts = (weights_part *)calloc(WEIGHTS_MOST_FILES, sizeof *w->parts);
    if (w->parts == NULL) return ex_fail(AMP_ERR_MEMORY, "%s: no memory", path);
    result = weights_open_files(w, path);
    if (result != AMP_OK) weights_close(w);
    return result;
}

/* ---- Tensors that a model has no place for */

/* Marks a tensor of the file as one that the model has.  NULL: none. */
static inline void weights_mark(const st_file *file, const st_tensor *t, unsigned char *known) {
    if (t != NULL) known[t - file->tensors] = 1;
}

/* What a kind of model keeps in its file without learning it: masks, numbers of positions, rotations. */
static inline int weights_is_buffer(const char *name) {
    static const char *const ends[] = {".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq", ".position_ids",
                                       ".token_type_ids"};
    size_t n = strlen(name), i, k;
    for (i = 0; i < sizeof ends / sizeof *ends; i++) {
        k = strlen(ends[i]);
        if (n >= k && strcmp(name + n - k, ends[i]) == 0) return 1;
    }
    return 0;
}

/* 1: the name, without its prefix, begins with one of `parts`, "a. b. c.". */
static inline int weights_is_part(const char *name, const char *prefix, const char *parts) {
    size_t n = strlen(prefix);
    if (strncmp(name, prefix, n) == 0) name += n;
    while (*parts != 0) {
        n = strcspn(parts, " ");
        if (strncmp(name, parts, n) == 0) return 1;
        parts += n + (parts[n] == ' ');
    }
    return 0;
}

/* Looks at the tensors that are not marked.  One that belongs to `parts`, with or without the prefix, would change what
   the model computes and is refused; those of other heads are named in the remarks on the config. */
static inline amp_result weights_rest(const st_file *file, const unsigned char *known, const char *prefix,
                                      const char *parts, config_model *m) {
    int64_t i, n = 0;
    for (i = 0; i < file->n; i++) {
        const char *name = file->tensors[i].name;
        if (known[i] || weights_is_buffer(name)) continue;
        if (weights_is_part(name, prefix, parts))
            return ex_fail(AMP_ERR_UNSUPPORTED, "%s: the weights have %s, which would change what the model computes, "
                           "and which this kind of model does not have", m->path, name);
        if (n < 3) config_note(m, "%s%s", n > 0 ? ", " : *m->note != 0 ? "; does not mention " : "does not mention ",
                               name);
        n++;
    }
    if (n > 3) config_note(m, " and %lld more of the weights", (long long)n - 3);
    return AMP_OK;
}

/* ==== A tokenizer ================================================================================ */

typedef enum words_kind { WORDS_NONE, WORDS_PIECE, WORDS_BPE, WORDS_UNIGRAM } words_kind;
enum { WORDS_STEPS = 16, WORDS_PARTS = 32, WORDS_FILES = 4 };

/* A token that is found in a text before anything else is done.  left, right: the white space there is part of it. */
typedef struct words_added { char *text; int32_t id, length; int left, right, special; } words_added;

/* What a step does to a text: normalizers before, pre-tokenizers behind. */
typedef enum words_step_kind {
    STEP_NFC, STEP_REPLACE, STEP_SPACES, STEP_BREAKS, STEP_PREPEND, STEP_STRIP, STEP_CHARSMAP,
    STEP_BYTES, STEP_NEWER, STEP_WHITE, STEP_META
} words_step_kind;
/* REPLACE: a by b; SPACES: runs of spaces by b; BREAKS: \s{2,}|[\n\r\t] by b; STRIP: left and right; BYTES: by GPT-2's
   rule, left: a space first; NEWER: left digits at most; META: a for spaces, left: 1 before every part of a text, 2
   before its first, right: cut there. */
typedef struct words_step { words_step_kind kind; char a[16], b[16]; int left, right; } words_step;

/* A part of what encoding gives: a token, or one of the two texts (token -1 and -2). */
typedef struct words_part { int32_t token, type; } words_part;

typedef struct words_model {
    words_kind kind;
    int64_t n;                      /* the highest token + 1 */
    int32_t pad;
    char path[PATH_MAX];            /* of its first file */
    char prefix[300];               /* what its files' names begin with: "book." of book.safetensors, or "" */
    struct { char name[32]; char *text; size_t bytes; } files[WORDS_FILES];
    int n_files;
    words_added *added; int64_t n_added;
    words_step steps[WORDS_STEPS]; int n_steps, first_cut;      /* from first_cut on they cut */
    words_part single[WORDS_PARTS], pair[WORDS_PARTS]; int n_single, n_pair;
    wordpiece piece;                /* WORDS_PIECE */
    bpe pairs;                      /* WORDS_BPE */
    double *scores, least;          /* WORDS_UNIGRAM: of the tokens of `pairs`, which holds their texts */
    int32_t unknown; int64_t longest;
    int byte_fallback;
    unsigned char *charsmap; int64_t charsmap_units, charsmap_bytes;    /* of STEP_CHARSMAP */
    int32_t *out; int64_t used, room;   /* tokens of the text at hand */
} words_model;

static inline void words_close(words_model *w) {
    int64_t i;
    for (i = 0; i < w->n_files; i++) free(w->files[i].text);
    for (i = 0; i < w->n_added; i++) free(w->added[i].text);
    free(w->added); free(w->scores); free(w->charsmap); free(w->out);
    wordpiece_close(&w->piece);
    bpe_close(&w->pairs);
    memset(w, 0, sizeof *w);
}

/* ---- Encoding one text */

static inline amp_result words_put(words_model *w, int32_t token) {
    if (w->used == w->room) {
        int64_t room = 2 * w->room + 256;
        int32_t *more = (int32_t *)realloc(w->out, (size_t)room * sizeof *more);
        if (more == NULL) return ex_fail(AMP_ERR_MEMORY, "no memory for the tokens of a text");
        w->out = more;
        w->room = room;
    }
    w->out[w->used++] = token;
    return AMP_OK;
}
static inline amp_result words_reserve(words_model *w, int64_t n) {
    int32_t *more;
    if (w->room - w->used >= n) return AMP_OK;
    more = (int32_t *)realloc(w->out, (size_t)(2 * w->room + n) * sizeof *more);
    if (more == NULL) return ex_fail(AMP_ERR_MEMORY, "no memory for the tokens of a text");
    w->out = more;
    w->room = 2 * w->room + n;
    return AMP_OK;
}

/* One place of a text that Unigram cuts: the best way there ends in a token that begins at `from`; -1: none does. */
typedef struct words_way { double score; int64_t from; int32_t token; } words_way;

/* The most likely tokens of a word: Viterbi's search; characters that no token has count as the unknown one, and those
   that follow each other are one. */
static inline void words_ways(const words_model *w, const char *text, int64_t n, words_way *ways) {
    int64_t at, length, first;
    uint32_t code;
    for (at = 0; at <= n; at++) { ways[at].score = 0; ways[at].from = -1; ways[at].token = w->unknown; }
    for (at = 0; at < n; at += first) {
        int single = 0;
        double score;
        words_way *way;
        first = utf8_read(text + at, n - at, &code);
        for (length = first; at + length <= n && length <= w->longest;) {
            int32_t token = bpe_find(&w->pairs, text + at, length);
            way = &ways[at + length];
            if (token >= 0) {
                score = w->scores[token] + ways[at].score;
                if (way->from < 0 || score > way->score) { way->score = score; way->from = at; way->token = token; }
                if (length == first) single = 1;
            }
            if (at + length < n) length += utf8_read(text + at + length, n - at - length, &code);
            else break;
        }
        if (single) continue;
        way = &ways[at + first];
        score = w->least - 10 + ways[at].score;
        if (way->from < 0 || score > way->score) { way->score = score; way->from = at; way->token = w->unknown; }
    }
}
static inline amp_result words_unigram(words_model *w, const char *text, int64_t n) {
    words_way *ways = (words_way *)malloc((size_t)(n + 1) * sizeof *ways);
    int64_t at, before = w->used, i, k;
    amp_result result = ways != NULL ? AMP_OK : ex_fail(AMP_ERR_MEMORY, "no memory for a word of %lld bytes",
                                                        (long long)n);
    if (result == AMP_OK) words_ways(w, text, n, ways);
    for (at = n; at > 0 && result == AMP_OK; at = ways[at].from) {
        int unknown = ways[at].token == w->unknown;
        if (unknown && w->byte_fallback)
            for (i = at - 1; i >= ways[at].from && result == AMP_OK; i--)
                result = words_put(w, w->pairs.byte_token[(unsigned char)text[i]]);
        else if (!unknown || w->used == before || w->out[w->used - 1] != w->unknown)
            result = words_put(w, ways[at].token);
    }
    for (i = before, k = w->used - 1; i < k; i++, k--) {
        int32_t token = w->out[i];
        w->out[i] = w->out[k];
        w->out[k] = token;
    }
    free(ways);
    return result;
}

/* The model's tokens of one word. */
static inline amp_result words_word(words_model *w, const char *text, int64_t n) {
    int64_t more;
    if (n == 0) return AMP_OK;
    if (w->kind == WORDS_UNIGRAM) return words_unigram(w, text, n);
    EX_TRY(words_reserve(w, 3 * n + 1));        /* WordPiece: a character may become three */
    if (w->kind == WORDS_PIECE) more = wordpiece_encode(&w->piece, text, n, w->out + w->used, 3 * n + 1);
    else more = bpe_encode_word(&w->pairs, text, n, w->out + w->used);
    if (more < 0) return ex_fail(AMP_ERR_MEMORY, "%s", st_error());
    w->used += more;
    return AMP_OK;
}

static inline amp_result words_cut(words_model *w, int step, const char *text, int64_t n, int first);

/* Spaces become `a`, one stands before the text, and before each a word begins. */
static inline amp_result words_meta(words_model *w, int step, const char *text, int64_t n, int first) {
    const words_step *s = &w->steps[step];
    int64_t mark = (int64_t)strlen(s->a), at, from = 0;
    json_buffer b = {NULL, 0, 0, 0};
    amp_result result = AMP_OK;
    int starts = n > 0 && (text[0] == ' ' || (n >= mark && memcmp(text, s->a, (size_t)mark) == 0));
    if ((s->left == 1 || (s->left == 2 && first)) && !starts) json_put(&b, s->a, (size_t)mark);
    for (at = 0; at < n; at++) json_put(&b, text[at] == ' ' ? s->a : text + at, text[at] == ' ' ? (size_t)mark : 1);
    if (b.failed) result = ex_fail(AMP_ERR_MEMORY, "no memory for a text");
    for (at = 1; at <= (int64_t)b.used && result == AMP_OK; at++) {
        if (at < (int64_t)b.used && (!s->right || at + mark > (int64_t)b.used ||
                                     memcmp(b.text + at, s->a, (size_t)mark) != 0)) continue;
        result = words_cut(w, step + 1, b.text + from, at - from, first && from == 0);
        from = at;
    }
    free(b.text);
    return result;
}

/* Words between white space, which is dropped. */
static inline amp_result words_white(words_model *w, int step, const char *text, int64_t n, int first) {
    int64_t at, from = 0, length;
    uint32_t code;
    for (at = 0; at < n; at += length) {
        length = utf8_read(text + at, n - at, &code);
        if (bpe_class(code) != BPE_SPACE) continue;
        if (at > from) EX_TRY(words_cut(w, step + 1, text + from, at - from, first && from == 0));
        from = at + length;
    }
    return n > from ? words_cut(w, step + 1, text + from, n - from, first && from == 0) : AMP_OK;
}

/* Words by a rule of GPT-2 or a newer one. */
static inline amp_result words_rule(words_model *w, int step, const char *text, int64_t n, int first) {
    const words_step *s = &w->steps[step];
    int64_t at, length;
    for (at = 0; at < n; at += length) {
        length = s->kind == STEP_NEWER ? bpe_word_length_newer(text + at, n - at, s->left)
                                       : bpe_word_length(text + at, n - at);
        EX_TRY(words_cut(w, step + 1, text + at, length, first && at == 0));
    }
    return AMP_OK;
}

/* Cuts a text by the steps from `step` on, and each word by the model.  first: it begins the whole text. */
static inline amp_result words_cut(words_model *w, int step, const char *text, int64_t n, int first) {
    const words_step *s = &w->steps[step];
    json_buffer b = {NULL, 0, 0, 0};
    amp_result result;
    if (step == w->n_steps) return words_word(w, text, n);
    if (s->kind == STEP_META) return words_meta(w, step, text, n, first);
    if (s->kind == STEP_WHITE) return words_white(w, step, text, n, first);
    if (s->kind == STEP_BYTES && s->left && n > 0 && text[0] != ' ') {
        json_put(&b, " ", 1);
        json_put(&b, text, (size_t)n);
        if (b.failed) return ex_fail(AMP_ERR_MEMORY, "no memory for a text");
        text = b.text;
        n++;
    }
    result = s->kind == STEP_BYTES && !s->right ? words_cut(w, step + 1, text, n, first)
                                                : words_rule(w, step, text, n, first);
    free(b.text);
    return result;
}

/* ---- Normalizers */

/* Puts a replacement for runs of spaces (pattern 0), or for runs of two or more white spaces and for single breaks of
   lines and tabs (pattern 1). */
static inline void words_runs(const words_step *s, const char *text, int64_t n, json_buffer *out) {
    int64_t at, end, length = 0, count;
    uint32_t code;
    for (at = 0; at < n; at = end) {
        int many = s->kind == STEP_SPACES;
        for (end = at, count = 0; end < n; end += length, count++) {
            length = utf8_read(text + end, n - end, &code);
            if (many ? code != ' ' : bpe_class(code) != BPE_SPACE) break;
        }
        if (count >= 2 || (count == 1 && !many && strchr("\n\r\t", text[at]) != NULL))
            json_put(out, s->b, strlen(s->b));
        else {
            if (end == at) end += length;
            json_put(out, text + at, (size_t)(end - at));
        }
    }
}

static inline void words_replace(const words_step *s, const char *text, int64_t n, json_buffer *out) {
    int64_t length = (int64_t)strlen(s->a), at = 0;
    while (at < n) {
        if (length > 0 && at + length <= n && memcmp(text + at, s->a, (size_t)length) == 0) {
            json_put(out, s->b, strlen(s->b));
            at += length;
        } else json_put(out, text + at++, 1);
    }
}

static inline void words_strip(const words_step *s, const char *text, int64_t n, json_buffer *out) {
    int64_t at, length, from = -1, end = 0;
    uint32_t code;
    for (at = 0; at < n; at += length) {
        length = utf8_read(text + at, n - at, &code);
        if (bpe_class(code) == BPE_SPACE) continue;
        if (from < 0) from = at;
        end = at + length;
    }
    if (from < 0) return;
    if (!s->left) from = 0;
    if (!s->right) end = n;
    json_put(out, text + from, (size_t)(end - from));
}

/* A unit of the map of characters, SentencePiece's trie in an array: bits 0 to 7 and 31 the label, 8 a leaf, 9 a wide
   offset, 10 to 30 the offset to the children. */
static inline uint32_t words_unit(const words_model *w, int64_t i) {
    const unsigned char *p = w->charsmap + 4 * i;
    return i >= 0 && i < w->charsmap_units ? (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 |
                                                 (uint32_t)p[3] << 24 : 0;
}
/* What the shortest beginning of the text that the map knows becomes; NULL: it knows none. */
static inline const char *words_mapped(const words_model *w, const char *text, int64_t n) {
    uint32_t unit = words_unit(w, 0);
    int64_t place = (int64_t)((unit >> 10) << ((unit & 0x200u) >> 6)), i, value;
    for (i = 0; i < n && text[i] != 0; i++) {
        place ^= (unsigned char)text[i];
        unit = words_unit(w, place);
        if ((unit & 0x800000ffu) != (unsigned char)text[i]) return NULL;
        place ^= (int64_t)((unit >> 10) << ((unit & 0x200u) >> 6));
        if ((unit & 0x100u) == 0) continue;
        value = 4 * w->charsmap_units + (int64_t)(words_unit(w, place) & 0x7fffffffu);
        return value < w->charsmap_bytes ? (const char *)w->charsmap + value : NULL;
    }
    return NULL;
}

/* What stays with the character before it: marks, joiners, the later letters of a Hangul syllable, a line feed after a
   carriage return.  (Unicode's clusters have a few more: spacing marks and flags.) */
static inline int words_joins(uint32_t before, uint32_t code) {
    int lead = before >= 0x1100 && before < 0x1160, syllable = before >= 0xac00 && before < 0xd7a4;
    int vowel = code >= 0x1160 && code < 0x11a8, tail = code >= 0x11a8 && code < 0x1200;
    int control = before < ' ' || (before >= 0x7f && before < 0xa0) || before == 0xad || before == 0x200b ||
                  (before >= 0x200e && before < 0x2010) || (before >= 0x2028 && before < 0x202f) ||
                  (before >= 0x2060 && before < 0x2070) || before == 0xfeff;
    if (before == '\r') return code == '\n';
    if (control) return 0;
    if (lead && ((code >= 0x1100 && code < 0x1160) || (code >= 0xac00 && code < 0xd7a4))) return 1;
    if (vowel && (lead || (before >= 0x1160 && before < 0x11a8) || (syllable && (before - 0xac00) % 28 == 0))) return 1;
    if (tail && (syllable || (before >= 0x1160 && before < 0x1200))) return 1;
    return piece_class(code) == PIECE_MARK || code == 0x200c || code == 0x200d;
}

/* SentencePiece's map of characters, a cluster of less than 6 bytes at a time, or one character. */
static inline void words_map(const words_model *w, const char *text, int64_t n, json_buffer *out) {
    int64_t at, end, length;
    uint32_t code, next;
    for (at = 0; at < n; at = end) {
        const char *mapped;
        end = at + utf8_read(text + at, n - at, &code);
        while (end < n) {
            length = utf8_read(text + end, n - end, &next);
            if (!words_joins(code, next)) break;
            code = next;
            end += length;
        }
        mapped = end - at < 6 ? words_mapped(w, text + at, end - at) : NULL;
        if (mapped != NULL) { json_put(out, mapped, strlen(mapped)); continue; }
        for (; at < end; at += length) {
            length = utf8_read(text + at, n - at, &code);
            mapped = words_mapped(w, text + at, length);
            if (mapped != NULL) json_put(out, mapped, strlen(mapped));
            else json_put(out, text + at, (size_t)length);
        }
    }
}

/* A part of a text between added tokens: normalized, then cut.  first: it begins the text. */
static inline amp_result words_part_encode(words_model *w, const char *text, int64_t n, int first) {
    json_buffer was = {NULL, 0, 0, 0}, now;
    amp_result result = AMP_OK;
    int i;
    for (i = 0; i < w->first_cut && result == AMP_OK; i++) {
        const words_step *s = &w->steps[i];
        memset(&now, 0, sizeof now);
        json_put(&now, "", 0);
        if (s->kind == STEP_NFC) nfc_put(&now, text, n);
        else if (s->kind == STEP_CHARSMAP) words_map(w, text, n, &now);
        else if (s->kind == STEP_REPLACE) words_replace(s, text, n, &now);
        else if (s->kind == STEP_STRIP) words_strip(s, text, n, &now);
        else if (s->kind == STEP_PREPEND) {
            if (n > 0) json_put(&now, s->a, strlen(s->a));
            json_put(&now, text, (size_t)n);
        } else words_runs(s, text, n, &now);
        if (now.failed) result = ex_fail(AMP_ERR_MEMORY, "no memory for a text");
        free(was.text);
        was = now;
        text = was.text;
        n = (int64_t)was.used;
    }
    if (result == AMP_OK && n > 0) result = words_cut(w, w->first_cut, text, n, first);
    free(was.text);
    return result;
}

/* ---- Added tokens, and rows */

/* The first added token in the text from `at` on, of several there the longest.  *from, *to: with its spaces. */
static inline const words_added *words_find_added(const words_model *w, const char *text, int64_t n, int64_t at,
                                                  int64_t *from, int64_t *to) {
    const words_added *found = NULL;
    int64_t start = at, i, k, length;
    uint32_t code;
    for (; at < n && found == NULL; at++)
        for (i = 0; i < w->n_added; i++) {
            const words_added *a = &w->added[i];
            if (at + a->length <= n && memcmp(text + at, a->text, (size_t)a->length) == 0 &&
                (found == NULL || a->length > found->length)) found = a;
        }
    if (found == NULL) return NULL;
    *from = at - 1;
    *to = *from + found->length;
    for (; found->right && *to < n; *to += length) {
        length = utf8_read(text + *to, n - *to, &code);
        if (bpe_class(code) != BPE_SPACE) break;
    }
    for (; found->left && *from > start; *from = k) {
        for (k = *from - 1; k > start && ((unsigned char)text[k] & 0xc0) == 0x80; k--) {}
        (void)utf8_read(text + k, *from - k, &code);
        if (bpe_class(code) != BPE_SPACE) break;
    }
    return found;
}

/* The tokens of a text without what stands around it: w->out, w->used of them. */
static inline amp_result words_encode_text(words_model *w, const char *text, int64_t n) {
    int64_t at = 0, from = n, to = n;
    w->used = 0;
    while (at < n) {
        const words_added *added = words_find_added(w, text, n, at, &from, &to);
        if (added == NULL) from = n;
        if (from > at) EX_TRY(words_part_encode(w, text + at, from - at, at == 0));
        if (added != NULL) EX_TRY(words_put(w, added->id));
        at = added != NULL ? to : n;
    }
    return AMP_OK;
}

/* A text, or two, with what stands around them, at most `most` tokens: the longer text is cut at its end.  Into ids,
   and types unless NULL; returns how many, or -1. */
static inline int64_t words_encode(words_model *w, const char *a, int64_t n, const char *b, int64_t m, int64_t most,
                                   int32_t *ids, int32_t *types) {
    const words_part *parts = b != NULL ? w->pair : w->single;
    int n_parts = b != NULL ? w->n_pair : w->n_single, i;
    int64_t lengths[2] = {0, 0}, used = 0, room, k;
    int32_t *first = NULL;
    if (words_encode_text(w, a, n) != AMP_OK) return -1;
    lengths[0] = w->used;
    if (b != NULL) {
        first = w->out;
        w->out = NULL;
        w->room = w->used = 0;
        if (words_encode_text(w, b, m) != AMP_OK) { free(first); return -1; }
        lengths[1] = w->used;
    }
    for (i = 0, room = most; i < n_parts; i++) room -= parts[i].token >= 0;
    while (lengths[0] + lengths[1] > (room > 0 ? room : 0)) lengths[lengths[1] > lengths[0]]--;
    for (i = 0; i < n_parts; i++) {
        int64_t count = parts[i].token >= 0 ? 1 : lengths[-1 - parts[i].token];
        const int32_t *from = parts[i].token == -1 && first != NULL ? first : w->out;
        for (k = 0; k < count && used < most; k++, used++) {
            ids[used] = parts[i].token >= 0 ? parts[i].token : from[k];
            if (types != NULL) types[used] = parts[i].type;
        }
    }
    free(first);
    return used;
}

/* The bytes that a token adds to a text; NULL: none, as for [CLS] and its like.  text: room for a character. */
static inline const char *words_text(const words_model *w, int64_t token, char text[8], int64_t *length) {
    const char *piece;
    int64_t i;
    *length = 0;
    if (token < 0 || token >= w->n) return NULL;
    for (i = 0; i < w->n_added; i++)
        if (w->added[i].id == token) {
            *length = w->added[i].special ? 0 : w->added[i].length;
            return w->added[i].special ? NULL : w->added[i].text;
        }
    if (w->kind == WORDS_PIECE) {
        if (token >= w->piece.n) return NULL;           /* a number between those of added tokens */
        *length = w->piece.tokens[token].length;
        return w->piece.text + w->piece.tokens[token].at;
    }
    piece = bpe_text(&w->pairs, token, length);
    if (piece != NULL && (w->pairs.characters || w->kind == WORDS_UNIGRAM) && *length == 6 &&
        memcmp(piece, "<0x", 3) == 0) {
        text[0] = (char)strtol(piece + 3, NULL, 16);
        *length = 1;
        return text;
    }
    return piece;
}

/* ---- Reading a tokenizer.json */

/* Keys that change no token: where a token came from in the text, what is done after encoding by another program, or
   how text is put together again. */
static const char words_ignored[] = "version truncation padding decoder trim_offsets fuse_unk str_rep type";

static inline amp_result words_refuse(const words_model *w, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static inline amp_result words_refuse(const words_model *w, const char *format, ...) {
    char why[300];
    va_list args;
    va_start(args, format);
    vsnprintf(why, sizeof why, format, args);
    va_end(args);
    return ex_fail(AMP_ERR_UNSUPPORTED, "%s: %s", w->path, why);
}

/* Refuses an object with a key that is not among `known` or words_ignored. */
static inline amp_result words_keys(const words_model *w, json j, const char *what, const char *known) {
    char name[128];
    json value;
    int more;
    if (!json_take(&j, '{')) return words_refuse(w, "%s must be an object", what);
    for (more = json_peek(&j) == '"'; more && json_member(&j, name, &value); more = json_take(&j, ','))
        if (ex_word_place(known, name) < 0 && ex_word_place(words_ignored, name) < 0)
            return words_refuse(w, "%s has the key %s, which is not known here and could change tokens", what, name);
    return AMP_OK;
}

/* A member's text; "" if it is not there, null, or too long. */
static inline const char *words_member(json j, const char *key, char *text, size_t size) {
    json value;
    text[0] = 0;
    if (!json_value(j, key, &value) || *value.at == 'n' || !json_text(value, text, size)) text[0] = 0;
    return text;
}
/* The same into a step's short text, which must hold all of it. */
static inline amp_result words_short(const words_model *w, json j, const char *key, char text[16]) {
    json value;
    text[0] = 0;
    if (!json_value(j, key, &value) || *value.at == 'n' || json_text(value, text, 16)) return AMP_OK;
    return words_refuse(w, "%s: a text of more than 15 bytes, or with a zero, is not supported", key);
}
static inline int words_is(json j, const char *key, const char *wanted) {
    char text[512];
    return strcmp(words_member(j, key, text, sizeof text), wanted) == 0;
}

/* Calls `each` with every element of a list that is the value of `key`, or with the object itself if it is no Sequence
   of these. */
typedef amp_result (*words_each)(words_model *w, json part);
static inline amp_result words_sequence(words_model *w, json part, const char *key, words_each each) {
    json list;
    int more;
    if (*part.at == 'n') return AMP_OK;
    if (!words_is(part, "type", "Sequence")) return (*each)(w, part);
    EX_TRY(words_keys(w, part, "a Sequence", key));
    if (!json_value(part, key, &list) || !json_take(&list, '[')) return words_refuse(w, "a Sequence has no %s", key);
    for (more = json_peek(&list) != ']'; more && !list.bad; more = json_take(&list, ',')) {
        json one = list;
        (void)json_peek(&one);
        json_skip(&list);
        one.end = list.at;
        EX_TRY((*each)(w, one));
    }
    return AMP_OK;
}

static inline amp_result words_step_new(words_model *w, words_step_kind kind, words_step **out) {
    *out = w->steps;
    if (w->n_steps == WORDS_STEPS) return words_refuse(w, "has more than %d steps", WORDS_STEPS);
    *out = &w->steps[w->n_steps++];
    memset(*out, 0, sizeof **out);
    (*out)->kind = kind;
    return AMP_OK;
}

/* The map of characters, in base 64: 4 bytes of the trie's size, the trie, texts that end in 0. */
static inline amp_result words_charsmap(words_model *w, json part) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    json value;
    size_t room, used = 0, i;
    uint32_t bits = 0;
    int n = 0;
    const char *digit;
    unsigned char *map;
    if (w->charsmap != NULL) return words_refuse(w, "two maps of characters are not supported");
    if (!json_value(part, "precompiled_charsmap", &value) || *value.at != '"')
        return words_refuse(w, "the Precompiled normalizer has no precompiled_charsmap");
    room = (size_t)(value.end - value.at);
    map = (unsigned char *)calloc(room + 1, 1);
    if (map == NULL) return ex_fail(AMP_ERR_MEMORY, "%s: no memory for its map of characters", w->path);
    w->charsmap = map;
    for (value.at++; value.at < value.end; value.at++) {
        digit = strchr(digits, *value.at);
        if (*value.at == 0 || digit == NULL) continue;          /* '=' and the quotation mark at the end */
        bits = bits << 6 | (uint32_t)(digit - digits);
        if (++n % 4 != 1) map[used++] = (unsigned char)(bits >> (n % 4 == 2 ? 4 : n % 4 == 3 ? 2 : 0));
    }
    for (bits = 0, i = 4; i > 0; i--) bits = bits << 8 | map[i - 1];
    if (used < 4 || bits % 4 != 0 || bits > used - 4) return words_refuse(w, "its map of characters is damaged");
    memmove(map, map + 4, used - 4);
    map[used - 4] = 0;
    w->charsmap_units = bits / 4;
    w->charsmap_bytes = (int64_t)used - 4;
    return AMP_OK;
}

static inline amp_result words_replacement(words_model *w, json part) {
    static const struct { const char *regex; words_step_kind kind; } known[] = {
        {" {2,}", STEP_SPACES}, {"\\s{2,}|[\\n\\r\\t]", STEP_BREAKS}};
    char regex[64];
    json pattern;
    words_step *s = NULL;
    size_t i;
    if (!json_value(part, "pattern", &pattern)) return words_refuse(w, "a Replace has no pattern");
    EX_TRY(words_step_new(w, STEP_REPLACE, &s));
    EX_TRY(words_short(w, part, "content", s->b));
    EX_TRY(words_short(w, pattern, "String", s->a));
    if (*s->a != 0) return AMP_OK;
    words_member(pattern, "Regex", regex, sizeof regex);
    for (i = 0; i < 2 && strcmp(regex, known[i].regex) != 0; i++) {}
    if (i == 2) return words_refuse(w, "the Replace of the pattern \"%s\" is not supported", regex);
    s->kind = known[i].kind;
    return AMP_OK;
}

/* BERT's: what it does is part of wordpiece.h. */
static inline amp_result words_bert(words_model *w, json part) {
    int lower = words_is(part, "lowercase", "true"), strip = words_is(part, "strip_accents", "true");
    EX_TRY(words_keys(w, part, "the BertNormalizer", "clean_text handle_chinese_chars strip_accents lowercase"));
    if (w->kind != WORDS_PIECE) return words_refuse(w, "a BertNormalizer without WordPiece is not supported");
    if (!words_is(part, "clean_text", "true") || !words_is(part, "handle_chinese_chars", "true"))
        return words_refuse(w, "clean_text or handle_chinese_chars = false is not supported");
    if (words_is(part, "strip_accents", "")) strip = lower;
    if (w->piece.cased >= 0) return words_refuse(w, "two BertNormalizers are not supported");
    if (strip != lower)
        return words_refuse(w, "lowercase = %s with strip_accents = %s is not supported", lower ? "true" : "false",
                            strip ? "true" : "false");
    w->piece.cased = !lower;
    return AMP_OK;
}

static inline amp_result words_normalizer(words_model *w, json part) {
    char type[64];
    words_step *s = NULL;
    words_member(part, "type", type, sizeof type);
    if (strcmp(type, "BertNormalizer") == 0) return words_bert(w, part);
    if (w->kind == WORDS_PIECE) return words_refuse(w, "the normalizer %s with WordPiece is not supported", type);
    if (strcmp(type, "Replace") == 0) {
        EX_TRY(words_keys(w, part, "a Replace", "pattern content"));
        return words_replacement(w, part);
    }
    if (strcmp(type, "Precompiled") == 0) {
        EX_TRY(words_keys(w, part, "the Precompiled normalizer", "precompiled_charsmap"));
        EX_TRY(words_step_new(w, STEP_CHARSMAP, &s));
        return words_charsmap(w, part);
    }
    if (strcmp(type, "Strip") == 0) {
        EX_TRY(words_keys(w, part, "the Strip normalizer", "strip_left strip_right"));
        EX_TRY(words_step_new(w, STEP_STRIP, &s));
        s->left = words_is(part, "strip_left", "true");
        s->right = words_is(part, "strip_right", "true");
        return AMP_OK;
    }
    if (strcmp(type, "Prepend") == 0) {
        EX_TRY(words_keys(w, part, "the Prepend normalizer", "prepend"));
        EX_TRY(words_step_new(w, STEP_PREPEND, &s));
        return words_short(w, part, "prepend", s->a);
    }
    if (strcmp(type, "NFC") != 0) return words_refuse(w, "the normalizer %s is not supported", type);
    return words_step_new(w, STEP_NFC, &s);
}

/* A Split by one of the rules that are known. */
static inline amp_result words_split(words_model *w, json part) {
    static const char rule[] = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}%s| "
                               "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
    char regex[300], wanted[300];
    json pattern;
    words_step *s = NULL;
    int digits;
    EX_TRY(words_keys(w, part, "a Split", "pattern behavior invert"));
    if (!json_value(part, "pattern", &pattern) || !words_is(part, "behavior", "Isolated") ||
        !words_is(part, "invert", "false"))
        return words_refuse(w, "a Split that is not Isolated, or inverted, is not supported");
    words_member(pattern, "Regex", regex, sizeof regex);
    for (digits = 3; digits > 0; digits -= 2) {
        snprintf(wanted, sizeof wanted, rule, digits == 3 ? "{1,3}" : "");
        if (strcmp(regex, wanted) != 0) continue;
        EX_TRY(words_step_new(w, STEP_NEWER, &s));
        s->left = digits;
        return AMP_OK;
    }
    return words_refuse(w, "the Split of the pattern \"%.100s\" is not supported", regex);
}

static inline amp_result words_pre(words_model *w, json part) {
    char type[64], scheme[16];
    words_step *s = NULL;
    words_member(part, "type", type, sizeof type);
    if (w->kind == WORDS_PIECE)
        return strcmp(type, "BertPreTokenizer") == 0
                   ? AMP_OK : words_refuse(w, "the pre-tokenizer %s with WordPiece is not supported", type);
    if (strcmp(type, "Split") == 0) return words_split(w, part);
    if (strcmp(type, "WhitespaceSplit") == 0) return words_step_new(w, STEP_WHITE, &s);
    if (strcmp(type, "ByteLevel") == 0) {
        EX_TRY(words_keys(w, part, "the ByteLevel pre-tokenizer", "add_prefix_space use_regex"));
        EX_TRY(words_step_new(w, STEP_BYTES, &s));
        s->left = words_is(part, "add_prefix_space", "true");
        s->right = !words_is(part, "use_regex", "false");
        return w->kind == WORDS_BPE && !w->pairs.characters
                   ? AMP_OK : words_refuse(w, "the ByteLevel pre-tokenizer without a BPE of bytes is not supported");
    }
    if (strcmp(type, "Metaspace") != 0) return words_refuse(w, "the pre-tokenizer %s is not supported", type);
    EX_TRY(words_keys(w, part, "the Metaspace pre-tokenizer", "replacement prepend_scheme split add_prefix_space"));
    EX_TRY(words_step_new(w, STEP_META, &s));
    EX_TRY(words_short(w, part, "replacement", s->a));
    words_member(part, "prepend_scheme", scheme, sizeof scheme);
    if (*scheme == 0) strcpy(scheme, words_is(part, "add_prefix_space", "false") ? "never" : "always");
    s->left = strcmp(scheme, "always") == 0 ? 1 : strcmp(scheme, "first") == 0 ? 2 : 0;
    s->right = !words_is(part, "split", "false");
    return *s->a != 0 ? AMP_OK : words_refuse(w, "the Metaspace pre-tokenizer has no replacement");
}

/* ---- What stands around texts */

static inline amp_result words_row_add(words_model *w, words_part *row, int *n, int32_t token, int64_t type) {
    if (*n == WORDS_PARTS || type < 0 || type > 1)
        return words_refuse(w, "a template is too long, or has a type above 1");
    if (token >= w->n) return words_refuse(w, "the template's token %d is not in the vocabulary", (int)token);
    row[*n].token = token;
    row[(*n)++].type = (int32_t)type;
    return AMP_OK;
}

/* The tokens that a name stands for in "special_tokens", into the row. */
static inline amp_result words_row_special(words_model *w, json all, const char *name, int64_t type, words_part *row,
                                           int *n) {
    json one, ids;
    if (!json_value(all, name, &one) || !json_value(one, "ids", &ids) || !json_take(&ids, '['))
        return words_refuse(w, "the template's token %s is not among its special_tokens", name);
    do {
        int64_t id;
        (void)json_peek(&ids);
        id = json_integer(&ids);
        if (ids.bad || id < 0 || id > INT32_MAX) return words_refuse(w, "the template's token %s has no number", name);
        EX_TRY(words_row_add(w, row, n, (int32_t)id, type));
    } while (json_take(&ids, ','));
    return AMP_OK;
}

/* [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}, ...] */
static inline amp_result words_row(words_model *w, json part, const char *key, words_part *row, int *n) {
    json list, all, one, inside;
    char name[128], type[8];
    int more, i;
    *n = 0;
    if (!json_value(part, key, &list) || !json_take(&list, '[') || !json_value(part, "special_tokens", &all))
        return words_refuse(w, "the template has no \"%s\"", key);
    for (more = json_peek(&list) != ']'; more && !list.bad; more = json_take(&list, ',')) {
        one = list;
        json_skip(&list);
        if (json_value(one, "SpecialToken", &inside)) {
            words_member(inside, "id", name, sizeof name);
            words_member(inside, "type_id", type, sizeof type);
            EX_TRY(words_row_special(w, all, name, atoi(type), row, n));
        } else if (json_value(one, "Sequence", &inside)) {
            words_member(inside, "type_id", type, sizeof type);
            EX_TRY(words_row_add(w, row, n, words_is(inside, "id", "A") ? -1 : -2, atoi(type)));
        } else return words_refuse(w, "a template has a part that is no token and no sequence");
    }
    for (i = 0, more = 0; i < *n; i++) more |= row[i].token < 0 ? -row[i].token : 0;
    return more == (row == w->pair ? 3 : 1) ? AMP_OK : words_refuse(w, "the template \"%s\" lacks its text", key);
}

/* [CLS] A [SEP], and [CLS] A [SEP] B [SEP]; roberta: A and B have two tokens between them, and the same type. */
static inline void words_frame(words_model *w, int32_t begin, int32_t end, int roberta) {
    words_part row[6] = {{begin, 0}, {-1, 0}, {end, 0}, {-2, !roberta}, {end, !roberta}, {0, 0}};
    memcpy(w->single, row, 3 * sizeof *row);
    w->n_single = 3;
    if (roberta) { memmove(row + 4, row + 3, 2 * sizeof *row); row[3] = row[2]; }
    memcpy(w->pair, row, sizeof row);
    w->n_pair = roberta ? 6 : 5;
}
static inline amp_result words_post(words_model *w, json part) {
    static const char *const keys[] = {"cls", "sep"};
    char type[64];
    json value;
    int64_t id[2];
    int i, roberta;
    words_member(part, "type", type, sizeof type);
    if (strcmp(type, "ByteLevel") == 0) return AMP_OK;          /* only where in the text a token came from */
    if (strcmp(type, "TemplateProcessing") == 0) {
        EX_TRY(words_keys(w, part, "the TemplateProcessing", "single pair special_tokens"));
        EX_TRY(words_row(w, part, "single", w->single, &w->n_single));
        return words_row(w, part, "pair", w->pair, &w->n_pair);
    }
    roberta = strcmp(type, "RobertaProcessing") == 0;
    if (!roberta && strcmp(type, "BertProcessing") != 0)
        return words_refuse(w, "the post-processor %s is not supported", type);
    EX_TRY(words_keys(w, part, type, "cls sep add_prefix_space"));
    for (i = 0; i < 2; i++) {
        if (!json_value(part, keys[i], &value) || !json_take(&value, '['))
            return words_refuse(w, "%s has no %s", type, keys[i]);
        (void)json_peek(&value);
        json_string(&value, NULL, 0);
        json_need(&value, ',');
        (void)json_peek(&value);
        id[i] = json_integer(&value);
        if (value.bad || id[i] < 0 || id[i] >= w->n) return words_refuse(w, "%s.%s is no token", type, keys[i]);
    }
    words_frame(w, (int32_t)id[0], (int32_t)id[1], roberta);
    return AMP_OK;
}

/* ---- Models */

/* {"[PAD]": 0, ...} as the lines of a vocab.txt. */
static inline amp_result words_piece(words_model *w, json model) {
    json vocab;
    char name[WORDPIECE_LINE], **lines;
    json_buffer b = {NULL, 0, 0, 0};
    int64_t n = 0, most, i, id;
    int more;
    EX_TRY(words_keys(w, model, "the WordPiece", "unk_token continuing_subword_prefix max_input_chars_per_word vocab"));
    if (!words_is(model, "unk_token", "[UNK]") || !words_is(model, "continuing_subword_prefix", "##") ||
        !words_is(model, "max_input_chars_per_word", "100"))
        return words_refuse(w, "a WordPiece other than BERT's is not supported: unk_token [UNK], "
                               "continuing_subword_prefix ##, max_input_chars_per_word 100");
    if (!json_value(model, "vocab", &vocab)) return words_refuse(w, "the WordPiece has no vocab");
    most = (vocab.end - vocab.at) / 5 + 1;
    lines = (char **)calloc((size_t)most, sizeof *lines);
    if (lines == NULL) return ex_fail(AMP_ERR_MEMORY, "%s: no memory for its vocabulary", w->path);
    json_need(&vocab, '{');
    for (more = json_peek(&vocab) == '"'; more && !vocab.bad; more = json_take(&vocab, ',')) {
        (void)json_peek(&vocab);
        json_string(&vocab, name, sizeof name);
        json_need(&vocab, ':');
        (void)json_peek(&vocab);
        id = json_integer(&vocab);
        if (id < 0 || id >= most || lines[id] != NULL || strpbrk(name, "\r\n") != NULL) vocab.bad = 1;
        else if ((lines[id] = strdup(name)) == NULL) b.failed = 1;
        if (id >= n) n = id + 1;
    }
    for (i = 0; i < n && i < most; i++) {
        if (lines[i] == NULL) vocab.bad = 1;
        else { json_put(&b, lines[i], strlen(lines[i])); json_put(&b, "\n", 1); }
    }
    for (i = 0; i < most; i++) free(lines[i]);
    free(lines);
    w->kind = WORDS_PIECE;
    w->piece.text = b.text;
    w->piece.text_bytes = b.used;
    if (b.failed) return ex_fail(AMP_ERR_MEMORY, "%s: no memory for its vocabulary", w->path);
    if (vocab.bad || b.used == 0)
        return words_refuse(w, "the vocabulary must give the numbers from 0 on to texts of one line, each once");
    EX_TRY(ex_st(wordpiece_parse(&w->piece, w->path)));
    w->piece.cased = -1;            /* until a normalizer says it */
    w->n = w->piece.n;
    return AMP_OK;
}

static inline amp_result words_pairs(words_model *w, json model) {
    json vocab, merges;
    char text[16];
    EX_TRY(words_keys(w, model, "the BPE", "vocab merges unk_token continuing_subword_prefix end_of_word_suffix "
                                           "byte_fallback ignore_merges dropout"));
    if (!words_is(model, "dropout", "") && !words_is(model, "dropout", "0.0"))
        return words_refuse(w, "a BPE with dropout, whose tokens are random, is not supported");
    if (*words_member(model, "continuing_subword_prefix", text, sizeof text) != 0 ||
        *words_member(model, "end_of_word_suffix", text, sizeof text) != 0)
        return words_refuse(w, "a BPE with continuing_subword_prefix or end_of_word_suffix is not supported");
    if (!json_value(model, "vocab", &vocab) || !json_value(model, "merges", &merges))
        return words_refuse(w, "the BPE has no vocab or no merges");
    w->kind = WORDS_BPE;
    w->pairs.characters = words_is(model, "byte_fallback", "true");
    w->pairs.whole = words_is(model, "ignore_merges", "true");
    EX_TRY(ex_st(bpe_parse(&w->pairs, w->path, vocab, merges)));
    w->n = w->pairs.n;
    return AMP_OK;
}

/* [["<s>", 0.0], ["\u2581", -2.1], ...] */
static inline amp_result words_unigram_read(words_model *w, json model) {
    bpe *t = &w->pairs;
    char name[BPE_LONGEST], number[16];
    json list;
    int64_t room = 0, used = 0, slot, id, unknown = -1;
    int more;
    EX_TRY(words_keys(w, model, "the Unigram", "unk_id vocab byte_fallback"));
    if (!json_value(model, "vocab", &list) || !json_take(&list, '['))
        return words_refuse(w, "the Unigram has no vocab");
    for (t->n_slots = 1024; t->n_slots < (uint64_t)(list.end - list.at) / 3;) t->n_slots *= 2;
    t->characters = 1;
    t->text = (char *)malloc((size_t)(list.end - list.at) + 1);
    t->by_text = (int32_t *)malloc((size_t)t->n_slots * sizeof *t->by_text);
    room = (list.end - list.at) / 6 + 1;
    w->scores = (double *)malloc((size_t)room * sizeof *w->scores);
    if (t->text == NULL || t->by_text == NULL || w->scores == NULL || !bpe_tokens_reserve(t, room))
        return ex_fail(AMP_ERR_MEMORY, "%s: no memory for its vocabulary", w->path);
    memset(t->by_text, 0xff, (size_t)t->n_slots * sizeof *t->by_text);
    for (id = 0, more = json_peek(&list) != ']'; more && !list.bad && id < room; more = json_take(&list, ','), id++) {
        int64_t n;
        char *end;
        json_need(&list, '[');
        (void)json_peek(&list);
        json_string(&list, name, sizeof name);
        json_need(&list, ',');
        (void)json_peek(&list);
        w->scores[id] = strtod(list.at, &end);
        list.bad |= end == list.at || !amp_is_finite_f64(&w->scores[id]);
        json_skip(&list);
        json_need(&list, ']');
        n = (int64_t)strlen(name);
        memcpy(t->text + used, name, (size_t)n);
        slot = bpe_slot(t, t->text + used, n);
        t->by_text[slot] = (int32_t)id;
        t->tokens[id].at = used;
        t->tokens[id].length = (int32_t)n;
        used += n;
        if (n > w->longest) w->longest = n;
        if (id == 0 || w->scores[id] < w->least) w->least = w->scores[id];
    }
    t->n = w->n = id;
    if (list.bad) return words_refuse(w, "the Unigram's vocab is not a list of pairs of a text and a number");
    if (*words_member(model, "unk_id", number, sizeof number) != 0) unknown = atoll(number);
    if (unknown < 0 || unknown >= id) return words_refuse(w, "the Unigram has no unk_id among its tokens");
    w->unknown = (int32_t)unknown;
    w->byte_fallback = words_is(model, "byte_fallback", "true");
    w->kind = WORDS_UNIGRAM;
    return w->byte_fallback ? ex_st(bpe_find_bytes(t, w->path)) : AMP_OK;
}

static inline amp_result words_read_model(words_model *w, json model) {
    char type[32];
    json merges;
    words_member(model, "type", type, sizeof type);
    if (*type == 0) strcpy(type, json_value(model, "merges", &merges) ? "BPE" : "WordPiece");      /* of old files */
    if (strcmp(type, "WordPiece") == 0) return words_piece(w, model);
    if (strcmp(type, "BPE") == 0) return words_pairs(w, model);
    if (strcmp(type, "Unigram") == 0) return words_unigram_read(w, model);
    return words_refuse(w, "the model %s is not supported", type);
}

/* ---- Added tokens */

static inline amp_result words_added_new(words_model *w, const char *text, int64_t id, int left, int right,
                                         int special) {
    words_added *more = (words_added *)realloc(w->added, (size_t)(w->n_added + 1) * sizeof *more);
    if (more == NULL) return ex_fail(AMP_ERR_MEMORY, "%s: no memory for its added tokens", w->path);
    w->added = more;
    more += w->n_added;
    more->text = strdup(text);
    if (more->text == NULL) return ex_fail(AMP_ERR_MEMORY, "%s: no memory for its added tokens", w->path);
    more->length = (int32_t)strlen(text);
    more->id = (int32_t)id;
    more->left = left; more->right = right; more->special = special;
    w->n_added++;
    if (id >= w->n) w->n = id + 1;
    return AMP_OK;
}
static inline amp_result words_added_read(words_model *w, json list) {
    char text[1024], number[24];
    int more;
    if (!json_take(&list, '[')) return *list.at == 'n' ? AMP_OK : words_refuse(w, "added_tokens must be a list");
    for (more = json_peek(&list) != ']'; more && !list.bad; more = json_take(&list, ',')) {
        json one = list;
        int64_t id;
        (void)json_peek(&one);
        json_skip(&list);
        EX_TRY(words_keys(w, one, "an added token", "id content single_word lstrip rstrip normalized special"));
        words_member(one, "content", text, sizeof text);
        if (*text == 0 || !ex_integer(words_member(one, "id", number, sizeof number), 0, BPE_MOST, &id))
            return words_refuse(w, "an added token has no text, or no number");
        if (words_is(one, "single_word", "true"))
            return words_refuse(w, "the added token %.60s: single_word = true is not supported", text);
        if (words_is(one, "normalized", "true") && (w->first_cut > 0 || (w->kind == WORDS_PIECE && !w->piece.cased)))
            return words_refuse(w, "the added token %.60s: normalized = true is not supported with a normalizer", text);
        EX_TRY(words_added_new(w, text, id, words_is(one, "lstrip", "true"), words_is(one, "rstrip", "true"),
                               words_is(one, "special", "true")));
    }
    return AMP_OK;
}

/* The number of a token's text; -1: there is none. */
static inline int32_t words_find(const words_model *w, const char *text) {
    int64_t i;
    for (i = 0; i < w->n_added; i++) if (strcmp(w->added[i].text, text) == 0) return w->added[i].id;
    if (w->kind == WORDS_PIECE) return wordpiece_find(&w->piece, "", text, (int64_t)strlen(text));
    return w->kind == WORDS_BPE || w->kind == WORDS_UNIGRAM ? bpe_find(&w->pairs, text, (int64_t)strlen(text)) : -1;
}

/* ==== Opening a tokenizer ======================================================================== */

/* Keeps a file, to read it and to save it again under `name`. */
static inline amp_result words_file(words_model *w, const char *path, const char *name, json *out) {
    int i = w->n_files;
    EX_TRY(ex_st(st_read_file(path, &w->files[i].text, &w->files[i].bytes)));
    snprintf(w->files[i].name, sizeof w->files[i].name, "%s", name);
    if (w->n_files++ == 0) snprintf(w->path, sizeof w->path, "%.4000s", path);
    *out = json_open(w->files[i].text, w->files[i].bytes);
    return AMP_OK;
}
/* Where a file called `name` lies beside `path`.  1: it is there. */
static inline int words_has(const char *path, const char *prefix, const char *name, char out[PATH_MAX]) {
    char full[400];
    snprintf(full, sizeof full, "%s%s", prefix, name);
    return folder_has(path, full, out);
}
/* The same of one that lies beside the first, if it is there. */
static inline amp_result words_beside(words_model *w, const char *name, json *out) {
    char path[PATH_MAX];
    *out = json_open(NULL, 0);
    return words_has(w->path, w->prefix, name, path) ? words_file(w, path, name, out) : AMP_OK;
}
/* What the names of a model's own tokenizer files begin with, by the path of its weights: "book." of book.safetensors;
   nothing of model.safetensors, which has its folder for itself. */
static inline void words_prefix(const char *path, char prefix[300]) {
    static const char *const ends[] = {".safetensors", ".state"};
    const char *slash = strrchr(path, '/'), *name = slash != NULL ? slash + 1 : path;
    size_t n = strlen(name), i, k;
    for (i = 0; i < 2; i++) {
        k = strlen(ends[i]);
        if (n > k && strcmp(name + n - k, ends[i]) == 0) { n -= k; break; }
    }
    prefix[0] = 0;
    if (n > 0 && !(n == 5 && strncmp(name, "model", 5) == 0)) snprintf(prefix, 300, "%.*s.", (int)n, name);
}

static inline amp_result words_of_json(words_model *w, json all) {
    json part, whole = all;
    if (json_peek(&whole) == '{') json_skip(&whole);
    else whole.bad = 1;
    if (whole.bad || json_peek(&whole) != 0 || whole.at != whole.end)
        return ex_fail(AMP_ERR_FORMAT, "%s: not a JSON object", w->path);
    EX_TRY(words_keys(w, all, "the file", "added_tokens normalizer pre_tokenizer post_processor model"));
    if (!json_value(all, "model", &part)) return words_refuse(w, "there is no model");
    EX_TRY(words_read_model(w, part));
    if (json_value(all, "normalizer", &part)) EX_TRY(words_sequence(w, part, "normalizers", words_normalizer));
    if (w->kind == WORDS_PIECE && w->piece.cased < 0)
        return words_refuse(w, "WordPiece without a BertNormalizer is not supported");
    w->first_cut = w->n_steps;
    if (!json_value(all, "pre_tokenizer", &part) || *part.at == 'n') {
        if (w->kind == WORDS_PIECE) return words_refuse(w, "WordPiece without a pre-tokenizer is not supported");
    } else EX_TRY(words_sequence(w, part, "pretokenizers", words_pre));
    if (w->kind == WORDS_BPE && !w->pairs.characters &&
        (w->n_steps == w->first_cut || w->steps[w->n_steps - 1].kind != STEP_BYTES))
        return words_refuse(w, "a BPE of bytes without the ByteLevel pre-tokenizer is not supported");
    if (json_value(all, "added_tokens", &part)) EX_TRY(words_added_read(w, part));
    w->single[0].token = -1; w->n_single = 1;
    w->pair[0].token = -1; w->pair[1].token = -2; w->pair[1].type = 1; w->n_pair = 2;
    return json_value(all, "post_processor", &part) ? words_sequence(w, part, "processors", words_post) : AMP_OK;
}

/* vocab.txt.  settings: tokenizer_config.json, or empty; cased: what the program's user says, 0: nothing. */
static inline amp_result words_of_lines(words_model *w, json settings, int cased) {
    static const char *const names[] = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"};
    int lower = !cased, told = cased, i;
    int64_t k;
    w->kind = WORDS_PIECE;
    w->piece.text = (char *)malloc(w->files[0].bytes + 1);
    if (w->piece.text == NULL) return ex_fail(AMP_ERR_MEMORY, "%s: no memory for its vocabulary", w->path);
    memcpy(w->piece.text, w->files[0].text, w->files[0].bytes + 1);
    w->piece.text_bytes = w->files[0].bytes;
    EX_TRY(ex_st(wordpiece_parse(&w->piece, w->path)));
    w->n = w->piece.n;
    if (words_is(settings, "do_lower_case", "true") || words_is(settings, "do_lower_case", "false")) {
        lower = words_is(settings, "do_lower_case", "true");
        if (cased && lower)
            return words_refuse(w, "tokenizer_config.json says that it is lower-cased, and --cased not");
        told = 1;
    }
    for (k = 0; k < w->n && !told; k++) {
        const char *text = w->piece.text + w->piece.tokens[k].at;
        if (w->piece.tokens[k].length > 0 && text[0] >= 'A' && text[0] <= 'Z')
            return words_refuse(w, "it has upper case, but nothing says so: put the model's tokenizer_config.json with "
                                   "\"do_lower_case\": false beside it");
    }
    if (!words_is(settings, "strip_accents", "") && words_is(settings, "strip_accents", "true") != lower)
        return words_refuse(w, "do_lower_case = %s with another strip_accents is not supported",
                            lower ? "true" : "false");
    if (words_is(settings, "tokenize_chinese_chars", "false") || words_is(settings, "do_basic_tokenize", "false"))
        return words_refuse(w, "tokenize_chinese_chars or do_basic_tokenize = false is not supported");
    w->piece.cased = !lower;
    words_frame(w, w->piece.begin, w->piece.end, 0);
    for (i = 0; i < 5; i++)
        if (words_find(w, names[i]) >= 0) EX_TRY(words_added_new(w, names[i], words_find(w, names[i]), 0, 0, 1));
    return AMP_OK;
}

/* vocab.json and merges.txt: GPT-2's, or RoBERTa's if it has <s>. */
static inline amp_result words_of_pairs(words_model *w, const char *vocab, const char *merges, json settings) {
    static const char *const names[] = {"<|endoftext|>", "<s>", "</s>", "<pad>", "<unk>", "<mask>"};
    words_step *s = NULL;
    int i;
    EX_TRY(ex_st(bpe_open(&w->pairs, vocab, merges)));
    w->kind = WORDS_BPE;
    w->n = w->pairs.n;
    EX_TRY(words_step_new(w, STEP_BYTES, &s));
    s->left = words_is(settings, "add_prefix_space", "true");
    s->right = 1;
    for (i = 0; i < 6; i++)
        if (words_find(w, names[i]) >= 0) EX_TRY(words_added_new(w, names[i], words_find(w, names[i]), i == 5, 0, 1));
    w->single[0].token = -1; w->n_single = 1;
    w->pair[0].token = -1; w->pair[1].token = -2; w->pair[1].type = 1; w->n_pair = 2;
    if (words_find(w, "<s>") >= 0 && words_find(w, "</s>") >= 0)
        words_frame(w, words_find(w, "<s>"), words_find(w, "</s>"), 1);
    return AMP_OK;
}

/* Refuses a tokenizer_config.json that says something else than the tokenizer. */
static inline amp_result words_agree(const words_model *w, json settings) {
    static const char *const names[] = {"true", "false"};
    const words_step *s = w->kind == WORDS_BPE && w->n_steps > w->first_cut ? &w->steps[w->n_steps - 1] : NULL;
    int i;
    if (settings.at == settings.end) return AMP_OK;
    for (i = 0; i < 2; i++) {
        if (words_is(settings, "do_lower_case", names[i]) && (i == 0) != (w->kind == WORDS_PIECE && !w->piece.cased))
            return words_refuse(w, "tokenizer_config.json says do_lower_case = %s, and this file does not", names[i]);
        if (s != NULL && s->kind == STEP_BYTES && s->right && words_is(settings, "add_prefix_space", names[i]) &&
            (i == 0) != s->left)
            return words_refuse(w, "tokenizer_config.json says add_prefix_space = %s, and this file does not",
                                names[i]);
    }
    if (words_is(settings, "split_by_punct", "true"))
        return words_refuse(w, "split_by_punct = true in tokenizer_config.json is not supported");
    if (words_is(settings, "add_bos_token", "true") && w->single[0].token < 0)
        return words_refuse(w, "tokenizer_config.json says add_bos_token = true, and this file adds none");
    if (words_is(settings, "add_eos_token", "true") && w->single[w->n_single - 1].token < 0)
        return words_refuse(w, "tokenizer_config.json says add_eos_token = true, and this file adds none");
    return AMP_OK;
}

/* The token that fills a row. */
static inline void words_find_pad(words_model *w, json settings) {
    static const char *const names[] = {"[PAD]", "<pad>"};
    char name[128];
    words_member(settings, "pad_token", name, sizeof name);
    w->pad = *name != 0 ? words_find(w, name) : -1;
    if (w->pad < 0) w->pad = words_find(w, names[0]);
    if (w->pad < 0) w->pad = words_find(w, names[1]);
    if (w->pad < 0) w->pad = 0;
}

/* The first file is read; what it is decides how.  merges: of a vocab.json. */
static inline amp_result words_open_read(words_model *w, json first, const char *merges, int cased) {
    json settings, model, rest;
    char beside[PATH_MAX];
    EX_TRY(words_beside(w, "tokenizer_config.json", &settings));
    if (merges == NULL && json_peek(&first) != '{') EX_TRY(words_of_lines(w, settings, cased));
    else if (merges == NULL && json_value(first, "model", &model) && *model.at == '{') EX_TRY(words_of_json(w, first));
    else {
        (void)words_has(w->path, w->prefix, "merges.txt", beside);
        if (merges == NULL) merges = beside;
        EX_TRY(words_of_pairs(w, w->path, merges, settings));
        EX_TRY(words_file(w, merges, "merges.txt", &rest));
    }
    if (cased && w->kind == WORDS_PIECE && !w->piece.cased)
        return words_refuse(w, "it is lower-cased, and --cased says that it is not");
    EX_TRY(words_agree(w, settings));
    words_find_pad(w, settings);
    return words_beside(w, "special_tokens_map.json", &rest);
}

/* A file whose name begins with `prefix`, and those beside it of the same prefix. */
static inline amp_result words_open_named(words_model *w, const char *path, const char *prefix, const char *merges,
                                          int cased) {
    json first, model;
    amp_result result;
    memset(w, 0, sizeof *w);
    snprintf(w->prefix, sizeof w->prefix, "%s", prefix);
    result = words_file(w, path, "tokenizer.json", &first);
    if (result == AMP_OK && json_peek(&first) != '{') strcpy(w->files[0].name, "vocab.txt");
    else if (result == AMP_OK && (!json_value(first, "model", &model) || *model.at != '{'))
        strcpy(w->files[0].name, "vocab.json");
    if (result == AMP_OK && merges != NULL) strcpy(w->files[0].name, "vocab.json");
    if (result == AMP_OK) result = words_open_read(w, json_open(w->files[0].text, w->files[0].bytes), merges, cased);
    if (result != AMP_OK) words_close(w);
    return result;
}

/* Opens a tokenizer.json, a vocab.txt, or a vocab.json with its merges (NULL: merges.txt beside it).  cased 1: the user
   says that a vocab.txt has upper case. */
static inline amp_result words_open_file(words_model *w, const char *path, const char *merges, int cased) {
    return words_open_named(w, path, "", merges, cased);
}

/* Opens the tokenizer beside a model's file: of book.safetensors book.tokenizer.json and its like, if they are there,
   or those of the folder. */
static inline amp_result words_open(words_model *w, const char *path, int cased) {
    static const char *const names[] = {"tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "spm.model",
                                        "sentencepiece.bpe.model"};
    char beside[PATH_MAX], prefix[300];
    int i;
    memset(w, 0, sizeof *w);
    words_prefix(path, prefix);
    for (i = 0; i < 3; i++)
        if (words_has(path, prefix, names[i], beside)) return words_open_named(w, beside, prefix, NULL, cased);
    for (i = 0; i < 3; i++) if (folder_has(path, names[i], beside)) return words_open_file(w, beside, NULL, cased);
    for (; i < 6; i++)
        if (folder_has(path, names[i], beside))
            return ex_fail(AMP_ERR_UNSUPPORTED, "%s: there is no tokenizer.json beside it, which transformers makes "
                           "from it by save_pretrained", beside);
    folder_beside(path, "", beside);
    return ex_fail(AMP_ERR_OPEN, "%s has no tokenizer: no tokenizer.json, no vocab.txt, no vocab.json with merges.txt",
                   *beside != 0 ? beside : "this folder");
}

/* Bytes as tokens, with [PAD], [UNK], [CLS] and [SEP] before them as an encoder has them, or alone.  It is a BPE
   without merges, so that other programs can open what is saved. */
static inline amp_result words_bytes(words_model *w, int marks) {
    static const char *const names[] = {"[PAD]", "[UNK]", "[CLS]", "[SEP]"};
    static const char level[] = "{\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": true, "
                                "\"use_regex\": true}";
    json_buffer b = {NULL, 0, 0, 0};
    int i, byte, next = 256, n = marks ? 4 : 0;
    char text[4];
    amp_result result;
    memset(w, 0, sizeof *w);
    snprintf(w->path, sizeof w->path, "the tokenizer of bytes");
    json_add(&b, "{\"version\": \"1.0\", \"truncation\": null, \"padding\": null, \"added_tokens\": [");
    for (i = 0; i < n; i++)
        json_add(&b, "%s{\"id\": %d, \"content\": \"%s\", \"single_word\": false, \"lstrip\": false, \"rstrip\": "
                     "false, \"normalized\": false, \"special\": true}", i > 0 ? ", " : "", i, names[i]);
    json_add(&b, "], \"normalizer\": null, \"pre_tokenizer\": %s, \"post_processor\": ", level);
    if (!marks) json_add(&b, "null");
    else json_add(&b, "{\"type\": \"BertProcessing\", \"sep\": [\"[SEP]\", 3], \"cls\": [\"[CLS]\", 2]}");
    json_add(&b, ", \"decoder\": %s, \"model\": {\"type\": \"BPE\", \"dropout\": null, \"unk_token\": null, "
                 "\"continuing_subword_prefix\": null, \"end_of_word_suffix\": null, \"fuse_unk\": false, "
                 "\"byte_fallback\": false, \"ignore_merges\": false, \"vocab\": {", level);
    for (i = 0; i < n; i++) json_add(&b, "\"%s\": %d, ", names[i], i);
    for (byte = 0; byte < 256; byte++) {
        int printable = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
        uint32_t code = (uint32_t)(printable ? byte : next++);
        json_add(&b, "%s\"%s", byte > 0 ? ", " : "", code == '"' || code == '\\' ? "\\" : "");
        json_put(&b, text, (size_t)utf8_write(code, text));
        json_add(&b, "\": %d", n + byte);
    }
    json_add(&b, "}, \"merges\": []}}\n");
    if (b.failed) { free(b.text); return ex_fail(AMP_ERR_MEMORY, "no memory for the tokenizer of bytes"); }
    strcpy(w->files[0].name, "tokenizer.json");
    w->files[0].text = b.text;
    w->files[0].bytes = b.used;
    w->n_files = 1;
    result = words_of_json(w, json_open(b.text, b.used));
    if (result != AMP_OK) words_close(w);
    return result;
}
/* 1: a token is the byte of its number. */
static inline int words_are_bytes(const words_model *w) {
    int byte = w->kind == WORDS_BPE && w->n == 256 ? 0 : 257;
    while (byte < 256 && w->pairs.byte_token[byte] == byte) byte++;
    return byte == 256;
}

/* Refuses a tokenizer with tokens that a model of `vocab` tokens does not have. */
static inline amp_result words_check(const words_model *w, int64_t vocab) {
    if (w->n <= vocab) return AMP_OK;
    return ex_fail(AMP_ERR_MISMATCH, "%s: the tokenizer has %lld tokens, and the model only %lld", w->path,
                   (long long)w->n, (long long)vocab);
}

/* What its tokens are, in words. */
static inline const char *words_kind_name(const words_model *w) {
    if (w->kind == WORDS_PIECE) return w->piece.cased ? "WordPiece, cased" : "WordPiece";
    if (w->kind == WORDS_UNIGRAM) return "Unigram";
    return w->pairs.merges != NULL && w->pairs.n > 260 ? "BPE" : "bytes";
}

/* Writes the files that it came from beside another model's weights, and removes those of an older tokenizer that would
   be opened in their place. */
static inline amp_result words_save(const words_model *w, const char *path) {
    static const char *const before[] = {"tokenizer.json", "vocab.txt", "vocab.json"};
    char full[PATH_MAX], prefix[300];
    int i, settings = 0;
    if (w->n_files == 0) return AMP_OK;
    words_prefix(path, prefix);
    for (i = 0; i < w->n_files; i++) {
        (void)words_has(path, prefix, w->files[i].name, full);
        EX_TRY(ex_file_write(full, w->files[i].text, w->files[i].bytes));
        settings |= strcmp(w->files[i].name, "tokenizer_config.json") == 0;
    }
    for (i = 0; i < 3 && strcmp(before[i], w->files[0].name) != 0; i++)
        if (words_has(path, prefix, before[i], full)) unlink(full);
    if (!settings && words_has(path, prefix, "tokenizer_config.json", full)) unlink(full);
    return AMP_OK;
}

#endif
