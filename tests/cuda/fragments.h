/* fragments.h - tests mma, ldmatrix, cp.async, wgmma and bulk copies with the tables of the PTX ISA, written here as
 * element -> (lane, register, half) or byte.  It tests the models (t_harness.cpp) and the hardware (tests/gpu/t_models.cu).  Both define these
 * functions before they include it:
 *     void fragment_mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool bf16);
 *     void fragment_mma_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
 *     void fragment_load(uint32_t (&r)[4], const void *row, bool transposed);
 *     void fragment_copy(void *shared, const void *from, bool there);         16 bytes, or zeros; and waits
 * and for compute capability 9.0:
 *     uint32_t fragment_number(const void *shared);                           as descriptors have it
 *     void fragment_gate_init(void *gate, unsigned count), fragment_gates_ready();
 *     void fragment_expect(void *gate, unsigned bytes), fragment_arrive(void *gate);
 *     void fragment_gate_wait(void *gate, unsigned parity);
 *     void fragment_bytes(void *to, const void *from, unsigned bytes, void *gate);
 *     void fragment_box(void *to, const void *map, void *gate, int c0, int c1, int c2, int c3);
 *     template <int N, bool ACROSS> void fragment_group(float (&c)[N / 8][4], const uint32_t (&a)[4], const fragment_operands &o);
 *         a product from fence to wait, with a in registers if !o.left; it is called by four warps
 * Each test returns "" or a text that says what is wrong. */
#ifndef AMPT_FRAGMENTS_H
#define AMPT_FRAGMENTS_H

#include <cuda_runtime.h>
#include <math.h>
#include <string>
#include <vector>
#include "amp.h"

#if defined(__CUDACC__)
#  define FRAGMENT_SHARED(name, count) __shared__ uint4 name[count]
#  define FRAGMENT_DYNAMIC(name) extern __shared__ __align__(128) unsigned char name[]
#else
#  define FRAGMENT_SHARED(name, count) COC_SHARED(uint4, name, count)
#  define FRAGMENT_DYNAMIC(name) unsigned char *const name = coc_dynamic_shared()
#endif

struct fragment_place { unsigned lane, at, half; };
static inline fragment_place fragment_a(unsigned row, unsigned k) { return {row % 8 * 4 + k % 8 / 2, k / 8 * 2 + row / 8, k % 2}; }
static inline fragment_place fragment_b(unsigned k, unsigned n) { return {n * 4 + k % 8 / 2, k / 8, k % 2}; }
static inline fragment_place fragment_c(unsigned row, unsigned n) { return {row % 8 * 4 + n / 2, row / 8 * 2 + n % 2, 0}; }

/* Runs kernel(data, which) over words in device memory.  Returns false if it failed. */
static inline bool fragment_run(void (*kernel)(uint32_t *, int), std::vector<uint32_t> *words, int which, unsigned blocks = 1,
                                unsigned threads = 32, size_t shared = 0) {
    uint32_t *data = NULL;
    size_t bytes = words->size() * 4;
    void *args[] = {(void *)&data, (void *)&which};
    bool done = cudaMalloc((void **)&data, bytes) == cudaSuccess;
    done = done && cudaMemcpy(data, words->data(), bytes, cudaMemcpyHostToDevice) == cudaSuccess;
    done = done && cudaLaunchKernel(kernel, dim3(blocks), dim3(threads), args, shared, (cudaStream_t)0) == cudaSuccess;
    done = done && cudaMemcpy(words->data(), data, bytes, cudaMemcpyDeviceToHost) == cudaSuccess;
    return cudaFree(data) == cudaSuccess && done;
}

/* ---- Products: every element of a and b at its place, small numbers whose sums are exact. */

__global__ static void fragment_product_kernel(uint32_t *words, int bf16) {
    unsigned lane = threadIdx.x;
    uint32_t a[4], b[2];
    float c[4];
    for (unsigned i = 0; i < 4; i++) a[i] = words[4 * lane + i], c[i] = ampi_f32_of_bits(words[192 + 4 * lane + i]);
    for (unsigned i = 0; i < 2; i++) b[i] = words[128 + 2 * lane + i];
    fragment_mma(c, a, b, bf16 != 0);
    for (unsigned i = 0; i < 4; i++) words[192 + 4 * lane + i] = ampi_bits_f32(c[i]);
}

static inline uint32_t fragment_stored(float x, bool bf16) { return bf16 ? amp_bf16_from_f32(x, 0) : amp_f16_from_f32(x, 0); }

static inline std::string fragment_products(bool bf16) {
    float left[16][16], right[16][8], sum[16][8];
    std::vector<uint32_t> words(320);
    auto at = [](unsigned from, unsigned registers, fragment_place p) { return from + registers * p.lane + p.at; };
    for (unsigned i = 0; i < 256; i++) {
        float x = left[i / 16][i % 16] = (float)((int)i % 29 - 14) / 8;
        words[at(0, 4, fragment_a(i / 16, i % 16))] |= fragment_stored(x, bf16) << 16 * fragment_a(i / 16, i % 16).half;
    }
    for (unsigned i = 0; i < 128; i++) {
        float x = right[i / 8][i % 8] = (float)((int)i % 23 - 11) / 4;
        words[at(128, 2, fragment_b(i / 8, i % 8))] |= fragment_stored(x, bf16) << 16 * fragment_b(i / 8, i % 8).half;
    }
    for (unsigned i = 0; i < 128; i++) {
        words[at(192, 4, fragment_c(i / 8, i % 8))] = ampi_bits_f32(sum[i / 8][i % 8] = (float)i);
        for (unsigned k = 0; k < 16; k++) sum[i / 8][i % 8] += left[i / 8][k] * right[k][i % 8];
    }
    if (!fragment_run(fragment_product_kernel, &words, bf16)) return "the kernel failed";
    for (unsigned i = 0; i < 128; i++)
        if (words[at(192, 4, fragment_c(i / 8, i % 8))] != ampi_bits_f32(sum[i / 8][i % 8]))
            return "row " + std::to_string(i / 8) + ", column " + std::to_string(i % 8) + " is another number";
    return "";
}

/* Every number of a 16-bit type, with subnormal numbers, infinities and NaN: times 1, it must be itself. */
__global__ static void fragment_number_kernel(uint32_t *wrong, int bf16) {
    uint32_t lane = threadIdx.x, mine = blockIdx.x * 8 + lane / 4, a[4] = {lane % 4 ? 0 : mine, 0, 0, 0}, b[2] = {0, 0};
    float c[4] = {0, 0, 0, 0}, x = bf16 ? amp_f32_from_bf16((uint16_t)mine) : amp_f32_from_f16((uint16_t)mine);
    b[0] = lane % 4 ? 0 : bf16 ? 0x3f80 : 0x3c00;           /* row g of a has one number at k = 0, b has 1 there */
    fragment_mma(c, a, b, bf16 != 0);
    for (unsigned i = 0; i < 4; i++) {
        float right = i < 2 ? x : 0.0f;
        if (!(c[i] == right || (c[i] != c[i] && right != right))) atomicAdd(wrong, 1u);
    }
}
static inline std::string fragment_numbers(bool bf16) {
    std::vector<uint32_t> wrong(1);
    if (!fragment_run(fragment_number_kernel, &wrong, bf16, 8192)) return "the kernel failed";
    return wrong[0] == 0 ? "" : std::to_string(wrong[0] / 2) + " numbers become others";
}

/* Sums of 16 products and c: the largest error over the sum of magnitudes. */
static inline double fragment_error(bool bf16) {
    double worst = 0;
    for (uint64_t turn = 0; turn < 64; turn++) {
        std::vector<uint32_t> words(320), before;
        for (size_t i = 0; i < 320; i++) {
            float x = amp_random_uniform(turn, 2 * i) - 0.5f, y = amp_random_uniform(turn, 2 * i + 1) - 0.5f;
            words[i] = i < 192 ? fragment_stored(x, bf16) | fragment_stored(y, bf16) << 16 : ampi_bits_f32(x);
        }
        before = words;
        if (!fragment_run(fragment_product_kernel, &words, bf16)) return HUGE_VAL;
        auto value = [&](size_t from, unsigned registers, fragment_place p) -> double {
            uint16_t bits = (uint16_t)(before[from + registers * p.lane + p.at] >> 16 * p.half);
            return bf16 ? amp_f32_from_bf16(bits) : amp_f32_from_f16(bits);
        };
        for (unsigned i = 0; i < 128; i++) {
            size_t at = 192 + 4 * fragment_c(i / 8, i % 8).lane + fragment_c(i / 8, i % 8).at;
            double sum = ampi_f32_of_bits(before[at]), size = fabs(sum);
            for (unsigned k = 0; k < 16; k++) {
                double x = value(0, 4, fragment_a(i / 8, k)) * value(128, 2, fragment_b(k, i % 8));
                sum += x, size += fabs(x);
            }
            worst = fmax(worst, fabs(ampi_f32_of_bits(words[at]) - sum) / size);
        }
    }
    return worst;
}

/* ---- Products in TF32, whose fragments have one number in a word. */

static inline fragment_place fragment_word_a(unsigned row, unsigned k) { return {row % 8 * 4 + k % 4, k / 4 * 2 + row / 8, 0}; }
static inline fragment_place fragment_word_b(unsigned k, unsigned n) { return {n * 4 + k % 4, k / 4, 0}; }

__global__ static void fragment_word_kernel(uint32_t *words, int) {
    unsigned lane = threadIdx.x;
    uint32_t a[4], b[2];
    float c[4];
    for (unsigned i = 0; i < 4; i++) a[i] = words[4 * lane + i], c[i] = ampi_f32_of_bits(words[192 + 4 * lane + i]);
    for (unsigned i = 0; i < 2; i++) b[i] = words[128 + 2 * lane + i];
    fragment_mma_tf32(c, a, b);
    for (unsigned i = 0; i < 4; i++) words[192 + 4 * lane + i] = ampi_bits_f32(c[i]);
}

/* The largest error over the sum of magnitudes.  With `exact`, operands are small numbers whose sums are exact, one at each
   place, so that the error is 0 only if every number was at its place.  HUGE_VAL if the kernel failed. */
static inline double fragment_word_error(bool exact, uint64_t seed) {
    std::vector<uint32_t> words(320), before;
    double worst = 0;
    auto at = [](unsigned from, unsigned registers, fragment_place p) { return from + registers * p.lane + p.at; };
    for (size_t i = 0; i < 320; i++) {
        float x = exact ? (float)((int)(i * 7 % 61) - 30) / 8 : amp_random_uniform(seed, i) - 0.5f;
        words[i] = ampi_bits_f32(i < 192 ? amp_tf32_from_f32(x, 0) : x);
    }
    before = words;
    if (!fragment_run(fragment_word_kernel, &words, 0)) return HUGE_VAL;
    for (unsigned i = 0; i < 128; i++) {
        size_t place = at(192, 4, fragment_c(i / 8, i % 8));
        double sum = ampi_f32_of_bits(before[place]), size = fabs(sum);
        for (unsigned k = 0; k < 8; k++) {
            double x = ampi_f32_of_bits(before[at(0, 4, fragment_word_a(i / 8, k))]);
            double y = ampi_f32_of_bits(before[at(128, 2, fragment_word_b(k, i % 8))]);
            sum += x * y, size += fabs(x * y);
        }
        worst = fmax(worst, fabs(ampi_f32_of_bits(words[place]) - sum) / size);
    }
    return worst;
}

/* Every TF32 number with any lower bits, which do not count: times 1, it must be itself. */
__global__ static void fragment_word_number_kernel(uint32_t *wrong, int) {
    uint32_t lane = threadIdx.x, mine = (blockIdx.x * 8 + lane / 4) << 13, a[4] = {0, 0, 0, 0}, b[2] = {0, 0};
    float c[4] = {0, 0, 0, 0}, x = ampi_f32_of_bits(mine);
    if (lane % 4 == 0) a[0] = (mine & 0x7f800000u) == 0x7f800000u ? mine : mine | (mine >> 13) * 2654435761u >> 19;
    if (lane % 4 == 0) b[0] = 0x3f800000u | 0x1fffu;        /* row g of a has one number at k = 0, b has 1 there */
    fragment_mma_tf32(c, a, b);
    for (unsigned i = 0; i < 4; i++) {
        float right = i < 2 ? x : 0.0f;
        if (!(c[i] == right || (c[i] != c[i] && right != right))) atomicAdd(wrong, 1u);
    }
}
static inline std::string fragment_word_numbers() {
    std::vector<uint32_t> wrong(1);
    if (!fragment_run(fragment_word_number_kernel, &wrong, 0, 1u << 16)) return "the kernel failed";
    return wrong[0] == 0 ? "" : std::to_string(wrong[0] / 2) + " numbers become others";
}

/* ---- ldmatrix and cp.async: the values that each lane gets. */

__global__ static void fragment_load_kernel(uint32_t *words, int transposed) {
    FRAGMENT_SHARED(room, 64);
    uint16_t *tile = (uint16_t *)room;
    uint32_t r[4];
    for (unsigned i = threadIdx.x; i < 512; i += 32) tile[i] = (uint16_t)i;
    __syncwarp();
    fragment_load(r, tile + threadIdx.x * 5 % 32 * 16, transposed != 0);
    for (unsigned i = 0; i < 4; i++) words[4 * threadIdx.x + i] = r[i];
}
static inline std::string fragment_loads(bool transposed) {
    std::vector<uint32_t> r(128);
    if (!fragment_run(fragment_load_kernel, &r, transposed)) return "the kernel failed";
    for (unsigned lane = 0; lane < 32; lane++)
        for (unsigned e = 0; e < 8; e++) {
            unsigned row = transposed ? lane % 4 * 2 + e % 2 : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + e % 2;
            if ((r[4 * lane + e / 2] >> 16 * (e % 2) & 0xffff) != (8 * (e / 2) + row) * 5 % 32 * 16 + column)
                return "lane " + std::to_string(lane) + ", number " + std::to_string(e) + " is another one";
        }
    return "";
}

__global__ static void fragment_copy_kernel(uint32_t *words, int) {
    FRAGMENT_SHARED(room, 32);
    uint32_t *tile = (uint32_t *)room;
    fragment_copy(tile + 4 * threadIdx.x, words + 4 * threadIdx.x, threadIdx.x % 3 != 0);
    __syncthreads();
    for (unsigned i = 0; i < 4; i++) words[4 * threadIdx.x + i] = tile[4 * (threadIdx.x ^ 1) + i];
}
static inline std::string fragment_copies() {
    std::vector<uint32_t> words(128, 0x11111111u);
    if (!fragment_run(fragment_copy_kernel, &words, 0)) return "the kernel failed";
    for (unsigned byte = 0; byte < 512; byte++) {
        unsigned from = (byte / 16) ^ 1, value = words[byte / 4] >> 8 * (byte % 4) & 255;
        if (value != (from % 3 != 0 ? 0x11u : 0u)) return "byte " + std::to_string(byte) + " is another one";
    }
    return "";
}

/* ---- Compute capability 9.0: phases of gates (mbarriers), over three turns of two stages.  The second warp copies 16 words
   into a stage when it is empty, and the first warp reads them when it is full. */

enum { FRAGMENT_TURNS = 3, FRAGMENT_STAGES = 2, FRAGMENT_STAGE_BYTES = 64 };

__global__ static void fragment_phase_kernel(uint32_t *words, int) {
    FRAGMENT_DYNAMIC(room);
    unsigned char *gates = room + FRAGMENT_STAGES * FRAGMENT_STAGE_BYTES;
    uint32_t *results = words + FRAGMENT_TURNS * FRAGMENT_STAGES * 16;
    for (int stage = 0; threadIdx.x == 0 && stage < FRAGMENT_STAGES; stage++) {
        fragment_gate_init(gates + 16 * stage, 1);              /* full */
        fragment_gate_init(gates + 16 * stage + 8, 1);          /* empty */
    }
    if (threadIdx.x == 0) fragment_gates_ready();
    __syncthreads();
    for (int i = 0; i < FRAGMENT_TURNS * FRAGMENT_STAGES; i++) {
        unsigned stage = (unsigned)i % FRAGMENT_STAGES, parity = (unsigned)i / FRAGMENT_STAGES % 2;
        unsigned char *full = gates + 16 * stage, *tile = room + stage * FRAGMENT_STAGE_BYTES;
        if (threadIdx.x == 32) {
            fragment_gate_wait(full + 8, parity ^ 1);
            fragment_expect(full, FRAGMENT_STAGE_BYTES);
            fragment_bytes(tile, words + 16 * i, FRAGMENT_STAGE_BYTES, full);
        } else if (threadIdx.x < 32) {
            fragment_gate_wait(full, parity);
            if (threadIdx.x < 16) results[16 * i + (int)threadIdx.x] = ((const uint32_t *)tile)[threadIdx.x];
            __syncwarp();
            if (threadIdx.x == 0) fragment_arrive(full + 8);
        }
    }
}
static inline std::string fragment_phases() {
    const size_t n = FRAGMENT_TURNS * FRAGMENT_STAGES * 16;
    std::vector<uint32_t> words(2 * n);
    for (size_t i = 0; i < n; i++) words[i] = 1000 + (uint32_t)i;
    if (!fragment_run(fragment_phase_kernel, &words, 0, 1, 64, 256)) return "the kernel failed";
    for (size_t i = 0; i < n; i++)
        if (words[n + i] != 1000 + i) return "word " + std::to_string(i % 16) + " of copy " + std::to_string(i / 16) + " is another one";
    return "";
}

/* ---- Boxes of tensor maps: 64 rows of 64 numbers, swizzled, with zeros outside the tensor.  In a tile of rows of 128 bytes,
   the pieces of 16 bytes of row r are exchanged by exclusive-or with r mod 8. */

static inline size_t fragment_tile_byte(size_t row, size_t column) {
    return row * 128 + ((column / 8) ^ (row % 8)) * 16 + column % 8 * 2;
}
static __device__ inline unsigned char *fragment_aligned(unsigned char *room) {
    return room + (1024 - fragment_number(room) % 1024) % 1024;
}

struct alignas(64) fragment_map { uint64_t words[16]; };
struct fragment_corner { int at[4]; };
typedef int (*fragment_encoder)(void *, int, unsigned, void *, const uint64_t *, const uint64_t *, const unsigned *,
                                const unsigned *, int, int, int, int);

static inline bool fragment_encode(fragment_map *map, void *data, const uint64_t (&size)[4], const uint64_t (&stride)[3]) {
    const unsigned box[4] = {64, 64, 1, 1}, step[4] = {1, 1, 1, 1};
    void *function = NULL;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, 0, &found) != cudaSuccess) return false;
#else
    if (cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, 0, &found) != cudaSuccess) return false;
#endif
    return function != NULL && ((fragment_encoder)function)(map, 9, 4, data, size, stride, box, step, 0, 3, 2, 0) == 0;
}

__global__ static void fragment_box_kernel(uint32_t *out, const __grid_constant__ fragment_map map, fragment_corner corner) {
    FRAGMENT_DYNAMIC(room);
    unsigned char *tile = fragment_aligned(room), *gate = tile + 8192;
    if (threadIdx.x == 0) {
        fragment_gate_init(gate, 1);
        fragment_gates_ready();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        fragment_expect(gate, 8192);
        fragment_box(tile, &map, gate, corner.at[0], corner.at[1], corner.at[2], corner.at[3]);
    }
    fragment_gate_wait(gate, 0);
    for (unsigned i = threadIdx.x; i < 2048; i += 32) out[i] = ((const uint32_t *)tile)[i];
}

/* The box at a corner of the tensor whose number at (c, r, h, b) is 1 + c + 80 (r + rows (h + heads b)). */
static inline std::string fragment_check_box(const std::vector<uint16_t> &tile, const uint64_t (&size)[4], const fragment_corner &corner) {
    for (int r = 0; r < 64; r++)
        for (int c = 0; c < 64; c++) {
            const int64_t at[4] = {corner.at[0] + c, corner.at[1] + r, corner.at[2], corner.at[3]};
            int64_t right = 1 + at[0] + 80 * (at[1] + (int64_t)size[1] * (at[2] + (int64_t)size[2] * at[3]));
            for (int d = 0; d < 4; d++)
                if (at[d] < 0 || at[d] >= (int64_t)size[d]) right = 0;
            if (tile[fragment_tile_byte((size_t)r, (size_t)c) / 2] != (uint16_t)right)
                return "row " + std::to_string(r) + ", column " + std::to_string(c) + " of the box at (" + std::to_string(corner.at[0]) +
                       ", " + std::to_string(corner.at[1]) + ", " + std::to_string(corner.at[2]) + ", " +
                       std::to_string(corner.at[3]) + ") is another number";
        }
    return "";
}

/* One dimension of size 1 has a stride that means nothing. */
static inline std::string fragment_boxes_of(const uint64_t (&size)[4], const uint64_t (&stride)[3], const std::vector<fragment_corner> &corners) {
    std::vector<uint16_t> numbers(80 * size[1] * size[2] * size[3]), tile(4096);
    uint32_t *out = NULL;
    void *data = NULL;
    fragment_map map;
    std::string wrong;
    for (size_t i = 0; i < numbers.size(); i++) numbers[i] = (uint16_t)(i + 1);
    bool done = cudaMalloc((void **)&out, 8192) == cudaSuccess && cudaMalloc(&data, numbers.size() * 2) == cudaSuccess &&
                cudaMemcpy(data, numbers.data(), numbers.size() * 2, cudaMemcpyHostToDevice) == cudaSuccess &&
                fragment_encode(&map, data, size, stride);
    for (size_t i = 0; done && wrong.empty() && i < corners.size(); i++) {
        fragment_corner corner = corners[i];
        void *args[] = {(void *)&out, (void *)&map, (void *)&corner};
        done = cudaLaunchKernel(fragment_box_kernel, dim3(1), dim3(32), args, 10240, (cudaStream_t)0) == cudaSuccess &&
               cudaMemcpy(tile.data(), out, 8192, cudaMemcpyDeviceToHost) == cudaSuccess;
        if (done) wrong = fragment_check_box(tile, size, corner);
    }
    done = cudaFree(out) == cudaSuccess && cudaFree(data) == cudaSuccess && done;
    return done ? wrong : "the kernel failed";
}
static inline std::string fragment_boxes() {
    std::string wrong = fragment_boxes_of({72, 50, 3, 2}, {160, 8000, 24000},
        {{{0, 0, 0, 0}}, {{0, 0, 1, 1}}, {{64, 0, 2, 1}}, {{0, 16, 2, 0}}, {{64, 40, 1, 0}}, {{0, 50, 0, 0}}, {{72, 0, 0, 0}},
         {{0, -8, 1, 1}}, {{-16, 0, 0, 0}}, {{0, 0, 3, 0}}, {{0, 0, 0, 2}}, {{0, 0, -1, 0}}});
    return wrong.empty() ? fragment_boxes_of({40, 70, 1, 1}, {160, 16, 16}, {{{0, 0, 0, 0}}, {{0, 64, 0, 0}}}) : wrong;
}

/* ---- Products of a warpgroup: left is 64 x 16, right 16 x n.  They lie in tiles of rows of 128 bytes, of which a product takes
   16 columns or, of a right operand that is across, 16 rows: those of number `step`.  All other numbers are NaN. */

struct fragment_operands {
    const unsigned char *left, *right;          /* left: NULL if it is in registers */
    unsigned leading;                           /* bytes between tiles of 64 columns */
    bool bf16, add;
};
struct fragment_group_case { bool bf16, across, registers, add; unsigned n, step; };
enum { FRAGMENT_LEFT = 8192, FRAGMENT_TILES = 24576, FRAGMENT_WORDS_AT = FRAGMENT_TILES / 4, FRAGMENT_SUMS_AT = FRAGMENT_WORDS_AT + 512 };

static inline fragment_place fragment_group_a(unsigned row, unsigned k) {
    return {row / 16 * 32 + row % 8 * 4 + k % 8 / 2, k / 8 * 2 + row / 8 % 2, k % 2};
}
static inline fragment_place fragment_group_c(unsigned row, unsigned n) {
    return {row / 16 * 32 + row % 8 * 4 + n % 8 / 2, n / 8 * 4 + row / 8 % 2 * 2 + n % 2, 0};
}
static inline size_t fragment_right_byte(const fragment_group_case &g, unsigned k, unsigned n) {
    k += 16 * g.step;
    return FRAGMENT_LEFT + (g.across ? n / 64 * 8192 + fragment_tile_byte(k, n % 64) : fragment_tile_byte(n, k));
}

template <int N, bool ACROSS>
static __device__ inline void fragment_group_turn(uint32_t *words, const unsigned char *tile, int which) {
    unsigned step = (unsigned)which >> 4;
    fragment_operands o = {which & 4 ? NULL : tile + 32 * step, tile + FRAGMENT_LEFT + step * (ACROSS ? 2048 : 32), ACROSS ? 8192u : 16u,
                           (which & 1) != 0, (which & 8) != 0};
    uint32_t *sums = words + FRAGMENT_SUMS_AT + threadIdx.x * (N / 2), a[4];
    float c[N / 8][4];
    for (int i = 0; i < 4; i++) a[i] = words[FRAGMENT_WORDS_AT + 4 * threadIdx.x + (unsigned)i];
    for (int i = 0; i < N / 2; i++) c[i / 4][i % 4] = ampi_f32_of_bits(sums[i]);
    fragment_group<N, ACROSS>(c, a, o);
    for (int i = 0; i < N / 2; i++) sums[i] = ampi_bits_f32(c[i / 4][i % 4]);
}
template <int N, bool ACROSS> __global__ static void __launch_bounds__(128) fragment_group_kernel(uint32_t *words, int which) {
    FRAGMENT_DYNAMIC(room);
    unsigned char *tile = fragment_aligned(room), *gate = tile + FRAGMENT_TILES;
    if (threadIdx.x == 0) {
        fragment_gate_init(gate, 1);
        fragment_gates_ready();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        fragment_expect(gate, FRAGMENT_TILES);
        fragment_bytes(tile, words, FRAGMENT_TILES, gate);
    }
    fragment_gate_wait(gate, 0);
    fragment_group_turn<N, ACROSS>(words, tile, which);
}

/* Writes the operands into their places, and the sums into `sum`. */
static inline std::vector<uint32_t> fragment_group_words(const fragment_group_case &g, std::vector<float> *sum) {
    std::vector<uint32_t> words(FRAGMENT_SUMS_AT + 64 * g.n, 0xffffffffu);
    auto left = [](unsigned r, unsigned k) { return (float)((int)((r * 37 + k * 11) % 61) - 30) / 8; };
    auto right = [](unsigned k, unsigned n) { return (float)((int)((k * 29 + n * 7) % 53) - 26) / 4; };
    auto store = [&](size_t byte, float x) {
        uint16_t bits = (uint16_t)fragment_stored(x, g.bf16);
        memcpy((char *)words.data() + byte, &bits, 2);
    };
    sum->assign(64 * g.n, 0.0f);
    for (unsigned r = 0; r < 64; r++)
        for (unsigned k = 0; k < 16; k++) {
            fragment_place a = fragment_group_a(r, k);
            store(g.registers ? 4 * (FRAGMENT_WORDS_AT + 4 * a.lane + a.at) + 2 * a.half : fragment_tile_byte(r, 16 * g.step + k), left(r, k));
        }
    for (unsigned k = 0; k < 16; k++)
        for (unsigned n = 0; n < g.n; n++) store(fragment_right_byte(g, k, n), right(k, n));
    for (unsigned i = 0; i < 64 * g.n; i++) {
        unsigned r = i / g.n, n = i % g.n;
        if (g.add) (*sum)[i] = (float)(i % 1021);
        if (g.add) words[FRAGMENT_SUMS_AT + fragment_group_c(r, n).lane * (g.n / 2) + fragment_group_c(r, n).at] = ampi_bits_f32((*sum)[i]);
        for (unsigned k = 0; k < 16; k++) (*sum)[i] += left(r, k) * right(k, n);
    }
    return words;
}

static inline std::string fragment_group_product(const fragment_group_case &g) {
    std::vector<float> sum;
    std::vector<uint32_t> words = fragment_group_words(g, &sum);
    int which = (int)(g.bf16 | g.across << 1 | g.registers << 2 | g.add << 3 | g.step << 4);
    void (*kernel)(uint32_t *, int) = g.n == 64 ? g.across ? fragment_group_kernel<64, true> : fragment_group_kernel<64, false>
                                                : g.across ? fragment_group_kernel<128, true> : fragment_group_kernel<128, false>;
    std::string name = std::string(g.bf16 ? "bf16" : "fp16") + ", n = " + std::to_string(g.n) + (g.across ? ", b across" : "") +
                       (g.registers ? ", a in registers" : "") + (g.add ? ", added" : "") + ", step " + std::to_string(g.step);
    if (!fragment_run(kernel, &words, which, 1, 128, FRAGMENT_TILES + 2048)) return name + ": the kernel failed";
    for (unsigned i = 0; i < 64 * g.n; i++) {
        fragment_place c = fragment_group_c(i / g.n, i % g.n);
        if (words[FRAGMENT_SUMS_AT + c.lane * (g.n / 2) + c.at] != ampi_bits_f32(sum[i]))
            return name + ": row " + std::to_string(i / g.n) + ", column " + std::to_string(i % g.n) + " is another number";
    }
    return "";
}
static inline std::string fragment_groups() {
    std::string wrong;
    for (unsigned i = 0; i < 128 && wrong.empty(); i++)
        wrong = fragment_group_product({(i & 1) != 0, (i & 2) != 0, (i & 4) != 0, (i & 8) != 0, i & 16 ? 128u : 64u, i >> 5});
    return wrong;
}

#endif
