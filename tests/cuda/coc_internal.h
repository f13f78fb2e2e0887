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
    int device;
};
/* Runs all blocks.  Returns cudaSuccess or the fault that ended the kernel. */
cudaError_t coc_run_grid(const coc_grid *grid);

void coc_fault(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* For the signal handler: 1 if the host touched device memory at this address.  From now on it may be touched. */
int coc_host_touched(const void *address);
/* Describes the memory at an address, for texts. */
std::string coc_describe(const void *address);
std::string coc_function_name(const void *function);
/* Counts of kernels since the program began; see coc_counts. */
struct coc_work { long switches, mmas, ldmatrices, fp8_pairs, async_bytes, prefetches, barriers, busy_barriers, wgmmas, bulk_bytes; };
extern coc_work coc_worked;
extern coc_order coc_current_order;
extern uint64_t coc_order_seed;
extern unsigned coc_last_blocks, coc_shared_base;
void coc_install_handler();
void coc_check_locks(const char *function);

/* ---- Between the engine and coc_hopper.cpp.  A set of waiting threads has a bit for each thread of the largest block. */

enum { COC_READY_WORDS = 1024 / 64 };
struct coc_hopper;                              /* what a block has of it, kept by each OS thread */
coc_hopper *coc_hopper_new();
coc_hopper *coc_hopper_here();
void coc_hopper_begin(coc_hopper *hopper, unsigned threads, unsigned block);
void coc_hopper_barrier();                      /* all threads of the block met */
void coc_hopper_return();                       /* the current thread returns */
void coc_hopper_end();                          /* it is the block's last */
bool coc_hopper_land();                         /* One of the copies that are under way lands; false if there is none. */
/* Waits while *flag is `value`; who changes it wakes those that wait. */
void coc_wait_in(uint64_t *waiting, const volatile unsigned *flag, unsigned value, const char *where);
void coc_wake(uint64_t *waiting);
unsigned coc_thread_number();                   /* of the current thread in its block */
unsigned coc_block_threads();
const coc_grid *coc_grid_now();
coc_work *coc_work_here();
bool coc_is_shared(const void *p, size_t bytes);            /* These bytes lie inside one array of shared memory. */
unsigned char *coc_shared_at(uint32_t number, size_t bytes);    /* the inverse of coc_shared_number, or NULL */
float coc_half_value(uint32_t bits, bool bf16);
/* What cuTensorMapEncodeTiled writes into the 128 bytes of a map. */
struct coc_tensor_map {
    uint64_t magic;
    unsigned char *data;
    uint64_t size[5], stride[4];                /* numbers; bytes */
    uint16_t box[5];
    uint8_t rank, bytes, swizzled;              /* bytes of a number */
    int8_t device;
};
enum : uint64_t { COC_TENSOR_MAP = 0x70616d726f736e74u };
static_assert(sizeof(coc_tensor_map) <= 128, "as the driver's");

/* ---- For a library above the runtime (coc_cublas.cpp). */

/* One call of the library.  It is counted and holds the runtime's lock.  At its end, device memory is hidden. */
struct coc_library_call {
    explicit coc_library_call(const char *function, bool synchronises = false);
    ~coc_library_call();
};
coc_counts *coc_counts_now();
int coc_device_now();
int coc_capability();                           /* of the GPUs, 10 major + minor */
cudaError_t coc_device_error(int device);       /* a lasting error of the device */
cudaError_t coc_lose_device(int device, cudaError_t error);
/* 1: these bytes lie inside one living allocation of the device, or in pinned memory. */
int coc_usable(const void *p, size_t bytes, int device);
void coc_expose(int device);
void coc_wait_for_device(int device);
int coc_device_done(int device);                /* 1: no work is left.  Work that may run is run. */
void coc_pause();                               /* lets other threads run and time pass */
/* Puts work of this name into a stream of the current device, or into the graph that is captured from it.  run returns
   cudaErrorNotReady while it waits for another GPU, and is then called again.  It is a fault if work in another stream
   that is not ordered before it uses the same scratch memory. */
struct coc_scratch { const void *data; size_t bytes; };
cudaError_t coc_enqueue(const char *name, cudaStream_t stream, coc_scratch scratch, std::function<cudaError_t()> run);
/* Moves the modelled clock by the time that work took. */
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
