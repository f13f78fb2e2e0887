/* t_fuzz.c - runs the fuzzers' seeds without libFuzzer: unchanged, cut at every byte, and with changed bytes and numbers.
 * Inputs that once caused a failure are among the seeds as found_*. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#define AMPT_REPLAY
#define LLVMFuzzerTestOneInput fuzz_config
#include "fuzz/fuzz_config.c"
#undef LLVMFuzzerTestOneInput
#define LLVMFuzzerTestOneInput fuzz_tokens
#include "fuzz/fuzz_tokens.c"
#undef LLVMFuzzerTestOneInput
#define LLVMFuzzerTestOneInput fuzz_array
#include "fuzz/fuzz_array.c"
#undef LLVMFuzzerTestOneInput
#define LLVMFuzzerTestOneInput fuzz_safetensors
#include "fuzz/fuzz_safetensors.c"
#undef LLVMFuzzerTestOneInput
#define LLVMFuzzerTestOneInput fuzz_tokenizer
#include "fuzz/fuzz_tokenizer.c"
#undef LLVMFuzzerTestOneInput
#define LLVMFuzzerTestOneInput fuzz_state
#include "fuzz/fuzz_state.c"
#include <dirent.h>

typedef int (*fuzzer)(const uint8_t *data, size_t size);

/* Numbers that formats do not expect; each stands where a 64-bit one may, and its lower half where a 32-bit one may. */
static const uint64_t hostile[] = {
    0, UINT64_MAX, INT64_MAX, (uint64_t)1 << 63, (uint64_t)1 << 61, INT32_MAX, (uint64_t)1 << 31, UINT32_MAX,
    UINT64_C(0x7ff0000000000000), UINT64_C(0x7ff8000000000001), UINT64_C(0x7fefffffffffffff), UINT64_C(0x433fffffffffffff),
    0x7f800000, 0x7fc00001, 0xff7fffff, 1};

/* Runs `run` and tells the input if it fails for the first time. */
static void try_input(fuzzer run, const char *name, const char *what, size_t at, const uint8_t *data, size_t size) {
    int failures = ampt.failures;
    run(data, size);
    if (failures == 0 && ampt.failures > 0) printf("      %s, %s %zu\n", name, what, at);
}

/* rounds: how many of the changes, spread evenly, so that slow ones take no longer than others. */
static void try_changes(fuzzer run, const char *name, const uint8_t *data, size_t size, size_t rounds) {
    size_t kinds = 2 * sizeof hostile / sizeof *hostile, all = size + 3 * size + kinds * (size / 4), step = all / rounds + 1, i, k, at;
    uint8_t *copy = (uint8_t *)malloc(size + 8);
    for (i = 0; i < all && copy != NULL; i += step) {
        memcpy(copy, data, size);
        if (i < size) { try_input(run, name, "cut at byte", i, copy, i); continue; }
        k = i - size;
        at = k < 3 * size ? k / 3 : (k - 3 * size) / kinds * 4;
        if (k < 3 * size) copy[at] ^= (uint8_t)("\1\x80\xff"[k % 3]);
        else for (size_t b = 0; b < (k % 2 ? 8u : 4u) && at + b < size; b++) copy[at + b] = (uint8_t)(hostile[(k - 3 * size) % kinds / 2] >> (8 * b));
        try_input(run, name, "changed at byte", at, copy, size);
    }
    free(copy);
}

/* Of all files in a folder of seeds; returns how many there are. */
static int try_seeds(fuzzer run, const char *name, size_t rounds) {
    char folder[64], path[512];
    struct dirent *entry;
    int seeds = 0;
    snprintf(folder, sizeof folder, "tests/hostile/fuzz/seeds/%s", name);
    DIR *dir = opendir(folder);
    CHECK(dir != NULL);
    while (dir != NULL && (entry = readdir(dir)) != NULL) {
        void *data;
        size_t size;
        if (entry->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        CHECK_OK(amp_file_read_all(NULL, path, &data, &size));
        try_input(run, path, "byte", 0, (const uint8_t *)data, size);
        try_changes(run, path, (const uint8_t *)data, size, rounds);
        amp_file_free(NULL, data, size);
        seeds++;
    }
    if (dir != NULL) closedir(dir);
    return seeds;
}

TEST(config) { CHECK(try_seeds(fuzz_config, "config", 5000) >= 4); }
TEST(tokens) { CHECK(try_seeds(fuzz_tokens, "tokens", 1500) >= 8); }
TEST(array) { CHECK(try_seeds(fuzz_array, "array", 1500) >= 6); }
TEST(safetensors) { CHECK(try_seeds(fuzz_safetensors, "safetensors", 4000) >= 4); }
TEST(tokenizer) { CHECK(try_seeds(fuzz_tokenizer, "tokenizer", 150) >= 5); }
TEST(state) { CHECK(try_seeds(fuzz_state, "state", 16000) >= 5); }

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(config);
    RUN(tokens);
    RUN(array);
    RUN(safetensors);
    RUN(tokenizer);
    RUN(state);
    return TEST_END();
}
