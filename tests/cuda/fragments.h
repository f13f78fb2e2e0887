/* fragments.h - tests mma, ldmatrix and cp.async with the tables of the PTX ISA, written here as element -> (lane,
 * register, half).  It tests the models (t_harness.cpp) and the hardware (tests/gpu/t_models.cu).  Both define these
 * functions before they include it:
 *     void fragment_mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool bf16);
 *     void fragment_mma_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
 *     void fragment_load(uint32_t (&r)[4], const void *row, bool transposed);
 *     void fragment_copy(void *shared, const void *from, bool there);         16 bytes, or zeros; and waits
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
#else
#  define FRAGMENT_SHARED(name, count) COC_SHARED(uint4, name, count)
#endif

struct fragment_place { unsigned lane, at, half; };
static inline fragment_place fragment_a(unsigned row, unsigned k) { return {row % 8 * 4 + k % 8 / 2, k / 8 * 2 + row / 8, k % 2}; }
static inline fragment_place fragment_b(unsigned k, unsigned n) { return {n * 4 + k % 8 / 2, k / 8, k % 2}; }
static inline fragment_place fragment_c(unsigned row, unsigned n) { return {row % 8 * 4 + n / 2, row / 8 * 2 + n % 2, 0}; }

/* Runs kernel(data, which), one warp per block, over words in device memory.  Returns false if it failed. */
static inline bool fragment_run(void (*kernel)(uint32_t *, int), std::vector<uint32_t> *words, int which, unsigned blocks = 1) {
    uint32_t *data = NULL;
    size_t bytes = words->size() * 4;
    void *args[] = {(void *)&data, (void *)&which};
    bool done = cudaMalloc((void **)&data, bytes) == cudaSuccess;
    done = done && cudaMemcpy(data, words->data(), bytes, cudaMemcpyHostToDevice) == cudaSuccess;
    done = done && cudaLaunchKernel(kernel, dim3(blocks), dim3(32), args, 0, (cudaStream_t)0) == cudaSuccess;
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

#endif
