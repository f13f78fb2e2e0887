/* t_cuda_attention.cpp - runs attention_tests.h on the kernels by mma.sync and on the fp32 units, and tests how much they move. */
#include "attention_tests.h"

/* Tiles that nobody sees are neither fetched nor multiplied: the work does not grow with the keys that are hidden. */
CUDA_TEST(tensor_cores_skip_hidden_tiles) {
    if (!CUDA_IS_MODEL) return;
    const mask_case window = {"window 64, 64 global", AMP_MASK_WINDOW_GLOBAL, 0, 64, 64, 0, 0, 0};
    const mask_case both = {"window 64, 64 global, both ways", AMP_MASK_WINDOW_GLOBAL, 1, 64, 64, 0, 0, 0};
    const mask_case blocks = {"arbitrary", AMP_MASK_ARBITRARY, 0, 0, 0, 0, 0, 0};
    const attention_shape shape = {1, 1, 1024, 1024, 64, PACKED};
    long all = work_of(problem(shape, mask_cases[0], all_numbers[2], 1200)).mmas;
    long seen = work_of(problem(shape, window, all_numbers[2], 1201)).mmas;
    CHECK_MSG(seen < all / 4, "%ld of %ld", seen, all);
    seen = work_of(problem(shape, both, all_numbers[2], 1202)).mmas;
    CHECK_MSG(seen < all / 2, "%ld of %ld", seen, all);
    problem own(shape, blocks, all_numbers[2], 1203);
    for (size_t i = 0; i < own.mask.allowed.size(); i++)
        own.mask.allowed[i] = i / 1024 / 128 == i % 1024 / 128 && i % 1024 <= i / 1024;
    coc_counts diagonal = work_of(own), whole = work_of(problem(shape, mask_cases[0], all_numbers[2], 1200));
    CHECK_MSG(diagonal.mmas < all / 8, "%ld of %ld", diagonal.mmas, all);
    CHECK_MSG(diagonal.async_bytes < whole.async_bytes / 4, "%ld of %ld bytes", diagonal.async_bytes, whole.async_bytes);
}

/* Backward loads own rows that stay in registers once; forward leaves the registers to the scores, and loads them for each
   32 keys.  Blocks own 128 rows, for which they fetch the other side once. */
CUDA_TEST(tensor_cores_move_little) {
    if (!CUDA_IS_MODEL) return;
    const double forward[] = {0.375, 0.375}, both[] = {96.0 / 288, 304.0 / 576};
    const long n = 1024, blocks = n / 128, stats = 8;
    for (int64_t dim : {64, 128}) {
        problem p({1, 1, n, n, dim, PACKED}, mask_cases[0], all_numbers[2], 1300);
        coc_counts all = work_of(p);
        p.backward = false;
        coc_counts first = work_of(p);
        CHECK_EQ(first.mmas, n / 16 * (n / 8) * (dim / 16) * 2);
        CHECK_EQ(all.mmas, n / 16 * (n / 8) * (dim / 16) * 9);
        double loads = (double)first.ldmatrices / (double)first.mmas, all_loads = (double)all.ldmatrices / (double)all.mmas;
        CHECK_MSG(loads < forward[dim == 128] * 1.02, "%g loads for a product", loads);
        CHECK_MSG(all_loads < both[dim == 128] * 1.02, "%g loads for a product", all_loads);
        CHECK_EQ(first.async_bytes, blocks * (2 * n + 128) * dim * 2);
        CHECK_EQ(all.async_bytes - first.async_bytes, 2 * blocks * (2 * n + 256) * dim * 2 + stats * n * (blocks + 1));
    }
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    attention_tests();
    RUN_PLAIN(tensor_cores_skip_hidden_tiles);
    RUN_PLAIN(tensor_cores_move_little);
    return TEST_END();
}
