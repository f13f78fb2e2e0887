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

/* ---- Operands in fp32 on tensor cores: one product in TF32, three in fp32. */

static const numbers words[] = {{AMP_F32, AMP_F32}, {AMP_F32, AMP_TF32}};

CUDA_TEST(words) {
    uint64_t turn = 0;
    for (const attention_shape &shape : flash_shapes)
        for (size_t m = 0; m < masks; m++) {
            if ((m + turn) % 3 == 2 || (shape.queries > 100 && m % 2)) continue;
            if (turn++ % 2 && AMPT_SANITIZED) continue;
            check_on_tensor_cores(problem(shape, mask_cases[m], words[turn % 2], 1500 + turn));
        }
}

/* Heads of other sizes are filled up with zeros in shared memory.  Rows that are not multiples of 16 aligned bytes, long heads
   and older images are left to the fp32 units. */
CUDA_TEST(words_and_head_sizes) {
    uint64_t turn = 0;
    for (int64_t dim : {4, 12, 20, 60, 68, 100, 124}) {
        turn++;
        attention_shape shape = {1, 2, turn % 3 ? 66 : 5, turn % 2 ? 66 : 70, dim, turn % 2 && turn % 3 ? PACKED : DENSE};
        check_on_tensor_cores(problem(shape, mask_cases[turn % 4], words[turn % 2], 1600 + turn));
    }
    if (!CUDA_IS_MODEL) return;
    const attention_shape others[] = {{1, 1, 20, 20, 132, DENSE}, {1, 1, 20, 20, 64, GAPS}, {1, 1, 20, 20, 30, DENSE}};
    coc_counts before = coc_count();
    long launches = coc_kernel_launches("ampc_flash");
    for (const attention_shape &shape : others)
        for (const numbers &type : words) check_problem(problem(shape, mask_cases[1], type, 1650));
    CHECK_EQ(coc_kernel_launches("ampc_flash"), launches);
    CHECK_EQ(coc_count().mmas, before.mmas);
    coc_set_devices(1, (size_t)1 << 28, 4, 90, 75);
    check_problem(problem(flash_shapes[1], mask_cases[1], words[0], 1660));
    CHECK_EQ(coc_kernel_launches("ampc_flash"), 0);
    usual_devices();
}

/* A product of 16 x 8 x 8 numbers is one of the tensor cores in TF32, and three in fp32. */
CUDA_TEST(words_take_one_product_or_three) {
    if (!CUDA_IS_MODEL) return;
    const long n = 256;
    for (int64_t dim : {64, 128})
        for (int tf32 = 0; tf32 < 2; tf32++) {
            problem p({1, 1, n, n, dim, PACKED}, mask_cases[0], words[tf32], 1700);
            long all = work_of(p).mmas, product = n / 16 * (n / 8) * (dim / 8) * (tf32 ? 1 : 3);
            CHECK_EQ(all, product * 9);
            p.backward = false;
            CHECK_EQ(work_of(p).mmas, product * 2);
        }
}

/* The largest error of a row of o, dq, dk or dv against the exact results, over the row's norm. */
static double worst_row(const exact &e, const std::string &out) {
    double worst = 0;
    size_t at = 0;
    for (int t : {O, DQ, DK, DV})
        for (size_t row = 0; row < e.value[t].size(); row += (size_t)e.s.dim) {
            double error = 0, norm = 0;
            for (size_t i = row; i < row + (size_t)e.s.dim; i++) {
                error += pow(cuda_value(out.data(), AMP_F32, at++) - e.value[t][i], 2);
                norm += pow(e.value[t][i], 2);
            }
            worst = fmax(worst, sqrt(error / norm));
        }
    return worst;
}

/* Three products of numbers in two parts are as good as fp32.  One product is not. */
CUDA_TEST(three_products_are_fp32) {
    for (int64_t dim : {64, 128}) {
        problem p({1, 1, 140, 140, dim, PACKED}, mask_cases[0], words[0], 1800), rough = p;
        const double bound = 12 * ldexp(1, -22);        /* the sums of a row cancel, so that its norm is small */
        const exact e(p);
        cuda_side s(amp_cuda());
        std::string three, one;
        rough.type.compute = AMP_TF32;
        p.run(s, &three);
        rough.run(s, &one);
        CHECK_MSG(worst_row(e, three) <= bound, "%g of 2^-22", ldexp(worst_row(e, three), 22));
        CHECK_MSG(worst_row(e, one) > 64 * bound, "%g of 2^-22", ldexp(worst_row(e, one), 22));
    }
}

/* Results are NaN where the CPU's are, and near them elsewhere, for operands whose bounds are NaN. */
static void check_alike(const problem &p) {
    cuda_compare c = cuda_on_both([&](cuda_side &s, std::string *out) { p.run(s, out); });
    size_t wrong = 0, count = c.actual.size() / 4;
    for (size_t i = 0; i < count; i++) {
        double mine = cuda_value(c.actual.data(), AMP_F32, i), cpu = cuda_value(c.expected.data(), AMP_F32, i);
        wrong += (mine != mine) != (cpu != cpu) || (mine != cpu && fabs(mine - cpu) > ldexp(1 + fabs(cpu), -10));
    }
    CHECK_MSG(wrong == 0, "%zu of %zu, %s, %s", wrong, count, p.mask.kind.name, amp_dtype_name(p.type.compute));
}

/* Infinities, NaN and numbers beyond TF32 have no two parts. */
CUDA_TEST(words_and_infinities) {
    for (size_t m : {(size_t)0, (size_t)1, (size_t)7, (size_t)10, (size_t)11})
        for (int t : {Q, K, V, D_O}) {
            problem p({1, 1, 70, 70, m % 2 ? 48 : 64, PACKED}, mask_cases[m], words[(m + (size_t)t) % 2], 1900);
            p.scale = 0.125f;
            p.poison(t, 0, 0, 40, (int64_t)(m + (size_t)t) % 3);
            check_problem(p);
        }
    for (const numbers &type : words)
        for (size_t m = 0; m < 2; m++) {
            problem p({1, 1, 40, 40, 64, DENSE}, mask_cases[m], type, 1910);
            for (int64_t i = 0; i < 40; i++) p.set(Q, 0, 0, i, 1), p.set(K, 0, 0, i, i == 7 || i < 5 ? -HUGE_VALF : 1);
            check_alike(p);                 /* weights of 0, and rows without any other */
        }
    problem large({1, 1, 40, 40, 64, DENSE}, mask_cases[0], words[0], 1920);
    large.set(V, 0, 0, 7, 3.4028e38f);
    large.backward = false;
    cuda_compare both = cuda_on_both([&](cuda_side &s, std::string *out) { large.run(s, out); });
    both.check_within(0, AMP_F32, large.count(O), [&](int64_t, double value) { return ldexp(fabs(value), -18); }, "o");
}

/* ---- Operands in fp32 that are multiplied in 16 bits: they are cast, and the results too. */

CUDA_TEST(casts_to_16_bits) {
    const attention_shape shapes[] = {{1, 2, 70, 70, 64, PACKED}, {2, 1, 33, 70, 20, GAPS}, {1, 1, 66, 66, 128, DENSE}};
    uint64_t turn = 0;
    for (const attention_shape &shape : shapes)
        for (amp_dtype compute : {AMP_F16, AMP_BF16}) {
            problem p(shape, mask_cases[turn % 4], {AMP_F32, compute}, 2000 + turn), low = p;
            cuda_side s(amp_cuda());
            std::string cast, first;
            turn++;
            p.scale = low.scale = fabsf(p.scale);
            low.type.storage = compute;
            for (int t : {Q, K, V, D_O}) {
                std::vector<float> x;
                for (size_t i = 0; i < (size_t)p.count(t); i++) x.push_back((float)cuda_value(p.in[t].data(), AMP_F32, i));
                low.in[t] = cuda_stored(x, compute);
            }
            long flash = CUDA_IS_MODEL ? coc_kernel_launches("ampc_flash") : 0;
            long copies = CUDA_IS_MODEL ? coc_kernel_launches("ampc_copy_heads") : 0;
            long products = CUDA_IS_MODEL ? work_of(p).mmas : 1;
            p.run(s, &cast);
            CHECK(products > 0);
            if (CUDA_IS_MODEL) CHECK_EQ(coc_kernel_launches("ampc_flash") - flash, 2 * 3);
            if (CUDA_IS_MODEL) CHECK_EQ(coc_kernel_launches("ampc_copy_heads") - copies, 2 * 4);
            low.run(s, &first);
            size_t numbers = (size_t)(p.count(O) + p.count(DQ) + p.count(DK) + p.count(DV)), wrong = 0;
            for (size_t i = 0; i < numbers; i++)
                wrong += cuda_value(cast.data(), AMP_F32, i) != cuda_value(first.data(), compute, i);
            CHECK_EQ(wrong, 0);
            CHECK(cast.substr(4 * numbers) == first.substr(2 * numbers));   /* lse */
            check_problem(p);
        }
}

/* What is cast needs memory for the copies.  Few queries are not worth it, and the fp32 units take them. */
CUDA_TEST(few_queries_are_not_cast) {
    if (!CUDA_IS_MODEL) return;
    for (int64_t queries : {15, 16}) {
        problem p({1, 1, queries, 70, 64, DENSE}, mask_cases[0], {AMP_F32, AMP_BF16}, 2100);
        long flash = coc_kernel_launches("ampc_flash");
        check_problem(p);
        CHECK_EQ(coc_kernel_launches("ampc_flash") > flash, queries == 16);
    }
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    attention_tests();
    RUN_PLAIN(tensor_cores_skip_hidden_tiles);
    RUN_PLAIN(tensor_cores_move_little);
    RUN_CI(words); RUN(words_and_head_sizes);
    RUN_PLAIN(words_take_one_product_or_three);
    RUN(three_products_are_fp32);
    RUN(words_and_infinities);
    RUN(casts_to_16_bits); RUN(few_queries_are_not_cast);
    return TEST_END();
}
