/* coc.h - the functions of tests/cuda/include/coc.h on a real GPU, for tests of the CUDA backend that are built for a
 * device.
 *
 * A GPU has only one order, so coc_every_order runs twice and requires the same bits.  compute-sanitizer detects
 * faults, red zones and leaks.  Some functions need the model: failing calls, counting calls, other numbers of
 * multiprocessors.  A test that calls one of these ends there and counts as skipped, with the reason. */
#ifndef COC_ON_GPU_H
#define COC_ON_GPU_H

#include <cuda_runtime.h>
#include <functional>
#include <stdint.h>
#include <stdio.h>
#include <string>
#include "../../test.h"

enum { CUDA_IS_MODEL = 0, COC_LETTER_A = 256 };
enum coc_order { COC_FORWARD = 0, COC_REVERSE = 1, COC_RANDOM = 2, COC_AHEAD = 3, COC_ORDERS = 4 };
enum coc_schedule { COC_LATE = 0, COC_EAGER = 1, COC_OTHERS_FIRST = 2, COC_SCHEDULES = 3 };
struct coc_counts {
    long calls, launches, synchronising, allocations, frees, copies, fills, graph_launches, timed_events, switches;
    long mmas, ldmatrices, fp8_pairs, async_bytes, prefetches, wgmmas, bulk_bytes, barriers, busy_barriers;
    long blas_objects, blas_heuristics, blas_matmuls;
};
struct coc_alive { long allocations, pinned, streams, events, graphs, graph_execs, blas_objects; size_t bytes; };

/* ---- Tests that need the model are left where they ask for it. */

struct coc_model_only { const char *what; };
[[noreturn]] static inline void coc_needs_model(const char *what) { throw coc_model_only{what}; }

static inline void coc_guarded(void (*test)()) {
    int devices;
    cudaError_t found = cudaGetDeviceCount(&devices);
    if (found == cudaErrorNoDevice || found == cudaErrorInsufficientDriver) {
        ampt.reason = "no GPU here";
        return;
    }
    try { test(); } catch (const coc_model_only &needed) { ampt.reason = needed.what; }
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
}
static const bool coc_guards = (ampt.around = coc_guarded) != NULL;

/* ---- What a GPU decides itself */

static inline void coc_set_order(coc_order, uint64_t = 1) {}
static inline void coc_set_schedule(coc_schedule) {}
static inline void coc_set_patience(int) {}
static inline void coc_set_yielding(int) {}
static inline void coc_set_hidden(int) {}
static inline void coc_set_pointer_check(int) {}
static inline int coc_faults() { return 0; }
static inline int coc_locks_held() { return 0; }
static inline std::string coc_fault_text() { return ""; }
static inline std::string coc_take_faults() { return ""; }
static inline void coc_check_red_zones() {}
static inline void coc_reset_counts() {}
static inline coc_alive coc_living() { return coc_alive(); }
static inline void coc_fail_clear() {}
static inline void coc_reset() {}

enum { coc_orders = 2 };
static inline std::string coc_every_order(const std::function<void(std::string *)> &run) {
    std::string once, twice;
    run(&once);
    run(&twice);
    return once == twice ? "" : "two runs on the GPU differ";
}
#if defined(COC_CUDA_RUNTIME_H)         /* a rehearsal: the model GPU's memory is small and a launch slow */
void *coc_sparse_alloc(size_t bytes);
static inline void coc_set_last_blocks(unsigned blocks) { if (blocks) coc_needs_model("a part of a launch"); }
#else
static inline void coc_set_last_blocks(unsigned) {}     /* all of them run */
static inline void *coc_sparse_alloc(size_t bytes) {
    void *p = NULL;
    if (cudaMalloc(&p, bytes) != cudaSuccess) {
        (void)cudaGetLastError();
        coc_needs_model("the GPU has not enough memory");
    }
    return cudaMemset(p, 0, bytes) == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess ? p : NULL;
}
#endif

/* ---- What only the model can do */

static inline void coc_set_devices(int, size_t = 0, int = 0, int = 0, int = 0) { coc_needs_model("other GPUs than the one here"); }
static inline void coc_set_driver(int) { coc_needs_model("another driver"); }
static inline void coc_set_shared_base(unsigned) { coc_needs_model("other addresses"); }
static inline void coc_set_pools(int) { coc_needs_model("a GPU without stream-ordered memory"); }
static inline coc_counts coc_count() { coc_needs_model("counts of calls"); }
static inline long coc_calls(const char *) { coc_needs_model("counts of calls"); }
static inline long coc_kernel_launches(const char *) { coc_needs_model("counts of launches"); }
static inline std::string coc_synchronising_calls() { coc_needs_model("counts of calls"); }
static inline void coc_fail(const char *, int, cudaError_t, int = 0) { coc_needs_model("calls that fail"); }
static inline int coc_fail_pending() { coc_needs_model("calls that fail"); }
static inline void coc_set_modelled_clock(int) { coc_needs_model("a modelled clock"); }
static inline void coc_fail_blas(const char *, int, int) { coc_needs_model("calls that fail"); }
static inline int coc_fail_blas_pending() { coc_needs_model("calls that fail"); }
enum coc_blas_algorithm { COC_BLAS_WIDE, COC_BLAS_SPLIT, COC_BLAS_ROUNDED, COC_BLAS_NARROW, COC_BLAS_SCALAR, COC_BLAS_ALGORITHMS };
static inline void coc_set_blas_time(coc_blas_algorithm, double) { coc_needs_model("times of algorithms"); }
static inline void coc_set_blas_epilogue_time(double) { coc_needs_model("times of algorithms"); }
static inline void coc_set_blas_power(coc_blas_algorithm, double) { coc_needs_model("times of algorithms"); }
static inline void coc_set_blas_drift(double) { coc_needs_model("times of algorithms"); }
static inline void coc_set_blas_wrong(coc_blas_algorithm) { coc_needs_model("a wrong algorithm"); }
static inline void coc_set_blas_lacks(int) { coc_needs_model("a refused epilogue"); }
static inline void coc_set_blas_cuts_tf32(int) {}       /* a GPU does what it does */
static inline void coc_set_launch_time(double) { coc_needs_model("a modelled clock"); }
static inline void coc_set_blas_least(int) { coc_needs_model("another heuristic"); }
static inline void coc_set_blas_version(size_t) { coc_needs_model("another version of cuBLASLt"); }
static inline unsigned coc_blas_schemes() { coc_needs_model("what the heuristic is asked"); }

#endif
