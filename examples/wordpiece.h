/* wordpiece.h - the tokenizer of BERT: WordPiece (Devlin et al. 2019) from a vocab.txt with one token a line.
 *
 * Stands alone: needs libc and safetensors.h, whose UTF-8 it uses.  Text is cleaned, lower-cased without accents unless
 * the vocabulary is cased, split at spaces, at punctuation and around ideographs, and each word is cut from the left
 * into the longest known pieces, with "##" before all but the first; a word that cannot be cut, or has more than 100
 * characters, is [UNK].  As BertTokenizer, except that CJK compatibility ideographs stay unchanged and "[SEP]" in a
 * text is three tokens like any other (model_folder.h finds such tokens first).  wordpiece_open, wordpiece_encode,
 * wordpiece_close; st_error says why a call failed. */
#ifndef EXAMPLE_WORDPIECE_H
#define EXAMPLE_WORDPIECE_H

#include "safetensors.h"

/* Characters of a word; bytes of a line. */
enum { WORDPIECE_LONGEST = 100, WORDPIECE_LINE = 8192 };

typedef struct wordpiece_span { int64_t at; int32_t length; } wordpiece_span;

typedef struct wordpiece {
    int64_t n;                      /* tokens */
    int32_t pad, unknown, begin, end;           /* [PAD], [UNK], [CLS], [SEP] */
    int cased;
    char *text;                     /* of the file */
    size_t text_bytes;
    wordpiece_span *tokens;
    int32_t *slots;                 /* hash table, -1: empty */
    uint64_t n_slots;
    int64_t longest;                /* bytes of the longest token */
} wordpiece;

static inline void wordpiece_close(wordpiece *w) {
    free(w->text);
    free(w->tokens); free(w->slots);
    memset(w, 0, sizeof *w);
}

/* The slot of `prefix` and `bytes` together: that of their token, or the empty one where it would go. */
static inline uint64_t wordpiece_slot(const wordpiece *w, const char *prefix, const char *bytes, int64_t n) {
    uint64_t hash = 0xcbf29ce484222325u, slot;
    int64_t i, before = (int64_t)strlen(prefix);
    for (i = 0; i < before + n; i++)
        hash = (hash ^ (unsigned char)(i < before ? prefix[i] : bytes[i - before])) * 0x100000001b3u;
    for (slot = hash & (w->n_slots - 1); w->slots[slot] >= 0; slot = (slot + 1) & (w->n_slots - 1)) {
        const wordpiece_span *span = &w->tokens[w->slots[slot]];
        if (span->length == before + n && memcmp(w->text + span->at, prefix, (size_t)before) == 0 &&
            memcmp(w->text + span->at + before, bytes, (size_t)n) == 0) break;
    }
    return slot;
}
static inline int32_t wordpiece_find(const wordpiece *w, const char *prefix, const char *bytes, int64_t n) {
    return w->slots[wordpiece_slot(w, prefix, bytes, n)];
}

/* One token a line; of equal lines the last one counts, as in transformers. */
static inline int wordpiece_lines(wordpiece *w, const char *path) {
    int64_t at = 0, bytes = (int64_t)w->text_bytes, lines = 1, i;
    for (i = 0; i < bytes; i++) lines += w->text[i] == '\n';
    if (lines > (int64_t)1 << 24) return st_fail(ST_ERR_SIZE, "%s: the file has more than 2^24 lines", path);
    for (w->n_slots = 16; (int64_t)w->n_slots < 2 * lines;) w->n_slots *= 2;
    w->tokens = (wordpiece_span *)malloc((size_t)lines * sizeof *w->tokens);
    w->slots = (int32_t *)malloc((size_t)w->n_slots * sizeof *w->slots);
    if (w->tokens == NULL || w->slots == NULL)
        return st_fail(ST_ERR_MEMORY, "%s: no memory for the vocabulary", path);
    for (i = 0; i < (int64_t)w->n_slots; i++) w->slots[i] = -1;
    while (at < bytes) {
        const char *stop = (const char *)memchr(w->text + at, '\n', (size_t)(bytes - at));
        int64_t next = stop != NULL ? stop - w->text + 1 : bytes, end = stop != NULL ? next - 1 : bytes;
        wordpiece_span *span = &w->tokens[w->n];
        if (end > at && w->text[end - 1] == '\r') end--;
        if (end - at > WORDPIECE_LINE)
            return st_fail(ST_ERR_FORMAT, "%s: line %lld: the token has %lld bytes", path, (long long)w->n + 1,
                                (long long)(end - at));
        span->at = at;
        span->length = (int32_t)(end - at);
        if (end - at > w->longest) w->longest = end - at;
        w->slots[wordpiece_slot(w, "", w->text + at, end - at)] = (int32_t)w->n;
        w->n++;
        at = next;
    }
    return ST_OK;
}

/* Reads a vocab.txt whose text is w->text.  Nothing in it is trusted. */
static inline int wordpiece_parse(wordpiece *w, const char *path) {
    static const char *const names[] = {"[PAD]", "[UNK]", "[CLS]", "[SEP]"};
    int32_t *special[4];
    int i, result;
    special[0] = &w->pad; special[1] = &w->unknown; special[2] = &w->begin; special[3] = &w->end;
    result = wordpiece_lines(w, path);
    if (result != ST_OK) return result;
    for (i = 0; i < 4; i++) {
        *special[i] = wordpiece_find(w, "", names[i], 5);
        if (*special[i] < 0)
            return st_fail(ST_ERR_FORMAT, "%s: no line is %s, so this is not a vocab.txt like BERT's", path, names[i]);
    }
    return ST_OK;
}

/* Opens a vocab.txt. */
static inline int wordpiece_open(wordpiece *w, const char *path, int cased) {
    int result;
    memset(w, 0, sizeof *w);
    result = st_read_file(path, &w->text, &w->text_bytes);
    w->cased = cased;
    if (result == ST_OK) result = wordpiece_parse(w, path);
    if (result != ST_OK) wordpiece_close(w);
    return result;
}

/* ---- Characters */

enum {
    PIECE_OTHER = 0,
    PIECE_MARK = 1,
    PIECE_DROPPED = 2,
    PIECE_SPACE = 3,
    PIECE_PUNCTUATION = 4,
    PIECE_IDEOGRAPH = 5
};

/* Made by tests/torch/oracle/wordpiece.py --tables from what the tokenizers library does with each character: letters
   that U+00C0, U+1E00 and U+1F00 (there 'a' is alpha) and those after them become, runs of other characters (first,
   2 count + step - 1, difference), characters that become two, and the first character * 8 + class of every run. */
static const char piece_latin[] =
    "aaaaaa.ceeeeiiii.nooooo..uuuuy..aaaaaa.ceeeeiiii.nooooo..uuuuy.yaaaaaaccccccccdd..eeeeeeeeeegggggggghh..iiiiiiii"
    "i...jjkk.llllll....nnnnnn...oooooo..rrrrrrsssssssstttt..uuuuuuuuuuuuwwyyyzzzzzz................................."
    "oo.............uu............................aaiioouuuuuuuuuu.aaaa....ggkkoooo..j...gg..nnaa....aaaaeeeeiiiioooo"
    "rrrruuuusstt..hh......aaeeooooooooyy............................";
static const char piece_extended[] =
    "aabbbbbbccddddddddddeeeeeeeeeeffgghhhhhhhhhhiiiikkkkkkllllllllmmmmmmnnnnnnnnoooooooopppprrrrrrrrsssssssssstttttt"
    "ttuuuuuuuuuuvvvvwwwwwwwwwwxxxxyyzzzzzzhtwy......aaaaaaaaaaaaaaaaaaaaaaaaeeeeeeeeeeeeeeeeiiiioooooooooooooooooooo"
    "oooouuuuuuuuuuuuuuyyyyyyyy......";
static const char piece_greek[] =
    "aaaaaaaaaaaaaaaaeeeeee..eeeeee..ggggggggggggggggiiiiiiiiiiiiiiiioooooo..oooooo..uuuuuuuu.u.u.u.uyyyyyyyyyyyyyyyy"
    "aaeeggiioouuyy..aaaaaaaaaaaaaaaaggggggggggggggggyyyyyyyyyyyyyyyyaaaaa.aaaaaaa.i...ggg.ggeeggg...iiii..iiiiii...."
    "uuuuqquuuuuuq.....yyy.yyooyyy...";
static const int32_t piece_folds[] = {
    198, 2, 32, 208, 2, 32, 216, 2, 32, 222, 2, 32, 272, 2, 1, 294, 2, 1, 306, 2, 1, 319, 5, 1, 330, 2, 1, 338, 2, 1,
    358, 2, 1, 385, 2, 210, 386, 5, 1, 390, 2, 206, 391, 2, 1, 393, 4, 205, 395, 2, 1, 398, 2, 79, 399, 2, 202, 400,
    2, 203, 401, 2, 1, 403, 2, 205, 404, 2, 207, 406, 2, 211, 407, 2, 209, 408, 2, 1, 412, 2, 211, 413, 2, 213, 415,
    2, 214, 418, 5, 1, 422, 2, 218, 423, 2, 1, 425, 2, 218, 428, 2, 1, 430, 2, 218, 433, 4, 217, 435, 5, 1, 439, 2,
    219, 440, 2, 1, 444, 2, 1, 452, 2, 2, 453, 2, 1, 455, 2, 2, 456, 2, 1, 458, 2, 2, 459, 2, 1, 482, 2, -252, 483, 2,
    -253, 484, 2, 1, 494, 2, 164, 495, 2, 163, 497, 2, 2, 498, 2, 1, 502, 2, -97, 503, 2, -56, 508, 2, -278, 509, 2,
    -279, 510, 2, -262, 511, 2, -263, 540, 2, 1, 544, 2, -130, 546, 5, 1, 570, 2, 10795, 571, 2, 1, 573, 2, -163, 574,
    2, 10792, 577, 2, 1, 579, 2, -195, 580, 2, 69, 581, 2, 71, 582, 11, 1, 880, 5, 1, 884, 2, -187, 886, 2, 1, 894, 2,
    -835, 895, 2, 116, 901, 2, -733, 902, 2, 43, 903, 2, -720, 904, 2, 45, 905, 2, 46, 906, 2, 47, 908, 2, 51, 910, 2,
    55, 911, 2, 58, 912, 2, 41, 913, 34, 32, 931, 14, 32, 938, 2, 15, 939, 2, 26, 940, 2, 5, 941, 2, 8, 942, 2, 9,
    943, 2, 10, 944, 2, 21, 970, 2, -17, 971, 2, -6, 972, 2, -13, 973, 2, -8, 974, 2, -5, 975, 2, 8, 979, 2, -1, 980,
    2, -2, 984, 25, 1, 1012, 2, -60, 1015, 2, 1, 1017, 2, -7, 1018, 2, 1, 1021, 6, -130, 1024, 2, 53, 1025, 2, 52,
    1026, 2, 80, 1027, 2, 48, 1028, 6, 80, 1031, 2, 79, 1032, 8, 80, 1036, 2, 46, 1037, 2, 43, 1038, 2, 53, 1039, 2,
    80, 1040, 18, 32, 1049, 2, 31, 1050, 44, 32, 1081, 2, -1, 1104, 2, -27, 1105, 2, -28, 1107, 2, -32, 1111, 2, -1,
    1116, 2, -34, 1117, 2, -37, 1118, 2, -27, 1120, 23, 1, 1142, 2, -1, 1143, 2, -2, 1144, 11, 1, 1162, 55, 1, 1216,
    2, 15, 1217, 2, -139, 1218, 2, -140, 1219, 13, 1, 1232, 2, -160, 1233, 2, -161, 1234, 2, -162, 1235, 2, -163,
    1236, 2, 1, 1238, 2, -161, 1239, 2, -162, 1240, 2, 1, 1242, 2, -1, 1243, 2, -2, 1244, 2, -166, 1245, 4, -167,
    1247, 2, -168, 1248, 2, 1, 1250, 2, -170, 1251, 2, -171, 1252, 2, -172, 1253, 2, -173, 1254, 2, -168, 1255, 2,
    -169, 1256, 2, 1, 1258, 2, -1, 1259, 2, -2, 1260, 2, -159, 1261, 2, -160, 1262, 2, -171, 1263, 2, -172, 1264, 2,
    -173, 1265, 2, -174, 1266, 2, -175, 1267, 2, -176, 1268, 2, -173, 1269, 2, -174, 1270, 2, 1, 1272, 2, -173, 1273,
    2, -174, 1274, 55, 1, 1329, 76, 48, 1570, 2, 5, 1571, 2, 4, 1572, 2, 36, 1573, 2, 2, 1574, 2, 36, 1728, 2, 21,
    1730, 2, -1, 1747, 2, -1, 2345, 2, -1, 2353, 2, -1, 2356, 2, -1, 2392, 6, -67, 2395, 2, -63, 2396, 4, -59, 2398,
    2, -51, 2399, 2, -48, 2524, 4, -59, 2527, 2, -48, 2611, 2, -1, 2614, 2, 2, 2649, 4, -67, 2651, 2, -63, 2654, 2,
    -51, 2888, 2, -1, 2908, 4, -59, 3264, 2, 21, 3271, 4, 14, 3274, 2, -8, 3546, 2, -1, 3907, 2, -1, 3917, 2, -1,
    3922, 2, -1, 3927, 2, -1, 3932, 2, -1, 3945, 2, -41, 4134, 2, -1, 4256, 76, 7264, 4295, 2, 7264, 4301, 2, 7264,
    5024, 160, 38864, 5104, 12, 8, 6971, 2, -6, 6973, 2, -8, 6979, 2, -14, 7312, 86, -3008, 7357, 6, -3008, 7835, 2,
    -7452, 7838, 2, -7615, 7930, 7, 1, 8129, 2, -7961, 8141, 2, -14, 8142, 2, -15, 8143, 2, -16, 8157, 2, 33, 8158, 2,
    32, 8159, 2, 31, 8173, 2, -8005, 8174, 2, -8006, 8175, 2, -8079, 8189, 2, -8009, 8192, 4, 2, 8486, 2, -7517, 8490,
    2, -8383, 8491, 2, -8394, 8498, 2, 28, 8544, 32, 16, 8579, 2, 1, 8602, 2, -10, 8603, 2, -9, 8622, 2, -26, 8653, 2,
    3, 8654, 2, 6, 8655, 2, 3, 8708, 2, -1, 8713, 2, -1, 8716, 2, -1, 8740, 5, -1, 8769, 2, -5, 8772, 2, -1, 8775, 2,
    -2, 8777, 2, -1, 8800, 2, -8739, 8802, 2, -1, 8813, 2, -32, 8814, 2, -8754, 8815, 2, -8753, 8816, 4, -12, 8820, 4,
    -2, 8824, 4, -2, 8832, 4, -6, 8836, 4, -2, 8840, 4, -2, 8876, 2, -10, 8877, 4, -5, 8879, 2, -4, 8928, 4, -100,
    8930, 4, -81, 8938, 8, -56, 9001, 4, 3295, 9398, 52, 26, 10972, 2, 1, 11264, 96, 48, 11360, 2, 1, 11362, 2,
    -10743, 11363, 2, -3814, 11364, 2, -10727, 11367, 7, 1, 11373, 2, -10780, 11374, 2, -10749, 11375, 2, -10783,
    11376, 2, -10782, 11378, 2, 1, 11381, 2, 1, 11390, 4, -10815, 11392, 101, 1, 11499, 5, 1, 11506, 2, 1, 12364, 25,
    -1, 12389, 7, -1, 12400, 2, -1, 12401, 2, -2, 12403, 2, -1, 12404, 2, -2, 12406, 2, -1, 12407, 2, -2, 12409, 2,
    -1, 12410, 2, -2, 12412, 2, -1, 12413, 2, -2, 12436, 2, -78, 12446, 2, -1, 12460, 25, -1, 12485, 7, -1, 12496, 2,
    -1, 12497, 2, -2, 12499, 2, -1, 12500, 2, -2, 12502, 2, -1, 12503, 2, -2, 12505, 2, -1, 12506, 2, -2, 12508, 2,
    -1, 12509, 2, -2, 12532, 2, -78, 12535, 8, -8, 12542, 2, -1, 42560, 47, 1, 42624, 29, 1, 42786, 15, 1, 42802, 63,
    1, 42873, 5, 1, 42877, 2, -35332, 42878, 11, 1, 42891, 2, 1, 42893, 2, -42280, 42896, 5, 1, 42902, 21, 1, 42922,
    2, -42308, 42923, 2, -42319, 42924, 2, -42315, 42925, 2, -42305, 42926, 2, -42308, 42928, 2, -42258, 42929, 2,
    -42282, 42930, 2, -42261, 42931, 2, 928, 42932, 17, 1, 42948, 2, -48, 42949, 2, -42307, 42950, 2, -35384, 42951,
    5, 1, 42960, 2, 1, 42966, 5, 1, 42997, 2, 1, 64285, 2, -62788, 64287, 2, -62765, 64298, 2, -62785, 64299, 2,
    -62786, 64300, 2, -62787, 64301, 2, -62788, 64302, 2, -62814, 64303, 2, -62815, 64304, 14, -62816, 64312, 10,
    -62816, 64318, 5, -62816, 64321, 5, -62816, 64324, 5, -62816, 64327, 8, -62816, 64331, 2, -62838, 64332, 2,
    -62843, 64333, 2, -62834, 64334, 2, -62826, 65313, 52, 32, 66560, 80, 40, 66736, 72, 40, 66928, 22, 39, 66940, 30,
    39, 66956, 14, 39, 66964, 4, 39, 68736, 102, 64, 69786, 5, -1, 69803, 2, -6, 70843, 2, -2, 71840, 64, 32, 93760,
    64, 32, 125184, 68, 34,
};
static const int32_t piece_pairs[] = {
    2507, 2503, 2494, 2508, 2503, 2519, 2891, 2887, 2878, 2892, 2887, 2903, 2964, 2962, 3031, 3018, 3014, 3006, 3019,
    3015, 3006, 3020, 3014, 3031, 3275, 3266, 3285, 3402, 3398, 3390, 3403, 3399, 3390, 3404, 3398, 3415, 3548, 3545,
    3535, 3549, 3545, 3535, 3550, 3545, 3551, 6918, 6917, 6965, 6920, 6919, 6965, 6922, 6921, 6965, 6924, 6923, 6965,
    6926, 6925, 6965, 6930, 6929, 6965, 6976, 6974, 6965, 6977, 6975, 6965, 70475, 70471, 70462, 70476, 70471, 70487,
    70844, 70841, 70832, 70846, 70841, 70845, 71098, 71096, 71087, 71099, 71097, 71087, 119134, 119127, 119141,
    119135, 119128, 119141, 119227, 119225, 119141, 119228, 119226, 119141,
};
static const uint32_t piece_classes[] = {
    2, 75, 90, 107, 114, 259, 268, 384, 468, 520, 732, 776, 988, 1018, 1283, 1292, 1296, 1340, 1344, 1372, 1376, 1386,
    1392, 1460, 1472, 1500, 1504, 1532, 1536, 6145, 7040, 7156, 7160, 7228, 7232, 9241, 9280, 10964, 11008, 11340,
    11368, 11401, 11764, 11769, 11780, 11785, 11804, 11809, 11828, 11833, 11904, 12188, 12290, 12336, 12364, 12376,
    12388, 12400, 12417, 12508, 12514, 12520, 12532, 12544, 12889, 13056, 13140, 13168, 13185, 13192, 13988, 13992,
    14001, 14058, 14064, 14073, 14120, 14137, 14152, 14161, 14192, 14340, 14458, 14464, 14473, 14480, 14721, 14952,
    15665, 15752, 16217, 16288, 16316, 16336, 16561, 16592, 16601, 16672, 16681, 16704, 16713, 16772, 16896, 17097,
    17140, 17152, 18201, 18456, 18897, 18904, 18913, 18920, 18953, 19016, 19049, 19056, 19081, 19136, 19217, 19236,
    19248, 19332, 19336, 19465, 19472, 19937, 19944, 19977, 20024, 20073, 20080, 20241, 20272, 20489, 20504, 20961,
    20976, 21001, 21192, 21377, 21392, 21417, 21424, 21513, 21528, 21985, 21992, 22025, 22088, 22121, 22144, 22289,
    22320, 22404, 22408, 22537, 22544, 23009, 23016, 23033, 23040, 23049, 23096, 23145, 23208, 23217, 23224, 23313,
    23344, 23569, 23576, 24065, 24072, 24169, 24192, 24577, 24584, 25073, 25096, 25137, 25280, 25361, 25392, 25609,
    25616, 26081, 26088, 26105, 26112, 26161, 26168, 26209, 26280, 26385, 26416, 26633, 26640, 27145, 27184, 27241,
    27248, 27409, 27440, 28241, 28280, 28305, 28352, 28580, 28680, 29065, 29072, 29089, 29176, 29241, 29308, 29312,
    29396, 29704, 30089, 30096, 30113, 30160, 30169, 30184, 30273, 30336, 30756, 30872, 30884, 30888, 30913, 30928,
    31145, 31152, 31161, 31168, 31177, 31188, 31216, 31625, 31736, 31745, 31788, 31793, 31808, 31849, 32240, 32305,
    32312, 32388, 32424, 32460, 32768, 33129, 33160, 33169, 33216, 33225, 33240, 33257, 33272, 33364, 33408, 33473,
    33488, 33521, 33544, 33673, 33704, 33809, 33816, 33833, 33848, 33897, 33904, 34025, 34032, 34780, 34784, 39657,
    39684, 39752, 40964, 40968, 45932, 45944, 46083, 46088, 46300, 46336, 46940, 46960, 47249, 47272, 47505, 47532,
    47616, 47761, 47872, 48017, 48128, 48545, 48560, 48569, 48624, 48689, 48696, 48713, 48804, 48824, 48836, 48856,
    48873, 48896, 49156, 49241, 49266, 49272, 50505, 50512, 51457, 51480, 51513, 51528, 51601, 51608, 51657, 51712,
    51748, 51760, 53433, 53448, 53465, 53492, 53504, 53937, 53944, 53953, 54024, 54033, 54040, 54057, 54120, 54169,
    54272, 54532, 54584, 54596, 54657, 54768, 55297, 55328, 55713, 55720, 55729, 55768, 55777, 55784, 55825, 55832,
    56020, 56072, 56153, 56224, 56321, 56336, 56593, 56624, 56641, 56656, 56665, 56688, 57137, 57144, 57153, 57168,
    57193, 57200, 57209, 57232, 57316, 57344, 57697, 57760, 57777, 57820, 57856, 58356, 58368, 58884, 59009, 59036,
    59041, 59144, 59153, 59208, 59241, 59248, 59297, 59304, 59329, 59344, 60929, 61360, 61409, 61440, 65539, 65626,
    65668, 65859, 65874, 65915, 65924, 66080, 66092, 66192, 66204, 66299, 66306, 66432, 66540, 66552, 66668, 66688,
    67201, 67304, 67337, 67344, 67369, 67584, 71748, 71776, 72012, 72024, 80708, 80816, 81452, 81464, 81716, 81792,
    85020, 85192, 85700, 85728, 85988, 86000, 92025, 92048, 92108, 92136, 92148, 92160, 93060, 93177, 93184, 93953,
    94212, 94584, 94596, 94744, 98307, 98316, 98336, 98372, 98448, 98468, 98560, 98641, 98672, 98692, 98696, 98796,
    98800, 99529, 99544, 99588, 99592, 100316, 100320, 106501, 159232, 159749, 327680, 337908, 337920, 340076, 340096,
    340857, 340864, 340892, 340897, 340980, 340984, 341233, 341248, 341889, 341908, 342016, 344081, 344088, 344113,
    344120, 344153, 344160, 344361, 344376, 344996, 345088, 345633, 345640, 345716, 345728, 345857, 346000, 346052,
    346072, 346084, 346088, 346417, 346484, 346496, 346681, 346768, 346876, 346880, 347137, 347160, 347545, 347552,
    347569, 347600, 347617, 347624, 347660, 347768, 347892, 347904, 347945, 347952, 348489, 348536, 348553, 348568,
    348585, 348672, 348697, 348704, 348769, 348776, 348900, 348928, 349153, 349160, 349569, 349576, 349585, 349608,
    349625, 349640, 349681, 349696, 349705, 349712, 349940, 349952, 350049, 350064, 350084, 350096, 350129, 350216,
    352041, 352048, 352065, 352072, 352092, 352096, 352105, 352128, 458754, 509957, 514048, 514289, 514296, 518644,
    518656, 520193, 520324, 520449, 520580, 520976, 520988, 520992, 521028, 521032, 521044, 521088, 522234, 522252,
    522272, 522284, 522328, 522340, 522368, 522452, 522464, 522492, 522504, 522716, 522736, 522748, 522752, 522972,
    522976, 522988, 522992, 523004, 523056, 524234, 524256, 524266, 524288, 526340, 526392, 528361, 529408, 530177,
    530184, 531377, 531456, 531708, 531712, 532100, 532104, 535420, 535424, 541372, 541376, 542972, 542976, 543228,
    543744, 544777, 544896, 545217, 545280, 545412, 545536, 545788, 545792, 546601, 546648, 546692, 546816, 547276,
    547328, 548044, 548168, 557065, 557072, 557505, 557628, 557712, 558073, 558096, 558489, 558520, 558537, 558556,
    558570, 558580, 558608, 559105, 559128, 559417, 559456, 559465, 559536, 559620, 559648, 560025, 560036, 560048,
    560129, 560144, 560561, 560632, 560684, 560721, 560748, 560752, 560860, 560864, 560876, 560904, 561529, 561552,
    561569, 561576, 561585, 561604, 561648, 562508, 562560, 562937, 562944, 562969, 563072, 563201, 563216, 563681,
    563688, 563713, 563720, 564017, 565248, 566681, 566728, 566737, 566744, 566777, 566792, 566801, 566816, 566836,
    566840, 568721, 568768, 568801, 568816, 568825, 568844, 569024, 569057, 569344, 569753, 569816, 569833, 569840,
    569849, 569868, 569888, 570713, 570720, 570729, 570736, 570753, 570800, 570809, 570816, 571625, 571648, 571665,
    571696, 571705, 571776, 571876, 571896, 598916, 599040, 742260, 742272, 743297, 743340, 743424, 743809, 743868,
    743904, 743972, 743976, 752761, 752792, 910569, 910588, 910594, 948224, 953145, 953168, 953242, 953305, 953368,
    953385, 953440, 953681, 953712, 954897, 954920, 970753, 971192, 971225, 971624, 971689, 971696, 971809, 971816,
    971836, 971993, 980992, 1001089, 1001472, 1048581, 1425664, 1427717, 1471872, 1556485, 1572864, 7340042, 7342081,
    7864322,
};

static inline int piece_class(uint32_t code) {
    size_t low = 0, high = sizeof piece_classes / sizeof *piece_classes;
    if ((code & 0xfffe) == 0xfffe || (code >= 0xfdd0 && code < 0xfdf0)) return PIECE_OTHER;    /* noncharacters */
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (piece_classes[middle] >> 3 <= code) low = middle;
        else high = middle;
    }
    return (int)(piece_classes[low] & 7);
}

/* 1 and *out if the character's letter in the string is not '.'. */
static inline int piece_letter(const char *letters, uint32_t first, uint32_t base, uint32_t code, uint32_t *out) {
    if (code < first || code >= first + (uint32_t)strlen(letters) || letters[code - first] == '.') return 0;
    *out = base + (uint32_t)(letters[code - first] - 'a');
    return 1;
}

/* A character in lower case and without accents: 1 to 3 characters.  Hangul syllables become their letters (Unicode,
   3.12: (lead * 21 + vowel) * 28 + tail). */
static inline int piece_fold(uint32_t code, uint32_t out[3]) {
    const int32_t c = (int32_t)code, *run, *pair;
    size_t low = 0, high = sizeof piece_folds / sizeof *piece_folds / 3;
    out[0] = code >= 'A' && code <= 'Z' ? code + 32 : code;
    if (code < 0x80 || piece_letter(piece_latin, 0xc0, 'a', code, out) ||
        piece_letter(piece_extended, 0x1e00, 'a', code, out) || piece_letter(piece_greek, 0x1f00, 0x3b1, code, out))
        return 1;
    if (code >= 0xac00 && code < 0xd7a4) {
        out[0] = 0x1100 + (code - 0xac00) / 588;
        out[1] = 0x1161 + (code - 0xac00) / 28 % 21;
        out[2] = 0x11a7 + (code - 0xac00) % 28;
        return out[2] > 0x11a7 ? 3 : 2;
    }
    for (pair = piece_pairs; pair < piece_pairs + sizeof piece_pairs / sizeof *piece_pairs; pair += 3)
        if (pair[0] == c) { out[0] = (uint32_t)pair[1]; out[1] = (uint32_t)pair[2]; return 2; }
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (piece_folds[3 * middle] <= c) low = middle;
        else high = middle;
    }
    run = piece_folds + 3 * low;
    if (c >= run[0] && (c - run[0]) % (1 + (run[1] & 1)) == 0 && (c - run[0]) / (1 + (run[1] & 1)) < run[1] / 2)
        out[0] = (uint32_t)(c + run[2]);
    return 1;
}

/* ---- Words into pieces */

/* The word being read, and where its tokens go. */
typedef struct piece_word {
    char text[4 * WORDPIECE_LONGEST];
    int64_t bytes, characters;
    int32_t *out;
    int64_t used, most;
} piece_word;

static inline void piece_emit(piece_word *word, int32_t token) {
    if (word->used < word->most) word->out[word->used] = token;
    if (word->used < word->most) word->used++;
}

/* Cuts the word, and begins another. */
static inline void piece_end_word(const wordpiece *w, piece_word *word) {
    int64_t at = 0, before = word->used, length, n = word->bytes;
    int whole = word->characters <= WORDPIECE_LONGEST;
    while (at < n && whole) {
        int32_t found = -1;
        for (length = n - at < w->longest ? n - at : w->longest; length > 0; length--) {
            found = wordpiece_find(w, at > 0 ? "##" : "", word->text + at, length);
            if (found >= 0) break;
        }
        if (found < 0) whole = 0;
        else piece_emit(word, found);
        at += length;
    }
    if (!whole) {
        word->used = before;
        piece_emit(word, w->unknown);
    }
    word->bytes = word->characters = 0;
}

static inline void piece_add(const wordpiece *w, piece_word *word, uint32_t code) {
    int alone = piece_class(code);
    alone = alone == PIECE_PUNCTUATION || alone == PIECE_IDEOGRAPH;
    if (alone) piece_end_word(w, word);
    if (word->characters++ < WORDPIECE_LONGEST) word->bytes += utf8_write(code, word->text + word->bytes);
    if (alone) piece_end_word(w, word);
}

/* The first `most` tokens of a text, without [CLS] and [SEP]; returns how many, -1 if w is not open. */
static inline int64_t wordpiece_encode(const wordpiece *w, const char *text, int64_t n, int32_t *out, int64_t most) {
    piece_word word;
    int64_t at, length;
    if (w->n == 0 || (n > 0 && text == NULL) || (most > 0 && out == NULL)) {
        st_fail(ST_ERR_STATE, "wordpiece_encode: %s", w->n == 0 ? "no vocabulary is open" : "text or out is NULL");
        return -1;
    }
    word.bytes = word.characters = word.used = 0;
    word.out = out;
    word.most = most;
    for (at = 0; at < n && word.used < most; at += length) {
        uint32_t code, folded[3];
        int kind, count, i;
        length = utf8_read(text + at, n - at, &code);
        kind = piece_class(code);
        if (kind == PIECE_SPACE) piece_end_word(w, &word);
        if (kind == PIECE_SPACE || kind == PIECE_DROPPED || (kind == PIECE_MARK && !w->cased)) continue;
        folded[0] = code;
        count = w->cased ? 1 : piece_fold(code, folded);
        for (i = 0; i < count; i++) piece_add(w, &word, folded[i]);
    }
    if (word.bytes > 0) piece_end_word(w, &word);
    return word.used;
}

#endif
