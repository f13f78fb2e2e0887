/* cuda_runtime.h - makes one .cu file compile with g++ and run on the CPU, without a CUDA toolkit and without a GPU.
 *
 *     nvcc -std=c++17 -arch=sm_90 -c amp_cuda.cu                            for the GPU
 *     g++ -std=c++17 -x c++ -I tests/cuda/include -c amp_cuda.cu     for the CPU, with declarations of our own
 *     g++ ... -DCOC_TOOLKIT -I $CUDA_HOME/include ...                       for the CPU, with the toolkit's
 *
 * The source must follow these rules:
 *   - It includes <cuda_runtime.h>, <cublasLt.h>, <nvtx3/nvToolsExt.h> and "amp.h", and no other CUDA header.
 *   - Kernels are launched by a template over the typed cudaLaunchKernel (no <<<>>>), which converts every argument
 *     to the kernel's own parameter type:
 *         template <class T> struct ampc_same { typedef T type; };
 *         template <class... P>
 *         cudaError_t ampc_launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream,
 *                                 typename ampc_same<P>::type... args) {
 *             void *pointers[] = {(void *)&args...};
 *             return cudaLaunchKernel(kernel, grid, block, pointers, shared, stream);
 *         }
 *   - Shared memory is declared by two macros:
 *         #if defined(__CUDACC__)
 *         #  define AMPC_SHARED(type, name, count) __shared__ __align__(16) type name[count]
 *         #  define AMPC_DYNAMIC(name) extern __shared__ __align__(128) unsigned char name[]
 *         #else
 *         #  define AMPC_SHARED(type, name, count) COC_SHARED(type, name, count)
 *         #  define AMPC_DYNAMIC(name) unsigned char *const name = coc_dynamic_shared()
 *         #endif
 *   - PTX is under `#if defined(__CUDA_ARCH__)` in a small named function, with its model in the #else.
 *     A model gets the values of other threads of the warp from coc_exchange (coc_device.h).
 *   - No thread waits for another by spinning, because blocks run one after the other, and threads switch only at
 *     barriers, shuffles and votes.
 *
 * coc_api.h declares the runtime, coc_device.h what device code uses, and coc.h the functions of the tests. */
#ifndef COC_CUDA_RUNTIME_H
#define COC_CUDA_RUNTIME_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#if defined(COC_TOOLKIT)
#  include <cuda_runtime_api.h>
#  include <vector_functions.h>
#  include "coc_errors.h"
#else
#  include "coc_api.h"
#endif
#include "coc_device.h"

#endif
