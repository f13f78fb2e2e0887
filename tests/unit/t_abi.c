/* t_abi.c - tests a program that has a file compiled against a different amp.h.  Most calls must return an error.  Calls
 * whose structs never change their layout must still work.  tests/abi.sh tests this with real files, compilers and linkers. */
#include "../amp.h"
#include "test.h"
#include <stddef.h>

/* What the linker brings from a file that includes amp.h 0.1.7. */
static const amp_header stale AMPI_RETAIN AMPI_SECTION = {(uint64_t)107 << 32 | 12345, "stale.c"};

#define REFUSED(call) \
    do { CHECK_ERR(call, AMP_ERR_VERSION); \
         CHECK_MSG(strstr(amp_last_error(), "stale.c was compiled against amp.h 0.1.7, the implementation is " AMP_VERSION_TEXT) != NULL, "%s", amp_last_error()); } while (0)

TEST(open_names_the_file) {
    SKIP_ON_WINDOWS("list of the headers that a program's files were compiled with");
    amp_desc desc;
    amp_context *amp = (amp_context *)&desc;
    memset(&desc, 0, sizeof desc);
    REFUSED(amp_open(&amp, NULL));
    CHECK(amp == NULL);
    desc.threads = -1;                  /* nothing of the desc is looked at before */
    REFUSED(amp_open(&amp, &desc));
    CHECK(strstr(amp_last_error(), amp_result_hint(AMP_ERR_VERSION)) != NULL);
}

TEST(calls_before_open_look_too) {
    SKIP_ON_WINDOWS("list of the headers that a program's files were compiled with");
    amp_settings s, kept;
    amp_machine machine;
    amp_choice choice;
    amp_loader_desc loader;
    amp_scaler_desc scaler;
    char text[8] = "before";
    memset(&s, 0, sizeof s); memset(&machine, 0, sizeof machine); memset(&loader, 0, sizeof loader); memset(&scaler, 0, sizeof scaler);
    kept = s;
    REFUSED(amp_machine_probe(&machine));
    CHECK(machine.cpu.cores == 0);
    REFUSED(amp_choose(&machine, AMP_F32, 0, &choice));
    REFUSED(amp_settings_set(&s, "dtype", "bf16"));
    REFUSED(amp_settings_read_text(&s, NULL, "dtype = bf16\n", 13));
    REFUSED(amp_settings_read_file(&s, NULL, "/nowhere"));
    REFUSED(amp_settings_read_env(&s));
    REFUSED(amp_settings_check(&s));
    REFUSED(amp_settings_fill(&s, NULL, NULL, &scaler, NULL, NULL));
    REFUSED(amp_settings_fill_loader(&s, &loader));
    CHECK_EQ(amp_settings_text(&s, text, sizeof text), 0);
    CHECK(strstr(amp_last_error(), "AMP0105 amp_settings_text: ") != NULL);
    CHECK_EQ(amp_machine_text(&machine, text, sizeof text), 0);
    CHECK(strstr(amp_last_error(), "AMP0105 amp_machine_text: ") != NULL);
    CHECK(memcmp(&s, &kept, sizeof s) == 0 && text[0] == '\0');
}

/* The size of each struct is in it: one that changes by a byte, or two that change in the same direction, change the sum. */
TEST(every_size_counts) {
    enum { N = AMPI_PLACES };
#define SIZE_OF(name) (uint64_t)sizeof(amp_##name),
    const uint64_t size[] = {AMPI_STRUCTS(SIZE_OF)};
    uint64_t sum = 0, weight[N];
    CHECK_EQ(sizeof size / sizeof size[0], N);
    for (int i = 0; i < N; i++) {
        weight[i] = (uint64_t)(2 * i + 1);
        sum += size[i] * weight[i];
        for (int j = 0; j < i; j++) CHECK(weight[i] != weight[j]);
    }
    CHECK(sum < (uint64_t)1 << 31);     /* so nothing is lost by taking 32 bits of it, should all of them double */
    CHECK_EQ(AMP_ABI, (uint64_t)AMP_VERSION << 32 | sum);
}

/* On 64-bit machines; these numbers are for ever. */
TEST(layouts_for_ever) {
    static const struct { const char *field; size_t have, want; } layout[] = {
#define AT(type, field, want) {#type "." #field, offsetof(type, field), want}
#define SIZE(type, want) {"sizeof " #type, sizeof(type), want}
        SIZE(amp_header, 16), AT(amp_header, abi, 0), AT(amp_header, file, 8),
        SIZE(amp_tensor, 80), AT(amp_tensor, data, 0), AT(amp_tensor, dtype, 8), AT(amp_tensor, ndim, 12), AT(amp_tensor, shape, 16), AT(amp_tensor, stride, 48),
        SIZE(amp_convert_desc, 24), AT(amp_convert_desc, rounding, 0), AT(amp_convert_desc, saturate, 4), AT(amp_convert_desc, seed, 8), AT(amp_convert_desc, offset, 16),
        SIZE(amp_system, 128), AT(amp_system, user, 0), AT(amp_system, alloc, 8), AT(amp_system, free, 16), AT(amp_system, file_open, 24),
        AT(amp_system, file_read, 32), AT(amp_system, file_write, 40), AT(amp_system, file_size, 48), AT(amp_system, file_sync, 56),
        AT(amp_system, file_close, 64), AT(amp_system, file_rename, 72), AT(amp_system, file_remove, 80), AT(amp_system, file_list, 88),
        AT(amp_system, thread_start, 96), AT(amp_system, thread_join, 104), AT(amp_system, thread_detach, 112), AT(amp_system, clock_ns, 120),
    };
    if (sizeof(void *) != 8) SKIP("no 64-bit machine");
    for (size_t i = 0; i < sizeof layout / sizeof layout[0]; i++)
        CHECK_MSG(layout[i].have == layout[i].want, "%s is %zu, and was %zu", layout[i].field, layout[i].have, layout[i].want);
}

/* So the calls that take these work in any program. */
TEST(what_never_changes_works) {
    const amp_convert_desc saturate = {AMP_ROUND_DEFAULT, 1, 0, 0};
    const float x = 1e30f;
    uint16_t half = 0;
    amp_system system;
    amp_state *state;
    amp_tensor t = amp_tensor2(&x, AMP_F32, 1, 1);
    CHECK_OK(amp_convert(&half, AMP_F16, &x, AMP_F32, 1, &saturate, NULL));
    CHECK_EQ(half, 0x7bff);
    amp_system_default(&system);
    CHECK(system.clock_ns != NULL);
    CHECK_OK(amp_state_create(&state, &system));
    amp_state_destroy(state);
    CHECK_EQ(amp_tensor_count(&t), 1);
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(open_names_the_file);
    RUN(calls_before_open_look_too);
    RUN(every_size_counts);
    RUN(layouts_for_ever);
    RUN(what_never_changes_works);
    return TEST_END();
}
