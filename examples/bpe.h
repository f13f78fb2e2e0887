/* bpe.h - the tokenizer of GPT-2: byte-level byte pair encoding (Radford et al. 2019).
 *
 * Stands alone: needs libc and safetensors.h, whose JSON reader it uses.  It reads the files vocab.json and merges.txt
 * that Hugging Face keeps beside a model, or the same two from a tokenizer.json (bpe_parse).  The text is split into
 * words, and in each word the pair of neighbours with the lowest rank is merged until no pair has one.  Bytes that are
 * not UTF-8 count as symbols, so every text is restored exactly.  A vocabulary of characters, as Llama 2 has it, is
 * read too: there a character without a token is written as tokens of its bytes, and the program cuts the words.
 * bpe_open, bpe_encode, bpe_text, bpe_close; st_error says why a call failed.  A tokenizer belongs to one thread at a
 * time, as bpe_encode works in it. */
#ifndef EXAMPLE_BPE_H
#define EXAMPLE_BPE_H

#include "safetensors.h"

enum { BPE_MOST = 1 << 22, BPE_ALPHABET = 256 + 68, BPE_LONGEST = 8192 };

typedef struct bpe_span { int64_t at; int32_t length; } bpe_span;       /* length -1: no such token */
typedef struct bpe_merge { int32_t left, right, rank, result; } bpe_merge;  /* result -1: an empty slot */
typedef struct bpe_candidate { int64_t at; bpe_merge merge; } bpe_candidate;

/* A word while it is merged: symbols as a list, and a heap of the pairs that have a rank. */
typedef struct bpe_word {
    int64_t *next, *before;
    int32_t *id;                    /* -1: merged into the symbol before it */
    bpe_candidate *heap;
    int64_t capacity, n_heap;
} bpe_word;

typedef struct bpe {
    int64_t n;                      /* highest token + 1 */
    int32_t end_of_text;            /* "<|endoftext|>", or -1 */
    char *text;                     /* of all tokens, without gaps */
    bpe_span *tokens; int64_t n_tokens;     /* the array has n_tokens places */
    int32_t *by_text;               /* hash table of tokens, -1: empty */
    uint64_t n_slots;
    bpe_merge *merges;            /* hash table */
    uint64_t merge_slots;
    int32_t byte_token[256];
    int32_t byte_of[BPE_ALPHABET];
    bpe_word word;
    int characters;                 /* 1: the vocabulary is of characters, not of bytes */
    int whole;                      /* 1: a word that is a token is that token, whatever its merges give */
} bpe;

static inline void bpe_close(bpe *t) {
    free(t->text); free(t->tokens); free(t->by_text); free(t->merges);
    free(t->word.next); free(t->word.before); free(t->word.id); free(t->word.heap);
    memset(t, 0, sizeof *t);
}

/* GPT-2 writes each byte as a character: printable ones as themselves, the others as U+0100, U+0101 ... */
static inline void bpe_alphabet(bpe *t) {
    int byte, next = 256, i;
    for (i = 0; i < BPE_ALPHABET; i++) t->byte_of[i] = -1;
    for (byte = 0; byte < 256; byte++) {
        int printable = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
        t->byte_of[printable ? byte : next++] = byte;
    }
}

/* Turns GPT-2's writing of bytes into the bytes, in place.  -1: a character stands for no byte. */
static inline int64_t bpe_bytes(const bpe *t, const char *in, int64_t n, char *out) {
    int64_t i, used = 0;
    uint32_t code;
    if (t->characters) { memmove(out, in, (size_t)n); return n; }
    for (i = 0; i < n;) {
        i += utf8_read(in + i, n - i, &code);
        if (code >= BPE_ALPHABET || t->byte_of[code] < 0) return -1;
        out[used++] = (char)t->byte_of[code];
    }
    return used;
}

/* The slot of a text: that of its token, or the empty one where it would go (FNV-1a, linear probing). */
static inline int64_t bpe_slot(const bpe *t, const char *bytes, int64_t n) {
    uint64_t hash = 0xcbf29ce484222325u;
    int64_t i, slot;
    for (i = 0; i < n; i++) hash = (hash ^ (unsigned char)bytes[i]) * 0x100000001b3u;
    for (slot = (int64_t)(hash & (t->n_slots - 1)); t->by_text[slot] >= 0;
         slot = (slot + 1) & (int64_t)(t->n_slots - 1)) {
        const bpe_span *span = &t->tokens[t->by_text[slot]];
        if (span->length == n && memcmp(t->text + span->at, bytes, (size_t)n) == 0) break;
    }
    return slot;
}
static inline int32_t bpe_find(const bpe *t, const char *bytes, int64_t n) {
    return t->by_text[bpe_slot(t, bytes, n)];
}

/* Makes room for the tokens up to `id`. */
static inline int bpe_tokens_reserve(bpe *t, int64_t id) {
    int64_t room = id + id / 2 + 1024;
    bpe_span *more;
    if (id < t->n_tokens) return 1;
    more = (bpe_span *)realloc(t->tokens, (size_t)room * sizeof *more);
    if (more == NULL) return 0;
    memset(more + t->n_tokens, 0xff, (size_t)(room - t->n_tokens) * sizeof *more);      /* -1: no token */
    t->tokens = more;
    t->n_tokens = room;
    return 1;
}

/* {"!": 0, "\u0120t": 256, ...}; added tokens may hold characters outside the alphabet and are only decoded. */
static inline const char *bpe_entry(bpe *t, json *j, char *key, int64_t *used) {
    int64_t id, length, slot;
    json_string(j, key, BPE_LONGEST);
    if (j->bad) return "not a string, or one that is too long";
    json_need(j, ':');
    id = json_integer(j);
    if (j->bad) return "a token must be followed by ':' and its number";
    if (id < 0 || id >= BPE_MOST) return "the number of a token must be 0 to 4194303";
    if (!bpe_tokens_reserve(t, id)) return "no memory for the vocabulary";
    if (t->tokens[id].length >= 0) return "two tokens have this number";
    length = bpe_bytes(t, key, (int64_t)strlen(key), t->text + *used);
    if (length == 0) return "a token is empty";
    if (length < 0) memcpy(t->text + *used, key, (size_t)(length = (int64_t)strlen(key)));
    else {
        slot = bpe_slot(t, t->text + *used, length);
        if (t->by_text[slot] >= 0) return "a token appears twice";
        t->by_text[slot] = (int32_t)id;
    }
    t->tokens[id].at = *used;
    t->tokens[id].length = (int32_t)length;
    *used += length;
    if (id >= t->n) t->n = id + 1;
    return NULL;
}

/* The tokens of single bytes: every byte has one. */
static inline int bpe_find_bytes(bpe *t, const char *path) {
    int i;
    for (i = 0; i < 256; i++) {
        char byte = (char)i, name[8];
        snprintf(name, sizeof name, "<0x%02X>", (unsigned)i);
        t->byte_token[i] = t->characters ? bpe_find(t, name, 6) : bpe_find(t, &byte, 1);
        if (t->byte_token[i] < 0)
            return st_fail(ST_ERR_FORMAT, "%s: there is no token for byte %d, so this is not a byte-level "
                                          "vocabulary", path, i);
    }
    return ST_OK;
}

static inline int bpe_vocab(bpe *t, const char *path, const char *text, size_t bytes) {
    char *key = (char *)malloc(BPE_LONGEST);
    const char *wrong = NULL;
    json j = json_open(text, bytes);
    int64_t used = 0;
    int more;
    for (t->n_slots = 1024; t->n_slots < bytes / 3;) t->n_slots *= 2;       /* an entry takes 6 bytes or more */
    t->text = (char *)malloc(bytes + 1);        /* a token is never longer than its text in the file */
    t->by_text = (int32_t *)malloc((size_t)t->n_slots * sizeof *t->by_text);
    if (key == NULL || t->text == NULL || t->by_text == NULL || !bpe_tokens_reserve(t, 0)) {
        free(key);
        return st_fail(ST_ERR_MEMORY, "%s: no memory for the vocabulary", path);
    }
    memset(t->by_text, 0xff, (size_t)t->n_slots * sizeof *t->by_text);
    json_need(&j, '{');
    for (more = json_peek(&j) == '"'; more && wrong == NULL; more = wrong == NULL && json_take(&j, ','))
        wrong = bpe_entry(t, &j, key, &used);
    if (wrong == NULL) json_need(&j, '}');
    if (wrong == NULL && (j.bad || json_peek(&j) != 0 || j.at != j.end))
        wrong = "not a JSON object of tokens and numbers";
    free(key);
    if (wrong != NULL)
        return st_fail(ST_ERR_FORMAT, "%s: byte %lld: %s", path, (long long)(j.at - text), wrong);
    t->end_of_text = bpe_find(t, "<|endoftext|>", 13);
    return bpe_find_bytes(t, path);
}

/* The merge of two tokens, or the empty slot where it would go. */
static inline bpe_merge *bpe_pair(const bpe *t, int32_t left, int32_t right) {
    uint64_t key = (uint64_t)left << 32 | (uint32_t)right, slot = (key * 0x9e3779b97f4a7c15u) >> 20;
    for (;; slot++) {
        bpe_merge *m = &t->merges[slot & (t->merge_slots - 1)];
        if (m->result < 0 || (m->left == left && m->right == right)) return m;
    }
}

/* One line "left right", without its end. */
static inline const char *bpe_merge_line(bpe *t, const char *line, int64_t n, int32_t rank, char *scratch) {
    const char *space = (const char *)memchr(line, ' ', (size_t)n);
    int64_t first, second;
    bpe_merge *m;
    if (space == NULL || memchr(space + 1, ' ', (size_t)(line + n - space - 1)) != NULL || n > BPE_LONGEST)
        return "must be two tokens with one space between them";
    first = bpe_bytes(t, line, space - line, scratch);
    second = first > 0 ? bpe_bytes(t, space + 1, line + n - space - 1, scratch + first) : 0;
    if (first < 1 || second < 1) return "must be two tokens in GPT-2's writing of bytes";
    m = bpe_pair(t, bpe_find(t, scratch, first), bpe_find(t, scratch + first, second));
    if (m->result >= 0) return "this merge appears twice";
    m->left = bpe_find(t, scratch, first);
    m->right = bpe_find(t, scratch + first, second);
    m->rank = rank;
    if (m->left < 0 || m->right < 0) return "merges a token that is not in the vocabulary";
    m->result = bpe_find(t, scratch, first + second);
    return m->result < 0 ? "the merged token is not in the vocabulary" : NULL;
}

/* ["a b", ...] or [["a", "b"], ...] as the lines of merges.txt, to be freed. */
static inline char *bpe_merges_text(json list, size_t *bytes) {
    json_buffer b = {NULL, 0, 0, 0};
    char *piece = (char *)malloc(2 * BPE_LONGEST);
    int more, pair;
    json_need(&list, '[');
    for (more = piece != NULL && json_peek(&list) != ']'; more && !list.bad; more = json_take(&list, ',')) {
        pair = json_take(&list, '[');
        json_peek(&list);
        json_string(&list, piece, BPE_LONGEST);
        if (pair) {
            size_t n = strlen(piece);
            json_need(&list, ',');
            json_peek(&list);
            piece[n] = ' ';
            json_string(&list, piece + n + 1, BPE_LONGEST);
            json_need(&list, ']');
        }
        json_put(&b, piece, strlen(piece));
        json_put(&b, "\n", 1);
    }
    json_need(&list, ']');
    free(piece);
    if (b.text == NULL && !list.bad) json_put(&b, "", 0);
    if (b.failed || list.bad) { free(b.text); return NULL; }
    *bytes = b.used;
    return b.text;
}

static inline int bpe_merges(bpe *t, const char *path, const char *text, size_t bytes) {
    char *scratch = (char *)malloc(BPE_LONGEST);
    const char *at = text, *end = text + bytes, *wrong = NULL;
    int64_t line, i;
    int32_t rank = 0;
    uint64_t lines = 1;
    for (i = 0; i < (int64_t)bytes; i++) lines += text[i] == '\n';
    for (t->merge_slots = 16; t->merge_slots < 2 * lines;) t->merge_slots *= 2;
    t->merges = (bpe_merge *)malloc((size_t)t->merge_slots * sizeof *t->merges);
    if (scratch == NULL || t->merges == NULL) {
        free(scratch);
        return st_fail(ST_ERR_MEMORY, "%s: no memory for the merges", path);
    }
    for (i = 0; i < (int64_t)t->merge_slots; i++) t->merges[i].result = -1;
    for (line = 1; at < end && wrong == NULL; line++) {
        const char *stop = (const char *)memchr(at, '\n', (size_t)(end - at));
        int64_t n = (stop != NULL ? stop : end) - at;
        if (n > 0 && at[n - 1] == '\r') n--;
        if (n > 0 && !(line == 1 && n > 8 && memcmp(at, "#version", 8) == 0))
            wrong = bpe_merge_line(t, at, n, rank++, scratch);
        if (wrong == NULL) at = stop != NULL ? stop + 1 : end;
    }
    free(scratch);
    return wrong == NULL ? ST_OK
                         : st_fail(ST_ERR_FORMAT, "%s: line %lld: %s", path, (long long)line - 1, wrong);
}

/* The same from a tokenizer.json of this path: the values of "vocab" and "merges".  t: zeros, with .characters and
   .whole set. */
static inline int bpe_parse(bpe *t, const char *path, json vocab, json merges) {
    size_t bytes = 0;
    char *text = bpe_merges_text(merges, &bytes);
    int result = text != NULL ? ST_OK : st_fail(ST_ERR_FORMAT, "%s: the merges are not a list of pairs", path);
    bpe_alphabet(t);
    if (result == ST_OK) result = bpe_vocab(t, path, vocab.at, (size_t)(vocab.end - vocab.at));
    if (result == ST_OK) result = bpe_merges(t, path, text, bytes);
    free(text);
    if (result != ST_OK) bpe_close(t);
    return result;
}

/* Opens both files.  Nothing in them is trusted. */
static inline int bpe_open(bpe *t, const char *vocab, const char *merges) {
    char *text = NULL;
    size_t bytes = 0;
    int result;
    memset(t, 0, sizeof *t);
    bpe_alphabet(t);
    result = st_read_file(vocab, &text, &bytes);
    if (result == ST_OK) result = bpe_vocab(t, vocab, text, bytes);
    free(text);
    text = NULL;
    if (result == ST_OK) result = st_read_file(merges, &text, &bytes);
    if (result == ST_OK) result = bpe_merges(t, merges, text, bytes);
    free(text);
    if (result != ST_OK) bpe_close(t);
    return result;
}

/* The text of a token; NULL if there is none. */
static inline const char *bpe_text(const bpe *t, int64_t token, int64_t *length) {
    *length = 0;
    if (token < 0 || token >= t->n || t->tokens[token].length < 0) return NULL;
    *length = t->tokens[token].length;
    return t->text + t->tokens[token].at;
}

/* ---- Words */

enum { BPE_OTHER = 0, BPE_LETTER = 1, BPE_NUMBER = 2, BPE_SPACE = 3 };

/* Unicode's categories L and N and its white space: first character * 4 + class of every run.  Characters that were
   not assigned in Unicode 14 take the class of those before them.  Made by
   tests/torch/oracle/tokenizer.py --classes. */
static const uint32_t bpe_classes[] = {
    0, 39, 56, 131, 132, 194, 232, 261, 364, 389, 492, 535, 536, 643, 644, 681, 684, 714, 720, 725, 728, 742, 745,
    748, 754, 764, 769, 860, 865, 988, 993, 2824, 2841, 2888, 2945, 2964, 2993, 2996, 3001, 3004, 3521, 3540, 3545,
    3576, 3581, 3600, 3609, 3612, 3617, 4056, 4061, 4616, 4649, 5480, 5505, 5668, 5953, 6092, 6273, 6444, 6530, 6568,
    6585, 6592, 6597, 6992, 6997, 7000, 7061, 7068, 7097, 7106, 7145, 7156, 7165, 7168, 7233, 7236, 7241, 7360, 7477,
    7832, 7877, 7938, 7977, 8108, 8145, 8152, 8169, 8180, 8193, 8280, 8297, 8300, 8337, 8340, 8353, 8356, 8449, 8548,
    8577, 8736, 8741, 8768, 8833, 9000, 9233, 9448, 9461, 9464, 9537, 9540, 9569, 9608, 9626, 9664, 9669, 9732, 9749,
    9968, 9973, 9976, 10041, 10076, 10097, 10120, 10138, 10177, 10184, 10194, 10216, 10225, 10228, 10261, 10480,
    10597, 10650, 10688, 10697, 10708, 10773, 10992, 10997, 11000, 11073, 11144, 11162, 11200, 11237, 11240, 11285,
    11504, 11509, 11512, 11633, 11656, 11674, 11712, 11717, 11722, 11784, 11789, 12024, 12097, 12124, 12186, 12236,
    12309, 12528, 12533, 12536, 12641, 12680, 12698, 12764, 12770, 12796, 12801, 12804, 12821, 13040, 13045, 13048,
    13173, 13192, 13210, 13253, 13312, 13329, 13548, 13557, 13560, 13625, 13628, 13649, 13660, 13666, 13693, 13704,
    13722, 13796, 13801, 13828, 13845, 14120, 14234, 14280, 14341, 14532, 14537, 14544, 14593, 14620, 14658, 14696,
    14853, 15044, 15049, 15056, 15093, 15136, 15170, 15217, 15364, 15490, 15568, 15617, 15812, 15905, 15924, 16385,
    16556, 16637, 16642, 16680, 16705, 16728, 16745, 16760, 16773, 16776, 16789, 16796, 16825, 16836, 16853, 16904,
    16953, 16956, 16962, 17000, 17025, 17388, 17393, 19828, 19878, 19969, 20032, 20097, 20480, 20485, 22964, 22973,
    23043, 23045, 23148, 23169, 23468, 23482, 23493, 23624, 23677, 23752, 23809, 23880, 23937, 24008, 24065, 24272,
    24413, 24416, 24433, 24436, 24450, 24576, 24642, 24705, 25108, 25117, 25252, 25257, 25728, 25882, 25921, 26434,
    26488, 26625, 26716, 26753, 26964, 27138, 27264, 27293, 27296, 27669, 27856, 27925, 27970, 28008, 28173, 28292,
    28345, 28354, 28393, 28568, 28673, 28816, 28930, 28981, 28994, 29033, 29176, 29185, 29440, 29605, 29620, 29625,
    29648, 29653, 29660, 29673, 30464, 30721, 32500, 32505, 32508, 32521, 32564, 32577, 32628, 32641, 32692, 32713,
    32756, 32771, 32812, 32931, 32936, 32959, 32960, 33151, 33152, 33218, 33221, 33234, 33256, 33277, 33282, 33320,
    33345, 33408, 33801, 33804, 33821, 33824, 33833, 33872, 33877, 33880, 33893, 33912, 33937, 33940, 33945, 33948,
    33953, 33956, 33961, 33976, 33981, 34024, 34033, 34048, 34069, 34088, 34105, 34108, 34114, 34317, 34326, 34344,
    37250, 37488, 37802, 37888, 40410, 40528, 45057, 45972, 45997, 46012, 46025, 46052, 46070, 46072, 46081, 46528,
    46593, 46976, 47293, 47296, 49155, 49156, 49173, 49182, 49184, 49286, 49320, 49349, 49368, 49378, 49389, 49396,
    49413, 49764, 49781, 49792, 49797, 50156, 50161, 50752, 50762, 50776, 50817, 50944, 51137, 51200, 51330, 51368,
    51490, 51520, 51526, 51584, 51714, 51752, 51910, 51968, 53249, 79616, 79873, 168512, 168769, 168952, 168961,
    170036, 170049, 170114, 170153, 170428, 170493, 170616, 170625, 170906, 170944, 171101, 171136, 171145, 171556,
    171565, 172040, 172045, 172056, 172061, 172076, 172081, 172172, 172226, 172248, 172289, 172496, 172553, 172752,
    172866, 172928, 173001, 173024, 173037, 173040, 173045, 173052, 173058, 173097, 173208, 173249, 173340, 173441,
    173568, 173585, 173772, 173885, 173890, 173944, 173953, 173972, 173977, 174018, 174057, 174244, 174337, 174348,
    174353, 174384, 174402, 174448, 174465, 174556, 174569, 174572, 174585, 174784, 174789, 174792, 174805, 174812,
    174821, 174840, 174849, 174852, 174857, 174968, 174977, 175020, 175049, 175060, 175109, 175468, 175473, 175528,
    175553, 176012, 176066, 176129, 229376, 254977, 257144, 257149, 257188, 257193, 257736, 257869, 259320, 259393,
    259900, 260033, 260080, 260545, 261116, 261186, 261224, 261253, 261356, 261381, 261484, 261529, 262016, 262145,
    263168, 263198, 263388, 263426, 263652, 263722, 263728, 264705, 265088, 265094, 265217, 265346, 265397, 265478,
    265481, 265514, 265537, 265688, 265729, 265852, 265857, 266048, 266054, 266241, 266882, 266945, 267708, 267713,
    270684, 270690, 270721, 270812, 270822, 270849, 271006, 271233, 271342, 271361, 271450, 271484, 271489, 271612,
    271873, 272114, 272121, 272130, 272385, 272388, 272449, 272608, 272642, 272704, 272769, 272886, 272892, 272897,
    273014, 273153, 273184, 273189, 273300, 273326, 273344, 273409, 273636, 273665, 273762, 273793, 273890, 273921,
    274020, 274086, 274433, 275434, 275457, 275600, 275650, 276993, 277164, 277185, 277622, 277661, 277784, 277830,
    277844, 277953, 278024, 278209, 278294, 278401, 278528, 278541, 278752, 278858, 278976, 278981, 278988, 278997,
    279036, 279053, 279232, 279361, 279490, 279552, 279565, 279708, 279770, 279808, 279825, 279828, 279837, 280012,
    280025, 280064, 280077, 280268, 280325, 280340, 280386, 280425, 280428, 280433, 280436, 280454, 280577, 280752,
    281089, 281252, 281281, 281468, 281538, 281600, 281621, 281836, 281845, 281848, 281921, 281948, 281973, 281992,
    282625, 282836, 282909, 282924, 282946, 282984, 283005, 283328, 283409, 283416, 283421, 283458, 284161, 284348,
    284513, 284528, 284673, 284864, 284945, 284994, 285056, 285185, 285356, 285409, 285412, 285442, 285697, 285812,
    285890, 285936, 285953, 286896, 287361, 287618, 287741, 287936, 287997, 288000, 288005, 288008, 288066, 288385,
    288580, 288645, 288648, 288653, 288656, 288769, 288772, 288813, 288972, 289001, 289004, 289089, 289092, 289137,
    289320, 289397, 289400, 289473, 291004, 291073, 291076, 291138, 291264, 291273, 291400, 291841, 292036, 292121,
    292124, 292162, 292225, 292392, 292449, 292482, 293761, 293836, 294593, 294658, 294740, 294913, 299010, 299456,
    299521, 311236, 311297, 315584, 331777, 371074, 371128, 371137, 371458, 371521, 371648, 371713, 371904, 371969,
    371984, 372034, 372109, 375298, 375388, 375809, 376124, 376129, 376132, 376397, 376712, 376717, 376720, 376833,
    455280, 478082, 478208, 478594, 479233, 482052, 482057, 482156, 482161, 482284, 482289, 482388, 482393, 482516,
    482521, 482620, 482625, 482748, 482753, 482852, 482857, 482980, 482985, 483084, 483089, 483130, 483328, 490497,
    491520, 492545, 492736, 492765, 492802, 492857, 492860, 494145, 494264, 494337, 494512, 494530, 494588, 499585,
    500510, 500544, 500737, 501008, 501037, 501058, 501112, 504262, 504496, 504502, 504512, 504518, 505016, 505022,
    505857, 506816, 508930, 508980, 520130, 524289, 3670020,
};

static inline int bpe_class(uint32_t code) {
    size_t low = 0, high = sizeof bpe_classes / sizeof *bpe_classes;
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (bpe_classes[middle] >> 2 <= code) low = middle;
        else high = middle;
    }
    return (int)(bpe_classes[low] & 3);
}

/* End of the run of characters of one class that starts at `at`; *last: where its last character starts. */
static inline int64_t bpe_run(const char *text, int64_t n, int64_t at, int class_wanted, int64_t *last) {
    uint32_t code;
    while (at < n) {
        int64_t length = utf8_read(text + at, n - at, &code);
        if (bpe_class(code) != class_wanted) break;
        *last = at;
        at += length;
    }
    return at;
}

/* Length of the word that text begins with, by GPT-2's rule:
   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ */
static inline int64_t bpe_word_length(const char *text, int64_t n) {
    static const char *const endings[] = {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"};
    int64_t first, end, last = 0;
    uint32_t code;
    size_t i;
    int kind;
    for (i = 0; i < sizeof endings / sizeof *endings && text[0] == '\''; i++) {
        int64_t length = (int64_t)strlen(endings[i]);
        if (length <= n && memcmp(text, endings[i], (size_t)length) == 0) return length;
    }
    first = text[0] == ' ' && n > 1;
    utf8_read(text + first, n - first, &code);
    kind = bpe_class(code);
    if (kind != BPE_SPACE) return bpe_run(text, n, first, kind, &last);
    end = bpe_run(text, n, 0, BPE_SPACE, &last);
    return end < n && last > 0 ? last : end;    /* the last space of several belongs to the next word */
}

/* The same by the rule of Llama 3, whose numbers have at most three digits a word, and of Qwen 2, which has one:
   (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,digits}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|
   \s+(?!\S)|\s+ */
static inline int64_t bpe_word_length_newer(const char *text, int64_t n, int digits) {
    static const char *const endings[] = {"s", "t", "re", "ve", "m", "ll", "d"};
    int64_t first = 0, end, last = 0, length;
    uint32_t code, next = 0;
    size_t i;
    int kind;
    for (i = 0; i < sizeof endings / sizeof *endings && text[0] == '\''; i++) {
        int64_t k, count = (int64_t)strlen(endings[i]);
        for (k = 0; k < count && k + 1 < n && (text[k + 1] | 32) == endings[i][k]; k++) {}
        if (k == count) return count + 1;
        if (endings[i][0] == 's' && n > 2 && memcmp(text + 1, "\xc5\xbf", 2) == 0) return 3;    /* a long s */
    }
    length = utf8_read(text, n, &code);
    kind = bpe_class(code);
    if (length < n) utf8_read(text + length, n - length, &next);
    if (kind == BPE_LETTER || (kind != BPE_NUMBER && code != '\r' && code != '\n' && length < n &&
                               bpe_class(next) == BPE_LETTER))
        return bpe_run(text, n, kind == BPE_LETTER ? 0 : length, BPE_LETTER, &last);
    for (; kind == BPE_NUMBER && digits > 0 && first < n; digits--, first += length) {
        length = utf8_read(text + first, n - first, &code);
        if (bpe_class(code) != BPE_NUMBER) break;
    }
    if (kind == BPE_NUMBER) return first;
    if (kind == BPE_OTHER || (code == ' ' && length < n && bpe_class(next) == BPE_OTHER)) {
        for (end = bpe_run(text, n, kind == BPE_OTHER ? 0 : 1, BPE_OTHER, &last); end < n; end++)
            if (text[end] != '\r' && text[end] != '\n') break;
        return end;
    }
    end = bpe_run(text, n, 0, BPE_SPACE, &last);
    for (first = end; first > 0; first--) if (text[first - 1] == '\n' || text[first - 1] == '\r') return first;
    return end < n && last > 0 ? last : end;
}

/* ---- Merging */

static inline int bpe_word_reserve(bpe_word *w, int64_t n) {
    int64_t capacity = 2 * n + 64;
    if (n <= w->capacity) return ST_OK;
    free(w->next); free(w->before); free(w->id); free(w->heap);
    w->next = (int64_t *)malloc((size_t)capacity * sizeof *w->next);
    w->before = (int64_t *)malloc((size_t)capacity * sizeof *w->before);
    w->id = (int32_t *)malloc((size_t)capacity * sizeof *w->id);
    w->heap = (bpe_candidate *)malloc((size_t)capacity * 3 * sizeof *w->heap);   /* a merge makes at most two pairs */
    w->capacity = w->next != NULL && w->before != NULL && w->id != NULL && w->heap != NULL ? capacity : 0;
    return w->capacity > 0 ? ST_OK : st_fail(ST_ERR_MEMORY, "no memory for a word of %lld bytes", (long long)n);
}

/* The lower rank goes first, then the place further left. */
static inline int bpe_before(const bpe_candidate *a, const bpe_candidate *b) {
    return a->merge.rank != b->merge.rank ? a->merge.rank < b->merge.rank : a->at < b->at;
}

static inline void bpe_push(const bpe *t, bpe_word *w, int64_t at) {
    bpe_candidate c;
    int64_t i = w->n_heap, parent;
    if (at < 0 || w->next[at] < 0) return;
    c.at = at;
    c.merge = *bpe_pair(t, w->id[at], w->id[w->next[at]]);
    if (c.merge.result < 0) return;
    for (w->n_heap++; i > 0; i = parent) {
        parent = (i - 1) / 2;
        if (!bpe_before(&c, &w->heap[parent])) break;
        w->heap[i] = w->heap[parent];
    }
    w->heap[i] = c;
}

static inline bpe_candidate bpe_pop(bpe_word *w) {
    bpe_candidate top = w->heap[0], moved = w->heap[--w->n_heap];
    int64_t i = 0, child;
    for (; (child = 2 * i + 1) < w->n_heap; i = child) {
        if (child + 1 < w->n_heap && bpe_before(&w->heap[child + 1], &w->heap[child])) child++;
        if (!bpe_before(&w->heap[child], &moved)) break;
        w->heap[i] = w->heap[child];
    }
    w->heap[i] = moved;
    return top;
}

/* The symbols that a word begins as: its bytes, or the characters that have a token and the bytes of those that have
   none.  Returns how many. */
static inline int64_t bpe_symbols(const bpe *t, const char *text, int64_t n, int32_t *out) {
    int64_t i = 0, used = 0, length;
    uint32_t code;
    while (i < n) {
        length = t->characters ? utf8_read(text + i, n - i, &code) : 1;
        out[used] = t->characters ? bpe_find(t, text + i, length) : -1;
        if (out[used] >= 0) { i += length; used++; continue; }
        for (; length > 0; length--) out[used++] = t->byte_token[(unsigned char)text[i++]];
    }
    return used;
}

/* The tokens of one word, at most n; returns how many. */
static inline int64_t bpe_merge_word(const bpe *t, bpe_word *w, const char *text, int64_t n, int32_t *out) {
    int64_t i, used = 0;
    int32_t whole = t->whole ? bpe_find(t, text, n) : -1;
    if (whole >= 0) { out[0] = whole; return 1; }
    w->n_heap = 0;
    n = bpe_symbols(t, text, n, w->id);
    for (i = 0; i < n; i++) {
        w->before[i] = i - 1;
        w->next[i] = i + 1 < n ? i + 1 : -1;
    }
    for (i = 0; i < n; i++) bpe_push(t, w, i);
    while (w->n_heap > 0) {
        bpe_candidate c = bpe_pop(w);
        int64_t right = w->id[c.at] == c.merge.left ? w->next[c.at] : -1;
        if (right < 0 || w->id[right] != c.merge.right) continue;   /* merged differently since */
        w->id[c.at] = c.merge.result;
        w->id[right] = -1;
        w->next[c.at] = w->next[right];
        if (w->next[right] >= 0) w->before[w->next[right]] = c.at;
        bpe_push(t, w, w->before[c.at]);
        bpe_push(t, w, c.at);
    }
    for (i = 0; i >= 0 && i < n; i = w->next[i]) out[used++] = w->id[i];
    return used;
}

/* The same, with room made for it; -1: no memory. */
static inline int64_t bpe_encode_word(bpe *t, const char *text, int64_t n, int32_t *out) {
    return bpe_word_reserve(&t->word, n) == ST_OK ? bpe_merge_word(t, &t->word, text, n, out) : -1;
}

/* The tokens of a text; out holds n.  "<|endoftext|>" becomes its own token, as in transformers. */
static inline int bpe_encode(bpe *t, const char *text, int64_t n, int32_t *out, int64_t *count) {
    static const char mark[] = "<|endoftext|>";
    int64_t at = 0, used = 0, length, more;
    *count = 0;
    if (t->merges == NULL) return st_fail(ST_ERR_STATE, "bpe_encode: the tokenizer is not open");
    if (n < 0 || (n > 0 && (text == NULL || out == NULL)))
        return st_fail(ST_ERR_NULL, "bpe_encode: text or out is NULL, or n negative");
    while (at < n) {
        const char *stop = t->end_of_text >= 0 ? (const char *)memchr(text + at, '<', (size_t)(n - at)) : NULL;
        int64_t end;
        while (stop != NULL && (text + n - stop < 13 || memcmp(stop, mark, 13) != 0))
            stop = (const char *)memchr(stop + 1, '<', (size_t)(text + n - stop - 1));
        for (end = stop != NULL ? stop - text : n; at < end; at += length) {
            length = bpe_word_length(text + at, end - at);
            more = bpe_encode_word(t, text + at, length, out + used);
            if (more < 0) return ST_ERR_MEMORY;
            used += more;
        }
        if (stop != NULL) { out[used++] = t->end_of_text; at += 13; }
    }
    *count = used;
    return ST_OK;
}

#endif
