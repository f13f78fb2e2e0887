/* clang_cuda.h - declares for clang the device functions of nvcc's headers that its own headers lack.
 *
 * toolkits.sh includes it before amp_cuda.cu.  A kernel's parameter is copied there, because clang before 20 ignores
 * __grid_constant__, so that its code is for compiling and not for running. */
#ifndef CLANG_CUDA_H
#define CLANG_CUDA_H

static __device__ __forceinline__ uint4 __ldcs(const uint4 *p) {
    uint4 x;
    asm("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p));
    return x;
}
static __device__ __forceinline__ void __stcs(uint4 *p, uint4 x) {
    asm("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

/* From clang 17 on, they are in its headers. */
#if __clang_major__ < 17
static __device__ __forceinline__ int __reduce_min_sync(unsigned lanes, int x) {
    int least;
    asm volatile("redux.sync.min.s32 %0, %1, %2;" : "=r"(least) : "r"(x), "r"(lanes));
    return least;
}
static __device__ __forceinline__ int __reduce_max_sync(unsigned lanes, int x) {
    int most;
    asm volatile("redux.sync.max.s32 %0, %1, %2;" : "=r"(most) : "r"(x), "r"(lanes));
    return most;
}
#endif
#endif
