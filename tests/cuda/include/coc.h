/* coc.h - the functions by which tests control and inspect the model GPU. */
#ifndef COC_H
#define COC_H

#include "cuda_runtime.h"
#include <functional>
#include <pthread.h>
#include <string>

enum { CUDA_IS_MODEL = 1 };

/* ---- Orders.  The threads of a block start and continue in this order; blocks are taken in it too.
   AHEAD: forward, but a warp continues until all its threads wait for the block, as if the other warps were slow. */
enum coc_order { COC_FORWARD = 0, COC_REVERSE = 1, COC_RANDOM = 2, COC_AHEAD = 3, COC_ORDERS = 4 };
void coc_set_order(coc_order order, uint64_t seed = 1);
/* Only the last `blocks` blocks of each launch run (0, the default: all).  This tests the end of arrays that are too long to
   be computed whole.  A test of a kernel with a persistent grid sets as many multiprocessors as the kernel has blocks. */
void coc_set_last_blocks(unsigned blocks);

/* ---- When work in streams runs.  All three schedules are legal.
   LATE: when a call waits for it, and only the work that the call needs.  EAGER: at the call.
   OTHERS_FIRST: as LATE, but all other work that may run at that moment runs before it.  Branches of a graph advance
   together, step by step.
   The work of a stream that is destroyed still runs.  The next stream that is created gets the same handle. */
enum coc_schedule { COC_LATE = 0, COC_EAGER = 1, COC_OTHERS_FIRST = 2, COC_SCHEDULES = 3 };
void coc_set_schedule(coc_schedule schedule);
/* cudaEventQuery and cudaStreamQuery return "not ready" this many times (default 1) before unfinished work runs. */
void coc_set_patience(int queries);
/* 1: every call first lets other threads run for a tenth of a millisecond, so that the calls of two threads come in every
   order. */
void coc_set_yielding(int yielding);

/* ---- The machine: how many GPUs (default 2), their memory in bytes (default 1 GiB), their multiprocessors
   (default 4: small, so that persistent grids loop), compute capability (default COC_CAPABILITY), and what it was compiled
   for (default: that).  May be called only while no object of the runtime exists.
   Code for a newer GPU does not run (error 209).  Code for an older GPU runs, translated by the driver, but has only that
   GPU's features: below 80 (PTX ISA), m16n8k16 is a fault, and cp.async copies at once.  Image 90 + COC_LETTER_A is that of
   -arch=sm_90a: it runs on capability 90 alone, and has wgmma and setmaxnreg. */
#ifndef COC_CAPABILITY
#  define COC_CAPABILITY 90
#endif
enum { COC_LETTER_A = 256 };
void coc_set_devices(int count, size_t memory = (size_t)1 << 30, int multiprocessors = 4, int capability = COC_CAPABILITY,
                     int image = 0);
/* The driver's version (13000 after coc_reset): it has no functions that came later. */
void coc_set_driver(int version);
/* The GPU's number of the first byte of dynamic shared memory, as descriptors have it (default 1024). */
void coc_set_shared_base(unsigned number);
/* 0: the GPUs have no stream-ordered memory, and cudaMallocAsync is refused (default 1). */
void coc_set_pools(int pools);
/* 1 (default): device memory is hidden outside kernels and copies.  An access is recorded as a fault, and then succeeds. */
void coc_set_hidden(int hidden);
/* A pointer argument of a kernel must point to device memory, pinned memory or be NULL (default 1). */
void coc_set_pointer_check(int check);

/* ---- Faults are errors in every program: a divergent barrier, a deadlock, an overrun red zone, host access to device
   memory, memory used after its release, an error of the kernel's own.  Kernel faults end the kernel with a sticky
   error.  Each test ends with coc_faults() == 0, or takes the fault it provoked. */
int coc_faults();
/* A call of CUDA or cuBLASLt while amp_cuda.cu holds a lock is a fault, because it may deadlock.  CUDA may hold its own lock
   while it calls a function of the program (cudaLaunchHostFunc, the destructor of a user object) that waits for our lock. */
int coc_locks_held();                           /* by this thread, inside amp_cuda.cu */
extern "C" int coc_mutex_lock(pthread_mutex_t *mutex), coc_mutex_unlock(pthread_mutex_t *mutex);
std::string coc_fault_text();                   /* all since the last coc_take_faults, one per line */
std::string coc_take_faults();                  /* returns the texts and clears them */
void coc_check_red_zones();                     /* checks all allocations that exist now */

/* ---- Counts since coc_reset_counts. */
struct coc_counts {
    long calls;                 /* of any function of the runtime */
    long launches;
    long synchronising;         /* calls that wait for the GPU, or may: also cudaMemcpy, cudaFree, pageable copies */
    long allocations, frees;    /* of device or pinned memory, by any function */
    long copies, fills, graph_launches;
    long timed_events;          /* created with timing */
    long switches;              /* of fibers */
    long mmas, ldmatrices;      /* instructions of a warp */
    long fp8_pairs;            /* conversions by cvt.rn.satfinite to two numbers of 8 bits, of a thread */
    long async_bytes;           /* read from global memory by cp.async */
    long prefetches;            /* into the L2 cache, of a thread */
    long wgmmas;                /* of a warpgroup */
    long bulk_bytes;            /* written to shared memory by bulk copies, zeros included */
    long barriers, busy_barriers;   /* threads that reached one, and those of them with unfinished cp.async copies */
    long blas_objects, blas_heuristics, blas_matmuls;   /* handles and descriptors made, algorithms asked for, products */
};
coc_counts coc_count();
long coc_calls(const char *function);           /* calls of one function by its name, "cudaMalloc" */
long coc_kernel_launches(const char *part);     /* launches of kernels whose name holds this, run by graphs or not */
std::string coc_synchronising_calls();          /* their names with counts, for messages */
void coc_reset_counts();

/* ---- Failures.  The n-th call (1: the next) of a function (NULL: of any that can fail) returns `error` and does
   nothing else.  With sticky, the device is lost, and every later call returns the error until cudaDeviceReset. */
void coc_fail(const char *function, int n, cudaError_t error, int sticky = 0);
int coc_fail_pending();                         /* 1: it has not happened yet */
void coc_fail_clear();

/* ---- Time.  1 (default): events have the time of a clock that only work moves: a kernel by 5 us, and a matrix product by
   the time of its algorithm.  0: the time of day. */
void coc_set_modelled_clock(int modelled);
/* The CPU time of each piece of work that is put into a stream (default 0).  Until then, a GPU without other work waits. */
void coc_set_launch_time(double microseconds);

/* ---- cuBLASLt (coc_cublas.cpp).  The n-th call (1: the next) of one of its functions (NULL: of any) returns this
   cublasStatus_t and does nothing else.  Functions that destroy never fail. */
void coc_fail_blas(const char *function, int n, int status);
int coc_fail_blas_pending();
/* The algorithms that the heuristic offers, in its order, and what they need:
     0 WIDE       16-byte aligned matrices
     1 SPLIT      the same, and workspace: K in two parts, partial sums in fp32
     2 ROUNDED    the same, partial sums in D's type
     3 NARROW     4-byte aligned matrices
     4 SCALAR     nothing */
enum coc_blas_algorithm { COC_BLAS_WIDE, COC_BLAS_SPLIT, COC_BLAS_ROUNDED, COC_BLAS_NARROW, COC_BLAS_SCALAR, COC_BLAS_ALGORITHMS };
/* The microseconds of a product by the modelled clock (default 10, 12, 13, 15, 30), and those that an epilogue adds. */
void coc_set_blas_time(coc_blas_algorithm algorithm, double microseconds);
void coc_set_blas_epilogue_time(double microseconds);
/* The microseconds that an algorithm takes longer on operands of many values, which draw more power (default 0). */
void coc_set_blas_power(coc_blas_algorithm algorithm, double microseconds);
/* Each product from now on takes longer by this share of its time than the one before, as the clock of a GPU falls that
   gets warm (default 0). */
void coc_set_blas_drift(double share);
/* This algorithm leaves out the last K mod 32 terms, as split-K of real libraries did (COC_BLAS_ALGORITHMS: none does). */
void coc_set_blas_wrong(coc_blas_algorithm algorithm);
/* No algorithm has this epilogue (-1, the default: every epilogue has some). */
void coc_set_blas_lacks(int epilogue);
/* Operands of TF32: 1: their low bits are cut, 0 (default): they are rounded, ties away from zero. */
void coc_set_blas_cuts_tf32(int cuts);
/* The heuristic finds no algorithm for a product with a side below this (default 1), which is legal. */
void coc_set_blas_least(int side);
/* cublasLtGetVersion (default 130100): algorithms of another version return an error. */
void coc_set_blas_version(size_t version);
/* The mask of reduction schemes that the heuristic was last asked with. */
unsigned coc_blas_schemes();

/* ---- NVTX: the ranges since coc_reset, "step{forward{}}". */
std::string coc_ranges();

/* ---- The objects that exist, for leak checks. */
struct coc_alive { long allocations, pinned, streams, events, graphs, graph_execs, blas_objects; size_t bytes; };
coc_alive coc_living();
/* Resets all devices, faults and counts.  No object of the runtime may be in use. */
void coc_reset();

/* Device memory of any size that takes host memory only where it is touched.  It is zero, and is not poisoned.  It is for
   addresses beyond 2^31 elements.  NULL if the address space is limited. */
void *coc_sparse_alloc(size_t bytes);

/* ---- Every order.  run() does the work and leaves its results in host memory that `results` appends to a string of
   bytes.  These must be the same for all orders and schedules.  Returns "" or what differed.  Of the five, the
   first four are run, with which each copy and kernel runs early and late.  With AddressSanitizer a call runs one of
   the four, the next call another.  AMPT_ORDERS=5 in the environment runs all (`make test-orders`). */
extern int coc_orders;
std::string coc_every_order(const std::function<void(std::string *results)> &run);

#endif
