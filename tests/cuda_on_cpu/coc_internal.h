/* coc_internal.h - between the engine (threads of a block) and the runtime (memory, streams). */
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
extern long coc_switches;
extern coc_order coc_current_order;
extern uint64_t coc_order_seed;
void coc_install_handler();

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
