/* t_cuda_hopper.cpp - runs attention_tests.h on the kernels for Hopper, which amp_desc.wgmma asks for, and
 * tests that they run, what they fetch, and what happens when the driver gives them no tensor map.
 *
 * The model plays a GPU of compute capability 9.0 with code for sm_90a.  On another GPU the kernels by mma.sync run. */
#include "attention_tests.h"

static std::string logged;
static int logs;
static void keep_log(void *, amp_log_level, int, const char *text) { logged = text, logs++; }

/* Runs a problem and counts its kernels of three kinds: for Hopper forward and backward, and those by mma.sync. */
struct launches { long forward, backward, others; };
static launches launches_of(const problem &p, std::string *out) {
    const amp_host host = {NULL, cuda_host_fail, keep_log, cuda_host_alloc, cuda_host_free, NULL};
    amp_backend_desc d = {};
    d.wgmma = 1;
    logs = 0;
    cuda_side gpu(amp_cuda(), d, &host);
    coc_reset_counts();
    p.run(gpu, out);
    const long hopper = coc_kernel_launches("ampc_flash_hopper"), all = coc_kernel_launches("ampc_flash");
    const long forward = coc_kernel_launches("ampc_flash_hopper_rows");
    return launches{forward, hopper - forward, all - hopper};
}

static const attention_shape hopper_shape = {2, 2, 130, 150, 64, DENSE};

/* Turns of the ring: more tiles than stages, under masks of intervals and of single elements. */
CUDA_TEST(warpgroups_turn_the_ring) {
    for (size_t m : {(size_t)1, (size_t)3, (size_t)0})
        for (int64_t dim : {64, 128}) {
            problem p({1, 1, 300, 430, dim, DENSE}, mask_cases[m], all_numbers[1 + m % 2], 2050 + m);
            p.scale = fabsf(p.scale);
            check_problem(p);
        }
}

/* The kernels that this file is about are those that run, and no product goes by mma.sync. */
CUDA_TEST(warpgroups_do_the_work) {
    for (int64_t dim : {40, 64, 96, 128}) {
        attention_shape shape = hopper_shape;
        std::string out;
        shape.dim = dim;
        const launches found = launches_of(problem(shape, mask_cases[1], all_numbers[1 + dim % 3 % 2], 2000), &out);
        CHECK(found.forward == 1 && found.backward == 2 && found.others == 0);
        if (CUDA_IS_MODEL) CHECK_EQ(work_of(problem(shape, mask_cases[1], all_numbers[2], 2001)).mmas, 0);
    }
    std::string out;
    const launches few = launches_of(problem({1, 1, 63, 200, 64, DENSE}, mask_cases[0], all_numbers[2], 2002), &out);
    CHECK(few.forward == 0 && few.backward == 0 && few.others == 3);
}

/* A block fetches its own rows once, and of the other side only the tiles that it sees. */
CUDA_TEST(warpgroups_fetch_what_they_see) {
    const long n = 1024, tile = 128 * 64 * 2;
    problem all({1, 1, n, n, 64, DENSE}, mask_cases[0], all_numbers[2], 2100);
    problem causal({1, 1, n, n, 64, DENSE}, mask_cases[1], all_numbers[2], 2101);
    all.backward = causal.backward = false;
    CHECK_EQ(work_of(all).bulk_bytes, (8 + 2 * 8 * 8) * tile);
    CHECK_EQ(work_of(causal).bulk_bytes, (8 + 2 * 36) * tile);
    CHECK_EQ(work_of(causal).wgmmas, 36 * 2 * (4 + 8));         /* of two warpgroups: 64 x 128 x 16, and 64 x 64 x 16 */
}

/* If the driver refuses a map, the kernels by mma.sync do the work with the same results.  That is logged once. */
CUDA_TEST(a_map_that_the_driver_refuses) {
    const problem p(hopper_shape, mask_cases[1], all_numbers[2], 2200);
    std::string right, out;
    const launches whole = launches_of(p, &right);
    CHECK(whole.forward == 1 && logs == 0);
    for (int n = 1; n <= 3; n++) {
        out.clear();
        coc_fail("cuTensorMapEncodeTiled", n, cudaErrorUnknown);
        const launches part = launches_of(p, &out);
        coc_fail(NULL, 0, cudaSuccess);
        CHECK_MSG(part.forward == 0 && part.backward == 2 && part.others == 1, "%ld %ld %ld", part.forward, part.backward, part.others);
        CHECK_MSG(logs == 1 && logged.find("refused a tensor map") != std::string::npos, "%d: %s", logs, logged.c_str());
    }
    {
        const amp_host host = {NULL, cuda_host_fail, keep_log, cuda_host_alloc, cuda_host_free, NULL};
        amp_backend_desc d = {};
        d.wgmma = 1, logs = 0;
        cuda_side gpu(amp_cuda(), d, &host);
        for (int n = 0; n < 3; n++) {
            coc_fail("cuTensorMapEncodeTiled", 1, cudaErrorUnknown);
            p.run(gpu, &out);
        }
        CHECK_EQ(logs, 1);
    }
    CHECK_MSG(logs == 2 && logged.find("3 passes of attention") != std::string::npos, "%d: %s", logs, logged.c_str());
}

/* Keys and values that all heads share have a stride of 0, which no map has. */
CUDA_TEST(heads_that_share_keys) {
    problem p({2, 3, 100, 140, 64, DENSE}, mask_cases[1], all_numbers[2], 2300);
    for (int t : {K, V}) p.where.views[t].stride[2] = 0;
    for (int t : {K, V})
        for (int64_t b = 0; b < 2; b++)
            for (int64_t i = 0; i < 140; i++)
                for (int64_t h = 1; h < 3; h++) p.in[t].replace(p.at(t, b, h, i) * 2, 128, p.in[t], p.at(t, b, 0, i) * 2, 128);
    p.scale = fabsf(p.scale);
    check_problem(p);
    CHECK(coc_kernel_launches("ampc_flash_hopper") > 0);
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    cuda_wgmma() = 1;
    usual_devices();
    if (ampt.leave_out > 0) ampt.left_out++;    /* all of them, which take a minute: make test-ci runs them */
    else attention_tests();
    RUN(warpgroups_turn_the_ring);
    RUN(warpgroups_do_the_work);
    RUN_PLAIN(warpgroups_fetch_what_they_see);
    RUN(a_map_that_the_driver_refuses);
    RUN(heads_that_share_keys);
    return TEST_END();
}
