/* coc_internal.h - the interface between the engine (threads of a block) and the runtime (memory, streams) of the model
 * GPU. */
#ifndef COC_INTERNAL_H
#define COC_INTERNAL_H

#include "include/coc.h"

enum { COC_SHARED_MOST = 227 * 1024, COC_SHARED_DEFAULT = 48 * 1024 };

struct coc_grid {
    dim3 grid, block;
    size_t shared;              /* dynamic bytes */
    size_t shared_most;         /* static and dynamic together */
    coc_call *call;
    const char *name;
};
/* Runs all blocks; cudaSuccess or the fault that ended the kernel. */
cudaError_t coc_run_grid(const coc_grid *grid);

void coc_fault(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* For the signal handler: 1 if the address was device memory that the host touched; it may be touched now. */
int coc_host_touched(const void *address);
/* What lies at an address, for texts. */
std::string coc_describe(const void *address);
std::string coc_function_name(const void *function);
/* What kernels did since the program began; see coc_counts. */
struct coc_work { long switches, mmas, ldmatrices, fp8_pairs, async_bytes, prefetches, barriers, busy_barriers; };
extern coc_work coc_worked;
extern coc_order coc_current_order;
extern uint64_t coc_order_seed;
extern unsigned coc_last_blocks;
void coc_install_handler();
void coc_check_locks(const char *function);

/* ---- For a library above the runtime (coc_cublas.cpp). */

/* One call of the library: counted, holding the runtime's lock; device memory is hidden at its end. */
struct coc_library_call {
    explicit coc_library_call(const char *function, bool synchronises = false);
    ~coc_library_call();
};
coc_counts *coc_counts_now();
int coc_device_now();
int coc_capability();                           /* of the GPUs, 10 major + minor */
cudaError_t coc_device_error(int device);       /* what lasts */
cudaError_t coc_lose_device(int device, cudaError_t error);
/* 1: these bytes lie inside one living allocation of the device, or in pinned memory. */
int coc_usable(const void *p, size_t bytes, int device);
void coc_expose(int device);
void coc_wait_for_device(int device);
int coc_device_done(int device);                /* 1: no work is left; what may run does */
void coc_pause();                               /* lets other threads in, and time pass */
/* Puts work of this name into a stream of the current device, or into the graph that is captured from it.  run returns
   cudaErrorNotReady while it waits for another GPU, and is then called again.  Its scratch memory must not be that of work in another stream that does not come before it: a fault. */
struct coc_scratch { const void *data; size_t bytes; };
cudaError_t coc_enqueue(const char *name, cudaStream_t stream, coc_scratch scratch, std::function<cudaError_t()> run);
/* Work took this long, in seconds of the modelled clock. */
void coc_pass_time(double seconds);
void coc_blas_reset();
long coc_blas_living();

#if defined(__SANITIZE_ADDRESS__)
#  include <sanitizer/asan_interface.h>
#  include <sanitizer/common_interface_defs.h>
#  define COC_ASAN 1
static inline void coc_poison(const void *p, size_t bytes) { __asan_poison_memory_region(p, bytes); }
static inline void coc_unpoison(const void *p, size_t bytes) { __asan_unpoison_memory_region(p, bytes); }
#else
#  define COC_ASAN 0
static inline void coc_poison(const void *, size_t) {}
static inline void coc_unpoison(const void *, size_t) {}
#endif

#endif
