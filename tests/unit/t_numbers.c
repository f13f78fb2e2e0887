/* t_numbers.c - tests conversions, finite checks and random numbers (section >>numbers).  The golden data comes from
 * tests/torch/oracle/number_formats.py.  `t_numbers --full` converts every fp32 pattern, not only some blocks of 2^24. */
#define _POSIX_C_SOURCE 200809L
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "test.h"

#ifndef AMPT_GOLDEN
#define AMPT_GOLDEN "tests/torch/golden"
#endif

enum { PIECE = 1 << 14, ODD = 1543 };           /* ODD: more than two chunks, no multiple of a vector */

static int ampt_full;
static const amp_dtype ampt_floats[7] = {AMP_F32, AMP_F64, AMP_F16, AMP_BF16, AMP_TF32, AMP_E4M3, AMP_E5M2};
static const amp_dtype ampt_narrow[5] = {AMP_F16, AMP_BF16, AMP_TF32, AMP_E4M3, AMP_E5M2};

/* Paths to force: 1 to the best this CPU has. */
static amp_cpu_path ampt_best(void) {
    return AMPT_WIDEST_PATH(ampi_cpu_best_path());
}
#define EACH_PATH(path) (path = AMP_CPU_SCALAR; path <= ampt_best(); path = AMPT_NEXT_PATH(path))

/* ---- One element, by the scalar functions only.  Patterns of every format travel as uint64_t. */

static uint64_t ampt_get(const void *data, amp_dtype dtype, int64_t i) {
    switch (amp_dtype_size(dtype)) {
        case 1: return ((const uint8_t *)data)[i];
        case 2: return ampi_get16(data, i);
        case 4: return ampi_get32(data, i);
        default: return ampi_get64(data, i);
    }
}

static void ampt_put(void *data, amp_dtype dtype, int64_t i, uint64_t x) {
    switch (amp_dtype_size(dtype)) {
        case 1: ((uint8_t *)data)[i] = (uint8_t)x; break;
        case 2: ampi_put16(data, i, (uint16_t)x); break;
        case 4: ampi_put32(data, i, (uint32_t)x); break;
        default: ampi_put64(data, i, x); break;
    }
}

static uint32_t ampt_to_f32(uint64_t x, amp_dtype dtype) {
    switch (dtype) {
        case AMP_F16:  return ampi_bits_f32(amp_f32_from_f16((uint16_t)x));
        case AMP_BF16: return ampi_bits_f32(amp_f32_from_bf16((uint16_t)x));
        case AMP_E4M3: return ampi_bits_f32(amp_f32_from_e4m3((uint8_t)x));
        case AMP_E5M2: return ampi_bits_f32(amp_f32_from_e5m2((uint8_t)x));
        default:       return (uint32_t)x;
    }
}

static uint64_t ampt_from_f32(uint32_t bits, amp_dtype dtype, int saturate) {
    float x = ampi_f32_of_bits(bits);
    switch (dtype) {
        case AMP_F16:  return amp_f16_from_f32(x, saturate);
        case AMP_BF16: return amp_bf16_from_f32(x, saturate);
        case AMP_E4M3: return amp_e4m3_from_f32(x, saturate);
        case AMP_E5M2: return amp_e5m2_from_f32(x, saturate);
        case AMP_TF32: return ampi_bits_f32(amp_tf32_from_f32(x, saturate));
        case AMP_F64:  return ampi_f64_bits_of_f32_bits(bits);
        default:       return saturate && (bits & 0x7fffffff) == 0x7f800000 ? bits - 1 : bits;
    }
}

static uint64_t ampt_from_f64(uint64_t bits, amp_dtype dtype, int saturate) {
    double x = ampi_f64_of_bits(bits);
    switch (dtype) {
        case AMP_F16:  return amp_f16_from_f64(x, saturate);
        case AMP_BF16: return amp_bf16_from_f64(x, saturate);
        case AMP_E4M3: return amp_e4m3_from_f64(x, saturate);
        case AMP_E5M2: return amp_e5m2_from_f64(x, saturate);
        case AMP_TF32: return ampi_to_tf32(bits, 1, saturate);
        case AMP_F32:  return ampi_to_f32(bits, saturate);
        default:       return bits;
    }
}

static uint64_t ampt_stochastic(uint32_t bits, amp_dtype dtype, uint32_t random, int saturate) {
    float x = ampi_f32_of_bits(bits);
    switch (dtype) {
        case AMP_F16:  return amp_f16_stochastic(x, random, saturate);
        case AMP_BF16: return amp_bf16_stochastic(x, random, saturate);
        case AMP_E4M3: return amp_e4m3_stochastic(x, random, saturate);
        default:       return amp_e5m2_stochastic(x, random, saturate);
    }
}

static uint64_t ampt_stochastic_f64(uint64_t bits, amp_dtype dtype, uint32_t random, int saturate) {
    switch (dtype) {
        case AMP_F16:  return ampi_to_f16(bits, 1, saturate, AMPI_STOCHASTIC, random);
        case AMP_BF16: return ampi_to_bf16(bits, 1, saturate, AMPI_STOCHASTIC, random);
        case AMP_E4M3: return ampi_to_e4m3(bits, 1, saturate, AMPI_STOCHASTIC, random);
        default:       return ampi_to_e5m2(bits, 1, saturate, AMPI_STOCHASTIC, random);
    }
}

static uint64_t ampt_one(uint64_t x, amp_dtype from, amp_dtype to, int saturate) {
    if (from == AMP_F64) return ampt_from_f64(x, to, saturate);
    return ampt_from_f32(ampt_to_f32(x, from), to, saturate);
}

/* The sign bit, the pattern of infinity (E4M3: of the largest number) and the oracle's NaN. */
static uint64_t ampt_sign(amp_dtype dtype) { return (uint64_t)1 << (8 * amp_dtype_size(dtype) - 1); }
static uint64_t ampt_top(amp_dtype dtype) {
    switch (dtype) {
        case AMP_F16: return 0x7c00;
        case AMP_BF16: return 0x7f80;
        case AMP_E4M3: return 0x7e;
        case AMP_E5M2: return 0x7c;
        case AMP_F64: return (uint64_t)0x7ff << 52;
        default: return 0x7f800000u;
    }
}
static uint64_t ampt_nan(amp_dtype dtype) {
    switch (dtype) {
        case AMP_F16: return 0x7e00;
        case AMP_BF16: return 0x7fc0;
        case AMP_E4M3: return 0x7f;
        case AMP_E5M2: return 0x7e;
        default: return 0x7fc00000u;
    }
}
/* The largest finite magnitude of a format. */
static uint64_t ampt_largest(amp_dtype dtype) {
    return dtype == AMP_E4M3 ? 0x7e : dtype == AMP_TF32 ? 0x7f7fe000u : ampt_top(dtype) - 1;
}

/* Patterns of a dtype: any bits, and one in four near the ends of the exponent range. */
static void ampt_fill(void *data, amp_dtype dtype, int64_t n, uint64_t seed) {
    int64_t i;
    for (i = 0; i < n; i++) {
        uint64_t at = 3 * (uint64_t)i, x = (uint64_t)amp_random_u32(seed, at) << 32 | amp_random_u32(seed, at + 1);
        uint32_t kind = amp_random_u32(seed, at + 2) % 12;
        if (kind == 0) x = ampt_top(dtype) | (x & ampt_sign(dtype));
        if (kind == 1) x = (x & 3) + ampt_top(dtype) - 2;
        if (kind == 2) x = (x & 7) | (x & ampt_sign(dtype));
        if (kind >= 8 && dtype == AMP_F64) x = ampi_f64_bits_of_f32_bits((uint32_t)x);
        ampt_put(data, dtype, i, x);
    }
}

/* ---- CRC-32 (IEEE 802.3), eight bytes at a time. */

static uint32_t ampt_crc_table[8][256];

static void ampt_crc_build(void) {
    uint32_t i, k;
    for (i = 0; i < 256; i++) {
        uint32_t c = i;
        for (k = 0; k < 8; k++) c = c & 1 ? c >> 1 ^ 0xedb88320u : c >> 1;
        ampt_crc_table[0][i] = c;
    }
    for (k = 1; k < 8; k++)
        for (i = 0; i < 256; i++)
            ampt_crc_table[k][i] = ampt_crc_table[k - 1][i] >> 8 ^ ampt_crc_table[0][ampt_crc_table[k - 1][i] & 255];
}

/* Goes on from the crc of what came before; 0 at first. */
static uint32_t ampt_crc(uint32_t crc, const void *data, size_t bytes) {
    const uint8_t *p = (const uint8_t *)data;
    uint32_t c = ~crc;
    for (; bytes >= 8; bytes -= 8, p += 8) {
        uint32_t a = c ^ ((uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24);
        c = ampt_crc_table[7][a & 255] ^ ampt_crc_table[6][a >> 8 & 255] ^ ampt_crc_table[5][a >> 16 & 255] ^
            ampt_crc_table[4][a >> 24] ^ ampt_crc_table[3][p[4]] ^ ampt_crc_table[2][p[5]] ^ ampt_crc_table[1][p[6]] ^
            ampt_crc_table[0][p[7]];
    }
    for (; bytes > 0; bytes--, p++) c = c >> 8 ^ ampt_crc_table[0][(c ^ *p) & 255];
    return ~c;
}

/* Golden checksums: [dtype][narrow][block]. */
static struct { uint32_t crc; int known; } numbers_golden[8][2][256];

static int ampt_read_golden(void) {
    char name[32], direction[32];
    int block, lines = 0;
    unsigned crc;
    FILE *file = fopen(AMPT_GOLDEN "/numbers.txt", "r");
    if (file == NULL) return 0;
    while (fscanf(file, "%31s %31s %d %x", name, direction, &block, &crc) == 4) {
        amp_dtype dtype = AMP_DTYPE_DEFAULT;
        if (amp_dtype_parse(name, &dtype) != AMP_OK || dtype > AMP_E5M2 || block < 0 || block > 255) continue;
        numbers_golden[dtype][strcmp(direction, "narrow") == 0][block].crc = crc;
        numbers_golden[dtype][strcmp(direction, "narrow") == 0][block].known = 1;
        lines++;
    }
    fclose(file);
    return lines;
}

static int ampt_is_golden(uint32_t crc, amp_dtype dtype, int narrow, int block) {
    return numbers_golden[dtype][narrow][block].known && crc == numbers_golden[dtype][narrow][block].crc;
}

/* Every NaN becomes the oracle's. */
static void ampt_canonical(void *data, amp_dtype dtype, int64_t n) {
    uint16_t *halves = (uint16_t *)data;
    uint32_t *words = (uint32_t *)data;
    uint8_t *bytes = (uint8_t *)data;
    uint64_t top = ampt_top(dtype), nan = ampt_nan(dtype);
    int64_t i;
    switch (amp_dtype_size(dtype)) {
        case 1: for (i = 0; i < n; i++) if ((bytes[i] & 0x7f) > top) bytes[i] = (uint8_t)nan; break;
        case 2: for (i = 0; i < n; i++) if ((halves[i] & 0x7fff) > top) halves[i] = (uint16_t)nan; break;
        default: for (i = 0; i < n; i++) if ((words[i] & 0x7fffffff) > top) words[i] = (uint32_t)nan; break;
    }
}

/* ---- Every pattern of the narrow formats, to fp32. */

TEST(widen_golden) {
    static uint32_t wide[65536];
    size_t d;
    int block, blocks, i, wrong;
    CHECK_EQ(ampt_read_golden(), 256 + 256 + 1 + 1 + 5 * 256);
    for (d = 0; d < 5; d++) {
        amp_dtype dtype = ampt_narrow[d];
        if (dtype == AMP_TF32) continue;
        blocks = amp_dtype_size(dtype) == 1 ? 1 : 256;
        for (i = 0; i < 256 * blocks; i++) wide[i] = ampt_to_f32((uint64_t)i, dtype);
        ampt_canonical(wide, AMP_F32, 256 * blocks);
        for (wrong = 0, block = 0; block < blocks; block++)
            wrong += !ampt_is_golden(ampt_crc(0, wide + 256 * block, 1024), dtype, 0, block);
        CHECK_MSG(wrong == 0, "%s: %d blocks of 256 patterns are wrong", amp_dtype_name(dtype), wrong);
    }
}

TEST(widen_paths) {
    static uint16_t codes[65536];
    static uint32_t wide[65536];
    int d, i, wrong;
    amp_cpu_path path;
    for (i = 0; i < 65536; i++) codes[i] = (uint16_t)i;
    for (d = 0; d < 2; d++)
        for EACH_PATH(path) {
            ampi_convert_fast(wide, AMP_F32, codes, ampt_narrow[d], 65536, path);
            for (wrong = 0, i = 0; i < 65536; i++) wrong += wide[i] != ampt_to_f32((uint64_t)i, ampt_narrow[d]);
            CHECK_MSG(wrong == 0, "%s, path %d: %d wrong", amp_dtype_name(ampt_narrow[d]), (int)path, wrong);
        }
}

/* Widening and narrowing again gives the pattern back (a quiet NaN for a NaN). */
TEST(numbers_round_trip) {
    size_t d;
    uint64_t i;
    for (d = 0; d < 5; d++) {
        amp_dtype dtype = ampt_narrow[d];
        uint64_t quiet = dtype == AMP_F16 ? 0x200 : dtype == AMP_BF16 ? 0x40 : dtype == AMP_E5M2 ? 2 : 0;
        int wrong = 0;
        if (dtype == AMP_TF32) continue;
        for (i = 0; i < 2 * ampt_sign(dtype); i++) {
            int is_nan = (i & (ampt_sign(dtype) - 1)) > ampt_top(dtype);
            uint32_t wide = ampt_to_f32(i, dtype);
            wrong += ampt_from_f32(wide, dtype, 0) != (is_nan ? i | quiet : i);
            wrong += ampt_from_f64(ampi_f64_bits_of_f32_bits(wide), dtype, 0) != (is_nan ? i | quiet : i);
        }
        CHECK_MSG(wrong == 0, "%s: %d wrong", amp_dtype_name(dtype), wrong);
    }
}

/* ---- fp32 patterns to the narrow formats, in blocks shared among two threads. */

typedef struct ampt_sweep {
    int first, step, wrong[5], tested;
    uint32_t in[PIECE], out[PIECE], other[PIECE];
} ampt_sweep;

static int ampt_wanted(int block) {
    /* subnormals; E5M2, fp16 and E4M3 subnormals; 1; E4M3 and fp16 overflow; bf16 overflow, NaN; negative numbers */
    static const int some[] = {0x00, 0x33, 0x37, 0x3f, 0x43, 0x47, 0x7f, 0x80, 0xbb, 0xff};
    size_t i;
    for (i = 0; i < sizeof some / sizeof *some; i++) if (some[i] == block) return 1;
    return ampt_full;
}

/* A piece of a block by the best path; the other paths and the scalar function must agree.  Returns the wrong ones. */
static int ampt_sweep_piece(void *out, void *other, const uint32_t *in, amp_dtype dtype) {
    size_t bytes = PIECE * amp_dtype_size(dtype);
    amp_cpu_path path;
    int i, wrong = 0;
    ampi_convert_fast(out, dtype, in, AMP_F32, PIECE, ampt_best());
    for EACH_PATH(path) {
        if (path == ampt_best() || bytes == PIECE) continue;       /* fp8 has one path */
        ampi_convert_fast(other, dtype, in, AMP_F32, PIECE, path);
        wrong += memcmp(out, other, bytes) != 0;
    }
    for (i = 0; i < PIECE; i += ampt_full ? 1 : 7) wrong += ampt_get(out, dtype, i) != ampt_from_f32(in[i], dtype, 0);
    return wrong;
}

static void *ampt_sweep_run(void *arg) {
    ampt_sweep *sweep = (ampt_sweep *)arg;
    int block, d;
    uint32_t piece, i;
    for (block = sweep->first; block < 256; block += sweep->step) {
        uint32_t crc[5] = {0, 0, 0, 0, 0};
        if (!ampt_wanted(block)) continue;
        sweep->tested++;
        for (piece = 0; piece < 1 << 24; piece += PIECE) {
            for (i = 0; i < PIECE; i++) sweep->in[i] = ((uint32_t)block << 24) + piece + i;
            for (d = 0; d < 5; d++) {
                amp_dtype dtype = ampt_narrow[d];
                sweep->wrong[d] += ampt_sweep_piece(sweep->out, sweep->other, sweep->in, dtype);
                ampt_canonical(sweep->out, dtype, PIECE);
                crc[d] = ampt_crc(crc[d], sweep->out, PIECE * amp_dtype_size(dtype));
            }
        }
        for (d = 0; d < 5; d++) {
            if (ampt_is_golden(crc[d], ampt_narrow[d], 1, block)) continue;
            printf("  %s: fp32 patterns %02x...... are not golden\n", amp_dtype_name(ampt_narrow[d]), (unsigned)block);
            sweep->wrong[d]++;
        }
        if (ampt_full && block % 16 == 0) { printf("  block %d of 256\n", block); fflush(stdout); }
    }
    return NULL;
}

TEST(narrow_golden) {
    static ampt_sweep sweeps[2];
    pthread_t threads[2];
    int t, d;
    memset(sweeps, 0, sizeof sweeps);
    CHECK(ampt_read_golden() > 0);
    for (t = 0; t < 2; t++) {
        sweeps[t].first = t;
        sweeps[t].step = 2;
        pthread_create(&threads[t], NULL, ampt_sweep_run, &sweeps[t]);
    }
    for (t = 0; t < 2; t++) pthread_join(threads[t], NULL);
    CHECK_EQ(sweeps[0].tested + sweeps[1].tested, ampt_full ? 256 : 10);
    for (t = 0; t < 2; t++)
        for (d = 0; d < 5; d++)
            CHECK_MSG(sweeps[t].wrong[d] == 0, "%s: %d wrong", amp_dtype_name(ampt_narrow[d]), sweeps[t].wrong[d]);
}

/* fp64 to every format, one rounding: golden cases at, and just beside, midpoints. */
/* 1 if x is split and joined right: the halves are x, the upper one is x rounded (to the nearest, ties away), a NaN is
   one in both and only becomes quiet. */
static int ampt_split_right(uint32_t x, uint16_t bf16, uint16_t rest, uint32_t back) {
    uint32_t magnitude = x & 0x7fffffff, quiet = magnitude > 0x7f800000 ? 0x400000 : 0;
    uint16_t even = amp_bf16_from_f32(ampi_f32_of_bits(x), 0);
    int tie = (x & 0xffff) == 0x8000 && quiet == 0;
    return back == (x | quiet) && rest == (uint16_t)x && bf16 == (tie ? (uint16_t)((x >> 16) + 1) : even);
}

/* Every upper half with the lower halves at the edges, or with all of them; odd lengths take the scalar ends too. */
TEST(split_and_join) {
    static const uint32_t edges[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff, 0x1234, 0xc0de};
    static uint32_t in[PIECE + 5], back[PIECE + 5];
    static uint16_t bf16[PIECE + 5], rest[PIECE + 5];
    uint32_t pieces = (ampt_full ? 1u << 31 : 8u * 32768) / (PIECE / 2), piece, i;
    amp_cpu_path path;
    int wrong = 0;
    for EACH_PATH(path) {
        const ampi_numbers_vec *vec = AMPI_PICK(ampi_numbers_kernels, path);
        for (piece = 0; piece < pieces; piece++) {
            for (i = 0; i < PIECE + 5; i++) {
                uint32_t at = piece * PIECE + i;
                in[i] = ampt_full ? at : at << 16 | edges[at >> 16 & 7];
            }
            vec->bf16_split(bf16, rest, in, PIECE + 5);
            vec->f32_join(back, bf16, rest, PIECE + 5);
            for (i = 0; i < PIECE + 5; i++) {
                uint16_t low, high = amp_bf16_split(ampi_f32_of_bits(in[i]), &low);
                wrong += !ampt_split_right(in[i], bf16[i], rest[i], back[i]) || high != bf16[i] || low != rest[i] ||
                    ampi_bits_f32(amp_f32_join(high, low)) != back[i];
            }
        }
    }
    CHECK_MSG(wrong == 0, "%d wrong", wrong);
    /* a weight that was set to 0 beside a remainder that stayed is still small */
    CHECK(ampi_bits_f32(amp_f32_join(0, 0x9000)) == 0x9000 && ampi_bits_f32(amp_f32_join(0x8000, 0xffff)) == 0x8000ffff);
}

TEST(f64_golden) {
    static const amp_dtype columns[6] = {AMP_F16, AMP_BF16, AMP_E4M3, AMP_E5M2, AMP_F32, AMP_TF32};
    unsigned long long x, want;
    int lines = 0, twice = 0, d;
    ampi_fp host;
    FILE *file = fopen(AMPT_GOLDEN "/numbers_f64.txt", "r");
    CHECK(file != NULL);
    if (file == NULL) return;
    host = ampi_fp_begin();
    while (fscanf(file, "%llx", &x) == 1) {
        for (d = 0; d < 6; d++) {
            uint64_t bulk = 0, got = ampt_from_f64(x, columns[d], 0);
            if (fscanf(file, "%llx", &want) != 1) want = ~0ull;
            CHECK_MSG(got == want, "%016llx to %s: %llx, expected %llx", x, amp_dtype_name(columns[d]),
                      (unsigned long long)got, want);
            ampi_convert_fast(&bulk, columns[d], &x, AMP_F64, 1, ampt_best());
            CHECK(ampt_get(&bulk, columns[d], 0) == want);
            if (columns[d] == AMP_F16) twice += ampt_from_f32(ampi_to_f32(x, 0), AMP_F16, 0) != want;
        }
        lines++;
    }
    ampi_fp_end(host);
    fclose(file);
    CHECK_EQ(lines, 1745);
    CHECK_MSG(twice > 20, "only %d cases where two roundings differ from one", twice);
}

/* ---- Bulk conversion: every pair of dtypes, every path, odd lengths, no alignment, in place. */

TEST(pairs) {
    static uint8_t src[8 * ODD + 16], dst[8 * ODD + 16];
    amp_cpu_path path;
    int a, b, offset;
    int64_t n, i;
    ampi_fp host = ampi_fp_begin();         /* as its callers do */
    for (a = 0; a < 7; a++) {
        amp_dtype from = ampt_floats[a];
        for (b = 0; b < 7; b++) {
            amp_dtype to = ampt_floats[b];
            for EACH_PATH(path) {
                int wrong = 0;
                for (n = 0; n <= ODD; n = n < 40 ? n + 1 : n + 501) {
                    size_t end = (size_t)n * amp_dtype_size(to);
                    offset = (int)(n % 5);
                    ampt_fill(src + offset, from, n, (uint64_t)(n + 100 * a));
                    memset(dst, 0xa5, sizeof dst);
                    ampi_convert_fast(dst + 3, to, src + offset, from, n, path);
                    for (i = 0; i < n; i++) {
                        uint64_t x = ampt_get(src + offset, from, i), want = ampt_one(x, from, to, 0);
                        wrong += ampt_get(dst + 3, to, i) != (from == to && to != AMP_TF32 ? x : want);
                    }
                    wrong += dst[2] != 0xa5 || dst[3 + end] != 0xa5;
                }
                CHECK_MSG(wrong == 0, "%s to %s, path %d: %d wrong", amp_dtype_name(from), amp_dtype_name(to),
                          (int)path, wrong);
            }
        }
    }
    ampi_fp_end(host);
}

TEST(in_place) {
    static uint8_t data[8 * ODD], want[8 * ODD];
    amp_cpu_path path;
    amp_convert_desc desc;
    int a, b, how;
    memset(&desc, 0, sizeof desc);
    for (a = 0; a < 7; a++)
        for (b = 0; b < 7; b++)
            for EACH_PATH(path)
                for (how = 0; how < 2; how++) {
                    amp_dtype from = ampt_floats[a], to = ampt_floats[b];
                    size_t bytes = amp_dtype_size(to) * ODD;
                    if (amp_dtype_size(from) != amp_dtype_size(to)) continue;
                    desc.saturate = how;
                    ampt_fill(data, from, ODD, 7);
                    ampi_convert(want, to, data, from, ODD, &desc, AMP_CPU_SCALAR);
                    ampi_convert(data, to, data, from, ODD, &desc, path);
                    CHECK_MSG(memcmp(data, want, bytes) == 0, "%s to %s, path %d", amp_dtype_name(from),
                              amp_dtype_name(to), (int)path);
                }
}

/* fp64 patterns where rounding to another format turns: at its numbers and halfway between them, and up to 2 patterns beside. */
static void fill_turns(uint64_t *x, int64_t n, amp_dtype to, uint64_t seed) {
    for (int64_t i = 0; i < n; i++) {
        uint64_t at = 2 * (uint64_t)i;
        uint32_t bits = amp_random_u32(seed, at), more = amp_random_u32(seed, at + 1);
        double a = ampi_f64_of_bits(ampi_f64_bits_of_f32_bits(ampt_to_f32(bits & (2 * ampt_sign(to) - 1), to)));
        double b = ampi_f64_of_bits(ampi_f64_bits_of_f32_bits(ampt_to_f32((bits + 1) & (2 * ampt_sign(to) - 1), to)));
        x[i] = ampi_bits_f64((more & 1) ? a / 2 + b / 2 : a) + (more >> 1) % 5 - 2;
    }
}

/* Every pair with fp64, on every path and with any number of elements over: the bits of one rounding by the scalar functions. */
TEST(f64_vectors) {
    enum { N = 4099, ROUNDS = 64 };
    static uint64_t wide[N], back[N];
    static uint32_t narrow[N];
    const amp_convert_desc plain = {AMP_ROUND_DEFAULT, 0, 0, 0}, saturated = {AMP_ROUND_DEFAULT, 1, 0, 0};
    amp_cpu_path path;
    for EACH_PATH(path)
        for (int d = 0; d < 7; d++) {
            amp_dtype dtype = ampt_floats[d];
            int64_t wrong = 0, wrong_back = 0;
            for (int round = 0; dtype != AMP_F64 && round < ROUNDS * (ampt_full ? 32 : 1); round++) {
                int64_t n = N - round % 32, first = round % 3;
                if (round % 2) fill_turns(wide, N, dtype, (uint64_t)(100 * round + d));
                else ampt_fill(wide, AMP_F64, N, (uint64_t)(100 * round + d));
                for (int saturate = 0; saturate < 2; saturate++) {
                    if (round % 4) ampi_convert(narrow, dtype, wide + first, AMP_F64, n - first, saturate ? &saturated : &plain, path);
                    else (void)ampi_convert_counted(narrow, dtype, wide + first, AMP_F64, n - first, saturate ? &saturated : &plain, path);
                    for (int64_t i = 0; i < n - first; i++) wrong += ampt_get(narrow, dtype, i) != ampt_from_f64(wide[first + i], dtype, saturate);
                }
                ampt_fill(narrow, dtype, N, (uint64_t)(7000 + 100 * round + d));
                ampi_convert(back, AMP_F64, narrow, dtype, n, &plain, path);
                for (int64_t i = 0; i < n; i++) wrong_back += back[i] != ampi_f64_bits_of_f32_bits(ampt_to_f32(ampt_get(narrow, dtype, i), dtype));
            }
            CHECK_MSG(wrong == 0 && wrong_back == 0, "path %d: %lld to %s and %lld from it differ", (int)path, (long long)wrong,
                      amp_dtype_name(dtype), (long long)wrong_back);
        }
}

/* Flush-to-zero and denormals-are-zero, which linking with -Ofast sets, change nothing. */
TEST(flush_to_zero) {
#if AMPI_X86
    static uint32_t in[65536], out[65536];
    static uint16_t halves[65536];
    unsigned before = __builtin_ia32_stmxcsr();
    amp_cpu_path path;
    int i, wrong = 0;
    for (i = 0; i < 65536; i++) { in[i] = (uint32_t)i * 65537u & 0xbfffffffu; halves[i] = (uint16_t)i; }
    for EACH_PATH(path) {
        __builtin_ia32_ldmxcsr(before | 0x8040);
        ampi_convert_fast(out, AMP_F32, halves, AMP_F16, 65536, path);
        ampi_convert_fast(halves, AMP_F16, in, AMP_F32, 65536, path);
        __builtin_ia32_ldmxcsr(before & ~0x8040u);
        for (i = 0; i < 65536; i++) {
            wrong += out[i] != ampt_to_f32((uint64_t)i, AMP_F16) || halves[i] != ampt_from_f32(in[i], AMP_F16, 0);
            halves[i] = (uint16_t)i;
        }
    }
    __builtin_ia32_ldmxcsr(before);
    CHECK_EQ(wrong, 0);
#else
    SKIP("no MXCSR on this CPU");
#endif
}

/* ---- Saturation. */

TEST(saturation) {
    int d, wrong;
    uint64_t i;
    for (d = 0; d < 5; d++) {
        amp_dtype dtype = ampt_narrow[d];
        uint64_t sign = ampt_sign(dtype);
        for (wrong = 0, i = 0; i < (uint64_t)1 << 32; i += 4093) {
            uint32_t x = (uint32_t)i, magnitude = x & 0x7fffffff;
            uint64_t plain = ampt_from_f32(x, dtype, 0), largest = ampt_largest(dtype);
            int over = magnitude <= 0x7f800000 && (plain & (sign - 1)) > largest;
            uint64_t want = over ? (plain & sign) | largest : plain;
            wrong += ampt_from_f32(x, dtype, 1) != want;
            wrong += ampt_from_f64(ampi_f64_bits_of_f32_bits(x), dtype, 1) != want;
        }
        CHECK_MSG(wrong == 0, "%s: %d wrong", amp_dtype_name(dtype), wrong);
    }
    CHECK_EQ(amp_e4m3_from_f32(464.0f, 0), 0x7e);
    CHECK_EQ(amp_e4m3_from_f32(465.0f, 0), 0x7f);
    CHECK_EQ(amp_e4m3_from_f32(-1e30f, 0), 0xff);
    CHECK_EQ(amp_e4m3_from_f32(-1e30f, 1), 0xfe);
    CHECK_EQ(amp_f16_from_f32(65519.99609375f, 0), 0x7bff);
    CHECK_EQ(amp_f16_from_f32(65520.0f, 0), 0x7c00);
    CHECK_EQ(amp_f16_from_f32(65520.0f, 1), 0x7bff);
}

/* Saturation, stochastic rounding and the count of new infinities in bulk are those of the elements. */
TEST(bulk_options) {
    static uint8_t src[8 * ODD], dst[8 * ODD];
    amp_convert_desc desc;
    amp_cpu_path path;
    int a, b, how;
    int64_t i, new_inf;
    for (a = 0; a < 7; a++)
        for (b = 0; b < 7; b++)
            for (how = 0; how < 4; how++)
                for EACH_PATH(path) {
                    amp_dtype from = ampt_floats[a], to = ampt_floats[b];
                    int stochastic = how & 1, wrong = 0;
                    int64_t want_inf = 0;
                    if (stochastic && (to == AMP_F32 || to == AMP_F64 || to == AMP_TF32)) continue;
                    memset(&desc, 0, sizeof desc);
                    desc.rounding = stochastic ? AMP_ROUND_STOCHASTIC : AMP_ROUND_DEFAULT;
                    desc.saturate = how >> 1;
                    desc.seed = 0x123456789abcdefu;
                    desc.offset = ((uint64_t)1 << 34) - 700 + (uint64_t)how;     /* block numbers cross 2^32 */
                    ampt_fill(src, from, ODD, (uint64_t)(b + 10));
                    new_inf = ampi_convert_counted(dst, to, src, from, ODD, &desc, path);
                    for (i = 0; i < ODD; i++) {
                        uint64_t x = ampt_get(src, from, i), got = ampt_get(dst, to, i);
                        uint64_t want = ampt_one(x, from, to, desc.saturate);
                        uint32_t random = amp_random_u32(desc.seed, desc.offset + (uint64_t)i);
                        if (stochastic && from == AMP_F64) want = ampt_stochastic_f64(x, to, random, desc.saturate);
                        else if (stochastic) want = ampt_stochastic(ampt_to_f32(x, from), to, random, desc.saturate);
                        else if (from == to && to != AMP_TF32 && !desc.saturate) want = x;
                        wrong += got != want;
                        if ((got & (ampt_sign(to) - 1)) > ampt_largest(to))
                            want_inf += (x & (ampt_sign(from) - 1)) < (from == AMP_E4M3 ? 0x7f : ampt_top(from));
                    }
                    CHECK_MSG(wrong == 0, "%s to %s, options %d, path %d: %d wrong",
                              amp_dtype_name(from), amp_dtype_name(to), how, (int)path, wrong);
                    CHECK_EQ(new_inf, want_inf);
                }
}

/* ---- Stochastic rounding. */

/* Over all thresholds of `bits` bits the mean is the number itself, exactly: fp64 holds every partial sum. */
static int ampt_unbiased(uint32_t x, amp_dtype dtype, int bits) {
    uint32_t t;
    double sum = 0;
    for (t = 0; t < 1u << bits; t++)
        sum += (double)ampi_f32_of_bits(ampt_to_f32(ampt_stochastic(x, dtype, t << (32 - bits), 0), dtype));
    return sum == (double)ampi_f32_of_bits(x) * (double)(1u << bits);
}

TEST(stochastic_unbiased) {
    static const uint32_t bits[] = {0x3f800000, 0x3f800001, 0x3f80ffff, 0x3fffffff,
                                    0xbf8c1234, 0x40490fdb, 0xc2c87654, 0x43123456};
    size_t i;
    for (i = 0; i < sizeof bits / sizeof *bits; i++) {
        CHECK_MSG(ampt_unbiased(bits[i], AMP_BF16, 16), "bf16 %08x", (unsigned)bits[i]);
        CHECK_MSG(ampt_unbiased(bits[i], AMP_F16, 16), "fp16 %08x", (unsigned)bits[i]);
        CHECK_MSG(ampt_unbiased(bits[i], AMP_E4M3, 20), "e4m3 %08x", (unsigned)bits[i]);
        CHECK_MSG(ampt_unbiased(bits[i], AMP_E5M2, 21), "e5m2 %08x", (unsigned)bits[i]);
    }
    CHECK(ampt_unbiased(0x38012345, AMP_F16, 16));      /* fp16 subnormals */
    CHECK(ampt_unbiased(0xb5f12345, AMP_F16, 20));
    CHECK(ampt_unbiased(0x33012300, AMP_F16, 20));      /* below half of the smallest */
    CHECK(ampt_unbiased(0x3b812300, AMP_E4M3, 20));
    CHECK(ampt_unbiased(0x00812345, AMP_BF16, 16));
}

/* Infinity and NaN do not depend on the random bits, and a number that the format holds stays itself. */
TEST(stochastic_special) {
    static const uint32_t randoms[8] = {0, 1, 0xffff, 0x10000, 0x7fffffff, 0x80000000, 0xffff0000, 0xffffffff};
    static const uint32_t specials[8] = {0x7f800000, 0xff800000, 0x7f800001, 0xffbfffff,
                                         0x7fc00000, 0xffffffff, 0, 0x80000000};
    int d, r, saturate, wrong = 0;
    size_t s;
    uint64_t code;
    for (d = 0; d < 5; d++) {
        amp_dtype dtype = ampt_narrow[d];
        if (dtype == AMP_TF32) continue;
        for (r = 0; r < 8; r++) {
            for (saturate = 0; saturate < 2; saturate++)
                for (s = 0; s < 8; s++) {
                    uint64_t got = ampt_stochastic(specials[s], dtype, randoms[r], saturate);
                    wrong += got != ampt_from_f32(specials[s], dtype, saturate);
                }
            for (code = 0; code <= ampt_largest(dtype); code++)
                wrong += ampt_stochastic(ampt_to_f32(code, dtype), dtype, randoms[r], 0) != code;
        }
    }
    CHECK_EQ(wrong, 0);
    /* 2^-32 of the smallest fp16 number is the least that can round up: the fraction is cut to 32 bits */
    CHECK_EQ(ampt_stochastic(0x23800000, AMP_F16, 0xffffffff, 0), 1);
    CHECK_EQ(ampt_stochastic(0x23800000, AMP_F16, 0xfffffffe, 0), 0);
    CHECK_EQ(ampt_stochastic(0x237fffff, AMP_F16, 0xffffffff, 0), 0);
    CHECK_EQ(ampt_stochastic(0x1f800000, AMP_F16, 0xffffffff, 0), 0);
    CHECK_EQ(ampt_stochastic(0x00800000, AMP_F16, 0xffffffff, 0), 0);
    CHECK_EQ(ampt_stochastic(0x80000001, AMP_E4M3, 0xffffffff, 0), 0x80);
    CHECK_EQ(ampt_stochastic_f64((uint64_t)(1023 - 56) << 52, AMP_F16, 0xffffffff, 0), 1);
    for (s = 57; s < 1023; s++) CHECK_EQ(ampt_stochastic_f64((uint64_t)(1023 - s) << 52, AMP_F16, 0xffffffff, 0), 0);
    /* where fp64 and fp32 hold the same number they round alike */
    for (wrong = 0, s = 0; s < 100000; s++) {
        uint32_t x = amp_random_u32(1, s), random = amp_random_u32(2, s);
        for (d = 0; d < 5; d++)
            if (ampt_narrow[d] != AMP_TF32)
                wrong += ampt_stochastic(x, ampt_narrow[d], random, 0) !=
                         ampt_stochastic_f64(ampi_f64_bits_of_f32_bits(x), ampt_narrow[d], random, 0);
    }
    CHECK_EQ(wrong, 0);
}

/* ---- Finite checks. */

TEST(is_finite) {
    volatile float zero = 0, one = 1, huge = 3e38f;
    float inf = one / zero, nan = zero / zero, over = huge * huge, fine = one + huge;
    double dinf = (double)one / (double)zero, dfine = 1e308;
    CHECK(!amp_is_finite_f32(&inf));
    CHECK(!amp_is_finite_f32(&nan));
    CHECK(!amp_is_finite_f32(&over));
    CHECK(amp_is_finite_f32(&fine));
    CHECK(!amp_is_finite_f64(&dinf));
    CHECK(amp_is_finite_f64(&dfine));
    CHECK(amp_is_finite_f16(0xfbff) && !amp_is_finite_f16(0x7c00) && !amp_is_finite_f16(0xffff));
    CHECK(amp_is_finite_bf16(0xff7f) && !amp_is_finite_bf16(0x7f80) && !amp_is_finite_bf16(0xffff));
    CHECK_EQ(amp_f16_from_f32(inf, 0), 0x7c00);
    CHECK_EQ(amp_bf16_from_f32(over, 0), 0x7f80);
    CHECK((amp_f16_from_f32(nan, 1) & 0x7fff) > 0x7c00);
}

TEST(count_nonfinite) {
    static uint8_t data[8 * ODD + 8];
    amp_cpu_path path;
    int d;
    int64_t n, i;
    for (d = 0; d < 7; d++) {
        amp_dtype dtype = ampt_floats[d];
        for (n = 0; n <= ODD; n = n < 40 ? n + 1 : n + 501) {
            int64_t want = 0, first = 5, want_first = -1;
            uint8_t *p = data + n % 7;
            ampt_fill(p, dtype, n, (uint64_t)n);
            for (i = 0; i < n; i++) {
                uint64_t limit = dtype == AMP_E4M3 ? 0x7f : ampt_top(dtype);
                int bad = (ampt_get(p, dtype, i) & (ampt_sign(dtype) - 1)) >= limit;
                if (bad && want_first < 0) want_first = i;
                want += bad;
            }
            CHECK_EQ(amp_count_nonfinite(p, dtype, n, &first), want);
            CHECK_EQ(first, want_first);
            CHECK_EQ(amp_count_nonfinite(p, dtype, n, NULL), want);
            for EACH_PATH(path) CHECK_EQ(ampi_count_nonfinite(p, dtype, n, path), want);
        }
    }
    /* a lone one at the end of a long array, found in a later piece */
    memset(data, 0, sizeof data);
    ampt_put(data, AMP_F32, ODD - 1, 0xff800000u);
    CHECK_EQ(amp_count_nonfinite(data, AMP_F32, ODD, &n), 1);
    CHECK_EQ(n, ODD - 1);
    CHECK_EQ(amp_count_nonfinite(data, AMP_U8, 3, NULL), -1);
    CHECK_EQ(amp_count_nonfinite(data, AMP_DTYPE_DEFAULT, 3, NULL), -1);
}

/* ---- Random numbers. */

static int ampt_philox_is(uint64_t seed, uint64_t stream, uint64_t block,
                          uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    uint32_t out[4];
    amp_philox(seed, stream, block, out);
    return out[0] == a && out[1] == b && out[2] == c && out[3] == d;
}

/* The known answers published with Random123 (kat_vectors, philox4x32 10). */
TEST(philox_known_answers) {
    CHECK(ampt_philox_is(0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8));
    CHECK(ampt_philox_is(~(uint64_t)0, ~(uint64_t)0, ~(uint64_t)0, 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd));
    CHECK(ampt_philox_is(0x299f31d0a4093822u, 0x0370734413198a2eu, 0x85a308d3243f6a88u,
                         0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1));
}

TEST(random_sequence) {
    static uint32_t out[ODD + 1];
    uint32_t words[4];
    amp_cpu_path path;
    int64_t n, i, at;
    amp_philox(42, 0, 3, words);
    CHECK_EQ(amp_random_u32(42, 14), words[2]);
    CHECK(amp_random_uniform(42, 14) == (float)(words[2] >> 8) / 16777216.0f);
    for EACH_PATH(path)
        for (at = 0; at < 4; at++)
            for (n = 0; n <= ODD; n = n < 70 ? n + 1 : n + 491) {
                uint64_t starts[4];
                int wrong = 0;
                starts[0] = 5;
                starts[1] = ((uint64_t)1 << 34) - 100;      /* block numbers cross 2^32 */
                starts[2] = ~(uint64_t)0 - 200;
                starts[3] = (uint64_t)1 << 40;
                out[n] = 77;
                AMPI_PICK(ampi_numbers_kernels, path)->random(out, n, 0xfedcba9876543210u, starts[at]);
                for (i = 0; i < n; i++)
                    wrong += out[i] != amp_random_u32(0xfedcba9876543210u, starts[at] + (uint64_t)i);
                CHECK_MSG(wrong == 0 && out[n] == 77, "path %d, start %d, n %d: %d wrong",
                          (int)path, (int)at, (int)n, wrong);
            }
}

/* ---- Names and errors. */

TEST(dtype_names) {
    static const struct { const char *name; int dtype; } names[] = {
        {"fp32", AMP_F32}, {"fp64", AMP_F64}, {"fp16", AMP_F16}, {"bf16", AMP_BF16}, {"tf32", AMP_TF32},
        {"fp8_e4m3", AMP_E4M3}, {"fp8_e5m2", AMP_E5M2}, {"u8", AMP_U8}, {"u16", AMP_U16}, {"i32", AMP_I32},
        {"i64", AMP_I64}, {"float32", AMP_F32}, {"float64", AMP_F64}, {"float16", AMP_F16}, {"half", AMP_F16},
        {"bfloat16", AMP_BF16}, {"float", AMP_F32}, {"double", AMP_F64}, {"auto", 0}, {"default", 0}};
    static const size_t sizes[12] = {0, 4, 8, 2, 2, 4, 1, 1, 1, 2, 4, 8};
    amp_dtype dtype;
    size_t i;
    for (i = 0; i < sizeof names / sizeof *names; i++) {
        CHECK_OK(amp_dtype_parse(names[i].name, &dtype));
        CHECK_EQ(dtype, names[i].dtype);
        if (i < 11) CHECK(strcmp(amp_dtype_name((amp_dtype)names[i].dtype), names[i].name) == 0);
    }
    for (i = 0; i < 12; i++) CHECK_EQ(amp_dtype_size((amp_dtype)i), sizes[i]);
    CHECK(strcmp(amp_dtype_name(AMP_DTYPE_DEFAULT), "default") == 0);
    CHECK(strcmp(amp_dtype_name(AMP_FP8), "fp8") == 0);
    CHECK(strcmp(amp_dtype_name((amp_dtype)13), "?") == 0 && amp_dtype_size((amp_dtype)13) == 0);
    dtype = AMP_U8;
    CHECK_ERR(amp_dtype_parse("FP16", &dtype), AMP_ERR_NAME);
    CHECK_ERR(amp_dtype_parse("", &dtype), AMP_ERR_NAME);
    CHECK_EQ(dtype, AMP_U8);
    CHECK_ERR(amp_dtype_parse(NULL, &dtype), AMP_ERR_NULL);
    CHECK_ERR(amp_dtype_parse("fp16", NULL), AMP_ERR_NULL);
}

TEST(convert_errors) {
    amp_convert_desc desc;
    float x = 70000;
    uint16_t half = 1;
    int64_t new_inf = -1;
    memset(&desc, 0, sizeof desc);
    CHECK_OK(amp_convert(&half, AMP_F16, &x, AMP_F32, 1, NULL, &new_inf));
    CHECK_EQ(half, 0x7c00);
    CHECK_EQ(new_inf, 1);
    desc.saturate = 1;
    CHECK_OK(amp_convert(&half, AMP_F16, &x, AMP_F32, 1, &desc, &new_inf));
    CHECK_EQ(half, 0x7bff);
    CHECK_EQ(new_inf, 0);
    CHECK_OK(amp_convert(NULL, AMP_F16, NULL, AMP_F32, 0, NULL, &new_inf));
    CHECK_ERR(amp_convert(NULL, AMP_F16, &x, AMP_F32, 1, NULL, NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_convert(&half, AMP_F16, NULL, AMP_F32, 1, NULL, NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_convert(&half, AMP_F16, &x, AMP_F32, -1, NULL, NULL), AMP_ERR_RANGE);
    CHECK_ERR(amp_convert(&half, AMP_U16, &x, AMP_F32, 1, NULL, NULL), AMP_ERR_DTYPE);
    CHECK_ERR(amp_convert(&half, AMP_F16, &x, AMP_DTYPE_DEFAULT, 1, NULL, NULL), AMP_ERR_DTYPE);
    desc.rounding = AMP_ROUND_STOCHASTIC;
    CHECK_ERR(amp_convert(&x, AMP_F32, &half, AMP_F16, 1, &desc, NULL), AMP_ERR_DTYPE);
    CHECK_ERR(amp_convert(&x, AMP_TF32, &half, AMP_F16, 1, &desc, NULL), AMP_ERR_DTYPE);
    desc.rounding = (amp_rounding)9;
    CHECK_ERR(amp_convert(&half, AMP_F16, &x, AMP_F32, 1, &desc, NULL), AMP_ERR_RANGE);
}

int main(int argc, char **argv) {
    int i;
    for (i = 1; i < argc; i++) if (strcmp(argv[i], "--full") == 0) ampt_full = 1;
    ampt_crc_build();
    TEST_BEGIN(argc, argv);
    RUN(widen_golden);
    RUN(widen_paths);
    RUN(numbers_round_trip);
    if (!AMPT_SANITIZED) RUN_LONG(narrow_golden);
    RUN(split_and_join);
    RUN(f64_golden);
    RUN(pairs);
    RUN(in_place);
    RUN(f64_vectors);
    RUN(flush_to_zero);
    RUN(saturation);
    RUN(bulk_options);
    RUN(stochastic_unbiased);
    RUN(stochastic_special);
    RUN(is_finite);
    RUN(count_nonfinite);
    RUN(philox_known_answers);
    RUN(random_sequence);
    RUN(dtype_names);
    RUN(convert_errors);
    return TEST_END();
}
