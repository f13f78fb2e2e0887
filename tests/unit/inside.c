/* inside.c - the tests that use internal functions of amp.h, compiled together with one amp.h.  build/t_gemm and the others
 * are names of one program (inside_main.c).  It runs the tests of the file whose name it is called by.  Therefore a name at
 * file scope may be used in only one of these files.  Each file also compiles alone. */
#define _GNU_SOURCE
#define AMP_IMPLEMENTATION
#include "../amp.h"

#define main t_attention
#include "t_attention.c"
#undef main
#define main t_care
#include "t_care.c"
#undef main
#define main t_context
#include "t_context.c"
#undef main
#define main t_data
#include "t_data.c"
#undef main
#define main t_fp8
#include "t_fp8.c"
#undef main
#define main t_gemm
#include "t_gemm.c"
#undef main
#define main t_kernels
#include "t_kernels.c"
#undef main
#define main t_numbers
#include "t_numbers.c"
#undef main
#define main t_optimizer
#include "t_optimizer.c"
#undef main
#define main t_ranks
#define ROOM ranks_ROOM
#define IN ranks_IN
#define OUT ranks_OUT
#define ROWS ranks_ROWS
#define device ranks_device
#define lengths ranks_lengths
#define train ranks_train
#define rounded ranks_rounded
#include "t_ranks.c"
#undef ROOM
#undef IN
#undef OUT
#undef ROWS
#undef device
#undef lengths
#undef train
#undef rounded
#undef main
#define main t_scaler
#include "t_scaler.c"
#undef main
#define main t_settings
#include "t_settings.c"
#undef main
#define main t_state
#include "t_state.c"
#undef main
#define main t_threads
#include "t_threads.c"
#undef main
#define main t_verify
#include "t_verify.c"
#undef main

static const struct { const char *name; int (*run)(int, char **); } suites[] = {
    {"t_attention", t_attention}, {"t_care", t_care}, {"t_context", t_context}, {"t_data", t_data}, {"t_fp8", t_fp8},
    {"t_gemm", t_gemm}, {"t_kernels", t_kernels}, {"t_numbers", t_numbers}, {"t_optimizer", t_optimizer},
    {"t_ranks", t_ranks}, {"t_scaler", t_scaler}, {"t_settings", t_settings}, {"t_state", t_state}, {"t_threads", t_threads},
    {"t_verify", t_verify}
};

/* The tests of the file that this program is called by, which may begin with fast_. */
int inside(int argc, char **argv);
int inside(int argc, char **argv) {
    const char *called = argv[0], *end;
    size_t i;
    while (strpbrk(called, "/\\") != NULL) called = strpbrk(called, "/\\") + 1;
    if (!strncmp(called, "fast_", 5)) called += 5;
    end = called + strcspn(called, ".");                /* of t_gemm.exe */
    for (i = 0; i < sizeof suites / sizeof suites[0]; i++)
        if (strlen(suites[i].name) == (size_t)(end - called) && !strncmp(called, suites[i].name, (size_t)(end - called)))
            return suites[i].run(argc, argv);
    fprintf(stderr, "inside.c has no tests of the name %s\n", called);
    return 2;
}
