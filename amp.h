/* amp.h - v0.1.0 - mixed-precision training for C, C++ and CUDA programs - MIT licence, text at the end
   SPDX-License-Identifier: MIT

   In one C file of a program:

       #define AMP_IMPLEMENTATION
       #include "amp.h"

   In every other file only the #include.  The shortest complete use, a linear model trained in bf16:

       #define AMP_IMPLEMENTATION
       #include "amp.h"
       #include <stdio.h>
       static float w[10 * 4], dw[10 * 4], x[8 * 4], y[8 * 10], loss;
       static int32_t labels[8] = {0, 1, 2, 3, 4, 5, 6, 7};
       int main(void) {
           amp_context *amp; amp_optimizer *opt; amp_param p; amp_optimizer_desc od; int i;
           for (i = 0; i < 32; i++) x[i] = (float)(i % 7) - 3;
           if (amp_open(&amp, NULL) != AMP_OK) return fprintf(stderr, "%s\n", amp_last_error()), 1;
           memset(&p, 0, sizeof p); memset(&od, 0, sizeof od);
           p.name = "w"; p.weight = amp_tensor2(w, AMP_F32, 10, 4); p.grad = amp_tensor2(dw, AMP_F32, 10, 4);
           od.params = &p; od.n_params = 1; od.lr = 0.1f;
           if (amp_param_register(amp, &p, 1) || amp_optimizer_create(amp, &opt, &od)) return puts(amp_last_error()), 1;
           for (i = 0; i < 100; i++) {
               amp_linear_op lin; amp_cross_entropy_op ce; amp_autocast_desc region;
               memset(&lin, 0, sizeof lin); memset(&ce, 0, sizeof ce); memset(&region, 0, sizeof region);
               lin.x = amp_tensor2(x, AMP_F32, 8, 4); lin.weight = &p; lin.y = amp_tensor2(y, AMP_F32, 8, 10);
               ce.logits = ce.dlogits = lin.y; ce.labels = labels; ce.loss = &loss;
               region.dtype = AMP_BF16;
               amp_autocast_begin(amp, &region); amp_linear(amp, &lin); amp_cross_entropy(amp, &ce); amp_autocast_end(amp);
               lin.dy = ce.dlogits; amp_linear_backward(amp, &lin);
               amp_step(opt, NULL);
           }
           printf("loss %.3f\n", loss);
           amp_optimizer_destroy(opt); amp_close(amp);
           return 0;
       }

       gcc -O2 -fopenmp program.c -o program -lm -lpthread

   CONTENTS (search for the tag; the implementation has the same tags in the same order)

       >>base        results, last error, log, memory, files, threads, clock
       >>numbers     formats, conversions, rounding, finite checks, random numbers
       >>machine     what this machine can do, and which precision to use on it
       >>tensors     views, ranges, parameters, masks
       >>state       the blob that a checkpoint is saved in
       >>backends    the context; kernels and the table a device is driven through
       >>masks       masks written out, and kept
       >>autocast    regions, policies, overrides, the cast cache
       >>operators   linear, matmul, gemm, attention, norms, softmax, activations, losses, embedding, dropout
       >>gradients   sets, the loss scaler, optimizers, the step
       >>data        the prefetching loader: token files, .npy arrays, callbacks
       >>watch       settings, status, records of steps and epochs, how values fit a format
       >>care        verify, gradient check, advice, tuning, recovery

   AT A GLANCE

       open and close         amp_cpu amp_open amp_close amp_query amp_query_machine amp_query_choice amp_set_dtype
                              amp_set_enabled
       memory                 amp_alloc amp_free amp_copy amp_fill amp_sync amp_memory amp_memory_reset_peak
                              amp_cleanup amp_event_record amp_event_wait
       errors                 amp_last_error amp_result_text amp_result_hint amp_version
       files                  amp_file_write_atomic amp_file_read_all amp_file_free amp_system_default
       numbers                amp_f16_from_f32 and its kin, amp_convert amp_count_nonfinite amp_random_u32 amp_dtype_parse
       tensors                amp_tensor1 to amp_tensor4, amp_tensor_count
       precision              amp_machine_probe amp_machine_text amp_choose
       parameters             amp_param_register amp_param_forget amp_param_touch amp_param_accumulate amp_param_dtype
       regions                amp_autocast_begin amp_autocast_end amp_autocast_active
       recomputing            amp_recompute_begin amp_recompute_end
       decisions              amp_autocast_decide amp_autocast_compute amp_autocast_result amp_autocast_cast
       policies               amp_operator_register amp_operator_override amp_layer_override
       cast cache             amp_cast_cache_info amp_cast_cache_clear
       mask cache             amp_mask_get amp_mask_put amp_mask_cache_info amp_mask_cache_drop amp_mask_cache_clear
       operators              amp_linear amp_matmul amp_gemm amp_attention amp_layernorm amp_rmsnorm amp_softmax
                              amp_activation amp_swiglu amp_cross_entropy amp_mse amp_embedding amp_dropout
                              (each but gemm and the losses with _backward), amp_add amp_cast
       loss scaling           amp_scaler_create amp_scaler_seed amp_scaler_check amp_scaler_update amp_scaler_get
                              amp_scaler_set_scale amp_scaler_rescale
       gradients              amp_set_create amp_set_found amp_set_device amp_set_apply
       optimizers             amp_optimizer_create amp_optimizer_step amp_step amp_outcome_next amp_optimizer_bytes
                              amp_optimizer_set_lr amp_optimizer_set_clip amp_optimizer_set_accumulation
       graphs                 amp_graph_begin amp_graph_end amp_graph_launch
       data                   amp_loader_create amp_loader_next amp_loader_seek amp_loader_stop amp_loader_query
                              amp_loader_info_get
       checkpoints            amp_state_create amp_state_put amp_state_get amp_state_save amp_state_load, and
                              amp_scaler_save amp_optimizer_save amp_loader_save amp_random_save with their _load;
                              every created object has _destroy, and _query for its effective settings
       settings               amp_settings_set amp_settings_read_file amp_settings_read_env amp_settings_fill
                              amp_settings_apply amp_settings_text
       watching               amp_status_get amp_monitor_create amp_monitor_phase amp_monitor_step amp_monitor_next
                              amp_monitor_epoch amp_numerics_create amp_numerics_step amp_range_push
       care                   amp_verify amp_verify_placement amp_gradcheck amp_advise amp_apply amp_tune
                              amp_recovery_create amp_recovery_step amp_recovery_memory

   BUILD

       AMP_IMPLEMENTATION   in one file      brings the implementation; there, include amp.h before system headers
                                             when compiling with -std=c99 (it asks them for POSIX)
       AMP_STATIC           in that file     everything private to it; thread state and caches are then per file
       AMP_API              in all files     may be predefined, for example with a visibility attribute
       -fopenmp             optional         kernels then use several threads; results are the same bits without it
       -lm -lpthread        when linking     no -march is needed: instruction sets are chosen at run time

   AMP.H DOES NOT

       differentiate automatically: you call backward functions in reverse order;
       own your tensors: views point to memory that you allocate, with amp_alloc or yourself;
       have convolutions: bring yours, and take amp_gemm, the scaler and the optimizer;
       compute in fp8 (conversions are there), or drop out inside attention;
       abort, exit or print, except for warnings and errors to stderr, which a logger replaces.

   STEP BY STEP

       1 amp_open chooses backend and precision; amp_query_choice tells it, with the reason.
       2 Describe parameters as amp_param (name, weight, grad) and call amp_param_register.
       3 amp_scaler_create for fp16, amp_optimizer_create for all; amp_loader_create if you read tokens.
       4 Each step: amp_loader_next; amp_autocast_begin; forward operators, loss with dlogits and
         .seed = amp_scaler_seed(scaler); amp_autocast_end; backward operators in reverse; amp_step.
         Gradients need no zeroing: the first backward after a step overwrites them, later ones add.
       5 amp_outcome_next tells what became of each step, two steps later: applied or skipped, norm, scale.
       6 To save: amp_state_create, *_save of each object, amp_state_save; your weights in a format of yours.
       7 To watch and to survive: amp_monitor_create (records as JSON lines, in place of amp_outcome_next),
         amp_status_text, amp_numerics_create; amp_verify once before a long run; amp_recovery_create.

   NUMBERS

       format   bits  exponent  mantissa  largest     smallest normal  smallest   unit roundoff
       fp32     32    8         23        3.4e38      1.2e-38          1.4e-45    6.0e-8
       tf32     19    8         10        3.4e38      1.2e-38                     4.9e-4
       fp16     16    5         10        65504       6.1e-5           6.0e-8     4.9e-4
       bf16     16    8         7         3.4e38      1.2e-38          9.2e-41    3.9e-3
       E4M3     8     4         3         448         1.6e-2           2.0e-3     6.3e-2
       E5M2     8     5         2         57344       6.1e-5           1.5e-5     1.3e-1

       Rounding is to nearest, ties to even (tf32: away from zero).  Beyond the largest value a conversion gives
       infinity (E4M3, which has none: NaN) unless it is asked to saturate.  NaN stays NaN.

   GLOSSARY

       loss scale      factor on the loss's gradient, so that small fp16 gradients do not become 0
       found_inf       some gradient was infinite or NaN: the step is skipped and the scale shrinks
       growth interval clean steps after which the scale grows
       master weights  the fp32 weights an optimizer updates when the model's own are 16-bit
       remainder       the 16 bits that make a bf16 weight an fp32 master
       region          the code between amp_autocast_begin and amp_autocast_end, per thread
       island          a region with .disable, inside another
       epilogue        what is done to a matrix product while it is still in registers: bias, activation
       recomputing     a block's forward once more before its backward, instead of keeping its activations
       packed weight   a copy of a matrix in the order and dtype in which the kernel reads it

   ERRORS     Every fallible call returns an amp_result, and on failure leaves its outputs as they were;
              amp_last_error says id, function, field, value, what is allowed and how to mend it.  Overflow
              and skipped steps are no errors but data: see amp_outcome.
   MEMORY     All of it comes from amp_system.alloc.  Operators take scratch from there too, and give it back.
   THREADS    A context may be used from several threads at once by operators, amp_gemm, regions and memory
              calls.  Setting up (registering, overriding), and each scaler, optimizer, set and loader, is one
              thread's business at a time, but for amp_loader_stop and amp_loader_info_get.  Regions and the
              last-error text belong to their thread.
   SAME BITS  Results do not depend on the number of threads or workers, and repeat from run to run and after a
              restart from a saved state.  CPU paths, in the order of amp_cpu_path, differ by rounding where they
              do not agree:

              what                                     runs  threads  restarts  CPU paths that agree
              casts, random numbers, dropout, masks    yes   yes      yes       all
              embedding, add, scaler, order of data    yes   yes      yes       all
              activations, SwiGLU, optimizers          yes   yes      yes       AVX2 and up
              norms, softmax, attention, losses        yes   yes      yes       AVX-512 and up
              gradient norms, products but in bf16     yes   yes      yes       AVX-512 and up
              products in bf16                         yes   yes      yes       none

              Conversions, finite checks and the scaler stay right under -Ofast.
   STABLE     Result numbers and the state format are for ever.  Before 1.0 the rest may change with the minor
              version; the change log stands at the end. */

#ifndef AMP_H_INCLUDED
#define AMP_H_INCLUDED

/* The implementation needs POSIX; under -std=c99 the system headers show it only when asked before the first
   of them is included, so the implementing file includes amp.h first. */
#if defined(AMP_IMPLEMENTATION) && defined(__STRICT_ANSI__) && !defined(_POSIX_C_SOURCE) && !defined(_GNU_SOURCE)
#  define _POSIX_C_SOURCE 200809L
#endif

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

#define AMP_VERSION_MAJOR 0
#define AMP_VERSION_MINOR 1
#define AMP_VERSION_PATCH 0
#define AMP_VERSION (AMP_VERSION_MAJOR * 10000 + AMP_VERSION_MINOR * 100 + AMP_VERSION_PATCH)
#define AMP_VERSION_TEXT "0.1.0"

/* AMP_STATIC: every function private to this file.  AMP_API may be predefined, e.g. for visibility. */
#if defined(AMP_STATIC)
#  define AMP_API static __attribute__((unused))
#elif !defined(AMP_API)
#  define AMP_API extern
#endif
#define AMPI_INLINE static inline __attribute__((unused))

/* Rules that must give the same bits on the host and in device code are written once under AMPI_HD. */
#if defined(__CUDACC__)
#  define AMPI_HD static inline __host__ __device__ __attribute__((unused))
#else
#  define AMPI_HD AMPI_INLINE
#endif

/* What a caller was compiled against: header version and size of the struct it passes. */
#define AMP_ABI(type) (((uint64_t)AMP_VERSION << 32) | (uint64_t)sizeof(type))
/* ==== 1 >>base ======================================================================================
   Result codes, the last-error text, the log, and the layer through which all memory, files, threads
   and time go.  Every fallible function returns an amp_result; 0 is success.                          */

/* X(name, number, text, hint).  Numbers are for ever: they are never reused or changed.
   1xx arguments, 2xx numerics, 3xx memory and threads, 4xx files and data, 5xx devices and hooks. */
#define AMP_RESULTS(X) \
    X(AMP_OK,                0, "success",                               "") \
    X(AMP_ERR_NULL,        101, "a required pointer is NULL",            "pass the object or buffer the text names") \
    X(AMP_ERR_RANGE,       102, "a value is outside its legal range",    "use a value from the range in the text; 0 is the default") \
    X(AMP_ERR_SHAPE,       103, "shapes do not fit together",            "compare the shapes in the text with the operator's comment") \
    X(AMP_ERR_DTYPE,       104, "a dtype is not accepted here",          "use one of the dtypes in the text") \
    X(AMP_ERR_VERSION,     105, "header and implementation differ",      "rebuild every file against the same amp.h") \
    X(AMP_ERR_STATE,       106, "called in the wrong order",             "see the order of calls in the manual") \
    X(AMP_ERR_NAME,        107, "unknown or duplicate name",             "use one of the names in the text") \
    X(AMP_ERR_UNSUPPORTED, 108, "not supported here",                    "choose what the text offers, or allow the fallback") \
    X(AMP_ERR_SIZE,        109, "a size does not fit into memory",       "use smaller dimensions") \
    X(AMP_ERR_CONFLICT,    110, "settings contradict each other",        "drop one of the two settings in the text") \
    X(AMP_ERR_LABEL,       201, "a label or index is out of range",      "labels must be 0..classes-1 or the ignore index") \
    X(AMP_ERR_SCALE,       202, "the loss scale is not usable",          "the scale and its inverse must be finite and normal") \
    X(AMP_ERR_GRAD_16BIT,  203, "fp16 gradients are refused",            "only the torch preset does this: use another preset, or fp32 or bf16 gradients") \
    X(AMP_ERR_UNSCALED,    204, "already checked since the last update", "call amp_scaler_update before the next amp_scaler_check") \
    X(AMP_ERR_STEPPED,     205, "already stepped since the last update", "call amp_scaler_update after each step") \
    X(AMP_ERR_NO_CHECK,    206, "no inf check was recorded",             "call amp_scaler_check for at least one set before the update") \
    X(AMP_ERR_GRAPH,       207, "a captured graph is out of date",       "capture the step again") \
    X(AMP_ERR_MEMORY,      301, "out of memory",                         "use a smaller batch, or give the context a larger allocator") \
    X(AMP_ERR_THREAD,      302, "a thread could not be started",         "raise the thread limit or use fewer workers") \
    X(AMP_ERR_OPEN,        401, "a file could not be opened",            "check path and permissions") \
    X(AMP_ERR_READ,        402, "a file could not be read",              "check the disk; the text has the offset") \
    X(AMP_ERR_WRITE,       403, "a file could not be written",           "check free space and permissions") \
    X(AMP_ERR_FORMAT,      404, "not a file of the expected format",     "pass a file of the format the text names") \
    X(AMP_ERR_TRUNCATED,   405, "a file or blob ends too early",         "copy or write it again") \
    X(AMP_ERR_CHECKSUM,    406, "a checksum does not match",             "the file is damaged: use the previous one") \
    X(AMP_ERR_NEWER,       407, "written by a newer version",            "use a newer amp.h") \
    X(AMP_ERR_MISMATCH,    408, "saved state is of another object",      "load it into an object with the same settings") \
    X(AMP_ERR_END,         409, "no more data",                          "the loader's last epoch is over") \
    X(AMP_ERR_TIMEOUT,     410, "a worker did not deliver in time",      "the text names worker, file and offset; raise timeout_ms") \
    X(AMP_ERR_SOURCE,      411, "the data callback failed",              "see the callback's own message") \
    X(AMP_ERR_DEVICE,      501, "a device call failed",                  "the text has the device's own error name") \
    X(AMP_ERR_BACKEND,     502, "the backend cannot be used",            "build the backend against this amp.h") \
    X(AMP_ERR_REDUCE,      503, "the reduction hook failed",             "the hook must return 0")

typedef enum amp_result {
#define AMPI_RESULT_ENUM(name, number, text, hint) name = number,
    AMP_RESULTS(AMPI_RESULT_ENUM)
#undef AMPI_RESULT_ENUM
    AMP_RESULT_FORCE_I32 = 0x7fffffff
} amp_result;

/* The constant text, and the constant advice, of a result; "unknown result" and "" for any other number. */
AMP_API const char *amp_result_text(amp_result result);
AMP_API const char *amp_result_hint(amp_result result);
/* Why the last failing call of this thread failed: id, function, field, value, what is allowed, how to
   mend it, in one line.  "" before any failure.  Stays valid until the next failure of this thread. */
AMP_API const char *amp_last_error(void);
/* AMP_VERSION of the implementation that is linked in. */
AMP_API int amp_version(void);

typedef enum amp_log_level {
    AMP_LOG_DEFAULT = 0,            /* AMP_LOG_WARNING */
    AMP_LOG_OFF = 1, AMP_LOG_ERROR = 2, AMP_LOG_WARNING = 3, AMP_LOG_INFO = 4, AMP_LOG_DEBUG = 5,
    AMP_LOG_FORCE_I32 = 0x7fffffff
} amp_log_level;

/* Called from any thread.  id: the amp_result for errors, a constant number per message otherwise. */
typedef struct amp_logger {
    void (*write)(void *user, amp_log_level level, int id, const char *text);   /* NULL: stderr, each warning and error
                                                                                   at most 10 times */
    void *user;
    amp_log_level level;            /* most detailed level that is written; default AMP_LOG_WARNING */
} amp_logger;

/* Everything the library asks of the machine goes through this table.  A NULL member means the POSIX
   default, so a host replaces only what it wants.  File calls return 0 (or a byte count) or -errno.
   alloc and free come both or neither: size 0 is never asked for, align is a power of two up to 4096.
   thread_start, thread_join and thread_detach come all or none: each thread that was started is joined or, when a
   call of this table never returns in it, detached. */
typedef struct amp_system {
    void *user;
    void *(*alloc)(void *user, size_t size, size_t align);
    void (*free)(void *user, void *ptr, size_t size);
    int (*file_open)(void *user, const char *path, int for_writing, intptr_t *file);    /* 0: to read; 1: a new or
                                                       emptied file to write; 2: what is there, or a new file, to read and write */
    int64_t (*file_read)(void *user, intptr_t file, void *buffer, size_t bytes, int64_t offset);
    int64_t (*file_write)(void *user, intptr_t file, const void *buffer, size_t bytes, int64_t offset);
    int64_t (*file_size)(void *user, intptr_t file);
    int (*file_sync)(void *user, intptr_t file);
    int (*file_close)(void *user, intptr_t file);
    int (*file_rename)(void *user, const char *from, const char *to);
    int (*file_remove)(void *user, const char *path);
    /* Calls each(arg, name) for the names in a folder, in any order, until that returns other than 0; returns what
       it returned, or -errno. */
    int (*file_list)(void *user, const char *folder, int (*each)(void *arg, const char *name), void *arg);
    int (*thread_start)(void *user, void **thread, void (*run)(void *arg), void *arg);
    int (*thread_join)(void *user, void *thread);
    int (*thread_detach)(void *user, void *thread);
    int64_t (*clock_ns)(void *user);        /* monotonic */
} amp_system;

/* *out = the POSIX table, every member set. */
AMP_API void amp_system_default(amp_system *out);
/* Writes a file so that after a crash either the old or the new content is there, whole: temporary file
   beside it, write, fsync, rename.  A symbolic link is replaced; a device or pipe is
   refused.  system may be NULL.  Errors: 401, 403; the old file is then untouched.  What a process that is killed in it
   leaves is PATH.tmpPID. */
AMP_API amp_result amp_file_write_atomic(const amp_system *system, const char *path, const void *data, size_t bytes);
/* Reads a whole file into *data (from system->alloc, one extra 0 byte behind it; amp_file_free frees it).
   Errors: 301, 401, 402. */
AMP_API amp_result amp_file_read_all(const amp_system *system, const char *path, void **data, size_t *bytes);
AMP_API void amp_file_free(const amp_system *system, void *data, size_t bytes);

/* ==== 2 >>numbers ===================================================================================
   Number formats and their conversions.  All of this is integer arithmetic on bit patterns: the same
   bits on every machine, under every compiler flag, with flush-to-zero set or not.                    */

typedef enum amp_dtype {
    AMP_DTYPE_DEFAULT = 0,
    AMP_F32 = 1, AMP_F64 = 2, AMP_F16 = 3, AMP_BF16 = 4,
    AMP_TF32 = 5,                   /* a compute dtype only: fp32 storage with a 10-bit mantissa */
    AMP_E4M3 = 6, AMP_E5M2 = 7,     /* the OCP 8-bit formats; E4M3 has no infinity */
    AMP_U8 = 8, AMP_U16 = 9, AMP_I32 = 10, AMP_I64 = 11,
    AMP_DTYPE_FORCE_I32 = 0x7fffffff
} amp_dtype;

/* Bytes of one element (TF32: 4); 0 for anything that is no dtype. */
AMP_API size_t amp_dtype_size(amp_dtype dtype);
/* "fp32", "fp64", "fp16", "bf16", "tf32", "fp8_e4m3", "fp8_e5m2", "u8", "u16", "i32", "i64"; "default" for 0,
   "?" otherwise. */
AMP_API const char *amp_dtype_name(amp_dtype dtype);
/* The inverse, also "float32", "float16", "half", "bfloat16", "float", "double", and "auto" for 0.  Errors: 107. */
AMP_API amp_result amp_dtype_parse(const char *name, amp_dtype *out);

/* ---- Scalar conversions.  16-bit and 8-bit numbers are uint16_t and uint8_t bit patterns.

   Narrowing rounds once, to nearest, ties to even (IEEE 754-2019, 4.3.1); subnormals are kept.  Overflow: with
   saturate 0, fp16, bf16 and E5M2 become infinite, as in PyTorch, and E4M3, which has no infinity, becomes NaN
   (beyond 464), as in ml_dtypes and in PyTorch before 2.12 (which saturates E4M3 alone); with saturate 1 the result
   is the largest finite value, for an infinite input too.  NaN stays NaN, with its sign and its upper payload bits,
   and becomes quiet, as in the F16C instructions. */

enum { AMPI_EVEN = 0, AMPI_AWAY = 1, AMPI_STOCHASTIC = 2 };     /* how ampi_round_bits rounds */

/* The bits of a number.  The empty asm hides their origin from compilers that, under -ffast-math, would
   conclude that a computed number is finite. */
AMPI_HD uint32_t ampi_bits_f32(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    __asm__("" : "+r"(bits));
    return bits;
}
AMPI_HD uint64_t ampi_bits_f64(double x) {
    uint64_t bits;
    uint32_t high;
    memcpy(&bits, &x, sizeof bits);
    high = (uint32_t)(bits >> 32);
    __asm__("" : "+r"(high));
    return (uint64_t)high << 32 | (uint32_t)bits;
}
AMPI_HD float ampi_f32_of_bits(uint32_t bits) { float x; memcpy(&x, &bits, sizeof x); return x; }
AMPI_HD double ampi_f64_of_bits(uint64_t bits) { double x; memcpy(&x, &bits, sizeof x); return x; }

/* Rounds a finite magnitude, given as a pattern with sm mantissa bits and exponent bias sb, to dm mantissa bits
   and bias db.  Returns the pattern with an unbounded exponent, so a result above the format's largest finite
   pattern is an overflow.  Stochastic: up if fraction + random / 2^32 >= 1, the fraction cut to 32 bits. */
AMPI_HD uint64_t ampi_round_bits(uint64_t bits, int sm, int sb, int dm, int db, int mode, uint32_t random) {
    uint64_t m = bits & (((uint64_t)1 << sm) - 1), q, rest, middle;
    int e = (int)(bits >> sm), shift = sm - dm;
    if (e > 0) m |= (uint64_t)1 << sm;
    else e = 1;
    e += db - sb;
    if (e < 1) { shift += 1 - e; e = 1; }
    if (shift > 62) { m = shift > 120 ? 0 : m >> (shift - 62); shift = 62; }
    if (shift == 0) return ((uint64_t)(e - 1) << dm) + m;
    q = m >> shift;
    rest = m & (((uint64_t)1 << shift) - 1);
    middle = (uint64_t)1 << (shift - 1);
    if (mode == AMPI_STOCHASTIC) q += ((rest << (64 - shift) >> 32) + random) >> 32;
    else if (mode == AMPI_AWAY) q += rest >= middle;
    else q += rest > middle || (rest == middle && (q & 1) != 0);
    return ((uint64_t)(e - 1) << dm) + q;
}

/* The magnitude pattern, in a format with dm mantissa bits, bias db and this largest finite pattern, of an fp32
   (wide 0) or fp64 (wide 1) pattern.  largest + 1 is infinity, in E4M3 NaN. */
AMPI_HD uint32_t ampi_narrow(uint64_t x, int wide, int dm, int db, uint32_t largest, int saturate, int mode,
                             uint32_t random) {
    int sm = wide ? 52 : 23, sb = wide ? 1023 : 127;
    uint64_t magnitude = x & (wide ? ~(uint64_t)0 >> 1 : (uint64_t)0x7fffffff);
    uint64_t infinity = (uint64_t)(2 * sb + 1) << sm, r;
    if (magnitude > infinity)
        return (largest + 1) | (uint32_t)1 << (dm - 1) | (uint32_t)((magnitude - infinity) >> (sm - dm));
    if (magnitude == infinity) return saturate ? largest : largest + 1;
    r = ampi_round_bits(magnitude, sm, sb, dm, db, mode, random);
    return r <= largest ? (uint32_t)r : saturate ? largest : largest + 1;
}

AMPI_HD uint32_t ampi_sign(uint64_t x, int wide) { return (uint32_t)(x >> (wide ? 63 : 31)); }
AMPI_HD uint16_t ampi_to_f16(uint64_t x, int wide, int saturate, int mode, uint32_t random) {
    return (uint16_t)(ampi_sign(x, wide) << 15 | ampi_narrow(x, wide, 10, 15, 0x7bff, saturate, mode, random));
}
AMPI_HD uint16_t ampi_to_bf16(uint64_t x, int wide, int saturate, int mode, uint32_t random) {
    return (uint16_t)(ampi_sign(x, wide) << 15 | ampi_narrow(x, wide, 7, 127, 0x7f7f, saturate, mode, random));
}
AMPI_HD uint8_t ampi_to_e4m3(uint64_t x, int wide, int saturate, int mode, uint32_t random) {
    return (uint8_t)(ampi_sign(x, wide) << 7 | ampi_narrow(x, wide, 3, 7, 0x7e, saturate, mode, random));
}
AMPI_HD uint8_t ampi_to_e5m2(uint64_t x, int wide, int saturate, int mode, uint32_t random) {
    return (uint8_t)(ampi_sign(x, wide) << 7 | ampi_narrow(x, wide, 2, 15, 0x7b, saturate, mode, random));
}
AMPI_HD uint32_t ampi_to_tf32(uint64_t x, int wide, int saturate) {
    return ampi_sign(x, wide) << 31 | ampi_narrow(x, wide, 10, 127, 0x3fbff, saturate, AMPI_AWAY, 0) << 13;
}
AMPI_HD uint32_t ampi_to_f32(uint64_t x, int saturate) {
    return ampi_sign(x, 1) << 31 | ampi_narrow(x, 1, 23, 127, 0x7f7fffff, saturate, AMPI_EVEN, 0);
}

/* fp32 to 16 and 8 bits, and to TF32 (10 mantissa bits in fp32 storage, ties away from zero as cvt.rna.tf32.f32). */
AMPI_HD uint16_t amp_f16_from_f32(float x, int saturate) {
    return ampi_to_f16(ampi_bits_f32(x), 0, saturate, AMPI_EVEN, 0);
}
AMPI_HD uint16_t amp_bf16_from_f32(float x, int saturate) {
    uint32_t bits = ampi_bits_f32(x), magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40);
    if (saturate && magnitude > 0x7f7f0000u) return (uint16_t)((bits >> 16 & 0x8000u) | 0x7f7f);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
AMPI_HD uint8_t amp_e4m3_from_f32(float x, int saturate) {
    return ampi_to_e4m3(ampi_bits_f32(x), 0, saturate, AMPI_EVEN, 0);
}
AMPI_HD uint8_t amp_e5m2_from_f32(float x, int saturate) {
    return ampi_to_e5m2(ampi_bits_f32(x), 0, saturate, AMPI_EVEN, 0);
}
AMPI_HD float amp_tf32_from_f32(float x, int saturate) {
    return ampi_f32_of_bits(ampi_to_tf32(ampi_bits_f32(x), 0, saturate));
}

/* fp64 to 16 and 8 bits with one rounding: going through fp32 would round twice. */
AMPI_HD uint16_t amp_f16_from_f64(double x, int saturate) {
    return ampi_to_f16(ampi_bits_f64(x), 1, saturate, AMPI_EVEN, 0);
}
AMPI_HD uint16_t amp_bf16_from_f64(double x, int saturate) {
    return ampi_to_bf16(ampi_bits_f64(x), 1, saturate, AMPI_EVEN, 0);
}
AMPI_HD uint8_t amp_e4m3_from_f64(double x, int saturate) {
    return ampi_to_e4m3(ampi_bits_f64(x), 1, saturate, AMPI_EVEN, 0);
}
AMPI_HD uint8_t amp_e5m2_from_f64(double x, int saturate) {
    return ampi_to_e5m2(ampi_bits_f64(x), 1, saturate, AMPI_EVEN, 0);
}

/* Stochastic rounding (Gupta et al. 2015): of the two neighbours, the one away from zero with probability equal to
   the discarded fraction, so that the mean over uniform `random` is x.  Finite x beyond the largest finite value
   overflows as above; infinity and NaN do not depend on random. */
AMPI_HD uint16_t amp_f16_stochastic(float x, uint32_t random, int saturate) {
    return ampi_to_f16(ampi_bits_f32(x), 0, saturate, AMPI_STOCHASTIC, random);
}
AMPI_HD uint16_t amp_bf16_stochastic(float x, uint32_t random, int saturate) {
    uint32_t bits = ampi_bits_f32(x), magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40);
    if (saturate && magnitude > 0x7f7f0000u) return (uint16_t)((bits >> 16 & 0x8000u) | 0x7f7f);
    return (uint16_t)((bits + (random >> 16)) >> 16);
}
/* A number as a bf16 number and the 16 bits it lacks, and back: every fp32 number but a signalling NaN, which becomes
   quiet, comes back bit for bit.  The bf16 number is the nearest; ties go away from zero, because with ties to even two
   numbers would have the same two halves. */
AMPI_HD uint16_t amp_bf16_split(float x, uint16_t *rest) {
    uint32_t bits = ampi_bits_f32(x);
    *rest = (uint16_t)bits;
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x8000u) >> 16);
}
AMPI_HD float amp_f32_join(uint16_t bf16, uint16_t rest) {
    uint32_t rounded_up = (bf16 & 0x7fffu) - 1u < 0x7f80u ? (uint32_t)rest >> 15 : 0;      /* not in 0 and NaN */
    return ampi_f32_of_bits((bf16 - rounded_up) << 16 | rest);
}
AMPI_HD uint8_t amp_e4m3_stochastic(float x, uint32_t random, int saturate) {
    return ampi_to_e4m3(ampi_bits_f32(x), 0, saturate, AMPI_STOCHASTIC, random);
}
AMPI_HD uint8_t amp_e5m2_stochastic(float x, uint32_t random, int saturate) {
    return ampi_to_e5m2(ampi_bits_f32(x), 0, saturate, AMPI_STOCHASTIC, random);
}

/* The fp32 pattern of a finite magnitude with m mantissa bits and exponent bias b. */
AMPI_HD uint32_t ampi_widen(uint32_t magnitude, int m, int b) {
    uint32_t e = magnitude >> m, fraction = magnitude & ((1u << m) - 1);
    if (magnitude == 0) return 0;
    if (e == 0) for (e = 1; (fraction >> m) == 0; e--) fraction <<= 1;
    return ((e + (uint32_t)(127 - b)) << 23) + ((fraction & ((1u << m) - 1)) << (23 - m));
}
AMPI_HD uint32_t ampi_bits_of_f16(uint16_t x) {
    uint32_t sign = (uint32_t)(x & 0x8000) << 16, magnitude = x & 0x7fff;
    if (magnitude > 0x7c00) return sign | 0x7fc00000u | magnitude << 13;
    return sign | (magnitude == 0x7c00 ? 0x7f800000u : ampi_widen(magnitude, 10, 15));
}
AMPI_HD uint32_t ampi_bits_of_e4m3(uint8_t x) {
    uint32_t sign = (uint32_t)(x & 0x80) << 24, magnitude = x & 0x7f;
    return sign | (magnitude == 0x7f ? 0x7fc00000u : ampi_widen(magnitude, 3, 7));
}
AMPI_HD uint64_t ampi_f64_bits_of_f32_bits(uint32_t x) {
    uint64_t sign = (uint64_t)(x & 0x80000000u) << 32, fraction = x & 0x7fffff, e = x >> 23 & 255;
    if (e == 255) return sign | (uint64_t)0x7ff << 52 | (fraction ? (uint64_t)1 << 51 | fraction << 29 : 0);
    if (e == 0 && fraction == 0) return sign;
    if (e == 0) for (e = 1; (fraction >> 23) == 0; e--) fraction <<= 1;
    return sign | (e + 896) << 52 | (fraction & 0x7fffff) << 29;
}

/* Widening to fp32 is exact.  A signalling fp16 NaN becomes quiet; bf16 keeps every bit. */
AMPI_HD float amp_f32_from_f16(uint16_t x)  { return ampi_f32_of_bits(ampi_bits_of_f16(x)); }
AMPI_HD float amp_f32_from_bf16(uint16_t x) { return ampi_f32_of_bits((uint32_t)x << 16); }
AMPI_HD float amp_f32_from_e4m3(uint8_t x)  { return ampi_f32_of_bits(ampi_bits_of_e4m3(x)); }
AMPI_HD float amp_f32_from_e5m2(uint8_t x)  { return ampi_f32_of_bits(ampi_bits_of_f16((uint16_t)(x << 8))); }

/* 1 if neither infinite nor NaN.  They test the exponent's bits, where isfinite() is constant under -Ofast. */
AMPI_HD int amp_is_finite_f32(const float *x)  { return (ampi_bits_f32(*x) & 0x7f800000u) != 0x7f800000u; }
AMPI_HD int amp_is_finite_f64(const double *x) { return (ampi_bits_f64(*x) >> 52 & 0x7ff) != 0x7ff; }
AMPI_HD int amp_is_finite_f16(uint16_t x)      { return (x & 0x7c00) != 0x7c00; }
AMPI_HD int amp_is_finite_bf16(uint16_t x)     { return (x & 0x7f80) != 0x7f80; }

/* ---- How numbers fit a format: where, among the magnitudes of finite fp32 (wide 0) or fp64 (wide 1) numbers, rounding to
   fp16, bf16, E4M3 or E5M2 to nearest even changes kind.  A number x is counted at i where |x|, as an integer, is above
   limit[i]; rounding is monotone, so the differences of these counts are those of the kinds. */
enum { AMPI_FIT_ZERO = 0,           /* above: x is not 0 ... */
       AMPI_FIT_KEPT = 1,           /* ... nor does it become 0 ... */
       AMPI_FIT_NORMAL = 2,         /* ... nor subnormal; */
       AMPI_FIT_LAST = 3,           /* it comes into the last binade ... */
       AMPI_FIT_OVER = 4,           /* ... or beyond the largest number; */
       AMPI_FIT_INFINITE = 5,       /* it is infinite ... */
       AMPI_FIT_NAN = 6,            /* ... or NaN */
       AMPI_FIT_LIMITS = 7 };
typedef struct ampi_fit { uint64_t limit[AMPI_FIT_LIMITS]; } ampi_fit;

/* The largest finite magnitude that rounds to at most `pattern`, by bisection. */
AMPI_HD uint64_t ampi_fit_limit(int wide, int dm, int db, uint32_t largest, uint32_t pattern) {
    uint64_t low = 0, high = (wide ? (uint64_t)0x7ff << 52 : (uint64_t)0xff << 23) - 1;
    while (low < high) {
        uint64_t middle = low + (high - low + 1) / 2;
        if (ampi_narrow(middle, wide, dm, db, largest, 0, AMPI_EVEN, 0) <= pattern) low = middle;
        else high = middle - 1;
    }
    return low;
}
AMPI_HD ampi_fit ampi_fit_of(int wide, amp_dtype format) {
    int dm = format == AMP_F16 ? 10 : format == AMP_BF16 ? 7 : format == AMP_E4M3 ? 3 : 2;
    int db = format == AMP_BF16 ? 127 : format == AMP_E4M3 ? 7 : 15;
    uint32_t largest = format == AMP_F16 ? 0x7bff : format == AMP_BF16 ? 0x7f7f : format == AMP_E4M3 ? 0x7e : 0x7b;
    ampi_fit f;
    f.limit[AMPI_FIT_ZERO] = 0;
    f.limit[AMPI_FIT_KEPT] = ampi_fit_limit(wide, dm, db, largest, 0);
    f.limit[AMPI_FIT_NORMAL] = ampi_fit_limit(wide, dm, db, largest, ((uint32_t)1 << dm) - 1);
    f.limit[AMPI_FIT_LAST] = ampi_fit_limit(wide, dm, db, largest, (largest >> dm << dm) - 1);
    f.limit[AMPI_FIT_OVER] = ampi_fit_limit(wide, dm, db, largest, largest);
    f.limit[AMPI_FIT_NAN] = wide ? (uint64_t)0x7ff << 52 : (uint64_t)0xff << 23;
    f.limit[AMPI_FIT_INFINITE] = f.limit[AMPI_FIT_NAN] - 1;
    return f;
}

/* ---- Random numbers that are a function of (seed, position), so any element can be computed anywhere, in any order.
   Philox4x32-10 (Salmon et al. 2011): four words from key = seed and counter = {block, stream}, low words first. */
AMPI_HD void amp_philox(uint64_t seed, uint64_t stream, uint64_t block, uint32_t out[4]) {
    uint32_t c0 = (uint32_t)block, c1 = (uint32_t)(block >> 32), c2 = (uint32_t)stream, c3 = (uint32_t)(stream >> 32);
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    int round;
    for (round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * c0, b = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0; out[1] = c1; out[2] = c2; out[3] = c3;
}
/* Word `index` of the sequence of a seed: word index % 4 of block index / 4 of stream 0. */
AMPI_HD uint32_t amp_random_u32(uint64_t seed, uint64_t index) {
    uint32_t words[4];
    amp_philox(seed, 0, index / 4, words);
    return words[index % 4];
}
/* Uniform in [0, 1): the upper 24 bits of that word times 2^-24. */
AMPI_HD float amp_random_uniform(uint64_t seed, uint64_t index) {
    return (float)(amp_random_u32(seed, index) >> 8) * (1.0f / 16777216);
}

typedef enum amp_rounding {
    AMP_ROUND_DEFAULT = 0,          /* nearest, ties to even (TF32: ties away from zero, as the hardware does) */
    AMP_ROUND_STOCHASTIC = 1,       /* to bf16, fp16 or fp8: away from zero with probability equal to the discarded
                                       fraction, so unbiased; NaN stays NaN */
    AMP_ROUND_FORCE_I32 = 0x7fffffff
} amp_rounding;

/* What bulk conversion may be told.  NULL or all zero: nearest even, no saturation. */
typedef struct amp_convert_desc {
    amp_rounding rounding;
    int32_t saturate;               /* 1: beyond the largest finite value, infinity included, becomes that value; NaN
                                       stays NaN; to fp64 nothing saturates */
    uint64_t seed, offset;          /* of AMP_ROUND_STOCHASTIC: element i uses amp_random_u32(seed, offset + i) */
} amp_convert_desc;

/* Bulk conversion of n elements between floating dtypes on the host, with the CPU's instructions and
   the scalar functions' bits.  dst and src may be the same buffer when the element sizes agree, and
   need no alignment.  new_inf, if not NULL, receives how many finite inputs became infinite (E4M3: NaN).
   TF32 as destination rounds within fp32 storage.
   Errors: 101, 102 n < 0, 104 not floating, or stochastic to fp32, fp64 or TF32. */
AMP_API amp_result amp_convert_v(void *dst, amp_dtype dst_dtype, const void *src, amp_dtype src_dtype, int64_t n,
                                 const amp_convert_desc *desc, int64_t *new_inf, uint64_t abi);
AMPI_INLINE amp_result amp_convert(void *dst, amp_dtype dst_dtype, const void *src, amp_dtype src_dtype, int64_t n,
                                   const amp_convert_desc *desc, int64_t *new_inf) {
    return amp_convert_v(dst, dst_dtype, src, src_dtype, n, desc, new_inf, AMP_ABI(amp_convert_desc));
}
/* How many of n elements are infinite or NaN, found by their bits (isfinite is folded away by -Ofast);
   *first, if not NULL, is the index of the first, or -1.  -1 is returned for a dtype that is not floating. */
AMP_API int64_t amp_count_nonfinite(const void *data, amp_dtype dtype, int64_t n, int64_t *first);

/* ==== 3 >>machine ===================================================================================
   What this machine can do, and which precision to use on it, with the reason.                        */

/* The instruction set that the CPU kernels use, best last; amp_desc.cpu_path forces one. */
typedef enum amp_cpu_path {
    AMP_CPU_DEFAULT = 0,            /* the best this CPU has */
    AMP_CPU_SCALAR = 1,             /* C99 */
    AMP_CPU_AVX2 = 2,               /* with FMA and F16C */
    AMP_CPU_AVX512 = 3,             /* F, BW, DQ, VL */
    AMP_CPU_AVX512_BF16 = 4,        /* products of bf16, which take subnormal numbers as 0, here and in AMX */
    AMP_CPU_AMX = 5,                /* AMX-BF16: products of bf16; the rest as AVX-512 */
    AMP_CPU_FORCE_I32 = 0x7fffffff
} amp_cpu_path;

typedef struct amp_cpu_info {
    char name[64];
    int32_t cores;                  /* that this process may use */
    amp_cpu_path path;              /* best path this CPU and system support */
    int32_t avx2, avx512, avx512_bf16, avx512_fp16; /* 0 or 1 */
    int32_t amx_bf16;               /* 0 or 1; 1 only where the system lets this process use it */
    int64_t l1d, l2, l3;            /* bytes per core, core and socket; 0 unknown */
    int64_t memory;                 /* bytes of RAM; 0 unknown */
} amp_cpu_info;

/* Filled by a backend. */
typedef struct amp_device {
    char name[128];
    char kind[16];                  /* "cpu", "cuda", ... */
    int32_t index;
    int32_t cc_major, cc_minor;     /* CUDA compute capability; 0 for a CPU */
    int32_t fp16, bf16, tf32, fp8;  /* matrix instructions of that format: 0 or 1 */
    int32_t multiprocessors;
    int64_t memory;                 /* bytes in all */
    char versions[96];              /* of the compiler, driver and libraries the backend runs on */
} amp_device;

typedef struct amp_machine {
    amp_cpu_info cpu;
    amp_device device;              /* of the context's backend; kind "cpu" where that is the CPU */
} amp_machine;

/* Fills cpu, and device from it. */
AMP_API amp_result amp_machine_probe(amp_machine *out);
/* A table of the machine in text, cut to size bytes with its 0.  Returns the length it needs, as snprintf does. */
AMP_API size_t amp_machine_text(const amp_machine *machine, char *text, size_t size);

typedef struct amp_choice {
    amp_dtype dtype;                /* what regions compute in: AMP_F32, AMP_TF32, AMP_F16 or AMP_BF16 */
    int32_t scaler;                 /* 1: train with a loss scaler (fp16) */
    int32_t emulated;               /* 1: the CPU rounds to this dtype and computes in fp32 */
    int32_t fell_back;              /* 1: not what was asked for */
    char reason[160];               /* one line */
} amp_choice;

/* Chooses a compute dtype: a pure function of its arguments.
   wanted AMP_DTYPE_DEFAULT ("auto"): bf16 on compute capability 8.0 and later or a CPU with bf16 instructions;
   fp16 with a scaler on 7.0 to 7.5; else fp32.  Anything else: that dtype if the device has it.
   Errors: 104 not a compute dtype; 108 the device lacks it (fp8: always) and allow_fallback is 0.  With
   allow_fallback the nearest dtype that works is chosen and the reason says so. */
AMP_API amp_result amp_choose(const amp_machine *machine, amp_dtype wanted, int32_t allow_fallback, amp_choice *out);

/* ==== 4 >>tensors ===================================================================================
   Views on memory that the caller owns.  Nothing here allocates.                                      */

enum { AMP_MAX_DIMS = 4 };

/* shape[0..ndim-1], the last dimension fastest.  Strides are in elements; all zero means contiguous.
   A zeroed amp_tensor (data NULL) is "no tensor". */
typedef struct amp_tensor {
    void *data;
    amp_dtype dtype;
    int32_t ndim;
    int64_t shape[AMP_MAX_DIMS];
    int64_t stride[AMP_MAX_DIMS];
} amp_tensor;

/* Contiguous views.  const data may be passed: operators write only to what they document as output. */
AMPI_INLINE amp_tensor amp_tensor4(const void *data, amp_dtype dtype, int64_t n0, int64_t n1, int64_t n2, int64_t n3) {
    amp_tensor t;
    memset(&t, 0, sizeof t);
    memcpy(&t.data, &data, sizeof t.data);
    t.dtype = dtype; t.ndim = 4;
    t.shape[0] = n0; t.shape[1] = n1; t.shape[2] = n2; t.shape[3] = n3;
    return t;
}
AMPI_INLINE amp_tensor amp_tensor3(const void *data, amp_dtype dtype, int64_t n0, int64_t n1, int64_t n2) {
    amp_tensor t = amp_tensor4(data, dtype, n0, n1, n2, 0);
    t.ndim = 3;
    return t;
}
AMPI_INLINE amp_tensor amp_tensor2(const void *data, amp_dtype dtype, int64_t rows, int64_t cols) {
    amp_tensor t = amp_tensor4(data, dtype, rows, cols, 0, 0);
    t.ndim = 2;
    return t;
}
AMPI_INLINE amp_tensor amp_tensor1(const void *data, amp_dtype dtype, int64_t n) {
    amp_tensor t = amp_tensor4(data, dtype, n, 0, 0, 0);
    t.ndim = 1;
    return t;
}
/* Elements of the view; 0 for no tensor (data NULL); -1 if a dimension is negative or the product overflows. */
AMP_API int64_t amp_tensor_count(const amp_tensor *tensor);

/* A piece of memory that a set, a check or a host's own loop works on. */
typedef struct amp_range {
    const char *name;               /* for reports; may be NULL */
    void *data;
    int64_t count;                  /* elements */
    amp_dtype dtype;
} amp_range;

/* A trainable parameter.  The caller fills name, weight and grad and owns all three; the rest is the library's.
   grad has the weight's shape, in fp32 or in the weight's dtype, contiguous.  A frozen parameter has no grad. */
typedef struct amp_param {
    const char *name;               /* as in "blocks.0.attn.weight": layer overrides match it */
    amp_tensor weight;
    amp_tensor grad;
    void *master;                   /* fp32 master weights, where an optimizer keeps such; else NULL */
    uint64_t id;                    /* from amp_param_register; 0: never cached */
    uint64_t version;               /* of the weight's value */
    uint64_t used[2];               /* 1 + the version that a forward, a backward call last multiplied by */
    int32_t grad_live;              /* 0: the next backward overwrites grad; 1: it adds */
    int32_t reserved;
} amp_param;

/* Which keys j a query sees.  Query i stands at position i + keys - queries, so that the last ones align; documents
   and windows go by that position too.  A zeroed mask hides nothing. */
typedef enum amp_mask_kind {
    AMP_MASK_NONE = 0,
    AMP_MASK_CAUSAL = 1,            /* j <= position */
    AMP_MASK_WINDOW = 2,            /* causal, and the last `window` keys only; bidirectional: |position - j| < window */
    AMP_MASK_WINDOW_GLOBAL = 3,     /* as WINDOW, and the first `global` positions see and are seen by all (causally if causal) */
    AMP_MASK_PREFIX = 4,            /* causal, but keys below prefix[b] are seen by all */
    AMP_MASK_ARBITRARY = 5,         /* the tensor `allowed` */
    AMP_MASK_FORCE_I32 = 0x7fffffff
} amp_mask_kind;

/* Kinds combine with padding and documents: a key is seen if all of them allow it.  A query that sees
   no key gives zeros, and zero gradients. */
typedef struct amp_mask {
    amp_mask_kind kind;
    int32_t bidirectional;          /* WINDOW, WINDOW_GLOBAL: 1 = not causal */
    int64_t window;                 /* WINDOW, WINDOW_GLOBAL: 1 or more */
    int64_t global;                 /* WINDOW_GLOBAL: 0 or more */
    const int32_t *prefix;          /* PREFIX: [batch] */
    const int32_t *lengths;         /* padding: keys at lengths[b] and beyond are hidden; NULL: none */
    const int32_t *documents;       /* [batch, keys] document numbers: only keys of the query's own document; NULL: one document */
    const uint8_t *allowed;         /* ARBITRARY: 1 = seen; [batch or 1, heads or 1, queries, keys] by the strides below */
    int64_t allowed_batch_stride;   /* elements; 0: the same for every sequence */
    int64_t allowed_head_stride;    /* elements; 0: the same for every head */
} amp_mask;

/* ==== 5 >>state =====================================================================================
   One blob for everything that must survive a restart: a list of named records, little-endian on every
   machine, each with a checksum, behind a header with magic and format version.  Objects save into it
   and load from it; a program adds records of its own.                                                */

typedef struct amp_state amp_state;

/* An empty state.  system NULL: POSIX.  Errors: 301. */
AMP_API amp_result amp_state_create(amp_state **out, const amp_system *system);
AMP_API void amp_state_destroy(amp_state *state);
/* Adds or replaces the record `key` (1 to 63 bytes): n values of dtype (F32, F64, F16, BF16, U8, U16, I32, I64).
   Errors: 101, 102 key length, 104, 301. */
AMP_API amp_result amp_state_put(amp_state *state, const char *key, amp_dtype dtype, const void *values, int64_t n);
/* Copies the record out; it must have this dtype and count.  On failure values is untouched.
   Errors: 107 no such key, 408 other dtype or count. */
AMP_API amp_result amp_state_get(const amp_state *state, const char *key, amp_dtype dtype, void *values, int64_t n);
/* Count and dtype of a record, -1 if there is none. */
AMP_API int64_t amp_state_count(const amp_state *state, const char *key, amp_dtype *dtype);
/* Name of record i, NULL beyond the last. */
AMP_API const char *amp_state_key(const amp_state *state, int64_t i);
/* The blob as bytes; *data comes from the state's system and goes back by amp_file_free.  Errors: 301. */
AMP_API amp_result amp_state_encode(const amp_state *state, void **data, size_t *bytes);
/* Errors: 301, 404 foreign, 405 ends early, 406 damaged, 407 newer format.  *out is untouched on failure. */
AMP_API amp_result amp_state_decode(amp_state **out, const amp_system *system, const void *data, size_t bytes);
/* To and from a file, written atomically.  Errors: as above and 401, 402, 403. */
AMP_API amp_result amp_state_save(const amp_state *state, const char *path);
AMP_API amp_result amp_state_load(amp_state **out, const amp_system *system, const char *path);

/* ==== 6 >>backends ==================================================================================
   The context, and the table through which everything a device does goes: memory, copies, streams,
   events, graphs and kernels.  The CPU backend is built in; amp_cuda.cu brings another; a third needs no
   change here.  A host may also copy a table and replace one entry, for example gemm by its own BLAS.   */

typedef struct amp_context amp_context;

/* A matrix as kernels see it: element (i, j) at data[i * ld + j], counted in elements of dtype. */
typedef struct amp_mat {
    void *data;
    amp_dtype dtype;
    int32_t reserved;
    int64_t rows, cols, ld;
} amp_mat;

typedef enum amp_activation_kind {
    AMP_ACT_NONE = 0,
    AMP_ACT_GELU = 1,               /* tanh form, "gelu_new": 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) */
    AMP_ACT_GELU_ERF = 2,           /* exact form: 0.5 x (1 + erf(x / sqrt 2)) */
    AMP_ACT_TANH = 3,
    AMP_ACT_SILU = 4,               /* x / (1 + exp(-x)) */
    AMP_ACT_RELU = 5,               /* relu(NaN) is NaN */
    AMP_ACT_FORCE_I32 = 0x7fffffff
} amp_activation_kind;

/* ---- Kernel arguments.  All pointers are device pointers; kernels do not check them.  Sums are fp32 (or
   wider) with one rounding to the output's dtype, and come out the same for any number of threads.
   "add" fields: 1 = add to what is there, 0 = overwrite. */

typedef struct amp_k_cast {         /* dst[i] = src[i]: between floating dtypes; or U16 to I32, which ignores `how` */
    void *dst; const void *src;
    amp_dtype dst_dtype, src_dtype;
    int64_t n;
    amp_convert_desc how;
    int64_t *new_inf;               /* + finite inputs that became non-finite; NULL: not counted */
} amp_k_cast;

/* The gradient of a parameter: where it goes; data NULL: not wanted. */
typedef struct amp_k_gradient { void *data; amp_dtype dtype; int32_t add; } amp_k_gradient;

/* c[i] = act(alpha op(a[i]) op(b[i]) + bias) + beta c[i] for i < batch; op(a) is m x k, op(b) k x n, row-major.
   a and b are rounded to `compute` (F32, TF32, F16, BF16), products and sums are fp32; a device may round bias to c's
   dtype first, and its RELU make 0 of NaN.  beta 0 never reads c; k 0 leaves act(bias) + beta c.  pre, backward and the
   sums: batch 1. */
typedef struct amp_k_gemm {
    int64_t m, n, k, batch;
    const void *a, *b; void *c;
    amp_dtype a_dtype, b_dtype, c_dtype, compute;
    int32_t trans_a, trans_b;       /* 1: the matrix is stored transposed (a: k x m, b: n x k) */
    int64_t lda, ldb, ldc;
    int64_t stride_a, stride_b, stride_c;
    float alpha, beta;
    const void *bias; amp_dtype bias_dtype;     /* [n], added to every row; NULL: none */
    amp_activation_kind act;        /* NONE, GELU, GELU_ERF or RELU */
    void *pre; amp_dtype pre_dtype; int64_t ld_pre;     /* if not NULL, what goes into act is written here */
    const void *packed_b;           /* b as gemm_pack made it, or NULL; b stays valid beside it */
    int32_t backward, reserved;     /* 1: c = act'(pre) * (alpha op(a) op(b)) + beta c; pre is read, no bias */
    amp_k_gradient column_sum;      /* [n]: over the rows of what is written to c, before or after its rounding */
    amp_k_gradient row_sum;         /* [m]: of op(a)[i][p] over p, before or after the rounding to `compute` */
} amp_k_gemm;

typedef struct amp_k_pack {         /* op(b) k x n, to be used with `compute` */
    const void *b; amp_dtype b_dtype, compute;
    int32_t trans_b;
    int32_t repeated;               /* 0: this is the first product with this b since it changed */
    int64_t k, n, ldb;
    int64_t *new_inf;               /* as in amp_k_cast */
} amp_k_pack;

typedef struct amp_k_column_sum {   /* out[j] = sum over i of x[i][j] */
    amp_mat x;
    void *out; amp_dtype out_dtype; int32_t add;
} amp_k_column_sum;

/* o = softmax(scale q k^T, masked) v per batch and head.  Strides in elements between [batch, position, head];
   the head dimension is contiguous.  Nothing of size queries x keys is stored. */
typedef struct amp_k_attention {
    int64_t batch, heads, queries, keys, dim;
    const void *q, *k, *v; void *o;
    amp_dtype dtype, compute;       /* dtype: storage of q, k, v, o and their gradients */
    int64_t q_stride[3], k_stride[3], v_stride[3], o_stride[3];
    float scale;
    amp_mask mask;
    float *lse;                     /* [batch, heads, queries] log-sum-exp of the scaled scores; -inf for a fully masked row */
    /* backward */
    const void *d_o; void *dq, *dk, *dv;
    int64_t do_stride[3], dq_stride[3], dk_stride[3], dv_stride[3];
} amp_k_attention;

/* s = x + residual; y = (s - mean) rstd weight + bias per row (RMSNorm: mean 0, no bias). */
typedef struct amp_k_norm {
    int32_t rms;
    float eps;                      /* rstd = 1 / sqrt(variance + eps), variance over cols without Bessel's correction */
    amp_mat x, residual, sum, y;    /* residual.data and sum.data may be NULL; sum may be x or residual */
    const void *weight, *bias; amp_dtype weight_dtype;      /* [cols]; either may be NULL */
    float *mean, *rstd;             /* [rows]; mean unused by RMSNorm */
    /* backward: x is the sum that was normalised; dx = gradient of that sum (+ dsum if given) */
    amp_mat dy, dsum, dx;           /* dsum.data may be NULL, and may be dx */
    amp_k_gradient dweight, dbias;  /* [cols] */
} amp_k_norm;

/* y = softmax(scale x) over the last dimension of [batch, heads, queries, keys], masked. */
typedef struct amp_k_softmax {
    int64_t batch, heads, queries, keys;
    const void *x; void *y;
    amp_dtype x_dtype, y_dtype;
    float scale;
    amp_mask mask;
    const void *dy; void *dx;       /* backward reads y; dx in x_dtype, dy in y_dtype; dx may be dy */
} amp_k_softmax;

/* y = act(x + bias); dx = dy act'(x + bias), tanh's from y if given.  y may be x, dx may be dy. */
typedef struct amp_k_activation {
    amp_activation_kind act;
    amp_dtype x_dtype, y_dtype;     /* dx in x_dtype, dy in y_dtype */
    int64_t n;
    const void *x; void *y;
    const void *dy; void *dx;
    const void *bias; amp_dtype bias_dtype;     /* [cols], added to every row; NULL: none */
    int64_t cols;                   /* divides n; used with a bias only */
} amp_k_activation;

typedef struct amp_k_swiglu {       /* y = silu(gate + gate_bias) (up + up_bias) */
    amp_mat gate, up, y;
    amp_mat dy, dgate, dup;
    const void *gate_bias, *up_bias; amp_dtype gate_bias_dtype, up_bias_dtype;      /* [cols]; either may be NULL */
} amp_k_swiglu;

/* loss = sum or mean over the rows whose label is not ignore_index of
   (1 - smoothing) (lse - x[label]) + smoothing (lse - mean(x)) over the first `classes` columns.
   dlogits = (softmax - target) factor seed / (rows counted, for the mean); ignored rows and the columns beyond
   classes get 0.  One read of the logits; dlogits may be their own buffer. */
typedef struct amp_k_cross_entropy {
    amp_mat logits, dlogits;        /* dlogits.data NULL: loss only */
    int64_t classes;
    const int32_t *labels;          /* [rows] */
    int32_t ignore_index, sum;      /* sum 1: no mean */
    float smoothing, factor;
    const float *seed;              /* device; NULL: 1 */
    float *losses;                  /* [rows], 0 where ignored; NULL: not wanted */
    float *loss;                    /* [1]; NaN for a mean over no rows */
    int32_t *bad_label;             /* [1]: 1 + the first row whose label is out of range, else 0 */
} amp_k_cross_entropy;

typedef struct amp_k_mse {          /* loss = mean (or sum) of (x - target)^2; dx = 2 (x - target) factor seed / n */
    const void *x, *target; void *dx;
    amp_dtype x_dtype, target_dtype;
    int64_t n;
    int32_t sum; float factor;
    const float *seed; float *loss;
} amp_k_mse;

/* y[i] = table[ids[i]] + positions[i mod seq]. */
typedef struct amp_k_embedding {
    const int32_t *ids; int64_t n, seq;
    amp_mat table, positions, y;    /* positions.data may be NULL */
    amp_mat dy, dtable, dpositions; /* gradients: either may have data NULL */
    int32_t add_table, add_positions;
    int32_t *bad_id;                /* [1]: 1 + the first i whose id is out of range, else 0 */
} amp_k_embedding;

typedef struct amp_k_dropout {      /* y = kept ? x / (1 - p) : 0; element i is kept if its uniform number >= p */
    const void *x; void *y;         /* backward: x = dy, y = dx */
    amp_dtype x_dtype, y_dtype;
    int64_t n;
    float p;
    uint64_t seed, offset;
    const uint64_t *base;           /* device; added to offset; NULL: 0 */
} amp_k_dropout;

typedef struct amp_k_add {          /* y = alpha a + beta b; b NULL: y = alpha a */
    const void *a, *b; void *y;
    amp_dtype a_dtype, b_dtype, y_dtype;
    int64_t n;
    float alpha, beta;
} amp_k_add;

/* What a 16-bit weight loses by rounding, and where it is kept.  The figures are bytes per parameter. */
typedef enum amp_master_kind {
    AMP_MASTER_DEFAULT = 0,         /* F32; at level O3 NONE */
    AMP_MASTER_F32 = 1,             /* 4: an fp32 master, rounded to the weight in the same pass */
    AMP_MASTER_REMAINDER = 2,       /* 2: bf16 weights only; weight and remainder are the master, by amp_bf16_split: bit
                                       for bit that of F32.  The weight differs in exact ties, away from zero here */
    AMP_MASTER_NONE = 3,            /* 0: rounded to nearest; an update below half a step of the weight is lost */
    AMP_MASTER_STOCHASTIC = 4,      /* 0: rounded stochastically; such updates count on average */
    AMP_MASTER_FORCE_I32 = 0x7fffffff
} amp_master_kind;

/* The rows of a multi-tensor call.  The table lies in device memory and is built once. */
typedef struct amp_k_tensor {
    void *weight, *grad, *master, *m, *v;       /* those a call does not use are NULL; master: fp32, or u16 remainders */
    amp_dtype weight_dtype, grad_dtype;
    amp_dtype moment_dtype;         /* of m and v: BF16, else fp32 */
    amp_master_kind master_kind;    /* REMAINDER: what master is; STOCHASTIC: how the weight is rounded */
    int64_t count;
    double lr_scale, weight_decay;
    int32_t live;                   /* 0: has no gradient in this step, is passed over */
    int32_t reserved;
} amp_k_tensor;

/* What a check finds and what follows from it, in device memory: one per set. */
typedef struct amp_k_found {
    double sum_sq;                  /* of the gradients before any multiplication; inf or NaN with them */
    float found_inf;                /* 0, or not 0: something was infinite or NaN */
    int32_t first_bad;              /* lowest row with a non-finite element; -1: none */
    float norm;                     /* of the gradients after unscaling and averaging; what clipping compares */
    float clip_coef;                /* min(1, clip / (norm + 1e-6)), 1 without clipping */
    float multiplier;               /* fp32(inverse scale * clip / divisor), or what of it is not yet in memory */
    float factor;                   /* what the next pass over the gradients multiplies by */
    int32_t skip;                   /* 1: the optimizer leaves everything as it is */
    int32_t consecutive_skips;
    int64_t attempts, step, skips;  /* attempts = step + skips; step counts those applied */
    double beta1_power, beta2_power;/* beta^step */
    double lr;
} amp_k_found;

/* What became of one attempt: record (number - 1) % AMP_OUTCOMES of a ring in device memory. */
#define AMP_OUTCOMES 64
typedef struct amp_k_outcome {
    int64_t number, step, skips, consecutive_skips;     /* counters after the attempt */
    double lr;
    float norm, clip_coef, scale;
    int32_t applied, at_floor, first_bad;
    int32_t growth_tracker, reserved;                   /* as scale, before the attempt's update */
} amp_k_outcome;

typedef struct amp_k_check {        /* finite check and sum of squares; grad *= *multiply if that is given and not 1 */
    const amp_k_tensor *table; int64_t tensors;
    const float *multiply;          /* device; NULL: read only.  Only the values before it count for `found` */
    amp_k_found *found;             /* adds to sum_sq, sets found_inf and first_bad (lowest), clears nothing */
} amp_k_check;

/* By ampi_adamw_row and ampi_sgd_row of section 10.  A row with master writes both weights in one pass. */
typedef struct amp_k_adamw {
    const amp_k_tensor *table; int64_t tensors;
    const amp_k_found *found;
    double beta1, beta2, eps;
    uint64_t seed;                  /* of stochastic rounding */
    int32_t maximize, reserved;
} amp_k_adamw;

typedef struct amp_k_sgd {
    const amp_k_tensor *table; int64_t tensors;
    const amp_k_found *found;
    double momentum, dampening;
    uint64_t seed;
    int32_t nesterov, maximize;
} amp_k_sgd;

typedef struct amp_k_scale_ranges { /* data *= *factor, in fp32 (fp64 in fp64), rounded once */
    const amp_k_tensor *table; int64_t tensors;     /* grad, grad_dtype, count, live */
    const float *factor;
} amp_k_scale_ranges;

/* How the values of a row fit a format. */
typedef struct amp_k_inspected {
    int64_t nan, infinite;          /* as they are */
    int64_t nonzero;                /* NaN and infinite ones too */
    int64_t underflow, subnormal;   /* not 0, and become 0, become subnormal, ... */
    int64_t overflow, saturated;    /* ... finite, and become infinite (E4M3: NaN), come into the last binade */
    float largest;                  /* largest finite magnitude, in fp32 to nearest (fp64 beyond it: fp32's largest); 0: none */
    int32_t reserved;
} amp_k_inspected;
/* What nearest even to `dtype` would do to the values; nothing is changed.  Integer tests on bits: exact. */
typedef struct amp_k_inspect {
    const amp_k_tensor *table; int64_t tensors;     /* grad, grad_dtype (F32, F16, BF16 or F64), count, live */
    amp_dtype dtype;                /* F16, BF16, E4M3 or E5M2 */
    int32_t reserved;
    amp_k_inspected *out;           /* one per row, overwritten; zeros where a row is not live */
} amp_k_inspect;

/* From the counts above each limit of ampi_fit to those of each kind; and one piece of a row added to another. */
AMPI_HD void ampi_fit_count(const int64_t above[AMPI_FIT_LIMITS], amp_k_inspected *out) {
    out->nan = above[AMPI_FIT_NAN];
    out->infinite = above[AMPI_FIT_INFINITE] - above[AMPI_FIT_NAN];
    out->nonzero = above[AMPI_FIT_ZERO];
    out->underflow = above[AMPI_FIT_ZERO] - above[AMPI_FIT_KEPT];
    out->subnormal = above[AMPI_FIT_KEPT] - above[AMPI_FIT_NORMAL];
    out->saturated = above[AMPI_FIT_LAST] - above[AMPI_FIT_OVER];
    out->overflow = above[AMPI_FIT_OVER] - above[AMPI_FIT_INFINITE];
}
AMPI_HD void ampi_fit_add(amp_k_inspected *sum, const amp_k_inspected *piece) {
    sum->nan += piece->nan; sum->infinite += piece->infinite; sum->nonzero += piece->nonzero;
    sum->underflow += piece->underflow; sum->subnormal += piece->subnormal;
    sum->overflow += piece->overflow; sum->saturated += piece->saturated;
    if (ampi_bits_f32(piece->largest) > ampi_bits_f32(sum->largest)) sum->largest = piece->largest;
}

/* The loss scaler as it lives in device memory; section 10 has the rules.  found_inf is the "any of the sets
   since the last update"; the counters serve the rate rule, hysteresis and reports. */
typedef struct amp_k_scaler {
    float scale, inv_scale;         /* inv_scale = fp32(1 / double(scale)) */
    float previous_scale;           /* before the last update or amp_scaler_set_scale */
    float found_inf;
    int32_t growth_tracker;         /* clean updates since the last change */
    int32_t growth_interval;        /* in force; metaseq's moves with the scale; -1: never */
    int32_t hysteresis_left;        /* overflows until the scale shrinks */
    int32_t overflows, steps;       /* since the scale last changed */
    int32_t at_floor;               /* 1: the last update found an overflow and could not shrink the scale */
    int64_t updates, skips, consecutive_skips;
} amp_k_scaler;

/* Where the presets differ beyond their numbers. */
enum {
    AMP_GROWTH_REFUSES_INF = 1,     /* a scale that would become infinite stays (torch, keras) */
    AMP_GROWTH_ONE_LATER = 2,       /* growth takes growth_interval + 1 clean updates (flax, deepspeed_fused) */
    AMP_GROWTH_COUNTS_ON = 4,       /* ... but only the first: the growing update counts on (deepspeed_fused) */
    AMP_WINDOW_MOVES = 8,           /* growth_interval grows and shrinks with the scale (metaseq) */
    AMP_FLOOR_REFUSES = 16,         /* a scale stays rather than fall to min_scale (fairseq, metaseq) */
    AMP_OVERFLOWS_KEPT = 32,        /* growth does not restart the overflow count of the rate rule (fairseq, metaseq) */
    AMP_SCALE_GUARDED = 64          /* steps skip while scale or inverse is 0, subnormal or inf (all but torch) */
};

/* A scaler's constants; see amp_scaler_desc for their meaning. */
typedef struct amp_k_scaler_rule {
    double growth_factor, backoff_factor, tolerance;
    float min_scale, max_scale;     /* 0 and +inf: none */
    int32_t growth_interval, hysteresis;
    uint32_t bits;                  /* the AMP_GROWTH_... bits above */
    int32_t frozen;                 /* 1: static scale */
} amp_k_scaler_rule;

/* One step's constants, as the rules need them. */
typedef struct amp_k_step_rule {
    double divisor;                 /* micro-batches times ranks: gradients are averaged by it */
    double beta1, beta2, lr;        /* lr below 0: found->lr is in force */
    double clip_norm;               /* 0: none */
    int32_t unscaled;               /* 1: the check multiplied the gradients in memory by `factor` */
    int32_t apply_nonfinite;        /* 1: never skip */
} amp_k_step_rule;

typedef enum amp_rule_kind {
    AMP_RULE_BEGIN = 1,             /* clears `found`, but no counters; factor = fp32(inverse scale / divisor) */
    AMP_RULE_CHECKED = 2,           /* found -> norm, clip_coef, multiplier, skip; scaler->found_inf |= found_inf */
    AMP_RULE_STEPPED = 3,           /* before the optimizer kernel: counts the step or skip, writes the outcome */
    AMP_RULE_UPDATE = 4,            /* the scaler's update */
    AMP_RULE_APPLIED = 5,           /* the gradients in memory have been multiplied by `multiplier`: it becomes 1 */
    AMP_RULE_RATIO = 6,             /* factor = scale / value, or scale / previous_scale for value 0 */
    AMP_RULE_SET_SCALE = 7,         /* the scale becomes value; the growth tracker stays */
    AMP_RULE_SET_INTERVAL = 8,      /* the rule's interval; value not 0: a tracker at or beyond it restarts */
    AMP_RULE_LAUNCH = 9,            /* before a captured step: found->lr = lr, *random = random_offset; either may be NULL */
    AMP_RULE_KIND_FORCE_I32 = 0x7fffffff
} amp_rule_kind;

/* One thread on the device runs one rule.  Pointers that a kind does not use are NULL. */
typedef struct amp_k_rule {
    amp_rule_kind kind;
    float value;
    amp_k_scaler *scaler;           /* device; NULL: no scaler, scale 1 */
    amp_k_found *found;             /* device */
    amp_k_outcome *outcomes;        /* device; the ring */
    uint64_t *random;               /* device */
    uint64_t random_offset;
    amp_k_scaler_rule scaler_rule;  /* by value */
    amp_k_step_rule step_rule;      /* by value */
} amp_k_rule;

typedef enum amp_copy_kind {
    AMP_COPY_DEFAULT = 0,           /* found out from the pointers */
    AMP_COPY_TO_DEVICE = 1, AMP_COPY_TO_HOST = 2, AMP_COPY_ON_DEVICE = 3,
    AMP_COPY_FORCE_I32 = 0x7fffffff
} amp_copy_kind;

/* Where memory lies. */
typedef enum amp_place {
    AMP_PLACE_UNKNOWN = 0,
    AMP_PLACE_HOST = 1,             /* pageable memory of the host */
    AMP_PLACE_PINNED = 2,           /* host memory that the device can read */
    AMP_PLACE_DEVICE = 3,
    AMP_PLACE_OTHER_DEVICE = 4,
    AMP_PLACE_MANAGED = 5,          /* moves between host and device by itself */
    AMP_PLACE_FORCE_I32 = 0x7fffffff
} amp_place;

typedef struct amp_memory_info {
    int64_t allocated;              /* bytes handed out now: the caller's, the caches', the optimizers' */
    int64_t reserved;               /* bytes taken from the system, the kernels' scratch included */
    int64_t peak;                   /* most bytes since the last reset: of reserved on the CPU, of allocated on a device */
    int64_t pinned;                 /* bytes of pinned host memory */
    int64_t cast_cache, optimizer;  /* parts of allocated */
    int64_t device_total;           /* 0: unknown */
} amp_memory_info;

typedef struct amp_telemetry {      /* each -1 where it cannot be had */
    float utilization, memory_utilization;      /* 0 to 1 */
    float temperature, power;       /* degrees C, W */
} amp_telemetry;

/* What a backend may call back: fail sets the thread's last-error text and returns the result. */
typedef struct amp_host {
    void *user;
    amp_result (*fail)(void *user, amp_result result, const char *text);
    void (*log)(void *user, amp_log_level level, int id, const char *text);
    void *(*alloc)(void *user, size_t size, size_t align);
    void (*free)(void *user, void *ptr, size_t size);
} amp_host;

/* The host's own allocator of device memory; all zero: the backend's.  What it hands out may be used at once by work
   in `stream` (NULL: the legacy default stream); what comes back may still be in use by work queued there.  alloc
   returns NULL where there is no memory left. */
typedef struct amp_device_memory {
    void *user;
    void *(*alloc)(void *user, size_t bytes, int32_t device, void *stream);
    void (*free)(void *user, void *ptr, size_t bytes, int32_t device, void *stream);
} amp_device_memory;

typedef struct amp_backend_desc {
    int32_t device;                 /* index */
    int32_t threads;                /* CPU: threads a kernel may use */
    amp_cpu_path cpu_path;
    int32_t autotune;               /* 1: the first product of a shape tries which way is the fastest */
    void *stream;                   /* the host's own stream, or NULL */
    void *blas;                     /* the host's own BLAS handle, or NULL */
    amp_device_memory memory;
} amp_backend_desc;

/* `dev` is what open returned.  All calls but those named sync or wait return before the device is done.
   Every entry is set, or NULL where its comment allows that. */
typedef struct amp_backend {
    uint64_t abi;                   /* AMP_ABI(amp_backend) */
    const char *name;
    amp_result (*open)(void **dev, const amp_host *host, const amp_backend_desc *desc);
    void (*close)(void *dev);
    amp_result (*describe)(void *dev, amp_device *out);
    /* memory; host_visible 1: device pointers can be read by the host */
    int32_t host_visible, reserved;
    amp_result (*alloc)(void *dev, void **ptr, size_t bytes);
    void (*free)(void *dev, void *ptr, size_t bytes);
    amp_result (*alloc_pinned)(void *dev, void **ptr, size_t bytes);
    void (*free_pinned)(void *dev, void *ptr, size_t bytes);
    amp_result (*copy)(void *dev, void *dst, const void *src, size_t bytes, amp_copy_kind kind, void *stream);
    amp_result (*fill)(void *dev, void *dst, int byte, size_t bytes, void *stream);
    amp_result (*place)(void *dev, const void *ptr, amp_place *out);
    amp_result (*memory)(void *dev, amp_memory_info *out);          /* reserved, pinned and device_total only */
    /* streams and events; stream NULL is the context's own */
    amp_result (*stream_create)(void *dev, void **stream);
    void (*stream_destroy)(void *dev, void *stream);
    amp_result (*stream_sync)(void *dev, void *stream);
    amp_result (*event_create)(void *dev, void **event);
    void (*event_destroy)(void *dev, void *event);
    amp_result (*event_record)(void *dev, void *event, void *stream);
    amp_result (*event_wait)(void *dev, void *event, void *stream); /* the stream waits, the host does not */
    amp_result (*event_done)(void *dev, void *event, int32_t *done);
    amp_result (*event_sync)(void *dev, void *event);
    amp_result (*event_elapsed)(void *dev, void *from, void *to, double *seconds);
    /* graphs: NULL where the device has none */
    amp_result (*graph_begin)(void *dev, void *stream);
    amp_result (*graph_end)(void *dev, void *stream, void **graph);
    amp_result (*graph_launch)(void *dev, void *graph, void *stream);
    void (*graph_destroy)(void *dev, void *graph);
    /* optional: NULL where there is none */
    amp_result (*telemetry)(void *dev, amp_telemetry *out);
    void (*range_push)(void *dev, const char *name);
    void (*range_pop)(void *dev);
    /* What autotuning found.  save: the bytes it takes, 0 for nothing new since load; copied to buffer if size is enough.
       load: what save gave, in another process; what does not fit this device and library is left out, and logged. */
    size_t (*plans_save)(void *dev, void *buffer, size_t size);
    amp_result (*plans_load)(void *dev, const void *buffer, size_t size);
    /* Gives memory that is kept for later use, and that no graph needs, back to the system. */
    amp_result (*trim)(void *dev);
    /* kernels */
    amp_result (*cast)(void *dev, const amp_k_cast *args, void *stream);
    amp_result (*gemm)(void *dev, const amp_k_gemm *args, void *stream);
    size_t (*gemm_pack_size)(void *dev, const amp_k_pack *args);    /* 0: no use packing this */
    amp_result (*gemm_pack)(void *dev, const amp_k_pack *args, void *packed, void *stream);
    amp_result (*column_sum)(void *dev, const amp_k_column_sum *args, void *stream);
    amp_result (*attention)(void *dev, const amp_k_attention *args, void *stream);
    amp_result (*attention_backward)(void *dev, const amp_k_attention *args, void *stream);
    amp_result (*norm)(void *dev, const amp_k_norm *args, void *stream);
    amp_result (*norm_backward)(void *dev, const amp_k_norm *args, void *stream);
    amp_result (*softmax)(void *dev, const amp_k_softmax *args, void *stream);
    amp_result (*softmax_backward)(void *dev, const amp_k_softmax *args, void *stream);
    amp_result (*activation)(void *dev, const amp_k_activation *args, void *stream);
    amp_result (*activation_backward)(void *dev, const amp_k_activation *args, void *stream);
    amp_result (*swiglu)(void *dev, const amp_k_swiglu *args, void *stream);
    amp_result (*swiglu_backward)(void *dev, const amp_k_swiglu *args, void *stream);
    amp_result (*cross_entropy)(void *dev, const amp_k_cross_entropy *args, void *stream);
    amp_result (*mse)(void *dev, const amp_k_mse *args, void *stream);
    amp_result (*embedding)(void *dev, const amp_k_embedding *args, void *stream);
    amp_result (*embedding_backward)(void *dev, const amp_k_embedding *args, void *stream);
    amp_result (*dropout)(void *dev, const amp_k_dropout *args, void *stream);
    amp_result (*add)(void *dev, const amp_k_add *args, void *stream);
    /* multi-tensor kernels; `rules` are single-thread calls of an AMPI_HD rule on device memory */
    amp_result (*check)(void *dev, const amp_k_check *args, void *stream);
    amp_result (*adamw)(void *dev, const amp_k_adamw *args, void *stream);
    amp_result (*sgd)(void *dev, const amp_k_sgd *args, void *stream);
    amp_result (*scale_ranges)(void *dev, const amp_k_scale_ranges *args, void *stream);
    amp_result (*inspect)(void *dev, const amp_k_inspect *args, void *stream);
    amp_result (*rule)(void *dev, const amp_k_rule *args, void *stream);
} amp_backend;

/* The CPU backend's table. */
AMP_API const amp_backend *amp_cpu(void);
/* The CUDA backend's table: from amp_cuda.cu, which nvcc compiles and the program links. */
extern const amp_backend *amp_cuda(void);

/* ---- The context */

typedef enum amp_level {            /* Apex's levels */
    AMP_LEVEL_DEFAULT = 0,          /* O1 */
    AMP_LEVEL_O0 = 1,               /* fp32 throughout; regions and scaler report, and do nothing */
    AMP_LEVEL_O1 = 2,               /* fp32 weights, operators cast */
    AMP_LEVEL_O2 = 3,               /* 16-bit weights (norms fp32) with fp32 masters in the optimizer */
    AMP_LEVEL_O3 = 4,               /* 16-bit weights, no masters */
    AMP_LEVEL_FORCE_I32 = 0x7fffffff
} amp_level;

typedef enum amp_policy {
    AMP_POLICY_DEFAULT = 0,         /* FUSED */
    AMP_POLICY_FUSED = 1,           /* norms, softmax and losses store 16-bit and compute in fp32 */
    AMP_POLICY_TORCH = 2,           /* the result dtypes of PyTorch's CUDA table */
    AMP_POLICY_FORCE_I32 = 0x7fffffff
} amp_policy;

typedef enum amp_mode {
    AMP_MODE_DEFAULT = 0,           /* training */
    AMP_MODE_TRAINING = 1,
    AMP_MODE_INFERENCE = 2,         /* dropout passes through; nothing is kept for a backward */
    AMP_MODE_FORCE_I32 = 0x7fffffff
} amp_mode;

typedef enum amp_reduce_op {
    AMP_REDUCE_SUM = 1, AMP_REDUCE_MAX = 2,
    AMP_REDUCE_FORCE_I32 = 0x7fffffff
} amp_reduce_op;

/* Combines a buffer over all ranks, in place, on the stream; returns 0 for success.  Called on every rank
   in the same order.  NULL: one rank. */
typedef struct amp_reducer {
    int (*reduce)(void *user, void *data, int64_t count, amp_dtype dtype, amp_reduce_op op, void *stream);
    void *user;
    int32_t rank, world;            /* world 0 means 1 */
} amp_reducer;

typedef enum amp_autotune {
    AMP_AUTOTUNE_DEFAULT = 0,       /* off */
    AMP_AUTOTUNE_OFF = 1,
    AMP_AUTOTUNE_ON = 2,
    AMP_AUTOTUNE_FORCE_I32 = 0x7fffffff
} amp_autotune;

/*  .field            default                      legal
    .dtype            auto: see amp_choose          F32, TF32, F16, BF16
    .level            O1                           O0 to O3
    .policy           FUSED                        FUSED, TORCH
    .mode             TRAINING                     TRAINING, INFERENCE
    .backend          amp_cpu()                    a backend's table
    .device           0                            device index
    .threads          all cores of the process     1 to 1024 (OpenMP builds, where OMP_NUM_THREADS lowers the default; otherwise 1)
    .seed             0                            of dropout
    .fallback         none                         F32, TF32, F16, BF16: replaces a dtype the device lacks, instead of an
                                                   error or the nearest; operators overridden to AMP_CAST_FP32 compute in it
    .cpu_path         best                         what this CPU has
    .autotune         OFF                          OFF, ON: a device times its ways to the first product of each shape
                                                   (not while a graph is captured); amp_cpu() has no use for it
    .autotune_file    NULL: none                   what was found: read by amp_open, written by amp_close if there is more.
                                                   One that is missing, damaged or of another device or library is no
                                                   error: a warning says so                              */
typedef struct amp_desc {
    amp_dtype dtype;
    amp_level level;
    amp_policy policy;
    amp_mode mode;
    int32_t allow_fallback;         /* 1: a dtype the device lacks is replaced, with a logged reason; 0: refused */
    int32_t disable_cache;          /* 1: no cast cache */
    int32_t disable;                /* 1: regions compute in their operands' dtypes until amp_set_enabled */
    int32_t allow_tf32;             /* 1: products that would be computed in F32 are computed in TF32 */
    int32_t memory_efficient;       /* 1: the cast cache is emptied when the last region closes; hosts ask for it, to recompute */
    amp_dtype fallback;
    int64_t cache_limit;            /* bytes of the cast cache; 0: no limit */
    int64_t mask_limit;             /* bytes of the mask cache; 0: no limit */
    const amp_backend *backend;
    int32_t device;
    int32_t threads;
    uint64_t seed;
    amp_cpu_path cpu_path;
    amp_autotune autotune;
    const char *autotune_file;
    void *stream;                   /* the host's own stream; NULL: the backend's */
    void *blas;                     /* the host's own BLAS handle */
    amp_device_memory memory;       /* the host's own allocator on the device; not for amp_cpu(), see .system */
    amp_logger logger;
    amp_system system;
    amp_reducer reducer;
} amp_desc;

/* Opens a context.  Errors: 101, 102, 104, 105, 108, 301, 302, 501, 502; *out is NULL on failure. */
AMP_API amp_result amp_open_v(amp_context **out, const amp_desc *desc, uint64_t abi);
AMPI_INLINE amp_result amp_open(amp_context **out, const amp_desc *desc) { return amp_open_v(out, desc, AMP_ABI(amp_desc)); }
/* Closes it: everything created from it must be destroyed before.  NULL is allowed. */
AMP_API void amp_close(amp_context *amp);
/* The settings in effect, every default replaced by its value. */
AMP_API amp_result amp_query(const amp_context *amp, amp_desc *out);
/* The machine with the backend's device, and why the dtype was chosen. */
AMP_API amp_result amp_query_machine(const amp_context *amp, amp_machine *out);
AMP_API amp_result amp_query_choice(const amp_context *amp, amp_choice *out);
/* Changes the compute dtype of regions that begin from now on, not within another; drops the cast cache.
   Errors: 104, 108. */
AMP_API amp_result amp_set_dtype(amp_context *amp, amp_dtype dtype);
/* Off: regions that begin from now on compute in their operands' dtypes, as islands do; on: in the context's dtype again.
   Everything else goes on: the scaler scales, caches stay.  Errors: 101. */
AMP_API amp_result amp_set_enabled(amp_context *amp, int32_t enabled);

/* Device memory, 64-byte aligned (256 on CUDA).  *ptr is NULL for 0 bytes.  Errors: 102, 301. */
AMP_API amp_result amp_alloc(amp_context *amp, void **ptr, int64_t bytes);
AMP_API void amp_free(amp_context *amp, void *ptr);
/* Errors: 501. */
AMP_API amp_result amp_copy(amp_context *amp, void *dst, const void *src, int64_t bytes, amp_copy_kind kind);
AMP_API amp_result amp_fill(amp_context *amp, void *dst, int byte, int64_t bytes);
/* Waits until everything queued on the context's stream is done. */
AMP_API amp_result amp_sync(amp_context *amp);
/* The context's stream and the host's others, by events of the host's own (a cudaEvent_t): record marks what is queued so
   far, and wait makes what is queued from now on wait for the event.  Neither waits for the device.  On the CPU, where
   calls return when they are done, both do nothing.  Errors: 101, 501. */
AMP_API amp_result amp_event_record(amp_context *amp, void *event);
AMP_API amp_result amp_event_wait(amp_context *amp, void *event);
AMP_API amp_result amp_memory(const amp_context *amp, amp_memory_info *out);
AMP_API void amp_memory_reset_peak(amp_context *amp);
/* Gives back what can be made again: cached casts and masks nobody holds, scratch kept for later.  Waits.  *freed: bytes
   (may be NULL).  Errors: 101, 106 while a graph is captured, 501. */
AMP_API amp_result amp_cleanup(amp_context *amp, int64_t *freed);

/* Makes parameters known: gives each an id, so that its casts are cached.  The array must stay where it is
   until amp_param_forget or amp_close.  Names must be unique in a context.  Errors: 101, 103, 104, 107, 301. */
AMP_API amp_result amp_param_register(amp_context *amp, amp_param *params, int64_t n);
AMP_API void amp_param_forget(amp_context *amp, amp_param *params, int64_t n);
/* The host changed the weights itself: cached casts of them are stale. */
AMP_API void amp_param_touch(amp_param *param);
/* For a host's own backward kernels: 1 if the gradient must be added to param->grad, 0 if it overwrites.
   Marks the gradient as live. */
AMP_API int32_t amp_param_accumulate(amp_param *param);
/* The dtype to store a weight in at this context's level. */
AMP_API amp_dtype amp_param_dtype(const amp_context *amp, int32_t is_norm);

/* ==== 7 >>masks =====================================================================================
   Masks written out, and kept.  amp_attention and amp_softmax read structured masks from their description
   and need none of this; it is for softmax over scores of your own, for kernels that want a mask tensor, and
   for arbitrary masks that are used again and again.                                                    */

typedef struct amp_cache_info {
    int64_t entries, bytes, limit;  /* limit 0: none */
    int64_t hits, misses, evictions;
    int64_t new_inf;                /* cast cache: finite weights that became infinite in a copy */
} amp_cache_info;

/* A mask of the cache, read-only and shared. */
typedef struct amp_mask_view {
    amp_mask mask;                  /* U8: kind ARBITRARY over the tensor, for amp_attention and amp_softmax */
    amp_tensor tensor;              /* device, [batch or 1, 1, queries, keys]; 1 where all sequences have the same mask */
} amp_mask_view;

/* Writes a mask out, or finds it in the cache: by kind, sizes, dtype and the contents of its arrays.
   dtype AMP_U8: 1 seen, 0 hidden.  AMP_F32, AMP_F16, AMP_BF16: 0 seen, -inf hidden, to be added to scores.
   The arrays of mask must be readable by the host, and `allowed` the same for all heads.  The view stays until
   amp_mask_put gives it back; views given back may be evicted (least recently used first) when amp_desc.mask_limit
   is reached.  Errors: 101, 102, 104, 108 a mask per head, 301. */
AMP_API amp_result amp_mask_get(amp_context *amp, const amp_mask *mask, int64_t batch, int64_t queries, int64_t keys,
                                amp_dtype dtype, amp_mask_view *out);
AMP_API void amp_mask_put(amp_context *amp, amp_mask_view *view);
AMP_API amp_result amp_mask_cache_info(const amp_context *amp, amp_cache_info *out);
/* Frees the masks of one kind, or of all kinds, that nobody holds. */
AMP_API void amp_mask_cache_drop(amp_context *amp, amp_mask_kind kind);
AMP_API void amp_mask_cache_clear(amp_context *amp);

/* ==== 8 >>autocast ==================================================================================
   Which dtype each operator computes in.  A tensor's dtype is storage and the caller's choice; a region
   decides the compute dtype of the operators called in it.  Forward records the decision in the op
   struct, and backward obeys that record, so it runs outside the region, as in PyTorch.               */

typedef enum amp_operator {
    AMP_OP_NONE = 0,
    AMP_OP_LINEAR = 1, AMP_OP_MATMUL = 2, AMP_OP_GEMM = 3, AMP_OP_ATTENTION = 4,
    AMP_OP_LAYERNORM = 5, AMP_OP_RMSNORM = 6, AMP_OP_SOFTMAX = 7,
    AMP_OP_ACTIVATION = 8, AMP_OP_SWIGLU = 9, AMP_OP_CROSS_ENTROPY = 10, AMP_OP_MSE = 11,
    AMP_OP_EMBEDDING = 12, AMP_OP_DROPOUT = 13, AMP_OP_ADD = 14,
    AMP_OP_USER = 1000,             /* the first operator a host adds */
    AMP_OP_FORCE_I32 = 0x7fffffff
} amp_operator;

/* What a region does with an operator; names as in PyTorch's tables. */
typedef enum amp_cast_policy {
    AMP_CAST_DEFAULT = 0,           /* what the policy table says */
    AMP_CAST_LOWER = 1,             /* compute in the region's dtype */
    AMP_CAST_FP32 = 2,              /* compute and return fp32 */
    AMP_CAST_PROMOTE = 3,           /* the widest of the inputs, at least the region's dtype */
    AMP_CAST_FALLTHROUGH = 4,       /* whatever the inputs are */
    AMP_CAST_FP32_STORE = 5,        /* compute fp32, return the inputs' dtype (FUSED norms and softmax) */
    AMP_CAST_BANNED = 6,            /* refused in a region */
    AMP_CAST_FORCE_I32 = 0x7fffffff
} amp_cast_policy;

/* Which rule decided. */
typedef enum amp_rule {
    AMP_BY_STORAGE = 1,             /* no region, or an island: the operands' own dtype */
    AMP_BY_REGION = 2,              /* the region's dtype and the policy table */
    AMP_BY_OPERATOR = 3,            /* amp_operator_override */
    AMP_BY_LAYER = 4,               /* amp_layer_override */
    AMP_BY_LEVEL = 5,               /* O0 */
    AMP_BY_FORCE_I32 = 0x7fffffff
} amp_rule;

/* With a logger of level AMP_LOG_DEBUG each decision of a context is told once, with id AMP_LOG_DECISION, and again where
   the same call comes out otherwise (up to 4096 of them):
       linear h.0.fc.weight (bf16, fp32): computes in bf16, returns bf16, by region; cast cache: miss                  */
enum { AMP_LOG_DECISION = 1080 };

/* Filled by forward, read by backward and when recomputing; a zeroed plan is "forward has not run". */
typedef struct amp_plan {
    amp_dtype compute;              /* operands are rounded to this; sums are fp32 */
    amp_dtype result;               /* what PyTorch would return */
    amp_rule rule;
    amp_mode mode;
    uint64_t random_seed, random_offset;    /* of dropout */
    int32_t captured, reserved;     /* 1: the offset counts from where a launch of the graph begins */
    uint64_t version;               /* of the operator's parameters, added up: recomputing wants the same */
} amp_plan;

/*  .dtype            the enclosing region's, or the context's; F32, TF32, F16 or BF16
    .policy           the enclosing region's, or the context's
    .mode             the enclosing region's, or the context's                                        */
typedef struct amp_autocast_desc {
    amp_dtype dtype;
    amp_policy policy;
    amp_mode mode;
    int32_t disable;                /* 1: an island: operators use their operands' dtype */
    int32_t disable_cache;          /* 1: no cast cache within, nor in regions nested within */
    int32_t reserved;
} amp_autocast_desc;

/* Opens a region on this thread; regions nest up to 32 deep on a stack of the thread, so a region begun in
   one thread does not exist in another.  desc NULL: defaults.  Errors: 101, 102, 104, 108 as in amp_choose,
   106 nested too deep.  On failure no region was opened. */
AMP_API amp_result amp_autocast_begin_v(amp_context *amp, const amp_autocast_desc *desc, uint64_t abi);
AMPI_INLINE amp_result amp_autocast_begin(amp_context *amp, const amp_autocast_desc *desc) {
    return amp_autocast_begin_v(amp, desc, AMP_ABI(amp_autocast_desc));
}
/* Closes the innermost region of this thread.  Errors: 106 none is open, or it belongs to another context. */
AMP_API amp_result amp_autocast_end(amp_context *amp);
/* 1 if this thread is in a region of this context that is not an island, and no level O0.  *out: the region's
   effective settings (may be NULL). */
AMP_API int32_t amp_autocast_active(const amp_context *amp, amp_autocast_desc *out);

/* Recomputing (activation checkpointing, Chen et al. 2016): keep a block's input, let blocks share the memory of their
   activations, and in backward run each block's forward once more before its backward:

       amp_recompute_begin(amp); block_forward(b); amp_recompute_end(amp); block_backward(b);

   In between, the forwards that this thread calls obey the plans in their op structs, in whatever region they are: the
   same compute dtype, mode and random numbers, of which no new ones are taken.  From the same inputs they write the same
   bits, so the gradients are those of a run that kept everything.  Outputs that no backward reads need not be written
   again: the block's last linear may be left out.  The pair nests with itself and with regions, 32 deep in all.
   Errors: 101, 106 nested too deep, none is open, or the innermost is a region or another context's.  Operators in
   between: 106 forward has not run, ran in inference mode, or a parameter's version has moved since (the optimizer
   stepped).  amp_gemm and amp_autocast_decide have no record: 106 unless their region is opened again in between. */
AMP_API amp_result amp_recompute_begin(amp_context *amp);
AMP_API amp_result amp_recompute_end(amp_context *amp);

/* What an operator with inputs of these dtypes would do now.  layer: name for overrides, may be NULL; n >= 0
   inputs; integer and fp64 inputs are ignored as in PyTorch, and stay what they are.  Errors: 106 recomputing
   outside a region, 107 no such operator, 108 banned. */
AMP_API amp_result amp_autocast_decide(const amp_context *amp, int32_t op, const char *layer,
                                       const amp_dtype *inputs, int32_t n, amp_plan *out);
/* The two halves of that, for one or two inputs: the dtype to compute in, and the dtype to allocate the output
   in.  AMP_DTYPE_DEFAULT on error. */
AMP_API amp_dtype amp_autocast_compute(const amp_context *amp, int32_t op, const char *layer, amp_dtype a, amp_dtype b);
AMP_API amp_dtype amp_autocast_result(const amp_context *amp, int32_t op, const char *layer, amp_dtype a, amp_dtype b);
/* For the host's own kernels: *out is param's weight in dtype, from the cast cache when it is registered; valid
   until the weight changes or the last open region ends.  When the weight has that dtype it is the weight itself.
   With the cache disabled it is made anew at each call, at the same place: for one thread at a time.
   Errors: 101, 104, 106 param is not registered, 301. */
AMP_API amp_result amp_autocast_cast(amp_context *amp, amp_param *param, amp_dtype dtype, amp_tensor *out);

/* A host's own operator.  *op is its number for the calls above.  Errors: 101, 107 duplicate, 301. */
AMP_API amp_result amp_operator_register(amp_context *amp, const char *name, amp_cast_policy policy, int32_t *op);
/* Replaces the policy of one operator; AMP_CAST_DEFAULT restores it.  Errors: 102, 107. */
AMP_API amp_result amp_operator_override(amp_context *amp, int32_t op, amp_cast_policy policy);
/* Layers whose name matches pattern (* any run, ? one character) compute in dtype; the last match wins;
   AMP_DTYPE_DEFAULT takes the pattern back.  Errors: 101, 104, 108, 301. */
AMP_API amp_result amp_layer_override(amp_context *amp, const char *pattern, amp_dtype dtype);

/* Waits for the device, where the host cannot read its counters. */
AMP_API amp_result amp_cast_cache_info(const amp_context *amp, amp_cache_info *out);
/* Frees every cached cast. */
AMP_API void amp_cast_cache_clear(amp_context *amp);

/* ==== 9 >>operators =================================================================================
   Forward and backward of the parts of a network.  Each takes an op struct: the caller fills inputs and
   outputs, forward adds its plan, and the same struct goes to backward with the gradients filled in.
   "rows" are all leading dimensions of a tensor together; evenly strided, one after the other without
   overlapping, the last dimension contiguous.  Inputs of products and attention may repeat over batches and heads (stride
   0); elements of an output are never the same.  Storage is fp32, fp16 or bf16 unless said otherwise.
   Gradients of parameters go to param->grad: the first backward of a cycle overwrites, later ones add;
   parameters without grad are frozen.  Input gradients (dx) are overwritten; dx.data NULL: not wanted.
   layer names the layer for overrides; NULL: the weight's name.
   All return 101 for a missing pointer, 103 for shapes, 104 for dtypes, 301 without scratch memory, and
   backward 106 when forward has not run; for forwards that run again see amp_recompute_begin.          */

/* y = act(x weight^T + bias).  x [rows, in], weight [out, in], bias [out], y [rows, out].
   act NONE, GELU, GELU_ERF or RELU; with GELU and a backward to come, pre [rows, out] keeps what went into act. */
typedef struct amp_linear_op {
    const char *layer;
    amp_tensor x, y, pre;
    amp_param *weight, *bias;       /* bias may be NULL */
    amp_activation_kind act;
    int32_t dy_before_act;          /* 1: dy is the gradient before act already */
    amp_plan plan;
    amp_tensor dy, dx;              /* with act, backward overwrites dy with the gradient before act */
    amp_activation_kind x_act;      /* as act: x = x_act(x_pre), and backward writes the gradient of x_pre to dx */
    int32_t reserved;
    amp_tensor x_pre;               /* like dx; RELU can do without */
} amp_linear_op;
AMP_API amp_result amp_linear_v(amp_context *amp, amp_linear_op *op, uint64_t abi);
AMP_API amp_result amp_linear_backward_v(amp_context *amp, amp_linear_op *op, uint64_t abi);
AMPI_INLINE amp_result amp_linear(amp_context *amp, amp_linear_op *op) { return amp_linear_v(amp, op, AMP_ABI(amp_linear_op)); }
AMPI_INLINE amp_result amp_linear_backward(amp_context *amp, amp_linear_op *op) { return amp_linear_backward_v(amp, op, AMP_ABI(amp_linear_op)); }

/* y[i] = alpha op(a[i]) op(b[i]).  a [batch, m, k] or transposed [batch, k, m], b [batch, k, n] or [batch, n, k],
   y [batch, m, n]; a 2-d tensor is a batch of one. */
typedef struct amp_matmul_op {
    const char *layer;
    amp_tensor a, b, y;
    int32_t trans_a, trans_b;
    float alpha;                    /* 0: 1 */
    int32_t reserved;
    amp_plan plan;
    amp_tensor dy, da, db;          /* da, db: data NULL means not wanted */
} amp_matmul_op;
AMP_API amp_result amp_matmul_v(amp_context *amp, amp_matmul_op *op, uint64_t abi);
AMP_API amp_result amp_matmul_backward_v(amp_context *amp, amp_matmul_op *op, uint64_t abi);
AMPI_INLINE amp_result amp_matmul(amp_context *amp, amp_matmul_op *op) { return amp_matmul_v(amp, op, AMP_ABI(amp_matmul_op)); }
AMPI_INLINE amp_result amp_matmul_backward(amp_context *amp, amp_matmul_op *op) { return amp_matmul_backward_v(amp, op, AMP_ABI(amp_matmul_op)); }

/* The BLAS-shaped entry: replaces cblas_sgemm in one line and obeys the region.  The numbers of the enums are
   CBLAS's.  C = alpha op(A) op(B) + beta C, op(A) m x k, op(B) k x n; fp32, no alignment needed; beta 0 does
   not read C; any dimension may be 0.  May be called from several threads at once, each in its own region.
   Errors: 101, 102 (negative dimension, leading dimension too small, bad enum), 301. */
typedef enum amp_order { AMP_ROW_MAJOR = 101, AMP_COL_MAJOR = 102, AMP_ORDER_FORCE_I32 = 0x7fffffff } amp_order;
typedef enum amp_trans { AMP_NO_TRANS = 111, AMP_TRANS = 112, AMP_CONJ_TRANS = 113, AMP_TRANS_FORCE_I32 = 0x7fffffff } amp_trans;
AMP_API amp_result amp_gemm(amp_context *amp, amp_order order, amp_trans trans_a, amp_trans trans_b,
                            int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
                            const float *b, int64_t ldb, float beta, float *c, int64_t ldc);

/* o = softmax(scale q k^T + mask) v.  q, o [batch, queries, heads, dim]; k, v [batch, keys, heads, dim]; any
   strides with dim contiguous, so a packed qkv [batch, seq, 3, heads, dim] is three views of one buffer.
   lse fp32 [batch, heads, queries] carries what backward needs; never stores queries x keys. */
typedef struct amp_attention_op {
    const char *layer;
    amp_tensor q, k, v, o;
    float *lse;
    float scale;                    /* 0: 1 / sqrt(dim) */
    int32_t reserved;
    amp_mask mask;
    amp_plan plan;
    amp_tensor d_o, dq, dk, dv;
} amp_attention_op;
AMP_API amp_result amp_attention_v(amp_context *amp, amp_attention_op *op, uint64_t abi);
AMP_API amp_result amp_attention_backward_v(amp_context *amp, amp_attention_op *op, uint64_t abi);
AMPI_INLINE amp_result amp_attention(amp_context *amp, amp_attention_op *op) { return amp_attention_v(amp, op, AMP_ABI(amp_attention_op)); }
AMPI_INLINE amp_result amp_attention_backward(amp_context *amp, amp_attention_op *op) { return amp_attention_backward_v(amp, op, AMP_ABI(amp_attention_op)); }

/* sum = x + residual; y = normalised sum.  x, residual, sum, y [rows, cols]; weight, bias [cols], either may be
   NULL.  Without residual leave residual and sum empty.  mean, rstd fp32 [rows] (RMSNorm: no mean, no bias).
   Backward: dx = gradient of x (and of residual, which is the same), dsum added in if given: the gradient that
   reaches sum on its other way.  dsum may be dx. */
typedef struct amp_norm_op {
    const char *layer;
    amp_tensor x, residual, sum, y;
    amp_param *weight, *bias;
    float eps;                      /* 0: 1e-5 */
    int32_t reserved;
    float *mean, *rstd;
    amp_plan plan;
    amp_tensor dy, dsum, dx;
} amp_norm_op;
AMP_API amp_result amp_layernorm_v(amp_context *amp, amp_norm_op *op, uint64_t abi);
AMP_API amp_result amp_layernorm_backward_v(amp_context *amp, amp_norm_op *op, uint64_t abi);
AMP_API amp_result amp_rmsnorm_v(amp_context *amp, amp_norm_op *op, uint64_t abi);
AMP_API amp_result amp_rmsnorm_backward_v(amp_context *amp, amp_norm_op *op, uint64_t abi);
AMPI_INLINE amp_result amp_layernorm(amp_context *amp, amp_norm_op *op) { return amp_layernorm_v(amp, op, AMP_ABI(amp_norm_op)); }
AMPI_INLINE amp_result amp_layernorm_backward(amp_context *amp, amp_norm_op *op) { return amp_layernorm_backward_v(amp, op, AMP_ABI(amp_norm_op)); }
AMPI_INLINE amp_result amp_rmsnorm(amp_context *amp, amp_norm_op *op) { return amp_rmsnorm_v(amp, op, AMP_ABI(amp_norm_op)); }
AMPI_INLINE amp_result amp_rmsnorm_backward(amp_context *amp, amp_norm_op *op) { return amp_rmsnorm_backward_v(amp, op, AMP_ABI(amp_norm_op)); }

/* y = softmax(scale x) over the last dimension, masked; x, y [batch, heads, queries, keys], or fewer dimensions
   (rows, keys) without a mask.  y may be x. */
typedef struct amp_softmax_op {
    const char *layer;
    amp_tensor x, y;
    float scale;                    /* 0: 1 */
    int32_t reserved;
    amp_mask mask;
    amp_plan plan;
    amp_tensor dy, dx;              /* dx may be dy */
} amp_softmax_op;
AMP_API amp_result amp_softmax_v(amp_context *amp, amp_softmax_op *op, uint64_t abi);
AMP_API amp_result amp_softmax_backward_v(amp_context *amp, amp_softmax_op *op, uint64_t abi);
AMPI_INLINE amp_result amp_softmax(amp_context *amp, amp_softmax_op *op) { return amp_softmax_v(amp, op, AMP_ABI(amp_softmax_op)); }
AMPI_INLINE amp_result amp_softmax_backward(amp_context *amp, amp_softmax_op *op) { return amp_softmax_backward_v(amp, op, AMP_ABI(amp_softmax_op)); }

/* y = act(x + bias), any shape, contiguous.  If a backward follows, y may be x for TANH, and for RELU without a
   bias (they need y or the sign of it); the others read x again.  Errors: 102, 110 (such a y). */
typedef struct amp_activation_op {
    const char *layer;
    amp_tensor x, y;
    amp_param *bias;                /* [the last dimension of x]; may be NULL */
    amp_activation_kind act;
    int32_t reserved;
    amp_plan plan;
    amp_tensor dy, dx;              /* dx may be dy */
} amp_activation_op;
AMP_API amp_result amp_activation_v(amp_context *amp, amp_activation_op *op, uint64_t abi);
AMP_API amp_result amp_activation_backward_v(amp_context *amp, amp_activation_op *op, uint64_t abi);
AMPI_INLINE amp_result amp_activation(amp_context *amp, amp_activation_op *op) { return amp_activation_v(amp, op, AMP_ABI(amp_activation_op)); }
AMPI_INLINE amp_result amp_activation_backward(amp_context *amp, amp_activation_op *op) { return amp_activation_backward_v(amp, op, AMP_ABI(amp_activation_op)); }

/* y = silu(gate + gate_bias) * (up + up_bias).  gate, up, y [rows, cols]; gate and up may be halves of one
   [rows, 2 cols] buffer. */
typedef struct amp_swiglu_op {
    const char *layer;
    amp_tensor gate, up, y;
    amp_param *gate_bias, *up_bias; /* [cols]; each may be NULL */
    amp_plan plan;
    amp_tensor dy, dgate, dup;
} amp_swiglu_op;
AMP_API amp_result amp_swiglu_v(amp_context *amp, amp_swiglu_op *op, uint64_t abi);
AMP_API amp_result amp_swiglu_backward_v(amp_context *amp, amp_swiglu_op *op, uint64_t abi);
AMPI_INLINE amp_result amp_swiglu(amp_context *amp, amp_swiglu_op *op) { return amp_swiglu_v(amp, op, AMP_ABI(amp_swiglu_op)); }
AMPI_INLINE amp_result amp_swiglu_backward(amp_context *amp, amp_swiglu_op *op) { return amp_swiglu_backward_v(amp, op, AMP_ABI(amp_swiglu_op)); }

typedef enum amp_reduction {
    AMP_REDUCTION_DEFAULT = 0,      /* mean */
    AMP_REDUCTION_MEAN = 1, AMP_REDUCTION_SUM = 2,
    AMP_REDUCTION_FORCE_I32 = 0x7fffffff
} amp_reduction;

/* Softmax cross-entropy over the last dimension, loss and gradient in one read of the logits.
   logits [rows, cols], labels int32 [rows] in 0..classes-1 or ignore_index; the mean is over the rows that
   count.  With dlogits the gradient is computed in the same call, starting from seed (see amp_scaler_seed)
   times factor; dlogits may be the logits themselves.  The loss is never scaled.
   Errors: 201 for a label out of range (on a device: at the next call that waits). */
typedef struct amp_cross_entropy_op {
    const char *layer;
    amp_tensor logits, dlogits;     /* dlogits.data NULL: loss only */
    const int32_t *labels;
    int64_t classes;                /* 0: cols; fewer: the rest of the columns is padding */
    int32_t ignore_index;           /* 0: -100, as in PyTorch (a real label 0 cannot be ignored) */
    amp_reduction reduction;
    float label_smoothing;          /* 0 to 1 */
    float factor;                   /* 0: 1 */
    const float *seed;              /* device; NULL: 1 */
    float *loss;                    /* device, [1] */
    float *losses;                  /* device, [rows]; may be NULL */
    amp_plan plan;
} amp_cross_entropy_op;
AMP_API amp_result amp_cross_entropy_v(amp_context *amp, amp_cross_entropy_op *op, uint64_t abi);
AMPI_INLINE amp_result amp_cross_entropy(amp_context *amp, amp_cross_entropy_op *op) { return amp_cross_entropy_v(amp, op, AMP_ABI(amp_cross_entropy_op)); }

/* loss = mean or sum of (x - target)^2, and its gradient dx in the same call, as above. */
typedef struct amp_mse_op {
    const char *layer;
    amp_tensor x, target, dx;       /* dx.data NULL: loss only */
    amp_reduction reduction;
    float factor;                   /* 0: 1 */
    const float *seed;
    float *loss;
    amp_plan plan;
} amp_mse_op;
AMP_API amp_result amp_mse_v(amp_context *amp, amp_mse_op *op, uint64_t abi);
AMPI_INLINE amp_result amp_mse(amp_context *amp, amp_mse_op *op) { return amp_mse_v(amp, op, AMP_ABI(amp_mse_op)); }

/* y[i] = table[ids[i]] + positions[i mod seq].  ids int32 [rows], table [vocab, cols], positions [>= seq, cols]
   or NULL, y [rows, cols].  Backward adds rows up in a fixed order.  Errors: 201 for an id out of range. */
typedef struct amp_embedding_op {
    const char *layer;
    const int32_t *ids;
    amp_param *table, *positions;
    int64_t seq;                    /* rows per sequence; 0: all of them */
    amp_tensor y;
    amp_plan plan;
    amp_tensor dy;
} amp_embedding_op;
AMP_API amp_result amp_embedding_v(amp_context *amp, amp_embedding_op *op, uint64_t abi);
AMP_API amp_result amp_embedding_backward_v(amp_context *amp, amp_embedding_op *op, uint64_t abi);
AMPI_INLINE amp_result amp_embedding(amp_context *amp, amp_embedding_op *op) { return amp_embedding_v(amp, op, AMP_ABI(amp_embedding_op)); }
AMPI_INLINE amp_result amp_embedding_backward(amp_context *amp, amp_embedding_op *op) { return amp_embedding_backward_v(amp, op, AMP_ABI(amp_embedding_op)); }

/* y = x with each element zeroed with probability p, the rest divided by 1 - p.  No mask is stored: the
   random numbers are a function of (seed, offset, element), and the offset stands in the plan.  In inference
   mode y = x.  y may be x. */
typedef struct amp_dropout_op {
    const char *layer;
    amp_tensor x, y;
    float p;                        /* 0 to less than 1 */
    int32_t reserved;
    amp_plan plan;
    amp_tensor dy, dx;              /* dx may be dy */
} amp_dropout_op;
AMP_API amp_result amp_dropout_v(amp_context *amp, amp_dropout_op *op, uint64_t abi);
AMP_API amp_result amp_dropout_backward_v(amp_context *amp, amp_dropout_op *op, uint64_t abi);
AMPI_INLINE amp_result amp_dropout(amp_context *amp, amp_dropout_op *op) { return amp_dropout_v(amp, op, AMP_ABI(amp_dropout_op)); }
AMPI_INLINE amp_result amp_dropout_backward(amp_context *amp, amp_dropout_op *op) { return amp_dropout_backward_v(amp, op, AMP_ABI(amp_dropout_op)); }

/* y = a + b, contiguous, any storage dtypes, one rounding; y may be a or b.  The gradient of both is dy.
   Errors: 101, 103, 104. */
AMP_API amp_result amp_add(amp_context *amp, const amp_tensor *a, const amp_tensor *b, const amp_tensor *y);
/* dst = src in dst's dtype, contiguous, nearest even. */
AMP_API amp_result amp_cast(amp_context *amp, const amp_tensor *src, const amp_tensor *dst);
/* The next random offset of the context, and its seed: to be saved with a checkpoint.  Another seed puts captured graphs
   out of date.  Errors: 101, 102, 106 while a graph is captured, 107, 408. */
AMP_API amp_result amp_random_save(const amp_context *amp, amp_state *state, const char *prefix);
AMP_API amp_result amp_random_load(amp_context *amp, const amp_state *state, const char *prefix);


/* ==== 10 >>gradients ================================================================================
   From gradients to new weights: sets of ranges, the loss scaler, check + norm + clip, optimizers, the
   step.  The scaler is PyTorch's, bit for bit, with more presets and a floor.

   One training step is three calls, or amp_step for all of them:
       amp_scaler_check      looks for infinities and NaN, takes the norm; optional, the next call does it too
       amp_optimizer_step    new weights, unless something was infinite or NaN
       amp_scaler_update     new scale, once per iteration
   Nothing waits for the device: what was found, the scale and the counters live there, and small rules (at
   the end of this section) change them there.  Everything gives the same bits for any number of threads. */

/* ---- Sets.  Works on parameters or on any arrays of the host's; the device table is built once.

   Ranks: where the context has a reducer, a check first sums the gradients over the ranks and averages them,
   then combines "something was not finite" (MAX), so all ranks decide alike.  Every rank then takes part with
   every row of the set: a parameter without a gradient on one rank counts as zeros there. */

typedef struct amp_set amp_set;

/* Either params or ranges.  sharded 1: each rank holds other elements, so gradients are not summed over ranks,
   but norms and flags are combined. */
typedef struct amp_set_desc {
    amp_param *params; int64_t n_params;            /* their gradients, where grad_live is set; the array must stay.  A
                                                       host with an optimizer of its own sets grad_live = 0 after it */
    const amp_range *ranges; int64_t n_ranges;      /* copied; F32, F16, BF16 or F64; count 0 is allowed */
    int32_t sharded, reserved;
    double clip_norm;               /* largest allowed norm; 0: no clipping */
} amp_set_desc;
/* Errors: 101, 102, 103, 104, 105, 110 both or neither given, 301. */
AMP_API amp_result amp_set_create_v(amp_context *amp, amp_set **out, const amp_set_desc *desc, uint64_t abi);
AMPI_INLINE amp_result amp_set_create(amp_context *amp, amp_set **out, const amp_set_desc *desc) {
    return amp_set_create_v(amp, out, desc, AMP_ABI(amp_set_desc));
}
AMP_API void amp_set_destroy(amp_set *set);

/* What the last check of a set found. */
typedef struct amp_found {
    int32_t found_inf;              /* 1: some element was infinite or NaN */
    float norm;                     /* Euclidean, of the unscaled, averaged gradients; inf or NaN if found_inf */
    float clip_coef;                /* what clipping multiplies by */
    const char *first_bad;          /* name of the first range with a bad element, or NULL */
    int64_t first_bad_index;        /* its place in the set, -1: none */
} amp_found;
/* Waits for the device.  Errors: 101, 501. */
AMP_API amp_result amp_set_found(const amp_set *set, amp_found *out);
/* Device address of what was found, for a host's own kernels: `multiplier` is what is left to multiply by (one whose
   gradient buffer is its momentum too folds it into the learning rate), `skip` is 1 when nothing may change.  Never
   moves. */
AMP_API const amp_k_found *amp_set_device(const amp_set *set);
/* Multiplies the gradients by what the last check left to be multiplied: after AMP_CHECK_UNSCALE clipping, after
   AMP_CHECK_READ also the inverse scale and the average.  For hosts with an optimizer of their own.  Errors: 101. */
AMP_API amp_result amp_set_apply(amp_set *set);

/* ---- The loss scaler */

typedef struct amp_scaler amp_scaler;

typedef enum amp_scaler_preset {
    AMP_SCALER_DEFAULT = 0,         /* torch's numbers with a floor of 1 and a guarded ceiling */
    AMP_SCALER_TORCH = 1,           /* exactly torch.amp.GradScaler: no floor, no guard, refuses fp16 gradients */
    AMP_SCALER_APEX = 2,            /* apex.amp.LossScaler */
    AMP_SCALER_MEGATRON = 3,        /* Megatron-LM DynamicGradScaler */
    AMP_SCALER_DEEPSPEED = 4,       /* DeepSpeed DynamicLossScaler, JSON defaults */
    AMP_SCALER_DEEPSPEED_FUSED = 5, /* DeepSpeed fused FP16_Optimizer */
    AMP_SCALER_FAIRSEQ = 6,         /* fairseq DynamicLossScaler, class defaults */
    AMP_SCALER_METASEQ = 7,         /* metaseq (OPT): the interval moves with the scale */
    AMP_SCALER_FLAX = 8,            /* flax DynamicScale */
    AMP_SCALER_KERAS = 9,           /* TF / Keras 2 LossScaleOptimizer */
    AMP_SCALER_FORCE_I32 = 0x7fffffff
} amp_scaler_preset;

#define AMP_NO_FLOOR (-1.0f)        /* min_scale: none */
#define AMP_NO_CEILING (-1.0f)      /* max_scale: none, not even the guard */
#define AMP_NO_INTERVAL (-1)        /* growth_interval: never grow */
#define AMP_ZERO (-1.0f)            /* an explicit 0 where 0 means the default */
#define AMP_LAG_NONE (-1)           /* outcome_lag: none, so that amp_outcome_next waits for the step itself */

/*                   init    grow  shrink  interval  floor   ceiling  hysteresis
    DEFAULT          2^16    2     1/2     2000      1       2^126    1
    TORCH            2^16    2     1/2     2000      none    fp32     1
    APEX             2^16    2     1/2     2000      none    2^24     1
    MEGATRON         2^32    2     1/2     1000      1       none     2
    DEEPSPEED        2^16    2     1/2     1000      1       none     2
    DEEPSPEED_FUSED  2^16    2     1/2     1000 (a)  1       none     1
    FAIRSEQ          2^15    2     1/2     2000      1e-4 (b) none    1
    METASEQ          2^2     2     1/2     256 (c)   2^-5 (b) none    1
    FLAX             2^16    2     1/2     2000 (d)  2^-126  fp32 max 1
    KERAS            2^15    2     1/2     2000      1       fp32     1
   (a) one clean update more before the first growth after an overflow  (b) the scale stays above it instead of
   being set to it  (c) doubles and halves with the scale  (d) one clean update more before every growth.
   Ceiling "fp32": growth that would overflow is refused; "none": the scale can become infinite.  Where DeepSpeed
   and fairseq raise an exception at the floor, the step is skipped and reported with at_floor.

   0 takes the preset's value:
    .init_scale        finite and normal, with a finite and normal inverse (TORCH: anything), from floor to ceiling
    .growth_factor     above 1, finite
    .backoff_factor    0 to 1, both excluded
    .growth_interval   clean updates before growing; 1 or more, or AMP_NO_INTERVAL
    .min_scale         floor, as init_scale; AMP_NO_FLOOR: none
    .max_scale         ceiling, as init_scale; AMP_NO_CEILING: none
    .hysteresis        1 or more: overflows it takes to shrink the scale; refilled on growth
    .tolerance         0 to 1: an overflow also shrinks when overflows / updates since the last change reach this
                       rate, whatever hysteresis is left.  With hysteresis 1 only the rate decides (fairseq's rule).
                       0 means none with hysteresis 1 and in MEGATRON and DEEPSPEED, and 0.25 with more hysteresis
                       elsewhere, where alternating overflows could otherwise go on for ever; AMP_ZERO: none     */
typedef struct amp_scaler_desc {
    amp_scaler_preset preset;
    int32_t disable;                /* 1: the scale is 1 and stays (always so at level O0); checks, averages, skips, stages
                                       and their errors are as when enabled */
    int32_t frozen;                 /* 1: a static scale; overflows still skip */
    float init_scale;
    double growth_factor, backoff_factor;
    int32_t growth_interval, hysteresis;
    float min_scale, max_scale;
    double tolerance;
} amp_scaler_desc;
/* Errors: 101, 102, 105, 202, 301. */
AMP_API amp_result amp_scaler_create_v(amp_context *amp, amp_scaler **out, const amp_scaler_desc *desc, uint64_t abi);
AMPI_INLINE amp_result amp_scaler_create(amp_context *amp, amp_scaler **out, const amp_scaler_desc *desc) {
    return amp_scaler_create_v(amp, out, desc, AMP_ABI(amp_scaler_desc));
}
AMP_API void amp_scaler_destroy(amp_scaler *scaler);
/* Effective settings; creating a scaler from them gives the same scaler. */
AMP_API amp_result amp_scaler_query(const amp_scaler *scaler, amp_scaler_desc *out);
/* Device address of the scale: what a backward pass starts from, d(loss)/d(loss) = scale.  Never moves.
   NULL, which operators take as 1, for NULL. */
AMP_API const float *amp_scaler_seed(const amp_scaler *scaler);
/* Device address of the whole state, for a user's own kernels. */
AMP_API const amp_k_scaler *amp_scaler_device(const amp_scaler *scaler);
/* A copy of the state.  Waits for the device. */
AMP_API amp_result amp_scaler_get(const amp_scaler *scaler, amp_k_scaler *out);
/* The scale alone; 1 for a disabled scaler or NULL.  Waits. */
AMP_API float amp_scaler_scale(const amp_scaler *scaler);
/* Sets the scale; the growth tracker stays, as in PyTorch; every set goes back to its first stage.
   Errors: 202 (but TORCH takes anything, as PyTorch does). */
AMP_API amp_result amp_scaler_set_scale(amp_scaler *scaler, float scale);
/* Changes growth factor, backoff factor and growth interval; 0 leaves a value.  An interval at or below the
   tracker restarts the count (TORCH: the scale then never grows again, as in PyTorch).  Errors: 102. */
AMP_API amp_result amp_scaler_set_rule(amp_scaler *scaler, double growth_factor, double backoff_factor,
                                       int32_t growth_interval);

typedef enum amp_check_mode {
    AMP_CHECK_UNSCALE = 1,          /* gradients are unscaled in place (PyTorch's unscale_), and averaged where there is
                                       something to average; stored also where they are not finite */
    AMP_CHECK_READ = 2,             /* gradients stay as they are; the optimizer multiplies */
    AMP_CHECK_FORCE_I32 = 0x7fffffff
} amp_check_mode;
/* Looks for infinities and NaN in the set and takes its norm; once per set between two updates.  The stages are
   PyTorch's, per set, and update makes every set ready again:
                            ready             checked     stepped
       amp_scaler_check     -> checked        error 204   error 205
       amp_optimizer_step   checks, -> stepped  -> stepped  error 205
       amp_scaler_update    error 206 unless some set of this scaler was checked
   An empty set counts as checked.  On failure the set stays where it was.  Only the values before the
   multiplication are looked at: one that overflows by it is not found.
   Errors: 101, 102 mode, 106 the set is in use by another scaler, 203, 204, 205, 503. */
AMP_API amp_result amp_scaler_check(amp_scaler *scaler, amp_set *set, amp_check_mode mode);
/* Grows or shrinks the scale by what all checks since the last update found.  Errors: 101, 206. */
AMP_API amp_result amp_scaler_update(amp_scaler *scaler);
/* For buffers that hold values at an old scale (momentum in a gradient buffer): multiplies a set's ranges by
   scale / old_scale.  old_scale 0: the scale before the last update, so call it after every update.
   Errors: 101, 202. */
AMP_API amp_result amp_scaler_rescale(amp_scaler *scaler, amp_set *set, float old_scale);
/* Records <prefix>.scale and so on (prefix: 1 to 40 bytes): everything the next decision depends on.  All or nothing.
   Errors: 101, 102, 301. */
AMP_API amp_result amp_scaler_save(const amp_scaler *scaler, amp_state *state, const char *prefix);
/* All or nothing; every set is ready then.  Brings the saved factors and interval with it.  A disabled scaler takes
   anything, for its stages alone.  Errors: 101, 102, 107, 202, 408 another preset, or saved by a disabled scaler. */
AMP_API amp_result amp_scaler_load(amp_scaler *scaler, const amp_state *state, const char *prefix);

/* ---- Optimizers and the step */

typedef struct amp_optimizer amp_optimizer;

typedef enum amp_optimizer_kind {
    AMP_OPTIMIZER_DEFAULT = 0,      /* ADAMW */
    AMP_ADAMW = 1,                  /* torch.optim.AdamW: Loshchilov & Hutter 2019, decoupled weight decay */
    AMP_SGD = 2,                    /* torch.optim.SGD: momentum, dampening, Nesterov, weight decay as L2 */
    AMP_OPTIMIZER_FORCE_I32 = 0x7fffffff
} amp_optimizer_kind;

/* Parameters whose name matches get other settings; the first match wins. */
typedef struct amp_group {
    const char *match;              /* pattern with * and ? */
    double lr_scale;                /* 0: 1; AMP_ZERO: 0 */
    double weight_decay;            /* 0: the optimizer's; AMP_ZERO: none; else this, also on vectors */
    amp_master_kind master;         /* DEFAULT: the optimizer's; fp32 weights have none */
    amp_dtype moments;              /* DEFAULT: the optimizer's */
} amp_group;

/*  .lr                1e-3       finite, 0 or more by amp_optimizer_set_lr; AMP_ZERO
    .beta1, .beta2     0.9, 0.999 0 to less than 1; AMP_ZERO
    .eps               1e-8       AMP_ZERO
    .weight_decay      0          on matrices only, unless decay_vectors
    .momentum          0          SGD: 0 to less than 1 ...
    .dampening, .nesterov         ... as in torch.optim.SGD
    .clip_norm         0          0: no clipping; max norm of the whole averaged gradient
    .accumulation      1          micro-batches per step: amp_step steps on every n-th call and averages, so
                                  losses are not divided by hand
    .outcome_lag       2          steps until an outcome is delivered, to 63; AMP_LAG_NONE: at once
    .master            F32        of 16-bit weights; see amp_master_kind.  At level O3 NONE, or STOCHASTIC
    .moments           F32        or BF16, rounded stochastically: to nearest, a second moment with beta2 above
                                  0.996 would never shrink again, as v beta2 rounds back to v
    .seed              0          of stochastic rounding; ranks with the same weights need the same.  The number of
                                  an element is a function of seed, step applied, parameter and element         */
typedef struct amp_optimizer_desc {
    amp_optimizer_kind kind;
    int32_t accumulation;
    amp_param *params; int64_t n_params;            /* those without grad are left out; the array must stay */
    const amp_group *groups; int64_t n_groups;      /* copied */
    double lr, beta1, beta2, eps, weight_decay;
    double momentum, dampening;
    double clip_norm;
    int32_t nesterov, maximize;
    int32_t decay_vectors;          /* 1: weight decay on parameters of one dimension too */
    int32_t clip_each;              /* 1: also clip the running sum after every micro-batch; 0: once per step */
    int32_t outcome_lag;
    int32_t apply_nonfinite;        /* 1: without a scaler, step even with inf or NaN gradients (as PyTorch does) */
    int32_t sharded;                /* as in amp_set_desc */
    amp_master_kind master;
    amp_dtype moments;
    int32_t reserved;
    uint64_t seed;
} amp_optimizer_desc;
/* Allocates moments and masters, by default in fp32.  All parameters share one step count: one that gets its first
   gradient later has the others' bias correction.
   Errors: 101, 102, 103, 104, 105, 107 duplicate names, 110 a storage policy that does not fit, 301. */
AMP_API amp_result amp_optimizer_create_v(amp_context *amp, amp_optimizer **out, const amp_optimizer_desc *desc,
                                          uint64_t abi);
AMPI_INLINE amp_result amp_optimizer_create(amp_context *amp, amp_optimizer **out, const amp_optimizer_desc *desc) {
    return amp_optimizer_create_v(amp, out, desc, AMP_ABI(amp_optimizer_desc));
}
AMP_API void amp_optimizer_destroy(amp_optimizer *optimizer);
/* Effective settings. */
AMP_API amp_result amp_optimizer_query(const amp_optimizer *optimizer, amp_optimizer_desc *out);
/* The set of its gradients, for amp_scaler_check. */
AMP_API amp_set *amp_optimizer_set(amp_optimizer *optimizer);
/* From the next step on.  0 is a learning rate.  Errors: 102 negative or not finite. */
AMP_API amp_result amp_optimizer_set_lr(amp_optimizer *optimizer, double lr);
/* The largest allowed norm from the next check on; 0: none.  Errors: 101, 102. */
AMP_API amp_result amp_optimizer_set_clip(amp_optimizer *optimizer, double clip_norm);
/* Micro-batches per step, from a new cycle on: what the one begun has accumulated is dropped.  Errors: 101, 102. */
AMP_API amp_result amp_optimizer_set_accumulation(amp_optimizer *optimizer, int32_t accumulation);
/* The masters are made again from the weights (after a host loaded weights), and cached casts of them are dropped. */
AMP_API amp_result amp_optimizer_refresh(amp_optimizer *optimizer);
/* What storage costs: bytes per parameter, averaged over all that have a gradient.  Errors: 101. */
typedef struct amp_parameter_bytes {
    int64_t parameters;             /* elements of all of them */
    double weight, gradient, master, moments;
    double total;                   /* their sum */
} amp_parameter_bytes;
AMP_API amp_result amp_optimizer_bytes(const amp_optimizer *optimizer, amp_parameter_bytes *out);

/* One optimizer step, without touching the scale: checks first if amp_scaler_check was not called.  Gradients are
   averaged by `accumulation` (times ranks) and clipped.  Skips when something was infinite or NaN; moments, weights
   and step count then stay.  scaler NULL or disabled: scale 1.  Ends the accumulation cycle: the next backward
   overwrites gradients.  Errors: 101, 106 the set is in use by another scaler, 203, 205, 503. */
AMP_API amp_result amp_optimizer_step(amp_optimizer *optimizer, amp_scaler *scaler);
/* Check, norm, clip, optimizer, new scale: the whole step for one optimizer.  With accumulation n only every
   n-th call steps.  Nothing waits for the device.  scaler may be NULL.  Errors: as amp_optimizer_step, and 106 the set
   was checked before the cycle's last micro-batch. */
AMP_API amp_result amp_step(amp_optimizer *optimizer, amp_scaler *scaler);

/* What became of one step. */
typedef struct amp_outcome {
    int64_t step;                   /* number of the amp_step or amp_optimizer_step that stepped, from 1 */
    int64_t applied_steps;          /* of them applied so far */
    int32_t applied;                /* 0: skipped */
    int32_t at_floor;               /* 1: it overflowed, and the scale cannot shrink further */
    float norm, clip_coef;          /* as in amp_found */
    float scale;                    /* the scale this step's gradients carried ... */
    int32_t growth_tracker;         /* ... and the scaler's clean updates when the step began; 0 without a scaler */
    double lr;
    const char *first_bad;          /* name of the first parameter with a bad gradient, or NULL */
    int64_t total_skips, consecutive_skips;
} amp_outcome;
/* Takes the oldest outcome that is due: at least outcome_lag steps old.  1: *out was filled; 0: none is due, or the
   device failed.  Waits for that step if it is not done, so what is delivered when is always the same.
   The last 64 are kept.  amp_outcome_flush makes all of them due, and waits. */
AMP_API int32_t amp_outcome_next(amp_optimizer *optimizer, amp_outcome *out);
AMP_API amp_result amp_outcome_flush(amp_optimizer *optimizer);

/* A captured graph (CUDA graphs): what is called between begin and end is not done but recorded, and each launch does
   all of it at the cost of one call.  A whole training step can be captured, dynamic loss scaling included:

       step once as usual;                         (buffers, masks and plans exist from then on)
       amp_graph_begin(amp); forward; backward; amp_step; amp_graph_end(amp, &graph);
       then each step: amp_loader_next; amp_copy of the batch into the buffers that were captured;
                       amp_optimizer_set_lr; amp_graph_launch(graph); amp_outcome_next;

   The bits are those of the same calls without a graph: learning rate, loss scale, step count and random offsets are
   read from device memory.  In between nothing may wait for the device, and accumulation cycles must be whole.  While a
   graph lives, copies in the cast and mask caches stay.  What is built into it and cannot change: the dtype, overrides, the
   seed, an optimizer's or scaler's settings but the learning rate and the scale, pointers and shapes; launching after such a
   change is error 207.  A check is captured with its step or update.  Destroy graphs before the optimizers they step, and
   before the context.
   Errors: 101; begin: 106 one is being captured, 108 the backend has no graphs (the CPU's has none), 301, 501; end: 106
   nothing is captured, or a cycle is not whole, 501 with what could not be captured; launch: 106, 207, 501.  After a
   failed end nothing was done and nothing changed. */
typedef struct amp_graph amp_graph;
AMP_API amp_result amp_graph_begin(amp_context *amp);
AMP_API amp_result amp_graph_end(amp_context *amp, amp_graph **out);
AMP_API amp_result amp_graph_launch(amp_graph *graph);
AMP_API void amp_graph_destroy(amp_graph *graph);

/* Moments, masters, step count, learning rate, seed, accumulation position (with the gradients, in the middle of a
   cycle), counters and outcomes not yet delivered, as records <prefix>.step and so on (prefix: 1 to 40 bytes).
   Weights are the host's to save, and to load first.  Remainders are saved as the fp32 masters they stand for, so each
   kind loads into the other; loading remainders writes the bf16 weights, which are one with them.  bf16 moments load
   into fp32 ones too.  Save and load are all or nothing: saving over an earlier save needs room for both.
   Errors: 101, 102, 107, 301, 408 with the parameter's name. */
AMP_API amp_result amp_optimizer_save(const amp_optimizer *optimizer, amp_state *state, const char *prefix);
AMP_API amp_result amp_optimizer_load(amp_optimizer *optimizer, const amp_state *state, const char *prefix);

/* ---- The rules.  Single-thread arithmetic on the structs in device memory, written once for host and device: only
   integers, and fp64 operations in an order that leaves nothing to contract, so both give the same bits. */

/* Not 0, NaN included. */
AMPI_HD int ampi_is_set(float flag) { return (ampi_bits_f32(flag) & 0x7fffffffu) != 0; }
/* One rounding from the exact quotient's double, as PyTorch's scale.double().reciprocal().float(). */
AMPI_HD float ampi_inverse(float scale) { return (float)(1.0 / (double)scale); }
/* Scale and inverse both positive, finite and normal: 2^-126 to 2^126. */
AMPI_HD int ampi_is_usable(float scale) {
    uint32_t bits = ampi_bits_f32(scale);
    return bits >= 0x00800000u && bits <= 0x7e800000u;
}

/* Square root to an ulp by Newton's iteration; an argument that is not positive, normal and finite comes back. */
AMPI_HD double ampi_root(double x) {
    uint64_t bits = ampi_bits_f64(x);
    double r;
    int i;
    if (bits < (uint64_t)1 << 52 || bits >= (uint64_t)0x7ff << 52) return x;
    r = ampi_f64_of_bits((bits >> 1) + ((uint64_t)1023 << 51));
    for (i = 0; i < 5; i++) r = 0.5 * (r + x / r);
    return r;
}

AMPI_HD void ampi_rule_begin(const amp_k_rule *rule) {
    amp_k_found *f = rule->found;
    float inverse = rule->scaler ? rule->scaler->inv_scale : 1.0f;
    f->sum_sq = 0;
    f->found_inf = 0;
    f->first_bad = -1;
    f->norm = 0;
    f->clip_coef = 1;
    f->factor = f->multiplier = (float)((double)inverse / rule->step_rule.divisor);
    f->skip = 0;
}

AMPI_HD void ampi_rule_checked(const amp_k_rule *rule) {
    amp_k_found *f = rule->found;
    amp_k_scaler *s = rule->scaler;
    const amp_k_step_rule *step = &rule->step_rule;
    double inverse = s ? (double)s->inv_scale : 1.0;
    double norm = ampi_root(f->sum_sq) * inverse / step->divisor, clip = 1;
    int bad = ampi_is_set(f->found_inf);
    if (step->clip_norm > 0) clip = step->clip_norm / (norm + 1e-6);    /* torch.nn.utils.clip_grad_norm_ */
    if (!(clip < 1)) clip = 1;
    f->norm = (float)norm;
    f->clip_coef = (float)clip;
    f->multiplier = (float)(step->unscaled ? clip : inverse * clip / step->divisor);
    f->skip = bad && !step->apply_nonfinite;
    if (s == NULL) return;
    if (bad) s->found_inf = 1;
    if ((rule->scaler_rule.bits & AMP_SCALE_GUARDED) && !ampi_is_usable(s->scale)) f->skip = 1;
}

/* The scale after an overflow.  Never larger: a floor above the scale leaves it. */
AMPI_HD float ampi_scale_shrunk(const amp_k_scaler_rule *r, float scale) {
    float next = (float)((double)scale * r->backoff_factor);
    if (!(r->min_scale > 0)) return next;               /* a negative one shrinks too, as in PyTorch */
    if (next < r->min_scale) next = r->bits & AMP_FLOOR_REFUSES ? scale : r->min_scale;
    return next > scale ? scale : next;
}

/* The scale after a clean interval.  fp32 overflows from 2^128 - 2^103 on. */
AMPI_HD float ampi_scale_grown(const amp_k_scaler_rule *r, float scale) {
    const double limit = 340282356779733661637539395458142568448.0;
    double next = (double)scale * r->growth_factor;
    if (next > (double)r->max_scale) next = (double)r->max_scale;
    if ((r->bits & AMP_GROWTH_REFUSES_INF) && !(next < limit && next > -limit)) return scale;
    return (float)next;
}

AMPI_HD void ampi_rule_stepped(const amp_k_rule *rule) {
    amp_k_found *f = rule->found;
    const amp_k_scaler *s = rule->scaler;
    const amp_k_scaler_rule *r = &rule->scaler_rule;
    amp_k_outcome *o = rule->outcomes + f->attempts % AMP_OUTCOMES;
    f->attempts++;
    if (rule->step_rule.lr >= 0) f->lr = rule->step_rule.lr;
    if (f->skip) {
        f->skips++;
        f->consecutive_skips++;
    } else {
        f->step++;
        f->consecutive_skips = 0;
        f->beta1_power *= rule->step_rule.beta1;
        f->beta2_power *= rule->step_rule.beta2;
    }
    o->number = f->attempts;
    o->step = f->step;
    o->skips = f->skips;
    o->consecutive_skips = f->consecutive_skips;
    o->lr = f->lr;
    o->norm = f->norm;
    o->clip_coef = f->clip_coef;
    o->scale = s ? s->scale : 1.0f;
    o->growth_tracker = s ? s->growth_tracker : 0;
    o->applied = !f->skip;
    o->at_floor = s && f->skip && !r->frozen && !(ampi_scale_shrunk(r, s->scale) < s->scale);
    o->first_bad = f->first_bad;
}

/* What shrinking and growing have in common. */
AMPI_HD void ampi_scale_changed(amp_k_scaler *s, float scale) {
    s->scale = scale;
    s->inv_scale = ampi_inverse(scale);
    s->steps = 0;
}

AMPI_HD void ampi_update_overflow(amp_k_scaler *s, const amp_k_scaler_rule *r) {
    int spent, rate;
    float next;
    s->skips++;
    s->consecutive_skips++;
    s->growth_tracker = 0;
    s->at_floor = 0;
    if (s->overflows < INT32_MAX) s->overflows++;
    if (s->hysteresis_left > 0) s->hysteresis_left--;
    spent = s->hysteresis_left == 0 && (r->hysteresis > 1 || !(r->tolerance > 0));
    rate = r->tolerance > 0 && (double)s->overflows / (double)s->steps >= r->tolerance;
    if (r->frozen || !(spent || rate)) return;
    next = ampi_scale_shrunk(r, s->scale);
    s->at_floor = !(next < s->scale);
    s->overflows = 0;
    if (r->bits & AMP_WINDOW_MOVES) {
        s->growth_interval = (int32_t)((double)s->growth_interval / r->growth_factor);
        if (s->growth_interval < 1) s->growth_interval = 1;
    }
    ampi_scale_changed(s, next);
}

AMPI_HD void ampi_update_growth(amp_k_scaler *s, const amp_k_scaler_rule *r) {
    if (!(r->bits & AMP_WINDOW_MOVES)) s->growth_tracker = r->bits & AMP_GROWTH_COUNTS_ON ? 1 : 0;
    else if ((double)s->growth_interval * r->growth_factor < 2147483647.0)
        s->growth_interval = (int32_t)((double)s->growth_interval * r->growth_factor);
    s->hysteresis_left = r->hysteresis;
    if (!(r->bits & AMP_OVERFLOWS_KEPT)) s->overflows = 0;
    ampi_scale_changed(s, ampi_scale_grown(r, s->scale));
}

/* torch._amp_update_scale_ with the presets' differences.  The tracker is compared with ==, as there; metaseq counts
   clean updates since the last overflow and grows at each multiple of its interval. */
AMPI_HD void ampi_rule_update(amp_k_scaler *s, const amp_k_scaler_rule *r) {
    int overflow = ampi_is_set(s->found_inf), due;
    s->found_inf = 0;
    s->previous_scale = s->scale;
    s->updates++;
    if (s->steps < INT32_MAX) s->steps++;
    if (overflow) {
        ampi_update_overflow(s, r);
        return;
    }
    s->consecutive_skips = 0;
    s->at_floor = 0;
    if (s->growth_tracker < INT32_MAX) s->growth_tracker++;
    if (r->frozen || s->growth_interval < 1) return;
    if (r->bits & AMP_WINDOW_MOVES) due = s->growth_tracker % s->growth_interval == 0;
    else due = s->growth_tracker == s->growth_interval + (r->bits & AMP_GROWTH_ONE_LATER ? 1 : 0);
    if (due) ampi_update_growth(s, r);
}

AMPI_HD void ampi_rule_set_scale(amp_k_scaler *s, float scale) {
    s->previous_scale = s->scale;
    s->found_inf = 0;
    s->at_floor = 0;
    s->overflows = 0;
    ampi_scale_changed(s, scale);
}

AMPI_HD void ampi_rule_run(const amp_k_rule *rule) {
    amp_k_scaler *s = rule->scaler;
    amp_k_found *f = rule->found;
    float old = ampi_is_set(rule->value) || s == NULL ? rule->value : s->previous_scale;
    switch (rule->kind) {
        case AMP_RULE_BEGIN: ampi_rule_begin(rule); break;
        case AMP_RULE_CHECKED: ampi_rule_checked(rule); break;
        case AMP_RULE_STEPPED: ampi_rule_stepped(rule); break;
        case AMP_RULE_UPDATE: ampi_rule_update(s, &rule->scaler_rule); break;
        case AMP_RULE_APPLIED: f->multiplier = 1; break;
        case AMP_RULE_RATIO: f->factor = (float)((double)s->scale / (double)old); break;
        case AMP_RULE_SET_SCALE: ampi_rule_set_scale(s, rule->value); break;
        case AMP_RULE_SET_INTERVAL:
            s->growth_interval = rule->scaler_rule.growth_interval;
            if (ampi_is_set(rule->value) && s->growth_tracker >= s->growth_interval) s->growth_tracker = 0;
            break;
        case AMP_RULE_LAUNCH:
            if (f) f->lr = rule->step_rule.lr;
            if (rule->random) *rule->random = rule->random_offset;
            break;
        default: break;
    }
}

/* ---- Stochastic rounding in an optimizer.  Element i of a row takes the word amp_random_u32(s, i), s the seed of the
   row and step.  The weight takes the word, of which bf16 uses the upper half; bf16 moments both take the lower half,
   each unbiased by itself.  The step counts those applied, so a skipped one leaves no trace here either. */
AMPI_HD uint64_t ampi_row_seed(uint64_t seed, int64_t step, int64_t row) {
    uint32_t words[4];
    amp_philox(seed, (uint64_t)step, (uint64_t)row, words);
    return words[0] | (uint64_t)words[1] << 32;
}
AMPI_HD uint16_t ampi_moment_round(float x, uint32_t word) { return amp_bf16_stochastic(x, word << 16, 0); }

/* What every element of a row needs, in fp32; computed in fp64 from the device's own counters.

   AdamW, as torch.optim.AdamW:  m += (g - m) (1 - beta1);  v = beta2 v + (1 - beta2) g^2;
   w = (1 - lr decay) w - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps),  g = gradient * multiplier. */
typedef struct ampi_adamw_step {
    float multiplier, beta2, rest1, rest2, keep, rate, correction, eps;
    uint64_t seed;                  /* of ampi_row_seed */
} ampi_adamw_step;
AMPI_HD ampi_adamw_step ampi_adamw_row(const amp_k_adamw *args, const amp_k_tensor *row) {
    const amp_k_found *f = args->found;
    ampi_adamw_step s;
    double lr = f->lr * row->lr_scale;
    s.multiplier = args->maximize ? -f->multiplier : f->multiplier;
    s.beta2 = (float)args->beta2;
    s.rest1 = (float)(1.0 - args->beta1);
    s.rest2 = (float)(1.0 - args->beta2);
    s.keep = (float)(1.0 - ampi_f64_of_bits(ampi_bits_f64(lr * row->weight_decay)));    /* two roundings; nvcc fuses them, and its kernel makes `keep` again */
    s.rate = (float)(lr / (1.0 - f->beta1_power));
    s.correction = (float)(1.0 / ampi_root(1.0 - f->beta2_power));
    s.eps = (float)args->eps;
    s.seed = ampi_row_seed(args->seed, f->step, row - args->table);
    return s;
}

/* SGD, as torch.optim.SGD:  g = gradient * multiplier + decay w;  b = momentum b + (1 - dampening) g, in the first step
   b = g;  w -= lr (nesterov ? g + momentum b : b), without momentum w -= lr g. */
typedef struct ampi_sgd_step {
    float multiplier, decay, momentum, rest, rate;
    int32_t nesterov;
    uint64_t seed;
} ampi_sgd_step;
AMPI_HD ampi_sgd_step ampi_sgd_row(const amp_k_sgd *args, const amp_k_tensor *row) {
    const amp_k_found *f = args->found;
    int first = f->step == 1;
    ampi_sgd_step s;
    s.multiplier = args->maximize ? -f->multiplier : f->multiplier;
    s.decay = (float)row->weight_decay;
    s.momentum = (float)args->momentum;
    s.rest = first ? 1.0f : (float)(1.0 - args->dampening);
    s.rate = (float)(f->lr * row->lr_scale);
    s.nesterov = args->nesterov;
    s.seed = ampi_row_seed(args->seed, f->step, row - args->table);
    return s;
}
/* ==== 11 >>data =====================================================================================
   Samples, read by worker threads ahead of the training loop, delivered in one order whatever the number
   of workers, and resumed exactly.  They come from token files, from .npy arrays or from a callback.    */

typedef enum amp_token_format {
    AMP_TOKENS_DEFAULT = 0,         /* by content: llm.c's magic or .npy's, else bytes */
    AMP_TOKENS_LLMC = 1,            /* llm.c: 256 int32 (20240520, 1, count) and u16, or (20240801, 7, count) and u32 */
    AMP_TOKENS_U16 = 2,             /* raw little-endian uint16 */
    AMP_TOKENS_BYTES = 3,           /* any file: one token per byte */
    AMP_TOKENS_NPY = 4,             /* one-dimensional .npy of u1, u2, u4, i4 or i8 */
    AMP_TOKENS_FORCE_I32 = 0x7fffffff
} amp_token_format;

/* What becomes of the samples at an epoch's end that do not fill a batch on every rank. */
typedef enum amp_last_batch {
    AMP_LAST_DEFAULT = 0,           /* DROP */
    AMP_LAST_DROP = 1,              /* left out of this epoch */
    AMP_LAST_PARTIAL = 2,           /* a smaller batch, shared out evenly among the ranks; on some it may be empty */
    AMP_LAST_PAD = 3,               /* the same, filled up: zeros, and -100, the ignore index, as targets of tokens */
    AMP_LAST_FORCE_I32 = 0x7fffffff
} amp_last_batch;

enum { AMP_MAX_FIELDS = 8 };

/* One of the things a sample consists of: `count` values of dtype. */
typedef struct amp_field {
    amp_dtype dtype;
    int32_t reserved;
    int64_t count;
} amp_field;

/* What a callback is asked for. */
typedef struct amp_sample {
    int64_t sample;                 /* 0 to samples - 1 */
    int64_t epoch;
    uint64_t random;                /* for augmentation: a function of (seed, epoch, sample) only */
    int32_t worker;                 /* who asks, from 0: for scratch memory of its own */
    int32_t error_size;
    char *error;                    /* on failure: why, for the error text */
} amp_sample;

/* A source of the host's own.  read fills fields[i], host memory for fields[i].count values, and returns 0, or
   anything else for failure.  Workers call it at the same time.  Resuming counts on equal calls giving equal
   samples.  amp_loader_destroy waits until no call is running. */
typedef struct amp_source {
    int (*read)(void *user, const amp_sample *sample, void *const *fields);
    void *user;
    int64_t samples;
    amp_field fields[AMP_MAX_FIELDS];
    int32_t n_fields;
    int32_t reserved;
    uint64_t hash;                  /* of the data: resuming on another hash is refused; may stay 0 */
} amp_source;

typedef struct amp_loader amp_loader;

/* One of path, arrays and source.
   path: token files.  A sample is `seq` tokens, and the same one further as targets; samples start every seq
   tokens of a file and end in it.  A path with * ? or [] in any part that is no file itself is a pattern; the files
   are taken in the order of their bytes, and each stays open: one that another is renamed over is still read, one
   that is cut short is an error where it ends.
   arrays: .npy files of f2, f4, f8, u1, u2, i4, i8 or b1 with the same first dimension; sample i is row i of each.
    .format     by content
    .first      0          first token used, counted over all files; first sample of arrays and source
    .last       the end    one past the last
    .last_batch DROP
    .epochs     endless    after that many amp_loader_next returns AMP_ERR_END
    .workers    2          1 to 64 threads; AMP_NO_WORKERS: read in amp_loader_next
    .prefetch   2          batches read ahead: 1 to 1024
    .timeout_ms 60000      how long amp_loader_next waits for a worker
    .vocab      unchecked  tokens must be below
    .cache_mb   1024       shuffled samples of less than 8 KiB: file contents are kept in this many MiB of memory as
                           they are first touched, since a read for each would be slow; beyond them there is one  */
typedef struct amp_loader_desc {
    const char *path;
    const char *const *arrays;
    const amp_source *source;       /* copied */
    int32_t n_arrays;               /* 1 to AMP_MAX_FIELDS */
    amp_token_format format;
    int32_t shuffle;                /* 1: another order each epoch, a function of (seed, epoch) only */
    amp_last_batch last_batch;
    int64_t batch;                  /* samples per batch and rank: 1 or more */
    int64_t seq;                    /* path: 1 or more */
    int64_t first, last;
    uint64_t seed;
    int64_t epochs;
    int32_t workers, prefetch;
    int32_t timeout_ms;
    int32_t rank, world;            /* of this process; world 0: those of the context's reducer */
    int32_t vocab;
    int32_t disable_pinned;         /* 1: ordinary host memory, where the device has pinned */
    int32_t cache_mb;
} amp_loader_desc;
#define AMP_NO_WORKERS (-1)

/* Device memory, read-only, valid until the next call on the loader: that is, for work queued on the context's stream
   before it.  A device of its own gets batches on a stream of their own, into two slots, while the one before is in use;
   amp_loader_next then waits for nothing but the workers, and the context's stream for the copy.  Tokens below 65536, by
   .vocab or by the files' width, cross the bus in 16 bits and are widened there. */
typedef struct amp_batch {
    const int32_t *inputs, *targets;    /* [batch, seq]: fields 0 and 1, each NULL unless it is I32 */
    const void *fields[AMP_MAX_FIELDS]; /* [batch, count] each */
    int64_t batch, seq;             /* samples, and values of field 0 in each */
    int64_t valid;                  /* samples before the padding */
    int64_t epoch, index;           /* epoch from 0; index of this batch in its epoch */
} amp_batch;

/* A loader is used by one thread at a time; amp_loader_stop and amp_loader_info_get may come from any.  Errors: 101,
   102, 103 arrays of different length, 104, 105, 109, 110, 301, 302, 401, 402, 404, 405; 102 also when there is less than
   one batch. */
AMP_API amp_result amp_loader_create_v(amp_context *amp, amp_loader **out, const amp_loader_desc *desc, uint64_t abi);
AMPI_INLINE amp_result amp_loader_create(amp_context *amp, amp_loader **out, const amp_loader_desc *desc) { return amp_loader_create_v(amp, out, desc, AMP_ABI(amp_loader_desc)); }
/* For closing from another thread: a call that waits, and every later one, returns 106, and the position stays.  Save and
   destroy remain. */
AMP_API void amp_loader_stop(amp_loader *loader);
/* A call that another thread is in ends with 106 first; none may begin any more (see amp_loader_stop).
   Returns within 100 ms, once no callback is running and, without workers, no call: a worker that the operating system
   holds in a read is left behind, and frees what it uses, through the context's system table, when the read returns. */
AMP_API void amp_loader_destroy(amp_loader *loader);
/* After an error the loader stands where it stood: the next call tries the same batch again.
   Errors: 106 stopped, 402 and 405 with file and offset, 201 token not below vocab, 409 after the last epoch, 410, 411. */
AMP_API amp_result amp_loader_next(amp_loader *loader, amp_batch *out);
/* Makes batch `index` of `epoch` the next one, in the same time wherever it is.  Errors: 102, 106, 410. */
AMP_API amp_result amp_loader_seek(amp_loader *loader, int64_t epoch, int64_t index);

typedef struct amp_loader_info {
    amp_token_format format;        /* of token files; else DEFAULT */
    int32_t n_files, n_fields, ready;   /* ready: batches that wait to be taken */
    amp_field fields[AMP_MAX_FIELDS];
    int64_t tokens;                 /* in all token files */
    int64_t samples;                /* per epoch, all ranks */
    int64_t batches;                /* per epoch, this rank */
    int64_t epoch, index;           /* of the batch that comes next */
    int64_t waits;                  /* amp_loader_next calls that found no batch ready ... */
    double wait_seconds;            /* ... and what they waited in all: time lost to the data */
    uint64_t hash;                  /* of the sizes and of sample blocks of the files: other data has another */
} amp_loader_info;
AMP_API amp_result amp_loader_info_get(const amp_loader *loader, amp_loader_info *out);
/* Effective settings; what they point to belongs to the loader. */
AMP_API amp_result amp_loader_query(const amp_loader *loader, amp_loader_desc *out);
/* Record <prefix>.loader: what was consumed, not what was read ahead.  Load continues exactly there, also with
   other workers, prefetch, paths and epochs, and refuses other data, samples, order or world.
   Errors of save: 102, 301; of load: 106, 107, 408, 410. */
AMP_API amp_result amp_loader_save(const amp_loader *loader, amp_state *state, const char *prefix);
AMP_API amp_result amp_loader_load(amp_loader *loader, const amp_state *state, const char *prefix);

/* ==== 12 >>watch ====================================================================================
   Settings that reach every part, what the library is doing, records of each step and epoch, and what the
   numbers in the tensors look like.                                                                     */

/* ---- Settings: one struct for everything below, from a program, a file or the environment */

typedef enum amp_scaler_use {
    AMP_SCALER_USE_DEFAULT = 0,     /* AUTO */
    AMP_SCALER_USE_AUTO = 1,        /* for fp16 alone */
    AMP_SCALER_USE_ON = 2, AMP_SCALER_USE_OFF = 3,
    AMP_SCALER_USE_FORCE_I32 = 0x7fffffff
} amp_scaler_use;

/* What to do about trouble: see amp_trouble. */
typedef enum amp_nan_action {
    AMP_NAN_DEFAULT = 0,            /* SKIP */
    AMP_NAN_REPORT = 1,             /* a warning; without a scaler the step is applied all the same, as in PyTorch */
    AMP_NAN_SKIP = 2,               /* a warning; the step is skipped if its gradients are not finite */
    AMP_NAN_STOP = 3,               /* as SKIP, and the record asks the host to stop */
    AMP_NAN_RECOVER = 4,            /* as SKIP, and the record asks the host to call amp_recovery_step */
    AMP_NAN_FORCE_I32 = 0x7fffffff
} amp_nan_action;

#define AMP_INTERVAL_OFF (-1)       /* an interval: never */

/* The words in quotes are the key in files, and in capitals behind AMP_ the environment variable.  Words are those of
   the enums without their prefix, in either case; switches are true, false, on, off, yes, no, 1, 0; "default" takes any
   key back to its default.  An interval is a number of steps, or "off".

    "enabled"            .disable           true       false: regions compute in their operands' dtypes
    "dtype"              .dtype             auto       fp32, tf32, fp16, bf16
    "level"              .level             O1         O0 to O3
    "policy"             .policy            fused      fused, torch
    "mode"               .mode              training   training, inference
    "memory_efficient"   .memory_efficient  false      the cast cache is emptied when the last region closes, and models
                                                       that can recompute do (examples/train_gpt.c)
    "cache"              .disable_cache     true       the cast cache
    "fallback"           .fallback          none       see amp_desc.fallback
    "tf32"               .allow_tf32        false      products left in fp32 are computed in TF32
    "autotune"           .autotune          off        off, on
    "scaler"             .use_scaler        auto       auto (fp16 alone), on, off
    "scaler_preset"      .scaler.preset     default    the names of amp_scaler_preset
    "frozen"             .scaler.frozen     false      a static scale; overflows still skip
    "init_scale" "growth_factor" "backoff_factor" "growth_interval" "min_scale" "max_scale" "hysteresis" "tolerance"
                         .scaler            the preset's; a floor, ceiling or growth interval may be "none"
    "clip_norm"          .clip_norm         none       above 0, finite
    "accumulation"       .accumulation      1          1 to 1000000 micro-batches per step
    "log_interval"       .log_interval      100        steps between step records
    "memory_interval"    .memory_interval   100        steps between memory queries
    "cleanup_interval"   .cleanup_interval  off        steps between calls of amp_cleanup
    "numerics_interval"  .numerics_interval off        steps between looks at the tensors: where it is above 0 the host
                                                       makes an amp_numerics with it
    "memory_warning"     .memory_warning    0.9        share of the device's memory, up to 1, that is worth a warning
    "nan_action"         .nan_action        skip       report, skip, stop, recover
    "max_skips"          .max_skips         25         consecutive skips that are trouble; 1 or more
    "max_retries"        .max_retries       3          recoveries before giving up; 0 to 1000: for the amp_recovery
    "debug"              .debug             false      the log tells each operator's decision, once                      */
typedef struct amp_settings {
    int32_t disable;
    amp_dtype dtype;
    amp_level level;
    amp_policy policy;
    amp_mode mode;
    int32_t memory_efficient, disable_cache;
    amp_dtype fallback;
    int32_t allow_tf32;
    amp_autotune autotune;
    amp_scaler_use use_scaler;
    amp_nan_action nan_action;
    amp_scaler_desc scaler;         /* .disable stays 0: see use_scaler */
    double clip_norm;
    int32_t accumulation, max_skips;
    int32_t max_retries;            /* 0: the default; AMP_NO_RETRIES: none */
    int32_t debug;
    int64_t log_interval, memory_interval, cleanup_interval, numerics_interval;     /* 0: the default; AMP_INTERVAL_OFF */
    double memory_warning;          /* 0: the default; 1: never */
} amp_settings;
#define AMP_NO_RETRIES (-1)

/* Sets one by its key.  On failure nothing changes.  Errors: 101, 107 no such key (the text names the nearest), 102 a
   value out of range or no value of this key. */
AMP_API amp_result amp_settings_set(amp_settings *settings, const char *key, const char *value);
/* Lines "key = value"; # begins a comment, blank lines are allowed, a key may stand only once.  All or nothing.
   name stands in error texts, which say line and key.  Errors: as above, and 404 a line that is neither, 110 twice. */
AMP_API amp_result amp_settings_read_text(amp_settings *settings, const char *name, const char *text, size_t bytes);
/* The same from a file.  Errors: also 301, 401, 402. */
AMP_API amp_result amp_settings_read_file(amp_settings *settings, const amp_system *system, const char *path);
/* From the environment: AMP_DTYPE=bf16 and its kin; nothing else in the library reads it.  All or nothing.
   Errors: as amp_settings_set; 107 for a variable AMP_... that is no key. */
AMP_API amp_result amp_settings_read_env(amp_settings *settings);
/* Each field by itself, and what contradicts: level O0, which is fp32 throughout, with another dtype, with tf32 or with
   the scaler on; levels O2 and O3, which keep 16-bit weights, with fp32 or tf32; a floor above the ceiling; an initial
   scale outside of them.  What is only without effect is no contradiction.  Errors: 101, 102, 110 with both keys, 202. */
AMP_API amp_result amp_settings_check(const amp_settings *settings);
/* Every effective setting as a file that amp_settings_read_text takes, as snprintf does it. */
AMP_API size_t amp_settings_text(const amp_settings *settings, char *text, size_t size);

/* What a context's other parts are to be created with: fields of the descs that are settings are overwritten, the rest
   stays.  Each pointer may be NULL.  scaler->disable becomes 1 where no scaler is wanted; for "auto" that takes the
   context's dtype, so pass amp when it is open, and NULL before.  Errors: 101, 102, 105, 110, 202. */
typedef struct amp_monitor_desc amp_monitor_desc;
AMP_API amp_result amp_settings_fill_v(const amp_settings *settings, const amp_context *amp, amp_desc *desc,
                                       amp_scaler_desc *scaler, amp_optimizer_desc *optimizer, amp_monitor_desc *monitor,
                                       uint64_t abi);
AMPI_INLINE amp_result amp_settings_fill(const amp_settings *settings, const amp_context *amp, amp_desc *desc,
                                         amp_scaler_desc *scaler, amp_optimizer_desc *optimizer, amp_monitor_desc *monitor) {
    return amp_settings_fill_v(settings, amp, desc, scaler, optimizer, monitor, AMP_ABI(amp_settings));
}
/* The same between two steps of a running training: dtype, enabled, mode, caches, fallback, tf32, clipping,
   accumulation, the scaler's rule, intervals and actions change, and so does whether there is scaling: a scaler that is
   turned on starts anew, one turned off has scale 1.  A level, policy, autotune or scaler preset other than that in
   force is refused (left at their defaults they stay), and then nothing has changed.  scaler, optimizer and monitor may
   be NULL.  Captured graphs are out of date afterwards.  Errors: 101, 102, 105, 106 in the middle of a step, its
   cycle or a capture, 108 the device lacks the dtype, 110 what cannot change, 202, 501. */
typedef struct amp_monitor amp_monitor;
AMP_API amp_result amp_settings_apply_v(const amp_settings *settings, amp_context *amp, amp_scaler *scaler,
                                        amp_optimizer *optimizer, amp_monitor *monitor, uint64_t abi);
AMPI_INLINE amp_result amp_settings_apply(const amp_settings *settings, amp_context *amp, amp_scaler *scaler,
                                          amp_optimizer *optimizer, amp_monitor *monitor) {
    return amp_settings_apply_v(settings, amp, scaler, optimizer, monitor, AMP_ABI(amp_settings));
}

/* ---- Status: everything at a glance */

typedef struct amp_status {
    int32_t version, enabled;       /* AMP_VERSION of the implementation */
    char backend[16];
    amp_machine machine;            /* with the device and what it supports */
    amp_choice choice;              /* the compute dtype in force, and why */
    amp_level level;
    amp_policy policy;
    amp_mode mode;
    int32_t memory_efficient, allow_tf32;
    int32_t has_scaler;             /* 0: no scaler, or a disabled one; the next fields are then 1 and 0 */
    float scale;
    int32_t growth_tracker, growth_interval, at_floor;
    int64_t updates, skips, consecutive_skips;
    amp_cache_info cast_cache, mask_cache;
    amp_memory_info memory;
    double memory_share;            /* of the device's memory in use; -1 unknown */
    int32_t memory_warned, reserved;/* 1: the share has reached the warning threshold */
    amp_telemetry telemetry;
} amp_status;
/* memory_warning: as in amp_settings.  scaler may be NULL.  Waits for the device.  Errors: 101, 102, 106 while a graph is
   captured, 501. */
AMP_API amp_result amp_status_get(const amp_context *amp, const amp_scaler *scaler, double memory_warning, amp_status *out);
/* As a table and as one JSON object; fields that cannot be had say "not here" (JSON: null).  As snprintf does it. */
AMP_API size_t amp_status_text(const amp_status *status, char *text, size_t size);
AMP_API size_t amp_status_json(const amp_status *status, char *text, size_t size);

/* Names a stretch of work for a profiler (NVTX ranges, where amp_cuda.cu was built with -DAMP_NVTX); ranges nest.
   Without a profiler nothing happens. */
AMP_API void amp_range_push(amp_context *amp, const char *name);
AMP_API void amp_range_pop(amp_context *amp);

/* ---- Monitor: records of steps and epochs, one JSON object per line

       for each step:
           amp_monitor_phase(monitor, AMP_PHASE_DATA);      amp_loader_next ...
           amp_monitor_phase(monitor, AMP_PHASE_FORWARD);   ...
           amp_monitor_phase(monitor, AMP_PHASE_BACKWARD);  ...
           amp_monitor_phase(monitor, AMP_PHASE_OPTIMIZER); amp_step ...
           amp_monitor_step(monitor, &info);
           while (amp_monitor_next(monitor, &record)) ...;      in place of amp_outcome_next
       at an epoch's end: amp_monitor_epoch(monitor, &epoch);

   A line of the file, by its "event":
       "step"     step epoch loss norm scale tracker skipped skips dtype lr tokens_per_s seconds data_s forward_s
                  backward_s optimizer_s; where memory was queried allocated reserved peak; where there is one
                  trouble ("loss", "gradients", "floor", "skips") and first_bad
       "epoch"    epoch steps skipped troubles loss dtype tokens_per_s seconds data_s ... optimizer_s peak
   A loss that was not read is left out; null stands for infinities and NaN, which JSON has none of.  tracker is the
   scaler's before the step, skipped 0 or 1, skips their sum so far.                                                  */

typedef enum amp_phase {
    AMP_PHASE_OTHER = 0, AMP_PHASE_DATA = 1, AMP_PHASE_FORWARD = 2, AMP_PHASE_BACKWARD = 3, AMP_PHASE_OPTIMIZER = 4,
    AMP_PHASES = 5,
    AMP_PHASE_FORCE_I32 = 0x7fffffff
} amp_phase;

/* What is wrong with a step.  An overflow that a scaler answers is not trouble. */
typedef enum amp_trouble {
    AMP_TROUBLE_NONE = 0,
    AMP_TROUBLE_LOSS = 1,           /* the loss is infinite or NaN */
    AMP_TROUBLE_GRADIENTS = 2,      /* gradients are, and there is no scaler whose scale could shrink */
    AMP_TROUBLE_FLOOR = 3,          /* they are, and the scale is at its floor */
    AMP_TROUBLE_SKIPS = 4,          /* max_skips steps in a row were skipped */
    AMP_TROUBLE_FORCE_I32 = 0x7fffffff
} amp_trouble;

/*  .path              none         JSON lines go here
    .append            0            1: behind what is there (a torn last line is closed first); 0: a new file
    .log_interval      100          steps between step records in the file; those with trouble or a skip are always written
    .memory_interval   100          steps between memory queries; the device is asked at no other time
    .cleanup_interval  off          steps between calls of amp_cleanup
    .memory_warning    0.9          as in amp_settings; said once per crossing
    .nan_action        SKIP
    .max_skips         25
    .epoch             0            number of the first epoch, of a run that goes on                                    */
struct amp_monitor_desc {
    const char *path;
    int32_t append, max_skips;
    amp_optimizer *optimizer;       /* its outcomes are taken from here; required */
    amp_scaler *scaler;             /* may be NULL */
    int64_t log_interval, memory_interval, cleanup_interval;
    double memory_warning;
    amp_nan_action nan_action;
    int32_t reserved;
    int64_t epoch;
};
/* Destroy it before its optimizer.  Errors: 101, 102, 105, 110 optimizer or scaler of another context, 301, 401, 402, 403,
   501. */
AMP_API amp_result amp_monitor_create_v(amp_context *amp, amp_monitor **out, const amp_monitor_desc *desc, uint64_t abi);
AMPI_INLINE amp_result amp_monitor_create(amp_context *amp, amp_monitor **out, const amp_monitor_desc *desc) {
    return amp_monitor_create_v(amp, out, desc, AMP_ABI(amp_monitor_desc));
}
/* Writes what is still to be written, the records of the last steps too; errors are logged. */
AMP_API void amp_monitor_destroy(amp_monitor *monitor);
AMP_API amp_result amp_monitor_query(const amp_monitor *monitor, amp_monitor_desc *out);

/* The phase that begins now ends the one before; times are the device's own where it has events.  Also a profiler's
   range.  Time counts from the first call, in an epoch as in the run (without calls, from the epoch's beginning), so
   validation between epochs is nobody's.  While a graph is captured nothing is recorded.  Errors: 101, 102, 501. */
AMP_API amp_result amp_monitor_phase(amp_monitor *monitor, amp_phase phase);

typedef struct amp_step_info {
    double loss;
    int32_t no_loss;                /* 1: the loss was not read in this step */
    int32_t reserved;
    int64_t tokens;                 /* or samples, of all micro-batches of the step; for the rate */
} amp_step_info;
/* Ends a step, after amp_step stepped; it does not wait for it.  Errors: 101, 106 the optimizer has not stepped since the
   last call, 501; 403 when lines could not be written: they are kept (up to 256 KiB) and written as soon as that works
   again; training may go on. */
AMP_API amp_result amp_monitor_step(amp_monitor *monitor, const amp_step_info *info);

typedef struct amp_step_record {
    amp_outcome outcome;
    int64_t epoch;                  /* from 0 */
    double loss;                    /* NaN: not read */
    int64_t tokens;
    double tokens_per_second, seconds, phase_seconds[AMP_PHASES];
    amp_dtype dtype;                /* AMP_F32 while disabled */
    amp_trouble trouble;
    amp_nan_action action;          /* what is to be done about it; DEFAULT: nothing */
    int32_t has_memory;             /* 1: memory was queried in this step */
    amp_memory_info memory;
} amp_step_record;
/* The next record that is due: the optimizer's outcomes decide when.  1: *out was filled.  The last 64 are kept.  Steps that
   amp_monitor_step was not told of have none. */
AMP_API int32_t amp_monitor_next(amp_monitor *monitor, amp_step_record *out);
/* Makes the records of all steps due, and waits. */
AMP_API amp_result amp_monitor_flush(amp_monitor *monitor);
/* A line of the host's own: one JSON object without line ends.  Errors: 101, 102 it is none, 403 as above. */
AMP_API amp_result amp_monitor_write(amp_monitor *monitor, const char *json);

/* One epoch, or the mean of several. */
typedef struct amp_epoch_record {
    int64_t epoch;                  /* its number; in a mean: how many */
    int64_t steps, skipped, troubles;   /* in a mean: of all together; troubles: steps with any */
    double loss;                    /* mean of the finite ones; NaN: there was none */
    double seconds, phase_seconds[AMP_PHASES], tokens_per_second;
    int64_t peak;                   /* bytes, most in the epoch */
    amp_dtype dtype;                /* of most of its steps */
    int32_t mixed;                  /* 1: fp16, bf16 or tf32 */
} amp_epoch_record;
/* Ends an epoch: waits for its steps, writes its record and starts the peak of memory anew.  Records not yet taken stay.
   Errors: 101, 106 it has no steps, 403, 501. */
AMP_API amp_result amp_monitor_epoch(amp_monitor *monitor, amp_epoch_record *out);
/* Mixed-precision epochs beside full-precision ones: means of loss, time and rate, the greater peak.  epoch 0: there was
   none of that kind, and the ratios are 0. */
typedef struct amp_epoch_summary {
    amp_epoch_record mixed, full;
    double speedup;                 /* seconds of full over mixed, per step */
    double memory_ratio;            /* peak of mixed over full */
    double loss_difference;         /* mixed - full */
} amp_epoch_summary;
AMP_API amp_result amp_monitor_summary(const amp_monitor *monitor, amp_epoch_summary *out);
AMP_API size_t amp_epoch_summary_text(const amp_epoch_summary *summary, char *text, size_t size);

/* ---- Numerics: how the values of each tensor fit a format

   Which remedy, in this order; a gradient is taken as it lies in memory, with the loss scale S in it:
       LOOK         NaN or infinities that a wider format does not prevent: in weights or ranges (infinities in fp16 ranges
                    aside), or in gradients when the format is bf16 or the scale cannot fall any further.
       LOWER_SCALE  a gradient overflows in the format, or is infinite or NaN, and fits at a smaller scale that is not below
                    the scaler's floor (1 without a scaler).
       RAISE_SCALE  more than AMP_UNDERFLOW_SHARE of a gradient becomes 0, none overflows, and there is room above.
       LAYER_FP32   one overflows and another underflows, or one does both, or no scale is left to go to: what does not fit
                    is fewer than a quarter of the gradients.  Else BF16 (held against bf16 itself: still LAYER_FP32).
                    The same for weights and ranges that overflow, which no scale cures; what underflows there is small
                    beside the rest, and counts for nothing.
   wanted_scale is the largest power of two at which the largest gradient is at most a quarter of the format's largest
   number: two bits of room, as gradients differ from step to step by less than 4 but in exceptional ones, which a scaler
   skips.  An infinite gradient is taken for twice that largest number; NaN asks for a quarter of the scale at most. */

/* Of the values that are not 0.  Those that underflow are the smallest, so at 1% they are less than 1% of the sum of
   magnitudes, which is what bf16's roundoff (0.4%) makes of every sum anyway; networks were found to train with 5% of their
   gradients' values lost, and not with 31% (Micikevicius et al. 2018). */
#define AMP_UNDERFLOW_SHARE 0.01

typedef enum amp_remedy {
    AMP_REMEDY_NONE = 0,
    AMP_REMEDY_LOWER_SCALE = 1,     /* scaled gradients overflow and would fit */
    AMP_REMEDY_RAISE_SCALE = 2,     /* scaled gradients underflow, and there is room above */
    AMP_REMEDY_LAYER_FP32 = 3,      /* few tensors do not fit whatever the scale: amp_layer_override for these */
    AMP_REMEDY_BF16 = 4,            /* many do not: a format with a wider range */
    AMP_REMEDY_LOOK = 5,            /* NaN that no precision causes: data, learning rate, a division in the model */
    AMP_REMEDY_FORCE_I32 = 0x7fffffff
} amp_remedy;

typedef struct amp_numerics_row {
    const char *name;
    int32_t gradient;               /* 1: of the gradient, as it lies in memory (scaled); 0: of the weight */
    float largest;                  /* largest finite magnitude; 0 if there is none */
    int64_t count, infinite, nan;   /* count 0: a gradient that is not live */
    double underflow;               /* of the values that are not 0: share that becomes 0 in the format, ... */
    double subnormal;               /* ... or subnormal, which has fewer digits, ... */
    double overflow;                /* ... or infinite, or is infinite, ... */
    double saturation;              /* ... or comes into the format's last binade: one doubling away from that */
} amp_numerics_row;

typedef struct amp_numerics_report {
    int64_t step;                   /* calls so far */
    int32_t due;                    /* 0: the interval has not come; the rest is that of the last time */
    amp_remedy remedy;
    const amp_numerics_row *rows; int64_t n_rows;       /* the object's; gradients first */
    const char *first_bad;          /* first tensor with an infinity or NaN, or NULL */
    const char *worst;              /* the tensor the remedy is about, or NULL */
    float wanted_scale;             /* LOWER_SCALE, RAISE_SCALE: a power of two */
    char text[240];                 /* the remedy and its reason in words */
} amp_numerics_report;

/*  .dtype      the context's now; F16 for F32, TF32    F16, BF16, E4M3, E5M2: the format that values are held against
    .interval   100                                     calls; the first one is due                                     */
typedef struct amp_numerics_desc {
    amp_param *params; int64_t n_params;                /* weights and live gradients; the array must stay */
    const amp_range *ranges; int64_t n_ranges;          /* and any others, such as activations; copied */
    amp_scaler *scaler;                                 /* whose scale the gradients carry; may be NULL */
    amp_dtype dtype;
    int32_t reserved;
    int64_t interval;
} amp_numerics_desc;
typedef struct amp_numerics amp_numerics;
/* Errors: 101, 102, 104, 105, 301. */
AMP_API amp_result amp_numerics_create_v(amp_context *amp, amp_numerics **out, const amp_numerics_desc *desc, uint64_t abi);
AMPI_INLINE amp_result amp_numerics_create(amp_context *amp, amp_numerics **out, const amp_numerics_desc *desc) {
    return amp_numerics_create_v(amp, out, desc, AMP_ABI(amp_numerics_desc));
}
AMP_API void amp_numerics_destroy(amp_numerics *numerics);
/* Between backward and step.  At its interval it reads every tensor once and waits; otherwise it only counts.
   Errors: 101, 106 while a graph is captured, 501. */
AMP_API amp_result amp_numerics_step(amp_numerics *numerics, amp_numerics_report *out);
AMP_API size_t amp_numerics_text(const amp_numerics_report *report, char *text, size_t size);

/* ==== 13 >>care =====================================================================================
   Does mixed precision work here, which is best, and what to do when it goes wrong.                    */

/* ---- Verify: a step of the host's in fp32 and in each candidate, on the same batch */

/* Forward and backward of one batch, always the same; 0, or an amp_result, or any number of the host's for failure.  Regions
   inside take the context's dtype (amp_autocast_begin(amp, NULL)).  May step an optimizer that the desc names; does not change
   overrides.  For the fp32 it is held against, overrides of layers, .fallback and .allow_tf32 do not count. */
typedef int (*amp_step_function)(void *user, amp_context *amp);

/* How much a precision may differ is measured: in fp32, every weight is changed at random by up to the candidate's roundoff
   u, as one rounding does, twice over, and what that does to a tensor, as a root mean square, is its noise.  A computation in
   that precision rounds more than the weights, so its errors are some times that.  The noise is taken to be no less than
       u of what errors are relative to, as what is stored in that precision is rounded once at least; and
       what changes by fp32's roundoff do, times u over 4 of that roundoff: in a gradient that is 0 but for rounding, such as
       that of attention's key bias, other weights change nothing, and only fp32's own rounding shows how large rounding is.
       (fp32 rounds in every operation, and a candidate only what it stores and multiplies: hence the quarter.)
   Right models were found at 0.5 to 2 times the noise.  Zero weights are left as they are.

    .dtypes        TF32, F16 and BF16 as far as the device has them
    .allowance     8          an error passes up to this many times the noise                                          */
typedef struct amp_verify_desc {
    amp_step_function step;
    void *user;
    amp_param *params; int64_t n_params;                /* restored; their gradients are compared */
    const amp_range *outputs; int64_t n_outputs;        /* compared too: logits, the loss; F32, F16, BF16 or F64 */
    amp_optimizer *optimizer;                           /* restored; may be NULL, as may the scaler, which F16 takes */
    amp_scaler *scaler;
    const amp_dtype *dtypes; int64_t n_dtypes;          /* at most AMP_VERIFY_ROWS */
    double allowance;
} amp_verify_desc;
enum { AMP_VERIFY_ROWS = 8 };

typedef enum amp_verdict {
    AMP_VERDICT_PASS = 1, AMP_VERDICT_INACCURATE = 2, AMP_VERDICT_NONFINITE = 3, AMP_VERDICT_FAILED = 4,    /* the step itself */
    AMP_VERDICT_FORCE_I32 = 0x7fffffff
} amp_verdict;

/* Errors are relative: |x - fp32| / |fp32| in the Euclidean norm of the tensor, for a gradient over that of its layer's
   gradients together (of the same name up to the last dot; of all, where those are 0; an output of zeros: over 1). */
typedef struct amp_verify_row {
    amp_dtype dtype;
    amp_verdict verdict;
    double output_error, output_bound;      /* of the worst output, by error over bound */
    double gradient_error, gradient_bound;  /* of the worst gradient */
    char worst_output[64], worst_gradient[64];
    char first_bad[64];                     /* first tensor with an infinity or NaN; "" if none */
    double seconds;                         /* of the step */
    char advice[160];
} amp_verify_row;
typedef struct amp_verify_report {
    int64_t n_rows;
    amp_verify_row rows[AMP_VERIFY_ROWS];
} amp_verify_report;
/* Runs the step 3 times in fp32 and 3 times for each candidate, each time from the same weights (but for those changes), zero
   gradients, random numbers and loss scale; with a scaler once more before, and where fp16's gradients overflow then, at the
   scale that the scaler would come to.
   Afterwards parameters, gradients, optimizer, scaler, random offsets and dtype are bit for bit what they were, whatever the
   step did; outputs are not.  It takes host memory for all of these, the gradients twice.  A candidate that fails, or that the
   device lacks, is a row, not an error.  Errors: 101, 102, 103, 104, 105, 106 while a graph is captured or between
   amp_scaler_check and amp_scaler_update, 107, 110 level O0 or several ranks, 301, 501; 102 too when the step is not finite or fails in fp32
   already: the text names the first bad tensor, or has the step's own error. */
AMP_API amp_result amp_verify_v(amp_context *amp, const amp_verify_desc *desc, amp_verify_report *out, uint64_t abi);
AMPI_INLINE amp_result amp_verify(amp_context *amp, const amp_verify_desc *desc, amp_verify_report *out) {
    return amp_verify_v(amp, desc, out, AMP_ABI(amp_verify_desc));
}
AMP_API size_t amp_verify_text(const amp_verify_report *report, char *text, size_t size);

/* Does memory lie where the context's kernels can use it?  Errors: 101, 103 a range without data, 501 with the first name
   that does not, and where it lies. */
AMP_API amp_result amp_verify_placement(amp_context *amp, const amp_range *ranges, int64_t n);

/* Finite differences for an operator of the host's own, under autocast: for random directions d of each input,
   (L(x + h d) - L(x - h d)) / 2h is held against gradient . d, L = sum(outputs * weights) with weights random, and given to
   backward as the outputs' gradients.  x moves by h d, h = 2^-8 (2^-4 for fp16 and tf32, 2^-3 for bf16) times the root mean
   square of the input.  The bound is computed: 8 standard deviations of what rounding does to L, over h, and to gradient . d,
   both measured by changing all inputs at random by up to the coarsest roundoff of dtype, outputs and output_grads; and twice
   the truncation that halving h shows.  So a factor of 1.01 is found in fp32; bf16 shows terms that are missing.
   Each forward has the same random numbers, and each backward begins with input_grads zero.  The inputs are restored;
   gradients that are a parameter's are not live afterwards. */
typedef struct amp_gradcheck_desc {
    amp_step_function forward, backward;    /* inside and outside of a region, as in training */
    void *user;
    const amp_range *inputs, *input_grads; int64_t n_inputs;        /* F32; same order and counts */
    const amp_range *outputs, *output_grads; int64_t n_outputs;     /* F32, F16 or BF16 */
    amp_dtype dtype;                        /* of the region; the context's */
    int32_t directions;                     /* per input; 0: 8 */
    uint64_t seed;
} amp_gradcheck_desc;
typedef struct amp_gradcheck_report {
    int32_t passed, reserved;
    double error, bound;                    /* of the worst, by error over bound; absolute */
    double expected, found;                 /* by differences, by backward */
    char worst[64];                         /* its input */
} amp_gradcheck_report;
/* Errors: 101, 102 a field, or an output or gradient that is not finite, 103, 104, 105, 106 while a graph is captured, 108,
   301, 501; what the host's functions return. */
AMP_API amp_result amp_gradcheck_v(amp_context *amp, const amp_gradcheck_desc *desc, amp_gradcheck_report *out, uint64_t abi);
AMPI_INLINE amp_result amp_gradcheck(amp_context *amp, const amp_gradcheck_desc *desc, amp_gradcheck_report *out) {
    return amp_gradcheck_v(amp, desc, out, AMP_ABI(amp_gradcheck_desc));
}

/* ---- Advice */

/*  All may stay 0: then advice is about the machine alone.  */
typedef struct amp_advise_desc {
    int64_t batch;                          /* of a step that has run already, for the headroom */
    const amp_optimizer *optimizer;
    const amp_scaler *scaler;
    const amp_verify_report *verified;      /* what failed there is not advised */
} amp_advise_desc;
typedef struct amp_advice {
    amp_settings settings;                  /* as advised: dtype, level, allow_tf32, autotune, use_scaler, scaler, memory_efficient */
    int64_t batch;                          /* largest batch that should fit, 90% of the memory used; 0 unknown */
    char dtype_reason[160], level_reason[160], tf32_reason[160], batch_reason[160], scaler_reason[160];
} amp_advice;
/* dtype: amp_choose's for "auto", or the next of bf16, fp16, tf32 and fp32 that nothing speaks against (verification; fp16's
   scale at its floor).  level: O1; O2 when the step that ran took more than 90% of the device's memory and the dtype has 16
   bits.  batch: peak memory is fixed + batch * each, fixed being what amp_optimizer_bytes tells and the cast cache; the step
   must be the largest since amp_memory_reset_peak, and its memory amp_alloc's.  scaler: by its share of skipped steps.
   desc may be NULL.  Errors: 101, 102, 105, 501. */
AMP_API amp_result amp_advise_v(amp_context *amp, const amp_advise_desc *desc, amp_advice *out, uint64_t abi);
AMPI_INLINE amp_result amp_advise(amp_context *amp, const amp_advise_desc *desc, amp_advice *out) {
    return amp_advise_v(amp, desc, out, AMP_ABI(amp_advise_desc));
}
AMP_API size_t amp_advice_text(const amp_advice *advice, char *text, size_t size);
/* Applies what can change while training runs, as amp_settings_apply does; the level stays, and a log line says that it takes
   a new context where another was advised.  Errors: as there. */
AMP_API amp_result amp_apply(const amp_advice *advice, amp_context *amp, amp_scaler *scaler, amp_optimizer *optimizer);

/* ---- Tune: the host's step over precisions and batch sizes, timed and verified */

/* Makes the model ready for a batch size, freeing that of the one before; 0, AMP_ERR_MEMORY when it does not fit, or
   another amp_result. */
typedef int (*amp_prepare_function)(void *user, amp_context *amp, int64_t batch);

/*  .dtypes       F32 and what the device has of TF32, F16 and BF16
    .batch        1        the first batch size; doubled up to .max_batch, or until memory ends
    .max_batch    .batch
    .iterations   10       timed, after .warmup
    .warmup       3
    .file         none     where results are kept: read when it holds this machine, model and desc, written otherwise
    .model        ""       names the model there                                                                       */
typedef struct amp_tune_desc {
    amp_step_function step;
    amp_prepare_function prepare;           /* NULL: only .batch is tried */
    void *user;
    const amp_dtype *dtypes; int64_t n_dtypes;
    int64_t batch, max_batch;
    int32_t iterations, warmup;
    const amp_verify_desc *verify;          /* candidates that fail it are not picked; NULL: all are taken to be right.  Its
                                               parameters stay where they are, whatever batch is prepared */
    const char *file, *model;
} amp_tune_desc;
enum { AMP_TUNE_ROWS = 64 };
typedef struct amp_tune_row {
    amp_dtype dtype;
    amp_verdict verdict;                    /* PASS, too, where verify is NULL; FAILED: reason says why */
    int64_t batch, peak;                    /* bytes */
    double seconds;                         /* of a step, median */
    double rate;                            /* samples per second */
    double speedup;                         /* over F32 at the same batch; 0 without one */
    char reason[120];
} amp_tune_row;
typedef struct amp_tune_report {
    int64_t n_rows, best;                   /* index; -1: none */
    int32_t from_file, reserved;            /* 1: nothing was timed */
    amp_tune_row rows[AMP_TUNE_ROWS];
} amp_tune_report;
/* Precisions alternate in turns of five timed steps, so that a machine's changing speed meets all alike; a turn begins with
   an untimed step, the first one with .warmup.  A row that fails is no error: its precision is not tried with larger
   batches, and batches end when `prepare` fails or none is left.  Verified is at the first batch.  best: the highest rate,
   of equal ones the first.  Afterwards the context's dtype and all that .verify names are what they were (without it the
   steps have trained), captured graphs are out of date, and `prepare` was last called with the best batch.  A file that is damaged, or whose best batch
   cannot be prepared, is written anew; one that holds something else is left alone; all with a warning.
   Errors: 101, 102, 104, 105, 106 while a graph is captured, in a disabled context or when `prepare` fails at the end, 110
   several ranks, 301, those of amp_verify; 403 the results are there, but the file could not be written. */
AMP_API amp_result amp_tune_v(amp_context *amp, const amp_tune_desc *desc, amp_tune_report *out, uint64_t abi);
AMPI_INLINE amp_result amp_tune(amp_context *amp, const amp_tune_desc *desc, amp_tune_report *out) {
    return amp_tune_v(amp, desc, out, AMP_ABI(amp_tune_desc));
}
AMP_API size_t amp_tune_text(const amp_tune_report *report, char *text, size_t size);

/* ---- Recover: snapshots in memory, and what to do in trouble

       while (amp_monitor_next(monitor, &record)) {
           amp_recovery_step(recovery, &record, &event);
           if (event.action == AMP_RECOVERY_STOP) ...
       }
       ... and when a call returned 301:  amp_recovery_memory(recovery, &event), and do what event.action says. */

typedef enum amp_recovery_action {
    AMP_RECOVERY_NONE = 0,
    AMP_RECOVERY_RESTORED = 1,      /* the snapshot of event.step is in place, in event.dtype: go on from there */
    AMP_RECOVERY_RETRY = 2,         /* memory was freed: the same step again */
    AMP_RECOVERY_HALVE_BATCH = 3,   /* halve the micro-batch; accumulation has been doubled already, the cycle begins anew */
    AMP_RECOVERY_STOP = 4,          /* retries are spent, or the policy said so: the last good snapshot is in place */
    AMP_RECOVERY_FORCE_I32 = 0x7fffffff
} amp_recovery_action;

/* What a recovery does about the cause, beside restoring. */
typedef enum amp_recovery_cure {
    AMP_CURE_NONE = 0,              /* the same once more */
    AMP_CURE_LAYERS = 1,            /* the layer of the first bad tensor computes in fp32 from now on */
    AMP_CURE_DTYPE = 2,             /* fp16 becomes bf16 where the device has it, else fp32; bf16 and tf32 become fp32.  The
                                       scaler is turned off with fp16; levels O2 and O3 keep their dtype */
    AMP_CURE_FORCE_I32 = 0x7fffffff
} amp_recovery_cure;

typedef struct amp_recovery_event {
    amp_recovery_action action;     /* what is about to be done; a policy may change action and cure */
    amp_recovery_cure cure;
    amp_trouble trouble;
    amp_dtype dtype;                /* in force afterwards */
    int64_t step;                   /* of the snapshot: applied steps */
    int32_t retries, left;
    char layer[64];                 /* the pattern that LAYERS gives amp_layer_override: the layer of the first bad tensor */
    char text[200];                 /* what happened and what was done */
} amp_recovery_event;

/*  .interval      100       applied steps between snapshots; the first one is taken at creation
    .max_retries   3         AMP_NO_RETRIES: none; they count anew after .interval good steps
    .policy        NULL      decides: gets the event as planned, and may change action, cure and layer.  A learning rate that
                             it sets stays; otherwise the snapshot's comes back
    .save, .load   NULL      what the host wants restored too, into and from records of its own; keys "amp..." are taken.
                             They return 0, or an amp_result or other number for failure                               */
typedef struct amp_recovery_desc {
    amp_param *params; int64_t n_params;    /* weights; the array must stay */
    amp_optimizer *optimizer;
    amp_scaler *scaler;
    amp_loader *loader;                     /* NULL: data go on as they come */
    int64_t interval;
    int32_t max_retries, reserved;
    void (*policy)(void *user, amp_recovery_event *event);
    int (*save)(void *user, amp_state *state);
    int (*load)(void *user, const amp_state *state);
    void *user;
} amp_recovery_desc;
typedef struct amp_recovery amp_recovery;
/* Errors: 101, 102, 103, 104, 105, 106 in the middle of an accumulation cycle, 110, 301, 501; what .save returns. */
AMP_API amp_result amp_recovery_create_v(amp_context *amp, amp_recovery **out, const amp_recovery_desc *desc, uint64_t abi);
AMPI_INLINE amp_result amp_recovery_create(amp_context *amp, amp_recovery **out, const amp_recovery_desc *desc) {
    return amp_recovery_create_v(amp, out, desc, AMP_ABI(amp_recovery_desc));
}
AMP_API void amp_recovery_destroy(amp_recovery *recovery);
/* For every record: good ones lead to snapshots, ones with trouble and action RECOVER to recovery.  A snapshot replaces
   the one before only when a later step, computed from its weights, was applied without trouble; until then both are kept.
   One that does not fit into memory keeps the one before, with a warning.  Planned are: LAYERS for gradients that are not
   finite, DTYPE when that was tried for the layer, when the loss is not finite and when the scale is at its floor; NONE in
   fp32.  After restoring, records of steps that were undone give NONE, until those of the new run come.  Ranks must see
   the same records: give amp_monitor_step the loss that is averaged over them.
   Errors: 101, 106, 301, 501, what .load returns: call it again then, with the same record. */
AMP_API amp_result amp_recovery_step(amp_recovery *recovery, const amp_step_record *record, amp_recovery_event *event);
/* After a call of a step returned AMP_ERR_MEMORY, or the device said so: first cleans up (RETRY), then asks for half of the
   micro-batch (HALVE_BATCH) as often as it takes, or what the policy says.  What the cycle had accumulated is dropped.
   Errors: 101, 501. */
AMP_API amp_result amp_recovery_memory(amp_recovery *recovery, amp_recovery_event *event);
#ifdef __cplusplus
}
#endif
#endif /* AMP_H_INCLUDED */

/* Stop here if you only want the API. */

#if defined(AMP_IMPLEMENTATION) && !defined(AMP_IMPLEMENTATION_INCLUDED)
#define AMP_IMPLEMENTATION_INCLUDED

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#if defined(_OPENMP)
#  include <omp.h>
#endif
#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
#  define AMPI_X86 1
#  if !defined(__clang__)
#    pragma GCC diagnostic push
#    pragma GCC diagnostic ignored "-Wmaybe-uninitialized"      /* g++ 12 warns inside its own AVX-512 intrinsics */
#    pragma GCC diagnostic ignored "-Wuninitialized"
#    if !defined(__OPTIMIZE__)
#      pragma GCC diagnostic ignored "-Wsign-conversion"         /* and at -O0, where they are macros */
#    endif
#  endif
#  include <cpuid.h>
#  include <immintrin.h>
#else
#  define AMPI_X86 0
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ==== 1 >>base: implementation =================================================================== */

#if defined(__cplusplus)
#  define AMPI_THREAD_LOCAL thread_local
#elif defined(__STDC_VERSION__) && __STDC_VERSION__ >= 201112L
#  define AMPI_THREAD_LOCAL _Thread_local
#else
#  define AMPI_THREAD_LOCAL __thread
#endif
#define AMPI_PRIVATE static __attribute__((unused))
#define AMPI_PRINTF(text, first) __attribute__((format(printf, text, first)))
#define AMPI_MIN(a, b) ((a) < (b) ? (a) : (b))
#define AMPI_MAX(a, b) ((a) > (b) ? (a) : (b))
/* Leaves the calling function with the first result that is not AMP_OK. */
#define AMPI_TRY(call) do { amp_result ampi_r = (call); if (ampi_r != AMP_OK) return ampi_r; } while (0)

static AMPI_THREAD_LOCAL char ampi_error_text[512];

AMP_API const char *amp_result_text(amp_result result) {
    switch (result) {
#define AMPI_RESULT_TEXT(name, number, text, hint) case name: return text;
        AMP_RESULTS(AMPI_RESULT_TEXT)
#undef AMPI_RESULT_TEXT
        default: return "unknown result";
    }
}

AMP_API const char *amp_result_hint(amp_result result) {
    switch (result) {
#define AMPI_RESULT_HINT(name, number, text, hint) case name: return hint;
        AMP_RESULTS(AMPI_RESULT_HINT)
#undef AMPI_RESULT_HINT
        default: return "";
    }
}

AMP_API const char *amp_last_error(void) { return ampi_error_text; }
AMP_API int amp_version(void) { return AMP_VERSION; }

/* Sets the last-error text "AMP0102 amp_x: .field = 3, must be ...; hint" and returns result. */
AMPI_PRIVATE amp_result ampi_fail(amp_result result, const char *function, const char *format, ...) AMPI_PRINTF(3, 4);
AMPI_PRIVATE amp_result ampi_fail(amp_result result, const char *function, const char *format, ...) {
    char detail[352];
    va_list args;
    va_start(args, format);
    vsnprintf(detail, sizeof detail, format, args);
    va_end(args);
    snprintf(ampi_error_text, sizeof ampi_error_text, "AMP%04d %s: %s; %s", (int)result, function, detail, amp_result_hint(result));
    return result;
}

/* Header and implementation must agree, and the caller's struct must have the size we know. */
AMPI_PRIVATE amp_result ampi_check_abi(const char *function, uint64_t theirs, uint64_t ours) {
    if (theirs == ours) return AMP_OK;
    return ampi_fail(AMP_ERR_VERSION, function, "called with header version %u and struct size %u, the implementation has %u and %u",
                     (unsigned)(theirs >> 32), (unsigned)theirs, (unsigned)(ours >> 32), (unsigned)ours);
}

/* *bytes = count * size, unless that overflows. */
AMPI_PRIVATE amp_result ampi_bytes(const char *function, int64_t count, size_t size, size_t *bytes) {
    if (count < 0 || (size != 0 && (uint64_t)count > (uint64_t)PTRDIFF_MAX / size))
        return ampi_fail(AMP_ERR_SIZE, function, "%lld elements of %zu bytes", (long long)count, size);
    *bytes = (size_t)count * size;
    return AMP_OK;
}

/* ---- The POSIX system */

static void *ampi_posix_alloc(void *user, size_t size, size_t align) {
    void *ptr = NULL;
    (void)user;
    return posix_memalign(&ptr, align < sizeof(void *) ? sizeof(void *) : align, size) == 0 ? ptr : NULL;
}

static void ampi_posix_free(void *user, void *ptr, size_t size) { (void)user; (void)size; free(ptr); }

static int ampi_posix_open(void *user, const char *path, int for_writing, intptr_t *file) {
    int fd, flags = for_writing == 0 ? O_RDONLY : for_writing == 2 ? O_RDWR | O_CREAT : O_WRONLY | O_CREAT | O_TRUNC;
    (void)user;
    do fd = open(path, flags | O_CLOEXEC, 0666);
    while (fd < 0 && errno == EINTR);
    if (fd < 0) return -errno;
    *file = fd;
    return 0;
}

static int64_t ampi_posix_read(void *user, intptr_t file, void *buffer, size_t bytes, int64_t offset) {
    ssize_t n = pread((int)file, buffer, bytes, (off_t)offset);
    (void)user;
    return n < 0 ? -errno : n;
}

static int64_t ampi_posix_write(void *user, intptr_t file, const void *buffer, size_t bytes, int64_t offset) {
    ssize_t n = pwrite((int)file, buffer, bytes, (off_t)offset);
    (void)user;
    return n < 0 ? -errno : n;
}

static int64_t ampi_posix_size(void *user, intptr_t file) {
    struct stat info;
    (void)user;
    if (fstat((int)file, &info) != 0) return -errno;
    return S_ISDIR(info.st_mode) ? -EISDIR : (int64_t)info.st_size;
}

static int ampi_posix_sync(void *user, intptr_t file) { (void)user; return fsync((int)file) != 0 ? -errno : 0; }
static int ampi_posix_close(void *user, intptr_t file) { (void)user; return close((int)file) != 0 ? -errno : 0; }
static int ampi_posix_rename(void *user, const char *from, const char *to) {
    struct stat info;
    (void)user;
    if (lstat(to, &info) == 0 && !S_ISREG(info.st_mode) && !S_ISDIR(info.st_mode) && !S_ISLNK(info.st_mode)) return -EPERM;     /* a device, a pipe */
    return rename(from, to) != 0 ? -errno : 0;
}
static int ampi_posix_remove(void *user, const char *path) { (void)user; return unlink(path) != 0 ? -errno : 0; }

static int ampi_posix_list(void *user, const char *folder, int (*each)(void *arg, const char *name), void *arg) {
    DIR *dir = opendir(folder);
    struct dirent *entry;
    int result = 0;
    (void)user;
    if (dir == NULL) return -errno;
    while (result == 0) {
        errno = 0;
        entry = readdir(dir);
        if (entry == NULL) { result = -errno; break; }
        result = each(arg, entry->d_name);
    }
    closedir(dir);
    return result;
}

typedef struct ampi_posix_thread { pthread_t handle; void (*run)(void *); void *arg; int holders; } ampi_posix_thread;

/* The thread and whoever joins or detaches it both hold its record; the later one frees it. */
static void ampi_posix_thread_release(void *thread) {
    ampi_posix_thread *t = (ampi_posix_thread *)thread;
    if (__atomic_sub_fetch(&t->holders, 1, __ATOMIC_ACQ_REL) == 0) free(t);
}

static void *ampi_posix_thread_main(void *arg) {
    ampi_posix_thread *t = (ampi_posix_thread *)arg;
    pthread_cleanup_push(ampi_posix_thread_release, t);         /* also when `run` ends the thread */
    t->run(t->arg);
    pthread_cleanup_pop(1);
    return NULL;
}

static int ampi_posix_thread_start(void *user, void **thread, void (*run)(void *arg), void *arg) {
    ampi_posix_thread *t = (ampi_posix_thread *)malloc(sizeof *t);
    int error;
    (void)user;
    if (t == NULL) return -ENOMEM;
    t->run = run;
    t->arg = arg;
    t->holders = 2;
    error = pthread_create(&t->handle, NULL, ampi_posix_thread_main, t);
    if (error != 0) { free(t); return -error; }
    *thread = t;
    return 0;
}

static int ampi_posix_thread_join(void *user, void *thread) {
    ampi_posix_thread *t = (ampi_posix_thread *)thread;
    int error = pthread_join(t->handle, NULL);
    (void)user;
    ampi_posix_thread_release(t);
    return -error;
}

static int ampi_posix_thread_detach(void *user, void *thread) {
    ampi_posix_thread *t = (ampi_posix_thread *)thread;
    int error = pthread_detach(t->handle);
    (void)user;
    ampi_posix_thread_release(t);
    return -error;
}

static int64_t ampi_posix_clock(void *user) {
    struct timespec t;
    (void)user;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

AMP_API void amp_system_default(amp_system *out) {
    memset(out, 0, sizeof *out);
    out->alloc = ampi_posix_alloc;             out->free = ampi_posix_free;
    out->file_open = ampi_posix_open;          out->file_read = ampi_posix_read;
    out->file_write = ampi_posix_write;        out->file_size = ampi_posix_size;
    out->file_sync = ampi_posix_sync;          out->file_close = ampi_posix_close;
    out->file_rename = ampi_posix_rename;      out->file_remove = ampi_posix_remove;
    out->file_list = ampi_posix_list;          out->thread_start = ampi_posix_thread_start;
    out->thread_join = ampi_posix_thread_join; out->thread_detach = ampi_posix_thread_detach;
    out->clock_ns = ampi_posix_clock;
}

/* The caller's table with the gaps filled; system may be NULL. */
AMPI_PRIVATE amp_system ampi_system(const amp_system *system) {
    amp_system s;
    amp_system_default(&s);
    if (system == NULL) return s;
    s.user = system->user;
    if (system->alloc)        { s.alloc = system->alloc; s.free = system->free; }
    if (system->file_open)    s.file_open = system->file_open;
    if (system->file_read)    s.file_read = system->file_read;
    if (system->file_write)   s.file_write = system->file_write;
    if (system->file_size)    s.file_size = system->file_size;
    if (system->file_sync)    s.file_sync = system->file_sync;
    if (system->file_close)   s.file_close = system->file_close;
    if (system->file_rename)  s.file_rename = system->file_rename;
    if (system->file_remove)  s.file_remove = system->file_remove;
    if (system->file_list)    s.file_list = system->file_list;
    if (system->thread_start) {
        s.thread_start = system->thread_start; s.thread_join = system->thread_join;
        s.thread_detach = system->thread_detach;
    }
    if (system->clock_ns)     s.clock_ns = system->clock_ns;
    return s;
}

/* Zeroed host memory. */
AMPI_PRIVATE amp_result ampi_alloc(const amp_system *s, const char *function, void **out, int64_t count, size_t size) {
    size_t bytes = 0;
    *out = NULL;
    AMPI_TRY(ampi_bytes(function, count, size, &bytes));
    *out = s->alloc(s->user, bytes ? bytes : 1, 64);
    if (*out == NULL) return ampi_fail(AMP_ERR_MEMORY, function, "%zu bytes of host memory", bytes);
    memset(*out, 0, bytes ? bytes : 1);
    return AMP_OK;
}

AMPI_PRIVATE void ampi_free(const amp_system *s, void *ptr, int64_t count, size_t size) {
    if (ptr != NULL) s->free(s->user, ptr, count > 0 ? (size_t)count * size : 1);
}

/* Reads or writes all bytes, over short transfers and interruptions. Returns bytes moved or -errno. */
AMPI_PRIVATE int64_t ampi_read_fully(const amp_system *s, intptr_t file, void *buffer, int64_t bytes, int64_t offset) {
    int64_t done = 0;
    while (done < bytes) {
        int64_t n = s->file_read(s->user, file, (char *)buffer + done, (size_t)AMPI_MIN(bytes - done, (int64_t)1 << 30), offset + done);
        if (n == -EINTR) continue;
        if (n < 0) return n;
        if (n == 0) break;
        done += n;
    }
    return done;
}

AMPI_PRIVATE int64_t ampi_write_fully(const amp_system *s, intptr_t file, const void *buffer, int64_t bytes, int64_t offset) {
    int64_t done = 0;
    while (done < bytes) {
        int64_t n = s->file_write(s->user, file, (const char *)buffer + done, (size_t)AMPI_MIN(bytes - done, (int64_t)1 << 30), offset + done);
        if (n == -EINTR) continue;
        if (n < 0) return n;
        if (n == 0) return -EIO;
        done += n;
    }
    return done;
}

/* A signal interrupts them: open and sync are called again.  close is not: the descriptor is gone whatever it says. */
AMPI_PRIVATE int ampi_file_open(const amp_system *s, const char *path, int for_writing, intptr_t *file) {
    int error;
    do error = s->file_open(s->user, path, for_writing, file);
    while (error == -EINTR);
    return error;
}
AMPI_PRIVATE int ampi_file_sync(const amp_system *s, intptr_t file) {
    int error;
    do error = s->file_sync(s->user, file);
    while (error == -EINTR);
    return error;
}
AMPI_PRIVATE int ampi_file_close(const amp_system *s, intptr_t file) {
    int error = s->file_close(s->user, file);
    return error == -EINTR ? 0 : error;
}

AMP_API amp_result amp_file_write_atomic(const amp_system *system, const char *path, const void *data, size_t bytes) {
    amp_system s = ampi_system(system);
    char temporary[PATH_MAX];
    intptr_t file = -1;
    int64_t n;
    int error;
    if (path == NULL || (data == NULL && bytes > 0)) return ampi_fail(AMP_ERR_NULL, "amp_file_write_atomic", "path or data");
    if (snprintf(temporary, sizeof temporary, "%s.tmp%ld", path, (long)getpid()) >= (int)sizeof temporary)
        return ampi_fail(AMP_ERR_OPEN, "amp_file_write_atomic", "path of %zu bytes is too long", strlen(path));
    error = ampi_file_open(&s, temporary, 1, &file);
    if (error != 0) return ampi_fail(AMP_ERR_OPEN, "amp_file_write_atomic", "%s: %s", temporary, strerror(-error));
    n = ampi_write_fully(&s, file, data, (int64_t)bytes, 0);
    if (n < 0) error = (int)n;
    if (error == 0) error = ampi_file_sync(&s, file);
    n = ampi_file_close(&s, file);
    if (error == 0) error = (int)n;
    if (error == 0) error = s.file_rename(s.user, temporary, path);
    if (error == 0) return AMP_OK;
    s.file_remove(s.user, temporary);
    return ampi_fail(AMP_ERR_WRITE, "amp_file_write_atomic", "%s: %s", path, strerror(-error));
}

AMP_API amp_result amp_file_read_all(const amp_system *system, const char *path, void **data, size_t *bytes) {
    amp_system s = ampi_system(system);
    intptr_t file = -1;
    int64_t size, n;
    char *buffer;
    int error;
    if (path == NULL || data == NULL || bytes == NULL) return ampi_fail(AMP_ERR_NULL, "amp_file_read_all", "path, data or bytes");
    error = ampi_file_open(&s, path, 0, &file);
    if (error != 0) return ampi_fail(AMP_ERR_OPEN, "amp_file_read_all", "%s: %s", path, strerror(-error));
    size = s.file_size(s.user, file);
    buffer = size < 0 ? NULL : (char *)s.alloc(s.user, (size_t)size + 1, 64);
    n = buffer ? ampi_read_fully(&s, file, buffer, size, 0) : 0;
    s.file_close(s.user, file);
    if (size < 0) return ampi_fail(AMP_ERR_READ, "amp_file_read_all", "%s: %s", path, strerror((int)-size));
    if (buffer == NULL) return ampi_fail(AMP_ERR_MEMORY, "amp_file_read_all", "%lld bytes for %s", (long long)size, path);
    if (n != size) {
        s.free(s.user, buffer, (size_t)size + 1);
        return ampi_fail(AMP_ERR_READ, "amp_file_read_all", "%s: %s at offset %lld", path, n < 0 ? strerror((int)-n) : "ends early", (long long)(n < 0 ? 0 : n));
    }
    buffer[size] = 0;
    *data = buffer;
    *bytes = (size_t)size;
    return AMP_OK;
}

AMP_API void amp_file_free(const amp_system *system, void *data, size_t bytes) {
    amp_system s = ampi_system(system);
    if (data != NULL) s.free(s.user, data, bytes + 1);
}


/* ---- Attention on the CPU works on strips of queries times tiles of keys; AMPI_STRIPS strips share one pass over
   the keys.  A tile of scores is stored with the queries of the strip as lanes: element (key, query) at
   tile[key * AMPI_STRIP + query]. */
enum { AMPI_STRIP = 32, AMPI_STRIPS = 8, AMPI_KEY_TILE = 64 };

/* c = scale a b, or with add: c = c rescale + a b.  Element (r, k) of a lies at a[r * a_row + k * a_depth], that of b
   (k, x) at b[k * ldb + x], that of c (r, x) at c[r * ldc + x]; cols is a multiple of AMPI_STRIP.  Sums run over k in
   order. */
typedef struct ampi_product {
    int64_t rows, cols, depth;
    const float *a; int64_t a_row, a_depth;
    const float *b; int64_t ldb;
    float *c; int64_t ldc;
    int32_t add;
    float scale;
    const float *rescale;           /* [cols]; NULL: 1 */
} ampi_product;

/* Which rows (keys) of a tile each of its lanes (queries) sees: row r if r < first or low <= r < high, and if the
   documents are equal, and if allowed. */
typedef struct ampi_tile_mask {
    int32_t first[AMPI_STRIP], low[AMPI_STRIP], high[AMPI_STRIP], document[AMPI_STRIP];
    const int32_t *documents;       /* of the rows; NULL: all equal */
    const int32_t *allowed;         /* [rows, AMPI_STRIP]: -1 seen, 0 hidden; NULL: all seen */
} ampi_tile_mask;

typedef struct ampi_attention_vec {
    void (*product)(const ampi_product *p);
    /* The same, and a weight of exactly 0 contributes 0 even if the other factor is infinite or NaN. */
    void (*product_weighted)(const ampi_product *p, int32_t a_is_weight);
    /* dst[c * dst_ld + r] = src[r * src_ld + c]; rows a multiple of 16, cols of 4. */
    void (*transpose)(const float *src, int64_t src_ld, float *dst, int64_t dst_ld, int64_t rows, int64_t cols);
    void (*round)(float *x, int64_t n, amp_dtype compute);
    void (*hide)(float *tile, int64_t rows, const ampi_tile_mask *mask, float value);
    /* Scores become exp(score - running maximum), rounded to compute; max, sum and rescale are lanes. */
    void (*soften)(float *tile, int64_t rows, float *max, float *sum, float *rescale, amp_dtype compute);
    /* p = exp(p - lse), ds = p (ds - delta) */
    void (*slopes)(float *p, float *ds, int64_t rows, const float *lse, const float *delta);
    /* lse = max + log(sum), inverse = 1 / sum; -inf and 0 where nothing was seen */
    void (*finish)(const float *max, const float *sum, float *lse, float *inverse);
    float (*dot)(const float *a, const float *b, int64_t n);        /* n a multiple of AMPI_STRIP */
    int32_t (*has_nan)(const float *x, int64_t n);
    void (*softmax_backward)(const float *y, const float *dy, float scale, float *dx, int64_t n);
} ampi_attention_vec;

/* ---- Vector kernels of the GEMM.  Operands are packed into 32-bit words: one fp32 value, or two bf16 values with
   consecutive k, the lower k in the low half.  A kernel table is one way to multiply: fp32 words with FMA, or pairs
   of bf16 with the dot product instruction or with AMX; the loops around the tables know nothing but their sizes. */

enum {
    AMPI_GEMM_COLS = 32,                /* columns of the widest tile */
    AMPI_GEMM_ROOM = 256                /* values of a buffer on the stack */
};

/* The bf16 dot product needs a compiler that knows it. */
#if AMPI_X86 && (defined(__clang__) || __GNUC__ >= 10)
#  define AMPI_GEMM_BF16 1
#else
#  define AMPI_GEMM_BF16 0
#endif
/* AMX needs one, and a system that lets a process ask for it. */
#if AMPI_GEMM_BF16 && defined(__x86_64__) && defined(__linux__) && (defined(__clang__) || __GNUC__ >= 11)
#  define AMPI_GEMM_AMX 1
#else
#  define AMPI_GEMM_AMX 0
#endif

/* X(0) X(1) .. once for each row of a tile */
#define AMPI_ROWS_1(X)  X(0)
#define AMPI_ROWS_2(X)  AMPI_ROWS_1(X) X(1)
#define AMPI_ROWS_3(X)  AMPI_ROWS_2(X) X(2)
#define AMPI_ROWS_4(X)  AMPI_ROWS_3(X) X(3)
#define AMPI_ROWS_5(X)  AMPI_ROWS_4(X) X(4)
#define AMPI_ROWS_6(X)  AMPI_ROWS_5(X) X(5)
#define AMPI_ROWS_7(X)  AMPI_ROWS_6(X) X(6)
#define AMPI_ROWS_8(X)  AMPI_ROWS_7(X) X(7)
#define AMPI_ROWS_9(X)  AMPI_ROWS_8(X) X(8)
#define AMPI_ROWS_10(X) AMPI_ROWS_9(X) X(9)
#define AMPI_ROWS_11(X) AMPI_ROWS_10(X) X(10)
#define AMPI_ROWS_12(X) AMPI_ROWS_11(X) X(11)
#define AMPI_ROWS_13(X) AMPI_ROWS_12(X) X(12)
#define AMPI_ROWS_14(X) AMPI_ROWS_13(X) X(13)

/* A tile of a fixed number of rows. */
typedef void (*ampi_tile_rows)(int64_t k, const float *a, int64_t lda, const float *b, int64_t ldb,
                               const float *add, int64_t ldadd, float *c, int64_t ldc);

/* c (`rows` rows, `cols` columns) = add + a b over k words: a[i * lda + p], b[p * ldb + j]; add NULL counts as 0. */
typedef void (*ampi_gemm_tile)(int64_t rows, int64_t k, const float *a, int64_t lda, const float *b, int64_t ldb,
                               const float *add, int64_t ldadd, float *c, int64_t ldc);

/* What becomes of a finished tile x: pre = alpha x + bias; c = act(pre) + beta c. */
typedef struct ampi_gemm_out {
    float alpha, beta;
    const float *bias;                  /* one per column, padded to whole vectors; NULL: none */
    void (*activation)(amp_activation_kind kind, const float *x, float *y, int64_t n);
    amp_activation_kind act;
    void *pre; amp_dtype pre_dtype; int64_t ld_pre;         /* NULL: not wanted */
    void *c; amp_dtype c_dtype; int64_t ldc;
    int past_cache;                     /* 1: c is fp32 in whole cache lines, and is written to memory directly */
} ampi_gemm_out;

typedef struct ampi_gemm_vec {
    int32_t rows, cols;                 /* of the largest tile */
    int32_t unit;                       /* values of k in one word */
    int32_t block;                      /* words of k multiplied at a time */
    int32_t band;                       /* rows of A that wait in the second-level cache */
    int32_t spare;                      /* rows of packed A that a tile may read, and ignore, beyond its own */
    ampi_gemm_tile multiply;
    void (*begin)(void), (*end)(void);  /* around a thread's multiplications; NULL: nothing to do */
    /* n values, which lie side by side, rounded to `compute` and packed into words; a last half word is filled with 0. */
    void (*row)(float *dst, const void *src, amp_dtype dtype, amp_dtype compute, int64_t n);
    /* Rows of one k each, src[p * ld + j] for p < k and j < n, into panels of `cols` columns, filled with 0 at the right:
       panel q at dst + q * stride, in it the word of column j and word row w at w * cols + j. */
    void (*weave)(float *dst, int64_t stride, const void *src, amp_dtype dtype, amp_dtype compute, int64_t ld,
                  int64_t k, int64_t n);
    /* dst[c * ldd + r] = src[r * lds + c], words */
    void (*transpose)(float *dst, int64_t ldd, const float *src, int64_t lds, int64_t rows, int64_t cols);
    /* Writes out a tile, to rows `row` on of what `out` names; x is changed.  ld is a whole number of vectors. */
    void (*finish)(const ampi_gemm_out *out, float *x, int64_t ld, int64_t row, int64_t rows, int64_t cols);
    /* Matrix times vector, fp32: y[j] += sum of x[p] b[p * ld + j] for p < k, j < n; and the sum of x[p] row[p]. */
    void (*combine)(float *y, const float *x, const float *b, int64_t ld, int64_t k, int64_t n);
    float (*dot)(const float *x, const float *row, int64_t k);
} ampi_gemm_vec;
/* ---- Vector kernels of the multi-tensor calls.  Any n, any alignment; the same bits for an element wherever it
   stands, and for a sum over the same n elements. */
typedef struct ampi_multi_vec {
    /* Sum of squares in fp64; *bad becomes 1 if an element is infinite or NaN; g *= *factor unless that is NULL. */
    double (*check)(float *g, int64_t n, const float *factor, int32_t *bad);
    void (*scale)(float *g, int64_t n, float factor);
    void (*adamw)(float *w, const float *g, float *m, float *v, int64_t n, const ampi_adamw_step *s);
    void (*sgd)(float *w, const float *g, float *m, int64_t n, const ampi_sgd_step *s);     /* m may be NULL */
    /* above[i] += magnitudes above limit[i], *largest: the greatest finite one, as bits; n below 2^31 */
    void (*inspect)(const float *x, int64_t n, const ampi_fit *fit, int64_t above[AMPI_FIT_LIMITS], uint32_t *largest);
} ampi_multi_vec;

/* ---- Vector kernels of section 2.  Pointers need no alignment; dst may be src where the sizes agree. */
typedef struct ampi_numbers_vec {
    void (*f32_from_f16)(void *dst, const void *src, int64_t n);
    void (*f16_from_f32)(void *dst, const void *src, int64_t n);
    void (*f32_from_bf16)(void *dst, const void *src, int64_t n);
    void (*bf16_from_f32)(void *dst, const void *src, int64_t n);
    void (*tf32_from_f32)(void *dst, const void *src, int64_t n);
    /* Magnitudes above `limit`, a finite fp32 pattern, become limit; NaN stays. */
    void (*clamp)(void *dst, const void *src, int64_t n, uint32_t limit);
    /* random[i] << shift is the random word of element i, as in amp_bf16_stochastic. */
    void (*bf16_stochastic)(void *dst, const void *src, int64_t n, const uint32_t *random, int shift);
    /* amp_bf16_split and amp_f32_join */
    void (*bf16_split)(void *bf16, void *rest, const void *src, int64_t n);
    void (*f32_join)(void *dst, const void *bf16, const void *rest, int64_t n);
    /* How many 16-bit or 32-bit elements have every bit of `mask`. */
    int64_t (*count16)(const void *src, int64_t n, uint32_t mask);
    int64_t (*count32)(const void *src, int64_t n, uint32_t mask);
    /* out[i] = amp_random_u32(seed, index + i) */
    void (*random)(uint32_t *out, int64_t n, uint64_t seed, uint64_t index);
} ampi_numbers_vec;

/* Element i of an array that need not be aligned. */
AMPI_PRIVATE inline uint16_t ampi_get16(const void *p, int64_t i) {
    uint16_t x;
    memcpy(&x, (const char *)p + 2 * i, 2);
    return x;
}
AMPI_PRIVATE inline uint32_t ampi_get32(const void *p, int64_t i) {
    uint32_t x;
    memcpy(&x, (const char *)p + 4 * i, 4);
    return x;
}
AMPI_PRIVATE inline uint64_t ampi_get64(const void *p, int64_t i) {
    uint64_t x;
    memcpy(&x, (const char *)p + 8 * i, 8);
    return x;
}
AMPI_PRIVATE inline void ampi_put16(void *p, int64_t i, uint16_t x) { memcpy((char *)p + 2 * i, &x, 2); }
AMPI_PRIVATE inline void ampi_put32(void *p, int64_t i, uint32_t x) { memcpy((char *)p + 4 * i, &x, 4); }
AMPI_PRIVATE inline void ampi_put64(void *p, int64_t i, uint64_t x) { memcpy((char *)p + 8 * i, &x, 8); }

/* Vector kernels of the bandwidth-bound operators, on fp32 rows of any length.  Outputs may be the same
   buffer as any input of the same call. */
typedef struct ampi_pointwise_vec {
    void (*activation)(amp_activation_kind kind, const float *x, float *y, int64_t n);
    void (*activation_backward)(amp_activation_kind kind, const float *x, const float *dy, float *dx, int64_t n);
    void (*tanh_backward)(const float *y, const float *dy, float *dx, int64_t n);       /* from the output y */
    void (*swiglu)(const float *gate, const float *up, float *y, int64_t n);
    void (*swiglu_backward)(const float *gate, const float *up, const float *dy, float *dgate, float *dup, int64_t n);
    /* norms */
    float (*sum)(const float *x, int64_t n);
    float (*sum_squares)(const float *x, float mean, int64_t n);                        /* of x - mean */
    void (*normalize)(const float *x, float mean, float rstd, const float *weight, const float *bias, float *y,
                      int64_t n);
    void (*norm_sums)(const float *x, const float *dy, const float *weight, float mean, float rstd,
                      float *dweight, float *dbias, float sums[2], int64_t n);
    void (*norm_dx)(const float *x, const float *dy, const float *weight, const float *dsum, float mean, float rstd,
                    const float means[2], float *dx, int64_t n);
    /* losses */
    float (*row_max)(const float *x, int64_t n);
    float (*exp_sum)(const float *x, float max, float *e, int64_t n); /* e = exp(x - max); may be NULL */
    float (*squared_error)(const float *x, const float *target, float scale, float *dx, int64_t n);
    /* y = a x + b, and y = alpha a + beta b */
    void (*scale_shift)(const float *x, float a, float b, float *y, int64_t n);
    void (*add)(const float *a, float alpha, const float *b, float beta, float *y, int64_t n);
    /* y[i] = uniform number (index + i) < threshold / 2^24 ? 0 : scale x[i] */
    void (*dropout)(const float *x, float *y, int64_t n, uint32_t threshold, float scale, uint64_t seed,
                    uint64_t index);
} ampi_pointwise_vec;

/* ---- Vector kernels.  They stand at the end of this file, which includes itself once per instruction set:
   AMPI_V(name) is name_scalar, name_avx2 or name_avx512, AMPI_W the floats in a vector.  The loops that call
   them, and everything with threads, are ordinary code. */

#if defined(__NVCC__)               /* whose front end does not know the pragma */
#  define AMPI_UNROLL
#else
#  define AMPI_UNROLL _Pragma("GCC unroll 8")
#endif
#define AMPI_CAT2(a, b) a##b
#define AMPI_CAT(a, b) AMPI_CAT2(a, b)
#define AMPI_V(name) AMPI_CAT(name, AMPI_SUFFIX)
#define ampi_vf AMPI_V(ampi_vfloat)      /* AMPI_W floats */
#define ampi_vi AMPI_V(ampi_vint)        /* AMPI_W int32 */

#define AMPI_PASS 1
#define AMPI_SUFFIX _scalar
#define AMPI_W 4
#include "amp.h"
#undef AMPI_PASS
#undef AMPI_SUFFIX
#undef AMPI_W

#if AMPI_X86
#define AMPI_PASS 2
#define AMPI_SUFFIX _avx2
#define AMPI_W 8
#if defined(__clang__)
#  pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#  pragma GCC push_options
#  pragma GCC target("avx2,fma,f16c")
#endif
#include "amp.h"
#if defined(__clang__)
#  pragma clang attribute pop
#else
#  pragma GCC pop_options
#endif
#undef AMPI_PASS
#undef AMPI_SUFFIX
#undef AMPI_W

#define AMPI_PASS 3
#define AMPI_SUFFIX _avx512
#define AMPI_W 16
#if defined(__clang__)
#  pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#  pragma GCC push_options
#  pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#endif
#include "amp.h"
#if defined(__clang__)
#  pragma clang attribute pop
#else
#  pragma GCC pop_options
#endif
#undef AMPI_PASS
#undef AMPI_SUFFIX
#undef AMPI_W
#  define AMPI_PICK(table, path) ((path) >= AMP_CPU_AVX512 ? &table##_avx512 : (path) == AMP_CPU_AVX2 ? &table##_avx2 : &table##_scalar)
#else
#  define AMPI_PICK(table, path) ((void)(path), &table##_scalar)
#endif

/* ==== 2 >>numbers: implementation ================================================================== */

AMPI_PRIVATE amp_cpu_path ampi_cpu_best_path(void);

AMP_API size_t amp_dtype_size(amp_dtype dtype) {
    switch (dtype) {
        case AMP_E4M3: case AMP_E5M2: case AMP_U8: return 1;
        case AMP_F16: case AMP_BF16: case AMP_U16: return 2;
        case AMP_F32: case AMP_TF32: case AMP_I32: return 4;
        case AMP_F64: case AMP_I64: return 8;
        default: return 0;
    }
}

AMP_API const char *amp_dtype_name(amp_dtype dtype) {
    static const char *const names[] = {"default", "fp32", "fp64", "fp16", "bf16", "tf32", "fp8_e4m3", "fp8_e5m2",
                                        "u8", "u16", "i32", "i64"};
    return (int)dtype >= 0 && (int)dtype <= AMP_I64 ? names[(int)dtype] : "?";
}

AMP_API amp_result amp_dtype_parse(const char *name, amp_dtype *out) {
    static const struct { const char *name; amp_dtype dtype; } others[] = {
        {"float32", AMP_F32}, {"float", AMP_F32}, {"float64", AMP_F64}, {"double", AMP_F64}, {"float16", AMP_F16},
        {"half", AMP_F16}, {"bfloat16", AMP_BF16}, {"auto", AMP_DTYPE_DEFAULT}};
    size_t i;
    int d;
    if (name == NULL || out == NULL) return ampi_fail(AMP_ERR_NULL, "amp_dtype_parse", name == NULL ? "name" : "out");
    for (d = 0; d <= AMP_I64; d++)
        if (strcmp(name, amp_dtype_name((amp_dtype)d)) == 0) { *out = (amp_dtype)d; return AMP_OK; }
    for (i = 0; i < sizeof others / sizeof *others; i++)
        if (strcmp(name, others[i].name) == 0) { *out = others[i].dtype; return AMP_OK; }
    return ampi_fail(AMP_ERR_NAME, "amp_dtype_parse", "\"%.40s\", must be one of fp32, fp64, fp16, bf16, tf32, "
                     "fp8_e4m3, fp8_e5m2, u8, u16, i32, i64, auto", name);
}

AMPI_PRIVATE int ampi_dtype_is_float(amp_dtype dtype) { return (int)dtype >= AMP_F32 && (int)dtype <= AMP_E5M2; }

/* ---- Bulk conversion.  Everything goes through fp32, which holds each value of the narrower formats; fp64 is
   converted directly, because two roundings are not one. */

enum { AMPI_CONVERT_CHUNK = 512 };      /* elements of a fp32 buffer on the stack */

AMPI_PRIVATE void ampi_to_fp32(void *dst, const void *src, amp_dtype dtype, int64_t n, amp_cpu_path path) {
    const ampi_numbers_vec *vec = AMPI_PICK(ampi_numbers_kernels, path);
    const uint8_t *bytes = (const uint8_t *)src;
    int64_t i;
    switch (dtype) {
        case AMP_F16:  vec->f32_from_f16(dst, src, n); break;
        case AMP_BF16: vec->f32_from_bf16(dst, src, n); break;
        case AMP_E4M3: for (i = 0; i < n; i++) ampi_put32(dst, i, ampi_bits_of_e4m3(bytes[i])); break;
        case AMP_E5M2: for (i = 0; i < n; i++) ampi_put32(dst, i, ampi_bits_of_f16((uint16_t)(bytes[i] << 8))); break;
        default:       memmove(dst, src, (size_t)n * 4); break;
    }
}

AMPI_PRIVATE void ampi_from_fp32(void *dst, amp_dtype dtype, const void *src, int64_t n, amp_cpu_path path) {
    const ampi_numbers_vec *vec = AMPI_PICK(ampi_numbers_kernels, path);
    uint8_t *bytes = (uint8_t *)dst;
    int64_t i;
    switch (dtype) {
        case AMP_F16:  vec->f16_from_f32(dst, src, n); break;
        case AMP_BF16: vec->bf16_from_f32(dst, src, n); break;
        case AMP_TF32: vec->tf32_from_f32(dst, src, n); break;
        case AMP_E4M3: for (i = 0; i < n; i++) bytes[i] = ampi_to_e4m3(ampi_get32(src, i), 0, 0, AMPI_EVEN, 0); break;
        case AMP_E5M2: for (i = 0; i < n; i++) bytes[i] = ampi_to_e5m2(ampi_get32(src, i), 0, 0, AMPI_EVEN, 0); break;
        case AMP_F64:  for (i = 0; i < n; i++) ampi_put64(dst, i, ampi_f64_bits_of_f32_bits(ampi_get32(src, i))); break;
        default:       memmove(dst, src, (size_t)n * 4); break;
    }
}

/* From fp64 to any other dtype, in one rounding; random may be NULL. */
AMPI_PRIVATE void ampi_from_fp64(void *dst, amp_dtype dtype, const void *src, int64_t n, int saturate, int mode,
                                 const uint32_t *random) {
    uint8_t *bytes = (uint8_t *)dst;
    int64_t i;
    for (i = 0; i < n; i++) {
        uint64_t x = ampi_get64(src, i);
        uint32_t word = random != NULL ? random[i] : 0;
        switch (dtype) {
            case AMP_F16:  ampi_put16(dst, i, ampi_to_f16(x, 1, saturate, mode, word)); break;
            case AMP_BF16: ampi_put16(dst, i, ampi_to_bf16(x, 1, saturate, mode, word)); break;
            case AMP_E4M3: bytes[i] = ampi_to_e4m3(x, 1, saturate, mode, word); break;
            case AMP_E5M2: bytes[i] = ampi_to_e5m2(x, 1, saturate, mode, word); break;
            case AMP_TF32: ampi_put32(dst, i, ampi_to_tf32(x, 1, saturate)); break;
            default:       ampi_put32(dst, i, ampi_to_f32(x, saturate)); break;
        }
    }
}

/* Nearest even, no saturation, nothing counted, on the calling thread: what the CPU kernels use. */
AMPI_PRIVATE void ampi_convert_fast(void *dst, amp_dtype dst_dtype, const void *src, amp_dtype src_dtype, int64_t n,
                                    amp_cpu_path path) {
    float room[AMPI_CONVERT_CHUNK];
    size_t dst_size = amp_dtype_size(dst_dtype), src_size = amp_dtype_size(src_dtype);
    int64_t i;
    if (n <= 0) return;
    if (dst_dtype == src_dtype && dst_dtype != AMP_TF32) memmove(dst, src, (size_t)n * dst_size);
    else if (src_dtype == AMP_F64) ampi_from_fp64(dst, dst_dtype, src, n, 0, AMPI_EVEN, NULL);
    else if (src_dtype == AMP_F32 || src_dtype == AMP_TF32) ampi_from_fp32(dst, dst_dtype, src, n, path);
    else if (dst_dtype == AMP_F32) ampi_to_fp32(dst, src, src_dtype, n, path);
    else for (i = 0; i < n; i += AMPI_CONVERT_CHUNK) {
        int64_t m = AMPI_MIN(n - i, (int64_t)AMPI_CONVERT_CHUNK);
        ampi_to_fp32(room, (const char *)src + i * (int64_t)src_size, src_dtype, m, path);
        ampi_from_fp32((char *)dst + i * (int64_t)dst_size, dst_dtype, room, m, path);
    }
}

/* ---- Counting.  A number is not finite where every bit of its exponent is set; in E4M3, of its magnitude. */

AMPI_PRIVATE int64_t ampi_count_nonfinite(const void *data, amp_dtype dtype, int64_t n, amp_cpu_path path) {
    const ampi_numbers_vec *vec = AMPI_PICK(ampi_numbers_kernels, path);
    const uint8_t *bytes = (const uint8_t *)data;
    uint8_t mask = dtype == AMP_E4M3 ? 0x7f : 0x7c;
    int64_t i, total = 0;
    switch (dtype) {
        case AMP_F32: case AMP_TF32: return vec->count32(data, n, 0x7f800000u);
        case AMP_F16:  return vec->count16(data, n, 0x7c00);
        case AMP_BF16: return vec->count16(data, n, 0x7f80);
        case AMP_F64:
            for (i = 0; i < n; i++) total += (ampi_get64(data, i) >> 52 & 0x7ff) == 0x7ff;
            return total;
        case AMP_E4M3: case AMP_E5M2:
            for (i = 0; i < n; i++) total += (bytes[i] & mask) == mask;
            return total;
        default: return -1;
    }
}

AMP_API int64_t amp_count_nonfinite(const void *data, amp_dtype dtype, int64_t n, int64_t *first) {
    amp_cpu_path path = ampi_cpu_best_path();
    int64_t size = (int64_t)amp_dtype_size(dtype), total = 0, i;
    if (first != NULL) *first = -1;
    if (!ampi_dtype_is_float(dtype)) return -1;
    for (i = 0; data != NULL && i < n; i += AMPI_CONVERT_CHUNK) {
        int64_t m = AMPI_MIN(n - i, (int64_t)AMPI_CONVERT_CHUNK), j = i;
        int64_t count = ampi_count_nonfinite((const char *)data + i * size, dtype, m, path);
        total += count;
        if (count == 0 || first == NULL || *first >= 0) continue;
        while (ampi_count_nonfinite((const char *)data + j * size, dtype, 1, path) == 0) j++;
        *first = j;
    }
    return total;
}

/* ---- Conversion with every option, in pieces that fit the stack buffers. */

/* The fp32 pattern of the largest finite number. */
AMPI_PRIVATE uint32_t ampi_largest_bits(amp_dtype dtype) {
    switch (dtype) {
        case AMP_F16:  return 0x477fe000u;      /* 65504 */
        case AMP_BF16: return 0x7f7f0000u;
        case AMP_TF32: return 0x7f7fe000u;
        case AMP_E4M3: return 0x43e00000u;      /* 448 */
        case AMP_E5M2: return 0x47600000u;      /* 57344 */
        default:       return 0x7f7fffffu;
    }
}

AMPI_PRIVATE void ampi_stochastic(void *dst, amp_dtype dtype, const void *src, int64_t n, const uint32_t *random,
                                  amp_cpu_path path) {
    uint8_t *bytes = (uint8_t *)dst;
    int64_t i;
    switch (dtype) {
        case AMP_BF16: AMPI_PICK(ampi_numbers_kernels, path)->bf16_stochastic(dst, src, n, random, 0); break;
        case AMP_F16:
            for (i = 0; i < n; i++)
                ampi_put16(dst, i, ampi_to_f16(ampi_get32(src, i), 0, 0, AMPI_STOCHASTIC, random[i]));
            break;
        case AMP_E4M3:
            for (i = 0; i < n; i++) bytes[i] = ampi_to_e4m3(ampi_get32(src, i), 0, 0, AMPI_STOCHASTIC, random[i]);
            break;
        default:
            for (i = 0; i < n; i++) bytes[i] = ampi_to_e5m2(ampi_get32(src, i), 0, 0, AMPI_STOCHASTIC, random[i]);
            break;
    }
}

/* At most AMPI_CONVERT_CHUNK elements; `index` is the random number of the first. */
AMPI_PRIVATE void ampi_convert_chunk(void *dst, amp_dtype dst_dtype, const void *src, amp_dtype src_dtype, int64_t n,
                                     const amp_convert_desc *desc, uint64_t index, amp_cpu_path path) {
    const ampi_numbers_vec *vec = AMPI_PICK(ampi_numbers_kernels, path);
    int mode = desc->rounding == AMP_ROUND_STOCHASTIC ? AMPI_STOCHASTIC : AMPI_EVEN;
    uint32_t random[AMPI_CONVERT_CHUNK];
    float room[AMPI_CONVERT_CHUNK];
    if (mode == AMPI_STOCHASTIC) vec->random(random, n, desc->seed, index);
    if (src_dtype == AMP_F64 && dst_dtype != AMP_F64) {
        ampi_from_fp64(dst, dst_dtype, src, n, desc->saturate, mode, mode == AMPI_STOCHASTIC ? random : NULL);
        return;
    }
    if (dst_dtype == AMP_F64) {
        ampi_convert_fast(dst, dst_dtype, src, src_dtype, n, path);
        return;
    }
    ampi_to_fp32(room, src, src_dtype, n, path);
    if (desc->saturate) vec->clamp(room, room, n, ampi_largest_bits(dst_dtype));
    if (mode == AMPI_STOCHASTIC) ampi_stochastic(dst, dst_dtype, room, n, random, path);
    else ampi_from_fp32(dst, dst_dtype, room, n, path);
}

/* amp_convert with checked arguments and a chosen path.  Without saturation a number that is not finite stays so,
   so what became infinite is the difference of two counts. */
AMPI_PRIVATE void ampi_convert(void *dst, amp_dtype dst_dtype, const void *src, amp_dtype src_dtype, int64_t n,
                               const amp_convert_desc *desc, int64_t *new_inf, amp_cpu_path path) {
    int64_t dst_size = (int64_t)amp_dtype_size(dst_dtype), src_size = (int64_t)amp_dtype_size(src_dtype), i, found = 0;
    int plain = desc->rounding != AMP_ROUND_STOCHASTIC && !desc->saturate, counted = new_inf != NULL && !desc->saturate;
    for (i = 0; i < n; i += AMPI_CONVERT_CHUNK) {
        int64_t m = AMPI_MIN(n - i, (int64_t)AMPI_CONVERT_CHUNK);
        const char *from = (const char *)src + i * src_size;
        char *to = (char *)dst + i * dst_size;
        if (counted) found -= ampi_count_nonfinite(from, src_dtype, m, path);
        if (plain) ampi_convert_fast(to, dst_dtype, from, src_dtype, m, path);
        else ampi_convert_chunk(to, dst_dtype, from, src_dtype, m, desc, desc->offset + (uint64_t)i, path);
        if (counted) found += ampi_count_nonfinite(to, dst_dtype, m, path);
    }
    if (new_inf != NULL) *new_inf = found;
}

AMP_API amp_result amp_convert_v(void *dst, amp_dtype dst_dtype, const void *src, amp_dtype src_dtype, int64_t n,
                                 const amp_convert_desc *desc, int64_t *new_inf, uint64_t abi) {
    const amp_convert_desc none = {AMP_ROUND_DEFAULT, 0, 0, 0};
    int stochastic = desc != NULL && desc->rounding == AMP_ROUND_STOCHASTIC;
    AMPI_TRY(ampi_check_abi("amp_convert", abi, AMP_ABI(amp_convert_desc)));
    if (n < 0) return ampi_fail(AMP_ERR_RANGE, "amp_convert", "n = %lld, must be 0 or more", (long long)n);
    if (n > 0 && (dst == NULL || src == NULL))
        return ampi_fail(AMP_ERR_NULL, "amp_convert", dst == NULL ? "dst" : "src");
    if (!ampi_dtype_is_float(dst_dtype) || !ampi_dtype_is_float(src_dtype))
        return ampi_fail(AMP_ERR_DTYPE, "amp_convert", "from %s to %s, both must be floating",
                         amp_dtype_name(src_dtype), amp_dtype_name(dst_dtype));
    if (stochastic && (dst_dtype == AMP_F32 || dst_dtype == AMP_F64 || dst_dtype == AMP_TF32))
        return ampi_fail(AMP_ERR_DTYPE, "amp_convert", "stochastic rounding to %s, must be to fp16, bf16 or fp8",
                         amp_dtype_name(dst_dtype));
    if (desc != NULL && !stochastic && desc->rounding != AMP_ROUND_DEFAULT)
        return ampi_fail(AMP_ERR_RANGE, "amp_convert", ".rounding = %d, must be an amp_rounding", (int)desc->rounding);
    ampi_convert(dst, dst_dtype, src, src_dtype, n, desc != NULL ? desc : &none, new_inf, ampi_cpu_best_path());
    return AMP_OK;
}

/* ==== 3 >>machine: implementation ================================================================= */

#if AMPI_X86
static uint64_t ampi_xgetbv(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

/* Linux gives a process the tile registers when it asks: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA). */
static int ampi_ask_for_tiles(void) {
#if AMPI_GEMM_AMX
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(158L), "D"(0x1023L), "S"(18L) : "rcx", "r11", "memory");
    return result == 0;
#else
    return 0;
#endif
}

/* On cores with AMX, vdpbf16ps has a quarter of the rate of an FMA and does twice its work: there bf16 is multiplied
   with AMX or with FMA. */
static amp_cpu_path ampi_path_of(const amp_cpu_info *cpu, int cores_have_amx) {
    if (cpu->amx_bf16) return AMP_CPU_AMX;
    if (cpu->avx512_bf16 && !cores_have_amx) return AMP_CPU_AVX512_BF16;
    return cpu->avx512 ? AMP_CPU_AVX512 : cpu->avx2 ? AMP_CPU_AVX2 : AMP_CPU_SCALAR;
}

/* An instruction set counts only if the operating system saves its registers (XCR0: 0x06 ymm, 0xe6 zmm, 0x60000 tiles). */
static void ampi_probe_x86(amp_cpu_info *cpu) {
    uint32_t a, b, c, d, brand[12];
    uint64_t saved;
    int i, amx;
    if (__get_cpuid(0x80000000u, &a, &b, &c, &d) && a >= 0x80000004u) {
        const char *name = (const char *)brand;
        for (i = 0; i < 3; i++)
            __get_cpuid(0x80000002u + (uint32_t)i, &brand[4 * i], &brand[4 * i + 1], &brand[4 * i + 2], &brand[4 * i + 3]);
        while (*name == ' ') name++;
        snprintf(cpu->name, sizeof cpu->name, "%.47s", name);
    }
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return;
    saved = ampi_xgetbv();
    if ((saved & 0x06) == 0x06 && (c >> 12 & 1) && (c >> 28 & 1) && (c >> 29 & 1)) cpu->avx2 = 1;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) { cpu->avx2 = 0; return; }
    cpu->avx2 = cpu->avx2 && (b >> 5 & 1);
    cpu->avx512 = cpu->avx2 && (saved & 0xe6) == 0xe6 && (b >> 16 & 1) && (b >> 17 & 1) && (b >> 30 & 1) && (b >> 31 & 1);
    cpu->avx512_fp16 = cpu->avx512 && (d >> 23 & 1);
    amx = (d >> 22 & 1) && (d >> 24 & 1);
    if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) cpu->avx512_bf16 = cpu->avx512 && (a >> 5 & 1);
    cpu->amx_bf16 = cpu->avx512_bf16 && amx && (saved & 0x60000) == 0x60000 && ampi_ask_for_tiles();
    cpu->path = ampi_path_of(cpu, amx);
}
#endif

static int64_t ampi_sysconf(int name) {
    long value = sysconf(name);
    return value > 0 ? (int64_t)value : 0;
}

/* Bytes of RAM; 0 unknown. */
static int64_t ampi_probe_memory(void) {
#if defined(_SC_PHYS_PAGES)
    return ampi_sysconf(_SC_PHYS_PAGES) * ampi_sysconf(_SC_PAGESIZE);
#else
    return 0;
#endif
}

static void ampi_probe_cpu(amp_cpu_info *cpu) {
    memset(cpu, 0, sizeof *cpu);
    snprintf(cpu->name, sizeof cpu->name, "unknown CPU");
    cpu->path = AMP_CPU_SCALAR;
#if AMPI_X86
    ampi_probe_x86(cpu);
#endif
#if defined(_SC_NPROCESSORS_ONLN)
    cpu->cores = (int32_t)ampi_sysconf(_SC_NPROCESSORS_ONLN);
#endif
#if defined(_OPENMP)
    cpu->cores = AMPI_MIN(cpu->cores, omp_get_num_procs());     /* respects the process's affinity */
#endif
    cpu->cores = AMPI_MAX(cpu->cores, 1);
    cpu->memory = ampi_probe_memory();
#if defined(_SC_LEVEL1_DCACHE_SIZE)
    cpu->l1d = ampi_sysconf(_SC_LEVEL1_DCACHE_SIZE);
    cpu->l2 = ampi_sysconf(_SC_LEVEL2_CACHE_SIZE);
    cpu->l3 = ampi_sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
}

/* The library's one global: the best path, probed once.  Threads that race store the same value. */
AMPI_PRIVATE amp_cpu_path ampi_cpu_best_path(void) {
    static int cached;
    int path = __atomic_load_n(&cached, __ATOMIC_RELAXED);
    if (path == 0) {
        amp_cpu_info cpu;
        ampi_probe_cpu(&cpu);
        path = (int)cpu.path;
        __atomic_store_n(&cached, path, __ATOMIC_RELAXED);
    }
    return (amp_cpu_path)path;
}

/* A CPU as a device: tf32 and fp8 have no instructions there, fp16 has them with AVX512-FP16. */
#if defined(__clang__)
#  define AMPI_COMPILER ""          /* its __VERSION__ begins with its name */
#else
#  define AMPI_COMPILER "gcc "
#endif
#if defined(_OPENMP)
enum { AMPI_OPENMP = _OPENMP };
#else
enum { AMPI_OPENMP = 0 };
#endif
static void ampi_cpu_as_device(const amp_cpu_info *cpu, amp_device *out) {
    memset(out, 0, sizeof *out);
    snprintf(out->name, sizeof out->name, "%s", cpu->name);
    snprintf(out->kind, sizeof out->kind, "cpu");
    out->bf16 = cpu->path >= AMP_CPU_AVX512_BF16;
    out->multiprocessors = cpu->cores;
    out->memory = cpu->memory;
    if (AMPI_OPENMP) snprintf(out->versions, sizeof out->versions, AMPI_COMPILER "%.60s, OpenMP %d", __VERSION__, AMPI_OPENMP);
    else snprintf(out->versions, sizeof out->versions, AMPI_COMPILER "%.60s, no OpenMP", __VERSION__);
}

AMP_API amp_result amp_machine_probe(amp_machine *out) {
    if (out == NULL) return ampi_fail(AMP_ERR_NULL, "amp_machine_probe", "out is NULL");
    memset(out, 0, sizeof *out);
    ampi_probe_cpu(&out->cpu);
    ampi_cpu_as_device(&out->cpu, &out->device);
    return AMP_OK;
}

static const char *ampi_cpu_path_name(amp_cpu_path path) {
    switch (path) {
        case AMP_CPU_SCALAR: return "scalar";
        case AMP_CPU_AVX2: return "AVX2";
        case AMP_CPU_AVX512: return "AVX-512";
        case AMP_CPU_AVX512_BF16: return "AVX-512 BF16";
        case AMP_CPU_AMX: return "AMX and AVX-512";
        default: return "best";
    }
}

static const char *ampi_yes_no(int32_t flag) { return flag ? "yes" : "no"; }

AMP_API size_t amp_machine_text(const amp_machine *machine, char *text, size_t size) {
    const amp_cpu_info *c = &machine->cpu;
    const amp_device *d = &machine->device;
    int is_cpu = strcmp(d->kind, "cpu") == 0;
    char compute[64] = "";
    int n;
    if (d->cc_major > 0) snprintf(compute, sizeof compute, ", compute capability %d.%d, %d SMs", d->cc_major, d->cc_minor, d->multiprocessors);
    n = snprintf(text, size,
        "CPU      %s, %d cores, %.1f GiB\n"
        "         caches L1d %lld KiB, L2 %lld KiB, L3 %lld KiB\n"
        "         avx2 %s, avx512 %s, avx512_bf16 %s, avx512_fp16 %s, amx_bf16 %s; kernels use %s\n"
        "device   %s%s%s%s\n"
        "         matrix instructions: fp16 %s, bf16 %s, tf32 %s, fp8 %s%s\n",
        c->name, c->cores, (double)c->memory / 1073741824.0,
        (long long)(c->l1d / 1024), (long long)(c->l2 / 1024), (long long)(c->l3 / 1024),
        ampi_yes_no(c->avx2), ampi_yes_no(c->avx512), ampi_yes_no(c->avx512_bf16), ampi_yes_no(c->avx512_fp16), ampi_yes_no(c->amx_bf16),
        ampi_cpu_path_name(c->path),
        d->kind, is_cpu ? "" : ", ", is_cpu ? "" : d->name, compute,
        ampi_yes_no(d->fp16), ampi_yes_no(d->bf16), ampi_yes_no(d->tf32), ampi_yes_no(d->fp8),
        is_cpu ? " (others are emulated in fp32)" : "");
    return n < 0 ? 0 : (size_t)n;
}

static amp_result ampi_chosen(amp_choice *out, amp_dtype dtype, int emulated, int fell_back, const char *format, ...) AMPI_PRINTF(5, 6);
static amp_result ampi_chosen(amp_choice *out, amp_dtype dtype, int emulated, int fell_back, const char *format, ...) {
    va_list args;
    memset(out, 0, sizeof *out);
    out->dtype = dtype;
    out->scaler = dtype == AMP_F16;
    out->emulated = emulated;
    out->fell_back = fell_back;
    va_start(args, format);
    vsnprintf(out->reason, sizeof out->reason, format, args);
    va_end(args);
    return AMP_OK;
}

static amp_result ampi_choose_auto(const amp_device *d, int is_cpu, amp_choice *out) {
    int cc = d->cc_major * 10 + d->cc_minor;
    if (is_cpu && d->bf16) return ampi_chosen(out, AMP_BF16, 0, 0, "auto: this CPU has bf16 instructions; bf16 has fp32's range and needs no loss scaler");
    if (is_cpu) return ampi_chosen(out, AMP_F32, 0, 0, "auto: this CPU has no 16-bit matrix instructions, so fp32 is fastest and exact");
    if (d->bf16 && cc >= 80) return ampi_chosen(out, AMP_BF16, 0, 0, "auto: compute capability %d.%d has bf16 tensor cores; no loss scaler needed", d->cc_major, d->cc_minor);
    if (d->fp16 && cc >= 70 && cc <= 75) return ampi_chosen(out, AMP_F16, 0, 0, "auto: compute capability %d.%d has fp16 tensor cores but no bf16; with a loss scaler", d->cc_major, d->cc_minor);
    if (cc == 0 && d->bf16) return ampi_chosen(out, AMP_BF16, 0, 0, "auto: %.64s has bf16 matrix instructions; no loss scaler needed", d->name);
    return ampi_chosen(out, AMP_F32, 0, 0, "auto: %.64s has no fast 16-bit matrix instructions", d->name);
}

AMP_API amp_result amp_choose(const amp_machine *machine, amp_dtype wanted, int32_t allow_fallback, amp_choice *out) {
    const amp_device *d;
    const char *scaler;
    int is_cpu, has;
    if (machine == NULL || out == NULL) return ampi_fail(AMP_ERR_NULL, "amp_choose", "machine or out is NULL");
    d = &machine->device;
    is_cpu = strcmp(d->kind, "cpu") == 0;
    switch (wanted) {
        case AMP_DTYPE_DEFAULT: return ampi_choose_auto(d, is_cpu, out);
        case AMP_F32: return ampi_chosen(out, AMP_F32, 0, 0, "asked for; every machine has fp32");
        case AMP_F16: has = d->fp16; break;
        case AMP_BF16: has = d->bf16; break;
        case AMP_TF32: has = d->tf32; break;
        case AMP_E4M3: case AMP_E5M2:
            if (!allow_fallback)
                return ampi_fail(AMP_ERR_UNSUPPORTED, "amp_choose", "dtype %s: fp8 can be converted, but not computed in, by this version; use bf16, fp16, tf32 or fp32", amp_dtype_name(wanted));
            AMPI_TRY(ampi_choose_auto(d, is_cpu, out));
            return ampi_chosen(out, out->dtype, 0, 1, "%s asked for: fp8 compute is not in this version; %s instead", amp_dtype_name(wanted), amp_dtype_name(out->dtype));
        default:
            return ampi_fail(AMP_ERR_DTYPE, "amp_choose", "dtype %s is not a compute dtype; use fp32, tf32, fp16 or bf16", amp_dtype_name(wanted));
    }
    scaler = wanted == AMP_F16 ? "; train with a loss scaler" : "";
    if (has) return ampi_chosen(out, wanted, 0, 0, "asked for; %s has %s matrix instructions%s", is_cpu ? "this CPU" : "the device",
                                amp_dtype_name(wanted), scaler);
    if (is_cpu) return ampi_chosen(out, wanted, 1, 0, "asked for; emulated: operands are rounded to %s, the arithmetic is fp32%s",
                                   amp_dtype_name(wanted), scaler);
    if (!allow_fallback)
        return ampi_fail(AMP_ERR_UNSUPPORTED, "amp_choose", "dtype %s: %.64s (compute capability %d.%d) has no such matrix instructions", amp_dtype_name(wanted), d->name, d->cc_major, d->cc_minor);
    AMPI_TRY(ampi_choose_auto(d, is_cpu, out));
    return ampi_chosen(out, out->dtype, 0, 1, "%s asked for: %.64s lacks it; %s instead", amp_dtype_name(wanted), d->name, amp_dtype_name(out->dtype));
}

/* ==== 4 >>tensors: implementation ================================================================= */

AMP_API int64_t amp_tensor_count(const amp_tensor *tensor) {
    int64_t count = 1;
    int i;
    if (tensor == NULL || tensor->data == NULL) return 0;
    if (tensor->ndim < 1 || tensor->ndim > AMP_MAX_DIMS) return -1;
    for (i = 0; i < tensor->ndim; i++) {
        int64_t n = AMPI_MAX(tensor->shape[i], 1);      /* dimensions beside one of 0 must not overflow either */
        if (tensor->shape[i] < 0 || count > INT64_MAX / 16 / n) return -1;
        count *= n;
    }
    for (i = 0; i < tensor->ndim; i++) if (tensor->shape[i] == 0) return 0;
    return count;
}

/* Stride of dimension i in elements, also where the view leaves strides to be contiguous. */
AMPI_PRIVATE int64_t ampi_stride(const amp_tensor *t, int i) {
    int64_t stride = 1;
    int j, given = 0;
    for (j = 0; j < t->ndim; j++) given |= t->stride[j] != 0;
    if (given) return t->stride[i];
    for (j = t->ndim - 1; j > i; j--) stride *= t->shape[j];
    return stride;
}

AMPI_PRIVATE int ampi_is_contiguous(const amp_tensor *t) {
    int64_t stride = 1;
    int i;
    for (i = t->ndim - 1; i >= 0; i--) {
        if (t->shape[i] != 1 && ampi_stride(t, i) != stride) return 0;
        stride *= t->shape[i];
    }
    return 1;
}

AMPI_PRIVATE int ampi_is_storage(amp_dtype dtype) { return dtype == AMP_F32 || dtype == AMP_F16 || dtype == AMP_BF16; }
AMPI_PRIVATE int ampi_is_compute(amp_dtype dtype) { return ampi_is_storage(dtype) || dtype == AMP_TF32; }

/* "[2, 3, 4] bf16" for messages. */
AMPI_PRIVATE const char *ampi_shape_text(const amp_tensor *t, char *text, size_t size) {
    size_t n = 0;
    int i;
    if (t->data == NULL) { snprintf(text, size, "none"); return text; }
    for (i = 0; i < t->ndim && i < AMP_MAX_DIMS && n < size; i++)
        n += (size_t)snprintf(text + n, size - n, "%s%lld", i ? ", " : "[", (long long)t->shape[i]);
    if (n < size) snprintf(text + n, size - n, "] %s", amp_dtype_name(t->dtype));
    return text;
}

/* A tensor operand of an operator: present, of a storage dtype, with a legal shape. */
AMPI_PRIVATE amp_result ampi_check_tensor(const char *function, const char *field, const amp_tensor *t) {
    int i, given = 0;
    if (t->data == NULL) return ampi_fail(AMP_ERR_NULL, function, ".%s has no data", field);
    if (!ampi_is_storage(t->dtype))
        return ampi_fail(AMP_ERR_DTYPE, function, ".%s is %s, must be fp32, fp16 or bf16", field, amp_dtype_name(t->dtype));
    if (amp_tensor_count(t) < 0) return ampi_fail(AMP_ERR_SHAPE, function, ".%s has ndim %d or a negative or overflowing shape", field, t->ndim);
    for (i = 0; i < t->ndim; i++) given |= t->stride[i] != 0;
    if (given && t->shape[t->ndim - 1] > 1 && t->stride[t->ndim - 1] != 1)
        return ampi_fail(AMP_ERR_SHAPE, function, ".%s: the last dimension has stride %lld, must be contiguous", field, (long long)t->stride[t->ndim - 1]);
    return AMP_OK;
}

/* Whether a matrix's rows lie apart, one after the other. */
AMPI_PRIVATE amp_result ampi_check_ld(const char *function, const char *field, int64_t rows, int64_t cols, int64_t ld) {
    if (rows < 2 || cols < 1 || ld >= cols) return AMP_OK;
    return ampi_fail(AMP_ERR_SHAPE, function, ".%s: rows of %lld elements %s, their stride is %lld", field, (long long)cols, ld < 0 ? "run backwards" : "overlap", (long long)ld);
}

/* An output: no two elements may be one.  Strides from the smallest on must each reach past what lies below them. */
AMPI_PRIVATE amp_result ampi_check_output(const char *function, const char *field, const amp_tensor *t) {
    int64_t reach = 0;              /* place of the last element of the dimensions so far */
    int i, k, done = 0;
    if (amp_tensor_count(t) < 2) return AMP_OK;
    for (k = 0; k < t->ndim; k++) {
        int next = -1;
        for (i = 0; i < t->ndim; i++)
            if (!(done >> i & 1) && t->shape[i] > 1 && (next < 0 || ampi_stride(t, i) < ampi_stride(t, next))) next = i;
        if (next < 0) return AMP_OK;
        if (ampi_stride(t, next) <= reach)
            return ampi_fail(AMP_ERR_SHAPE, function, ".%s: elements overlap, dimension %d has stride %lld", field, next, (long long)ampi_stride(t, next));
        done |= 1 << next;
        reach += (t->shape[next] - 1) * ampi_stride(t, next);
    }
    return AMP_OK;
}

/* The tensor as rows x last dimension, if its leading dimensions are evenly strided. */
AMPI_PRIVATE amp_result ampi_rows(const char *function, const char *field, const amp_tensor *t, amp_mat *out) {
    int last = t->ndim - 1, i, given = 0;
    int64_t rows = 1, expect = 0;
    AMPI_TRY(ampi_check_tensor(function, field, t));
    memset(out, 0, sizeof *out);
    for (i = last - 1; i >= 0; i--) {
        if (t->shape[i] == 1) continue;
        if (!given) { out->ld = expect = ampi_stride(t, i); given = 1; }
        if (ampi_stride(t, i) != expect && amp_tensor_count(t) > 0)
            return ampi_fail(AMP_ERR_SHAPE, function, ".%s: the leading dimensions are not evenly strided", field);
        expect *= t->shape[i];
    }
    for (i = 0; i < last; i++) rows *= t->shape[i];
    out->data = t->data;
    out->dtype = t->dtype;
    out->rows = rows;
    out->cols = t->shape[last];
    if (!given) out->ld = out->cols;
    return ampi_check_ld(function, field, rows, out->cols, out->ld);
}

AMPI_PRIVATE amp_result ampi_check_same_rows(const char *function, const char *field, const amp_mat *m, const char *other, const amp_mat *like) {
    if (m->rows == like->rows && m->cols == like->cols) return AMP_OK;
    return ampi_fail(AMP_ERR_SHAPE, function, ".%s is [%lld, %lld], .%s is [%lld, %lld]; they must agree", field,
                     (long long)m->rows, (long long)m->cols, other, (long long)like->rows, (long long)like->cols);
}

/* Shell-style match with * (any run) and ? (one character). */
AMPI_PRIVATE int ampi_match(const char *pattern, const char *text) {
    const char *star = NULL, *resume = NULL;
    while (*text) {
        if (*pattern == '*') { star = pattern++; resume = text; }
        else if (*pattern == '?' || *pattern == *text) { pattern++; text++; }
        else if (star) { pattern = star + 1; text = ++resume; }
        else return 0;
    }
    while (*pattern == '*') pattern++;
    return *pattern == 0;
}

/* ==== 5 >>state: implementation ======================================================================

   The blob, format version 1; every number is little-endian.
      0    8  magic "AMPSTATE"
      8    4  format version
     12    4  AMP_VERSION of the writer
     16    8  bytes of the whole blob
     24    8  number of records
     32    4  CRC-32C of the directory
     36    4  CRC-32C of bytes 0 to 35
     40       directory, 80 bytes per record: key (64, filled up with 0), dtype (4), CRC-32C of the payload (4),
              count (8)
   and then the payloads in the order of the directory, without gaps.  Every byte stands under a checksum, and
   nothing is allocated before the sizes were compared with the bytes that are there. */

enum { AMPI_STATE_FORMAT = 1, AMPI_STATE_HEADER = 40, AMPI_STATE_ENTRY = 80, AMPI_STATE_KEY = 64 };

typedef struct ampi_record {
    char key[AMPI_STATE_KEY];       /* filled up with 0 */
    amp_dtype dtype;
    int64_t count;
    size_t bytes;
    void *data;                     /* NULL for no bytes */
} ampi_record;

struct amp_state {
    amp_system system;
    ampi_record *records;
    int64_t n, room;
    int64_t *table;                 /* by hash of the key: 1 + place of the record, 0 empty; 2 * room, a power of two */
};

/* ---- CRC-32C (Castagnoli, reflected polynomial 0x82F63B78, as in iSCSI), with the CPU's instruction where there
   is one and eight bytes per round of table look-ups elsewhere. */

typedef struct ampi_crc { int instruction; uint32_t table[8][256]; } ampi_crc;

#if AMPI_X86 && defined(__x86_64__)
__attribute__((target("sse4.2"))) static uint32_t ampi_crc_instruction(uint32_t crc, const uint8_t *data, size_t n) {
    uint64_t wide = crc;
    for (; n >= 8; n -= 8, data += 8) {
        uint64_t word;
        memcpy(&word, data, 8);
        wide = _mm_crc32_u64(wide, word);
    }
    crc = (uint32_t)wide;
    for (; n > 0; n--) crc = _mm_crc32_u8(crc, *data++);
    return crc;
}
static int ampi_crc_has_instruction(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 20 & 1u) != 0;
}
#else
static uint32_t ampi_crc_instruction(uint32_t crc, const uint8_t *data, size_t n) { (void)data; (void)n; return crc; }
static int ampi_crc_has_instruction(void) { return 0; }
#endif

/* table[k][i]: the CRC of byte i followed by k zero bytes. */
AMPI_PRIVATE void ampi_crc_init(ampi_crc *c, int allow_instruction) {
    uint32_t i;
    int k;
    c->instruction = allow_instruction && ampi_crc_has_instruction();
    if (c->instruction) return;
    for (i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (k = 0; k < 8; k++) crc = (crc >> 1) ^ (0x82F63B78u & (0u - (crc & 1u)));
        c->table[0][i] = crc;
    }
    for (i = 0; i < 256; i++)
        for (k = 1; k < 8; k++)
            c->table[k][i] = (c->table[k - 1][i] >> 8) ^ c->table[0][c->table[k - 1][i] & 255];
}

AMPI_PRIVATE uint32_t ampi_le32(const uint8_t *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}
AMPI_PRIVATE uint64_t ampi_le64(const uint8_t *p) { return (uint64_t)ampi_le32(p) | (uint64_t)ampi_le32(p + 4) << 32; }
AMPI_PRIVATE void ampi_store_le32(uint8_t *p, uint32_t value) {
    p[0] = (uint8_t)value; p[1] = (uint8_t)(value >> 8); p[2] = (uint8_t)(value >> 16); p[3] = (uint8_t)(value >> 24);
}
AMPI_PRIVATE void ampi_store_le64(uint8_t *p, uint64_t value) {
    ampi_store_le32(p, (uint32_t)value);
    ampi_store_le32(p + 4, (uint32_t)(value >> 32));
}

/* Goes on from the CRC of the bytes before; 0 to begin with. */
AMPI_PRIVATE uint32_t ampi_crc_add(const ampi_crc *c, uint32_t crc, const uint8_t *data, size_t n) {
    crc = ~crc;
    if (c->instruction) return ~ampi_crc_instruction(crc, data, n);
    for (; n >= 8; n -= 8, data += 8) {
        uint32_t low = crc ^ ampi_le32(data), high = ampi_le32(data + 4);
        crc = c->table[7][low & 255] ^ c->table[6][low >> 8 & 255] ^ c->table[5][low >> 16 & 255] ^
              c->table[4][low >> 24] ^ c->table[3][high & 255] ^ c->table[2][high >> 8 & 255] ^
              c->table[1][high >> 16 & 255] ^ c->table[0][high >> 24];
    }
    for (; n > 0; n--) crc = (crc >> 8) ^ c->table[0][(crc ^ *data++) & 255];
    return ~crc;
}

/* ---- Records */

/* Bytes of an element, 0 for a dtype that a record cannot have. */
static size_t ampi_state_element(amp_dtype dtype) {
    switch (dtype) {
        case AMP_F32: case AMP_F64: case AMP_F16: case AMP_BF16: case AMP_U8: case AMP_U16: case AMP_I32: case AMP_I64:
            return amp_dtype_size(dtype);
        default: return 0;
    }
}

static uint64_t ampi_text_hash(const char *key) {      /* FNV-1a */
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (; *key; key++) hash = (hash ^ (uint8_t)*key) * UINT64_C(0x100000001b3);
    return hash;
}

/* Where the key stands in the table, or the empty entry where it would stand. */
static int64_t *ampi_state_entry(const amp_state *state, const char *key) {
    uint64_t mask = (uint64_t)state->room * 2 - 1, i = ampi_text_hash(key) & mask;
    while (state->table[i] != 0 && strcmp(state->records[state->table[i] - 1].key, key) != 0) i = (i + 1) & mask;
    return state->table + i;
}

static ampi_record *ampi_state_find(const amp_state *state, const char *key) {
    int64_t place = state->n == 0 ? 0 : *ampi_state_entry(state, key);
    return place == 0 ? NULL : state->records + (place - 1);
}

/* Makes room for `room` records (a power of two) in all. */
static amp_result ampi_state_grow(amp_state *state, const char *function, int64_t room) {
    void *records, *table;
    int64_t i;
    AMPI_TRY(ampi_alloc(&state->system, function, &records, room, sizeof(ampi_record)));
    if (ampi_alloc(&state->system, function, &table, 2 * room, sizeof(int64_t)) != AMP_OK) {
        ampi_free(&state->system, records, room, sizeof(ampi_record));
        return AMP_ERR_MEMORY;
    }
    if (state->n > 0) memcpy(records, state->records, (size_t)state->n * sizeof(ampi_record));
    ampi_free(&state->system, state->records, state->room, sizeof(ampi_record));
    ampi_free(&state->system, state->table, 2 * state->room, sizeof(int64_t));
    state->records = (ampi_record *)records;
    state->table = (int64_t *)table;
    state->room = room;
    for (i = 0; i < state->n; i++) *ampi_state_entry(state, state->records[i].key) = i + 1;
    return AMP_OK;
}

static void *ampi_state_memory(const amp_state *state, size_t bytes) {
    return bytes == 0 ? NULL : state->system.alloc(state->system.user, bytes, 64);
}
static void ampi_state_release(const amp_state *state, ampi_record *record) {
    if (record->data != NULL) state->system.free(state->system.user, record->data, record->bytes);
}

/* Adds or replaces a record; its data becomes the state's own, unless this fails. */
static amp_result ampi_state_insert(amp_state *state, const char *function, const ampi_record *record) {
    ampi_record *old = ampi_state_find(state, record->key);
    if (old != NULL) {
        ampi_state_release(state, old);
        *old = *record;
        return AMP_OK;
    }
    if (state->n == state->room) AMPI_TRY(ampi_state_grow(state, function, state->room == 0 ? 16 : 2 * state->room));
    state->records[state->n] = *record;
    *ampi_state_entry(state, record->key) = state->n + 1;
    state->n++;
    return AMP_OK;
}

/* Moves the records of `from`, of the same system, into `to`: all of them or, without memory, none. */
AMPI_PRIVATE amp_result ampi_state_move(amp_state *to, amp_state *from, const char *function) {
    int64_t room = AMPI_MAX(to->room, 16), i;
    while (room < to->n + from->n) room *= 2;
    if (room > to->room) AMPI_TRY(ampi_state_grow(to, function, room));
    for (i = 0; i < from->n; i++) (void)ampi_state_insert(to, function, from->records + i);
    from->n = 0;
    return AMP_OK;
}

AMP_API amp_result amp_state_create(amp_state **out, const amp_system *system) {
    amp_system s = ampi_system(system);
    void *state;
    if (out == NULL) return ampi_fail(AMP_ERR_NULL, "amp_state_create", "out");
    *out = NULL;
    AMPI_TRY(ampi_alloc(&s, "amp_state_create", &state, 1, sizeof(amp_state)));
    *out = (amp_state *)state;
    (*out)->system = s;
    return AMP_OK;
}

AMP_API void amp_state_destroy(amp_state *state) {
    amp_system s;
    int64_t i;
    if (state == NULL) return;
    s = state->system;
    for (i = 0; i < state->n; i++) ampi_state_release(state, state->records + i);
    ampi_free(&s, state->records, state->room, sizeof(ampi_record));
    ampi_free(&s, state->table, 2 * state->room, sizeof(int64_t));
    ampi_free(&s, state, 1, sizeof(amp_state));
}

AMP_API amp_result amp_state_put(amp_state *state, const char *key, amp_dtype dtype, const void *values, int64_t n) {
    static const char function[] = "amp_state_put";
    size_t size = ampi_state_element(dtype), length;
    ampi_record record;
    amp_result result;
    if (state == NULL || key == NULL || (values == NULL && n > 0))
        return ampi_fail(AMP_ERR_NULL, function, state == NULL ? "state" : key == NULL ? "key" : "values");
    length = strlen(key);
    if (length < 1 || length >= AMPI_STATE_KEY)
        return ampi_fail(AMP_ERR_RANGE, function, "key \"%.80s\" has %zu bytes, must have 1 to %d", key, length,
                         AMPI_STATE_KEY - 1);
    if (n < 0) return ampi_fail(AMP_ERR_RANGE, function, "n = %lld for \"%s\", must be 0 or more", (long long)n, key);
    if (size == 0)
        return ampi_fail(AMP_ERR_DTYPE, function, "%s for \"%s\", must be fp32, fp64, fp16, bf16, u8, u16, i32 or i64",
                         amp_dtype_name(dtype), key);
    memset(&record, 0, sizeof record);
    memcpy(record.key, key, length);
    record.dtype = dtype;
    record.count = n;
    AMPI_TRY(ampi_bytes(function, n, size, &record.bytes));
    record.data = ampi_state_memory(state, record.bytes);
    if (record.data == NULL && record.bytes > 0)
        return ampi_fail(AMP_ERR_MEMORY, function, "%zu bytes for \"%s\"", record.bytes, key);
    if (record.bytes > 0) memcpy(record.data, values, record.bytes);
    result = ampi_state_insert(state, function, &record);
    if (result != AMP_OK) ampi_state_release(state, &record);
    return result;
}

AMP_API amp_result amp_state_get(const amp_state *state, const char *key, amp_dtype dtype, void *values, int64_t n) {
    static const char function[] = "amp_state_get";
    const ampi_record *record;
    if (state == NULL || key == NULL || (values == NULL && n > 0))
        return ampi_fail(AMP_ERR_NULL, function, state == NULL ? "state" : key == NULL ? "key" : "values");
    record = ampi_state_find(state, key);
    if (record == NULL)
        return ampi_fail(AMP_ERR_NAME, function, "no record \"%.80s\" among %lld", key, (long long)state->n);
    if (record->dtype != dtype || record->count != n)
        return ampi_fail(AMP_ERR_MISMATCH, function, "\"%s\" holds %lld %s, wanted are %lld %s", key,
                         (long long)record->count, amp_dtype_name(record->dtype), (long long)n, amp_dtype_name(dtype));
    if (record->bytes > 0) memcpy(values, record->data, record->bytes);
    return AMP_OK;
}

AMP_API int64_t amp_state_count(const amp_state *state, const char *key, amp_dtype *dtype) {
    const ampi_record *record = state == NULL || key == NULL ? NULL : ampi_state_find(state, key);
    if (record == NULL) return -1;
    if (dtype != NULL) *dtype = record->dtype;
    return record->count;
}

AMP_API const char *amp_state_key(const amp_state *state, int64_t i) {
    return state == NULL || i < 0 || i >= state->n ? NULL : state->records[i].key;
}

/* ---- The blob */

/* Copies values of `size` bytes between memory and little-endian data: reversed on a big-endian machine. */
AMPI_PRIVATE void ampi_copy_le(uint8_t *dst, const uint8_t *src, size_t bytes, size_t size) {
    const uint16_t probe = 1;
    uint8_t first;
    size_t i, j;
    memcpy(&first, &probe, 1);
    if (first == 1 || size == 1) { memcpy(dst, src, bytes); return; }
    for (i = 0; i < bytes; i += size)
        for (j = 0; j < size; j++) dst[i + j] = src[i + size - 1 - j];
}

/* As ampi_copy_le, with the checksum of the blob's side, in pieces that stay in the cache. */
static uint32_t ampi_state_copy(const ampi_crc *crc, void *dst, const void *src, size_t bytes, size_t size,
                                int to_blob) {
    enum { PIECE = 1 << 16 };
    uint32_t sum = 0;
    size_t at;
    for (at = 0; at < bytes; at += PIECE) {
        size_t n = AMPI_MIN(bytes - at, (size_t)PIECE);
        uint8_t *to = (uint8_t *)dst + at;
        const uint8_t *from = (const uint8_t *)src + at;
        ampi_copy_le(to, from, n, size);
        sum = ampi_crc_add(crc, sum, to_blob ? to : from, n);
    }
    return sum;
}

AMP_API amp_result amp_state_encode(const amp_state *state, void **data, size_t *bytes) {
    static const char function[] = "amp_state_encode";
    ampi_crc crc;
    uint8_t *blob, *entry, *payload;
    size_t total, directory;
    int64_t i;
    if (state == NULL || data == NULL || bytes == NULL)
        return ampi_fail(AMP_ERR_NULL, function, state == NULL ? "state" : data == NULL ? "data" : "bytes");
    directory = (size_t)state->n * AMPI_STATE_ENTRY;
    total = AMPI_STATE_HEADER + directory;
    for (i = 0; i < state->n; i++) {
        if (state->records[i].bytes > PTRDIFF_MAX - 1 - total)
            return ampi_fail(AMP_ERR_SIZE, function, "%lld records", (long long)state->n);
        total += state->records[i].bytes;
    }
    blob = (uint8_t *)state->system.alloc(state->system.user, total + 1, 64); /* amp_file_free counts one byte more */
    if (blob == NULL) return ampi_fail(AMP_ERR_MEMORY, function, "%zu bytes for the blob", total + 1);
    ampi_crc_init(&crc, 1);
    entry = blob + AMPI_STATE_HEADER;
    payload = entry + directory;
    for (i = 0; i < state->n; i++, entry += AMPI_STATE_ENTRY) {
        const ampi_record *record = state->records + i;
        memcpy(entry, record->key, AMPI_STATE_KEY);
        ampi_store_le32(entry + 64, (uint32_t)record->dtype);
        ampi_store_le32(entry + 68, ampi_state_copy(&crc, payload, record->data, record->bytes,
                                                    ampi_state_element(record->dtype), 1));
        ampi_store_le64(entry + 72, (uint64_t)record->count);
        payload += record->bytes;
    }
    memcpy(blob, "AMPSTATE", 8);
    ampi_store_le32(blob + 8, AMPI_STATE_FORMAT);
    ampi_store_le32(blob + 12, AMP_VERSION);
    ampi_store_le64(blob + 16, total);
    ampi_store_le64(blob + 24, (uint64_t)state->n);
    ampi_store_le32(blob + 32, ampi_crc_add(&crc, 0, blob + AMPI_STATE_HEADER, directory));
    ampi_store_le32(blob + 36, ampi_crc_add(&crc, 0, blob, 36));
    blob[total] = 0;
    *data = blob;
    *bytes = total;
    return AMP_OK;
}

/* A blob that is being read; `name` is its path, or "blob". */
typedef struct ampi_blob {
    const char *function, *name;
    const uint8_t *data;
    uint64_t bytes, records, directory;
    ampi_crc crc;
} ampi_blob;

static amp_result ampi_state_check_header(ampi_blob *b) {
    uint64_t magic = AMPI_MIN(b->bytes, (uint64_t)8), total;
    uint32_t version;
    if (memcmp(b->data, "AMPSTATE", (size_t)magic) != 0)
        return ampi_fail(AMP_ERR_FORMAT, b->function, "%s does not begin with AMPSTATE", b->name);
    if (b->bytes < 12)
        return ampi_fail(AMP_ERR_TRUNCATED, b->function, "%s has %llu bytes, fewer than its header", b->name,
                         (unsigned long long)b->bytes);
    version = ampi_le32(b->data + 8);
    if (version > AMPI_STATE_FORMAT)
        return ampi_fail(AMP_ERR_NEWER, b->function, "%s has format version %u, known are 1 to %d", b->name, version,
                         AMPI_STATE_FORMAT);
    if (b->bytes < AMPI_STATE_HEADER)
        return ampi_fail(AMP_ERR_TRUNCATED, b->function, "%s has %llu bytes, fewer than its header", b->name,
                         (unsigned long long)b->bytes);
    if (version == 0 || ampi_crc_add(&b->crc, 0, b->data, 36) != ampi_le32(b->data + 36))
        return ampi_fail(AMP_ERR_CHECKSUM, b->function, "%s: header", b->name);
    total = ampi_le64(b->data + 16);
    if (b->bytes < total)
        return ampi_fail(AMP_ERR_TRUNCATED, b->function, "%s has %llu of %llu bytes", b->name,
                         (unsigned long long)b->bytes, (unsigned long long)total);
    b->records = ampi_le64(b->data + 24);
    if (b->bytes > total || b->records > (total - AMPI_STATE_HEADER) / AMPI_STATE_ENTRY)
        return ampi_fail(AMP_ERR_CHECKSUM, b->function, "%s: %llu bytes do not fit its header", b->name,
                         (unsigned long long)b->bytes);
    b->directory = b->records * AMPI_STATE_ENTRY;
    return AMP_OK;
}

/* Entry i of the directory into *record, without data; *left is what remains for payloads from here on. */
static amp_result ampi_state_check_entry(const ampi_blob *b, uint64_t i, uint64_t *left, ampi_record *record) {
    const uint8_t *entry = b->data + AMPI_STATE_HEADER + i * AMPI_STATE_ENTRY;
    uint32_t dtype = ampi_le32(entry + 64);
    uint64_t count = ampi_le64(entry + 72), j;
    size_t size = dtype <= AMP_I64 ? ampi_state_element((amp_dtype)dtype) : 0, length;
    memset(record, 0, sizeof *record);
    memcpy(record->key, entry, AMPI_STATE_KEY);
    for (length = 0; length < AMPI_STATE_KEY && record->key[length] != 0; length++) {}
    for (j = length; j < AMPI_STATE_KEY && record->key[j] == 0; j++) {}
    if (length == 0 || length == AMPI_STATE_KEY || j < AMPI_STATE_KEY || size == 0 || count > *left / size)
        return ampi_fail(AMP_ERR_CHECKSUM, b->function, "%s: record %llu has an impossible key, dtype or size", b->name,
                         (unsigned long long)i);
    record->dtype = (amp_dtype)dtype;
    record->count = (int64_t)count;
    record->bytes = (size_t)count * size;
    *left -= record->bytes;
    return AMP_OK;
}

/* The whole directory, before anything is allocated for it. */
static amp_result ampi_state_check_directory(const ampi_blob *b) {
    uint64_t left = b->bytes - AMPI_STATE_HEADER - b->directory, i;
    ampi_record record;
    if (ampi_crc_add(&b->crc, 0, b->data + AMPI_STATE_HEADER, (size_t)b->directory) != ampi_le32(b->data + 32))
        return ampi_fail(AMP_ERR_CHECKSUM, b->function, "%s: directory", b->name);
    for (i = 0; i < b->records; i++) AMPI_TRY(ampi_state_check_entry(b, i, &left, &record));
    if (left != 0)
        return ampi_fail(AMP_ERR_CHECKSUM, b->function, "%s: %llu bytes belong to no record", b->name,
                         (unsigned long long)left);
    return AMP_OK;
}

static amp_result ampi_state_read_records(const ampi_blob *b, amp_state *state) {
    uint64_t left = b->bytes - AMPI_STATE_HEADER - b->directory, i;
    for (i = 0; i < b->records; i++) {
        const uint8_t *payload = b->data + (b->bytes - left),
                      *entry = b->data + AMPI_STATE_HEADER + i * AMPI_STATE_ENTRY;
        ampi_record record;
        amp_result result = AMP_OK;
        AMPI_TRY(ampi_state_check_entry(b, i, &left, &record));
        record.data = ampi_state_memory(state, record.bytes);
        if (record.data == NULL && record.bytes > 0)
            return ampi_fail(AMP_ERR_MEMORY, b->function, "%zu bytes for \"%s\"", record.bytes, record.key);
        if (ampi_state_copy(&b->crc, record.data, payload, record.bytes, ampi_state_element(record.dtype), 0) !=
            ampi_le32(entry + 68))
            result = ampi_fail(AMP_ERR_CHECKSUM, b->function, "%s: record \"%s\"", b->name, record.key);
        else if (ampi_state_find(state, record.key) != NULL)
            result = ampi_fail(AMP_ERR_CHECKSUM, b->function, "%s: record \"%s\" is there twice", b->name, record.key);
        else
            result = ampi_state_insert(state, b->function, &record);
        if (result != AMP_OK) { ampi_state_release(state, &record); return result; }
    }
    return AMP_OK;
}

static amp_result ampi_state_parse(amp_state **out, const amp_system *system, const void *data, size_t bytes,
                                   const char *function, const char *name) {
    amp_state *state;
    ampi_blob b;
    amp_result result;
    memset(&b, 0, sizeof b);
    b.function = function;
    b.name = name;
    b.data = (const uint8_t *)data;
    b.bytes = bytes;
    ampi_crc_init(&b.crc, 1);
    AMPI_TRY(ampi_state_check_header(&b));
    AMPI_TRY(ampi_state_check_directory(&b));
    AMPI_TRY(amp_state_create(&state, system));
    result = ampi_state_read_records(&b, state);
    if (result != AMP_OK) { amp_state_destroy(state); return result; }
    *out = state;
    return AMP_OK;
}

AMP_API amp_result amp_state_decode(amp_state **out, const amp_system *system, const void *data, size_t bytes) {
    if (out == NULL || (data == NULL && bytes > 0))
        return ampi_fail(AMP_ERR_NULL, "amp_state_decode", out == NULL ? "out" : "data");
    return ampi_state_parse(out, system, data == NULL ? "" : data, bytes, "amp_state_decode", "blob");
}

AMP_API amp_result amp_state_save(const amp_state *state, const char *path) {
    void *data;
    size_t bytes;
    amp_result result;
    if (state == NULL || path == NULL)
        return ampi_fail(AMP_ERR_NULL, "amp_state_save", state == NULL ? "state" : "path");
    AMPI_TRY(amp_state_encode(state, &data, &bytes));
    result = amp_file_write_atomic(&state->system, path, data, bytes);
    amp_file_free(&state->system, data, bytes);
    return result;
}

AMP_API amp_result amp_state_load(amp_state **out, const amp_system *system, const char *path) {
    void *data;
    size_t bytes;
    amp_result result;
    if (out == NULL || path == NULL) return ampi_fail(AMP_ERR_NULL, "amp_state_load", out == NULL ? "out" : "path");
    AMPI_TRY(amp_file_read_all(system, path, &data, &bytes));
    result = ampi_state_parse(out, system, data, bytes, "amp_state_load", path);
    amp_file_free(system, data, bytes);
    return result;
}

/* ==== 6 >>backends: implementation, the CPU backend ================================================= */

enum { AMPI_POOL_BLOCKS = 8 };

/* One open CPU device.  Streams do not exist: every call is done when it returns. */
typedef struct ampi_cpu {
    amp_host host;
    int threads;
    amp_cpu_path path;
    int pooled;                     /* 1: scratch blocks are kept for the next call */
    pthread_mutex_t lock;           /* for what follows */
    struct { void *ptr; size_t bytes; int busy; } pool[AMPI_POOL_BLOCKS];
    int64_t wall, busy;             /* time of the last telemetry, and the process's CPU time then */
} ampi_cpu;

/* Work on items [begin, end) of a parallel loop.  thread is below the number of threads asked for. */
typedef void (*ampi_task)(void *arg, int64_t begin, int64_t end, int thread);

/* Calls task for [0, n) in contiguous pieces of a multiple of `grain` items, on at most `threads` threads.
   Items must be independent, so that the result does not depend on how they are cut. */
AMPI_PRIVATE void ampi_parallel(int threads, int64_t n, int64_t grain, ampi_task task, void *arg) {
    int64_t pieces = (n + grain - 1) / grain;
    if (n <= 0) return;
    if (pieces < threads) threads = (int)pieces;
#if defined(_OPENMP)
    if (threads > 1) {
        #pragma omp parallel num_threads(threads)
        {
            int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
            int64_t begin = pieces * me / team * grain, end = pieces * (me + 1) / team * grain;
            if (begin < n) task(arg, begin, AMPI_MIN(end, n), (int)me);
        }
        return;
    }
#endif
    task(arg, 0, n, 0);
}

/* A block of the pool for `bytes`: the smallest free one that fits, else a free place where one is made.
   NULL: everything is busy, or there is no memory.  Called with the lock held. */
static void *ampi_pool_take(ampi_cpu *cpu, size_t bytes) {
    int best = -1, spare = -1, i;
    for (i = 0; i < AMPI_POOL_BLOCKS; i++) {
        if (cpu->pool[i].busy) continue;
        if (cpu->pool[i].bytes >= bytes && (best < 0 || cpu->pool[i].bytes < cpu->pool[best].bytes)) best = i;
        if (spare < 0 || cpu->pool[i].bytes < cpu->pool[spare].bytes) spare = i;
    }
    if (best < 0 && spare >= 0) {
        if (cpu->pool[spare].ptr) cpu->host.free(cpu->host.user, cpu->pool[spare].ptr, cpu->pool[spare].bytes);
        cpu->pool[spare].ptr = cpu->host.alloc(cpu->host.user, bytes, 64);
        cpu->pool[spare].bytes = cpu->pool[spare].ptr ? bytes : 0;
        if (cpu->pool[spare].ptr) best = spare;
    }
    if (best < 0) return NULL;
    cpu->pool[best].busy = 1;
    return cpu->pool[best].ptr;
}

/* Scratch memory that an operator of several kernels took before the first of them writes, so that none of the others
   can fail for want of it.  asking: kernels do nothing but tell how much they would take. */
typedef struct ampi_held { int asking, busy; void *ptr; size_t bytes; } ampi_held;
static AMPI_THREAD_LOCAL ampi_held ampi_scratch_held;

/* Scratch memory of one kernel call. */
AMPI_PRIVATE void *ampi_cpu_scratch(ampi_cpu *cpu, size_t bytes) {
    ampi_held *held = &ampi_scratch_held;
    void *ptr = NULL;
    if (bytes == 0) bytes = 1;
    if (held->asking) { held->bytes = AMPI_MAX(held->bytes, bytes); return NULL; }
    if (held->ptr != NULL && !held->busy && bytes <= held->bytes) { held->busy = 1; return held->ptr; }
    if (cpu->pooled) {
        pthread_mutex_lock(&cpu->lock);
        ptr = ampi_pool_take(cpu, bytes);
        pthread_mutex_unlock(&cpu->lock);
    }
    return ptr ? ptr : cpu->host.alloc(cpu->host.user, bytes, 64);
}

AMPI_PRIVATE void ampi_cpu_release(ampi_cpu *cpu, void *ptr, size_t bytes) {
    int i, found = 0;
    if (ptr == NULL) return;
    if (ptr == ampi_scratch_held.ptr) { ampi_scratch_held.busy = 0; return; }
    if (cpu->pooled) {
        pthread_mutex_lock(&cpu->lock);
        for (i = 0; i < AMPI_POOL_BLOCKS && !found; i++)
            if (cpu->pool[i].ptr == ptr) { cpu->pool[i].busy = 0; found = 1; }
        pthread_mutex_unlock(&cpu->lock);
    }
    if (!found) cpu->host.free(cpu->host.user, ptr, bytes ? bytes : 1);
}

AMPI_PRIVATE amp_result ampi_cpu_no_scratch(const char *kernel, size_t bytes) {
    if (ampi_scratch_held.asking) return AMP_ERR_MEMORY;
    return ampi_fail(AMP_ERR_MEMORY, kernel, "%zu bytes of scratch memory", bytes);
}

/* Address of element i of an array of dtype. */
AMPI_PRIVATE const void *ampi_at(const void *data, amp_dtype dtype, int64_t i) { return (const char *)data + i * (int64_t)amp_dtype_size(dtype); }
AMPI_PRIVATE void *ampi_at_mut(void *data, amp_dtype dtype, int64_t i) { return (char *)data + i * (int64_t)amp_dtype_size(dtype); }

/* Rows as fp32.  Kernels are written for fp32 rows: a 16-bit row is widened into `room` first, and a result
   row is computed in place or in `room` and then rounded once. */
AMPI_PRIVATE const float *ampi_row_in(const void *row, amp_dtype dtype, int64_t n, float *room, amp_cpu_path path) {
    if (dtype == AMP_F32) return (const float *)row;
    ampi_convert_fast(room, AMP_F32, row, dtype, n, path);
    return room;
}
AMPI_PRIVATE float *ampi_row_out(void *row, amp_dtype dtype, float *room) { return dtype == AMP_F32 ? (float *)row : room; }
AMPI_PRIVATE void ampi_row_done(void *row, amp_dtype dtype, int64_t n, const float *room, amp_cpu_path path) {
    if (dtype != AMP_F32) ampi_convert_fast(row, dtype, room, AMP_F32, n, path);
}

/* ---- >>backends: GEMM on the CPU

   C is cut into parts for the threads, by rows and by columns, never by k: each sum is formed by one thread, block
   by block of k, and its bits depend neither on the number of threads nor on where the cuts are.  In a part:

       for each block of rows, for each block of k:    pack the rows of A into words
           for each group of panels of columns:        pack the panels of B, unless gemm_pack did
               for each band of rows, for each panel, for each tile of rows:
                                                       multiply; in the last block of k, write out

   A panel of B stays in the first-level cache while a band of A passes from the second.  Rounding to the compute
   dtype happens in packing.  Small products skip what does not pay: operands that already are words are used where
   they lie, one thread does the work, scratch memory comes from the stack. */

enum {
    AMPI_GEMM_BANDS = 3,                /* bands in a block of rows; B is packed once for each */
    AMPI_GEMM_GROUP = 8,                /* panels of B packed at a time */
    AMPI_GEMM_SUMS = 1 << 17,           /* words of a block of C, where fp32 sums are kept between blocks of k */
    AMPI_GEMM_LOCAL = 4096              /* words of scratch memory on the stack */
};

/* op(a) or op(b), seen as k values for each of its rows or columns j.  along_k: those values lie side by side. */
typedef struct ampi_gemm_operand {
    const void *data;
    amp_dtype dtype, compute;
    int64_t ld;
    int along_k;
} ampi_gemm_operand;

static const void *ampi_gemm_at(const ampi_gemm_operand *x, int64_t k, int64_t j) {
    return ampi_at(x->data, x->dtype, x->along_k ? j * x->ld + k : k * x->ld + j);
}

/* Whether the operand's memory already holds words: fp32 anyhow, bf16 in pairs along k. */
static int ampi_gemm_is_words(const ampi_gemm_vec *vec, const ampi_gemm_operand *x, int64_t k) {
    if (vec->unit == 1) return x->dtype == AMP_F32 && x->compute == AMP_F32;
    return x->dtype == AMP_BF16 && x->along_k && k % 2 == 0 && x->ld % 2 == 0;
}

static const ampi_gemm_vec *ampi_gemm_pick(const ampi_cpu *cpu, amp_dtype compute) {
#if AMPI_GEMM_AMX
    if (cpu->path == AMP_CPU_AMX && compute == AMP_BF16) return &ampi_gemm_kernels_amx;
#endif
#if AMPI_GEMM_BF16
    if (cpu->path == AMP_CPU_AVX512_BF16 && compute == AMP_BF16) return &ampi_gemm_kernels_bf16;
#endif
    (void)compute;
    return AMPI_PICK(ampi_gemm_kernels, cpu->path);
}

static ampi_gemm_operand ampi_gemm_operand_a(const amp_k_gemm *g, int64_t item) {
    ampi_gemm_operand x;
    x.data = ampi_at(g->a, g->a_dtype, item * g->stride_a);
    x.dtype = g->a_dtype;
    x.compute = g->compute;
    x.ld = g->lda;
    x.along_k = !g->trans_a;
    return x;
}

static ampi_gemm_operand ampi_gemm_operand_b(const amp_k_gemm *g, int64_t item) {
    ampi_gemm_operand x;
    x.data = ampi_at(g->b, g->b_dtype, item * g->stride_b);
    x.dtype = g->b_dtype;
    x.compute = g->compute;
    x.ld = g->ldb;
    x.along_k = g->trans_b != 0;
    return x;
}

/* Blocks of k, of equal size but for the last; a function of k alone, so that packed and unpacked B agree. */
typedef struct ampi_gemm_blocks {
    int64_t words, count, size;         /* of k in all; blocks; words of a block */
} ampi_gemm_blocks;

static ampi_gemm_blocks ampi_gemm_cut_k(const ampi_gemm_vec *vec, int64_t k) {
    ampi_gemm_blocks b;
    b.words = (k + vec->unit - 1) / vec->unit;
    b.count = AMPI_MAX((b.words + vec->block - 1) / vec->block, 1);
    b.size = (b.words + b.count - 1) / b.count;
    return b;
}

/* Words between packed rows: a cache line more than needed, so that rows do not share cache sets. */
static int64_t ampi_gemm_pitch(int64_t words) { return (words + 15) / 16 * 16 + 16; }

/* ---- Packing */

/* Columns j0 .. j0 + n of B, k values from k0 on, into panels, `stride` words apart.  room: cols * pitch words. */
static void ampi_gemm_pack_columns(const ampi_gemm_vec *vec, const ampi_gemm_operand *x, int64_t k0, int64_t k, int64_t j0,
                                   int64_t n, float *dst, int64_t stride, float *room) {
    int64_t words = (k + vec->unit - 1) / vec->unit, pitch = ampi_gemm_pitch(words), step = x->along_k ? vec->cols : (int64_t)AMPI_GEMM_ROOM;
    int64_t j, i;
    for (j = 0; j < n; j += step) {
        float *panel = dst + j / vec->cols * stride;
        int64_t cols = AMPI_MIN(n - j, step);
        const void *src = ampi_gemm_at(x, k0, j0 + j);
        if (!x->along_k) {
            vec->weave(panel, stride, src, x->dtype, x->compute, x->ld, k, cols);
            continue;
        }
        if (cols < vec->cols) memset(panel, 0, (size_t)(words * vec->cols) * sizeof *panel);
        if (ampi_gemm_is_words(vec, x, k)) {
            vec->transpose(panel, vec->cols, (const float *)src, x->ld / vec->unit, cols, words);
            continue;
        }
        for (i = 0; i < cols; i++) vec->row(room + i * pitch, ampi_gemm_at(x, k0, j0 + j + i), x->dtype, x->compute, k);
        vec->transpose(panel, vec->cols, room, pitch, cols, words);
    }
}

/* Rows i0 .. i0 + m of A, k values from k0 on, into rows of words, `pitch` apart.  room: cols * words. */
static void ampi_gemm_pack_rows(const ampi_gemm_vec *vec, const ampi_gemm_operand *x, int64_t k0, int64_t k, int64_t i0,
                                int64_t m, float *dst, int64_t pitch, float *room) {
    int64_t words = (k + vec->unit - 1) / vec->unit, i;
    if (x->along_k) {
        for (i = 0; i < m; i++) vec->row(dst + i * pitch, ampi_gemm_at(x, k0, i0 + i), x->dtype, x->compute, k);
        return;
    }
    if (ampi_gemm_is_words(vec, x, k)) {
        vec->transpose(dst, pitch, (const float *)ampi_gemm_at(x, k0, i0), x->ld, words, m);
        return;
    }
    for (i = 0; i < m; i += vec->cols) {
        int64_t cols = AMPI_MIN(m - i, (int64_t)vec->cols);
        vec->weave(room, 0, ampi_gemm_at(x, k0, i0 + i), x->dtype, x->compute, x->ld, k, cols);
        vec->transpose(dst + i * pitch, pitch, room, vec->cols, words, cols);
    }
}

/* ---- One call and its parts */

typedef struct ampi_gemm_call {
    const amp_k_gemm *g;
    const ampi_gemm_vec *vec;
    void (*activation)(amp_activation_kind kind, const float *x, float *y, int64_t n);
    amp_cpu_path path;
    int64_t k;                          /* 0 where alpha is 0 */
    ampi_gemm_blocks blocks;
    int64_t panels;                     /* of all columns */
    int64_t cut_m, cut_n;               /* parts along the rows and the columns */
    int64_t block_rows, band_rows, block_panels;        /* of a block of C */
    int64_t pitch;                      /* of the sums kept between blocks of k */
    int use_a, use_b;                   /* 1: where it lies, unpacked */
    int sum_in_c;                       /* 1: sums between blocks of k are kept in C */
    int past_cache;                     /* 1: C is written past the caches */
    int64_t at_a, at_b, at_room, at_sums, at_tile, slot;   /* offsets in, and size of, a thread's scratch memory in words */
    float *scratch;
} ampi_gemm_call;

/* A block of C, and one block of k of it. */
typedef struct ampi_gemm_step {
    int64_t item, row, rows, panel, panels;
    int64_t k, words;                   /* k values and words of this block of k */
    int first, last;                    /* block of k */
    const float *a; int64_t lda;
    float *scratch;
} ampi_gemm_step;

/* What finish is told about the first row of the block and column j. */
static void ampi_gemm_out_at(const ampi_gemm_call *call, const ampi_gemm_step *s, int64_t j, const float *bias, ampi_gemm_out *out) {
    const amp_k_gemm *g = call->g;
    int whole = s->last && !call->sum_in_c;         /* x is all of the sum */
    out->alpha = g->alpha;
    out->beta = s->first || whole ? g->beta : 1.0f;
    out->bias = g->bias != NULL && (s->first || whole) ? bias : NULL;
    out->activation = call->activation;
    out->act = g->act;
    out->pre = g->pre != NULL ? ampi_at_mut(g->pre, g->pre_dtype, s->row * g->ld_pre + j) : NULL;
    out->pre_dtype = g->pre_dtype;
    out->ld_pre = g->ld_pre;
    out->c = ampi_at_mut(g->c, g->c_dtype, s->item * g->stride_c + s->row * g->ldc + j);
    out->c_dtype = g->c_dtype;
    out->ldc = g->ldc;
    out->past_cache = call->past_cache && g->n - j >= call->vec->cols;
}

/* Bias of n columns from j on, as fp32, and 0 up to the width of a panel. */
static void ampi_gemm_bias(const ampi_gemm_call *call, int64_t j, int64_t n, float *bias) {
    const amp_k_gemm *g = call->g;
    if (g->bias == NULL) return;
    memset(bias, 0, AMPI_GEMM_COLS * sizeof *bias);
    ampi_convert_fast(bias, AMP_F32, ampi_at(g->bias, g->bias_dtype, j), g->bias_dtype, n, call->path);
}

/* Asks for lines [n i / parts, n (i + 1) / parts) of n words, to be there when their turn comes. */
static void ampi_gemm_fetch(const float *words, int64_t n, int64_t i, int64_t parts) {
    const float *p = words + n * i / parts / 16 * 16, *end = words + n * (i + 1) / parts;
    for (; p < end; p += 16) __builtin_prefetch(p, 0, 2);
}

/* Asks for the rows of sums that the next tile adds to. */
static void ampi_gemm_fetch_rows(const float *sums, int64_t ld, int64_t rows, int64_t width) {
    int64_t i, j;
    for (i = 0; i < rows; i++)
        for (j = 0; j < width; j += 16) __builtin_prefetch(sums + i * ld + j, 1, 2);
}

/* One panel of B against a band of rows, from row `from` to `end` of the block, tile by tile, each summed in C itself,
   in the scratch memory's sums, or in one tile that finish then writes out.  next: the packed panel that follows, or
   NULL. */
static void ampi_gemm_panel(const ampi_gemm_call *call, const ampi_gemm_step *s, int64_t panel, int64_t from, int64_t end,
                            const float *b, int64_t ldb, const float *next) {
    const amp_k_gemm *g = call->g;
    const ampi_gemm_vec *vec = call->vec;
    int64_t width = vec->cols, col = panel * width, cols = AMPI_MIN(g->n - col, width), pitch = call->pitch;
    int64_t tiles = (end - from + vec->rows - 1) / vec->rows, tile, rows;
    float bias[AMPI_GEMM_COLS], *x = s->scratch + call->at_tile;
    float *sums = call->sum_in_c ? NULL : s->scratch + call->at_sums + (panel - s->panel) * width;
    int plain = g->bias == NULL && (g->beta == 0.0f || g->beta == 1.0f);
    int in_c = call->sum_in_c && cols == width && g->alpha == 1.0f && (plain || !s->first);
    ampi_gemm_out out;
    ampi_gemm_bias(call, col, cols, bias);
    ampi_gemm_out_at(call, s, col, bias, &out);
    for (tile = 0; tile < tiles; tile++, from += rows) {
        const float *a = s->a + from * s->lda, *before = s->first || sums == NULL ? NULL : sums + from * pitch;
        rows = (end - from) / (tiles - tile);
        if (next != NULL) ampi_gemm_fetch(next, s->words * width, tile, tiles);
        if (in_c) {
            float *c = (float *)out.c + from * g->ldc;
            if (tile + 1 < tiles) ampi_gemm_fetch_rows(c + rows * g->ldc, g->ldc, rows, width);
            vec->multiply(rows, s->words, a, s->lda, b, ldb, s->first && g->beta == 0.0f ? NULL : c, g->ldc, c, g->ldc);
        } else if (sums != NULL && !s->last) {
            vec->multiply(rows, s->words, a, s->lda, b, ldb, before, pitch, sums + from * pitch, pitch);
        } else {
            vec->multiply(rows, s->words, a, s->lda, b, ldb, before, pitch, x, width);
            vec->finish(&out, x, width, from, rows, cols);
        }
    }
}

/* Panels [p, end) against all bands; panel p at b, the others `stride` words apart.  more: the panel after the last is
   there too. */
static void ampi_gemm_bands(const ampi_gemm_call *call, const ampi_gemm_step *s, int64_t p, int64_t end, const float *b,
                            int64_t stride, int64_t ldb, int more) {
    int64_t row, q;
    for (row = 0; row < s->rows; row += call->band_rows)
        for (q = p; q < end; q++) {
            const float *panel = b + (q - p) * stride, *next = q + 1 < end + more ? panel + stride : NULL;
            ampi_gemm_panel(call, s, q, row, AMPI_MIN(row + call->band_rows, s->rows), panel, ldb, next);
        }
}

/* All panels of a block of C, for one block of k.  B comes from gemm_pack, from where it lies, or is packed here. */
static void ampi_gemm_columns(const ampi_gemm_call *call, const ampi_gemm_step *s, int64_t block) {
    const amp_k_gemm *g = call->g;
    const ampi_gemm_vec *vec = call->vec;
    ampi_gemm_operand b = ampi_gemm_operand_b(g, s->item);
    int64_t width = vec->cols, stride = s->words * width, k0 = block * call->blocks.size * vec->unit, p, q, end;
    const float *ready = g->packed_b == NULL ? NULL :
        (const float *)g->packed_b + block * call->blocks.size * call->panels * width;
    float *packed = s->scratch + call->at_b;
    for (p = s->panel; p < s->panel + s->panels; p = end) {
        end = AMPI_MIN(p + AMPI_GEMM_GROUP, s->panel + s->panels);
        if (ready != NULL) {
            ampi_gemm_bands(call, s, p, end, ready + p * stride, stride, width, end < call->panels);
            continue;
        }
        q = call->use_b ? AMPI_MIN(end, g->n / width) : p;      /* panels before q are used where they lie */
        if (p < q) ampi_gemm_bands(call, s, p, q, (const float *)ampi_gemm_at(&b, k0, p * width), width, b.ld, 0);
        if (q == end) continue;
        ampi_gemm_pack_columns(vec, &b, k0, s->k, q * width, AMPI_MIN(g->n, end * width) - q * width, packed, stride,
                               s->scratch + call->at_room);
        ampi_gemm_bands(call, s, q, end, packed, stride, width, 0);
    }
}

/* A block of C, over all k. */
static void ampi_gemm_block(const ampi_gemm_call *call, ampi_gemm_step *s) {
    ampi_gemm_operand a = ampi_gemm_operand_a(call->g, s->item);
    int64_t size = call->blocks.size * call->vec->unit, block;
    for (block = 0; block < call->blocks.count; block++) {
        s->first = block == 0;
        s->last = block + 1 == call->blocks.count;
        s->k = AMPI_MIN(call->k - block * size, size);
        s->words = (s->k + call->vec->unit - 1) / call->vec->unit;
        if (call->use_a) {
            s->a = (const float *)ampi_gemm_at(&a, block * size, s->row);
            s->lda = a.ld / call->vec->unit;
        } else {
            s->a = s->scratch + call->at_a;
            s->lda = ampi_gemm_pitch(call->blocks.size);
            ampi_gemm_pack_rows(call->vec, &a, block * size, s->k, s->row, s->rows, s->scratch + call->at_a, s->lda,
                                s->scratch + call->at_room);
        }
        ampi_gemm_columns(call, s, block);
    }
}

/* Rows or panels from part `i` of `parts` on, of n in all, in multiples of grain. */
static int64_t ampi_gemm_cut(int64_t n, int64_t grain, int64_t i, int64_t parts) {
    return AMPI_MIN((n + grain - 1) / grain * i / parts * grain, n);
}

static void ampi_gemm_part(void *arg, int64_t begin, int64_t end, int thread) {
    const ampi_gemm_call *call = (const ampi_gemm_call *)arg;
    int64_t part, i, j, parts = call->cut_m * call->cut_n;
    if (call->vec->begin != NULL) call->vec->begin();
    for (part = begin; part < end; part++) {
        int64_t along_m = part % parts / call->cut_n, along_n = part % call->cut_n;
        int64_t row = ampi_gemm_cut(call->g->m, call->vec->rows, along_m, call->cut_m);
        int64_t row_end = ampi_gemm_cut(call->g->m, call->vec->rows, along_m + 1, call->cut_m);
        int64_t panel = ampi_gemm_cut(call->panels, 1, along_n, call->cut_n), panel_end = ampi_gemm_cut(call->panels, 1, along_n + 1, call->cut_n);
        ampi_gemm_step s;
        memset(&s, 0, sizeof s);
        s.item = part / parts;
        s.scratch = call->scratch + thread * call->slot;
        for (j = panel; j < panel_end; j += call->block_panels)
            for (i = row; i < row_end; i += call->block_rows) {
                s.row = i;
                s.rows = AMPI_MIN(row_end - i, call->block_rows);
                s.panel = j;
                s.panels = AMPI_MIN(panel_end - j, call->block_panels);
                ampi_gemm_block(call, &s);
            }
    }
    if (call->vec->end != NULL) call->vec->end();
    if (call->past_cache) __atomic_thread_fence(__ATOMIC_SEQ_CST);      /* such stores have no order of their own */
}

/* Chooses the parts: the cut of each C with the least time for the busiest thread.  A part of r rows and c columns
   takes r c / 64 cycles for each k, and packing about 5 r / 8 + c / 2. */
static void ampi_gemm_cut_c(ampi_gemm_call *call, int threads) {
    int64_t rows = call->vec->rows, cols = call->vec->cols, tiles = (call->g->m + rows - 1) / rows, least = INT64_MAX, m, n;
    call->cut_m = call->cut_n = 1;
    for (m = 1; m <= AMPI_MIN(threads, tiles); m++)
        for (n = 1; n <= AMPI_MIN(threads / m, call->panels); n++) {
            int64_t r = (tiles + m - 1) / m * rows, c = (call->panels + n - 1) / n * cols;
            int64_t rounds = (call->g->batch * m * n + threads - 1) / threads;
            int64_t cost = rounds * (r * c + 40 * r + (call->g->packed_b != NULL ? 0 : 32 * c));
            if (cost >= least) continue;
            least = cost;
            call->cut_m = m;
            call->cut_n = n;
        }
}

/* Whether C, as the gradient of a weight often is, is far larger than what it is made of, and written once: then the
   caches need not fetch it first, nor keep it. */
static int ampi_gemm_past_cache(const ampi_gemm_call *call) {
    const amp_k_gemm *g = call->g;
    int once = call->blocks.count == 1 && g->beta == 0.0f && g->c_dtype == AMP_F32;
    int lines = (uintptr_t)g->c % 64 == 0 && g->ldc % 16 == 0 && (g->batch == 1 || g->stride_c % 16 == 0);
    return once && lines && call->k < AMPI_MIN(g->m, g->n) && g->m * g->n >= 1 << 20;
}

/* Block sizes, what is packed, and where in the scratch memory. */
static void ampi_gemm_plan(ampi_gemm_call *call) {
    const amp_k_gemm *g = call->g;
    const ampi_gemm_vec *vec = call->vec;
    ampi_gemm_operand a = ampi_gemm_operand_a(g, 0), b = ampi_gemm_operand_b(g, 0);
    int64_t tiles = (g->m + vec->rows - 1) / vec->rows, width = vec->cols, words = call->blocks.size;
    int64_t rows = AMPI_MIN((tiles + call->cut_m - 1) / call->cut_m * vec->rows, g->m), panels = (call->panels + call->cut_n - 1) / call->cut_n;
    int keep;
    call->past_cache = ampi_gemm_past_cache(call);
    call->sum_in_c = g->c_dtype == AMP_F32 && g->act == AMP_ACT_NONE && g->pre == NULL && !call->past_cache;
    keep = !call->sum_in_c && call->blocks.count > 1;
    call->band_rows = vec->band;
    call->block_rows = AMPI_MIN(rows, call->band_rows * (keep ? 2 : AMPI_GEMM_BANDS));
    call->block_panels = keep ? AMPI_MIN(panels, AMPI_GEMM_SUMS / (call->block_rows * width)) : panels;
    call->pitch = ampi_gemm_pitch(call->block_panels * width);
    /* Few columns or rows do not repay packing the other operand; rows a multiple of 1 KiB apart share cache sets. */
    call->use_a = a.along_k && ampi_gemm_is_words(vec, &a, call->k) && panels <= 4 && (a.ld % 256 != 0 || rows <= 4) && vec->spare == 0;
    call->use_b = !b.along_k && ampi_gemm_is_words(vec, &b, call->k) && rows <= 2 * vec->rows;
    call->at_tile = 0;
    call->at_a = call->at_tile + vec->rows * width;
    call->at_b = call->at_a + (call->use_a ? 0 : (call->block_rows + vec->spare) * ampi_gemm_pitch(words));
    call->at_room = call->at_b + (g->packed_b != NULL ? 0 : AMPI_MIN(panels, (int64_t)AMPI_GEMM_GROUP) * words * width);
    call->at_sums = call->at_room + width * ampi_gemm_pitch(words);
    call->slot = (call->at_sums + (keep ? call->block_rows * call->pitch : 0) + 15) / 16 * 16;
}

static amp_result ampi_gemm_small(ampi_gemm_call *call) {
    float local[AMPI_GEMM_LOCAL];
    call->scratch = local;
    ampi_gemm_part(call, 0, call->g->batch * call->cut_m * call->cut_n, 0);
    return AMP_OK;
}

static amp_result ampi_gemm_with(ampi_cpu *cpu, const ampi_gemm_vec *vec, const amp_k_gemm *args) {
    amp_k_gemm g = *args;
    ampi_gemm_call call;
    int threads = cpu->threads;
    int64_t parts;
    size_t bytes;
    if (g.batch > 1 && g.stride_b != 0) g.packed_b = NULL;
    memset(&call, 0, sizeof call);
    call.g = &g;
    call.vec = vec;
    call.activation = AMPI_PICK(ampi_pointwise_kernels, cpu->path)->activation;
    call.path = cpu->path;
    call.k = g.alpha == 0.0f ? 0 : g.k;
    call.blocks = ampi_gemm_cut_k(vec, call.k);
    call.panels = (g.n + vec->cols - 1) / vec->cols;
    if (2.0 * (double)g.m * (double)g.n * (double)g.k * (double)g.batch < 1e6) threads = 1;
    ampi_gemm_cut_c(&call, threads);
    ampi_gemm_plan(&call);
    parts = g.batch * call.cut_m * call.cut_n;
    if (threads == 1 && call.slot <= AMPI_GEMM_LOCAL) return ampi_scratch_held.asking ? AMP_OK : ampi_gemm_small(&call);
    threads = (int)AMPI_MIN(parts, (int64_t)threads);
    bytes = (size_t)call.slot * (size_t)threads * sizeof(float);
    call.scratch = (float *)ampi_cpu_scratch(cpu, bytes);
    if (call.scratch == NULL) return ampi_cpu_no_scratch("gemm", bytes);
    ampi_parallel(threads, parts, 1, ampi_gemm_part, &call);
    ampi_cpu_release(cpu, call.scratch, bytes);
    return AMP_OK;
}

/* ---- Matrix times vector: one row or one column of C, each value a sum of its own.  The matrix is read once, unpacked. */

enum {
    AMPI_GEMV_UNIT = 64,                /* values of C that threads share out */
    AMPI_GEMV_SPAN = 1024,              /* values of C at a time */
    AMPI_GEMV_ROWS = 8                  /* rows converted to fp32 at a time */
};

typedef struct ampi_gemv_call {
    const amp_k_gemm *g;
    const ampi_gemm_vec *vec;
    void (*activation)(amp_activation_kind kind, const float *x, float *y, int64_t n);
    amp_cpu_path path;
    int64_t k, n, units;                /* units of n in each item of the batch */
    int64_t slot;
    float *scratch;
} ampi_gemv_call;

/* sums[j] = sum over p < k of x[p] matrix(p, j0 + j).  room: k floats, or GEMV_ROWS rows of GEMV_SPAN. */
static void ampi_gemv_sums(const ampi_gemm_vec *vec, const ampi_gemm_operand *matrix, const float *x, int64_t k, int64_t j0,
                           int64_t n, float *sums, float *room) {
    int words = matrix->dtype == AMP_F32 && matrix->compute == AMP_F32;
    int64_t j, p, i;
    memset(sums, 0, (size_t)n * sizeof *sums);
    for (j = 0; matrix->along_k && j < n; j++) {
        const void *row = ampi_gemm_at(matrix, 0, j0 + j);
        if (!words) vec->row(room, row, matrix->dtype, matrix->compute, k);
        sums[j] = vec->dot(x, words ? (const float *)row : room, k);
    }
    if (matrix->along_k) return;
    if (words) {
        vec->combine(sums, x, (const float *)ampi_gemm_at(matrix, 0, j0), matrix->ld, k, n);
        return;
    }
    for (p = 0; p < k; p += AMPI_GEMV_ROWS) {
        int64_t rows = AMPI_MIN(k - p, (int64_t)AMPI_GEMV_ROWS);
        for (i = 0; i < rows; i++) vec->row(room + i * AMPI_GEMV_SPAN, ampi_gemm_at(matrix, p + i, j0), matrix->dtype, matrix->compute, n);
        vec->combine(sums, x + p, room, AMPI_GEMV_SPAN, rows, n);
    }
}

/* The vector as fp32. */
static void ampi_gemv_vector(const ampi_gemm_vec *vec, const ampi_gemm_operand *x, int64_t k, float *dst) {
    int64_t p;
    if (x->along_k) vec->row(dst, x->data, x->dtype, x->compute, k);
    else for (p = 0; p < k; p++) vec->row(dst + p, ampi_gemm_at(x, p, 0), x->dtype, x->compute, 1);
}

/* Writes n values from j on: a row of C in pieces of GEMM_ROOM columns, or a column, one value in each row of a tile. */
static void ampi_gemv_finish(const ampi_gemv_call *call, int64_t item, int64_t j, int64_t n, const float *sums) {
    const amp_k_gemm *g = call->g;
    int64_t room = AMPI_GEMM_ROOM, width = call->vec->cols, most = g->m == 1 ? room : room / width, i, done, m;
    float x[AMPI_GEMM_ROOM], bias[AMPI_GEMM_ROOM];
    for (done = 0; done < n; done += m, j += m) {
        int64_t row = g->m == 1 ? 0 : j, col = g->m == 1 ? j : 0;
        ampi_gemm_out out;
        m = AMPI_MIN(n - done, most);
        memset(&out, 0, sizeof out);
        memset(x, 0, sizeof x);
        memset(bias, 0, sizeof bias);
        for (i = 0; i < m; i++) x[g->m == 1 ? i : i * width] = sums[done + i];
        if (g->bias != NULL) ampi_convert_fast(bias, AMP_F32, ampi_at(g->bias, g->bias_dtype, col), g->bias_dtype, g->m == 1 ? m : 1, call->path);
        out.alpha = g->alpha;
        out.beta = g->beta;
        out.bias = g->bias != NULL ? bias : NULL;
        out.activation = call->activation;
        out.act = g->act;
        out.pre_dtype = g->pre_dtype;
        out.ld_pre = g->ld_pre;
        if (g->pre != NULL) out.pre = ampi_at_mut(g->pre, g->pre_dtype, row * g->ld_pre + col);
        out.c = ampi_at_mut(g->c, g->c_dtype, item * g->stride_c + row * g->ldc + col);
        out.c_dtype = g->c_dtype;
        out.ldc = g->ldc;
        if (g->m == 1) call->vec->finish(&out, x, (m + width - 1) / width * width, 0, 1, m);
        else call->vec->finish(&out, x, width, 0, m, 1);
    }
}

static void ampi_gemv_part(void *arg, int64_t begin, int64_t end, int thread) {
    const ampi_gemv_call *call = (const ampi_gemv_call *)arg;
    float *sums = call->scratch + thread * call->slot, *x = sums + AMPI_GEMV_SPAN, *room = x + call->k;
    int64_t unit, count;
    for (unit = begin; unit < end; unit += count) {
        int64_t item = unit / call->units, j = unit % call->units * AMPI_GEMV_UNIT, n;
        ampi_gemm_operand a = ampi_gemm_operand_a(call->g, item), b = ampi_gemm_operand_b(call->g, item);
        count = AMPI_MIN(AMPI_MIN(end - unit, call->units - unit % call->units), (int64_t)(AMPI_GEMV_SPAN / AMPI_GEMV_UNIT));
        n = AMPI_MIN(count * AMPI_GEMV_UNIT, call->n - j);
        ampi_gemv_vector(call->vec, call->g->m == 1 ? &a : &b, call->k, x);
        ampi_gemv_sums(call->vec, call->g->m == 1 ? &b : &a, x, call->k, j, n, sums, room);
        ampi_gemv_finish(call, item, j, n, sums);
    }
}

static amp_result ampi_gemv(ampi_cpu *cpu, const amp_k_gemm *g) {
    ampi_gemv_call call;
    int threads = 2.0 * (double)(g->m * g->n) * (double)g->k * (double)g->batch < 1e6 ? 1 : cpu->threads;
    size_t bytes;
    memset(&call, 0, sizeof call);
    call.g = g;
    call.vec = AMPI_PICK(ampi_gemm_kernels, cpu->path);
    call.activation = AMPI_PICK(ampi_pointwise_kernels, cpu->path)->activation;
    call.path = cpu->path;
    call.k = g->alpha == 0.0f ? 0 : g->k;
    call.n = g->m == 1 ? g->n : g->m;
    call.units = (call.n + AMPI_GEMV_UNIT - 1) / AMPI_GEMV_UNIT;
    call.slot = AMPI_GEMV_SPAN + call.k + AMPI_MAX(call.k, (int64_t)AMPI_GEMV_ROWS * AMPI_GEMV_SPAN);
    threads = (int)AMPI_MIN(g->batch * call.units, (int64_t)threads);
    bytes = (size_t)call.slot * (size_t)threads * sizeof(float);
    call.scratch = (float *)ampi_cpu_scratch(cpu, bytes);
    if (call.scratch == NULL) return ampi_cpu_no_scratch("gemm", bytes);
    ampi_parallel(threads, g->batch * call.units, 1, ampi_gemv_part, &call);
    ampi_cpu_release(cpu, call.scratch, bytes);
    return AMP_OK;
}

/* alpha 0 reads neither a nor b, as in BLAS. */
static amp_result ampi_cpu_product(ampi_cpu *cpu, const amp_k_gemm *args) {
    if (args->m <= 0 || args->n <= 0 || args->batch <= 0) return AMP_OK;
    if (args->m == 1 || args->n == 1) return ampi_gemv(cpu, args);
    return ampi_gemm_with(cpu, ampi_gemm_pick(cpu, args->compute), args);
}

/* ---- Packing B ahead: block of k after block, in each panel after panel */

typedef struct ampi_gemm_packing {
    const amp_k_pack *args;
    const ampi_gemm_vec *vec;
    ampi_gemm_operand b;
    ampi_gemm_blocks blocks;
    int64_t panels, pitch;
    float *packed, *scratch;
    amp_cpu_path path;
} ampi_gemm_packing;

static ampi_gemm_packing ampi_gemm_packing_of(const ampi_gemm_vec *vec, const amp_k_pack *args) {
    ampi_gemm_packing p;
    memset(&p, 0, sizeof p);
    p.args = args;
    p.vec = vec;
    p.b.data = args->b;
    p.b.dtype = args->b_dtype;
    p.b.compute = args->compute;
    p.b.ld = args->ldb;
    p.b.along_k = args->trans_b != 0;
    p.blocks = ampi_gemm_cut_k(p.vec, args->k);
    p.panels = (args->n + p.vec->cols - 1) / p.vec->cols;
    p.pitch = ampi_gemm_pitch(p.blocks.size);
    return p;
}

/* How many values stopped being finite when k0 .. k0 + k of columns j .. j + n were rounded into `words` words. */
static int64_t ampi_gemm_new_inf(const ampi_gemm_packing *p, int64_t k0, int64_t k, int64_t j, int64_t n, const float *packed, int64_t words) {
    int64_t after, before = 0, i;
    after = ampi_count_nonfinite(packed, p->vec->unit == 1 ? AMP_F32 : AMP_BF16, words * p->vec->unit, p->path);
    if (after == 0) return 0;
    for (i = 0; p->b.along_k && i < n; i++) before += ampi_count_nonfinite(ampi_gemm_at(&p->b, k0, j + i), p->b.dtype, k, p->path);
    for (i = 0; !p->b.along_k && i < k; i++) before += ampi_count_nonfinite(ampi_gemm_at(&p->b, k0 + i, j), p->b.dtype, n, p->path);
    return after - before;
}

static void ampi_gemm_pack_part(void *arg, int64_t begin, int64_t end, int thread) {
    const ampi_gemm_packing *p = (const ampi_gemm_packing *)arg;
    int64_t width = p->vec->cols, block, q;
    float *room = p->scratch + thread * width * p->pitch;
    for (block = 0; block < p->blocks.count; block++) {
        int64_t k0 = block * p->blocks.size * p->vec->unit, k = AMPI_MIN(p->args->k - k0, p->blocks.size * p->vec->unit);
        int64_t words = (k + p->vec->unit - 1) / p->vec->unit;
        float *to = p->packed + block * p->blocks.size * p->panels * width;
        for (q = begin; q < end; q += AMPI_GEMM_GROUP) {
            int64_t last = AMPI_MIN(q + AMPI_GEMM_GROUP, end), n = AMPI_MIN(last * width, p->args->n) - q * width, found;
            ampi_gemm_pack_columns(p->vec, &p->b, k0, k, q * width, n, to + q * words * width, words * width, room);
            if (p->args->new_inf == NULL) continue;
            found = ampi_gemm_new_inf(p, k0, k, q * width, n, to + q * words * width, (last - q) * words * width);
            __atomic_fetch_add(p->args->new_inf, found, __ATOMIC_RELAXED);
        }
    }
}

static amp_result ampi_gemm_pack_with(ampi_cpu *cpu, const ampi_gemm_vec *vec, const amp_k_pack *args, void *packed) {
    ampi_gemm_packing p = ampi_gemm_packing_of(vec, args);
    int threads = (double)args->k * (double)args->n < 1e5 ? 1 : (int)AMPI_MIN((int64_t)cpu->threads, AMPI_MAX(p.panels, 1));
    size_t bytes = (size_t)(threads * vec->cols * p.pitch) * sizeof(float);
    p.path = cpu->path;
    p.packed = (float *)packed;
    p.scratch = (float *)ampi_cpu_scratch(cpu, bytes);
    if (p.scratch == NULL) return ampi_cpu_no_scratch("gemm_pack", bytes);
    ampi_parallel(threads, p.panels, 1, ampi_gemm_pack_part, &p);
    ampi_cpu_release(cpu, p.scratch, bytes);
    return AMP_OK;
}

/* A product packs what it needs of B as it goes.  To do so ahead pays only for products to come: writing the packed B
   and reading it again costs memory traffic that a single product does not repay. */
static size_t ampi_cpu_gemm_pack_size(void *dev, const amp_k_pack *args) {
    ampi_gemm_packing p = ampi_gemm_packing_of(ampi_gemm_pick((const ampi_cpu *)dev, args->compute), args);
    return args->repeated ? (size_t)(p.blocks.words * p.panels * p.vec->cols) * sizeof(float) : 0;
}

static amp_result ampi_cpu_gemm_pack(void *dev, const amp_k_pack *args, void *packed, void *stream) {
    ampi_cpu *cpu = (ampi_cpu *)dev;
    (void)stream;
    return ampi_gemm_pack_with(cpu, ampi_gemm_pick(cpu, args->compute), args, packed);
}

/* ---- Column sums: ones times x, in blocks of 64 rows, so that rounding errors grow with rows / 64. */

enum { AMPI_COLUMN_BLOCK = 64 };

typedef struct ampi_column_call {
    const amp_k_column_sum *args;
    const ampi_gemm_vec *vec;
    int64_t slot;
    float *scratch;
} ampi_column_call;

/* Columns j .. j + n. */
static void ampi_column_span(const ampi_column_call *call, int64_t j, int64_t n, float *total) {
    const amp_mat *x = &call->args->x;
    float *block = total + AMPI_GEMV_SPAN, *room = block + AMPI_GEMV_SPAN, ones[AMPI_COLUMN_BLOCK];
    ampi_gemm_operand rows;
    ampi_gemm_out out;
    int64_t i, done, width = call->vec->cols;
    for (i = 0; i < AMPI_COLUMN_BLOCK; i++) ones[i] = 1.0f;
    memset(&rows, 0, sizeof rows);
    rows.dtype = x->dtype;
    rows.compute = AMP_F32;
    rows.ld = x->ld;
    memset(total, 0, AMPI_GEMV_SPAN * sizeof *total);
    for (i = 0; i < x->rows; i += AMPI_COLUMN_BLOCK) {
        rows.data = ampi_at(x->data, x->dtype, i * x->ld);
        ampi_gemv_sums(call->vec, &rows, ones, AMPI_MIN(x->rows - i, (int64_t)AMPI_COLUMN_BLOCK), j, n, block, room);
        call->vec->combine(total, ones, block, 0, 1, n);
    }
    memset(&out, 0, sizeof out);
    out.alpha = 1.0f;
    out.beta = call->args->add ? 1.0f : 0.0f;
    out.c_dtype = call->args->out_dtype;
    for (done = 0; done < n; done += AMPI_GEMM_ROOM) {
        int64_t m = AMPI_MIN(n - done, (int64_t)AMPI_GEMM_ROOM);
        out.c = ampi_at_mut(call->args->out, out.c_dtype, j + done);
        call->vec->finish(&out, total + done, (m + width - 1) / width * width, 0, 1, m);
    }
}

static void ampi_column_part(void *arg, int64_t begin, int64_t end, int thread) {
    const ampi_column_call *call = (const ampi_column_call *)arg;
    int64_t units = AMPI_GEMV_SPAN / AMPI_GEMV_UNIT, unit;
    for (unit = begin; unit < end; unit += units) {
        int64_t j = unit * AMPI_GEMV_UNIT, last = AMPI_MIN(AMPI_MIN(unit + units, end) * AMPI_GEMV_UNIT, call->args->x.cols);
        ampi_column_span(call, j, last - j, call->scratch + thread * call->slot);
    }
}

static amp_result ampi_cpu_column_sum(void *dev, const amp_k_column_sum *args, void *stream) {
    ampi_cpu *cpu = (ampi_cpu *)dev;
    int64_t units = (args->x.cols + AMPI_GEMV_UNIT - 1) / AMPI_GEMV_UNIT;
    ampi_column_call call;
    int threads = (double)args->x.rows * (double)args->x.cols < 1e5 ? 1 : (int)AMPI_MIN(units, (int64_t)cpu->threads);
    size_t bytes;
    (void)stream;
    if (args->x.cols <= 0) return AMP_OK;
    memset(&call, 0, sizeof call);
    call.args = args;
    call.vec = AMPI_PICK(ampi_gemm_kernels, cpu->path);
    call.slot = (int64_t)(2 + AMPI_GEMV_ROWS) * AMPI_GEMV_SPAN;
    bytes = (size_t)call.slot * (size_t)threads * sizeof(float);
    call.scratch = (float *)ampi_cpu_scratch(cpu, bytes);
    if (call.scratch == NULL) return ampi_cpu_no_scratch("column_sum", bytes);
    ampi_parallel(threads, units, 1, ampi_column_part, &call);
    ampi_cpu_release(cpu, call.scratch, bytes);
    return AMP_OK;
}

/* ---- Attention after Dao et al. 2022, on strips of 32 queries and tiles of 64 keys.  A tile is skipped where the
   mask hides all of it, and otherwise computed from the first to the last key that some query of the strip sees.
   Operands and probabilities are rounded to the compute dtype, products and sums are fp32, and the sums over keys
   (of o, dq) and over queries (of dk, dv) run in order. */

/* Which keys a query sees by kind and length: key j if j < first or low <= j < high. */
typedef struct ampi_span { int64_t first, low, high; } ampi_span;

AMPI_PRIVATE int64_t ampi_clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

/* The query stands at `position` among the keys: query i of q at i + keys - q, so that the last ones align. */
AMPI_PRIVATE ampi_span ampi_mask_span(const amp_mask *mask, int64_t b, int64_t position, int64_t keys) {
    int64_t length = mask->lengths ? ampi_clamp(mask->lengths[b], 0, keys) : keys;
    int64_t window = AMPI_MIN(mask->window, INT64_MAX / 4), end = position + 1;
    ampi_span s = {keys, 0, 0};
    switch (mask->kind) {
        case AMP_MASK_CAUSAL: s.first = end; break;
        case AMP_MASK_PREFIX: s.first = AMPI_MAX(end, (int64_t)mask->prefix[b]); break;
        case AMP_MASK_WINDOW: case AMP_MASK_WINDOW_GLOBAL:
            s.low = position - window + 1;
            s.high = mask->bidirectional ? position + window : end;
            if (mask->bidirectional) end = keys;
            s.first = mask->kind == AMP_MASK_WINDOW ? 0 : AMPI_MIN(mask->global, end);
            if (mask->kind == AMP_MASK_WINDOW_GLOBAL && position >= 0 && position < mask->global) s.first = end;
            break;
        default: break;
    }
    if (mask->documents && position < 0) s.first = s.high = 0;      /* a query of no document */
    s.first = ampi_clamp(s.first, 0, length);
    s.low = ampi_clamp(s.low, 0, length);
    s.high = ampi_clamp(s.high, 0, length);
    if (s.low <= s.first) s.first = AMPI_MAX(s.first, s.high);
    if (s.low <= s.first || s.high <= s.low) s.low = s.high = s.first;
    return s;
}

AMPI_PRIVATE int ampi_mask_hides(const amp_mask *mask) {
    return mask->kind != AMP_MASK_NONE || mask->lengths != NULL || mask->documents != NULL;
}

/* The row of `allowed` that belongs to a query, or NULL. */
AMPI_PRIVATE const uint8_t *ampi_mask_row(const amp_mask *mask, int64_t b, int64_t h, int64_t query, int64_t keys) {
    if (mask->kind != AMP_MASK_ARBITRARY) return NULL;
    return mask->allowed + b * mask->allowed_batch_stride + h * mask->allowed_head_stride + query * keys;
}

/* What the queries of one strip see.  Lanes without a query repeat the last one. */
typedef struct ampi_strip_mask {
    ampi_span span[AMPI_STRIP], least, most;    /* and the bounds over all lanes, field by field */
    int32_t document[AMPI_STRIP], least_document, most_document;
    const int32_t *documents;                   /* of the keys; NULL: one document */
    const uint8_t *allowed;                     /* of the first query; NULL: all allowed */
    int64_t keys, n;
} ampi_strip_mask;

AMPI_PRIVATE void ampi_strip_mask_open(ampi_strip_mask *s, const amp_mask *mask, int64_t b, int64_t h, int64_t query,
                                       int64_t n, int64_t queries, int64_t keys) {
    s->documents = mask->documents ? mask->documents + b * keys : NULL;
    s->allowed = ampi_mask_row(mask, b, h, query, keys);
    s->keys = keys;
    s->n = n;
    for (int64_t i = 0; i < AMPI_STRIP; i++) {
        int64_t position = query + AMPI_MIN(i, n - 1) + keys - queries;
        ampi_span span = ampi_mask_span(mask, b, position, keys);
        int32_t document = s->documents && position >= 0 ? s->documents[position] : 0;
        if (i == 0) {
            s->least = s->most = span;
            s->least_document = s->most_document = document;
        }
        s->span[i] = span;
        s->least.first = AMPI_MIN(s->least.first, span.first); s->most.first = AMPI_MAX(s->most.first, span.first);
        s->least.low = AMPI_MIN(s->least.low, span.low);       s->most.low = AMPI_MAX(s->most.low, span.low);
        s->least.high = AMPI_MIN(s->least.high, span.high);    s->most.high = AMPI_MAX(s->most.high, span.high);
        s->document[i] = document;
        s->least_document = AMPI_MIN(s->least_document, document);
        s->most_document = AMPI_MAX(s->most_document, document);
    }
}

/* The keys [*begin, *end) of a tile that some query of the strip may see; 0 if there are none. */
AMPI_PRIVATE int ampi_strip_range(const ampi_strip_mask *s, int64_t *begin, int64_t *end) {
    int64_t from = *begin, to = *end;
    *end = AMPI_MIN(to, AMPI_MAX(s->most.first, s->most.high));
    if (s->most.first <= from) *begin = AMPI_MAX(from, s->least.low);
    if (*begin >= *end) return 0;
    if (s->documents != NULL) {
        int32_t least = s->documents[*begin], most = least;
        for (int64_t j = *begin; j < *end; j++) {
            least = AMPI_MIN(least, s->documents[j]);
            most = AMPI_MAX(most, s->documents[j]);
        }
        if (most < s->least_document || least > s->most_document) return 0;
    }
    return 1;
}

/* The mask of the keys [begin, end) for the strip.  Returns 0 where all of them are seen by all.  `room` holds
   the transposed part of an arbitrary mask. */
AMPI_PRIVATE int ampi_strip_tile_mask(const ampi_strip_mask *s, int64_t begin, int64_t end, ampi_tile_mask *m,
                                      int32_t *room) {
    int64_t rows = end - begin, i, j;
    int open = end <= s->least.first || (begin >= s->most.low && end <= s->least.high);
    m->documents = NULL;
    m->allowed = s->allowed ? room : NULL;
    for (j = begin; s->documents && j < end; j++) {
        int same = s->documents[j] == s->least_document && s->documents[j] == s->most_document;
        if (!same) m->documents = s->documents + begin;
    }
    if (open && !m->documents && !m->allowed) return 0;
    for (i = 0; i < AMPI_STRIP; i++) {
        m->first[i] = (int32_t)ampi_clamp(s->span[i].first - begin, 0, rows);
        m->low[i] = (int32_t)ampi_clamp(s->span[i].low - begin, 0, rows);
        m->high[i] = (int32_t)ampi_clamp(s->span[i].high - begin, 0, rows);
        m->document[i] = s->document[i];
        for (j = 0; m->allowed && j < rows; j++) {
            room[j * AMPI_STRIP + i] = i < s->n && s->allowed[i * s->keys + begin + j] ? -1 : 0;
        }
    }
    return 1;
}

/* One attention call, and what one of its threads works with.  A row of `wide` floats is a row of dim values
   filled up with zeros. */
typedef struct ampi_attention_call {
    const amp_k_attention *x;
    const ampi_attention_vec *vec;
    const ampi_pointwise_vec *rows;
    amp_cpu_path path;
    int64_t wide, tiles;            /* tiles of AMPI_STRIPS strips per head */
    float *room; int64_t room_size; /* floats per thread */
} ampi_attention_call;

/* Rows of fp32 numbers of the compute dtype, ld floats apart. */
typedef struct ampi_rows32 { const float *data; int64_t ld; } ampi_rows32;

typedef struct ampi_strip {
    ampi_strip_mask mask;
    int64_t query;                  /* its first */
    float max[AMPI_STRIP], sum[AMPI_STRIP], lse[AMPI_STRIP], delta[AMPI_STRIP];
    ampi_rows32 q, d_o;             /* backward: d_o */
    float *q_copy, *q_t, *d_o_copy, *d_o_t;       /* [AMPI_STRIP, wide] and transposed */
    float *result_t;                /* o or dq, transposed */
} ampi_strip;

typedef struct ampi_attention_room {
    int64_t b, h;                   /* the head being worked on */
    ampi_strip strips[AMPI_STRIPS];
    int64_t n_strips;
    float *scores, *slopes;         /* [AMPI_KEY_TILE, AMPI_STRIP] */
    float *k, *v;                   /* [AMPI_KEY_TILE, wide] */
    float *result;                  /* [AMPI_STRIP, wide] */
    float *dk, *dv;                 /* backward: [keys, wide] */
    int32_t *allowed;               /* [AMPI_KEY_TILE, AMPI_STRIP] */
    int32_t careful;                /* 1: hidden keys or queries hold infinities or NaN */
} ampi_attention_room;

AMPI_PRIVATE float *ampi_take(float *base, int64_t *used, int64_t n) {
    float *p = base ? base + *used : NULL;
    *used += n;
    return p;
}

/* Places a thread's arrays at base and returns how many floats they take; base NULL only counts. */
AMPI_PRIVATE int64_t ampi_attention_place(ampi_attention_room *room, float *base, int64_t wide, int64_t keys,
                                          int backward) {
    int64_t used = 0, strip = AMPI_STRIP * wide, tile = AMPI_KEY_TILE * AMPI_STRIP;
    for (int s = 0; s < AMPI_STRIPS; s++) {
        room->strips[s].q_copy = ampi_take(base, &used, strip);
        room->strips[s].q_t = ampi_take(base, &used, strip);
        room->strips[s].d_o_copy = ampi_take(base, &used, backward ? strip : 0);
        room->strips[s].d_o_t = ampi_take(base, &used, backward ? strip : 0);
        room->strips[s].result_t = ampi_take(base, &used, strip);
    }
    room->scores = ampi_take(base, &used, tile);
    room->slopes = ampi_take(base, &used, backward ? tile : 0);
    room->k = ampi_take(base, &used, AMPI_KEY_TILE * wide);
    room->v = ampi_take(base, &used, AMPI_KEY_TILE * wide);
    room->result = ampi_take(base, &used, strip);
    room->dk = ampi_take(base, &used, backward ? keys * wide : 0);
    room->dv = ampi_take(base, &used, backward ? keys * wide : 0);
    room->allowed = (int32_t *)(void *)ampi_take(base, &used, tile);
    return used;
}

/* Whether every value of `storage` is one of `compute`. */
AMPI_PRIVATE int ampi_is_exact(amp_dtype storage, amp_dtype compute) {
    return compute == AMP_F32 || compute == storage || (compute == AMP_TF32 && storage != AMP_F32);
}

/* Row i of the head in a tensor. */
AMPI_PRIVATE int64_t ampi_attention_at(const ampi_attention_room *room, const int64_t stride[3], int64_t i) {
    return room->b * stride[0] + i * stride[1] + room->h * stride[2];
}

/* n rows of dim values at `data`, `stride` elements apart, as fp32 numbers of the compute dtype in room[n][wide]. */
AMPI_PRIVATE void ampi_attention_load(const ampi_attention_call *call, const void *data, int64_t stride, int64_t n,
                                      float *room) {
    const amp_k_attention *x = call->x;
    for (int64_t i = 0; i < n; i++) {
        float *row = room + i * call->wide;
        ampi_convert_fast(row, AMP_F32, ampi_at(data, x->dtype, i * stride), x->dtype, x->dim, call->path);
        memset(row + x->dim, 0, (size_t)(call->wide - x->dim) * sizeof *row);
        if (!ampi_is_exact(x->dtype, x->compute)) call->vec->round(row, x->dim, x->compute);
    }
}

/* Rows [begin, begin + n) of the head: where they lie if they are fp32 and stay so, else in `copy`.  A strip is
   filled up with zeros to AMPI_STRIP rows of `wide`. */
AMPI_PRIVATE ampi_rows32 ampi_attention_rows(const ampi_attention_call *call, const ampi_attention_room *room,
                                             const void *data, const int64_t stride[3], int64_t begin, int64_t n,
                                             int strip, float *copy) {
    const amp_k_attention *x = call->x;
    const void *from = ampi_at(data, x->dtype, ampi_attention_at(room, stride, begin));
    int64_t wide = call->wide;
    int usable = x->dtype == AMP_F32 && x->compute == AMP_F32 && (!strip || (n == AMPI_STRIP && x->dim == wide));
    ampi_rows32 rows = {copy, wide};
    if (usable) {
        rows.data = (const float *)from;
        rows.ld = stride[1];
        return rows;
    }
    ampi_attention_load(call, from, stride[1], n, copy);
    if (strip) memset(copy + n * wide, 0, (size_t)((AMPI_STRIP - n) * wide) * sizeof *copy);
    return rows;
}

/* Rounds factor * rows[n][wide] into rows begin, begin + 1, ... of a tensor.  Returns whether there was a NaN. */
AMPI_PRIVATE int ampi_attention_store(const ampi_attention_call *call, const ampi_attention_room *room, void *data,
                                      const int64_t stride[3], int64_t begin, int64_t n, float *rows, float factor) {
    const amp_k_attention *x = call->x;
    int nan = call->vec->has_nan(rows, n * call->wide);
    for (int64_t i = 0; i < n; i++) {
        float *row = rows + i * call->wide;
        void *to = ampi_at_mut(data, x->dtype, ampi_attention_at(room, stride, begin + i));
        if (ampi_bits_f32(factor) != 0x3f800000u) call->rows->scale_shift(row, factor, 0.0f, row, x->dim);
        ampi_convert_fast(to, x->dtype, row, AMP_F32, x->dim, call->path);
    }
    return nan;
}

/* delta[i] = sum over d of do[i][d] o[i][d], which is sum over keys of p dp. */
AMPI_PRIVATE void ampi_attention_delta(const ampi_attention_call *call, const ampi_attention_room *room,
                                       ampi_strip *s) {
    const amp_k_attention *x = call->x;
    float *row = room->result;
    memset(row, 0, (size_t)call->wide * sizeof *row);
    for (int64_t i = 0; i < s->mask.n; i++) {
        const void *o = ampi_at(x->o, x->dtype, ampi_attention_at(room, x->o_stride, s->query + i));
        ampi_convert_fast(row, AMP_F32, o, x->dtype, x->dim, call->path);
        s->delta[i] = call->vec->dot(s->d_o.data + i * s->d_o.ld, row, call->wide);
        s->lse[i] = x->lse[(room->b * x->heads + room->h) * x->queries + s->query + i];
    }
}

/* Prepares the strips of tile t of the head. */
AMPI_PRIVATE void ampi_attention_open(const ampi_attention_call *call, ampi_attention_room *room, int64_t t,
                                      int backward) {
    const amp_k_attention *x = call->x;
    int64_t query = t * AMPI_STRIPS * AMPI_STRIP;
    room->n_strips = 0;
    for (; query < x->queries && room->n_strips < AMPI_STRIPS; query += AMPI_STRIP) {
        ampi_strip *s = &room->strips[room->n_strips++];
        int64_t n = AMPI_MIN(x->queries - query, (int64_t)AMPI_STRIP);
        ampi_strip_mask_open(&s->mask, &x->mask, room->b, room->h, query, n, x->queries, x->keys);
        s->query = query;
        s->q = ampi_attention_rows(call, room, x->q, x->q_stride, query, n, 1, s->q_copy);
        call->vec->transpose(s->q.data, s->q.ld, s->q_t, AMPI_STRIP, AMPI_STRIP, call->wide);
        memset(s->result_t, 0, (size_t)(AMPI_STRIP * call->wide) * sizeof(float));
        for (int i = 0; i < AMPI_STRIP; i++) {
            s->max[i] = ampi_f32_of_bits(0xff800000u);
            s->sum[i] = s->lse[i] = s->delta[i] = 0.0f;
        }
        if (!backward) continue;
        s->d_o = ampi_attention_rows(call, room, x->d_o, x->do_stride, query, n, 1, s->d_o_copy);
        call->vec->transpose(s->d_o.data, s->d_o.ld, s->d_o_t, AMPI_STRIP, AMPI_STRIP, call->wide);
        ampi_attention_delta(call, room, s);
    }
}

/* tile = scale times n rows times a transposed strip. */
AMPI_PRIVATE void ampi_attention_scores(const ampi_attention_call *call, ampi_rows32 rows, int64_t n,
                                        const float *strip_t, float scale, float *tile) {
    ampi_product p = {n, AMPI_STRIP, call->x->dim, rows.data, rows.ld, 1, strip_t, AMPI_STRIP, tile, AMPI_STRIP,
                      0, scale, NULL};
    call->vec->product(&p);
}

AMPI_PRIVATE void ampi_attention_add(const ampi_attention_call *call, const ampi_attention_room *room,
                                     const ampi_product *p, int32_t a_is_weight) {
    if (room->careful) call->vec->product_weighted(p, a_is_weight);
    else call->vec->product(p);
}

/* One strip and n keys from `begin` on: o = o rescale + v^T p. */
AMPI_PRIVATE void ampi_attention_forward_tile(const ampi_attention_call *call, ampi_attention_room *room, ampi_strip *s,
                                              int64_t begin, int64_t n, ampi_rows32 k, ampi_rows32 v) {
    const amp_k_attention *x = call->x;
    float rescale[AMPI_STRIP];
    ampi_tile_mask mask;
    ampi_product p = {x->dim, AMPI_STRIP, n, v.data, 1, v.ld, room->scores, AMPI_STRIP, s->result_t, AMPI_STRIP,
                      1, 1.0f, rescale};
    ampi_attention_scores(call, k, n, s->q_t, x->scale, room->scores);
    if (ampi_strip_tile_mask(&s->mask, begin, begin + n, &mask, room->allowed))
        call->vec->hide(room->scores, n, &mask, ampi_f32_of_bits(0xff800000u));
    call->vec->soften(room->scores, n, s->max, s->sum, rescale, x->compute);
    ampi_attention_add(call, room, &p, 0);
}

/* One strip and n keys from `begin` on, with s the scaled scores:
   p = exp(s - lse), dp = do v^T, ds = p (dp - delta), dv += p^T do, dk += ds^T q, dq += ds k. */
AMPI_PRIVATE void ampi_attention_backward_tile(const ampi_attention_call *call, ampi_attention_room *room,
                                               ampi_strip *s, int64_t begin, int64_t n, ampi_rows32 k,
                                               ampi_rows32 v) {
    const amp_k_attention *x = call->x;
    int64_t wide = call->wide, queries = s->mask.n;
    float *p = room->scores, *ds = room->slopes, *dk = room->dk + begin * wide, *dv = room->dv + begin * wide;
    ampi_tile_mask mask;
    ampi_product to_dv = {n, wide, queries, p, AMPI_STRIP, 1, s->d_o.data, s->d_o.ld, dv, wide, 1, 1.0f, NULL};
    ampi_product to_dk = {n, wide, queries, ds, AMPI_STRIP, 1, s->q.data, s->q.ld, dk, wide, 1, 1.0f, NULL};
    ampi_product to_dq = {x->dim, AMPI_STRIP, n, k.data, 1, k.ld, ds, AMPI_STRIP, s->result_t, AMPI_STRIP,
                          1, 1.0f, NULL};
    ampi_attention_scores(call, k, n, s->q_t, x->scale, p);
    ampi_attention_scores(call, v, n, s->d_o_t, 1.0f, ds);
    call->vec->slopes(p, ds, n, s->lse, s->delta);
    if (ampi_strip_tile_mask(&s->mask, begin, begin + n, &mask, room->allowed)) {
        call->vec->hide(p, n, &mask, 0.0f);
        call->vec->hide(ds, n, &mask, 0.0f);
    }
    if (x->compute != AMP_F32) {
        call->vec->round(p, n * AMPI_STRIP, x->compute);
        call->vec->round(ds, n * AMPI_STRIP, x->compute);
    }
    ampi_attention_add(call, room, &to_dv, 1);
    ampi_attention_add(call, room, &to_dk, 1);
    ampi_attention_add(call, room, &to_dq, 0);
}

/* All strips of the room against all keys they see. */
AMPI_PRIVATE void ampi_attention_sweep(const ampi_attention_call *call, ampi_attention_room *room, int backward) {
    const amp_k_attention *x = call->x;
    for (int64_t j = 0; j < x->keys; j += AMPI_KEY_TILE) {
        int64_t last = AMPI_MIN(x->keys, j + AMPI_KEY_TILE);
        ampi_rows32 k = {NULL, 0}, v = {NULL, 0};
        for (int64_t i = 0; i < room->n_strips; i++) {
            ampi_strip *s = &room->strips[i];
            int64_t begin = j, end = last;
            ampi_rows32 ks, vs;
            if (!ampi_strip_range(&s->mask, &begin, &end)) continue;
            if (k.data == NULL) {
                k = ampi_attention_rows(call, room, x->k, x->k_stride, j, last - j, 0, room->k);
                v = ampi_attention_rows(call, room, x->v, x->v_stride, j, last - j, 0, room->v);
            }
            ks = k; ks.data += (begin - j) * k.ld;
            vs = v; vs.data += (begin - j) * v.ld;
            if (backward) ampi_attention_backward_tile(call, room, s, begin, end - begin, ks, vs);
            else ampi_attention_forward_tile(call, room, s, begin, end - begin, ks, vs);
        }
    }
}

/* Tile t of the head, forward.  Returns whether o has a NaN. */
AMPI_PRIVATE int ampi_attention_forward(const ampi_attention_call *call, ampi_attention_room *room, int64_t t) {
    const amp_k_attention *x = call->x;
    int64_t wide = call->wide;
    int nan = 0;
    ampi_attention_open(call, room, t, 0);
    ampi_attention_sweep(call, room, 0);
    for (int64_t i = 0; i < room->n_strips; i++) {
        ampi_strip *s = &room->strips[i];
        int64_t n = s->mask.n, row = (room->b * x->heads + room->h) * x->queries + s->query;
        float inverse[AMPI_STRIP];
        ampi_product divide = {wide, AMPI_STRIP, 0, s->q_t, 0, 0, s->q_t, 0, s->result_t, AMPI_STRIP, 1, 1.0f, inverse};
        call->vec->finish(s->max, s->sum, s->lse, inverse);
        call->vec->product(&divide);                        /* an empty product: only rescales */
        call->vec->transpose(s->result_t, AMPI_STRIP, room->result, wide, wide, AMPI_STRIP);
        nan |= ampi_attention_store(call, room, x->o, x->o_stride, s->query, n, room->result, 1.0f);
        if (x->lse) memcpy(x->lse + row, s->lse, (size_t)n * sizeof(float));
    }
    return nan;
}

/* The head, backward.  Returns whether a gradient has a NaN. */
AMPI_PRIVATE int ampi_attention_backward(const ampi_attention_call *call, ampi_attention_room *room) {
    const amp_k_attention *x = call->x;
    int64_t wide = call->wide;
    int nan = 0;
    memset(room->dk, 0, (size_t)(x->keys * wide) * sizeof(float));
    memset(room->dv, 0, (size_t)(x->keys * wide) * sizeof(float));
    for (int64_t t = 0; t < call->tiles; t++) {
        ampi_attention_open(call, room, t, 1);
        ampi_attention_sweep(call, room, 1);
        for (int64_t i = 0; i < room->n_strips; i++) {
            ampi_strip *s = &room->strips[i];
            call->vec->transpose(s->result_t, AMPI_STRIP, room->result, wide, wide, AMPI_STRIP);
            nan |= ampi_attention_store(call, room, x->dq, x->dq_stride, s->query, s->mask.n, room->result, x->scale);
        }
    }
    nan |= ampi_attention_store(call, room, x->dk, x->dk_stride, 0, x->keys, room->dk, x->scale);
    nan |= ampi_attention_store(call, room, x->dv, x->dv_stride, 0, x->keys, room->dv, 1.0f);
    return nan;
}

/* A hidden key that holds an infinity or NaN turns its weight of 0 into a NaN: the fast products cannot tell.
   Where a NaN came out under a mask, the work is done again with products that let a weight of 0 win. */
static void ampi_attention_forward_task(void *arg, int64_t begin, int64_t end, int thread) {
    const ampi_attention_call *call = (const ampi_attention_call *)arg;
    const amp_k_attention *x = call->x;
    ampi_attention_room room;
    ampi_attention_place(&room, call->room + thread * call->room_size, call->wide, x->keys, 0);
    for (int64_t item = begin; item < end; item++) {
        int64_t head = item / call->tiles, t = item % call->tiles;
        t = t % 2 ? call->tiles - 1 - t / 2 : t / 2;        /* early and late tiles in turn: their cost differs */
        room.b = head / x->heads;
        room.h = head % x->heads;
        room.careful = 0;
        if (!ampi_attention_forward(call, &room, t) || !ampi_mask_hides(&x->mask)) continue;
        room.careful = 1;
        ampi_attention_forward(call, &room, t);
    }
}

static void ampi_attention_backward_task(void *arg, int64_t begin, int64_t end, int thread) {
    const ampi_attention_call *call = (const ampi_attention_call *)arg;
    const amp_k_attention *x = call->x;
    ampi_attention_room room;
    ampi_attention_place(&room, call->room + thread * call->room_size, call->wide, x->keys, 1);
    for (int64_t head = begin; head < end; head++) {
        room.b = head / x->heads;
        room.h = head % x->heads;
        room.careful = 0;
        if (!ampi_attention_backward(call, &room) || !ampi_mask_hides(&x->mask)) continue;
        room.careful = 1;
        ampi_attention_backward(call, &room);
    }
}

AMPI_PRIVATE amp_result ampi_attention_run(ampi_cpu *cpu, const amp_k_attention *x, int backward) {
    ampi_attention_call call;
    ampi_attention_room room;
    int64_t items;
    size_t bytes;
    int threads;
    call.x = x;
    call.vec = AMPI_PICK(ampi_attention_kernels, cpu->path);
    call.rows = AMPI_PICK(ampi_pointwise_kernels, cpu->path);
    call.path = cpu->path;
    call.wide = (x->dim + AMPI_STRIP - 1) / AMPI_STRIP * AMPI_STRIP;
    call.tiles = (x->queries + AMPI_STRIPS * AMPI_STRIP - 1) / (AMPI_STRIPS * AMPI_STRIP);
    call.room_size = ampi_attention_place(&room, NULL, call.wide, x->keys, backward);
    items = x->batch * x->heads * (backward ? 1 : call.tiles);
    threads = (int)AMPI_MAX((int64_t)1, AMPI_MIN((int64_t)cpu->threads, items));
    AMPI_TRY(ampi_bytes("amp_attention", call.room_size * threads, sizeof(float), &bytes));
    call.room = (float *)ampi_cpu_scratch(cpu, bytes);
    if (call.room == NULL) return ampi_cpu_no_scratch("amp_attention", bytes);
    ampi_parallel(threads, items, 1, backward ? ampi_attention_backward_task : ampi_attention_forward_task, &call);
    ampi_cpu_release(cpu, call.room, bytes);
    return AMP_OK;
}

static amp_result ampi_cpu_attention(void *dev, const amp_k_attention *args, void *stream) {
    (void)stream;
    return ampi_attention_run((ampi_cpu *)dev, args, 0);
}

static amp_result ampi_cpu_attention_backward(void *dev, const amp_k_attention *args, void *stream) {
    (void)stream;
    return ampi_attention_run((ampi_cpu *)dev, args, 1);
}

/* ---- Softmax over masked rows.  A row without a seen key gives zeros. */

typedef struct ampi_softmax_call {
    const amp_k_softmax *x;
    amp_cpu_path path;
    float *room;                    /* two rows of `keys` per thread */
} ampi_softmax_call;

/* -inf into the hidden ones among scores [0, end) of a row. */
AMPI_PRIVATE void ampi_softmax_hide(const amp_k_softmax *x, int64_t b, int64_t h, int64_t query, ampi_span span,
                                    float *scores, int64_t end) {
    int64_t position = query + x->keys - x->queries;
    const int32_t *documents = x->mask.documents ? x->mask.documents + b * x->keys : NULL;
    const uint8_t *allowed = ampi_mask_row(&x->mask, b, h, query, x->keys);
    float hidden = ampi_f32_of_bits(0xff800000u);
    for (int64_t j = span.first; j < span.low && j < end; j++) scores[j] = hidden;
    if (!documents && !allowed) return;
    for (int64_t j = 0; j < end; j++) {
        if ((documents && documents[j] != documents[position]) || (allowed && !allowed[j])) scores[j] = hidden;
    }
}

/* y[0, n) = softmax of itself. */
AMPI_PRIVATE void ampi_softmax_row(amp_cpu_path path, float *y, int64_t n) {
    const ampi_pointwise_vec *vec = AMPI_PICK(ampi_pointwise_kernels, path);
    float max = vec->row_max(y, n);
    if (ampi_bits_f32(max) == 0xff800000u && !AMPI_PICK(ampi_attention_kernels, path)->has_nan(y, n)) {
        memset(y, 0, (size_t)n * sizeof *y);
        return;
    }
    vec->scale_shift(y, 1.0f / vec->exp_sum(y, max, y, n), 0.0f, y, n);
}

static void ampi_softmax_task(void *arg, int64_t begin, int64_t end, int thread) {
    const ampi_softmax_call *call = (const ampi_softmax_call *)arg;
    const amp_k_softmax *x = call->x;
    const ampi_pointwise_vec *vec = AMPI_PICK(ampi_pointwise_kernels, call->path);
    float *room = call->room + 2 * x->keys * thread;
    for (int64_t r = begin; r < end; r++) {
        int64_t query = r % x->queries, head = r / x->queries, b = head / x->heads;
        ampi_span span = ampi_mask_span(&x->mask, b, query + x->keys - x->queries, x->keys);
        int64_t n = AMPI_MAX(span.first, span.high);
        const float *in = ampi_row_in(ampi_at(x->x, x->x_dtype, r * x->keys), x->x_dtype, n, room, call->path);
        float *out = ampi_row_out(ampi_at_mut(x->y, x->y_dtype, r * x->keys), x->y_dtype, room + x->keys);
        vec->scale_shift(in, x->scale, 0.0f, out, n);
        ampi_softmax_hide(x, b, head % x->heads, query, span, out, n);
        ampi_softmax_row(call->path, out, n);
        memset(out + n, 0, (size_t)(x->keys - n) * sizeof *out);
        ampi_row_done(ampi_at_mut(x->y, x->y_dtype, r * x->keys), x->y_dtype, x->keys, out, call->path);
    }
}

static void ampi_softmax_backward_task(void *arg, int64_t begin, int64_t end, int thread) {
    const ampi_softmax_call *call = (const ampi_softmax_call *)arg;
    const amp_k_softmax *x = call->x;
    const ampi_attention_vec *vec = AMPI_PICK(ampi_attention_kernels, call->path);
    float *room = call->room + 2 * x->keys * thread;
    for (int64_t r = begin; r < end; r++) {
        int64_t at = r * x->keys;
        const float *y = ampi_row_in(ampi_at(x->y, x->y_dtype, at), x->y_dtype, x->keys, room, call->path);
        const float *dy = ampi_row_in(ampi_at(x->dy, x->y_dtype, at), x->y_dtype, x->keys, room + x->keys, call->path);
        float *dx = ampi_row_out(ampi_at_mut(x->dx, x->x_dtype, at), x->x_dtype, room + x->keys);
        vec->softmax_backward(y, dy, x->scale, dx, x->keys);
        ampi_row_done(ampi_at_mut(x->dx, x->x_dtype, at), x->x_dtype, x->keys, dx, call->path);
    }
}

AMPI_PRIVATE amp_result ampi_softmax_run(ampi_cpu *cpu, const amp_k_softmax *x, ampi_task task) {
    ampi_softmax_call call;
    int64_t rows = x->batch * x->heads * x->queries;
    int64_t grain = AMPI_MAX((int64_t)1, 16384 / AMPI_MAX(x->keys, (int64_t)1));
    int threads = (int)AMPI_MAX((int64_t)1, AMPI_MIN((int64_t)cpu->threads, rows));
    size_t bytes;
    AMPI_TRY(ampi_bytes("amp_softmax", 2 * x->keys * threads, sizeof(float), &bytes));
    call.x = x;
    call.path = cpu->path;
    call.room = (float *)ampi_cpu_scratch(cpu, bytes);
    if (call.room == NULL) return ampi_cpu_no_scratch("amp_softmax", bytes);
    ampi_parallel(threads, rows, grain, task, &call);
    ampi_cpu_release(cpu, call.room, bytes);
    return AMP_OK;
}

static amp_result ampi_cpu_softmax(void *dev, const amp_k_softmax *args, void *stream) {
    (void)stream;
    return ampi_softmax_run((ampi_cpu *)dev, args, ampi_softmax_task);
}

static amp_result ampi_cpu_softmax_backward(void *dev, const amp_k_softmax *args, void *stream) {
    (void)stream;
    return ampi_softmax_run((ampi_cpu *)dev, args, ampi_softmax_backward_task);
}
/* ---- The bandwidth-bound operators on the CPU.  Each is a loop over rows or tiles that widens what it reads to
   fp32, calls a vector kernel, and rounds once what it writes.  Sums over rows are taken over blocks whose size
   depends on the shape only, and the blocks are added in order: the same bits for any number of threads. */

enum {
    AMPI_TILE = 512,                /* elements of one operand that an elementwise kernel holds on the stack */
    AMPI_ROW_CHUNK = 1024,          /* sums along a row: fp32 within this many elements, fp64 beyond */
    AMPI_PIECE = 16384,             /* elements that are worth a thread */
    AMPI_SUM_BLOCK = 32768          /* elements of one partial loss sum */
};

typedef struct ampi_pointwise_job {
    ampi_cpu *cpu;
    const ampi_pointwise_vec *vec;
    const void *args;
    int64_t rows, cols, tiles_per_row;  /* elementwise kernels: tiles of at most AMPI_TILE neighbours in a row */
} ampi_pointwise_job;

AMPI_PRIVATE ampi_pointwise_job ampi_job(void *dev, const void *args) {
    ampi_pointwise_job job;
    memset(&job, 0, sizeof job);
    job.cpu = (ampi_cpu *)dev;
    job.vec = AMPI_PICK(ampi_pointwise_kernels, job.cpu->path);
    job.args = args;
    return job;
}

/* How many items of `size` elements a thread should get at least. */
AMPI_PRIVATE int64_t ampi_grain(int64_t size) { return AMPI_MAX(1, AMPI_PIECE / AMPI_MAX(size, 1)); }

/* Runs an elementwise task over the tiles of a rows x cols shape. */
AMPI_PRIVATE void ampi_run_tiles(ampi_pointwise_job *job, int64_t rows, int64_t cols, ampi_task task) {
    job->rows = rows;
    job->cols = cols;
    job->tiles_per_row = (cols + AMPI_TILE - 1) / AMPI_TILE;
    ampi_parallel(job->cpu->threads, rows * job->tiles_per_row, ampi_grain(AMPI_MIN(cols, (int64_t)AMPI_TILE)), task, job);
}

/* Tile i starts at (row, col) and has so many elements. */
AMPI_PRIVATE int64_t ampi_tile(const ampi_pointwise_job *job, int64_t i, int64_t *row, int64_t *col) {
    *row = i / job->tiles_per_row;
    *col = i % job->tiles_per_row * AMPI_TILE;
    return AMPI_MIN(job->cols - *col, (int64_t)AMPI_TILE);
}

AMPI_PRIVATE void *ampi_mat_at(const amp_mat *m, int64_t row, int64_t col) {
    return ampi_at_mut(m->data, m->dtype, row * m->ld + col);
}

/* 1 where the rows follow each other without a gap, so that the matrix can be walked as one long row. */
AMPI_PRIVATE int ampi_mat_dense(const amp_mat *m) { return m->ld == m->cols || m->rows <= 1; }

/* Columns of a row buffer: a multiple of 64 bytes. */
AMPI_PRIVATE int64_t ampi_padded(int64_t cols) { return (cols + 15) / 16 * 16; }

/* 1 + the index of the first value outside 0..limit-1 that is not `ignore`, or 0. */
AMPI_PRIVATE int32_t ampi_first_outside(const int32_t *values, int64_t n, int64_t limit, int64_t ignore) {
    for (int64_t i = 0; i < n; i++)
        if ((values[i] < 0 || values[i] >= limit) && values[i] != ignore)
            return (int32_t)AMPI_MIN(i + 1, (int64_t)INT32_MAX);
    return 0;
}

/* ---- Cast */

typedef struct ampi_cast_job { ampi_cpu *cpu; const amp_k_cast *args; int64_t *new_inf; } ampi_cast_job;

static void ampi_cast_task(void *arg, int64_t begin, int64_t end, int thread) {
    const ampi_cast_job *job = (const ampi_cast_job *)arg;
    const amp_k_cast *a = job->args;
    amp_convert_desc how = a->how;
    if (a->src_dtype == AMP_U16 && a->dst_dtype == AMP_I32) {
        for (; begin < end; begin++) ampi_put32(a->dst, begin, ampi_get16(a->src, begin));
        return;
    }
    how.offset += (uint64_t)begin;
    ampi_convert(ampi_at_mut(a->dst, a->dst_dtype, begin), a->dst_dtype, ampi_at(a->src, a->src_dtype, begin),
                 a->src_dtype, end - begin, &how, job->new_inf ? &job->new_inf[thread] : NULL, job->cpu->path);
}

static amp_result ampi_cpu_cast(void *dev, const amp_k_cast *args, void *stream) {
    ampi_cpu *cpu = (ampi_cpu *)dev;
    ampi_cast_job job = {cpu, args, NULL};
    size_t bytes = (size_t)cpu->threads * sizeof(int64_t);
    (void)stream;
    if (args->new_inf != NULL) {
        job.new_inf = (int64_t *)ampi_cpu_scratch(cpu, bytes);
        if (job.new_inf == NULL) return ampi_cpu_no_scratch("amp_cast", bytes);
        memset(job.new_inf, 0, bytes);
    }
    ampi_parallel(cpu->threads, args->n, AMPI_PIECE, ampi_cast_task, &job);
    if (job.new_inf != NULL) {
        for (int thread = 0; thread < cpu->threads; thread++) *args->new_inf += job.new_inf[thread];
        ampi_cpu_release(cpu, job.new_inf, bytes);
    }
    return AMP_OK;
}

/* ---- Activations, SwiGLU, dropout, addition */

/* x + bias[col..], in `room`; without a bias x itself. */
AMPI_PRIVATE const float *ampi_row_biased(const float *x, const void *bias, amp_dtype dtype, int64_t col, int64_t n,
                                          float *room, amp_cpu_path path) {
    float bias_room[AMPI_TILE];
    const float *b;
    if (bias == NULL) return x;
    b = ampi_row_in(ampi_at(bias, dtype, col), dtype, n, bias_room, path);
    for (int64_t i = 0; i < n; i++) room[i] = x[i] + b[i];
    return room;
}

static void ampi_activation_task(void *arg, int64_t begin, int64_t end, int thread) {
    const ampi_pointwise_job *job = (const ampi_pointwise_job *)arg;
    const amp_k_activation *a = (const amp_k_activation *)job->args;
    float x_room[AMPI_TILE], y_room[AMPI_TILE];
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        int64_t row, col, n = ampi_tile(job, i, &row, &col), at = row * job->cols + col;
        void *to = ampi_at_mut(a->y, a->y_dtype, at);
        const float *x = ampi_row_in(ampi_at(a->x, a->x_dtype, at), a->x_dtype, n, x_room, job->cpu->path);
        float *y = ampi_row_out(to, a->y_dtype, y_room);
        x = ampi_row_biased(x, a->bias, a->bias_dtype, col, n, x_room, job->cpu->path);
        job->vec->activation(a->act, x, y, n);
        ampi_row_done(to, a->y_dtype, n, y, job->cpu->path);
    }
}

/* With a bias over rows of cols, else over one long row. */
AMPI_PRIVATE void ampi_run_activation(ampi_pointwise_job *job, const amp_k_activation *a, ampi_task task) {
    int64_t cols = a->bias != NULL ? a->cols : a->n;
    ampi_run_tiles(job, cols > 0 ? a->n / cols : 0, cols, task);
}

static amp_result ampi_cpu_activation(void *dev, const amp_k_activation *args, void *stream) {
    ampi_pointwise_job job = ampi_job(dev, args);
    (void)stream;
    ampi_run_activation(&job, args, ampi_activation_task);
    return AMP_OK;
}

/* The slope of tanh is taken from y where it is given: no exponential is needed, and x may have been overwritten. */
static void ampi_activation_backward_task(void *arg, int64_t begin, int64_t end, int thread) {
    const ampi_pointwise_job *job = (const ampi_pointwise_job *)arg;
    const amp_k_activation *a = (const amp_k_activation *)job->args;
    int from_y = a->act == AMP_ACT_TANH && a->y != NULL;
    amp_dtype dtype = from_y ? a->y_dtype : a->x_dtype;
    float x_room[AMPI_TILE], dy_room[AMPI_TILE], dx_room[AMPI_TILE];
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        int64_t row, col, n = ampi_tile(job, i, &row, &col), at = row * job->cols + col;
        void *to = ampi_at_mut(a->dx, a->x_dtype, at);
        const float *x = ampi_row_in(ampi_at(from_y ? a->y : a->x, dtype, at), dtype, n, x_room, job->cpu->path);
        const float *dy = ampi_row_in(ampi_at(a->dy, a->y_dtype, at), a->y_dtype, n, dy_room, job->cpu->path);
        float *dx = ampi_row_out(to, a->x_dtype, dx_room);
        if (!from_y) x = ampi_row_biased(x, a->bias, a->bias_dtype, col, n, x_room, job->cpu->path);
        if (from_y) job->vec->tanh_backward(x, dy, dx, n);
        else job->vec->activation_backward(a->act, x, dy, dx, n);
        ampi_row_done(to, a->x_dtype, n, dx, job->cpu->path);
    }
}

static amp_result ampi_cpu_activation_backward(void *dev, const amp_k_activation *args, void *stream) {
    ampi_pointwise_job job = ampi_job(dev, args);
    (void)stream;
    ampi_run_activation(&job, args, ampi_activation_backward_task);
    return AMP_OK;
}

static void ampi_swiglu_task(void *arg, int64_t begin, int64_t end, int thread) {
    const ampi_pointwise_job *job = (const ampi_pointwise_job *)arg;
    const amp_k_swiglu *a = (const amp_k_swiglu *)job->args;
    amp_cpu_path path = job->cpu->path;
    float gate_room[AMPI_TILE], up_room[AMPI_TILE], y_room[AMPI_TILE];
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        int64_t row, col, n = ampi_tile(job, i, &row, &col);
        void *to = ampi_mat_at(&a->y, row, col);
        const float *gate = ampi_row_in(ampi_mat_at(&a->gate, row, col), a->gate.dtype, n, gate_room, path);
        const float *up = ampi_row_in(ampi_mat_at(&a->up, row, col), a->up.dtype, n, up_room, path);
        float *y = ampi_row_out(to, a->y.dtype, y_room);
        gate = ampi_row_biased(gate, a->gate_bias, a->gate_bias_dtype, col, n, gate_room, path);
        up = ampi_row_biased(up, a->up_bias, a->up_bias_dtype, col, n, up_room, path);
        job->vec->swiglu(gate, up, y, n);
        ampi_row_done(to, a->y.dtype, n, y, path);
    }
}

static amp_result ampi_cpu_swiglu(void *dev, const amp_k_swiglu *args, void *stream) {
    ampi_pointwise_job job = ampi_job(dev, args);
    int64_t rows = args->gate.rows, cols = args->gate.cols;
    int dense = args->gate_bias == NULL && args->up_bias == NULL && ampi_mat_dense(&args->gate) &&
                ampi_mat_dense(&args->up) && ampi_mat_dense(&args->y);
    (void)stream;
    ampi_run_tiles(&job, dense ? 1 : rows, dense ? rows * cols : cols, ampi_swiglu_task);
    return AMP_OK;
}

static void ampi_swiglu_backward_task(void *arg, int64_t begin, int64_t end, int thread) {
    const ampi_pointwise_job *job = (const ampi_pointwise_job *)arg;
    const amp_k_swiglu *a = (const amp_k_swiglu *)job->args;
    amp_cpu_path path = job->cpu->path;
    float gate_room[AMPI_TILE], up_room[AMPI_TILE], dy_room[AMPI_TILE], dgate_room[AMPI_TILE], dup_room[AMPI_TILE];
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        int64_t row, col, n = ampi_tile(job, i, &row, &col);
        void *to_gate = ampi_mat_at(&a->dgate, row, col), *to_up = ampi_mat_at(&a->dup, row, col);
        const float *gate = ampi_row_in(ampi_mat_at(&a->gate, row, col), a->gate.dtype, n, gate_room, path);
        const float *up = ampi_row_in(ampi_mat_at(&a->up, row, col), a->up.dtype, n, up_room, path);
        const float *dy = ampi_row_in(ampi_mat_at(&a->dy, row, col), a->dy.dtype, n, dy_room, path);
        float *dgate = ampi_row_out(to_gate, a->dgate.dtype, dgate_room);
        float *dup = ampi_row_out(to_up, a->dup.dtype, dup_room);
        gate = ampi_row_biased(gate, a->gate_bias, a->gate_bias_dtype, col, n, gate_room, path);
        up = ampi_row_biased(up, a->up_bias, a->up_bias_dtype, col, n, up_room, path);
        job->vec->swiglu_backward(gate, up, dy, dgate, dup, n);
        ampi_row_done(to_gate, a->dgate.dtype, n, dgate, path);
        ampi_row_done(to_up, a->dup.dtype, n, dup, path);
    }
}

static amp_result ampi_cpu_swiglu_backward(void *dev, const amp_k_swiglu *args, void *stream) {
    ampi_pointwise_job job = ampi_job(dev, args);
    int64_t rows = args->gate.rows, cols = args->gate.cols;
    int dense = args->gate_bias == NULL && args->up_bias == NULL && ampi_mat_dense(&args->gate) &&
                ampi_mat_dense(&args->up) && ampi_mat_dense(&args->dy) && ampi_mat_dense(&args->dgate) &&
                ampi_mat_dense(&args->dup);
    (void)stream;
    ampi_run_tiles(&job, dense ? 1 : rows, dense ? rows * cols : cols, ampi_swiglu_backward_task);
    return AMP_OK;
}

/* Uniform numbers are multiples of 2^-24, so u >= p exactly where the integer 2^24 u >= ceil(2^24 p). */
static void ampi_dropout_task(void *arg, int64_t begin, int64_t end, int thread) {
    const ampi_pointwise_job *job = (const ampi_pointwise_job *)arg;
    const amp_k_dropout *a = (const amp_k_dropout *)job->args;
    uint32_t threshold = (uint32_t)ceil((double)a->p * 16777216.0);
    uint64_t offset = a->offset + (a->base != NULL ? *a->base : 0);
    float scale = 1.0f / (1.0f - a->p), x_room[AMPI_TILE], y_room[AMPI_TILE];
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        int64_t row, at, n = ampi_tile(job, i, &row, &at);
        const void *from = ampi_at(a->x, a->x_dtype, at);
        void *to = ampi_at_mut(a->y, a->y_dtype, at);
        const float *x;
        float *y;
        if (threshold == 0) {
            ampi_convert_fast(to, a->y_dtype, from, a->x_dtype, n, job->cpu->path);
            continue;
        }
        x = ampi_row_in(from, a->x_dtype, n, x_room, job->cpu->path);
        y = ampi_row_out(to, a->y_dtype, y_room);
        job->vec->dropout(x, y, n, threshold, scale, a->seed, offset + (uint64_t)at);
        ampi_row_done(to, a->y_dtype, n, y, job->cpu->path);
    }
}

static amp_result ampi_cpu_dropout(void *dev, const amp_k_dropout *args, void *stream) {
    ampi_pointwise_job job = ampi_job(dev, args);
    (void)stream;
    ampi_run_tiles(&job, 1, args->n, ampi_dropout_task);
    return AMP_OK;
}

static void ampi_add_task(void *arg, int64_t begin, int64_t end, int thread) {
    const ampi_pointwise_job *job = (const ampi_pointwise_job *)arg;
    const amp_k_add *p = (const amp_k_add *)job->args;
    float a_room[AMPI_TILE], b_room[AMPI_TILE], y_room[AMPI_TILE];
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        int64_t row, at, n = ampi_tile(job, i, &row, &at);
        void *to = ampi_at_mut(p->y, p->y_dtype, at);
        const float *a = ampi_row_in(ampi_at(p->a, p->a_dtype, at), p->a_dtype, n, a_room, job->cpu->path), *b = NULL;
        float *y = ampi_row_out(to, p->y_dtype, y_room);
        if (p->b != NULL) b = ampi_row_in(ampi_at(p->b, p->b_dtype, at), p->b_dtype, n, b_room, job->cpu->path);
        job->vec->add(a, p->alpha, b, p->beta, y, n);
        ampi_row_done(to, p->y_dtype, n, y, job->cpu->path);
    }
}

static amp_result ampi_cpu_add(void *dev, const amp_k_add *args, void *stream) {
    ampi_pointwise_job job = ampi_job(dev, args);
    (void)stream;
    ampi_run_tiles(&job, 1, args->n, ampi_add_task);
    return AMP_OK;
}

/* ---- LayerNorm and RMSNorm */

typedef struct ampi_norm_job {
    ampi_cpu *cpu;
    const ampi_pointwise_vec *vec;
    const amp_k_norm *args;
    const float *weight, *bias;     /* fp32, or NULL */
    int64_t stride;                 /* floats between row buffers */
    float *rooms;                   /* three row buffers per thread */
    int64_t block_rows, blocks;     /* backward: rows per partial sum of dweight and dbias */
    float *partials;                /* [blocks, 2, stride] */
    float *memory;
    size_t bytes;
} ampi_norm_job;

/* Allocates the buffers of a call and widens weight and bias. */
static amp_result ampi_norm_open(ampi_norm_job *job, void *dev, const amp_k_norm *args, const char *function,
                                 int backward) {
    ampi_cpu *cpu = (ampi_cpu *)dev;
    int64_t floats;
    memset(job, 0, sizeof *job);
    job->cpu = cpu;
    job->vec = AMPI_PICK(ampi_pointwise_kernels, cpu->path);
    job->args = args;
    job->stride = ampi_padded(args->x.cols);
    job->block_rows = AMPI_MAX(16, (args->x.rows + 63) / 64);
    job->blocks = backward ? (args->x.rows + job->block_rows - 1) / job->block_rows : 0;
    floats = (2 + 3 * (int64_t)cpu->threads + 2 * job->blocks) * job->stride;
    AMPI_TRY(ampi_bytes(function, floats, sizeof(float), &job->bytes));
    job->memory = (float *)ampi_cpu_scratch(cpu, job->bytes);
    if (job->memory == NULL) return ampi_cpu_no_scratch(function, job->bytes);
    if (args->weight) job->weight = ampi_row_in(args->weight, args->weight_dtype, args->x.cols, job->memory, cpu->path);
    if (args->bias && !args->rms)
        job->bias = ampi_row_in(args->bias, args->weight_dtype, args->x.cols, job->memory + job->stride, cpu->path);
    job->rooms = job->memory + 2 * job->stride;
    job->partials = job->rooms + 3 * (int64_t)cpu->threads * job->stride;
    return AMP_OK;
}

/* mean of a row, or of the squares of its distances from `centre` */
static double ampi_row_mean(const ampi_norm_job *job, const float *x, int64_t n) {
    double sum = 0.0;
    for (int64_t i = 0; i < n; i += AMPI_ROW_CHUNK)
        sum += (double)job->vec->sum(x + i, AMPI_MIN(n - i, (int64_t)AMPI_ROW_CHUNK));
    return sum / (double)n;
}
static double ampi_row_variance(const ampi_norm_job *job, const float *x, float centre, int64_t n) {
    double sum = 0.0;
    for (int64_t i = 0; i < n; i += AMPI_ROW_CHUNK)
        sum += (double)job->vec->sum_squares(x + i, centre, AMPI_MIN(n - i, (int64_t)AMPI_ROW_CHUNK));
    return sum / (double)n;
}

/* The row to normalise.  What is normalised is the sum as it was stored, because that is what backward reads. */
static const float *ampi_norm_input(const ampi_norm_job *job, int64_t row, float *rooms) {
    const amp_k_norm *a = job->args;
    amp_cpu_path path = job->cpu->path;
    int64_t n = a->x.cols;
    const float *x = ampi_row_in(ampi_mat_at(&a->x, row, 0), a->x.dtype, n, rooms, path), *residual;
    float *sum = rooms + 2 * job->stride;
    void *to;
    if (a->residual.data == NULL) return x;
    residual = ampi_row_in(ampi_mat_at(&a->residual, row, 0), a->residual.dtype, n, rooms + job->stride, path);
    if (a->sum.data == NULL) {
        job->vec->add(x, 1.0f, residual, 1.0f, sum, n);
        return sum;
    }
    to = ampi_mat_at(&a->sum, row, 0);
    job->vec->add(x, 1.0f, residual, 1.0f, ampi_row_out(to, a->sum.dtype, sum), n);
    ampi_row_done(to, a->sum.dtype, n, sum, path);
    return ampi_row_in(to, a->sum.dtype, n, sum, path);
}

static void ampi_norm_task(void *arg, int64_t begin, int64_t end, int thread) {
    const ampi_norm_job *job = (const ampi_norm_job *)arg;
    const amp_k_norm *a = job->args;
    float *rooms = job->rooms + 3 * (int64_t)thread * job->stride;
    int64_t n = a->x.cols;
    for (int64_t row = begin; row < end; row++) {
        const float *s = ampi_norm_input(job, row, rooms);
        void *to = ampi_mat_at(&a->y, row, 0);
        float *y = ampi_row_out(to, a->y.dtype, rooms + job->stride);
        float mean = a->rms ? 0.0f : (float)ampi_row_mean(job, s, n);
        float rstd = (float)(1.0 / sqrt(ampi_row_variance(job, s, mean, n) + (double)a->eps));
        job->vec->normalize(s, mean, rstd, job->weight, job->bias, y, n);
        ampi_row_done(to, a->y.dtype, n, y, job->cpu->path);
        if (a->mean && !a->rms) a->mean[row] = mean;
        if (a->rstd) a->rstd[row] = rstd;
    }
}

static amp_result ampi_cpu_norm(void *dev, const amp_k_norm *args, void *stream) {
    ampi_norm_job job;
    (void)stream;
    AMPI_TRY(ampi_norm_open(&job, dev, args, args->rms ? "amp_rmsnorm" : "amp_layernorm", 0));
    ampi_parallel(job.cpu->threads, args->x.rows, ampi_grain(args->x.cols), ampi_norm_task, &job);
    ampi_cpu_release(job.cpu, job.memory, job.bytes);
    return AMP_OK;
}

/* With g = dy weight, h = (x - mean) rstd and means over the row:
   dx = rstd (g - mean(g) - h mean(g h)), without mean(g) in RMSNorm; dweight = sum of dy h, dbias = sum of dy. */
static void ampi_norm_backward_row(const ampi_norm_job *job, int64_t row, float *rooms, float *dweight, float *dbias) {
    const amp_k_norm *a = job->args;
    amp_cpu_path path = job->cpu->path;
    int64_t n = a->x.cols;
    float mean = a->rms ? 0.0f : a->mean[row], sums[2], means[2];
    double sum_g = 0.0, sum_gh = 0.0;
    void *to = ampi_mat_at(&a->dx, row, 0);
    const float *x = ampi_row_in(ampi_mat_at(&a->x, row, 0), a->x.dtype, n, rooms, path), *dsum = NULL;
    const float *dy = ampi_row_in(ampi_mat_at(&a->dy, row, 0), a->dy.dtype, n, rooms + job->stride, path);
    float *dx = ampi_row_out(to, a->dx.dtype, rooms + 2 * job->stride);
    for (int64_t i = 0; i < n; i += AMPI_ROW_CHUNK) {
        job->vec->norm_sums(x + i, dy + i, job->weight ? job->weight + i : NULL, mean, a->rstd[row],
                            dweight ? dweight + i : NULL, dbias ? dbias + i : NULL, sums,
                            AMPI_MIN(n - i, (int64_t)AMPI_ROW_CHUNK));
        sum_g += (double)sums[0];
        sum_gh += (double)sums[1];
    }
    means[0] = a->rms ? 0.0f : (float)(sum_g / (double)n);
    means[1] = (float)(sum_gh / (double)n);
    if (a->dsum.data)
        dsum = ampi_row_in(ampi_mat_at(&a->dsum, row, 0), a->dsum.dtype, n, rooms + 2 * job->stride, path);
    job->vec->norm_dx(x, dy, job->weight, dsum, mean, a->rstd[row], means, dx, n);
    ampi_row_done(to, a->dx.dtype, n, dx, path);
}

static void ampi_norm_backward_task(void *arg, int64_t begin, int64_t end, int thread) {
    const ampi_norm_job *job = (const ampi_norm_job *)arg;
    const amp_k_norm *a = job->args;
    float *rooms = job->rooms + 3 * (int64_t)thread * job->stride;
    for (int64_t block = begin; block < end; block++) {
        float *partial = job->partials + 2 * block * job->stride;
        int64_t last = AMPI_MIN(a->x.rows, (block + 1) * job->block_rows);
        memset(partial, 0, 2 * (size_t)job->stride * sizeof(float));
        for (int64_t row = block * job->block_rows; row < last; row++)
            ampi_norm_backward_row(job, row, rooms, a->dweight.data ? partial : NULL,
                                   a->dbias.data && !a->rms ? partial + job->stride : NULL);
    }
}

/* gradient = (old +) the sum of the partials, for columns begin to end */
static void ampi_norm_reduce(const ampi_norm_job *job, const amp_k_gradient *gradient, int64_t which, int64_t begin, int64_t end) {
    float sum[AMPI_TILE], old[AMPI_TILE];
    for (int64_t col = begin; col < end; col += AMPI_TILE) {
        int64_t n = AMPI_MIN(end - col, (int64_t)AMPI_TILE);
        void *to = ampi_at_mut(gradient->data, gradient->dtype, col);
        memset(sum, 0, sizeof sum);
        for (int64_t block = 0; block < job->blocks; block++)
            job->vec->add(sum, 1.0f, job->partials + (2 * block + which) * job->stride + col, 1.0f, sum, n);
        if (gradient->add) job->vec->add(sum, 1.0f, ampi_row_in(to, gradient->dtype, n, old, job->cpu->path), 1.0f, sum, n);
        ampi_convert_fast(to, gradient->dtype, sum, AMP_F32, n, job->cpu->path);
    }
}

static void ampi_norm_reduce_task(void *arg, int64_t begin, int64_t end, int thread) {
    const ampi_norm_job *job = (const ampi_norm_job *)arg;
    const amp_k_norm *a = job->args;
    (void)thread;
    if (a->dweight.data) ampi_norm_reduce(job, &a->dweight, 0, begin, end);
    if (a->dbias.data && !a->rms) ampi_norm_reduce(job, &a->dbias, 1, begin, end);
}

static amp_result ampi_cpu_norm_backward(void *dev, const amp_k_norm *args, void *stream) {
    ampi_norm_job job;
    (void)stream;
    AMPI_TRY(ampi_norm_open(&job, dev, args, args->rms ? "amp_rmsnorm_backward" : "amp_layernorm_backward", 1));
    ampi_parallel(job.cpu->threads, job.blocks, ampi_grain(job.block_rows * args->x.cols), ampi_norm_backward_task,
                  &job);
    ampi_parallel(job.cpu->threads, args->x.cols, AMPI_TILE, ampi_norm_reduce_task, &job);
    ampi_cpu_release(job.cpu, job.memory, job.bytes);
    return AMP_OK;
}

/* ---- Cross-entropy */

typedef struct ampi_cross_entropy_job {
    ampi_cpu *cpu;
    const ampi_pointwise_vec *vec;
    const amp_k_cross_entropy *args;
    double *losses;                 /* [rows] */
    float *rooms;                   /* one row buffer per thread */
    int64_t stride;
    double scale;                   /* of the gradient: factor seed / rows counted */
} ampi_cross_entropy_job;

/* What the first pass over a row finds out. */
typedef struct ampi_logit_row { float max, label; double sum; } ampi_logit_row;

/* Widens the row into v (where it is not fp32 already) chunk by chunk and looks at each chunk while it is cached. */
static const float *ampi_logits_scan(const ampi_cross_entropy_job *job, int64_t row, float *v, ampi_logit_row *out) {
    const amp_k_cross_entropy *a = job->args;
    const float *x = v;
    out->max = ampi_f32_of_bits(0xff800000u);
    out->sum = 0.0;
    for (int64_t i = 0; i < a->classes; i += AMPI_ROW_CHUNK) {
        int64_t n = AMPI_MIN(a->classes - i, (int64_t)AMPI_ROW_CHUNK);
        float max;
        x = ampi_row_in(ampi_mat_at(&a->logits, row, i), a->logits.dtype, n, v + i, job->cpu->path) - i;
        max = job->vec->row_max(x + i, n);
        out->max = AMPI_MAX(out->max, max);
        if (a->smoothing > 0.0f) out->sum += (double)job->vec->sum(x + i, n);
    }
    out->label = x[a->labels[row]];
    return x;
}

/* dlogits = scale (e / sum - smoothing / classes), and 1 - smoothing less in the column of the label. */
static void ampi_logits_gradient(const ampi_cross_entropy_job *job, int64_t row, const float *e, double sum) {
    const amp_k_cross_entropy *a = job->args;
    double shift = -(double)a->smoothing / (double)a->classes, p = (double)e[a->labels[row]] / sum;
    float at_label = (float)(job->scale * (p + shift - (1.0 - (double)a->smoothing))), room[AMPI_ROW_CHUNK];
    for (int64_t i = 0; i < a->classes; i += AMPI_ROW_CHUNK) {
        int64_t n = AMPI_MIN(a->classes - i, (int64_t)AMPI_ROW_CHUNK), label = a->labels[row] - i;
        void *to = ampi_mat_at(&a->dlogits, row, i);
        float *g = ampi_row_out(to, a->dlogits.dtype, room);
        job->vec->scale_shift(e + i, (float)(job->scale / sum), (float)(job->scale * shift), g, n);
        if (label >= 0 && label < n) g[label] = at_label;
        ampi_row_done(to, a->dlogits.dtype, n, g, job->cpu->path);
    }
}

static void ampi_logits_zero(const ampi_cross_entropy_job *job, int64_t row, int64_t begin, int64_t end) {
    const amp_mat *d = &job->args->dlogits;
    if (begin < end) memset(ampi_mat_at(d, row, begin), 0, (size_t)(end - begin) * amp_dtype_size(d->dtype));
}

/* The loss of a row, and its gradient if wanted.  In a row with NaN, with +inf or with nothing but -inf some x - max is
   NaN, and so are loss and gradient, as in PyTorch. */
static double ampi_cross_entropy_row(const ampi_cross_entropy_job *job, int64_t row, float *room) {
    const amp_k_cross_entropy *a = job->args;
    double sum = 0.0, lse, loss;
    int gradient = a->dlogits.data != NULL;
    ampi_logit_row found;
    const float *x = ampi_logits_scan(job, row, room, &found);
    float *e = gradient ? ampi_row_out(ampi_mat_at(&a->dlogits, row, 0), a->dlogits.dtype, room) : NULL;
    for (int64_t i = 0; i < a->classes; i += AMPI_ROW_CHUNK)
        sum += (double)job->vec->exp_sum(x + i, found.max, e ? e + i : NULL,
                                         AMPI_MIN(a->classes - i, (int64_t)AMPI_ROW_CHUNK));
    if (gradient) ampi_logits_gradient(job, row, e, sum);
    lse = (double)found.max + log(sum);
    loss = lse - (double)found.label;
    if (a->smoothing > 0.0f)
        loss = (1.0 - (double)a->smoothing) * loss + (double)a->smoothing * (lse - found.sum / (double)a->classes);
    return loss;
}

static void ampi_cross_entropy_task(void *arg, int64_t begin, int64_t end, int thread) {
    const ampi_cross_entropy_job *job = (const ampi_cross_entropy_job *)arg;
    const amp_k_cross_entropy *a = job->args;
    for (int64_t row = begin; row < end; row++) {
        int ignored = a->labels[row] == a->ignore_index;
        job->losses[row] = ignored ? 0.0 : ampi_cross_entropy_row(job, row, job->rooms + thread * job->stride);
        if (a->dlogits.data) ampi_logits_zero(job, row, ignored ? 0 : a->classes, a->logits.cols);
        if (a->losses) a->losses[row] = (float)job->losses[row];
    }
}

static void ampi_cross_entropy_total(const ampi_cross_entropy_job *job, int64_t counted) {
    const amp_k_cross_entropy *a = job->args;
    double total = 0.0;
    for (int64_t row = 0; row < a->logits.rows; row++) total += job->losses[row];
    if (a->sum) *a->loss = (float)total;
    else *a->loss = counted > 0 ? (float)(total / (double)counted) : ampi_f32_of_bits(0x7fc00000u);
}

static amp_result ampi_cpu_cross_entropy(void *dev, const amp_k_cross_entropy *args, void *stream) {
    ampi_cpu *cpu = (ampi_cpu *)dev;
    int64_t rows = args->logits.rows, counted = 0, room_floats;
    size_t loss_bytes, room_bytes;
    ampi_cross_entropy_job job = {cpu, AMPI_PICK(ampi_pointwise_kernels, cpu->path), args, NULL, NULL, 0, 0.0};
    (void)stream;
    *args->bad_label = ampi_first_outside(args->labels, rows, args->classes, args->ignore_index);
    if (*args->bad_label != 0) return AMP_OK;
    for (int64_t row = 0; row < rows; row++) counted += args->labels[row] != args->ignore_index;
    job.scale = (double)args->factor * (args->seed ? (double)*args->seed : 1.0) /
                (args->sum ? 1.0 : (double)AMPI_MAX(counted, 1));
    job.stride = ampi_padded(args->classes);
    room_floats = job.stride * cpu->threads;
    AMPI_TRY(ampi_bytes("amp_cross_entropy", rows, sizeof(double), &loss_bytes));
    AMPI_TRY(ampi_bytes("amp_cross_entropy", room_floats, sizeof(float), &room_bytes));
    job.losses = (double *)ampi_cpu_scratch(cpu, loss_bytes);
    job.rooms = (float *)ampi_cpu_scratch(cpu, room_bytes);
    if (job.losses != NULL && job.rooms != NULL) {
        ampi_parallel(cpu->threads, rows, ampi_grain(args->logits.cols), ampi_cross_entropy_task, &job);
        ampi_cross_entropy_total(&job, counted);
    }
    ampi_cpu_release(cpu, job.losses, loss_bytes);
    ampi_cpu_release(cpu, job.rooms, room_bytes);
    return job.losses && job.rooms ? AMP_OK : ampi_cpu_no_scratch("amp_cross_entropy", loss_bytes + room_bytes);
}

/* ---- Mean squared error */

typedef struct ampi_mse_job { ampi_cpu *cpu; const amp_k_mse *args; float scale; double *partials; } ampi_mse_job;

static void ampi_mse_task(void *arg, int64_t begin, int64_t end, int thread) {
    const ampi_mse_job *job = (const ampi_mse_job *)arg;
    const amp_k_mse *a = job->args;
    const ampi_pointwise_vec *vec = AMPI_PICK(ampi_pointwise_kernels, job->cpu->path);
    float x_room[AMPI_TILE], target_room[AMPI_TILE], dx_room[AMPI_TILE];
    (void)thread;
    for (int64_t block = begin; block < end; block++) {
        int64_t last = AMPI_MIN(a->n, (block + 1) * AMPI_SUM_BLOCK);
        double sum = 0.0;
        for (int64_t i = block * AMPI_SUM_BLOCK; i < last; i += AMPI_TILE) {
            int64_t n = AMPI_MIN(last - i, (int64_t)AMPI_TILE);
            void *to = a->dx ? ampi_at_mut(a->dx, a->x_dtype, i) : NULL;
            const float *x = ampi_row_in(ampi_at(a->x, a->x_dtype, i), a->x_dtype, n, x_room, job->cpu->path);
            const float *target =
                ampi_row_in(ampi_at(a->target, a->target_dtype, i), a->target_dtype, n, target_room, job->cpu->path);
            float *dx = to ? ampi_row_out(to, a->x_dtype, dx_room) : NULL;
            sum += (double)vec->squared_error(x, target, job->scale, dx, n);
            if (to) ampi_row_done(to, a->x_dtype, n, dx, job->cpu->path);
        }
        job->partials[block] = sum;
    }
}

static amp_result ampi_cpu_mse(void *dev, const amp_k_mse *args, void *stream) {
    ampi_cpu *cpu = (ampi_cpu *)dev;
    int64_t blocks = (args->n + AMPI_SUM_BLOCK - 1) / AMPI_SUM_BLOCK;
    size_t bytes = (size_t)blocks * sizeof(double);
    double total = 0.0, divisor = args->sum ? 1.0 : (double)AMPI_MAX(args->n, 1);
    ampi_mse_job job = {cpu, args, 0.0f, NULL};
    (void)stream;
    job.scale = (float)(2.0 * (double)args->factor * (args->seed ? (double)*args->seed : 1.0) / divisor);
    job.partials = (double *)ampi_cpu_scratch(cpu, bytes);
    if (job.partials == NULL) return ampi_cpu_no_scratch("amp_mse", bytes);
    ampi_parallel(cpu->threads, blocks, 1, ampi_mse_task, &job);
    for (int64_t block = 0; block < blocks; block++) total += job.partials[block];
    *args->loss = args->sum || args->n > 0 ? (float)(total / divisor) : ampi_f32_of_bits(0x7fc00000u);
    ampi_cpu_release(cpu, job.partials, bytes);
    return AMP_OK;
}

/* ---- Embedding */

static void ampi_embedding_task(void *arg, int64_t begin, int64_t end, int thread) {
    const ampi_pointwise_job *job = (const ampi_pointwise_job *)arg;
    const amp_k_embedding *a = (const amp_k_embedding *)job->args;
    amp_cpu_path path = job->cpu->path;
    float token_room[AMPI_TILE], position_room[AMPI_TILE], y_room[AMPI_TILE];
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        int64_t row, col, n = ampi_tile(job, i, &row, &col);
        const void *from = ampi_mat_at(&a->table, a->ids[row], col);
        void *to = ampi_mat_at(&a->y, row, col);
        const float *token, *position;
        float *y;
        if (a->positions.data == NULL) {
            ampi_convert_fast(to, a->y.dtype, from, a->table.dtype, n, path);
            continue;
        }
        token = ampi_row_in(from, a->table.dtype, n, token_room, path);
        position =
            ampi_row_in(ampi_mat_at(&a->positions, row % a->seq, col), a->positions.dtype, n, position_room, path);
        y = ampi_row_out(to, a->y.dtype, y_room);
        job->vec->add(token, 1.0f, position, 1.0f, y, n);
        ampi_row_done(to, a->y.dtype, n, y, path);
    }
}

static amp_result ampi_cpu_embedding(void *dev, const amp_k_embedding *args, void *stream) {
    ampi_pointwise_job job = ampi_job(dev, args);
    (void)stream;
    *args->bad_id = ampi_first_outside(args->ids, args->n, args->table.rows, INT64_MIN);
    if (*args->bad_id == 0) ampi_run_tiles(&job, args->n, args->y.cols, ampi_embedding_task);
    return AMP_OK;
}

typedef struct ampi_embedding_job {
    ampi_cpu *cpu;
    const ampi_pointwise_vec *vec;
    const amp_k_embedding *args;
    const int64_t *order;
} ampi_embedding_job;

/* order = 0..n-1 sorted by id, equal ids in their order: a counting sort with starts[vocab + 1]. */
static void ampi_embedding_sort(const int32_t *ids, int64_t n, int64_t vocab, int64_t *starts, int64_t *order) {
    memset(starts, 0, (size_t)(vocab + 1) * sizeof *starts);
    for (int64_t i = 0; i < n; i++) starts[ids[i] + 1]++;
    for (int64_t v = 0; v < vocab; v++) starts[v + 1] += starts[v];
    for (int64_t i = 0; i < n; i++) order[starts[ids[i]]++] = i;
}

/* sum += columns col.. of row `row` of dy */
static void ampi_embedding_gather(const ampi_embedding_job *job, int64_t row, int64_t col, int64_t n, float *sum,
                                  float *room) {
    const amp_mat *dy = &job->args->dy;
    job->vec->add(sum, 1.0f, ampi_row_in(ampi_mat_at(dy, row, col), dy->dtype, n, room, job->cpu->path), 1.0f, sum, n);
}

/* Columns begin to end of the gradient of every table row that occurs: old + (first occurrence + second + ...).
   Threads divide the columns, because a few ids make up most of a text. */
static void ampi_embedding_table_task(void *arg, int64_t begin, int64_t end, int thread) {
    const ampi_embedding_job *job = (const ampi_embedding_job *)arg;
    const amp_k_embedding *a = job->args;
    float sum[AMPI_TILE], room[AMPI_TILE];
    (void)thread;
    for (int64_t col = begin; col < end; col += AMPI_TILE) {
        int64_t n = AMPI_MIN(end - col, (int64_t)AMPI_TILE), k = 0;
        while (k < a->n) {
            int32_t id = a->ids[job->order[k]];
            void *to = ampi_mat_at(&a->dtable, id, col);
            memset(sum, 0, sizeof sum);
            for (; k < a->n && a->ids[job->order[k]] == id; k++)
                ampi_embedding_gather(job, job->order[k], col, n, sum, room);
            if (a->add_table)
                job->vec->add(ampi_row_in(to, a->dtable.dtype, n, room, job->cpu->path), 1.0f, sum, 1.0f, sum, n);
            ampi_convert_fast(to, a->dtable.dtype, sum, AMP_F32, n, job->cpu->path);
        }
    }
}

static void ampi_embedding_positions_task(void *arg, int64_t begin, int64_t end, int thread) {
    const ampi_embedding_job *job = (const ampi_embedding_job *)arg;
    const amp_k_embedding *a = job->args;
    float sum[AMPI_TILE], room[AMPI_TILE];
    (void)thread;
    for (int64_t p = begin; p < end; p++)
        for (int64_t col = 0; col < a->dy.cols; col += AMPI_TILE) {
            int64_t n = AMPI_MIN(a->dy.cols - col, (int64_t)AMPI_TILE);
            void *to = ampi_mat_at(&a->dpositions, p, col);
            memset(sum, 0, sizeof sum);
            for (int64_t row = p; row < a->n; row += a->seq) ampi_embedding_gather(job, row, col, n, sum, room);
            if (a->add_positions)
                job->vec->add(ampi_row_in(to, a->dpositions.dtype, n, room, job->cpu->path), 1.0f, sum, 1.0f, sum, n);
            ampi_convert_fast(to, a->dpositions.dtype, sum, AMP_F32, n, job->cpu->path);
        }
}

static void ampi_zero_rows_task(void *arg, int64_t begin, int64_t end, int thread) {
    const amp_mat *m = (const amp_mat *)arg;
    (void)thread;
    for (int64_t row = begin; row < end; row++)
        memset(ampi_mat_at(m, row, 0), 0, (size_t)m->cols * amp_dtype_size(m->dtype));
}

static void ampi_zero_rows(ampi_cpu *cpu, const amp_mat *m, int64_t first) {
    amp_mat rest = *m;
    rest.data = ampi_mat_at(m, first, 0);
    ampi_parallel(cpu->threads, m->rows - first, ampi_grain(m->cols), ampi_zero_rows_task, &rest);
}

static amp_result ampi_cpu_embedding_backward(void *dev, const amp_k_embedding *args, void *stream) {
    ampi_cpu *cpu = (ampi_cpu *)dev;
    ampi_embedding_job job = {cpu, AMPI_PICK(ampi_pointwise_kernels, cpu->path), args, NULL};
    int64_t *starts = NULL, cols = args->dy.cols, positions = AMPI_MIN(args->seq, args->dpositions.rows);
    size_t bytes = 0;
    (void)stream;
    *args->bad_id = args->dtable.data ? ampi_first_outside(args->ids, args->n, args->dtable.rows, INT64_MIN) : 0;
    if (*args->bad_id != 0) return AMP_OK;
    if (args->dtable.data != NULL) {
        AMPI_TRY(ampi_bytes("amp_embedding_backward", args->dtable.rows + 1 + args->n, sizeof(int64_t), &bytes));
        starts = (int64_t *)ampi_cpu_scratch(cpu, bytes);
        if (starts == NULL) return ampi_cpu_no_scratch("amp_embedding_backward", bytes);
        job.order = starts + args->dtable.rows + 1;
        ampi_embedding_sort(args->ids, args->n, args->dtable.rows, starts, starts + args->dtable.rows + 1);
        if (!args->add_table) ampi_zero_rows(cpu, &args->dtable, 0);
        ampi_parallel(cpu->threads, cols, AMPI_MAX(64, ampi_padded(ampi_grain(args->n))), ampi_embedding_table_task,
                      &job);
        ampi_cpu_release(cpu, starts, bytes);
    }
    if (args->dpositions.data != NULL) {
        if (!args->add_positions) ampi_zero_rows(cpu, &args->dpositions, positions);
        ampi_parallel(cpu->threads, positions, ampi_grain(cols), ampi_embedding_positions_task, &job);
    }
    return AMP_OK;
}

/* ---- Multi-tensor kernels.  All rows of a table are cut into chunks of a fixed size, counted through; threads share
   the chunks.  A sum is taken per chunk and the chunks are added in order: the same bits for any number of threads. */

#define AMPI_MULTI_CHUNK 16384      /* elements */
#define AMPI_MULTI_BLOCK 256        /* elements that are widened at a time */

typedef struct ampi_multi_job ampi_multi_job;
/* Elements [first, first + n) of a row; chunk is their number. */
typedef void (*ampi_multi_piece)(const ampi_multi_job *job, const amp_k_tensor *row, int64_t first, int64_t n,
                                 int64_t chunk);

typedef struct ampi_partial { double sum_sq; int64_t bad_row; } ampi_partial;   /* bad_row -1: none */

struct ampi_multi_job {
    const amp_k_tensor *table;
    int64_t tensors;
    ampi_multi_piece piece;
    const ampi_multi_vec *vec;
    amp_cpu_path path;
    const void *args;
    const float *factor;            /* NULL: do not multiply */
    ampi_partial *partials;
    const ampi_fit *fit;            /* of fp32 and fp64 */
    amp_k_inspected *inspected;     /* of each chunk */
};

AMPI_PRIVATE int64_t ampi_row_chunks(const amp_k_tensor *row) {
    return row->live ? (row->count + AMPI_MULTI_CHUNK - 1) / AMPI_MULTI_CHUNK : 0;
}

AMPI_PRIVATE int64_t ampi_multi_chunks(const amp_k_tensor *table, int64_t tensors) {
    int64_t i, chunks = 0;
    for (i = 0; i < tensors; i++) chunks += ampi_row_chunks(&table[i]);
    return chunks;
}

static void ampi_multi_task(void *arg, int64_t begin, int64_t end, int thread) {
    const ampi_multi_job *job = (const ampi_multi_job *)arg;
    int64_t r, chunk = 0, chunks, i, first;
    (void)thread;
    for (r = 0; r < job->tensors && chunk < end; r++, chunk += chunks) {
        chunks = ampi_row_chunks(&job->table[r]);
        for (i = AMPI_MAX(chunk, begin); i < AMPI_MIN(chunk + chunks, end); i++) {
            first = (i - chunk) * AMPI_MULTI_CHUNK;
            job->piece(job, &job->table[r], first, AMPI_MIN(AMPI_MULTI_CHUNK, job->table[r].count - first), i);
        }
    }
}

AMPI_PRIVATE void ampi_multi_run(ampi_cpu *cpu, ampi_multi_job *job, const amp_k_tensor *table, int64_t tensors,
                                 ampi_multi_piece piece, const void *args) {
    job->table = table;
    job->tensors = tensors;
    job->piece = piece;
    job->vec = AMPI_PICK(ampi_multi_kernels, cpu->path);
    job->path = cpu->path;
    job->args = args;
    ampi_parallel(cpu->threads, ampi_multi_chunks(table, tensors), 1, ampi_multi_task, job);
}

/* ---- Check and scale */

AMPI_PRIVATE double ampi_check_f64(void *data, int64_t n, const float *factor, int32_t *bad) {
    double sum = 0, x;
    int64_t i;
    for (i = 0; i < n; i++) {
        memcpy(&x, (char *)data + 8 * i, 8);
        if (!amp_is_finite_f64(&x)) *bad = 1;
        sum += x * x;
        if (factor == NULL) continue;
        x *= (double)*factor;
        memcpy((char *)data + 8 * i, &x, 8);
    }
    return sum;
}

/* 16-bit gradients are widened (exactly), multiplied in fp32 and rounded once. */
AMPI_PRIVATE double ampi_check_16bit(const ampi_multi_job *job, void *data, amp_dtype dtype, int64_t n, int32_t *bad) {
    float room[AMPI_MULTI_BLOCK];
    double sum = 0;
    int64_t i, k;
    for (i = 0; i < n; i += k) {
        k = AMPI_MIN(n - i, AMPI_MULTI_BLOCK);
        ampi_convert_fast(room, AMP_F32, ampi_at(data, dtype, i), dtype, k, job->path);
        sum += job->vec->check(room, k, job->factor, bad);
        if (job->factor != NULL) ampi_convert_fast(ampi_at_mut(data, dtype, i), dtype, room, AMP_F32, k, job->path);
    }
    return sum;
}

static void ampi_check_piece(const ampi_multi_job *job, const amp_k_tensor *row, int64_t first, int64_t n,
                             int64_t chunk) {
    void *data = ampi_at_mut(row->grad, row->grad_dtype, first);
    int32_t bad = 0;
    double sum;
    if (row->grad_dtype == AMP_F64) sum = ampi_check_f64(data, n, job->factor, &bad);
    else if (row->grad_dtype == AMP_F32) sum = job->vec->check((float *)data, n, job->factor, &bad);
    else sum = ampi_check_16bit(job, data, row->grad_dtype, n, &bad);
    job->partials[chunk].sum_sq = sum;
    job->partials[chunk].bad_row = bad ? row - job->table : -1;
}

static amp_result ampi_cpu_check(void *dev, const amp_k_check *args, void *stream) {
    ampi_cpu *cpu = (ampi_cpu *)dev;
    int64_t chunks = ampi_multi_chunks(args->table, args->tensors), i;
    size_t bytes = (size_t)chunks * sizeof(ampi_partial);
    amp_k_found *f = args->found;
    ampi_multi_job job;
    float factor;
    (void)stream;
    memset(&job, 0, sizeof job);
    if (args->multiply != NULL) {
        factor = *args->multiply;
        if (ampi_bits_f32(factor) != 0x3f800000u) job.factor = &factor;     /* 1 leaves every bit as it is */
    }
    job.partials = (ampi_partial *)ampi_cpu_scratch(cpu, bytes);
    if (job.partials == NULL) return ampi_cpu_no_scratch("amp_scaler_check", bytes);
    ampi_multi_run(cpu, &job, args->table, args->tensors, ampi_check_piece, args);
    for (i = 0; i < chunks; i++) {
        f->sum_sq += job.partials[i].sum_sq;
        if (job.partials[i].bad_row < 0) continue;
        f->found_inf = 1;
        if (f->first_bad < 0 || job.partials[i].bad_row < f->first_bad) f->first_bad = (int32_t)job.partials[i].bad_row;
    }
    ampi_cpu_release(cpu, job.partials, bytes);
    return AMP_OK;
}

static void ampi_scale_piece(const ampi_multi_job *job, const amp_k_tensor *row, int64_t first, int64_t n,
                             int64_t chunk) {
    void *data = ampi_at_mut(row->grad, row->grad_dtype, first);
    float room[AMPI_MULTI_BLOCK];
    int64_t i, k;
    int32_t bad = 0;
    (void)chunk;
    if (row->grad_dtype == AMP_F64) ampi_check_f64(data, n, job->factor, &bad);
    else if (row->grad_dtype == AMP_F32) job->vec->scale((float *)data, n, *job->factor);
    else for (i = 0; i < n; i += k) {
        k = AMPI_MIN(n - i, AMPI_MULTI_BLOCK);
        ampi_convert_fast(room, AMP_F32, ampi_at(data, row->grad_dtype, i), row->grad_dtype, k, job->path);
        job->vec->scale(room, k, *job->factor);
        ampi_convert_fast(ampi_at_mut(data, row->grad_dtype, i), row->grad_dtype, room, AMP_F32, k, job->path);
    }
}

static amp_result ampi_cpu_scale_ranges(void *dev, const amp_k_scale_ranges *args, void *stream) {
    ampi_multi_job job;
    (void)stream;
    memset(&job, 0, sizeof job);
    job.factor = args->factor;
    if (ampi_bits_f32(*args->factor) != 0x3f800000u)
        ampi_multi_run((ampi_cpu *)dev, &job, args->table, args->tensors, ampi_scale_piece, args);
    return AMP_OK;
}

/* ---- Inspect */

AMPI_PRIVATE float ampi_inspect_f64(const void *data, int64_t n, const ampi_fit *fit, int64_t above[AMPI_FIT_LIMITS]) {
    uint64_t bits, largest = 0;
    int64_t i;
    int k;
    for (i = 0; i < n; i++) {
        memcpy(&bits, (const char *)data + 8 * i, 8);
        bits &= ~(uint64_t)0 >> 1;
        for (k = 0; k < AMPI_FIT_LIMITS; k++) above[k] += bits > fit->limit[k];
        if (bits <= fit->limit[AMPI_FIT_INFINITE] && bits > largest) largest = bits;
    }
    return ampi_f32_of_bits(ampi_to_f32(largest, 1));
}

static void ampi_inspect_piece(const ampi_multi_job *job, const amp_k_tensor *row, int64_t first, int64_t n,
                               int64_t chunk) {
    const void *data = ampi_at(row->grad, row->grad_dtype, first);
    amp_k_inspected *out = &job->inspected[chunk];
    int64_t above[AMPI_FIT_LIMITS] = {0}, i, k;
    float room[AMPI_MULTI_BLOCK];
    uint32_t largest = 0;
    memset(out, 0, sizeof *out);
    if (row->grad_dtype == AMP_F64) out->largest = ampi_inspect_f64(data, n, &job->fit[1], above);
    else {
        for (i = 0; i < n; i += k) {
            k = row->grad_dtype == AMP_F32 ? n : AMPI_MIN(n - i, AMPI_MULTI_BLOCK);
            job->vec->inspect(ampi_row_in(ampi_at(data, row->grad_dtype, i), row->grad_dtype, k, room, job->path), k,
                              job->fit, above, &largest);
        }
        out->largest = ampi_f32_of_bits(largest);
    }
    ampi_fit_count(above, out);
}

static amp_result ampi_cpu_inspect(void *dev, const amp_k_inspect *args, void *stream) {
    ampi_cpu *cpu = (ampi_cpu *)dev;
    int64_t chunks = ampi_multi_chunks(args->table, args->tensors), chunk = 0, end, r;
    size_t bytes = (size_t)chunks * sizeof(amp_k_inspected);
    ampi_fit fit[2];
    ampi_multi_job job;
    (void)stream;
    memset(&job, 0, sizeof job);
    fit[0] = ampi_fit_of(0, args->dtype);
    fit[1] = ampi_fit_of(1, args->dtype);
    job.fit = fit;
    job.inspected = (amp_k_inspected *)ampi_cpu_scratch(cpu, bytes);
    if (job.inspected == NULL) return ampi_cpu_no_scratch("amp_numerics_step", bytes);
    ampi_multi_run(cpu, &job, args->table, args->tensors, ampi_inspect_piece, args);
    for (r = 0; r < args->tensors; r++) {
        memset(&args->out[r], 0, sizeof *args->out);
        for (end = chunk + ampi_row_chunks(&args->table[r]); chunk < end; chunk++)
            ampi_fit_add(&args->out[r], &job.inspected[chunk]);
    }
    ampi_cpu_release(cpu, job.inspected, bytes);
    return AMP_OK;
}

/* ---- Optimizers.  The fp32 weight of a row is its master, or the weight itself, or joined with its remainder, or a
   16-bit weight widened.  What is not fp32 is worked on in rooms. */

typedef struct ampi_update {
    float *w, *m, *v;               /* m and v NULL where a row has none */
    const float *g;
    float w_room[AMPI_MULTI_BLOCK], g_room[AMPI_MULTI_BLOCK], m_room[AMPI_MULTI_BLOCK], v_room[AMPI_MULTI_BLOCK];
} ampi_update;

AMPI_PRIVATE int ampi_has_remainder(const amp_k_tensor *row) {
    return row->master != NULL && row->master_kind == AMP_MASTER_REMAINDER;
}
/* How many elements may be worked on at once. */
AMPI_PRIVATE int64_t ampi_update_block(const amp_k_tensor *row) {
    return row->weight_dtype == AMP_F32 && row->grad_dtype == AMP_F32 && row->moment_dtype != AMP_BF16
               ? AMPI_MULTI_CHUNK : AMPI_MULTI_BLOCK;
}

AMPI_PRIVATE float *ampi_moment_in(const amp_k_tensor *row, void *moment, int64_t first, int64_t n, float *room,
                                   amp_cpu_path path) {
    if (moment == NULL) return NULL;
    if (row->moment_dtype != AMP_BF16) return (float *)moment + first;
    ampi_convert_fast(room, AMP_F32, ampi_at(moment, AMP_BF16, first), AMP_BF16, n, path);
    return room;
}

AMPI_PRIVATE void ampi_update_in(ampi_update *x, const amp_k_tensor *row, int64_t first, int64_t n, amp_cpu_path path) {
    const void *weight = ampi_at(row->weight, row->weight_dtype, first);
    x->g = ampi_row_in(ampi_at(row->grad, row->grad_dtype, first), row->grad_dtype, n, x->g_room, path);
    x->m = ampi_moment_in(row, row->m, first, n, x->m_room, path);
    x->v = ampi_moment_in(row, row->v, first, n, x->v_room, path);
    x->w = x->w_room;
    if (ampi_has_remainder(row))
        AMPI_PICK(ampi_numbers_kernels, path)->f32_join(x->w, weight, (uint16_t *)row->master + first, n);
    else if (row->master != NULL) x->w = (float *)row->master + first;
    else if (row->weight_dtype == AMP_F32) x->w = (float *)row->weight + first;
    else ampi_row_in(weight, row->weight_dtype, n, x->w_room, path);
}

AMPI_PRIVATE void ampi_update_out(const ampi_update *x, const amp_k_tensor *row, uint64_t seed, int64_t first, int64_t n,
                                  amp_cpu_path path) {
    const ampi_numbers_vec *vec = AMPI_PICK(ampi_numbers_kernels, path);
    void *weight = ampi_at_mut(row->weight, row->weight_dtype, first);
    int stochastic = row->master == NULL && row->master_kind == AMP_MASTER_STOCHASTIC && row->weight_dtype != AMP_F32;
    int rounded = row->moment_dtype == AMP_BF16;
    uint32_t random[AMPI_MULTI_BLOCK];
    if (stochastic || rounded) vec->random(random, n, seed, (uint64_t)first);
    if (stochastic) ampi_stochastic(weight, row->weight_dtype, x->w, n, random, path);
    else if (ampi_has_remainder(row)) vec->bf16_split(weight, (uint16_t *)row->master + first, x->w, n);
    else if (row->weight_dtype != AMP_F32 || row->master != NULL)
        ampi_convert_fast(weight, row->weight_dtype, x->w, AMP_F32, n, path);
    if (rounded && x->m != NULL) vec->bf16_stochastic(ampi_at_mut(row->m, AMP_BF16, first), x->m, n, random, 16);
    if (rounded && x->v != NULL) vec->bf16_stochastic(ampi_at_mut(row->v, AMP_BF16, first), x->v, n, random, 16);
}

static void ampi_adamw_piece(const ampi_multi_job *job, const amp_k_tensor *row, int64_t first, int64_t n,
                             int64_t chunk) {
    ampi_adamw_step step = ampi_adamw_row((const amp_k_adamw *)job->args, row);
    int64_t i, k, block = ampi_update_block(row);
    ampi_update x;
    (void)chunk;
    for (i = first; i < first + n; i += k) {
        k = AMPI_MIN(first + n - i, block);
        ampi_update_in(&x, row, i, k, job->path);
        job->vec->adamw(x.w, x.g, x.m, x.v, k, &step);
        ampi_update_out(&x, row, step.seed, i, k, job->path);
    }
}

static amp_result ampi_cpu_adamw(void *dev, const amp_k_adamw *args, void *stream) {
    ampi_multi_job job;
    (void)stream;
    memset(&job, 0, sizeof job);
    if (!args->found->skip) ampi_multi_run((ampi_cpu *)dev, &job, args->table, args->tensors, ampi_adamw_piece, args);
    return AMP_OK;
}

static void ampi_sgd_piece(const ampi_multi_job *job, const amp_k_tensor *row, int64_t first, int64_t n,
                           int64_t chunk) {
    ampi_sgd_step step = ampi_sgd_row((const amp_k_sgd *)job->args, row);
    int64_t i, k, block = ampi_update_block(row);
    ampi_update x;
    (void)chunk;
    for (i = first; i < first + n; i += k) {
        k = AMPI_MIN(first + n - i, block);
        ampi_update_in(&x, row, i, k, job->path);
        job->vec->sgd(x.w, x.g, x.m, k, &step);
        ampi_update_out(&x, row, step.seed, i, k, job->path);
    }
}

static amp_result ampi_cpu_sgd(void *dev, const amp_k_sgd *args, void *stream) {
    ampi_multi_job job;
    (void)stream;
    memset(&job, 0, sizeof job);
    if (!args->found->skip) ampi_multi_run((ampi_cpu *)dev, &job, args->table, args->tensors, ampi_sgd_piece, args);
    return AMP_OK;
}

static amp_result ampi_cpu_rule(void *dev, const amp_k_rule *args, void *stream) {
    (void)dev; (void)stream;
    ampi_rule_run(args);
    return AMP_OK;
}

/* ---- The CPU backend's runtime: memory from the host, streams and events that are always done */

static int64_t ampi_cpu_time(void) {
    struct timespec t;
    return clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t) == 0 ? (int64_t)t.tv_sec * 1000000000 + t.tv_nsec : 0;
}

static amp_result ampi_cpu_open(void **dev, const amp_host *host, const amp_backend_desc *desc) {
    ampi_cpu *cpu = (ampi_cpu *)host->alloc(host->user, sizeof *cpu, 64);
    if (cpu == NULL) return ampi_fail(AMP_ERR_MEMORY, "amp_open", "%zu bytes for the CPU backend", sizeof *cpu);
    memset(cpu, 0, sizeof *cpu);
    if (pthread_mutex_init(&cpu->lock, NULL) != 0) {
        host->free(host->user, cpu, sizeof *cpu);
        return ampi_fail(AMP_ERR_THREAD, "amp_open", "no lock for the CPU backend");
    }
    cpu->pooled = 1;
    cpu->host = *host;
    cpu->threads = desc->threads;
    cpu->path = desc->cpu_path;
    cpu->wall = ampi_posix_clock(NULL);
    cpu->busy = ampi_cpu_time();
    *dev = cpu;
    return AMP_OK;
}

static void ampi_cpu_close(void *dev) {
    ampi_cpu *cpu = (ampi_cpu *)dev;
    amp_host host = cpu->host;
    int i;
    for (i = 0; i < AMPI_POOL_BLOCKS; i++)
        if (cpu->pool[i].ptr) host.free(host.user, cpu->pool[i].ptr, cpu->pool[i].bytes);
    pthread_mutex_destroy(&cpu->lock);
    host.free(host.user, dev, sizeof(ampi_cpu));
}

static amp_result ampi_cpu_describe(void *dev, amp_device *out) {
    amp_machine machine;
    (void)dev;
    AMPI_TRY(amp_machine_probe(&machine));
    *out = machine.device;
    return AMP_OK;
}

static amp_result ampi_cpu_alloc(void *dev, void **ptr, size_t bytes) {
    ampi_cpu *cpu = (ampi_cpu *)dev;
    *ptr = cpu->host.alloc(cpu->host.user, bytes, 64);
    return *ptr ? AMP_OK : ampi_fail(AMP_ERR_MEMORY, "amp_alloc", "%zu bytes", bytes);
}

static void ampi_cpu_free(void *dev, void *ptr, size_t bytes) {
    ampi_cpu *cpu = (ampi_cpu *)dev;
    if (ptr) cpu->host.free(cpu->host.user, ptr, bytes);
}

static amp_result ampi_cpu_copy(void *dev, void *dst, const void *src, size_t bytes, amp_copy_kind kind, void *stream) {
    (void)dev; (void)kind; (void)stream;
    memmove(dst, src, bytes);
    return AMP_OK;
}

static amp_result ampi_cpu_fill(void *dev, void *dst, int byte, size_t bytes, void *stream) {
    (void)dev; (void)stream;
    memset(dst, byte, bytes);
    return AMP_OK;
}

static amp_result ampi_cpu_place(void *dev, const void *ptr, amp_place *out) {
    (void)dev;
    *out = ptr != NULL ? AMP_PLACE_HOST : AMP_PLACE_UNKNOWN;
    return AMP_OK;
}

/* ---- GEMM with what may come with it: the other kernels in turn */

/* c = act'(pre) * product + beta c: the product in fp32, then row by row. */
static amp_result ampi_cpu_gemm_backward(ampi_cpu *cpu, const amp_k_gemm *args) {
    size_t bytes = (size_t)(args->m * args->n + args->n) * sizeof(float);
    float *product = (float *)ampi_cpu_scratch(cpu, bytes), *pre;
    amp_k_gemm g = *args;
    amp_k_activation slope;
    amp_k_add sum;
    amp_result result;
    int64_t i;
    if (product == NULL) return ampi_cpu_no_scratch("gemm", bytes);
    pre = product + args->m * args->n;
    g.c = product; g.c_dtype = AMP_F32; g.ldc = g.n; g.beta = 0;
    g.pre = NULL; g.bias = NULL; g.act = AMP_ACT_NONE;
    result = ampi_cpu_product(cpu, &g);
    memset(&slope, 0, sizeof slope);
    slope.act = args->act; slope.n = args->n;
    slope.x_dtype = slope.y_dtype = AMP_F32;
    memset(&sum, 0, sizeof sum);
    sum.a_dtype = AMP_F32; sum.b_dtype = sum.y_dtype = args->c_dtype;
    sum.n = args->n; sum.alpha = 1; sum.beta = args->beta;
    for (i = 0; i < args->m && result == AMP_OK; i++) {
        float *row = product + i * args->n;
        ampi_convert_fast(pre, AMP_F32, ampi_at(args->pre, args->pre_dtype, i * args->ld_pre), args->pre_dtype, args->n, cpu->path);
        slope.x = pre; slope.dy = row; slope.dx = row;
        (void)ampi_cpu_activation_backward(cpu, &slope, NULL);
        sum.a = row;
        sum.y = ampi_at_mut(args->c, args->c_dtype, i * args->ldc);
        sum.b = args->beta == 0.0f ? NULL : sum.y;
        result = ampi_cpu_add(cpu, &sum, NULL);
    }
    ampi_cpu_release(cpu, product, bytes);
    return result;
}

static amp_result ampi_cpu_column_sum_of(ampi_cpu *cpu, const void *data, amp_dtype dtype, int64_t rows, int64_t cols,
                                         int64_t ld, const amp_k_gradient *out) {
    amp_k_column_sum s;
    s.x.data = ampi_at_mut((void *)(uintptr_t)data, dtype, 0);
    s.x.dtype = dtype; s.x.reserved = 0;
    s.x.rows = rows; s.x.cols = cols; s.x.ld = ld;
    s.out = out->data; s.out_dtype = out->dtype; s.add = out->add;
    return ampi_cpu_column_sum(cpu, &s, NULL);
}

/* Row sums of op(a): the columns of a where it is stored transposed, otherwise a times ones. */
static amp_result ampi_cpu_row_sum(ampi_cpu *cpu, const amp_k_gemm *args) {
    size_t bytes = (size_t)AMPI_MAX(args->k, 1) * sizeof(float);
    amp_k_gemm g;
    amp_result result;
    float *ones;
    int64_t i;
    if (args->trans_a) return ampi_cpu_column_sum_of(cpu, args->a, args->a_dtype, args->k, args->m, args->lda, &args->row_sum);
    ones = (float *)ampi_cpu_scratch(cpu, bytes);
    if (ones == NULL) return ampi_cpu_no_scratch("gemm", bytes);
    for (i = 0; i < args->k; i++) ones[i] = 1.0f;
    memset(&g, 0, sizeof g);
    g.m = args->m; g.n = 1; g.k = args->k; g.batch = 1;
    g.a = args->a; g.a_dtype = args->a_dtype; g.lda = args->lda;
    g.b = ones; g.b_dtype = AMP_F32; g.ldb = 1;
    g.c = args->row_sum.data; g.c_dtype = args->row_sum.dtype; g.ldc = 1;
    g.alpha = 1; g.beta = args->row_sum.add ? 1.0f : 0.0f; g.compute = AMP_F32;
    result = ampi_cpu_product(cpu, &g);
    ampi_cpu_release(cpu, ones, bytes);
    return result;
}

static amp_result ampi_cpu_gemm(void *dev, const amp_k_gemm *args, void *stream) {
    ampi_cpu *cpu = (ampi_cpu *)dev;
    (void)stream;
    AMPI_TRY(args->backward ? ampi_cpu_gemm_backward(cpu, args) : ampi_cpu_product(cpu, args));
    if (args->column_sum.data != NULL)
        AMPI_TRY(ampi_cpu_column_sum_of(cpu, args->c, args->c_dtype, args->m, args->n, args->ldc, &args->column_sum));
    return args->row_sum.data != NULL ? ampi_cpu_row_sum(cpu, args) : AMP_OK;
}

static amp_result ampi_cpu_memory(void *dev, amp_memory_info *out) {
    (void)dev;
    out->device_total = ampi_probe_memory();    /* the rest of the probe takes a virtual machine a millisecond */
    return AMP_OK;
}

/* Utilization: the process's CPU time over what its kernels' threads had since the last call, at first since opening. */
static amp_result ampi_cpu_telemetry(void *dev, amp_telemetry *out) {
    ampi_cpu *cpu = (ampi_cpu *)dev;
    int64_t wall = ampi_posix_clock(NULL), busy = ampi_cpu_time();
    double had;
    pthread_mutex_lock(&cpu->lock);
    had = (double)(wall - cpu->wall) * cpu->threads;
    out->utilization = had > 0 ? (float)AMPI_MIN((double)(busy - cpu->busy) / had, 1.0) : -1.0f;
    cpu->wall = wall;
    cpu->busy = busy;
    pthread_mutex_unlock(&cpu->lock);
    out->memory_utilization = out->temperature = out->power = -1;
    return AMP_OK;
}

static amp_result ampi_cpu_stream_create(void *dev, void **stream) { *stream = dev; return AMP_OK; }
static void ampi_cpu_stream_destroy(void *dev, void *stream) { (void)dev; (void)stream; }
static amp_result ampi_cpu_stream_sync(void *dev, void *stream) { (void)dev; (void)stream; return AMP_OK; }

/* An event is the time it was recorded at. */
static amp_result ampi_cpu_event_create(void *dev, void **event) { return ampi_cpu_alloc(dev, event, sizeof(int64_t)); }
static void ampi_cpu_event_destroy(void *dev, void *event) { ampi_cpu_free(dev, event, sizeof(int64_t)); }
static amp_result ampi_cpu_event_record(void *dev, void *event, void *stream) {
    (void)dev; (void)stream;
    *(int64_t *)event = ampi_posix_clock(NULL);
    return AMP_OK;
}
static amp_result ampi_cpu_event_wait(void *dev, void *event, void *stream) { (void)dev; (void)event; (void)stream; return AMP_OK; }
static amp_result ampi_cpu_event_done(void *dev, void *event, int32_t *done) { (void)dev; (void)event; *done = 1; return AMP_OK; }
static amp_result ampi_cpu_event_sync(void *dev, void *event) { (void)dev; (void)event; return AMP_OK; }
static amp_result ampi_cpu_event_elapsed(void *dev, void *from, void *to, double *seconds) {
    (void)dev;
    *seconds = 1e-9 * (double)(*(int64_t *)to - *(int64_t *)from);
    return AMP_OK;
}

static amp_result ampi_cpu_trim(void *dev) {
    ampi_cpu *cpu = (ampi_cpu *)dev;
    int i;
    pthread_mutex_lock(&cpu->lock);
    for (i = 0; i < AMPI_POOL_BLOCKS; i++) {
        if (cpu->pool[i].busy || cpu->pool[i].ptr == NULL) continue;
        cpu->host.free(cpu->host.user, cpu->pool[i].ptr, cpu->pool[i].bytes);
        cpu->pool[i].ptr = NULL;
        cpu->pool[i].bytes = 0;
    }
    pthread_mutex_unlock(&cpu->lock);
    return AMP_OK;
}

static const amp_backend ampi_cpu_backend = {
    AMP_ABI(amp_backend), "cpu",
    ampi_cpu_open, ampi_cpu_close, ampi_cpu_describe,
    1, 0,
    ampi_cpu_alloc, ampi_cpu_free, ampi_cpu_alloc, ampi_cpu_free, ampi_cpu_copy, ampi_cpu_fill, ampi_cpu_place, ampi_cpu_memory,
    ampi_cpu_stream_create, ampi_cpu_stream_destroy, ampi_cpu_stream_sync,
    ampi_cpu_event_create, ampi_cpu_event_destroy, ampi_cpu_event_record, ampi_cpu_event_wait,
    ampi_cpu_event_done, ampi_cpu_event_sync, ampi_cpu_event_elapsed,
    NULL, NULL, NULL, NULL,
    ampi_cpu_telemetry, NULL, NULL, NULL, NULL, ampi_cpu_trim,
    ampi_cpu_cast, ampi_cpu_gemm, ampi_cpu_gemm_pack_size, ampi_cpu_gemm_pack, ampi_cpu_column_sum,
    ampi_cpu_attention, ampi_cpu_attention_backward, ampi_cpu_norm, ampi_cpu_norm_backward,
    ampi_cpu_softmax, ampi_cpu_softmax_backward, ampi_cpu_activation, ampi_cpu_activation_backward,
    ampi_cpu_swiglu, ampi_cpu_swiglu_backward, ampi_cpu_cross_entropy, ampi_cpu_mse,
    ampi_cpu_embedding, ampi_cpu_embedding_backward, ampi_cpu_dropout, ampi_cpu_add,
    ampi_cpu_check, ampi_cpu_adamw, ampi_cpu_sgd, ampi_cpu_scale_ranges, ampi_cpu_inspect, ampi_cpu_rule
};

AMP_API const amp_backend *amp_cpu(void) { return &ampi_cpu_backend; }

/* Holds the scratch memory that these calls will take, where they go to the CPU's own kernels, until ampi_let_go. */
static amp_result ampi_hold(const amp_backend *backend, void *dev, const amp_k_gemm *gemms, int n_gemms, const amp_k_column_sum *sums, int n_sums) {
    ampi_held *held = &ampi_scratch_held;
    void *ptr;
    int i;
    held->bytes = 0;
    held->asking = 1;
    for (i = 0; i < n_gemms && backend->gemm == ampi_cpu_gemm; i++) (void)ampi_cpu_gemm(dev, &gemms[i], NULL);
    for (i = 0; i < n_sums && backend->column_sum == ampi_cpu_column_sum; i++) (void)ampi_cpu_column_sum(dev, &sums[i], NULL);
    held->asking = 0;
    if (held->bytes == 0) return AMP_OK;
    ptr = ampi_cpu_scratch((ampi_cpu *)dev, held->bytes);
    if (ptr == NULL) return ampi_cpu_no_scratch(n_gemms > 0 ? "gemm" : "column_sum", held->bytes);
    held->ptr = ptr;
    return AMP_OK;
}
static void ampi_let_go(void *dev) {
    void *ptr = ampi_scratch_held.ptr;
    ampi_scratch_held.ptr = NULL;
    ampi_cpu_release((ampi_cpu *)dev, ptr, ampi_scratch_held.bytes);
}

/* ==== 6 >>backends: implementation, the context ===================================================== */

enum { AMPI_LOG_IDS = 64, AMPI_LOG_REPEATS = 10, AMPI_BUILTIN_OPS = 15, AMPI_TOLD = 4096, AMPI_TOLD_ROOM = 2 * AMPI_TOLD };

typedef enum ampi_part { AMPI_PART_USER, AMPI_PART_CACHE, AMPI_PART_OPTIMIZER, AMPI_PARTS } ampi_part;

/* One live allocation of device memory; kept in an open-addressing table by address. */
typedef struct ampi_block { void *ptr; int64_t bytes; ampi_part part; } ampi_block;

typedef struct ampi_layer_rule { char pattern[128]; amp_dtype dtype; } ampi_layer_rule;
typedef struct ampi_user_op { char name[64]; amp_cast_policy policy; } ampi_user_op;

/* What a cached copy of a weight is good for. */
typedef enum ampi_pack_kind {
    AMPI_PACK_FORWARD = 1,          /* packed as the transposed right operand: y = x w^T */
    AMPI_PACK_BACKWARD = 2,         /* packed as the right operand: dx = dy w */
    AMPI_PACK_CAST = 3              /* the plain matrix in another dtype, for the host's kernels */
} ampi_pack_kind;

typedef struct ampi_cache_entry {
    uint64_t id, version, last_use;
    amp_dtype dtype;
    ampi_pack_kind kind;
    int users;                      /* calls that are reading it: not evicted meanwhile */
    void *data;
    int64_t bytes;
} ampi_cache_entry;

/* One written-out mask.  key: the description with its arrays replaced by their contents. */
typedef struct ampi_mask_entry {
    uint8_t *key; int64_t key_bytes;
    uint64_t hash, last_use;
    amp_mask_kind kind;
    int users;
    void *data;
    int64_t bytes;
} ampi_mask_entry;

/* Numbers in device memory. */
typedef struct ampi_cells {
    int32_t bad_row, reserved;      /* 1 + a row where a kernel found something out of range; 0: none */
    int64_t new_inf;                /* of the cast cache */
    uint64_t random;                /* where the random numbers of the graph launched last begin */
} ampi_cells;

struct amp_context {
    amp_desc desc;                  /* effective */
    amp_system system;
    amp_host host;
    const amp_backend *backend;
    void *dev;
    amp_machine machine;
    amp_choice choice;
    pthread_mutex_t lock;           /* for everything below */
    ampi_block *blocks; int64_t n_blocks, block_room;       /* room is a power of two */
    int64_t allocated, peak, part_bytes[AMPI_PARTS];
    int64_t taken, taken_peak;      /* host memory of the backend, scratch included; changed atomically */
    amp_param **params; int64_t n_params, param_room;
    uint64_t next_param_id, random_offset, clock;
    ampi_cache_entry *cache; int64_t n_cache, cache_room;
    amp_cache_info cache_info;
    int regions;                    /* open on all threads; changed atomically */
    ampi_mask_entry *masks; int64_t n_masks, mask_room;
    amp_cache_info mask_info;
    ampi_layer_rule *layers; int64_t n_layers, layer_room;
    ampi_user_op *ops; int64_t n_ops, op_room;
    amp_cast_policy override_policy[AMPI_BUILTIN_OPS];
    ampi_cells *cells;              /* device memory; NULL where the host sees it anyway and there are no graphs */
    amp_graph *capture;             /* being captured, else NULL */
    int graphs;                     /* that live: the caches keep what they refer to */
    uint64_t settings_version;      /* moves with everything that is built into a graph */
    uint64_t capture_random;        /* random_offset when the capture began */
    struct { int id, count; } logged[AMPI_LOG_IDS]; int n_logged;
    uint64_t *told; int n_told;     /* decisions in the log: a table of AMPI_TOLD_ROOM hashes; NULL before the first */
    amp_log_level quiet;            /* the log's level without `debug` of the settings */
};

/* ---- What other sections may ask of a context */

AMPI_PRIVATE const amp_backend *ampi_backend(const amp_context *amp, void **dev, void **stream) {
    *dev = amp->dev;
    *stream = amp->desc.stream;
    return amp->backend;
}
AMPI_PRIVATE amp_result ampi_may_wait(const amp_context *amp) {
    if (amp->capture == NULL) return AMP_OK;
    return ampi_fail(AMP_ERR_STATE, "amp_graph_begin", "a call since then waits for the device, which only records: move it behind amp_graph_end");
}
/* Something changed that captured graphs have built in. */
AMPI_PRIVATE void ampi_settings_changed(amp_context *amp) { amp->settings_version++; }
AMPI_PRIVATE uint64_t ampi_settings_version(const amp_context *amp) { return amp->settings_version; }
/* The graph that is being captured, or NULL. */
AMPI_PRIVATE amp_graph *ampi_capture(const amp_context *amp) { return amp->capture; }
AMPI_PRIVATE void ampi_capture_begin(amp_context *amp, amp_graph *graph) {
    amp->capture = graph;
    amp->graphs++;
    amp->capture_random = amp->random_offset;
}
/* Returns how many random numbers the captured work takes; they are not used up. */
AMPI_PRIVATE uint64_t ampi_capture_end(amp_context *amp) {
    uint64_t taken = amp->random_offset - amp->capture_random;
    amp->random_offset = amp->capture_random;
    amp->capture = NULL;
    return taken;
}
AMPI_PRIVATE void ampi_graph_left(amp_context *amp) { amp->graphs--; }
/* Where a graph reads its first random offset, and what that is now. */
AMPI_PRIVATE uint64_t *ampi_random_cell(const amp_context *amp, uint64_t *offset) {
    *offset = amp->random_offset;
    return &amp->cells->random;
}
AMPI_PRIVATE void ampi_random_advance(amp_context *amp, uint64_t taken) { amp->random_offset += taken; }
/* What decides what regions compute in, and the next random numbers, to be put back after a look at another precision. */
typedef struct ampi_precision {
    amp_choice choice;
    amp_dtype dtype, fallback;
    int32_t disable, allow_tf32;
    int64_t n_layers;               /* overrides of layers */
    uint64_t random_offset;
} ampi_precision;
AMPI_PRIVATE ampi_precision ampi_precision_get(const amp_context *amp) {
    ampi_precision p;
    memset(&p, 0, sizeof p);
    p.choice = amp->choice;
    p.dtype = amp->desc.dtype;
    p.disable = amp->desc.disable;
    p.allow_tf32 = amp->desc.allow_tf32;
    p.fallback = amp->desc.fallback;
    p.n_layers = amp->n_layers;
    p.random_offset = amp->random_offset;
    return p;
}
/* Whatever the level; nothing that is captured or logged changes.  Weights may have changed too: no cached cast is left. */
AMPI_PRIVATE void ampi_precision_set(amp_context *amp, const ampi_precision *p) {
    amp->choice = p->choice;
    amp->desc.dtype = p->dtype;
    amp->desc.disable = p->disable;
    amp->desc.allow_tf32 = p->allow_tf32;
    amp->desc.fallback = p->fallback;
    amp->n_layers = p->n_layers;
    amp->random_offset = p->random_offset;
    amp_cast_cache_clear(amp);
}
/* 1: some registered parameter has a gradient that no step has used; clear 1: no more. */
AMPI_PRIVATE int ampi_live_gradients(amp_context *amp, int clear) {
    int64_t i, live = 0;
    for (i = 0; i < amp->n_params; i++) {
        live += amp->params[i]->grad_live != 0;
        if (clear) amp->params[i]->grad_live = 0;
    }
    return live > 0;
}
/* The registered parameter with this gradient, or NULL. */
AMPI_PRIVATE amp_param *ampi_param_of_gradient(const amp_context *amp, const void *data) {
    int64_t i;
    for (i = 0; data != NULL && i < amp->n_params; i++)
        if (amp->params[i]->grad.data == data) return amp->params[i];
    return NULL;
}
AMPI_PRIVATE const amp_system *ampi_context_system(const amp_context *amp) { return &amp->system; }
AMPI_PRIVATE const amp_desc *ampi_settings(const amp_context *amp) { return &amp->desc; }

AMPI_PRIVATE void ampi_lock(const amp_context *amp) { pthread_mutex_lock(&((amp_context *)(uintptr_t)amp)->lock); }
AMPI_PRIVATE void ampi_unlock(const amp_context *amp) { pthread_mutex_unlock(&((amp_context *)(uintptr_t)amp)->lock); }

/* Makes room for one more element of a growing array of the context. */
static amp_result ampi_grow(amp_context *amp, const char *function, void **array, int64_t count, int64_t *room, size_t size) {
    int64_t bigger = *room ? 2 * *room : 16;
    void *copy;
    if (count < *room) return AMP_OK;
    AMPI_TRY(ampi_alloc(&amp->system, function, &copy, bigger, size));
    if (count > 0) memcpy(copy, *array, (size_t)count * size);
    ampi_free(&amp->system, *array, *room, size);
    *array = copy;
    *room = bigger;
    return AMP_OK;
}

/* ---- Log */

static const char *ampi_log_word(amp_log_level level) {
    return level == AMP_LOG_ERROR ? "error" : level == AMP_LOG_WARNING ? "warning" : level == AMP_LOG_INFO ? "info" : "debug";
}

/* Counts an id; returns how often it has been seen, this time included. */
static int ampi_log_count(amp_context *amp, int id) {
    int i, count = 1;
    ampi_lock(amp);
    for (i = 0; i < amp->n_logged && amp->logged[i].id != id; i++) {}
    if (i < amp->n_logged) count = ++amp->logged[i].count;
    else if (i < AMPI_LOG_IDS) { amp->logged[i].id = id; amp->logged[i].count = 1; amp->n_logged++; }
    ampi_unlock(amp);
    return count;
}

AMPI_PRIVATE void ampi_log_text(const amp_context *amp, amp_log_level level, int id, const char *text) {
    const amp_logger *logger = &amp->desc.logger;
    int count;
    if (level > logger->level || logger->level == AMP_LOG_OFF) return;
    if (logger->write != NULL) { logger->write(logger->user, level, id, text); return; }
    count = level <= AMP_LOG_WARNING ? ampi_log_count((amp_context *)(uintptr_t)amp, id) : 1;
    if (count <= AMPI_LOG_REPEATS)
        fprintf(stderr, "amp %s %d: %s%s\n", ampi_log_word(level), id, text, count == AMPI_LOG_REPEATS ? " (not repeated further)" : "");
}

AMPI_PRIVATE void ampi_log(const amp_context *amp, amp_log_level level, int id, const char *format, ...) AMPI_PRINTF(4, 5);
AMPI_PRIVATE void ampi_log(const amp_context *amp, amp_log_level level, int id, const char *format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    ampi_log_text(amp, level, id, text);
}

static amp_result ampi_host_fail(void *user, amp_result result, const char *text) { (void)user; return ampi_fail(result, "backend", "%s", text); }
static void ampi_host_log(void *user, amp_log_level level, int id, const char *text) { ampi_log_text((const amp_context *)user, level, id, text); }
static void *ampi_host_alloc(void *user, size_t size, size_t align) {
    amp_context *amp = (amp_context *)user;
    void *ptr = amp->system.alloc(amp->system.user, size, align);
    int64_t now, peak;
    if (ptr == NULL) return NULL;
    now = __atomic_add_fetch(&amp->taken, (int64_t)size, __ATOMIC_RELAXED);
    peak = __atomic_load_n(&amp->taken_peak, __ATOMIC_RELAXED);
    while (now > peak && !__atomic_compare_exchange_n(&amp->taken_peak, &peak, now, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    return ptr;
}
static void ampi_host_free(void *user, void *ptr, size_t size) {
    amp_context *amp = (amp_context *)user;
    __atomic_sub_fetch(&amp->taken, (int64_t)size, __ATOMIC_RELAXED);
    amp->system.free(amp->system.user, ptr, size);
}

/* ---- Opening */

static amp_result ampi_check_enum(const char *field, int value, int last) {
    if (value >= 0 && value <= last) return AMP_OK;
    return ampi_fail(AMP_ERR_RANGE, "amp_open", ".%s = %d, must be 0 (default) to %d", field, value, last);
}

static amp_result ampi_check_desc(const amp_desc *d) {
    const amp_system *s = &d->system;
    AMPI_TRY(ampi_check_enum("level", (int)d->level, AMP_LEVEL_O3));
    AMPI_TRY(ampi_check_enum("policy", (int)d->policy, AMP_POLICY_TORCH));
    AMPI_TRY(ampi_check_enum("mode", (int)d->mode, AMP_MODE_INFERENCE));
    AMPI_TRY(ampi_check_enum("cpu_path", (int)d->cpu_path, AMP_CPU_AMX));
    AMPI_TRY(ampi_check_enum("autotune", (int)d->autotune, AMP_AUTOTUNE_ON));
    if ((int)d->fallback != AMP_DTYPE_DEFAULT && !ampi_is_compute(d->fallback))
        return ampi_fail(AMP_ERR_DTYPE, "amp_open", ".fallback = %s, must be fp32, tf32, fp16 or bf16", amp_dtype_name(d->fallback));
    AMPI_TRY(ampi_check_enum("logger.level", (int)d->logger.level, AMP_LOG_DEBUG));
    if (d->threads < 0 || d->threads > 1024) return ampi_fail(AMP_ERR_RANGE, "amp_open", ".threads = %d, must be 1 to 1024, or 0 for all cores", d->threads);
    if (d->device < 0) return ampi_fail(AMP_ERR_RANGE, "amp_open", ".device = %d, must be 0 or more", d->device);
    if (d->cache_limit < 0) return ampi_fail(AMP_ERR_RANGE, "amp_open", ".cache_limit = %lld, must be 0 (none) or more", (long long)d->cache_limit);
    if (d->mask_limit < 0) return ampi_fail(AMP_ERR_RANGE, "amp_open", ".mask_limit = %lld, must be 0 (none) or more", (long long)d->mask_limit);
    if (d->cpu_path > ampi_cpu_best_path())
        return ampi_fail(AMP_ERR_UNSUPPORTED, "amp_open", ".cpu_path = %s, this CPU has at most %s", ampi_cpu_path_name(d->cpu_path), ampi_cpu_path_name(ampi_cpu_best_path()));
    if ((s->alloc == NULL) != (s->free == NULL)) return ampi_fail(AMP_ERR_CONFLICT, "amp_open", ".system.alloc and .system.free come both or neither");
    if ((d->memory.alloc == NULL) != (d->memory.free == NULL)) return ampi_fail(AMP_ERR_CONFLICT, "amp_open", ".memory.alloc and .memory.free come both or neither");
    if (d->memory.alloc != NULL && (d->backend == NULL || d->backend == amp_cpu()))
        return ampi_fail(AMP_ERR_CONFLICT, "amp_open", ".memory is for a device's memory, and amp_cpu() has none: set .system");
    if ((s->thread_start == NULL) != (s->thread_join == NULL) || (s->thread_start == NULL) != (s->thread_detach == NULL))
        return ampi_fail(AMP_ERR_CONFLICT, "amp_open", ".system.thread_start, .thread_join and .thread_detach come all or none");
    if (d->reducer.world < 0 || d->reducer.rank < 0 || d->reducer.rank >= AMPI_MAX(d->reducer.world, 1))
        return ampi_fail(AMP_ERR_RANGE, "amp_open", ".reducer.rank = %d of .world = %d", d->reducer.rank, d->reducer.world);
    if (d->reducer.world > 1 && d->reducer.reduce == NULL) return ampi_fail(AMP_ERR_NULL, "amp_open", ".reducer.reduce is NULL with .world = %d", d->reducer.world);
    if (d->backend != NULL && d->backend->abi != AMP_ABI(amp_backend))
        return ampi_fail(AMP_ERR_BACKEND, "amp_open", "backend %s was built against another amp.h", d->backend->name ? d->backend->name : "?");
    return AMP_OK;
}

static void ampi_fill_defaults(amp_desc *d) {
    amp_cpu_info cpu;
    ampi_probe_cpu(&cpu);
    if (d->level == 0) d->level = AMP_LEVEL_O1;
    if (d->policy == 0) d->policy = AMP_POLICY_FUSED;
    if (d->mode == 0) d->mode = AMP_MODE_TRAINING;
    if (d->autotune == 0) d->autotune = AMP_AUTOTUNE_OFF;
    if (d->logger.level == 0) d->logger.level = AMP_LOG_WARNING;
    if (d->backend == NULL) d->backend = amp_cpu();
    if (d->cpu_path == 0) d->cpu_path = cpu.path;
#if defined(_OPENMP)
    if (d->threads == 0) d->threads = AMPI_MIN(cpu.cores, omp_get_max_threads());
#else
    if (d->threads == 0) d->threads = cpu.cores;
#endif
#if !defined(_OPENMP)
    d->threads = 1;
#endif
    if (d->reducer.world == 0) d->reducer.world = 1;
}

/* The file of tuned plans holds one record, the backend's bytes. */
#define AMPI_PLANS_KEY "plans"

static amp_result ampi_plans_parse(amp_context *amp, const amp_state *state) {
    amp_dtype dtype = AMP_DTYPE_DEFAULT;
    int64_t bytes = amp_state_count(state, AMPI_PLANS_KEY, &dtype);
    void *data;
    amp_result result;
    if (bytes <= 0 || dtype != AMP_U8) return ampi_fail(AMP_ERR_CHECKSUM, "amp_open", "%s holds no plans", amp->desc.autotune_file);
    AMPI_TRY(ampi_alloc(&amp->system, "amp_open", &data, bytes, 1));
    result = amp_state_get(state, AMPI_PLANS_KEY, AMP_U8, data, bytes);
    if (result == AMP_OK) result = amp->backend->plans_load(amp->dev, data, (size_t)bytes);
    ampi_free(&amp->system, data, bytes, 1);
    return result;
}

/* Nothing about this file may stop a training. */
static void ampi_plans_read(amp_context *amp) {
    amp_state *state;
    amp_result result;
    if (amp->desc.autotune_file == NULL || amp->backend->plans_load == NULL) return;
    result = amp_state_load(&state, &amp->system, amp->desc.autotune_file);
    if (result == AMP_ERR_OPEN) return;        /* not yet written */
    if (result == AMP_OK) {
        result = ampi_plans_parse(amp, state);
        amp_state_destroy(state);
    }
    if (result != AMP_OK) ampi_log(amp, AMP_LOG_WARNING, 1002, "autotune_file ignored: %s", amp_last_error());
}

static amp_result ampi_plans_save(const amp_context *amp, void *data, size_t bytes) {
    amp_state *state;
    amp_result result;
    AMPI_TRY(amp_state_create(&state, &amp->system));
    (void)amp->backend->plans_save(amp->dev, data, bytes);
    result = amp_state_put(state, AMPI_PLANS_KEY, AMP_U8, data, (int64_t)bytes);
    if (result == AMP_OK) result = amp_state_save(state, amp->desc.autotune_file);
    amp_state_destroy(state);
    return result;
}

static void ampi_plans_write(const amp_context *amp) {
    int asked = amp->desc.autotune_file != NULL && amp->backend->plans_save != NULL;
    size_t bytes = asked ? amp->backend->plans_save(amp->dev, NULL, 0) : 0;
    amp_result result;
    void *data;
    if (bytes == 0) return;
    result = ampi_alloc(&amp->system, "amp_close", &data, (int64_t)bytes, 1);
    if (result == AMP_OK) {
        result = ampi_plans_save(amp, data, bytes);
        ampi_free(&amp->system, data, (int64_t)bytes, 1);
    }
    if (result != AMP_OK) ampi_log(amp, AMP_LOG_WARNING, 1003, "autotune_file not written: %s", amp_last_error());
}

/* The context's own copy of a path. */
static amp_result ampi_own_path(const amp_system *system, const char **path) {
    void *copy;
    size_t bytes;
    if (*path == NULL) return AMP_OK;
    bytes = strlen(*path) + 1;
    AMPI_TRY(ampi_alloc(system, "amp_open", &copy, (int64_t)bytes, 1));
    memcpy(copy, *path, bytes);
    *path = (const char *)copy;
    return AMP_OK;
}

/* Chooses as amp_choose does, on this context's device; what the device lacks is replaced by fallback, if there is one. */
static amp_result ampi_choose_here(const amp_context *amp, amp_dtype wanted, amp_dtype fallback, amp_choice *out) {
    amp_result result;
    if (fallback == AMP_DTYPE_DEFAULT) return amp_choose(&amp->machine, wanted, amp->desc.allow_fallback, out);
    result = amp_choose(&amp->machine, wanted, 0, out);
    if (result != AMP_ERR_UNSUPPORTED) return result;
    AMPI_TRY(amp_choose(&amp->machine, fallback, 0, out));
    return ampi_chosen(out, fallback, out->emulated, 1, "%s asked for: %.64s lacks it; the fallback %s instead",
                       amp_dtype_name(wanted), amp->machine.device.name, amp_dtype_name(fallback));
}

/* What regions are to compute in.  Level O0 is fp32 throughout. */
static amp_result ampi_choose_for(const amp_context *amp, amp_dtype wanted, amp_dtype fallback, amp_choice *out) {
    amp_choice other;
    if (fallback != AMP_DTYPE_DEFAULT) AMPI_TRY(amp_choose(&amp->machine, fallback, 0, &other));
    AMPI_TRY(ampi_choose_here(amp, wanted, fallback, out));
    if (amp->desc.level != AMP_LEVEL_O0 || out->dtype == AMP_F32) return AMP_OK;
    return ampi_chosen(out, AMP_F32, 0, 0, "level O0 computes in fp32");
}

/* 1: products that are left in fp32 can be computed in TF32. */
static int32_t ampi_may_tf32(const amp_context *amp, int32_t wanted) {
    amp_choice choice;
    if (!wanted || amp->desc.level == AMP_LEVEL_O0) return 0;
    (void)amp_choose(&amp->machine, AMP_TF32, 1, &choice);
    if (!choice.fell_back) return 1;
    ampi_log(amp, AMP_LOG_INFO, 1004, "allow_tf32 has no effect: %.64s has no TF32", amp->machine.device.name);
    return 0;
}

static amp_result ampi_open_device(amp_context *amp) {
    amp_backend_desc b;
    memset(&b, 0, sizeof b);
    b.device = amp->desc.device;
    b.threads = amp->desc.threads;
    b.cpu_path = amp->desc.cpu_path;
    b.stream = amp->desc.stream;
    b.blas = amp->desc.blas;
    b.memory = amp->desc.memory;
    b.autotune = amp->desc.autotune == AMP_AUTOTUNE_ON;
    AMPI_TRY(amp->backend->open(&amp->dev, &amp->host, &b));
    AMPI_TRY(amp->backend->describe(amp->dev, &amp->machine.device));
    AMPI_TRY(ampi_choose_for(amp, amp->desc.dtype, amp->desc.fallback, &amp->choice));
    amp->desc.allow_tf32 = ampi_may_tf32(amp, amp->desc.allow_tf32);
    if (amp->choice.fell_back) ampi_log(amp, AMP_LOG_WARNING, 1001, "%s", amp->choice.reason);
    amp->desc.dtype = amp->choice.dtype;
    ampi_plans_read(amp);
    if (amp->backend->host_visible && amp->backend->graph_begin == NULL) return AMP_OK;
    AMPI_TRY(amp->backend->alloc(amp->dev, (void **)&amp->cells, sizeof *amp->cells));
    return amp->backend->fill(amp->dev, amp->cells, 0, sizeof *amp->cells, amp->desc.stream);
}

AMP_API amp_result amp_open_v(amp_context **out, const amp_desc *desc, uint64_t abi) {
    amp_system system;
    amp_context *amp;
    amp_result result;
    void *memory;
    if (out == NULL) return ampi_fail(AMP_ERR_NULL, "amp_open", "out is NULL");
    *out = NULL;
    AMPI_TRY(ampi_check_abi("amp_open", abi, AMP_ABI(amp_desc)));
    if (desc != NULL) AMPI_TRY(ampi_check_desc(desc));
    system = ampi_system(desc ? &desc->system : NULL);
    AMPI_TRY(ampi_alloc(&system, "amp_open", &memory, 1, sizeof *amp));
    amp = (amp_context *)memory;
    if (desc != NULL) amp->desc = *desc;
    ampi_fill_defaults(&amp->desc);
    amp->system = amp->desc.system = system;
    amp->quiet = amp->desc.logger.level == AMP_LOG_DEBUG ? AMP_LOG_WARNING : amp->desc.logger.level;
    amp->backend = amp->desc.backend;
    amp->next_param_id = 1;
    amp->host.user = amp;
    amp->host.fail = ampi_host_fail;
    amp->host.log = ampi_host_log;
    amp->host.alloc = ampi_host_alloc;
    amp->host.free = ampi_host_free;
    if (pthread_mutex_init(&amp->lock, NULL) != 0) {
        ampi_free(&system, amp, 1, sizeof *amp);
        return ampi_fail(AMP_ERR_THREAD, "amp_open", "no lock for the context");
    }
    ampi_probe_cpu(&amp->machine.cpu);
    result = ampi_own_path(&system, &amp->desc.autotune_file);
    if (result != AMP_OK) amp->desc.autotune_file = NULL;
    else result = ampi_open_device(amp);
    if (result != AMP_OK) { amp_close(amp); return result; }
    *out = amp;
    return AMP_OK;
}

AMP_API void amp_close(amp_context *amp) {
    amp_system system;
    int64_t i;
    if (amp == NULL) return;
    system = amp->system;
    if (amp->dev != NULL) {
        ampi_plans_write(amp);
        amp_cast_cache_clear(amp);
        amp_mask_cache_clear(amp);
        for (i = 0; i < amp->block_room; i++)
            if (amp->blocks[i].ptr) amp->backend->free(amp->dev, amp->blocks[i].ptr, (size_t)amp->blocks[i].bytes);
        if (amp->cells) amp->backend->free(amp->dev, amp->cells, sizeof *amp->cells);
        amp->backend->close(amp->dev);
    }
    if (amp->desc.autotune_file) ampi_free(&system, (void *)(uintptr_t)amp->desc.autotune_file, (int64_t)strlen(amp->desc.autotune_file) + 1, 1);
    ampi_free(&system, amp->blocks, amp->block_room, sizeof *amp->blocks);
    ampi_free(&system, amp->params, amp->param_room, sizeof *amp->params);
    ampi_free(&system, amp->cache, amp->cache_room, sizeof *amp->cache);
    ampi_free(&system, amp->masks, amp->mask_room, sizeof *amp->masks);
    ampi_free(&system, amp->layers, amp->layer_room, sizeof *amp->layers);
    ampi_free(&system, amp->ops, amp->op_room, sizeof *amp->ops);
    ampi_free(&system, amp->told, AMPI_TOLD_ROOM, sizeof *amp->told);
    pthread_mutex_destroy(&amp->lock);
    ampi_free(&system, amp, 1, sizeof *amp);
}

AMP_API amp_result amp_query(const amp_context *amp, amp_desc *out) {
    if (amp == NULL || out == NULL) return ampi_fail(AMP_ERR_NULL, "amp_query", "amp or out is NULL");
    *out = amp->desc;
    return AMP_OK;
}

AMP_API amp_result amp_query_machine(const amp_context *amp, amp_machine *out) {
    if (amp == NULL || out == NULL) return ampi_fail(AMP_ERR_NULL, "amp_query_machine", "amp or out is NULL");
    *out = amp->machine;
    return AMP_OK;
}

AMP_API amp_result amp_query_choice(const amp_context *amp, amp_choice *out) {
    if (amp == NULL || out == NULL) return ampi_fail(AMP_ERR_NULL, "amp_query_choice", "amp or out is NULL");
    *out = amp->choice;
    return AMP_OK;
}

/* Levels O2 and O3 keep weights in the dtype they were opened with. */
static amp_result ampi_check_switch(const amp_context *amp, const char *function, amp_dtype dtype) {
    if (amp->desc.level < AMP_LEVEL_O2 || dtype == amp->choice.dtype) return AMP_OK;
    return ampi_fail(AMP_ERR_CONFLICT, function, "levels O2 and O3 store weights in %s; switching the dtype needs level O1", amp_dtype_name(amp->choice.dtype));
}

static void ampi_switch_dtype(amp_context *amp, const amp_choice *choice) {
    if (choice->fell_back) ampi_log(amp, AMP_LOG_WARNING, 1001, "%s", choice->reason);
    amp->choice = *choice;
    amp->desc.dtype = choice->dtype;
    ampi_settings_changed(amp);
    amp_cast_cache_clear(amp);
}

AMP_API amp_result amp_set_dtype(amp_context *amp, amp_dtype dtype) {
    amp_choice choice;
    if (amp == NULL) return ampi_fail(AMP_ERR_NULL, "amp_set_dtype", "amp is NULL");
    AMPI_TRY(ampi_choose_here(amp, dtype, amp->desc.fallback, &choice));
    if (amp->desc.level == AMP_LEVEL_O0 && choice.dtype != AMP_F32)
        return ampi_fail(AMP_ERR_CONFLICT, "amp_set_dtype", "level O0 computes in fp32, not in %s", amp_dtype_name(choice.dtype));
    AMPI_TRY(ampi_check_switch(amp, "amp_set_dtype", choice.dtype));
    ampi_switch_dtype(amp, &choice);
    return AMP_OK;
}

AMP_API amp_result amp_set_enabled(amp_context *amp, int32_t enabled) {
    if (amp == NULL) return ampi_fail(AMP_ERR_NULL, "amp_set_enabled", "amp is NULL");
    amp->desc.disable = !enabled;
    ampi_settings_changed(amp);
    return AMP_OK;
}

/* ---- Memory */

static int64_t ampi_block_slot(const ampi_block *blocks, int64_t room, const void *ptr) {
    uint64_t slot = ((uint64_t)(uintptr_t)ptr >> 4) * 0x9e3779b97f4a7c15u;
    int64_t i = (int64_t)(slot >> 20) & (room - 1);
    while (blocks[i].ptr != NULL && blocks[i].ptr != ptr) i = (i + 1) & (room - 1);
    return i;
}

/* Keeps the table at most half full.  Called with the lock held. */
static amp_result ampi_blocks_reserve(amp_context *amp) {
    int64_t room = amp->block_room ? 2 * amp->block_room : 64, i;
    void *memory;
    if (2 * (amp->n_blocks + 1) <= amp->block_room) return AMP_OK;
    AMPI_TRY(ampi_alloc(&amp->system, "amp_alloc", &memory, room, sizeof(ampi_block)));
    for (i = 0; i < amp->block_room; i++)
        if (amp->blocks[i].ptr) ((ampi_block *)memory)[ampi_block_slot((ampi_block *)memory, room, amp->blocks[i].ptr)] = amp->blocks[i];
    ampi_free(&amp->system, amp->blocks, amp->block_room, sizeof *amp->blocks);
    amp->blocks = (ampi_block *)memory;
    amp->block_room = room;
    return AMP_OK;
}

static amp_result ampi_alloc_locked(amp_context *amp, ampi_part part, void **ptr, int64_t bytes) {
    ampi_block *block;
    AMPI_TRY(ampi_blocks_reserve(amp));
    AMPI_TRY(amp->backend->alloc(amp->dev, ptr, (size_t)bytes));
    block = &amp->blocks[ampi_block_slot(amp->blocks, amp->block_room, *ptr)];
    block->ptr = *ptr;
    block->bytes = bytes;
    block->part = part;
    amp->n_blocks++;
    amp->part_bytes[part] += bytes;
    amp->allocated += bytes;
    amp->peak = AMPI_MAX(amp->peak, amp->allocated);
    return AMP_OK;
}

/* Removes a block and closes the gap in its probe chain. */
static void ampi_free_locked(amp_context *amp, void *ptr) {
    int64_t mask = amp->block_room - 1, hole, i;
    ampi_block block;
    if (amp->block_room == 0) return;
    hole = ampi_block_slot(amp->blocks, amp->block_room, ptr);
    block = amp->blocks[hole];
    if (block.ptr == NULL) return;
    amp->blocks[hole].ptr = NULL;
    for (i = (hole + 1) & mask; amp->blocks[i].ptr != NULL; i = (i + 1) & mask) {
        ampi_block moved = amp->blocks[i];
        amp->blocks[i].ptr = NULL;
        amp->blocks[ampi_block_slot(amp->blocks, amp->block_room, moved.ptr)] = moved;
    }
    amp->n_blocks--;
    amp->part_bytes[block.part] -= block.bytes;
    amp->allocated -= block.bytes;
    amp->backend->free(amp->dev, ptr, (size_t)block.bytes);
}

AMPI_PRIVATE amp_result ampi_alloc_part(amp_context *amp, ampi_part part, void **ptr, int64_t bytes) {
    amp_result result;
    *ptr = NULL;
    if (bytes < 0) return ampi_fail(AMP_ERR_RANGE, "amp_alloc", "bytes = %lld, must be 0 or more", (long long)bytes);
    if (bytes == 0) return AMP_OK;
    ampi_lock(amp);
    result = ampi_alloc_locked(amp, part, ptr, bytes);
    ampi_unlock(amp);
    return result;
}

AMP_API amp_result amp_alloc(amp_context *amp, void **ptr, int64_t bytes) {
    if (amp == NULL || ptr == NULL) return ampi_fail(AMP_ERR_NULL, "amp_alloc", "amp or ptr is NULL");
    return ampi_alloc_part(amp, AMPI_PART_USER, ptr, bytes);
}

AMP_API void amp_free(amp_context *amp, void *ptr) {
    if (amp == NULL || ptr == NULL) return;
    ampi_lock(amp);
    ampi_free_locked(amp, ptr);
    ampi_unlock(amp);
}

AMP_API amp_result amp_copy(amp_context *amp, void *dst, const void *src, int64_t bytes, amp_copy_kind kind) {
    if (amp == NULL || (bytes > 0 && (dst == NULL || src == NULL))) return ampi_fail(AMP_ERR_NULL, "amp_copy", "amp, dst or src is NULL");
    if (bytes < 0) return ampi_fail(AMP_ERR_RANGE, "amp_copy", "bytes = %lld, must be 0 or more", (long long)bytes);
    return bytes == 0 ? AMP_OK : amp->backend->copy(amp->dev, dst, src, (size_t)bytes, kind, amp->desc.stream);
}

AMP_API amp_result amp_fill(amp_context *amp, void *dst, int byte, int64_t bytes) {
    if (amp == NULL || (bytes > 0 && dst == NULL)) return ampi_fail(AMP_ERR_NULL, "amp_fill", "amp or dst is NULL");
    if (bytes < 0) return ampi_fail(AMP_ERR_RANGE, "amp_fill", "bytes = %lld, must be 0 or more", (long long)bytes);
    return bytes == 0 ? AMP_OK : amp->backend->fill(amp->dev, dst, byte, (size_t)bytes, amp->desc.stream);
}

AMP_API amp_result amp_sync(amp_context *amp) {
    int32_t bad = 0;
    if (amp == NULL) return ampi_fail(AMP_ERR_NULL, "amp_sync", "amp is NULL");
    AMPI_TRY(ampi_may_wait(amp));
    if (!amp->backend->host_visible) AMPI_TRY(amp->backend->copy(amp->dev, &bad, &amp->cells->bad_row, sizeof bad, AMP_COPY_TO_HOST, amp->desc.stream));
    AMPI_TRY(amp->backend->stream_sync(amp->dev, amp->desc.stream));
    if (bad == 0) return AMP_OK;
    AMPI_TRY(amp->backend->fill(amp->dev, &amp->cells->bad_row, 0, sizeof bad, amp->desc.stream));
    return ampi_fail(AMP_ERR_LABEL, "amp_sync", "an operator since the last wait met a label or id out of range in row %d", bad - 1);
}

AMP_API amp_result amp_event_record(amp_context *amp, void *event) {
    if (amp == NULL || event == NULL) return ampi_fail(AMP_ERR_NULL, "amp_event_record", "amp or event is NULL");
    return amp->backend->host_visible ? AMP_OK : amp->backend->event_record(amp->dev, event, amp->desc.stream);
}

AMP_API amp_result amp_event_wait(amp_context *amp, void *event) {
    if (amp == NULL || event == NULL) return ampi_fail(AMP_ERR_NULL, "amp_event_wait", "amp or event is NULL");
    return amp->backend->host_visible ? AMP_OK : amp->backend->event_wait(amp->dev, event, amp->desc.stream);
}

/* What the context counts itself, without asking the device. */
AMPI_PRIVATE void ampi_memory_counted(const amp_context *amp, amp_memory_info *out) {
    ampi_lock(amp);
    out->allocated = amp->allocated;
    out->peak = amp->peak;
    if (amp->backend->host_visible) {
        out->reserved = __atomic_load_n(&amp->taken, __ATOMIC_RELAXED);
        out->peak = __atomic_load_n(&amp->taken_peak, __ATOMIC_RELAXED);
    }
    out->cast_cache = amp->part_bytes[AMPI_PART_CACHE];
    out->optimizer = amp->part_bytes[AMPI_PART_OPTIMIZER];
    ampi_unlock(amp);
}

AMP_API amp_result amp_memory(const amp_context *amp, amp_memory_info *out) {
    if (amp == NULL || out == NULL) return ampi_fail(AMP_ERR_NULL, "amp_memory", "amp or out is NULL");
    memset(out, 0, sizeof *out);
    AMPI_TRY(amp->backend->memory(amp->dev, out));
    ampi_memory_counted(amp, out);
    return AMP_OK;
}

AMP_API void amp_memory_reset_peak(amp_context *amp) {
    if (amp == NULL) return;
    ampi_lock(amp);
    amp->peak = amp->allocated;
    __atomic_store_n(&amp->taken_peak, __atomic_load_n(&amp->taken, __ATOMIC_RELAXED), __ATOMIC_RELAXED);
    ampi_unlock(amp);
}

/* ---- Parameters */

static amp_result ampi_check_param(const amp_context *amp, const amp_param *params, int64_t i) {
    const amp_param *p = &params[i];
    int64_t j;
    if (p->name == NULL) return ampi_fail(AMP_ERR_NULL, "amp_param_register", "parameter %lld has no name", (long long)i);
    AMPI_TRY(ampi_check_tensor("amp_param_register", "weight", &p->weight));
    if (!ampi_is_contiguous(&p->weight)) return ampi_fail(AMP_ERR_SHAPE, "amp_param_register", "%s: the weight is not contiguous", p->name);
    if (p->grad.data != NULL) {
        AMPI_TRY(ampi_check_tensor("amp_param_register", "grad", &p->grad));
        if (amp_tensor_count(&p->grad) != amp_tensor_count(&p->weight) || !ampi_is_contiguous(&p->grad))
            return ampi_fail(AMP_ERR_SHAPE, "amp_param_register", "%s: the gradient must be contiguous with the weight's %lld elements", p->name, (long long)amp_tensor_count(&p->weight));
        if (p->grad.dtype != AMP_F32 && p->grad.dtype != p->weight.dtype)
            return ampi_fail(AMP_ERR_DTYPE, "amp_param_register", "%s: the gradient is %s, must be fp32 or the weight's %s", p->name, amp_dtype_name(p->grad.dtype), amp_dtype_name(p->weight.dtype));
    }
    for (j = 0; j < amp->n_params; j++)
        if (amp->params[j] == p || strcmp(amp->params[j]->name, p->name) == 0)
            return ampi_fail(AMP_ERR_NAME, "amp_param_register", "%s is registered already", p->name);
    for (j = 0; j < i; j++)
        if (strcmp(params[j].name, p->name) == 0) return ampi_fail(AMP_ERR_NAME, "amp_param_register", "two parameters are called %s", p->name);
    return AMP_OK;
}

AMP_API amp_result amp_param_register(amp_context *amp, amp_param *params, int64_t n) {
    amp_result result = AMP_OK;
    int64_t i;
    if (amp == NULL || (params == NULL && n > 0)) return ampi_fail(AMP_ERR_NULL, "amp_param_register", "amp or params is NULL");
    if (n < 0) return ampi_fail(AMP_ERR_RANGE, "amp_param_register", "n = %lld, must be 0 or more", (long long)n);
    ampi_lock(amp);
    for (i = 0; i < n && result == AMP_OK; i++) result = ampi_check_param(amp, params, i);
    while (result == AMP_OK && amp->param_room < amp->n_params + n)
        result = ampi_grow(amp, "amp_param_register", (void **)&amp->params, amp->param_room, &amp->param_room, sizeof *amp->params);
    for (i = 0; i < n && result == AMP_OK; i++) {
        params[i].id = amp->next_param_id++;
        params[i].version = 1;
        params[i].grad_live = 0;
        amp->params[amp->n_params++] = &params[i];
    }
    ampi_unlock(amp);
    return result;
}

static void ampi_cache_drop(amp_context *amp, uint64_t id);

AMP_API void amp_param_forget(amp_context *amp, amp_param *params, int64_t n) {
    int64_t i, kept = 0;
    if (amp == NULL || params == NULL) return;
    ampi_lock(amp);
    for (i = 0; i < amp->n_params; i++) {
        amp_param *p = amp->params[i];
        if (p < params || p >= params + n) { amp->params[kept++] = p; continue; }
        ampi_cache_drop(amp, p->id);
        p->id = 0;
    }
    ampi_settings_changed(amp);
    amp->n_params = kept;
    ampi_unlock(amp);
}

AMP_API void amp_param_touch(amp_param *param) { if (param != NULL) param->version++; }

AMP_API int32_t amp_param_accumulate(amp_param *param) {
    int32_t add;
    if (param == NULL) return 0;
    add = param->grad_live;
    param->grad_live = 1;
    return add;
}

AMP_API amp_dtype amp_param_dtype(const amp_context *amp, int32_t is_norm) {
    amp_dtype dtype;
    if (amp == NULL) return AMP_F32;
    dtype = amp->desc.dtype;
    if (dtype != AMP_F16 && dtype != AMP_BF16) return AMP_F32;
    if (amp->desc.level == AMP_LEVEL_O3) return dtype;
    return amp->desc.level == AMP_LEVEL_O2 && !is_norm ? dtype : AMP_F32;
}

/* ==== 7 >>masks: implementation =====================================================================
   Everything runs with the context's lock held, so that a mask is written once.                        */

static amp_result ampi_check_mask(const char *f, const amp_mask *mask) {
    if ((int)mask->kind < 0 || mask->kind > AMP_MASK_ARBITRARY) return ampi_fail(AMP_ERR_RANGE, f, ".mask.kind = %d, must be 0 to 5", (int)mask->kind);
    if ((mask->kind == AMP_MASK_WINDOW || mask->kind == AMP_MASK_WINDOW_GLOBAL) && mask->window < 1)
        return ampi_fail(AMP_ERR_RANGE, f, ".mask.window = %lld, must be 1 or more", (long long)mask->window);
    if (mask->kind == AMP_MASK_WINDOW_GLOBAL && mask->global < 0) return ampi_fail(AMP_ERR_RANGE, f, ".mask.global = %lld, must be 0 or more", (long long)mask->global);
    if (mask->kind == AMP_MASK_PREFIX && mask->prefix == NULL) return ampi_fail(AMP_ERR_NULL, f, ".mask.prefix is NULL");
    if (mask->kind == AMP_MASK_ARBITRARY && mask->allowed == NULL) return ampi_fail(AMP_ERR_NULL, f, ".mask.allowed is NULL");
    return AMP_OK;
}

/* Whether sequences may differ. */
static int ampi_mask_per_batch(const amp_mask *m) {
    return m->lengths || m->documents || m->kind == AMP_MASK_PREFIX || (m->kind == AMP_MASK_ARBITRARY && m->allowed_batch_stride != 0);
}

static amp_result ampi_mask_check(const amp_mask *m, int64_t batch, int64_t queries, int64_t keys, amp_dtype dtype) {
    const char *f = "amp_mask_get";
    size_t bytes;
    if (batch < 1 || queries < 1 || keys < 1)
        return ampi_fail(AMP_ERR_RANGE, f, "batch = %lld, queries = %lld, keys = %lld, must be 1 or more", (long long)batch, (long long)queries, (long long)keys);
    if (dtype != AMP_U8 && !ampi_is_storage(dtype)) return ampi_fail(AMP_ERR_DTYPE, f, "dtype %s, must be u8, fp32, fp16 or bf16", amp_dtype_name(dtype));
    if (queries > INT64_MAX / keys || batch > INT64_MAX / (queries * keys))
        return ampi_fail(AMP_ERR_SIZE, f, "%lld x %lld x %lld elements", (long long)batch, (long long)queries, (long long)keys);
    AMPI_TRY(ampi_bytes(f, batch * queries * keys, amp_dtype_size(dtype), &bytes));
    AMPI_TRY(ampi_check_mask(f, m));
    if (m->kind == AMP_MASK_ARBITRARY && m->allowed_head_stride != 0)
        return ampi_fail(AMP_ERR_UNSUPPORTED, f, ".allowed differs between heads (stride %lld); the cache keeps one mask for all", (long long)m->allowed_head_stride);
    return AMP_OK;
}

/* The key: eight numbers, then the arrays.  Returns its size; out NULL only counts. */
static int64_t ampi_mask_key(const amp_mask *m, int64_t batch, int64_t queries, int64_t keys, amp_dtype dtype, uint8_t *out) {
    int64_t numbers[8], n = (int64_t)sizeof numbers, b;
    int per_batch = ampi_mask_per_batch(m);
    const void *parts[3];
    int64_t sizes[3];
    int i;
    numbers[0] = m->kind; numbers[1] = m->bidirectional; numbers[2] = m->window; numbers[3] = m->global;
    numbers[4] = per_batch ? batch : 1; numbers[5] = queries; numbers[6] = keys;
    numbers[7] = (int64_t)dtype + 64 * (m->lengths != NULL) + 128 * (m->documents != NULL);
    if (out) memcpy(out, numbers, sizeof numbers);
    parts[0] = m->kind == AMP_MASK_PREFIX ? m->prefix : NULL;  sizes[0] = 4 * batch;
    parts[1] = m->lengths;                                     sizes[1] = 4 * batch;
    parts[2] = m->documents;                                   sizes[2] = 4 * batch * keys;
    for (i = 0; i < 3; i++) {
        if (parts[i] == NULL) continue;
        if (out) memcpy(out + n, parts[i], (size_t)sizes[i]);
        n += sizes[i];
    }
    for (b = 0; m->kind == AMP_MASK_ARBITRARY && b < (per_batch ? batch : 1); b++, n += queries * keys)
        if (out) memcpy(out + n, m->allowed + b * m->allowed_batch_stride, (size_t)(queries * keys));
    return n;
}

static uint64_t ampi_mask_hash(const uint8_t *key, int64_t n) {        /* FNV-1a over 8 bytes at a time */
    uint64_t hash = 0xcbf29ce484222325u, word;
    for (; n > 0; key += 8, n -= 8) {
        word = 0;
        memcpy(&word, key, (size_t)AMPI_MIN(n, 8));
        hash = (hash ^ word) * 0x100000001b3u;
        hash ^= hash >> 29;
    }
    return hash;
}

/* One row of 0 and 1. */
static void ampi_mask_write_row(const amp_mask *m, int64_t b, int64_t query, int64_t queries, int64_t keys, uint8_t *row) {
    int64_t position = query + keys - queries, j;
    ampi_span s = ampi_mask_span(m, b, position, keys);
    const int32_t *documents = m->documents ? m->documents + b * keys : NULL;
    const uint8_t *allowed = ampi_mask_row(m, b, 0, query, keys);
    for (j = 0; j < keys; j++) {
        int seen = j < s.first || (j >= s.low && j < s.high);
        if (documents) seen = seen && position >= 0 && documents[j] == documents[position];
        if (allowed) seen = seen && allowed[j];
        row[j] = (uint8_t)seen;
    }
}

/* The row in its dtype: 0 where seen, -inf where hidden. */
static void ampi_mask_add_row(const uint8_t *row, int64_t keys, amp_dtype dtype, void *out) {
    int64_t j;
    for (j = 0; j < keys; j++) {
        if (dtype == AMP_F32) { uint32_t bits = row[j] ? 0 : 0xff800000u; memcpy((char *)out + 4 * j, &bits, 4); }
        else { uint16_t bits = row[j] ? 0 : dtype == AMP_F16 ? 0xfc00 : 0xff80; memcpy((char *)out + 2 * j, &bits, 2); }
    }
}

/* Writes all rows to the device, one at a time where the host cannot reach it. */
static amp_result ampi_mask_write(amp_context *amp, const amp_mask *m, int64_t batch, int64_t queries, int64_t keys, amp_dtype dtype, void *data) {
    int64_t size = (int64_t)amp_dtype_size(dtype), b, i;
    amp_result result = AMP_OK;
    void *room;
    uint8_t *row, *out;
    AMPI_TRY(ampi_alloc(&amp->system, "amp_mask_get", &room, keys, 1 + (size_t)size));
    row = (uint8_t *)room;
    for (b = 0; b < batch && result == AMP_OK; b++)
        for (i = 0; i < queries && result == AMP_OK; i++) {
            void *target = (char *)data + (b * queries + i) * keys * size;
            ampi_mask_write_row(m, b, i, queries, keys, row);
            out = dtype == AMP_U8 ? row : row + keys;
            if (dtype != AMP_U8) ampi_mask_add_row(row, keys, dtype, out);
            result = amp->backend->copy(amp->dev, target, out, (size_t)(keys * size), AMP_COPY_TO_DEVICE, amp->desc.stream);
            if (result == AMP_OK && !amp->backend->host_visible) result = amp->backend->stream_sync(amp->dev, amp->desc.stream);
        }
    ampi_free(&amp->system, room, keys, 1 + (size_t)size);
    return result;
}

static void ampi_mask_remove(amp_context *amp, int64_t i) {
    ampi_mask_entry *e = &amp->masks[i];
    ampi_free_locked(amp, e->data);
    ampi_free(&amp->system, e->key, e->key_bytes, 1);
    amp->mask_info.entries--;
    amp->mask_info.bytes -= e->bytes;
    *e = amp->masks[--amp->n_masks];
}

static void ampi_mask_make_room(amp_context *amp, int64_t more) {
    while (amp->graphs == 0 && amp->desc.mask_limit > 0 && amp->mask_info.bytes + more > amp->desc.mask_limit) {
        int64_t oldest = -1, i;
        for (i = 0; i < amp->n_masks; i++)
            if (amp->masks[i].users == 0 && (oldest < 0 || amp->masks[i].last_use < amp->masks[oldest].last_use)) oldest = i;
        if (oldest < 0) return;
        ampi_mask_remove(amp, oldest);
        amp->mask_info.evictions++;
    }
}

/* A new entry for the key, which it takes over; batch is 1 where all sequences share a mask. */
static amp_result ampi_mask_add(amp_context *amp, const amp_mask *m, int64_t batch, int64_t queries, int64_t keys, amp_dtype dtype, ampi_mask_entry *e) {
    size_t bytes = 0;
    amp_result result;
    AMPI_TRY(ampi_may_wait(amp));
    AMPI_TRY(ampi_bytes("amp_mask_get", batch * queries, (size_t)keys * amp_dtype_size(dtype), &bytes));
    AMPI_TRY(ampi_grow(amp, "amp_mask_get", (void **)&amp->masks, amp->n_masks, &amp->mask_room, sizeof *amp->masks));
    ampi_mask_make_room(amp, (int64_t)bytes);
    AMPI_TRY(ampi_alloc_locked(amp, AMPI_PART_CACHE, &e->data, (int64_t)bytes));
    result = ampi_mask_write(amp, m, batch, queries, keys, dtype, e->data);
    if (result != AMP_OK) { ampi_free_locked(amp, e->data); return result; }
    e->bytes = (int64_t)bytes;
    e->kind = m->kind;
    amp->masks[amp->n_masks++] = *e;
    amp->mask_info.entries++;
    amp->mask_info.bytes += e->bytes;
    amp->mask_info.misses++;
    return AMP_OK;
}

static amp_result ampi_mask_find(amp_context *amp, const amp_mask *m, int64_t batch, int64_t queries, int64_t keys, amp_dtype dtype, ampi_mask_entry **out) {
    ampi_mask_entry e;
    amp_result result;
    void *key;
    int64_t i;
    memset(&e, 0, sizeof e);
    e.key_bytes = ampi_mask_key(m, batch, queries, keys, dtype, NULL);
    AMPI_TRY(ampi_alloc(&amp->system, "amp_mask_get", &key, e.key_bytes, 1));
    e.key = (uint8_t *)key;
    ampi_mask_key(m, batch, queries, keys, dtype, e.key);
    e.hash = ampi_mask_hash(e.key, e.key_bytes);
    for (i = 0; i < amp->n_masks; i++) {
        ampi_mask_entry *known = &amp->masks[i];
        if (known->hash != e.hash || known->key_bytes != e.key_bytes || memcmp(known->key, e.key, (size_t)e.key_bytes) != 0) continue;
        ampi_free(&amp->system, e.key, e.key_bytes, 1);
        amp->mask_info.hits++;
        *out = known;
        return AMP_OK;
    }
    result = ampi_mask_add(amp, m, ampi_mask_per_batch(m) ? batch : 1, queries, keys, dtype, &e);
    if (result != AMP_OK) ampi_free(&amp->system, e.key, e.key_bytes, 1);
    else *out = &amp->masks[amp->n_masks - 1];
    return result;
}

AMP_API amp_result amp_mask_get(amp_context *amp, const amp_mask *mask, int64_t batch, int64_t queries, int64_t keys,
                                amp_dtype dtype, amp_mask_view *out) {
    ampi_mask_entry *e = NULL;
    amp_result result;
    if (amp == NULL || mask == NULL || out == NULL) return ampi_fail(AMP_ERR_NULL, "amp_mask_get", "amp, mask or out is NULL");
    AMPI_TRY(ampi_mask_check(mask, batch, queries, keys, dtype));
    ampi_lock(amp);
    result = ampi_mask_find(amp, mask, batch, queries, keys, dtype, &e);
    if (result == AMP_OK) {
        e->users++;
        e->last_use = ++amp->clock;
        memset(out, 0, sizeof *out);
        out->tensor = amp_tensor4(e->data, dtype, ampi_mask_per_batch(mask) ? batch : 1, 1, queries, keys);
    }
    ampi_unlock(amp);
    if (result != AMP_OK || dtype != AMP_U8) return result;
    out->mask.kind = AMP_MASK_ARBITRARY;
    out->mask.allowed = (const uint8_t *)out->tensor.data;
    out->mask.allowed_batch_stride = out->tensor.shape[0] > 1 ? queries * keys : 0;
    return AMP_OK;
}

AMP_API void amp_mask_put(amp_context *amp, amp_mask_view *view) {
    int64_t i;
    if (amp == NULL || view == NULL || view->tensor.data == NULL) return;
    ampi_lock(amp);
    for (i = 0; i < amp->n_masks; i++)
        if (amp->masks[i].data == view->tensor.data) { amp->masks[i].users--; break; }
    ampi_mask_make_room(amp, 0);
    ampi_unlock(amp);
    memset(view, 0, sizeof *view);
}

AMP_API amp_result amp_mask_cache_info(const amp_context *amp, amp_cache_info *out) {
    if (amp == NULL || out == NULL) return ampi_fail(AMP_ERR_NULL, "amp_mask_cache_info", "amp or out is NULL");
    ampi_lock(amp);
    *out = amp->mask_info;
    out->limit = amp->desc.mask_limit;
    ampi_unlock(amp);
    return AMP_OK;
}

/* Removes what nobody holds; any kind if `any`. */
static void ampi_mask_remove_kind(amp_context *amp, amp_mask_kind kind, int any) {
    int64_t i;
    if (amp == NULL) return;
    ampi_lock(amp);
    for (i = amp->n_masks - 1; i >= 0; i--)
        if (amp->graphs == 0 && amp->masks[i].users == 0 && (any || amp->masks[i].kind == kind)) ampi_mask_remove(amp, i);
    ampi_unlock(amp);
}

AMP_API void amp_mask_cache_drop(amp_context *amp, amp_mask_kind kind) { ampi_mask_remove_kind(amp, kind, 0); }
AMP_API void amp_mask_cache_clear(amp_context *amp) { ampi_mask_remove_kind(amp, AMP_MASK_NONE, 1); }

/* ==== 8 >>autocast: implementation ================================================================== */

/* ---- Emptying the cast cache, of which more below */

/* A graph that lives may use the memory: then it stays, out of date. */
static void ampi_cache_remove(amp_context *amp, int64_t i) {
    amp->cache[i].version = UINT64_MAX;
    if (amp->graphs > 0) return;
    ampi_free_locked(amp, amp->cache[i].data);
    amp->cache_info.entries--;
    amp->cache_info.bytes -= amp->cache[i].bytes;
    amp->cache[i] = amp->cache[--amp->n_cache];
}

/* Frees the copies that nobody needs: those handed to the host stay while any region is open, all while a graph lives. */
static void ampi_cache_clear_idle(amp_context *amp) {
    int64_t i;
    int regions;
    ampi_lock(amp);
    regions = __atomic_load_n(&amp->regions, __ATOMIC_RELAXED);
    for (i = amp->n_cache - 1; amp->graphs == 0 && i >= 0; i--)
        if (amp->cache[i].users == 0 && (amp->cache[i].kind != AMPI_PACK_CAST || regions == 0)) ampi_cache_remove(amp, i);
    ampi_unlock(amp);
}

/* ---- Regions */

enum { AMPI_REGION_DEPTH = 32 };

/* recompute 1: opened by amp_recompute_begin; desc is then that of the region around it. */
typedef struct ampi_region { const amp_context *amp; amp_autocast_desc desc; int recompute; } ampi_region;

/* The stack of regions of this thread. */
static AMPI_THREAD_LOCAL ampi_region ampi_regions[AMPI_REGION_DEPTH];
static AMPI_THREAD_LOCAL int ampi_region_count;

/* The innermost entry of this context, or NULL; its settings. */
static const ampi_region *ampi_region_top(const amp_context *amp) {
    int i = ampi_region_count;
    while (--i >= 0)
        if (ampi_regions[i].amp == amp) return &ampi_regions[i];
    return NULL;
}
static const amp_autocast_desc *ampi_region_of(const amp_context *amp) {
    const ampi_region *top = ampi_region_top(amp);
    return top ? &top->desc : NULL;
}

static int ampi_is_recomputing(const amp_context *amp) {
    int i = ampi_region_count;
    while (--i >= 0)
        if (ampi_regions[i].amp == amp && ampi_regions[i].recompute) return 1;
    return 0;
}

static amp_result ampi_region_check_depth(const char *function) {
    if (ampi_region_count < AMPI_REGION_DEPTH) return AMP_OK;
    return ampi_fail(AMP_ERR_STATE, function, "%d regions are open on this thread, which is the limit; is an amp_autocast_end or amp_recompute_end missing", AMPI_REGION_DEPTH);
}

static void ampi_region_push(amp_context *amp, const amp_autocast_desc *desc, int recompute) {
    ampi_region *region = &ampi_regions[ampi_region_count++];
    region->amp = amp;
    region->desc = *desc;
    region->recompute = recompute;
    __atomic_add_fetch(&amp->regions, 1, __ATOMIC_RELAXED);
}

static void ampi_region_drop(void) {
    amp_context *amp = (amp_context *)(uintptr_t)ampi_regions[--ampi_region_count].amp;
    if (__atomic_sub_fetch(&amp->regions, 1, __ATOMIC_RELAXED) == 0 && amp->desc.memory_efficient) ampi_cache_clear_idle(amp);
}

static amp_result ampi_region_pop(const amp_context *amp, const char *function, int recompute) {
    const ampi_region *top;
    if (ampi_region_count == 0) return ampi_fail(AMP_ERR_STATE, function, "no region is open on this thread");
    top = &ampi_regions[ampi_region_count - 1];
    if (top->amp != amp) return ampi_fail(AMP_ERR_STATE, function, "the innermost region of this thread belongs to another context");
    if (top->recompute != recompute)
        return ampi_fail(AMP_ERR_STATE, function, "the innermost region was opened by %s; close that first", top->recompute ? "amp_recompute_begin" : "amp_autocast_begin");
    ampi_region_drop();
    return AMP_OK;
}

/* An island with the context's settings. */
static amp_autocast_desc ampi_outside(const amp_context *amp) {
    amp_autocast_desc d;
    memset(&d, 0, sizeof d);
    d.dtype = amp->desc.dtype;
    d.policy = amp->desc.policy;
    d.mode = amp->desc.mode;
    d.disable = 1;
    return d;
}

AMP_API amp_result amp_autocast_begin_v(amp_context *amp, const amp_autocast_desc *desc, uint64_t abi) {
    const amp_autocast_desc *outer;
    amp_autocast_desc d;
    amp_choice choice;
    if (amp == NULL) return ampi_fail(AMP_ERR_NULL, "amp_autocast_begin", "amp is NULL");
    AMPI_TRY(ampi_check_abi("amp_autocast_begin", abi, AMP_ABI(amp_autocast_desc)));
    AMPI_TRY(ampi_region_check_depth("amp_autocast_begin"));
    memset(&d, 0, sizeof d);
    if (desc != NULL) d = *desc;
    if ((int)d.policy < 0 || d.policy > AMP_POLICY_TORCH) return ampi_fail(AMP_ERR_RANGE, "amp_autocast_begin", ".policy = %d, must be 0 to 2", (int)d.policy);
    if ((int)d.mode < 0 || d.mode > AMP_MODE_INFERENCE) return ampi_fail(AMP_ERR_RANGE, "amp_autocast_begin", ".mode = %d, must be 0 to 2", (int)d.mode);
    outer = ampi_region_of(amp);
    if (d.policy == 0) d.policy = outer ? outer->policy : amp->desc.policy;
    if (d.mode == 0) d.mode = outer ? outer->mode : amp->desc.mode;
    if (amp->desc.disable_cache || (outer && outer->disable_cache)) d.disable_cache = 1;
    if (amp->desc.disable) d.disable = 1;
    if (d.dtype == AMP_DTYPE_DEFAULT) d.dtype = outer ? outer->dtype : amp->desc.dtype;
    else {
        AMPI_TRY(ampi_choose_here(amp, d.dtype, amp->desc.fallback, &choice));
        d.dtype = choice.dtype;
    }
    ampi_region_push(amp, &d, 0);
    return AMP_OK;
}

/* How many entries this thread has; what a callback of the host's then opens inherits nothing from the region around.
   And closing those beyond. */
AMPI_PRIVATE int ampi_regions_hide(amp_context *amp) {
    int depth = ampi_region_count;
    amp_autocast_desc outside = ampi_outside(amp);
    if (ampi_region_of(amp) != NULL && depth < AMPI_REGION_DEPTH) ampi_region_push(amp, &outside, 0);
    return depth;
}
AMPI_PRIVATE void ampi_regions_close(int depth) {
    while (ampi_region_count > depth) ampi_region_drop();
}

AMP_API amp_result amp_autocast_end(amp_context *amp) { return ampi_region_pop(amp, "amp_autocast_end", 0); }

AMP_API amp_result amp_recompute_begin(amp_context *amp) {
    amp_autocast_desc outside;
    const amp_autocast_desc *around;
    if (amp == NULL) return ampi_fail(AMP_ERR_NULL, "amp_recompute_begin", "amp is NULL");
    AMPI_TRY(ampi_region_check_depth("amp_recompute_begin"));
    outside = ampi_outside(amp);
    around = ampi_region_of(amp);
    ampi_region_push(amp, around ? around : &outside, 1);
    return AMP_OK;
}

AMP_API amp_result amp_recompute_end(amp_context *amp) { return ampi_region_pop(amp, "amp_recompute_end", 1); }

AMP_API int32_t amp_autocast_active(const amp_context *amp, amp_autocast_desc *out) {
    const amp_autocast_desc *d = amp ? ampi_region_of(amp) : NULL;
    if (d == NULL) return 0;
    if (out != NULL) *out = *d;
    return !d->disable && amp->desc.level != AMP_LEVEL_O0;
}

/* ---- Policies */

/* Rows: operators in the order of amp_operator.  Columns: FUSED and TORCH (PyTorch's CUDA lists). */
static const uint8_t ampi_policy_table[AMPI_BUILTIN_OPS][2] = {
    {AMP_CAST_FALLTHROUGH, AMP_CAST_FALLTHROUGH},   /* none */
    {AMP_CAST_LOWER, AMP_CAST_LOWER},               /* linear */
    {AMP_CAST_LOWER, AMP_CAST_LOWER},               /* matmul */
    {AMP_CAST_LOWER, AMP_CAST_LOWER},               /* gemm */
    {AMP_CAST_LOWER, AMP_CAST_LOWER},               /* attention: scaled_dot_product_attention */
    {AMP_CAST_FP32_STORE, AMP_CAST_FP32},           /* layernorm */
    {AMP_CAST_FP32_STORE, AMP_CAST_FP32},           /* rmsnorm */
    {AMP_CAST_FP32_STORE, AMP_CAST_FP32},           /* softmax */
    {AMP_CAST_FALLTHROUGH, AMP_CAST_FALLTHROUGH},   /* activation */
    {AMP_CAST_FALLTHROUGH, AMP_CAST_FALLTHROUGH},   /* swiglu */
    {AMP_CAST_FP32, AMP_CAST_FP32},                 /* cross_entropy: log_softmax and nll_loss */
    {AMP_CAST_FP32, AMP_CAST_FP32},                 /* mse */
    {AMP_CAST_FALLTHROUGH, AMP_CAST_FALLTHROUGH},   /* embedding */
    {AMP_CAST_FALLTHROUGH, AMP_CAST_FALLTHROUGH},   /* dropout */
    {AMP_CAST_FALLTHROUGH, AMP_CAST_FALLTHROUGH}    /* add */
};

static const char *const ampi_op_names[AMPI_BUILTIN_OPS] = {
    "none", "linear", "matmul", "gemm", "attention", "layernorm", "rmsnorm", "softmax", "activation", "swiglu",
    "cross_entropy", "mse", "embedding", "dropout", "add"
};

static const char *ampi_op_name(const amp_context *amp, int32_t op) {
    return op < AMPI_BUILTIN_OPS ? ampi_op_names[op] : amp->ops[op - AMP_OP_USER].name;
}

static int ampi_op_exists(const amp_context *amp, int32_t op) {
    return (op > AMP_OP_NONE && op < AMPI_BUILTIN_OPS) || (op >= AMP_OP_USER && op - AMP_OP_USER < amp->n_ops);
}

static amp_cast_policy ampi_policy_of(const amp_context *amp, int32_t op, amp_policy table, amp_rule *rule) {
    *rule = AMP_BY_REGION;
    if (op >= AMP_OP_USER) return amp->ops[op - AMP_OP_USER].policy;
    if (amp->override_policy[op] != AMP_CAST_DEFAULT) { *rule = AMP_BY_OPERATOR; return amp->override_policy[op]; }
    return (amp_cast_policy)ampi_policy_table[op][table == AMP_POLICY_TORCH];
}

/* The last override whose pattern matches, AMP_DTYPE_DEFAULT without one. */
static amp_dtype ampi_layer_dtype(const amp_context *amp, const char *layer) {
    int64_t i = amp->n_layers;
    if (layer == NULL) return AMP_DTYPE_DEFAULT;
    while (--i >= 0)
        if (ampi_match(amp->layers[i].pattern, layer)) return amp->layers[i].dtype;
    return AMP_DTYPE_DEFAULT;
}

/* Eligible for casting: floating, and not fp64. */
static int ampi_eligible(amp_dtype dtype) {
    return dtype == AMP_F32 || dtype == AMP_F16 || dtype == AMP_BF16 || dtype == AMP_E4M3 || dtype == AMP_E5M2;
}

/* The dtype that holds both without loss of range or precision. */
static amp_dtype ampi_wider(amp_dtype a, amp_dtype b) {
    if (a == AMP_DTYPE_DEFAULT || a == b) return b;
    return b == AMP_DTYPE_DEFAULT ? a : AMP_F32;
}

/* The widest of the inputs that a region may cast; AMP_DTYPE_DEFAULT when there is none. */
static amp_dtype ampi_widest(const amp_dtype *inputs, int32_t n) {
    amp_dtype widest = AMP_DTYPE_DEFAULT;
    int32_t i;
    for (i = 0; i < n; i++)
        if (ampi_eligible(inputs[i])) widest = ampi_wider(widest, inputs[i]);
    return widest;
}

/* What the inputs promote to without a region: fp64 counts here. */
static amp_dtype ampi_promoted(const amp_dtype *inputs, int32_t n) {
    amp_dtype widest = ampi_widest(inputs, n);
    int32_t i;
    for (i = 0; i < n; i++)
        if (inputs[i] == AMP_F64) return AMP_F64;
    return widest == AMP_DTYPE_DEFAULT ? AMP_F32 : widest;
}

static amp_dtype ampi_stored(amp_dtype compute) { return compute == AMP_TF32 ? AMP_F32 : compute; }

/* Matrix products: what a region's dtype is for, and TF32. */
static int ampi_is_product(int32_t op) { return op >= AMP_OP_LINEAR && op <= AMP_OP_ATTENTION; }

/* Applies a policy to the widest input; dtype is the region's or the layer's. */
static void ampi_apply_policy(amp_cast_policy policy, amp_dtype dtype, amp_dtype widest, amp_plan *out) {
    switch (policy) {
        case AMP_CAST_LOWER: out->compute = dtype; out->result = ampi_stored(dtype); break;
        case AMP_CAST_FP32: out->compute = out->result = AMP_F32; break;
        case AMP_CAST_FP32_STORE: out->compute = AMP_F32; out->result = widest; break;
        case AMP_CAST_PROMOTE:
            out->result = ampi_wider(widest, ampi_stored(dtype));
            out->compute = out->result == AMP_F32 && dtype == AMP_TF32 ? AMP_TF32 : out->result;
            break;
        default: break;
    }
}

/* The decision in a region that is no island. */
static amp_result ampi_decide_in(const amp_context *amp, const amp_autocast_desc *region, int32_t op, const char *layer,
                                 const amp_dtype *inputs, int32_t n, amp_plan *out) {
    amp_cast_policy policy = ampi_policy_of(amp, op, region->policy, &out->rule);
    amp_dtype widest = ampi_widest(inputs, n), dtype = AMP_DTYPE_DEFAULT;
    if (policy == AMP_CAST_BANNED)
        return ampi_fail(AMP_ERR_UNSUPPORTED, "amp_autocast_decide", "operator %s is banned in autocast regions; call it in an island (.disable = 1)", ampi_op_name(amp, op));
    if (policy == AMP_CAST_FALLTHROUGH || out->result == AMP_F64 || widest == AMP_DTYPE_DEFAULT) return AMP_OK;
    if (policy == AMP_CAST_LOWER || policy == AMP_CAST_PROMOTE) dtype = ampi_layer_dtype(amp, layer);
    if (dtype != AMP_DTYPE_DEFAULT) out->rule = AMP_BY_LAYER;
    else dtype = region->dtype;
    if (policy == AMP_CAST_FP32 && amp->desc.fallback != AMP_DTYPE_DEFAULT && ampi_is_product(op)) {
        policy = AMP_CAST_LOWER;
        dtype = amp->desc.fallback;
    }
    ampi_apply_policy(policy, dtype, widest, out);
    return AMP_OK;
}

/* Takes no lock: operators and overrides are set up before threads use the context, as the manual says. */
static amp_result ampi_decide(const amp_context *amp, int32_t op, const char *layer, const amp_dtype *inputs, int32_t n, amp_plan *out) {
    const ampi_region *top;
    const amp_autocast_desc *region;
    if (amp == NULL || out == NULL || (inputs == NULL && n > 0)) return ampi_fail(AMP_ERR_NULL, "amp_autocast_decide", "amp, inputs or out is NULL");
    if (!ampi_op_exists(amp, op)) return ampi_fail(AMP_ERR_NAME, "amp_autocast_decide", "there is no operator %d", op);
    top = ampi_region_top(amp);
    if (top != NULL && top->recompute)
        return ampi_fail(AMP_ERR_STATE, "amp_autocast_decide", "%s keeps no record of its forward; while recomputing, open the region it ran in again around it", ampi_op_name(amp, op));
    memset(out, 0, sizeof *out);
    region = top ? &top->desc : NULL;
    out->mode = region ? region->mode : amp->desc.mode;
    out->compute = out->result = ampi_promoted(inputs, n);
    out->rule = AMP_BY_STORAGE;
    if (region != NULL && !region->disable) {
        if (amp->desc.level == AMP_LEVEL_O0) out->rule = AMP_BY_LEVEL;
        else AMPI_TRY(ampi_decide_in(amp, region, op, layer, inputs, n, out));
    }
    if (out->compute == AMP_F32 && amp->desc.allow_tf32 && ampi_is_product(op)) out->compute = AMP_TF32;
    return AMP_OK;
}

/* ---- The log of decisions */

/* Whether an operator found its weight in the cast cache. */
typedef enum ampi_cache_use { AMPI_CACHE_UNUSED, AMPI_CACHE_MISS, AMPI_CACHE_HIT } ampi_cache_use;

/* 1: this text is new, and is now remembered by its hash; 2: so it is, and it is the last one. */
static int ampi_told_add(amp_context *amp, const char *text) {
    uint64_t hash = ampi_text_hash(text) | 1, i = hash >> 8;
    void *room;
    int added = 0;
    ampi_lock(amp);
    if (amp->told == NULL && ampi_alloc(&amp->system, "debug log", &room, AMPI_TOLD_ROOM, sizeof *amp->told) == AMP_OK)
        amp->told = (uint64_t *)room;
    if (amp->told != NULL && amp->n_told < AMPI_TOLD) {
        while (amp->told[i %= AMPI_TOLD_ROOM] != 0 && amp->told[i] != hash) i++;
        if (amp->told[i] == 0) {
            amp->told[i] = hash;
            added = ++amp->n_told < AMPI_TOLD ? 1 : 2;
        }
    }
    ampi_unlock(amp);
    return added;
}

/* The line of AMP_LOG_DECISION. */
static void ampi_tell(const amp_context *amp, int32_t op, const char *layer, const amp_dtype *inputs, int32_t n,
                      const amp_plan *plan, ampi_cache_use use) {
    static const char *const rules[] = {"", "storage", "region", "operator", "layer", "level"};
    static const char *const uses[] = {"", "; cast cache: miss", "; cast cache: hit"};
    char dtypes[96], text[400];
    size_t used = 0;
    int32_t i;
    int added;
    if (amp->desc.logger.level < AMP_LOG_DEBUG) return;
    dtypes[0] = 0;
    for (i = 0; i < n && used < sizeof dtypes - 16; i++)
        if (inputs[i] != AMP_DTYPE_DEFAULT)
            used += (size_t)snprintf(dtypes + used, sizeof dtypes - used, "%s%s", used ? ", " : "", amp_dtype_name(inputs[i]));
    snprintf(text, sizeof text, "%s%s%.200s (%s): computes in %s, returns %s, by %s%s", ampi_op_name(amp, op), layer ? " " : "",
             layer ? layer : "", dtypes, amp_dtype_name(plan->compute), amp_dtype_name(plan->result), rules[plan->rule], uses[use]);
    added = ampi_told_add((amp_context *)(uintptr_t)amp, text);
    if (added) ampi_log_text(amp, AMP_LOG_DEBUG, AMP_LOG_DECISION, text);
    if (added == 2) ampi_log_text(amp, AMP_LOG_DEBUG, AMP_LOG_DECISION, "further decisions are not told");
}

AMP_API amp_result amp_autocast_decide(const amp_context *amp, int32_t op, const char *layer,
                                       const amp_dtype *inputs, int32_t n, amp_plan *out) {
    AMPI_TRY(ampi_decide(amp, op, layer, inputs, n, out));
    ampi_tell(amp, op, layer, inputs, n, out, AMPI_CACHE_UNUSED);
    return AMP_OK;
}

static amp_result ampi_decide2(const amp_context *amp, int32_t op, const char *layer, amp_dtype a, amp_dtype b, amp_plan *plan) {
    amp_dtype inputs[2];
    inputs[0] = a;
    inputs[1] = b;
    return amp_autocast_decide(amp, op, layer, inputs, 2, plan);
}

AMP_API amp_dtype amp_autocast_compute(const amp_context *amp, int32_t op, const char *layer, amp_dtype a, amp_dtype b) {
    amp_plan plan;
    return ampi_decide2(amp, op, layer, a, b, &plan) == AMP_OK ? plan.compute : AMP_DTYPE_DEFAULT;
}

AMP_API amp_dtype amp_autocast_result(const amp_context *amp, int32_t op, const char *layer, amp_dtype a, amp_dtype b) {
    amp_plan plan;
    return ampi_decide2(amp, op, layer, a, b, &plan) == AMP_OK ? plan.result : AMP_DTYPE_DEFAULT;
}

static int ampi_is_cast_policy(amp_cast_policy policy) { return (int)policy >= 0 && policy <= AMP_CAST_BANNED; }

AMP_API amp_result amp_operator_register(amp_context *amp, const char *name, amp_cast_policy policy, int32_t *op) {
    amp_result result;
    int64_t i;
    if (amp == NULL || name == NULL || op == NULL) return ampi_fail(AMP_ERR_NULL, "amp_operator_register", "amp, name or op is NULL");
    if (!ampi_is_cast_policy(policy) || policy == AMP_CAST_DEFAULT) return ampi_fail(AMP_ERR_RANGE, "amp_operator_register", "policy = %d, must be 1 to 6", (int)policy);
    if (strlen(name) >= sizeof amp->ops->name) return ampi_fail(AMP_ERR_RANGE, "amp_operator_register", "name has %zu bytes, at most 63", strlen(name));
    for (i = 0; i < AMPI_BUILTIN_OPS + amp->n_ops; i++)
        if (strcmp(i < AMPI_BUILTIN_OPS ? ampi_op_names[i] : amp->ops[i - AMPI_BUILTIN_OPS].name, name) == 0)
            return ampi_fail(AMP_ERR_NAME, "amp_operator_register", "operator %s exists already", name);
    ampi_lock(amp);
    result = ampi_grow(amp, "amp_operator_register", (void **)&amp->ops, amp->n_ops, &amp->op_room, sizeof *amp->ops);
    if (result == AMP_OK) {
        snprintf(amp->ops[amp->n_ops].name, sizeof amp->ops->name, "%s", name);
        amp->ops[amp->n_ops].policy = policy;
        *op = AMP_OP_USER + (int32_t)amp->n_ops++;
    }
    ampi_unlock(amp);
    return result;
}

AMP_API amp_result amp_operator_override(amp_context *amp, int32_t op, amp_cast_policy policy) {
    if (amp == NULL) return ampi_fail(AMP_ERR_NULL, "amp_operator_override", "amp is NULL");
    if (op <= AMP_OP_NONE || op >= AMPI_BUILTIN_OPS) return ampi_fail(AMP_ERR_NAME, "amp_operator_override", "op = %d is no built-in operator", op);
    if (!ampi_is_cast_policy(policy)) return ampi_fail(AMP_ERR_RANGE, "amp_operator_override", "policy = %d, must be 0 (default) to 6", (int)policy);
    amp->override_policy[op] = policy;
    ampi_settings_changed(amp);
    return AMP_OK;
}

AMP_API amp_result amp_layer_override(amp_context *amp, const char *pattern, amp_dtype dtype) {
    amp_choice choice;
    amp_result result;
    int64_t i, kept = 0;
    if (amp == NULL || pattern == NULL) return ampi_fail(AMP_ERR_NULL, "amp_layer_override", "amp or pattern is NULL");
    if (strlen(pattern) >= sizeof amp->layers->pattern) return ampi_fail(AMP_ERR_RANGE, "amp_layer_override", "pattern has %zu bytes, at most 127", strlen(pattern));
    memset(&choice, 0, sizeof choice);
    if (dtype != AMP_DTYPE_DEFAULT) AMPI_TRY(ampi_choose_here(amp, dtype, amp->desc.fallback, &choice));
    ampi_lock(amp);
    for (i = 0; i < amp->n_layers; i++)
        if (strcmp(amp->layers[i].pattern, pattern) != 0) amp->layers[kept++] = amp->layers[i];
    amp->n_layers = kept;
    result = dtype == AMP_DTYPE_DEFAULT ? AMP_OK : ampi_grow(amp, "amp_layer_override", (void **)&amp->layers, amp->n_layers, &amp->layer_room, sizeof *amp->layers);
    if (result == AMP_OK && dtype != AMP_DTYPE_DEFAULT) {
        snprintf(amp->layers[amp->n_layers].pattern, sizeof amp->layers->pattern, "%s", pattern);
        amp->layers[amp->n_layers++].dtype = choice.dtype;
    }
    ampi_settings_changed(amp);
    ampi_unlock(amp);
    return result;
}

/* ---- The cast cache: copies of registered weights by (id, dtype, kind), made again when the version moved.
   Everything here runs with the context's lock held, the making included, so that a copy is made once. */

static void ampi_cache_drop(amp_context *amp, uint64_t id) {
    int64_t i = amp->n_cache;
    while (--i >= 0)
        if (amp->cache[i].id == id) ampi_cache_remove(amp, i);
}

/* Frees the least recently used copies nobody is reading until `more` bytes fit under the limit.  Those handed to
   the host stay while any region is open. */
static void ampi_cache_make_room(amp_context *amp, int64_t more) {
    int regions = __atomic_load_n(&amp->regions, __ATOMIC_RELAXED);
    while (amp->graphs == 0 && amp->desc.cache_limit > 0 && amp->cache_info.bytes + more > amp->desc.cache_limit) {
        int64_t oldest = -1, i;
        for (i = 0; i < amp->n_cache; i++) {
            const ampi_cache_entry *e = &amp->cache[i];
            if (e->users == 0 && (e->kind != AMPI_PACK_CAST || regions == 0) && (oldest < 0 || e->last_use < amp->cache[oldest].last_use)) oldest = i;
        }
        if (oldest < 0) return;
        ampi_cache_remove(amp, oldest);
        amp->cache_info.evictions++;
    }
}

static void ampi_pack_args(const amp_param *p, amp_dtype dtype, ampi_pack_kind kind, int64_t *new_inf, amp_k_pack *out) {
    memset(out, 0, sizeof *out);
    out->b = p->weight.data;
    out->b_dtype = p->weight.dtype;
    out->compute = dtype;
    out->trans_b = kind == AMPI_PACK_FORWARD;
    out->k = p->weight.shape[kind == AMPI_PACK_FORWARD ? 1 : 0];
    out->n = p->weight.shape[kind == AMPI_PACK_FORWARD ? 0 : 1];
    out->ldb = p->weight.shape[1];
    out->new_inf = new_inf;
}

/* Fills the entry's memory from the weight. */
static amp_result ampi_cache_fill(amp_context *amp, const amp_param *p, ampi_cache_entry *e) {
    int64_t *new_inf = amp->backend->host_visible ? &amp->cache_info.new_inf : &amp->cells->new_inf;
    amp_k_pack pack;
    amp_k_cast cast;
    if (e->kind != AMPI_PACK_CAST) {
        ampi_pack_args(p, e->dtype, e->kind, new_inf, &pack);
        return amp->backend->gemm_pack(amp->dev, &pack, e->data, amp->desc.stream);
    }
    memset(&cast, 0, sizeof cast);
    cast.dst = e->data;
    cast.dst_dtype = e->dtype;
    cast.src = p->weight.data;
    cast.src_dtype = p->weight.dtype;
    cast.n = amp_tensor_count(&p->weight);
    cast.new_inf = new_inf;
    return amp->backend->cast(amp->dev, &cast, amp->desc.stream);
}

static int64_t ampi_cache_bytes(amp_context *amp, const amp_param *p, amp_dtype dtype, ampi_pack_kind kind, int repeated) {
    amp_k_pack pack;
    if (kind == AMPI_PACK_CAST) return amp_tensor_count(&p->weight) * (int64_t)amp_dtype_size(dtype);
    ampi_pack_args(p, dtype, kind, NULL, &pack);
    pack.repeated = repeated;
    return (int64_t)amp->backend->gemm_pack_size(amp->dev, &pack);
}

static amp_result ampi_cache_add(amp_context *amp, const amp_param *p, amp_dtype dtype, ampi_pack_kind kind, int64_t bytes, int64_t *index) {
    ampi_cache_entry e;
    memset(&e, 0, sizeof e);
    e.id = p->id;
    e.dtype = dtype;
    e.kind = kind;
    e.bytes = bytes;
    AMPI_TRY(ampi_grow(amp, "cast cache", (void **)&amp->cache, amp->n_cache, &amp->cache_room, sizeof *amp->cache));
    ampi_cache_make_room(amp, bytes);
    AMPI_TRY(ampi_alloc_locked(amp, AMPI_PART_CACHE, &e.data, bytes));
    *index = amp->n_cache;
    amp->cache[amp->n_cache++] = e;
    amp->cache_info.entries++;
    amp->cache_info.bytes += bytes;
    return AMP_OK;
}

/* refresh 1: the copy is made again, whatever its version.  repeated: as in amp_k_pack. */
static amp_result ampi_cache_get_locked(amp_context *amp, const amp_param *p, amp_dtype dtype, ampi_pack_kind kind, int repeated, int refresh,
                                        const void **data, ampi_cache_use *use) {
    ampi_cache_entry *e;
    int64_t i, bytes;
    int fresh;
    for (i = 0; i < amp->n_cache; i++)
        if (amp->cache[i].id == p->id && amp->cache[i].dtype == dtype && amp->cache[i].kind == kind) break;
    fresh = i < amp->n_cache && amp->cache[i].version == p->version && !refresh;
    *use = fresh ? AMPI_CACHE_HIT : AMPI_CACHE_MISS;
    bytes = fresh ? amp->cache[i].bytes : ampi_cache_bytes(amp, p, dtype, kind, repeated);
    if (bytes == 0) return AMP_OK;
    if (i == amp->n_cache) AMPI_TRY(ampi_cache_add(amp, p, dtype, kind, bytes, &i));
    e = &amp->cache[i];
    if (fresh) amp->cache_info.hits++;
    else {
        amp_result result = ampi_cache_fill(amp, p, e);
        if (result != AMP_OK) { ampi_cache_remove(amp, i); return result; }
        e->version = p->version;
        amp->cache_info.misses++;
    }
    e->last_use = ++amp->clock;
    e->users++;
    *data = e->data;
    return AMP_OK;
}

static int ampi_cache_is_off(const amp_context *amp) {
    const amp_autocast_desc *region = ampi_region_of(amp);
    return amp->desc.disable_cache || (region && region->disable_cache);
}

/* A cached copy, or *data NULL when there is none to be had: the parameter is not registered, the cache is off,
   or the kernels have no use for one.  Recomputing is no repeated use: it is the last one, and there to save memory.
   ampi_cache_put ends its use. */
static amp_result ampi_cache_get(amp_context *amp, amp_param *p, amp_dtype dtype, ampi_pack_kind kind, const void **data, ampi_cache_use *use) {
    uint64_t *used = &p->used[kind == AMPI_PACK_BACKWARD], now = p->version + 1;
    amp_result result;
    *data = NULL;
    if (p->id == 0 || ampi_cache_is_off(amp)) return AMP_OK;
    ampi_lock(amp);
    result = ampi_cache_get_locked(amp, p, dtype, kind, *used == now && !ampi_is_recomputing(amp), 0, data, use);
    *used = now;
    ampi_unlock(amp);
    return result;
}

static void ampi_cache_put(amp_context *amp, const void *data) {
    int64_t i;
    if (data == NULL) return;
    ampi_lock(amp);
    for (i = 0; i < amp->n_cache; i++)
        if (amp->cache[i].data == data) { amp->cache[i].users--; break; }
    ampi_unlock(amp);
}

AMP_API amp_result amp_autocast_cast(amp_context *amp, amp_param *param, amp_dtype dtype, amp_tensor *out) {
    const void *data = NULL;
    ampi_cache_use use;
    amp_result result;
    if (amp == NULL || param == NULL || out == NULL) return ampi_fail(AMP_ERR_NULL, "amp_autocast_cast", "amp, param or out is NULL");
    if (!ampi_is_storage(dtype)) return ampi_fail(AMP_ERR_DTYPE, "amp_autocast_cast", "dtype %s, must be fp32, fp16 or bf16", amp_dtype_name(dtype));
    if (dtype == param->weight.dtype) { *out = param->weight; return AMP_OK; }
    if (param->id == 0) return ampi_fail(AMP_ERR_STATE, "amp_autocast_cast", "%s is not registered; call amp_param_register first", param->name ? param->name : "the parameter");
    ampi_lock(amp);
    result = ampi_cache_get_locked(amp, param, dtype, AMPI_PACK_CAST, 1, ampi_cache_is_off(amp), &data, &use);
    ampi_unlock(amp);
    if (result != AMP_OK) return result;
    ampi_cache_put(amp, data);
    *out = param->weight;
    memcpy(&out->data, &data, sizeof out->data);
    out->dtype = dtype;
    return AMP_OK;
}

AMP_API amp_result amp_cast_cache_info(const amp_context *amp, amp_cache_info *out) {
    if (amp == NULL || out == NULL) return ampi_fail(AMP_ERR_NULL, "amp_cast_cache_info", "amp or out is NULL");
    ampi_lock(amp);
    *out = amp->cache_info;
    out->limit = amp->desc.cache_limit;
    ampi_unlock(amp);
    if (amp->backend->host_visible) return AMP_OK;
    AMPI_TRY(ampi_may_wait(amp));
    AMPI_TRY(amp->backend->copy(amp->dev, &out->new_inf, &amp->cells->new_inf, sizeof out->new_inf, AMP_COPY_TO_HOST, amp->desc.stream));
    return amp->backend->stream_sync(amp->dev, amp->desc.stream);
}

AMP_API void amp_cast_cache_clear(amp_context *amp) {
    int64_t i;
    if (amp == NULL) return;
    ampi_lock(amp);
    for (i = amp->n_cache - 1; i >= 0; i--)
        if (amp->cache[i].users == 0) ampi_cache_remove(amp, i);
    ampi_unlock(amp);
}

/* Of section 6; here, because it empties what this section keeps. */
AMP_API amp_result amp_cleanup(amp_context *amp, int64_t *freed) {
    amp_memory_info before, after;
    if (freed != NULL) *freed = 0;
    if (amp == NULL) return ampi_fail(AMP_ERR_NULL, "amp_cleanup", "amp is NULL");
    AMPI_TRY(ampi_may_wait(amp));
    AMPI_TRY(amp->backend->stream_sync(amp->dev, amp->desc.stream));
    if (freed != NULL) AMPI_TRY(amp_memory(amp, &before));
    ampi_cache_clear_idle(amp);
    amp_mask_cache_clear(amp);
    if (amp->backend->trim != NULL) AMPI_TRY(amp->backend->trim(amp->dev));
    if (freed == NULL) return AMP_OK;
    AMPI_TRY(amp_memory(amp, &after));
    *freed = before.reserved - after.reserved;
    return AMP_OK;
}

/* ==== 9 >>operators: implementation =================================================================
   Each function checks its op struct, asks section 8 for the plan, translates to kernel arguments and
   calls the backend.                                                                                   */

/* The first lines of every operator. */
static amp_result ampi_op_begin(const char *function, const amp_context *amp, const void *op, uint64_t abi, uint64_t ours) {
    if (amp == NULL || op == NULL) return ampi_fail(AMP_ERR_NULL, function, "amp or op is NULL");
    return ampi_check_abi(function, abi, ours);
}

/* What backward and a forward that runs again obey. */
static amp_result ampi_check_plan(const char *function, const amp_plan *plan) {
    if (plan->compute == AMP_DTYPE_DEFAULT) return ampi_fail(AMP_ERR_STATE, function, "the forward call of this op struct has not run");
    if (plan->mode == AMP_MODE_INFERENCE) return ampi_fail(AMP_ERR_STATE, function, "its forward ran in inference mode, which keeps nothing for a backward");
    return AMP_OK;
}

/* Versions only grow, so their sum moves when one of them does. */
static uint64_t ampi_versions(const amp_param *a, const amp_param *b) { return (a ? a->version : 0) + (b ? b->version : 0); }

/* The plan of a forward: decided now, or when recomputing the recorded one.  amp_linear tells the log of it itself, with what
   the cast cache had. */
static amp_result ampi_plan_forward(const amp_context *amp, const char *function, int32_t op, const char *layer, amp_dtype a, amp_dtype b,
                                    uint64_t version, const amp_plan *recorded, amp_plan *plan) {
    if (!ampi_is_recomputing(amp)) {
        amp_dtype inputs[2];
        inputs[0] = a; inputs[1] = b;
        AMPI_TRY(ampi_decide(amp, op, layer, inputs, 2, plan));
        if (op != AMP_OP_LINEAR) ampi_tell(amp, op, layer, inputs, 2, plan, AMPI_CACHE_UNUSED);
        plan->version = version;
        return AMP_OK;
    }
    AMPI_TRY(ampi_check_plan(function, recorded));
    if (recorded->version != version)
        return ampi_fail(AMP_ERR_STATE, function, "a parameter of %s has changed since its forward; recompute before the optimizer steps", layer ? layer : ampi_op_name(amp, op));
    *plan = *recorded;
    return AMP_OK;
}

/* A gradient or input that must have the rows of `like`, if it is there at all. */
static amp_result ampi_rows_like(const char *function, const char *field, const amp_tensor *t, const char *other, const amp_mat *like, amp_mat *out) {
    AMPI_TRY(ampi_rows(function, field, t, out));
    return ampi_check_same_rows(function, field, out, other, like);
}

static amp_result ampi_optional_rows(const char *function, const char *field, const amp_tensor *t, const char *other, const amp_mat *like, amp_mat *out) {
    memset(out, 0, sizeof *out);
    return t->data == NULL ? AMP_OK : ampi_rows_like(function, field, t, other, like, out);
}

/* A parameter of this exact shape; cols -1 for a vector. */
static amp_result ampi_check_weight(const char *function, const char *field, const amp_param *p, int64_t rows, int64_t cols) {
    const int64_t *have = p->weight.shape;
    char shape[64], other[24] = "";
    AMPI_TRY(ampi_check_tensor(function, field, &p->weight));
    if (!ampi_is_contiguous(&p->weight)) return ampi_fail(AMP_ERR_SHAPE, function, ".%s is not contiguous", field);
    if (p->weight.ndim == (cols < 0 ? 1 : 2) && have[0] == rows && (cols < 0 || have[1] == cols)) return AMP_OK;
    if (cols >= 0) snprintf(other, sizeof other, ", %lld", (long long)cols);
    return ampi_fail(AMP_ERR_SHAPE, function, ".%s is %s, must be [%lld%s]", field, ampi_shape_text(&p->weight, shape, sizeof shape),
                     (long long)rows, other);
}

static int ampi_wants_grad(const amp_param *p) { return p != NULL && p->grad.data != NULL; }
static const char *ampi_layer_name(const char *layer, const amp_param *p) { return layer ? layer : p ? p->name : NULL; }

/* What a kernel found out of range: read back at once where the host can, otherwise at the next wait. */
static int32_t *ampi_bad_row(amp_context *amp, int32_t *here) { return amp->backend->host_visible ? here : &amp->cells->bad_row; }

/* ---- Linear */

static amp_result ampi_linear_check_act(const char *function, const char *field, amp_activation_kind act) {
    if (act == AMP_ACT_NONE || act == AMP_ACT_GELU || act == AMP_ACT_GELU_ERF || act == AMP_ACT_RELU) return AMP_OK;
    return ampi_fail(AMP_ERR_RANGE, function, ".%s = %d, must be NONE, GELU, GELU_ERF or RELU", field, (int)act);
}

static amp_result ampi_linear_rows(const char *function, const amp_linear_op *op, amp_mat *x, amp_mat *y) {
    if (op->weight == NULL) return ampi_fail(AMP_ERR_NULL, function, ".weight is NULL");
    AMPI_TRY(ampi_rows(function, "x", &op->x, x));
    AMPI_TRY(ampi_rows(function, "y", &op->y, y));
    AMPI_TRY(ampi_check_weight(function, "weight", op->weight, y->cols, x->cols));
    if (op->bias) AMPI_TRY(ampi_check_weight(function, "bias", op->bias, y->cols, -1));
    if (x->rows != y->rows)
        return ampi_fail(AMP_ERR_SHAPE, function, ".x has %lld rows, .y has %lld", (long long)x->rows, (long long)y->rows);
    AMPI_TRY(ampi_linear_check_act(function, "act", op->act));
    return ampi_linear_check_act(function, "x_act", op->x_act);
}

/* The weight as the right operand: packed, where that is of use, or cast once until it changes.  ampi_cache_put(*held)
   ends its use. */
static amp_result ampi_linear_weight(amp_context *amp, amp_param *w, ampi_pack_kind kind, amp_k_gemm *g, const void **held, ampi_cache_use *use) {
    amp_k_pack pack;
    *held = NULL;
    *use = AMPI_CACHE_UNUSED;
    g->b = w->weight.data;
    g->b_dtype = w->weight.dtype;
    if (g->compute == AMP_F32) return AMP_OK;
    ampi_pack_args(w, g->compute, kind, NULL, &pack);
    pack.repeated = 1;
    if (amp->backend->gemm_pack_size(amp->dev, &pack) > 0) {
        AMPI_TRY(ampi_cache_get(amp, w, g->compute, kind, held, use));
        g->packed_b = *held;
    } else if (g->compute != AMP_TF32 && g->compute != g->b_dtype) {
        AMPI_TRY(ampi_cache_get(amp, w, g->compute, AMPI_PACK_CAST, held, use));
        if (*held != NULL) { g->b = *held; g->b_dtype = g->compute; }
    }
    return AMP_OK;
}

AMP_API amp_result amp_linear_v(amp_context *amp, amp_linear_op *op, uint64_t abi) {
    const char *f = "amp_linear";
    amp_mat x, y, pre;
    amp_k_gemm g;
    amp_plan plan;
    amp_dtype inputs[2];
    ampi_cache_use use;
    amp_result result;
    const void *held;
    AMPI_TRY(ampi_op_begin(f, amp, op, abi, AMP_ABI(amp_linear_op)));
    AMPI_TRY(ampi_linear_rows(f, op, &x, &y));
    AMPI_TRY(ampi_optional_rows(f, "pre", &op->pre, "y", &y, &pre));
    AMPI_TRY(ampi_plan_forward(amp, f, AMP_OP_LINEAR, ampi_layer_name(op->layer, op->weight), x.dtype, op->weight->weight.dtype,
                               ampi_versions(op->weight, op->bias), &op->plan, &plan));
    memset(&g, 0, sizeof g);
    g.m = y.rows; g.n = y.cols; g.k = x.cols; g.batch = 1;
    g.a = x.data; g.a_dtype = x.dtype; g.lda = x.ld;
    g.ldb = x.cols; g.trans_b = 1;
    g.c = y.data; g.c_dtype = y.dtype; g.ldc = y.ld;
    g.alpha = 1; g.compute = plan.compute; g.act = op->act;
    if (op->bias) { g.bias = op->bias->weight.data; g.bias_dtype = op->bias->weight.dtype; }
    if (pre.data) { g.pre = pre.data; g.pre_dtype = pre.dtype; g.ld_pre = pre.ld; }
    AMPI_TRY(ampi_linear_weight(amp, op->weight, AMPI_PACK_FORWARD, &g, &held, &use));
    inputs[0] = x.dtype; inputs[1] = op->weight->weight.dtype;
    ampi_tell(amp, AMP_OP_LINEAR, ampi_layer_name(op->layer, op->weight), inputs, 2, &plan, use);
    result = amp->backend->gemm(amp->dev, &g, amp->desc.stream);
    ampi_cache_put(amp, held);
    if (result == AMP_OK) op->plan = plan;
    return result;
}

/* d, the gradient after an activation, becomes the gradient before it. */
static amp_result ampi_linear_activation_backward(amp_context *amp, const char *f, amp_activation_kind act, const amp_tensor *in,
                                                  const char *in_name, const amp_tensor *d, const char *d_name) {
    amp_k_activation a;
    if (!ampi_is_contiguous(in) || !ampi_is_contiguous(d))
        return ampi_fail(AMP_ERR_SHAPE, f, ".%s and .%s must be contiguous with an activation", d_name, in_name);
    memset(&a, 0, sizeof a);
    a.act = act;
    a.n = amp_tensor_count(d);
    a.x = in->data; a.x_dtype = in->dtype;
    a.dy = d->data; a.y_dtype = d->dtype;
    a.dx = d->data;
    return amp->backend->activation_backward(amp->dev, &a, amp->desc.stream);
}

/* What an activation's backward reads: what went into it; RELU does with what came out, because relu(x) > 0 where x > 0. */
static amp_result ampi_linear_kept(const char *f, amp_activation_kind act, const amp_tensor *pre, const char *name, const amp_tensor *y,
                                   const amp_tensor *d, const char *d_name, const amp_tensor **in) {
    *in = act == AMP_ACT_RELU && pre->data == NULL ? y : pre;
    if ((*in)->data == NULL) return ampi_fail(AMP_ERR_NULL, f, ".%s has no data; backward through GELU needs what went into it", name);
    if ((*in)->dtype == d->dtype) return AMP_OK;
    return ampi_fail(AMP_ERR_DTYPE, f, ".%s is %s, must have the dtype of .%s (%s)", d_name, amp_dtype_name(d->dtype), name, amp_dtype_name((*in)->dtype));
}

/* Whether products take sums and activations along: on a device that saves passes over memory.  The CPU is as fast
   without, and keeps its bits. */
static int ampi_linear_fuses(const amp_context *amp) { return !amp->backend->host_visible; }

/* bias: takes its gradient along; NULL: none. */
static amp_k_gemm ampi_linear_dweight_args(const amp_linear_op *op, const amp_mat *x, const amp_mat *dy, const amp_param *bias) {
    const amp_param *w = op->weight;
    amp_k_gemm g;
    memset(&g, 0, sizeof g);
    if (!ampi_wants_grad(w)) return g;
    g.m = dy->cols; g.n = x->cols; g.k = x->rows; g.batch = 1;
    g.a = dy->data; g.a_dtype = dy->dtype; g.lda = dy->ld; g.trans_a = 1;
    g.b = x->data; g.b_dtype = x->dtype; g.ldb = x->ld;
    g.c = w->grad.data; g.c_dtype = w->grad.dtype; g.ldc = x->cols;
    g.alpha = 1; g.beta = w->grad_live ? 1.0f : 0.0f; g.compute = op->plan.compute;
    if (bias != NULL) { g.row_sum.data = bias->grad.data; g.row_sum.dtype = bias->grad.dtype; g.row_sum.add = bias->grad_live; }
    return g;
}

/* The gradient of what was added to every row; of no columns where it is not wanted. */
static amp_k_column_sum ampi_dbias_args(const amp_param *bias, const amp_mat *dy) {
    amp_k_column_sum s;
    memset(&s, 0, sizeof s);
    if (!ampi_wants_grad(bias)) return s;
    s.x = *dy;
    s.out = bias->grad.data;
    s.out_dtype = bias->grad.dtype;
    s.add = bias->grad_live;
    return s;
}
static amp_result ampi_dbias(amp_context *amp, amp_param *bias, const amp_k_column_sum *s) {
    if (s->out == NULL) return AMP_OK;
    AMPI_TRY(amp->backend->column_sum(amp->dev, s, amp->desc.stream));
    bias->grad_live = 1;
    return AMP_OK;
}

/* pre: what went into x_act, NULL: there is none.  ampi_cache_put(*held) ends the use of the weight. */
static amp_result ampi_linear_dx_args(amp_context *amp, const char *f, const amp_linear_op *op, const amp_mat *dy, const amp_mat *dx,
                                      const amp_tensor *pre, amp_k_gemm *g, const void **held) {
    amp_mat at;
    ampi_cache_use use;
    *held = NULL;
    memset(g, 0, sizeof *g);
    if (dx->data == NULL) return AMP_OK;
    g->m = dx->rows; g->n = dx->cols; g->k = dy->cols; g->batch = 1;
    g->a = dy->data; g->a_dtype = dy->dtype; g->lda = dy->ld;
    g->ldb = dx->cols;
    g->c = dx->data; g->c_dtype = dx->dtype; g->ldc = dx->ld;
    g->alpha = 1; g->compute = op->plan.compute;
    if (pre != NULL && ampi_linear_fuses(amp)) {
        AMPI_TRY(ampi_rows(f, "x_pre", pre, &at));
        g->backward = 1; g->act = op->x_act;
        g->pre = at.data; g->pre_dtype = at.dtype; g->ld_pre = at.ld;
    }
    return ampi_linear_weight(amp, op->weight, AMPI_PACK_BACKWARD, g, held, &use);
}

/* What the backward of a linear layer calls, in this order: gemms[0] for the weight, `sum` for the bias, gemms[1] for x. */
typedef struct ampi_linear_calls { amp_k_gemm gemms[2]; amp_k_column_sum sum; const amp_tensor *pre, *x_pre; amp_param *along; } ampi_linear_calls;

static amp_result ampi_linear_run(amp_context *amp, const char *f, amp_linear_op *op, const ampi_linear_calls *c) {
    if (c->pre) AMPI_TRY(ampi_linear_activation_backward(amp, f, op->act, c->pre, "pre", &op->dy, "dy"));
    if (c->gemms[0].c) {
        AMPI_TRY(amp->backend->gemm(amp->dev, &c->gemms[0], amp->desc.stream));
        op->weight->grad_live = 1;
        if (c->along != NULL) c->along->grad_live = 1;
    }
    AMPI_TRY(ampi_dbias(amp, op->bias, &c->sum));
    if (c->gemms[1].c == NULL) return AMP_OK;
    AMPI_TRY(amp->backend->gemm(amp->dev, &c->gemms[1], amp->desc.stream));
    if (c->x_pre == NULL || c->gemms[1].backward) return AMP_OK;
    return ampi_linear_activation_backward(amp, f, op->x_act, c->x_pre, "x_pre", &op->dx, "dx");
}

AMP_API amp_result amp_linear_backward_v(amp_context *amp, amp_linear_op *op, uint64_t abi) {
    const char *f = "amp_linear_backward";
    ampi_linear_calls c;
    amp_mat x, y, dy, dx, same;
    const void *held;
    amp_result result;
    memset(&c, 0, sizeof c);
    AMPI_TRY(ampi_op_begin(f, amp, op, abi, AMP_ABI(amp_linear_op)));
    AMPI_TRY(ampi_check_plan(f, &op->plan));
    AMPI_TRY(ampi_linear_rows(f, op, &x, &y));
    AMPI_TRY(ampi_rows_like(f, "dy", &op->dy, "y", &y, &dy));
    AMPI_TRY(ampi_optional_rows(f, "dx", &op->dx, "x", &x, &dx));
    if (dx.data && op->x_act != AMP_ACT_NONE) {
        AMPI_TRY(ampi_linear_kept(f, op->x_act, &op->x_pre, "x_pre", &op->x, &op->dx, "dx", &c.x_pre));
        AMPI_TRY(ampi_rows_like(f, "x_pre", c.x_pre, "x", &x, &same));
    }
    if (op->act != AMP_ACT_NONE && !op->dy_before_act) {
        AMPI_TRY(ampi_linear_kept(f, op->act, &op->pre, "pre", &op->y, &op->dy, "dy", &c.pre));
        AMPI_TRY(ampi_rows_like(f, "pre", c.pre, "y", &y, &same));
    }
    c.along = ampi_wants_grad(op->weight) && ampi_wants_grad(op->bias) && ampi_linear_fuses(amp) ? op->bias : NULL;
    c.gemms[0] = ampi_linear_dweight_args(op, &x, &dy, c.along);
    c.sum = ampi_dbias_args(c.along == NULL ? op->bias : NULL, &dy);
    AMPI_TRY(ampi_linear_dx_args(amp, f, op, &dy, &dx, c.x_pre, &c.gemms[1], &held));
    result = ampi_hold(amp->backend, amp->dev, c.gemms, 2, &c.sum, 1);
    if (result == AMP_OK) result = ampi_linear_run(amp, f, op, &c);
    ampi_let_go(amp->dev);
    ampi_cache_put(amp, held);
    return result;
}

/* ---- Batched matmul */

/* One operand of a batched product: a matrix per batch, of any even stride. */
typedef struct ampi_operand { const void *data; amp_dtype dtype; int64_t batch, rows, cols, ld, stride; } ampi_operand;

static amp_result ampi_operand_of(const char *f, const char *field, const amp_tensor *t, ampi_operand *out) {
    AMPI_TRY(ampi_check_tensor(f, field, t));
    if (t->ndim != 2 && t->ndim != 3) return ampi_fail(AMP_ERR_SHAPE, f, ".%s has %d dimensions, must be [batch, rows, cols] or [rows, cols]", field, t->ndim);
    out->data = t->data;
    out->dtype = t->dtype;
    out->batch = t->ndim == 3 ? t->shape[0] : 1;
    out->rows = t->shape[t->ndim - 2];
    out->cols = t->shape[t->ndim - 1];
    out->ld = ampi_stride(t, t->ndim - 2);
    out->stride = t->ndim == 3 ? ampi_stride(t, 0) : 0;
    return ampi_check_ld(f, field, out->rows, out->cols, out->ld);
}

/* Whether op(a) op(b) has the shape of c. */
static amp_result ampi_batched_check(const char *f, const ampi_operand *a, int trans_a, const ampi_operand *b, int trans_b, const ampi_operand *c) {
    int64_t m = trans_a ? a->cols : a->rows, k = trans_a ? a->rows : a->cols, n = trans_b ? b->rows : b->cols;
    if (k == (trans_b ? b->cols : b->rows) && c->rows == m && c->cols == n && a->batch == c->batch && b->batch == c->batch) return AMP_OK;
    return ampi_fail(AMP_ERR_SHAPE, f, "[%lld, %lld, %lld]%s times [%lld, %lld, %lld]%s does not give [%lld, %lld, %lld]",
                     (long long)a->batch, (long long)a->rows, (long long)a->cols, trans_a ? " transposed" : "",
                     (long long)b->batch, (long long)b->rows, (long long)b->cols, trans_b ? " transposed" : "",
                     (long long)c->batch, (long long)c->rows, (long long)c->cols);
}

/* *out: c = alpha op(a) op(b), shapes checked. */
static amp_result ampi_batched_gemm(const char *f, const ampi_operand *a, int trans_a, const ampi_operand *b, int trans_b,
                                    const ampi_operand *c, float alpha, amp_dtype compute, amp_k_gemm *out) {
    amp_k_gemm g;
    AMPI_TRY(ampi_batched_check(f, a, trans_a, b, trans_b, c));
    memset(&g, 0, sizeof g);
    g.m = c->rows; g.n = c->cols; g.batch = c->batch;
    g.k = trans_a ? a->rows : a->cols;
    g.a = a->data; g.a_dtype = a->dtype; g.lda = a->ld; g.stride_a = a->stride; g.trans_a = trans_a;
    g.b = b->data; g.b_dtype = b->dtype; g.ldb = b->ld; g.stride_b = b->stride; g.trans_b = trans_b;
    memcpy(&g.c, &c->data, sizeof g.c); g.c_dtype = c->dtype; g.ldc = c->ld; g.stride_c = c->stride;
    g.alpha = alpha; g.compute = compute;
    *out = g;
    return AMP_OK;
}

AMP_API amp_result amp_matmul_v(amp_context *amp, amp_matmul_op *op, uint64_t abi) {
    const char *f = "amp_matmul";
    ampi_operand a, b, y;
    amp_k_gemm g;
    amp_plan plan;
    AMPI_TRY(ampi_op_begin(f, amp, op, abi, AMP_ABI(amp_matmul_op)));
    AMPI_TRY(ampi_operand_of(f, "a", &op->a, &a));
    AMPI_TRY(ampi_operand_of(f, "b", &op->b, &b));
    AMPI_TRY(ampi_operand_of(f, "y", &op->y, &y));
    AMPI_TRY(ampi_check_output(f, "y", &op->y));
    AMPI_TRY(ampi_plan_forward(amp, f, AMP_OP_MATMUL, op->layer, a.dtype, b.dtype, 0, &op->plan, &plan));
    AMPI_TRY(ampi_batched_gemm(f, &a, op->trans_a, &b, op->trans_b, &y, op->alpha == 0 ? 1 : op->alpha, plan.compute, &g));
    AMPI_TRY(amp->backend->gemm(amp->dev, &g, amp->desc.stream));
    op->plan = plan;
    return AMP_OK;
}

/* With y = op(a) op(b): d op(a) = dy op(b)^T and d op(b) = op(a)^T dy; a transposed operand takes the transposed product. */
AMP_API amp_result amp_matmul_backward_v(amp_context *amp, amp_matmul_op *op, uint64_t abi) {
    const char *f = "amp_matmul_backward";
    ampi_operand a, b, dy, da, db;
    amp_k_gemm gemms[2];
    amp_result result;
    float alpha;
    int n = 0, i;
    AMPI_TRY(ampi_op_begin(f, amp, op, abi, AMP_ABI(amp_matmul_op)));
    AMPI_TRY(ampi_check_plan(f, &op->plan));
    alpha = op->alpha == 0 ? 1 : op->alpha;
    AMPI_TRY(ampi_operand_of(f, "a", &op->a, &a));
    AMPI_TRY(ampi_operand_of(f, "b", &op->b, &b));
    AMPI_TRY(ampi_operand_of(f, "dy", &op->dy, &dy));
    AMPI_TRY(ampi_batched_check(f, &a, op->trans_a, &b, op->trans_b, &dy));
    if (op->da.data) {
        AMPI_TRY(ampi_operand_of(f, "da", &op->da, &da));
        AMPI_TRY(ampi_check_output(f, "da", &op->da));
        if (op->trans_a) AMPI_TRY(ampi_batched_gemm(f, &b, op->trans_b, &dy, 1, &da, alpha, op->plan.compute, &gemms[n++]));
        else AMPI_TRY(ampi_batched_gemm(f, &dy, 0, &b, !op->trans_b, &da, alpha, op->plan.compute, &gemms[n++]));
    }
    if (op->db.data) {
        AMPI_TRY(ampi_operand_of(f, "db", &op->db, &db));
        AMPI_TRY(ampi_check_output(f, "db", &op->db));
        if (op->trans_b) AMPI_TRY(ampi_batched_gemm(f, &dy, 1, &a, op->trans_a, &db, alpha, op->plan.compute, &gemms[n++]));
        else AMPI_TRY(ampi_batched_gemm(f, &a, !op->trans_a, &dy, 0, &db, alpha, op->plan.compute, &gemms[n++]));
    }
    result = ampi_hold(amp->backend, amp->dev, gemms, n, NULL, 0);
    for (i = 0; i < n && result == AMP_OK; i++) result = amp->backend->gemm(amp->dev, &gemms[i], amp->desc.stream);
    ampi_let_go(amp->dev);
    return result;
}

/* ---- The BLAS-shaped GEMM */

static amp_result ampi_gemm_check(int order, int trans_a, int trans_b, int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc) {
    int row = order == AMP_ROW_MAJOR, ta = trans_a != AMP_NO_TRANS, tb = trans_b != AMP_NO_TRANS;
    int64_t need_a = row != ta ? k : m, need_b = row != tb ? n : k, need_c = row ? n : m;
    if (!row && order != AMP_COL_MAJOR) return ampi_fail(AMP_ERR_RANGE, "amp_gemm", "order = %d, must be 101 (row major) or 102 (column major)", order);
    if (trans_a < AMP_NO_TRANS || trans_a > AMP_CONJ_TRANS) return ampi_fail(AMP_ERR_RANGE, "amp_gemm", "trans_a = %d, must be 111, 112 or 113", trans_a);
    if (trans_b < AMP_NO_TRANS || trans_b > AMP_CONJ_TRANS) return ampi_fail(AMP_ERR_RANGE, "amp_gemm", "trans_b = %d, must be 111, 112 or 113", trans_b);
    if (m < 0 || n < 0 || k < 0)
        return ampi_fail(AMP_ERR_RANGE, "amp_gemm", "m = %lld, n = %lld, k = %lld, must be 0 or more", (long long)m, (long long)n, (long long)k);
    if (lda < AMPI_MAX(need_a, 1)) return ampi_fail(AMP_ERR_RANGE, "amp_gemm", "lda = %lld, must be at least %lld", (long long)lda, (long long)AMPI_MAX(need_a, 1));
    if (ldb < AMPI_MAX(need_b, 1)) return ampi_fail(AMP_ERR_RANGE, "amp_gemm", "ldb = %lld, must be at least %lld", (long long)ldb, (long long)AMPI_MAX(need_b, 1));
    if (ldc < AMPI_MAX(need_c, 1)) return ampi_fail(AMP_ERR_RANGE, "amp_gemm", "ldc = %lld, must be at least %lld", (long long)ldc, (long long)AMPI_MAX(need_c, 1));
    return AMP_OK;
}

/* Column major is row major with everything transposed: C^T = op(B)^T op(A)^T. */
AMP_API amp_result amp_gemm(amp_context *amp, amp_order order, amp_trans trans_a, amp_trans trans_b,
                            int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
                            const float *b, int64_t ldb, float beta, float *c, int64_t ldc) {
    int swap = order == AMP_COL_MAJOR;
    amp_plan plan;
    amp_k_gemm g;
    if (amp == NULL) return ampi_fail(AMP_ERR_NULL, "amp_gemm", "amp is NULL");
    AMPI_TRY(ampi_gemm_check((int)order, (int)trans_a, (int)trans_b, m, n, k, lda, ldb, ldc));
    if (m == 0 || n == 0) return AMP_OK;
    if (c == NULL || (k > 0 && (a == NULL || b == NULL))) return ampi_fail(AMP_ERR_NULL, "amp_gemm", "a, b or c is NULL");
    if (k == 0) a = b = c;          /* not read; kernels do no arithmetic on NULL */
    AMPI_TRY(ampi_decide2(amp, AMP_OP_GEMM, NULL, AMP_F32, AMP_F32, &plan));
    memset(&g, 0, sizeof g);
    g.m = swap ? n : m; g.n = swap ? m : n; g.k = k; g.batch = 1;
    g.a = swap ? b : a; g.lda = swap ? ldb : lda; g.trans_a = (swap ? trans_b : trans_a) != AMP_NO_TRANS;
    g.b = swap ? a : b; g.ldb = swap ? lda : ldb; g.trans_b = (swap ? trans_a : trans_b) != AMP_NO_TRANS;
    g.c = c; g.ldc = ldc;
    g.a_dtype = g.b_dtype = g.c_dtype = AMP_F32;
    g.alpha = alpha; g.beta = beta; g.compute = plan.compute;
    return amp->backend->gemm(amp->dev, &g, amp->desc.stream);
}

/* ---- Attention */

static amp_result ampi_attention_view(const char *f, const char *field, const amp_tensor *t, const int64_t shape[4], amp_dtype dtype, int64_t stride[3]) {
    char text[64];
    int i;
    AMPI_TRY(ampi_check_tensor(f, field, t));
    for (i = 0; i < 4; i++)
        if (t->ndim != 4 || t->shape[i] != shape[i])
            return ampi_fail(AMP_ERR_SHAPE, f, ".%s is %s, must be [%lld, %lld, %lld, %lld]", field, ampi_shape_text(t, text, sizeof text),
                             (long long)shape[0], (long long)shape[1], (long long)shape[2], (long long)shape[3]);
    if (t->dtype != dtype) return ampi_fail(AMP_ERR_DTYPE, f, ".%s is %s, must be %s like .q", field, amp_dtype_name(t->dtype), amp_dtype_name(dtype));
    for (i = 0; i < 3; i++) stride[i] = ampi_stride(t, i);
    return AMP_OK;
}

static amp_result ampi_attention_args(const char *f, const amp_attention_op *op, amp_k_attention *k) {
    int64_t q_shape[4], k_shape[4];
    memset(k, 0, sizeof *k);
    AMPI_TRY(ampi_check_tensor(f, "q", &op->q));
    AMPI_TRY(ampi_check_tensor(f, "k", &op->k));
    if (op->q.ndim != 4 || op->k.ndim != 4) return ampi_fail(AMP_ERR_SHAPE, f, ".q and .k must be [batch, positions, heads, dim]");
    memcpy(q_shape, op->q.shape, sizeof q_shape);
    memcpy(k_shape, op->q.shape, sizeof k_shape);
    k_shape[1] = op->k.shape[1];
    AMPI_TRY(ampi_attention_view(f, "q", &op->q, q_shape, op->q.dtype, k->q_stride));
    AMPI_TRY(ampi_attention_view(f, "k", &op->k, k_shape, op->q.dtype, k->k_stride));
    AMPI_TRY(ampi_attention_view(f, "v", &op->v, k_shape, op->q.dtype, k->v_stride));
    AMPI_TRY(ampi_attention_view(f, "o", &op->o, q_shape, op->q.dtype, k->o_stride));
    AMPI_TRY(ampi_check_output(f, "o", &op->o));
    AMPI_TRY(ampi_check_mask(f, &op->mask));
    if (op->lse == NULL) return ampi_fail(AMP_ERR_NULL, f, ".lse is NULL");
    k->batch = q_shape[0]; k->queries = q_shape[1]; k->heads = q_shape[2]; k->dim = q_shape[3];
    k->keys = k_shape[1];
    k->q = op->q.data; k->k = op->k.data; k->v = op->v.data; k->o = op->o.data;
    k->dtype = op->q.dtype;
    k->scale = op->scale == 0 ? (float)(1.0 / sqrt((double)AMPI_MAX(k->dim, 1))) : op->scale;
    k->mask = op->mask;
    k->lse = op->lse;
    return AMP_OK;
}

AMP_API amp_result amp_attention_v(amp_context *amp, amp_attention_op *op, uint64_t abi) {
    amp_k_attention k;
    amp_plan plan;
    AMPI_TRY(ampi_op_begin("amp_attention", amp, op, abi, AMP_ABI(amp_attention_op)));
    AMPI_TRY(ampi_attention_args("amp_attention", op, &k));
    AMPI_TRY(ampi_plan_forward(amp, "amp_attention", AMP_OP_ATTENTION, op->layer, k.dtype, k.dtype, 0, &op->plan, &plan));
    k.compute = plan.compute;
    AMPI_TRY(amp->backend->attention(amp->dev, &k, amp->desc.stream));
    op->plan = plan;
    return AMP_OK;
}

AMP_API amp_result amp_attention_backward_v(amp_context *amp, amp_attention_op *op, uint64_t abi) {
    const char *f = "amp_attention_backward";
    int64_t k_shape[4];
    amp_k_attention k;
    AMPI_TRY(ampi_op_begin(f, amp, op, abi, AMP_ABI(amp_attention_op)));
    AMPI_TRY(ampi_check_plan(f, &op->plan));
    AMPI_TRY(ampi_attention_args(f, op, &k));
    memcpy(k_shape, op->k.shape, sizeof k_shape);
    AMPI_TRY(ampi_attention_view(f, "d_o", &op->d_o, op->q.shape, k.dtype, k.do_stride));
    AMPI_TRY(ampi_attention_view(f, "dq", &op->dq, op->q.shape, k.dtype, k.dq_stride));
    AMPI_TRY(ampi_attention_view(f, "dk", &op->dk, k_shape, k.dtype, k.dk_stride));
    AMPI_TRY(ampi_attention_view(f, "dv", &op->dv, k_shape, k.dtype, k.dv_stride));
    AMPI_TRY(ampi_check_output(f, "dq", &op->dq));
    AMPI_TRY(ampi_check_output(f, "dk", &op->dk));
    AMPI_TRY(ampi_check_output(f, "dv", &op->dv));
    k.compute = op->plan.compute;
    k.d_o = op->d_o.data; k.dq = op->dq.data; k.dk = op->dk.data; k.dv = op->dv.data;
    return amp->backend->attention_backward(amp->dev, &k, amp->desc.stream);
}

/* ---- Norms */

static amp_result ampi_norm_args(const char *f, const amp_norm_op *op, int rms, amp_k_norm *k) {
    memset(k, 0, sizeof *k);
    AMPI_TRY(ampi_rows(f, "x", &op->x, &k->x));
    AMPI_TRY(ampi_optional_rows(f, "residual", &op->residual, "x", &k->x, &k->residual));
    AMPI_TRY(ampi_optional_rows(f, "sum", &op->sum, "x", &k->x, &k->sum));
    AMPI_TRY(ampi_rows_like(f, "y", &op->y, "x", &k->x, &k->y));
    if (rms && op->bias) return ampi_fail(AMP_ERR_CONFLICT, f, ".bias is given; RMSNorm has none");
    if (op->residual.data && op->sum.data == NULL) return ampi_fail(AMP_ERR_NULL, f, ".sum has no data; with .residual the sum is kept for backward");
    if (op->weight) AMPI_TRY(ampi_check_weight(f, "weight", op->weight, k->x.cols, -1));
    if (op->bias) AMPI_TRY(ampi_check_weight(f, "bias", op->bias, k->x.cols, -1));
    if (op->weight && op->bias && op->weight->weight.dtype != op->bias->weight.dtype)
        return ampi_fail(AMP_ERR_DTYPE, f, ".weight is %s and .bias is %s; they must agree", amp_dtype_name(op->weight->weight.dtype), amp_dtype_name(op->bias->weight.dtype));
    if (op->rstd == NULL || (!rms && op->mean == NULL)) return ampi_fail(AMP_ERR_NULL, f, ".rstd or .mean is NULL");
    if (!(op->eps >= 0)) return ampi_fail(AMP_ERR_RANGE, f, ".eps = %g, must be positive (0: 1e-5)", (double)op->eps);
    k->rms = rms;
    k->eps = op->eps == 0 ? 1e-5f : op->eps;
    if (op->weight) { k->weight = op->weight->weight.data; k->weight_dtype = op->weight->weight.dtype; }
    if (op->bias) { k->bias = op->bias->weight.data; k->weight_dtype = op->bias->weight.dtype; }
    k->mean = op->mean;
    k->rstd = op->rstd;
    return AMP_OK;
}

static amp_result ampi_norm_forward(amp_context *amp, const char *f, amp_norm_op *op, int rms, uint64_t abi) {
    amp_k_norm k;
    amp_plan plan;
    AMPI_TRY(ampi_op_begin(f, amp, op, abi, AMP_ABI(amp_norm_op)));
    AMPI_TRY(ampi_norm_args(f, op, rms, &k));
    AMPI_TRY(ampi_plan_forward(amp, f, rms ? AMP_OP_RMSNORM : AMP_OP_LAYERNORM, ampi_layer_name(op->layer, op->weight), k.x.dtype, AMP_DTYPE_DEFAULT,
                               ampi_versions(op->weight, op->bias), &op->plan, &plan));
    AMPI_TRY(amp->backend->norm(amp->dev, &k, amp->desc.stream));
    op->plan = plan;
    return AMP_OK;
}

static void ampi_gradient_of(const amp_param *p, amp_k_gradient *out) {
    if (!ampi_wants_grad(p)) return;
    out->data = p->grad.data;
    out->dtype = p->grad.dtype;
    out->add = p->grad_live;
}

static amp_result ampi_norm_backward(amp_context *amp, const char *f, amp_norm_op *op, int rms, uint64_t abi) {
    amp_param *w = op ? op->weight : NULL, *b = op ? op->bias : NULL;
    amp_k_norm k;
    AMPI_TRY(ampi_op_begin(f, amp, op, abi, AMP_ABI(amp_norm_op)));
    AMPI_TRY(ampi_check_plan(f, &op->plan));
    AMPI_TRY(ampi_norm_args(f, op, rms, &k));
    AMPI_TRY(ampi_rows_like(f, "dy", &op->dy, "y", &k.y, &k.dy));
    AMPI_TRY(ampi_rows_like(f, "dx", &op->dx, "x", &k.x, &k.dx));
    AMPI_TRY(ampi_optional_rows(f, "dsum", &op->dsum, "x", &k.x, &k.dsum));
    if (k.sum.data) k.x = k.sum;
    ampi_gradient_of(w, &k.dweight);
    ampi_gradient_of(b, &k.dbias);
    AMPI_TRY(amp->backend->norm_backward(amp->dev, &k, amp->desc.stream));
    if (ampi_wants_grad(w)) w->grad_live = 1;
    if (ampi_wants_grad(b)) b->grad_live = 1;
    return AMP_OK;
}

AMP_API amp_result amp_layernorm_v(amp_context *amp, amp_norm_op *op, uint64_t abi) { return ampi_norm_forward(amp, "amp_layernorm", op, 0, abi); }
AMP_API amp_result amp_layernorm_backward_v(amp_context *amp, amp_norm_op *op, uint64_t abi) { return ampi_norm_backward(amp, "amp_layernorm_backward", op, 0, abi); }
AMP_API amp_result amp_rmsnorm_v(amp_context *amp, amp_norm_op *op, uint64_t abi) { return ampi_norm_forward(amp, "amp_rmsnorm", op, 1, abi); }
AMP_API amp_result amp_rmsnorm_backward_v(amp_context *amp, amp_norm_op *op, uint64_t abi) { return ampi_norm_backward(amp, "amp_rmsnorm_backward", op, 1, abi); }

/* ---- Softmax */

/* A contiguous tensor as [batch, heads, queries, keys], missing leading dimensions 1. */
static amp_result ampi_softmax_args(const char *f, const amp_softmax_op *op, amp_k_softmax *k) {
    int64_t shape[4];
    int i;
    memset(k, 0, sizeof *k);
    AMPI_TRY(ampi_check_tensor(f, "x", &op->x));
    AMPI_TRY(ampi_check_tensor(f, "y", &op->y));
    AMPI_TRY(ampi_check_mask(f, &op->mask));
    if (!ampi_is_contiguous(&op->x) || !ampi_is_contiguous(&op->y)) return ampi_fail(AMP_ERR_SHAPE, f, ".x and .y must be contiguous");
    if (op->x.ndim != op->y.ndim || memcmp(op->x.shape, op->y.shape, sizeof(int64_t) * (size_t)op->x.ndim) != 0)
        return ampi_fail(AMP_ERR_SHAPE, f, ".x and .y have different shapes");
    for (i = 0; i < 4; i++) shape[i] = i < 4 - op->x.ndim ? 1 : op->x.shape[i - (4 - op->x.ndim)];
    k->batch = shape[0]; k->heads = shape[1]; k->queries = shape[2]; k->keys = shape[3];
    k->x = op->x.data; k->x_dtype = op->x.dtype;
    k->y = op->y.data; k->y_dtype = op->y.dtype;
    k->scale = op->scale == 0 ? 1 : op->scale;
    k->mask = op->mask;
    return AMP_OK;
}

AMP_API amp_result amp_softmax_v(amp_context *amp, amp_softmax_op *op, uint64_t abi) {
    amp_k_softmax k;
    amp_plan plan;
    AMPI_TRY(ampi_op_begin("amp_softmax", amp, op, abi, AMP_ABI(amp_softmax_op)));
    AMPI_TRY(ampi_softmax_args("amp_softmax", op, &k));
    AMPI_TRY(ampi_plan_forward(amp, "amp_softmax", AMP_OP_SOFTMAX, op->layer, k.x_dtype, AMP_DTYPE_DEFAULT, 0, &op->plan, &plan));
    AMPI_TRY(amp->backend->softmax(amp->dev, &k, amp->desc.stream));
    op->plan = plan;
    return AMP_OK;
}

/* A gradient that is contiguous, with the count and dtype of its tensor. */
static amp_result ampi_check_flat(const char *f, const char *field, const amp_tensor *t, int64_t n, amp_dtype dtype) {
    AMPI_TRY(ampi_check_tensor(f, field, t));
    if (!ampi_is_contiguous(t)) return ampi_fail(AMP_ERR_SHAPE, f, ".%s must be contiguous", field);
    if (amp_tensor_count(t) != n) return ampi_fail(AMP_ERR_SHAPE, f, ".%s has %lld elements, must have %lld", field, (long long)amp_tensor_count(t), (long long)n);
    if (dtype != AMP_DTYPE_DEFAULT && t->dtype != dtype) return ampi_fail(AMP_ERR_DTYPE, f, ".%s is %s, must be %s", field, amp_dtype_name(t->dtype), amp_dtype_name(dtype));
    return AMP_OK;
}

AMP_API amp_result amp_softmax_backward_v(amp_context *amp, amp_softmax_op *op, uint64_t abi) {
    const char *f = "amp_softmax_backward";
    amp_k_softmax k;
    AMPI_TRY(ampi_op_begin(f, amp, op, abi, AMP_ABI(amp_softmax_op)));
    AMPI_TRY(ampi_check_plan(f, &op->plan));
    AMPI_TRY(ampi_softmax_args(f, op, &k));
    AMPI_TRY(ampi_check_flat(f, "dy", &op->dy, amp_tensor_count(&op->y), k.y_dtype));
    AMPI_TRY(ampi_check_flat(f, "dx", &op->dx, amp_tensor_count(&op->x), k.x_dtype));
    k.dy = op->dy.data;
    k.dx = op->dx.data;
    return amp->backend->softmax_backward(amp->dev, &k, amp->desc.stream);
}

/* ---- Activations */

static amp_result ampi_activation_args(const char *f, const amp_activation_op *op, amp_k_activation *k) {
    memset(k, 0, sizeof *k);
    if (op->act <= AMP_ACT_NONE || op->act > AMP_ACT_RELU) return ampi_fail(AMP_ERR_RANGE, f, ".act = %d, must be 1 to 5", (int)op->act);
    AMPI_TRY(ampi_check_flat(f, "x", &op->x, amp_tensor_count(&op->x), AMP_DTYPE_DEFAULT));
    AMPI_TRY(ampi_check_flat(f, "y", &op->y, amp_tensor_count(&op->x), AMP_DTYPE_DEFAULT));
    k->act = op->act;
    k->n = amp_tensor_count(&op->x);
    k->x = op->x.data; k->x_dtype = op->x.dtype;
    k->y = op->y.data; k->y_dtype = op->y.dtype;
    if (op->bias == NULL) return AMP_OK;
    k->cols = op->x.shape[op->x.ndim - 1];
    AMPI_TRY(ampi_check_weight(f, "bias", op->bias, k->cols, -1));
    k->bias = op->bias->weight.data; k->bias_dtype = op->bias->weight.dtype;
    return AMP_OK;
}

AMP_API amp_result amp_activation_v(amp_context *amp, amp_activation_op *op, uint64_t abi) {
    amp_k_activation k;
    amp_plan plan;
    AMPI_TRY(ampi_op_begin("amp_activation", amp, op, abi, AMP_ABI(amp_activation_op)));
    AMPI_TRY(ampi_activation_args("amp_activation", op, &k));
    AMPI_TRY(ampi_plan_forward(amp, "amp_activation", AMP_OP_ACTIVATION, op->layer, k.x_dtype, AMP_DTYPE_DEFAULT, ampi_versions(op->bias, NULL), &op->plan, &plan));
    AMPI_TRY(amp->backend->activation(amp->dev, &k, amp->desc.stream));
    op->plan = plan;
    return AMP_OK;
}

AMP_API amp_result amp_activation_backward_v(amp_context *amp, amp_activation_op *op, uint64_t abi) {
    const char *f = "amp_activation_backward";
    amp_k_activation k;
    amp_k_column_sum sum;
    amp_mat dx;
    amp_result result;
    AMPI_TRY(ampi_op_begin(f, amp, op, abi, AMP_ABI(amp_activation_op)));
    AMPI_TRY(ampi_check_plan(f, &op->plan));
    AMPI_TRY(ampi_activation_args(f, op, &k));
    AMPI_TRY(ampi_check_flat(f, "dy", &op->dy, k.n, k.y_dtype));
    AMPI_TRY(ampi_check_flat(f, "dx", &op->dx, k.n, k.x_dtype));
    if (k.bias != NULL && k.x == k.y && k.act != AMP_ACT_TANH)
        return ampi_fail(AMP_ERR_CONFLICT, f, ".y is .x, which backward reads with a .bias: give .y its own memory");
    k.dy = op->dy.data;
    k.dx = op->dx.data;
    memset(&dx, 0, sizeof dx);
    dx.data = k.dx; dx.dtype = k.x_dtype;
    dx.rows = k.cols ? k.n / k.cols : 0; dx.cols = dx.ld = k.cols;
    sum = ampi_dbias_args(k.cols ? op->bias : NULL, &dx);
    AMPI_TRY(ampi_hold(amp->backend, amp->dev, NULL, 0, &sum, 1));
    result = amp->backend->activation_backward(amp->dev, &k, amp->desc.stream);
    if (result == AMP_OK) result = ampi_dbias(amp, op->bias, &sum);
    ampi_let_go(amp->dev);
    return result;
}

static amp_result ampi_swiglu_args(const char *f, const amp_swiglu_op *op, amp_k_swiglu *k) {
    memset(k, 0, sizeof *k);
    AMPI_TRY(ampi_rows(f, "gate", &op->gate, &k->gate));
    AMPI_TRY(ampi_rows_like(f, "up", &op->up, "gate", &k->gate, &k->up));
    if (op->gate_bias) {
        AMPI_TRY(ampi_check_weight(f, "gate_bias", op->gate_bias, k->gate.cols, -1));
        k->gate_bias = op->gate_bias->weight.data; k->gate_bias_dtype = op->gate_bias->weight.dtype;
    }
    if (op->up_bias) {
        AMPI_TRY(ampi_check_weight(f, "up_bias", op->up_bias, k->gate.cols, -1));
        k->up_bias = op->up_bias->weight.data; k->up_bias_dtype = op->up_bias->weight.dtype;
    }
    return ampi_rows_like(f, "y", &op->y, "gate", &k->gate, &k->y);
}

AMP_API amp_result amp_swiglu_v(amp_context *amp, amp_swiglu_op *op, uint64_t abi) {
    amp_k_swiglu k;
    amp_plan plan;
    AMPI_TRY(ampi_op_begin("amp_swiglu", amp, op, abi, AMP_ABI(amp_swiglu_op)));
    AMPI_TRY(ampi_swiglu_args("amp_swiglu", op, &k));
    AMPI_TRY(ampi_plan_forward(amp, "amp_swiglu", AMP_OP_SWIGLU, op->layer, k.gate.dtype, k.up.dtype, ampi_versions(op->gate_bias, op->up_bias), &op->plan, &plan));
    AMPI_TRY(amp->backend->swiglu(amp->dev, &k, amp->desc.stream));
    op->plan = plan;
    return AMP_OK;
}

AMP_API amp_result amp_swiglu_backward_v(amp_context *amp, amp_swiglu_op *op, uint64_t abi) {
    const char *f = "amp_swiglu_backward";
    amp_k_swiglu k;
    amp_k_column_sum sum;
    amp_result result;
    AMPI_TRY(ampi_op_begin(f, amp, op, abi, AMP_ABI(amp_swiglu_op)));
    AMPI_TRY(ampi_check_plan(f, &op->plan));
    AMPI_TRY(ampi_swiglu_args(f, op, &k));
    AMPI_TRY(ampi_rows_like(f, "dy", &op->dy, "gate", &k.gate, &k.dy));
    AMPI_TRY(ampi_rows_like(f, "dgate", &op->dgate, "gate", &k.gate, &k.dgate));
    AMPI_TRY(ampi_rows_like(f, "dup", &op->dup, "gate", &k.gate, &k.dup));
    sum = ampi_dbias_args(ampi_wants_grad(op->gate_bias) ? op->gate_bias : op->up_bias, &k.dgate);      /* as large as that of dup */
    AMPI_TRY(ampi_hold(amp->backend, amp->dev, NULL, 0, &sum, 1));
    result = amp->backend->swiglu_backward(amp->dev, &k, amp->desc.stream);
    sum = ampi_dbias_args(op->gate_bias, &k.dgate);
    if (result == AMP_OK) result = ampi_dbias(amp, op->gate_bias, &sum);
    sum = ampi_dbias_args(op->up_bias, &k.dup);
    if (result == AMP_OK) result = ampi_dbias(amp, op->up_bias, &sum);
    ampi_let_go(amp->dev);
    return result;
}

/* ---- Losses */

AMP_API amp_result amp_cross_entropy_v(amp_context *amp, amp_cross_entropy_op *op, uint64_t abi) {
    const char *f = "amp_cross_entropy";
    int32_t bad = 0;
    amp_k_cross_entropy k;
    amp_plan plan;
    AMPI_TRY(ampi_op_begin(f, amp, op, abi, AMP_ABI(amp_cross_entropy_op)));
    memset(&k, 0, sizeof k);
    AMPI_TRY(ampi_rows(f, "logits", &op->logits, &k.logits));
    AMPI_TRY(ampi_optional_rows(f, "dlogits", &op->dlogits, "logits", &k.logits, &k.dlogits));
    if (op->labels == NULL || op->loss == NULL) return ampi_fail(AMP_ERR_NULL, f, ".labels or .loss is NULL");
    if (op->classes < 0 || op->classes > k.logits.cols)
        return ampi_fail(AMP_ERR_RANGE, f, ".classes = %lld, must be 1 to %lld columns (0: all)", (long long)op->classes, (long long)k.logits.cols);
    if (!(op->label_smoothing >= 0 && op->label_smoothing <= 1)) return ampi_fail(AMP_ERR_RANGE, f, ".label_smoothing = %g, must be 0 to 1", (double)op->label_smoothing);
    if ((int)op->reduction < 0 || op->reduction > AMP_REDUCTION_SUM) return ampi_fail(AMP_ERR_RANGE, f, ".reduction = %d, must be 0 to 2", (int)op->reduction);
    AMPI_TRY(ampi_plan_forward(amp, f, AMP_OP_CROSS_ENTROPY, op->layer, k.logits.dtype, AMP_DTYPE_DEFAULT, 0, &op->plan, &plan));
    k.classes = op->classes ? op->classes : k.logits.cols;
    k.labels = op->labels;
    k.ignore_index = op->ignore_index ? op->ignore_index : -100;
    k.sum = op->reduction == AMP_REDUCTION_SUM;
    k.smoothing = op->label_smoothing;
    k.factor = op->factor == 0 ? 1 : op->factor;
    k.seed = op->seed;
    k.loss = op->loss;
    k.losses = op->losses;
    k.bad_label = ampi_bad_row(amp, &bad);
    AMPI_TRY(amp->backend->cross_entropy(amp->dev, &k, amp->desc.stream));
    if (bad != 0)
        return ampi_fail(AMP_ERR_LABEL, f, ".labels[%d] = %d, must be 0 to %lld or ignore_index %d", bad - 1, op->labels[bad - 1], (long long)k.classes - 1, k.ignore_index);
    op->plan = plan;
    return AMP_OK;
}

AMP_API amp_result amp_mse_v(amp_context *amp, amp_mse_op *op, uint64_t abi) {
    const char *f = "amp_mse";
    amp_k_mse k;
    amp_plan plan;
    AMPI_TRY(ampi_op_begin(f, amp, op, abi, AMP_ABI(amp_mse_op)));
    memset(&k, 0, sizeof k);
    k.n = amp_tensor_count(&op->x);
    AMPI_TRY(ampi_check_flat(f, "x", &op->x, k.n, AMP_DTYPE_DEFAULT));
    AMPI_TRY(ampi_check_flat(f, "target", &op->target, k.n, AMP_DTYPE_DEFAULT));
    if (op->dx.data) AMPI_TRY(ampi_check_flat(f, "dx", &op->dx, k.n, op->x.dtype));
    if (op->loss == NULL) return ampi_fail(AMP_ERR_NULL, f, ".loss is NULL");
    if ((int)op->reduction < 0 || op->reduction > AMP_REDUCTION_SUM) return ampi_fail(AMP_ERR_RANGE, f, ".reduction = %d, must be 0 to 2", (int)op->reduction);
    AMPI_TRY(ampi_plan_forward(amp, f, AMP_OP_MSE, op->layer, op->x.dtype, op->target.dtype, 0, &op->plan, &plan));
    k.x = op->x.data; k.x_dtype = op->x.dtype;
    k.target = op->target.data; k.target_dtype = op->target.dtype;
    k.dx = op->dx.data;
    k.sum = op->reduction == AMP_REDUCTION_SUM;
    k.factor = op->factor == 0 ? 1 : op->factor;
    k.seed = op->seed;
    k.loss = op->loss;
    AMPI_TRY(amp->backend->mse(amp->dev, &k, amp->desc.stream));
    op->plan = plan;
    return AMP_OK;
}

/* ---- Embedding */

static amp_result ampi_embedding_args(const char *f, const amp_embedding_op *op, amp_k_embedding *k) {
    memset(k, 0, sizeof *k);
    if (op->ids == NULL || op->table == NULL) return ampi_fail(AMP_ERR_NULL, f, ".ids or .table is NULL");
    AMPI_TRY(ampi_rows(f, "y", &op->y, &k->y));
    AMPI_TRY(ampi_rows(f, "table", &op->table->weight, &k->table));
    k->ids = op->ids;
    k->n = k->y.rows;
    k->seq = op->seq ? op->seq : AMPI_MAX(k->n, 1);
    if (k->seq < 0) return ampi_fail(AMP_ERR_RANGE, f, ".seq = %lld, must be 1 or more (0: all rows)", (long long)op->seq);
    AMPI_TRY(ampi_check_weight(f, "table", op->table, k->table.rows, k->y.cols));
    if (op->positions == NULL) return AMP_OK;
    AMPI_TRY(ampi_rows(f, "positions", &op->positions->weight, &k->positions));
    if (k->positions.rows < AMPI_MIN(k->seq, k->n) || k->positions.cols != k->y.cols)
        return ampi_fail(AMP_ERR_SHAPE, f, ".positions is [%lld, %lld], must be [at least %lld, %lld]", (long long)k->positions.rows, (long long)k->positions.cols,
                         (long long)AMPI_MIN(k->seq, k->n), (long long)k->y.cols);
    return AMP_OK;
}

AMP_API amp_result amp_embedding_v(amp_context *amp, amp_embedding_op *op, uint64_t abi) {
    const char *f = "amp_embedding";
    int32_t bad = 0;
    amp_k_embedding k;
    amp_plan plan;
    AMPI_TRY(ampi_op_begin(f, amp, op, abi, AMP_ABI(amp_embedding_op)));
    AMPI_TRY(ampi_embedding_args(f, op, &k));
    AMPI_TRY(ampi_plan_forward(amp, f, AMP_OP_EMBEDDING, ampi_layer_name(op->layer, op->table), k.table.dtype, AMP_DTYPE_DEFAULT,
                               ampi_versions(op->table, op->positions), &op->plan, &plan));
    k.bad_id = ampi_bad_row(amp, &bad);
    AMPI_TRY(amp->backend->embedding(amp->dev, &k, amp->desc.stream));
    if (bad != 0) return ampi_fail(AMP_ERR_LABEL, f, ".ids[%d] = %d, must be 0 to %lld", bad - 1, op->ids[bad - 1], (long long)k.table.rows - 1);
    op->plan = plan;
    return AMP_OK;
}

static void ampi_grad_mat(const amp_param *p, const amp_mat *like, amp_mat *grad, int32_t *add) {
    if (!ampi_wants_grad(p)) return;
    *grad = *like;
    grad->data = p->grad.data;
    grad->dtype = p->grad.dtype;
    *add = p->grad_live;
}

AMP_API amp_result amp_embedding_backward_v(amp_context *amp, amp_embedding_op *op, uint64_t abi) {
    const char *f = "amp_embedding_backward";
    int32_t bad = 0;
    amp_k_embedding k;
    AMPI_TRY(ampi_op_begin(f, amp, op, abi, AMP_ABI(amp_embedding_op)));
    AMPI_TRY(ampi_check_plan(f, &op->plan));
    AMPI_TRY(ampi_embedding_args(f, op, &k));
    AMPI_TRY(ampi_rows_like(f, "dy", &op->dy, "y", &k.y, &k.dy));
    ampi_grad_mat(op->table, &k.table, &k.dtable, &k.add_table);
    ampi_grad_mat(op->positions, &k.positions, &k.dpositions, &k.add_positions);
    k.bad_id = ampi_bad_row(amp, &bad);
    AMPI_TRY(amp->backend->embedding_backward(amp->dev, &k, amp->desc.stream));
    if (bad != 0) return ampi_fail(AMP_ERR_LABEL, f, ".ids[%d] = %d, must be 0 to %lld", bad - 1, op->ids[bad - 1], (long long)k.table.rows - 1);
    if (k.dtable.data) op->table->grad_live = 1;
    if (k.dpositions.data) op->positions->grad_live = 1;
    return AMP_OK;
}

/* ---- Dropout */

static amp_result ampi_dropout_run(amp_context *amp, const char *f, const amp_dropout_op *op, const amp_plan *plan, const amp_tensor *from, const amp_tensor *to, const char *to_name) {
    amp_k_dropout k;
    memset(&k, 0, sizeof k);
    k.n = amp_tensor_count(from);
    AMPI_TRY(ampi_check_flat(f, to_name, to, k.n, AMP_DTYPE_DEFAULT));
    k.x = from->data; k.x_dtype = from->dtype;
    k.y = to->data; k.y_dtype = to->dtype;
    k.p = plan->mode == AMP_MODE_INFERENCE ? 0 : op->p;
    k.seed = plan->random_seed;
    k.offset = plan->random_offset;
    k.base = plan->captured ? &amp->cells->random : NULL;
    return amp->backend->dropout(amp->dev, &k, amp->desc.stream);
}

/* Takes the next n random numbers, none in inference. */
static void ampi_dropout_numbers(amp_context *amp, int64_t n, amp_plan *plan) {
    plan->random_seed = amp->desc.seed;
    ampi_lock(amp);
    plan->random_offset = amp->random_offset - (amp->capture ? amp->capture_random : 0);
    plan->captured = amp->capture != NULL;
    if (plan->mode != AMP_MODE_INFERENCE) amp->random_offset += (uint64_t)n;
    ampi_unlock(amp);
}

AMP_API amp_result amp_dropout_v(amp_context *amp, amp_dropout_op *op, uint64_t abi) {
    const char *f = "amp_dropout";
    int64_t n;
    amp_plan plan;
    AMPI_TRY(ampi_op_begin(f, amp, op, abi, AMP_ABI(amp_dropout_op)));
    if (!(op->p >= 0 && op->p < 1)) return ampi_fail(AMP_ERR_RANGE, f, ".p = %g, must be 0 to less than 1", (double)op->p);
    n = amp_tensor_count(&op->x);
    AMPI_TRY(ampi_check_flat(f, "x", &op->x, n, AMP_DTYPE_DEFAULT));
    AMPI_TRY(ampi_plan_forward(amp, f, AMP_OP_DROPOUT, op->layer, op->x.dtype, AMP_DTYPE_DEFAULT, 0, &op->plan, &plan));
    if (!ampi_is_recomputing(amp)) ampi_dropout_numbers(amp, op->p > 0 ? n : 0, &plan);
    AMPI_TRY(ampi_dropout_run(amp, f, op, &plan, &op->x, &op->y, "y"));
    op->plan = plan;
    return AMP_OK;
}

AMP_API amp_result amp_dropout_backward_v(amp_context *amp, amp_dropout_op *op, uint64_t abi) {
    const char *f = "amp_dropout_backward";
    AMPI_TRY(ampi_op_begin(f, amp, op, abi, AMP_ABI(amp_dropout_op)));
    AMPI_TRY(ampi_check_plan(f, &op->plan));
    AMPI_TRY(ampi_check_flat(f, "dy", &op->dy, amp_tensor_count(&op->x), AMP_DTYPE_DEFAULT));
    return ampi_dropout_run(amp, f, op, &op->plan, &op->dy, &op->dx, "dx");
}

/* ---- Add, cast, random state */

AMP_API amp_result amp_add(amp_context *amp, const amp_tensor *a, const amp_tensor *b, const amp_tensor *y) {
    amp_k_add k;
    if (amp == NULL || a == NULL || b == NULL || y == NULL) return ampi_fail(AMP_ERR_NULL, "amp_add", "amp, a, b or y is NULL");
    memset(&k, 0, sizeof k);
    k.n = amp_tensor_count(a);
    AMPI_TRY(ampi_check_flat("amp_add", "a", a, k.n, AMP_DTYPE_DEFAULT));
    AMPI_TRY(ampi_check_flat("amp_add", "b", b, k.n, AMP_DTYPE_DEFAULT));
    AMPI_TRY(ampi_check_flat("amp_add", "y", y, k.n, AMP_DTYPE_DEFAULT));
    k.a = a->data; k.a_dtype = a->dtype;
    k.b = b->data; k.b_dtype = b->dtype;
    k.y = y->data; k.y_dtype = y->dtype;
    k.alpha = k.beta = 1;
    return amp->backend->add(amp->dev, &k, amp->desc.stream);
}

AMP_API amp_result amp_cast(amp_context *amp, const amp_tensor *src, const amp_tensor *dst) {
    amp_k_cast k;
    if (amp == NULL || src == NULL || dst == NULL) return ampi_fail(AMP_ERR_NULL, "amp_cast", "amp, src or dst is NULL");
    memset(&k, 0, sizeof k);
    k.n = amp_tensor_count(src);
    AMPI_TRY(ampi_check_flat("amp_cast", "src", src, k.n, AMP_DTYPE_DEFAULT));
    AMPI_TRY(ampi_check_flat("amp_cast", "dst", dst, k.n, AMP_DTYPE_DEFAULT));
    k.src = src->data; k.src_dtype = src->dtype;
    k.dst = dst->data; k.dst_dtype = dst->dtype;
    return amp->backend->cast(amp->dev, &k, amp->desc.stream);
}

AMP_API amp_result amp_random_save(const amp_context *amp, amp_state *state, const char *prefix) {
    int64_t values[2];
    char key[64];
    if (amp == NULL || state == NULL || prefix == NULL) return ampi_fail(AMP_ERR_NULL, "amp_random_save", "amp, state or prefix is NULL");
    if (snprintf(key, sizeof key, "%s.random", prefix) >= (int)sizeof key) return ampi_fail(AMP_ERR_RANGE, "amp_random_save", "prefix has %zu bytes, at most 56", strlen(prefix));
    values[0] = (int64_t)amp->desc.seed;
    values[1] = (int64_t)amp->random_offset;
    return amp_state_put(state, key, AMP_I64, values, 2);
}

AMP_API amp_result amp_random_load(amp_context *amp, const amp_state *state, const char *prefix) {
    int64_t values[2];
    char key[64];
    if (amp == NULL || state == NULL || prefix == NULL) return ampi_fail(AMP_ERR_NULL, "amp_random_load", "amp, state or prefix is NULL");
    if (snprintf(key, sizeof key, "%s.random", prefix) >= (int)sizeof key) return ampi_fail(AMP_ERR_RANGE, "amp_random_load", "prefix has %zu bytes, at most 56", strlen(prefix));
    if (amp->capture != NULL) return ampi_fail(AMP_ERR_STATE, "amp_random_load", "a graph is being captured: load before amp_graph_begin or after amp_graph_end");
    AMPI_TRY(amp_state_get(state, key, AMP_I64, values, 2));
    if (amp->desc.seed != (uint64_t)values[0]) ampi_settings_changed(amp);     /* graphs have the seed built in, not the offset */
    amp->desc.seed = (uint64_t)values[0];
    amp->random_offset = (uint64_t)values[1];
    return AMP_OK;
}

/* ==== 10 >>gradients: implementation ================================================================
   The host keeps what it decides (stages, tables, settings); everything a rule changes lives in device memory and
   is changed there, so no call but the getters, save and load waits for the device. */

typedef enum ampi_stage { AMPI_READY = 0, AMPI_CHECKED = 1, AMPI_STEPPED = 2 } ampi_stage;

struct amp_set {
    amp_context *amp;
    int64_t n;
    amp_k_tensor *rows, *table;     /* the host's copy, and the device's */
    amp_param **params;             /* of each row; NULL: the rows are ranges */
    const char **names; char *text; int64_t text_bytes;     /* text: the names of ranges, copied */
    amp_k_found *found;             /* device */
    double clip_norm, divisor;
    int32_t sharded;
    int32_t unscaled;               /* 1: the last check multiplied */
    int32_t apply_nonfinite;        /* of its optimizer */
    ampi_stage stage;
    amp_scaler *scaler;             /* the one this set was checked by since its last update, else NULL ... */
    amp_set *next;                  /* ... and the next set in that scaler's list */
};

struct amp_scaler {
    amp_context *amp;
    amp_scaler_desc desc;           /* effective */
    amp_k_scaler_rule rule;
    amp_k_scaler *device;
    amp_set *sets;                  /* checked since the last update */
    int32_t checked;                /* 1: some set was, perhaps before a load */
};

struct amp_optimizer {
    amp_context *amp;
    amp_optimizer_desc desc;        /* effective */
    amp_group *groups; const char **matches; char *text; int64_t text_bytes;
    amp_set *set;
    void *memory;                   /* device: moments and masters of all rows */
    amp_k_outcome *ring;            /* device */
    amp_k_outcome *outcomes;        /* the host's copy of it, pinned; record i is complete after events[i] */
    void *events[AMP_OUTCOMES];
    int64_t attempts, delivered, flushed;   /* steps so far; their outcomes taken, and made due by a flush */
    int64_t sent;                   /* outcomes sent by this object: steps, whatever was loaded in between */
    int32_t micro;                  /* micro-batches of the cycle so far */
};

/* What a launch has to do on the host beside launching. */
struct amp_graph {
    amp_context *amp;
    void *exec;                     /* the backend's; NULL while capturing */
    uint64_t settings_version;
    uint64_t random;                /* random numbers that a launch takes */
    amp_optimizer **optimizers; int64_t n, room;    /* that it steps, each once */
    amp_set **sets; int64_t n_sets, set_room;       /* that it checks by amp_scaler_check */
};

AMPI_PRIVATE int32_t ampi_world(const amp_context *amp) { return AMPI_MAX(ampi_settings(amp)->reducer.world, 1); }
/* The scaler, or NULL when it does nothing. */
AMPI_PRIVATE amp_scaler *ampi_enabled(amp_scaler *scaler) {
    return scaler != NULL && !scaler->desc.disable ? scaler : NULL;
}

AMPI_PRIVATE amp_result ampi_wait(const amp_context *amp) {
    void *dev, *stream;
    AMPI_TRY(ampi_may_wait(amp));
    const amp_backend *backend = ampi_backend(amp, &dev, &stream);
    return backend->stream_sync(dev, stream);
}

AMPI_PRIVATE amp_result ampi_fetch(const amp_context *amp, void *dst, const void *src, size_t bytes) {
    void *dev, *stream;
    const amp_backend *backend = ampi_backend(amp, &dev, &stream);
    AMPI_TRY(ampi_may_wait(amp));
    AMPI_TRY(backend->copy(dev, dst, src, bytes, AMP_COPY_TO_HOST, stream));
    return backend->stream_sync(dev, stream);
}

/* Waits too, because src may be on the stack. */
AMPI_PRIVATE amp_result ampi_send(amp_context *amp, void *dst, const void *src, size_t bytes) {
    AMPI_TRY(ampi_may_wait(amp));
    AMPI_TRY(amp_copy(amp, dst, src, (int64_t)bytes, AMP_COPY_TO_DEVICE));
    return ampi_wait(amp);
}

AMPI_PRIVATE amp_k_rule ampi_rule(amp_rule_kind kind, const amp_scaler *scaler, const amp_set *set) {
    amp_k_rule rule;
    memset(&rule, 0, sizeof rule);
    rule.kind = kind;
    rule.step_rule.divisor = 1;
    if (scaler != NULL) {
        rule.scaler = scaler->device;
        rule.scaler_rule = scaler->rule;
    }
    if (set != NULL) {
        rule.found = set->found;
        rule.step_rule.divisor = set->divisor;
        rule.step_rule.clip_norm = set->clip_norm;
        rule.step_rule.unscaled = set->unscaled;
    }
    return rule;
}

AMPI_PRIVATE amp_result ampi_run_rule(const amp_context *amp, const amp_k_rule *rule) {
    void *dev, *stream;
    const amp_backend *backend = ampi_backend(amp, &dev, &stream);
    return backend->rule(dev, rule, stream);
}

/* Replaces n texts (NULL allowed) by copies in one block. */
AMPI_PRIVATE amp_result ampi_copy_texts(const amp_context *amp, const char *function, const char **texts, int64_t n,
                                        char **block, int64_t *bytes) {
    int64_t i, at = 0;
    *bytes = 0;
    for (i = 0; i < n; i++) if (texts[i] != NULL) *bytes += (int64_t)strlen(texts[i]) + 1;
    AMPI_TRY(ampi_alloc(ampi_context_system(amp), function, (void **)block, *bytes, 1));
    for (i = 0; i < n; i++) {
        if (texts[i] == NULL) continue;
        memcpy(*block + at, texts[i], strlen(texts[i]) + 1);
        texts[i] = *block + at;
        at += (int64_t)strlen(texts[i]) + 1;
    }
    return AMP_OK;
}

/* ---- Sets */

AMPI_PRIVATE void ampi_set_unlink(amp_set *set) {
    amp_set **link;
    set->stage = AMPI_READY;
    if (set->scaler == NULL) return;
    for (link = &set->scaler->sets; *link != set; link = &(*link)->next) {}
    *link = set->next;
    set->scaler = NULL;
}

AMPI_PRIVATE void ampi_set_enter(amp_set *set, amp_scaler *scaler, ampi_stage stage) {
    if (set->scaler == NULL) {
        set->scaler = scaler;
        set->next = scaler->sets;
        scaler->sets = set;
    }
    set->stage = stage;
    scaler->checked = 1;
}

AMP_API void amp_set_destroy(amp_set *set) {
    const amp_system *s;
    amp_graph *graph;
    int64_t i;
    if (set == NULL) return;
    s = ampi_context_system(set->amp);
    graph = ampi_capture(set->amp);
    for (i = graph ? graph->n_sets : 0; i-- > 0;)
        if (graph->sets[i] == set) graph->sets[i] = graph->sets[--graph->n_sets];
    ampi_settings_changed(set->amp);
    ampi_set_unlink(set);
    amp_free(set->amp, set->table);
    amp_free(set->amp, set->found);
    ampi_free(s, set->rows, set->n, sizeof *set->rows);
    ampi_free(s, set->params, set->n, sizeof *set->params);
    ampi_free(s, (void *)set->names, set->n, sizeof *set->names);
    ampi_free(s, set->text, set->text_bytes, 1);
    ampi_free(s, set, 1, sizeof *set);
}

/* A set of n rows that are still to be filled. */
AMPI_PRIVATE amp_result ampi_set_new(amp_context *amp, const char *function, amp_set **out, int64_t n,
                                     int with_params) {
    const amp_system *s = ampi_context_system(amp);
    amp_result r;
    amp_set *set;
    AMPI_TRY(ampi_alloc(s, function, (void **)out, 1, sizeof *set));
    set = *out;
    set->amp = amp;
    set->n = n;
    set->divisor = 1;
    r = ampi_alloc(s, function, (void **)&set->rows, n, sizeof *set->rows);
    if (r == AMP_OK) r = ampi_alloc(s, function, (void **)&set->names, n, sizeof *set->names);
    if (r == AMP_OK && with_params) r = ampi_alloc(s, function, (void **)&set->params, n, sizeof *set->params);
    if (r == AMP_OK)
        r = ampi_alloc_part(amp, AMPI_PART_OPTIMIZER, (void **)&set->table, n * (int64_t)sizeof *set->table);
    if (r == AMP_OK) r = ampi_alloc_part(amp, AMPI_PART_OPTIMIZER, (void **)&set->found, (int64_t)sizeof *set->found);
    if (r == AMP_OK) return AMP_OK;
    amp_set_destroy(set);
    *out = NULL;
    return r;
}

/* What gradients are averaged by. */
AMPI_PRIVATE void ampi_set_average(amp_set *set, double accumulation) {
    set->divisor = accumulation * (set->sharded ? 1 : ampi_world(set->amp));
}

/* Everything is filled in: to the device. */
AMPI_PRIVATE amp_result ampi_set_finish(amp_set *set, double clip_norm, int32_t sharded, double accumulation) {
    amp_k_found found;
    memset(&found, 0, sizeof found);
    found.first_bad = -1;
    found.clip_coef = found.multiplier = found.factor = 1;
    found.beta1_power = found.beta2_power = 1;
    set->clip_norm = clip_norm;
    set->sharded = sharded;
    ampi_set_average(set, accumulation);
    AMPI_TRY(ampi_send(set->amp, set->found, &found, sizeof found));
    return amp_copy(set->amp, set->table, set->rows, set->n * (int64_t)sizeof *set->rows, AMP_COPY_TO_DEVICE);
}

AMPI_PRIVATE amp_result ampi_check_gradient(const char *function, const amp_param *p) {
    char a[64], b[64];
    if (!ampi_is_contiguous(&p->weight) || !ampi_is_contiguous(&p->grad))
        return ampi_fail(AMP_ERR_SHAPE, function, "%s: weight and gradient must be contiguous", p->name);
    if (amp_tensor_count(&p->grad) < 0 || amp_tensor_count(&p->grad) != amp_tensor_count(&p->weight))
        return ampi_fail(AMP_ERR_SHAPE, function, "%s: the gradient is %s, the weight %s", p->name,
                         ampi_shape_text(&p->grad, a, sizeof a), ampi_shape_text(&p->weight, b, sizeof b));
    if (p->grad.dtype != AMP_F32 && p->grad.dtype != p->weight.dtype)
        return ampi_fail(AMP_ERR_DTYPE, function, "%s: the gradient is %s, must be fp32 or the weight's %s", p->name,
                         amp_dtype_name(p->grad.dtype), amp_dtype_name(p->weight.dtype));
    if (!ampi_is_storage(p->weight.dtype))
        return ampi_fail(AMP_ERR_DTYPE, function, "%s: the weight is %s, must be fp32, fp16 or bf16", p->name,
                         amp_dtype_name(p->weight.dtype));
    return AMP_OK;
}

AMPI_PRIVATE amp_result ampi_check_params(const char *function, const amp_param *params, int64_t n,
                                          int64_t *with_grad) {
    int64_t i, j;
    *with_grad = 0;
    for (i = 0; i < n; i++) {
        if (params[i].name == NULL)
            return ampi_fail(AMP_ERR_NULL, function, "parameter %lld has no name", (long long)i);
        if (params[i].grad.data == NULL) continue;
        AMPI_TRY(ampi_check_gradient(function, &params[i]));
        for (j = 0; j < i; j++)
            if (strcmp(params[j].name, params[i].name) == 0)
                return ampi_fail(AMP_ERR_NAME, function, "two parameters are called %s", params[i].name);
        ++*with_grad;
    }
    return AMP_OK;
}

/* Weights that are read as a whole, those without a gradient too. */
AMPI_PRIVATE amp_result ampi_check_weights_of(const char *function, const amp_param *params, int64_t n) {
    int64_t i;
    for (i = 0; i < n; i++)
        if (params[i].weight.data == NULL || amp_tensor_count(&params[i].weight) < 0 || !ampi_is_contiguous(&params[i].weight) ||
            !ampi_is_storage(params[i].weight.dtype))
            return ampi_fail(AMP_ERR_SHAPE, function, "parameter %lld: the weight must be contiguous, in fp32, fp16 or bf16", (long long)i);
    return AMP_OK;
}

AMPI_PRIVATE void ampi_set_fill_params(amp_set *set, amp_param *params, int64_t n) {
    int64_t i, r = 0;
    for (i = 0; i < n; i++) {
        amp_param *p = &params[i];
        amp_k_tensor *row = &set->rows[r];
        if (p->grad.data == NULL) continue;
        row->weight = p->weight.data;
        row->weight_dtype = p->weight.dtype;
        row->grad = p->grad.data;
        row->grad_dtype = p->grad.dtype;
        row->count = amp_tensor_count(&p->grad);
        row->live = 1;
        set->params[r] = p;
        set->names[r++] = p->name;
    }
}

AMPI_PRIVATE amp_result ampi_check_ranges(const char *function, const amp_range *ranges, int64_t n) {
    int64_t i;
    for (i = 0; i < n; i++) {
        const amp_range *range = &ranges[i];
        const char *name = range->name ? range->name : "range";
        if (range->count < 0)
            return ampi_fail(AMP_ERR_RANGE, function, "%s %lld: count = %lld, must be 0 or more", name,
                             (long long)i, (long long)range->count);
        if (range->data == NULL && range->count > 0)
            return ampi_fail(AMP_ERR_NULL, function, "%s %lld: data is NULL", name, (long long)i);
        if (!ampi_is_storage(range->dtype) && range->dtype != AMP_F64)
            return ampi_fail(AMP_ERR_DTYPE, function, "%s %lld: %s, must be fp32, fp16, bf16 or fp64", name,
                             (long long)i, amp_dtype_name(range->dtype));
    }
    return AMP_OK;
}

AMPI_PRIVATE amp_result ampi_set_fill_ranges(amp_set *set, const amp_range *ranges) {
    int64_t i;
    AMPI_TRY(ampi_check_ranges("amp_set_create", ranges, set->n));
    for (i = 0; i < set->n; i++) {
        const amp_range *range = &ranges[i];
        set->rows[i].grad = range->data;
        set->rows[i].grad_dtype = range->dtype;
        set->rows[i].count = range->count;
        set->rows[i].live = 1;
        set->names[i] = range->name;
    }
    return ampi_copy_texts(set->amp, "amp_set_create", set->names, set->n, &set->text, &set->text_bytes);
}

AMPI_PRIVATE amp_result ampi_check_clip(const char *function, double clip_norm) {
    if (clip_norm >= 0 && amp_is_finite_f64(&clip_norm)) return AMP_OK;
    return ampi_fail(AMP_ERR_RANGE, function, ".clip_norm = %g, must be 0 (none) or positive and finite", clip_norm);
}

AMP_API amp_result amp_set_create_v(amp_context *amp, amp_set **out, const amp_set_desc *desc, uint64_t abi) {
    int64_t n;
    amp_result r;
    AMPI_TRY(ampi_check_abi("amp_set_create", abi, AMP_ABI(amp_set_desc)));
    if (out != NULL) *out = NULL;
    if (amp == NULL || out == NULL || desc == NULL)
        return ampi_fail(AMP_ERR_NULL, "amp_set_create", "amp, out or desc is NULL");
    if (desc->n_params < 0 || desc->n_ranges < 0)
        return ampi_fail(AMP_ERR_RANGE, "amp_set_create", ".n_params or .n_ranges is negative");
    if ((desc->params != NULL) == (desc->ranges != NULL))
        return ampi_fail(AMP_ERR_CONFLICT, "amp_set_create", "give .params or .ranges, %s",
                         desc->params ? "not both" : "neither is there");
    AMPI_TRY(ampi_check_clip("amp_set_create", desc->clip_norm));
    n = desc->n_ranges;
    if (desc->params != NULL) AMPI_TRY(ampi_check_params("amp_set_create", desc->params, desc->n_params, &n));
    AMPI_TRY(ampi_set_new(amp, "amp_set_create", out, n, desc->params != NULL));
    if (desc->params != NULL) ampi_set_fill_params(*out, desc->params, desc->n_params);
    r = desc->ranges != NULL ? ampi_set_fill_ranges(*out, desc->ranges) : AMP_OK;
    if (r == AMP_OK) r = ampi_set_finish(*out, desc->clip_norm, desc->sharded, 1);
    if (r == AMP_OK) return AMP_OK;
    amp_set_destroy(*out);
    *out = NULL;
    return r;
}

AMPI_PRIVATE const char *ampi_set_name(const amp_set *set, int64_t row) {
    return row < 0 || row >= set->n ? NULL : set->names[row];
}

AMP_API amp_result amp_set_found(const amp_set *set, amp_found *out) {
    amp_k_found f;
    if (set == NULL || out == NULL) return ampi_fail(AMP_ERR_NULL, "amp_set_found", "set or out is NULL");
    AMPI_TRY(ampi_fetch(set->amp, &f, set->found, sizeof f));
    out->found_inf = ampi_is_set(f.found_inf);
    out->norm = f.norm;
    out->clip_coef = f.clip_coef;
    out->first_bad = ampi_set_name(set, f.first_bad);
    out->first_bad_index = f.first_bad;
    return AMP_OK;
}

AMP_API const amp_k_found *amp_set_device(const amp_set *set) { return set ? set->found : NULL; }

AMPI_PRIVATE amp_result ampi_set_scale(amp_set *set, const float *factor) {
    void *dev, *stream;
    const amp_backend *backend = ampi_backend(set->amp, &dev, &stream);
    amp_k_scale_ranges args;
    memset(&args, 0, sizeof args);
    args.table = set->table;
    args.tensors = set->n;
    args.factor = factor;
    return backend->scale_ranges(dev, &args, stream);
}

AMP_API amp_result amp_set_apply(amp_set *set) {
    amp_k_rule rule;
    if (set == NULL) return ampi_fail(AMP_ERR_NULL, "amp_set_apply", "set is NULL");
    AMPI_TRY(ampi_set_scale(set, &set->found->multiplier));
    rule = ampi_rule(AMP_RULE_APPLIED, NULL, set);
    return ampi_run_rule(set->amp, &rule);
}

/* Which rows have a gradient now.  With several ranks all take part in the sums, zeros where there is none. */
AMPI_PRIVATE amp_result ampi_set_refresh(amp_set *set) {
    int all = ampi_world(set->amp) > 1 && !set->sharded, changed = 0;
    int64_t i;
    if (set->params == NULL) return AMP_OK;
    for (i = 0; i < set->n; i++) {
        amp_k_tensor *row = &set->rows[i];
        amp_param *p = set->params[i];
        if (all && !p->grad_live) {
            AMPI_TRY(amp_fill(set->amp, row->grad, 0, row->count * (int64_t)amp_dtype_size(row->grad_dtype)));
            p->grad_live = 1;
        }
        changed |= row->live != (p->grad_live != 0);
        row->live = p->grad_live != 0;
    }
    if (!changed) return AMP_OK;
    return amp_copy(set->amp, set->table, set->rows, set->n * (int64_t)sizeof *set->rows, AMP_COPY_TO_DEVICE);
}

AMPI_PRIVATE amp_result ampi_reduce(const amp_context *amp, void *data, int64_t count, amp_dtype dtype,
                                    amp_reduce_op op) {
    const amp_reducer *r = &ampi_settings(amp)->reducer;
    void *dev, *stream;
    int code;
    if (ampi_world(amp) == 1 || count == 0) return AMP_OK;
    ampi_backend(amp, &dev, &stream);
    code = r->reduce(r->user, data, count, dtype, op, stream);
    if (code == 0) return AMP_OK;
    return ampi_fail(AMP_ERR_REDUCE, "reducer", "%lld x %s, %s: the hook returned %d", (long long)count,
                     amp_dtype_name(dtype), op == AMP_REDUCE_SUM ? "sum" : "max", code);
}

AMPI_PRIVATE amp_result ampi_run_check(amp_set *set, const float *multiply) {
    void *dev, *stream;
    const amp_backend *backend = ampi_backend(set->amp, &dev, &stream);
    amp_k_check args;
    memset(&args, 0, sizeof args);
    args.table = set->table;
    args.tensors = set->n;
    args.multiply = multiply;
    args.found = set->found;
    return backend->check(dev, &args, stream);
}

/* The whole check; scaler is enabled or NULL.  The end of a cycle combines ranks; a micro-batch inside it (for
   clip_each) is a rank's own affair, with its own average. */
AMPI_PRIVATE amp_result ampi_check_set(amp_set *set, amp_scaler *scaler, amp_check_mode mode, double divisor, int last) {
    amp_k_rule rule;
    int64_t i;
    AMPI_TRY(ampi_set_refresh(set));
    for (i = 0; last && !set->sharded && i < set->n; i++)
        AMPI_TRY(ampi_reduce(set->amp, set->rows[i].grad, set->rows[i].count, set->rows[i].grad_dtype, AMP_REDUCE_SUM));
    set->unscaled = mode == AMP_CHECK_UNSCALE;
    rule = ampi_rule(AMP_RULE_BEGIN, scaler, set);
    rule.step_rule.divisor = divisor;
    rule.step_rule.apply_nonfinite = set->apply_nonfinite && scaler == NULL;
    AMPI_TRY(ampi_run_rule(set->amp, &rule));
    AMPI_TRY(ampi_run_check(set, set->unscaled ? &set->found->factor : NULL));
    if (last) AMPI_TRY(ampi_reduce(set->amp, &set->found->found_inf, 1, AMP_F32, AMP_REDUCE_MAX));
    if (last && set->sharded) AMPI_TRY(ampi_reduce(set->amp, &set->found->sum_sq, 1, AMP_F64, AMP_REDUCE_SUM));
    rule.kind = AMP_RULE_CHECKED;
    return ampi_run_rule(set->amp, &rule);
}

/* ---- The loss scaler */

typedef struct ampi_preset {
    const char *name;
    float init_scale, min_scale, max_scale;
    int32_t growth_interval, hysteresis;
    uint32_t bits;
} ampi_preset;

#define AMPI_POW2_126 8.5070591730234615866e37f
#define AMPI_FLT_MAX 3.40282346638528859812e38f
#define AMPI_TINY 1.17549435082228750797e-38f   /* 2^-126 */
#define AMPI_NONE (-1.0f)                       /* AMP_NO_FLOOR, AMP_NO_CEILING */

/* By amp_scaler_preset.  fairseq stops at or below 1e-4, so its floor is the next number above. */
#define AMPI_DEEPSPEED_FUSED_BITS (AMP_SCALE_GUARDED | AMP_GROWTH_ONE_LATER | AMP_GROWTH_COUNTS_ON)
#define AMPI_KERAS_BITS (AMP_SCALE_GUARDED | AMP_GROWTH_REFUSES_INF)
#define AMPI_FAIRSEQ_BITS (AMP_SCALE_GUARDED | AMP_FLOOR_REFUSES | AMP_OVERFLOWS_KEPT)
static const ampi_preset ampi_presets[] = {
    {"default",         65536,        1,              AMPI_POW2_126, 2000, 1, AMP_SCALE_GUARDED},
    {"torch",           65536,        AMPI_NONE,      AMPI_NONE,     2000, 1, AMP_GROWTH_REFUSES_INF},
    {"apex",            65536,        AMPI_NONE,      16777216,      2000, 1, AMP_SCALE_GUARDED},
    {"megatron",        4294967296.f, 1,              AMPI_NONE,     1000, 2, AMP_SCALE_GUARDED},
    {"deepspeed",       65536,        1,              AMPI_NONE,     1000, 2, AMP_SCALE_GUARDED},
    {"deepspeed_fused", 65536,        1,              AMPI_NONE,     1000, 1, AMPI_DEEPSPEED_FUSED_BITS},
    {"fairseq",         32768,        1.00000005e-4f, AMPI_NONE,     2000, 1, AMPI_FAIRSEQ_BITS},
    {"metaseq",         4,            0.03125f,       AMPI_NONE,     256,  1, AMPI_FAIRSEQ_BITS | AMP_WINDOW_MOVES},
    {"flax",            65536,        AMPI_TINY,      AMPI_FLT_MAX,  2000, 1, AMP_SCALE_GUARDED | AMP_GROWTH_ONE_LATER},
    {"keras",           32768,        1,              AMPI_NONE,     2000, 1, AMPI_KERAS_BITS}
};
enum { AMPI_PRESETS = sizeof ampi_presets / sizeof ampi_presets[0] };

/* Not 0; by bits, so that NaN is not taken for "not given". */
AMPI_PRIVATE int ampi_is_given(double value) { return ampi_bits_f64(value) << 1 != 0; }

/* Every 0 replaced by its value. */
AMPI_PRIVATE void ampi_scaler_defaults(amp_scaler_desc *d) {
    const ampi_preset *p = &ampi_presets[d->preset];
    int livelock = d->preset != AMP_SCALER_MEGATRON && d->preset != AMP_SCALER_DEEPSPEED;
    if (!ampi_is_set(d->init_scale)) d->init_scale = p->init_scale;
    if (!ampi_is_set(d->min_scale)) d->min_scale = p->min_scale;
    if (!ampi_is_set(d->max_scale)) d->max_scale = p->max_scale;
    if (d->growth_interval == 0) d->growth_interval = p->growth_interval;
    if (d->hysteresis == 0) d->hysteresis = p->hysteresis;
    if (!ampi_is_given(d->growth_factor)) d->growth_factor = 2;
    if (!ampi_is_given(d->backoff_factor)) d->backoff_factor = 0.5;
    if (!ampi_is_given(d->tolerance)) d->tolerance = d->hysteresis > 1 && livelock ? 0.25 : (double)AMP_ZERO;
}

AMPI_PRIVATE amp_result ampi_check_factors(const char *function, double growth, double backoff, int32_t interval) {
    if (!amp_is_finite_f64(&growth) || !(growth > 1))
        return ampi_fail(AMP_ERR_RANGE, function, ".growth_factor = %g, must be above 1 and finite", growth);
    if (!amp_is_finite_f64(&backoff) || !(backoff > 0 && backoff < 1))
        return ampi_fail(AMP_ERR_RANGE, function, ".backoff_factor = %g, must be between 0 and 1", backoff);
    if (interval < 1 && interval != AMP_NO_INTERVAL)
        return ampi_fail(AMP_ERR_RANGE, function, ".growth_interval = %d, must be 1 or more, or AMP_NO_INTERVAL",
                         interval);
    return AMP_OK;
}

AMPI_PRIVATE int ampi_is_none(float limit) { return ampi_bits_f32(limit) == ampi_bits_f32(AMPI_NONE); }

AMPI_PRIVATE amp_result ampi_check_scale(const char *function, const char *field, float scale) {
    if (ampi_is_usable(scale)) return AMP_OK;
    return ampi_fail(AMP_ERR_SCALE, function, "%s = %g, must be from 2^-126 to 2^126", field, (double)scale);
}

/* Settings with every default filled in.  torch takes any scale, as PyTorch does; flax's own ceiling is beyond the
   guard. */
AMPI_PRIVATE amp_result ampi_check_scaler(const char *function, const amp_scaler_desc *d) {
    int floor = !ampi_is_none(d->min_scale), ceiling = !ampi_is_none(d->max_scale);
    int own = ampi_bits_f32(d->max_scale) == ampi_bits_f32(ampi_presets[d->preset].max_scale);
    AMPI_TRY(ampi_check_factors(function, d->growth_factor, d->backoff_factor, d->growth_interval));
    if (d->hysteresis < 1)
        return ampi_fail(AMP_ERR_RANGE, function, ".hysteresis = %d, must be 1 or more", d->hysteresis);
    if (!amp_is_finite_f64(&d->tolerance) || !(d->tolerance <= 1) ||
        (!(d->tolerance >= 0) && !ampi_is_none((float)d->tolerance)))
        return ampi_fail(AMP_ERR_RANGE, function, ".tolerance = %g, must be 0 to 1, or AMP_ZERO", d->tolerance);
    if (d->preset != AMP_SCALER_TORCH) AMPI_TRY(ampi_check_scale(function, ".init_scale", d->init_scale));
    if (floor) AMPI_TRY(ampi_check_scale(function, ".min_scale", d->min_scale));
    if (ceiling && !own) AMPI_TRY(ampi_check_scale(function, ".max_scale", d->max_scale));
    if ((floor && d->init_scale < d->min_scale) || (ceiling && d->init_scale > d->max_scale))
        return ampi_fail(AMP_ERR_RANGE, function, ".init_scale = %g, must be from .min_scale = %g to .max_scale = %g",
                         (double)d->init_scale, (double)d->min_scale, (double)d->max_scale);
    return AMP_OK;
}

/* The constants of the rule.  A ceiling of "none" is infinity, by its bits. */
AMPI_PRIVATE amp_k_scaler_rule ampi_scaler_rule(const amp_scaler_desc *d) {
    amp_k_scaler_rule r;
    memset(&r, 0, sizeof r);
    r.growth_factor = d->growth_factor;
    r.backoff_factor = d->backoff_factor;
    r.tolerance = d->tolerance > 0 ? d->tolerance : 0;
    r.min_scale = d->min_scale > 0 ? d->min_scale : 0;
    r.max_scale = d->max_scale > 0 ? d->max_scale : ampi_f32_of_bits(0x7f800000u);
    r.growth_interval = d->growth_interval;
    r.hysteresis = d->hysteresis;
    r.bits = ampi_presets[d->preset].bits;
    r.frozen = d->frozen != 0;
    return r;
}

AMPI_PRIVATE amp_k_scaler ampi_scaler_start(const amp_scaler_desc *d) {
    amp_k_scaler s;
    memset(&s, 0, sizeof s);
    s.scale = s.previous_scale = d->disable ? 1.0f : d->init_scale;
    s.inv_scale = ampi_inverse(s.scale);
    s.growth_interval = d->growth_interval;
    s.hysteresis_left = d->hysteresis;
    return s;
}

AMP_API amp_result amp_scaler_create_v(amp_context *amp, amp_scaler **out, const amp_scaler_desc *desc, uint64_t abi) {
    amp_scaler_desc d;
    amp_k_scaler start;
    amp_scaler *scaler;
    amp_result r;
    AMPI_TRY(ampi_check_abi("amp_scaler_create", abi, AMP_ABI(amp_scaler_desc)));
    if (out != NULL) *out = NULL;
    if (amp == NULL || out == NULL) return ampi_fail(AMP_ERR_NULL, "amp_scaler_create", "amp or out is NULL");
    memset(&d, 0, sizeof d);
    if (desc != NULL) d = *desc;
    if ((int)d.preset < 0 || (int)d.preset >= AMPI_PRESETS)
        return ampi_fail(AMP_ERR_RANGE, "amp_scaler_create", ".preset = %d, must be 0 (default) to %d", (int)d.preset,
                         AMPI_PRESETS - 1);
    if (ampi_settings(amp)->level == AMP_LEVEL_O0) d.disable = 1;
    ampi_scaler_defaults(&d);
    AMPI_TRY(ampi_check_scaler("amp_scaler_create", &d));
    AMPI_TRY(ampi_alloc(ampi_context_system(amp), "amp_scaler_create", (void **)&scaler, 1, sizeof *scaler));
    scaler->amp = amp;
    scaler->desc = d;
    scaler->rule = ampi_scaler_rule(&d);
    start = ampi_scaler_start(&d);
    r = ampi_alloc_part(amp, AMPI_PART_OPTIMIZER, (void **)&scaler->device, (int64_t)sizeof start);
    if (r == AMP_OK) r = ampi_send(amp, scaler->device, &start, sizeof start);
    if (r == AMP_OK) *out = scaler;
    else amp_scaler_destroy(scaler);
    return r;
}

AMPI_PRIVATE void ampi_scaler_release_sets(amp_scaler *scaler) {
    while (scaler->sets != NULL) ampi_set_unlink(scaler->sets);
    scaler->checked = 0;
}

AMP_API void amp_scaler_destroy(amp_scaler *scaler) {
    if (scaler == NULL) return;
    ampi_settings_changed(scaler->amp);
    ampi_scaler_release_sets(scaler);
    amp_free(scaler->amp, scaler->device);
    ampi_free(ampi_context_system(scaler->amp), scaler, 1, sizeof *scaler);
}

AMP_API amp_result amp_scaler_query(const amp_scaler *scaler, amp_scaler_desc *out) {
    if (scaler == NULL || out == NULL) return ampi_fail(AMP_ERR_NULL, "amp_scaler_query", "scaler or out is NULL");
    *out = scaler->desc;
    return AMP_OK;
}

AMP_API const float *amp_scaler_seed(const amp_scaler *scaler) { return scaler ? &scaler->device->scale : NULL; }
AMP_API const amp_k_scaler *amp_scaler_device(const amp_scaler *scaler) { return scaler ? scaler->device : NULL; }

AMP_API amp_result amp_scaler_get(const amp_scaler *scaler, amp_k_scaler *out) {
    if (scaler == NULL || out == NULL) return ampi_fail(AMP_ERR_NULL, "amp_scaler_get", "scaler or out is NULL");
    return ampi_fetch(scaler->amp, out, scaler->device, sizeof *out);
}

AMP_API float amp_scaler_scale(const amp_scaler *scaler) {
    amp_k_scaler state;
    if (scaler == NULL || scaler->desc.disable || amp_scaler_get(scaler, &state) != AMP_OK) return 1;
    return state.scale;
}

AMP_API amp_result amp_scaler_set_scale(amp_scaler *scaler, float scale) {
    amp_k_rule rule;
    if (scaler == NULL) return ampi_fail(AMP_ERR_NULL, "amp_scaler_set_scale", "scaler is NULL");
    if (!scaler->desc.disable) {
        if (scaler->desc.preset != AMP_SCALER_TORCH) AMPI_TRY(ampi_check_scale("amp_scaler_set_scale", "scale", scale));
        rule = ampi_rule(AMP_RULE_SET_SCALE, scaler, NULL);
        rule.value = scale;
        AMPI_TRY(ampi_run_rule(scaler->amp, &rule));
    }
    ampi_scaler_release_sets(scaler);
    return AMP_OK;
}

AMP_API amp_result amp_scaler_set_rule(amp_scaler *scaler, double growth_factor, double backoff_factor,
                                       int32_t growth_interval) {
    amp_scaler_desc d;
    amp_k_rule rule;
    if (scaler == NULL) return ampi_fail(AMP_ERR_NULL, "amp_scaler_set_rule", "scaler is NULL");
    d = scaler->desc;
    if (ampi_is_given(growth_factor)) d.growth_factor = growth_factor;
    if (ampi_is_given(backoff_factor)) d.backoff_factor = backoff_factor;
    if (growth_interval != 0) d.growth_interval = growth_interval;
    AMPI_TRY(ampi_check_factors("amp_scaler_set_rule", d.growth_factor, d.backoff_factor, d.growth_interval));
    scaler->desc = d;
    scaler->rule = ampi_scaler_rule(&d);
    ampi_settings_changed(scaler->amp);
    if (growth_interval == 0) return AMP_OK;
    rule = ampi_rule(AMP_RULE_SET_INTERVAL, scaler, NULL);
    rule.value = d.preset == AMP_SCALER_TORCH ? 0.0f : 1.0f;
    return ampi_run_rule(scaler->amp, &rule);
}

/* A running scaler takes other settings, filled in and checked, of the same preset.  Turned on it starts anew; turned off
   its scale is 1. */
AMPI_PRIVATE amp_result ampi_scaler_change(amp_scaler *scaler, const amp_scaler_desc *d) {
    amp_k_scaler s = ampi_scaler_start(d);
    int keeps = d->preset == AMP_SCALER_TORCH;
    if (d->disable == scaler->desc.disable) {
        AMPI_TRY(amp_scaler_get(scaler, &s));
        if (d->hysteresis != scaler->desc.hysteresis) s.hysteresis_left = d->hysteresis;
        if (d->growth_interval != scaler->desc.growth_interval) {
            s.growth_interval = d->growth_interval;
            if (!keeps && s.growth_tracker >= s.growth_interval) s.growth_tracker = 0;
        }
    }
    AMPI_TRY(ampi_send(scaler->amp, scaler->device, &s, sizeof s));
    scaler->desc = *d;
    scaler->rule = ampi_scaler_rule(d);
    ampi_scaler_release_sets(scaler);
    ampi_settings_changed(scaler->amp);
    return AMP_OK;
}

/* A set serves one scaler between two updates of it. */
AMPI_PRIVATE amp_result ampi_check_owner(const char *function, const amp_set *set, const amp_scaler *scaler) {
    if (set->scaler == NULL || set->scaler == scaler) return AMP_OK;
    return ampi_fail(AMP_ERR_STATE, function,
                     "the set was checked by another scaler; call amp_scaler_update on that one first");
}

AMPI_PRIVATE amp_result ampi_refuse_fp16(const char *function, const amp_set *set, const amp_scaler *scaler) {
    int64_t i;
    if (scaler == NULL || scaler->desc.preset != AMP_SCALER_TORCH) return AMP_OK;
    for (i = 0; i < set->n; i++) {
        int live = set->params == NULL || set->params[i]->grad_live;
        if (live && set->rows[i].grad_dtype == AMP_F16)
            return ampi_fail(AMP_ERR_GRAD_16BIT, function, "%s is fp16", set->names[i] ? set->names[i] : "a range");
    }
    return AMP_OK;
}

/* Records a set that is checked in the graph being captured. */
AMPI_PRIVATE amp_result ampi_graph_note_set(amp_set *set) {
    amp_graph *graph = ampi_capture(set->amp);
    if (graph == NULL) return AMP_OK;
    AMPI_TRY(ampi_grow(set->amp, "amp_graph_begin", (void **)&graph->sets, graph->n_sets, &graph->set_room, sizeof(void *)));
    graph->sets[graph->n_sets++] = set;
    return AMP_OK;
}

AMP_API amp_result amp_scaler_check(amp_scaler *scaler, amp_set *set, amp_check_mode mode) {
    amp_scaler *enabled = ampi_enabled(scaler);
    if (scaler == NULL || set == NULL) return ampi_fail(AMP_ERR_NULL, "amp_scaler_check", "scaler or set is NULL");
    if (mode != AMP_CHECK_UNSCALE && mode != AMP_CHECK_READ)
        return ampi_fail(AMP_ERR_RANGE, "amp_scaler_check", "mode = %d, must be AMP_CHECK_UNSCALE or AMP_CHECK_READ",
                         (int)mode);
    AMPI_TRY(ampi_check_owner("amp_scaler_check", set, scaler));
    if (set->stage == AMPI_CHECKED)
        return ampi_fail(AMP_ERR_UNSCALED, "amp_scaler_check", "the set was checked since the last update");
    if (set->stage == AMPI_STEPPED)
        return ampi_fail(AMP_ERR_STEPPED, "amp_scaler_check", "check comes before the optimizer's step");
    AMPI_TRY(ampi_refuse_fp16("amp_scaler_check", set, enabled));
    AMPI_TRY(ampi_graph_note_set(set));
    AMPI_TRY(ampi_check_set(set, enabled, mode, set->divisor, 1));
    ampi_set_enter(set, scaler, AMPI_CHECKED);
    return AMP_OK;
}

AMP_API amp_result amp_scaler_update(amp_scaler *scaler) {
    amp_k_rule rule;
    if (scaler == NULL) return ampi_fail(AMP_ERR_NULL, "amp_scaler_update", "scaler is NULL");
    if (!scaler->checked)
        return ampi_fail(AMP_ERR_NO_CHECK, "amp_scaler_update", "nothing was checked since the last update");
    if (!scaler->desc.disable) {
        rule = ampi_rule(AMP_RULE_UPDATE, scaler, NULL);
        AMPI_TRY(ampi_run_rule(scaler->amp, &rule));
    }
    ampi_scaler_release_sets(scaler);
    return AMP_OK;
}

AMP_API amp_result amp_scaler_rescale(amp_scaler *scaler, amp_set *set, float old_scale) {
    amp_k_rule rule;
    if (scaler == NULL || set == NULL) return ampi_fail(AMP_ERR_NULL, "amp_scaler_rescale", "scaler or set is NULL");
    if (scaler->desc.disable) return AMP_OK;
    if (ampi_is_set(old_scale)) AMPI_TRY(ampi_check_scale("amp_scaler_rescale", "old_scale", old_scale));
    AMPI_TRY(ampi_set_refresh(set));
    rule = ampi_rule(AMP_RULE_RATIO, scaler, set);
    rule.value = old_scale;
    AMPI_TRY(ampi_run_rule(set->amp, &rule));
    return ampi_set_scale(set, &set->found->factor);
}

/* ---- Saving.  Structs are written field by field, so the records do not depend on their layout. */

/* "<prefix>.<name>", or "<prefix>.<name>.<i>" for i >= 0, in key. */
AMPI_PRIVATE amp_result ampi_key(const char *function, char key[64], const char *prefix, const char *name, int64_t i) {
    int n;
    if (prefix == NULL) return ampi_fail(AMP_ERR_NULL, function, "prefix is NULL");
    n = i < 0 ? snprintf(key, 64, "%s.%s", prefix, name) : snprintf(key, 64, "%s.%s.%lld", prefix, name, (long long)i);
    if (prefix[0] != 0 && strlen(prefix) <= 40 && n < 64) return AMP_OK;
    return ampi_fail(AMP_ERR_RANGE, function, "prefix \"%s\" must have 1 to 40 bytes", prefix);
}

AMPI_PRIVATE amp_result ampi_put(amp_state *state, const char *prefix, const char *name, int64_t i, amp_dtype dtype,
                                 const void *values, int64_t n) {
    char key[64];
    AMPI_TRY(ampi_key("save", key, prefix, name, i));
    return amp_state_put(state, key, dtype, values, n);
}

AMPI_PRIVATE amp_result ampi_get(const amp_state *state, const char *prefix, const char *name, int64_t i,
                                 amp_dtype dtype, void *values, int64_t n) {
    char key[64];
    AMPI_TRY(ampi_key("load", key, prefix, name, i));
    return amp_state_get(state, key, dtype, values, n);
}

enum { AMPI_DISABLED_CHECKED = 3, AMPI_SAVED_SCALES = 3, AMPI_SAVED_COUNTERS = 10, AMPI_SAVED_FACTORS = 6, AMPI_SAVED_RULE = 3 };
#define AMPI_COUNT_MOST ((int64_t)1 << 53)      /* of saved counters: what fp64 holds, and what still can be counted on from */

/* before: what the records will be added to. */
AMPI_PRIVATE amp_result ampi_save_scaler(const amp_scaler *scaler, const amp_state *before, amp_state *state, const char *prefix) {
    amp_k_scaler s;
    float scales[AMPI_SAVED_SCALES];
    double factors[AMPI_SAVED_FACTORS];
    int64_t counters[AMPI_SAVED_COUNTERS], rule[AMPI_SAVED_RULE];
    int32_t disabled = scaler->desc.disable ? scaler->checked ? AMPI_DISABLED_CHECKED : 1 : 0;
    char key[64];
    const amp_scaler_desc *d = &scaler->desc;
    AMPI_TRY(ampi_key("amp_scaler_save", key, prefix, "disabled", -1));
    if (disabled || amp_state_count(before, key, NULL) >= 0)   /* an earlier save's record must not stay */
        AMPI_TRY(amp_state_put(state, key, AMP_I32, &disabled, 1));
    if (disabled) return AMP_OK;
    AMPI_TRY(amp_scaler_get(scaler, &s));
    scales[0] = s.scale; scales[1] = s.previous_scale; scales[2] = s.found_inf;
    counters[0] = s.growth_tracker; counters[1] = s.growth_interval; counters[2] = s.hysteresis_left;
    counters[3] = s.overflows; counters[4] = s.steps; counters[5] = s.at_floor; counters[6] = s.updates;
    counters[7] = s.skips; counters[8] = s.consecutive_skips; counters[9] = scaler->checked;
    factors[0] = d->growth_factor; factors[1] = d->backoff_factor; factors[2] = d->tolerance;
    factors[3] = (double)d->min_scale; factors[4] = (double)d->max_scale; factors[5] = (double)d->init_scale;
    rule[0] = d->preset; rule[1] = d->growth_interval; rule[2] = d->hysteresis;
    AMPI_TRY(ampi_put(state, prefix, "scale", -1, AMP_F32, scales, AMPI_SAVED_SCALES));
    AMPI_TRY(ampi_put(state, prefix, "counters", -1, AMP_I64, counters, AMPI_SAVED_COUNTERS));
    AMPI_TRY(ampi_put(state, prefix, "factors", -1, AMP_F64, factors, AMPI_SAVED_FACTORS));
    return ampi_put(state, prefix, "rule", -1, AMP_I64, rule, AMPI_SAVED_RULE);
}

AMP_API amp_result amp_scaler_save(const amp_scaler *scaler, amp_state *state, const char *prefix) {
    amp_state *own;
    amp_result r;
    if (scaler == NULL || state == NULL) return ampi_fail(AMP_ERR_NULL, "amp_scaler_save", "scaler or state is NULL");
    AMPI_TRY(amp_state_create(&own, &state->system));
    r = ampi_save_scaler(scaler, state, own, prefix);
    if (r == AMP_OK) r = ampi_state_move(state, own, "amp_scaler_save");
    amp_state_destroy(own);
    return r;
}

/* Saved numbers as a state that the rule can go on from. */
AMPI_PRIVATE amp_result ampi_saved_state(const amp_scaler_desc *d, const float *scales, const int64_t *counters,
                                         amp_k_scaler *s) {
    int i;
    for (i = 0; i < AMPI_SAVED_COUNTERS; i++)
        if (counters[i] < (i == 1 ? AMP_NO_INTERVAL : 0) || counters[i] > (i < 6 ? INT32_MAX : AMPI_COUNT_MOST))
            return ampi_fail(AMP_ERR_RANGE, "amp_scaler_load", "saved counter %d = %lld is out of range", i,
                             (long long)counters[i]);
    if (counters[1] == 0 || counters[2] > d->hysteresis)
        return ampi_fail(AMP_ERR_RANGE, "amp_scaler_load", "saved interval %lld or hysteresis %lld is out of range",
                         (long long)counters[1], (long long)counters[2]);
    if (d->preset != AMP_SCALER_TORCH) AMPI_TRY(ampi_check_scale("amp_scaler_load", "scale", scales[0]));
    memset(s, 0, sizeof *s);
    s->scale = scales[0];
    s->inv_scale = ampi_inverse(s->scale);
    s->previous_scale = scales[1];
    s->found_inf = ampi_is_set(scales[2]) ? 1.0f : 0.0f;
    s->growth_tracker = (int32_t)counters[0];
    s->growth_interval = (int32_t)counters[1];
    s->hysteresis_left = (int32_t)counters[2];
    s->overflows = (int32_t)counters[3]; s->steps = (int32_t)counters[4]; s->at_floor = (int32_t)counters[5];
    s->updates = counters[6]; s->skips = counters[7]; s->consecutive_skips = counters[8];
    return AMP_OK;
}

AMPI_PRIVATE amp_result ampi_saved_settings(const amp_state *state, const char *prefix, amp_scaler_desc *d) {
    double factors[AMPI_SAVED_FACTORS];
    int64_t rule[AMPI_SAVED_RULE];
    AMPI_TRY(ampi_get(state, prefix, "factors", -1, AMP_F64, factors, AMPI_SAVED_FACTORS));
    AMPI_TRY(ampi_get(state, prefix, "rule", -1, AMP_I64, rule, AMPI_SAVED_RULE));
    if (rule[0] != (int64_t)d->preset)
        return ampi_fail(AMP_ERR_MISMATCH, "amp_scaler_load", "saved by preset %s, this scaler has %s",
                         rule[0] >= 0 && rule[0] < AMPI_PRESETS ? ampi_presets[rule[0]].name : "?",
                         ampi_presets[d->preset].name);
    if (rule[1] < INT32_MIN || rule[1] > INT32_MAX || rule[2] < 1 || rule[2] > INT32_MAX)
        return ampi_fail(AMP_ERR_RANGE, "amp_scaler_load", "saved interval %lld or hysteresis %lld is out of range",
                         (long long)rule[1], (long long)rule[2]);
    d->growth_factor = factors[0]; d->backoff_factor = factors[1]; d->tolerance = factors[2];
    d->min_scale = (float)factors[3]; d->max_scale = (float)factors[4]; d->init_scale = (float)factors[5];
    d->growth_interval = (int32_t)rule[1]; d->hysteresis = (int32_t)rule[2];
    return ampi_check_scaler("amp_scaler_load", d);
}

AMP_API amp_result amp_scaler_load(amp_scaler *scaler, const amp_state *state, const char *prefix) {
    amp_scaler_desc d;
    amp_k_scaler s;
    float scales[AMPI_SAVED_SCALES];
    int64_t counters[AMPI_SAVED_COUNTERS];
    int32_t disabled = 0;
    char key[64];
    if (scaler == NULL || state == NULL) return ampi_fail(AMP_ERR_NULL, "amp_scaler_load", "scaler or state is NULL");
    AMPI_TRY(ampi_key("amp_scaler_load", key, prefix, "disabled", -1));
    if (amp_state_count(state, key, NULL) >= 0) AMPI_TRY(amp_state_get(state, key, AMP_I32, &disabled, 1));
    if (scaler->desc.disable) {
        ampi_scaler_release_sets(scaler);
        scaler->checked = disabled == AMPI_DISABLED_CHECKED ||
                          (!disabled && ampi_get(state, prefix, "counters", -1, AMP_I64, counters, AMPI_SAVED_COUNTERS) == AMP_OK && counters[9] != 0);
        return AMP_OK;
    }
    if (disabled) return ampi_fail(AMP_ERR_MISMATCH, "amp_scaler_load", "%s was saved by a disabled scaler", prefix);
    d = scaler->desc;
    AMPI_TRY(ampi_get(state, prefix, "scale", -1, AMP_F32, scales, AMPI_SAVED_SCALES));
    AMPI_TRY(ampi_get(state, prefix, "counters", -1, AMP_I64, counters, AMPI_SAVED_COUNTERS));
    AMPI_TRY(ampi_saved_settings(state, prefix, &d));
    AMPI_TRY(ampi_saved_state(&d, scales, counters, &s));
    AMPI_TRY(ampi_send(scaler->amp, scaler->device, &s, sizeof s));
    ampi_scaler_release_sets(scaler);
    scaler->checked = counters[9] != 0;
    scaler->desc = d;
    scaler->rule = ampi_scaler_rule(&d);
    ampi_settings_changed(scaler->amp);
    return AMP_OK;
}

/* ---- Optimizers */

/* 0 means the default, AMP_ZERO 0. */
AMPI_PRIVATE double ampi_or(double value, double otherwise) {
    return !ampi_is_given(value) ? otherwise : ampi_is_none((float)value) ? 0 : value;
}

AMPI_PRIVATE amp_result ampi_check_number(const char *field, double value, double limit) {
    if (amp_is_finite_f64(&value) && value >= 0 && value < limit) return AMP_OK;
    return ampi_fail(AMP_ERR_RANGE, "amp_optimizer_create", "%s = %g, must be from 0 to below %g", field, value, limit);
}

AMPI_PRIVATE void ampi_optimizer_defaults(amp_optimizer_desc *d, amp_level level) {
    if (d->kind == AMP_OPTIMIZER_DEFAULT) d->kind = AMP_ADAMW;
    d->lr = ampi_or(d->lr, 1e-3);
    d->beta1 = ampi_or(d->beta1, 0.9);
    d->beta2 = ampi_or(d->beta2, 0.999);
    d->eps = ampi_or(d->eps, 1e-8);
    if (d->accumulation == 0) d->accumulation = 1;
    if (d->outcome_lag == 0) d->outcome_lag = 2;
    if (d->master == AMP_MASTER_DEFAULT) d->master = level == AMP_LEVEL_O3 ? AMP_MASTER_NONE : AMP_MASTER_F32;
    if (d->moments == AMP_DTYPE_DEFAULT) d->moments = AMP_F32;
}

/* Whether a master and moments of this kind can be; level O3 is the one without masters. */
AMPI_PRIVATE amp_result ampi_check_storage(const amp_optimizer_desc *d, amp_level level, const char *of,
                                           amp_master_kind master, amp_dtype moments) {
    const char *function = "amp_optimizer_create";
    if ((int)master < 0 || master > AMP_MASTER_STOCHASTIC)
        return ampi_fail(AMP_ERR_RANGE, function, "%s.master = %d, must be an amp_master_kind", of, (int)master);
    if (level == AMP_LEVEL_O3 && (master == AMP_MASTER_F32 || master == AMP_MASTER_REMAINDER))
        return ampi_fail(AMP_ERR_CONFLICT, function, "%s.master asks for masters, and level O3 has none: open the context "
                         "at level O2", of);
    if (moments != AMP_DTYPE_DEFAULT && moments != AMP_F32 && moments != AMP_BF16)
        return ampi_fail(AMP_ERR_DTYPE, function, "%s.moments = %s, must be fp32 or bf16", of, amp_dtype_name(moments));
    if (moments == AMP_BF16 && d->kind == AMP_SGD && !(d->momentum > 0))
        return ampi_fail(AMP_ERR_CONFLICT, function, "%s.moments is given, and SGD without .momentum has none", of);
    return AMP_OK;
}

AMPI_PRIVATE amp_result ampi_check_optimizer(const amp_optimizer_desc *d, amp_level level) {
    const char *function = "amp_optimizer_create";
    int64_t i;
    if ((int)d->kind < 0 || d->kind > AMP_SGD)
        return ampi_fail(AMP_ERR_RANGE, function, ".kind = %d, must be AMP_ADAMW or AMP_SGD", (int)d->kind);
    AMPI_TRY(ampi_check_number(".lr", d->lr, 1e30));
    AMPI_TRY(ampi_check_number(".beta1", d->beta1, 1));
    AMPI_TRY(ampi_check_number(".beta2", d->beta2, 1));
    AMPI_TRY(ampi_check_number(".eps", d->eps, 1e30));
    AMPI_TRY(ampi_check_number(".weight_decay", d->weight_decay, 1e30));
    AMPI_TRY(ampi_check_number(".momentum", d->momentum, 1));
    AMPI_TRY(ampi_check_number(".dampening", d->dampening, 1e30));
    AMPI_TRY(ampi_check_clip(function, d->clip_norm));
    if (d->nesterov && (!(d->momentum > 0) || d->dampening > 0))
        return ampi_fail(AMP_ERR_CONFLICT, function, ".nesterov needs .momentum above 0 and .dampening 0");
    if (d->accumulation < 1)
        return ampi_fail(AMP_ERR_RANGE, function, ".accumulation = %d, must be 1 or more", d->accumulation);
    if (d->outcome_lag != AMP_LAG_NONE && (d->outcome_lag < 0 || d->outcome_lag >= AMP_OUTCOMES))
        return ampi_fail(AMP_ERR_RANGE, function, ".outcome_lag = %d, must be 1 to %d, 0 (2) or AMP_LAG_NONE",
                         d->outcome_lag, AMP_OUTCOMES - 1);
    if (d->n_params < 0 || d->n_groups < 0)
        return ampi_fail(AMP_ERR_RANGE, function, ".n_params or .n_groups is negative");
    if (d->params == NULL || (d->groups == NULL && d->n_groups > 0))
        return ampi_fail(AMP_ERR_NULL, function, ".params or .groups is NULL");
    for (i = 0; i < d->n_groups; i++) {
        if (d->groups[i].match == NULL)
            return ampi_fail(AMP_ERR_NULL, function, "group %lld has no pattern", (long long)i);
        AMPI_TRY(ampi_check_number("a group's .lr_scale", ampi_or(d->groups[i].lr_scale, 1), 1e30));
        AMPI_TRY(ampi_check_number("a group's .weight_decay", ampi_or(d->groups[i].weight_decay, 0), 1e30));
        AMPI_TRY(ampi_check_storage(d, level, "a group's ", d->groups[i].master, d->groups[i].moments));
    }
    return ampi_check_storage(d, level, "", d->master, d->moments);
}

AMPI_PRIVATE amp_result ampi_copy_groups(amp_optimizer *o) {
    const amp_system *s = ampi_context_system(o->amp);
    int64_t i, n = o->desc.n_groups;
    AMPI_TRY(ampi_alloc(s, "amp_optimizer_create", (void **)&o->groups, n, sizeof *o->groups));
    AMPI_TRY(ampi_alloc(s, "amp_optimizer_create", (void **)&o->matches, n, sizeof *o->matches));
    for (i = 0; i < n; i++) o->matches[i] = o->desc.groups[i].match;
    AMPI_TRY(ampi_copy_texts(o->amp, "amp_optimizer_create", o->matches, n, &o->text, &o->text_bytes));
    for (i = 0; i < n; i++) {
        o->groups[i] = o->desc.groups[i];
        o->groups[i].match = o->matches[i];
    }
    o->desc.groups = o->groups;
    return AMP_OK;
}

/* Learning rate, decay and storage of each row. */
AMPI_PRIVATE void ampi_apply_groups(amp_optimizer *o) {
    int64_t i, g;
    for (i = 0; i < o->set->n; i++) {
        amp_k_tensor *row = &o->set->rows[i];
        const amp_group *group;
        row->lr_scale = 1;
        row->weight_decay = o->set->params[i]->weight.ndim >= 2 || o->desc.decay_vectors ? o->desc.weight_decay : 0;
        row->master_kind = o->desc.master;
        row->moment_dtype = o->desc.moments;
        for (g = 0; g < o->desc.n_groups && !ampi_match(o->groups[g].match, o->set->names[i]); g++) {}
        if (g < o->desc.n_groups) {
            group = &o->groups[g];
            row->lr_scale = ampi_or(group->lr_scale, 1);
            row->weight_decay = ampi_or(group->weight_decay, row->weight_decay);
            if (group->master != AMP_MASTER_DEFAULT) row->master_kind = group->master;
            if (group->moments != AMP_DTYPE_DEFAULT) row->moment_dtype = group->moments;
        }
        if (row->weight_dtype == AMP_F32) row->master_kind = AMP_MASTER_NONE;
    }
}

/* Remainders go with bf16 weights, and what is asked of 16-bit weights needs at least one. */
AMPI_PRIVATE amp_result ampi_check_weights(const amp_optimizer *o) {
    int64_t i, narrow = 0;
    for (i = 0; i < o->set->n; i++) {
        narrow += o->set->rows[i].weight_dtype != AMP_F32;
        if (o->set->rows[i].master_kind == AMP_MASTER_REMAINDER && o->set->rows[i].weight_dtype != AMP_BF16)
            return ampi_fail(AMP_ERR_CONFLICT, "amp_optimizer_create", "%s: .master = AMP_MASTER_REMAINDER needs a bf16 "
                             "weight, this one is %s", o->set->names[i], amp_dtype_name(o->set->rows[i].weight_dtype));
    }
    if (narrow > 0 || (o->desc.master != AMP_MASTER_REMAINDER && o->desc.master != AMP_MASTER_STOCHASTIC)) return AMP_OK;
    return ampi_fail(AMP_ERR_CONFLICT, "amp_optimizer_create", ".master = %s is for 16-bit weights, and all are fp32: "
                     "levels O2 and O3 keep them in 16 bits",
                     o->desc.master == AMP_MASTER_REMAINDER ? "AMP_MASTER_REMAINDER" : "AMP_MASTER_STOCHASTIC");
}

/* The three arrays a row may have, and bytes per element of each. */
enum { AMPI_M = 0, AMPI_V2 = 1, AMPI_MASTER = 2, AMPI_ARRAYS = 3 };

AMPI_PRIVATE int ampi_has_array(const amp_optimizer *o, const amp_k_tensor *row, int which) {
    if (which == AMPI_MASTER) return row->master_kind == AMP_MASTER_F32 || row->master_kind == AMP_MASTER_REMAINDER;
    return o->desc.kind == AMP_ADAMW || (which == AMPI_M && o->desc.momentum > 0);
}
AMPI_PRIVATE void **ampi_row_array(amp_k_tensor *row, int which) {
    return which == AMPI_M ? &row->m : which == AMPI_V2 ? &row->v : &row->master;
}
AMPI_PRIVATE int64_t ampi_array_size(const amp_k_tensor *row, int which) {
    return which == AMPI_MASTER ? row->master_kind == AMP_MASTER_REMAINDER ? 2 : 4 : row->moment_dtype == AMP_BF16 ? 2 : 4;
}

/* One block for the arrays of all rows, zeroed, each array at a multiple of 256 bytes. */
AMPI_PRIVATE amp_result ampi_optimizer_memory(amp_optimizer *o) {
    int64_t i, bytes = 0, at = 0;
    int a, pass;
    for (pass = 0; pass < 2; pass++) {
        if (pass == 1) AMPI_TRY(ampi_alloc_part(o->amp, AMPI_PART_OPTIMIZER, &o->memory, bytes));
        for (i = 0; i < o->set->n; i++)
            for (a = 0; a < AMPI_ARRAYS; a++) {
                amp_k_tensor *row = &o->set->rows[i];
                int64_t size = (row->count * ampi_array_size(row, a) + 255) / 256 * 256;
                if (!ampi_has_array(o, row, a)) continue;
                if (pass == 0) bytes += size;
                else if (bytes > 0) *ampi_row_array(row, a) = (char *)o->memory + at;
                at += pass * size;
            }
    }
    return amp_fill(o->amp, o->memory, 0, bytes);
}

AMPI_PRIVATE amp_result ampi_make_masters(amp_optimizer *o) {
    void *dev, *stream;
    const amp_backend *backend = ampi_backend(o->amp, &dev, &stream);
    int64_t i;
    for (i = 0; i < o->set->n; i++) {
        amp_k_tensor *row = &o->set->rows[i];
        amp_k_cast args;
        o->set->params[i]->master = ampi_has_remainder(row) ? NULL : row->master;
        if (row->master == NULL || row->count == 0) continue;
        if (ampi_has_remainder(row)) {          /* the weight is the master */
            AMPI_TRY(amp_fill(o->amp, row->master, 0, row->count * 2));
            continue;
        }
        memset(&args, 0, sizeof args);
        args.dst = row->master;
        args.src = row->weight;
        args.dst_dtype = AMP_F32;
        args.src_dtype = row->weight_dtype;
        args.n = row->count;
        AMPI_TRY(backend->cast(dev, &args, stream));
    }
    return AMP_OK;
}

AMPI_PRIVATE amp_result ampi_outcome_memory(amp_optimizer *o) {
    void *dev, *stream, *pinned;
    const amp_backend *backend = ampi_backend(o->amp, &dev, &stream);
    size_t bytes = AMP_OUTCOMES * sizeof *o->ring;
    int i;
    AMPI_TRY(ampi_alloc_part(o->amp, AMPI_PART_OPTIMIZER, (void **)&o->ring, (int64_t)bytes));
    AMPI_TRY(backend->alloc_pinned(dev, &pinned, bytes));
    o->outcomes = (amp_k_outcome *)pinned;
    for (i = 0; i < AMP_OUTCOMES; i++) AMPI_TRY(backend->event_create(dev, &o->events[i]));
    return AMP_OK;
}

AMPI_PRIVATE amp_result ampi_optimizer_build(amp_optimizer *o, int64_t rows) {
    AMPI_TRY(ampi_copy_groups(o));
    AMPI_TRY(ampi_set_new(o->amp, "amp_optimizer_create", &o->set, rows, 1));
    o->set->apply_nonfinite = o->desc.apply_nonfinite;
    ampi_set_fill_params(o->set, o->desc.params, o->desc.n_params);
    ampi_apply_groups(o);
    AMPI_TRY(ampi_check_weights(o));
    AMPI_TRY(ampi_optimizer_memory(o));
    AMPI_TRY(ampi_outcome_memory(o));
    AMPI_TRY(ampi_set_finish(o->set, o->desc.clip_norm, o->desc.sharded, o->desc.accumulation));
    return ampi_make_masters(o);
}

AMP_API amp_result amp_optimizer_create_v(amp_context *amp, amp_optimizer **out, const amp_optimizer_desc *desc,
                                          uint64_t abi) {
    amp_optimizer_desc d;
    amp_optimizer *o;
    amp_result r;
    int64_t rows;
    AMPI_TRY(ampi_check_abi("amp_optimizer_create", abi, AMP_ABI(amp_optimizer_desc)));
    if (out != NULL) *out = NULL;
    if (amp == NULL || out == NULL || desc == NULL)
        return ampi_fail(AMP_ERR_NULL, "amp_optimizer_create", "amp, out or desc is NULL");
    d = *desc;
    ampi_optimizer_defaults(&d, ampi_settings(amp)->level);
    AMPI_TRY(ampi_check_optimizer(&d, ampi_settings(amp)->level));
    AMPI_TRY(ampi_check_params("amp_optimizer_create", d.params, d.n_params, &rows));
    AMPI_TRY(ampi_alloc(ampi_context_system(amp), "amp_optimizer_create", (void **)&o, 1, sizeof *o));
    o->amp = amp;
    o->desc = d;
    r = ampi_optimizer_build(o, rows);
    if (r == AMP_OK) *out = o;
    else amp_optimizer_destroy(o);
    return r;
}

AMP_API void amp_optimizer_destroy(amp_optimizer *optimizer) {
    amp_optimizer *o = optimizer;
    const amp_backend *backend;
    const amp_system *s;
    void *dev, *stream;
    int64_t i;
    if (o == NULL) return;
    s = ampi_context_system(o->amp);
    backend = ampi_backend(o->amp, &dev, &stream);
    ampi_wait(o->amp);
    ampi_settings_changed(o->amp);
    for (i = 0; i < AMP_OUTCOMES; i++) if (o->events[i] != NULL) backend->event_destroy(dev, o->events[i]);
    for (i = 0; o->set != NULL && i < o->set->n; i++) if (o->set->params[i] != NULL) o->set->params[i]->master = NULL;
    if (o->outcomes != NULL) backend->free_pinned(dev, o->outcomes, AMP_OUTCOMES * sizeof *o->outcomes);
    amp_free(o->amp, o->ring);
    amp_free(o->amp, o->memory);
    amp_set_destroy(o->set);
    ampi_free(s, o->groups, o->desc.n_groups, sizeof *o->groups);
    ampi_free(s, (void *)o->matches, o->desc.n_groups, sizeof *o->matches);
    ampi_free(s, o->text, o->text_bytes, 1);
    ampi_free(s, o, 1, sizeof *o);
}

AMP_API amp_result amp_optimizer_query(const amp_optimizer *optimizer, amp_optimizer_desc *out) {
    if (optimizer == NULL || out == NULL)
        return ampi_fail(AMP_ERR_NULL, "amp_optimizer_query", "optimizer or out is NULL");
    *out = optimizer->desc;
    return AMP_OK;
}

AMP_API amp_set *amp_optimizer_set(amp_optimizer *optimizer) { return optimizer ? optimizer->set : NULL; }

AMP_API amp_result amp_optimizer_set_lr(amp_optimizer *optimizer, double lr) {
    if (optimizer == NULL) return ampi_fail(AMP_ERR_NULL, "amp_optimizer_set_lr", "optimizer is NULL");
    if (!amp_is_finite_f64(&lr) || !(lr >= 0))
        return ampi_fail(AMP_ERR_RANGE, "amp_optimizer_set_lr", "lr = %g, must be 0 or more and finite", lr);
    optimizer->desc.lr = lr;
    return AMP_OK;
}

AMP_API amp_result amp_optimizer_set_clip(amp_optimizer *optimizer, double clip_norm) {
    if (optimizer == NULL) return ampi_fail(AMP_ERR_NULL, "amp_optimizer_set_clip", "optimizer is NULL");
    AMPI_TRY(ampi_check_clip("amp_optimizer_set_clip", clip_norm));
    optimizer->desc.clip_norm = optimizer->set->clip_norm = clip_norm;
    ampi_settings_changed(optimizer->amp);
    return AMP_OK;
}

AMP_API amp_result amp_optimizer_set_accumulation(amp_optimizer *optimizer, int32_t accumulation) {
    amp_set *set;
    int64_t i;
    if (optimizer == NULL) return ampi_fail(AMP_ERR_NULL, "amp_optimizer_set_accumulation", "optimizer is NULL");
    if (accumulation < 1)
        return ampi_fail(AMP_ERR_RANGE, "amp_optimizer_set_accumulation", "accumulation = %d, must be 1 or more", accumulation);
    set = optimizer->set;
    optimizer->desc.accumulation = accumulation;
    optimizer->micro = 0;
    ampi_set_average(set, accumulation);
    for (i = 0; i < set->n; i++) set->params[i]->grad_live = 0;
    if (set->stage == AMPI_CHECKED) ampi_set_unlink(set);
    ampi_settings_changed(optimizer->amp);
    return AMP_OK;
}

AMP_API amp_result amp_optimizer_refresh(amp_optimizer *optimizer) {
    int64_t i;
    if (optimizer == NULL) return ampi_fail(AMP_ERR_NULL, "amp_optimizer_refresh", "optimizer is NULL");
    for (i = 0; i < optimizer->set->n; i++) amp_param_touch(optimizer->set->params[i]);
    return ampi_make_masters(optimizer);
}

AMP_API amp_result amp_optimizer_bytes(const amp_optimizer *optimizer, amp_parameter_bytes *out) {
    int64_t i, n = 0, weight = 0, gradient = 0, arrays[AMPI_ARRAYS] = {0, 0, 0};
    double parameters;
    int a;
    if (optimizer == NULL || out == NULL)
        return ampi_fail(AMP_ERR_NULL, "amp_optimizer_bytes", "optimizer or out is NULL");
    for (i = 0; i < optimizer->set->n; i++) {
        const amp_k_tensor *row = &optimizer->set->rows[i];
        n += row->count;
        weight += row->count * (int64_t)amp_dtype_size(row->weight_dtype);
        gradient += row->count * (int64_t)amp_dtype_size(row->grad_dtype);
        for (a = 0; a < AMPI_ARRAYS; a++)
            if (ampi_has_array(optimizer, row, a)) arrays[a] += row->count * ampi_array_size(row, a);
    }
    parameters = (double)AMPI_MAX(n, 1);
    out->parameters = n;
    out->weight = (double)weight / parameters;
    out->gradient = (double)gradient / parameters;
    out->master = (double)arrays[AMPI_MASTER] / parameters;
    out->moments = (double)(arrays[AMPI_M] + arrays[AMPI_V2]) / parameters;
    out->total = (double)(weight + gradient + arrays[AMPI_M] + arrays[AMPI_V2] + arrays[AMPI_MASTER]) / parameters;
    return AMP_OK;
}

/* ---- Graphs: what a launch has to do on the host beside launching */

/* Records an optimizer whose cycle begins in the graph that is being captured. */
AMPI_PRIVATE amp_result ampi_graph_note(amp_optimizer *o) {
    amp_graph *graph = ampi_capture(o->amp);
    int64_t i;
    if (graph == NULL || o->micro > 0) return AMP_OK;
    for (i = 0; i < graph->n; i++)
        if (graph->optimizers[i] == o)
            return ampi_fail(AMP_ERR_STATE, "amp_graph_begin", "an optimizer steps twice: a graph holds one step of each");
    AMPI_TRY(ampi_grow(o->amp, "amp_graph_begin", (void **)&graph->optimizers, graph->n, &graph->room, sizeof(void *)));
    graph->optimizers[graph->n++] = o;
    return AMP_OK;
}

/* ---- The step */

AMPI_PRIVATE amp_result ampi_run_optimizer(const amp_optimizer *o) {
    void *dev, *stream;
    const amp_backend *backend = ampi_backend(o->amp, &dev, &stream);
    amp_k_adamw adamw;
    amp_k_sgd sgd;
    if (o->desc.kind == AMP_ADAMW) {
        memset(&adamw, 0, sizeof adamw);
        adamw.table = o->set->table; adamw.tensors = o->set->n; adamw.found = o->set->found;
        adamw.beta1 = o->desc.beta1; adamw.beta2 = o->desc.beta2; adamw.eps = o->desc.eps;
        adamw.maximize = o->desc.maximize; adamw.seed = o->desc.seed;
        return backend->adamw(dev, &adamw, stream);
    }
    memset(&sgd, 0, sizeof sgd);
    sgd.table = o->set->table; sgd.tensors = o->set->n; sgd.found = o->set->found;
    sgd.momentum = o->desc.momentum; sgd.dampening = o->desc.dampening; sgd.seed = o->desc.seed;
    sgd.nesterov = o->desc.nesterov; sgd.maximize = o->desc.maximize;
    return backend->sgd(dev, &sgd, stream);
}

/* Counts the step on the device; scaler is enabled or NULL.  In a graph the learning rate is what AMP_RULE_LAUNCH wrote. */
AMPI_PRIVATE amp_result ampi_count_step(const amp_optimizer *o, const amp_scaler *scaler) {
    amp_k_rule rule = ampi_rule(AMP_RULE_STEPPED, scaler, o->set);
    rule.outcomes = o->ring;
    rule.step_rule.beta1 = o->desc.beta1;
    rule.step_rule.beta2 = o->desc.beta2;
    rule.step_rule.lr = ampi_capture(o->amp) ? -1 : o->desc.lr;
    return ampi_run_rule(o->amp, &rule);
}

/* Sends the step's outcome on the way to the host. */
AMPI_PRIVATE amp_result ampi_send_outcome(amp_optimizer *o) {
    void *dev, *stream;
    const amp_backend *backend = ampi_backend(o->amp, &dev, &stream);
    int64_t slot = o->attempts % AMP_OUTCOMES;
    AMPI_TRY(backend->copy(dev, &o->outcomes[slot], &o->ring[slot], sizeof *o->ring, AMP_COPY_TO_HOST, stream));
    AMPI_TRY(backend->event_record(dev, o->events[slot], stream));
    o->attempts++;
    o->sent++;
    return AMP_OK;
}

/* The weights have other values now. */
AMPI_PRIVATE void ampi_touch_weights(const amp_set *set) {
    int64_t i;
    for (i = 0; i < set->n; i++) if (set->rows[i].live) amp_param_touch(set->params[i]);
}

/* The stages that amp_optimizer_step and amp_step can start from. */
AMPI_PRIVATE amp_result ampi_check_step(const char *function, amp_optimizer *o, amp_scaler *scaler) {
    if (o == NULL) return ampi_fail(AMP_ERR_NULL, function, "optimizer is NULL");
    AMPI_TRY(ampi_check_owner(function, o->set, scaler));
    if (o->set->stage == AMPI_STEPPED)
        return ampi_fail(AMP_ERR_STEPPED, function, "this optimizer stepped since the last update");
    return ampi_refuse_fp16(function, o->set, o->set->stage == AMPI_CHECKED ? NULL : ampi_enabled(scaler));
}

AMPI_PRIVATE amp_result ampi_step(amp_optimizer *o, amp_scaler *scaler) {
    amp_scaler *enabled = ampi_enabled(scaler);
    amp_set *set = o->set;
    int64_t i;
    if (set->stage != AMPI_CHECKED) {
        AMPI_TRY(ampi_check_set(set, enabled, AMP_CHECK_READ, set->divisor, 1));
        if (scaler != NULL) ampi_set_enter(set, scaler, AMPI_CHECKED);
    } else AMPI_TRY(ampi_set_refresh(set));             /* gradients may have come and gone since the check */
    AMPI_TRY(ampi_count_step(o, enabled));
    if (ampi_capture(o->amp) == NULL) AMPI_TRY(ampi_send_outcome(o));
    AMPI_TRY(ampi_run_optimizer(o));
    ampi_touch_weights(set);
    for (i = 0; i < set->n; i++) set->params[i]->grad_live = 0;
    if (scaler != NULL) ampi_set_enter(set, scaler, AMPI_STEPPED);
    o->micro = 0;
    return AMP_OK;
}

AMP_API amp_result amp_optimizer_step(amp_optimizer *optimizer, amp_scaler *scaler) {
    AMPI_TRY(ampi_check_step("amp_optimizer_step", optimizer, scaler));
    AMPI_TRY(ampi_graph_note(optimizer));
    return ampi_step(optimizer, scaler);
}

/* Clips what has been summed up so far, as if the cycle ended with this micro-batch. */
AMPI_PRIVATE amp_result ampi_clip_running(amp_optimizer *o, amp_scaler *scaler) {
    if (!o->desc.clip_each || !(o->desc.clip_norm > 0)) return AMP_OK;
    AMPI_TRY(ampi_check_set(o->set, ampi_enabled(scaler), AMP_CHECK_READ, o->desc.accumulation, 0));
    return ampi_set_scale(o->set, &o->set->found->clip_coef);
}

AMP_API amp_result amp_step(amp_optimizer *optimizer, amp_scaler *scaler) {
    AMPI_TRY(ampi_check_step("amp_step", optimizer, scaler));
    AMPI_TRY(ampi_graph_note(optimizer));
    if (optimizer->micro + 1 < optimizer->desc.accumulation) {
        if (optimizer->set->stage != AMPI_READY)
            return ampi_fail(AMP_ERR_STATE, "amp_step", "the set was checked in micro-batch %d of %d, must be in the last: "
                             "amp_optimizer_set_accumulation begins a new cycle", optimizer->micro + 1,
                             optimizer->desc.accumulation);
        AMPI_TRY(ampi_clip_running(optimizer, scaler));
        optimizer->micro++;
        return AMP_OK;
    }
    AMPI_TRY(ampi_step(optimizer, scaler));
    return scaler ? amp_scaler_update(scaler) : AMP_OK;
}

/* ---- Outcomes */

AMPI_PRIVATE void ampi_outcome_fill(const amp_optimizer *o, const amp_k_outcome *k, amp_outcome *out) {
    memset(out, 0, sizeof *out);
    out->step = k->number;
    out->applied_steps = k->step;
    out->applied = k->applied;
    out->at_floor = k->at_floor;
    out->norm = k->norm;
    out->clip_coef = k->clip_coef;
    out->scale = k->scale;
    out->growth_tracker = k->growth_tracker;
    out->lr = k->lr;
    out->first_bad = ampi_set_name(o->set, k->first_bad);
    out->total_skips = k->skips;
    out->consecutive_skips = k->consecutive_skips;
}

/* The number of the oldest outcome that is due, 0 if none is. */
AMPI_PRIVATE int64_t ampi_outcome_due(amp_optimizer *o) {
    int64_t due = AMPI_MAX(o->flushed, o->attempts - AMPI_MAX(o->desc.outcome_lag, 0));
    o->delivered = AMPI_MAX(o->delivered, o->attempts - AMP_OUTCOMES);
    return o->delivered < due ? o->delivered + 1 : 0;
}

AMP_API int32_t amp_outcome_next(amp_optimizer *optimizer, amp_outcome *out) {
    amp_optimizer *o = optimizer;
    void *dev, *stream;
    const amp_backend *backend;
    int64_t slot;
    if (o == NULL || out == NULL || ampi_outcome_due(o) == 0) return 0;
    backend = ampi_backend(o->amp, &dev, &stream);
    slot = o->delivered % AMP_OUTCOMES;
    if (backend->event_sync(dev, o->events[slot]) != AMP_OK) return 0;
    ampi_outcome_fill(o, &o->outcomes[slot], out);
    o->delivered++;
    if (out->at_floor)
        ampi_log(o->amp, AMP_LOG_WARNING, 1101,
                 "step %lld overflowed in %s and the loss scale %g cannot shrink further",
                 (long long)out->step, out->first_bad ? out->first_bad : "the gradients", (double)out->scale);
    return 1;
}

AMP_API amp_result amp_outcome_flush(amp_optimizer *optimizer) {
    if (optimizer == NULL) return ampi_fail(AMP_ERR_NULL, "amp_outcome_flush", "optimizer is NULL");
    optimizer->flushed = optimizer->attempts;
    return ampi_wait(optimizer->amp);
}

/* ---- Capturing and launching */

AMP_API void amp_graph_destroy(amp_graph *graph) {
    amp_context *amp;
    void *dev, *stream;
    const amp_backend *backend;
    if (graph == NULL) return;
    amp = graph->amp;
    backend = ampi_backend(amp, &dev, &stream);
    if (graph->exec != NULL) backend->graph_destroy(dev, graph->exec);
    ampi_free(ampi_context_system(amp), graph->optimizers, graph->room, sizeof(void *));
    ampi_free(ampi_context_system(amp), graph->sets, graph->set_room, sizeof(void *));
    ampi_free(ampi_context_system(amp), graph, 1, sizeof *graph);
    ampi_graph_left(amp);
}

AMP_API amp_result amp_graph_begin(amp_context *amp) {
    const char *f = "amp_graph_begin";
    void *dev, *stream;
    const amp_backend *backend;
    amp_graph *graph;
    amp_result result;
    if (amp == NULL) return ampi_fail(AMP_ERR_NULL, f, "amp is NULL");
    backend = ampi_backend(amp, &dev, &stream);
    if (ampi_capture(amp) != NULL) return ampi_fail(AMP_ERR_STATE, f, "a graph is being captured already");
    if (backend->graph_begin == NULL)
        return ampi_fail(AMP_ERR_UNSUPPORTED, f, "the %s backend has no graphs: run the step as it is", backend->name);
    if (ampi_live_gradients(amp, 0)) return ampi_fail(AMP_ERR_STATE, f, "there are gradients of a cycle without its step: step first");
    AMPI_TRY(ampi_alloc(ampi_context_system(amp), f, (void **)&graph, 1, sizeof *graph));
    graph->amp = amp;
    graph->settings_version = ampi_settings_version(amp);      /* what changes from here on is only in a part of it */
    amp_cast_cache_clear(amp);      /* every launch makes its casts anew */
    ampi_capture_begin(amp, graph);
    result = backend->graph_begin(dev, stream);
    if (result == AMP_OK) return AMP_OK;
    ampi_capture_end(amp);
    amp_graph_destroy(graph);
    return result;
}

/* Every cycle that was begun must have ended with its step and update. */
AMPI_PRIVATE amp_result ampi_graph_check(const amp_graph *graph, const char *function) {
    int64_t i;
    int open = ampi_live_gradients(graph->amp, 0);
    for (i = 0; i < graph->n_sets; i++)
        if (graph->sets[i]->stage != AMPI_READY)
            return ampi_fail(AMP_ERR_STATE, function, "a set was checked without its amp_scaler_update: a graph holds both");
    for (i = 0; i < graph->n; i++) open |= graph->optimizers[i]->micro > 0 || graph->optimizers[i]->set->stage != AMPI_READY;
    return open ? ampi_fail(AMP_ERR_STATE, function, "an accumulation cycle is open: a graph holds whole steps") : AMP_OK;
}

/* The set is ready, as if it had not been checked. */
AMPI_PRIVATE void ampi_set_undo(amp_set *set) {
    amp_scaler *scaler = set->scaler;
    ampi_set_unlink(set);
    if (scaler != NULL && scaler->sets == NULL) scaler->checked = 0;
}

/* What the calls of a failed capture left on the host. */
AMPI_PRIVATE void ampi_graph_undo(const amp_graph *graph) {
    int64_t i;
    ampi_live_gradients(graph->amp, 1);
    for (i = 0; i < graph->n_sets; i++) ampi_set_undo(graph->sets[i]);
    for (i = 0; i < graph->n; i++) {
        graph->optimizers[i]->micro = 0;
        ampi_set_undo(graph->optimizers[i]->set);
    }
}

AMP_API amp_result amp_graph_end(amp_context *amp, amp_graph **out) {
    const char *f = "amp_graph_end";
    void *dev, *stream;
    const amp_backend *backend;
    amp_graph *graph;
    amp_result result;
    if (out != NULL) *out = NULL;
    if (amp == NULL || out == NULL) return ampi_fail(AMP_ERR_NULL, f, "amp or out is NULL");
    backend = ampi_backend(amp, &dev, &stream);
    graph = ampi_capture(amp);
    if (graph == NULL) return ampi_fail(AMP_ERR_STATE, f, "amp_graph_begin comes first");
    graph->random = ampi_capture_end(amp);
    result = backend->graph_end(dev, stream, &graph->exec);
    amp_cast_cache_clear(amp);      /* what was to be cast has only been recorded */
    if (result == AMP_OK) result = ampi_graph_check(graph, f);
    if (result == AMP_OK) *out = graph;
    else {
        ampi_graph_undo(graph);
        amp_graph_destroy(graph);
    }
    return result;
}

/* The numbers that change from launch to launch go to the device by value. */
AMPI_PRIVATE amp_result ampi_graph_numbers(const amp_graph *graph) {
    int64_t i;
    for (i = 0; i < AMPI_MAX(graph->n, (int64_t)1); i++) {
        amp_k_rule rule = ampi_rule(AMP_RULE_LAUNCH, NULL, i < graph->n ? graph->optimizers[i]->set : NULL);
        if (i < graph->n) rule.step_rule.lr = graph->optimizers[i]->desc.lr;
        if (i == 0) rule.random = ampi_random_cell(graph->amp, &rule.random_offset);
        AMPI_TRY(ampi_run_rule(graph->amp, &rule));
    }
    return AMP_OK;
}

AMP_API amp_result amp_graph_launch(amp_graph *graph) {
    void *dev, *stream;
    const amp_backend *backend;
    int64_t i;
    if (graph == NULL) return ampi_fail(AMP_ERR_NULL, "amp_graph_launch", "graph is NULL");
    backend = ampi_backend(graph->amp, &dev, &stream);
    AMPI_TRY(ampi_may_wait(graph->amp));
    if (graph->settings_version != ampi_settings_version(graph->amp))
        return ampi_fail(AMP_ERR_GRAPH, "amp_graph_launch", "precision, overrides, seed or settings changed since its capture began");
    AMPI_TRY(ampi_graph_check(graph, "amp_graph_launch"));
    AMPI_TRY(ampi_graph_numbers(graph));
    AMPI_TRY(backend->graph_launch(dev, graph->exec, stream));
    ampi_random_advance(graph->amp, graph->random);
    for (i = 0; i < graph->n; i++) {
        ampi_touch_weights(graph->optimizers[i]->set);
        AMPI_TRY(ampi_send_outcome(graph->optimizers[i]));
    }
    return AMP_OK;
}

/* ---- Saving an optimizer.  Records: names, shape, counters, settings, seed, outcomes, and the arrays m.0, v.0, master.0
   and so on by row; in the middle of a cycle also the gradients grad.0 ...  Masters are fp32 in a record, however they
   are kept. */

#define AMPI_SAVED_STEPS 8
#define AMPI_SAVED_REALS 3
#define AMPI_SAVED_OUTCOME 11

static const char *const ampi_array_names[AMPI_ARRAYS] = {"m", "v", "master"};

/* Per row: elements, and which arrays there are as bits. */
AMPI_PRIVATE amp_result ampi_shape_record(const amp_optimizer *o, int64_t **shape) {
    int64_t i;
    int a;
    AMPI_TRY(ampi_alloc(ampi_context_system(o->amp), "amp_optimizer_save", (void **)shape, 2 * o->set->n,
                        sizeof **shape));
    for (i = 0; i < o->set->n; i++) {
        (*shape)[2 * i] = o->set->rows[i].count;
        for (a = 0; a < AMPI_ARRAYS; a++)
            if (ampi_has_array(o, &o->set->rows[i], a)) (*shape)[2 * i + 1] |= (int64_t)1 << a;
    }
    return AMP_OK;
}

/* All names, each followed by a line feed. */
AMPI_PRIVATE amp_result ampi_names_record(const amp_optimizer *o, char **text, int64_t *bytes) {
    int64_t i, at = 0;
    *bytes = 0;
    for (i = 0; i < o->set->n; i++) *bytes += (int64_t)strlen(o->set->names[i]) + 1;
    AMPI_TRY(ampi_alloc(ampi_context_system(o->amp), "amp_optimizer_save", (void **)text, *bytes, 1));
    for (i = 0; i < o->set->n; i++) {
        size_t n = strlen(o->set->names[i]);
        memcpy(*text + at, o->set->names[i], n);
        (*text)[at + (int64_t)n] = '\n';
        at += (int64_t)n + 1;
    }
    return AMP_OK;
}

AMPI_PRIVATE amp_result ampi_save_rows(const amp_optimizer *o, amp_state *state, const char *prefix) {
    const amp_system *s = ampi_context_system(o->amp);
    int64_t *shape, bytes;
    char *names;
    amp_result r;
    AMPI_TRY(ampi_shape_record(o, &shape));
    r = ampi_put(state, prefix, "shape", -1, AMP_I64, shape, 2 * o->set->n);
    ampi_free(s, shape, 2 * o->set->n, sizeof *shape);
    if (r != AMP_OK) return r;
    AMPI_TRY(ampi_names_record(o, &names, &bytes));
    r = ampi_put(state, prefix, "names", -1, AMP_U8, names, bytes);
    ampi_free(s, names, bytes, 1);
    return r;
}

AMPI_PRIVATE amp_result ampi_save_counters(const amp_optimizer *o, amp_state *state, const char *prefix) {
    amp_k_found f;
    int64_t steps[AMPI_SAVED_STEPS], seed;
    double reals[AMPI_SAVED_REALS];
    AMPI_TRY(ampi_fetch(o->amp, &f, o->set->found, sizeof f));
    steps[0] = o->desc.kind; steps[1] = o->micro;
    steps[2] = o->attempts; steps[3] = o->delivered; steps[4] = o->flushed;
    steps[5] = f.step; steps[6] = f.skips; steps[7] = f.consecutive_skips;
    reals[0] = f.beta1_power; reals[1] = f.beta2_power; reals[2] = o->desc.lr;
    seed = (int64_t)o->desc.seed;
    AMPI_TRY(ampi_put(state, prefix, "step", -1, AMP_I64, steps, AMPI_SAVED_STEPS));
    AMPI_TRY(ampi_put(state, prefix, "seed", -1, AMP_I64, &seed, 1));
    return ampi_put(state, prefix, "settings", -1, AMP_F64, reals, AMPI_SAVED_REALS);
}

/* The outcomes not yet delivered; fp64 holds each of their numbers exactly.  Trackers came later: a record of their own. */
AMPI_PRIVATE amp_result ampi_save_outcomes(const amp_optimizer *o, amp_state *state, const char *prefix) {
    double rows[AMP_OUTCOMES * AMPI_SAVED_OUTCOME];
    int32_t trackers[AMP_OUTCOMES];
    int64_t i, first = AMPI_MAX(o->delivered, o->attempts - AMP_OUTCOMES), n = o->attempts - first;
    for (i = 0; i < n; i++) {
        const amp_k_outcome *k = &o->outcomes[(first + i) % AMP_OUTCOMES];
        double *row = rows + i * AMPI_SAVED_OUTCOME;
        row[0] = (double)k->number; row[1] = (double)k->step;
        row[2] = (double)k->skips; row[3] = (double)k->consecutive_skips;
        row[4] = k->lr; row[5] = (double)k->norm; row[6] = (double)k->clip_coef; row[7] = (double)k->scale;
        row[8] = k->applied; row[9] = k->at_floor; row[10] = k->first_bad;
        trackers[i] = k->growth_tracker;
    }
    AMPI_TRY(ampi_put(state, prefix, "trackers", -1, AMP_I32, trackers, n));
    return ampi_put(state, prefix, "outcomes", -1, AMP_F64, rows, n * AMPI_SAVED_OUTCOME);
}

/* The dtype of an array of a row in a record. */
AMPI_PRIVATE amp_dtype ampi_saved_dtype(const amp_k_tensor *row, int which) {
    return which != AMPI_MASTER && row->moment_dtype == AMP_BF16 ? AMP_BF16 : AMP_F32;
}

/* One array between the device and a record, through `room`. */
AMPI_PRIVATE amp_result ampi_save_array(const amp_optimizer *o, amp_state *state, const char *prefix, const char *name,
                                        int64_t i, const void *data, amp_dtype dtype, void *room) {
    int64_t n = o->set->rows[i].count;
    if (n > 0) AMPI_TRY(ampi_fetch(o->amp, room, data, (size_t)n * amp_dtype_size(dtype)));
    return ampi_put(state, prefix, name, i, dtype, room, n);
}

/* A weight and its remainder as an fp32 record, through `room` for twice as many numbers. */
AMPI_PRIVATE amp_result ampi_save_remainder(const amp_optimizer *o, amp_state *state, const char *prefix, int64_t i,
                                            float *room) {
    const amp_k_tensor *row = &o->set->rows[i];
    uint16_t *weight = (uint16_t *)(room + row->count), *rest = weight + row->count;
    size_t bytes = (size_t)row->count * 2;
    if (row->count > 0) {
        AMPI_TRY(ampi_fetch(o->amp, weight, row->weight, bytes));
        AMPI_TRY(ampi_fetch(o->amp, rest, row->master, bytes));
    }
    AMPI_PICK(ampi_numbers_kernels, ampi_cpu_best_path())->f32_join(room, weight, rest, row->count);
    return ampi_put(state, prefix, ampi_array_names[AMPI_MASTER], i, AMP_F32, room, row->count);
}

/* Bytes that the largest row needs on its way. */
AMPI_PRIVATE int64_t ampi_row_room(const amp_set *set) {
    int64_t i, largest = 0;
    for (i = 0; i < set->n; i++)
        largest = AMPI_MAX(largest, set->rows[i].count * (ampi_has_remainder(&set->rows[i]) ? 8 : 4));
    return largest;
}

AMPI_PRIVATE amp_result ampi_save_arrays(const amp_optimizer *o, amp_state *state, const char *prefix, void *room) {
    int64_t i;
    int a;
    for (i = 0; i < o->set->n; i++) {
        amp_k_tensor *row = &o->set->rows[i];
        for (a = 0; a < AMPI_ARRAYS; a++)
            if (a == AMPI_MASTER && ampi_has_remainder(row))
                AMPI_TRY(ampi_save_remainder(o, state, prefix, i, (float *)room));
            else if (ampi_has_array(o, row, a))
                AMPI_TRY(ampi_save_array(o, state, prefix, ampi_array_names[a], i, *ampi_row_array(row, a),
                                         ampi_saved_dtype(row, a), room));
        if (o->micro > 0 && o->set->params[i]->grad_live)
            AMPI_TRY(ampi_save_array(o, state, prefix, "grad", i, row->grad, row->grad_dtype, room));
    }
    return AMP_OK;
}

AMPI_PRIVATE amp_result ampi_save_optimizer(const amp_optimizer *o, amp_state *state, const char *prefix) {
    const amp_system *s = ampi_context_system(o->amp);
    int64_t bytes = ampi_row_room(o->set);
    amp_result r;
    void *room;
    AMPI_TRY(ampi_save_rows(o, state, prefix));
    AMPI_TRY(ampi_save_counters(o, state, prefix));
    AMPI_TRY(ampi_save_outcomes(o, state, prefix));
    AMPI_TRY(ampi_alloc(s, "amp_optimizer_save", &room, bytes, 1));
    r = ampi_save_arrays(o, state, prefix, room);
    ampi_free(s, room, bytes, 1);
    return r;
}

AMP_API amp_result amp_optimizer_save(const amp_optimizer *optimizer, amp_state *state, const char *prefix) {
    amp_state *own;
    amp_result r;
    if (optimizer == NULL || state == NULL) return ampi_fail(AMP_ERR_NULL, "amp_optimizer_save", "optimizer or state is NULL");
    AMPI_TRY(amp_state_create(&own, &state->system));
    r = ampi_save_optimizer(optimizer, own, prefix);
    if (r == AMP_OK) r = ampi_state_move(state, own, "amp_optimizer_save");
    amp_state_destroy(own);
    return r;
}

/* Refuses what was saved by an optimizer with other parameters, and says which. */
AMPI_PRIVATE amp_result ampi_compare_names(const amp_optimizer *o, const char *saved, int64_t bytes) {
    int64_t i, at = 0;
    for (i = 0; i < o->set->n; i++) {
        const char *name = o->set->names[i], *end = NULL;
        int64_t n;
        if (at < bytes) end = (const char *)memchr(saved + at, '\n', (size_t)(bytes - at));
        n = end ? end - (saved + at) : AMPI_MAX(bytes - at, 0);
        if (n != (int64_t)strlen(name) || memcmp(saved + at, name, (size_t)n) != 0)
            return ampi_fail(AMP_ERR_MISMATCH, "amp_optimizer_load", "parameter %lld is %s, but %.*s was saved",
                             (long long)i, name, (int)AMPI_MIN(n, 100), saved + at);
        at += n + 1;
    }
    if (at >= bytes) return AMP_OK;
    return ampi_fail(AMP_ERR_MISMATCH, "amp_optimizer_load", "%.*s was saved too", (int)AMPI_MIN(bytes - at - 1, 100),
                     saved + at);
}

AMPI_PRIVATE amp_result ampi_load_names(const amp_optimizer *o, const amp_state *state, const char *prefix) {
    const amp_system *s = ampi_context_system(o->amp);
    char key[64], *saved;
    amp_dtype dtype;
    int64_t bytes;
    amp_result r;
    AMPI_TRY(ampi_key("amp_optimizer_load", key, prefix, "names", -1));
    bytes = amp_state_count(state, key, &dtype);
    if (bytes < 0) return ampi_fail(AMP_ERR_NAME, "amp_optimizer_load", "there is no record %s", key);
    AMPI_TRY(ampi_alloc(s, "amp_optimizer_load", (void **)&saved, bytes, 1));
    r = amp_state_get(state, key, AMP_U8, saved, bytes);
    if (r == AMP_OK) r = ampi_compare_names(o, saved, bytes);
    ampi_free(s, saved, bytes, 1);
    return r;
}

AMPI_PRIVATE amp_result ampi_compare_shape(const amp_optimizer *o, const int64_t *saved, const int64_t *shape) {
    int64_t i;
    for (i = 0; i < o->set->n; i++) {
        const char *name = o->set->names[i];
        if (saved[2 * i] != shape[2 * i])
            return ampi_fail(AMP_ERR_MISMATCH, "amp_optimizer_load", "%s has %lld elements, %lld were saved", name,
                             (long long)shape[2 * i], (long long)saved[2 * i]);
        if (saved[2 * i + 1] != shape[2 * i + 1])
            return ampi_fail(AMP_ERR_MISMATCH, "amp_optimizer_load",
                             "%s has other moments or another master than were saved (%lld, %lld)", name,
                             (long long)shape[2 * i + 1], (long long)saved[2 * i + 1]);
    }
    return AMP_OK;
}

AMPI_PRIVATE amp_result ampi_load_shape(const amp_optimizer *o, const amp_state *state, const char *prefix) {
    const amp_system *s = ampi_context_system(o->amp);
    int64_t *shape, *saved, n = 2 * o->set->n;
    amp_result r;
    AMPI_TRY(ampi_shape_record(o, &shape));
    r = ampi_alloc(s, "amp_optimizer_load", (void **)&saved, n, sizeof *saved);
    if (r == AMP_OK) r = ampi_get(state, prefix, "shape", -1, AMP_I64, saved, n);
    if (r == AMP_OK) r = ampi_compare_shape(o, saved, shape);
    ampi_free(s, saved, n, sizeof *saved);
    ampi_free(s, shape, n, sizeof *shape);
    return r;
}

/* Every record that will be read is there, with its size. */
AMPI_PRIVATE amp_result ampi_check_array(const amp_optimizer *o, const amp_state *state, const char *prefix,
                                         const char *name, int64_t i, amp_dtype wanted) {
    char key[64];
    amp_dtype dtype;
    int64_t n;
    AMPI_TRY(ampi_key("amp_optimizer_load", key, prefix, name, i));
    n = amp_state_count(state, key, &dtype);
    if (n < 0)
        return ampi_fail(AMP_ERR_NAME, "amp_optimizer_load", "there is no record %s for %s", key, o->set->names[i]);
    if (n == o->set->rows[i].count && (dtype == wanted || (wanted == AMP_F32 && dtype == AMP_BF16))) return AMP_OK;
    return ampi_fail(AMP_ERR_MISMATCH, "amp_optimizer_load", "%s: record %s holds %lld x %s, must be %lld x %s",
                     o->set->names[i], key, (long long)n,
                     amp_dtype_name(dtype), (long long)o->set->rows[i].count, amp_dtype_name(wanted));
}

AMPI_PRIVATE int ampi_has_record(const amp_state *state, const char *prefix, const char *name, int64_t i) {
    char key[64];
    return ampi_key("amp_optimizer_load", key, prefix, name, i) == AMP_OK && amp_state_count(state, key, NULL) >= 0;
}
/* Gradients are there for the rows that had one in the middle of a cycle. */
AMPI_PRIVATE int ampi_has_gradient(const amp_state *state, const char *prefix, int64_t i, int64_t micro) {
    return micro > 0 && ampi_has_record(state, prefix, "grad", i);
}

AMPI_PRIVATE amp_result ampi_check_arrays(const amp_optimizer *o, const amp_state *state, const char *prefix,
                                          int64_t micro) {
    int64_t i;
    int a;
    for (i = 0; i < o->set->n; i++) {
        const amp_k_tensor *row = &o->set->rows[i];
        for (a = 0; a < AMPI_ARRAYS; a++)
            if (ampi_has_array(o, row, a))
                AMPI_TRY(ampi_check_array(o, state, prefix, ampi_array_names[a], i, ampi_saved_dtype(row, a)));
        if (ampi_has_gradient(state, prefix, i, micro))
            AMPI_TRY(ampi_check_array(o, state, prefix, "grad", i, row->grad_dtype));
    }
    return AMP_OK;
}

/* A record, widened to fp32 if it is bf16 and that is wanted: bf16 lies in the upper half of the room, and each number
   is read before it is written over. */
AMPI_PRIVATE amp_result ampi_get_as(const amp_state *state, const char *prefix, const char *name, int64_t i,
                                    amp_dtype dtype, void *room, int64_t n) {
    char key[64];
    amp_dtype saved;
    AMPI_TRY(ampi_key("amp_optimizer_load", key, prefix, name, i));
    if (dtype != AMP_F32 || amp_state_count(state, key, &saved) != n || saved != AMP_BF16)
        return amp_state_get(state, key, dtype, room, n);
    AMPI_TRY(amp_state_get(state, key, AMP_BF16, (char *)room + 2 * n, n));
    ampi_convert_fast(room, AMP_F32, (char *)room + 2 * n, AMP_BF16, n, ampi_cpu_best_path());
    return AMP_OK;
}

AMPI_PRIVATE amp_result ampi_load_array(amp_optimizer *o, const amp_state *state, const char *prefix, const char *name,
                                        int64_t i, void *data, amp_dtype dtype, void *room) {
    int64_t n = o->set->rows[i].count;
    AMPI_TRY(ampi_get_as(state, prefix, name, i, dtype, room, n));
    return n > 0 ? ampi_send(o->amp, data, room, (size_t)n * amp_dtype_size(dtype)) : AMP_OK;
}

/* An fp32 record as a weight and its remainder. */
AMPI_PRIVATE amp_result ampi_load_remainder(amp_optimizer *o, const amp_state *state, const char *prefix, int64_t i,
                                            float *room) {
    const amp_k_tensor *row = &o->set->rows[i];
    uint16_t *weight = (uint16_t *)(room + row->count), *rest = weight + row->count;
    size_t bytes = (size_t)row->count * 2;
    AMPI_TRY(ampi_get_as(state, prefix, ampi_array_names[AMPI_MASTER], i, AMP_F32, room, row->count));
    if (row->count == 0) return AMP_OK;
    AMPI_PICK(ampi_numbers_kernels, ampi_cpu_best_path())->bf16_split(weight, rest, room, row->count);
    AMPI_TRY(ampi_send(o->amp, row->weight, weight, bytes));
    amp_param_touch(o->set->params[i]);
    return ampi_send(o->amp, row->master, rest, bytes);
}

AMPI_PRIVATE amp_result ampi_load_arrays(amp_optimizer *o, const amp_state *state, const char *prefix, int64_t micro,
                                         void *room) {
    int64_t i;
    int a;
    for (i = 0; i < o->set->n; i++) {
        amp_k_tensor *row = &o->set->rows[i];
        for (a = 0; a < AMPI_ARRAYS; a++)
            if (a == AMPI_MASTER && ampi_has_remainder(row))
                AMPI_TRY(ampi_load_remainder(o, state, prefix, i, (float *)room));
            else if (ampi_has_array(o, row, a))
                AMPI_TRY(ampi_load_array(o, state, prefix, ampi_array_names[a], i, *ampi_row_array(row, a),
                                         ampi_saved_dtype(row, a), room));
        o->set->params[i]->grad_live = ampi_has_gradient(state, prefix, i, micro);
        if (o->set->params[i]->grad_live)
            AMPI_TRY(ampi_load_array(o, state, prefix, "grad", i, row->grad, row->grad_dtype, room));
    }
    return AMP_OK;
}

AMPI_PRIVATE amp_result ampi_check_saved_steps(const amp_optimizer *o, const int64_t *steps, const double *reals) {
    int64_t i;
    if (steps[0] != (int64_t)o->desc.kind)
        return ampi_fail(AMP_ERR_MISMATCH, "amp_optimizer_load", "saved by %s", steps[0] == AMP_SGD ? "SGD" : "AdamW");
    for (i = 1; i < AMPI_SAVED_STEPS; i++)
        if (steps[i] < 0 || steps[i] > AMPI_COUNT_MOST)
            return ampi_fail(AMP_ERR_RANGE, "amp_optimizer_load", "saved counter %lld = %lld is out of range", (long long)i,
                             (long long)steps[i]);
    for (i = 0; i < AMPI_SAVED_REALS; i++)
        if (!amp_is_finite_f64(&reals[i]) || !(reals[i] >= 0) || (i < 2 && reals[i] > 1))
            return ampi_fail(AMP_ERR_RANGE, "amp_optimizer_load", "saved setting %lld = %g is out of range",
                             (long long)i, reals[i]);
    if (steps[1] >= o->desc.accumulation)
        return ampi_fail(AMP_ERR_MISMATCH, "amp_optimizer_load", "saved after %lld micro-batches, .accumulation is %d",
                         (long long)steps[1], o->desc.accumulation);
    if (steps[3] > steps[2] || steps[4] > steps[2] || steps[5] > steps[2] || steps[6] != steps[2] - steps[5])
        return ampi_fail(AMP_ERR_RANGE, "amp_optimizer_load", "the saved counters contradict each other");
    return AMP_OK;
}

AMPI_PRIVATE amp_result ampi_load_counters(amp_optimizer *o, const int64_t *steps, const double *reals) {
    amp_k_found f;
    AMPI_TRY(ampi_fetch(o->amp, &f, o->set->found, sizeof f));
    f.attempts = steps[2]; f.step = steps[5]; f.skips = steps[6];
    f.consecutive_skips = (int32_t)AMPI_MIN(steps[7], INT32_MAX / 2);
    f.beta1_power = reals[0]; f.beta2_power = reals[1];
    AMPI_TRY(ampi_send(o->amp, o->set->found, &f, sizeof f));
    o->micro = (int32_t)steps[1];
    o->attempts = steps[2];
    o->delivered = steps[3];
    o->flushed = steps[4];
    o->desc.lr = reals[2];
    return AMP_OK;
}

/* What becomes an integer is one that fp64 holds. */
AMPI_PRIVATE amp_result ampi_check_outcomes(const double *rows, int64_t n) {
    int64_t i;
    for (i = 0; i < n * AMPI_SAVED_OUTCOME; i++) {
        int64_t column = i % AMPI_SAVED_OUTCOME;
        double most = column < 4 ? 9007199254740992.0 : 2147483647.0;
        if (column >= 4 && column < 8) continue;
        if (!amp_is_finite_f64(&rows[i]) || !(rows[i] >= -1 && rows[i] <= most))
            return ampi_fail(AMP_ERR_RANGE, "amp_optimizer_load", "saved outcome: number %lld = %g is out of range",
                             (long long)column, rows[i]);
    }
    return AMP_OK;
}

AMPI_PRIVATE void ampi_load_outcomes(amp_optimizer *o, const double *rows, const int32_t *trackers, int64_t n) {
    int64_t i, first = o->attempts - n;
    for (i = 0; i < n; i++) {
        amp_k_outcome *k = &o->outcomes[(first + i) % AMP_OUTCOMES];
        const double *row = rows + i * AMPI_SAVED_OUTCOME;
        k->number = (int64_t)row[0]; k->step = (int64_t)row[1];
        k->skips = (int64_t)row[2]; k->consecutive_skips = (int64_t)row[3];
        k->lr = row[4]; k->norm = (float)row[5]; k->clip_coef = (float)row[6]; k->scale = (float)row[7];
        k->applied = (int32_t)row[8]; k->at_floor = (int32_t)row[9]; k->first_bad = (int32_t)row[10];
        k->growth_tracker = trackers[i];
    }
}

AMP_API amp_result amp_optimizer_load(amp_optimizer *optimizer, const amp_state *state, const char *prefix) {
    amp_optimizer *o = optimizer;
    const amp_system *s;
    int64_t steps[AMPI_SAVED_STEPS], n, bytes, seed;
    int32_t trackers[AMP_OUTCOMES];
    double reals[AMPI_SAVED_REALS], outcomes[AMP_OUTCOMES * AMPI_SAVED_OUTCOME];
    amp_result r;
    void *room;
    if (o == NULL || state == NULL) return ampi_fail(AMP_ERR_NULL, "amp_optimizer_load", "optimizer or state is NULL");
    s = ampi_context_system(o->amp);
    bytes = ampi_row_room(o->set);
    seed = (int64_t)o->desc.seed;
    AMPI_TRY(ampi_get(state, prefix, "step", -1, AMP_I64, steps, AMPI_SAVED_STEPS));
    AMPI_TRY(ampi_get(state, prefix, "settings", -1, AMP_F64, reals, AMPI_SAVED_REALS));
    AMPI_TRY(ampi_load_names(o, state, prefix));
    AMPI_TRY(ampi_check_saved_steps(o, steps, reals));
    AMPI_TRY(ampi_load_shape(o, state, prefix));
    n = AMPI_MIN(steps[2] - steps[3], AMP_OUTCOMES);
    AMPI_TRY(ampi_get(state, prefix, "outcomes", -1, AMP_F64, outcomes, n * AMPI_SAVED_OUTCOME));
    AMPI_TRY(ampi_check_outcomes(outcomes, n));
    memset(trackers, 0, sizeof trackers);
    if (ampi_has_record(state, prefix, "trackers", -1)) AMPI_TRY(ampi_get(state, prefix, "trackers", -1, AMP_I32, trackers, n));
    AMPI_TRY(ampi_check_arrays(o, state, prefix, steps[1]));
    if (ampi_has_record(state, prefix, "seed", -1)) AMPI_TRY(ampi_get(state, prefix, "seed", -1, AMP_I64, &seed, 1));
    AMPI_TRY(ampi_alloc(s, "amp_optimizer_load", &room, bytes, 1));
    r = ampi_wait(o->amp);
    if (r == AMP_OK) r = ampi_load_arrays(o, state, prefix, steps[1], room);
    if (r == AMP_OK) r = ampi_load_counters(o, steps, reals);
    if (r == AMP_OK) ampi_load_outcomes(o, outcomes, trackers, n);
    if (r == AMP_OK) o->desc.seed = (uint64_t)seed;
    ampi_free(s, room, bytes, 1);
    ampi_set_unlink(o->set);
    ampi_settings_changed(o->amp);
    return r;
}

/* ---- Keeping: all that a step changes, copied to the host, and put back bit for bit as often as wanted.  Putting it
   back takes no memory, so that it works when a step has failed for want of it. */

typedef struct ampi_keep {
    amp_context *amp;
    amp_param **params, *param_copies; int64_t n_params;    /* the host's, and the optimizer's that are not among them */
    amp_range *ranges; int64_t n_ranges, range_room;        /* device memory; counts are bytes */
    char *copy; int64_t bytes;      /* of the ranges, one behind the other */
    amp_optimizer *optimizer, optimizer_copy; amp_set set_copy;
    amp_k_outcome outcomes[AMP_OUTCOMES];
    amp_scaler *scaler, scaler_copy;
    ampi_precision precision;
} ampi_keep;

AMPI_PRIVATE void ampi_keep_destroy(ampi_keep *k) {
    const amp_system *s;
    if (k == NULL) return;
    s = ampi_context_system(k->amp);
    ampi_free(s, k->params, k->n_params, sizeof *k->params);
    ampi_free(s, k->param_copies, k->n_params, sizeof *k->param_copies);
    ampi_free(s, k->ranges, k->range_room, sizeof *k->ranges);
    ampi_free(s, k->copy, k->bytes, 1);
    ampi_free(s, k, 1, sizeof *k);
}

AMPI_PRIVATE void ampi_keep_range(ampi_keep *k, void *data, int64_t bytes) {
    if (data == NULL || bytes <= 0) return;
    k->ranges[k->n_ranges].data = data;
    k->ranges[k->n_ranges++].count = bytes;
    k->bytes += bytes;
}

AMPI_PRIVATE void ampi_keep_tensor(ampi_keep *k, const amp_tensor *t) {
    ampi_keep_range(k, t->data, amp_tensor_count(t) * (int64_t)amp_dtype_size(t->dtype));
}

/* The parameters, and their number; params NULL: the number alone. */
AMPI_PRIVATE int64_t ampi_keep_params(amp_param **params, amp_param *own, int64_t n_own, const amp_optimizer *o) {
    int64_t i, n = 0;
    for (i = 0; i < n_own; i++, n++) if (params != NULL) params[n] = &own[i];
    for (i = 0; o != NULL && i < o->set->n; i++) {
        amp_param *p = o->set->params[i];
        if (n_own > 0 && p >= own && p < own + n_own) continue;
        if (params != NULL) params[n] = p;
        n++;
    }
    return n;
}

AMPI_PRIVATE void ampi_keep_ranges(ampi_keep *k) {
    amp_optimizer *o = k->optimizer;
    int64_t i;
    int a;
    for (i = 0; i < k->n_params; i++) {
        const amp_param *p = k->params[i];
        ampi_keep_tensor(k, &p->weight);
        ampi_keep_tensor(k, &p->grad);
        if (o == NULL) ampi_keep_range(k, p->master, amp_tensor_count(&p->weight) * 4);
    }
    for (i = 0; o != NULL && i < o->set->n; i++)
        for (a = 0; a < AMPI_ARRAYS; a++) {
            amp_k_tensor *row = &o->set->rows[i];
            if (ampi_has_array(o, row, a)) ampi_keep_range(k, *ampi_row_array(row, a), row->count * ampi_array_size(row, a));
        }
    if (o != NULL) ampi_keep_range(k, o->ring, AMP_OUTCOMES * (int64_t)sizeof *o->ring);
    if (o != NULL) ampi_keep_range(k, o->set->found, (int64_t)sizeof *o->set->found);
    if (k->scaler != NULL) ampi_keep_range(k, k->scaler->device, (int64_t)sizeof *k->scaler->device);
}

/* to_host 1: from the device; 0: back. */
AMPI_PRIVATE amp_result ampi_keep_copy(ampi_keep *k, int to_host) {
    int64_t i, at = 0;
    for (i = 0; i < k->n_ranges; at += k->ranges[i++].count)
        AMPI_TRY(to_host ? amp_copy(k->amp, k->copy + at, k->ranges[i].data, k->ranges[i].count, AMP_COPY_TO_HOST)
                         : amp_copy(k->amp, k->ranges[i].data, k->copy + at, k->ranges[i].count, AMP_COPY_TO_DEVICE));
    return ampi_wait(k->amp);
}

/* The kept copy of device memory that was kept. */
AMPI_PRIVATE const void *ampi_kept(const ampi_keep *k, const void *data) {
    int64_t i, at = 0;
    for (i = 0; k->ranges[i].data != data; i++) at += k->ranges[i].count;
    return k->copy + at;
}

/* Between two steps only: what was checked and not yet updated would be lost. */
AMPI_PRIVATE amp_result ampi_keep_check(const char *function, const amp_context *amp, const amp_optimizer *o, const amp_scaler *s) {
    AMPI_TRY(ampi_may_wait(amp));
    if ((o != NULL && o->amp != amp) || (s != NULL && s->amp != amp))
        return ampi_fail(AMP_ERR_STATE, function, "the %s belongs to another context", o != NULL && o->amp != amp ? "optimizer" : "scaler");
    if ((o != NULL && o->set->stage != AMPI_READY) || (s != NULL && s->checked))
        return ampi_fail(AMP_ERR_STATE, function, "gradients were checked since the last update: call amp_scaler_update first");
    return AMP_OK;
}

AMPI_PRIVATE amp_result ampi_keep_memory(ampi_keep *k, const char *function) {
    const amp_system *s = ampi_context_system(k->amp);
    k->range_room = 3 * k->n_params + (k->optimizer ? AMPI_ARRAYS * k->optimizer->set->n : 0) + 3;
    AMPI_TRY(ampi_alloc(s, function, (void **)&k->params, k->n_params, sizeof *k->params));
    AMPI_TRY(ampi_alloc(s, function, (void **)&k->param_copies, k->n_params, sizeof *k->param_copies));
    return ampi_alloc(s, function, (void **)&k->ranges, k->range_room, sizeof *k->ranges);
}

AMPI_PRIVATE amp_result ampi_keep_create(amp_context *amp, const char *function, amp_param *params, int64_t n, amp_optimizer *o,
                                         amp_scaler *scaler, ampi_keep **out) {
    ampi_keep *k;
    amp_result r;
    int64_t i;
    AMPI_TRY(ampi_keep_check(function, amp, o, scaler));
    AMPI_TRY(ampi_alloc(ampi_context_system(amp), function, (void **)&k, 1, sizeof *k));
    k->amp = amp;
    k->optimizer = o;
    k->scaler = scaler;
    k->precision = ampi_precision_get(amp);
    k->n_params = ampi_keep_params(NULL, params, n, o);
    r = ampi_keep_memory(k, function);
    if (r == AMP_OK) {
        (void)ampi_keep_params(k->params, params, n, o);
        for (i = 0; i < k->n_params; i++) k->param_copies[i] = *k->params[i];
        ampi_keep_ranges(k);
        r = ampi_alloc(ampi_context_system(amp), function, (void **)&k->copy, k->bytes, 1);
    }
    if (r == AMP_OK) r = ampi_keep_copy(k, 1);
    if (r != AMP_OK) { ampi_keep_destroy(k); return r; }
    if (o != NULL) {
        k->optimizer_copy = *o;
        k->set_copy = *o->set;
        memcpy(k->outcomes, o->outcomes, sizeof k->outcomes);
    }
    if (scaler != NULL) k->scaler_copy = *scaler;
    *out = k;
    return AMP_OK;
}

AMPI_PRIVATE amp_result ampi_keep_restore(ampi_keep *k) {
    int64_t i;
    amp_result r = ampi_keep_copy(k, 0);
    for (i = 0; i < k->n_params; i++) *k->params[i] = k->param_copies[i];
    if (k->optimizer != NULL) {
        ampi_set_unlink(k->optimizer->set);
        *k->optimizer = k->optimizer_copy;
        *k->optimizer->set = k->set_copy;
        memcpy(k->optimizer->outcomes, k->outcomes, sizeof k->outcomes);
    }
    if (k->scaler != NULL) {
        ampi_scaler_release_sets(k->scaler);
        *k->scaler = k->scaler_copy;
    }
    ampi_precision_set(k->amp, &k->precision);
    return r;
}

/* ==== 11 >>data: implementation =====================================================================

   Batches carry one number over all epochs: epoch * batches per epoch + index.  Slot number % depth of a ring
   belongs to it.  Workers claim numbers in order, fill the slots in any order, and the consumer takes them in
   order.  Which samples a batch has is a function of its number alone, so a position is one number. */

enum {
    AMPI_LLMC_HEADER = 1024,
    AMPI_NPY_HEADER = 4096,         /* longest header that is read */
    AMPI_NPY_DIMS = 32,
    AMPI_READ_BYTES = 1 << 18,      /* neighbouring samples are read together up to this */
    AMPI_CACHE_MB = 1024,
    AMPI_CACHE_BLOCK = 1 << 16,
    AMPI_CACHED_SAMPLE = 8192,      /* longer samples are worth a read each */
    AMPI_PIECES = 32,               /* reads that are planned ahead */
    AMPI_HASH_BLOCK = 4096, AMPI_HASH_BLOCKS = 16,
    AMPI_ORDER_ROUNDS = 8,
    AMPI_CLOSE_MS = 30,             /* how long destroy waits before it leaves a worker behind */
    AMPI_SLOT_ALIGN = 256,
    AMPI_POSITION_COUNT = 13        /* values in the saved record */
};

/* A worker that was told to stop in the middle of a batch returns this; it never leaves this section. */
#define AMPI_CANCELLED AMP_ERR_STATE

/* ---- Order: a bijection of 0..n-1 that needs no memory.  An alternating Feistel network over the smallest number
   of bits that holds n, walked until it lands below n (under two steps on average): Black & Rogaway 2002.
   These functions define what a saved position means and never change. */

typedef struct ampi_order { uint64_t n, keys[AMPI_ORDER_ROUNDS]; int low_bits, high_bits; } ampi_order;

/* The finaliser of SplitMix64 (Steele, Lea & Flood 2014), a bijection of 64 bits. */
AMPI_PRIVATE uint64_t ampi_mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

/* Number i of the stream that belongs to (seed, epoch). */
AMPI_PRIVATE uint64_t ampi_epoch_random(uint64_t seed, int64_t epoch, uint64_t i) {
    uint64_t stream = ampi_mix64(ampi_mix64(seed + UINT64_C(0x9e3779b97f4a7c15)) ^ (uint64_t)epoch);
    return ampi_mix64(stream + (i + 1) * UINT64_C(0x9e3779b97f4a7c15));
}

AMPI_PRIVATE void ampi_order_init(ampi_order *order, int64_t n, uint64_t seed, int64_t epoch) {
    int bits = 0, round;
    while (bits < 63 && (UINT64_C(1) << bits) < (uint64_t)n) bits++;
    order->n = (uint64_t)n;
    order->low_bits = bits / 2;
    order->high_bits = bits - bits / 2;
    for (round = 0; round < AMPI_ORDER_ROUNDS; round++)
        order->keys[round] = ampi_epoch_random(seed, epoch, (uint64_t)round);
}

AMPI_PRIVATE inline __attribute__((always_inline)) uint64_t ampi_order_step(const ampi_order *order, uint64_t x) {
    uint64_t low_mask = (UINT64_C(1) << order->low_bits) - 1, high_mask = (UINT64_C(1) << order->high_bits) - 1;
    uint64_t low = x & low_mask, high = x >> order->low_bits;
    int round;
    for (round = 0; round < AMPI_ORDER_ROUNDS; round += 2) {
        high = (high ^ (ampi_mix64(low + order->keys[round]) >> 32)) & high_mask;
        low = (low ^ (ampi_mix64(high + order->keys[round + 1]) >> 32)) & low_mask;
    }
    return high << order->low_bits | low;
}

/* out = the samples at n places from `place` on, n <= AMPI_PIECES.  They walk abreast and without branches: one alone
   would wait for its multiplications. */
AMPI_PRIVATE void ampi_order_at(const ampi_order *order, int64_t place, int64_t n, int64_t *out) {
    uint64_t x[AMPI_PIECES];
    int64_t walking[AMPI_PIECES], i, k;
    for (i = 0; i < n; i++) { x[i] = (uint64_t)(place + i); walking[i] = i; }
    while (n > 0) {
        for (i = k = 0; i < n; i++) {
            int64_t at = walking[i];
            x[at] = ampi_order_step(order, x[at]);
            out[at] = (int64_t)x[at];
            walking[k] = at;
            k += x[at] >= order->n;
        }
        n = k;
    }
}

/* ---- Types */

typedef enum ampi_source_kind { AMPI_FROM_TOKENS, AMPI_FROM_ARRAYS, AMPI_FROM_CALLBACK } ampi_source_kind;

typedef struct ampi_data_file {
    char *path;
    int64_t path_bytes;
    int is_open;
    intptr_t handle;
    int64_t bytes, start;           /* of the file; offset of its first element */
    amp_token_format format;
    amp_dtype dtype;
    int64_t count, row;             /* elements of the first dimension, values in each */
    int64_t first_sample, samples;  /* of the loader, that lie in it */
    int64_t first_byte, stride, overlap;    /* sample i: stride + overlap bytes at first_byte + i * stride */
    int64_t cache_at, cached;       /* its first `cached` bytes have a place there in the cache */
} ampi_data_file;

typedef enum ampi_slot_state {
    AMPI_SLOT_EMPTY, AMPI_SLOT_FILLING, AMPI_SLOT_READY, AMPI_SLOT_FAILED,
    AMPI_SLOT_RETRY                 /* claimed before, to be filled again */
} ampi_slot_state;

typedef struct ampi_slot {
    ampi_slot_state state;
    int worker, ahead;              /* who fills it; 1: claimed before the consumer waited for it */
    amp_result result;
    char error[sizeof ampi_error_text];
    char *data;                     /* in the ring */
    void *copied;                   /* event: its copy to the device is done */
} ampi_slot;

enum { AMPI_BLOCK_ABSENT, AMPI_BLOCK_LOADING, AMPI_BLOCK_LOADED };

/* Where a worker is: the closing thread turns READING into ABANDONED, and then the worker touches nothing but
   itself, the loader's files and cache, and its shell. */
enum { AMPI_WORKER_BUSY, AMPI_WORKER_READING, AMPI_WORKER_ABANDONED };

/* How long a file was when a worker last looked, and in which of its fills that was: what the cache holds of a file
   is handed out only while the file holds it too. */
typedef struct ampi_seen { int64_t fill, bytes; } ampi_seen;

/* Bytes that are read at once: neighbouring samples. */
typedef struct ampi_piece { const ampi_data_file *file; int64_t offset, samples; } ampi_piece;

typedef struct ampi_worker {
    struct amp_loader *loader;
    void *thread;
    int id, started, exited, abandoned;
    int64_t number;                 /* of the batch it fills */
    int phase;                      /* atomic */
    int64_t file, offset;           /* atomic: what it reads; a sample number for the callback */
    uint8_t *scratch;
    int64_t fills;                  /* begun */
    ampi_seen *seen;                /* of each file, when there is a cache */
    ampi_order order;
    int64_t order_epoch;            /* that `order` is of; -1: none */
} ampi_worker;

struct amp_loader {
    amp_context *amp;
    amp_system system;
    amp_loader_desc desc;           /* effective */
    amp_source source;              /* its fields describe every kind of source */
    ampi_source_kind kind;
    ampi_data_file *files;
    int64_t n_files;
    char **names;                   /* the files' paths, for desc.arrays */
    int64_t tokens, samples, batches, whole;    /* whole: batches of an epoch that are full on every rank */
    int64_t end;                    /* number of the batch at which the last epoch is over */
    uint64_t hash;
    /* buffers */
    int narrow;                     /* 1: slots hold tokens in 16 bits, device slots in 32, all at twice the offset */
    int64_t depth, ring_bytes, slot_bytes, scratch_bytes;
    int64_t field_offset[AMP_MAX_FIELDS], field_bytes[AMP_MAX_FIELDS];    /* in a slot; of one sample */
    ampi_slot *slots;
    char *ring;
    uint8_t *cache;                 /* of file contents: blocks, each filled once, by the worker that first wants it */
    uint8_t *cache_blocks;          /* atomic: their states */
    int64_t cache_bytes;
    /* a device that the host cannot see: two device slots, filled by turns on a stream of their own */
    const amp_backend *backend;
    void *dev, *stream, *copy_stream, *used[2];     /* used: events, all work queued before the last calls of next */
    char *device;                   /* and behind the two slots, where tokens arrive in 16 bits */
    const char *padding;            /* in the ring: the targets of a batch that is all padding */
    int64_t deliveries;             /* since creation: device slot deliveries & 1 is the current one */
    int64_t issued;                 /* number of the first batch whose copy was not begun */
    /* the queue, under the lock */
    int has_lock, threads, stop, paused, waiting;
    int lost;                       /* of the threads: ended by what they called */
    int cancel;                     /* atomic: workers drop what they do */
    int64_t busy, retries;
    int64_t calls;                  /* of the host's, that are inside */
    int64_t holders;                /* who still needs the loader's shell: its owner, and workers left behind */
    pthread_mutex_t lock;
    pthread_cond_t work, ready;
    int64_t consumed, claimed, released;    /* first batch not taken; not claimed; whose slot's last use is not over */
    int64_t waits, wait_ns;
    ampi_worker *workers;
    int64_t n_workers;              /* in the array: one where there are no threads, and it reads for amp_loader_next */
};

/* ---- Files */

static const char ampi_loader_create_name[] = "amp_loader_create";

/* Reads up to `bytes` at an offset; fewer only at the end that the file had when it was opened. */
static amp_result ampi_data_read(const amp_loader *l, const ampi_data_file *f, void *buffer, int64_t bytes,
                                 int64_t offset, int64_t *got) {
    *got = ampi_read_fully(&l->system, f->handle, buffer, bytes, offset);
    if (*got >= AMPI_MIN(bytes, f->bytes - offset)) return AMP_OK;
    if (*got >= 0)
        return ampi_fail(AMP_ERR_TRUNCATED, ampi_loader_create_name, "%s ended at offset %lld, it had %lld bytes", f->path,
                         (long long)(offset + *got), (long long)f->bytes);
    return ampi_fail(AMP_ERR_READ, ampi_loader_create_name, "%s: %s at offset %lld", f->path, strerror((int)-*got),
                     (long long)offset);
}

/* The elements a header promises are exactly those that follow it. */
static amp_result ampi_data_check_size(const ampi_data_file *f) {
    int64_t size = (int64_t)amp_dtype_size(f->dtype), held = (f->bytes - f->start) / size;
    if (f->count == 0 ? f->bytes == f->start
                      : held / f->row == f->count && f->start + f->count * f->row * size == f->bytes)
        return AMP_OK;
    return ampi_fail(f->count > held / f->row ? AMP_ERR_TRUNCATED : AMP_ERR_FORMAT, ampi_loader_create_name,
                     "%s: the header says %lld times %lld values of %s from offset %lld on, the file has %lld bytes",
                     f->path, (long long)f->count, (long long)f->row, amp_dtype_name(f->dtype), (long long)f->start,
                     (long long)f->bytes);
}

static amp_result ampi_llmc_header(ampi_data_file *f, const uint8_t *head, int64_t n) {
    uint32_t magic, version, known;
    if (n < AMPI_LLMC_HEADER)
        return ampi_fail(AMP_ERR_TRUNCATED, ampi_loader_create_name, "%s has %lld bytes, an llm.c header has %d",
                         f->path, (long long)f->bytes, AMPI_LLMC_HEADER);
    magic = ampi_le32(head);
    version = ampi_le32(head + 4);
    if (magic != 20240520u && magic != 20240801u)
        return ampi_fail(AMP_ERR_FORMAT, ampi_loader_create_name,
                         "%s begins with %u, not with llm.c's 20240520 or 20240801", f->path, magic);
    known = magic == 20240520u ? 1u : 7u;
    if (version != known || ampi_le32(head + 8) > INT32_MAX)
        return ampi_fail(AMP_ERR_FORMAT, ampi_loader_create_name,
                         "%s: llm.c version %u with %u tokens, known is version %u", f->path, version,
                         ampi_le32(head + 8), known);
    f->dtype = magic == 20240520u ? AMP_U16 : AMP_I32;
    f->start = AMPI_LLMC_HEADER;
    f->count = (int64_t)ampi_le32(head + 8);
    return ampi_data_check_size(f);
}

/* ---- The header of a .npy file: "\x93NUMPY", major, minor, length (2 or 4 bytes), and a Python dict such as
   {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }. */

typedef struct ampi_npy { char descr[8]; int fortran, dims; int64_t shape[AMPI_NPY_DIMS], start; } ampi_npy;
typedef struct ampi_text { const char *at, *end; } ampi_text;

/* Passes over white space and then over `word`, if that comes next. */
static int ampi_text_take(ampi_text *t, const char *word) {
    size_t n = strlen(word);
    while (t->at < t->end && (*t->at == ' ' || *t->at == '\n' || *t->at == '\t' || *t->at == '\r')) t->at++;
    if ((size_t)(t->end - t->at) < n || memcmp(t->at, word, n) != 0) return 0;
    t->at += n;
    return 1;
}

/* A quoted string of at most size - 1 characters. */
static int ampi_text_string(ampi_text *t, char *out, size_t size) {
    const char *quote = ampi_text_take(t, "'") ? "'" : ampi_text_take(t, "\"") ? "\"" : NULL;
    size_t n = 0;
    if (quote == NULL) return 0;
    for (; t->at < t->end && *t->at != *quote; t->at++) {
        if (n + 1 >= size) return 0;
        out[n++] = *t->at;
    }
    out[n] = 0;
    return ampi_text_take(t, quote);
}

static int ampi_text_number(ampi_text *t, int64_t *out) {
    int digits = 0;
    *out = 0;
    for (; t->at < t->end && *t->at >= '0' && *t->at <= '9'; t->at++, digits++) {
        if (*out > (INT64_MAX - 9) / 10) return 0;
        *out = *out * 10 + (*t->at - '0');
    }
    if (t->at < t->end && *t->at == 'L') t->at++;       /* written by Python 2 */
    return digits > 0;
}

static int ampi_npy_shape(ampi_text *t, ampi_npy *npy) {
    npy->dims = 0;
    if (!ampi_text_take(t, "(")) return 0;
    while (!ampi_text_take(t, ")")) {
        if (npy->dims == AMPI_NPY_DIMS || !ampi_text_number(t, &npy->shape[npy->dims])) return 0;
        npy->dims++;
        if (!ampi_text_take(t, ",")) return ampi_text_take(t, ")");
    }
    return 1;
}

static int ampi_npy_dict(ampi_text *t, ampi_npy *npy) {
    int seen = 0;
    char key[16];
    if (!ampi_text_take(t, "{")) return 0;
    while (!ampi_text_take(t, "}")) {
        if (!ampi_text_string(t, key, sizeof key) || !ampi_text_take(t, ":")) return 0;
        (void)ampi_text_take(t, "");
        if (strcmp(key, "descr") == 0) {
            if (!ampi_text_string(t, npy->descr, sizeof npy->descr)) return 0;
            seen |= 1;
        } else if (strcmp(key, "fortran_order") == 0) {
            npy->fortran = ampi_text_take(t, "True");
            if (!npy->fortran && !ampi_text_take(t, "False")) return 0;
            seen |= 2;
        } else if (strcmp(key, "shape") == 0) {
            if (!ampi_npy_shape(t, npy)) return 0;
            seen |= 4;
        } else return 0;
        if (!ampi_text_take(t, ",")) return ampi_text_take(t, "}") && seen == 7;
    }
    return seen == 7;
}

/* Where the dict begins and ends, from the first 12 bytes; 0: not a .npy file of a known version. */
static int64_t ampi_npy_extent(const uint8_t *head, int64_t n, int64_t *text) {
    if (n < 12 || memcmp(head, "\x93NUMPY", 6) != 0 || head[6] < 1 || head[6] > 3) return 0;
    *text = head[6] == 1 ? 10 : 12;
    return *text + (head[6] == 1 ? (int64_t)head[8] + ((int64_t)head[9] << 8) : (int64_t)ampi_le32(head + 8));
}

static amp_dtype ampi_npy_dtype(const char *descr, int tokens) {
    static const struct {
        const char *name;
        amp_dtype dtype;
        int tokens;
    } known[] = {/* 0 arrays, 1 tokens, 2 both */
                 {"f2", AMP_F16, 0}, {"f4", AMP_F32, 0}, {"f8", AMP_F64, 0}, {"b1", AMP_U8, 0}, {"u1", AMP_U8, 2},
                 {"u2", AMP_U16, 2}, {"i4", AMP_I32, 2}, {"i8", AMP_I64, 2}, {"u4", AMP_I32, 1}};
    size_t i;
    for (i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(descr + 1, known[i].name) == 0 && (known[i].tokens == 2 || known[i].tokens == tokens)
            && (descr[0] == '<' || (descr[0] == '|' && amp_dtype_size(known[i].dtype) == 1))) return known[i].dtype;
    return AMP_DTYPE_DEFAULT;
}

/* Fills dtype, start, count and row of f from its head, n bytes. */
static amp_result ampi_npy_header(ampi_data_file *f, const uint8_t *head, int64_t n, int tokens) {
    ampi_npy npy;
    ampi_text text;
    int64_t from = 0;
    int i;
    memset(&npy, 0, sizeof npy);
    npy.start = ampi_npy_extent(head, n, &from);
    if (npy.start == 0)
        return ampi_fail(AMP_ERR_FORMAT, ampi_loader_create_name, "%s is not a .npy file of version 1 to 3", f->path);
    if (npy.start > f->bytes)
        return ampi_fail(AMP_ERR_TRUNCATED, ampi_loader_create_name, "%s ends in its header", f->path);
    text.at = (const char *)head + from;
    text.end = (const char *)head + AMPI_MIN(npy.start, n);
    if (npy.start > n || !ampi_npy_dict(&text, &npy) || npy.dims < 1 || (npy.fortran && npy.dims > 1) ||
        (tokens && npy.dims != 1))
        return ampi_fail(AMP_ERR_FORMAT, ampi_loader_create_name,
                         "%s: the header is none of a%s plain array in C order", f->path,
                         tokens ? " one-dimensional" : "");
    f->dtype = ampi_npy_dtype(npy.descr, tokens);
    if (f->dtype == AMP_DTYPE_DEFAULT)
        return ampi_fail(AMP_ERR_DTYPE, ampi_loader_create_name, "%s holds %s, must be little-endian %s", f->path,
                         npy.descr, tokens ? "u1, u2, u4, i4 or i8" : "f2, f4, f8, u1, u2, i4, i8 or b1");
    f->start = npy.start;
    f->count = npy.shape[0];
    for (i = 1, f->row = 1; i < npy.dims; i++) {
        if (npy.shape[i] == 0 || npy.shape[i] > ((int64_t)1 << 40) / f->row)
            return ampi_fail(AMP_ERR_FORMAT, ampi_loader_create_name, "%s: dimension %d is %lld", f->path, i,
                             (long long)npy.shape[i]);
        f->row *= npy.shape[i];
    }
    return ampi_data_check_size(f);
}

/* Opens a file and finds out what is in it. */
static amp_result ampi_data_open(amp_loader *l, ampi_data_file *f, amp_token_format format) {
    uint8_t head[AMPI_NPY_HEADER];
    int64_t n;
    int error = f->is_open ? 0 : ampi_file_open(&l->system, f->path, 0, &f->handle);
    if (error == -EMFILE)
        return ampi_fail(AMP_ERR_OPEN, ampi_loader_create_name,
                         "%s: every file stays open, and of %lld only %lld could be; raise `ulimit -n`", f->path,
                         (long long)l->n_files, (long long)(f - l->files));
    if (error != 0) return ampi_fail(AMP_ERR_OPEN, ampi_loader_create_name, "%s: %s", f->path, strerror(-error));
    f->is_open = 1;
    f->bytes = l->system.file_size(l->system.user, f->handle);
    if (f->bytes < 0)
        return ampi_fail(AMP_ERR_READ, ampi_loader_create_name, "%s: %s", f->path, strerror((int)-f->bytes));
    AMPI_TRY(ampi_data_read(l, f, head, sizeof head, 0, &n));
    if (l->kind == AMPI_FROM_ARRAYS) return ampi_npy_header(f, head, n, 0);
    if (format == AMP_TOKENS_DEFAULT)
        format = n >= 4 && (ampi_le32(head) == 20240520u || ampi_le32(head) == 20240801u) ? AMP_TOKENS_LLMC
               : n >= 6 && memcmp(head, "\x93NUMPY", 6) == 0 ? AMP_TOKENS_NPY : AMP_TOKENS_BYTES;
    f->format = format;
    f->row = 1;
    if (format == AMP_TOKENS_LLMC) return ampi_llmc_header(f, head, n);
    if (format == AMP_TOKENS_NPY) return ampi_npy_header(f, head, n, 1);
    f->dtype = format == AMP_TOKENS_U16 ? AMP_U16 : AMP_U8;
    f->count = format == AMP_TOKENS_U16 ? f->bytes / 2 : f->bytes;
    if (format == AMP_TOKENS_U16 && f->bytes % 2 != 0)
        return ampi_fail(AMP_ERR_TRUNCATED, ampi_loader_create_name, "%s has %lld bytes, which ends in half a token",
                         f->path, (long long)f->bytes);
    return AMP_OK;
}

static uint64_t ampi_hash_bytes(uint64_t hash, const void *data, int64_t n) {     /* FNV-1a */
    const uint8_t *p = (const uint8_t *)data;
    for (; n > 0; n--) hash = (hash ^ *p++) * UINT64_C(0x100000001b3);
    return hash;
}
static uint64_t ampi_hash_number(uint64_t hash, int64_t value) {
    uint8_t bytes[8];
    ampi_store_le64(bytes, (uint64_t)value);
    return ampi_hash_bytes(hash, bytes, 8);
}

/* Hashes the size of a file and blocks of it, from the first to the last: 16 of a single file, two of each of many. */
static amp_result ampi_data_hash(amp_loader *l, const ampi_data_file *f) {
    uint8_t block[AMPI_HASH_BLOCK];
    int64_t blocks = AMPI_MAX(AMPI_HASH_BLOCKS / l->n_files, 2), last = f->bytes - AMPI_HASH_BLOCK, i, n, offset;
    l->hash = ampi_hash_number(l->hash, f->bytes);
    for (i = 0; i < blocks; i++) {
        offset = last < (blocks - 1) * AMPI_HASH_BLOCK ? i * AMPI_HASH_BLOCK    /* so short that this is all of it */
               : i == blocks - 1 ? last : last / (blocks - 1) * i;
        if (offset >= f->bytes) break;
        AMPI_TRY(ampi_data_read(l, f, block, sizeof block, offset, &n));
        l->hash = ampi_hash_bytes(l->hash, block, n);
    }
    return AMP_OK;
}

/* ---- Which files */

static amp_result ampi_files_reserve(amp_loader *l, int64_t n) {
    void *memory;
    AMPI_TRY(ampi_alloc(&l->system, ampi_loader_create_name, &memory, n, sizeof(ampi_data_file)));
    l->files = (ampi_data_file *)memory;
    l->n_files = n;
    AMPI_TRY(ampi_alloc(&l->system, ampi_loader_create_name, &memory, n, sizeof(char *)));
    l->names = (char **)memory;
    return AMP_OK;
}

static amp_result ampi_file_name(amp_loader *l, int64_t i, const char *path) {
    ampi_data_file *f = l->files + i;
    void *memory;
    int64_t bytes = (int64_t)strlen(path) + 1;
    AMPI_TRY(ampi_alloc(&l->system, ampi_loader_create_name, &memory, bytes, 1));
    memcpy(memory, path, (size_t)bytes);
    f->path = l->names[i] = (char *)memory;
    f->path_bytes = bytes;
    return AMP_OK;
}

/* A path that matches the beginning of a pattern, its text behind it, and the rest of the pattern. */
typedef struct ampi_path { struct ampi_path *next; const char *rest; int64_t bytes; } ampi_path;
typedef struct ampi_search {
    const amp_system *system;
    ampi_path *ahead, *at;
    amp_result result;
    char part[PATH_MAX];            /* of the pattern: what comes behind `at` */
} ampi_search;

static char *ampi_path_text(ampi_path *p) { return (char *)(p + 1); }

/* Adds the path that continues `at` with a name, and with the slashes that follow in the pattern. */
static int ampi_search_add(ampi_search *s, const char *name) {
    const char *end = s->at->rest + strcspn(s->at->rest, "/"), *rest = end + strspn(end, "/");
    int64_t bytes = (int64_t)(sizeof(ampi_path) + strlen(ampi_path_text(s->at)) + strlen(name)) + (rest - end) + 1;
    void *memory;
    ampi_path *p;
    s->result = ampi_alloc(s->system, ampi_loader_create_name, &memory, bytes, 1);
    if (s->result != AMP_OK) return 1;
    p = (ampi_path *)memory;
    p->bytes = bytes;
    p->rest = rest;
    p->next = s->ahead;
    s->ahead = p;
    snprintf(ampi_path_text(p), (size_t)bytes - sizeof *p, "%s%s%.*s", ampi_path_text(s->at), name, (int)(rest - end), end);
    return 0;
}

static int ampi_search_name(void *search, const char *name) {
    ampi_search *s = (ampi_search *)search;
    return fnmatch(s->part, name, FNM_PERIOD) == 0 && ampi_search_add(s, name);
}

static int ampi_path_exists(const amp_system *s, const char *path) {
    intptr_t handle;
    int error = ampi_file_open(s, path, 0, &handle);
    if (error == 0) s->file_close(s->user, handle);
    return error != -ENOENT && error != -ENOTDIR;
}

/* Goes on from `at` by one part of the pattern. */
static amp_result ampi_search_step(ampi_search *s) {
    const char *folder = ampi_path_text(s->at), *rest = s->at->rest;
    int error;
    snprintf(s->part, sizeof s->part, "%.*s", (int)strcspn(rest, "/"), rest);
    if (strpbrk(s->part, "*?[") == NULL) {
        ampi_path *p = ampi_search_add(s, s->part) ? NULL : s->ahead;
        if (p == NULL || *p->rest != 0 || ampi_path_exists(s->system, ampi_path_text(p))) return s->result;
        s->ahead = p->next;
        ampi_free(s->system, p, p->bytes, 1);
        return AMP_OK;
    }
    if (folder[0] == 0) folder = ".";
    error = s->system->file_list(s->system->user, folder, ampi_search_name, s);
    if (error >= 0 || error == -ENOENT || error == -ENOTDIR) return s->result;
    return ampi_fail(AMP_ERR_OPEN, ampi_loader_create_name, "the names in %s: %s", folder, strerror(-error));
}

static int ampi_compare_paths(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

/* The matches of a pattern, sorted by bytes: the same order for every rank, whatever its locale. */
static amp_result ampi_files_by_pattern(amp_loader *l) {
    ampi_search s;
    ampi_path root[2], *found = NULL, *p;
    amp_result result;
    int64_t n = 0, i;
    memset(&s, 0, sizeof s);
    memset(root, 0, sizeof root);
    root->rest = l->desc.path;
    s.system = &l->system;
    s.at = root;
    result = ampi_search_step(&s);
    while ((p = s.ahead) != NULL) {
        s.ahead = p->next;
        s.at = p;
        if (result == AMP_OK && *p->rest == 0) {
            p->next = found;
            found = p;
            n++;
            continue;
        }
        if (result == AMP_OK) result = ampi_search_step(&s);
        ampi_free(&l->system, p, p->bytes, 1);
    }
    if (result == AMP_OK && n == 0)
        result = ampi_fail(AMP_ERR_OPEN, ampi_loader_create_name, "%s: no file matches", l->desc.path);
    if (result == AMP_OK) result = ampi_files_reserve(l, n);
    for (p = found, i = 0; p != NULL && result == AMP_OK; p = p->next) l->names[i++] = ampi_path_text(p);
    if (result == AMP_OK) qsort(l->names, (size_t)n, sizeof *l->names, ampi_compare_paths);
    for (i = 0; i < n && result == AMP_OK; i++) result = ampi_file_name(l, i, l->names[i]);
    while ((p = found) != NULL) { found = p->next; ampi_free(&l->system, p, p->bytes, 1); }
    return result;
}

/* A name with wildcards under which there is no file. */
static int ampi_is_pattern(const amp_loader *l) {
    return strpbrk(l->desc.path, "*?[") != NULL && !ampi_path_exists(&l->system, l->desc.path);
}

static amp_result ampi_files_find(amp_loader *l) {
    int64_t i;
    if (l->kind == AMPI_FROM_ARRAYS) {
        AMPI_TRY(ampi_files_reserve(l, l->desc.n_arrays));
        for (i = 0; i < l->n_files; i++) AMPI_TRY(ampi_file_name(l, i, l->desc.arrays[i]));
        l->desc.arrays = (const char *const *)l->names;
        return AMP_OK;
    }
    if (ampi_is_pattern(l)) return ampi_files_by_pattern(l);
    AMPI_TRY(ampi_files_reserve(l, 1));
    return ampi_file_name(l, 0, l->desc.path);
}

/* ---- What the source holds */

/* Checks [first, last) of `n` and fills in the end. */
static amp_result ampi_loader_bounds(amp_loader *l, int64_t n, const char *what) {
    amp_loader_desc *d = &l->desc;
    if (d->last == 0) d->last = n;
    if (d->first < 0 || d->last > n || d->first > d->last)
        return ampi_fail(AMP_ERR_RANGE, ampi_loader_create_name,
                         ".first = %lld and .last = %lld, must be 0 to %lld (%s), .first not above .last",
                         (long long)d->first, (long long)d->last, (long long)n, what);
    return AMP_OK;
}

/* Counts the samples of token files: those of each file that lie in [first, last) with the token behind them. */
static amp_result ampi_loader_count_tokens(amp_loader *l) {
    int64_t i, at = 0;
    for (i = 0; i < l->n_files; i++) {
        if (l->files[i].format != l->files[0].format || l->files[i].dtype != l->files[0].dtype)
            return ampi_fail(AMP_ERR_FORMAT, ampi_loader_create_name, "%s and %s are of different formats",
                             l->files[0].path, l->files[i].path);
        l->tokens += l->files[i].count;
    }
    l->desc.format = l->files[0].format;
    AMPI_TRY(ampi_loader_bounds(l, l->tokens, "tokens"));
    for (i = 0; i < l->n_files; i++) {
        ampi_data_file *f = l->files + i;
        int64_t first = AMPI_MAX(l->desc.first - at, 0), last = AMPI_MIN(l->desc.last - at, f->count);
        f->overlap = (int64_t)amp_dtype_size(f->dtype);
        f->first_byte = f->start + first * f->overlap;
        f->stride = l->desc.seq * f->overlap;
        f->first_sample = l->samples;
        f->samples = last > first ? (last - first - 1) / l->desc.seq : 0;
        l->samples += f->samples;
        at += f->count;
    }
    l->source.n_fields = 2;
    for (i = 0; i < 2; i++) { l->source.fields[i].dtype = AMP_I32; l->source.fields[i].count = l->desc.seq; }
    return AMP_OK;
}

static amp_result ampi_loader_count_arrays(amp_loader *l) {
    int64_t i;
    l->source.n_fields = (int32_t)l->n_files;
    for (i = 0; i < l->n_files; i++) {
        ampi_data_file *f = l->files + i;
        if (f->count != l->files[0].count)
            return ampi_fail(AMP_ERR_SHAPE, ampi_loader_create_name, "%s has %lld rows, %s has %lld", l->files[0].path,
                             (long long)l->files[0].count, f->path, (long long)f->count);
        l->source.fields[i].dtype = f->dtype;
        l->source.fields[i].count = f->row;
    }
    AMPI_TRY(ampi_loader_bounds(l, l->files[0].count, "rows"));
    l->samples = l->desc.last - l->desc.first;
    for (i = 0; i < l->n_files; i++) {
        ampi_data_file *f = l->files + i;
        f->samples = l->samples;
        f->stride = f->row * (int64_t)amp_dtype_size(f->dtype);
        f->first_byte = f->start + l->desc.first * f->stride;
    }
    return AMP_OK;
}

static amp_result ampi_loader_count_callback(amp_loader *l) {
    const amp_source *s = &l->source;
    int32_t i;
    if (s->read == NULL) return ampi_fail(AMP_ERR_NULL, ampi_loader_create_name, ".source->read is NULL");
    if (s->samples < 1 || s->n_fields < 1 || s->n_fields > AMP_MAX_FIELDS)
        return ampi_fail(AMP_ERR_RANGE, ampi_loader_create_name,
                         ".source->samples = %lld and .n_fields = %d, must be 1 or more and 1 to %d",
                         (long long)s->samples, s->n_fields, AMP_MAX_FIELDS);
    l->hash = ampi_hash_number(ampi_hash_number(l->hash, (int64_t)s->hash), s->samples);
    for (i = 0; i < s->n_fields; i++) {
        if (amp_dtype_size(s->fields[i].dtype) == 0)
            return ampi_fail(AMP_ERR_DTYPE, ampi_loader_create_name, ".source->fields[%d].dtype = %d", i,
                             (int)s->fields[i].dtype);
        if (s->fields[i].count < 1)
            return ampi_fail(AMP_ERR_RANGE, ampi_loader_create_name,
                             ".source->fields[%d].count = %lld, must be 1 or more", i, (long long)s->fields[i].count);
        l->hash = ampi_hash_number(ampi_hash_number(l->hash, (int64_t)s->fields[i].dtype), s->fields[i].count);
    }
    AMPI_TRY(ampi_loader_bounds(l, s->samples, "samples"));
    l->samples = l->desc.last - l->desc.first;
    return AMP_OK;
}

/* Opens the source and counts; afterwards samples, batches, fields and hash are known. */
static amp_result ampi_loader_open(amp_loader *l) {
    const amp_loader_desc *d = &l->desc;
    int64_t i, per_rank;
    l->hash = UINT64_C(0xcbf29ce484222325);
    if (l->kind != AMPI_FROM_CALLBACK) {
        AMPI_TRY(ampi_files_find(l));
        for (i = 0; i < l->n_files; i++) {
            AMPI_TRY(ampi_data_open(l, l->files + i, d->format));
            AMPI_TRY(ampi_data_hash(l, l->files + i));
        }
    }
    AMPI_TRY(l->kind == AMPI_FROM_TOKENS   ? ampi_loader_count_tokens(l)
             : l->kind == AMPI_FROM_ARRAYS ? ampi_loader_count_arrays(l)
                                           : ampi_loader_count_callback(l));
    per_rank = l->samples / d->world;
    l->whole = per_rank / d->batch;
    l->batches = l->whole + (d->last_batch != AMP_LAST_DROP && l->samples > l->whole * d->world * d->batch);
    if (l->batches < 1)
        return ampi_fail(AMP_ERR_RANGE, ampi_loader_create_name,
                         "%s: %lld samples are less than one batch of %lld on each of %d ranks",
                         l->n_files > 0 ? l->files[0].path : "callback", (long long)l->samples, (long long)d->batch,
                         d->world);
    l->end = d->epochs == 0 || d->epochs > INT64_MAX / l->batches ? INT64_MAX : d->epochs * l->batches;
    return AMP_OK;
}

/* ---- Filling a slot */

/* The places in the epoch's order that batch `index` has on this rank.  What fills no batch on every rank is
   shared out evenly. */
static void ampi_loader_slice(const amp_loader *l, int64_t index, int64_t *start, int64_t *n) {
    int64_t world = l->desc.world, rank = l->desc.rank, rest;
    *n = l->desc.batch;
    *start = (index * world + rank) * *n;
    if (index < l->whole) return;
    rest = l->samples - l->whole * world * *n;
    *start = l->whole * world * *n + rest / world * rank + AMPI_MIN(rank, rest % world);
    *n = rest / world + (rank < rest % world);
}

/* Where the cache has bytes of a file; NULL: it has not. */
static const uint8_t *ampi_cache_find(const amp_loader *l, const ampi_data_file *f, int64_t offset, int64_t bytes) {
    int64_t at = f->cache_at + offset, block;
    if (offset + bytes > f->cached) return NULL;
    for (block = at / AMPI_CACHE_BLOCK; block * AMPI_CACHE_BLOCK < at + bytes; block++)
        if (__atomic_load_n(l->cache_blocks + block, __ATOMIC_ACQUIRE) != AMPI_BLOCK_LOADED) return NULL;
    return l->cache + at;
}

/* Reads the blocks that hold these bytes.  One that another worker is reading, or that cannot be read, is passed
   over: then the bytes are not found, and are read for themselves. */
static void ampi_cache_load(const amp_loader *l, const ampi_data_file *f, int64_t offset, int64_t bytes) {
    int64_t from = offset / AMPI_CACHE_BLOCK * AMPI_CACHE_BLOCK;
    for (; from < offset + bytes && from < f->cached; from += AMPI_CACHE_BLOCK) {
        uint8_t *state = l->cache_blocks + (f->cache_at + from) / AMPI_CACHE_BLOCK, expected = AMPI_BLOCK_ABSENT;
        int64_t n = AMPI_MIN(f->bytes - from, (int64_t)AMPI_CACHE_BLOCK), got;
        if (!__atomic_compare_exchange_n(state, &expected, AMPI_BLOCK_LOADING, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            continue;
        got = ampi_read_fully(&l->system, f->handle, l->cache + f->cache_at + from, n, from);
        __atomic_store_n(state, got == n ? AMPI_BLOCK_LOADED : AMPI_BLOCK_ABSENT, __ATOMIC_RELEASE);
    }
}

/* What may hang: *data = the bytes, in the cache or in the worker's scratch memory.  Returns how many there are, or
   -errno. */
static int64_t ampi_worker_fetch(ampi_worker *w, const ampi_data_file *f, int64_t offset, int64_t bytes,
                                 const uint8_t **data) {
    const amp_loader *l = w->loader;
    if (offset + bytes <= f->cached) {
        int64_t size = l->system.file_size(l->system.user, f->handle);
        if (size < offset + bytes) return size < 0 ? size : AMPI_MAX(size - offset, 0);
        w->seen[f - l->files].fill = w->fills;
        w->seen[f - l->files].bytes = size;
        ampi_cache_load(l, f, offset, bytes);
        *data = ampi_cache_find(l, f, offset, bytes);
        if (*data != NULL) return bytes;
    }
    *data = w->scratch;
    return ampi_read_fully(&l->system, f->handle, w->scratch, bytes, offset);
}

static amp_result ampi_worker_read(ampi_worker *w, const ampi_data_file *f, int64_t offset, int64_t bytes,
                                   const uint8_t **data) {
    const amp_loader *l = w->loader;
    int expected = AMPI_WORKER_READING;
    int64_t got = 0;
    __atomic_store_n(&w->file, f - l->files, __ATOMIC_RELAXED);
    __atomic_store_n(&w->offset, offset, __ATOMIC_RELAXED);
    __atomic_store_n(&w->phase, AMPI_WORKER_READING, __ATOMIC_SEQ_CST);
    if (!__atomic_load_n(&l->cancel, __ATOMIC_SEQ_CST)) got = ampi_worker_fetch(w, f, offset, bytes, data);
    w->abandoned =
        !__atomic_compare_exchange_n(&w->phase, &expected, AMPI_WORKER_BUSY, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    if (w->abandoned || __atomic_load_n(&l->cancel, __ATOMIC_SEQ_CST)) return AMPI_CANCELLED;
    if (got == bytes) return AMP_OK;
    if (got < 0)
        return ampi_fail(AMP_ERR_READ, "amp_loader_next", "worker %d: %s: %s at offset %lld", w->id, f->path,
                         strerror((int)-got), (long long)offset);
    return ampi_fail(AMP_ERR_TRUNCATED, "amp_loader_next", "worker %d: %s ended at offset %lld, it had %lld bytes",
                     w->id, f->path, (long long)(offset + got), (long long)f->bytes);
}

/* *data = bytes of a file, valid until the next call. */
static amp_result ampi_worker_get(ampi_worker *w, const ampi_data_file *f, int64_t offset, int64_t bytes,
                                  const uint8_t **data) {
    const amp_loader *l = w->loader;
    if (offset + bytes <= f->cached) {
        const ampi_seen *seen = w->seen + (f - l->files);
        *data = ampi_cache_find(l, f, offset, bytes);
        if (*data != NULL && seen->fill == w->fills && offset + bytes <= seen->bytes)
            return __atomic_load_n(&l->cancel, __ATOMIC_RELAXED) ? AMPI_CANCELLED : AMP_OK;
    }
    return ampi_worker_read(w, f, offset, bytes, data);
}

/* Token i as a number; what is negative or beyond 32 bits comes out as the largest. */
AMPI_PRIVATE inline __attribute__((always_inline)) uint32_t ampi_token(const uint8_t *raw, amp_dtype dtype, int64_t i) {
    uint64_t wide;
    if (dtype == AMP_U8) return raw[i];
    if (dtype == AMP_U16) return (uint32_t)raw[2 * i] | (uint32_t)raw[2 * i + 1] << 8;
    if (dtype == AMP_I32) return ampi_le32(raw + 4 * i);
    wide = ampi_le64(raw + 8 * i);
    return wide > UINT32_MAX ? UINT32_MAX : (uint32_t)wide;
}

typedef uint16_t ampi_u16x8 __attribute__((vector_size(16)));
typedef int32_t ampi_i32x8 __attribute__((vector_size(32)));

/* As ampi_token_row_as for 16 bits, 8 tokens at a time, on a little-endian machine.  Returns how many it did. */
static int64_t ampi_token_eights(const uint8_t *raw, int64_t seq, char *inputs, char *targets, int narrow,
                                 uint32_t limit, uint32_t *bad) {
    ampi_u16x8 last, over = {0}, in, out;
    ampi_i32x8 wide;
    int64_t i;
    for (i = 0; i < 8; i++) last[i] = (uint16_t)AMPI_MIN(limit - 1, 65535u);
    for (i = 0; i + 8 <= seq; i += 8) {
        memcpy(&in, raw + 2 * i, sizeof in);
        memcpy(&out, raw + 2 * i + 2, sizeof out);
        over |= (ampi_u16x8)(out > last);
        if (narrow) {
            memcpy(inputs + 2 * i, &in, sizeof in);
            memcpy(targets + 2 * i, &out, sizeof out);
            continue;
        }
        wide = __builtin_convertvector(in, ampi_i32x8);
        memcpy(inputs + 4 * i, &wide, sizeof wide);
        wide = __builtin_convertvector(out, ampi_i32x8);
        memcpy(targets + 4 * i, &wide, sizeof wide);
    }
    for (seq = 0; seq < 8; seq++) *bad |= over[seq];
    return i;
}

/* One sample: seq inputs, and as targets the same one further, in int32 or, narrow, in uint16.  Whether a token is not
   below the limit. */
AMPI_PRIVATE inline __attribute__((always_inline)) uint32_t
ampi_token_row_as(amp_dtype dtype, const uint8_t *raw, int64_t seq, char *inputs, char *targets, int narrow,
                  uint32_t limit) {
    uint32_t token = ampi_token(raw, dtype, 0), next, bad = token >= limit;
    int64_t i = 0;
    if (dtype == AMP_U16 && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__) {
        i = ampi_token_eights(raw, seq, inputs, targets, narrow, limit, &bad);
        token = ampi_token(raw, dtype, i);
    }
    for (; i < seq; i++, token = next) {
        next = ampi_token(raw, dtype, i + 1);
        bad |= next >= limit;
        if (narrow) {
            ampi_put16(inputs, i, (uint16_t)token);
            ampi_put16(targets, i, (uint16_t)next);
        } else {
            ampi_put32(inputs, i, token);
            ampi_put32(targets, i, next);
        }
    }
    return bad;
}

static uint32_t ampi_token_row(amp_dtype dtype, const uint8_t *raw, int64_t seq, char *in, char *out, int narrow,
                               uint32_t limit) {
    switch (dtype) {
        case AMP_U8:  return ampi_token_row_as(AMP_U8, raw, seq, in, out, narrow, limit);
        case AMP_U16: return ampi_token_row_as(AMP_U16, raw, seq, in, out, narrow, limit);
        case AMP_I32: return ampi_token_row_as(AMP_I32, raw, seq, in, out, narrow, limit);
        default:      return ampi_token_row_as(AMP_I64, raw, seq, in, out, narrow, limit);
    }
}

static amp_result ampi_bad_token(const ampi_data_file *f, const uint8_t *raw, int64_t offset, uint32_t limit) {
    int64_t size = (int64_t)amp_dtype_size(f->dtype), i = 0, value;
    while (ampi_token(raw, f->dtype, i) < limit) i++;
    value = f->dtype == AMP_I64 ? (int64_t)ampi_le64(raw + 8 * i) : (int64_t)ampi_token(raw, f->dtype, i);
    return ampi_fail(AMP_ERR_LABEL, "amp_loader_next", "%s: token %lld at offset %lld, must be 0 to %u", f->path,
                     (long long)value, (long long)(offset + i * size), limit - 1);
}

static const ampi_data_file *ampi_file_of_sample(const amp_loader *l, int64_t sample) {
    int64_t low = 0, high = l->n_files - 1;
    while (low < high) {                /* the last file whose first sample is not beyond it */
        int64_t middle = low + (high - low + 1) / 2;
        if (l->files[middle].first_sample <= sample) low = middle;
        else high = middle - 1;
    }
    return l->files + low;
}

/* How many neighbouring samples, of `size` bytes each, one read may bring. */
static int64_t ampi_read_run(const amp_loader *l, int64_t wanted, int64_t size) {
    return l->desc.shuffle ? 1 : AMPI_MIN(wanted, AMPI_MAX(AMPI_READ_BYTES / size, 1));
}

/* Finds out where n samples lie, from a place on, in this array or, if NULL, in the token files: as many as go into
   AMPI_PIECES pieces, whose number it returns.  What they need from the cache is on its way when they are used. */
static int64_t ampi_worker_plan(const ampi_worker *w, const ampi_data_file *array, int64_t place, int64_t n,
                                ampi_piece *pieces) {
    const amp_loader *l = w->loader;
    int64_t samples[AMPI_PIECES], count, at;
    if (l->desc.shuffle) ampi_order_at(&w->order, place, AMPI_MIN(n, (int64_t)AMPI_PIECES), samples);
    for (count = 0; count < AMPI_PIECES && n > 0; count++) {
        int64_t sample = l->desc.shuffle ? samples[count] : place;
        const ampi_data_file *f = array != NULL ? array : ampi_file_of_sample(l, sample);
        ampi_piece *p = pieces + count;
        p->file = f;
        p->offset = f->first_byte + (sample - f->first_sample) * f->stride;
        p->samples = ampi_read_run(l, AMPI_MIN(n, f->first_sample + f->samples - sample), f->stride);
        for (at = p->offset / 64 * 64; at < AMPI_MIN(p->offset + f->stride + f->overlap, f->cached); at += 64)
            __builtin_prefetch(l->cache + f->cache_at + at);
        place += p->samples;
        n -= p->samples;
    }
    return count;
}

/* Fills rows of a batch from sample `row` on with tokens. */
static amp_result ampi_fill_token_rows(ampi_worker *w, const ampi_piece *p, int64_t row, ampi_slot *slot) {
    const amp_loader *l = w->loader;
    const ampi_data_file *f = p->file;
    uint32_t limit = l->desc.vocab > 0 ? (uint32_t)l->desc.vocab : (uint32_t)1 << 31;
    int64_t size = l->field_bytes[0], i;
    char *inputs = slot->data + l->field_offset[0] + row * size;
    char *targets = slot->data + l->field_offset[1] + row * size;
    const uint8_t *raw;
    AMPI_TRY(ampi_worker_get(w, f, p->offset, p->samples * f->stride + f->overlap, &raw));
    for (i = 0; i < p->samples; i++, raw += f->stride, inputs += size, targets += size)
        if (ampi_token_row(f->dtype, raw, l->desc.seq, inputs, targets, l->narrow, limit))
            return ampi_bad_token(f, raw, p->offset + i * f->stride, limit);
    return AMP_OK;
}

static amp_result ampi_fill_array_rows(ampi_worker *w, const ampi_piece *p, int64_t row, ampi_slot *slot) {
    const amp_loader *l = w->loader;
    int64_t file = p->file - l->files, bytes = p->samples * p->file->stride;
    const uint8_t *raw;
    AMPI_TRY(ampi_worker_get(w, p->file, p->offset, bytes, &raw));
    ampi_copy_le((uint8_t *)slot->data + l->field_offset[file] + row * p->file->stride, raw, (size_t)bytes,
                 amp_dtype_size(p->file->dtype));
    return AMP_OK;
}

/* Samples from token files, or from each array. */
static amp_result ampi_fill_from_files(ampi_worker *w, int64_t start, int64_t n, ampi_slot *slot) {
    const amp_loader *l = w->loader;
    int tokens = l->kind == AMPI_FROM_TOKENS;
    ampi_piece pieces[AMPI_PIECES], *p;
    int64_t file, row, count;
    for (file = 0; file < (tokens ? 1 : l->n_files); file++)
        for (row = 0; row < n;) {
            count = ampi_worker_plan(w, tokens ? NULL : l->files + file, start + row, n - row, pieces);
            for (p = pieces; p < pieces + count; row += p->samples, p++)
                AMPI_TRY(tokens ? ampi_fill_token_rows(w, p, row, slot) : ampi_fill_array_rows(w, p, row, slot));
        }
    return AMP_OK;
}

static amp_result ampi_fill_callback(ampi_worker *w, int64_t epoch, int64_t start, int64_t n, ampi_slot *slot) {
    const amp_loader *l = w->loader;
    char error[256];
    amp_sample what;
    int64_t i;
    memset(&what, 0, sizeof what);
    what.epoch = epoch;
    what.worker = w->id;
    what.error = error;
    what.error_size = (int32_t)sizeof error;
    for (i = 0; i < n; i++) {
        void *fields[AMP_MAX_FIELDS];
        int32_t k;
        int failed;
        if (__atomic_load_n(&l->cancel, __ATOMIC_SEQ_CST)) return AMPI_CANCELLED;
        what.sample = start + i;
        if (l->desc.shuffle) ampi_order_at(&w->order, start + i, 1, &what.sample);
        what.sample += l->desc.first;
        what.random = ampi_epoch_random(l->desc.seed, epoch, (uint64_t)what.sample + AMPI_ORDER_ROUNDS);
        error[0] = 0;
        for (k = 0; k < l->source.n_fields; k++) fields[k] = slot->data + l->field_offset[k] + i * l->field_bytes[k];
        __atomic_store_n(&w->offset, what.sample, __ATOMIC_RELAXED);
        failed = l->source.read(l->source.user, &what, fields);
        error[sizeof error - 1] = 0;
        if (failed != 0)
            return ampi_fail(AMP_ERR_SOURCE, "amp_loader_next", "worker %d: sample %lld: the callback returned %d: %s",
                             w->id, (long long)what.sample, failed, error);
    }
    return AMP_OK;
}

/* Fills what the batch lacks of its full size; narrow targets get theirs on the device. */
static void ampi_fill_padding(const amp_loader *l, int64_t n, ampi_slot *slot) {
    int64_t i, missing = l->desc.batch - n, k;
    for (i = 0; i < l->source.n_fields && missing > 0; i++) {
        char *from = slot->data + l->field_offset[i] + n * l->field_bytes[i];
        if (l->kind == AMPI_FROM_TOKENS && i == 1 && !l->narrow)
            for (k = 0; k < missing * l->desc.seq; k++) ((int32_t *)(void *)from)[k] = -100;
        else memset(from, 0, (size_t)(missing * l->field_bytes[i]));
    }
}

static amp_result ampi_worker_fill(ampi_worker *w, int64_t number, ampi_slot *slot) {
    amp_loader *l = w->loader;
    int64_t epoch = number / l->batches, start, n;
    ampi_loader_slice(l, number % l->batches, &start, &n);
    if (l->desc.shuffle && w->order_epoch != epoch) {
        ampi_order_init(&w->order, l->samples, l->desc.seed, epoch);
        w->order_epoch = epoch;
    }
    w->fills++;
    AMPI_TRY(l->kind == AMPI_FROM_CALLBACK ? ampi_fill_callback(w, epoch, start, n, slot)
                                           : ampi_fill_from_files(w, start, n, slot));
    if (l->desc.last_batch == AMP_LAST_PAD) ampi_fill_padding(l, n, slot);
    return AMP_OK;
}

/* ---- The queue.  Every function here is called with the lock held. */

static ampi_slot *ampi_slot_of(amp_loader *l, int64_t number) { return l->slots + number % l->depth; }

/* The batch to fill next, or -1: what has to be filled again, once the consumer waits, or what was never claimed. */
static int64_t ampi_queue_claim(amp_loader *l) {
    int64_t number;
    if (l->paused) return -1;
    for (number = l->consumed; l->retries > 0 && l->waiting > 0 && number < l->claimed; number++)
        if (ampi_slot_of(l, number)->state == AMPI_SLOT_RETRY) { l->retries--; return number; }
    return l->claimed < l->released + l->depth && l->claimed < l->end ? l->claimed++ : -1;
}

static void ampi_queue_store(amp_loader *l, ampi_slot *slot, amp_result result) {
    slot->result = result;
    slot->state = result == AMP_OK ? AMPI_SLOT_READY : result == AMPI_CANCELLED ? AMPI_SLOT_RETRY : AMPI_SLOT_FAILED;
    if (slot->state == AMPI_SLOT_RETRY) l->retries++;
    if (slot->state == AMPI_SLOT_FAILED) memcpy(slot->error, ampi_error_text, sizeof slot->error);
}

/* Slots of batches before `number` may be filled again. */
static void ampi_queue_release(amp_loader *l, int64_t number) {
    if (l->released >= number) return;
    for (; l->released < number; l->released++) ampi_slot_of(l, l->released)->state = AMPI_SLOT_EMPTY;
    pthread_cond_broadcast(&l->work);
}

static amp_result ampi_queue_timeout(amp_loader *l, const ampi_slot *slot, const char *function) {
    int id = slot->state == AMPI_SLOT_FILLING ? slot->worker : 0;
    const ampi_worker *w = l->workers + id;
    long long offset = (long long)__atomic_load_n(&w->offset, __ATOMIC_RELAXED);
    if (l->kind == AMPI_FROM_CALLBACK)
        return ampi_fail(AMP_ERR_TIMEOUT, function, "%d ms have passed, worker %d is in the callback with sample %lld",
                         l->desc.timeout_ms, id, offset);
    return ampi_fail(AMP_ERR_TIMEOUT, function, "%d ms have passed, worker %d reads %s at offset %lld",
                     l->desc.timeout_ms, id, l->files[__atomic_load_n(&w->file, __ATOMIC_RELAXED)].path, offset);
}

static amp_result ampi_stopped(const char *function) { return ampi_fail(AMP_ERR_STATE, function, "the loader was stopped"); }

/* Waits for news from a worker until `deadline` (monotonic ns); 0 when that has passed. */
static int ampi_queue_wait(amp_loader *l, int64_t deadline) {
    struct timespec until;
    int error;
    until.tv_sec = (time_t)(deadline / 1000000000);
    until.tv_nsec = (long)(deadline % 1000000000);
    l->waiting++;
    error = pthread_cond_timedwait(&l->ready, &l->lock, &until);
    l->waiting--;
    return error != ETIMEDOUT;
}

static void ampi_queue_again(amp_loader *l, ampi_slot *slot) {
    slot->state = AMPI_SLOT_RETRY;
    l->retries++;
    pthread_cond_broadcast(&l->work);
}

/* Waits until batch `number`, the next one, is READY.  A failure of reading ahead may be old: the batch is tried
   again now that it is wanted, and only that attempt's failure is handed over. */
static amp_result ampi_queue_await(amp_loader *l, int64_t number) {
    ampi_slot *slot = ampi_slot_of(l, number);
    int64_t begin = 0;
    amp_result result = AMP_OK;
    if (l->threads == 0 && slot->state != AMPI_SLOT_READY) {
        if (slot->state == AMPI_SLOT_RETRY) l->retries--;
        else l->claimed++;
        slot->state = AMPI_SLOT_FILLING;
        pthread_mutex_unlock(&l->lock);
        result = ampi_worker_fill(l->workers, number, slot);
        pthread_mutex_lock(&l->lock);
        ampi_queue_store(l, slot, result);
        result = AMP_OK;
    }
    while (slot->state != AMPI_SLOT_READY && result == AMP_OK && !l->stop) {
        if (slot->state == AMPI_SLOT_FAILED) {
            if (!slot->ahead) {
                result = slot->result;
                memcpy(ampi_error_text, slot->error, sizeof ampi_error_text);
            }
            ampi_queue_again(l, slot);
            if (!slot->ahead) break;
        }
        if (l->threads > 0 && l->lost == l->threads) {
            result = ampi_fail(AMP_ERR_SOURCE, "amp_loader_next", "no worker is left, the callback ended their threads: create the loader anew");
            break;
        }
        if (begin == 0) {
            begin = ampi_posix_clock(NULL);
            l->waits++;
            pthread_cond_broadcast(&l->work);
        }
        if (!ampi_queue_wait(l, begin + (int64_t)l->desc.timeout_ms * 1000000) && slot->state != AMPI_SLOT_READY &&
            slot->state != AMPI_SLOT_FAILED)
            result = ampi_queue_timeout(l, slot, "amp_loader_next");
    }
    if (begin != 0) l->wait_ns += ampi_posix_clock(NULL) - begin;
    return result == AMP_OK && l->stop ? ampi_stopped("amp_loader_next") : result;
}

/* ---- Workers */

/* What workers use; called when none is left. */
static void ampi_loader_free(amp_loader *l) {
    amp_system s = l->system;
    int64_t i;
    for (i = 0; i < l->n_files; i++) {
        if (l->files[i].is_open) s.file_close(s.user, l->files[i].handle);
        ampi_free(&s, l->files[i].path, l->files[i].path_bytes, 1);
    }
    ampi_free(&s, l->files, l->n_files, sizeof(ampi_data_file));
    ampi_free(&s, l->names, l->n_files, sizeof(char *));
    for (i = 0; i < l->n_workers; i++) {
        ampi_free(&s, l->workers[i].scratch, l->scratch_bytes, 1);
        ampi_free(&s, l->workers[i].seen, l->n_files, sizeof(ampi_seen));
    }
    if (l->cache != NULL) s.free(s.user, l->cache, (size_t)l->cache_bytes);
    ampi_free(&s, l->cache_blocks, l->cache_bytes / AMPI_CACHE_BLOCK, 1);
    ampi_free(&s, l->workers, l->n_workers, sizeof(ampi_worker));
    ampi_free(&s, l->slots, l->depth, sizeof(ampi_slot));
    if (l->desc.path != NULL) ampi_free(&s, (void *)(uintptr_t)l->desc.path, (int64_t)strlen(l->desc.path) + 1, 1);
    if (l->has_lock) {
        pthread_cond_destroy(&l->work);
        pthread_cond_destroy(&l->ready);
        pthread_mutex_destroy(&l->lock);
    }
    ampi_free(&s, l, 1, sizeof *l);
}

/* What a worker called ended its thread (pthread_exit) instead of returning: its batch fails, the others go on. */
static void ampi_worker_died(void *arg) {
    ampi_worker *w = (ampi_worker *)arg;
    amp_loader *l = w->loader;
    int last = 0;
    pthread_mutex_lock(&l->lock);
    if (__atomic_load_n(&w->phase, __ATOMIC_SEQ_CST) == AMPI_WORKER_ABANDONED) last = --l->holders == 0;
    else {
        l->busy--;
        l->lost++;
        w->exited = 1;
        ampi_queue_store(l, ampi_slot_of(l, w->number),
                         ampi_fail(AMP_ERR_SOURCE, "amp_loader_next", "worker %d: what it called ended its thread, at sample or offset %lld",
                                   w->id, (long long)__atomic_load_n(&w->offset, __ATOMIC_RELAXED)));
        pthread_cond_broadcast(&l->ready);
    }
    pthread_mutex_unlock(&l->lock);
    if (last) ampi_loader_free(l);
}

static void ampi_worker_run(ampi_worker *w, ampi_slot *slot, amp_result *result) {
    pthread_cleanup_push(ampi_worker_died, w);
    *result = ampi_worker_fill(w, w->number, slot);
    pthread_cleanup_pop(0);
}

static void ampi_worker_main(void *arg) {
    ampi_worker *w = (ampi_worker *)arg;
    amp_loader *l = w->loader;
    sigset_t all;
    int last;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, NULL);     /* the host's own threads handle its signals */
    pthread_mutex_lock(&l->lock);
    while (!l->stop) {
        int64_t number = ampi_queue_claim(l);
        ampi_slot *slot;
        amp_result result;
        if (number < 0) { pthread_cond_wait(&l->work, &l->lock); continue; }
        slot = ampi_slot_of(l, number);
        slot->state = AMPI_SLOT_FILLING;
        slot->worker = w->id;
        w->number = number;
        slot->ahead = l->waiting == 0 || number != l->consumed;
        l->busy++;
        pthread_mutex_unlock(&l->lock);
        ampi_worker_run(w, slot, &result);
        pthread_mutex_lock(&l->lock);
        if (w->abandoned) {
            last = --l->holders == 0;
            pthread_mutex_unlock(&l->lock);
            if (last) ampi_loader_free(l);
            return;
        }
        l->busy--;
        ampi_queue_store(l, slot, result);
        if (l->waiting > 0) pthread_cond_signal(&l->ready);
    }
    w->exited = 1;
    pthread_cond_signal(&l->ready);
    pthread_mutex_unlock(&l->lock);
}

static amp_result ampi_loader_start(amp_loader *l) {
    int64_t i;
    for (i = 0; i < l->n_workers && l->desc.workers != AMP_NO_WORKERS; i++) {
        ampi_worker *w = l->workers + i;
        int error = l->system.thread_start(l->system.user, &w->thread, ampi_worker_main, w);
        if (error != 0)
            return ampi_fail(AMP_ERR_THREAD, ampi_loader_create_name, "worker %lld of %lld: %s", (long long)i,
                             (long long)l->n_workers, strerror(-error));
        w->started = 1;
        l->threads++;
    }
    return AMP_OK;
}

AMP_API void amp_loader_stop(amp_loader *l) {
    if (l == NULL || !l->has_lock) return;
    __atomic_store_n(&l->cancel, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_lock(&l->lock);
    l->stop = 1;
    pthread_cond_broadcast(&l->work);
    pthread_cond_broadcast(&l->ready);
    pthread_mutex_unlock(&l->lock);
}

/* Around the host's calls that may wait: destroying waits until they are out. */
static amp_result ampi_loader_enter(amp_loader *l, const char *function) {
    amp_result result;
    pthread_mutex_lock(&l->lock);
    result = l->stop ? ampi_stopped(function) : AMP_OK;
    if (result == AMP_OK) l->calls++;
    pthread_mutex_unlock(&l->lock);
    return result;
}

static amp_result ampi_loader_leave(amp_loader *l, amp_result result) {
    pthread_mutex_lock(&l->lock);
    l->calls--;
    if (l->stop) pthread_cond_broadcast(&l->ready);
    pthread_mutex_unlock(&l->lock);
    return result;
}

/* Sees every call and every worker out: workers that do not come back from a read are left behind. */
static void ampi_loader_finish(amp_loader *l) {
    int64_t deadline = ampi_posix_clock(NULL) + (int64_t)AMPI_CLOSE_MS * 1000000, i, inside;
    if (!l->has_lock) return;
    amp_loader_stop(l);
    pthread_mutex_lock(&l->lock);
    do {
        int late = ampi_posix_clock(NULL) >= deadline;
        for (i = 0, inside = l->calls; i < l->n_workers; i++) {
            ampi_worker *w = l->workers + i;
            int expected = AMPI_WORKER_READING;
            if (!w->started || w->exited) continue;
            if (late && __atomic_compare_exchange_n(&w->phase, &expected, AMPI_WORKER_ABANDONED, 0, __ATOMIC_SEQ_CST,
                                                    __ATOMIC_SEQ_CST)) {
                l->holders++;
            } else if (__atomic_load_n(&w->phase, __ATOMIC_SEQ_CST) != AMPI_WORKER_ABANDONED) inside++;
        }
        if (inside > 0) (void)ampi_queue_wait(l, late ? ampi_posix_clock(NULL) + 1000000 : deadline);
    } while (inside > 0);
    pthread_mutex_unlock(&l->lock);
    for (i = 0; i < l->n_workers; i++) {
        if (l->workers[i].exited) l->system.thread_join(l->system.user, l->workers[i].thread);
        else if (l->workers[i].started) l->system.thread_detach(l->system.user, l->workers[i].thread);
    }
}

/* ---- Buffers */

/* Whether every token fits into 16 bits, and has a way to go in them. */
static int ampi_loader_narrow(const amp_loader *l) {
    int64_t i;
    if (l->kind != AMPI_FROM_TOKENS || l->backend->host_visible) return 0;
    if (l->desc.vocab > 0 && l->desc.vocab <= 65536) return 1;
    for (i = 0; i < l->n_files && (l->files[i].dtype == AMP_U8 || l->files[i].dtype == AMP_U16); i++) {}
    return i == l->n_files;
}

/* Narrow slots with padding have one more behind them, which is large enough for a batch of targets in 32 bits. */
static amp_result ampi_loader_layout(amp_loader *l) {
    int32_t i;
    size_t bytes;
    l->narrow = ampi_loader_narrow(l);
    for (i = 0; i < l->source.n_fields; i++) {
        AMPI_TRY(ampi_bytes(ampi_loader_create_name, l->source.fields[i].count,
                            l->narrow ? 2 : amp_dtype_size(l->source.fields[i].dtype), &bytes));
        l->field_bytes[i] = (int64_t)bytes;
        l->field_offset[i] = l->slot_bytes;
        AMPI_TRY(ampi_bytes(ampi_loader_create_name, l->desc.batch, bytes, &bytes));
        if ((int64_t)bytes > PTRDIFF_MAX / 8 - AMPI_SLOT_ALIGN - l->slot_bytes)
            return ampi_fail(AMP_ERR_SIZE, ampi_loader_create_name, "a batch");
        l->slot_bytes = (l->slot_bytes + (int64_t)bytes + AMPI_SLOT_ALIGN - 1) / AMPI_SLOT_ALIGN * AMPI_SLOT_ALIGN;
    }
    AMPI_TRY(ampi_bytes(ampi_loader_create_name, l->depth + (l->narrow && l->desc.last_batch == AMP_LAST_PAD),
                        (size_t)l->slot_bytes, &bytes));
    l->ring_bytes = (int64_t)bytes;
    return AMP_OK;
}

/* Scratch memory of a worker: the longest read.  And which files have a place in the cache. */
static void ampi_loader_file_memory(amp_loader *l) {
    int64_t limit = (int64_t)l->desc.cache_mb << 20, i;
    for (i = 0; i < l->n_files; i++) {
        ampi_data_file *f = l->files + i;
        int64_t blocks = (f->bytes + AMPI_CACHE_BLOCK - 1) / AMPI_CACHE_BLOCK;
        l->scratch_bytes =
            AMPI_MAX(l->scratch_bytes, ampi_read_run(l, l->desc.batch, f->stride) * f->stride + f->overlap);
        if (!l->desc.shuffle || f->stride >= AMPI_CACHED_SAMPLE) continue;
        f->cache_at = l->cache_bytes;
        f->cached = AMPI_MIN(blocks * AMPI_CACHE_BLOCK, limit - l->cache_bytes);
        l->cache_bytes += f->cached;
    }
}

static amp_result ampi_loader_cache(amp_loader *l) {
    void *memory;
    size_t bytes;
    int64_t i;
    if (l->cache_bytes == 0) return AMP_OK;
    AMPI_TRY(ampi_bytes(ampi_loader_create_name, l->cache_bytes, 1, &bytes));
    for (i = 0; i < l->n_workers; i++) {
        AMPI_TRY(ampi_alloc(&l->system, ampi_loader_create_name, &memory, l->n_files, sizeof(ampi_seen)));
        l->workers[i].seen = (ampi_seen *)memory;
    }
    AMPI_TRY(ampi_alloc(&l->system, ampi_loader_create_name, &memory, l->cache_bytes / AMPI_CACHE_BLOCK, 1));
    l->cache_blocks = (uint8_t *)memory;
    l->cache = (uint8_t *)l->system.alloc(l->system.user, bytes, 4096);         /* touched when used */
    if (l->cache != NULL) return AMP_OK;
    return ampi_fail(AMP_ERR_MEMORY, ampi_loader_create_name, "%lld bytes for file contents; lower .cache_mb = %d",
                     (long long)l->cache_bytes, l->desc.cache_mb);
}

static amp_result ampi_loader_device_buffers(amp_loader *l) {
    const amp_backend *b = l->backend;
    void *memory = NULL;
    int64_t i;
    if (l->desc.disable_pinned) AMPI_TRY(ampi_alloc(&l->system, ampi_loader_create_name, &memory, l->ring_bytes, 1));
    else AMPI_TRY(b->alloc_pinned(l->dev, &memory, (size_t)l->ring_bytes));
    l->ring = (char *)memory;
    AMPI_TRY(amp_alloc(l->amp, &memory, (l->narrow ? 5 : 2) * l->slot_bytes));
    l->device = (char *)memory;
    if (l->narrow && l->desc.last_batch == AMP_LAST_PAD) {
        int32_t *padding = (int32_t *)(void *)(l->ring + l->depth * l->slot_bytes);
        for (i = 0; i < l->slot_bytes / 4; i++) padding[i] = -100;
        l->padding = (const char *)padding;
    }
    AMPI_TRY(b->stream_create(l->dev, &l->copy_stream));
    for (i = 0; i < 2; i++) AMPI_TRY(b->event_create(l->dev, &l->used[i]));
    for (i = 0; i < l->depth; i++) AMPI_TRY(b->event_create(l->dev, &l->slots[i].copied));
    return AMP_OK;
}

static amp_result ampi_loader_buffers(amp_loader *l) {
    void *memory;
    int64_t i;
    AMPI_TRY(ampi_loader_layout(l));
    ampi_loader_file_memory(l);
    AMPI_TRY(ampi_alloc(&l->system, ampi_loader_create_name, &memory, l->depth, sizeof(ampi_slot)));
    l->slots = (ampi_slot *)memory;
    AMPI_TRY(
        ampi_alloc(&l->system, ampi_loader_create_name, &memory, AMPI_MAX(l->desc.workers, 1), sizeof(ampi_worker)));
    l->workers = (ampi_worker *)memory;
    l->n_workers = AMPI_MAX(l->desc.workers, 1);
    for (i = 0; i < l->n_workers; i++) {
        l->workers[i].loader = l;
        l->workers[i].id = (int)i;
        l->workers[i].order_epoch = -1;
        AMPI_TRY(ampi_alloc(&l->system, ampi_loader_create_name, &memory, l->scratch_bytes, 1));
        l->workers[i].scratch = (uint8_t *)memory;
    }
    AMPI_TRY(ampi_loader_cache(l));
    if (l->backend->host_visible) {
        AMPI_TRY(amp_alloc(l->amp, &memory, l->ring_bytes));
        l->ring = (char *)memory;
    } else AMPI_TRY(ampi_loader_device_buffers(l));
    for (i = 0; i < l->depth; i++) l->slots[i].data = l->ring + i * l->slot_bytes;
    return AMP_OK;
}

static void ampi_loader_free_buffers(amp_loader *l) {
    const amp_backend *b = l->backend;
    int64_t i;
    if (l->copy_stream != NULL) b->stream_sync(l->dev, l->copy_stream);
    for (i = 0; i < l->depth && l->slots != NULL; i++)
        if (l->slots[i].copied != NULL) b->event_destroy(l->dev, l->slots[i].copied);
    for (i = 0; i < 2; i++)
        if (l->used[i] != NULL) b->event_destroy(l->dev, l->used[i]);
    if (l->copy_stream != NULL) b->stream_destroy(l->dev, l->copy_stream);
    amp_free(l->amp, l->device);
    if (l->ring == NULL) return;
    if (b->host_visible) amp_free(l->amp, l->ring);
    else if (l->desc.disable_pinned) ampi_free(&l->system, l->ring, l->ring_bytes, 1);
    else b->free_pinned(l->dev, l->ring, (size_t)l->ring_bytes);
}

AMP_API void amp_loader_destroy(amp_loader *l) {
    int last = 1;
    if (l == NULL) return;
    ampi_loader_finish(l);
    ampi_loader_free_buffers(l);
    if (l->has_lock) {
        pthread_mutex_lock(&l->lock);
        last = --l->holders == 0;
        pthread_mutex_unlock(&l->lock);
    }
    if (last) ampi_loader_free(l);
}

/* ---- Creation */

static amp_result ampi_loader_range(const char *field, int64_t value, int64_t low, int64_t high) {
    if (value >= low && value <= high) return AMP_OK;
    return ampi_fail(AMP_ERR_RANGE, ampi_loader_create_name, ".%s = %lld, must be %lld to %lld", field,
                     (long long)value, (long long)low, (long long)high);
}

static amp_result ampi_loader_check_desc(const amp_loader_desc *d) {
    int sources = (d->path != NULL) + (d->arrays != NULL) + (d->source != NULL);
    int32_t i;
    if (sources != 1)
        return ampi_fail(sources == 0 ? AMP_ERR_NULL : AMP_ERR_CONFLICT, ampi_loader_create_name,
                         "%d of .path, .arrays and .source are given, must be one", sources);
    if (d->path == NULL && (d->format != AMP_TOKENS_DEFAULT || d->seq != 0 || d->vocab != 0))
        return ampi_fail(AMP_ERR_CONFLICT, ampi_loader_create_name,
                         ".format, .seq and .vocab are for token files, and .path is NULL");
    if (d->path != NULL) AMPI_TRY(ampi_loader_range("seq", d->seq, 1, INT64_MAX / 16));
    if (d->arrays != NULL) AMPI_TRY(ampi_loader_range("n_arrays", d->n_arrays, 1, AMP_MAX_FIELDS));
    for (i = 0; i < d->n_arrays && d->arrays != NULL; i++)
        if (d->arrays[i] == NULL) return ampi_fail(AMP_ERR_NULL, ampi_loader_create_name, ".arrays[%d]", i);
    AMPI_TRY(ampi_loader_range("format", d->format, 0, AMP_TOKENS_NPY));
    AMPI_TRY(ampi_loader_range("shuffle", d->shuffle, 0, 1));
    AMPI_TRY(ampi_loader_range("last_batch", d->last_batch, 0, AMP_LAST_PAD));
    AMPI_TRY(ampi_loader_range("batch", d->batch, 1, INT64_MAX));
    AMPI_TRY(ampi_loader_range("epochs", d->epochs, 0, INT64_MAX));
    AMPI_TRY(ampi_loader_range("workers", d->workers, AMP_NO_WORKERS, 64));
    AMPI_TRY(ampi_loader_range("prefetch", d->prefetch, 0, 1024));
    AMPI_TRY(ampi_loader_range("timeout_ms", d->timeout_ms, 0, INT32_MAX));
    AMPI_TRY(ampi_loader_range("vocab", d->vocab, 0, INT32_MAX));
    AMPI_TRY(ampi_loader_range("disable_pinned", d->disable_pinned, 0, 1));
    AMPI_TRY(ampi_loader_range("cache_mb", d->cache_mb, 0, INT32_MAX));
    AMPI_TRY(ampi_loader_range("world", d->world, 0, INT32_MAX));
    return ampi_loader_range("rank", d->rank, 0, AMPI_MAX(d->world, 1) - 1);
}

static void ampi_loader_defaults(amp_loader *l) {
    amp_loader_desc *d = &l->desc;
    const amp_reducer *ranks = &ampi_settings(l->amp)->reducer;
    if (d->last_batch == AMP_LAST_DEFAULT) d->last_batch = AMP_LAST_DROP;
    if (d->workers == 0) d->workers = 2;
    if (d->prefetch == 0) d->prefetch = 2;
    if (d->timeout_ms == 0) d->timeout_ms = 60000;
    if (d->cache_mb == 0) d->cache_mb = AMPI_CACHE_MB;
    if (d->world == 0) { d->world = AMPI_MAX(ranks->world, 1); d->rank = ranks->rank; }
    /* one more than is read ahead: the batch in use, or on its way to the device */
    l->depth = (d->workers == AMP_NO_WORKERS ? 1 : (int64_t)d->prefetch) +
               (d->workers != AMP_NO_WORKERS || !l->backend->host_visible);
}

static amp_result ampi_loader_init_lock(amp_loader *l) {
    pthread_condattr_t monotonic;
    int error = pthread_condattr_init(&monotonic), made = 0;
    if (error != 0) return ampi_fail(AMP_ERR_THREAD, ampi_loader_create_name, "no lock: %s", strerror(error));
    error = pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    if (error == 0) { error = pthread_mutex_init(&l->lock, NULL); made += error == 0; }
    if (error == 0) { error = pthread_cond_init(&l->work, NULL); made += error == 0; }
    if (error == 0) { error = pthread_cond_init(&l->ready, &monotonic); made += error == 0; }
    pthread_condattr_destroy(&monotonic);
    l->has_lock = made == 3;
    if (l->has_lock) return AMP_OK;
    if (made > 1) pthread_cond_destroy(&l->work);
    if (made > 0) pthread_mutex_destroy(&l->lock);
    return ampi_fail(AMP_ERR_THREAD, ampi_loader_create_name, "no lock: %s", strerror(error));
}

static amp_result ampi_loader_setup(amp_loader *l, const amp_loader_desc *desc) {
    void *memory;
    AMPI_TRY(ampi_loader_init_lock(l));
    ampi_loader_defaults(l);
    if (desc->path != NULL) {
        AMPI_TRY(ampi_alloc(&l->system, ampi_loader_create_name, &memory, (int64_t)strlen(desc->path) + 1, 1));
        memcpy(memory, desc->path, strlen(desc->path));
        l->desc.path = (const char *)memory;
    }
    if (desc->source != NULL) {
        l->source = *desc->source;
        l->desc.source = &l->source;
    }
    l->kind = desc->path != NULL ? AMPI_FROM_TOKENS : desc->arrays != NULL ? AMPI_FROM_ARRAYS : AMPI_FROM_CALLBACK;
    AMPI_TRY(ampi_loader_open(l));
    AMPI_TRY(ampi_loader_buffers(l));
    return ampi_loader_start(l);
}

AMP_API amp_result amp_loader_create_v(amp_context *amp, amp_loader **out, const amp_loader_desc *desc, uint64_t abi) {
    amp_loader *l;
    void *memory;
    amp_result result;
    if (out == NULL) return ampi_fail(AMP_ERR_NULL, ampi_loader_create_name, "out is NULL");
    *out = NULL;
    if (amp == NULL || desc == NULL)
        return ampi_fail(AMP_ERR_NULL, ampi_loader_create_name, "%s is NULL", amp == NULL ? "amp" : "desc");
    AMPI_TRY(ampi_check_abi(ampi_loader_create_name, abi, AMP_ABI(amp_loader_desc)));
    AMPI_TRY(ampi_loader_check_desc(desc));
    AMPI_TRY(ampi_alloc(ampi_context_system(amp), ampi_loader_create_name, &memory, 1, sizeof *l));
    l = (amp_loader *)memory;
    l->amp = amp;
    l->system = *ampi_context_system(amp);
    l->backend = ampi_backend(amp, &l->dev, &l->stream);
    l->desc = *desc;
    l->desc.path = NULL;
    l->holders = 1;
    result = ampi_loader_setup(l, desc);
    if (result != AMP_OK) { amp_loader_destroy(l); return result; }
    *out = l;
    return AMP_OK;
}

/* ---- Taking batches */

/* The host sees the ring: the slot itself is handed out, and belongs to the workers again at the next call. */
static amp_result ampi_next_host(amp_loader *l, int64_t number, char **data) {
    amp_result result;
    pthread_mutex_lock(&l->lock);
    ampi_queue_release(l, number);
    result = ampi_queue_await(l, number);
    pthread_mutex_unlock(&l->lock);
    *data = ampi_slot_of(l, number)->data;
    return result;
}

static char *ampi_device_slot(const amp_loader *l, int64_t turn) {
    return l->device + (turn & 1) * (l->narrow + 1) * l->slot_bytes;
}

/* What has arrived in 16 bits goes into a device slot, and the targets of the padding with it. */
static amp_result ampi_device_widen(amp_loader *l, int64_t number, char *to, const char *from) {
    char *targets = to + 2 * l->field_offset[1];
    int64_t start, valid, missing;
    amp_k_cast cast;
    memset(&cast, 0, sizeof cast);
    cast.dst = to;
    cast.src = from;
    cast.dst_dtype = AMP_I32;
    cast.src_dtype = AMP_U16;
    cast.n = l->slot_bytes / 2;
    AMPI_TRY(l->backend->cast(l->dev, &cast, l->copy_stream));
    ampi_loader_slice(l, number % l->batches, &start, &valid);
    missing = (l->desc.batch - valid) * 2 * l->field_bytes[1];
    if (l->padding == NULL || missing == 0) return AMP_OK;
    return l->backend->copy(l->dev, targets + valid * 2 * l->field_bytes[1], l->padding, (size_t)missing,
                            AMP_COPY_TO_DEVICE, l->copy_stream);
}

/* Begins the copy of a batch that is READY into the device slot of its turn, once the work that was queued up to
   `after` has let go of that slot; the first time that is whatever used this memory before. */
static amp_result ampi_device_copy(amp_loader *l, int64_t number, void *after) {
    const amp_backend *b = l->backend;
    ampi_slot *slot = ampi_slot_of(l, number);
    char *to = ampi_device_slot(l, l->deliveries + number - l->consumed);
    char *arrival = l->narrow ? l->device + 4 * l->slot_bytes : to;
    AMPI_TRY(b->event_wait(l->dev, after, l->copy_stream));
    AMPI_TRY(b->copy(l->dev, arrival, slot->data, (size_t)l->slot_bytes, AMP_COPY_TO_DEVICE, l->copy_stream));
    if (l->narrow) AMPI_TRY(ampi_device_widen(l, number, to, arrival));
    AMPI_TRY(b->event_record(l->dev, slot->copied, l->copy_stream));
    l->issued = number + 1;
    return AMP_OK;
}

/* Gives the slots whose copy is done back to the workers, and waits only for the one that batch `number` needs, if the
   host is that far ahead of the device. */
static amp_result ampi_device_collect(amp_loader *l, int64_t number) {
    while (l->released < l->issued) {
        void *copied = ampi_slot_of(l, l->released)->copied;
        int32_t done = 0;
        AMPI_TRY(l->backend->event_done(l->dev, copied, &done));
        if (!done && l->released + l->depth > number) return AMP_OK;
        if (!done) AMPI_TRY(l->backend->event_sync(l->dev, copied));
        pthread_mutex_lock(&l->lock);
        ampi_queue_release(l, l->released + 1);
        pthread_mutex_unlock(&l->lock);
    }
    return AMP_OK;
}

/* Two device slots: while the caller's kernels use one, the next batch is copied into the other.  The host waits
   for workers only; the caller's stream waits for the copy. */
static amp_result ampi_next_device(amp_loader *l, int64_t number, char **data) {
    const amp_backend *b = l->backend;
    int turn = (int)(l->deliveries & 1), next_ready;
    void *copied = ampi_slot_of(l, number)->copied;
    amp_result result;
    AMPI_TRY(b->event_record(l->dev, l->used[turn], l->stream));
    AMPI_TRY(ampi_device_collect(l, number));
    if (l->issued == number) {
        pthread_mutex_lock(&l->lock);
        result = ampi_queue_await(l, number);
        pthread_mutex_unlock(&l->lock);
        AMPI_TRY(result);
        AMPI_TRY(ampi_device_copy(l, number, l->used[l->deliveries > 0 ? !turn : turn]));
    }
    AMPI_TRY(b->event_wait(l->dev, copied, l->stream));
    *data = ampi_device_slot(l, turn);
    pthread_mutex_lock(&l->lock);
    next_ready = number + 1 < l->claimed && ampi_slot_of(l, number + 1)->state == AMPI_SLOT_READY;
    pthread_mutex_unlock(&l->lock);
    if (next_ready && l->issued == number + 1)
        (void)ampi_device_copy(l, number + 1, l->used[turn]);   /* failing, it is begun again by the next call */
    return AMP_OK;
}

static amp_result ampi_next(amp_loader *l, amp_batch *out) {
    char *data = NULL;
    int64_t number = l->consumed, start, i;
    int stop;
    if (number >= l->end)
        return ampi_fail(AMP_ERR_END, "amp_loader_next", "%lld epochs of %lld batches are over",
                         (long long)l->desc.epochs, (long long)l->batches);
    AMPI_TRY(l->backend->host_visible ? ampi_next_host(l, number, &data) : ampi_next_device(l, number, &data));
    pthread_mutex_lock(&l->lock);
    stop = l->stop;
    l->consumed += !stop;
    pthread_mutex_unlock(&l->lock);
    if (stop) return ampi_stopped("amp_loader_next");
    l->deliveries++;
    memset(out, 0, sizeof *out);
    ampi_loader_slice(l, number % l->batches, &start, &out->valid);
    out->batch = l->desc.last_batch == AMP_LAST_PAD ? l->desc.batch : out->valid;
    out->seq = l->source.fields[0].count;
    out->epoch = number / l->batches;
    out->index = number % l->batches;
    for (i = 0; i < l->source.n_fields; i++) out->fields[i] = data + (l->narrow + 1) * l->field_offset[i];
    if (l->source.fields[0].dtype == AMP_I32) out->inputs = (const int32_t *)out->fields[0];
    if (l->source.fields[1].dtype == AMP_I32) out->targets = (const int32_t *)out->fields[1];
    return AMP_OK;
}

AMP_API amp_result amp_loader_next(amp_loader *l, amp_batch *out) {
    amp_batch batch;
    if (l == NULL || out == NULL)
        return ampi_fail(AMP_ERR_NULL, "amp_loader_next", "%s is NULL", l == NULL ? "loader" : "out");
    AMPI_TRY(ampi_loader_enter(l, "amp_loader_next"));
    AMPI_TRY(ampi_loader_leave(l, ampi_next(l, &batch)));
    *out = batch;
    return AMP_OK;
}

/* ---- Position */

/* Makes batch `number` the next one.  Workers drop what they do; what was read ahead is forgotten. */
static amp_result ampi_loader_move(amp_loader *l, int64_t number, const char *function) {
    int64_t deadline = ampi_posix_clock(NULL) + (int64_t)l->desc.timeout_ms * 1000000, i;
    amp_result result = AMP_OK;
    AMPI_TRY(ampi_loader_enter(l, function));
    if (l->copy_stream != NULL) result = l->backend->stream_sync(l->dev, l->copy_stream);
    if (result != AMP_OK) return ampi_loader_leave(l, result);
    __atomic_store_n(&l->cancel, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_lock(&l->lock);
    l->paused = 1;
    while (l->busy > 0 && result == AMP_OK && !l->stop)
        if (!ampi_queue_wait(l, deadline) && l->busy > 0)
            result = ampi_queue_timeout(l, ampi_slot_of(l, l->consumed), function);
    if (result == AMP_OK && l->stop) result = ampi_stopped(function);
    if (result == AMP_OK) {
        l->consumed = l->claimed = l->released = l->issued = number;
        l->retries = 0;
        for (i = 0; i < l->depth; i++) l->slots[i].state = AMPI_SLOT_EMPTY;
    }
    l->paused = 0;
    if (!l->stop) __atomic_store_n(&l->cancel, 0, __ATOMIC_SEQ_CST);
    pthread_cond_broadcast(&l->work);
    pthread_mutex_unlock(&l->lock);
    return ampi_loader_leave(l, result);
}

AMP_API amp_result amp_loader_seek(amp_loader *l, int64_t epoch, int64_t index) {
    if (l == NULL) return ampi_fail(AMP_ERR_NULL, "amp_loader_seek", "loader is NULL");
    if (epoch < 0 || index < 0 || index >= l->batches || epoch > (INT64_MAX - index) / l->batches ||
        epoch * l->batches + index > l->end)
        return ampi_fail(AMP_ERR_RANGE, "amp_loader_seek",
                         "epoch = %lld, index = %lld; an epoch has %lld batches, and .epochs is %lld", (long long)epoch,
                         (long long)index, (long long)l->batches, (long long)l->desc.epochs);
    return ampi_loader_move(l, epoch * l->batches + index, "amp_loader_seek");
}

AMP_API amp_result amp_loader_info_get(const amp_loader *l, amp_loader_info *out) {
    amp_loader *changing = (amp_loader *)(uintptr_t)l;
    int64_t number;
    if (l == NULL || out == NULL)
        return ampi_fail(AMP_ERR_NULL, "amp_loader_info_get", "%s is NULL", l == NULL ? "loader" : "out");
    memset(out, 0, sizeof *out);
    out->format = l->desc.format;
    out->n_files = (int32_t)l->n_files;
    out->n_fields = l->source.n_fields;
    memcpy(out->fields, l->source.fields, sizeof out->fields);
    out->tokens = l->tokens;
    out->samples = l->samples;
    out->batches = l->batches;
    out->hash = l->hash;
    pthread_mutex_lock(&changing->lock);
    out->epoch = l->consumed / l->batches;
    out->index = l->consumed % l->batches;
    out->waits = l->waits;
    out->wait_seconds = 1e-9 * (double)l->wait_ns;
    for (number = l->consumed; number < l->claimed; number++)
        if (ampi_slot_of(changing, number)->state == AMPI_SLOT_READY) out->ready++;
    pthread_mutex_unlock(&changing->lock);
    return AMP_OK;
}

AMP_API amp_result amp_loader_query(const amp_loader *l, amp_loader_desc *out) {
    if (l == NULL || out == NULL)
        return ampi_fail(AMP_ERR_NULL, "amp_loader_query", "%s is NULL", l == NULL ? "loader" : "out");
    *out = l->desc;
    return AMP_OK;
}

/* What a position means depends on all of these. */
static void ampi_loader_position(const amp_loader *l, int64_t values[AMPI_POSITION_COUNT]) {
    const amp_loader_desc *d = &l->desc;
    values[0] = l->consumed / l->batches; values[1] = l->consumed % l->batches;
    values[2] = (int64_t)l->hash;         values[3] = l->samples;
    values[4] = d->batch;                 values[5] = d->seq;
    values[6] = (int64_t)d->seed;         values[7] = d->world;
    values[8] = d->shuffle;               values[9] = (int64_t)d->last_batch;
    values[10] = d->first;                values[11] = d->last;
    values[12] = (int64_t)d->format;
}

static amp_result ampi_loader_key(const char *function, const void *loader, const void *state, const char *prefix,
                                  char *key, size_t size) {
    if (loader == NULL || state == NULL || prefix == NULL)
        return ampi_fail(AMP_ERR_NULL, function, "%s is NULL",
                         loader == NULL  ? "loader"
                         : state == NULL ? "state"
                                         : "prefix");
    if (snprintf(key, size, "%s.loader", prefix) >= (int)size)
        return ampi_fail(AMP_ERR_RANGE, function, "prefix \"%.80s\" has %zu bytes, must have at most %zu", prefix,
                         strlen(prefix), size - sizeof ".loader");
    return AMP_OK;
}

AMP_API amp_result amp_loader_save(const amp_loader *l, amp_state *state, const char *prefix) {
    int64_t values[AMPI_POSITION_COUNT];
    char key[AMPI_STATE_KEY];
    AMPI_TRY(ampi_loader_key("amp_loader_save", l, state, prefix, key, sizeof key));
    ampi_loader_position(l, values);
    return amp_state_put(state, key, AMP_I64, values, AMPI_POSITION_COUNT);
}

AMP_API amp_result amp_loader_load(amp_loader *l, const amp_state *state, const char *prefix) {
    static const char *const names[AMPI_POSITION_COUNT] = {
        "epoch",  "index",    "hash of the data", "samples", ".batch", ".seq",   ".seed",
        ".world", ".shuffle", ".last_batch",      ".first",  ".last",  ".format"};
    int64_t saved[AMPI_POSITION_COUNT], own[AMPI_POSITION_COUNT];
    char key[AMPI_STATE_KEY];
    int i;
    AMPI_TRY(ampi_loader_key("amp_loader_load", l, state, prefix, key, sizeof key));
    AMPI_TRY(amp_state_get(state, key, AMP_I64, saved, AMPI_POSITION_COUNT));
    ampi_loader_position(l, own);
    for (i = 2; i < AMPI_POSITION_COUNT; i++)
        if (saved[i] != own[i])
            return ampi_fail(AMP_ERR_MISMATCH, "amp_loader_load", "the %s was %lld when \"%s\" was saved, and is %lld",
                             names[i], (long long)saved[i], key, (long long)own[i]);
    if (saved[0] < 0 || saved[1] < 0 || saved[1] >= l->batches || saved[0] > (INT64_MAX - saved[1]) / l->batches)
        return ampi_fail(AMP_ERR_MISMATCH, "amp_loader_load", "\"%s\": epoch %lld, index %lld of %lld", key,
                         (long long)saved[0], (long long)saved[1], (long long)l->batches);
    return ampi_loader_move(l, saved[0] * l->batches + saved[1], "amp_loader_load");
}

/* ==== 12 >>watch: implementation ==================================================================== */

/* What the host said of a step, and what was measured; kept until the step's outcome is due. */
typedef struct ampi_note {
    int64_t number;                 /* the optimizer's for this step; 0: given up, the optimizer was set back */
    int64_t epoch, tokens;
    double loss, phase_seconds[AMP_PHASES];
    amp_dtype dtype;
    int32_t read, has_memory;       /* 1: loss and memory are known */
    amp_memory_info memory;
} ampi_note;

/* A moment: from here to the next one time belongs to a phase of a step. */
typedef struct ampi_mark {
    void *event;                    /* the device's; NULL where the host's clock measures */
    int64_t ns;
    int64_t step;
    amp_phase phase;
} ampi_mark;

/* Sums of epochs. */
typedef struct ampi_tally {
    int64_t epochs, steps, skipped, troubles, tokens, peak;
    int64_t losses, dtypes[AMP_TF32 + 1];
    double loss, phase_seconds[AMP_PHASES];
} ampi_tally;

#define AMPI_NAN ((uint64_t)0x7ff8 << 48)   /* the bits of an fp64 NaN */
enum { AMPI_LINE_BYTES = 256 * 1024, AMPI_NOTES = 2 * AMP_OUTCOMES };

struct amp_monitor {
    amp_context *amp;
    amp_monitor_desc desc;          /* effective */
    char *text; int64_t text_bytes; /* of desc.path */
    intptr_t file; int open;
    char *lines; int64_t kept, offset, lost;    /* bytes of lines not yet written, where they go, lines there was no room for */
    ampi_note notes[AMPI_NOTES];     /* of the steps since `taken`, and of the one that runs */
    int64_t steps, taken;           /* calls of amp_monitor_step; those whose notes are not needed any more */
    int64_t last;                   /* the optimizer's steps at the last of them */
    ampi_mark *marks; int64_t first_mark, n_marks, mark_room;   /* a ring; room is a power of two */
    int32_t begun;                  /* 1: a phase or a step of this epoch was seen */
    int32_t in_range, warned;       /* 1: a profiler's range is open; the memory warning was said */
    amp_step_record records[AMP_OUTCOMES]; int64_t first_record, n_records;
    ampi_tally epoch, mixed, full;
    int64_t epochs;                 /* number of the one that runs */
};

/* ---- Settings.  One table says what each key is; setting, reading, checking and writing go by it. */

typedef struct ampi_word { const char *word; int32_t value; } ampi_word;

static const ampi_word ampi_switch_words[] = {
    {"true", 1}, {"false", 0}, {"on", 1}, {"off", 0}, {"yes", 1}, {"no", 0}, {"1", 1}, {"0", 0}, {NULL, 0}};
static const ampi_word ampi_dtype_words[] = {
    {"auto", AMP_DTYPE_DEFAULT}, {"fp32", AMP_F32}, {"tf32", AMP_TF32}, {"fp16", AMP_F16}, {"bf16", AMP_BF16}, {NULL, 0}};
static const ampi_word ampi_fallback_words[] = {
    {"none", AMP_DTYPE_DEFAULT}, {"fp32", AMP_F32}, {"tf32", AMP_TF32}, {"fp16", AMP_F16}, {"bf16", AMP_BF16}, {NULL, 0}};
static const ampi_word ampi_level_words[] = {
    {"O0", AMP_LEVEL_O0}, {"O1", AMP_LEVEL_O1}, {"O2", AMP_LEVEL_O2}, {"O3", AMP_LEVEL_O3}, {NULL, 0}};
static const ampi_word ampi_policy_words[] = {{"fused", AMP_POLICY_FUSED}, {"torch", AMP_POLICY_TORCH}, {NULL, 0}};
static const ampi_word ampi_mode_words[] = {{"training", AMP_MODE_TRAINING}, {"inference", AMP_MODE_INFERENCE}, {NULL, 0}};
static const ampi_word ampi_autotune_words[] = {{"off", AMP_AUTOTUNE_OFF}, {"on", AMP_AUTOTUNE_ON}, {NULL, 0}};
static const ampi_word ampi_scaler_words[] = {
    {"auto", AMP_SCALER_USE_AUTO}, {"on", AMP_SCALER_USE_ON}, {"off", AMP_SCALER_USE_OFF}, {NULL, 0}};
static const ampi_word ampi_action_words[] = {
    {"report", AMP_NAN_REPORT}, {"skip", AMP_NAN_SKIP}, {"stop", AMP_NAN_STOP}, {"recover", AMP_NAN_RECOVER}, {NULL, 0}};
static const ampi_word ampi_none_words[] = {{"none", -1}, {NULL, 0}};          /* AMP_NO_FLOOR and its kin */
static const ampi_word ampi_clip_words[] = {{"none", 0}, {NULL, 0}};
static const ampi_word ampi_zero_words[] = {{"0", -1}, {NULL, 0}};             /* AMP_ZERO, AMP_NO_RETRIES */
static const ampi_word ampi_interval_words[] = {{"off", AMP_INTERVAL_OFF}, {NULL, 0}};

/* What a field of amp_settings holds.  INVERTED: a switch whose field says the opposite. */
typedef enum ampi_field {
    AMPI_SWITCH, AMPI_INVERTED, AMPI_WORD, AMPI_PRESET, AMPI_I32, AMPI_I64, AMPI_REAL32, AMPI_REAL64
} ampi_field;

/* words: values with a word of their own; "0" among them where 0 in the field means the default.  Numbers: from low to
   high, in words `range`.  standard: what 0 in the field stands for. */
typedef struct ampi_setting {
    const char *key;
    ampi_field field;
    size_t offset;
    const ampi_word *words;
    double standard, low, high;
    const char *range;
} ampi_setting;

#define AMPI_AT(field) offsetof(amp_settings, field)
#define AMPI_STEPS 1, 1e15, "a whole number from 1 to 1e15, or off"
#define AMPI_SCALES 0, AMPI_TINY, AMPI_POW2_126
#define AMPI_DBL_MAX 1.7976931348623157e308
#define AMPI_ABOVE_0 2.2250738585072014e-308
#define AMPI_ABOVE_1 1.0000000000000002
#define AMPI_BELOW_1 0.99999999999999989
static const ampi_setting ampi_setting_table[] = {
    {"enabled", AMPI_INVERTED, AMPI_AT(disable), ampi_switch_words, 0, 0, 0, NULL},
    {"dtype", AMPI_WORD, AMPI_AT(dtype), ampi_dtype_words, 0, 0, 0, NULL},
    {"level", AMPI_WORD, AMPI_AT(level), ampi_level_words, AMP_LEVEL_O1, 0, 0, NULL},
    {"policy", AMPI_WORD, AMPI_AT(policy), ampi_policy_words, AMP_POLICY_FUSED, 0, 0, NULL},
    {"mode", AMPI_WORD, AMPI_AT(mode), ampi_mode_words, AMP_MODE_TRAINING, 0, 0, NULL},
    {"memory_efficient", AMPI_SWITCH, AMPI_AT(memory_efficient), ampi_switch_words, 0, 0, 0, NULL},
    {"cache", AMPI_INVERTED, AMPI_AT(disable_cache), ampi_switch_words, 0, 0, 0, NULL},
    {"fallback", AMPI_WORD, AMPI_AT(fallback), ampi_fallback_words, 0, 0, 0, NULL},
    {"tf32", AMPI_SWITCH, AMPI_AT(allow_tf32), ampi_switch_words, 0, 0, 0, NULL},
    {"autotune", AMPI_WORD, AMPI_AT(autotune), ampi_autotune_words, AMP_AUTOTUNE_OFF, 0, 0, NULL},
    {"scaler", AMPI_WORD, AMPI_AT(use_scaler), ampi_scaler_words, AMP_SCALER_USE_AUTO, 0, 0, NULL},
    {"scaler_preset", AMPI_PRESET, AMPI_AT(scaler.preset), NULL, 0, 0, 0, NULL},
    {"frozen", AMPI_SWITCH, AMPI_AT(scaler.frozen), ampi_switch_words, 0, 0, 0, NULL},
    {"init_scale", AMPI_REAL32, AMPI_AT(scaler.init_scale), NULL, AMPI_SCALES, "a number from 2^-126 to 2^126"},
    {"growth_factor", AMPI_REAL64, AMPI_AT(scaler.growth_factor), NULL, 0, AMPI_ABOVE_1, AMPI_DBL_MAX, "a number above 1"},
    {"backoff_factor", AMPI_REAL64, AMPI_AT(scaler.backoff_factor), NULL, 0, AMPI_ABOVE_0, AMPI_BELOW_1,
     "a number between 0 and 1"},
    {"growth_interval", AMPI_I32, AMPI_AT(scaler.growth_interval), ampi_none_words, 0, 1, INT32_MAX,
     "a whole number from 1 to 2147483647, or none"},
    {"min_scale", AMPI_REAL32, AMPI_AT(scaler.min_scale), ampi_none_words, AMPI_SCALES, "a number from 2^-126 to 2^126, or none"},
    {"max_scale", AMPI_REAL32, AMPI_AT(scaler.max_scale), ampi_none_words, 0, AMPI_TINY, AMPI_FLT_MAX, "a number from 2^-126 to 2^126, or none"},
    {"hysteresis", AMPI_I32, AMPI_AT(scaler.hysteresis), NULL, 0, 1, INT32_MAX, "a whole number from 1 to 2147483647"},
    {"tolerance", AMPI_REAL64, AMPI_AT(scaler.tolerance), ampi_zero_words, 0, AMPI_ABOVE_0, 1, "a number from 0 to 1"},
    {"clip_norm", AMPI_REAL64, AMPI_AT(clip_norm), ampi_clip_words, 0, AMPI_ABOVE_0, AMPI_DBL_MAX, "a number above 0, or none"},
    {"accumulation", AMPI_I32, AMPI_AT(accumulation), NULL, 1, 1, 1000000, "a whole number from 1 to 1000000"},
    {"log_interval", AMPI_I64, AMPI_AT(log_interval), ampi_interval_words, 100, AMPI_STEPS},
    {"memory_interval", AMPI_I64, AMPI_AT(memory_interval), ampi_interval_words, 100, AMPI_STEPS},
    {"cleanup_interval", AMPI_I64, AMPI_AT(cleanup_interval), ampi_interval_words, AMP_INTERVAL_OFF, AMPI_STEPS},
    {"numerics_interval", AMPI_I64, AMPI_AT(numerics_interval), ampi_interval_words, AMP_INTERVAL_OFF, AMPI_STEPS},
    {"memory_warning", AMPI_REAL64, AMPI_AT(memory_warning), NULL, 0.9, AMPI_ABOVE_0, 1, "a number above 0, at most 1"},
    {"nan_action", AMPI_WORD, AMPI_AT(nan_action), ampi_action_words, AMP_NAN_SKIP, 0, 0, NULL},
    {"max_skips", AMPI_I32, AMPI_AT(max_skips), NULL, 25, 1, INT32_MAX, "a whole number from 1 to 2147483647"},
    {"max_retries", AMPI_I32, AMPI_AT(max_retries), ampi_zero_words, 3, 1, 1000, "a whole number from 0 to 1000"},
    {"debug", AMPI_SWITCH, AMPI_AT(debug), ampi_switch_words, 0, 0, 0, NULL},
};
enum { AMPI_SETTINGS = sizeof ampi_setting_table / sizeof ampi_setting_table[0] };

/* Text that is put together piece by piece and cut like snprintf's: `used` is the length that all of it takes. */
typedef struct ampi_sheet { char *text; size_t size, used; int first; } ampi_sheet;

AMPI_PRIVATE ampi_sheet ampi_sheet_of(char *text, size_t size) {
    ampi_sheet s;
    memset(&s, 0, sizeof s);
    s.text = text;
    s.size = text ? size : 0;
    if (s.size > 0) text[0] = 0;
    return s;
}

AMPI_PRIVATE void ampi_print(ampi_sheet *s, const char *format, ...) AMPI_PRINTF(2, 3);
AMPI_PRIVATE void ampi_print(ampi_sheet *s, const char *format, ...) {
    size_t room = s->used < s->size ? s->size - s->used : 0;
    va_list args;
    int n;
    va_start(args, format);
    n = vsnprintf(room ? s->text + s->used : NULL, room, format, args);
    va_end(args);
    if (n > 0) s->used += (size_t)n;
}

/* A field's value; 0 (a switch: its opposite, if INVERTED) is the default. */
static double ampi_setting_get(const amp_settings *s, const ampi_setting *k) {
    const char *at = (const char *)s + k->offset;
    int32_t i32;
    int64_t i64;
    float real32;
    double real64;
    switch (k->field) {
        case AMPI_I64: memcpy(&i64, at, sizeof i64); return (double)i64;
        case AMPI_REAL32: memcpy(&real32, at, sizeof real32); return (double)real32;
        case AMPI_REAL64: memcpy(&real64, at, sizeof real64); return real64;
        default: memcpy(&i32, at, sizeof i32);
    }
    return k->field == AMPI_INVERTED ? i32 == 0 : k->field == AMPI_SWITCH ? i32 != 0 : (double)i32;
}

static void ampi_setting_put(amp_settings *s, const ampi_setting *k, double value) {
    char *at = (char *)s + k->offset;
    int64_t i64 = k->field == AMPI_I64 ? (int64_t)value : 0;
    int32_t i32 = k->field < AMPI_I32 || k->field == AMPI_I32 ? (int32_t)value : 0;
    float real32 = k->field == AMPI_REAL32 ? (float)value : 0;
    switch (k->field) {
        case AMPI_I64: memcpy(at, &i64, sizeof i64); break;
        case AMPI_REAL32: memcpy(at, &real32, sizeof real32); break;
        case AMPI_REAL64: memcpy(at, &value, sizeof value); break;
        case AMPI_INVERTED: i32 = !i32;         /* falls through */
        default: memcpy(at, &i32, sizeof i32);
    }
}

/* Word i of a key and its value, or NULL. */
static const char *ampi_setting_word(const ampi_setting *k, int i, int32_t *value) {
    *value = i;
    if (k->field == AMPI_PRESET) return i < AMPI_PRESETS ? ampi_presets[i].name : NULL;
    if (k->words == NULL) return NULL;
    *value = k->words[i].value;
    return k->words[i].word;
}

static int ampi_lower(char c) { return c >= 'A' && c <= 'Z' ? c + 32 : c; }

/* Whether the n bytes of text are the word, in either case. */
static int ampi_same_word(const char *word, const char *text, size_t n) {
    size_t i;
    for (i = 0; i < n && word[i] != 0; i++) if (ampi_lower(word[i]) != ampi_lower(text[i])) return 0;
    return i == n && word[i] == 0;
}

/* The decimal point of the locale in force. */
static const char *ampi_point(char room[16]) {
    snprintf(room, 16, "%.1f", 0.5);
    room[strlen(room) - 1] = 0;
    return room + 1;
}

/* [sign] digits [. digits] [e [sign] digits], with at least one digit before the e; whole: [sign] digits. */
static int ampi_is_number(const char *text, size_t n, int whole) {
    size_t i = 0, digits = 0, exponent = 0;
    if (i < n && (text[i] == '+' || text[i] == '-')) i++;
    for (; i < n && text[i] >= '0' && text[i] <= '9'; i++) digits++;
    if (whole || i == n) return digits > 0 && i == n;
    if (text[i] == '.') for (i++; i < n && text[i] >= '0' && text[i] <= '9'; i++) digits++;
    if (digits == 0 || i == n) return digits > 0;
    if (text[i] != 'e' && text[i] != 'E') return 0;
    if (++i < n && (text[i] == '+' || text[i] == '-')) i++;
    for (; i < n && text[i] >= '0' && text[i] <= '9'; i++) exponent++;
    return exponent > 0 && i == n;
}

/* The same number in every locale; 0: none, or too large for an fp64. */
static int ampi_parse_number(const char *text, size_t n, int whole, double *out) {
    char copy[96], room[16], *end;
    const char *point = (const char *)memchr(text, '.', n);
    size_t before = point ? (size_t)(point - text) : n;
    if (n >= 64 || !ampi_is_number(text, n, whole)) return 0;
    snprintf(copy, sizeof copy, "%.*s%s%.*s", (int)before, text, point ? ampi_point(room) : "", point ? (int)(n - before - 1) : 0, point ? point + 1 : "");
    *out = strtod(copy, &end);
    return *end == 0 && amp_is_finite_f64(out);
}

/* The shortest text that ampi_parse_number reads as this number, or as one that rounds to the same fp32. */
static void ampi_number_text(double value, int single, char out[64]) {
    char room[16], *at;
    const char *point = ampi_point(room);
    double back = 0;
    int digits;
    for (digits = 1; digits <= 17; digits++) {
        snprintf(out, 64, "%.*g", digits, value);
        at = strstr(out, point);
        if (at != NULL) {
            *at = '.';
            memmove(at + 1, at + strlen(point), strlen(at + strlen(point)) + 1);
        }
        if (ampi_parse_number(out, strlen(out), 0, &back) && (single ? (float)back == (float)value : back == value)) return;
    }
}

/* A value as a file has it. */
static void ampi_setting_text(const ampi_setting *k, double value, char out[64]) {
    const char *word;
    int32_t of;
    int i;
    for (i = 0; (word = ampi_setting_word(k, i, &of)) != NULL; i++)
        if (amp_is_finite_f64(&value) && value == (double)of) { snprintf(out, 64, "%s", word); return; }
    if (!amp_is_finite_f64(&value)) snprintf(out, 64, "not finite");
    else if (k->field == AMPI_I32 || k->field == AMPI_I64 || k->field == AMPI_WORD || k->field == AMPI_PRESET) snprintf(out, 64, "%.0f", value);
    else ampi_number_text(value, k->field == AMPI_REAL32, out);
}

/* What a key takes, in words. */
static void ampi_setting_allowed(const ampi_setting *k, char *out, size_t size) {
    const char *word;
    int32_t of;
    int i, n;
    ampi_sheet t = ampi_sheet_of(out, size);
    if (k->range != NULL) { ampi_print(&t, "%s", k->range); return; }
    for (n = 0; ampi_setting_word(k, n, &of) != NULL; n++) {}
    for (i = 0; (word = ampi_setting_word(k, i, &of)) != NULL; i++)
        ampi_print(&t, "%s%s", i == 0 ? "one of " : i + 1 < n ? ", " : " or ", word);
}

static int ampi_setting_parse(const ampi_setting *k, const char *text, size_t n, double *value) {
    const char *word;
    int32_t of;
    int i;
    for (i = 0; (word = ampi_setting_word(k, i, &of)) != NULL; i++) {
        *value = (double)of;
        if (ampi_same_word(word, text, n)) return 1;
    }
    if (k->range == NULL || !ampi_parse_number(text, n, k->field == AMPI_I32 || k->field == AMPI_I64, value)) return 0;
    if (k->words == ampi_zero_words && *value == 0) { *value = k->words->value; return 1; }
    if (k->field == AMPI_REAL32) *value = (double)(float)*value;
    return amp_is_finite_f64(value) && *value >= k->low && *value <= k->high;
}

/* Where a setting comes from, for error texts. */
typedef struct ampi_origin {
    const char *function, *name;    /* name: of a file; NULL: none */
    int64_t line;
    int environment;                /* 1: keys are named as variables */
} ampi_origin;

/* "max.conf: line 3: .dtype", "AMP_DTYPE" */
static const char *ampi_origin_text(const ampi_origin *from, const char *key, size_t n, char out[256]) {
    ampi_sheet t = ampi_sheet_of(out, 256);
    size_t i;
    if (from->name != NULL) ampi_print(&t, "%.120s: line %lld: ", from->name, (long long)from->line);
    ampi_print(&t, "%s", from->environment ? "AMP_" : ".");
    for (i = 0; i < n && i < 40; i++) {
        int c = (unsigned char)key[i];
        if (from->environment && c >= 'a' && c <= 'z') c -= 32;
        ampi_print(&t, "%c", c < 32 || c > 126 ? '?' : c);
    }
    return out;
}

/* The number of edits (insert, delete, replace a character) between two names, in either case (Levenshtein 1966). */
static int ampi_edits(const char *name, size_t n, const char *key) {
    int row[32], i, j, above, before, length = (int)strlen(key);
    for (j = 0; j <= length; j++) row[j] = j;
    for (i = 1; i <= (int)AMPI_MIN(n, (size_t)64); i++) {
        before = row[0]++;
        for (j = 1; j <= length; j++) {
            above = row[j];
            row[j] = AMPI_MIN(AMPI_MIN(above, row[j - 1]) + 1, before + (ampi_lower(name[i - 1]) != ampi_lower(key[j - 1])));
            before = above;
        }
    }
    return row[length];
}

static const ampi_setting *ampi_setting_find(const char *key, size_t n) {
    int i;
    for (i = 0; i < AMPI_SETTINGS; i++)
        if (strlen(ampi_setting_table[i].key) == n && memcmp(ampi_setting_table[i].key, key, n) == 0) return &ampi_setting_table[i];
    return NULL;
}

static amp_result ampi_setting_unknown(const ampi_origin *from, const char *key, size_t n) {
    char label[256], nearest[256];
    int i, best = 0, edits, fewest = INT32_MAX;
    for (i = 0; i < AMPI_SETTINGS; i++) {
        edits = ampi_edits(key, n, ampi_setting_table[i].key);
        if (edits < fewest) { fewest = edits; best = i; }
    }
    key = ampi_origin_text(from, key, n, label);
    ampi_origin_text(from, ampi_setting_table[best].key, strlen(ampi_setting_table[best].key), nearest);
    return ampi_fail(AMP_ERR_NAME, from->function, "%s is no setting; the nearest is %s", key,
                     from->name ? strrchr(nearest, '.') : nearest);
}

/* Sets one key from text.  On failure nothing changes. */
static amp_result ampi_setting_set(amp_settings *s, const ampi_origin *from, const ampi_setting *k, const char *text, size_t n) {
    char label[256], allowed[160], shown[48];
    double value = 0;
    size_t i;
    if (ampi_same_word("default", text, n)) {
        ampi_setting_put(s, k, k->field == AMPI_INVERTED);
        return AMP_OK;
    }
    if (n > 0 && ampi_setting_parse(k, text, n, &value)) {
        ampi_setting_put(s, k, value);
        return AMP_OK;
    }
    for (i = 0; i < n && i < 40; i++) shown[i] = text[i] < 32 || text[i] > 126 ? '?' : text[i];
    snprintf(shown + i, 4, "%s", n > 40 ? "..." : "");
    ampi_setting_allowed(k, allowed, sizeof allowed);
    return ampi_fail(AMP_ERR_RANGE, from->function, "%s = %s, must be %s", ampi_origin_text(from, k->key, strlen(k->key), label),
                     n > 0 ? shown : "(nothing)", allowed);
}

AMP_API amp_result amp_settings_set(amp_settings *settings, const char *key, const char *value) {
    const ampi_setting *k;
    ampi_origin from;
    memset(&from, 0, sizeof from);
    from.function = "amp_settings_set";
    if (settings == NULL || key == NULL || value == NULL) return ampi_fail(AMP_ERR_NULL, from.function, "settings, key or value is NULL");
    k = ampi_setting_find(key, strlen(key));
    return k == NULL ? ampi_setting_unknown(&from, key, strlen(key)) : ampi_setting_set(settings, &from, k, value, strlen(value));
}

/* Without the white space around it. */
static void ampi_trim(const char **text, size_t *n) {
    while (*n > 0 && (**text == ' ' || (**text >= '\t' && **text <= '\r'))) { ++*text; --*n; }
    while (*n > 0 && ((*text)[*n - 1] == ' ' || ((*text)[*n - 1] >= '\t' && (*text)[*n - 1] <= '\r'))) --*n;
}

/* One line; seen: where each key stood before. */
static amp_result ampi_settings_line(amp_settings *s, const ampi_origin *from, const char *line, size_t n, int64_t seen[AMPI_SETTINGS]) {
    const char *comment = (const char *)memchr(line, '#', n), *equals, *value;
    const ampi_setting *k;
    size_t length, rest;
    char label[256];
    if (comment != NULL) n = (size_t)(comment - line);
    ampi_trim(&line, &n);
    if (n == 0) return AMP_OK;
    equals = (const char *)memchr(line, '=', n);
    length = equals ? (size_t)(equals - line) : 0;
    value = line + length + 1;
    rest = equals ? n - length - 1 : 0;
    ampi_trim(&line, &length);
    if (length == 0)
        return ampi_fail(AMP_ERR_FORMAT, from->function, "%.120s: line %lld is neither \"key = value\" nor a # comment", from->name, (long long)from->line);
    k = ampi_setting_find(line, length);
    if (k == NULL) return ampi_setting_unknown(from, line, length);
    if (seen[k - ampi_setting_table] > 0)
        return ampi_fail(AMP_ERR_CONFLICT, from->function, "%s stands in line %lld already", ampi_origin_text(from, line, length, label),
                         (long long)seen[k - ampi_setting_table]);
    seen[k - ampi_setting_table] = from->line;
    ampi_trim(&value, &rest);
    return ampi_setting_set(s, from, k, value, rest);
}

/* A byte order mark before the first line is passed over. */
static amp_result ampi_settings_read(amp_settings *settings, const char *function, const char *name, const char *text, size_t bytes) {
    int64_t seen[AMPI_SETTINGS];
    amp_settings next = *settings;
    const char *at = text, *end = text + bytes, *line_end;
    ampi_origin from;
    memset(seen, 0, sizeof seen);
    memset(&from, 0, sizeof from);
    from.function = function;
    from.name = name;
    if (bytes >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0) at += 3;
    while (at < end) {
        line_end = (const char *)memchr(at, '\n', (size_t)(end - at));
        if (line_end == NULL) line_end = end;
        from.line++;
        AMPI_TRY(ampi_settings_line(&next, &from, at, (size_t)(line_end - at), seen));
        at = line_end + 1;
    }
    *settings = next;
    return AMP_OK;
}

AMP_API amp_result amp_settings_read_text(amp_settings *settings, const char *name, const char *text, size_t bytes) {
    const char *f = "amp_settings_read_text";
    if (settings == NULL || (text == NULL && bytes > 0)) return ampi_fail(AMP_ERR_NULL, f, "settings or text is NULL");
    return ampi_settings_read(settings, f, name ? name : "settings", text ? text : "", bytes);
}

AMP_API amp_result amp_settings_read_file(amp_settings *settings, const amp_system *system, const char *path) {
    const char *f = "amp_settings_read_file";
    amp_result result;
    void *text;
    size_t bytes;
    if (settings == NULL || path == NULL) return ampi_fail(AMP_ERR_NULL, f, "settings or path is NULL");
    AMPI_TRY(amp_file_read_all(system, path, &text, &bytes));
    result = ampi_settings_read(settings, f, path, (const char *)text, bytes);
    amp_file_free(system, text, bytes);
    return result;
}

extern char **environ;

AMP_API amp_result amp_settings_read_env(amp_settings *settings) {
    amp_settings next;
    ampi_origin from;
    char key[64];
    int i;
    size_t n, j;
    memset(&from, 0, sizeof from);
    from.function = "amp_settings_read_env";
    from.environment = 1;
    if (settings == NULL) return ampi_fail(AMP_ERR_NULL, from.function, "settings is NULL");
    next = *settings;
    for (i = 0; environ != NULL && environ[i] != NULL; i++) {
        const char *name = environ[i], *equals = strchr(name, '=');
        const ampi_setting *k;
        if (equals == NULL || strncmp(name, "AMP_", 4) != 0) continue;
        n = (size_t)(equals - name) - 4;
        for (j = 0; j < n && j < sizeof key; j++) key[j] = (char)(name[j + 4] >= 'a' && name[j + 4] <= 'z' ? '?' : ampi_lower(name[j + 4]));
        k = n <= sizeof key ? ampi_setting_find(key, n) : NULL;
        if (k == NULL) return ampi_setting_unknown(&from, name + 4, n);
        AMPI_TRY(ampi_setting_set(&next, &from, k, equals + 1, strlen(equals + 1)));
    }
    *settings = next;
    return AMP_OK;
}

/* Every default replaced by its value; those of the scaler come from its preset. */
static amp_settings ampi_settings_effective(const amp_settings *settings) {
    amp_settings s = *settings;
    int i;
    for (i = 0; i < AMPI_SETTINGS; i++) {
        const ampi_setting *k = &ampi_setting_table[i];
        double value = ampi_setting_get(&s, k);
        if (k->standard != 0 && amp_is_finite_f64(&value) && value == 0) ampi_setting_put(&s, k, k->standard);
    }
    if ((int)s.scaler.preset >= 0 && (int)s.scaler.preset < AMPI_PRESETS) ampi_scaler_defaults(&s.scaler);
    return s;
}

AMP_API size_t amp_settings_text(const amp_settings *settings, char *text, size_t size) {
    amp_settings s;
    ampi_sheet t = ampi_sheet_of(text, size);
    char value[64];
    int i;
    if (settings == NULL) return 0;
    s = ampi_settings_effective(settings);
    for (i = 0; i < AMPI_SETTINGS; i++) {
        ampi_setting_text(&ampi_setting_table[i], ampi_setting_get(&s, &ampi_setting_table[i]), value);
        ampi_print(&t, "%s = %s\n", ampi_setting_table[i].key, value);
    }
    return t.used;
}

/* Each field by itself, as a program may have filled it. */
static amp_result ampi_settings_check_fields(const char *f, const amp_settings *s) {
    char allowed[160], shown[64];
    double value;
    int32_t of;
    int i, w, fits;
    for (i = 0; i < AMPI_SETTINGS; i++) {
        const ampi_setting *k = &ampi_setting_table[i];
        value = ampi_setting_get(s, k);
        fits = amp_is_finite_f64(&value) && (value == 0 || (k->range != NULL && value >= k->low && value <= k->high));
        for (w = 0; !fits && amp_is_finite_f64(&value) && ampi_setting_word(k, w, &of) != NULL; w++) fits = value == (double)of;
        if (fits) continue;
        ampi_setting_text(k, value, shown);
        ampi_setting_allowed(k, allowed, sizeof allowed);
        return ampi_fail(AMP_ERR_RANGE, f, ".%s = %s, must be %s", k->key, shown, allowed);
    }
    if (s->scaler.disable) return ampi_fail(AMP_ERR_RANGE, f, ".scaler.disable = %d, must be 0: .use_scaler decides", s->scaler.disable);
    return AMP_OK;
}

static amp_result ampi_settings_conflict(const char *f, const amp_settings *s, const char *a, const char *b, const char *why) {
    const ampi_setting *ka = ampi_setting_find(a, strlen(a)), *kb = ampi_setting_find(b, strlen(b));
    char va[64], vb[64];
    ampi_setting_text(ka, ampi_setting_get(s, ka), va);
    ampi_setting_text(kb, ampi_setting_get(s, kb), vb);
    return ampi_fail(AMP_ERR_CONFLICT, f, "%s = %s and %s = %s: %s", a, va, b, vb, why);
}

static amp_result ampi_settings_check(const char *f, const amp_settings *settings) {
    amp_settings s;
    const amp_scaler_desc *c = &s.scaler;
    int floor, ceiling;
    AMPI_TRY(ampi_settings_check_fields(f, settings));
    s = ampi_settings_effective(settings);
    floor = !ampi_is_none(c->min_scale);
    ceiling = !ampi_is_none(c->max_scale);
    if (s.level == AMP_LEVEL_O0) {
        const char *why = "level O0 is fp32 throughout";
        if (s.dtype != AMP_DTYPE_DEFAULT && s.dtype != AMP_F32) return ampi_settings_conflict(f, &s, "level", "dtype", why);
        if (s.allow_tf32) return ampi_settings_conflict(f, &s, "level", "tf32", why);
        if (s.use_scaler == AMP_SCALER_USE_ON) return ampi_settings_conflict(f, &s, "level", "scaler", why);
    }
    if (s.level >= AMP_LEVEL_O2 && (s.dtype == AMP_F32 || s.dtype == AMP_TF32))
        return ampi_settings_conflict(f, &s, "level", "dtype", "levels O2 and O3 keep weights in fp16 or bf16");
    if (floor && ceiling && c->min_scale > c->max_scale)
        return ampi_settings_conflict(f, &s, "min_scale", "max_scale", "the floor is above the ceiling");
    if (floor && c->init_scale < c->min_scale) return ampi_settings_conflict(f, &s, "init_scale", "min_scale", "it starts below its floor");
    if (ceiling && c->init_scale > c->max_scale) return ampi_settings_conflict(f, &s, "init_scale", "max_scale", "it starts above its ceiling");
    return ampi_check_scaler(f, c);
}

AMP_API amp_result amp_settings_check(const amp_settings *settings) {
    const char *f = "amp_settings_check";
    if (settings == NULL) return ampi_fail(AMP_ERR_NULL, f, "settings is NULL");
    return ampi_settings_check(f, settings);
}

/* A scaler's desc for a training that computes in dtype. */
static amp_scaler_desc ampi_settings_scaler(const amp_settings *s, amp_dtype dtype) {
    amp_scaler_desc d = s->scaler;
    int automatic = s->use_scaler == AMP_SCALER_USE_DEFAULT || s->use_scaler == AMP_SCALER_USE_AUTO;
    d.disable = automatic ? dtype != AMP_F16 : s->use_scaler == AMP_SCALER_USE_OFF;
    return d;
}

static void ampi_settings_fill_context(const amp_settings *s, amp_desc *d) {
    d->dtype = s->dtype;
    d->level = s->level;
    d->policy = s->policy;
    d->mode = s->mode;
    d->disable = s->disable != 0;
    d->disable_cache = s->disable_cache != 0;
    d->allow_tf32 = s->allow_tf32 != 0;
    d->memory_efficient = s->memory_efficient != 0;
    d->fallback = s->fallback;
    d->autotune = s->autotune;
    if (s->debug) d->logger.level = AMP_LOG_DEBUG;
}

static void ampi_settings_fill_monitor(const amp_settings *s, amp_monitor_desc *d) {
    d->log_interval = s->log_interval;
    d->memory_interval = s->memory_interval;
    d->cleanup_interval = s->cleanup_interval;
    d->memory_warning = s->memory_warning;
    d->nan_action = s->nan_action;
    d->max_skips = s->max_skips;
}

AMP_API amp_result amp_settings_fill_v(const amp_settings *settings, const amp_context *amp, amp_desc *desc,
                                       amp_scaler_desc *scaler, amp_optimizer_desc *optimizer, amp_monitor_desc *monitor,
                                       uint64_t abi) {
    const char *f = "amp_settings_fill";
    amp_settings s;
    if (settings == NULL) return ampi_fail(AMP_ERR_NULL, f, "settings is NULL");
    AMPI_TRY(ampi_check_abi(f, abi, AMP_ABI(amp_settings)));
    AMPI_TRY(ampi_settings_check(f, settings));
    s = ampi_settings_effective(settings);
    if (desc != NULL) ampi_settings_fill_context(&s, desc);
    if (scaler != NULL) *scaler = ampi_settings_scaler(settings, amp ? ampi_settings(amp)->dtype : s.dtype);
    if (optimizer != NULL) {
        optimizer->clip_norm = s.clip_norm;
        optimizer->accumulation = s.accumulation;
        optimizer->apply_nonfinite = s.nan_action == AMP_NAN_REPORT;
    }
    if (monitor != NULL) ampi_settings_fill_monitor(&s, monitor);
    return AMP_OK;
}

/* What cannot change while a context lives; asked 0: nothing was asked for. */
static amp_result ampi_settings_fixed(const char *f, const char *key, int asked, int in_force) {
    const ampi_setting *k = ampi_setting_find(key, strlen(key));
    char a[64], b[64];
    if (asked == 0 || asked == in_force) return AMP_OK;
    ampi_setting_text(k, asked, a);
    ampi_setting_text(k, in_force, b);
    return ampi_fail(AMP_ERR_CONFLICT, f, "%s = %s, and %s is in force: that cannot change while training runs", key, a, b);
}

/* Everything that amp_settings_apply may refuse. */
static amp_result ampi_settings_may_apply(const char *f, const amp_settings *s, const amp_context *amp, const amp_scaler *scaler,
                                          const amp_optimizer *optimizer, amp_choice *choice, amp_scaler_desc *rule) {
    int64_t i;
    AMPI_TRY(ampi_may_wait(amp));
    if ((scaler != NULL && scaler->amp != amp) || (optimizer != NULL && optimizer->amp != amp))
        return ampi_fail(AMP_ERR_CONFLICT, f, "%s is of another context", scaler != NULL && scaler->amp != amp ? "scaler" : "optimizer");
    for (i = 0; optimizer != NULL && i < optimizer->set->n; i++)
        if (optimizer->set->params[i]->grad_live)
            return ampi_fail(AMP_ERR_STATE, f, "%s has a gradient that no step has used: step first, or drop it by amp_optimizer_set_accumulation", optimizer->set->names[i]);
    AMPI_TRY(ampi_settings_fixed(f, "level", (int)s->level, (int)amp->desc.level));
    AMPI_TRY(ampi_settings_fixed(f, "policy", (int)s->policy, (int)amp->desc.policy));
    AMPI_TRY(ampi_settings_fixed(f, "autotune", (int)s->autotune, (int)amp->desc.autotune));
    AMPI_TRY(ampi_choose_for(amp, s->dtype, s->fallback, choice));
    AMPI_TRY(ampi_check_switch(amp, f, choice->dtype));
    *rule = ampi_settings_scaler(s, choice->dtype);
    if (scaler == NULL) return AMP_OK;
    AMPI_TRY(ampi_settings_fixed(f, "scaler_preset", (int)rule->preset, (int)scaler->desc.preset));
    rule->preset = scaler->desc.preset;
    if (amp->desc.level == AMP_LEVEL_O0) rule->disable = 1;
    ampi_scaler_defaults(rule);
    return ampi_check_scaler(f, rule);
}

static void ampi_settings_apply_context(const amp_settings *s, amp_context *amp, const amp_choice *choice) {
    amp_desc *d = &amp->desc;
    amp_log_level loud = d->logger.level;
    int changed = choice->dtype != d->dtype;
    d->disable = s->disable != 0;
    d->mode = s->mode ? s->mode : AMP_MODE_TRAINING;
    d->memory_efficient = s->memory_efficient != 0;
    d->disable_cache = s->disable_cache != 0;
    d->fallback = s->fallback;
    d->allow_tf32 = ampi_may_tf32(amp, s->allow_tf32);
    if (s->debug && loud != AMP_LOG_DEBUG) { amp->quiet = loud; d->logger.level = AMP_LOG_DEBUG; }
    if (!s->debug && loud == AMP_LOG_DEBUG) d->logger.level = amp->quiet;
    ampi_settings_changed(amp);
    if (changed) ampi_switch_dtype(amp, choice);
    amp->choice = *choice;
    if (d->disable_cache) amp_cast_cache_clear(amp);
}

AMP_API amp_result amp_settings_apply_v(const amp_settings *settings, amp_context *amp, amp_scaler *scaler,
                                        amp_optimizer *optimizer, amp_monitor *monitor, uint64_t abi) {
    const char *f = "amp_settings_apply";
    amp_settings s;
    amp_choice choice;
    amp_scaler_desc rule;
    if (settings == NULL || amp == NULL) return ampi_fail(AMP_ERR_NULL, f, "settings or amp is NULL");
    AMPI_TRY(ampi_check_abi(f, abi, AMP_ABI(amp_settings)));
    AMPI_TRY(ampi_settings_check(f, settings));
    if (monitor != NULL && monitor->amp != amp) return ampi_fail(AMP_ERR_CONFLICT, f, "monitor is of another context");
    AMPI_TRY(ampi_settings_may_apply(f, settings, amp, scaler, optimizer, &choice, &rule));
    if (scaler != NULL) AMPI_TRY(ampi_scaler_change(scaler, &rule));
    else if (!rule.disable) ampi_log(amp, AMP_LOG_WARNING, 1201, "%s asks for a loss scaler, and none was passed to amp_settings_apply", amp_dtype_name(choice.dtype));
    s = ampi_settings_effective(settings);
    ampi_settings_apply_context(&s, amp, &choice);
    if (optimizer != NULL) {
        AMPI_TRY(amp_optimizer_set_clip(optimizer, s.clip_norm));
        if (s.accumulation != optimizer->desc.accumulation) AMPI_TRY(amp_optimizer_set_accumulation(optimizer, s.accumulation));
        optimizer->desc.apply_nonfinite = optimizer->set->apply_nonfinite = s.nan_action == AMP_NAN_REPORT;
    }
    if (monitor != NULL) ampi_settings_fill_monitor(&s, &monitor->desc);
    return AMP_OK;
}

/* ---- Status */

/* Bytes of the UTF-8 character at p; 0 where there is none (RFC 3629: no surrogates, nothing longer than need be). */
AMPI_PRIVATE int ampi_utf8(const unsigned char *p) {
    int n = p[0] < 0x80 ? 1 : p[0] >= 0xc2 && p[0] < 0xe0 ? 2 : (p[0] & 0xf0) == 0xe0 ? 3 : p[0] >= 0xf0 && p[0] < 0xf5 ? 4 : 0, i;
    for (i = 1; i < n; i++) if ((p[i] & 0xc0) != 0x80) return 0;
    if ((p[0] == 0xe0 && p[1] < 0xa0) || (p[0] == 0xed && p[1] > 0x9f)) return 0;
    return (p[0] == 0xf0 && p[1] < 0x90) || (p[0] == 0xf4 && p[1] > 0x8f) ? 0 : n;
}

/* JSON (RFC 8259): values of an object, or the object itself, by key. */
AMPI_PRIVATE void ampi_json_key(ampi_sheet *s, const char *key) {
    ampi_print(s, "%s\"%s\": ", s->first ? "" : ", ", key);
    s->first = 0;
}
AMPI_PRIVATE void ampi_json_open(ampi_sheet *s, const char *key) {
    if (key) ampi_json_key(s, key);
    ampi_print(s, "{");
    s->first = 1;
}
AMPI_PRIVATE void ampi_json_close(ampi_sheet *s) { ampi_print(s, "}"); s->first = 0; }
AMPI_PRIVATE void ampi_json_null(ampi_sheet *s, const char *key) { ampi_json_key(s, key); ampi_print(s, "null"); }
AMPI_PRIVATE void ampi_json_integer(ampi_sheet *s, const char *key, int64_t value) {
    ampi_json_key(s, key);
    ampi_print(s, "%lld", (long long)value);
}
AMPI_PRIVATE void ampi_json_flag(ampi_sheet *s, const char *key, int flag) {
    ampi_json_key(s, key);
    ampi_print(s, flag ? "true" : "false");
}
/* Nine digits, those of an fp32 number, with a point whatever the locale has there. */
AMPI_PRIVATE void ampi_json_number(ampi_sheet *s, const char *key, double value) {
    char digits[64], *end = digits;
    const char *p = digits;
    if (!amp_is_finite_f64(&value)) { ampi_json_null(s, key); return; }
    snprintf(digits, sizeof digits, "%.9g", value);
    for (; *p != 0; p++) {
        if ((*p >= '0' && *p <= '9') || *p == '-' || *p == '+' || *p == 'e') *end++ = *p;
        else if (end == digits || end[-1] != '.') *end++ = '.';
    }
    *end = 0;
    ampi_json_key(s, key);
    ampi_print(s, "%s", digits);
}
/* Bytes that are no UTF-8 become U+FFFD. */
AMPI_PRIVATE void ampi_json_text(ampi_sheet *s, const char *key, const char *text) {
    const unsigned char *p = (const unsigned char *)text;
    int n;
    if (text == NULL) { ampi_json_null(s, key); return; }
    ampi_json_key(s, key);
    ampi_print(s, "\"");
    for (; *p != 0; p += AMPI_MAX(n, 1)) {
        n = ampi_utf8(p);
        if (n == 0) ampi_print(s, "\\ufffd");
        else if (*p < 0x20 || *p == 0x7f) ampi_print(s, "\\u%04x", *p);
        else ampi_print(s, "%s%.*s", *p == '"' || *p == '\\' ? "\\" : "", n, (const char *)p);
    }
    ampi_print(s, "\"");
}
/* Values that may be unknown. */
AMPI_PRIVATE void ampi_json_count(ampi_sheet *s, const char *key, int64_t value) {
    if (value > 0) ampi_json_integer(s, key, value);
    else ampi_json_null(s, key);
}
AMPI_PRIVATE void ampi_json_reading(ampi_sheet *s, const char *key, double value) {
    if (value >= 0) ampi_json_number(s, key, value);
    else ampi_json_null(s, key);
}

/* Share of the device's memory that the context holds; -1 unknown. */
AMPI_PRIVATE double ampi_memory_share(const amp_memory_info *m) {
    return m->device_total > 0 ? (double)AMPI_MAX(m->reserved, m->allocated) / (double)m->device_total : -1.0;
}

/* *threshold by its default; 1 means never. */
AMPI_PRIVATE amp_result ampi_memory_threshold(const char *function, double *threshold) {
    if (!ampi_is_given(*threshold)) *threshold = 0.9;
    if (amp_is_finite_f64(threshold) && *threshold > 0 && *threshold <= 1) return AMP_OK;
    return ampi_fail(AMP_ERR_RANGE, function, "memory_warning = %g, must be above 0 and at most 1 (never); 0 is 0.9", *threshold);
}
AMPI_PRIVATE int ampi_memory_warned(double share, double threshold) { return threshold < 1 && share >= threshold; }

AMPI_PRIVATE amp_result ampi_status_scaler(const amp_scaler *scaler, amp_status *out) {
    amp_k_scaler k;
    out->scale = 1;
    if (scaler == NULL || scaler->desc.disable) return AMP_OK;
    AMPI_TRY(amp_scaler_get(scaler, &k));
    out->has_scaler = 1;
    out->scale = k.scale;
    out->growth_tracker = k.growth_tracker; out->growth_interval = k.growth_interval; out->at_floor = k.at_floor;
    out->updates = k.updates; out->skips = k.skips; out->consecutive_skips = k.consecutive_skips;
    return AMP_OK;
}

AMP_API amp_result amp_status_get(const amp_context *amp, const amp_scaler *scaler, double memory_warning, amp_status *out) {
    void *dev, *stream;
    const amp_backend *backend;
    const amp_desc *d;
    amp_status s;
    if (amp == NULL || out == NULL) return ampi_fail(AMP_ERR_NULL, "amp_status_get", "amp or out is NULL");
    AMPI_TRY(ampi_memory_threshold("amp_status_get", &memory_warning));
    AMPI_TRY(ampi_wait(amp));
    memset(&s, 0, sizeof s);
    backend = ampi_backend(amp, &dev, &stream);
    d = ampi_settings(amp);
    s.version = amp_version();
    s.enabled = !d->disable;
    snprintf(s.backend, sizeof s.backend, "%s", backend->name);
    AMPI_TRY(amp_query_machine(amp, &s.machine));
    AMPI_TRY(amp_query_choice(amp, &s.choice));
    s.level = d->level; s.policy = d->policy; s.mode = d->mode;
    s.memory_efficient = d->memory_efficient != 0;
    s.allow_tf32 = d->allow_tf32 != 0;
    AMPI_TRY(ampi_status_scaler(scaler, &s));
    AMPI_TRY(amp_cast_cache_info(amp, &s.cast_cache));
    AMPI_TRY(amp_mask_cache_info(amp, &s.mask_cache));
    AMPI_TRY(amp_memory(amp, &s.memory));
    s.memory_share = ampi_memory_share(&s.memory);
    s.memory_warned = ampi_memory_warned(s.memory_share, memory_warning);
    s.telemetry.utilization = s.telemetry.memory_utilization = s.telemetry.temperature = s.telemetry.power = -1;
    if (backend->telemetry != NULL) AMPI_TRY(backend->telemetry(dev, &s.telemetry));
    *out = s;
    return AMP_OK;
}

/* The word of a value; "?" if it has none. */
AMPI_PRIVATE const char *ampi_word_of(const ampi_word *words, int value) {
    while (words->word != NULL && words->value != value) words++;
    return words->word ? words->word : "?";
}

/* Bytes in words. */
AMPI_PRIVATE void ampi_print_bytes(ampi_sheet *s, const char *before, int64_t bytes, int known) {
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double value = (double)bytes;
    int unit = 0;
    while (value >= 1024 && unit < 4) { value /= 1024; unit++; }
    if (!known) ampi_print(s, "%snot here", before);
    else ampi_print(s, "%s%.*f %s", before, unit > 0, value, units[unit]);
}
AMPI_PRIVATE void ampi_print_reading(ampi_sheet *s, const char *name, double value, double factor, const char *unit) {
    if (value >= 0) ampi_print(s, "%s %.0f%s", name, value * factor, unit);
    else ampi_print(s, "%s not here", name);
}
AMPI_PRIVATE void ampi_print_cache(ampi_sheet *s, const char *label, const amp_cache_info *c) {
    ampi_print(s, "%s%lld entries, ", label, (long long)c->entries);
    ampi_print_bytes(s, "", c->bytes, 1);
    if (c->limit > 0) ampi_print_bytes(s, " of ", c->limit, 1);
    ampi_print(s, "; %lld hits, %lld misses, %lld evictions, %lld new infinities\n", (long long)c->hits, (long long)c->misses,
               (long long)c->evictions, (long long)c->new_inf);
}
AMPI_PRIVATE void ampi_print_memory(ampi_sheet *s, const amp_status *t) {
    const amp_memory_info *m = &t->memory;
    ampi_print_bytes(s, "memory   allocated ", m->allocated, 1);
    ampi_print_bytes(s, " (casts ", m->cast_cache, 1);
    ampi_print_bytes(s, ", optimizers ", m->optimizer, 1);
    ampi_print_bytes(s, "), reserved ", m->reserved, 1);
    ampi_print_bytes(s, ", peak ", m->peak, 1);
    ampi_print_bytes(s, ", pinned ", m->pinned, 1);
    ampi_print_bytes(s, "\n         the device's ", m->device_total, m->device_total > 0);
    ampi_print_reading(s, ", share", t->memory_share, 100, "%");
    ampi_print(s, "%s\n", t->memory_warned ? ": above the warning threshold" : "");
}

AMP_API size_t amp_status_text(const amp_status *status, char *text, size_t size) {
    const amp_status *t = status;
    const amp_telemetry *m;
    ampi_sheet s = ampi_sheet_of(text, size);
    if (t == NULL) return 0;
    m = &t->telemetry;
    ampi_print(&s, "version  amp.h %d.%d.%d, backend %s: %s\n", t->version / 10000, t->version / 100 % 100, t->version % 100, t->backend,
               t->machine.device.versions);
    ampi_print(&s, "dtype    %s%s: %s\n", amp_dtype_name(t->choice.dtype), t->enabled ? "" : " (disabled)", t->choice.reason);
    ampi_print(&s, "level    %s, policy %s, mode %s, memory_efficient %s, tf32 %s\n", ampi_word_of(ampi_level_words, (int)t->level),
               ampi_word_of(ampi_policy_words, (int)t->policy), ampi_word_of(ampi_mode_words, (int)t->mode), ampi_yes_no(t->memory_efficient), ampi_yes_no(t->allow_tf32));
    if (t->has_scaler)
        ampi_print(&s, "scaler   scale %g%s, tracker %d of %d; %lld of %lld updates skipped, %lld in a row\n", (double)t->scale,
                   t->at_floor ? " (at its floor)" : "", t->growth_tracker, t->growth_interval, (long long)t->skips,
                   (long long)t->updates, (long long)t->consecutive_skips);
    else ampi_print(&s, "scaler   not here\n");
    ampi_print_cache(&s, "casts    ", &t->cast_cache);
    ampi_print_cache(&s, "masks    ", &t->mask_cache);
    ampi_print_memory(&s, t);
    ampi_print_reading(&s, "load     utilization", (double)m->utilization, 100, "%");
    ampi_print_reading(&s, ", memory", (double)m->memory_utilization, 100, "%");
    ampi_print_reading(&s, ", temperature", (double)m->temperature, 1, " C");
    ampi_print_reading(&s, ", power", (double)m->power, 1, " W\n");
    if (!(m->power >= 0)) ampi_print(&s, "\n");
    s.used += amp_machine_text(&t->machine, s.used < s.size ? s.text + s.used : NULL, s.used < s.size ? s.size - s.used : 0);
    return s.used;
}

AMPI_PRIVATE void ampi_json_cache(ampi_sheet *s, const char *key, const amp_cache_info *c) {
    ampi_json_open(s, key);
    ampi_json_integer(s, "entries", c->entries);
    ampi_json_integer(s, "bytes", c->bytes);
    ampi_json_count(s, "limit", c->limit);
    ampi_json_integer(s, "hits", c->hits);
    ampi_json_integer(s, "misses", c->misses);
    ampi_json_integer(s, "evictions", c->evictions);
    ampi_json_integer(s, "new_inf", c->new_inf);
    ampi_json_close(s);
}
AMPI_PRIVATE void ampi_json_scaler(ampi_sheet *s, const amp_status *t) {
    if (!t->has_scaler) { ampi_json_null(s, "scaler"); return; }
    ampi_json_open(s, "scaler");
    ampi_json_number(s, "scale", (double)t->scale);
    ampi_json_integer(s, "tracker", t->growth_tracker);
    ampi_json_integer(s, "growth_interval", t->growth_interval);
    ampi_json_flag(s, "at_floor", t->at_floor);
    ampi_json_integer(s, "updates", t->updates);
    ampi_json_integer(s, "skips", t->skips);
    ampi_json_integer(s, "consecutive_skips", t->consecutive_skips);
    ampi_json_close(s);
}
AMPI_PRIVATE void ampi_json_memory(ampi_sheet *s, const amp_status *t) {
    const amp_memory_info *m = &t->memory;
    ampi_json_open(s, "memory");
    ampi_json_integer(s, "allocated", m->allocated);
    ampi_json_integer(s, "reserved", m->reserved);
    ampi_json_integer(s, "peak", m->peak);
    ampi_json_integer(s, "pinned", m->pinned);
    ampi_json_integer(s, "cast_cache", m->cast_cache);
    ampi_json_integer(s, "optimizer", m->optimizer);
    ampi_json_count(s, "device_total", m->device_total);
    ampi_json_reading(s, "share", t->memory_share);
    ampi_json_flag(s, "warned", t->memory_warned);
    ampi_json_close(s);
}
AMPI_PRIVATE void ampi_json_cpu(ampi_sheet *s, const amp_cpu_info *c) {
    ampi_json_open(s, "cpu");
    ampi_json_text(s, "name", c->name);
    ampi_json_integer(s, "cores", c->cores);
    ampi_json_text(s, "path", ampi_cpu_path_name(c->path));
    ampi_json_flag(s, "avx2", c->avx2);
    ampi_json_flag(s, "avx512", c->avx512);
    ampi_json_flag(s, "avx512_bf16", c->avx512_bf16);
    ampi_json_flag(s, "avx512_fp16", c->avx512_fp16);
    ampi_json_flag(s, "amx_bf16", c->amx_bf16);
    ampi_json_count(s, "l1d", c->l1d);
    ampi_json_count(s, "l2", c->l2);
    ampi_json_count(s, "l3", c->l3);
    ampi_json_count(s, "memory", c->memory);
    ampi_json_close(s);
}
AMPI_PRIVATE void ampi_json_device(ampi_sheet *s, const amp_device *d) {
    ampi_json_open(s, "device");
    ampi_json_text(s, "name", d->name);
    ampi_json_text(s, "kind", d->kind);
    ampi_json_text(s, "versions", d->versions);
    ampi_json_integer(s, "index", d->index);
    ampi_json_reading(s, "compute_capability", d->cc_major > 0 ? d->cc_major + 0.1 * d->cc_minor : -1.0);
    ampi_json_flag(s, "fp16", d->fp16);
    ampi_json_flag(s, "bf16", d->bf16);
    ampi_json_flag(s, "tf32", d->tf32);
    ampi_json_flag(s, "fp8", d->fp8);
    ampi_json_integer(s, "multiprocessors", d->multiprocessors);
    ampi_json_count(s, "memory", d->memory);
    ampi_json_close(s);
}

AMP_API size_t amp_status_json(const amp_status *status, char *text, size_t size) {
    const amp_status *t = status;
    ampi_sheet s = ampi_sheet_of(text, size);
    char version[40];
    if (t == NULL) return 0;
    snprintf(version, sizeof version, "%d.%d.%d", t->version / 10000, t->version / 100 % 100, t->version % 100);
    ampi_json_open(&s, NULL);
    ampi_json_text(&s, "version", version);
    ampi_json_text(&s, "backend", t->backend);
    ampi_json_flag(&s, "enabled", t->enabled);
    ampi_json_text(&s, "dtype", amp_dtype_name(t->choice.dtype));
    ampi_json_text(&s, "reason", t->choice.reason);
    ampi_json_flag(&s, "emulated", t->choice.emulated);
    ampi_json_flag(&s, "fell_back", t->choice.fell_back);
    ampi_json_text(&s, "level", ampi_word_of(ampi_level_words, (int)t->level));
    ampi_json_text(&s, "policy", ampi_word_of(ampi_policy_words, (int)t->policy));
    ampi_json_text(&s, "mode", ampi_word_of(ampi_mode_words, (int)t->mode));
    ampi_json_flag(&s, "memory_efficient", t->memory_efficient);
    ampi_json_flag(&s, "tf32", t->allow_tf32);
    ampi_json_scaler(&s, t);
    ampi_json_cache(&s, "cast_cache", &t->cast_cache);
    ampi_json_cache(&s, "mask_cache", &t->mask_cache);
    ampi_json_memory(&s, t);
    ampi_json_reading(&s, "utilization", (double)t->telemetry.utilization);
    ampi_json_reading(&s, "memory_utilization", (double)t->telemetry.memory_utilization);
    ampi_json_reading(&s, "temperature", (double)t->telemetry.temperature);
    ampi_json_reading(&s, "power", (double)t->telemetry.power);
    ampi_json_cpu(&s, &t->machine.cpu);
    ampi_json_device(&s, &t->machine.device);
    ampi_json_close(&s);
    return s.used;
}

AMP_API void amp_range_push(amp_context *amp, const char *name) {
    void *dev, *stream;
    const amp_backend *backend;
    if (amp == NULL || name == NULL) return;
    backend = ampi_backend(amp, &dev, &stream);
    if (backend->range_push != NULL) backend->range_push(dev, name);
}

AMP_API void amp_range_pop(amp_context *amp) {
    void *dev, *stream;
    const amp_backend *backend;
    if (amp == NULL) return;
    backend = ampi_backend(amp, &dev, &stream);
    if (backend->range_pop != NULL) backend->range_pop(dev);
}

/* ---- Monitor.  A step's record waits for its outcome, and for the events that measure it; lines wait for room on disk. */

/* One JSON value (RFC 8259) of a single line; returns what follows, or NULL. */
AMPI_PRIVATE const char *ampi_json_blank(const char *p) { while (*p == ' ' || *p == '\t') p++; return p; }
AMPI_PRIVATE const char *ampi_json_digits(const char *p) {
    if (*p < '0' || *p > '9') return NULL;
    while (*p >= '0' && *p <= '9') p++;
    return p;
}
AMPI_PRIVATE const char *ampi_json_skip_number(const char *p) {
    if (*p == '-') p++;
    p = *p == '0' ? p + 1 : ampi_json_digits(p);
    if (p != NULL && *p == '.') p = ampi_json_digits(p + 1);
    if (p == NULL || (*p != 'e' && *p != 'E')) return p;
    return ampi_json_digits(p[1] == '-' || p[1] == '+' ? p + 2 : p + 1);
}
AMPI_PRIVATE const char *ampi_json_skip_text(const char *p) {
    int i, n;
    if (*p != '"') return NULL;
    for (p++; *p != '"'; p += n) {
        n = ampi_utf8((const unsigned char *)p);
        if (n == 0 || (unsigned char)*p < 0x20) return NULL;
        if (*p != '\\') continue;
        n = p[1] == 'u' ? 6 : 2;
        if (p[1] == 0 || strchr("\"\\/bfnrtu", p[1]) == NULL) return NULL;
        for (i = 2; i < n; i++) if (p[i] == 0 || strchr("0123456789abcdefABCDEF", p[i]) == NULL) return NULL;
    }
    return p + 1;
}
AMPI_PRIVATE const char *ampi_json_skip(const char *p, int depth) {
    char end = *p == '{' ? '}' : ']';
    int object = *p == '{', i;
    static const char *const words[] = {"true", "false", "null"};
    for (i = 0; i < 3; i++) if (strncmp(p, words[i], strlen(words[i])) == 0) return p + strlen(words[i]);
    if (*p == '"') return ampi_json_skip_text(p);
    if (!object && *p != '[') return ampi_json_skip_number(p);
    if (depth == 0) return NULL;
    p = ampi_json_blank(p + 1);
    if (*p == end) return p + 1;
    for (;; p = ampi_json_blank(p + 1)) {
        if (object) {
            p = ampi_json_skip_text(p);
            if (p == NULL || *(p = ampi_json_blank(p)) != ':') return NULL;
            p = ampi_json_blank(p + 1);
        }
        p = ampi_json_skip(p, depth - 1);
        if (p == NULL) return NULL;
        p = ampi_json_blank(p);
        if (*p == end) return p + 1;
        if (*p != ',') return NULL;
    }
}
AMPI_PRIVATE int ampi_json_is_object(const char *p) {
    p = ampi_json_blank(p);
    if (*p == '{') p = ampi_json_skip(p, 64);
    else return 0;
    return p != NULL && *ampi_json_blank(p) == 0;
}

/* ---- The file */

/* Writes what is kept, from where the last write ended: a line that was cut is gone on with. */
AMPI_PRIVATE amp_result ampi_lines_write(amp_monitor *m, const char *function) {
    const amp_system *s = ampi_context_system(m->amp);
    int64_t done = 0, n = 1;
    if (!m->open) return AMP_OK;
    while (done < m->kept && n > 0) {
        n = s->file_write(s->user, m->file, m->lines + done, (size_t)(m->kept - done), m->offset + done);
        if (n == -EINTR) n = 1;
        else if (n > 0) done += AMPI_MIN(n, m->kept - done);
    }
    m->kept -= done;
    m->offset += done;
    if (done > 0 && m->kept > 0) memmove(m->lines, m->lines + done, (size_t)m->kept);
    if (m->kept == 0) return AMP_OK;
    return ampi_fail(AMP_ERR_WRITE, function, "%s at offset %lld: %s; %lld bytes are kept, %lld lines were lost", m->desc.path,
                     (long long)m->offset, n < 0 ? strerror((int)-n) : "nothing was written", (long long)m->kept, (long long)m->lost);
}

/* A sheet for one more line, behind those that are kept. */
AMPI_PRIVATE ampi_sheet ampi_line_room(const amp_monitor *m) {
    return ampi_sheet_of(m->lines + m->kept, (size_t)(AMPI_LINE_BYTES - m->kept));
}
AMPI_PRIVATE ampi_sheet ampi_line_begin(const amp_monitor *m, const char *event) {
    ampi_sheet s = ampi_line_room(m);
    ampi_json_open(&s, NULL);
    ampi_json_text(&s, "event", event);
    return s;
}

/* Keeps the line if there is room for it. */
AMPI_PRIVATE void ampi_line_end(amp_monitor *m, const ampi_sheet *s) {
    if (s->used + 1 <= s->size) {
        m->kept += (int64_t)s->used + 1;
        m->lines[m->kept - 1] = '\n';
        return;
    }
    if (m->lost++ == 0)
        ampi_log(m->amp, AMP_LOG_ERROR, 1213, "%s cannot be written, and there is no room to keep more lines", m->desc.path);
}

/* Opens the file; behind a last line without its end, which a crash left, comes one. */
AMPI_PRIVATE amp_result ampi_lines_open(amp_monitor *m, const char *function) {
    const amp_system *s = ampi_context_system(m->amp);
    int64_t n;
    char last = '\n';
    int error = ampi_file_open(s, m->desc.path, m->desc.append ? 2 : 1, &m->file);
    if (error != 0) return ampi_fail(AMP_ERR_OPEN, function, "%s: %s", m->desc.path, strerror(-error));
    m->open = 1;
    AMPI_TRY(ampi_alloc(s, function, (void **)&m->lines, AMPI_LINE_BYTES, 1));
    if (!m->desc.append) return AMP_OK;
    n = m->offset = s->file_size(s->user, m->file);
    if (n > 0) n = ampi_read_fully(s, m->file, &last, 1, n - 1);
    if (n < 0 || (m->offset > 0 && n == 0))
        return ampi_fail(AMP_ERR_READ, function, "%s: %s", m->desc.path, n < 0 ? strerror((int)-n) : "ends early");
    if (last == '\n') return AMP_OK;
    m->lines[m->kept++] = '\n';
    return ampi_lines_write(m, function);
}

AMPI_PRIVATE amp_result ampi_lines_sync(amp_monitor *m, const char *function) {
    const amp_system *s = ampi_context_system(m->amp);
    int error;
    AMPI_TRY(ampi_lines_write(m, function));
    error = m->open ? ampi_file_sync(s, m->file) : 0;
    if (error == 0 || error == -EINVAL || error == -ENOTSUP) return AMP_OK;    /* no file that could be synced */
    return ampi_fail(AMP_ERR_WRITE, function, "%s: %s", m->desc.path, strerror(-error));
}

/* ---- Time */

AMPI_PRIVATE ampi_mark *ampi_mark_at(const amp_monitor *m, int64_t i) {
    return &m->marks[(m->first_mark + i) & (m->mark_room - 1)];
}

/* Twice the room, with an event at each place.  The ring begins anew at 0; the places not in use move along. */
AMPI_PRIVATE amp_result ampi_marks_grow(amp_monitor *m) {
    const amp_system *s = ampi_context_system(m->amp);
    void *dev, *stream;
    const amp_backend *backend = ampi_backend(m->amp, &dev, &stream);
    int64_t old = m->mark_room, room = old ? 2 * old : 64, i;
    ampi_mark *marks;
    AMPI_TRY(ampi_alloc(s, "amp_monitor_phase", (void **)&marks, room, sizeof *marks));
    for (i = 0; i < m->mark_room; i++) marks[i] = *ampi_mark_at(m, i);
    ampi_free(s, m->marks, m->mark_room, sizeof *m->marks);
    m->marks = marks;
    m->mark_room = room;
    m->first_mark = 0;
    for (i = old; i < room && !backend->host_visible; i++) AMPI_TRY(backend->event_create(dev, &marks[i].event));
    return AMP_OK;
}

/* Books what has been measured; wait 1: also what is not done of steps before `until`. */
AMPI_PRIVATE amp_result ampi_marks_settle(amp_monitor *m, int64_t until, int wait) {
    void *dev, *stream;
    const amp_backend *backend = ampi_backend(m->amp, &dev, &stream);
    for (; m->n_marks >= 2; m->first_mark = (m->first_mark + 1) & (m->mark_room - 1), m->n_marks--) {
        const ampi_mark *from = ampi_mark_at(m, 0), *to = ampi_mark_at(m, 1);
        double seconds = 1e-9 * (double)(to->ns - from->ns);
        int32_t done = 1;
        if (to->event != NULL) {
            AMPI_TRY(backend->event_done(dev, to->event, &done));
            if (!done && !(wait && from->step < until)) return AMP_OK;
            if (!done) AMPI_TRY(backend->event_sync(dev, to->event));
            if (from->event != NULL) AMPI_TRY(backend->event_elapsed(dev, from->event, to->event, &seconds));
        }
        m->notes[from->step % AMPI_NOTES].phase_seconds[from->phase] += seconds;
    }
    return AMP_OK;
}

/* From now on time belongs to this phase of the step that runs. */
AMPI_PRIVATE amp_result ampi_mark_now(amp_monitor *m, amp_phase phase) {
    const amp_system *s = ampi_context_system(m->amp);
    void *dev, *stream;
    const amp_backend *backend = ampi_backend(m->amp, &dev, &stream);
    ampi_mark *mark;
    AMPI_TRY(ampi_marks_settle(m, 0, 0));
    if (m->n_marks == m->mark_room) AMPI_TRY(ampi_marks_grow(m));
    mark = ampi_mark_at(m, m->n_marks);
    if (mark->event != NULL) AMPI_TRY(backend->event_record(dev, mark->event, stream));
    mark->ns = s->clock_ns(s->user);
    mark->step = m->steps;
    mark->phase = phase;
    m->n_marks++;
    return AMP_OK;
}

/* The time of an epoch begins, with its first phase once more. */
AMPI_PRIVATE amp_result ampi_time_begin(amp_monitor *m) {
    m->n_marks = 0;
    m->begun = 0;
    memset(m->notes[m->steps % AMPI_NOTES].phase_seconds, 0, sizeof m->notes[0].phase_seconds);
    return ampi_mark_now(m, AMP_PHASE_OTHER);
}

AMPI_PRIVATE void ampi_range_end(amp_monitor *m) {
    if (m->in_range) amp_range_pop(m->amp);
    m->in_range = 0;
}

AMP_API amp_result amp_monitor_phase(amp_monitor *monitor, amp_phase phase) {
    static const char *const names[AMP_PHASES] = {"other", "data", "forward", "backward", "optimizer"};
    amp_monitor *m = monitor;
    if (m == NULL) return ampi_fail(AMP_ERR_NULL, "amp_monitor_phase", "monitor is NULL");
    if ((int)phase < 0 || phase >= AMP_PHASES)
        return ampi_fail(AMP_ERR_RANGE, "amp_monitor_phase", "phase = %d, must be 0 to %d", (int)phase, AMP_PHASES - 1);
    ampi_range_end(m);
    if (phase != AMP_PHASE_OTHER) amp_range_push(m->amp, names[phase]);
    m->in_range = phase != AMP_PHASE_OTHER;
    if (ampi_capture(m->amp) != NULL) return AMP_OK;
    if (!m->begun) m->n_marks = 0;
    m->begun = 1;
    return ampi_mark_now(m, phase);
}

/* ---- Records */

AMPI_PRIVATE const char *ampi_trouble_name(amp_trouble trouble) {
    static const char *const names[] = {NULL, "loss", "gradients", "floor", "skips"};
    return names[trouble];
}

AMPI_PRIVATE amp_trouble ampi_trouble_of(const amp_monitor *m, const amp_step_record *r, int read) {
    const amp_outcome *o = &r->outcome;
    int scales = m->desc.scaler != NULL && !m->desc.scaler->desc.disable && !m->desc.scaler->desc.frozen;
    if (read && !amp_is_finite_f64(&r->loss)) return AMP_TROUBLE_LOSS;
    if (!scales && (!o->applied || o->first_bad != NULL || !amp_is_finite_f32(&o->norm))) return AMP_TROUBLE_GRADIENTS;
    if (o->at_floor) return AMP_TROUBLE_FLOOR;
    return o->consecutive_skips >= m->desc.max_skips ? AMP_TROUBLE_SKIPS : AMP_TROUBLE_NONE;
}

AMPI_PRIVATE void ampi_trouble_log(const amp_monitor *m, const amp_step_record *r) {
    static const char *const words[] = {"", "the loss is not finite", "gradients are not finite, and no scale can shrink",
                                        "gradients overflow, and the scale is at its floor", "too many steps in a row were skipped"};
    ampi_log(m->amp, AMP_LOG_WARNING, 1212, "step %lld: %s%s%s (%lld in a row skipped); action: %s", (long long)r->outcome.step,
             words[r->trouble], r->outcome.first_bad ? ", first in " : "", r->outcome.first_bad ? r->outcome.first_bad : "",
             (long long)r->outcome.consecutive_skips, ampi_word_of(ampi_action_words, (int)r->action));
}

AMPI_PRIVATE void ampi_json_phases(ampi_sheet *s, double seconds, const double *phases) {
    ampi_json_number(s, "seconds", seconds);
    ampi_json_number(s, "data_s", phases[AMP_PHASE_DATA]);
    ampi_json_number(s, "forward_s", phases[AMP_PHASE_FORWARD]);
    ampi_json_number(s, "backward_s", phases[AMP_PHASE_BACKWARD]);
    ampi_json_number(s, "optimizer_s", phases[AMP_PHASE_OPTIMIZER]);
}

AMPI_PRIVATE void ampi_step_line(amp_monitor *m, const amp_step_record *r, int read) {
    const amp_outcome *o = &r->outcome;
    ampi_sheet s = ampi_line_begin(m, "step");
    ampi_json_integer(&s, "step", o->step);
    ampi_json_integer(&s, "epoch", r->epoch);
    if (read) ampi_json_number(&s, "loss", r->loss);
    ampi_json_number(&s, "norm", (double)o->norm);
    ampi_json_number(&s, "scale", (double)o->scale);
    ampi_json_integer(&s, "tracker", o->growth_tracker);
    ampi_json_integer(&s, "skipped", !o->applied);
    ampi_json_integer(&s, "skips", o->total_skips);
    ampi_json_text(&s, "dtype", amp_dtype_name(r->dtype));
    ampi_json_number(&s, "lr", o->lr);
    ampi_json_number(&s, "tokens_per_s", r->tokens_per_second);
    ampi_json_phases(&s, r->seconds, r->phase_seconds);
    if (r->has_memory) {
        ampi_json_integer(&s, "allocated", r->memory.allocated);
        ampi_json_integer(&s, "reserved", r->memory.reserved);
        ampi_json_integer(&s, "peak", r->memory.peak);
    }
    if (r->trouble != AMP_TROUBLE_NONE) ampi_json_text(&s, "trouble", ampi_trouble_name(r->trouble));
    if (o->first_bad != NULL) ampi_json_text(&s, "first_bad", o->first_bad);
    ampi_json_close(&s);
    ampi_line_end(m, &s);
}

AMPI_PRIVATE double ampi_sum_phases(const double *phases) {
    double seconds = 0;
    int p;
    for (p = 0; p < AMP_PHASES; p++) seconds += phases[p];
    return seconds;
}

AMPI_PRIVATE void ampi_tally_step(ampi_tally *t, const amp_step_record *r) {
    int p;
    t->steps++;
    t->skipped += !r->outcome.applied;
    t->troubles += r->trouble != AMP_TROUBLE_NONE;
    t->tokens += r->tokens;
    t->dtypes[r->dtype]++;
    for (p = 0; p < AMP_PHASES; p++) t->phase_seconds[p] += r->phase_seconds[p];
    if (!amp_is_finite_f64(&r->loss)) return;
    t->losses++;
    t->loss += r->loss;
}

/* Makes the record of a step: its outcome has come. */
AMPI_PRIVATE void ampi_record_add(amp_monitor *m, const ampi_note *note, const amp_outcome *outcome) {
    int64_t interval = m->desc.log_interval;
    amp_step_record *r;
    if (m->n_records == AMP_OUTCOMES) { m->first_record++; m->n_records--; }
    r = &m->records[(m->first_record + m->n_records++) % AMP_OUTCOMES];
    memset(r, 0, sizeof *r);
    r->outcome = *outcome;
    r->epoch = note->epoch;
    r->loss = note->loss;
    r->tokens = note->tokens;
    r->dtype = note->dtype;
    r->has_memory = note->has_memory;
    r->memory = note->memory;
    memcpy(r->phase_seconds, note->phase_seconds, sizeof r->phase_seconds);
    r->seconds = ampi_sum_phases(r->phase_seconds);
    r->tokens_per_second = r->seconds > 0 ? (double)r->tokens / r->seconds : 0;
    r->trouble = ampi_trouble_of(m, r, note->read);
    if (r->trouble != AMP_TROUBLE_NONE) {
        r->action = m->desc.nan_action;
        ampi_trouble_log(m, r);
    }
    ampi_tally_step(&m->epoch, r);
    if (!m->open) return;
    if (r->trouble == AMP_TROUBLE_NONE && outcome->applied && (interval < 1 || outcome->step % interval != 0)) return;
    ampi_step_line(m, r, note->read);
}

/* The oldest note of this number, or NULL. */
AMPI_PRIVATE const ampi_note *ampi_note_find(const amp_monitor *m, int64_t number, int64_t *step) {
    for (*step = m->taken; *step < m->steps; (*step)++)
        if (m->notes[*step % AMPI_NOTES].number == number) return &m->notes[*step % AMPI_NOTES];
    return NULL;
}

/* 1: outcome `number`, the next one that is due, and the times of its step are there. */
AMPI_PRIVATE int ampi_outcome_here(amp_monitor *m, int64_t number) {
    void *dev, *stream;
    const amp_backend *backend = ampi_backend(m->amp, &dev, &stream);
    int64_t step;
    int32_t done = 0;
    if (backend->event_done(dev, m->desc.optimizer->events[(number - 1) % AMP_OUTCOMES], &done) != AMP_OK || !done) return 0;
    return ampi_note_find(m, number, &step) == NULL || ampi_mark_at(m, 0)->step > step;
}

/* Makes records of the outcomes that are due; wait 0: of those that have come. */
AMPI_PRIVATE amp_result ampi_records_take(amp_monitor *m, int wait) {
    amp_optimizer *o = m->desc.optimizer;
    const ampi_note *note;
    amp_outcome outcome;
    int64_t number, step;
    AMPI_TRY(ampi_marks_settle(m, 0, 0));
    while ((number = ampi_outcome_due(o)) != 0 && (wait || ampi_outcome_here(m, number))) {
        note = ampi_note_find(m, number, &step);
        if (note != NULL) AMPI_TRY(ampi_marks_settle(m, step + 1, 1));     /* then the outcome has come, too */
        if (!amp_outcome_next(o, &outcome)) return ampi_wait(m->amp);      /* says why */
        if (note == NULL) continue;
        ampi_record_add(m, note, &outcome);
        m->taken = step + 1;
    }
    return AMP_OK;
}

/* ---- Steps */

AMPI_PRIVATE amp_result ampi_monitor_memory(amp_monitor *m, ampi_note *note) {
    double share;
    int reached;
    AMPI_TRY(amp_memory(m->amp, &note->memory));
    note->has_memory = 1;
    share = ampi_memory_share(&note->memory);
    reached = ampi_memory_warned(share, m->desc.memory_warning);
    if (reached && !m->warned)
        ampi_log(m->amp, AMP_LOG_WARNING, 1211, "step %lld: %.0f%% of the device's memory is in use (memory_warning %g)",
                 (long long)note->number, 100 * share, m->desc.memory_warning);
    m->warned = reached;
    return AMP_OK;
}

AMPI_PRIVATE int ampi_interval_ends(int64_t interval, int64_t number) { return interval > 0 && number % interval == 0; }

/* The note of the step that ends.  Notes from before the optimizer was set back have no outcome any more. */
AMPI_PRIVATE amp_result ampi_note_fill(amp_monitor *m, const amp_step_info *info) {
    ampi_note *note = &m->notes[m->steps % AMPI_NOTES];
    const amp_desc *d = ampi_settings(m->amp);
    int64_t i;
    note->number = m->desc.optimizer->attempts;
    for (i = m->taken; i < m->steps; i++)
        if (m->notes[i % AMPI_NOTES].number >= note->number) m->notes[i % AMPI_NOTES].number = 0;
    note->epoch = m->epochs;
    note->tokens = info->tokens;
    note->read = !info->no_loss;
    note->loss = note->read ? info->loss : ampi_f64_of_bits(AMPI_NAN);
    note->dtype = d->disable ? AMP_F32 : d->dtype;
    note->has_memory = 0;
    memset(&note->memory, 0, sizeof note->memory);
    return ampi_interval_ends(m->desc.memory_interval, note->number) ? ampi_monitor_memory(m, note) : AMP_OK;
}

AMP_API amp_result amp_monitor_step(amp_monitor *monitor, const amp_step_info *info) {
    amp_monitor *m = monitor;
    amp_optimizer *o;
    if (m == NULL || info == NULL) return ampi_fail(AMP_ERR_NULL, "amp_monitor_step", "monitor or info is NULL");
    o = m->desc.optimizer;
    if (o->sent == m->last)
        return ampi_fail(AMP_ERR_STATE, "amp_monitor_step", "the optimizer has not stepped since the last call: amp_step comes first");
    ampi_range_end(m);
    AMPI_TRY(ampi_note_fill(m, info));
    m->last = o->sent;
    m->begun = 1;
    m->steps++;
    m->taken = AMPI_MAX(m->taken, m->steps - AMPI_NOTES + 1);
    memset(m->notes[m->steps % AMPI_NOTES].phase_seconds, 0, sizeof m->notes[0].phase_seconds);
    AMPI_TRY(ampi_mark_now(m, AMP_PHASE_OTHER));
    AMPI_TRY(ampi_records_take(m, o->attempts - o->delivered >= AMP_OUTCOMES));
    if (ampi_interval_ends(m->desc.cleanup_interval, o->attempts)) AMPI_TRY(amp_cleanup(m->amp, NULL));
    return ampi_lines_write(m, "amp_monitor_step");
}

AMP_API int32_t amp_monitor_next(amp_monitor *monitor, amp_step_record *out) {
    amp_monitor *m = monitor;
    if (m == NULL || out == NULL) return 0;
    (void)ampi_records_take(m, 1);          /* what fails here fails in the next step, or has made its line wait */
    (void)ampi_lines_write(m, "amp_monitor_next");
    if (m->n_records == 0) return 0;
    *out = m->records[m->first_record++ % AMP_OUTCOMES];
    m->n_records--;
    return 1;
}

AMPI_PRIVATE amp_result ampi_monitor_take_all(amp_monitor *m) {
    AMPI_TRY(amp_outcome_flush(m->desc.optimizer));
    return ampi_records_take(m, 1);
}

AMP_API amp_result amp_monitor_flush(amp_monitor *monitor) {
    if (monitor == NULL) return ampi_fail(AMP_ERR_NULL, "amp_monitor_flush", "monitor is NULL");
    AMPI_TRY(ampi_monitor_take_all(monitor));
    return ampi_lines_write(monitor, "amp_monitor_flush");
}

AMP_API amp_result amp_monitor_write(amp_monitor *monitor, const char *json) {
    amp_monitor *m = monitor;
    ampi_sheet s;
    if (m == NULL || json == NULL) return ampi_fail(AMP_ERR_NULL, "amp_monitor_write", "monitor or json is NULL");
    if (!ampi_json_is_object(json) || strlen(json) >= AMPI_LINE_BYTES)
        return ampi_fail(AMP_ERR_RANGE, "amp_monitor_write", "\"%.40s\" must be one JSON object on one line of at most %d bytes",
                         json, AMPI_LINE_BYTES - 1);
    if (!m->open) return AMP_OK;
    s = ampi_line_room(m);
    ampi_print(&s, "%s", json);
    ampi_line_end(m, &s);
    return ampi_lines_write(m, "amp_monitor_write");
}

/* ---- Epochs */

AMPI_PRIVATE void ampi_epoch_fill(amp_epoch_record *r, const ampi_tally *t) {
    double n = (double)AMPI_MAX(t->epochs, (int64_t)1), seconds = ampi_sum_phases(t->phase_seconds);
    int p, dtype = AMP_F32;
    memset(r, 0, sizeof *r);
    r->epoch = t->epochs;
    r->steps = t->steps;
    r->skipped = t->skipped;
    r->troubles = t->troubles;
    r->loss = t->losses > 0 ? t->loss / (double)t->losses : ampi_f64_of_bits(AMPI_NAN);
    r->seconds = seconds / n;
    for (p = 0; p < AMP_PHASES; p++) r->phase_seconds[p] = t->phase_seconds[p] / n;
    r->tokens_per_second = seconds > 0 ? (double)t->tokens / seconds : 0;
    r->peak = t->peak;
    for (p = 0; p <= AMP_TF32; p++) if (t->dtypes[p] > t->dtypes[dtype]) dtype = p;
    r->dtype = (amp_dtype)dtype;
    r->mixed = dtype == AMP_F16 || dtype == AMP_BF16 || dtype == AMP_TF32;
}

AMPI_PRIVATE void ampi_tally_epoch(ampi_tally *sum, const ampi_tally *t, double loss) {
    int p;
    sum->epochs++;
    sum->steps += t->steps; sum->skipped += t->skipped; sum->troubles += t->troubles; sum->tokens += t->tokens;
    sum->peak = AMPI_MAX(sum->peak, t->peak);
    for (p = 0; p < AMP_PHASES; p++) sum->phase_seconds[p] += t->phase_seconds[p];
    for (p = 0; p <= AMP_TF32; p++) sum->dtypes[p] += t->dtypes[p];
    if (t->losses == 0) return;
    sum->losses++;
    sum->loss += loss;
}

AMPI_PRIVATE void ampi_epoch_line(amp_monitor *m, const amp_epoch_record *r) {
    ampi_sheet s = ampi_line_begin(m, "epoch");
    ampi_json_integer(&s, "epoch", r->epoch);
    ampi_json_integer(&s, "steps", r->steps);
    ampi_json_integer(&s, "skipped", r->skipped);
    ampi_json_integer(&s, "troubles", r->troubles);
    ampi_json_number(&s, "loss", r->loss);
    ampi_json_text(&s, "dtype", amp_dtype_name(r->dtype));
    ampi_json_number(&s, "tokens_per_s", r->tokens_per_second);
    ampi_json_phases(&s, r->seconds, r->phase_seconds);
    ampi_json_integer(&s, "peak", r->peak);
    ampi_json_close(&s);
    ampi_line_end(m, &s);
}

AMP_API amp_result amp_monitor_epoch(amp_monitor *monitor, amp_epoch_record *out) {
    amp_monitor *m = monitor;
    amp_epoch_record r;
    amp_memory_info memory;
    if (m == NULL) return ampi_fail(AMP_ERR_NULL, "amp_monitor_epoch", "monitor is NULL");
    AMPI_TRY(ampi_monitor_take_all(m));
    if (m->epoch.steps == 0) return ampi_fail(AMP_ERR_STATE, "amp_monitor_epoch", "epoch %lld has no steps", (long long)m->epochs);
    memset(&memory, 0, sizeof memory);
    ampi_memory_counted(m->amp, &memory);
    m->epoch.peak = memory.peak;
    m->epoch.epochs = 1;
    ampi_epoch_fill(&r, &m->epoch);
    r.epoch = m->epochs;
    ampi_tally_epoch(r.mixed ? &m->mixed : &m->full, &m->epoch, r.loss);
    if (m->open) ampi_epoch_line(m, &r);
    if (out != NULL) *out = r;
    memset(&m->epoch, 0, sizeof m->epoch);
    m->epochs++;
    amp_memory_reset_peak(m->amp);
    ampi_range_end(m);
    AMPI_TRY(ampi_time_begin(m));
    return ampi_lines_sync(m, "amp_monitor_epoch");
}

AMP_API amp_result amp_monitor_summary(const amp_monitor *monitor, amp_epoch_summary *out) {
    const amp_epoch_record *a, *b;
    if (monitor == NULL || out == NULL) return ampi_fail(AMP_ERR_NULL, "amp_monitor_summary", "monitor or out is NULL");
    memset(out, 0, sizeof *out);
    ampi_epoch_fill(&out->mixed, &monitor->mixed);
    ampi_epoch_fill(&out->full, &monitor->full);
    a = &out->mixed;
    b = &out->full;
    if (a->epoch == 0 || b->epoch == 0) return AMP_OK;
    if (a->seconds > 0)
        out->speedup = b->seconds * (double)b->epoch / (double)b->steps / (a->seconds * (double)a->epoch / (double)a->steps);
    if (b->peak > 0) out->memory_ratio = (double)a->peak / (double)b->peak;
    out->loss_difference = a->loss - b->loss;
    return AMP_OK;
}

AMPI_PRIVATE void ampi_print_epochs(ampi_sheet *s, const char *label, const amp_epoch_record *r) {
    if (r->epoch == 0) { ampi_print(s, "%-16s  none\n", label); return; }
    ampi_print(s, "%-16s  %6lld  %8lld  %7lld  ", label, (long long)r->epoch, (long long)r->steps, (long long)r->skipped);
    if (amp_is_finite_f64(&r->loss)) ampi_print(s, "%10.4f", r->loss);
    else ampi_print(s, "%10s", "not here");
    ampi_print(s, "  %10.3g  %10.4g", r->seconds, r->tokens_per_second);
    ampi_print_bytes(s, "  ", r->peak, 1);
    ampi_print(s, "\n");
}

AMP_API size_t amp_epoch_summary_text(const amp_epoch_summary *summary, char *text, size_t size) {
    ampi_sheet s = ampi_sheet_of(text, size);
    if (summary == NULL) return 0;
    ampi_print(&s, "%-16s  %6s  %8s  %7s  %10s  %10s  %10s  %s\n", "precision", "epochs", "steps", "skipped", "loss", "s/epoch",
               "tokens/s", "peak");
    ampi_print_epochs(&s, summary->mixed.epoch ? amp_dtype_name(summary->mixed.dtype) : "mixed", &summary->mixed);
    ampi_print_epochs(&s, "fp32", &summary->full);
    if (summary->mixed.epoch == 0 || summary->full.epoch == 0) return s.used;
    ampi_print(&s, "%s beside fp32: %.2f times as fast per step, %.2f of the memory", amp_dtype_name(summary->mixed.dtype),
               summary->speedup, summary->memory_ratio);
    if (amp_is_finite_f64(&summary->loss_difference)) ampi_print(&s, ", loss %+.4f", summary->loss_difference);
    ampi_print(&s, "\n");
    return s.used;
}

/* ---- Creation */

AMPI_PRIVATE amp_result ampi_check_interval(const char *field, int64_t *interval, int64_t otherwise) {
    if (*interval == 0) *interval = otherwise;
    if (*interval >= 1 || *interval == AMP_INTERVAL_OFF) return AMP_OK;
    return ampi_fail(AMP_ERR_RANGE, "amp_monitor_create", ".%s = %lld, must be 1 or more, or AMP_INTERVAL_OFF", field, (long long)*interval);
}

AMPI_PRIVATE amp_result ampi_check_monitor(const amp_context *amp, amp_monitor_desc *d) {
    const char *f = "amp_monitor_create";
    if (d->optimizer == NULL) return ampi_fail(AMP_ERR_NULL, f, ".optimizer is NULL");
    if (d->optimizer->amp != amp || (d->scaler != NULL && d->scaler->amp != amp))
        return ampi_fail(AMP_ERR_CONFLICT, f, ".optimizer or .scaler is of another context");
    AMPI_TRY(ampi_check_interval("log_interval", &d->log_interval, 100));
    AMPI_TRY(ampi_check_interval("memory_interval", &d->memory_interval, 100));
    AMPI_TRY(ampi_check_interval("cleanup_interval", &d->cleanup_interval, AMP_INTERVAL_OFF));
    AMPI_TRY(ampi_memory_threshold(f, &d->memory_warning));
    if ((int)d->nan_action < 0 || d->nan_action > AMP_NAN_RECOVER)
        return ampi_fail(AMP_ERR_RANGE, f, ".nan_action = %d, must be 0 (default) to %d", (int)d->nan_action, (int)AMP_NAN_RECOVER);
    if (d->nan_action == AMP_NAN_DEFAULT) d->nan_action = AMP_NAN_SKIP;
    if (d->max_skips < 0) return ampi_fail(AMP_ERR_RANGE, f, ".max_skips = %d, must be 1 or more, or 0 for 25", d->max_skips);
    if (d->max_skips == 0) d->max_skips = 25;
    if (d->epoch < 0) return ampi_fail(AMP_ERR_RANGE, f, ".epoch = %lld, must be 0 or more", (long long)d->epoch);
    if (d->path != NULL && d->path[0] == 0) return ampi_fail(AMP_ERR_RANGE, f, ".path is empty; NULL means no file");
    return AMP_OK;
}

AMPI_PRIVATE void ampi_monitor_free(amp_monitor *m) {
    const amp_system *s = ampi_context_system(m->amp);
    void *dev, *stream;
    const amp_backend *backend = ampi_backend(m->amp, &dev, &stream);
    int64_t i;
    int error = m->open ? ampi_file_close(s, m->file) : 0;
    if (error != 0) ampi_log(m->amp, AMP_LOG_ERROR, 1214, "%s: %s", m->desc.path, strerror(-error));
    for (i = 0; i < m->mark_room; i++) if (m->marks[i].event != NULL) backend->event_destroy(dev, m->marks[i].event);
    ampi_free(s, m->marks, m->mark_room, sizeof *m->marks);
    ampi_free(s, m->lines, AMPI_LINE_BYTES, 1);
    ampi_free(s, m->text, m->text_bytes, 1);
    ampi_free(s, m, 1, sizeof *m);
}

AMP_API amp_result amp_monitor_create_v(amp_context *amp, amp_monitor **out, const amp_monitor_desc *desc, uint64_t abi) {
    const char *f = "amp_monitor_create";
    amp_monitor_desc d;
    amp_monitor *m;
    amp_result r;
    AMPI_TRY(ampi_check_abi(f, abi, AMP_ABI(amp_monitor_desc)));
    if (out != NULL) *out = NULL;
    if (amp == NULL || out == NULL || desc == NULL) return ampi_fail(AMP_ERR_NULL, f, "amp, out or desc is NULL");
    d = *desc;
    AMPI_TRY(ampi_check_monitor(amp, &d));
    AMPI_TRY(ampi_alloc(ampi_context_system(amp), f, (void **)&m, 1, sizeof *m));
    m->amp = amp;
    m->desc = d;
    m->epochs = d.epoch;
    m->last = d.optimizer->sent;
    r = ampi_copy_texts(amp, f, &m->desc.path, 1, &m->text, &m->text_bytes);
    if (r == AMP_OK) r = ampi_time_begin(m);
    if (r == AMP_OK && d.path != NULL) r = ampi_lines_open(m, f);
    if (r == AMP_OK) *out = m;
    else ampi_monitor_free(m);
    return r;
}

AMP_API void amp_monitor_destroy(amp_monitor *monitor) {
    amp_monitor *m = monitor;
    amp_result r;
    if (m == NULL) return;
    ampi_range_end(m);
    r = ampi_monitor_take_all(m);
    if (r != AMP_OK) ampi_log(m->amp, AMP_LOG_ERROR, (int)r, "%s", amp_last_error());
    r = ampi_lines_sync(m, "amp_monitor_destroy");
    if (r != AMP_OK) ampi_log(m->amp, AMP_LOG_ERROR, (int)r, "%s; what was kept is lost now", amp_last_error());
    ampi_monitor_free(m);
}

AMP_API amp_result amp_monitor_query(const amp_monitor *monitor, amp_monitor_desc *out) {
    if (monitor == NULL || out == NULL) return ampi_fail(AMP_ERR_NULL, "amp_monitor_query", "monitor or out is NULL");
    *out = monitor->desc;
    return AMP_OK;
}

/* ---- Numerics */

/* Adds formatted text at `at`, as far as there is room; returns where the text then ends. */
AMPI_PRIVATE AMPI_PRINTF(4, 5) size_t ampi_append(char *text, size_t size, size_t at, const char *format, ...) {
    va_list args;
    int n;
    va_start(args, format);
    n = at < size ? vsnprintf(text + at, size - at, format, args) : vsnprintf(NULL, 0, format, args);
    va_end(args);
    return n > 0 ? at + (size_t)n : at;
}

struct amp_numerics {
    amp_context *amp;
    amp_numerics_desc desc;         /* effective */
    int64_t n, gradients, weights;  /* rows: gradients, weights, ranges */
    amp_k_tensor *table, *on_device;
    amp_k_inspected *found, *found_on_device;
    amp_param **params;             /* of the gradients */
    amp_numerics_row *rows;
    const char **names; char *text; int64_t text_bytes;     /* of ranges, copied */
    int64_t calls;
    amp_numerics_report report;     /* of the last time */
};

AMP_API void amp_numerics_destroy(amp_numerics *numerics) {
    const amp_system *s;
    amp_numerics *m = numerics;
    if (m == NULL) return;
    s = ampi_context_system(m->amp);
    amp_free(m->amp, m->on_device);
    amp_free(m->amp, m->found_on_device);
    ampi_free(s, m->table, m->n, sizeof *m->table);
    ampi_free(s, m->found, m->n, sizeof *m->found);
    ampi_free(s, m->params, m->n, sizeof *m->params);
    ampi_free(s, m->rows, m->n, sizeof *m->rows);
    ampi_free(s, (void *)m->names, m->n, sizeof *m->names);
    ampi_free(s, m->text, m->text_bytes, 1);
    ampi_free(s, m, 1, sizeof *m);
}

AMPI_PRIVATE amp_result ampi_numerics_check(const amp_numerics_desc *d, int64_t *gradients) {
    const char *f = "amp_numerics_create";
    if (d->n_params < 0 || d->n_ranges < 0)
        return ampi_fail(AMP_ERR_RANGE, f, "%s = %lld, must be 0 or more", d->n_params < 0 ? ".n_params" : ".n_ranges",
                         (long long)AMPI_MIN(d->n_params, d->n_ranges));
    if (d->n_params > 0 && d->params == NULL) return ampi_fail(AMP_ERR_NULL, f, ".params is NULL");
    if (d->n_ranges > 0 && d->ranges == NULL) return ampi_fail(AMP_ERR_NULL, f, ".ranges is NULL");
    if (d->n_params + d->n_ranges == 0) return ampi_fail(AMP_ERR_NULL, f, "give .params or .ranges, neither is there");
    if (d->interval < 0) return ampi_fail(AMP_ERR_RANGE, f, ".interval = %lld, must be 1 or more, or 0 (100)", (long long)d->interval);
    if (d->dtype != AMP_F16 && d->dtype != AMP_BF16 && d->dtype != AMP_E4M3 && d->dtype != AMP_E5M2)
        return ampi_fail(AMP_ERR_DTYPE, f, ".dtype = %s, must be fp16, bf16, fp8_e4m3 or fp8_e5m2", amp_dtype_name(d->dtype));
    AMPI_TRY(ampi_check_ranges(f, d->ranges, d->n_ranges));
    AMPI_TRY(ampi_check_weights_of(f, d->params, d->n_params));
    return ampi_check_params(f, d->params, d->n_params, gradients);
}

AMPI_PRIVATE void ampi_numerics_row(amp_numerics *m, int64_t i, const char *name, int gradient, void *data,
                                    amp_dtype dtype, int64_t count) {
    m->table[i].grad = data;
    m->table[i].grad_dtype = dtype;
    m->table[i].count = count;
    m->table[i].live = !gradient;
    m->rows[i].name = name;
    m->rows[i].gradient = gradient;
}

AMPI_PRIVATE amp_result ampi_numerics_fill(amp_numerics *m) {
    const amp_numerics_desc *d = &m->desc;
    int64_t i, g = 0;
    for (i = 0; i < d->n_params; i++) {
        amp_param *p = &d->params[i];
        ampi_numerics_row(m, m->gradients + i, p->name, 0, p->weight.data, p->weight.dtype, amp_tensor_count(&p->weight));
        if (p->grad.data == NULL) continue;
        m->params[g] = p;
        ampi_numerics_row(m, g++, p->name, 1, p->grad.data, p->grad.dtype, amp_tensor_count(&p->grad));
    }
    for (i = 0; i < d->n_ranges; i++) m->names[i] = d->ranges[i].name;
    AMPI_TRY(ampi_copy_texts(m->amp, "amp_numerics_create", m->names, d->n_ranges, &m->text, &m->text_bytes));
    for (i = 0; i < d->n_ranges; i++)
        ampi_numerics_row(m, m->gradients + m->weights + i, m->names[i] ? m->names[i] : "range", 0, d->ranges[i].data,
                          d->ranges[i].dtype, d->ranges[i].count);
    return ampi_send(m->amp, m->on_device, m->table, (size_t)m->n * sizeof *m->table);
}

AMPI_PRIVATE amp_result ampi_numerics_memory(amp_numerics *m) {
    const amp_system *s = ampi_context_system(m->amp);
    const char *f = "amp_numerics_create";
    AMPI_TRY(ampi_alloc(s, f, (void **)&m->table, m->n, sizeof *m->table));
    AMPI_TRY(ampi_alloc(s, f, (void **)&m->found, m->n, sizeof *m->found));
    AMPI_TRY(ampi_alloc(s, f, (void **)&m->params, m->n, sizeof *m->params));
    AMPI_TRY(ampi_alloc(s, f, (void **)&m->rows, m->n, sizeof *m->rows));
    AMPI_TRY(ampi_alloc(s, f, (void **)&m->names, m->n, sizeof *m->names));
    AMPI_TRY(amp_alloc(m->amp, (void **)&m->on_device, m->n * (int64_t)sizeof *m->table));
    return amp_alloc(m->amp, (void **)&m->found_on_device, m->n * (int64_t)sizeof *m->found);
}

AMP_API amp_result amp_numerics_create_v(amp_context *amp, amp_numerics **out, const amp_numerics_desc *desc, uint64_t abi) {
    amp_numerics_desc d;
    amp_numerics *m;
    amp_result r;
    int64_t gradients;
    AMPI_TRY(ampi_check_abi("amp_numerics_create", abi, AMP_ABI(amp_numerics_desc)));
    if (out != NULL) *out = NULL;
    if (amp == NULL || out == NULL || desc == NULL)
        return ampi_fail(AMP_ERR_NULL, "amp_numerics_create", "amp, out or desc is NULL");
    d = *desc;
    if (d.dtype == AMP_DTYPE_DEFAULT) d.dtype = ampi_settings(amp)->dtype == AMP_BF16 ? AMP_BF16 : AMP_F16;
    if (d.interval == 0) d.interval = 100;
    AMPI_TRY(ampi_numerics_check(&d, &gradients));
    AMPI_TRY(ampi_alloc(ampi_context_system(amp), "amp_numerics_create", (void **)&m, 1, sizeof *m));
    m->amp = amp;
    m->desc = d;
    m->gradients = gradients;
    m->weights = d.n_params;
    m->n = gradients + d.n_params + d.n_ranges;
    r = ampi_numerics_memory(m);
    if (r == AMP_OK) r = ampi_numerics_fill(m);
    if (r == AMP_OK) *out = m;
    else amp_numerics_destroy(m);
    return r;
}

AMPI_PRIVATE amp_result ampi_numerics_look(amp_numerics *m) {
    void *dev, *stream;
    const amp_backend *backend = ampi_backend(m->amp, &dev, &stream);
    amp_k_inspect args;
    int64_t i;
    for (i = 0; i < m->gradients; i++) m->table[i].live = m->params[i]->grad_live != 0;
    AMPI_TRY(ampi_send(m->amp, m->on_device, m->table, (size_t)m->gradients * sizeof *m->table));
    memset(&args, 0, sizeof args);
    args.table = m->on_device;
    args.tensors = m->n;
    args.dtype = m->desc.dtype;
    args.out = m->found_on_device;
    AMPI_TRY(backend->inspect(dev, &args, stream));
    return ampi_fetch(m->amp, m->found, m->found_on_device, (size_t)m->n * sizeof *m->found);
}

AMPI_PRIVATE void ampi_numerics_shares(amp_numerics_row *row, const amp_k_tensor *tensor, const amp_k_inspected *k) {
    double values = (double)AMPI_MAX(k->nonzero, (int64_t)1);
    row->largest = k->largest;
    row->count = tensor->live ? tensor->count : 0;
    row->infinite = k->infinite;
    row->nan = k->nan;
    row->underflow = (double)k->underflow / values;
    row->subnormal = (double)k->subnormal / values;
    row->overflow = (double)(k->overflow + k->infinite) / values;
    row->saturation = (double)k->saturated / values;
}

/* ---- The remedy: see amp_remedy */

typedef struct ampi_fitting {
    const amp_numerics_row *over, *under, *bad, *look;      /* the worst gradient of each kind, ... */
    const amp_numerics_row *wide;   /* ... what else overflows, most; any row; NULL: none */
    double largest;                 /* of the gradients, infinite ones counted as twice the format's largest */
    int64_t gradients, misfits, others, wide_ones;          /* gradients there are, those that do not fit; the same of the rest */
    float scale, floor, ceiling, wanted;
} ampi_fitting;

AMPI_PRIVATE double ampi_largest_of(amp_dtype format) {
    return format == AMP_F16 ? 65504.0 : format == AMP_E4M3 ? 448.0 : format == AMP_E5M2 ? 57344.0 : 3.3895313892515355e38;
}

/* The largest power of two at or below a positive normal number. */
AMPI_PRIVATE double ampi_power_below(double x) { return ampi_f64_of_bits(ampi_bits_f64(x) >> 52 << 52); }

AMPI_PRIVATE void ampi_fit_gradient(const amp_numerics *m, const amp_numerics_row *row, ampi_fitting *f) {
    double top = row->infinite > 0 ? 2 * ampi_largest_of(m->desc.dtype) : (double)row->largest;
    if (row->count == 0) return;
    f->gradients++;
    if (row->nan > 0 && f->bad == NULL) f->bad = row;
    if (top > f->largest) f->largest = top;
    if (row->overflow > 0 && (f->over == NULL || row->overflow > f->over->overflow)) f->over = row;
    if (row->underflow > AMP_UNDERFLOW_SHARE && (f->under == NULL || row->underflow > f->under->underflow)) f->under = row;
    f->misfits += row->overflow > 0 || row->nan > 0 || row->underflow > AMP_UNDERFLOW_SHARE;
}

/* What is infinite in fp32's range was not made so by a narrower format. */
AMPI_PRIVATE void ampi_fit_other(const amp_numerics *m, const amp_numerics_row *row, ampi_fitting *f) {
    amp_dtype dtype = m->table[row - m->rows].grad_dtype;
    if (row->count == 0) return;
    f->others++;
    if ((row->nan > 0 || (row->infinite > 0 && dtype != AMP_F16)) && f->look == NULL) f->look = row;
    if (!(row->overflow > 0)) return;
    f->wide_ones++;
    if (f->wide == NULL || row->overflow > f->wide->overflow) f->wide = row;
}

AMPI_PRIVATE amp_result ampi_fit_scale(const amp_numerics *m, ampi_fitting *f) {
    amp_scaler *scaler = ampi_enabled(m->desc.scaler);
    amp_k_scaler state;
    f->scale = f->floor = 1;
    f->ceiling = AMPI_POW2_126;
    if (scaler == NULL) return AMP_OK;
    AMPI_TRY(amp_scaler_get(scaler, &state));
    f->scale = state.scale;
    if (scaler->desc.min_scale > 0) f->floor = scaler->desc.min_scale;
    if (scaler->desc.max_scale > 0 && scaler->desc.max_scale < f->ceiling) f->ceiling = scaler->desc.max_scale;
    return AMP_OK;
}

/* The power of two that leaves two bits above the largest gradient. */
AMPI_PRIVATE float ampi_wanted_scale(const amp_numerics *m, const ampi_fitting *f) {
    double wanted = (double)f->scale * ampi_largest_of(m->desc.dtype) / 4 / f->largest;
    if (!(f->largest > 0)) return f->scale;
    return (float)ampi_power_below(AMPI_MIN(wanted, (double)f->ceiling));
}

AMPI_PRIVATE AMPI_PRINTF(4, 5) void ampi_remedy_is(amp_numerics_report *r, amp_remedy remedy, const amp_numerics_row *worst, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(r->text, sizeof r->text, format, args);
    va_end(args);
    r->remedy = remedy;
    r->worst = worst ? worst->name : NULL;
}

/* `worst` does not fit, and no scale helps: `few` of `all` tensors. */
AMPI_PRIVATE void ampi_remedy_format(amp_numerics *m, const amp_numerics_row *worst, int64_t few, int64_t all) {
    const char *format = amp_dtype_name(m->desc.dtype), *what = worst->overflow > 0 ? "overflow" : "underflow";
    double share = 100 * (worst->overflow > 0 ? worst->overflow : worst->underflow);
    if (4 * few < all || m->desc.dtype == AMP_BF16)
        ampi_remedy_is(&m->report, AMP_REMEDY_LAYER_FP32, worst, "%.3g%% of %s%s %s in %s, as in %lld of %lld tensors, whatever "
                    "the scale: compute such layers in fp32, amp_layer_override(amp, \"%s\", AMP_F32)", share, worst->name,
                    worst->gradient ? "'s gradient" : "", what, format, (long long)few, (long long)all, worst->name);
    else
        ampi_remedy_is(&m->report, AMP_REMEDY_BF16, worst, "%.3g%% of %s%s %s in %s, as in %lld of %lld tensors, whatever the "
                    "scale: bf16 has the range", share, worst->name, worst->gradient ? "'s gradient" : "", what, format,
                    (long long)few, (long long)all);
}

AMPI_PRIVATE void ampi_remedy_scale(amp_numerics *m, const ampi_fitting *f) {
    amp_numerics_report *r = &m->report;
    const char *format = amp_dtype_name(m->desc.dtype);
    r->wanted_scale = f->wanted;
    if (f->over != NULL || f->bad != NULL)
        ampi_remedy_is(r, AMP_REMEDY_LOWER_SCALE, f->over ? f->over : f->bad, "%s's gradient overflows in %s at scale %g and fits "
                    "at %g: lower the scale, amp_scaler_set_scale", (f->over ? f->over : f->bad)->name, format,
                    (double)f->scale, (double)f->wanted);
    else
        ampi_remedy_is(r, AMP_REMEDY_RAISE_SCALE, f->under, "%.3g%% of %s's gradient becomes 0 in %s at scale %g, and %g would still "
                    "leave room: %s", 100 * f->under->underflow, f->under->name, format, (double)f->scale, (double)f->wanted,
                    ampi_enabled(m->desc.scaler) ? "raise the scale, amp_scaler_set_scale" : "train with a loss scaler");
}

AMPI_PRIVATE amp_result ampi_numerics_judge(amp_numerics *m) {
    amp_numerics_report *r = &m->report;
    ampi_fitting f;
    int64_t i;
    int lower, raise;
    memset(&f, 0, sizeof f);
    AMPI_TRY(ampi_fit_scale(m, &f));
    for (i = 0; i < m->gradients; i++) ampi_fit_gradient(m, &m->rows[i], &f);
    for (; i < m->n; i++) ampi_fit_other(m, &m->rows[i], &f);
    f.wanted = ampi_wanted_scale(m, &f);
    if (f.bad != NULL && f.wanted > f.scale / 4) f.wanted = (float)ampi_power_below((double)f.scale / 4);
    lower = f.wanted < f.scale && f.wanted >= f.floor;
    raise = f.wanted > f.scale;
    r->wanted_scale = 0;
    if (f.look != NULL || ((f.bad != NULL || (f.over != NULL && f.over->infinite > 0)) && (!lower || m->desc.dtype == AMP_BF16))) {
        const amp_numerics_row *worst = f.look ? f.look : f.bad ? f.bad : f.over;
        ampi_remedy_is(r, AMP_REMEDY_LOOK, worst, "%s%s has %lld NaN and %lld infinities that no smaller scale or wider format "
                    "prevents: look at the data, the learning rate, divisions and logarithms", worst->name,
                    worst->gradient ? "'s gradient" : "", (long long)worst->nan, (long long)worst->infinite);
    } else if ((f.over != NULL || f.bad != NULL) && f.under == NULL && lower) ampi_remedy_scale(m, &f);
    else if (f.over == NULL && f.under != NULL && raise) ampi_remedy_scale(m, &f);
    else if (f.over != NULL || f.under != NULL) ampi_remedy_format(m, f.over ? f.over : f.under, f.misfits, f.gradients);
    else if (f.wide != NULL) ampi_remedy_format(m, f.wide, f.wide_ones, f.others);
    else ampi_remedy_is(r, AMP_REMEDY_NONE, NULL, "all tensors fit %s", amp_dtype_name(m->desc.dtype));
    if (r->remedy != AMP_REMEDY_LOWER_SCALE && r->remedy != AMP_REMEDY_RAISE_SCALE) r->wanted_scale = 0;
    return AMP_OK;
}

AMP_API amp_result amp_numerics_step(amp_numerics *numerics, amp_numerics_report *out) {
    amp_numerics *m = numerics;
    int64_t i;
    if (m == NULL || out == NULL) return ampi_fail(AMP_ERR_NULL, "amp_numerics_step", "numerics or out is NULL");
    AMPI_TRY(ampi_may_wait(m->amp));
    m->report.due = m->calls % m->desc.interval == 0;
    if (m->report.due) {
        AMPI_TRY(ampi_numerics_look(m));
        m->report.first_bad = NULL;
        for (i = 0; i < m->n; i++) {
            ampi_numerics_shares(&m->rows[i], &m->table[i], &m->found[i]);
            if (m->rows[i].nan + m->rows[i].infinite > 0 && m->report.first_bad == NULL) m->report.first_bad = m->rows[i].name;
        }
        m->report.rows = m->rows;
        m->report.n_rows = m->n;
        AMPI_TRY(ampi_numerics_judge(m));
    }
    m->report.step = ++m->calls;
    *out = m->report;
    return AMP_OK;
}

AMP_API size_t amp_numerics_text(const amp_numerics_report *report, char *text, size_t size) {
    size_t at = 0;
    int64_t i;
    if (size > 0) text[0] = 0;
    if (report == NULL) return 0;
    at = ampi_append(text, size, at, "step %lld: %s\n%-36s %-8s %10s %9s %9s %9s %9s %8s %8s\n", (long long)report->step,
                     report->text, "tensor", "", "largest", "underflow", "subnormal", "last bin.", "overflow", "infinite", "NaN");
    for (i = 0; i < report->n_rows; i++) {
        const amp_numerics_row *r = &report->rows[i];
        at = ampi_append(text, size, at, "%-36s %-8s %10.3g %8.2f%% %8.2f%% %8.2f%% %8.2f%% %8lld %8lld\n", r->name,
                         r->gradient ? "gradient" : "", (double)r->largest, 100 * r->underflow, 100 * r->subnormal,
                         100 * r->saturation, 100 * r->overflow, (long long)r->infinite, (long long)r->nan);
    }
    return at;
}

/* ==== 13 >>care: implementation ===================================================================== */

/* ---- Verify */

#define AMPI_VERIFY_DRAWS 2         /* random changes of each size */
#define AMPI_VERIFY_STAGE 65536     /* elements that are looked at at a time */

typedef struct ampi_verify_tensor {
    const char *name;
    void *data;
    amp_dtype dtype;
    int32_t gradient, bad;          /* bad 1: the last run left something infinite or NaN */
    int64_t count, at;              /* at: where its bytes begin in the reference */
    double norm;                    /* what errors are relative to */
    double difference;              /* sum of squares, of the last run against the reference */
    double noise, noise32;          /* the same, summed over draws: from changes of the candidate's, of fp32's roundoff */
} ampi_verify_tensor;

typedef struct ampi_verifier {
    amp_context *amp;
    const amp_verify_desc *desc;
    ampi_keep *keep;
    ampi_verify_tensor *tensors; int64_t n, n_room;
    char *reference; int64_t bytes;
    char *stage;                    /* 8 bytes for each element */
    float scale, own_scale;         /* the loss scale of all runs, 0: the scaler's own; and that */
    double allowance, seconds;
    int code;                       /* what the step returned last */
    char why[160];                  /* and the error text then, "" without one */
} ampi_verifier;

/* Half the distance from 1 to the next number. */
AMPI_PRIVATE double ampi_roundoff(amp_dtype dtype) {
    return dtype == AMP_BF16 ? 0.00390625 : dtype == AMP_F16 || dtype == AMP_TF32 ? 0.00048828125 : 5.9604644775390625e-8;
}

/* ---- Changing weights by random amounts up to one roundoff */

/* x (1 + u xi), xi uniform from -1 to 1; below the format's normal numbers up to half its spacing. */
AMPI_PRIVATE void ampi_perturb_f32(float *x, int64_t n, double u, double tiny, const uint32_t *random) {
    int64_t i;
    for (i = 0; i < n; i++) {
        double w = (double)x[i], most = AMPI_MAX(u * (w < 0 ? -w : w), tiny);
        if ((ampi_bits_f32(x[i]) & 0x7fffffffu) != 0) x[i] = (float)(w + most * (double)(int32_t)random[i] * 4.656612873077393e-10);
    }
}

/* 16-bit weights cannot move by less than their own spacing: they move by that, as seldom as gives the same variance. */
AMPI_PRIVATE void ampi_perturb_16bit(uint16_t *x, amp_dtype dtype, int64_t n, double u, const uint32_t *random) {
    int64_t i;
    for (i = 0; i < n; i++) {
        uint16_t magnitude = x[i] & 0x7fff, next = (uint16_t)(magnitude + 1), infinite = dtype == AMP_F16 ? 0x7c00 : 0x7f80;
        double w = dtype == AMP_F16 ? (double)amp_f32_from_f16(magnitude) : (double)amp_f32_from_bf16(magnitude);
        double step = dtype == AMP_F16 ? (double)amp_f32_from_f16(next) : (double)amp_f32_from_bf16(next), share;
        if (magnitude == 0 || next >= infinite) continue;
        share = u * w / (step - w);
        if ((double)(random[i] >> 1) * 4.656612873077393e-10 < share * share / 3)
            x[i] = (uint16_t)(x[i] + (random[i] & 1 ? 1 : -1));
    }
}

/* All weights from their kept copies, changed; fp16's subnormals as the candidate's roundoff calls for. */
AMPI_PRIVATE amp_result ampi_perturb(ampi_verifier *v, double u, amp_dtype dtype, uint64_t draw) {
    const ampi_numbers_vec *vec = AMPI_PICK(ampi_numbers_kernels, ampi_cpu_best_path());
    uint32_t random[AMPI_MULTI_BLOCK];
    int64_t i, k, first, m;
    for (i = 0; i < v->keep->n_params; i++) {
        amp_param *p = v->keep->params[i];
        int64_t count = amp_tensor_count(&p->weight), size = (int64_t)amp_dtype_size(p->weight.dtype), n;
        const char *kept = count > 0 ? (const char *)ampi_kept(v->keep, p->weight.data) : NULL;
        uint64_t seed = ampi_row_seed(0x7665726966790000u, (int64_t)draw, i);
        for (first = 0; first < count; first += n) {
            n = AMPI_MIN(count - first, (int64_t)AMPI_VERIFY_STAGE);
            memcpy(v->stage, kept + first * size, (size_t)(n * size));
            for (k = 0; k < n; k += m) {
                m = AMPI_MIN(n - k, AMPI_MULTI_BLOCK);
                vec->random(random, m, seed, (uint64_t)(first + k));
                if (p->weight.dtype == AMP_F32) ampi_perturb_f32((float *)(void *)v->stage + k, m, u, dtype == AMP_F16 ? 2.98023223876953125e-8 : 0, random);
                else ampi_perturb_16bit((uint16_t *)(void *)v->stage + k, p->weight.dtype, m, u, random);
            }
            AMPI_TRY(ampi_send(v->amp, (char *)p->weight.data + first * size, v->stage, (size_t)(n * size)));
        }
    }
    return AMP_OK;
}

/* ---- Runs */

/* Everything as it was kept, gradients zero, and the context in `dtype`; reference 1: everywhere. */
AMPI_PRIVATE amp_result ampi_verify_prepare(ampi_verifier *v, amp_dtype dtype, int reference) {
    ampi_precision p = v->keep->precision;
    int64_t i;
    AMPI_TRY(ampi_keep_restore(v->keep));
    for (i = 0; i < v->keep->n_params; i++) {
        amp_param *param = v->keep->params[i];
        if (param->grad.data == NULL) continue;
        param->grad_live = 0;
        AMPI_TRY(amp_fill(v->amp, param->grad.data, 0, amp_tensor_count(&param->grad) * (int64_t)amp_dtype_size(param->grad.dtype)));
    }
    if (v->scale > 0) AMPI_TRY(amp_scaler_set_scale(v->desc->scaler, v->scale));
    p.disable = 0;
    if (reference) {
        p.allow_tf32 = 0;
        p.fallback = AMP_DTYPE_DEFAULT;
        p.n_layers = 0;
    }
    p.dtype = p.choice.dtype = dtype;
    p.choice.scaler = dtype == AMP_F16;
    ampi_precision_set(v->amp, &p);
    return AMP_OK;
}

/* One run of the host's step.  Regions it leaves open are closed. */
AMPI_PRIVATE void ampi_verify_step(ampi_verifier *v) {
    const amp_system *s = ampi_context_system(v->amp);
    int depth = ampi_regions_hide(v->amp);
    int64_t begin = s->clock_ns(s->user);
    ampi_error_text[0] = 0;
    v->code = v->desc->step(v->desc->user, v->amp);
    if (v->code == 0) v->code = (int)amp_sync(v->amp);
    v->seconds = 1e-9 * (double)(s->clock_ns(s->user) - begin);
    snprintf(v->why, sizeof v->why, "%.150s", v->code != 0 ? ampi_error_text : "");
    ampi_regions_close(depth);
}

AMPI_PRIVATE double ampi_square(double x) { return x * x; }

/* Adds n elements to a tensor's difference; those that are not finite are marked and left out. */
AMPI_PRIVATE void ampi_verify_compare(ampi_verify_tensor *t, const void *x, const void *reference, int64_t n) {
    float a_room[AMPI_MULTI_BLOCK], b_room[AMPI_MULTI_BLOCK];
    amp_cpu_path path = ampi_cpu_best_path();
    double sum = 0, a64, b64;
    int64_t i, k, m;
    if (t->dtype == AMP_F64) {
        for (i = 0; i < n; i++) {
            memcpy(&a64, (const char *)x + 8 * i, 8);
            memcpy(&b64, (const char *)reference + 8 * i, 8);
            if (amp_is_finite_f64(&a64)) sum += ampi_square(a64 - b64);
            else t->bad = 1;
        }
    } else for (k = 0; k < n; k += m) {
        const float *a, *b;
        m = AMPI_MIN(n - k, AMPI_MULTI_BLOCK);
        a = ampi_row_in(ampi_at(x, t->dtype, k), t->dtype, m, a_room, path);
        b = ampi_row_in(ampi_at(reference, t->dtype, k), t->dtype, m, b_room, path);
        for (i = 0; i < m; i++)
            if (amp_is_finite_f32(&a[i])) sum += ampi_square((double)a[i] - (double)b[i]);
            else t->bad = 1;
    }
    t->difference += sum;
}

/* Holds what the last run left against the reference.  Returns the first tensor that is not finite, or NULL. */
AMPI_PRIVATE amp_result ampi_verify_look(ampi_verifier *v, const ampi_verify_tensor **bad) {
    int64_t i, first, n;
    *bad = NULL;
    for (i = 0; i < v->n; i++) {
        ampi_verify_tensor *t = &v->tensors[i];
        int64_t size = (int64_t)amp_dtype_size(t->dtype);
        t->difference = 0;
        t->bad = 0;
        for (first = 0; first < t->count; first += n) {
            n = AMPI_MIN(t->count - first, (int64_t)AMPI_VERIFY_STAGE);
            AMPI_TRY(ampi_fetch(v->amp, v->stage, (char *)t->data + first * size, (size_t)(n * size)));
            ampi_verify_compare(t, v->stage, v->reference + t->at + first * size, n);
        }
        if (t->bad && *bad == NULL) *bad = t;
    }
    return AMP_OK;
}

/* The reference itself, and with it the norms: a gradient's is its layer's, or where that is 0 that of all gradients. */
AMPI_PRIVATE int ampi_same_layer(const char *a, const char *b) {
    const char *end = strrchr(a, '.');
    size_t n = end ? (size_t)(end - a) + 1 : strlen(a) + 1;
    return strncmp(a, b, n) == 0 && (end == NULL || strrchr(b, '.') == b + n - 1);
}

AMPI_PRIVATE void ampi_verify_norms(ampi_verifier *v) {
    double all = 0, layer;
    int64_t i, j;
    for (i = 0; i < v->n; i++) if (v->tensors[i].gradient) all += v->tensors[i].difference;
    for (i = 0; i < v->n; i++) {
        ampi_verify_tensor *t = &v->tensors[i];
        layer = t->difference;
        for (j = 0; t->gradient && j < v->n; j++)
            if (j != i && v->tensors[j].gradient && ampi_same_layer(t->name, v->tensors[j].name)) layer += v->tensors[j].difference;
        if (!(layer > 0) && t->gradient) layer = all;
        t->norm = layer > 0 ? ampi_root(layer) : 1;
    }
}

/* reference starts as zeros, so that the first comparison gives norms. */
AMPI_PRIVATE amp_result ampi_verify_reference(ampi_verifier *v) {
    const ampi_verify_tensor *bad;
    int64_t i;
    AMPI_TRY(ampi_verify_prepare(v, AMP_F32, 1));
    ampi_verify_step(v);
    if (v->code != 0) return ampi_fail(AMP_ERR_RANGE, "amp_verify", "the step fails in fp32 already, with %d: %s", v->code, v->why);
    AMPI_TRY(ampi_verify_look(v, &bad));
    if (bad != NULL) return ampi_fail(AMP_ERR_RANGE, "amp_verify", "%s%s is infinite or NaN in fp32 already", bad->name, bad->gradient ? "'s gradient" : "");
    ampi_verify_norms(v);
    for (i = 0; i < v->n; i++) {
        const ampi_verify_tensor *t = &v->tensors[i];
        AMPI_TRY(ampi_fetch(v->amp, v->reference + t->at, t->data, (size_t)t->count * amp_dtype_size(t->dtype)));
    }
    return AMP_OK;
}

/* What random changes of the weights by up to u make in fp32. */
AMPI_PRIVATE amp_result ampi_verify_noise(ampi_verifier *v, double u, amp_dtype dtype) {
    const ampi_verify_tensor *bad;
    int64_t i;
    int draw;
    for (i = 0; i < v->n; i++) *(dtype == AMP_F32 ? &v->tensors[i].noise32 : &v->tensors[i].noise) = 0;
    for (draw = 0; draw < AMPI_VERIFY_DRAWS; draw++) {
        AMPI_TRY(ampi_verify_prepare(v, AMP_F32, 1));
        AMPI_TRY(ampi_perturb(v, u, dtype, (uint64_t)draw));
        ampi_verify_step(v);
        if (v->code != 0) return ampi_fail(AMP_ERR_RANGE, "amp_verify", "the step fails in fp32 once weights change by a rounding, with %d: %s", v->code, v->why);
        AMPI_TRY(ampi_verify_look(v, &bad));
        if (bad != NULL) return ampi_fail(AMP_ERR_RANGE, "amp_verify", "%s is infinite or NaN in fp32 once weights change by a rounding", bad->name);
        for (i = 0; i < v->n; i++) *(dtype == AMP_F32 ? &v->tensors[i].noise32 : &v->tensors[i].noise) += v->tensors[i].difference;
    }
    return AMP_OK;
}

/* The largest loss scale from the scaler's own down at which fp16's gradients are finite (without fp16: fp32's, which may be
   stored in fp16): what the scaler would come to. */
AMPI_PRIVATE amp_result ampi_verify_scale(ampi_verifier *v) {
    amp_scaler *scaler = ampi_enabled(v->desc->scaler);
    const ampi_verify_tensor *bad;
    float scale, next;
    int64_t i;
    int wanted = 0;
    for (i = 0; i < v->desc->n_dtypes; i++) wanted |= v->desc->dtypes[i] == AMP_F16;
    if (scaler == NULL) return AMP_OK;
    v->own_scale = scale = amp_scaler_scale(scaler);
    for (;; scale = next) {
        v->scale = scale < v->own_scale ? scale : 0;
        AMPI_TRY(ampi_verify_prepare(v, wanted ? AMP_F16 : AMP_F32, 0));
        ampi_verify_step(v);
        if (v->code != 0) return AMP_OK;
        AMPI_TRY(ampi_verify_look(v, &bad));
        if (bad == NULL) return AMP_OK;
        next = ampi_scale_shrunk(&scaler->rule, scale);
        if (!bad->gradient || scaler->rule.frozen || !(next < scale) || !ampi_is_usable(next)) break;
    }
    v->scale = 0;
    return AMP_OK;
}

/* ---- Verdicts */

AMPI_PRIVATE double ampi_over_bound(double error, double bound) { return bound > 0 ? error / bound : -1; }

AMPI_PRIVATE void ampi_verify_advise(const ampi_verifier *v, amp_verify_row *row) {
    const char *name = amp_dtype_name(row->dtype);
    int fp16 = row->dtype == AMP_F16, scaled = ampi_enabled(v->desc->scaler) != NULL;
    int gradient = ampi_over_bound(row->gradient_error, row->gradient_bound) > ampi_over_bound(row->output_error, row->output_bound);
    const char *worst = gradient ? row->worst_gradient : row->worst_output;
    char *to = row->advice;
    if (row->verdict == AMP_VERDICT_FAILED && v->seconds < 0) snprintf(to, sizeof row->advice, "%s", v->why);
    else if (row->verdict == AMP_VERDICT_FAILED) snprintf(to, sizeof row->advice, "the step returned %d. %.120s", v->code, v->why);
    else if (row->verdict == AMP_VERDICT_NONFINITE)
        snprintf(to, sizeof row->advice, fp16 ? "%.50s overflows: train in bf16, or give its layer fp32 by amp_layer_override"
                 : "%.50s: %s has fp32's range, so look for what the operator does in low precision", row->first_bad, name);
    else if (row->verdict == AMP_VERDICT_INACCURATE)
        snprintf(to, sizeof row->advice, fp16 && gradient && !scaled ? "%.50s loses what underflows: train with a loss scaler"
                 : "%.50s: give its layer fp32 by amp_layer_override, or look at its operator in %s", worst, name);
    else if (fp16 && !scaled) snprintf(to, sizeof row->advice, "good for this batch; gradients may shrink: train with a loss scaler");
    else if (fp16 && v->scale > 0)
        snprintf(to, sizeof row->advice, "good, from loss scale %g on, which the scaler comes to: start there", (double)v->scale);
    else snprintf(to, sizeof row->advice, "good");
}

/* Errors and bounds of the worst output and the worst gradient. */
AMPI_PRIVATE void ampi_verify_errors(const ampi_verifier *v, amp_verify_row *row) {
    double u = ampi_roundoff(row->dtype), u32 = ampi_roundoff(AMP_F32), worst[2] = {-1, -1};
    int64_t i;
    for (i = 0; i < v->n; i++) {
        const ampi_verify_tensor *t = &v->tensors[i];
        double noise = ampi_root(AMPI_MAX(t->noise, t->noise32 * ampi_square(u / u32 / 4)) / (double)AMPI_VERIFY_DRAWS) / t->norm;
        double error = ampi_root(t->difference) / t->norm, bound = v->allowance * AMPI_MAX(noise, u);
        if (t->bad || !(ampi_over_bound(error, bound) > worst[t->gradient])) continue;
        worst[t->gradient] = ampi_over_bound(error, bound);
        *(t->gradient ? &row->gradient_error : &row->output_error) = error;
        *(t->gradient ? &row->gradient_bound : &row->output_bound) = bound;
        snprintf(t->gradient ? row->worst_gradient : row->worst_output, sizeof row->worst_output, "%s", t->name);
        if (error > bound) row->verdict = AMP_VERDICT_INACCURATE;
    }
}

AMPI_PRIVATE amp_result ampi_verify_candidate(ampi_verifier *v, amp_verify_row *row) {
    const ampi_verify_tensor *bad = NULL;
    amp_machine machine;
    amp_choice choice;
    row->verdict = AMP_VERDICT_PASS;
    AMPI_TRY(amp_query_machine(v->amp, &machine));
    v->seconds = -1;                /* not run */
    v->code = (int)amp_choose(&machine, row->dtype, 0, &choice);
    snprintf(v->why, sizeof v->why, "%.150s", v->code != 0 ? ampi_error_text : "");
    if (v->code == 0) {
        AMPI_TRY(ampi_verify_noise(v, ampi_roundoff(row->dtype), row->dtype));
        AMPI_TRY(ampi_verify_prepare(v, row->dtype, 0));
        ampi_verify_step(v);
        row->seconds = v->seconds;
    }
    if (v->code != 0) row->verdict = AMP_VERDICT_FAILED;
    else {
        AMPI_TRY(ampi_verify_look(v, &bad));
        ampi_verify_errors(v, row);
        if (bad != NULL) row->verdict = AMP_VERDICT_NONFINITE;
        if (bad != NULL) snprintf(row->first_bad, sizeof row->first_bad, "%s", bad->name);
    }
    ampi_verify_advise(v, row);
    return AMP_OK;
}

/* ---- The call */

AMPI_PRIVATE amp_result ampi_verify_check(const amp_context *amp, const amp_verify_desc *d) {
    const char *f = "amp_verify";
    int64_t i, ignored;
    if (d->step == NULL) return ampi_fail(AMP_ERR_NULL, f, ".step is NULL");
    if (ampi_world(amp) > 1) return ampi_fail(AMP_ERR_CONFLICT, f, "the context has %d ranks, which may not all run the step equally often: verify on one", ampi_world(amp));
    if (d->n_params < 0 || d->n_outputs < 0 || d->n_dtypes < 0 || d->n_dtypes > AMP_VERIFY_ROWS)
        return ampi_fail(AMP_ERR_RANGE, f, ".n_params = %lld, .n_outputs = %lld or .n_dtypes = %lld, must be 0 or more, the last at most %d",
                         (long long)d->n_params, (long long)d->n_outputs, (long long)d->n_dtypes, AMP_VERIFY_ROWS);
    if ((d->params == NULL && d->n_params > 0) || (d->outputs == NULL && d->n_outputs > 0) || (d->dtypes == NULL && d->n_dtypes > 0))
        return ampi_fail(AMP_ERR_NULL, f, ".params, .outputs or .dtypes is NULL");
    if (d->n_params + d->n_outputs == 0) return ampi_fail(AMP_ERR_NULL, f, "nothing to compare: give .params or .outputs");
    if (!amp_is_finite_f64(&d->allowance) || !(d->allowance >= 0))
        return ampi_fail(AMP_ERR_RANGE, f, ".allowance = %g, must be above 0 and finite, or 0 (8)", d->allowance);
    for (i = 0; i < d->n_dtypes; i++)
        if (d->dtypes[i] != AMP_F32 && d->dtypes[i] != AMP_TF32 && d->dtypes[i] != AMP_F16 && d->dtypes[i] != AMP_BF16)
            return ampi_fail(AMP_ERR_DTYPE, f, ".dtypes[%lld] = %s, must be fp32, tf32, fp16 or bf16", (long long)i, amp_dtype_name(d->dtypes[i]));
    if (ampi_settings(amp)->level == AMP_LEVEL_O0)
        return ampi_fail(AMP_ERR_CONFLICT, f, "level O0 computes in fp32: open the context at another level to see other precisions");
    AMPI_TRY(ampi_check_ranges(f, d->outputs, d->n_outputs));
    AMPI_TRY(ampi_check_weights_of(f, d->params, d->n_params));
    return ampi_check_params(f, d->params, d->n_params, &ignored);
}

/* Without a list: what the device has. */
AMPI_PRIVATE void ampi_verify_dtypes(const amp_context *amp, amp_verify_desc *d, amp_dtype dtypes[3]) {
    static const amp_dtype all[3] = {AMP_TF32, AMP_F16, AMP_BF16};
    amp_machine machine;
    amp_choice choice;
    int i;
    if (d->n_dtypes > 0 || amp_query_machine(amp, &machine) != AMP_OK) return;
    for (i = 0; i < 3; i++)
        if (amp_choose(&machine, all[i], 0, &choice) == AMP_OK) dtypes[d->n_dtypes++] = all[i];
    d->dtypes = dtypes;
}

AMPI_PRIVATE void ampi_verify_add(ampi_verifier *v, const char *name, int gradient, void *data, amp_dtype dtype, int64_t count) {
    ampi_verify_tensor *t = &v->tensors[v->n++];
    t->name = name ? name : "output";
    t->gradient = gradient;
    t->data = data;
    t->dtype = dtype;
    t->count = count;
    t->at = v->bytes;
    v->bytes += (count * (int64_t)amp_dtype_size(dtype) + 7) / 8 * 8;
}

AMPI_PRIVATE amp_result ampi_verify_memory(ampi_verifier *v) {
    const amp_system *s = ampi_context_system(v->amp);
    const amp_verify_desc *d = v->desc;
    int64_t i;
    v->n_room = d->n_params + d->n_outputs;
    AMPI_TRY(ampi_alloc(s, "amp_verify", (void **)&v->tensors, v->n_room, sizeof *v->tensors));
    for (i = 0; i < d->n_outputs; i++)
        ampi_verify_add(v, d->outputs[i].name, 0, d->outputs[i].data, d->outputs[i].dtype, d->outputs[i].count);
    for (i = 0; i < d->n_params; i++) {
        const amp_tensor *g = &d->params[i].grad;
        if (g->data != NULL) ampi_verify_add(v, d->params[i].name, 1, g->data, g->dtype, amp_tensor_count(g));
    }
    if (v->bytes == 0) return ampi_fail(AMP_ERR_NULL, "amp_verify", "nothing to compare: no parameter has a gradient, and there are no outputs");
    AMPI_TRY(ampi_alloc(s, "amp_verify", (void **)&v->reference, v->bytes, 1));
    AMPI_TRY(ampi_alloc(s, "amp_verify", (void **)&v->stage, AMPI_VERIFY_STAGE, 8));
    return ampi_keep_create(v->amp, "amp_verify", d->params, d->n_params, d->optimizer, d->scaler, &v->keep);
}

AMPI_PRIVATE amp_result ampi_verify_run(ampi_verifier *v, amp_verify_report *report) {
    int64_t i;
    AMPI_TRY(ampi_verify_scale(v));
    AMPI_TRY(ampi_verify_reference(v));
    AMPI_TRY(ampi_verify_noise(v, ampi_roundoff(AMP_F32), AMP_F32));
    for (i = 0; i < v->desc->n_dtypes; i++) {
        report->rows[i].dtype = v->desc->dtypes[i];
        AMPI_TRY(ampi_verify_candidate(v, &report->rows[i]));
    }
    report->n_rows = v->desc->n_dtypes;
    return AMP_OK;
}

AMP_API amp_result amp_verify_v(amp_context *amp, const amp_verify_desc *desc, amp_verify_report *out, uint64_t abi) {
    amp_verify_desc d;
    amp_verify_report report;
    amp_dtype dtypes[3];
    ampi_verifier v;
    amp_result r, restored = AMP_OK;
    AMPI_TRY(ampi_check_abi("amp_verify", abi, AMP_ABI(amp_verify_desc)));
    if (amp == NULL || desc == NULL || out == NULL) return ampi_fail(AMP_ERR_NULL, "amp_verify", "amp, desc or out is NULL");
    AMPI_TRY(ampi_verify_check(amp, desc));
    d = *desc;
    ampi_verify_dtypes(amp, &d, dtypes);
    memset(&v, 0, sizeof v);
    memset(&report, 0, sizeof report);
    v.amp = amp;
    v.desc = &d;
    v.allowance = d.allowance > 0 ? d.allowance : 8;
    r = ampi_verify_memory(&v);
    if (r == AMP_OK) r = ampi_verify_run(&v, &report);
    if (v.keep != NULL) restored = ampi_keep_restore(v.keep);
    ampi_keep_destroy(v.keep);
    ampi_free(ampi_context_system(amp), v.stage, AMPI_VERIFY_STAGE, 8);
    ampi_free(ampi_context_system(amp), v.reference, v.bytes, 1);
    ampi_free(ampi_context_system(amp), v.tensors, v.n_room, sizeof *v.tensors);
    if (r == AMP_OK) r = restored;
    if (r == AMP_OK) *out = report;
    return r;
}

AMPI_PRIVATE const char *ampi_verdict_word(amp_verdict verdict) {
    return verdict == AMP_VERDICT_PASS ? "PASS" : verdict == AMP_VERDICT_INACCURATE ? "INACCURATE"
           : verdict == AMP_VERDICT_NONFINITE ? "NONFINITE" : "FAILED";
}

AMP_API size_t amp_verify_text(const amp_verify_report *report, char *text, size_t size) {
    size_t at = 0;
    int64_t i;
    if (size > 0) text[0] = 0;
    if (report == NULL) return 0;
    at = ampi_append(text, size, at, "%-6s%-12s%10s%10s  %-24s%10s%10s  %-24s%10s  %s\n", "", "verdict", "output", "bound",
                     "worst", "gradient", "bound", "worst", "seconds", "advice");
    for (i = 0; i < report->n_rows; i++) {
        const amp_verify_row *r = &report->rows[i];
        at = ampi_append(text, size, at, "%-6s%-12s%10.2g%10.2g  %-24s%10.2g%10.2g  %-24s%10.3g  %s\n", amp_dtype_name(r->dtype),
                         ampi_verdict_word(r->verdict), r->output_error, r->output_bound, r->worst_output, r->gradient_error,
                         r->gradient_bound, r->worst_gradient, r->seconds, r->advice);
    }
    return at;
}

AMPI_PRIVATE const char *ampi_place_word(amp_place place) {
    switch (place) {
        case AMP_PLACE_HOST: return "pageable memory of the host";
        case AMP_PLACE_PINNED: return "pinned memory of the host";
        case AMP_PLACE_DEVICE: return "memory of this device";
        case AMP_PLACE_OTHER_DEVICE: return "memory of another device";
        case AMP_PLACE_MANAGED: return "managed memory";
        default: return "memory that nobody knows";
    }
}

AMP_API amp_result amp_verify_placement(amp_context *amp, const amp_range *ranges, int64_t n) {
    const char *f = "amp_verify_placement";
    const amp_backend *backend;
    void *dev, *stream;
    int64_t i;
    if (amp == NULL || (ranges == NULL && n > 0)) return ampi_fail(AMP_ERR_NULL, f, "amp or ranges is NULL");
    if (n < 0) return ampi_fail(AMP_ERR_RANGE, f, "n = %lld, must be 0 or more", (long long)n);
    backend = ampi_backend(amp, &dev, &stream);
    for (i = 0; i < n; i++) {
        const char *name = ranges[i].name ? ranges[i].name : "range";
        amp_place place;
        if (ranges[i].count == 0) continue;
        if (ranges[i].data == NULL || ranges[i].count < 0)
            return ampi_fail(AMP_ERR_SHAPE, f, "%s, number %lld, has no data or a negative count", name, (long long)i);
        AMPI_TRY(backend->place(dev, ranges[i].data, &place));
        if (place == AMP_PLACE_UNKNOWN || place == AMP_PLACE_OTHER_DEVICE || (place == AMP_PLACE_HOST && !backend->host_visible))
            return ampi_fail(AMP_ERR_DEVICE, f, "%s, number %lld, lies in %s, where kernels of this context cannot read it: take "
                             "memory from amp_alloc, and amp_copy it there", name, (long long)i, ampi_place_word(place));
        if (place == AMP_PLACE_PINNED && !backend->host_visible)
            ampi_log(amp, AMP_LOG_WARNING, 1201, "%s lies in pinned memory of the host: kernels read it over the bus", name);
    }
    return AMP_OK;
}

/* ---- Gradient check.  The loss is L = sum of w y over all outputs, in fp64; w are numbers that every dtype holds. */

#define AMPI_GRADCHECK_DRAWS 8
#define AMPI_GRADCHECK_SIGMAS 8

typedef struct ampi_gradchecker {
    amp_context *amp;
    const amp_gradcheck_desc *desc;
    ampi_precision before, within;
    int64_t *begin;                 /* of each input in the arrays below; begin[n_inputs]: their size */
    float *x, *grad, *work;         /* inputs, gradients there, and room for one input or gradient */
    double *changes;                /* [input, direction]: sums of squares, see ampi_gradcheck_noise */
    float *stage;                   /* for AMPI_VERIFY_STAGE outputs */
    int32_t directions, ready;      /* ready 1: x holds the inputs */
    double u;                       /* roundoff of what is computed or stored in */
    double loss, squares, noise;    /* L, the sum of (w y)^2, and what of L is rounding: a standard deviation */
} ampi_gradchecker;

/* 1/4 to 1 in quarters, of either sign. */
AMPI_PRIVATE double ampi_gradcheck_weight(const ampi_gradchecker *c, int64_t output, int64_t i) {
    uint32_t word = amp_random_u32(ampi_row_seed(c->desc->seed, -1, output), (uint64_t)i);
    return (double)(int32_t)((word >> 8) % 4 + 1) * (word & 1 ? 0.25 : -0.25);
}

AMPI_PRIVATE uint64_t ampi_direction_seed(const ampi_gradchecker *c, int64_t input, int32_t direction) {
    return ampi_row_seed(c->desc->seed, input, direction);
}
AMPI_PRIVATE double ampi_direction(uint64_t seed, int64_t i) { return amp_random_u32(seed, (uint64_t)i) & 1 ? 1.0 : -1.0; }

/* ---- Runs */

AMPI_PRIVATE int64_t ampi_gradcheck_count(const ampi_gradchecker *c, int64_t input) { return c->begin[input + 1] - c->begin[input]; }

AMPI_PRIVATE const char *ampi_input_name(const ampi_gradchecker *c, int64_t input) {
    const char *name = c->desc->inputs[input].name;
    return name != NULL && name[0] != 0 ? name : "input";
}

AMPI_PRIVATE amp_result ampi_gradcheck_put(ampi_gradchecker *c, int64_t input, const float *x) {
    int64_t n = ampi_gradcheck_count(c, input);
    return n > 0 ? ampi_send(c->amp, c->desc->inputs[input].data, x, (size_t)n * 4) : AMP_OK;
}

AMPI_PRIVATE amp_result ampi_gradcheck_call(ampi_gradchecker *c, amp_step_function call, const char *name) {
    char why[200];
    int code;
    ampi_error_text[0] = 0;
    code = call(c->desc->user, c->amp);
    if (code == 0) code = (int)amp_sync(c->amp);
    if (code == 0) return AMP_OK;
    snprintf(why, sizeof why, "%.180s", ampi_error_text);
    return ampi_fail((amp_result)code, "amp_gradcheck", ".%s returned %d. %s", name, code, why);
}

AMPI_PRIVATE amp_result ampi_gradcheck_add_output(ampi_gradchecker *c, int64_t output) {
    const amp_range *y = &c->desc->outputs[output];
    float room[AMPI_MULTI_BLOCK];
    int64_t first, n, k, m, i;
    for (first = 0; first < y->count; first += n) {
        n = AMPI_MIN(y->count - first, (int64_t)AMPI_VERIFY_STAGE);
        AMPI_TRY(ampi_fetch(c->amp, c->stage, ampi_at(y->data, y->dtype, first), (size_t)n * amp_dtype_size(y->dtype)));
        for (k = 0; k < n; k += m) {
            const float *row;
            m = AMPI_MIN(n - k, AMPI_MULTI_BLOCK);
            row = ampi_row_in(ampi_at(c->stage, y->dtype, k), y->dtype, m, room, ampi_cpu_best_path());
            for (i = 0; i < m; i++) {
                double wy = ampi_gradcheck_weight(c, output, first + k + i) * (double)row[i];
                if (!amp_is_finite_f32(&row[i]))
                    return ampi_fail(AMP_ERR_RANGE, "amp_gradcheck", "element %lld of output %s is infinite or NaN",
                                     (long long)(first + k + i), y->name ? y->name : "?");
                c->loss += wy;
                c->squares += wy * wy;
            }
        }
    }
    return AMP_OK;
}

/* The loss at what the inputs hold, with the same random numbers and no stale casts each time. */
AMPI_PRIVATE amp_result ampi_gradcheck_forward(ampi_gradchecker *c, double *loss) {
    int depth;
    amp_result r;
    int64_t i;
    ampi_precision_set(c->amp, &c->within);
    depth = ampi_regions_hide(c->amp);
    r = amp_autocast_begin(c->amp, NULL);
    if (r == AMP_OK) r = ampi_gradcheck_call(c, c->desc->forward, "forward");
    ampi_regions_close(depth);
    AMPI_TRY(r);
    c->loss = c->squares = 0;
    for (i = 0; i < c->desc->n_outputs; i++) AMPI_TRY(ampi_gradcheck_add_output(c, i));
    *loss = c->loss;
    return AMP_OK;
}

/* Gradients begin at zero, whether backward overwrites or adds. */
AMPI_PRIVATE amp_result ampi_gradcheck_backward(ampi_gradchecker *c) {
    int64_t i;
    int depth;
    amp_result r;
    for (i = 0; i < c->desc->n_inputs; i++) {
        const amp_range *g = &c->desc->input_grads[i];
        AMPI_TRY(amp_fill(c->amp, g->data, 0, g->count * 4));
    }
    depth = ampi_regions_hide(c->amp);
    r = ampi_gradcheck_call(c, c->desc->backward, "backward");
    ampi_regions_close(depth);
    return r;
}

AMPI_PRIVATE amp_result ampi_gradcheck_gradient(ampi_gradchecker *c, int64_t input, float *out) {
    const amp_range *g = &c->desc->input_grads[input];
    int64_t i;
    if (g->count > 0) AMPI_TRY(ampi_fetch(c->amp, out, g->data, (size_t)g->count * 4));
    for (i = 0; i < g->count; i++)
        if (!amp_is_finite_f32(&out[i]))
            return ampi_fail(AMP_ERR_RANGE, "amp_gradcheck", "element %lld of the gradient of %s is infinite or NaN",
                             (long long)i, ampi_input_name(c, input));
    return AMP_OK;
}

/* w as the outputs' gradients. */
AMPI_PRIVATE amp_result ampi_gradcheck_seed(ampi_gradchecker *c) {
    int64_t o, first, n, i;
    for (o = 0; o < c->desc->n_outputs; o++) {
        const amp_range *g = &c->desc->output_grads[o];
        for (first = 0; first < g->count; first += n) {
            n = AMPI_MIN(g->count - first, AMPI_MULTI_BLOCK);
            for (i = 0; i < n; i++) c->stage[i] = (float)ampi_gradcheck_weight(c, o, first + i);
            if (g->dtype != AMP_F32) ampi_convert_fast(c->stage, g->dtype, c->stage, AMP_F32, n, AMP_CPU_SCALAR);
            AMPI_TRY(ampi_send(c->amp, ampi_at_mut(g->data, g->dtype, first), c->stage, (size_t)n * amp_dtype_size(g->dtype)));
        }
    }
    return AMP_OK;
}

/* ---- What of it is rounding */

/* Step of an input's elements: the cube root of u, which balances rounding (u / h) and truncation (h^2), times their root
   mean square. */
AMPI_PRIVATE double ampi_gradcheck_step(const ampi_gradchecker *c, int64_t input) {
    const float *x = c->x + c->begin[input];
    int64_t i, n = ampi_gradcheck_count(c, input);
    double sum = 0, h = c->u > 0.001 ? 0.125 : c->u > 1e-6 ? 0.0625 : 0.00390625;
    for (i = 0; i < n; i++) sum += (double)x[i] * (double)x[i];
    return sum > 0 ? h * ampi_root(sum / (double)n) : h;
}

/* x + step d as fp32 has it. */
AMPI_PRIVATE float ampi_gradcheck_moved(float x, double step, double d) { return (float)((double)x + step * d); }

/* gradient . d, d being the step that was really taken, over `step`; *squares: of its terms. */
AMPI_PRIVATE double ampi_gradcheck_dot(const ampi_gradchecker *c, int64_t input, uint64_t seed, double step, const float *gradient,
                                       const float *minus, double *squares) {
    const float *x = c->x + c->begin[input];
    int64_t i, n = ampi_gradcheck_count(c, input);
    double sum = 0;
    *squares = 0;
    for (i = 0; i < n; i++) {
        double d = ampi_direction(seed, i);
        double moved = (double)ampi_gradcheck_moved(x[i], step, d) - (double)ampi_gradcheck_moved(x[i], -step, d);
        double term = ((double)gradient[i] - (minus ? (double)minus[i] : 0)) * moved / (2 * step);
        sum += term;
        *squares += term * term;
    }
    return sum;
}

/* The standard deviation of L, and of each gradient . d, when every input changes at random by up to u of itself: other
   roundings everywhere.  To L comes one rounding of each output. */
AMPI_PRIVATE amp_result ampi_gradcheck_noise(ampi_gradchecker *c) {
    const amp_gradcheck_desc *d = c->desc;
    double at, squares = c->squares, loss = c->loss, sum = 0, unused, change;
    uint32_t random;
    int64_t input, i, draw;
    int32_t j;
    for (draw = 0; draw < AMPI_GRADCHECK_DRAWS; draw++) {
        for (input = 0; input < d->n_inputs; input++) {
            memcpy(c->work, c->x + c->begin[input], (size_t)ampi_gradcheck_count(c, input) * 4);
            for (i = 0; i < ampi_gradcheck_count(c, input); i++) {
                random = amp_random_u32(ampi_row_seed(d->seed, -2 - draw, input), (uint64_t)i);
                ampi_perturb_f32(&c->work[i], 1, c->u, 0, &random);
            }
            AMPI_TRY(ampi_gradcheck_put(c, input, c->work));
        }
        AMPI_TRY(ampi_gradcheck_forward(c, &at));
        AMPI_TRY(ampi_gradcheck_backward(c));
        sum += ampi_square(at - loss);
        for (input = 0; input < d->n_inputs; input++) {
            AMPI_TRY(ampi_gradcheck_gradient(c, input, c->work));
            for (j = 0; j < c->directions; j++) {
                change = ampi_gradcheck_dot(c, input, ampi_direction_seed(c, input, j), ampi_gradcheck_step(c, input), c->work,
                                            c->grad + c->begin[input], &unused);
                c->changes[input * c->directions + j] += ampi_square(change);
            }
        }
    }
    for (input = 0; input < d->n_inputs; input++) AMPI_TRY(ampi_gradcheck_put(c, input, c->x + c->begin[input]));
    c->noise = ampi_root(sum / (double)AMPI_GRADCHECK_DRAWS + squares * c->u * c->u / 3);
    return AMP_OK;
}

/* ---- Differences */

/* (L(x + step d) - L(x - step d)) / 2 step. */
AMPI_PRIVATE amp_result ampi_gradcheck_difference(ampi_gradchecker *c, int64_t input, uint64_t seed, double step, double *out) {
    const float *x = c->x + c->begin[input];
    int64_t i, n = ampi_gradcheck_count(c, input);
    double loss[2] = {0, 0};
    int side;
    for (side = 0; side < 2; side++) {
        for (i = 0; i < n; i++) c->work[i] = ampi_gradcheck_moved(x[i], side ? -step : step, ampi_direction(seed, i));
        AMPI_TRY(ampi_gradcheck_put(c, input, c->work));
        AMPI_TRY(ampi_gradcheck_forward(c, &loss[side]));
    }
    *out = (loss[0] - loss[1]) / (2 * step);
    return ampi_gradcheck_put(c, input, x);
}

AMPI_PRIVATE amp_result ampi_gradcheck_direction(ampi_gradchecker *c, int64_t input, int32_t j, amp_gradcheck_report *worst) {
    uint64_t seed = ampi_direction_seed(c, input, j);
    double step = ampi_gradcheck_step(c, input), wide, narrow, found, squares, rounding, error, bound;
    AMPI_TRY(ampi_gradcheck_difference(c, input, seed, step, &wide));
    AMPI_TRY(ampi_gradcheck_difference(c, input, seed, step / 2, &narrow));
    found = ampi_gradcheck_dot(c, input, seed, step, c->grad + c->begin[input], NULL, &squares);
    rounding = c->noise / (step * 1.4142135623730951) +
               ampi_root(c->changes[input * c->directions + j] / (double)AMPI_GRADCHECK_DRAWS + squares * c->u * c->u / 3);
    error = found > wide ? found - wide : wide - found;
    bound = AMPI_GRADCHECK_SIGMAS * rounding + 8.0 / 3 * (wide > narrow ? wide - narrow : narrow - wide);
    if (error > bound) worst->passed = 0;
    if (worst->worst[0] != 0 && !(error * worst->bound > worst->error * bound)) return AMP_OK;
    worst->error = error;
    worst->bound = bound;
    worst->expected = wide;
    worst->found = found;
    snprintf(worst->worst, sizeof worst->worst, "%s", ampi_input_name(c, input));
    return AMP_OK;
}

/* ---- The call */

AMPI_PRIVATE amp_result ampi_gradcheck_pairs(const amp_range *values, const amp_range *grads, int64_t n, int inputs) {
    const char *f = "amp_gradcheck", *what = inputs ? "input" : "output";
    int64_t i;
    if (values == NULL || grads == NULL) return ampi_fail(AMP_ERR_NULL, f, ".%ss or .%s_grads is NULL", what, what);
    if (n < 1) return ampi_fail(AMP_ERR_RANGE, f, ".n_%ss = %lld, must be 1 or more", what, (long long)n);
    AMPI_TRY(ampi_check_ranges(f, values, n));
    AMPI_TRY(ampi_check_ranges(f, grads, n));
    for (i = 0; i < n; i++) {
        const char *name = values[i].name ? values[i].name : what;
        if (values[i].count != grads[i].count)
            return ampi_fail(AMP_ERR_SHAPE, f, "%s %lld has %lld elements, its gradient %lld", name, (long long)i, (long long)values[i].count, (long long)grads[i].count);
        if (inputs ? values[i].dtype != AMP_F32 || grads[i].dtype != AMP_F32 : values[i].dtype == AMP_F64 || grads[i].dtype == AMP_F64)
            return ampi_fail(AMP_ERR_DTYPE, f, "%s %lld or its gradient is %s, must be %s", name, (long long)i,
                             amp_dtype_name(values[i].dtype == AMP_F32 ? grads[i].dtype : values[i].dtype), inputs ? "fp32" : "fp32, fp16 or bf16");
    }
    return AMP_OK;
}

AMPI_PRIVATE amp_result ampi_gradcheck_check(amp_context *amp, const amp_gradcheck_desc *d, amp_dtype *dtype) {
    const char *f = "amp_gradcheck";
    amp_choice choice;
    amp_machine machine;
    if (d->forward == NULL || d->backward == NULL) return ampi_fail(AMP_ERR_NULL, f, ".forward or .backward is NULL");
    if (d->directions < 0 || d->directions > 1000000)
        return ampi_fail(AMP_ERR_RANGE, f, ".directions = %d, must be 1 to 1000000, or 0 (8)", d->directions);
    AMPI_TRY(ampi_gradcheck_pairs(d->inputs, d->input_grads, d->n_inputs, 1));
    AMPI_TRY(ampi_gradcheck_pairs(d->outputs, d->output_grads, d->n_outputs, 0));
    *dtype = ampi_settings(amp)->dtype;
    if (d->dtype == AMP_DTYPE_DEFAULT) return ampi_may_wait(amp);
    AMPI_TRY(amp_query_machine(amp, &machine));
    AMPI_TRY(amp_choose(&machine, d->dtype, ampi_settings(amp)->allow_fallback, &choice));
    *dtype = choice.dtype;
    return ampi_may_wait(amp);
}

AMPI_PRIVATE amp_result ampi_gradcheck_memory(ampi_gradchecker *c) {
    const amp_system *s = ampi_context_system(c->amp);
    const char *f = "amp_gradcheck";
    int64_t i, n = c->desc->n_inputs, most = 1;
    AMPI_TRY(ampi_alloc(s, f, (void **)&c->begin, n + 1, sizeof *c->begin));
    for (i = 0; i < n; i++) {
        c->begin[i + 1] = c->begin[i] + c->desc->inputs[i].count;
        most = AMPI_MAX(most, c->desc->inputs[i].count);
    }
    AMPI_TRY(ampi_alloc(s, f, (void **)&c->x, c->begin[n], 4));
    AMPI_TRY(ampi_alloc(s, f, (void **)&c->grad, c->begin[n], 4));
    AMPI_TRY(ampi_alloc(s, f, (void **)&c->work, most, 4));
    AMPI_TRY(ampi_alloc(s, f, (void **)&c->changes, n * c->directions, sizeof *c->changes));
    AMPI_TRY(ampi_alloc(s, f, (void **)&c->stage, AMPI_VERIFY_STAGE, 4));
    for (i = 0; i < n; i++)
        if (c->desc->inputs[i].count > 0)
            AMPI_TRY(ampi_fetch(c->amp, c->x + c->begin[i], c->desc->inputs[i].data, (size_t)c->desc->inputs[i].count * 4));
    c->ready = 1;
    return AMP_OK;
}

AMPI_PRIVATE void ampi_gradcheck_free(ampi_gradchecker *c) {
    const amp_system *s = ampi_context_system(c->amp);
    int64_t i, n = c->desc->n_inputs, most = 1, size = c->begin ? c->begin[n] : 0;
    for (i = 0; i < n; i++) most = AMPI_MAX(most, c->desc->inputs[i].count);
    ampi_free(s, c->stage, AMPI_VERIFY_STAGE, 4);
    ampi_free(s, c->changes, n * c->directions, sizeof *c->changes);
    ampi_free(s, c->work, most, 4);
    ampi_free(s, c->grad, size, 4);
    ampi_free(s, c->x, size, 4);
    ampi_free(s, c->begin, n + 1, sizeof *c->begin);
}

AMPI_PRIVATE amp_result ampi_gradcheck_run(ampi_gradchecker *c, amp_gradcheck_report *report) {
    int64_t i;
    int32_t j;
    AMPI_TRY(ampi_gradcheck_memory(c));
    AMPI_TRY(ampi_gradcheck_seed(c));
    AMPI_TRY(ampi_gradcheck_forward(c, &c->loss));
    AMPI_TRY(ampi_gradcheck_backward(c));
    for (i = 0; i < c->desc->n_inputs; i++) AMPI_TRY(ampi_gradcheck_gradient(c, i, c->grad + c->begin[i]));
    AMPI_TRY(ampi_gradcheck_noise(c));
    for (i = 0; i < c->desc->n_inputs; i++)
        for (j = 0; j < c->directions && c->desc->inputs[i].count > 0; j++) AMPI_TRY(ampi_gradcheck_direction(c, i, j, report));
    return AMP_OK;
}

AMP_API amp_result amp_gradcheck_v(amp_context *amp, const amp_gradcheck_desc *desc, amp_gradcheck_report *out, uint64_t abi) {
    amp_gradcheck_report report;
    ampi_gradchecker c;
    amp_dtype dtype;
    amp_result r;
    int64_t i;
    AMPI_TRY(ampi_check_abi("amp_gradcheck", abi, AMP_ABI(amp_gradcheck_desc)));
    if (amp == NULL || desc == NULL || out == NULL) return ampi_fail(AMP_ERR_NULL, "amp_gradcheck", "amp, desc or out is NULL");
    AMPI_TRY(ampi_gradcheck_check(amp, desc, &dtype));
    memset(&c, 0, sizeof c);
    memset(&report, 0, sizeof report);
    report.passed = 1;
    c.amp = amp;
    c.desc = desc;
    c.directions = desc->directions ? desc->directions : 8;
    c.before = c.within = ampi_precision_get(amp);
    c.within.dtype = c.within.choice.dtype = dtype;
    c.within.disable = 0;
    c.u = ampi_roundoff(dtype);
    for (i = 0; i < desc->n_outputs; i++) {
        c.u = AMPI_MAX(c.u, ampi_roundoff(desc->outputs[i].dtype));
        c.u = AMPI_MAX(c.u, ampi_roundoff(desc->output_grads[i].dtype));
    }
    r = ampi_gradcheck_run(&c, &report);
    for (i = 0; c.ready && i < desc->n_inputs; i++) {
        amp_result back = ampi_gradcheck_put(&c, i, c.x + c.begin[i]);
        amp_param *p = ampi_param_of_gradient(amp, desc->input_grads[i].data);
        if (p != NULL) p->grad_live = 0;
        if (r == AMP_OK) r = back;
    }
    ampi_precision_set(amp, &c.before);
    ampi_gradcheck_free(&c);
    if (r == AMP_OK) *out = report;
    return r;
}

/* ---- Advice */

/* What is in force now, as settings. */
static void ampi_settings_now(const amp_context *amp, const amp_scaler *scaler, const amp_optimizer *optimizer,
                              amp_settings *s) {
    const amp_desc *d = ampi_settings(amp);
    memset(s, 0, sizeof *s);
    s->disable = d->disable;
    s->dtype = d->dtype;
    s->level = d->level;
    s->policy = d->policy;
    s->mode = d->mode;
    s->memory_efficient = d->memory_efficient;
    s->disable_cache = d->disable_cache;
    s->fallback = d->fallback;
    s->allow_tf32 = d->allow_tf32;
    s->autotune = d->autotune;
    s->debug = d->logger.level == AMP_LOG_DEBUG;
    if (scaler != NULL) s->scaler = scaler->desc;
    s->scaler.disable = 0;
    if (optimizer == NULL) return;
    s->clip_norm = optimizer->desc.clip_norm;
    s->accumulation = optimizer->desc.accumulation;
    s->nan_action = optimizer->desc.apply_nonfinite ? AMP_NAN_REPORT : AMP_NAN_DEFAULT;
}

/* What a decision is made from. */
typedef struct ampi_facts {
    const amp_advise_desc *desc;
    const amp_device *device;
    amp_choice automatic;           /* amp_choose's */
    amp_memory_info memory;
    amp_k_scaler scaler;            /* updates 0: no history in fp16 */
    int is_short;                   /* 1: the step that ran took more than 90% of the memory */
} ampi_facts;

/* The row of a candidate that failed, or NULL. */
static const amp_verify_row *ampi_failed_row(const amp_verify_report *report, amp_dtype dtype) {
    int64_t i;
    for (i = 0; report != NULL && i < report->n_rows; i++)
        if (report->rows[i].dtype == dtype && report->rows[i].verdict != AMP_VERDICT_PASS) return &report->rows[i];
    return NULL;
}

static const char *ampi_verdict_name(amp_verdict verdict) {
    switch (verdict) {
        case AMP_VERDICT_PASS: return "pass";
        case AMP_VERDICT_INACCURATE: return "inaccurate";
        case AMP_VERDICT_NONFINITE: return "not finite";
        case AMP_VERDICT_FAILED: return "failed";
        default: return "?";
    }
}

/* Why a dtype is not to be used, in `why`; 0: it may be. */
static int ampi_speaks_against(const ampi_facts *f, amp_dtype dtype, char *why, size_t size) {
    const amp_verify_row *row = ampi_failed_row(f->desc->verified, dtype);
    if (row != NULL) {
        const char *where = row->first_bad[0] ? row->first_bad : row->worst_gradient[0] ? row->worst_gradient : row->worst_output;
        snprintf(why, size, "%s: verified %s%s%.40s", amp_dtype_name(dtype), ampi_verdict_name(row->verdict),
                 where[0] ? " in " : "", where);
        return 1;
    }
    if (dtype != AMP_F16 || !f->scaler.at_floor) return 0;
    snprintf(why, size, "fp16: gradients overflow at the lowest scale %g", (double)f->scaler.scale);
    return 1;
}

static int ampi_device_has(const amp_device *d, amp_dtype dtype) {
    return dtype == AMP_F32 || (dtype == AMP_BF16 && d->bf16) || (dtype == AMP_F16 && d->fp16) || (dtype == AMP_TF32 && d->tf32);
}

/* The automatic choice, or what comes after it: the 16-bit formats first, the wider range before the finer step. */
static void ampi_advise_dtype(const ampi_facts *f, amp_advice *out) {
    static const amp_dtype order[] = {AMP_BF16, AMP_F16, AMP_TF32, AMP_F32};
    char why[100] = "", first[100] = "";
    int i;
    out->settings.dtype = f->automatic.dtype;
    if (!ampi_speaks_against(f, f->automatic.dtype, first, sizeof first)) {
        snprintf(out->dtype_reason, sizeof out->dtype_reason, "%s", f->automatic.reason);
        return;
    }
    for (i = 0; i < 4; i++)
        if (order[i] != f->automatic.dtype && ampi_device_has(f->device, order[i]) &&
            (order[i] == AMP_F32 || !ampi_speaks_against(f, order[i], why, sizeof why))) break;
    out->settings.dtype = order[AMPI_MIN(i, 3)];
    snprintf(out->dtype_reason, sizeof out->dtype_reason, "%s; so %s", first, amp_dtype_name(out->settings.dtype));
}

#define AMPI_GIB(bytes) ((double)(bytes) / 1073741824.0)

/* peak(b) = fixed + b each: what belongs to the parameters does not grow with the batch, all else in proportion. */
static void ampi_advise_batch(ampi_facts *f, amp_advice *out) {
    amp_parameter_bytes bytes;
    double fixed, each, usable = 0.9 * (double)f->memory.device_total;
    char *reason = out->batch_reason;
    size_t size = sizeof out->batch_reason;
    if (f->desc->batch == 0 || f->desc->optimizer == NULL) {
        snprintf(reason, size, "not known before a step has run: it takes .batch and .optimizer");
        return;
    }
    (void)amp_optimizer_bytes(f->desc->optimizer, &bytes);
    fixed = bytes.total * (double)bytes.parameters + (double)f->memory.cast_cache;
    each = ((double)f->memory.peak - fixed) / (double)f->desc->batch;
    if (f->memory.device_total <= 0) {
        snprintf(reason, size, "the device does not tell how much memory it has");
        return;
    }
    f->is_short = (double)f->memory.peak > usable;
    if (!(each > 0)) {
        snprintf(reason, size, "the peak of %.3g GiB is no more than parameters and optimizer take (%.3g GiB): activations are not amp_alloc's",
                 AMPI_GIB(f->memory.peak), AMPI_GIB(fixed));
        return;
    }
    out->batch = usable > fixed ? (int64_t)((usable - fixed) / each) : 0;
    snprintf(reason, size, "peak %.3g GiB at batch %lld is %.3g GiB fixed and %.3g GiB a sample; 90%% of %.3g GiB hold %lld",
             AMPI_GIB(f->memory.peak), (long long)f->desc->batch, AMPI_GIB(fixed), AMPI_GIB(each),
             AMPI_GIB(f->memory.device_total), (long long)out->batch);
}

/* O2 halves weights, gradients and casts; that pays when they are what does not fit. */
static void ampi_advise_level(const ampi_facts *f, amp_advice *out) {
    int low = out->settings.dtype == AMP_F16 || out->settings.dtype == AMP_BF16;
    out->settings.level = f->is_short && low ? AMP_LEVEL_O2 : AMP_LEVEL_O1;
    out->settings.memory_efficient = f->is_short;
    if (!f->is_short)
        snprintf(out->level_reason, sizeof out->level_reason, "O1: fp32 weights, and casts where they pay; %s",
                 out->batch > 0 ? "memory is not short" : "nothing says that memory is short");
    else
        snprintf(out->level_reason, sizeof out->level_reason, "%s: the step took %.3g of %.3g GiB, over 90%%; %s", low ? "O2" : "O1",
                 AMPI_GIB(f->memory.peak), AMPI_GIB(f->memory.device_total),
                 low ? "16-bit weights with masters, no kept casts" : "no kept casts");
}

static void ampi_advise_tf32(const ampi_facts *f, amp_advice *out) {
    char why[100] = "";
    out->settings.allow_tf32 = f->device->tf32 && !ampi_speaks_against(f, AMP_TF32, why, sizeof why);
    snprintf(out->tf32_reason, sizeof out->tf32_reason, "%s",
             out->settings.allow_tf32 ? "on: what stays in fp32 is multiplied by tf32 instructions, with 10 bits of mantissa" :
             f->device->tf32 ? why : "off: the device has no tf32 instructions");
    out->settings.autotune = strcmp(f->device->kind, "cpu") == 0 ? AMP_AUTOTUNE_OFF : AMP_AUTOTUNE_ON;
}

/* From the scaler's own history.  Growth alone costs a skip per growth interval, so more than one step in a hundred means
   that something else is wrong: hysteresis that takes several skips for one reduction, an interval that is too short, or a
   scale that hangs just below the overflow. */
static void ampi_advise_scaler(const ampi_facts *f, amp_advice *out) {
    amp_scaler_desc *d = &out->settings.scaler;
    const amp_k_scaler *s = &f->scaler;
    char *reason = out->scaler_reason;
    size_t size = sizeof out->scaler_reason;
    double init = (double)d->init_scale, rate = s->updates > 0 ? (double)s->skips / (double)s->updates : 0;
    out->settings.use_scaler = AMP_SCALER_USE_AUTO;
    if (out->settings.dtype != AMP_F16) {
        snprintf(reason, size, "%s has fp32's range and needs none", amp_dtype_name(out->settings.dtype));
    } else if (s->updates == 0) {
        snprintf(reason, size, "fp16 loses gradients below 6e-8: a dynamic scale, halved on overflow, doubled after clean steps");
    } else if (!(rate > 0.01) && !(s->scale < d->init_scale)) {
        snprintf(reason, size, "%lld of %lld steps skipped, scale %g: as it is", (long long)s->skips, (long long)s->updates, (double)s->scale);
    } else if (!(rate > 0.01)) {
        d->init_scale = s->scale;
        snprintf(reason, size, "the scale came down from %g to %g in %lld skips: begin there", init, (double)s->scale, (long long)s->skips);
    } else {
        const char *cure = "backoff 0.25, and begin at a quarter of it";
        if (s->scale < d->init_scale) d->init_scale = s->scale;
        if (d->hysteresis > 1) {
            d->hysteresis = 1;
            cure = "hysteresis 1, so that one skip shrinks it";
        } else if (d->growth_interval > 0 && d->growth_interval < 2000) {
            d->growth_interval = 2000;
            cure = "growth interval 2000";
        } else {
            d->backoff_factor = AMPI_MIN(d->backoff_factor, 0.25);
            d->init_scale = AMPI_MAX(s->scale / 4, ampi_is_none(d->min_scale) ? 1.1754944e-38f : d->min_scale);
        }
        snprintf(reason, size, "%lld of %lld steps skipped, over 1%%, scale %g: %s", (long long)s->skips, (long long)s->updates,
                 (double)s->scale, cure);
    }
}

static amp_result ampi_gather_facts(const amp_context *amp, const amp_advise_desc *desc, ampi_facts *f) {
    memset(f, 0, sizeof *f);
    f->desc = desc;
    f->device = &amp->machine.device;
    AMPI_TRY(amp_choose(&amp->machine, AMP_DTYPE_DEFAULT, 0, &f->automatic));
    AMPI_TRY(amp_memory(amp, &f->memory));
    if (desc->scaler == NULL || desc->scaler->desc.disable || ampi_settings(amp)->dtype != AMP_F16) return AMP_OK;
    return amp_scaler_get(desc->scaler, &f->scaler);
}

AMP_API amp_result amp_advise_v(amp_context *amp, const amp_advise_desc *desc, amp_advice *out, uint64_t abi) {
    static const amp_advise_desc none = {0, NULL, NULL, NULL};
    amp_advice advice;
    ampi_facts f;
    AMPI_TRY(ampi_check_abi("amp_advise", abi, AMP_ABI(amp_advise_desc)));
    if (amp == NULL || out == NULL) return ampi_fail(AMP_ERR_NULL, "amp_advise", "%s is NULL", amp == NULL ? "amp" : "out");
    if (desc == NULL) desc = &none;
    if (desc->batch < 0)
        return ampi_fail(AMP_ERR_RANGE, "amp_advise", ".batch = %lld, must be 1 or more, or 0 for none", (long long)desc->batch);
    if (desc->verified != NULL && (desc->verified->n_rows < 0 || desc->verified->n_rows > AMP_VERIFY_ROWS))
        return ampi_fail(AMP_ERR_RANGE, "amp_advise", ".verified has %lld rows, must be 0 to %d",
                         (long long)desc->verified->n_rows, AMP_VERIFY_ROWS);
    AMPI_TRY(ampi_gather_facts(amp, desc, &f));
    memset(&advice, 0, sizeof advice);
    ampi_settings_now(amp, desc->scaler, desc->optimizer, &advice.settings);
    ampi_advise_dtype(&f, &advice);
    ampi_advise_batch(&f, &advice);
    ampi_advise_level(&f, &advice);
    ampi_advise_tf32(&f, &advice);
    ampi_advise_scaler(&f, &advice);
    *out = advice;
    return AMP_OK;
}

AMP_API size_t amp_advice_text(const amp_advice *advice, char *text, size_t size) {
    ampi_sheet sheet = ampi_sheet_of(text, size);
    const amp_settings *s;
    char batch[24] = "unknown";
    if (advice == NULL) return 0;
    s = &advice->settings;
    if (advice->batch > 0) snprintf(batch, sizeof batch, "%lld", (long long)advice->batch);
    ampi_print(&sheet, "dtype    %-8s %s\n", amp_dtype_name(s->dtype), advice->dtype_reason);
    ampi_print(&sheet, "level    O%-7d %s\n", (int)s->level - (int)AMP_LEVEL_O0, advice->level_reason);
    ampi_print(&sheet, "tf32     %-8s %s\n", s->allow_tf32 ? "on" : "off", advice->tf32_reason);
    ampi_print(&sheet, "batch    %-8s %s\n", batch, advice->batch_reason);
    ampi_print(&sheet, "scaler   %-8s %s\n", s->dtype == AMP_F16 ? "on" : "off", advice->scaler_reason);
    return sheet.used;
}

AMP_API amp_result amp_apply(const amp_advice *advice, amp_context *amp, amp_scaler *scaler, amp_optimizer *optimizer) {
    const amp_scaler_desc *rule;
    amp_settings s;
    if (advice == NULL || amp == NULL) return ampi_fail(AMP_ERR_NULL, "amp_apply", "%s is NULL", advice == NULL ? "advice" : "amp");
    ampi_settings_now(amp, scaler, optimizer, &s);
    s.dtype = advice->settings.dtype;
    s.allow_tf32 = advice->settings.allow_tf32;
    s.memory_efficient = advice->settings.memory_efficient;
    s.use_scaler = advice->settings.use_scaler;
    rule = &advice->settings.scaler;            /* left at 0 by advice without a scaler */
    if (rule->init_scale > 0) s.scaler.init_scale = rule->init_scale;
    if (rule->backoff_factor > 0) s.scaler.backoff_factor = rule->backoff_factor;
    if (rule->growth_interval != 0) s.scaler.growth_interval = rule->growth_interval;
    if (rule->hysteresis > 0) s.scaler.hysteresis = rule->hysteresis;
    AMPI_TRY(amp_settings_apply(&s, amp, scaler, optimizer, NULL));
    if (advice->settings.level != s.level)
        ampi_log(amp, AMP_LOG_WARNING, 1301, "level O%d is advised: it takes a new context, O%d stays",
                 (int)advice->settings.level - (int)AMP_LEVEL_O0, (int)s.level - (int)AMP_LEVEL_O0);
    return AMP_OK;
}

/* ---- Tune */

enum {
    AMPI_TUNE_DTYPES = 4,
    AMPI_TUNE_TURN = 5,             /* timed steps of a precision before the next one's turn */
    AMPI_TUNE_NUMBERS = 7,          /* of a row in the file; and of all rows */
    AMPI_TUNE_ROOM = AMPI_TUNE_NUMBERS * (int)AMP_TUNE_ROWS
};

typedef struct ampi_candidate {
    amp_dtype dtype;
    amp_verdict verdict;
    char reason[120];
    int dropped;                    /* 1: failed; not tried with larger batches */
    amp_tune_row *row;              /* of the batch at hand; NULL: not tried */
    int64_t *times;                 /* nanoseconds of its steps with it */
} ampi_candidate;

typedef struct ampi_tune {
    amp_context *amp;
    amp_tune_desc desc;             /* effective */
    amp_tune_report *out;
    ampi_candidate candidates[AMPI_TUNE_DTYPES];
    int n;
    int64_t prepared;               /* what `prepare` was called with last; 0: not yet, or it failed */
    ampi_keep *keep;                /* what .verify names, as it was */
    uint64_t key;                   /* of the results in the file */
    amp_state *state;               /* what the file holds, or NULL */
    int foreign;                    /* 1: the file is something else, and stays */
} ampi_tune;

/* What a function of the host's means by its number, in words. */
static void ampi_host_said(const char *what, int code, char *text, size_t size) {
    const char *said = amp_result_text((amp_result)code), *last = amp_last_error();
    char id[16];
    snprintf(id, sizeof id, "AMP%04d ", code);
    if (strncmp(last, id, strlen(id)) == 0) snprintf(text, size, "%s: %.*s", what, (int)size, last);
    else snprintf(text, size, "%s returned %d%s%s", what, code, strcmp(said, "unknown result") ? ": " : "",
                  strcmp(said, "unknown result") ? said : "");
}

static amp_result ampi_check_tune_dtypes(const amp_tune_desc *d) {
    int64_t i, j;
    if (d->n_dtypes < 0 || d->n_dtypes > AMPI_TUNE_DTYPES)
        return ampi_fail(AMP_ERR_RANGE, "amp_tune", ".n_dtypes = %lld, must be 0 (all) to %d", (long long)d->n_dtypes, AMPI_TUNE_DTYPES);
    if (d->n_dtypes > 0 && d->dtypes == NULL)
        return ampi_fail(AMP_ERR_NULL, "amp_tune", ".dtypes is NULL with .n_dtypes = %lld", (long long)d->n_dtypes);
    for (i = 0; i < d->n_dtypes; i++) {
        amp_dtype t = d->dtypes[i];
        if (t != AMP_F32 && t != AMP_TF32 && t != AMP_F16 && t != AMP_BF16)
            return ampi_fail(AMP_ERR_DTYPE, "amp_tune", ".dtypes[%lld] = %s, must be fp32, tf32, fp16 or bf16", (long long)i, amp_dtype_name(t));
        for (j = 0; j < i; j++)
            if (d->dtypes[j] == t) return ampi_fail(AMP_ERR_RANGE, "amp_tune", ".dtypes has %s twice", amp_dtype_name(t));
    }
    return AMP_OK;
}

static amp_result ampi_check_tune(const amp_context *amp, const amp_tune_desc *d) {
    if (d->step == NULL) return ampi_fail(AMP_ERR_NULL, "amp_tune", ".step is NULL");
    AMPI_TRY(ampi_check_tune_dtypes(d));
    if (d->batch < 0) return ampi_fail(AMP_ERR_RANGE, "amp_tune", ".batch = %lld, must be 1 or more, or 0 for 1", (long long)d->batch);
    if (d->max_batch != 0 && d->max_batch < AMPI_MAX(d->batch, 1))
        return ampi_fail(AMP_ERR_RANGE, "amp_tune", ".max_batch = %lld, must be .batch = %lld or more",
                         (long long)d->max_batch, (long long)AMPI_MAX(d->batch, 1));
    if (d->iterations < 0 || d->iterations > 1000)
        return ampi_fail(AMP_ERR_RANGE, "amp_tune", ".iterations = %d, must be 1 to 1000, or 0 for 10", d->iterations);
    if (d->warmup < 0 || d->warmup > 1000) return ampi_fail(AMP_ERR_RANGE, "amp_tune", ".warmup = %d, must be 1 to 1000, or 0 for 3", d->warmup);
    if (d->file != NULL && d->file[0] == 0) return ampi_fail(AMP_ERR_RANGE, "amp_tune", ".file is \"\", must be a path, or NULL for none");
    AMPI_TRY(ampi_may_wait(amp));
    if (ampi_world(amp) > 1) return ampi_fail(AMP_ERR_CONFLICT, "amp_tune", "%d ranks would each find another best: tune on one, and give the others its result", ampi_world(amp));
    if (ampi_settings(amp)->disable)
        return ampi_fail(AMP_ERR_STATE, "amp_tune", "the context is disabled, so all precisions would be one: call amp_set_enabled first");
    return AMP_OK;
}

static void ampi_tune_fill(ampi_tune *t) {
    static const amp_dtype all[AMPI_TUNE_DTYPES] = {AMP_F32, AMP_TF32, AMP_F16, AMP_BF16};
    amp_tune_desc *d = &t->desc;
    int i;
    if (d->batch == 0) d->batch = 1;
    if (d->max_batch == 0 || d->prepare == NULL) d->max_batch = d->batch;
    if (d->iterations == 0) d->iterations = 10;
    if (d->warmup == 0) d->warmup = 3;
    if (d->model == NULL) d->model = "";
    for (i = 0; i < (d->n_dtypes > 0 ? (int)d->n_dtypes : AMPI_TUNE_DTYPES); i++) {
        ampi_candidate *c = &t->candidates[t->n];
        c->dtype = d->n_dtypes > 0 ? d->dtypes[i] : all[i];
        c->verdict = AMP_VERDICT_PASS;
        t->n += d->n_dtypes > 0 || ampi_device_has(&t->amp->machine.device, c->dtype);
    }
}

/* ---- The file: records "tune.<key>.rows" and "tune.<key>.text"; the key stands for all that the results depend on */

static uint64_t ampi_tune_hash(const ampi_tune *t) {
    const amp_desc *s = ampi_settings(t->amp);
    const amp_tune_desc *d = &t->desc;
    char machine[1024];
    int64_t numbers[] = {AMP_VERSION, s->level, s->policy, s->mode, s->allow_tf32, s->memory_efficient, s->disable_cache, s->threads,
                         s->cpu_path, s->autotune, d->batch, d->max_batch, d->iterations, d->warmup, d->verify != NULL};
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    size_t i;
    int k;
    amp_machine_text(&t->amp->machine, machine, sizeof machine);
    hash = ampi_hash_bytes(hash, machine, (int64_t)strlen(machine) + 1);
    hash = ampi_hash_bytes(hash, d->model, (int64_t)strlen(d->model) + 1);
    for (i = 0; i < sizeof numbers / sizeof numbers[0]; i++) hash = ampi_hash_number(hash, numbers[i]);
    for (k = 0; k < t->n; k++) hash = ampi_hash_number(hash, t->candidates[k].dtype);
    return d->verify ? ampi_hash_number(hash, (int64_t)ampi_bits_f64(d->verify->allowance)) : hash;
}

static void ampi_tune_record(const ampi_tune *t, const char *name, char key[64]) {
    snprintf(key, 64, "tune.%016llx.%s", (unsigned long long)t->key, name);
}

/* A row from its numbers; 0: they cannot be one. */
static int ampi_tune_decode(const double *x, const char *text, amp_tune_row *row) {
    int i;
    for (i = 0; i < AMPI_TUNE_NUMBERS; i++) if (!amp_is_finite_f64(&x[i]) || !(x[i] >= 0 && x[i] <= 9007199254740992.0)) return 0;
    if (x[0] > (double)(int)AMP_I64 || x[1] < 1 || x[1] > (double)(int)AMP_VERDICT_FAILED || x[2] < 1) return 0;
    memset(row, 0, sizeof *row);
    row->dtype = (amp_dtype)(int)x[0];
    row->verdict = (amp_verdict)(int)x[1];
    row->batch = (int64_t)x[2];
    row->peak = (int64_t)x[3];
    row->seconds = x[4];
    row->rate = x[5];
    row->speedup = x[6];
    memcpy(row->reason, text, sizeof row->reason - 1);
    return 1;
}

/* 1: the report came from the file. */
static int ampi_tune_known(ampi_tune *t) {
    double numbers[AMPI_TUNE_ROOM];
    char text[AMP_TUNE_ROWS * sizeof t->out->rows[0].reason], key[64], text_key[64];
    int64_t n, i, size = (int64_t)sizeof t->out->rows[0].reason;
    ampi_tune_record(t, "rows", key);
    ampi_tune_record(t, "text", text_key);
    n = amp_state_count(t->state, key, NULL);
    if (n < 0) return 0;                        /* another model, machine or desc */
    if (n % AMPI_TUNE_NUMBERS == 0 && n > 0 && n <= AMPI_TUNE_ROOM) {
        n /= AMPI_TUNE_NUMBERS;
        if (amp_state_get(t->state, key, AMP_F64, numbers, n * AMPI_TUNE_NUMBERS) == AMP_OK &&
            amp_state_get(t->state, text_key, AMP_U8, text, n * size) == AMP_OK) {
            for (i = 0; i < n && ampi_tune_decode(numbers + i * AMPI_TUNE_NUMBERS, text + i * size, &t->out->rows[i]); i++) {}
            if (i == n) { t->out->n_rows = n; return 1; }
        }
    }
    memset(t->out, 0, sizeof *t->out);
    ampi_log(t->amp, AMP_LOG_WARNING, 1302, "tuned results ignored: %s holds rows that cannot be", t->desc.file);
    return 0;
}

static int ampi_tune_read(ampi_tune *t) {
    amp_result result;
    if (t->desc.file == NULL) return 0;
    t->key = ampi_tune_hash(t);
    result = amp_state_load(&t->state, ampi_context_system(t->amp), t->desc.file);
    if (result == AMP_OK) return ampi_tune_known(t);
    t->foreign = result == AMP_ERR_FORMAT;
    if (result != AMP_ERR_OPEN)                 /* not yet written */
        ampi_log(t->amp, AMP_LOG_WARNING, 1302, "tuned results ignored%s: %s", t->foreign ? ", and the file left alone" : "", amp_last_error());
    return 0;
}

static amp_result ampi_tune_put(const ampi_tune *t) {
    double numbers[AMPI_TUNE_ROOM];
    char text[AMP_TUNE_ROWS * sizeof t->out->rows[0].reason], key[64];
    int64_t i, size = (int64_t)sizeof t->out->rows[0].reason;
    for (i = 0; i < t->out->n_rows; i++) {
        const amp_tune_row *row = &t->out->rows[i];
        double *x = numbers + i * AMPI_TUNE_NUMBERS;
        x[0] = (double)(int)row->dtype; x[1] = (double)(int)row->verdict; x[2] = (double)row->batch; x[3] = (double)row->peak;
        x[4] = row->seconds; x[5] = row->rate; x[6] = row->speedup;
        memcpy(text + i * size, row->reason, (size_t)size);
    }
    ampi_tune_record(t, "rows", key);
    AMPI_TRY(amp_state_put(t->state, key, AMP_F64, numbers, i * AMPI_TUNE_NUMBERS));
    ampi_tune_record(t, "text", key);
    AMPI_TRY(amp_state_put(t->state, key, AMP_U8, text, i * size));
    return amp_state_save(t->state, t->desc.file);
}

/* Beside the results of others that the file holds. */
static amp_result ampi_tune_write(ampi_tune *t) {
    amp_result result = AMP_OK;
    char why[200];
    if (t->desc.file == NULL || t->foreign || t->out->n_rows == 0) return AMP_OK;
    if (t->state == NULL) result = amp_state_create(&t->state, ampi_context_system(t->amp));
    if (result == AMP_OK) result = ampi_tune_put(t);
    if (result == AMP_OK) return AMP_OK;
    snprintf(why, sizeof why, "%.199s", amp_last_error());
    return ampi_fail(AMP_ERR_WRITE, "amp_tune", "the results are there, but not in %.100s: %s", t->desc.file, why);
}

/* ---- Timing */

static void ampi_tune_failed(ampi_candidate *c, const char *what, int code) {
    c->dropped = 1;
    c->row->verdict = AMP_VERDICT_FAILED;
    ampi_host_said(what, code, c->row->reason, sizeof c->row->reason);
}

/* `n` steps with nothing queued behind them; times may be NULL.  Regions a step leaves open are closed. */
static int ampi_tune_steps(const ampi_tune *t, int n, int64_t *times) {
    const amp_system *s = ampi_context_system(t->amp);
    int64_t begun;
    int i, depth, code = 0;
    for (i = 0; i < n && code == 0; i++) {
        depth = ampi_regions_hide(t->amp);
        ampi_error_text[0] = 0;
        begun = s->clock_ns(s->user);
        code = t->desc.step(t->desc.user, t->amp);
        ampi_regions_close(depth);
        if (code == 0) code = (int)amp_sync(t->amp);
        if (times != NULL) times[i] = s->clock_ns(s->user) - begun;
    }
    return code;
}

/* One turn of a candidate.  A new precision begins without cached casts, so untimed steps come first in every turn. */
static void ampi_tune_turn(const ampi_tune *t, ampi_candidate *c, int done) {
    int n = AMPI_MIN(t->desc.iterations - done, (int)AMPI_TUNE_TURN), code;
    amp_memory_info memory;
    amp_choice choice;
    code = (int)amp_choose(&t->amp->machine, c->dtype, 0, &choice);
    if (code == 0) code = (int)amp_set_dtype(t->amp, c->dtype);
    if (code != 0) { ampi_tune_failed(c, "dtype", code); return; }
    code = ampi_tune_steps(t, done == 0 ? t->desc.warmup : 1, NULL);
    amp_memory_reset_peak(t->amp);
    if (code == 0) code = ampi_tune_steps(t, n, c->times + done);
    if (code == 0) code = (int)amp_memory(t->amp, &memory);
    if (code == 0) { c->row->peak = AMPI_MAX(c->row->peak, memory.peak); return; }
    ampi_tune_failed(c, "step", code);
    (void)amp_cleanup(t->amp, NULL);
}

/* The middle one, or the mean of the two in the middle; sorts. */
static double ampi_median_ns(int64_t *times, int n) {
    int i, j;
    for (i = 1; i < n; i++) {
        int64_t x = times[i];
        for (j = i; j > 0 && times[j - 1] > x; j--) times[j] = times[j - 1];
        times[j] = x;
    }
    return 0.5 * ((double)times[(n - 1) / 2] + (double)times[n / 2]);
}

static void ampi_tune_finish_rows(ampi_tune *t) {
    double full = 0;
    int k;
    for (k = 0; k < t->n; k++) {
        ampi_candidate *c = &t->candidates[k];
        if (c->row == NULL || c->row->verdict == AMP_VERDICT_FAILED) continue;
        c->row->seconds = 1e-9 * ampi_median_ns(c->times, t->desc.iterations);
        if (c->row->seconds > 0) c->row->rate = (double)c->row->batch / c->row->seconds;
        if (c->dtype == AMP_F32) full = c->row->seconds;
    }
    for (k = 0; k < t->n; k++)
        if (t->candidates[k].row != NULL && t->candidates[k].row->seconds > 0)
            t->candidates[k].row->speedup = full / t->candidates[k].row->seconds;
}

/* Rows for the candidates that are still in it. */
static void ampi_tune_open_rows(ampi_tune *t, int64_t batch) {
    int k;
    for (k = 0; k < t->n; k++) {
        ampi_candidate *c = &t->candidates[k];
        c->row = c->dropped ? NULL : &t->out->rows[t->out->n_rows++];
        if (c->row == NULL) continue;
        memset(c->row, 0, sizeof *c->row);
        c->row->dtype = c->dtype;
        c->row->batch = batch;
        c->row->verdict = c->verdict;
        memcpy(c->row->reason, c->reason, sizeof c->reason);
        c->dropped = c->verdict == AMP_VERDICT_FAILED;
    }
}

static void ampi_tune_batch(ampi_tune *t, int64_t batch) {
    int done, k;
    ampi_tune_open_rows(t, batch);
    for (done = 0; done < t->desc.iterations; done += AMPI_TUNE_TURN)
        for (k = 0; k < t->n; k++)
            if (t->candidates[k].row != NULL && !t->candidates[k].dropped) ampi_tune_turn(t, &t->candidates[k], done);
    ampi_tune_finish_rows(t);
}

static int ampi_tune_prepare(ampi_tune *t, int64_t batch) {
    int code = 0, depth;
    if (t->desc.prepare != NULL && t->prepared != batch) {
        depth = ampi_regions_hide(t->amp);
        ampi_error_text[0] = 0;
        code = t->desc.prepare(t->desc.user, t->amp, batch);
        ampi_regions_close(depth);
    }
    t->prepared = code == 0 ? batch : 0;
    return code;
}

/* Verdicts hold for every batch size. */
static amp_result ampi_tune_verify(ampi_tune *t) {
    const amp_verify_desc *d = t->desc.verify;
    amp_verify_desc v;
    amp_verify_report report;
    amp_dtype dtypes[AMPI_TUNE_DTYPES];
    int64_t i;
    int k;
    if (d == NULL) return AMP_OK;
    v = *d;
    v.dtypes = dtypes;
    v.n_dtypes = 0;
    for (k = 0; k < t->n; k++) if (t->candidates[k].dtype != AMP_F32) dtypes[v.n_dtypes++] = t->candidates[k].dtype;
    if (v.n_dtypes > 0) AMPI_TRY(amp_verify(t->amp, &v, &report));
    else report.n_rows = 0;
    AMPI_TRY(ampi_keep_create(t->amp, "amp_tune", d->params, d->n_params, d->optimizer, d->scaler, &t->keep));
    for (i = 0; i < report.n_rows; i++)
        for (k = 0; k < t->n; k++) {
            if (t->candidates[k].dtype != report.rows[i].dtype || report.rows[i].verdict == AMP_VERDICT_PASS) continue;
            t->candidates[k].verdict = report.rows[i].verdict;
            snprintf(t->candidates[k].reason, sizeof t->candidates[k].reason, "%.119s", report.rows[i].advice);
        }
    return AMP_OK;
}

static int ampi_tune_left(const ampi_tune *t) {
    int k, left = 0;
    for (k = 0; k < t->n; k++) left += !t->candidates[k].dropped;
    return left;
}

static amp_result ampi_tune_run(ampi_tune *t) {
    int64_t batch = t->desc.batch;
    int k, code;
    while (ampi_tune_left(t) > 0 && t->out->n_rows + ampi_tune_left(t) <= AMP_TUNE_ROWS) {
        code = ampi_tune_prepare(t, batch);
        if (code != 0) {
            ampi_tune_open_rows(t, batch);
            for (k = 0; k < t->n; k++) if (t->candidates[k].row != NULL) ampi_tune_failed(&t->candidates[k], "prepare", code);
            break;
        }
        if (batch == t->desc.batch) AMPI_TRY(ampi_tune_verify(t));
        ampi_tune_batch(t, batch);
        if (batch > t->desc.max_batch / 2) break;
        batch *= 2;
    }
    return AMP_OK;
}

/* The highest rate; the first row of those with the same. */
static void ampi_tune_pick(amp_tune_report *out) {
    int64_t i;
    out->best = -1;
    for (i = 0; i < out->n_rows; i++)
        if (out->rows[i].verdict == AMP_VERDICT_PASS && (out->best < 0 || out->rows[i].rate > out->rows[out->best].rate)) out->best = i;
}

/* What was the best batch once may not fit beside what runs now. */
static int ampi_tune_still_fits(ampi_tune *t) {
    int64_t batch;
    ampi_tune_pick(t->out);
    batch = t->out->best < 0 ? t->desc.batch : t->out->rows[t->out->best].batch;
    if (ampi_tune_prepare(t, batch) == 0) return 1;
    ampi_log(t->amp, AMP_LOG_WARNING, 1302, "tuned results ignored: batch %lld of %s cannot be prepared any more", (long long)batch, t->desc.file);
    memset(t->out, 0, sizeof *t->out);
    return 0;
}

static amp_result ampi_tune_time(ampi_tune *t) {
    ampi_precision before = ampi_precision_get(t->amp);
    int64_t *times;
    amp_result result, restored = AMP_OK;
    int k;
    AMPI_TRY(ampi_alloc(ampi_context_system(t->amp), "amp_tune", (void **)&times, (int64_t)t->n * t->desc.iterations, sizeof *times));
    for (k = 0; k < t->n; k++) t->candidates[k].times = times + k * t->desc.iterations;
    result = ampi_tune_run(t);
    if (t->keep != NULL) restored = ampi_keep_restore(t->keep);
    ampi_keep_destroy(t->keep);
    before.random_offset = ampi_precision_get(t->amp).random_offset;
    ampi_precision_set(t->amp, &before);
    ampi_free(ampi_context_system(t->amp), times, (int64_t)t->n * t->desc.iterations, sizeof *times);
    return result != AMP_OK ? result : restored;
}

AMP_API amp_result amp_tune_v(amp_context *amp, const amp_tune_desc *desc, amp_tune_report *out, uint64_t abi) {
    amp_result result = AMP_OK;
    amp_tune_report report;
    char why[200];
    ampi_tune t;
    int code = 0;
    AMPI_TRY(ampi_check_abi("amp_tune", abi, AMP_ABI(amp_tune_desc)));
    if (amp == NULL || desc == NULL || out == NULL)
        return ampi_fail(AMP_ERR_NULL, "amp_tune", "%s is NULL", amp == NULL ? "amp" : desc == NULL ? "desc" : "out");
    AMPI_TRY(ampi_check_tune(amp, desc));
    memset(&t, 0, sizeof t);
    t.amp = amp;
    t.desc = *desc;
    t.out = &report;
    memset(&report, 0, sizeof report);
    ampi_tune_fill(&t);
    report.from_file = ampi_tune_read(&t) && ampi_tune_still_fits(&t);
    if (!report.from_file) result = ampi_tune_time(&t);
    ampi_tune_pick(&report);
    if (result == AMP_OK) code = ampi_tune_prepare(&t, report.best >= 0 ? report.rows[report.best].batch : t.desc.batch);
    if (code != 0) ampi_host_said("prepare", code, why, sizeof why);
    if (result == AMP_OK && !report.from_file) result = ampi_tune_write(&t);
    amp_state_destroy(t.state);
    if (result != AMP_OK && result != AMP_ERR_WRITE) return result;
    *out = report;
    if (code == 0 || out->best < 0) return result;
    return ampi_fail(AMP_ERR_STATE, "amp_tune", "batch %lld was timed and is the best, but now %s", (long long)out->rows[out->best].batch, why);
}

AMP_API size_t amp_tune_text(const amp_tune_report *report, char *text, size_t size) {
    ampi_sheet sheet = ampi_sheet_of(text, size);
    int64_t i;
    if (report == NULL) return 0;
    ampi_print(&sheet, "  %-5s %8s %12s %12s %8s %10s  %s\n", "dtype", "batch", "ms/step", "samples/s", "speedup", "peak MiB", "verdict");
    for (i = 0; i < AMPI_MIN(report->n_rows, (int64_t)AMP_TUNE_ROWS); i++) {
        const amp_tune_row *row = &report->rows[i];
        ampi_print(&sheet, "%c %-5s %8lld ", i == report->best ? '*' : ' ', amp_dtype_name(row->dtype), (long long)row->batch);
        if (row->verdict == AMP_VERDICT_FAILED) ampi_print(&sheet, "%12s %12s %8s %10s", "-", "-", "-", "-");
        else ampi_print(&sheet, "%12.3f %12.1f %8.2f %10.1f", 1e3 * row->seconds, row->rate, row->speedup, (double)row->peak / 1048576.0);
        ampi_print(&sheet, "  %s%s%s\n", ampi_verdict_name(row->verdict), row->reason[0] ? ": " : "", row->reason);
    }
    return sheet.used;
}

/* ---- Recover.  Records come some steps late, so a snapshot is taken of weights that no record speaks of yet: it is a
   candidate until a later step was applied, whose finite loss and gradients were computed from them.  Then it replaces the
   one before; trouble drops it.  Two snapshots are held at most.

   Restoring sets the optimizer's count of steps back and drops the outcomes that were pending.  What a monitor or the host
   still has of the undone steps are records numbered from the last one seen to the last step done.  They are passed over
   until a number comes that is not among these: the new run's, which begins below. */

#define AMPI_SNAPSHOT "amp"         /* prefix of the library's records; the host's go beside them */

typedef struct ampi_snapshot {
    amp_state *state;               /* NULL: none */
    int64_t attempts, applied;      /* steps done until then */
} ampi_snapshot;

struct amp_recovery {
    amp_context *amp;
    amp_recovery_desc desc;         /* effective */
    ampi_snapshot good, candidate;
    int32_t retries;                /* since .interval good steps */
    int64_t streak;                 /* applied steps without trouble */
    int64_t next;                   /* applied steps when a snapshot is due */
    int64_t seen;                   /* the last record's number */
    int64_t undone;                 /* records from seen + 1 to this one are passed over; 0: none */
    int64_t cleaned;                /* 1 + steps done when memory was last cleaned up; 0: not yet */
};

static void ampi_snapshot_drop(ampi_snapshot *s) {
    amp_state_destroy(s->state);
    memset(s, 0, sizeof *s);
}

static int64_t ampi_weight_bytes(const amp_param *p) { return amp_tensor_count(&p->weight) * (int64_t)amp_dtype_size(p->weight.dtype); }

/* Every weight between its memory and the state, through `room`. */
static amp_result ampi_snapshot_weights(const amp_recovery *r, amp_state *state, int load, void *room) {
    int64_t i;
    for (i = 0; i < r->desc.n_params; i++) {
        amp_param *p = &r->desc.params[i];
        int64_t n = amp_tensor_count(&p->weight), bytes = ampi_weight_bytes(p);
        if (n <= 0) continue;
        if (!load) {
            AMPI_TRY(ampi_fetch(r->amp, room, p->weight.data, (size_t)bytes));
            AMPI_TRY(ampi_put(state, AMPI_SNAPSHOT, "weight", i, p->weight.dtype, room, n));
        } else {
            AMPI_TRY(ampi_get(state, AMPI_SNAPSHOT, "weight", i, p->weight.dtype, room, n));
            AMPI_TRY(ampi_send(r->amp, p->weight.data, room, (size_t)bytes));
            amp_param_touch(p);
        }
    }
    return AMP_OK;
}

static amp_result ampi_snapshot_move(const amp_recovery *r, amp_state *state, int load) {
    const amp_system *s = ampi_context_system(r->amp);
    int64_t i, most = 0;
    amp_result result;
    void *room;
    for (i = 0; i < r->desc.n_params; i++) most = AMPI_MAX(most, ampi_weight_bytes(&r->desc.params[i]));
    AMPI_TRY(ampi_alloc(s, "amp_recovery", &room, most, 1));
    result = ampi_snapshot_weights(r, state, load, room);
    ampi_free(s, room, most, 1);
    return result;
}

/* What a save or load of the host's returned, as a result. */
static amp_result ampi_host_failed(const char *what, int code) {
    char why[200];
    ampi_host_said(what, code, why, sizeof why);
    return ampi_fail(strcmp(amp_result_text((amp_result)code), "unknown result") ? (amp_result)code : AMP_ERR_STATE, "amp_recovery", "%s", why);
}

static amp_result ampi_snapshot_fill(const amp_recovery *r, ampi_snapshot *out) {
    const amp_recovery_desc *d = &r->desc;
    int64_t steps[AMPI_SAVED_STEPS];
    int code;
    AMPI_TRY(amp_state_create(&out->state, ampi_context_system(r->amp)));
    AMPI_TRY(ampi_snapshot_move(r, out->state, 0));
    AMPI_TRY(amp_optimizer_save(d->optimizer, out->state, AMPI_SNAPSHOT ".optimizer"));
    if (d->scaler != NULL) AMPI_TRY(amp_scaler_save(d->scaler, out->state, AMPI_SNAPSHOT ".scaler"));
    if (d->loader != NULL) AMPI_TRY(amp_loader_save(d->loader, out->state, AMPI_SNAPSHOT));
    AMPI_TRY(amp_random_save(r->amp, out->state, AMPI_SNAPSHOT));
    ampi_error_text[0] = 0;
    code = d->save ? d->save(d->user, out->state) : 0;
    if (code != 0) return ampi_host_failed("save", code);
    AMPI_TRY(ampi_get(out->state, AMPI_SNAPSHOT ".optimizer", "step", -1, AMP_I64, steps, AMPI_SAVED_STEPS));
    out->attempts = steps[2];
    out->applied = steps[5];
    return AMP_OK;
}

static amp_result ampi_snapshot_take(const amp_recovery *r, ampi_snapshot *out) {
    amp_result result = ampi_snapshot_fill(r, out);
    if (result != AMP_OK) ampi_snapshot_drop(out);
    return result;
}

/* Everything as it was, but for the outcomes that were pending then: they are of good steps, and have been delivered. */
static amp_result ampi_snapshot_restore(const amp_recovery *r, const ampi_snapshot *s) {
    const amp_recovery_desc *d = &r->desc;
    int code;
    AMPI_TRY(ampi_wait(r->amp));
    AMPI_TRY(ampi_snapshot_move(r, s->state, 1));
    AMPI_TRY(amp_optimizer_load(d->optimizer, s->state, AMPI_SNAPSHOT ".optimizer"));
    d->optimizer->delivered = d->optimizer->attempts;
    if (d->scaler != NULL && ampi_has_record(s->state, AMPI_SNAPSHOT ".scaler", "scale", -1))
        AMPI_TRY(amp_scaler_load(d->scaler, s->state, AMPI_SNAPSHOT ".scaler"));
    if (d->loader != NULL) AMPI_TRY(amp_loader_load(d->loader, s->state, AMPI_SNAPSHOT));
    AMPI_TRY(amp_random_load(r->amp, s->state, AMPI_SNAPSHOT));
    ampi_error_text[0] = 0;
    code = d->load ? d->load(d->user, s->state) : 0;
    return code != 0 ? ampi_host_failed("load", code) : AMP_OK;
}

static amp_result ampi_check_recovery(const amp_context *amp, const amp_recovery_desc *d) {
    static const char f[] = "amp_recovery_create";
    int64_t i;
    if (d->params == NULL) return ampi_fail(AMP_ERR_NULL, f, ".params is NULL");
    if (d->n_params < 1) return ampi_fail(AMP_ERR_RANGE, f, ".n_params = %lld, must be 1 or more", (long long)d->n_params);
    if (d->optimizer == NULL) return ampi_fail(AMP_ERR_NULL, f, ".optimizer is NULL");
    if (d->interval < 0) return ampi_fail(AMP_ERR_RANGE, f, ".interval = %lld, must be 1 or more, or 0 for 100", (long long)d->interval);
    if (d->max_retries < AMP_NO_RETRIES || d->max_retries > 1000)
        return ampi_fail(AMP_ERR_RANGE, f, ".max_retries = %d, must be 1 to 1000, 0 for 3, or AMP_NO_RETRIES", d->max_retries);
    if ((d->save == NULL) != (d->load == NULL)) return ampi_fail(AMP_ERR_CONFLICT, f, ".save and .load come both or neither");
    for (i = 0; i < d->n_params; i++) {
        const amp_param *p = &d->params[i];
        if (p->weight.data == NULL) return ampi_fail(AMP_ERR_NULL, f, ".params[%lld] %s has no weight", (long long)i, p->name ? p->name : "");
        AMPI_TRY(ampi_check_tensor(f, p->name ? p->name : "weight", &p->weight));
        if (!ampi_is_contiguous(&p->weight)) return ampi_fail(AMP_ERR_SHAPE, f, "%s: the weight is not contiguous", p->name ? p->name : "?");
    }
    if (d->optimizer->amp != amp || (d->scaler != NULL && d->scaler->amp != amp))
        return ampi_fail(AMP_ERR_CONFLICT, f, ".%s is of another context", d->optimizer->amp != amp ? "optimizer" : "scaler");
    if (d->optimizer->micro > 0)
        return ampi_fail(AMP_ERR_STATE, f, "%d of %d micro-batches are accumulated: create it between steps",
                         d->optimizer->micro, d->optimizer->desc.accumulation);
    return AMP_OK;
}

AMP_API amp_result amp_recovery_create_v(amp_context *amp, amp_recovery **out, const amp_recovery_desc *desc, uint64_t abi) {
    amp_recovery *r;
    amp_result result;
    AMPI_TRY(ampi_check_abi("amp_recovery_create", abi, AMP_ABI(amp_recovery_desc)));
    if (out != NULL) *out = NULL;
    if (amp == NULL || out == NULL || desc == NULL)
        return ampi_fail(AMP_ERR_NULL, "amp_recovery_create", "%s is NULL", amp == NULL ? "amp" : out == NULL ? "out" : "desc");
    AMPI_TRY(ampi_check_recovery(amp, desc));
    AMPI_TRY(ampi_alloc(ampi_context_system(amp), "amp_recovery_create", (void **)&r, 1, sizeof *r));
    r->amp = amp;
    r->desc = *desc;
    if (r->desc.interval == 0) r->desc.interval = 100;
    if (r->desc.max_retries == 0) r->desc.max_retries = 3;
    if (r->desc.max_retries == AMP_NO_RETRIES) r->desc.max_retries = 0;
    result = ampi_snapshot_take(r, &r->good);
    if (result != AMP_OK) { amp_recovery_destroy(r); return result; }
    r->next = r->good.applied + r->desc.interval;
    *out = r;
    return AMP_OK;
}

AMP_API void amp_recovery_destroy(amp_recovery *recovery) {
    if (recovery == NULL) return;
    ampi_snapshot_drop(&recovery->good);
    ampi_snapshot_drop(&recovery->candidate);
    ampi_free(ampi_context_system(recovery->amp), recovery, 1, sizeof *recovery);
}

/* ---- What is planned */

/* The layer's name is its tensor's up to the last dot. */
static void ampi_layer_pattern(const char *name, char pattern[64]) {
    const char *dot = strrchr(name, '.');
    size_t n = dot ? (size_t)(dot - name) + 1 : strlen(name);
    if (n > 62) n = 62;
    memcpy(pattern, name, n);
    pattern[n] = dot || name[n] ? '*' : 0;
    pattern[n + 1] = 0;
}

static int ampi_layer_is_fp32(const amp_context *amp, const char *pattern) {
    int64_t i;
    for (i = 0; i < amp->n_layers; i++)
        if (amp->layers[i].dtype == AMP_F32 && strcmp(amp->layers[i].pattern, pattern) == 0) return 1;
    return 0;
}

/* The next wider format: fp16 -> bf16 where there is one, all else -> fp32. */
static amp_dtype ampi_next_dtype(const amp_context *amp) {
    amp_dtype now = ampi_settings(amp)->dtype;
    amp_choice choice;
    return now == AMP_F16 && amp_choose(&amp->machine, AMP_BF16, 1, &choice) == AMP_OK && !choice.fell_back ? AMP_BF16 : AMP_F32;
}

/* 1: a wider format is there, and may be switched to: levels O2 and O3 keep theirs. */
static int ampi_can_widen(const amp_context *amp) {
    const amp_desc *d = ampi_settings(amp);
    return !d->disable && d->dtype != AMP_F32 && d->level < AMP_LEVEL_O2;
}

/* A gradient that is not finite points to its layer.  A loss that is not makes every gradient NaN, and a scale at its floor
   is no single layer's doing: both take a wider format, where there is one. */
static void ampi_plan_cure(const amp_recovery *r, const amp_step_record *record, amp_recovery_event *event) {
    const amp_context *amp = r->amp;
    const char *bad = r->desc.optimizer->desc.sharded && ampi_world(amp) > 1 ? NULL : record->outcome.first_bad;    /* sharded: this rank's own */
    int everywhere = record->trouble == AMP_TROUBLE_LOSS || record->trouble == AMP_TROUBLE_FLOOR, wide = ampi_can_widen(amp);
    if (ampi_settings(amp)->disable || ampi_settings(amp)->dtype == AMP_F32) return;
    if (bad != NULL) ampi_layer_pattern(bad, event->layer);
    if (bad != NULL && !(everywhere && wide) && !ampi_layer_is_fp32(amp, event->layer)) event->cure = AMP_CURE_LAYERS;
    else if (wide) { event->cure = AMP_CURE_DTYPE; event->dtype = ampi_next_dtype(amp); }
}

static const char *ampi_trouble_text(amp_trouble trouble) {
    switch (trouble) {
        case AMP_TROUBLE_LOSS: return "the loss is not finite";
        case AMP_TROUBLE_GRADIENTS: return "gradients are not finite";
        case AMP_TROUBLE_FLOOR: return "gradients overflow at the scale's floor";
        case AMP_TROUBLE_SKIPS: return "too many steps in a row were skipped";
        default: return "asked for";
    }
}

static amp_recovery_event ampi_event(const amp_recovery *r, amp_recovery_action action, amp_trouble trouble) {
    amp_recovery_event e;
    memset(&e, 0, sizeof e);
    e.action = action;
    e.trouble = trouble;
    e.dtype = ampi_settings(r->amp)->dtype;
    e.step = r->good.applied;
    e.retries = r->retries;
    e.left = r->desc.max_retries - r->retries;
    return e;
}

/* ---- What is done */

/* Asks the policy.  1: it was the policy that set the learning rate, so restoring keeps it. */
static int ampi_ask(const amp_recovery *r, amp_recovery_event *event) {
    double lr = r->desc.optimizer->desc.lr;
    amp_recovery_event planned = *event;
    if (r->desc.policy == NULL) return 0;
    r->desc.policy(r->desc.user, event);
    if (event->action < AMP_RECOVERY_NONE || event->action > AMP_RECOVERY_STOP) event->action = planned.action;
    if (event->cure < AMP_CURE_NONE || event->cure > AMP_CURE_DTYPE) event->cure = planned.cure;
    event->layer[sizeof event->layer - 1] = 0;
    event->trouble = planned.trouble;
    event->step = planned.step;
    return ampi_bits_f64(lr) != ampi_bits_f64(r->desc.optimizer->desc.lr);
}

/* Without fp16 there is nothing to scale, as for settings with "scaler" auto. */
static amp_result ampi_cure_dtype(const amp_recovery *r, amp_dtype dtype) {
    amp_scaler *scaler = ampi_enabled(r->desc.scaler);
    amp_scaler_desc d;
    AMPI_TRY(amp_set_dtype(r->amp, dtype));
    if (scaler == NULL || ampi_settings(r->amp)->dtype == AMP_F16) return AMP_OK;
    d = scaler->desc;
    d.disable = 1;
    return ampi_scaler_change(scaler, &d);
}

static amp_result ampi_cure(const amp_recovery *r, amp_recovery_event *event) {
    if (event->cure == AMP_CURE_LAYERS && event->layer[0] == 0) event->cure = AMP_CURE_NONE;
    if (event->cure == AMP_CURE_DTYPE && !ampi_can_widen(r->amp)) event->cure = AMP_CURE_NONE;
    if (event->cure == AMP_CURE_LAYERS) AMPI_TRY(amp_layer_override(r->amp, event->layer, AMP_F32));
    if (event->cure == AMP_CURE_DTYPE) AMPI_TRY(ampi_cure_dtype(r, ampi_next_dtype(r->amp)));
    event->dtype = ampi_settings(r->amp)->dtype;
    return AMP_OK;
}

/* The last good snapshot, and from there on. */
static amp_result ampi_go_back(amp_recovery *r, int keep_lr) {
    amp_optimizer *o = r->desc.optimizer;
    double lr = o->desc.lr;
    int64_t last = o->attempts;
    AMPI_TRY(ampi_snapshot_restore(r, &r->good));
    if (keep_lr) o->desc.lr = lr;
    ampi_snapshot_drop(&r->candidate);
    r->undone = r->seen > r->good.attempts ? last : 0;
    r->next = r->good.applied + r->desc.interval;
    r->streak = 0;
    return AMP_OK;
}

static void ampi_event_text(amp_recovery_event *e, const amp_step_record *record) {
    const char *where = record->outcome.first_bad;
    char cure[100] = "nothing else changed";
    if (e->cure == AMP_CURE_LAYERS) snprintf(cure, sizeof cure, "%.63s in fp32 from now on", e->layer);
    if (e->cure == AMP_CURE_DTYPE) snprintf(cure, sizeof cure, "%s from now on", amp_dtype_name(e->dtype));
    snprintf(e->text, sizeof e->text, "step %lld: %s%s%.40s; back to %lld applied steps, %s", (long long)record->outcome.step,
             ampi_trouble_text(e->trouble), where ? ", first in " : "", where ? where : "", (long long)e->step,
             e->action == AMP_RECOVERY_STOP ? "stop" : cure);
}

/* Trouble that is only noted: snapshots since are worth nothing. */
static void ampi_note_bad(amp_recovery *r) {
    ampi_snapshot_drop(&r->candidate);
    r->streak = 0;
    r->next = 0;
}

static amp_result ampi_recover(amp_recovery *r, const amp_step_record *record, amp_recovery_event *out) {
    amp_recovery_event e = ampi_event(r, AMP_RECOVERY_RESTORED, record->trouble);
    int keep_lr;
    if (e.left > 0) {
        ampi_plan_cure(r, record, &e);
        e.retries++;
        e.left--;
    } else e.action = AMP_RECOVERY_STOP;
    ampi_event_text(&e, record);
    keep_lr = ampi_ask(r, &e);
    if (e.action == AMP_RECOVERY_NONE) { ampi_note_bad(r); *out = e; return AMP_OK; }
    if (e.action == AMP_RECOVERY_STOP) e.cure = AMP_CURE_NONE;
    else e.action = AMP_RECOVERY_RESTORED;
    AMPI_TRY(ampi_go_back(r, keep_lr));
    AMPI_TRY(ampi_cure(r, &e));
    r->retries = e.retries;
    ampi_event_text(&e, record);
    ampi_log(r->amp, e.action == AMP_RECOVERY_STOP ? AMP_LOG_ERROR : AMP_LOG_WARNING, 1303, "%s", e.text);
    *out = e;
    return AMP_OK;
}

/* ---- Records */

/* 1: of a step that was undone. */
static int ampi_is_undone(amp_recovery *r, int64_t step) {
    if (step > r->seen && step <= r->undone) return 1;
    r->undone = 0;
    r->seen = step;
    return 0;
}

static void ampi_note_good(amp_recovery *r, const amp_step_record *record) {
    ampi_snapshot *c = &r->candidate;
    if (!record->outcome.applied) return;
    if (++r->streak >= r->desc.interval) r->retries = 0;
    if (c->state != NULL && record->outcome.step > c->attempts) {
        ampi_snapshot_drop(&r->good);
        r->good = *c;
        memset(c, 0, sizeof *c);
    }
    if (c->state != NULL || r->desc.optimizer->micro > 0 || record->outcome.applied_steps < r->next) return;
    r->next = record->outcome.applied_steps + r->desc.interval;
    if (ampi_snapshot_take(r, c) != AMP_OK)
        ampi_log(r->amp, AMP_LOG_WARNING, 1304, "no snapshot at step %lld, that of %lld applied steps stays: %s", (long long)record->outcome.step,
                 (long long)r->good.applied, amp_last_error());
}

AMP_API amp_result amp_recovery_step(amp_recovery *recovery, const amp_step_record *record, amp_recovery_event *event) {
    amp_recovery *r = recovery;
    if (r == NULL || record == NULL || event == NULL)
        return ampi_fail(AMP_ERR_NULL, "amp_recovery_step", "%s is NULL", r == NULL ? "recovery" : record == NULL ? "record" : "event");
    AMPI_TRY(ampi_may_wait(r->amp));
    *event = ampi_event(r, AMP_RECOVERY_NONE, AMP_TROUBLE_NONE);
    if (ampi_is_undone(r, record->outcome.step)) return AMP_OK;
    if (record->trouble == AMP_TROUBLE_NONE) ampi_note_good(r, record);
    else if (record->action == AMP_NAN_RECOVER) return ampi_recover(r, record, event);
    else ampi_note_bad(r);
    return AMP_OK;
}

/* ---- Memory */

/* Out of memory a second time in one step. */
static amp_result ampi_halve(amp_recovery *r, amp_recovery_event *e) {
    amp_optimizer *o = r->desc.optimizer;
    int32_t n = o->desc.accumulation, most = INT32_MAX / 2;
    int keep_lr;
    e->action = n > most ? AMP_RECOVERY_STOP : AMP_RECOVERY_HALVE_BATCH;
    snprintf(e->text, sizeof e->text, "out of memory again in step %lld: half of the micro-batch, and twice as many of them as the %d of a step",
             (long long)o->attempts + 1, n);
    keep_lr = ampi_ask(r, e);
    if (e->action == AMP_RECOVERY_HALVE_BATCH && n <= most) return amp_optimizer_set_accumulation(o, 2 * n);
    AMPI_TRY(amp_optimizer_set_accumulation(o, n));
    if (e->action == AMP_RECOVERY_NONE || e->action == AMP_RECOVERY_RETRY) return AMP_OK;
    if (e->action == AMP_RECOVERY_HALVE_BATCH) e->action = AMP_RECOVERY_STOP;
    AMPI_TRY(ampi_go_back(r, keep_lr));
    if (e->action == AMP_RECOVERY_RESTORED) AMPI_TRY(ampi_cure(r, e));
    snprintf(e->text, sizeof e->text, "out of memory: back to %lld applied steps%s", (long long)e->step,
             e->action == AMP_RECOVERY_STOP ? ", stop" : "");
    return AMP_OK;
}

/* One cleanup per step, then ever smaller micro-batches.  What the cycle has accumulated is dropped, since a part of what
   failed may be in it. */
AMP_API amp_result amp_recovery_memory(amp_recovery *recovery, amp_recovery_event *event) {
    amp_recovery *r = recovery;
    amp_recovery_event e;
    amp_optimizer *o;
    int64_t freed = 0;
    int again;
    if (r == NULL || event == NULL) return ampi_fail(AMP_ERR_NULL, "amp_recovery_memory", "%s is NULL", r == NULL ? "recovery" : "event");
    AMPI_TRY(ampi_may_wait(r->amp));
    o = r->desc.optimizer;
    again = r->cleaned == o->attempts + 1;
    e = ampi_event(r, AMP_RECOVERY_RETRY, AMP_TROUBLE_NONE);
    AMPI_TRY(amp_cleanup(r->amp, &freed));
    r->cleaned = o->attempts + 1;
    if (again) AMPI_TRY(ampi_halve(r, &e));
    else {
        AMPI_TRY(amp_optimizer_set_accumulation(o, o->desc.accumulation));
        snprintf(e.text, sizeof e.text, "out of memory in step %lld: %lld bytes given back, and the step once more",
                 (long long)o->attempts + 1, (long long)freed);
    }
    ampi_log(r->amp, AMP_LOG_WARNING, 1305, "%s", e.text);
    *event = e;
    return AMP_OK;
}

#if AMPI_X86 && !defined(__clang__)
#  pragma GCC diagnostic pop
#endif
#ifdef __cplusplus
}
#endif
#endif /* AMP_IMPLEMENTATION */

/* ==== Vector kernels: compiled once per instruction set, see AMPI_PASS ============================== */
#if defined(AMPI_PASS)

typedef float ampi_vf __attribute__((vector_size(AMPI_W * 4), may_alias));
typedef int32_t ampi_vi __attribute__((vector_size(AMPI_W * 4), may_alias));

AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_load)(const float *p) { ampi_vf v; memcpy(&v, p, sizeof v); return v; }
AMPI_PRIVATE inline void AMPI_V(ampi_store)(float *p, ampi_vf v) { memcpy(p, &v, sizeof v); }
AMPI_PRIVATE inline void AMPI_V(ampi_store_past_cache)(float *p, ampi_vf v) {        /* p: at a multiple of a vector's size */
#if AMPI_X86 && AMPI_PASS == 3
    _mm512_stream_ps(p, (__m512)v);
#elif AMPI_X86 && AMPI_PASS == 2
    _mm256_stream_ps(p, (__m256)v);
#else
    AMPI_V(ampi_store)(p, v);
#endif
}

/* ---- Numbers: bulk conversions, with the bits of the scalar functions of section 2. */

#define ampi_vu AMPI_V(ampi_vuint)       /* AMPI_W uint32 */
typedef uint32_t ampi_vu __attribute__((vector_size(AMPI_W * 4), may_alias));

AMPI_PRIVATE inline ampi_vu AMPI_V(ampi_load32)(const void *p, int64_t i) {
    ampi_vu v;
    memcpy(&v, (const char *)p + 4 * i, sizeof v);
    return v;
}
AMPI_PRIVATE inline void AMPI_V(ampi_store32)(void *p, int64_t i, ampi_vu v) {
    memcpy((char *)p + 4 * i, &v, sizeof v);
}

/* 16-bit elements from i on, widened into 32-bit lanes, and back; the lanes must be below 65536. */
AMPI_PRIVATE inline ampi_vu AMPI_V(ampi_load16)(const void *p, int64_t i) {
    const char *from = (const char *)p + 2 * i;
#if AMPI_PASS == 3
    return (ampi_vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)from));
#elif AMPI_PASS == 2
    return (ampi_vu)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)from));
#else
    typedef uint16_t half __attribute__((vector_size(AMPI_W * 2)));
    half v;
    memcpy(&v, from, sizeof v);
    return __builtin_convertvector(v, ampi_vu);
#endif
}
AMPI_PRIVATE inline void AMPI_V(ampi_store16)(void *p, int64_t i, ampi_vu v) {
    char *to = (char *)p + 2 * i;
#if AMPI_PASS == 3
    _mm256_storeu_si256((__m256i *)(void *)to, _mm512_cvtepi32_epi16((__m512i)v));
#elif AMPI_PASS == 2
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)v, (__m256i)v), 0x08);
    _mm_storeu_si128((__m128i *)(void *)to, _mm256_castsi256_si128(packed));
#else
    typedef uint16_t half __attribute__((vector_size(AMPI_W * 2)));
    half narrow = __builtin_convertvector(v, half);
    memcpy(to, &narrow, sizeof narrow);
#endif
}

/* All ones in the lanes that hold a NaN. */
AMPI_PRIVATE inline ampi_vu AMPI_V(ampi_nan_lanes)(ampi_vu x) {
    return (ampi_vu)((ampi_vi)(x & 0x7fffffffu) > 0x7f800000);
}

/* bf16 patterns: x + add, cut.  To nearest even, add is 0x7fff + the lowest kept bit; stochastic, 16 random bits. */
AMPI_PRIVATE inline ampi_vu AMPI_V(ampi_bf16_round)(ampi_vu x, ampi_vu add) {
    ampi_vu nan = AMPI_V(ampi_nan_lanes)(x);
    return (((x + add) >> 16) & ~nan) | (((x >> 16) | 0x40u) & nan);
}

AMPI_PRIVATE void AMPI_V(ampi_bf16_from_f32)(void *dst, const void *src, int64_t n) {
    int64_t i;
    for (i = 0; i + AMPI_W <= n; i += AMPI_W) {
        ampi_vu x = AMPI_V(ampi_load32)(src, i);
        AMPI_V(ampi_store16)(dst, i, AMPI_V(ampi_bf16_round)(x, ((x >> 16) & 1u) + 0x7fffu));
    }
    for (; i < n; i++) ampi_put16(dst, i, ampi_to_bf16(ampi_get32(src, i), 0, 0, AMPI_EVEN, 0));
}

AMPI_PRIVATE void AMPI_V(ampi_bf16_stochastic)(void *dst, const void *src, int64_t n, const uint32_t *random,
                                               int shift) {
    int64_t i;
    for (i = 0; i + AMPI_W <= n; i += AMPI_W) {
        ampi_vu add = AMPI_V(ampi_load32)(random, i) << shift >> 16;
        AMPI_V(ampi_store16)(dst, i, AMPI_V(ampi_bf16_round)(AMPI_V(ampi_load32)(src, i), add));
    }
    for (; i < n; i++) ampi_put16(dst, i, ampi_to_bf16(ampi_get32(src, i), 0, 0, AMPI_STOCHASTIC, random[i] << shift));
}

AMPI_PRIVATE void AMPI_V(ampi_bf16_split)(void *bf16, void *rest, const void *src, int64_t n) {
    uint16_t low;
    int64_t i;
    for (i = 0; i + AMPI_W <= n; i += AMPI_W) {
        ampi_vu x = AMPI_V(ampi_load32)(src, i), zero = {0};
        AMPI_V(ampi_store16)(bf16, i, AMPI_V(ampi_bf16_round)(x, zero + 0x8000u));
        AMPI_V(ampi_store16)(rest, i, x & 0xffffu);
    }
    for (; i < n; i++) {
        ampi_put16(bf16, i, amp_bf16_split(ampi_f32_of_bits(ampi_get32(src, i)), &low));
        ampi_put16(rest, i, low);
    }
}

AMPI_PRIVATE void AMPI_V(ampi_f32_join)(void *dst, const void *bf16, const void *rest, int64_t n) {
    int64_t i;
    for (i = 0; i + AMPI_W <= n; i += AMPI_W) {
        ampi_vu x = AMPI_V(ampi_load16)(bf16, i), low = AMPI_V(ampi_load16)(rest, i);
        ampi_vi magnitude = (ampi_vi)(x & 0x7fffu);
        ampi_vu rounded_up = (low >> 15) & (ampi_vu)(magnitude > 0) & (ampi_vu)(magnitude <= 0x7f80);
        AMPI_V(ampi_store32)(dst, i, (x - rounded_up) << 16 | low);
    }
    for (; i < n; i++) ampi_put32(dst, i, ampi_bits_f32(amp_f32_join(ampi_get16(bf16, i), ampi_get16(rest, i))));
}

AMPI_PRIVATE void AMPI_V(ampi_f32_from_bf16)(void *dst, const void *src, int64_t n) {
    int64_t i;
    for (i = 0; i + AMPI_W <= n; i += AMPI_W) AMPI_V(ampi_store32)(dst, i, AMPI_V(ampi_load16)(src, i) << 16);
    for (; i < n; i++) ampi_put32(dst, i, (uint32_t)ampi_get16(src, i) << 16);
}

/* F16C instructions do not depend on flush-to-zero or denormals-are-zero: fp16 subnormals are always kept, and an
   fp32 subnormal is far below the smallest of them. */
AMPI_PRIVATE void AMPI_V(ampi_f16_from_f32)(void *dst, const void *src, int64_t n) {
    int64_t i = 0;
#if AMPI_PASS == 3
    for (; i + 16 <= n; i += 16) {
        __m512 x = _mm512_loadu_ps((const void *)((const char *)src + 4 * i));
        __m256i r = _mm512_maskz_cvtps_ph(0xffff, x, _MM_FROUND_TO_NEAREST_INT);
        _mm256_storeu_si256((__m256i *)(void *)((char *)dst + 2 * i), r);
    }
#elif AMPI_PASS == 2
    for (; i + 8 <= n; i += 8) {
        __m256 x = _mm256_loadu_ps((const float *)(const void *)((const char *)src + 4 * i));
        _mm_storeu_si128((__m128i *)(void *)((char *)dst + 2 * i), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
#endif
    for (; i < n; i++) ampi_put16(dst, i, ampi_to_f16(ampi_get32(src, i), 0, 0, AMPI_EVEN, 0));
}

AMPI_PRIVATE void AMPI_V(ampi_f32_from_f16)(void *dst, const void *src, int64_t n) {
    int64_t i = 0;
#if AMPI_PASS == 3
    for (; i + 16 <= n; i += 16) {
        __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)((const char *)src + 2 * i));
        _mm512_storeu_ps((void *)((char *)dst + 4 * i), _mm512_cvtph_ps(x));
    }
#elif AMPI_PASS == 2
    for (; i + 8 <= n; i += 8) {
        __m128i x = _mm_loadu_si128((const __m128i *)(const void *)((const char *)src + 2 * i));
        _mm256_storeu_ps((float *)(void *)((char *)dst + 4 * i), _mm256_cvtph_ps(x));
    }
#endif
    for (; i < n; i++) ampi_put32(dst, i, ampi_bits_of_f16(ampi_get16(src, i)));
}

AMPI_PRIVATE void AMPI_V(ampi_tf32_from_f32)(void *dst, const void *src, int64_t n) {
    int64_t i;
    for (i = 0; i + AMPI_W <= n; i += AMPI_W) {
        ampi_vu x = AMPI_V(ampi_load32)(src, i), nan = AMPI_V(ampi_nan_lanes)(x);
        AMPI_V(ampi_store32)(dst, i, (((x + 0x1000u) & ~nan) | ((x | 0x400000u) & nan)) & 0xffffe000u);
    }
    for (; i < n; i++) ampi_put32(dst, i, ampi_to_tf32(ampi_get32(src, i), 0, 0));
}

AMPI_PRIVATE void AMPI_V(ampi_clamp)(void *dst, const void *src, int64_t n, uint32_t limit) {
    int64_t i;
    for (i = 0; i + AMPI_W <= n; i += AMPI_W) {
        ampi_vu x = AMPI_V(ampi_load32)(src, i);
        ampi_vi magnitude = (ampi_vi)(x & 0x7fffffffu);
        ampi_vu above = (ampi_vu)((magnitude > (int32_t)limit) & (magnitude <= 0x7f800000));
        AMPI_V(ampi_store32)(dst, i, (x & ~above) | (((x & 0x80000000u) | limit) & above));
    }
    for (; i < n; i++) {
        uint32_t x = ampi_get32(src, i), magnitude = x & 0x7fffffffu;
        ampi_put32(dst, i, magnitude > limit && magnitude <= 0x7f800000u ? (x & 0x80000000u) | limit : x);
    }
}

/* Counts in 32-bit lanes, emptied before they can overflow. */
AMPI_PRIVATE int64_t AMPI_V(ampi_count32)(const void *src, int64_t n, uint32_t mask) {
    int64_t i = 0, total = 0;
    while (i + AMPI_W <= n) {
        int64_t last = AMPI_MIN(n - AMPI_W, i + ((int64_t)1 << 30));
        ampi_vi count = {0};
        int lane;
        for (; i <= last; i += AMPI_W) count -= (ampi_vi)((AMPI_V(ampi_load32)(src, i) & mask) == mask);
        for (lane = 0; lane < AMPI_W; lane++) total += count[lane];
    }
    for (; i < n; i++) total += (ampi_get32(src, i) & mask) == mask;
    return total;
}

/* The same over pairs of 16-bit elements. */
AMPI_PRIVATE int64_t AMPI_V(ampi_count16)(const void *src, int64_t n, uint32_t mask) {
    uint32_t high = mask << 16;
    int64_t pairs = n / 2, i = 0, total = 0;
    while (i + AMPI_W <= pairs) {
        int64_t last = AMPI_MIN(pairs - AMPI_W, i + ((int64_t)1 << 30));
        ampi_vi count = {0};
        int lane;
        for (; i <= last; i += AMPI_W) {
            ampi_vu x = AMPI_V(ampi_load32)(src, i);
            count -= (ampi_vi)((x & mask) == mask) + (ampi_vi)((x & high) == high);
        }
        for (lane = 0; lane < AMPI_W; lane++) total += count[lane];
    }
    for (i *= 2; i < n; i++) total += (ampi_get16(src, i) & mask) == mask;
    return total;
}

/* ---- Random numbers: AMPI_W Philox blocks at once, one in each lane. */

#if AMPI_PASS >= 2
#if AMPI_PASS == 3
#  define AMPI_M(name) _mm512_##name
#  define ampi_mi __m512i
#else
#  define AMPI_M(name) _mm256_##name
#  define ampi_mi __m256i
#endif

/* The low and high halves of the products with m. */
AMPI_PRIVATE inline void AMPI_V(ampi_multiply)(ampi_vu x, uint32_t m, ampi_vu *low, ampi_vu *high) {
    typedef uint64_t wide __attribute__((vector_size(AMPI_W * 4)));
    ampi_mi factor = AMPI_M(set1_epi32)((int)m);
    wide even = (wide)AMPI_M(mul_epu32)((ampi_mi)x, factor);
    wide odd = (wide)AMPI_M(mul_epu32)((ampi_mi)((wide)x >> 32), factor);
    *low = (ampi_vu)((even & 0xffffffffu) | odd << 32);
    *high = (ampi_vu)(even >> 32 | (odd & 0xffffffff00000000u));
}

/* out[0..4W) = the blocks from `block` on, whose low words must not wrap.  A transposition of 4 x 4 words in each
   128 bits leaves word groups in the order lane 0, 4, 8, .. 1, 5, ..: the lanes' blocks are numbered to fit. */
AMPI_PRIVATE void AMPI_V(ampi_philox)(uint32_t *out, uint64_t seed, uint64_t block) {
    ampi_vu c0 = {0}, c1 = c0 + (uint32_t)(block >> 32), c2 = c0, c3 = c0, low0, high0, low2, high2;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    ampi_mi a, b, c, d;
    int i;
    for (i = 0; i < AMPI_W; i++) c0[i] = (uint32_t)block + (uint32_t)(i % 4 * (AMPI_W / 4) + i / 4);
    for (i = 0; i < 10; i++) {
        AMPI_V(ampi_multiply)(c0, 0xD2511F53u, &low0, &high0);
        AMPI_V(ampi_multiply)(c2, 0xCD9E8D57u, &low2, &high2);
        c0 = high2 ^ c1 ^ k0;
        c1 = low2;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    a = AMPI_M(unpacklo_epi32)((ampi_mi)c0, (ampi_mi)c1);
    b = AMPI_M(unpackhi_epi32)((ampi_mi)c0, (ampi_mi)c1);
    c = AMPI_M(unpacklo_epi32)((ampi_mi)c2, (ampi_mi)c3);
    d = AMPI_M(unpackhi_epi32)((ampi_mi)c2, (ampi_mi)c3);
    AMPI_V(ampi_store32)(out, 0, (ampi_vu)AMPI_M(unpacklo_epi64)(a, c));
    AMPI_V(ampi_store32)(out, AMPI_W, (ampi_vu)AMPI_M(unpackhi_epi64)(a, c));
    AMPI_V(ampi_store32)(out, 2 * AMPI_W, (ampi_vu)AMPI_M(unpacklo_epi64)(b, d));
    AMPI_V(ampi_store32)(out, 3 * AMPI_W, (ampi_vu)AMPI_M(unpackhi_epi64)(b, d));
}
#undef AMPI_M
#undef ampi_mi
#endif

AMPI_PRIVATE void AMPI_V(ampi_random)(uint32_t *out, int64_t n, uint64_t seed, uint64_t index) {
    uint32_t words[4];
    int64_t i = 0;
    while (i < n) {
        uint64_t block = (index + (uint64_t)i) / 4, word = (index + (uint64_t)i) % 4;
#if AMPI_PASS >= 2
        if (word == 0 && n - i >= 4 * AMPI_W && (uint32_t)block <= 0xffffffffu - AMPI_W) {
            AMPI_V(ampi_philox)(out + i, seed, block);
            i += 4 * AMPI_W;
            continue;
        }
#endif
        amp_philox(seed, 0, block, words);
        for (; word < 4 && i < n; word++) out[i++] = words[word];
    }
}

static const ampi_numbers_vec AMPI_V(ampi_numbers_kernels) = {
    AMPI_V(ampi_f32_from_f16), AMPI_V(ampi_f16_from_f32), AMPI_V(ampi_f32_from_bf16), AMPI_V(ampi_bf16_from_f32),
    AMPI_V(ampi_tf32_from_f32), AMPI_V(ampi_clamp), AMPI_V(ampi_bf16_stochastic), AMPI_V(ampi_bf16_split),
    AMPI_V(ampi_f32_join), AMPI_V(ampi_count16), AMPI_V(ampi_count32), AMPI_V(ampi_random),
};
#undef ampi_vu


/* ---- Vector helpers and elementary functions.  They hold under -Ofast too: special values are told apart by
   their bits, and AMPI_V(ampi_keep) stops the compiler from rearranging a sum whose order matters. */

AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_splat)(float x) {
#if AMPI_PASS == 3
    return (ampi_vf)_mm512_set1_ps(x);
#elif AMPI_PASS == 2
    return (ampi_vf)_mm256_set1_ps(x);
#else
    ampi_vf v = {x, x, x, x};
    return v;
#endif
}
AMPI_PRIVATE inline ampi_vi AMPI_V(ampi_splat_int)(int32_t x) { ampi_vi zero = {0}; return zero + x; }

/* v itself, with its history hidden from the compiler. */
AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_keep)(ampi_vf v) {
#if AMPI_X86 && AMPI_PASS >= 2
    __asm__("" : "+v"(v));
#elif AMPI_X86 && defined(__SSE__)
    __asm__("" : "+x"(v));
#elif defined(__aarch64__)
    __asm__("" : "+w"(v));
#else
    __asm__("" : "+m"(v));
#endif
    return v;
}

/* Lane by lane, yes where mask is all ones and no where it is 0. */
AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_select)(ampi_vi mask, ampi_vf yes, ampi_vf no) {
#if AMPI_PASS == 3
    return (ampi_vf)_mm512_ternarylogic_epi32((__m512i)mask, (__m512i)yes, (__m512i)no, 0xca);
#elif AMPI_PASS == 2
    return (ampi_vf)_mm256_blendv_ps((__m256)no, (__m256)yes, (__m256)mask);
#else
    return (ampi_vf)((mask & (ampi_vi)yes) | (~mask & (ampi_vi)no));
#endif
}

/* The larger and the smaller of two numbers; with a NaN, either operand. */
AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_max)(ampi_vf a, ampi_vf b) {
#if AMPI_PASS == 3
    return (ampi_vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif AMPI_PASS == 2
    return (ampi_vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return AMPI_V(ampi_select)((ampi_vi)(a > b), a, b);
#endif
}
AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_min)(ampi_vf a, ampi_vf b) {
#if AMPI_PASS == 3
    return (ampi_vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif AMPI_PASS == 2
    return (ampi_vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return AMPI_V(ampi_select)((ampi_vi)(a < b), a, b);
#endif
}

/* a b + c, with one rounding where the instruction set has it, and two without.  Never rearranged. */
AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_fma)(ampi_vf a, ampi_vf b, ampi_vf c) {
#if AMPI_PASS == 3
    return (ampi_vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif AMPI_PASS == 2
    return (ampi_vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return AMPI_V(ampi_keep)(a * b) + c;
#endif
}

/* a / b and sqrt(a), correctly rounded: -Ofast turns the plain operator into an approximation that fails for
   infinities and zeros. */
AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_div)(ampi_vf a, ampi_vf b) {
#if AMPI_X86 && AMPI_PASS >= 2
    __asm__("vdivps %1, %0, %0" : "+v"(a) : "v"(b));
    return a;
#elif AMPI_X86 && defined(__AVX__)
    __asm__("vdivps %1, %0, %0" : "+x"(a) : "x"(b));
    return a;
#elif AMPI_X86 && defined(__SSE__)
    __asm__("divps %1, %0" : "+x"(a) : "x"(b));
    return a;
#else
    return a / b;
#endif
}
AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_sqrt)(ampi_vf a) {
#if AMPI_X86 && AMPI_PASS >= 2
    __asm__("vsqrtps %0, %0" : "+v"(a));
#elif AMPI_X86 && defined(__AVX__)
    __asm__("vsqrtps %0, %0" : "+x"(a));
#elif AMPI_X86 && defined(__SSE__)
    __asm__("sqrtps %0, %0" : "+x"(a));
#else
    for (int i = 0; i < AMPI_W; i++) a[i] = sqrtf(a[i]);
#endif
    return a;
}

/* The nearest integer of |x| < 2^31, as a number. */
AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_round)(ampi_vf x) {
#if AMPI_PASS == 3
    return (ampi_vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif AMPI_PASS == 2
    return (ampi_vf)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    ampi_vf half = (ampi_vf)(((ampi_vi)x & INT32_MIN) | (ampi_vi)AMPI_V(ampi_splat)(0.5f));
    return __builtin_convertvector(__builtin_convertvector(x + half, ampi_vi), ampi_vf);
#endif
}

/* The sum and the largest of all lanes, by halves: lane i with lane i + W/2, and so on. */
AMPI_PRIVATE inline float AMPI_V(ampi_sum)(ampi_vf v) {
#if AMPI_PASS >= 2
    __m128 s;
#  if AMPI_PASS == 3
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
#  else
    __m256 h = (__m256)v;
#  endif
    s = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
#else
    return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}
AMPI_PRIVATE inline float AMPI_V(ampi_reduce_max)(ampi_vf v) {
#if AMPI_PASS >= 2
    __m128 s;
#  if AMPI_PASS == 3
    __m256 h = _mm256_max_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
#  else
    __m256 h = (__m256)v;
#  endif
    s = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
#else
    float a = AMPI_MAX(v[0], v[2]), b = AMPI_MAX(v[1], v[3]);
    return AMPI_MAX(a, b);
#endif
}

/* The first n lanes from or to memory, 0 <= n <= AMPI_W; the others read as 0. */
AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_load_tail)(const float *p, int64_t n) {
#if AMPI_PASS == 3
    return (ampi_vf)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#else
    ampi_vf v = {0.0f};
    memcpy(&v, p, (size_t)n * sizeof *p);
    return v;
#endif
}
AMPI_PRIVATE inline void AMPI_V(ampi_store_tail)(float *p, ampi_vf v, int64_t n) {
#if AMPI_PASS == 3
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)v);
#else
    memcpy(p, &v, (size_t)n * sizeof *p);
#endif
}

/* All ones in the lanes that hold a NaN. */
AMPI_PRIVATE inline ampi_vi AMPI_V(ampi_is_nan)(ampi_vf x) { return (ampi_vi)(((ampi_vi)x & INT32_MAX) > 0x7f800000); }

/* c[0] + c[1] x + ... + c[n - 1] x^(n - 1) */
AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_polynomial)(const float *c, int n, ampi_vf x) {
    ampi_vf p = AMPI_V(ampi_splat)(c[n - 1]);
    AMPI_UNROLL
    for (int i = n - 2; i >= 0; i--) p = AMPI_V(ampi_fma)(p, x, AMPI_V(ampi_splat)(c[i]));
    return p;
}

/* x brought into [low, high]; NaN stays NaN, which min and max promise only for their second operand. */
AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_bound)(ampi_vf x, float low, float high) {
    ampi_vf a = AMPI_V(ampi_splat)(low), b = AMPI_V(ampi_splat)(high);
#if AMPI_X86 && AMPI_PASS >= 2
    __asm__("vmaxps %1, %2, %0" : "=v"(a) : "v"(x), "v"(a));
    __asm__("vminps %1, %2, %0" : "=v"(b) : "v"(a), "v"(b));
    return b;
#else
    ampi_vi nan = AMPI_V(ampi_is_nan)(x);
    return AMPI_V(ampi_select)(nan, x, AMPI_V(ampi_min)(AMPI_V(ampi_max)(x, a), b));
#endif
}

/* x 2^n for an integer n from -252 to 254, in two steps so that no factor overflows; 0 where not place > limit. */
AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_scale2)(ampi_vf x, ampi_vf n, ampi_vi place, int32_t limit) {
#if AMPI_PASS == 3
    __mmask16 kept = _mm512_cmpgt_epi32_mask((__m512i)place, _mm512_set1_epi32(limit));
    return (ampi_vf)_mm512_maskz_scalef_ps(kept, (__m512)x, (__m512)n);
#else
    ampi_vi k = __builtin_convertvector(n, ampi_vi), half = k >> 1;
    x = AMPI_V(ampi_keep)(x * (ampi_vf)((half + 127) << 23));
    x *= (ampi_vf)((k - half + 127) << 23);
    return (ampi_vf)((ampi_vi)x & (ampi_vi)(place > AMPI_V(ampi_splat_int)(limit)));
#endif
}

/* exp(x) = 2^n exp(r), n = round(x / ln 2), r = x - n ln 2 with ln 2 in two parts.  Below -87.3 the result is 0,
   because subnormal numbers cost a hundred times as much; above 88.73 it is inf.  Largest error measured 1.03 ulp.
   All four functions: NaN gives NaN. */
AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_exp)(ampi_vf x) {
    static const float c[] = {0.5f, 0.166665763f, 0.0416665524f, 0.00836334564f, 0.00139263924f};
    /* The patterns below -87.3 (0xc2ae999a), to -inf (0xff800000), moved to the smallest integers. */
    ampi_vi place = (ampi_vi)((AMPI_V(ampi_vuint))x + 0xbd516665u);
    ampi_vf y = AMPI_V(ampi_bound)(x, -87.3f, 89.0f);
    ampi_vf n = AMPI_V(ampi_round)(y * AMPI_V(ampi_splat)(1.44269504f)), r, p;
    r = AMPI_V(ampi_keep)(AMPI_V(ampi_fma)(n, AMPI_V(ampi_splat)(-0.693359375f), y));
    r = AMPI_V(ampi_keep)(AMPI_V(ampi_fma)(n, AMPI_V(ampi_splat)(2.12194442e-4f), r));
    p = AMPI_V(ampi_keep)(AMPI_V(ampi_fma)(r * r, AMPI_V(ampi_polynomial)(c, 5, r), r));
    return AMPI_V(ampi_scale2)(p + AMPI_V(ampi_splat)(1.0f), n, place, -0x432e999b);
}

/* log(x) = k ln 2 + log(1 + f), x = 2^k (1 + f) with 1 + f from sqrt(1/2) to sqrt(2), and with s = f / (2 + f)
   log(1 + f) = 2 atanh(s) = f - (f^2/2 - s (f^2/2 + R(s^2))), as in fdlibm.  Largest error 0.79 ulp; 0 gives -inf,
   below 0 NaN. */
AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_log)(ampi_vf x) {
    static const float c[] = {0.666666687f, 0.400001258f, 0.285503983f, 0.233419433f};
    ampi_vi bits = (ampi_vi)x, subnormal = (ampi_vi)(bits < 0x00800000), k;
    ampi_vi scaled = (ampi_vi)__builtin_convertvector(bits & 0x007fffff, ampi_vf);      /* 2^149 x */
    ampi_vf f, s, z, square, e, w;
    bits = (ampi_vi)AMPI_V(ampi_select)(subnormal, (ampi_vf)scaled, x);
    k = (bits - 0x3f3504f3) >> 23;
    f = (ampi_vf)(bits - (k << 23)) - AMPI_V(ampi_splat)(1.0f);
    e = __builtin_convertvector(k - (subnormal & 149), ampi_vf);
    s = AMPI_V(ampi_div)(f, f + AMPI_V(ampi_splat)(2.0f));
    z = s * s;
    square = AMPI_V(ampi_splat)(0.5f) * f * f;
    w = s * AMPI_V(ampi_fma)(z, AMPI_V(ampi_polynomial)(c, 4, z), square);
    w = AMPI_V(ampi_keep)(AMPI_V(ampi_fma)(e, AMPI_V(ampi_splat)(9.05800061e-6f), w));
    w = AMPI_V(ampi_keep)(AMPI_V(ampi_keep)(square - w) - f);
    w = AMPI_V(ampi_fma)(e, AMPI_V(ampi_splat)(0.693138123f), -w);
    w = AMPI_V(ampi_select)((ampi_vi)((ampi_vi)x >= 0x7f800000), x, w);                 /* inf and NaN */
    w = AMPI_V(ampi_select)((ampi_vi)((ampi_vi)x < 0), (ampi_vf)AMPI_V(ampi_splat_int)(0x7fc00000), w);
    k = (ampi_vi)(((ampi_vi)x & INT32_MAX) == 0);
    return AMPI_V(ampi_select)(k, (ampi_vf)AMPI_V(ampi_splat_int)(-0x00800000), w);
}

/* tanh(x): x + x^3 P(x^2) below 0.625, else 1 - 2 / (exp(2 |x|) + 1) with the sign of x.  Largest error 1.3 ulp. */
AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_tanh)(ampi_vf x) {
    static const float c[] = {-0.333333343f, 0.133333042f, -0.0539592579f, 0.0217689183f, -0.00834394526f,
                              0.00229274482f};
    ampi_vf one = AMPI_V(ampi_splat)(1.0f), a = (ampi_vf)((ampi_vi)x & INT32_MAX), z, small, large;
    a = AMPI_V(ampi_min)(a, AMPI_V(ampi_splat)(10.0f));
    z = a * a;
    small = AMPI_V(ampi_fma)(a, z * AMPI_V(ampi_polynomial)(c, 6, z), a);
    large = one - AMPI_V(ampi_div)(AMPI_V(ampi_splat)(2.0f), AMPI_V(ampi_exp)(a + a) + one);
    a = AMPI_V(ampi_select)((ampi_vi)(a < AMPI_V(ampi_splat)(0.625f)), small, large);
    a = (ampi_vf)((ampi_vi)a | ((ampi_vi)x & INT32_MIN));
    return AMPI_V(ampi_select)(AMPI_V(ampi_is_nan)(x), x, a);
}

/* erf(x): x + x P(x^2) below 0.92, else 1 - exp(Q(|x|)), Q(t) = log(1 - erf(t)), with the sign of x.  Largest error
   1.16 ulp. */
AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_erf)(ampi_vf x) {
    static const float p[] = {0.128379166f, -0.376126349f, 0.112837009f, -0.0268596914f, 0.00520171458f,
                              -0.000815005042f, 8.39977802e-05f};
    static const float q[] = {0.000318539649f, -1.13023102f, -0.631823897f, -0.110087164f, 0.0264276378f,
                              -0.00476262579f, 0.000597585749f, -4.61638592e-05f, 1.64306368e-06f};
    ampi_vf one = AMPI_V(ampi_splat)(1.0f), a = (ampi_vf)((ampi_vi)x & INT32_MAX), z, small, large;
    a = AMPI_V(ampi_min)(a, AMPI_V(ampi_splat)(4.0f));
    z = a * a;
    small = AMPI_V(ampi_fma)(a, AMPI_V(ampi_polynomial)(p, 7, z), a);
    large = one - AMPI_V(ampi_exp)(AMPI_V(ampi_polynomial)(q, 9, a));
    a = AMPI_V(ampi_select)((ampi_vi)(a < AMPI_V(ampi_splat)(0.92f)), small, large);
    a = (ampi_vf)((ampi_vi)a | ((ampi_vi)x & INT32_MIN));
    return AMPI_V(ampi_select)(AMPI_V(ampi_is_nan)(x), x, a);
}

/* ---- >>backends: the GEMM's kernels.  A tile's sums live in named registers: gcc keeps no array of vectors there.
   Each sum is one chain of FMAs in the order of k, whatever the tile's height. */

#if AMPI_W == 16
#  define AMPI_GEMM_ROWS 14             /* 28 of 32 registers */
#  define AMPI_GEMM_BLOCK 512
#else
#  define AMPI_GEMM_ROWS 6              /* 12 of 16 */
#  define AMPI_GEMM_BLOCK 256
#endif

/* One word in all lanes; a and b may hold pairs of bf16, so nothing is assumed of their type. */
AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_gemm_word)(const float *p) {
    float word;
    memcpy(&word, p, sizeof word);
    return AMPI_V(ampi_splat)(word);
}

#define AMPI_TILE_ZERO(i)  ampi_vf sum##i##_0 = {0.0f}, sum##i##_1 = {0.0f};
#define AMPI_TILE_STEP(i)  x = AMPI_V(ampi_gemm_word)(at[i / 3] + i % 3 * lda); \
                           sum##i##_0 = AMPI_TILE_PRODUCT(x, b0, sum##i##_0); sum##i##_1 = AMPI_TILE_PRODUCT(x, b1, sum##i##_1);
#define AMPI_TILE_ADD(i)   sum##i##_0 += AMPI_V(ampi_load)(add + i * ldadd); \
                           sum##i##_1 += AMPI_V(ampi_load)(add + i * ldadd + AMPI_W);
#define AMPI_TILE_STORE(i) AMPI_V(ampi_store)(c + i * ldc, sum##i##_0); AMPI_V(ampi_store)(c + i * ldc + AMPI_W, sum##i##_1);

#define AMPI_TILE(name, r) \
    AMPI_PRIVATE AMPI_TILE_TARGET void AMPI_V(name##r)(int64_t k, const float *a, int64_t lda, const float *b, int64_t ldb, \
                                                       const float *add, int64_t ldadd, float *c, int64_t ldc) { \
        /* three rows to a pointer: fourteen addresses do not fit into the registers */ \
        const float *at[5] = {a, a + 3 * lda, a + 6 * lda, a + 9 * lda, a + 12 * lda}; \
        AMPI_ROWS_##r(AMPI_TILE_ZERO) \
        for (; k > 0; k--, b += ldb, at[0]++, at[1]++, at[2]++, at[3]++, at[4]++) { \
            ampi_vf x, b0 = AMPI_V(ampi_load)(b), b1 = AMPI_V(ampi_load)(b + AMPI_W); \
            AMPI_ROWS_##r(AMPI_TILE_STEP) \
        } \
        if (add != NULL) { AMPI_ROWS_##r(AMPI_TILE_ADD) } \
        AMPI_ROWS_##r(AMPI_TILE_STORE) \
    }

#define AMPI_TILE_TARGET
#define AMPI_TILE_PRODUCT AMPI_V(ampi_fma)
AMPI_TILE(ampi_tile_, 1)  AMPI_TILE(ampi_tile_, 2)  AMPI_TILE(ampi_tile_, 3)
AMPI_TILE(ampi_tile_, 4)  AMPI_TILE(ampi_tile_, 5)  AMPI_TILE(ampi_tile_, 6)
#if AMPI_GEMM_ROWS == 14
AMPI_TILE(ampi_tile_, 7)  AMPI_TILE(ampi_tile_, 8)  AMPI_TILE(ampi_tile_, 9)  AMPI_TILE(ampi_tile_, 10)
AMPI_TILE(ampi_tile_, 11) AMPI_TILE(ampi_tile_, 12) AMPI_TILE(ampi_tile_, 13) AMPI_TILE(ampi_tile_, 14)
#endif
#undef AMPI_TILE_TARGET
#undef AMPI_TILE_PRODUCT

AMPI_PRIVATE void AMPI_V(ampi_gemm_multiply)(int64_t rows, int64_t k, const float *a, int64_t lda, const float *b, int64_t ldb,
                                             const float *add, int64_t ldadd, float *c, int64_t ldc) {
    static const ampi_tile_rows tiles[AMPI_GEMM_ROWS] = {
        AMPI_V(ampi_tile_1), AMPI_V(ampi_tile_2), AMPI_V(ampi_tile_3), AMPI_V(ampi_tile_4), AMPI_V(ampi_tile_5), AMPI_V(ampi_tile_6),
#if AMPI_GEMM_ROWS == 14
        AMPI_V(ampi_tile_7), AMPI_V(ampi_tile_8), AMPI_V(ampi_tile_9), AMPI_V(ampi_tile_10), AMPI_V(ampi_tile_11),
        AMPI_V(ampi_tile_12), AMPI_V(ampi_tile_13), AMPI_V(ampi_tile_14),
#endif
    };
    tiles[rows - 1](k, a, lda, b, ldb, add, ldadd, c, ldc);
}

/* ---- Packing into fp32 words */

/* fp32 values rounded to bf16, fp16 or tf32; dst may be src. */
AMPI_PRIVATE void AMPI_V(ampi_gemm_round)(float *dst, const float *src, amp_dtype compute, int64_t n) {
    uint16_t room[AMPI_GEMM_ROOM];
    int64_t i, m;
    if (compute == AMP_TF32) AMPI_V(ampi_tf32_from_f32)(dst, src, n);
    else for (i = 0; i < n; i += m) {
        m = AMPI_MIN(n - i, (int64_t)AMPI_GEMM_ROOM);
        if (compute == AMP_F16) {
            AMPI_V(ampi_f16_from_f32)(room, src + i, m);
            AMPI_V(ampi_f32_from_f16)(dst + i, room, m);
        } else {
            AMPI_V(ampi_bf16_from_f32)(room, src + i, m);
            AMPI_V(ampi_f32_from_bf16)(dst + i, room, m);
        }
    }
}

AMPI_PRIVATE void AMPI_V(ampi_gemm_row)(float *dst, const void *src, amp_dtype dtype, amp_dtype compute, int64_t n) {
    if (dtype == AMP_F16) AMPI_V(ampi_f32_from_f16)(dst, src, n);
    else if (dtype == AMP_BF16) AMPI_V(ampi_f32_from_bf16)(dst, src, n);
    else if (compute == AMP_F32) memcpy(dst, src, (size_t)n * sizeof *dst);
    else AMPI_V(ampi_gemm_round)(dst, (const float *)src, compute, n);
    /* a 16-bit source needs no rounding to its own format, and tf32 holds all of both */
    if (dtype != AMP_F32 && dtype != compute && (compute == AMP_F16 || compute == AMP_BF16))
        AMPI_V(ampi_gemm_round)(dst, dst, compute, n);
}

/* n words as one row of several panels. */
AMPI_PRIVATE inline void AMPI_V(ampi_gemm_deal)(float *dst, int64_t stride, const float *src, int64_t n) {
    for (; n >= 2 * AMPI_W; n -= 2 * AMPI_W, src += 2 * AMPI_W, dst += stride) {
        AMPI_V(ampi_store)(dst, AMPI_V(ampi_load)(src));
        AMPI_V(ampi_store)(dst + AMPI_W, AMPI_V(ampi_load)(src + AMPI_W));
    }
    if (n <= 0) return;
    AMPI_V(ampi_store)(dst, n < AMPI_W ? AMPI_V(ampi_load_tail)(src, n) : AMPI_V(ampi_load)(src));
    AMPI_V(ampi_store)(dst + AMPI_W, AMPI_V(ampi_load_tail)(src + AMPI_MIN(n, AMPI_W), AMPI_MAX(n - AMPI_W, 0)));
}

AMPI_PRIVATE void AMPI_V(ampi_gemm_weave)(float *dst, int64_t stride, const void *src, amp_dtype dtype, amp_dtype compute,
                                          int64_t ld, int64_t k, int64_t n) {
    float room[AMPI_GEMM_ROOM];
    int64_t size = (int64_t)amp_dtype_size(dtype), p;
    for (p = 0; p < k; p++, dst += 2 * AMPI_W) {
        const char *row = (const char *)src + p * ld * size;
        if (dtype == AMP_F32 && compute == AMP_F32) {
            AMPI_V(ampi_gemm_deal)(dst, stride, (const float *)(const void *)row, n);
            continue;
        }
        AMPI_V(ampi_gemm_row)(room, row, dtype, compute, n);
        AMPI_V(ampi_gemm_deal)(dst, stride, room, n);
    }
}

/* ---- Transposition: the 4 x 4 words in each 128 bits, once the rows to come side by side have been loaded there */

#if AMPI_PASS == 3
#  define AMPI_SHUFFLE(a, b, i, j, k, l) (ampi_vf)_mm512_shuffle_ps((__m512)(a), (__m512)(b), _MM_SHUFFLE(l, k, j, i))
#elif AMPI_PASS == 2
#  define AMPI_SHUFFLE(a, b, i, j, k, l) (ampi_vf)_mm256_shuffle_ps((__m256)(a), (__m256)(b), _MM_SHUFFLE(l, k, j, i))
#elif defined(__clang__)
#  define AMPI_SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k + 4, l + 4)
#else
#  define AMPI_SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, (__extension__ (ampi_vi){i, j, k + 4, l + 4}))
#endif

/* 4 words from each of p, p + step, .. */
AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_gather4)(const float *p, int64_t step) {
#if AMPI_PASS == 3
    __m512 v = _mm512_castps128_ps512(_mm_loadu_ps(p));
    v = _mm512_insertf32x4(v, _mm_loadu_ps(p + step), 1);
    v = _mm512_insertf32x4(v, _mm_loadu_ps(p + 2 * step), 2);
    return (ampi_vf)_mm512_insertf32x4(v, _mm_loadu_ps(p + 3 * step), 3);
#elif AMPI_PASS == 2
    return (ampi_vf)_mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)), _mm_loadu_ps(p + step), 1);
#else
    (void)step;
    return AMPI_V(ampi_load)(p);
#endif
}

/* AMPI_W rows and 4 columns */
AMPI_PRIVATE inline void AMPI_V(ampi_transpose4)(float *dst, int64_t ldd, const float *src, int64_t lds) {
    ampi_vf r0 = AMPI_V(ampi_gather4)(src, 4 * lds), r1 = AMPI_V(ampi_gather4)(src + lds, 4 * lds);
    ampi_vf r2 = AMPI_V(ampi_gather4)(src + 2 * lds, 4 * lds), r3 = AMPI_V(ampi_gather4)(src + 3 * lds, 4 * lds);
    ampi_vf low01 = AMPI_SHUFFLE(r0, r1, 0, 1, 0, 1), high01 = AMPI_SHUFFLE(r0, r1, 2, 3, 2, 3);
    ampi_vf low23 = AMPI_SHUFFLE(r2, r3, 0, 1, 0, 1), high23 = AMPI_SHUFFLE(r2, r3, 2, 3, 2, 3);
    AMPI_V(ampi_store)(dst, AMPI_SHUFFLE(low01, low23, 0, 2, 0, 2));
    AMPI_V(ampi_store)(dst + ldd, AMPI_SHUFFLE(low01, low23, 1, 3, 1, 3));
    AMPI_V(ampi_store)(dst + 2 * ldd, AMPI_SHUFFLE(high01, high23, 0, 2, 0, 2));
    AMPI_V(ampi_store)(dst + 3 * ldd, AMPI_SHUFFLE(high01, high23, 1, 3, 1, 3));
}
#undef AMPI_SHUFFLE

AMPI_PRIVATE void AMPI_V(ampi_gemm_transpose)(float *dst, int64_t ldd, const float *src, int64_t lds, int64_t rows, int64_t cols) {
    int64_t r, c, i, whole = rows - rows % AMPI_W, quads = cols - cols % 4;
    for (r = 0; r < whole; r += AMPI_W)
        for (c = 0; c < quads; c += 4)
            AMPI_V(ampi_transpose4)(dst + c * ldd + r, ldd, src + r * lds + c, lds);
    for (r = 0; r < rows; r++)
        for (i = r < whole ? quads : 0; i < cols; i++) memcpy(dst + i * ldd + r, src + r * lds + i, sizeof *dst);
}

/* ---- Writing out */

AMPI_PRIVATE void AMPI_V(ampi_gemm_write)(void *dst, amp_dtype dtype, int64_t offset, const float *x, int64_t n) {
    if (dtype == AMP_F16) AMPI_V(ampi_f16_from_f32)((char *)dst + 2 * offset, x, n);
    else if (dtype == AMP_BF16) AMPI_V(ampi_bf16_from_f32)((char *)dst + 2 * offset, x, n);
    else memcpy((char *)dst + 4 * offset, x, (size_t)n * sizeof *x);
}

/* x = alpha x + bias */
AMPI_PRIVATE void AMPI_V(ampi_gemm_scale)(float *x, float alpha, const float *bias, int64_t n) {
    ampi_vf factor = AMPI_V(ampi_splat)(alpha);
    int64_t j;
    for (j = 0; j < n; j += AMPI_W) {
        ampi_vf v = AMPI_V(ampi_load)(x + j);
        if (bias != NULL) v = AMPI_V(ampi_fma)(v, factor, AMPI_V(ampi_load)(bias + j));
        else v *= factor;
        AMPI_V(ampi_store)(x + j, v);
    }
}

/* x += beta c, n at most AMPI_GEMM_ROOM */
AMPI_PRIVATE void AMPI_V(ampi_gemm_add_c)(float *x, float beta, const void *c, amp_dtype dtype, int64_t offset, int64_t n) {
    float room[AMPI_GEMM_ROOM + AMPI_W];
    ampi_vf factor = AMPI_V(ampi_splat)(beta), zero = {0.0f};
    int64_t j;
    AMPI_V(ampi_gemm_row)(room, (const char *)c + offset * (int64_t)amp_dtype_size(dtype), dtype, AMP_F32, n);
    AMPI_V(ampi_store)(room + n, zero);
    for (j = 0; j < n; j += AMPI_W)
        AMPI_V(ampi_store)(x + j, AMPI_V(ampi_fma)(factor, AMPI_V(ampi_load)(room + j), AMPI_V(ampi_load)(x + j)));
}

AMPI_PRIVATE void AMPI_V(ampi_gemm_finish)(const ampi_gemm_out *out, float *x, int64_t ld, int64_t row, int64_t rows, int64_t cols) {
    int64_t i, j;
    if (out->alpha != 1.0f || out->bias != NULL)
        for (i = 0; i < rows; i++) AMPI_V(ampi_gemm_scale)(x + i * ld, out->alpha, out->bias, ld);
    if (out->pre != NULL)
        for (i = 0; i < rows; i++) AMPI_V(ampi_gemm_write)(out->pre, out->pre_dtype, (row + i) * out->ld_pre, x + i * ld, cols);
    if (out->act != AMP_ACT_NONE) out->activation(out->act, x, x, rows * ld);
    if (out->beta != 0.0f)
        for (i = 0; i < rows; i++) AMPI_V(ampi_gemm_add_c)(x + i * ld, out->beta, out->c, out->c_dtype, (row + i) * out->ldc, cols);
    for (i = 0; i < rows; i++) {
        float *c = (float *)out->c + (row + i) * out->ldc;
        if (!out->past_cache) AMPI_V(ampi_gemm_write)(out->c, out->c_dtype, (row + i) * out->ldc, x + i * ld, cols);
        else for (j = 0; j < cols; j += AMPI_W) AMPI_V(ampi_store_past_cache)(c + j, AMPI_V(ampi_load)(x + i * ld + j));
    }
}

/* ---- Matrix times vector */

/* v + x[0] b[0][j] + .. over 4 rows */
AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_combine4)(ampi_vf v, const float *x, ampi_vf b0, ampi_vf b1, ampi_vf b2, ampi_vf b3) {
    v = AMPI_V(ampi_fma)(AMPI_V(ampi_splat)(x[0]), b0, v);
    v = AMPI_V(ampi_fma)(AMPI_V(ampi_splat)(x[1]), b1, v);
    v = AMPI_V(ampi_fma)(AMPI_V(ampi_splat)(x[2]), b2, v);
    return AMPI_V(ampi_fma)(AMPI_V(ampi_splat)(x[3]), b3, v);
}

AMPI_PRIVATE void AMPI_V(ampi_gemm_combine)(float *y, const float *x, const float *b, int64_t ld, int64_t k, int64_t n) {
    int64_t j, p, whole = n - n % AMPI_W, rest = n % AMPI_W;
    for (p = 0; p + 4 <= k; p += 4, b += 4 * ld) {
        for (j = 0; j < whole; j += AMPI_W)
            AMPI_V(ampi_store)(y + j, AMPI_V(ampi_combine4)(AMPI_V(ampi_load)(y + j), x + p,
                AMPI_V(ampi_load)(b + j), AMPI_V(ampi_load)(b + ld + j), AMPI_V(ampi_load)(b + 2 * ld + j),
                AMPI_V(ampi_load)(b + 3 * ld + j)));
        if (rest == 0) continue;
        AMPI_V(ampi_store_tail)(y + j, AMPI_V(ampi_combine4)(AMPI_V(ampi_load_tail)(y + j, rest), x + p,
            AMPI_V(ampi_load_tail)(b + j, rest), AMPI_V(ampi_load_tail)(b + ld + j, rest),
            AMPI_V(ampi_load_tail)(b + 2 * ld + j, rest), AMPI_V(ampi_load_tail)(b + 3 * ld + j, rest)), rest);
    }
    for (; p < k; p++, b += ld) {
        ampi_vf factor = AMPI_V(ampi_splat)(x[p]);
        for (j = 0; j < whole; j += AMPI_W)
            AMPI_V(ampi_store)(y + j, AMPI_V(ampi_fma)(factor, AMPI_V(ampi_load)(b + j), AMPI_V(ampi_load)(y + j)));
        if (rest == 0) continue;
        AMPI_V(ampi_store_tail)(y + j, AMPI_V(ampi_fma)(factor, AMPI_V(ampi_load_tail)(b + j, rest),
                                                        AMPI_V(ampi_load_tail)(y + j, rest)), rest);
    }
}

AMPI_PRIVATE float AMPI_V(ampi_gemm_dot)(const float *x, const float *row, int64_t k) {
    ampi_vf s0 = {0.0f}, s1 = s0, s2 = s0, s3 = s0;
    int64_t p = 0;
    for (; p + 4 * AMPI_W <= k; p += 4 * AMPI_W) {
        s0 = AMPI_V(ampi_fma)(AMPI_V(ampi_load)(x + p), AMPI_V(ampi_load)(row + p), s0);
        s1 = AMPI_V(ampi_fma)(AMPI_V(ampi_load)(x + p + AMPI_W), AMPI_V(ampi_load)(row + p + AMPI_W), s1);
        s2 = AMPI_V(ampi_fma)(AMPI_V(ampi_load)(x + p + 2 * AMPI_W), AMPI_V(ampi_load)(row + p + 2 * AMPI_W), s2);
        s3 = AMPI_V(ampi_fma)(AMPI_V(ampi_load)(x + p + 3 * AMPI_W), AMPI_V(ampi_load)(row + p + 3 * AMPI_W), s3);
    }
    for (; p + AMPI_W <= k; p += AMPI_W) s0 = AMPI_V(ampi_fma)(AMPI_V(ampi_load)(x + p), AMPI_V(ampi_load)(row + p), s0);
    if (p < k) s1 = AMPI_V(ampi_fma)(AMPI_V(ampi_load_tail)(x + p, k - p), AMPI_V(ampi_load_tail)(row + p, k - p), s1);
    return AMPI_V(ampi_sum)((s0 + s1) + (s2 + s3));
}

static const ampi_gemm_vec AMPI_V(ampi_gemm_kernels) = {
    AMPI_GEMM_ROWS, 2 * AMPI_W, 1, AMPI_GEMM_BLOCK, 14 * AMPI_GEMM_ROWS, 0, AMPI_V(ampi_gemm_multiply), NULL, NULL, AMPI_V(ampi_gemm_row), AMPI_V(ampi_gemm_weave),
    AMPI_V(ampi_gemm_transpose), AMPI_V(ampi_gemm_finish), AMPI_V(ampi_gemm_combine), AMPI_V(ampi_gemm_dot),
};

/* ---- The same with pairs of bf16 and vdpbf16ps, which adds the product of the high halves, then that of the low
   ones.  It takes subnormal operands as 0, and so does the conversion that packs them. */

#if AMPI_GEMM_BF16 && AMPI_PASS == 3
#define AMPI_TILE_TARGET __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))

AMPI_PRIVATE AMPI_TILE_TARGET inline ampi_vf ampi_gemm_dot2(ampi_vf x, ampi_vf b, ampi_vf sum) {
    return (ampi_vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)b);
}
#define AMPI_TILE_PRODUCT ampi_gemm_dot2
AMPI_TILE(ampi_tile_bf16_, 1)  AMPI_TILE(ampi_tile_bf16_, 2)  AMPI_TILE(ampi_tile_bf16_, 3)  AMPI_TILE(ampi_tile_bf16_, 4)
AMPI_TILE(ampi_tile_bf16_, 5)  AMPI_TILE(ampi_tile_bf16_, 6)  AMPI_TILE(ampi_tile_bf16_, 7)  AMPI_TILE(ampi_tile_bf16_, 8)
AMPI_TILE(ampi_tile_bf16_, 9)  AMPI_TILE(ampi_tile_bf16_, 10) AMPI_TILE(ampi_tile_bf16_, 11) AMPI_TILE(ampi_tile_bf16_, 12)
AMPI_TILE(ampi_tile_bf16_, 13) AMPI_TILE(ampi_tile_bf16_, 14)
#undef AMPI_TILE_PRODUCT

AMPI_PRIVATE void ampi_gemm_multiply_bf16(int64_t rows, int64_t k, const float *a, int64_t lda, const float *b, int64_t ldb,
                                          const float *add, int64_t ldadd, float *c, int64_t ldc) {
    static const ampi_tile_rows tiles[AMPI_GEMM_ROWS] = {
        AMPI_V(ampi_tile_bf16_1), AMPI_V(ampi_tile_bf16_2), AMPI_V(ampi_tile_bf16_3), AMPI_V(ampi_tile_bf16_4),
        AMPI_V(ampi_tile_bf16_5), AMPI_V(ampi_tile_bf16_6), AMPI_V(ampi_tile_bf16_7), AMPI_V(ampi_tile_bf16_8),
        AMPI_V(ampi_tile_bf16_9), AMPI_V(ampi_tile_bf16_10), AMPI_V(ampi_tile_bf16_11), AMPI_V(ampi_tile_bf16_12),
        AMPI_V(ampi_tile_bf16_13), AMPI_V(ampi_tile_bf16_14),
    };
    tiles[rows - 1](k, a, lda, b, ldb, add, ldadd, c, ldc);
}

/* The first n of 16 or 32 lanes; any n. */
AMPI_PRIVATE inline __mmask16 ampi_lanes16(int64_t n) { return (__mmask16)(n >= 16 ? 0xffff : n <= 0 ? 0 : (1 << n) - 1); }

AMPI_PRIVATE AMPI_TILE_TARGET void ampi_gemm_row_from_f32(float *dst, const float *src, int64_t n) {
    int64_t i;
    for (i = 0; i < n; i += 32) {
        __m512 low = _mm512_maskz_loadu_ps(ampi_lanes16(n - i), src + i);
        __m512 high = _mm512_maskz_loadu_ps(ampi_lanes16(n - i - 16), src + i + 16);
        _mm512_mask_storeu_epi32(dst + i / 2, ampi_lanes16((n - i + 1) / 2), (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
}

AMPI_PRIVATE void ampi_gemm_row_bf16(float *dst, const void *src, amp_dtype dtype, amp_dtype compute, int64_t n) {
    float room[AMPI_GEMM_ROOM];
    int64_t i;
    if (dtype == AMP_F32) ampi_gemm_row_from_f32(dst, (const float *)src, n);
    for (i = 0; dtype == AMP_F16 && i < n; i += AMPI_GEMM_ROOM) {
        int64_t m = AMPI_MIN(n - i, (int64_t)AMPI_GEMM_ROOM);
        AMPI_V(ampi_f32_from_f16)(room, (const char *)src + 2 * i, m);
        ampi_gemm_row_from_f32(dst + i / 2, room, m);
    }
    if (dtype != AMP_BF16) return;
    if (n % 2) memset(dst + n / 2, 0, sizeof *dst);
    memcpy(dst, src, (size_t)n * 2);
    (void)compute;
}

/* Two rows of k, woven: 16 pairs of what stands below each other. */
AMPI_PRIVATE AMPI_TILE_TARGET inline __m512i ampi_gemm_pairs_f32(const float *low, const float *high, int64_t n) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                           23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __mmask16 lanes = ampi_lanes16(n);
    __m512 l = _mm512_maskz_loadu_ps(lanes, low);
    __m512 h = high != NULL ? _mm512_maskz_loadu_ps(lanes, high) : _mm512_setzero_ps();
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(h, l));
}
AMPI_PRIVATE inline __m512i ampi_gemm_pairs_16(const uint16_t *low, const uint16_t *high, int64_t n) {
    __mmask16 lanes = ampi_lanes16(n);
    __m512i l = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, low));
    __m512i h = high != NULL ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, high)) : _mm512_setzero_si512();
    return _mm512_or_si512(l, _mm512_slli_epi32(h, 16));
}

AMPI_PRIVATE AMPI_TILE_TARGET void ampi_gemm_weave_bf16(float *dst, int64_t stride, const void *src, amp_dtype dtype, amp_dtype compute,
                                                        int64_t ld, int64_t k, int64_t n) {
    float room[2][AMPI_GEMM_ROOM];
    int64_t size = (int64_t)amp_dtype_size(dtype), p, j;
    (void)compute;
    for (p = 0; p < k; p += 2, dst += 32) {
        const void *low = (const char *)src + p * ld * size, *high = p + 1 < k ? (const char *)src + (p + 1) * ld * size : NULL;
        if (dtype == AMP_F16) {
            AMPI_V(ampi_f32_from_f16)(room[0], low, n);
            if (high != NULL) AMPI_V(ampi_f32_from_f16)(room[1], high, n);
            low = room[0];
            high = high != NULL ? room[1] : NULL;
        }
        for (j = 0; j < n || j % 32 != 0; j += 16) {
            __m512i words;
            if (j >= n) words = _mm512_setzero_si512();
            else if (dtype == AMP_BF16)
                words = ampi_gemm_pairs_16((const uint16_t *)low + j, high != NULL ? (const uint16_t *)high + j : NULL, n - j);
            else words = ampi_gemm_pairs_f32((const float *)low + j, high != NULL ? (const float *)high + j : NULL, n - j);
            _mm512_storeu_si512(dst + j / 32 * stride + j % 32, words);
        }
    }
}

static const ampi_gemm_vec ampi_gemm_kernels_bf16 = {
    AMPI_GEMM_ROWS, 2 * AMPI_W, 2, 256, 14 * AMPI_GEMM_ROWS, 0, ampi_gemm_multiply_bf16, NULL, NULL, ampi_gemm_row_bf16, ampi_gemm_weave_bf16,
    AMPI_V(ampi_gemm_transpose), AMPI_V(ampi_gemm_finish), AMPI_V(ampi_gemm_combine), AMPI_V(ampi_gemm_dot),
};
#undef AMPI_TILE_TARGET
#endif

/* ---- The same pairs with AMX.  A tile register holds 16 rows of 16 words; tdpbf16ps adds to each sum what 16 words
   give, the products of the low halves and those of the high halves each summed by itself.  It takes subnormal
   operands and results as 0. */

#if AMPI_GEMM_AMX && AMPI_PASS == 3
#define AMPI_TILE_TARGET __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,amx-tile,amx-bf16")))

/* All eight tiles with 16 rows of 64 bytes (palette 1). */
AMPI_PRIVATE AMPI_TILE_TARGET void ampi_amx_begin(void) {
    static const struct { uint8_t palette, start, zero[14]; uint16_t row_bytes[16]; uint8_t rows[16]; } config = {
        1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}
    };
    _tile_loadconfig(&config);
}
AMPI_PRIVATE AMPI_TILE_TARGET void ampi_amx_end(void) { _tile_release(); }

/* gcc does not see that a tile load reads memory: what was stored there must be stored before. */
AMPI_PRIVATE inline void ampi_amx_stored(const void *p) { __asm__ volatile("" : : "r"(p) : "memory"); }

/* Tiles 0 to 3 (two of 16 rows, two of 16 columns) += a b over 16 words; one row of tiles unless `both`.  Strides in bytes. */
AMPI_PRIVATE AMPI_TILE_TARGET inline void ampi_amx_step(int both, const float *a, size_t lda, const float *b, size_t ldb) {
    _tile_loadd(6, b, ldb);
    _tile_loadd(4, a, lda);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + 16, ldb);
    _tile_dpbf16ps(1, 4, 7);
    if (!both) return;
    _tile_loadd(5, (const char *)a + 16 * lda, lda);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
}

/* The last words of k, fewer than 16, filled with zeros. */
AMPI_PRIVATE AMPI_TILE_TARGET void ampi_amx_rest(int64_t rows, int64_t k, const float *a, int64_t lda, const float *b, int64_t ldb) {
    float rest_a[32 * 16], rest_b[16 * 32];
    int64_t i;
    memset(rest_a, 0, sizeof rest_a);
    memset(rest_b, 0, sizeof rest_b);
    for (i = 0; i < rows; i++) memcpy(rest_a + 16 * i, a + i * lda, (size_t)k * sizeof *a);
    for (i = 0; i < k; i++) memcpy(rest_b + 32 * i, b + i * ldb, 32 * sizeof *b);
    ampi_amx_stored(rest_a);
    ampi_amx_stored(rest_b);
    ampi_amx_step(rows > 16, rest_a, 64, rest_b, 128);
}

AMPI_PRIVATE AMPI_TILE_TARGET inline void ampi_amx_load(int both, const float *c, size_t ldc) {
    _tile_loadd(0, c, ldc);
    _tile_loadd(1, c + 16, ldc);
    if (!both) return;
    _tile_loadd(2, (const char *)c + 16 * ldc, ldc);
    _tile_loadd(3, (const char *)c + 16 * ldc + 64, ldc);
}
AMPI_PRIVATE AMPI_TILE_TARGET inline void ampi_amx_store(int both, float *c, size_t ldc) {
    _tile_stored(0, c, ldc);
    _tile_stored(1, c + 16, ldc);
    if (!both) return;
    _tile_stored(2, (char *)c + 16 * ldc, ldc);
    _tile_stored(3, (char *)c + 16 * ldc + 64, ldc);
}

/* Rows that do not fill their tiles come from, and go to, a tile of their own. */
AMPI_PRIVATE AMPI_TILE_TARGET void ampi_gemm_multiply_amx(int64_t rows, int64_t k, const float *a, int64_t lda, const float *b, int64_t ldb,
                                                          const float *add, int64_t ldadd, float *c, int64_t ldc) {
    float part[32 * 32];
    int whole = rows % 16 == 0, both = rows > 16;
    int64_t i;
    if (add == NULL) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else if (whole) {
        ampi_amx_load(both, add, (size_t)ldadd * 4);
    } else {
        for (i = 0; i < rows; i++) memcpy(part + 32 * i, add + i * ldadd, 32 * sizeof *add);
        ampi_amx_stored(part);
        ampi_amx_load(both, part, 128);
    }
    for (; k >= 16; k -= 16, a += 16, b += 16 * ldb) ampi_amx_step(both, a, (size_t)lda * 4, b, (size_t)ldb * 4);
    if (k > 0) ampi_amx_rest(rows, k, a, lda, b, ldb);
    ampi_amx_store(both, whole ? c : part, whole ? (size_t)ldc * 4 : 128);
    for (i = 0; !whole && i < rows; i++) memcpy(c + i * ldc, part + 32 * i, 32 * sizeof *c);
}

static const ampi_gemm_vec ampi_gemm_kernels_amx = {
    32, 32, 2, 128, 384, 15, ampi_gemm_multiply_amx, ampi_amx_begin, ampi_amx_end, ampi_gemm_row_bf16, ampi_gemm_weave_bf16,
    AMPI_V(ampi_gemm_transpose), AMPI_V(ampi_gemm_finish), AMPI_V(ampi_gemm_combine), AMPI_V(ampi_gemm_dot),
};
#undef AMPI_TILE_TARGET
#endif

#undef AMPI_GEMM_ROWS
#undef AMPI_GEMM_BLOCK
#undef AMPI_TILE
#undef AMPI_TILE_ZERO
#undef AMPI_TILE_STEP
#undef AMPI_TILE_ADD
#undef AMPI_TILE_STORE

/* ---- >>backends: attention.  One matrix product serves all five of a layer's products: its left factor is read
   as scalars in any layout, its right factor and the result as vectors, so keys and values are used where they
   lie and only strips of queries are transposed. */

/* 2 AMPI_W neighbouring columns. */
typedef struct AMPI_V(ampi_two) { ampi_vf x, y; } AMPI_V(ampi_two);

AMPI_PRIVATE inline AMPI_V(ampi_two) AMPI_V(ampi_two_load)(const float *p) {
    AMPI_V(ampi_two) t;
    t.x = AMPI_V(ampi_load)(p);
    t.y = AMPI_V(ampi_load)(p + AMPI_W);
    return t;
}

AMPI_PRIVATE inline AMPI_V(ampi_two) AMPI_V(ampi_two_fma)(const float *a, AMPI_V(ampi_two) b, AMPI_V(ampi_two) c) {
    ampi_vf s = AMPI_V(ampi_splat)(*a);
    c.x = AMPI_V(ampi_fma)(s, b.x, c.x);
    c.y = AMPI_V(ampi_fma)(s, b.y, c.y);
    return c;
}

/* Stores the sums of row r, columns from x on. */
AMPI_PRIVATE inline void AMPI_V(ampi_product_store)(const ampi_product *p, int64_t r, int64_t x, AMPI_V(ampi_two) sum) {
    float *c = p->c + r * p->ldc + x;
    if (!p->add) {
        ampi_vf scale = AMPI_V(ampi_splat)(p->scale);
        sum.x *= scale;
        sum.y *= scale;
    } else if (p->rescale) {
        AMPI_V(ampi_two) old = AMPI_V(ampi_two_load)(c), factor = AMPI_V(ampi_two_load)(p->rescale + x);
        sum.x = AMPI_V(ampi_fma)(old.x, factor.x, sum.x);
        sum.y = AMPI_V(ampi_fma)(old.y, factor.y, sum.y);
    } else {
        AMPI_V(ampi_two) old = AMPI_V(ampi_two_load)(c);
        sum.x += old.x;
        sum.y += old.y;
    }
    AMPI_V(ampi_store)(c, sum.x);
    AMPI_V(ampi_store)(c + AMPI_W, sum.y);
}

/* Rows from r on, as many as the registers hold: 8 with 32 registers, 4 with 16.  Rows beyond the last repeat the
   first and are not stored. */
#if AMPI_PASS == 3
#  define AMPI_PRODUCT_ROWS 8
#else
#  define AMPI_PRODUCT_ROWS 4
#endif
AMPI_PRIVATE void AMPI_V(ampi_product_rows)(const ampi_product *p, int64_t r, int64_t x) {
    int64_t n = p->rows - r, depth = p->depth, step = p->a_depth, ldb = p->ldb;
    const float *b = p->b + x, *a0 = p->a + r * p->a_row;
    const float *a1 = n > 1 ? a0 + p->a_row : a0, *a2 = n > 2 ? a1 + p->a_row : a0, *a3 = n > 3 ? a2 + p->a_row : a0;
    AMPI_V(ampi_two) c0 = {{0.0f}, {0.0f}}, c1 = c0, c2 = c0, c3 = c0;
#if AMPI_PASS == 3
    const float *a4 = n > 4 ? a3 + p->a_row : a0, *a5 = n > 5 ? a4 + p->a_row : a0, *a6 = n > 6 ? a5 + p->a_row : a0;
    const float *a7 = n > 7 ? a6 + p->a_row : a0;
    AMPI_V(ampi_two) c4 = c0, c5 = c0, c6 = c0, c7 = c0;
#endif
    for (int64_t k = 0, i = 0; k < depth; k++, i += step, b += ldb) {
        AMPI_V(ampi_two) v = AMPI_V(ampi_two_load)(b);
        c0 = AMPI_V(ampi_two_fma)(a0 + i, v, c0);
        c1 = AMPI_V(ampi_two_fma)(a1 + i, v, c1);
        c2 = AMPI_V(ampi_two_fma)(a2 + i, v, c2);
        c3 = AMPI_V(ampi_two_fma)(a3 + i, v, c3);
#if AMPI_PASS == 3
        c4 = AMPI_V(ampi_two_fma)(a4 + i, v, c4);
        c5 = AMPI_V(ampi_two_fma)(a5 + i, v, c5);
        c6 = AMPI_V(ampi_two_fma)(a6 + i, v, c6);
        c7 = AMPI_V(ampi_two_fma)(a7 + i, v, c7);
#endif
    }
    AMPI_V(ampi_product_store)(p, r, x, c0);
    if (n > 1) AMPI_V(ampi_product_store)(p, r + 1, x, c1);
    if (n > 2) AMPI_V(ampi_product_store)(p, r + 2, x, c2);
    if (n > 3) AMPI_V(ampi_product_store)(p, r + 3, x, c3);
#if AMPI_PASS == 3
    if (n > 4) AMPI_V(ampi_product_store)(p, r + 4, x, c4);
    if (n > 5) AMPI_V(ampi_product_store)(p, r + 5, x, c5);
    if (n > 6) AMPI_V(ampi_product_store)(p, r + 6, x, c6);
    if (n > 7) AMPI_V(ampi_product_store)(p, r + 7, x, c7);
#endif
}

AMPI_PRIVATE void AMPI_V(ampi_product_all)(const ampi_product *p) {
    for (int64_t r = 0; r < p->rows; r += AMPI_PRODUCT_ROWS) {
        for (int64_t x = 0; x < p->cols; x += 2 * AMPI_W) AMPI_V(ampi_product_rows)(p, r, x);
    }
}
#undef AMPI_PRODUCT_ROWS

/* All ones in the lanes that hold +0 or -0. */
AMPI_PRIVATE inline ampi_vi AMPI_V(ampi_is_zero)(ampi_vf x) { return (ampi_vi)(((ampi_vi)x & INT32_MAX) == 0); }

AMPI_PRIVATE void AMPI_V(ampi_product_weighted)(const ampi_product *p, int32_t a_is_weight) {
    ampi_vf zero = AMPI_V(ampi_splat)(0.0f);
    for (int64_t r = 0; r < p->rows; r++) {
        for (int64_t x = 0; x < p->cols; x += 2 * AMPI_W) {
            AMPI_V(ampi_two) sum = {{0.0f}, {0.0f}};
            for (int64_t k = 0; k < p->depth; k++) {
                ampi_vf a = AMPI_V(ampi_splat)(p->a[r * p->a_row + k * p->a_depth]);
                AMPI_V(ampi_two) b = AMPI_V(ampi_two_load)(p->b + k * p->ldb + x);
                sum.x += AMPI_V(ampi_select)(AMPI_V(ampi_is_zero)(a_is_weight ? a : b.x), zero, a * b.x);
                sum.y += AMPI_V(ampi_select)(AMPI_V(ampi_is_zero)(a_is_weight ? a : b.y), zero, a * b.y);
            }
            AMPI_V(ampi_product_store)(p, r, x, sum);
        }
    }
}

/* AMPI_W rows times 4 columns: quads are gathered so that a 4 x 4 transpose inside each of them finishes it. */
#if AMPI_PASS == 3
AMPI_PRIVATE inline __m512 AMPI_V(ampi_quads)(const float *p, int64_t ld) {
    __m512 v = _mm512_castps128_ps512(_mm_loadu_ps(p));
    v = _mm512_insertf32x4(v, _mm_loadu_ps(p + 4 * ld), 1);
    v = _mm512_insertf32x4(v, _mm_loadu_ps(p + 8 * ld), 2);
    return _mm512_insertf32x4(v, _mm_loadu_ps(p + 12 * ld), 3);
}
AMPI_PRIVATE inline void AMPI_V(ampi_transpose_block)(const float *src, int64_t src_ld, float *dst, int64_t dst_ld) {
    __m512 r0 = AMPI_V(ampi_quads)(src, src_ld), r1 = AMPI_V(ampi_quads)(src + src_ld, src_ld);
    __m512 r2 = AMPI_V(ampi_quads)(src + 2 * src_ld, src_ld), r3 = AMPI_V(ampi_quads)(src + 3 * src_ld, src_ld);
    __m512 low01 = _mm512_unpacklo_ps(r0, r1), low23 = _mm512_unpacklo_ps(r2, r3);
    __m512 high01 = _mm512_unpackhi_ps(r0, r1), high23 = _mm512_unpackhi_ps(r2, r3);
    _mm512_storeu_ps(dst, _mm512_shuffle_ps(low01, low23, 0x44));
    _mm512_storeu_ps(dst + dst_ld, _mm512_shuffle_ps(low01, low23, 0xee));
    _mm512_storeu_ps(dst + 2 * dst_ld, _mm512_shuffle_ps(high01, high23, 0x44));
    _mm512_storeu_ps(dst + 3 * dst_ld, _mm512_shuffle_ps(high01, high23, 0xee));
}
#elif AMPI_PASS == 2
AMPI_PRIVATE inline __m256 AMPI_V(ampi_quads)(const float *p, int64_t ld) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)), _mm_loadu_ps(p + 4 * ld), 1);
}
AMPI_PRIVATE inline void AMPI_V(ampi_transpose_block)(const float *src, int64_t src_ld, float *dst, int64_t dst_ld) {
    __m256 r0 = AMPI_V(ampi_quads)(src, src_ld), r1 = AMPI_V(ampi_quads)(src + src_ld, src_ld);
    __m256 r2 = AMPI_V(ampi_quads)(src + 2 * src_ld, src_ld), r3 = AMPI_V(ampi_quads)(src + 3 * src_ld, src_ld);
    __m256 low01 = _mm256_unpacklo_ps(r0, r1), low23 = _mm256_unpacklo_ps(r2, r3);
    __m256 high01 = _mm256_unpackhi_ps(r0, r1), high23 = _mm256_unpackhi_ps(r2, r3);
    _mm256_storeu_ps(dst, _mm256_shuffle_ps(low01, low23, 0x44));
    _mm256_storeu_ps(dst + dst_ld, _mm256_shuffle_ps(low01, low23, 0xee));
    _mm256_storeu_ps(dst + 2 * dst_ld, _mm256_shuffle_ps(high01, high23, 0x44));
    _mm256_storeu_ps(dst + 3 * dst_ld, _mm256_shuffle_ps(high01, high23, 0xee));
}
#else
AMPI_PRIVATE inline void AMPI_V(ampi_transpose_block)(const float *src, int64_t src_ld, float *dst, int64_t dst_ld) {
    for (int64_t r = 0; r < AMPI_W; r++) {
        for (int64_t c = 0; c < 4; c++) dst[c * dst_ld + r] = src[r * src_ld + c];
    }
}
#endif

AMPI_PRIVATE void AMPI_V(ampi_transpose)(const float *src, int64_t src_ld, float *dst, int64_t dst_ld, int64_t rows,
                                         int64_t cols) {
    for (int64_t c = 0; c < cols; c += 4) {
        for (int64_t r = 0; r < rows; r += AMPI_W) {
            AMPI_V(ampi_transpose_block)(src + r * src_ld + c, src_ld, dst + c * dst_ld + r, dst_ld);
        }
    }
}

/* Rounds to a compute dtype's precision: bf16 and fp16 to nearest even, tf32 with ties away from zero. */
AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_round_f16)(ampi_vf v) {
#if AMPI_PASS == 3
    return (ampi_vf)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif AMPI_PASS == 2
    return (ampi_vf)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < AMPI_W; i++) v[i] = amp_f32_from_f16(amp_f16_from_f32(v[i], 0));
    return v;
#endif
}
AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_round_to)(ampi_vf v, amp_dtype compute) {
    ampi_vi bits = (ampi_vi)v, nan = AMPI_V(ampi_is_nan)(v);
    switch (compute) {
        case AMP_BF16: bits = (bits + 0x7fff + ((bits >> 16) & 1)) & (int32_t)-0x10000; break;
        case AMP_TF32: bits = (bits + 0x1000) & (int32_t)-0x2000; break;
        case AMP_F16: return AMPI_V(ampi_round_f16)(v);
        default: return v;
    }
    return AMPI_V(ampi_select)(nan, v, (ampi_vf)bits);
}

AMPI_PRIVATE void AMPI_V(ampi_round_row)(float *x, int64_t n, amp_dtype compute) {
    for (int64_t i = 0; i < n; i += AMPI_W) {
        int64_t m = AMPI_MIN(n - i, (int64_t)AMPI_W);
        AMPI_V(ampi_store_tail)(x + i, AMPI_V(ampi_round_to)(AMPI_V(ampi_load_tail)(x + i, m), compute), m);
    }
}

AMPI_PRIVATE inline ampi_vi AMPI_V(ampi_load_int)(const int32_t *p) { ampi_vi v; memcpy(&v, p, sizeof v); return v; }

AMPI_PRIVATE void AMPI_V(ampi_hide)(float *tile, int64_t rows, const ampi_tile_mask *mask, float value) {
    ampi_vf hidden = AMPI_V(ampi_splat)(value);
    for (int64_t x = 0; x < AMPI_STRIP; x += AMPI_W) {
        ampi_vi first = AMPI_V(ampi_load_int)(mask->first + x), low = AMPI_V(ampi_load_int)(mask->low + x);
        ampi_vi high = AMPI_V(ampi_load_int)(mask->high + x), document = AMPI_V(ampi_load_int)(mask->document + x);
        for (int64_t r = 0; r < rows; r++) {
            ampi_vi row = AMPI_V(ampi_splat_int)((int32_t)r);
            ampi_vi seen = (ampi_vi)(row < first) | ((ampi_vi)(row >= low) & (ampi_vi)(row < high));
            float *p = tile + r * AMPI_STRIP + x;
            if (mask->documents) seen &= (ampi_vi)(document == AMPI_V(ampi_splat_int)(mask->documents[r]));
            if (mask->allowed) seen &= AMPI_V(ampi_load_int)(mask->allowed + r * AMPI_STRIP + x);
            AMPI_V(ampi_store)(p, AMPI_V(ampi_select)(seen, AMPI_V(ampi_load)(p), hidden));
        }
    }
}

/* All ones in the lanes that hold -inf. */
AMPI_PRIVATE inline ampi_vi AMPI_V(ampi_is_lowest)(ampi_vf x) { return (ampi_vi)((ampi_vi)x == -0x00800000); }

/* m = max(max, scores), p = exp(score - m), rescale = exp(max - m), sum = sum rescale + all p: the running
   softmax of Milakov and Gimelshein 2018.  Lanes that saw nothing yet keep m = -inf and get p = 0. */
AMPI_PRIVATE void AMPI_V(ampi_soften)(float *tile, int64_t rows, float *max, float *sum, float *rescale,
                                      amp_dtype compute) {
    for (int64_t x = 0; x < AMPI_STRIP; x += AMPI_W) {
        ampi_vf old = AMPI_V(ampi_load)(max + x), m = old, n = old, s = AMPI_V(ampi_splat)(0.0f), shift, factor;
        float *p = tile + x;
        int64_t r = 0;
        for (; r + 2 <= rows; r += 2) {
            m = AMPI_V(ampi_max)(AMPI_V(ampi_load)(p + r * AMPI_STRIP), m);
            n = AMPI_V(ampi_max)(AMPI_V(ampi_load)(p + (r + 1) * AMPI_STRIP), n);
        }
        if (r < rows) m = AMPI_V(ampi_max)(AMPI_V(ampi_load)(p + r * AMPI_STRIP), m);
        m = AMPI_V(ampi_max)(n, m);
        shift = AMPI_V(ampi_select)(AMPI_V(ampi_is_lowest)(m), AMPI_V(ampi_splat)(0.0f), m);
        for (r = 0; r < rows; r++) {
            ampi_vf e = AMPI_V(ampi_exp)(AMPI_V(ampi_load)(p + r * AMPI_STRIP) - shift);
            s += e;
            AMPI_V(ampi_store)(p + r * AMPI_STRIP, AMPI_V(ampi_round_to)(e, compute));
        }
        factor = AMPI_V(ampi_exp)(old - shift);
        AMPI_V(ampi_store)(rescale + x, factor);
        AMPI_V(ampi_store)(sum + x, AMPI_V(ampi_fma)(AMPI_V(ampi_load)(sum + x), factor, s));
        AMPI_V(ampi_store)(max + x, m);
    }
}

AMPI_PRIVATE void AMPI_V(ampi_finish)(const float *max, const float *sum, float *lse, float *inverse) {
    ampi_vf lowest = (ampi_vf)AMPI_V(ampi_splat_int)(-0x00800000), one = AMPI_V(ampi_splat)(1.0f);
    for (int64_t x = 0; x < AMPI_STRIP; x += AMPI_W) {
        ampi_vf s = AMPI_V(ampi_load)(sum + x), m = AMPI_V(ampi_load)(max + x);
        ampi_vi none = AMPI_V(ampi_is_zero)(s);
        AMPI_V(ampi_store)(lse + x, AMPI_V(ampi_select)(none, lowest, m + AMPI_V(ampi_log)(s)));
        AMPI_V(ampi_store)(inverse + x, AMPI_V(ampi_select)(none, AMPI_V(ampi_splat)(0.0f), AMPI_V(ampi_div)(one, s)));
    }
}

AMPI_PRIVATE void AMPI_V(ampi_slopes)(float *p, float *ds, int64_t rows, const float *lse, const float *delta) {
    ampi_vf highest = (ampi_vf)AMPI_V(ampi_splat_int)(0x7f800000);
    for (int64_t x = 0; x < AMPI_STRIP; x += AMPI_W) {
        ampi_vf l = AMPI_V(ampi_load)(lse + x), d = AMPI_V(ampi_load)(delta + x);
        l = AMPI_V(ampi_select)(AMPI_V(ampi_is_lowest)(l), highest, l);      /* a query that sees nothing: p = 0 */
        for (int64_t i = x; i < rows * AMPI_STRIP; i += AMPI_STRIP) {
            ampi_vf e = AMPI_V(ampi_exp)(AMPI_V(ampi_load)(p + i) - l);
            AMPI_V(ampi_store)(p + i, e);
            AMPI_V(ampi_store)(ds + i, e * (AMPI_V(ampi_load)(ds + i) - d));
        }
    }
}

AMPI_PRIVATE float AMPI_V(ampi_dot)(const float *a, const float *b, int64_t n) {
    ampi_vf s = AMPI_V(ampi_splat)(0.0f), t = s;
    for (int64_t i = 0; i < n; i += 2 * AMPI_W) {
        s = AMPI_V(ampi_fma)(AMPI_V(ampi_load)(a + i), AMPI_V(ampi_load)(b + i), s);
        t = AMPI_V(ampi_fma)(AMPI_V(ampi_load)(a + i + AMPI_W), AMPI_V(ampi_load)(b + i + AMPI_W), t);
    }
    return AMPI_V(ampi_sum)(s + t);
}

AMPI_PRIVATE int32_t AMPI_V(ampi_has_nan)(const float *x, int64_t n) {
    ampi_vi nan = AMPI_V(ampi_splat_int)(0);
    int32_t any = 0;
    for (int64_t i = 0; i < n; i += AMPI_W) {
        nan |= AMPI_V(ampi_is_nan)(AMPI_V(ampi_load_tail)(x + i, AMPI_MIN(n - i, (int64_t)AMPI_W)));
    }
    for (int i = 0; i < AMPI_W; i++) any |= nan[i];
    return any != 0;
}

/* dx = scale y (dy - sum(y dy)); a probability of 0 contributes 0 whatever its gradient is. */
AMPI_PRIVATE void AMPI_V(ampi_softmax_backward_row)(const float *y, const float *dy, float scale, float *dx,
                                                    int64_t n) {
    ampi_vf s = AMPI_V(ampi_splat)(0.0f), zero = s, factor = AMPI_V(ampi_splat)(scale);
    for (int64_t i = 0; i < n; i += AMPI_W) {
        int64_t m = AMPI_MIN(n - i, (int64_t)AMPI_W);
        ampi_vf p = AMPI_V(ampi_load_tail)(y + i, m), d = AMPI_V(ampi_load_tail)(dy + i, m);
        s += AMPI_V(ampi_select)(AMPI_V(ampi_is_zero)(p), zero, p * d);
    }
    s = AMPI_V(ampi_splat)(AMPI_V(ampi_sum)(s));
    for (int64_t i = 0; i < n; i += AMPI_W) {
        int64_t m = AMPI_MIN(n - i, (int64_t)AMPI_W);
        ampi_vf p = AMPI_V(ampi_load_tail)(y + i, m), d = AMPI_V(ampi_load_tail)(dy + i, m);
        d = AMPI_V(ampi_select)(AMPI_V(ampi_is_zero)(p), zero, p * (d - s) * factor);
        AMPI_V(ampi_store_tail)(dx + i, d, m);
    }
}

static const ampi_attention_vec AMPI_V(ampi_attention_kernels) = {
    AMPI_V(ampi_product_all), AMPI_V(ampi_product_weighted), AMPI_V(ampi_transpose), AMPI_V(ampi_round_row),
    AMPI_V(ampi_hide), AMPI_V(ampi_soften), AMPI_V(ampi_slopes), AMPI_V(ampi_finish), AMPI_V(ampi_dot),
    AMPI_V(ampi_has_nan), AMPI_V(ampi_softmax_backward_row)
};
/* ---- >>backends: the bandwidth-bound operators on fp32 rows.  Each element is computed by the same
   instructions wherever it stands in a row; the last n % AMPI_W go through a partly filled vector. */

/* The next vector of a row that has n elements left: whole, or its first n lanes. */
AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_load_upto)(const float *p, int64_t n) {
    return n >= AMPI_W ? AMPI_V(ampi_load)(p) : AMPI_V(ampi_load_tail)(p, n);
}
AMPI_PRIVATE inline void AMPI_V(ampi_store_upto)(float *p, ampi_vf v, int64_t n) {
    if (n >= AMPI_W) AMPI_V(ampi_store)(p, v);
    else AMPI_V(ampi_store_tail)(p, v, n);
}

/* The first n lanes of v, and 0 in the others. */
AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_first_lanes)(ampi_vf v, int64_t n) {
    float lanes[AMPI_W];
    AMPI_V(ampi_store)(lanes, v);
    return AMPI_V(ampi_load_tail)(lanes, n);
}

/* 1 / (1 + exp(-x)) from exp(-|x|), which never overflows: e / (1 + e) below 0 and 1 / (1 + e) from 0 on. */
AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_sigmoid)(ampi_vf x) {
    ampi_vf one = AMPI_V(ampi_splat)(1.0f);
    ampi_vf e = AMPI_V(ampi_exp)((ampi_vf)((ampi_vi)x | INT32_MIN));
    return AMPI_V(ampi_div)(AMPI_V(ampi_select)((ampi_vi)((ampi_vi)x < 0), e, one), one + e);
}

/* The tanh form of GELU is x sigmoid(2 u), because (1 + tanh u) / 2 = sigmoid(2 u), with
   2 u = x (A + B x^2), A = 2 sqrt(2 / pi), B = 0.044715 A.  x^2 is cut at 10^4, where the sigmoid is long 0 or 1. */
#define AMPI_GELU_A 1.5957691216057308f
#define AMPI_GELU_B 0.07135481282740843f

AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_gelu_square)(ampi_vf x) {
    ampi_vf square = x * x, limit = AMPI_V(ampi_splat)(1.0e4f);
    return AMPI_V(ampi_select)((ampi_vi)(square > limit), limit, square);
}

AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_gelu)(ampi_vf x) {
    ampi_vf a = AMPI_V(ampi_splat)(AMPI_GELU_A), b = AMPI_V(ampi_splat)(AMPI_GELU_B);
    return x * AMPI_V(ampi_sigmoid)(x * AMPI_V(ampi_fma)(b, AMPI_V(ampi_gelu_square)(x), a));
}

/* s + x s (1 - s) (A + 3 B x^2) */
AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_gelu_slope)(ampi_vf x) {
    ampi_vf a = AMPI_V(ampi_splat)(AMPI_GELU_A), b = AMPI_V(ampi_splat)(AMPI_GELU_B);
    ampi_vf square = AMPI_V(ampi_gelu_square)(x);
    ampi_vf s = AMPI_V(ampi_sigmoid)(x * AMPI_V(ampi_fma)(b, square, a));
    ampi_vf inner = AMPI_V(ampi_fma)(AMPI_V(ampi_splat)(3.0f * AMPI_GELU_B), square, a);
    return AMPI_V(ampi_fma)(x * inner, s * (AMPI_V(ampi_splat)(1.0f) - s), s);
}

/* The normal distribution function, (1 + erf(x / sqrt 2)) / 2. */
AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_normal)(ampi_vf x) {
    ampi_vf half = AMPI_V(ampi_splat)(0.5f);
    return AMPI_V(ampi_fma)(half, AMPI_V(ampi_erf)(x * AMPI_V(ampi_splat)(0.7071067811865476f)), half);
}

/* normal(x) + x exp(-x^2 / 2) / sqrt(2 pi) */
AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_gelu_erf_slope)(ampi_vf x) {
    ampi_vf density = AMPI_V(ampi_exp)(x * x * AMPI_V(ampi_splat)(-0.5f)) * AMPI_V(ampi_splat)(0.3989422804014327f);
    return AMPI_V(ampi_fma)(x, density, AMPI_V(ampi_normal)(x));
}

/* s (1 + x (1 - s)), s = sigmoid(x) */
AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_silu_slope)(ampi_vf x, ampi_vf s) {
    ampi_vf one = AMPI_V(ampi_splat)(1.0f);
    return s * AMPI_V(ampi_fma)(x, one - s, one);
}

/* ReLU by bits, so that NaN survives whatever the compiler assumes about it: all ones where x is above 0 or NaN. */
AMPI_PRIVATE inline ampi_vi AMPI_V(ampi_relu_mask)(ampi_vf x) {
    return (ampi_vi)((ampi_vi)x > 0) | AMPI_V(ampi_is_nan)(x);
}

AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_act)(amp_activation_kind kind, ampi_vf x) {
    switch (kind) {
        case AMP_ACT_GELU: return AMPI_V(ampi_gelu)(x);
        case AMP_ACT_GELU_ERF: return x * AMPI_V(ampi_normal)(x);
        case AMP_ACT_TANH: return AMPI_V(ampi_tanh)(x);
        case AMP_ACT_SILU: return x * AMPI_V(ampi_sigmoid)(x);
        case AMP_ACT_RELU: return (ampi_vf)((ampi_vi)x & AMPI_V(ampi_relu_mask)(x));
        default: return x;
    }
}

/* 1 - y^2, the slope of tanh where its value is y */
AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_tanh_slope)(ampi_vf y) {
    return AMPI_V(ampi_fma)(-y, y, AMPI_V(ampi_splat)(1.0f));
}

AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_act_back)(amp_activation_kind kind, ampi_vf x, ampi_vf dy) {
    switch (kind) {
        case AMP_ACT_GELU: return dy * AMPI_V(ampi_gelu_slope)(x);
        case AMP_ACT_GELU_ERF: return dy * AMPI_V(ampi_gelu_erf_slope)(x);
        case AMP_ACT_TANH: return dy * AMPI_V(ampi_tanh_slope)(AMPI_V(ampi_tanh)(x));
        case AMP_ACT_SILU: return dy * AMPI_V(ampi_silu_slope)(x, AMPI_V(ampi_sigmoid)(x));
        case AMP_ACT_RELU: return (ampi_vf)((ampi_vi)dy & AMPI_V(ampi_relu_mask)(x));
        default: return dy;
    }
}

AMPI_PRIVATE void AMPI_V(ampi_activation_row)(amp_activation_kind kind, const float *x, float *y, int64_t n) {
    for (int64_t i = 0; i < n; i += AMPI_W)
        AMPI_V(ampi_store_upto)(y + i, AMPI_V(ampi_act)(kind, AMPI_V(ampi_load_upto)(x + i, n - i)), n - i);
}

AMPI_PRIVATE void AMPI_V(ampi_activation_backward_row)(amp_activation_kind kind, const float *x, const float *dy,
                                                       float *dx, int64_t n) {
    for (int64_t i = 0; i < n; i += AMPI_W) {
        ampi_vf v = AMPI_V(ampi_load_upto)(x + i, n - i), d = AMPI_V(ampi_load_upto)(dy + i, n - i);
        AMPI_V(ampi_store_upto)(dx + i, AMPI_V(ampi_act_back)(kind, v, d), n - i);
    }
}

AMPI_PRIVATE void AMPI_V(ampi_tanh_backward_row)(const float *y, const float *dy, float *dx, int64_t n) {
    for (int64_t i = 0; i < n; i += AMPI_W) {
        ampi_vf v = AMPI_V(ampi_load_upto)(y + i, n - i), d = AMPI_V(ampi_load_upto)(dy + i, n - i);
        AMPI_V(ampi_store_upto)(dx + i, d * AMPI_V(ampi_tanh_slope)(v), n - i);
    }
}

AMPI_PRIVATE void AMPI_V(ampi_swiglu_row)(const float *gate, const float *up, float *y, int64_t n) {
    for (int64_t i = 0; i < n; i += AMPI_W) {
        ampi_vf g = AMPI_V(ampi_load_upto)(gate + i, n - i), u = AMPI_V(ampi_load_upto)(up + i, n - i);
        AMPI_V(ampi_store_upto)(y + i, g * AMPI_V(ampi_sigmoid)(g) * u, n - i);
    }
}

AMPI_PRIVATE void AMPI_V(ampi_swiglu_backward_row)(const float *gate, const float *up, const float *dy, float *dgate,
                                                   float *dup, int64_t n) {
    for (int64_t i = 0; i < n; i += AMPI_W) {
        ampi_vf g = AMPI_V(ampi_load_upto)(gate + i, n - i), u = AMPI_V(ampi_load_upto)(up + i, n - i);
        ampi_vf d = AMPI_V(ampi_load_upto)(dy + i, n - i), s = AMPI_V(ampi_sigmoid)(g);
        AMPI_V(ampi_store_upto)(dgate + i, d * u * AMPI_V(ampi_silu_slope)(g, s), n - i);
        AMPI_V(ampi_store_upto)(dup + i, d * g * s, n - i);
    }
}

/* ---- Rows: sums with four accumulators (the latency of an addition), then lane by lane in a fixed order */

AMPI_PRIVATE float AMPI_V(ampi_sum_row)(const float *x, int64_t n) {
    ampi_vf s0 = AMPI_V(ampi_splat)(0.0f), s1 = s0, s2 = s0, s3 = s0;
    int64_t i = 0;
    for (; i + 4 * AMPI_W <= n; i += 4 * AMPI_W) {
        s0 += AMPI_V(ampi_load)(x + i);
        s1 += AMPI_V(ampi_load)(x + i + AMPI_W);
        s2 += AMPI_V(ampi_load)(x + i + 2 * AMPI_W);
        s3 += AMPI_V(ampi_load)(x + i + 3 * AMPI_W);
    }
    for (; i + AMPI_W <= n; i += AMPI_W) s0 += AMPI_V(ampi_load)(x + i);
    if (i < n) s1 += AMPI_V(ampi_load_upto)(x + i, n - i);
    return AMPI_V(ampi_sum)((s0 + s1) + (s2 + s3));
}

AMPI_PRIVATE float AMPI_V(ampi_sum_squares_row)(const float *x, float mean, int64_t n) {
    ampi_vf s0 = AMPI_V(ampi_splat)(0.0f), s1 = s0, s2 = s0, s3 = s0, m = AMPI_V(ampi_splat)(mean);
    int64_t i = 0;
    for (; i + 4 * AMPI_W <= n; i += 4 * AMPI_W) {
        ampi_vf d0 = AMPI_V(ampi_load)(x + i) - m, d1 = AMPI_V(ampi_load)(x + i + AMPI_W) - m;
        ampi_vf d2 = AMPI_V(ampi_load)(x + i + 2 * AMPI_W) - m, d3 = AMPI_V(ampi_load)(x + i + 3 * AMPI_W) - m;
        s0 = AMPI_V(ampi_fma)(d0, d0, s0);
        s1 = AMPI_V(ampi_fma)(d1, d1, s1);
        s2 = AMPI_V(ampi_fma)(d2, d2, s2);
        s3 = AMPI_V(ampi_fma)(d3, d3, s3);
    }
    for (; i + AMPI_W <= n; i += AMPI_W) {
        ampi_vf d = AMPI_V(ampi_load)(x + i) - m;
        s0 = AMPI_V(ampi_fma)(d, d, s0);
    }
    if (i < n) {
        ampi_vf d = AMPI_V(ampi_first_lanes)(AMPI_V(ampi_load_upto)(x + i, n - i) - m, n - i);
        s1 = AMPI_V(ampi_fma)(d, d, s1);
    }
    return AMPI_V(ampi_sum)((s0 + s1) + (s2 + s3));
}

AMPI_PRIVATE void AMPI_V(ampi_normalize_row)(const float *x, float mean, float rstd, const float *weight,
                                             const float *bias, float *y, int64_t n) {
    ampi_vf m = AMPI_V(ampi_splat)(mean), r = AMPI_V(ampi_splat)(rstd);
    for (int64_t i = 0; i < n; i += AMPI_W) {
        ampi_vf v = (AMPI_V(ampi_load_upto)(x + i, n - i) - m) * r;
        if (weight && bias)
            v = AMPI_V(ampi_fma)(v, AMPI_V(ampi_load_upto)(weight + i, n - i), AMPI_V(ampi_load_upto)(bias + i, n - i));
        else if (weight) v *= AMPI_V(ampi_load_upto)(weight + i, n - i);
        else if (bias) v += AMPI_V(ampi_load_upto)(bias + i, n - i);
        AMPI_V(ampi_store_upto)(y + i, v, n - i);
    }
}

/* With g = dy weight and h = (x - mean) rstd: sums = sum g, sum g h; dweight += dy h, dbias += dy. */
AMPI_PRIVATE void AMPI_V(ampi_norm_sums_row)(const float *x, const float *dy, const float *weight, float mean,
                                             float rstd, float *dweight, float *dbias, float sums[2], int64_t n) {
    ampi_vf m = AMPI_V(ampi_splat)(mean), r = AMPI_V(ampi_splat)(rstd);
    ampi_vf s0 = AMPI_V(ampi_splat)(0.0f), s1 = s0;
    for (int64_t i = 0; i < n; i += AMPI_W) {
        ampi_vf h = (AMPI_V(ampi_load_upto)(x + i, n - i) - m) * r, d = AMPI_V(ampi_load_upto)(dy + i, n - i);
        ampi_vf g = d;
        if (weight) g *= AMPI_V(ampi_load_upto)(weight + i, n - i);
        s0 += g;
        s1 = AMPI_V(ampi_fma)(g, h, s1);
        if (dweight)
            AMPI_V(ampi_store_upto)
            (dweight + i, AMPI_V(ampi_fma)(d, h, AMPI_V(ampi_load_upto)(dweight + i, n - i)), n - i);
        if (dbias) AMPI_V(ampi_store_upto)(dbias + i, AMPI_V(ampi_load_upto)(dbias + i, n - i) + d, n - i);
    }
    sums[0] = AMPI_V(ampi_sum)(s0);
    sums[1] = AMPI_V(ampi_sum)(s1);
}

/* dx = rstd (g - means[0] - h means[1]) + dsum */
AMPI_PRIVATE void AMPI_V(ampi_norm_dx_row)(const float *x, const float *dy, const float *weight, const float *dsum,
                                           float mean, float rstd, const float means[2], float *dx, int64_t n) {
    ampi_vf m = AMPI_V(ampi_splat)(mean), r = AMPI_V(ampi_splat)(rstd);
    ampi_vf g_mean = AMPI_V(ampi_splat)(means[0]), gh_mean = AMPI_V(ampi_splat)(means[1]);
    for (int64_t i = 0; i < n; i += AMPI_W) {
        ampi_vf h = (AMPI_V(ampi_load_upto)(x + i, n - i) - m) * r, g = AMPI_V(ampi_load_upto)(dy + i, n - i);
        if (weight) g *= AMPI_V(ampi_load_upto)(weight + i, n - i);
        g = AMPI_V(ampi_fma)(-h, gh_mean, g - g_mean);
        if (dsum) g = AMPI_V(ampi_fma)(r, g, AMPI_V(ampi_load_upto)(dsum + i, n - i));
        else g *= r;
        AMPI_V(ampi_store_upto)(dx + i, g, n - i);
    }
}

/* -inf for an empty row; a row with NaN has any value. */
AMPI_PRIVATE float AMPI_V(ampi_row_max)(const float *x, int64_t n) {
    ampi_vf m0 = AMPI_V(ampi_splat)(ampi_f32_of_bits(0xff800000u)), m1 = m0;
    int64_t i = 0;
    for (; i + 2 * AMPI_W <= n; i += 2 * AMPI_W) {
        m0 = AMPI_V(ampi_max)(m0, AMPI_V(ampi_load)(x + i));
        m1 = AMPI_V(ampi_max)(m1, AMPI_V(ampi_load)(x + i + AMPI_W));
    }
    for (; i < n; i++) m0 = AMPI_V(ampi_max)(m0, AMPI_V(ampi_splat)(x[i]));
    return AMPI_V(ampi_reduce_max)(AMPI_V(ampi_max)(m0, m1));
}

AMPI_PRIVATE float AMPI_V(ampi_exp_sum_row)(const float *x, float max, float *e, int64_t n) {
    ampi_vf s = AMPI_V(ampi_splat)(0.0f), m = AMPI_V(ampi_splat)(max);
    for (int64_t i = 0; i < n; i += AMPI_W) {
        ampi_vf v = AMPI_V(ampi_exp)(AMPI_V(ampi_load_upto)(x + i, n - i) - m);
        if (e) AMPI_V(ampi_store_upto)(e + i, v, n - i);
        s += i + AMPI_W <= n ? v : AMPI_V(ampi_first_lanes)(v, n - i);
    }
    return AMPI_V(ampi_sum)(s);
}

AMPI_PRIVATE float AMPI_V(ampi_squared_error_row)(const float *x, const float *target, float scale, float *dx,
                                                  int64_t n) {
    ampi_vf s = AMPI_V(ampi_splat)(0.0f), f = AMPI_V(ampi_splat)(scale);
    for (int64_t i = 0; i < n; i += AMPI_W) {
        ampi_vf d = AMPI_V(ampi_load_upto)(x + i, n - i) - AMPI_V(ampi_load_upto)(target + i, n - i);
        s = AMPI_V(ampi_fma)(d, d, s);
        if (dx) AMPI_V(ampi_store_upto)(dx + i, d * f, n - i);
    }
    return AMPI_V(ampi_sum)(s);
}

AMPI_PRIVATE void AMPI_V(ampi_scale_shift_row)(const float *x, float a, float b, float *y, int64_t n) {
    ampi_vf scale = AMPI_V(ampi_splat)(a), shift = AMPI_V(ampi_splat)(b);
    for (int64_t i = 0; i < n; i += AMPI_W) {
        AMPI_V(ampi_store_upto)(y + i, AMPI_V(ampi_fma)(AMPI_V(ampi_load_upto)(x + i, n - i), scale, shift), n - i);
    }
}

AMPI_PRIVATE void AMPI_V(ampi_add_row)(const float *a, float alpha, const float *b, float beta, float *y, int64_t n) {
    ampi_vf va = AMPI_V(ampi_splat)(alpha), vb = AMPI_V(ampi_splat)(beta);
    for (int64_t i = 0; i < n; i += AMPI_W) {
        ampi_vf v = AMPI_V(ampi_load_upto)(a + i, n - i) * va;
        if (b) v = AMPI_V(ampi_fma)(AMPI_V(ampi_load_upto)(b + i, n - i), vb, v);
        AMPI_V(ampi_store_upto)(y + i, v, n - i);
    }
}

AMPI_PRIVATE void AMPI_V(ampi_dropout_row)(const float *x, float *y, int64_t n, uint32_t threshold, float scale,
                                           uint64_t seed, uint64_t index) {
    uint32_t words[256];
    ampi_vf s = AMPI_V(ampi_splat)(scale);
    for (int64_t begin = 0; begin < n; begin += 256) {
        int64_t end = AMPI_MIN(n, begin + 256);
        AMPI_V(ampi_random)(words, end - begin, seed, index + (uint64_t)begin);
        for (int64_t i = begin; i < end; i += AMPI_W) {
                ampi_vi word, kept;
            ampi_vf v = AMPI_V(ampi_load_upto)(x + i, end - i) * s;
            memcpy(&word, words + (i - begin), sizeof word);
            kept = (ampi_vi)(((word >> 8) & 0xffffff) >= (int32_t)threshold);
            AMPI_V(ampi_store_upto)(y + i, (ampi_vf)((ampi_vi)v & kept), end - i);
        }
    }
}

static const ampi_pointwise_vec AMPI_V(ampi_pointwise_kernels) = {
    AMPI_V(ampi_activation_row), AMPI_V(ampi_activation_backward_row), AMPI_V(ampi_tanh_backward_row),
    AMPI_V(ampi_swiglu_row), AMPI_V(ampi_swiglu_backward_row),
    AMPI_V(ampi_sum_row), AMPI_V(ampi_sum_squares_row), AMPI_V(ampi_normalize_row), AMPI_V(ampi_norm_sums_row),
    AMPI_V(ampi_norm_dx_row),
    AMPI_V(ampi_row_max), AMPI_V(ampi_exp_sum_row), AMPI_V(ampi_squared_error_row),
    AMPI_V(ampi_scale_shift_row), AMPI_V(ampi_add_row), AMPI_V(ampi_dropout_row),
};

/* ---- Multi-tensor kernels. */

/* Half a vector of fp32, its bits, and the same numbers in fp64. */
typedef float AMPI_V(ampi_vhalf) __attribute__((vector_size(AMPI_W * 2), may_alias));
typedef int32_t AMPI_V(ampi_vhalf_bits) __attribute__((vector_size(AMPI_W * 2), may_alias));
typedef double AMPI_V(ampi_vdouble) __attribute__((vector_size(AMPI_W * 4), may_alias));

/* sum += x^2 for AMPI_W / 2 numbers, which are read as bits so that no compiler option hides what is not finite. */
AMPI_PRIVATE inline AMPI_V(ampi_vdouble) AMPI_V(ampi_add_square)(AMPI_V(ampi_vdouble) sum, const float *p,
                                                                 AMPI_V(ampi_vhalf_bits) *bad) {
    AMPI_V(ampi_vhalf_bits) x;
    AMPI_V(ampi_vdouble) d;
    memcpy(&x, p, sizeof x);
    d = __builtin_convertvector((AMPI_V(ampi_vhalf))x, AMPI_V(ampi_vdouble));
    *bad |= (AMPI_V(ampi_vhalf_bits))((x & 0x7f800000) == 0x7f800000);
    return sum + d * d;
}

AMPI_PRIVATE void AMPI_V(ampi_multi_scale)(float *g, int64_t n, float factor) {
    ampi_vf f = AMPI_V(ampi_splat)(factor);
    int64_t i;
    for (i = 0; i + AMPI_W <= n; i += AMPI_W) AMPI_V(ampi_store)(g + i, AMPI_V(ampi_load)(g + i) * f);
    if (i < n) AMPI_V(ampi_store_tail)(g + i, AMPI_V(ampi_load_tail)(g + i, n - i) * f, n - i);
}

/* Four independent sums hide the latency of the addition; they are added at the end in a fixed order.  The last
   numbers of a row go through a vector filled up with zeros. */
AMPI_PRIVATE double AMPI_V(ampi_multi_check)(float *g, int64_t n, const float *factor, int32_t *bad) {
    AMPI_V(ampi_vdouble) s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
    AMPI_V(ampi_vhalf_bits) seen = {0};
    float rest[2 * AMPI_W];
    const float *p = g;
    int32_t any = 0;
    double total = 0;
    int64_t i;
    int j;
    for (i = 0; i < n; i += 2 * AMPI_W, p += 2 * AMPI_W) {
        if (n - i < 2 * AMPI_W) {
            memset(rest, 0, sizeof rest);
            memcpy(rest, (const char *)g + 4 * i, (size_t)(4 * (n - i)));
            p = rest;
        }
        s0 = AMPI_V(ampi_add_square)(s0, p, &seen);
        s1 = AMPI_V(ampi_add_square)(s1, p + AMPI_W / 2, &seen);
        s2 = AMPI_V(ampi_add_square)(s2, p + AMPI_W, &seen);
        s3 = AMPI_V(ampi_add_square)(s3, p + AMPI_W / 2 * 3, &seen);
    }
    s0 = (s0 + s1) + (s2 + s3);
    for (j = 0; j < AMPI_W / 2; j++) { total += s0[j]; any |= seen[j]; }
    if (any) *bad = 1;
    if (factor != NULL) AMPI_V(ampi_multi_scale)(g, n, *factor);
    return total;
}

AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_adamw_one)(ampi_vf w, ampi_vf g, ampi_vf *m, ampi_vf *v,
                                                   const ampi_adamw_step *s) {
    ampi_vf root, rate = AMPI_V(ampi_splat)(-s->rate);
    g = g * s->multiplier;
    *m = AMPI_V(ampi_fma)(g - *m, AMPI_V(ampi_splat)(s->rest1), *m);
    *v = AMPI_V(ampi_fma)(g * s->rest2, g, *v * s->beta2);
    root = AMPI_V(ampi_fma)(AMPI_V(ampi_sqrt)(*v), AMPI_V(ampi_splat)(s->correction), AMPI_V(ampi_splat)(s->eps));
    return AMPI_V(ampi_fma)(rate, AMPI_V(ampi_div)(*m, root), w * s->keep);
}

AMPI_PRIVATE void AMPI_V(ampi_multi_adamw)(float *w, const float *g, float *m, float *v, int64_t n,
                                           const ampi_adamw_step *s) {
    int64_t i, rest;
    ampi_vf a, b, x;
    for (i = 0; i + AMPI_W <= n; i += AMPI_W) {
        a = AMPI_V(ampi_load)(m + i);
        b = AMPI_V(ampi_load)(v + i);
        x = AMPI_V(ampi_adamw_one)(AMPI_V(ampi_load)(w + i), AMPI_V(ampi_load)(g + i), &a, &b, s);
        AMPI_V(ampi_store)(w + i, x);
        AMPI_V(ampi_store)(m + i, a);
        AMPI_V(ampi_store)(v + i, b);
    }
    if (i == n) return;
    rest = n - i;
    a = AMPI_V(ampi_load_tail)(m + i, rest);
    b = AMPI_V(ampi_load_tail)(v + i, rest);
    x = AMPI_V(ampi_adamw_one)(AMPI_V(ampi_load_tail)(w + i, rest), AMPI_V(ampi_load_tail)(g + i, rest), &a, &b, s);
    AMPI_V(ampi_store_tail)(w + i, x, rest);
    AMPI_V(ampi_store_tail)(m + i, a, rest);
    AMPI_V(ampi_store_tail)(v + i, b, rest);
}

AMPI_PRIVATE inline ampi_vf AMPI_V(ampi_sgd_one)(ampi_vf w, ampi_vf g, ampi_vf *m, const ampi_sgd_step *s) {
    ampi_vf momentum = AMPI_V(ampi_splat)(s->momentum);
    g = g * s->multiplier;
    if (s->decay != 0) g = AMPI_V(ampi_fma)(w, AMPI_V(ampi_splat)(s->decay), g);     /* 0 times an infinite w is NaN */
    if (m != NULL) {
        *m = AMPI_V(ampi_fma)(momentum, *m, g * s->rest);
        g = s->nesterov ? AMPI_V(ampi_fma)(momentum, *m, g) : *m;
    }
    return AMPI_V(ampi_fma)(AMPI_V(ampi_splat)(-s->rate), g, w);
}

AMPI_PRIVATE void AMPI_V(ampi_multi_sgd)(float *w, const float *g, float *m, int64_t n, const ampi_sgd_step *s) {
    int64_t i, rest;
    ampi_vf a = {0}, x, *room = m != NULL ? &a : NULL;
    for (i = 0; i + AMPI_W <= n; i += AMPI_W) {
        if (m != NULL) a = AMPI_V(ampi_load)(m + i);
        x = AMPI_V(ampi_sgd_one)(AMPI_V(ampi_load)(w + i), AMPI_V(ampi_load)(g + i), room, s);
        AMPI_V(ampi_store)(w + i, x);
        if (m != NULL) AMPI_V(ampi_store)(m + i, a);
    }
    if (i == n) return;
    rest = n - i;
    if (m != NULL) a = AMPI_V(ampi_load_tail)(m + i, rest);
    x = AMPI_V(ampi_sgd_one)(AMPI_V(ampi_load_tail)(w + i, rest), AMPI_V(ampi_load_tail)(g + i, rest), room, s);
    AMPI_V(ampi_store_tail)(w + i, x, rest);
    if (m != NULL) AMPI_V(ampi_store_tail)(m + i, a, rest);
}

/* Counts of AMPI_W numbers at a time, each lane's own; comparisons give -1. */
typedef struct AMPI_V(ampi_inspect_sums) { ampi_vi above[AMPI_FIT_LIMITS], limit[AMPI_FIT_LIMITS], largest; } AMPI_V(ampi_inspect_sums);

AMPI_PRIVATE inline void AMPI_V(ampi_inspect_one)(AMPI_V(ampi_inspect_sums) *s, ampi_vi x) {
    ampi_vi finite, greater;
    x &= 0x7fffffff;
    s->above[0] -= (ampi_vi)(x > s->limit[0]);
    s->above[1] -= (ampi_vi)(x > s->limit[1]);
    s->above[2] -= (ampi_vi)(x > s->limit[2]);
    s->above[3] -= (ampi_vi)(x > s->limit[3]);
    s->above[4] -= (ampi_vi)(x > s->limit[4]);
    finite = (ampi_vi)(x <= s->limit[AMPI_FIT_INFINITE]);
    s->above[5] += finite + 1;
    s->above[6] -= (ampi_vi)(x > s->limit[6]);
    x &= finite;
    greater = (ampi_vi)(x > s->largest);
    s->largest = (x & greater) | (s->largest & ~greater);
}

AMPI_PRIVATE void AMPI_V(ampi_multi_inspect)(const float *x, int64_t n, const ampi_fit *fit,
                                             int64_t above[AMPI_FIT_LIMITS], uint32_t *largest) {
    AMPI_V(ampi_inspect_sums) s;
    ampi_vi bits;
    float rest[AMPI_W];
    int64_t i;
    int j, k;
    memset(&s, 0, sizeof s);
    for (k = 0; k < AMPI_FIT_LIMITS; k++) s.limit[k] += (int32_t)fit->limit[k];
    for (i = 0; i + AMPI_W <= n; i += AMPI_W) {
        memcpy(&bits, x + i, sizeof bits);
        AMPI_V(ampi_inspect_one)(&s, bits);
    }
    if (i < n) {                    /* zeros count nowhere */
        memset(rest, 0, sizeof rest);
        memcpy(rest, x + i, (size_t)(n - i) * sizeof *x);
        memcpy(&bits, rest, sizeof bits);
        AMPI_V(ampi_inspect_one)(&s, bits);
    }
    for (j = 0; j < AMPI_W; j++) {
        for (k = 0; k < AMPI_FIT_LIMITS; k++) above[k] += s.above[k][j];
        if ((uint32_t)s.largest[j] > *largest) *largest = (uint32_t)s.largest[j];
    }
}

static const ampi_multi_vec AMPI_V(ampi_multi_kernels) = {
    AMPI_V(ampi_multi_check), AMPI_V(ampi_multi_scale), AMPI_V(ampi_multi_adamw), AMPI_V(ampi_multi_sgd),
    AMPI_V(ampi_multi_inspect)
};

#endif /* AMPI_PASS */

/* ---- Change log
   0.1.0  first version: CPU and CUDA backends, autocast, operators, scaler, optimizers, loader, state; settings,
          monitoring, verification, tuning and recovery.

   ---- Licence
   MIT License

   Copyright (c) 2026 the amp.h authors

   Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
   documentation files (the "Software"), to deal in the Software without restriction, including without limitation
   the rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and
   to permit persons to whom the Software is furnished to do so, subject to the following conditions:

   The above copyright notice and this permission notice shall be included in all copies or substantial portions of
   the Software.

   THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO
   THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
   AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF
   CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS
   IN THE SOFTWARE. */
