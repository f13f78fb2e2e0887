/* amp_cuda.cu - the CUDA backend of amp.h: memory, streams, graphs and kernels of one NVIDIA GPU.

   Build and link it beside the program; nothing of it is included:

       nvcc -O2 -std=c++17 -arch=sm_90 -c amp_cuda.cu          (-arch=native for the GPU at hand; sm_70 and later)
       cc -c train.c && nvcc train.o amp_cuda.o -o train

   and name it when the context is opened:

       amp_desc d = {0};
       d.backend = amp_cuda();
       d.device = 0;                    index of the GPU; several contexts may be open, on one GPU or on several
       d.stream = my_stream;            a cudaStream_t, or NULL: the context makes its own
       d.memory = my_memory;            alloc and free of the host's own, or zeros: cudaMalloc and cudaFree
       amp_open(&amp, &d);

   What holds for every entry of the table:
   - It works on the context's GPU and leaves the calling thread's current device as it was.
   - Kernels, copies and fills go to the stream and return at once.  Only stream_sync and event_sync wait; copies from
     and to pageable memory may.  A step allocates nothing once its sizes have been seen.
   - Memory comes from an arena that keeps what is freed.  A freed block is used again on the same stream at once, in
     stream order.  Scratch memory taken while a stream is captured, by amp_graph_begin or by the host itself, belongs
     to that graph until it is destroyed.
   - A failure names the CUDA error and the call.  After an error that CUDA does not recover from (an illegal address,
     for example) every call fails, with a text that says so; close the context and start the process again.
   - Kernels compute in fp32 (sums in fp32 or wider), round once to storage, use 64-bit indices and give the same bits
     every time on one kind of GPU: no floating-point atomics.  The norms' gradients of weight and bias are summed by
     block and may differ in the last bits between GPUs with another number of multiprocessors; nothing else does.
   - Do not build with --use_fast_math: it flushes subnormal numbers and would change the optimizers' bits.

   The file is CUDA C++17 that g++ also compiles: kernels are launched through ampc_launch, and PTX stands in small
   functions with a twin in plain C++.  Sections, in order: device, errors, launches, numbers, lanes, sums; runtime;
   casts, multi-tensor kernels and column sums; row operators; pointwise operators; losses; products; table. */

#include <cuda_runtime.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include "amp.h"

/* Loops of constant length that are unrolled, and those that must not be.
   Shared memory of fixed size (an array of `count`), and the launch's dynamic shared memory as aligned bytes.  Where
   g++ compiles this file the two come from what runs kernels on the CPU. */
#if defined(__CUDACC__)
#  define AMPC_UNROLL _Pragma("unroll")
#  define AMPC_NO_UNROLL _Pragma("unroll 1")
#  define AMPC_SHARED(type, name, count) __shared__ __align__(16) type name[count]
#  define AMPC_DYNAMIC(name) extern __shared__ __align__(128) unsigned char name[]
#else
#  define AMPC_UNROLL
#  define AMPC_NO_UNROLL
#  define AMPC_SHARED(type, name, count) COC_SHARED(type, name, count)
#  define AMPC_DYNAMIC(name) unsigned char *const name = coc_dynamic_shared()
#endif

namespace {

/* ==== Device ======================================================================================== */

struct ampc_block;
struct ampc_graph;
struct ampc_capture;

enum { AMPC_BUCKETS = 1024, AMPC_CLASSES = 512 };

/* One open context's GPU. */
struct ampc_device {
    amp_host host;
    amp_device info;
    int index;
    int multiprocessors;
    int cc;                         /* compute capability, 10 major + minor */
    size_t shared_limit;            /* bytes of shared memory that a block may ask for */
    cudaStream_t stream;            /* the context's own */
    int owns_stream;
    void *blas;                     /* the host's cuBLAS handle, or NULL */
    amp_device_memory memory;       /* the host's own allocator, or zeros */
    cudaError_t sticky;             /* not 0: CUDA gave up on this process's use of the GPU */
    pthread_mutex_t lock;           /* for everything below */
    ampc_block *busy[AMPC_BUCKETS]; /* blocks handed out, by address */
    ampc_block *idle[AMPC_CLASSES]; /* blocks to be used again, by size class */
    ampc_graph *graphs;             /* being captured, or made and not destroyed */
    ampc_capture *captures;         /* the host's own that use scratch memory */
    int64_t allocated, reserved, peak, pinned;      /* bytes: handed out (rounded up), taken from CUDA, most handed out */
};

/* ==== Errors ======================================================================================== */

/* Errors after which the process can no longer use the GPU. */
bool ampc_is_sticky(cudaError_t error) {
    switch (error) {
        case cudaErrorIllegalAddress: case cudaErrorLaunchTimeout: case cudaErrorHardwareStackError:
        case cudaErrorIllegalInstruction: case cudaErrorMisalignedAddress: case cudaErrorInvalidAddressSpace:
        case cudaErrorInvalidPc: case cudaErrorLaunchFailure: case cudaErrorAssert: case cudaErrorECCUncorrectable:
            return true;
        default: return false;
    }
}

amp_result ampc_result_of(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? AMP_ERR_MEMORY : AMP_ERR_DEVICE;
}

/* What to do about an error that the call itself has no advice for. */
const char *ampc_advice(cudaError_t error) {
    switch (error) {
        case cudaErrorMemoryAllocation: return "free memory on the GPU or use a smaller batch";
        case cudaErrorNoDevice: return "no GPU is visible: check nvidia-smi and CUDA_VISIBLE_DEVICES";
        case cudaErrorInsufficientDriver: return "install a driver that is at least as new as the CUDA toolkit";
        case cudaErrorNoKernelImageForDevice: return "compile amp_cuda.cu with -arch for this GPU";
        case cudaErrorStreamCaptureUnsupported: return "the call waits for the GPU, which a captured stream cannot do";
        default:
            return ampc_is_sticky(error) ? "find the kernel with compute-sanitizer or CUDA_LAUNCH_BLOCKING=1"
                                         : "see the CUDA Runtime API's description of this error";
    }
}

/* AMP_OK, or a failure whose text has the CUDA error's name, the call and a hint (NULL: the general one).  An error
   that lasts is reported with its name once; from then on every call fails through ampc_usable. */
amp_result ampc_check(ampc_device *dev, cudaError_t error, const char *call, const char *hint) {
    char text[512];
    if (error == cudaSuccess) return AMP_OK;
    (void)cudaGetLastError();       /* the host's own checks shall not find it again */
    if (hint == NULL) hint = ampc_advice(error);
    snprintf(text, sizeof text, "amp_cuda: %s on device %d: %s (%s); %s", call, dev->index, cudaGetErrorName(error),
             cudaGetErrorString(error), hint);
    if (ampc_is_sticky(error) && dev->sticky == cudaSuccess) {
        dev->sticky = error;
        dev->host.log(dev->host.user, AMP_LOG_ERROR, AMP_ERR_DEVICE, text);
    }
    return dev->host.fail(dev->host.user, ampc_result_of(error), text);
}

/* AMP_OK unless an earlier call met an error that lasts. */
amp_result ampc_usable(ampc_device *dev, const char *call) {
    char text[256];
    if (dev->sticky == cudaSuccess) return AMP_OK;
    snprintf(text, sizeof text, "amp_cuda: %s: device %d failed before with %s; close the context and start the process "
             "again", call, dev->index, cudaGetErrorName(dev->sticky));
    return dev->host.fail(dev->host.user, AMP_ERR_DEVICE, text);
}

amp_result ampc_refuse(ampc_device *dev, amp_result result, const char *kernel, const char *why) {
    char text[256];
    snprintf(text, sizeof text, "amp_cuda: %s: %s", kernel, why);
    return dev->host.fail(dev->host.user, result, text);
}

#define AMPC_TRY(call) do { amp_result ampc_tried = (call); if (ampc_tried != AMP_OK) return ampc_tried; } while (0)

/* Makes a context's GPU current for a scope, and then the one before it again.  ready: AMP_OK, or why the call cannot
   go on. */
struct ampc_current {
    ampc_device *dev;
    int before;
    cudaError_t error;
    explicit ampc_current(ampc_device *d) : dev(d), before(-1), error(cudaSuccess) {
        if (dev->sticky != cudaSuccess) return;
        error = cudaGetDevice(&before);
        if (error == cudaSuccess && before != dev->index) error = cudaSetDevice(dev->index);
    }
    ~ampc_current() {
        if (before >= 0 && before != dev->index) (void)cudaSetDevice(before);
    }
    amp_result ready(const char *call) {
        AMPC_TRY(ampc_usable(dev, call));
        return ampc_check(dev, error, before < 0 ? "cudaGetDevice" : "cudaSetDevice", NULL);
    }
    ampc_current(const ampc_current &) = delete;
    ampc_current &operator=(const ampc_current &) = delete;
};

/* The rest of the function runs on the context's GPU, or it returns why that cannot be. */
#define AMPC_ENTER(dev, call) ampc_current ampc_here(dev); AMPC_TRY(ampc_here.ready(call))

/* ==== Launches ====================================================================================== */

template <class T> struct ampc_identity { typedef T type; };

/* Lets a kernel have all the dynamic shared memory that its own leaves: without that the two together get 48 KiB.  The
   setting belongs to the function, whose other users may be about to launch it, so it is the same for all of them. */
amp_result ampc_allow_shared(ampc_device *dev, const void *kernel) {
    cudaFuncAttributes own;
    AMPC_TRY(ampc_check(dev, cudaFuncGetAttributes(&own, kernel), "cudaFuncGetAttributes", NULL));
    return ampc_check(dev, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                (int)(dev->shared_limit - own.sharedSizeBytes)), "cudaFuncSetAttribute", NULL);
}

/* Starts a kernel; name: the call that it serves.  Arguments are converted to the kernel's own parameter types, so that
   an int cannot be read as an int64_t.  stream NULL: the context's own.  An empty grid starts nothing. */
template <class... P>
amp_result ampc_launch(ampc_device *dev, const char *name, void (*kernel)(P...), unsigned grid, unsigned block,
                       size_t shared, void *stream, typename ampc_identity<P>::type... args) {
    void *pointers[] = {(void *)&args...};
    cudaError_t error = cudaSuccess;
    char call[96];
    AMPC_ENTER(dev, name);
    if (grid == 0) return AMP_OK;
    if (shared > 32 * 1024) AMPC_TRY(ampc_allow_shared(dev, (const void *)kernel));
    error = cudaLaunchKernel(kernel, dim3(grid), dim3(block), pointers, shared, stream ? (cudaStream_t)stream : dev->stream);
    if (error == cudaSuccess) return AMP_OK;
    snprintf(call, sizeof call, "cudaLaunchKernel for %s", name);
    return ampc_check(dev, error, call, NULL);
}

/* Blocks of a persistent grid: enough for the work, at most per_sm on each multiprocessor. */
unsigned ampc_grid(const ampc_device *dev, int64_t blocks, int per_sm) {
    int64_t most = (int64_t)dev->multiprocessors * per_sm;
    return (unsigned)(blocks < 0 ? 0 : blocks < most ? blocks : most);
}

/* Blocks of `size` that n needs. */
__host__ __device__ inline int64_t ampc_blocks(int64_t n, int64_t size) { return (n + size - 1) / size; }

/* Device memory for the kernels of one call, in the order of its stream; given back when the scope ends.
   get: AMP_OK and .data (256-byte aligned), or AMP_ERR_MEMORY. */
struct ampc_scratch {
    ampc_device *dev;
    cudaStream_t stream;
    void *data;
    ampc_scratch(ampc_device *d, void *s) : dev(d), stream(s ? (cudaStream_t)s : d->stream), data(NULL) {}
    ~ampc_scratch();
    amp_result get(size_t bytes, const char *kernel);
    ampc_scratch(const ampc_scratch &) = delete;
    ampc_scratch &operator=(const ampc_scratch &) = delete;
};

/* ==== Numbers =======================================================================================
   Storage types, and their conversions to and from fp32 with the bits of amp.h's scalar functions.       */

struct ampc_f16 { uint16_t bits; };
struct ampc_bf16 { uint16_t bits; };

__host__ __device__ inline int64_t ampc_dtype_size(amp_dtype dtype) {
    switch (dtype) {
        case AMP_F64: case AMP_I64: return 8;
        case AMP_F32: case AMP_TF32: case AMP_I32: return 4;
        case AMP_F16: case AMP_BF16: case AMP_U16: return 2;
        default: return 1;
    }
}

/* The address of element i of an array whose dtype is known at run time only. */
__host__ __device__ inline void *ampc_at(void *data, amp_dtype dtype, int64_t i) {
    return (char *)data + i * ampc_dtype_size(dtype);
}
__host__ __device__ inline const void *ampc_at(const void *data, amp_dtype dtype, int64_t i) {
    return (const char *)data + i * ampc_dtype_size(dtype);
}

/* Hardware conversions make every NaN the same; amp.h keeps its sign and upper payload bits. */
__device__ __forceinline__ uint16_t ampc_f16_bits(float x) {
#if defined(__CUDA_ARCH__)
    uint32_t bits = __float_as_uint(x);
    uint16_t half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
    if ((bits & 0x7fffffffu) <= 0x7f800000u) return half;
    return (uint16_t)((bits >> 16 & 0x8000u) | 0x7e00u | (bits >> 13 & 0x3ffu));
#else
    return amp_f16_from_f32(x, 0);
#endif
}
__device__ __forceinline__ float ampc_f16_value(uint16_t half) {
#if defined(__CUDA_ARCH__)
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
    if ((half & 0x7fffu) <= 0x7c00u) return x;
    return __uint_as_float((half & 0x8000u) << 16 | 0x7fc00000u | (half & 0x3ffu) << 13);
#else
    return amp_f32_from_f16(half);
#endif
}
__device__ __forceinline__ uint16_t ampc_bf16_bits(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint32_t bits = __float_as_uint(x);
    uint16_t half;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(x));
    return (bits & 0x7fffffffu) <= 0x7f800000u ? half : (uint16_t)(bits >> 16 | 0x40u);
#else
    return amp_bf16_from_f32(x, 0);
#endif
}

__device__ __forceinline__ float ampc_float(float x) { return x; }
__device__ __forceinline__ float ampc_float(ampc_f16 x) { return ampc_f16_value(x.bits); }
__device__ __forceinline__ float ampc_float(ampc_bf16 x) { return amp_f32_from_bf16(x.bits); }
__device__ __forceinline__ void ampc_put(float *to, float x) { *to = x; }
__device__ __forceinline__ void ampc_put(ampc_f16 *to, float x) { to->bits = ampc_f16_bits(x); }
__device__ __forceinline__ void ampc_put(ampc_bf16 *to, float x) { to->bits = ampc_bf16_bits(x); }

/* Products, sums, quotients and roots that no compiler contracts or replaces: one rounding each. */
__device__ __forceinline__ float ampc_mul(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
}
__device__ __forceinline__ double ampc_mul(double a, double b) {
#if defined(__CUDA_ARCH__)
    return __dmul_rn(a, b);
#else
    return a * b;
#endif
}
__device__ __forceinline__ float ampc_add(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fadd_rn(a, b);
#else
    return a + b;
#endif
}
__device__ __forceinline__ float ampc_div(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fdiv_rn(a, b);
#else
    return a / b;
#endif
}
__device__ __forceinline__ float ampc_sqrt(float x) {
#if defined(__CUDA_ARCH__)
    return __fsqrt_rn(x);
#else
    return __builtin_sqrtf(x);
#endif
}
__device__ __forceinline__ float ampc_fma(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
    return __fmaf_rn(a, b, c);
#else
    return __builtin_fmaf(a, b, c);
#endif
}

__device__ __forceinline__ bool ampc_finite(float x) { return (ampi_bits_f32(x) & 0x7f800000u) != 0x7f800000u; }

/* Calls run(ampc_type<T>()) with the storage type of a dtype. */
template <class T> struct ampc_type { typedef T type; };
template <class F> amp_result ampc_storage(ampc_device *dev, const char *kernel, amp_dtype dtype, F run) {
    switch (dtype) {
        case AMP_F32: return run(ampc_type<float>());
        case AMP_F16: return run(ampc_type<ampc_f16>());
        case AMP_BF16: return run(ampc_type<ampc_bf16>());
        default: return ampc_refuse(dev, AMP_ERR_DTYPE, kernel, "storage must be fp32, fp16 or bf16");
    }
}

/* ==== Lanes =========================================================================================
   A thread's piece of an array: N elements (a multiple of 16 bytes) read and written 16 bytes at a time, held as
   fp32.  The address must be 16-byte aligned; ampc_load_upto and ampc_store_upto take any.               */

enum { AMPC_LANES = 8 };
enum ampc_reuse { AMPC_KEEP, AMPC_ONCE };       /* ONCE: not used again soon, so the cache may drop it first */

template <ampc_reuse R> __device__ __forceinline__ uint4 ampc_get16(const void *p) {
#if defined(__CUDA_ARCH__)
    return R == AMPC_ONCE ? __ldcs((const uint4 *)p) : *(const uint4 *)p;
#else
    return *(const uint4 *)p;
#endif
}
template <ampc_reuse R> __device__ __forceinline__ void ampc_put16(void *p, uint4 x) {
#if defined(__CUDA_ARCH__)
    if (R == AMPC_ONCE) __stcs((uint4 *)p, x);
    else *(uint4 *)p = x;
#else
    *(uint4 *)p = x;
#endif
}

/* Pieces of 16, 8, 4 or 2 bytes. */
template <ampc_reuse R, int BYTES> __device__ __forceinline__ uint4 ampc_get_piece(const void *p) {
    uint4 raw = {0, 0, 0, 0};
    if constexpr (BYTES == 16) raw = ampc_get16<R>(p);
    else if constexpr (BYTES == 8) {
        uint2 half = *(const uint2 *)p;
        raw.x = half.x;
        raw.y = half.y;
    } else if constexpr (BYTES == 4) raw.x = *(const uint32_t *)p;
    else raw.x = *(const uint16_t *)p;
    return raw;
}
template <ampc_reuse R, int BYTES> __device__ __forceinline__ void ampc_put_piece(void *p, const uint4 &raw) {
    if constexpr (BYTES == 16) ampc_put16<R>(p, raw);
    else if constexpr (BYTES == 8) *(uint2 *)p = uint2{raw.x, raw.y};
    else if constexpr (BYTES == 4) *(uint32_t *)p = raw.x;
    else *(uint16_t *)p = (uint16_t)raw.x;
}

__device__ __forceinline__ uint32_t ampc_word(const uint4 &x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }
__device__ __forceinline__ void ampc_set_word(uint4 &x, int i, uint32_t word) {
    if (i == 0) x.x = word;
    else if (i == 1) x.y = word;
    else if (i == 2) x.z = word;
    else x.w = word;
}

/* Two numbers rounded to 16 bits, the first in the low half.  NaN stays NaN, with any payload. */
__device__ __forceinline__ uint32_t ampc_pair(float low, float high, amp_dtype dtype) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint32_t pair;
    if (dtype == AMP_F16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    if (dtype == AMP_F16) return ampc_f16_bits(low) | (uint32_t)ampc_f16_bits(high) << 16;
    return ampc_bf16_bits(low) | (uint32_t)ampc_bf16_bits(high) << 16;
#endif
}
__device__ __forceinline__ float ampc_half_value(uint16_t half) {
#if defined(__CUDA_ARCH__)
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
    return x;
#else
    return amp_f32_from_f16(half);
#endif
}

template <int V> __device__ __forceinline__ void ampc_widen(const uint4 &raw, amp_dtype dtype, float *x) {
    if (V < 8 && dtype == AMP_F32) {
        AMPC_UNROLL
        for (int i = 0; i < V; i++) x[i] = ampi_f32_of_bits(ampc_word(raw, i & 3));
    } else if (dtype == AMP_F16) {
        AMPC_UNROLL
        for (int i = 0; i < V; i++) x[i] = ampc_half_value((uint16_t)(ampc_word(raw, i / 2) >> 16 * (i & 1)));
    } else {
        AMPC_UNROLL
        for (int i = 0; i < V; i++)
            x[i] = ampi_f32_of_bits(i & 1 ? ampc_word(raw, i / 2) & 0xffff0000u : ampc_word(raw, i / 2) << 16);
    }
}
template <int V> __device__ __forceinline__ uint4 ampc_narrow(const float *x, amp_dtype dtype) {
    uint4 raw = {0, 0, 0, 0};
    if (V < 8 && dtype == AMP_F32) {
        AMPC_UNROLL
        for (int i = 0; i < V; i++) ampc_set_word(raw, i & 3, ampi_bits_f32(x[i]));
    } else {
        AMPC_UNROLL
        for (int i = 0; i < V; i += 2) ampc_set_word(raw, i / 2, ampc_pair(x[i], V > 1 ? x[i + 1] : 0.0f, dtype));
    }
    return raw;
}

__host__ __device__ constexpr amp_dtype ampc_dtype_of(const float *) { return AMP_F32; }
__host__ __device__ constexpr amp_dtype ampc_dtype_of(const ampc_f16 *) { return AMP_F16; }
__host__ __device__ constexpr amp_dtype ampc_dtype_of(const ampc_bf16 *) { return AMP_BF16; }

/* A piece of N elements, or pieces of 16 bytes. */
template <ampc_reuse R = AMPC_KEEP, class T, int N> __device__ __forceinline__ void ampc_load(const T *p, float (&x)[N]) {
    const int width = N * (int)sizeof(T) < 16 ? N : 16 / (int)sizeof(T);
    uint4 raw[N / width];
    AMPC_UNROLL
    for (int i = 0; i < N / width; i++) raw[i] = ampc_get_piece<R, width * (int)sizeof(T)>(p + i * width);
    AMPC_UNROLL
    for (int i = 0; i < N / width; i++) ampc_widen<width>(raw[i], ampc_dtype_of(p), x + i * width);
}
template <ampc_reuse R = AMPC_KEEP, class T, int N> __device__ __forceinline__ void ampc_store(T *p, const float (&x)[N]) {
    const int width = N * (int)sizeof(T) < 16 ? N : 16 / (int)sizeof(T);
    AMPC_UNROLL
    for (int i = 0; i < N / width; i++)
        ampc_put_piece<R, width * (int)sizeof(T)>(p + i * width, ampc_narrow<width>(x + i * width, ampc_dtype_of(p)));
}

/* The first n of N elements, one by one; those beyond are `fill` (loads) or left alone (stores). */
template <class T, int N> __device__ __forceinline__ void ampc_load_upto(const T *p, float (&x)[N], int64_t n, float fill) {
    AMPC_UNROLL
    for (int i = 0; i < N; i++) x[i] = i < n ? ampc_float(p[i]) : fill;
}
template <class T, int N> __device__ __forceinline__ void ampc_store_upto(T *p, const float (&x)[N], int64_t n) {
    AMPC_UNROLL
    for (int i = 0; i < N; i++)
        if (i < n) ampc_put(p + i, x[i]);
}

/* 1 where a pointer (and, for rows, their distance in bytes) allows 16-byte accesses. */
__host__ __device__ inline bool ampc_aligned(const void *p, int64_t row_bytes = 0) {
    return (((uintptr_t)p | (uintptr_t)row_bytes) & 15) == 0;
}

/* ==== Sums ==========================================================================================
   Over a warp and over a block, in one fixed order, with the result in every thread.  Blocks have whole
   warps.  room: 32 values of shared memory; it may be used again at once.                               */

template <class T> __device__ __forceinline__ T ampc_warp_sum(T x) {
    AMPC_UNROLL
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}
/* NaN wins, as in a comparison that keeps what is not smaller. */
template <class T> __device__ __forceinline__ T ampc_larger(T a, T b) { return a >= b || a != a ? a : b; }
template <class T> __device__ __forceinline__ T ampc_warp_max(T x) {
    AMPC_UNROLL
    for (int step = 16; step > 0; step >>= 1) x = ampc_larger(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}
template <class T> __device__ __forceinline__ T ampc_block_sum(T x, T *room) {
    unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    x = ampc_warp_sum(x);
    if (lane == 0) room[warp] = x;
    __syncthreads();
    x = ampc_warp_sum(lane < warps ? room[lane] : (T)0);
    __syncthreads();
    return x;
}
template <class T> __device__ __forceinline__ T ampc_block_max(T x, T *room) {
    unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    x = ampc_warp_max(x);
    if (lane == 0) room[warp] = x;
    __syncthreads();
    x = ampc_warp_max(room[lane < warps ? lane : 0]);
    __syncthreads();
    return x;
}

/* ==== Runtime: the arena ============================================================================
   Memory that is given back stays here, sorted into size classes (eight to an octave, so at most an eighth is lost to
   rounding), and is used again by a request of the same class.  Every idle block remembers who used it last: a
   stream, whose later work comes after everything that touches the block, so only that stream may have it at once;
   or a graph, which will touch it again at every launch.  When CUDA has no more memory, what no graph holds is given
   back to CUDA and the request is tried once more.                                                       */

struct ampc_block {
    void *data;
    size_t bytes;                   /* its class */
    const void *owner;              /* a stream, a graph, a capture of the host's; NULL: nothing touches it */
    ampc_block *next;
};

/* A graph, from the begin of its capture on. */
struct ampc_graph {
    cudaStream_t stream;            /* captured, later the one it was launched on last */
    int capturing;
    cudaGraphExec_t exec;
    ampc_graph *next;
};

/* A capture of the host's own.  The arena holds it, and a user object of CUDA's as long as the graph or what was
   instantiated from it lives, which may be longer than the context does. */
struct ampc_capture {
    unsigned long long id;
    int holders;
    ampc_capture *next;
};

/* No function of the host's is called while it is locked: they may call back. */
struct ampc_locked {
    pthread_mutex_t *lock;
    explicit ampc_locked(ampc_device *dev) : lock(&dev->lock) { pthread_mutex_lock(lock); }
    ~ampc_locked() { pthread_mutex_unlock(lock); }
    ampc_locked(const ampc_locked &) = delete;
    ampc_locked &operator=(const ampc_locked &) = delete;
};

/* Lets a thread allocate while it captures a stream: the allocation is no part of the graph. */
struct ampc_relaxed {
    cudaStreamCaptureMode mode;
    ampc_relaxed() : mode(cudaStreamCaptureModeRelaxed) { (void)cudaThreadExchangeStreamCaptureMode(&mode); }
    ~ampc_relaxed() { (void)cudaThreadExchangeStreamCaptureMode(&mode); }
    ampc_relaxed(const ampc_relaxed &) = delete;
    ampc_relaxed &operator=(const ampc_relaxed &) = delete;
};

int ampc_log2(size_t x) {
    int n = 0;
    while (x >>= 1) n++;
    return n;
}

/* Rounded up to the size of its class: steps of an eighth of the octave, 512 bytes at least. */
size_t ampc_class_bytes(size_t bytes) {
    size_t step;
    if (bytes < 512) bytes = 512;
    step = (size_t)1 << (ampc_log2(bytes) - 3);
    if (step < 512) step = 512;
    return (bytes + step - 1) / step * step;
}

int ampc_class(size_t class_bytes) {
    int octave = ampc_log2(class_bytes);
    return octave * 8 + (int)(class_bytes >> (octave - 3) & 7);
}

ampc_block **ampc_busy_bucket(ampc_device *dev, const void *data) {
    return &dev->busy[((uintptr_t)data >> 9) % AMPC_BUCKETS];
}

/* Idle blocks of one owner become another's. */
void ampc_hand_over(ampc_device *dev, const void *from, const void *to) {
    for (int i = 0; i < AMPC_CLASSES; i++)
        for (ampc_block *block = dev->idle[i]; block != NULL; block = block->next)
            if (block->owner == from) block->owner = to;
}

void ampc_capture_release(void *held) {
    ampc_capture *capture = (ampc_capture *)held;
    if (__atomic_sub_fetch(&capture->holders, 1, __ATOMIC_ACQ_REL) == 0) free(capture);
}

/* Nothing touches the memory of captures whose graphs are gone; all: forgets the others too. */
void ampc_captures_end(ampc_device *dev, bool all) {
    for (ampc_capture **link = &dev->captures, *capture; (capture = *link) != NULL;) {
        if (!all && __atomic_load_n(&capture->holders, __ATOMIC_ACQUIRE) > 1) { link = &capture->next; continue; }
        *link = capture->next;
        ampc_hand_over(dev, capture, NULL);
        ampc_capture_release(capture);
    }
}

/* The capture with this id, a new one where there is none; NULL: no host memory.  If CUDA makes no user object it is
   held until the context is closed. */
ampc_capture *ampc_capture_of(ampc_device *dev, unsigned long long id, cudaGraph_t graph) {
    cudaUserObject_t object;
    ampc_capture *capture = dev->captures;
    while (capture != NULL && capture->id != id) capture = capture->next;
    if (capture != NULL) return capture;
    capture = (ampc_capture *)malloc(sizeof *capture);
    if (capture == NULL) return NULL;
    capture->id = id;
    capture->holders = 2;
    capture->next = dev->captures;
    dev->captures = capture;
    if (cudaUserObjectCreate(&object, capture, ampc_capture_release, 1, cudaUserObjectNoDestructorSync) == cudaSuccess &&
        cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove) != cudaSuccess)
        (void)cudaUserObjectRelease(object, 1);
    (void)cudaGetLastError();
    return capture;
}

cudaError_t ampc_capture_info(cudaStream_t stream, cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph) {
#if CUDART_VERSION >= 13000
    return cudaStreamGetCaptureInfo(stream, status, id, graph);
#else
    return cudaStreamGetCaptureInfo_v2(stream, status, id, graph);
#endif
}

/* Who scratch memory used on a stream belongs to: the stream, or the graph that it is being captured into.  NULL: no
   host memory. */
const void *ampc_owner_of(ampc_device *dev, cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    cudaGraph_t captured = NULL;
    ampc_locked locked(dev);
    if (ampc_capture_info(stream, &status, &id, &captured) != cudaSuccess) {
        (void)cudaGetLastError();
        return stream;
    }
    if (status != cudaStreamCaptureStatusActive) return stream;
    for (ampc_graph *graph = dev->graphs; graph != NULL; graph = graph->next)
        if (graph->capturing && graph->stream == stream) return graph;
    return ampc_capture_of(dev, id, captured);
}

/* The stream whose work an owner's memory is used by; held: a graph may use it at any time. */
cudaStream_t ampc_stream_of(ampc_device *dev, const void *owner, bool *held) {
    *held = true;
    for (ampc_graph *graph = dev->graphs; graph != NULL; graph = graph->next)
        if (graph == owner) return graph->stream;
    for (ampc_capture *capture = dev->captures; capture != NULL; capture = capture->next)
        if (capture == owner) return dev->stream;
    *held = false;
    return owner == NULL ? dev->stream : (cudaStream_t)const_cast<void *>(owner);
}

/* Memory from CUDA or from the host's own allocator. */
cudaError_t ampc_memory_get(ampc_device *dev, cudaStream_t stream, void **data, size_t bytes) {
    if (dev->memory.alloc == NULL) return cudaMalloc(data, bytes);
    *data = dev->memory.alloc(dev->memory.user, bytes, dev->index, stream);
    return *data != NULL ? cudaSuccess : cudaErrorMemoryAllocation;
}

/* Takes idle blocks out of the arena, those that no graph holds or all of them, with the streams that they go to. */
ampc_block *ampc_unused(ampc_device *dev, bool all) {
    ampc_block *unused = NULL;
    ampc_locked locked(dev);
    for (int i = 0; i < AMPC_CLASSES; i++) {
        ampc_block **link = &dev->idle[i];
        while (*link != NULL) {
            ampc_block *block = *link;
            bool held;
            cudaStream_t stream = ampc_stream_of(dev, block->owner, &held);
            if (held && !all) { link = &block->next; continue; }
            *link = block->next;
            block->owner = stream;
            block->next = unused;
            unused = block;
            dev->reserved -= (int64_t)block->bytes;
        }
    }
    return unused;
}

/* Gives these blocks back to CUDA, or to the host's own allocator. */
void ampc_trim(ampc_device *dev, bool all) {
    ampc_relaxed relaxed;
    for (ampc_block *block = ampc_unused(dev, all), *next; block != NULL; block = next) {
        next = block->next;
        if (dev->memory.alloc == NULL) (void)cudaFree(block->data);
        else dev->memory.free(dev->memory.user, block->data, block->bytes, dev->index, const_cast<void *>(block->owner));
        dev->host.free(dev->host.user, block, sizeof *block);
    }
    (void)cudaGetLastError();
}

amp_result ampc_no_memory(ampc_device *dev, cudaError_t error, size_t bytes, const char *call) {
    char hint[192];
    long long allocated, reserved;
    {
        ampc_locked locked(dev);
        allocated = dev->allocated;
        reserved = dev->reserved;
    }
    snprintf(hint, sizeof hint, "%zu bytes for %s with %lld in use of %lld reserved: use a smaller batch", bytes, call,
             allocated, reserved);
    return ampc_check(dev, error, dev->memory.alloc == NULL ? "cudaMalloc" : "the host's own alloc",
                      error == cudaErrorMemoryAllocation ? hint : NULL);
}

/* A new block; stream: of its first use. */
amp_result ampc_block_new(ampc_device *dev, cudaStream_t stream, size_t bytes, const char *call, ampc_block **out) {
    ampc_relaxed relaxed;
    ampc_block *block = (ampc_block *)dev->host.alloc(dev->host.user, sizeof *block, sizeof(void *));
    if (block == NULL) return ampc_refuse(dev, AMP_ERR_MEMORY, call, "no host memory for the arena's own list");
    cudaError_t error = ampc_memory_get(dev, stream, &block->data, bytes);
    if (error == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError();
        ampc_trim(dev, false);
        error = ampc_memory_get(dev, stream, &block->data, bytes);
    }
    if (error != cudaSuccess) {
        dev->host.free(dev->host.user, block, sizeof *block);
        return ampc_no_memory(dev, error, bytes, call);
    }
    block->bytes = bytes;
    *out = block;
    return AMP_OK;
}

/* An idle block of this class that `owner` may use at once, or NULL; stream: the owner's. */
ampc_block *ampc_idle(ampc_device *dev, const void *owner, size_t size, cudaStream_t *stream) {
    bool held;
    ampc_locked locked(dev);
    ampc_captures_end(dev, false);
    ampc_block **link = &dev->idle[ampc_class(size)], *block;
    while (*link != NULL && (*link)->owner != owner && (*link)->owner != NULL) link = &(*link)->next;
    block = *link;
    if (block != NULL) *link = block->next;
    *stream = ampc_stream_of(dev, owner, &held);
    return block;
}

/* Memory for `owner`.  Called with the device current. */
amp_result ampc_take(ampc_device *dev, const void *owner, size_t bytes, const char *call, void **data) {
    size_t size = ampc_class_bytes(bytes);
    cudaStream_t stream;
    ampc_block **bucket, *block = ampc_idle(dev, owner, size, &stream);
    bool made = block == NULL;
    if (made) AMPC_TRY(ampc_block_new(dev, stream, size, call, &block));
    ampc_locked locked(dev);
    block->owner = owner;
    bucket = ampc_busy_bucket(dev, block->data);
    block->next = *bucket;
    *bucket = block;
    if (made) dev->reserved += (int64_t)size;
    dev->allocated += (int64_t)size;
    if (dev->allocated > dev->peak) dev->peak = dev->allocated;
    *data = block->data;
    return AMP_OK;
}

void ampc_give(ampc_device *dev, const void *data) {
    ampc_block **link = ampc_busy_bucket(dev, data), *block;
    while (*link != NULL && (*link)->data != data) link = &(*link)->next;
    block = *link;
    if (block == NULL) return;
    *link = block->next;
    block->next = dev->idle[ampc_class(block->bytes)];
    dev->idle[ampc_class(block->bytes)] = block;
    dev->allocated -= (int64_t)block->bytes;
}

amp_result ampc_scratch::get(size_t bytes, const char *kernel) {
    AMPC_ENTER(dev, kernel);
    const void *owner = ampc_owner_of(dev, stream);
    if (owner == NULL) return ampc_refuse(dev, AMP_ERR_MEMORY, kernel, "no host memory for the capture");
    return ampc_take(dev, owner, bytes, kernel, &data);
}

ampc_scratch::~ampc_scratch() {
    if (data == NULL) return;
    ampc_locked locked(dev);
    ampc_give(dev, data);
}

/* ==== Runtime: entries of the table ================================================================= */

amp_result ampc_check_image(ampc_device *dev);      /* whether this build's machine code runs on the GPU */
void ampc_graph_destroy(void *device, void *graph);

amp_result ampc_open_device(ampc_device *dev, const amp_backend_desc *desc) {
    cudaDeviceProp prop;
    char text[160];
    int count = 0;
    AMPC_TRY(ampc_check(dev, cudaGetDeviceCount(&count), "cudaGetDeviceCount", NULL));
    if (desc->device < 0 || desc->device >= count) {
        snprintf(text, sizeof text, ".device = %d, must be 0 to %d", (int)desc->device, count - 1);
        return ampc_refuse(dev, AMP_ERR_RANGE, "amp_open", text);
    }
    AMPC_ENTER(dev, "amp_open");
    AMPC_TRY(ampc_check(dev, cudaGetDeviceProperties(&prop, dev->index), "cudaGetDeviceProperties", NULL));
    dev->cc = 10 * prop.major + prop.minor;
    dev->multiprocessors = prop.multiProcessorCount;
    dev->shared_limit = prop.sharedMemPerBlockOptin;
    snprintf(dev->info.name, sizeof dev->info.name, "%.127s", prop.name);
    snprintf(dev->info.kind, sizeof dev->info.kind, "cuda");
    dev->info.index = dev->index;
    dev->info.cc_major = prop.major;
    dev->info.cc_minor = prop.minor;
    dev->info.fp16 = dev->cc >= 70;
    dev->info.bf16 = dev->info.tf32 = dev->cc >= 80;
    dev->info.fp8 = dev->cc >= 89;
    dev->info.multiprocessors = prop.multiProcessorCount;
    dev->info.memory = (int64_t)prop.totalGlobalMem;
    AMPC_TRY(ampc_check_image(dev));
    if (desc->stream != NULL) return AMP_OK;
    AMPC_TRY(ampc_check(dev, cudaStreamCreateWithFlags(&dev->stream, cudaStreamNonBlocking),
                        "cudaStreamCreateWithFlags", NULL));
    dev->owns_stream = 1;
    return AMP_OK;
}

/* Everything that was handed out comes back, and all of it goes to CUDA. */
void ampc_drop_memory(ampc_device *dev) {
    while (dev->graphs != NULL) ampc_graph_destroy(dev, dev->graphs);
    for (int i = 0; i < AMPC_BUCKETS; i++)
        while (dev->busy[i] != NULL) ampc_give(dev, dev->busy[i]->data);
    ampc_captures_end(dev, true);
    ampc_trim(dev, true);
}

void ampc_close(void *device) {
    ampc_device *dev = (ampc_device *)device;
    amp_host host = dev->host;
    if (dev->owns_stream || dev->reserved > 0 || dev->graphs != NULL || dev->captures != NULL) {
        ampc_current current(dev);
        if (dev->owns_stream) (void)cudaStreamSynchronize(dev->stream);
        ampc_drop_memory(dev);
        if (dev->owns_stream) (void)cudaStreamDestroy(dev->stream);
        (void)cudaGetLastError();
    }
    pthread_mutex_destroy(&dev->lock);
    host.free(host.user, dev, sizeof *dev);
}

amp_result ampc_open(void **out, const amp_host *host, const amp_backend_desc *desc) {
    ampc_device *dev = (ampc_device *)host->alloc(host->user, sizeof *dev, 64);
    amp_result result;
    *out = NULL;
    if (dev == NULL) return host->fail(host->user, AMP_ERR_MEMORY, "amp_cuda: amp_open: no host memory for the device");
    memset((void *)dev, 0, sizeof *dev);
    pthread_mutex_init(&dev->lock, NULL);
    dev->host = *host;
    dev->index = desc->device;
    dev->stream = (cudaStream_t)desc->stream;
    dev->blas = desc->blas;
    dev->memory = desc->memory;
    result = ampc_open_device(dev, desc);
    if (result == AMP_OK) *out = dev;
    else ampc_close(dev);
    return result;
}

amp_result ampc_describe(void *device, amp_device *out) {
    *out = ((const ampc_device *)device)->info;
    return AMP_OK;
}

/* ---- Memory */

amp_result ampc_alloc(void *device, void **ptr, size_t bytes) {
    ampc_device *dev = (ampc_device *)device;
    *ptr = NULL;
    AMPC_ENTER(dev, "amp_alloc");
    return ampc_take(dev, dev->stream, bytes, "amp_alloc", ptr);
}

void ampc_free(void *device, void *ptr, size_t bytes) {
    ampc_device *dev = (ampc_device *)device;
    (void)bytes;
    if (ptr == NULL) return;
    ampc_locked locked(dev);
    ampc_give(dev, ptr);
}

amp_result ampc_alloc_pinned(void *device, void **ptr, size_t bytes) {
    ampc_device *dev = (ampc_device *)device;
    *ptr = NULL;
    AMPC_ENTER(dev, "alloc_pinned");
    ampc_relaxed relaxed;
    AMPC_TRY(ampc_check(dev, cudaHostAlloc(ptr, bytes > 0 ? bytes : 1, cudaHostAllocPortable), "cudaHostAlloc",
                        "pinned memory comes from the host's RAM: prefetch less, or raise the limit on locked memory"));
    ampc_locked locked(dev);
    dev->pinned += (int64_t)bytes;
    return AMP_OK;
}

void ampc_free_pinned(void *device, void *ptr, size_t bytes) {
    ampc_device *dev = (ampc_device *)device;
    if (ptr == NULL) return;
    ampc_current current(dev);
    ampc_relaxed relaxed;
    (void)cudaFreeHost(ptr);
    ampc_locked locked(dev);
    dev->pinned -= (int64_t)bytes;
}

cudaStream_t ampc_stream(const ampc_device *dev, void *stream) { return stream ? (cudaStream_t)stream : dev->stream; }

amp_result ampc_copy(void *device, void *dst, const void *src, size_t bytes, amp_copy_kind kind, void *stream) {
    ampc_device *dev = (ampc_device *)device;
    cudaMemcpyKind way = kind == AMP_COPY_TO_DEVICE ? cudaMemcpyHostToDevice
                         : kind == AMP_COPY_TO_HOST ? cudaMemcpyDeviceToHost
                         : kind == AMP_COPY_ON_DEVICE ? cudaMemcpyDeviceToDevice : cudaMemcpyDefault;
    AMPC_ENTER(dev, "amp_copy");
    if (bytes == 0) return AMP_OK;
    return ampc_check(dev, cudaMemcpyAsync(dst, src, bytes, way, ampc_stream(dev, stream)), "cudaMemcpyAsync", NULL);
}

amp_result ampc_fill(void *device, void *dst, int byte, size_t bytes, void *stream) {
    ampc_device *dev = (ampc_device *)device;
    AMPC_ENTER(dev, "amp_fill");
    if (bytes == 0) return AMP_OK;
    return ampc_check(dev, cudaMemsetAsync(dst, byte, bytes, ampc_stream(dev, stream)), "cudaMemsetAsync", NULL);
}

amp_result ampc_memory(void *device, amp_memory_info *out) {
    ampc_device *dev = (ampc_device *)device;
    ampc_locked locked(dev);
    out->allocated = dev->allocated;
    out->reserved = dev->reserved;
    out->peak = dev->peak;
    out->pinned = dev->pinned;
    out->device_total = dev->info.memory;
    return AMP_OK;
}

/* ---- Streams */

amp_result ampc_stream_create(void *device, void **stream) {
    ampc_device *dev = (ampc_device *)device;
    cudaStream_t made = NULL;
    *stream = NULL;
    AMPC_ENTER(dev, "stream_create");
    AMPC_TRY(ampc_check(dev, cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "cudaStreamCreateWithFlags", NULL));
    *stream = made;
    return AMP_OK;
}

/* Waits for it, since another stream may get its scratch memory. */
void ampc_stream_destroy(void *device, void *stream) {
    ampc_device *dev = (ampc_device *)device;
    if (stream == NULL) return;
    ampc_current current(dev);
    (void)cudaStreamSynchronize((cudaStream_t)stream);
    (void)cudaStreamDestroy((cudaStream_t)stream);
    (void)cudaGetLastError();
    ampc_locked locked(dev);
    ampc_hand_over(dev, stream, NULL);
    for (ampc_graph *graph = dev->graphs; graph != NULL; graph = graph->next)
        if (graph->stream == stream) graph->stream = dev->stream;
}

amp_result ampc_stream_sync(void *device, void *stream) {
    ampc_device *dev = (ampc_device *)device;
    AMPC_ENTER(dev, "stream_sync");
    return ampc_check(dev, cudaStreamSynchronize(ampc_stream(dev, stream)), "cudaStreamSynchronize", NULL);
}

/* ---- Events */

amp_result ampc_event_create(void *device, void **event) {
    ampc_device *dev = (ampc_device *)device;
    cudaEvent_t made = NULL;
    *event = NULL;
    AMPC_ENTER(dev, "event_create");
    AMPC_TRY(ampc_check(dev, cudaEventCreateWithFlags(&made, cudaEventDefault), "cudaEventCreateWithFlags", NULL));
    *event = made;
    return AMP_OK;
}

void ampc_event_destroy(void *device, void *event) {
    if (event == NULL) return;
    ampc_current current((ampc_device *)device);
    (void)cudaEventDestroy((cudaEvent_t)event);
    (void)cudaGetLastError();
}

amp_result ampc_event_record(void *device, void *event, void *stream) {
    ampc_device *dev = (ampc_device *)device;
    AMPC_ENTER(dev, "event_record");
    return ampc_check(dev, cudaEventRecord((cudaEvent_t)event, ampc_stream(dev, stream)), "cudaEventRecord", NULL);
}

amp_result ampc_event_wait(void *device, void *event, void *stream) {
    ampc_device *dev = (ampc_device *)device;
    AMPC_ENTER(dev, "event_wait");
    return ampc_check(dev, cudaStreamWaitEvent(ampc_stream(dev, stream), (cudaEvent_t)event, 0), "cudaStreamWaitEvent",
                      NULL);
}

amp_result ampc_event_done(void *device, void *event, int32_t *done) {
    ampc_device *dev = (ampc_device *)device;
    cudaError_t error;
    *done = 0;
    AMPC_ENTER(dev, "event_done");
    error = cudaEventQuery((cudaEvent_t)event);
    *done = error == cudaSuccess;
    if (error == cudaErrorNotReady) {
        (void)cudaGetLastError();
        return AMP_OK;
    }
    return ampc_check(dev, error, "cudaEventQuery", NULL);
}

/* What is done already costs no wait. */
amp_result ampc_event_sync(void *device, void *event) {
    ampc_device *dev = (ampc_device *)device;
    int32_t done;
    AMPC_TRY(ampc_event_done(device, event, &done));
    if (done) return AMP_OK;
    AMPC_ENTER(dev, "event_sync");
    return ampc_check(dev, cudaEventSynchronize((cudaEvent_t)event), "cudaEventSynchronize", NULL);
}

amp_result ampc_event_elapsed(void *device, void *from, void *to, double *seconds) {
    ampc_device *dev = (ampc_device *)device;
    float milliseconds = 0;
    *seconds = 0;
    AMPC_ENTER(dev, "event_elapsed");
    AMPC_TRY(ampc_check(dev, cudaEventElapsedTime(&milliseconds, (cudaEvent_t)from, (cudaEvent_t)to),
                        "cudaEventElapsedTime", "both events must have been recorded and be done"));
    *seconds = 1e-3 * (double)milliseconds;
    return AMP_OK;
}

/* ---- Graphs */

amp_result ampc_graph_begin(void *device, void *stream) {
    ampc_device *dev = (ampc_device *)device;
    ampc_graph *graph;
    amp_result result;
    AMPC_ENTER(dev, "graph_begin");
    graph = (ampc_graph *)dev->host.alloc(dev->host.user, sizeof *graph, sizeof(void *));
    if (graph == NULL) return ampc_refuse(dev, AMP_ERR_MEMORY, "graph_begin", "no host memory for the graph");
    graph->stream = ampc_stream(dev, stream);
    graph->capturing = 1;
    graph->exec = NULL;
    result = ampc_check(dev, cudaStreamBeginCapture(graph->stream, cudaStreamCaptureModeThreadLocal),
                        "cudaStreamBeginCapture", "end the capture that is running on this stream first");
    if (result != AMP_OK) {
        dev->host.free(dev->host.user, graph, sizeof *graph);
        return result;
    }
    ampc_locked locked(dev);
    graph->next = dev->graphs;
    dev->graphs = graph;
    return AMP_OK;
}

/* The capture that runs on a stream, or NULL. */
ampc_graph *ampc_captured(ampc_device *dev, cudaStream_t stream) {
    ampc_locked locked(dev);
    ampc_graph *graph = dev->graphs;
    while (graph != NULL && !(graph->capturing && graph->stream == stream)) graph = graph->next;
    if (graph != NULL) graph->capturing = 0;
    return graph;
}

/* Takes it out of the list; its scratch memory goes to the stream that it ran on last. */
void ampc_graph_forget(ampc_device *dev, ampc_graph *graph) {
    ampc_graph **link = &dev->graphs;
    ampc_locked locked(dev);
    while (*link != NULL && *link != graph) link = &(*link)->next;
    if (*link != NULL) *link = graph->next;
    ampc_hand_over(dev, graph, graph->stream);
}

void ampc_graph_destroy(void *device, void *made) {
    ampc_device *dev = (ampc_device *)device;
    ampc_graph *graph = (ampc_graph *)made;
    if (graph == NULL) return;
    if (graph->exec != NULL) {
        ampc_current current(dev);
        (void)cudaGraphExecDestroy(graph->exec);
        (void)cudaGetLastError();
    }
    ampc_graph_forget(dev, graph);
    dev->host.free(dev->host.user, graph, sizeof *graph);
}

amp_result ampc_graph_end(void *device, void *stream, void **out) {
    ampc_device *dev = (ampc_device *)device;
    ampc_graph *graph = ampc_captured(dev, ampc_stream(dev, stream));
    cudaGraph_t captured = NULL;
    amp_result result;
    *out = NULL;
    if (graph == NULL) return ampc_refuse(dev, AMP_ERR_STATE, "graph_end", "no capture was begun on this stream");
    ampc_current current(dev);
    result = ampc_check(dev, cudaStreamEndCapture(graph->stream, &captured), "cudaStreamEndCapture",
                        "something that cannot be captured was called, such as a wait");
    if (result == AMP_OK) result = current.ready("graph_end");
    if (result == AMP_OK)
        result = ampc_check(dev, cudaGraphInstantiate(&graph->exec, captured, 0), "cudaGraphInstantiate", NULL);
    if (captured != NULL) (void)cudaGraphDestroy(captured);
    if (result == AMP_OK) *out = graph;
    else ampc_graph_destroy(dev, graph);
    return result;
}

amp_result ampc_graph_launch(void *device, void *made, void *stream) {
    ampc_device *dev = (ampc_device *)device;
    ampc_graph *graph = (ampc_graph *)made;
    AMPC_ENTER(dev, "graph_launch");
    graph->stream = ampc_stream(dev, stream);
    return ampc_check(dev, cudaGraphLaunch(graph->exec, graph->stream), "cudaGraphLaunch", NULL);
}

/* ==== Casts =========================================================================================
   Through the fp32 pattern, as amp.h's bulk conversion, and straight from fp64, because two roundings are not one.
   A thread takes pieces of 16 bytes of the wider side.                                                    */

struct ampc_tf32 { uint32_t bits; };
struct ampc_e4m3 { uint8_t bits; };
struct ampc_e5m2 { uint8_t bits; };

/* The 8-bit pattern of a finite or infinite fp32 magnitude, to nearest even; LARGEST + 1 beyond the largest finite
   one.  Subnormal results are rounded by adding a number whose last place is the smallest subnormal. */
template <int M, int BIAS, uint32_t LARGEST> __device__ __forceinline__ uint32_t ampc_narrow8(uint32_t magnitude, int saturate) {
    const uint32_t normal = (uint32_t)(128 - BIAS) << 23, magic = (uint32_t)(127 - BIAS + 23 - M + 1) << 23;
    uint32_t r;
    if (magnitude < normal)
        r = ampi_bits_f32(ampc_add(ampi_f32_of_bits(magnitude), ampi_f32_of_bits(magic))) - magic;
    else
        r = ((magnitude + ((1u << (22 - M)) - 1) + (magnitude >> (23 - M) & 1)) >> (23 - M)) -
            ((uint32_t)(127 - BIAS) << M);
    return r <= LARGEST ? r : saturate ? LARGEST : LARGEST + 1;
}
template <int M, int BIAS, uint32_t LARGEST> __device__ __forceinline__ uint8_t ampc_to_8bit(uint32_t bits, int saturate) {
    uint32_t magnitude = bits & 0x7fffffffu, r;
    if (magnitude > 0x7f800000u) r = (LARGEST + 1) | 1u << (M - 1) | (magnitude - 0x7f800000u) >> (23 - M);
    else r = ampc_narrow8<M, BIAS, LARGEST>(magnitude, saturate);
    return (uint8_t)((bits >> 24 & 0x80u) | r);
}

/* The fp32 pattern of a stored number. */
__device__ __forceinline__ uint32_t ampc_pattern(float x) { return ampi_bits_f32(x); }
__device__ __forceinline__ uint32_t ampc_pattern(ampc_f16 x) { return ampi_bits_f32(ampc_f16_value(x.bits)); }
__device__ __forceinline__ uint32_t ampc_pattern(ampc_bf16 x) { return (uint32_t)x.bits << 16; }
__device__ __forceinline__ uint32_t ampc_pattern(ampc_e4m3 x) { return ampi_bits_of_e4m3(x.bits); }
__device__ __forceinline__ uint32_t ampc_pattern(ampc_e5m2 x) { return ampi_bits_of_f16((uint16_t)(x.bits << 8)); }

/* From an fp32 pattern, to nearest. */
__device__ __forceinline__ uint32_t ampc_clamped(uint32_t bits, uint32_t largest) {
    uint32_t magnitude = bits & 0x7fffffffu;
    return magnitude > largest && magnitude <= 0x7f800000u ? (bits & 0x80000000u) | largest : bits;
}
__device__ __forceinline__ void ampc_narrow(float *to, uint32_t bits, int saturate) {
    *to = ampi_f32_of_bits(saturate ? ampc_clamped(bits, 0x7f7fffffu) : bits);
}
__device__ __forceinline__ void ampc_narrow(double *to, uint32_t bits, int) {
    *to = ampi_f64_of_bits(ampi_f64_bits_of_f32_bits(bits));
}
__device__ __forceinline__ void ampc_narrow(ampc_f16 *to, uint32_t bits, int saturate) {
    to->bits = ampc_f16_bits(ampi_f32_of_bits(saturate ? ampc_clamped(bits, 0x477fe000u) : bits));
}
__device__ __forceinline__ void ampc_narrow(ampc_bf16 *to, uint32_t bits, int saturate) {
    to->bits = amp_bf16_from_f32(ampi_f32_of_bits(bits), saturate);
}
__device__ __forceinline__ void ampc_narrow(ampc_tf32 *to, uint32_t bits, int saturate) {
    to->bits = ampi_to_tf32(bits, 0, saturate);
}
__device__ __forceinline__ void ampc_narrow(ampc_e4m3 *to, uint32_t bits, int saturate) {
    to->bits = ampc_to_8bit<3, 7, 0x7e>(bits, saturate);
}
__device__ __forceinline__ void ampc_narrow(ampc_e5m2 *to, uint32_t bits, int saturate) {
    to->bits = ampc_to_8bit<2, 15, 0x7b>(bits, saturate);
}
/* Straight from an fp64 pattern. */
__device__ __forceinline__ void ampc_narrow_wide(float *to, uint64_t x, int saturate) {
    *to = ampi_f32_of_bits(ampi_to_f32(x, saturate));
}
__device__ __forceinline__ void ampc_narrow_wide(double *to, uint64_t x, int) { *to = ampi_f64_of_bits(x); }
__device__ __forceinline__ void ampc_narrow_wide(ampc_f16 *to, uint64_t x, int s) { to->bits = ampi_to_f16(x, 1, s, AMPI_EVEN, 0); }
__device__ __forceinline__ void ampc_narrow_wide(ampc_bf16 *to, uint64_t x, int s) { to->bits = ampi_to_bf16(x, 1, s, AMPI_EVEN, 0); }
__device__ __forceinline__ void ampc_narrow_wide(ampc_tf32 *to, uint64_t x, int s) { to->bits = ampi_to_tf32(x, 1, s); }
__device__ __forceinline__ void ampc_narrow_wide(ampc_e4m3 *to, uint64_t x, int s) { to->bits = ampi_to_e4m3(x, 1, s, AMPI_EVEN, 0); }
__device__ __forceinline__ void ampc_narrow_wide(ampc_e5m2 *to, uint64_t x, int s) { to->bits = ampi_to_e5m2(x, 1, s, AMPI_EVEN, 0); }

template <class D, class S> __device__ __forceinline__ D ampc_convert(S x, int saturate) {
    D y;
    ampc_narrow(&y, ampc_pattern(x), saturate);
    return y;
}
template <class D> __device__ __forceinline__ D ampc_convert(double x, int saturate) {
    D y;
    ampc_narrow_wide(&y, ampi_bits_f64(x), saturate);
    return y;
}

/* 1 for what is infinite or NaN. */
__device__ __forceinline__ int ampc_beyond(float x) { return !ampc_finite(x); }
__device__ __forceinline__ int ampc_beyond(double x) { return !amp_is_finite_f64(&x); }
__device__ __forceinline__ int ampc_beyond(ampc_f16 x) { return !amp_is_finite_f16(x.bits); }
__device__ __forceinline__ int ampc_beyond(ampc_bf16 x) { return !amp_is_finite_bf16(x.bits); }
__device__ __forceinline__ int ampc_beyond(ampc_tf32 x) { return (x.bits & 0x7f800000u) == 0x7f800000u; }
__device__ __forceinline__ int ampc_beyond(ampc_e4m3 x) { return (x.bits & 0x7f) == 0x7f; }
__device__ __forceinline__ int ampc_beyond(ampc_e5m2 x) { return (x.bits & 0x7c) == 0x7c; }

/* A piece of an array in the elements' own type. */
template <class T, int N> __device__ __forceinline__ void ampc_fetch(const T *p, T (&x)[N]) {
    uint4 raw = ampc_get_piece<AMPC_ONCE, N * (int)sizeof(T)>(p);
    memcpy(x, &raw, sizeof x);
}
template <class T, int N> __device__ __forceinline__ void ampc_leave(T *p, const T (&x)[N]) {
    uint4 raw = {0, 0, 0, 0};
    memcpy(&raw, x, sizeof x);
    ampc_put_piece<AMPC_KEEP, N * (int)sizeof(T)>(p, raw);
}

/* new_inf is a 64-bit count; integer atomics come out the same in any order. */
__device__ __forceinline__ void ampc_count(unsigned long long *total, int mine, int *room) {
    int sum = ampc_block_sum(mine, room);
    if (threadIdx.x == 0 && sum != 0) atomicAdd(total, (unsigned long long)sum);
}

/* Elements of a piece, 16 bytes of the wider side, so that a warp writes whole sectors; and pieces under way. */
template <class D, class S> struct ampc_cast_shape {
    enum { wide = sizeof(D) > sizeof(S) ? sizeof(D) : sizeof(S), least = sizeof(D) < sizeof(S) ? sizeof(D) : sizeof(S) };
    enum { width = 16 / wide, pieces = wide == 8 ? 4 : wide / least, per_sm = wide == 8 ? 5 : 8 };
};

template <class D, class S> __global__ void __launch_bounds__(256, (ampc_cast_shape<D, S>::per_sm))
ampc_cast_kernel(D *dst, const S *src, int64_t n, int saturate, int aligned, unsigned long long *new_inf) {
    enum { W = ampc_cast_shape<D, S>::width, U = ampc_cast_shape<D, S>::pieces };
    AMPC_SHARED(int, room, 32);
    int64_t at = (int64_t)blockIdx.x * blockDim.x * U + threadIdx.x, step = (int64_t)gridDim.x * blockDim.x * U;
    int64_t pieces = aligned ? n / W : 0, i;
    int found = 0;
    for (i = at; i < pieces; i += step) {
        S x[U][W];
        AMPC_UNROLL
        for (int u = 0; u < U; u++)
            if (i + u * 256 < pieces) ampc_fetch(src + (i + u * 256) * W, x[u]);
        AMPC_UNROLL
        for (int u = 0; u < U; u++) {
            D y[W];
            if (i + u * 256 >= pieces) continue;
            AMPC_UNROLL
            for (int j = 0; j < W; j++) {
                y[j] = ampc_convert<D>(x[u][j], saturate);
                if (new_inf != NULL) found += ampc_beyond(y[j]) - ampc_beyond(x[u][j]);
            }
            ampc_leave(dst + (i + u * 256) * W, y);
        }
    }
    at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (i = pieces * W + at; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        S x = src[i];
        D y = ampc_convert<D>(x, saturate);
        if (new_inf != NULL) found += ampc_beyond(y) - ampc_beyond(x);
        dst[i] = y;
    }
    if (new_inf != NULL) ampc_count(new_inf, found, room);
}

/* Stochastic rounding to 16 and 8 bits.  A thread takes the elements whose random words are one block of Philox. */
__device__ inline int ampc_round_stochastic(void *dst, amp_dtype to, const void *src, amp_dtype from, int64_t i,
                                            int saturate, uint32_t random) {
    int wide = from == AMP_F64, before, after;
    uint64_t x;
    if (wide) x = ampi_bits_f64(((const double *)src)[i]);
    else if (from == AMP_F16) x = ampc_pattern(((const ampc_f16 *)src)[i]);
    else if (from == AMP_BF16) x = ampc_pattern(((const ampc_bf16 *)src)[i]);
    else if (from == AMP_E4M3) x = ampc_pattern(((const ampc_e4m3 *)src)[i]);
    else if (from == AMP_E5M2) x = ampc_pattern(((const ampc_e5m2 *)src)[i]);
    else x = ampc_pattern(((const float *)src)[i]);
    before = wide ? (x >> 52 & 0x7ff) == 0x7ff : (x >> 23 & 0xff) == 0xff;
    if (to == AMP_F16 || to == AMP_BF16) {
        uint16_t y = to == AMP_F16 ? ampi_to_f16(x, wide, saturate, AMPI_STOCHASTIC, random)
                                   : ampi_to_bf16(x, wide, saturate, AMPI_STOCHASTIC, random);
        ((uint16_t *)dst)[i] = y;
        after = to == AMP_F16 ? !amp_is_finite_f16(y) : !amp_is_finite_bf16(y);
    } else {
        uint8_t y = to == AMP_E4M3 ? ampi_to_e4m3(x, wide, saturate, AMPI_STOCHASTIC, random)
                                   : ampi_to_e5m2(x, wide, saturate, AMPI_STOCHASTIC, random);
        ((uint8_t *)dst)[i] = y;
        after = to == AMP_E4M3 ? (y & 0x7f) == 0x7f : (y & 0x7c) == 0x7c;
    }
    return after - before;
}

__global__ void __launch_bounds__(256)
ampc_cast_stochastic_kernel(void *dst, amp_dtype to, const void *src, amp_dtype from, int64_t n, int saturate,
                            uint64_t seed, uint64_t offset, unsigned long long *new_inf) {
    AMPC_SHARED(int, room, 32);
    uint64_t first = offset / 4, groups = (offset + (uint64_t)n + 3) / 4 - first;
    uint64_t g = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    int found = 0;
    for (; g < groups; g += (uint64_t)gridDim.x * blockDim.x) {
        uint32_t words[4];
        amp_philox(seed, 0, first + g, words);
        AMPC_UNROLL
        for (int j = 0; j < 4; j++) {
            int64_t i = (int64_t)((first + g) * 4 + (uint64_t)j - offset);
            if (i >= 0 && i < n) found += ampc_round_stochastic(dst, to, src, from, i, saturate, words[j]);
        }
    }
    if (new_inf != NULL) ampc_count(new_inf, found, room);
}

/* Token ids travel as u16 and are used as i32. */
__global__ void __launch_bounds__(256) ampc_widen_ids_kernel(int32_t *dst, const uint16_t *src, int64_t n, int aligned) {
    int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, step = (int64_t)gridDim.x * blockDim.x, i;
    int64_t pieces = aligned ? n / 4 : 0;
    for (i = at; i < pieces; i += step) {
        uint2 raw = ((const uint2 *)src)[i];
        uint4 wide = {raw.x & 0xffffu, raw.x >> 16, raw.y & 0xffffu, raw.y >> 16};
        ampc_put16<AMPC_KEEP>(dst + 4 * i, wide);
    }
    for (i = 4 * pieces + at; i < n; i += step) dst[i] = src[i];
}

enum { AMPC_CAST_PER_SM = 8 };

template <class D, class S> amp_result ampc_cast_as(ampc_device *dev, const amp_k_cast *a, void *stream) {
    const int width = ampc_cast_shape<D, S>::width * ampc_cast_shape<D, S>::pieces;
    int saturate = a->how.saturate != 0, aligned = ampc_aligned(a->dst) && ampc_aligned(a->src);
    unsigned grid = ampc_grid(dev, ampc_blocks(a->n, 256 * (aligned ? width : 1)), ampc_cast_shape<D, S>::per_sm);
    return ampc_launch(dev, "amp_cast", ampc_cast_kernel<D, S>, grid, 256, 0, stream, (D *)a->dst, (const S *)a->src, a->n,
                       saturate, aligned, saturate ? NULL : (unsigned long long *)a->new_inf);
}

template <class D> amp_result ampc_cast_to(ampc_device *dev, const amp_k_cast *a, void *stream) {
    switch (a->src_dtype) {
        case AMP_F32: case AMP_TF32: return ampc_cast_as<D, float>(dev, a, stream);
        case AMP_F64: return ampc_cast_as<D, double>(dev, a, stream);
        case AMP_F16: return ampc_cast_as<D, ampc_f16>(dev, a, stream);
        case AMP_BF16: return ampc_cast_as<D, ampc_bf16>(dev, a, stream);
        case AMP_E4M3: return ampc_cast_as<D, ampc_e4m3>(dev, a, stream);
        case AMP_E5M2: return ampc_cast_as<D, ampc_e5m2>(dev, a, stream);
        default: return ampc_refuse(dev, AMP_ERR_DTYPE, "amp_cast", "the source must be a floating dtype");
    }
}

amp_result ampc_cast_stochastic(ampc_device *dev, const amp_k_cast *a, void *stream) {
    int saturate = a->how.saturate != 0;
    unsigned grid = ampc_grid(dev, ampc_blocks(a->n / 4 + 2, 256), AMPC_CAST_PER_SM);
    bool from = a->src_dtype >= AMP_F32 && a->src_dtype <= AMP_E5M2;
    bool to = a->dst_dtype == AMP_F16 || a->dst_dtype == AMP_BF16 || a->dst_dtype == AMP_E4M3 || a->dst_dtype == AMP_E5M2;
    if (!from || !to) return ampc_refuse(dev, AMP_ERR_DTYPE, "amp_cast", "stochastic rounding must be to fp16, bf16 or fp8");
    return ampc_launch(dev, "amp_cast", ampc_cast_stochastic_kernel, grid, 256, 0, stream, a->dst, a->dst_dtype, a->src,
                       a->src_dtype, a->n, saturate, a->how.seed, a->how.offset,
                       saturate ? NULL : (unsigned long long *)a->new_inf);
}

amp_result ampc_cast(void *device, const amp_k_cast *a, void *stream) {
    ampc_device *dev = (ampc_device *)device;
    if (a->n <= 0) return ampc_usable(dev, "amp_cast");
    if (a->src_dtype == AMP_U16 && a->dst_dtype == AMP_I32)
        return ampc_launch(dev, "amp_cast", ampc_widen_ids_kernel, ampc_grid(dev, ampc_blocks(a->n, 256), AMPC_CAST_PER_SM),
                           256, 0, stream, (int32_t *)a->dst, (const uint16_t *)a->src, a->n,
                           ampc_aligned(a->dst) && ((uintptr_t)a->src & 7) == 0);
    if (a->how.rounding == AMP_ROUND_STOCHASTIC) return ampc_cast_stochastic(dev, a, stream);
    if (a->src_dtype == a->dst_dtype && a->dst_dtype != AMP_TF32 && !a->how.saturate)
        return a->dst == a->src ? ampc_usable(dev, "amp_cast")
                                : ampc_copy(dev, a->dst, a->src, (size_t)(a->n * ampc_dtype_size(a->dst_dtype)),
                                            AMP_COPY_ON_DEVICE, stream);
    switch (a->dst_dtype) {
        case AMP_F32: return ampc_cast_to<float>(dev, a, stream);
        case AMP_F64: return ampc_cast_to<double>(dev, a, stream);
        case AMP_F16: return ampc_cast_to<ampc_f16>(dev, a, stream);
        case AMP_BF16: return ampc_cast_to<ampc_bf16>(dev, a, stream);
        case AMP_TF32: return ampc_cast_to<ampc_tf32>(dev, a, stream);
        case AMP_E4M3: return ampc_cast_to<ampc_e4m3>(dev, a, stream);
        case AMP_E5M2: return ampc_cast_to<ampc_e5m2>(dev, a, stream);
        default: return ampc_refuse(dev, AMP_ERR_DTYPE, "amp_cast", "the destination must be a floating dtype");
    }
}

/* ==== Multi-tensor kernels ==========================================================================
   One launch covers a table of any number of rows.  Rows are cut into chunks, numbered through the table; block b
   takes the chunks b, b + grid, b + 2 grid and so on.  A warp finds a chunk's row by summing up the chunks of 32 rows
   at a time; since chunks come in rising order, it goes through the table once.                          */

enum { AMPC_CHUNK = 8192, AMPC_MULTI_THREADS = 256, AMPC_MULTI_PER_SM = 4, AMPC_OPTIMIZER_PER_SM = 3,
       AMPC_CHECK_BLOCKS = 512 };

struct ampc_cursor {
    const amp_k_tensor *table;
    int tensors, base, before;      /* the first of the 32 rows in view, and the chunks ahead of it */
    int mine, upto;                 /* chunks of this lane's row, and of all rows in view up to it */
};

__device__ inline void ampc_cursor_look(ampc_cursor *c) {
    int row = c->base + (int)(threadIdx.x % 32);
    c->mine = row < c->tensors && c->table[row].live ? (int)ampc_blocks(c->table[row].count, AMPC_CHUNK) : 0;
    c->upto = c->mine;
    for (unsigned step = 1; step < 32; step *= 2) {
        int other = __shfl_up_sync(0xffffffffu, c->upto, step);
        if (threadIdx.x % 32 >= step) c->upto += other;
    }
}

__device__ inline ampc_cursor ampc_cursor_begin(const amp_k_tensor *table, int64_t tensors) {
    ampc_cursor c = {table, (int)tensors, 0, 0, 0, 0};
    ampc_cursor_look(&c);
    return c;
}

/* The row of a chunk and the chunk's number in it; -1 beyond the last. */
__device__ inline int ampc_cursor_find(ampc_cursor *c, int chunk, int *inside) {
    int total = __shfl_sync(0xffffffffu, c->upto, 31), lane;
    while (chunk - c->before >= total) {
        c->before += total;
        c->base += 32;
        if (c->base >= c->tensors) return -1;
        ampc_cursor_look(c);
        total = __shfl_sync(0xffffffffu, c->upto, 31);
    }
    lane = __ffs((int)__ballot_sync(0xffffffffu, c->upto > chunk - c->before)) - 1;
    *inside = chunk - c->before - __shfl_sync(0xffffffffu, c->upto - c->mine, lane);
    return c->base + lane;
}

/* Calls piece(row number, row, first element, elements) for the block's chunks, with all its threads together. */
template <class F> __device__ __forceinline__ void ampc_for_chunks(const amp_k_tensor *table, int64_t tensors, F piece) {
    ampc_cursor cursor = ampc_cursor_begin(table, tensors);
    for (int chunk = (int)blockIdx.x;; chunk += (int)gridDim.x) {
        int inside = 0, row = ampc_cursor_find(&cursor, chunk, &inside);
        int64_t first = (int64_t)inside * AMPC_CHUNK, left;
        if (row < 0) return;
        left = table[row].count - first;
        piece(row, table[row], first, left < AMPC_CHUNK ? (int)left : (int)AMPC_CHUNK);
    }
}

/* ---- Check and scale */

struct ampc_partial { double sum_sq; int32_t bad_row, reserved; };      /* bad_row: INT32_MAX if none */

__device__ __forceinline__ double ampc_square(double x) { return x * x; }

/* Squares, and what is not finite, of 4 or 8 numbers. */
template <int N> __device__ __forceinline__ void ampc_check_lanes(const float (&x)[N], double *sum, int *bad) {
    double squares = 0;
    AMPC_UNROLL
    for (int i = 0; i < N; i++) *bad |= !ampc_finite(x[i]);
    AMPC_UNROLL
    for (int i = 0; i < N; i += 4)
        squares += (ampc_square(x[i]) + ampc_square(x[i + 1])) + (ampc_square(x[i + 2]) + ampc_square(x[i + 3]));
    *sum += squares;
}

/* n elements at p by the whole block; write 0: read only. */
template <bool SUM, class T>
__device__ __forceinline__ void ampc_check_piece(T *p, int n, float factor, int write, double *sum, int *bad) {
    enum { W = 16 / (int)sizeof(T), U = 4 };        /* elements of a piece, pieces on their way */
    int i, whole = ampc_aligned(p) ? n / W : 0;
    for (i = (int)threadIdx.x; i < whole; i += U * AMPC_MULTI_THREADS) {
        uint4 raw[U];
        AMPC_UNROLL
        for (int u = 0; u < U; u++)
            if (i + u * AMPC_MULTI_THREADS < whole) raw[u] = ampc_get16<AMPC_KEEP>(p + (i + u * AMPC_MULTI_THREADS) * W);
        AMPC_UNROLL
        for (int u = 0; u < U; u++) {
            float x[W];
            if (i + u * AMPC_MULTI_THREADS >= whole) continue;
            ampc_widen<W>(raw[u], ampc_dtype_of(p), x);
            if (SUM) ampc_check_lanes(x, sum, bad);
            if (!write) continue;
            AMPC_UNROLL
            for (int k = 0; k < W; k++) x[k] = ampc_mul(x[k], factor);
            ampc_put16<AMPC_KEEP>(p + (i + u * AMPC_MULTI_THREADS) * W, ampc_narrow<W>(x, ampc_dtype_of(p)));
        }
    }
    for (i = whole * W + (int)threadIdx.x; i < n; i += AMPC_MULTI_THREADS) {
        float one = ampc_float(p[i]);
        if (SUM) {
            *bad |= !ampc_finite(one);
            *sum += ampc_square(one);
        }
        if (write) ampc_put(p + i, ampc_mul(one, factor));
    }
}
template <bool SUM>
__device__ __forceinline__ void ampc_check_piece(double *p, int n, float factor, int write, double *sum, int *bad) {
    for (int i = (int)threadIdx.x; i < n; i += AMPC_MULTI_THREADS) {
        double x = p[i];
        if (SUM) {
            *bad |= !amp_is_finite_f64(&x);
            *sum += ampc_square(x);
        }
        if (write) p[i] = x * (double)factor;
    }
}
template <bool SUM>
__device__ __forceinline__ void ampc_check_row(const amp_k_tensor &row, int64_t first, int n, float factor, int write,
                                               double *sum, int *bad) {
    switch (row.grad_dtype) {
        case AMP_F32: ampc_check_piece<SUM>((float *)row.grad + first, n, factor, write, sum, bad); break;
        case AMP_F16: ampc_check_piece<SUM>((ampc_f16 *)row.grad + first, n, factor, write, sum, bad); break;
        case AMP_BF16: ampc_check_piece<SUM>((ampc_bf16 *)row.grad + first, n, factor, write, sum, bad); break;
        default: ampc_check_piece<SUM>((double *)row.grad + first, n, factor, write, sum, bad); break;
    }
}

__device__ __forceinline__ int ampc_is_one(float x) { return ampi_bits_f32(x) == 0x3f800000u; }

/* The grid is always AMPC_CHECK_BLOCKS, so that the order of the sum is the same on every GPU. */
__global__ void __launch_bounds__(AMPC_MULTI_THREADS, AMPC_MULTI_PER_SM)
ampc_check_kernel(const amp_k_tensor *table, int64_t tensors, const float *multiply, ampc_partial *partials) {
    AMPC_SHARED(double, sums, 32);
    AMPC_SHARED(int, rows, 32);
    float factor = multiply != NULL ? *multiply : 1.0f;
    int write = !ampc_is_one(factor), bad_row = INT32_MAX;
    double sum = 0;
    ampc_for_chunks(table, tensors, [&](int number, const amp_k_tensor &row, int64_t first, int n) {
        int bad = 0;
        ampc_check_row<true>(row, first, n, factor, write, &sum, &bad);
        if (bad && number < bad_row) bad_row = number;
    });
    sum = ampc_block_sum(sum, sums);
    bad_row = -ampc_block_max(-bad_row, rows);
    if (threadIdx.x != 0) return;
    partials[blockIdx.x].sum_sq = sum;
    partials[blockIdx.x].bad_row = bad_row;
}

__global__ void __launch_bounds__(AMPC_CHECK_BLOCKS) ampc_check_finish_kernel(const ampc_partial *partials, amp_k_found *found) {
    AMPC_SHARED(double, sums, 32);
    AMPC_SHARED(int, rows, 32);
    double sum = ampc_block_sum(partials[threadIdx.x].sum_sq, sums);
    int bad_row = -ampc_block_max(-partials[threadIdx.x].bad_row, rows);
    if (threadIdx.x != 0) return;
    found->sum_sq += sum;
    if (bad_row == INT32_MAX) return;
    found->found_inf = 1;
    if (found->first_bad < 0 || bad_row < found->first_bad) found->first_bad = bad_row;
}

__global__ void __launch_bounds__(AMPC_MULTI_THREADS, AMPC_MULTI_PER_SM)
ampc_scale_kernel(const amp_k_tensor *table, int64_t tensors, const float *factor_at) {
    float factor = *factor_at;
    if (ampc_is_one(factor)) return;
    ampc_for_chunks(table, tensors, [&](int, const amp_k_tensor &row, int64_t first, int n) {
        ampc_check_row<false>(row, first, n, factor, 1, NULL, NULL);
    });
}

amp_result ampc_check_grads(void *device, const amp_k_check *a, void *stream) {
    ampc_device *dev = (ampc_device *)device;
    ampc_scratch partials(dev, stream);
    if (a->tensors <= 0) return ampc_usable(dev, "amp_scaler_check");
    AMPC_TRY(partials.get(AMPC_CHECK_BLOCKS * sizeof(ampc_partial), "amp_scaler_check"));
    AMPC_TRY(ampc_launch(dev, "amp_scaler_check", ampc_check_kernel, AMPC_CHECK_BLOCKS, AMPC_MULTI_THREADS, 0, stream,
                         a->table, a->tensors, a->multiply, (ampc_partial *)partials.data));
    return ampc_launch(dev, "amp_scaler_check", ampc_check_finish_kernel, 1, AMPC_CHECK_BLOCKS, 0, stream,
                       (const ampc_partial *)partials.data, a->found);
}

amp_result ampc_scale_ranges(void *device, const amp_k_scale_ranges *a, void *stream) {
    ampc_device *dev = (ampc_device *)device;
    unsigned grid = a->tensors > 0 ? (unsigned)(dev->multiprocessors * AMPC_MULTI_PER_SM) : 0;
    return ampc_launch(dev, "scale_ranges", ampc_scale_kernel, grid, AMPC_MULTI_THREADS, 0, stream, a->table, a->tensors, a->factor);
}

/* ---- Optimizers.  The fp32 weight of a row is its master, or the weight itself, or a 16-bit weight widened.  A first
   launch computes each row's constants in fp64, as the CPU does, so that the second has no fp64 in it. */

/* One element.  Every operation rounds once, in the order of amp.h's CPU kernels. */
__device__ __forceinline__ float ampc_adamw_one(float w, float g, float *m, float *v, const ampi_adamw_step &s) {
    float root;
    g = ampc_mul(g, s.multiplier);
    *m = ampc_fma(ampc_add(g, -*m), s.rest1, *m);
    *v = ampc_fma(ampc_mul(g, s.rest2), g, ampc_mul(*v, s.beta2));
    root = ampc_fma(ampc_sqrt(*v), s.correction, s.eps);
    return ampc_fma(-s.rate, ampc_div(*m, root), ampc_mul(w, s.keep));
}
__device__ __forceinline__ float ampc_sgd_one(float w, float g, float *m, const ampi_sgd_step &s, bool momentum) {
    g = ampc_fma(w, s.decay, ampc_mul(g, s.multiplier));
    if (momentum) {
        *m = ampc_fma(s.momentum, *m, ampc_mul(g, s.rest));
        g = s.nesterov ? ampc_fma(s.momentum, *m, g) : *m;
    }
    return ampc_fma(-s.rate, g, w);
}

/* Where a row's elements from `first` on lie.  w: the fp32 weights, NULL where there is but a 16-bit weight. */
template <class W, class G> struct ampc_row_piece {
    float *w, *m, *v;
    W *low;
    const G *g;
    bool aligned;
};
template <class W, class G> __device__ __forceinline__ ampc_row_piece<W, G> ampc_piece_of(const amp_k_tensor &row, int64_t first) {
    ampc_row_piece<W, G> p;
    p.w = row.master != NULL ? (float *)row.master + first : sizeof(W) == 4 ? (float *)row.weight + first : NULL;
    p.m = row.m != NULL ? (float *)row.m + first : NULL;
    p.v = row.v != NULL ? (float *)row.v + first : NULL;
    p.low = sizeof(W) == 4 && row.master == NULL ? NULL : (W *)row.weight + first;
    p.g = (const G *)row.grad + first;
    p.aligned = ampc_aligned(p.w) && ampc_aligned(p.m) && ampc_aligned(p.v) && ampc_aligned(p.low) && ampc_aligned(p.g);
    return p;
}

/* Updates n elements with the whole block; UPDATE: float (float w, float g, float *m, float *v). */
template <bool SECOND, class W, class G, class UPDATE>
__device__ __forceinline__ void ampc_update_piece(const ampc_row_piece<W, G> &p, int n, UPDATE update) {
    enum { L = 4 };                 /* elements of a piece: 16 bytes of fp32, so that a warp writes whole sectors */
    int whole = p.aligned ? n / L : 0, i;
    AMPC_NO_UNROLL
    for (i = (int)threadIdx.x; i < whole; i += AMPC_MULTI_THREADS) {
        int at = i * L;
        float w[L], g[L], m[L] = {}, v[L] = {};
        ampc_load<AMPC_ONCE>(p.g + at, g);
        if (p.w != NULL) ampc_load<AMPC_ONCE>(p.w + at, w);
        else ampc_load<AMPC_ONCE>(p.low + at, w);
        if (p.m != NULL) ampc_load<AMPC_ONCE>(p.m + at, m);
        if (SECOND) ampc_load<AMPC_ONCE>(p.v + at, v);
        AMPC_UNROLL
        for (int j = 0; j < L; j++) w[j] = update(w[j], g[j], &m[j], &v[j]);
        if (p.w != NULL) ampc_store<AMPC_ONCE>(p.w + at, w);
        if (p.m != NULL) ampc_store<AMPC_ONCE>(p.m + at, m);
        if (SECOND) ampc_store<AMPC_ONCE>(p.v + at, v);
        if (p.low != NULL) ampc_store(p.low + at, w);
    }
    AMPC_NO_UNROLL
    for (i = whole * L + (int)threadIdx.x; i < n; i += AMPC_MULTI_THREADS) {
        float w = p.w != NULL ? p.w[i] : ampc_float(p.low[i]), m = p.m != NULL ? p.m[i] : 0.0f, v = SECOND ? p.v[i] : 0.0f;
        w = update(w, ampc_float(p.g[i]), &m, &v);
        if (p.w != NULL) p.w[i] = w;
        if (p.m != NULL) p.m[i] = m;
        if (SECOND) p.v[i] = v;
        if (p.low != NULL) ampc_put(p.low + i, w);
    }
}

template <bool SECOND, class W, class UPDATE>
__device__ __forceinline__ void ampc_update_weights(const amp_k_tensor &row, int64_t first, int n, UPDATE update) {
    switch (row.grad_dtype) {
        case AMP_F16: ampc_update_piece<SECOND>(ampc_piece_of<W, ampc_f16>(row, first), n, update); break;
        case AMP_BF16: ampc_update_piece<SECOND>(ampc_piece_of<W, ampc_bf16>(row, first), n, update); break;
        default: ampc_update_piece<SECOND>(ampc_piece_of<W, float>(row, first), n, update); break;
    }
}
template <bool SECOND, class UPDATE>
__device__ __forceinline__ void ampc_update_row(const amp_k_tensor &row, int64_t first, int n, UPDATE update) {
    switch (row.weight_dtype) {
        case AMP_F16: ampc_update_weights<SECOND, ampc_f16>(row, first, n, update); break;
        case AMP_BF16: ampc_update_weights<SECOND, ampc_bf16>(row, first, n, update); break;
        default: ampc_update_weights<SECOND, float>(row, first, n, update); break;
    }
}

/* ---- Rows whose storage takes more than a conversion: remainders, stochastic rounding, bf16 moments.  Dtypes are known
   at run time only, which keeps this out of the plain rows' registers. */

__device__ inline bool ampc_is_plain(const amp_k_tensor &row) {
    return row.master_kind != AMP_MASTER_REMAINDER && row.master_kind != AMP_MASTER_STOCHASTIC && row.moment_dtype != AMP_BF16;
}

/* Up to 8 16-bit patterns. */
__device__ inline void ampc_load_bits(const uint16_t *p, uint32_t (&x)[AMPC_LANES], int n) {
    if (n >= AMPC_LANES && ampc_aligned(p)) {
        uint4 raw = ampc_get16<AMPC_ONCE>(p);
        AMPC_UNROLL
        for (int i = 0; i < AMPC_LANES; i++) x[i] = ampc_word(raw, i / 2) >> (i % 2 * 16) & 0xffffu;
        return;
    }
    AMPC_UNROLL
    for (int i = 0; i < AMPC_LANES; i++) x[i] = i < n ? p[i] : 0;
}
__device__ inline void ampc_store_bits(uint16_t *p, const uint32_t (&x)[AMPC_LANES], int n) {
    if (n >= AMPC_LANES && ampc_aligned(p)) {
        uint4 raw = {x[0] | x[1] << 16, x[2] | x[3] << 16, x[4] | x[5] << 16, x[6] | x[7] << 16};
        ampc_put16<AMPC_ONCE>(p, raw);
        return;
    }
    AMPC_UNROLL
    for (int i = 0; i < AMPC_LANES; i++)
        if (i < n) p[i] = (uint16_t)x[i];
}

/* Up to 8 numbers from element i on. */
template <class T> __device__ __forceinline__ void ampc_load_some(const T *p, float (&x)[AMPC_LANES], int n) {
    if (n >= AMPC_LANES && ampc_aligned(p)) ampc_load<AMPC_ONCE>(p, x);
    else ampc_load_upto(p, x, n, 0.0f);
}
template <class T> __device__ __forceinline__ void ampc_store_some(T *p, const float (&x)[AMPC_LANES], int n) {
    if (n >= AMPC_LANES && ampc_aligned(p)) ampc_store<AMPC_ONCE>(p, x);
    else ampc_store_upto(p, x, n);
}
__device__ inline void ampc_load_as(const void *p, amp_dtype dtype, int64_t i, float (&x)[AMPC_LANES], int n) {
    if (dtype == AMP_F16) ampc_load_some((const ampc_f16 *)p + i, x, n);
    else if (dtype == AMP_BF16) ampc_load_some((const ampc_bf16 *)p + i, x, n);
    else ampc_load_some((const float *)p + i, x, n);
}
__device__ inline void ampc_store_as(void *p, amp_dtype dtype, int64_t i, const float (&x)[AMPC_LANES], int n) {
    if (dtype == AMP_F16) ampc_store_some((ampc_f16 *)p + i, x, n);
    else if (dtype == AMP_BF16) ampc_store_some((ampc_bf16 *)p + i, x, n);
    else ampc_store_some((float *)p + i, x, n);
}

__device__ inline void ampc_load_weights(const amp_k_tensor &row, int64_t i, float (&w)[AMPC_LANES], int n) {
    uint32_t high[AMPC_LANES], rest[AMPC_LANES];
    if (row.master_kind != AMP_MASTER_REMAINDER) {
        ampc_load_as(row.master != NULL ? row.master : row.weight, row.master != NULL ? AMP_F32 : row.weight_dtype, i, w, n);
        return;
    }
    ampc_load_bits((const uint16_t *)row.weight + i, high, n);
    ampc_load_bits((const uint16_t *)row.master + i, rest, n);
    AMPC_UNROLL
    for (int j = 0; j < AMPC_LANES; j++) w[j] = amp_f32_join((uint16_t)high[j], (uint16_t)rest[j]);
}
__device__ inline void ampc_store_weights(const amp_k_tensor &row, int64_t i, const float (&w)[AMPC_LANES],
                                          const uint32_t (&random)[AMPC_LANES], int n) {
    uint32_t high[AMPC_LANES], rest[AMPC_LANES];
    if (row.master_kind != AMP_MASTER_REMAINDER && row.master_kind != AMP_MASTER_STOCHASTIC) {
        if (row.master != NULL) ampc_store_as(row.master, AMP_F32, i, w, n);
        ampc_store_as(row.weight, row.weight_dtype, i, w, n);
        return;
    }
    AMPC_UNROLL
    for (int j = 0; j < AMPC_LANES; j++) {
        uint16_t remainder = 0;
        high[j] = row.master_kind == AMP_MASTER_REMAINDER ? amp_bf16_split(w[j], &remainder)
                  : row.weight_dtype == AMP_BF16 ? amp_bf16_stochastic(w[j], random[j], 0)
                                                 : amp_f16_stochastic(w[j], random[j], 0);
        rest[j] = remainder;
    }
    ampc_store_bits((uint16_t *)row.weight + i, high, n);
    if (row.master_kind == AMP_MASTER_REMAINDER) ampc_store_bits((uint16_t *)row.master + i, rest, n);
}
__device__ inline void ampc_store_moments(void *p, amp_dtype dtype, int64_t i, const float (&x)[AMPC_LANES],
                                          const uint32_t (&random)[AMPC_LANES], int n) {
    uint32_t bits[AMPC_LANES];
    if (dtype != AMP_BF16) {
        ampc_store_as(p, AMP_F32, i, x, n);
        return;
    }
    AMPC_UNROLL
    for (int j = 0; j < AMPC_LANES; j++) bits[j] = ampi_moment_round(x[j], random[j]);
    ampc_store_bits((uint16_t *)p + i, bits, n);
}

template <bool SECOND, class UPDATE>
__device__ __forceinline__ void ampc_update_stored(const amp_k_tensor &row, int64_t first, int n, uint64_t seed, UPDATE update) {
    AMPC_NO_UNROLL
    for (int at = (int)threadIdx.x * AMPC_LANES; at < n; at += AMPC_MULTI_THREADS * AMPC_LANES) {
        int64_t i = first + at;
        float w[AMPC_LANES], g[AMPC_LANES], m[AMPC_LANES] = {}, v[AMPC_LANES] = {};
        uint32_t random[AMPC_LANES];
        amp_philox(seed, 0, (uint64_t)i / 4, random);
        amp_philox(seed, 0, (uint64_t)i / 4 + 1, random + 4);
        ampc_load_as(row.grad, row.grad_dtype, i, g, n - at);
        ampc_load_weights(row, i, w, n - at);
        if (row.m != NULL) ampc_load_as(row.m, row.moment_dtype, i, m, n - at);
        if (SECOND) ampc_load_as(row.v, row.moment_dtype, i, v, n - at);
        AMPC_UNROLL
        for (int j = 0; j < AMPC_LANES; j++) w[j] = update(w[j], g[j], &m[j], &v[j]);
        ampc_store_weights(row, i, w, random, n - at);
        if (row.m != NULL) ampc_store_moments(row.m, row.moment_dtype, i, m, random, n - at);
        if (SECOND) ampc_store_moments(row.v, row.moment_dtype, i, v, random, n - at);
    }
}

/* nvcc would make one fused operation of 1 - lr decay, which rounds once where the CPU rounds twice. */
__device__ inline ampi_adamw_step ampc_row_step(const amp_k_adamw *args, const amp_k_tensor *row) {
    ampi_adamw_step s = ampi_adamw_row(args, row);
    s.keep = (float)(1.0 - ampc_mul(ampc_mul(args->found->lr, row->lr_scale), row->weight_decay));
    return s;
}
__device__ inline ampi_sgd_step ampc_row_step(const amp_k_sgd *args, const amp_k_tensor *row) { return ampi_sgd_row(args, row); }

template <class A, class S> __global__ void __launch_bounds__(128) ampc_row_steps_kernel(A args, S *steps) {
    int64_t row = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (row < args.tensors) steps[row] = ampc_row_step(&args, &args.table[row]);
}

__global__ void __launch_bounds__(AMPC_MULTI_THREADS, AMPC_OPTIMIZER_PER_SM)
ampc_adamw_kernel(const amp_k_tensor *table, int64_t tensors, const amp_k_found *found, const ampi_adamw_step *steps) {
    if (found->skip) return;
    ampc_for_chunks(table, tensors, [&](int number, const amp_k_tensor &row, int64_t first, int n) {
        const ampi_adamw_step s = steps[number];
        auto update = [&](float w, float g, float *m, float *v) { return ampc_adamw_one(w, g, m, v, s); };
        if (ampc_is_plain(row)) ampc_update_row<true>(row, first, n, update);
        else ampc_update_stored<true>(row, first, n, s.seed, update);
    });
}

__global__ void __launch_bounds__(AMPC_MULTI_THREADS, AMPC_OPTIMIZER_PER_SM)
ampc_sgd_kernel(const amp_k_tensor *table, int64_t tensors, const amp_k_found *found, const ampi_sgd_step *steps) {
    if (found->skip) return;
    ampc_for_chunks(table, tensors, [&](int number, const amp_k_tensor &row, int64_t first, int n) {
        const ampi_sgd_step s = steps[number];
        bool momentum = row.m != NULL;
        auto update = [&](float w, float g, float *m, float *) { return ampc_sgd_one(w, g, m, s, momentum); };
        if (ampc_is_plain(row)) ampc_update_row<false>(row, first, n, update);
        else ampc_update_stored<false>(row, first, n, s.seed, update);
    });
}

template <class A, class S>
amp_result ampc_optimize(ampc_device *dev, const char *name, const A *a, void *stream,
                         void (*kernel)(const amp_k_tensor *, int64_t, const amp_k_found *, const S *)) {
    ampc_scratch steps(dev, stream);
    if (a->tensors <= 0) return ampc_usable(dev, name);
    AMPC_TRY(steps.get((size_t)a->tensors * sizeof(S), name));
    AMPC_TRY(ampc_launch(dev, name, ampc_row_steps_kernel<A, S>, (unsigned)ampc_blocks(a->tensors, 128), 128, 0, stream, *a,
                         (S *)steps.data));
    return ampc_launch(dev, name, kernel, (unsigned)(dev->multiprocessors * AMPC_OPTIMIZER_PER_SM), AMPC_MULTI_THREADS, 0, stream,
                       a->table, a->tensors, a->found, (const S *)steps.data);
}

amp_result ampc_adamw(void *device, const amp_k_adamw *a, void *stream) {
    return ampc_optimize((ampc_device *)device, "amp_step (AdamW)", a, stream, ampc_adamw_kernel);
}

amp_result ampc_sgd(void *device, const amp_k_sgd *a, void *stream) {
    return ampc_optimize((ampc_device *)device, "amp_step (SGD)", a, stream, ampc_sgd_kernel);
}

/* ---- Rules: amp.h's own arithmetic, on one thread */

__global__ void ampc_rule_kernel(amp_k_rule rule) { ampi_rule_run(&rule); }

amp_result ampc_rule(void *device, const amp_k_rule *a, void *stream) {
    return ampc_launch((ampc_device *)device, "rule", ampc_rule_kernel, 1, 1, 0, stream, *a);
}

amp_result ampc_check_image(ampc_device *dev) {
    cudaFuncAttributes attributes;
    return ampc_check(dev, cudaFuncGetAttributes(&attributes, (const void *)ampc_rule_kernel), "cudaFuncGetAttributes",
                      "compile amp_cuda.cu with -arch for this GPU");
}

/* ==== Column sums ===================================================================================
   A warp adds up every eighth row of 256 columns, eight columns to a lane; then the block's eight warps are added in
   order.  Tall matrices are cut into runs of rows, whose sums a second kernel adds in order.  How many runs there are
   follows from the shape alone.                                                                          */

enum { AMPC_SUM_COLS = 256, AMPC_SUM_ROWS = 256, AMPC_SUM_RUNS = 256 };

/* Adds `sum` to a stored number or replaces it. */
template <class T> __device__ __forceinline__ void ampc_put_sum(T *to, float sum, int add) {
    ampc_put(to, add ? ampc_add(sum, ampc_float(*to)) : sum);
}

/* partial NULL: the only run, straight to out. */
template <class X, class O> __global__ void __launch_bounds__(256)
ampc_column_sum_kernel(const X *x, int64_t rows, int64_t cols, int64_t ld, int64_t tiles, int64_t run, int aligned,
                       float *partial, O *out, int add) {
    AMPC_SHARED(float, room, 8 * AMPC_SUM_COLS);
    int64_t tile = blockIdx.x % tiles, number = blockIdx.x / tiles;
    int64_t begin = number * run, end = begin + run < rows ? begin + run : rows, row;
    unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int64_t column = tile * AMPC_SUM_COLS + lane * AMPC_LANES, mine = tile * AMPC_SUM_COLS + threadIdx.x;
    float sum[AMPC_LANES] = {}, v[AMPC_LANES], total = 0;
    if (aligned && column + AMPC_LANES <= cols) {
        for (row = begin + warp; row < end; row += 8) {
            ampc_load<AMPC_ONCE>(x + row * ld + column, v);
            AMPC_UNROLL
            for (int i = 0; i < AMPC_LANES; i++) sum[i] += v[i];
        }
    } else {
        for (row = begin + warp; row < end; row += 8) {
            ampc_load_upto(x + row * ld + column, v, cols - column, 0.0f);
            AMPC_UNROLL
            for (int i = 0; i < AMPC_LANES; i++) sum[i] += v[i];
        }
    }
    AMPC_UNROLL
    for (int i = 0; i < AMPC_LANES; i++) room[warp * AMPC_SUM_COLS + lane * AMPC_LANES + i] = sum[i];
    __syncthreads();
    if (mine >= cols) return;
    for (int i = 0; i < 8; i++) total += room[i * AMPC_SUM_COLS + threadIdx.x];
    if (partial != NULL) partial[number * cols + mine] = total;
    else ampc_put_sum(out + mine, total, add);
}

/* 32 columns to a block; each warp adds every eighth run, then the warps are added in order. */
template <class O> __global__ void __launch_bounds__(256)
ampc_column_finish_kernel(const float *partial, int64_t runs, int64_t cols, O *out, int add) {
    AMPC_SHARED(float, room, 256);
    int64_t column = (int64_t)blockIdx.x * 32 + threadIdx.x % 32;
    float sum = 0;
    if (column < cols)
        for (int64_t i = threadIdx.x / 32; i < runs; i += 8) sum += partial[i * cols + column];
    room[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x >= 32 || column >= cols) return;
    for (int i = 1; i < 8; i++) sum += room[32 * i + threadIdx.x];
    ampc_put_sum(out + column, sum, add);
}

template <class X, class O> amp_result ampc_column_sum_as(ampc_device *dev, const amp_k_column_sum *a, void *stream) {
    int64_t rows = a->x.rows > 0 ? a->x.rows : 0, cols = a->x.cols, tiles = ampc_blocks(cols, AMPC_SUM_COLS);
    int64_t runs = ampc_blocks(rows, AMPC_SUM_ROWS), run;
    int aligned = ampc_aligned(a->x.data, a->x.ld * (int64_t)sizeof(X));
    ampc_scratch partial(dev, stream);
    if (runs > AMPC_SUM_RUNS) runs = AMPC_SUM_RUNS;
    if (runs < 1) runs = 1;
    run = ampc_blocks(rows, runs);
    if (runs > 1) AMPC_TRY(partial.get((size_t)(runs * cols) * sizeof(float), "column_sum"));
    AMPC_TRY(ampc_launch(dev, "column_sum", ampc_column_sum_kernel<X, O>, (unsigned)(tiles * runs), 256, 0, stream,
                         (const X *)a->x.data, rows, cols, a->x.ld, tiles, run, aligned, (float *)partial.data,
                         (O *)a->out, a->add));
    if (runs == 1) return AMP_OK;
    return ampc_launch(dev, "column_sum", ampc_column_finish_kernel<O>, (unsigned)ampc_blocks(cols, 32), 256, 0, stream,
                       (const float *)partial.data, runs, cols, (O *)a->out, a->add);
}

amp_result ampc_column_sum(void *device, const amp_k_column_sum *a, void *stream) {
    ampc_device *dev = (ampc_device *)device;
    if (a->x.cols <= 0) return ampc_usable(dev, "column_sum");
    return ampc_storage(dev, "column_sum", a->x.dtype, [&](auto x) {
        return ampc_storage(dev, "column_sum", a->out_dtype, [&](auto out) {
            return ampc_column_sum_as<typename decltype(x)::type, typename decltype(out)::type>(dev, a, stream);
        });
    });
}

/* ==== Pieces ========================================================================================
   V neighbouring elements of a row, whose dtype is known at run time: 8 of 16 bits, or 4 of any storage dtype where
   one operand is fp32, so that the lanes of a warp always touch neighbouring bytes; 1 where a pointer, a row distance
   or the length of a row does not fit.  A piece is held as it lies in memory until its turn comes.          */

/* The widest V, at most v, for an array from p on; for rows of `cols` elements, ld apart, each a whole number of pieces. */
int ampc_width(int v, const void *p, amp_dtype dtype, int64_t ld = 0, int64_t cols = 0) {
    int64_t size = ampc_dtype_size(dtype);
    if (p == NULL) return v;
    if (v == 8 && size == 4) v = 4;
    while (v > 1 && ((uintptr_t)p % (uint64_t)(v * size) != 0 || ld % v != 0 || cols % v != 0)) v = v == 8 ? 4 : 1;
    return v;
}
int ampc_width(int v, const amp_mat &m) { return ampc_width(v, m.data, m.dtype, m.rows > 1 ? m.ld : 0, m.cols); }
/* The same for what all rows share, such as a norm's weight: V of 8 takes fp32 too, as two pieces. */
int ampc_width_shared(int v, const void *p, amp_dtype dtype) {
    return v == 8 && dtype == AMP_F32 && ampc_aligned(p) ? v : ampc_width(v, p, dtype);
}

template <int V> __device__ __forceinline__ uint4 ampc_piece_get(const void *p, amp_dtype dtype) {
    if (V < 8 && dtype == AMP_F32) return ampc_get_piece<AMPC_KEEP, V < 8 ? 4 * V : 16>(p);
    return ampc_get_piece<AMPC_KEEP, 2 * V>(p);
}
template <int V> __device__ __forceinline__ void ampc_piece_put(void *p, amp_dtype dtype, const uint4 &raw) {
    if (V < 8 && dtype == AMP_F32) ampc_put_piece<AMPC_KEEP, V < 8 ? 4 * V : 16>(p, raw);
    else ampc_put_piece<AMPC_KEEP, 2 * V>(p, raw);
}

/* Where element `at` of a row of storage lies.  I: int within a chunk, so that a thread keeps 32-bit distances. */
template <class I> __device__ __forceinline__ const void *ampc_within(const void *row, amp_dtype dtype, I at) {
    return (const char *)row + at * (dtype == AMP_F32 ? 4 : 2);
}
template <class I> __device__ __forceinline__ void *ampc_within(void *row, amp_dtype dtype, I at) {
    return (char *)row + at * (dtype == AMP_F32 ? 4 : 2);
}

/* The piece at `at` of a row that ends at `end`, a multiple of V; beyond it 0 (reads) or nothing (writes). */
template <int V, class I> __device__ __forceinline__ uint4 ampc_piece_read(const void *row, amp_dtype dtype, I at, I end) {
    return at < end ? ampc_piece_get<V>(ampc_within(row, dtype, at), dtype) : uint4{0, 0, 0, 0};
}
template <int V, class I> __device__ __forceinline__ void ampc_piece_write(void *row, amp_dtype dtype, I at, I end,
                                                                           const uint4 &raw) {
    if (at < end) ampc_piece_put<V>(ampc_within(row, dtype, at), dtype, raw);
}

/* The V numbers at `at` of what all rows share. */
template <int V> __device__ __forceinline__ void ampc_shared_read(const void *p, amp_dtype dtype, int at, float *x) {
    const void *from = ampc_within(p, dtype, at);
    if constexpr (V == 8) {
        if (dtype == AMP_F32) {
            uint4 low = ampc_piece_get<4>(from, dtype), high = ampc_piece_get<4>(ampc_within(from, dtype, 4), dtype);
            ampc_widen<4>(low, AMP_F32, x);
            ampc_widen<4>(high, AMP_F32, x + 4);
            return;
        }
    }
    ampc_widen<V>(ampc_piece_get<V>(from, dtype), dtype, x);
}

__device__ __forceinline__ void *ampc_row(const amp_mat &m, int64_t row, int64_t col = 0) {
    return ampc_within(m.data, m.dtype, row * m.ld + col);
}

/* x += a piece. */
template <int V> __device__ __forceinline__ void ampc_piece_add(const uint4 &raw, amp_dtype dtype, float *x) {
    float other[V];
    ampc_widen<V>(raw, dtype, other);
    AMPC_UNROLL
    for (int i = 0; i < V; i++) x[i] += other[i];
}

__device__ __forceinline__ void ampc_prefetch(const void *p) {
#if defined(__CUDA_ARCH__)
    asm volatile("prefetch.global.L2 [%0];" :: "l"(p));
#else
    (void)p;
#endif
}

/* Adds a piece of sums to what lies there (add 1), or overwrites it. */
template <int V, class I> __device__ __forceinline__ void ampc_piece_sum(void *row, amp_dtype dtype, I at, I end, float *sum,
                                                                         int add) {
    if (add) ampc_piece_add<V>(ampc_piece_read<V>(row, dtype, at, end), dtype, sum);
    ampc_piece_write<V>(row, dtype, at, end, ampc_narrow<V>(sum, dtype));
}

/* ---- Exponentials.  Hardware: 2^x and 1/x with relative errors below 2^-22 and 2^-23, results below 2^-126 are 0. */

#define AMPC_LOG2_E 1.44269504f

__device__ __forceinline__ float ampc_exp2(float x) {
#if defined(__CUDA_ARCH__)
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return x < -126.0f ? 0.0f : exp2f(x);
#endif
}
__device__ __forceinline__ float ampc_reciprocal(float x) {
#if defined(__CUDA_ARCH__)
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return 1.0f / x;
#endif
}
/* exp(x), relative error 2^-22 + 1.25 |x| 2^-24; of exp(x - max), x <= max, it is small where the result is not. */
__device__ __forceinline__ float ampc_exp(float x) { return ampc_exp2(ampc_mul(x, AMPC_LOG2_E)); }
__device__ __forceinline__ float ampc_exp_below(float x, float max) { return ampc_exp(x - max); }

/* ==== Rows ==========================================================================================
   A group of `lanes` threads, whole warps, works on a row.  Thread i holds E of its elements: the pieces i, i + lanes,
   i + 2 lanes, ...  A row longer than lanes E is worked on in chunks, which later passes read again; passes go to and
   fro, so that the chunk at the turn is still held.                                                        */

/* Threads of a block at most, and their registers: 64 where the row is one chunk, so that a multiprocessor holds 1024
   threads; 128 for other rows.  Those that also sum columns have one block on a multiprocessor, and 168 registers while
   the sums lie there; of AMPC_SHARED_SUMS elements a thread they lie in shared memory, and the block has one group. */
enum { AMPC_ROW_THREADS = 512, AMPC_SUM_THREADS = 384, AMPC_SHARED_SUMS = 32 };
__host__ __device__ constexpr bool ampc_one_chunk(int v, int e) { return v > 1 && e < 32; }
__host__ __device__ constexpr int ampc_threads(int e, bool sums) {
    return sums && e < AMPC_SHARED_SUMS ? AMPC_SUM_THREADS : AMPC_ROW_THREADS;
}
#define AMPC_ROW_BOUNDS(light) __launch_bounds__(AMPC_ROW_THREADS, (light) && ampc_one_chunk(V, E) ? 2 : 1)

template <int V, int E> struct ampc_shape { enum { v = V, e = E }; };
struct ampc_row_plan {
    int v, e, lanes, block;
    unsigned grid;
    int64_t chunks;
};

/* As few warps for a row as 8, 16 or 24 elements a thread allow, and of these as few elements; 32 for rows that would not
   fit otherwise. */
ampc_row_plan ampc_plan_rows(const ampc_device *dev, int v, int64_t rows, int64_t cols, bool sums = false) {
    static const int choices[3][4] = {{8, 8, 8, 8}, {8, 16, 16, 32}, {8, 16, 24, 32}};
    const int *e = choices[v == 8 ? 2 : v == 4];
    ampc_row_plan p;
    int64_t lanes[4];
    int i, best = 0, threads;
    for (i = 0; i < 4; i++) lanes[i] = cols > 0 ? ampc_blocks(cols, 32 * e[i]) * 32 : 32;
    for (i = 1; i < 4; i++)
        if (i < 3 ? lanes[i] < lanes[best] : lanes[best] > ampc_threads(e[best], sums)) best = i;
    threads = ampc_threads(e[best], sums);
    p.v = v;
    p.e = e[best];
    p.lanes = lanes[best] < threads ? (int)lanes[best] : threads;
    p.chunks = ampc_blocks(cols, (int64_t)p.lanes * p.e);
    p.block = p.lanes * (sums ? (p.e < AMPC_SHARED_SUMS ? threads / p.lanes : 1) : p.lanes < 256 ? 256 / p.lanes : 1);
    p.grid = ampc_grid(dev, ampc_blocks(rows, p.block / p.lanes),
                       sums ? 1 : (ampc_one_chunk(v, p.e) ? 2 : 1) * threads / p.block);
    return p;
}

/* Calls run(ampc_shape<V, E>()). */
template <class F> amp_result ampc_pick_shape(const ampc_row_plan &p, F run) {
    switch (p.v * 100 + p.e) {
        case 808: return run(ampc_shape<8, 8>());
        case 816: return run(ampc_shape<8, 16>());
        case 824: return run(ampc_shape<8, 24>());
        case 832: return run(ampc_shape<8, 32>());
        case 408: return run(ampc_shape<4, 8>());
        case 416: return run(ampc_shape<4, 16>());
        case 432: return run(ampc_shape<4, 32>());
        default: return run(ampc_shape<1, 8>());
    }
}

/* Where a thread stands: its row's group, and its pieces in a chunk, whose elements are counted from the chunk's first. */
template <int V, int E> struct ampc_place {
    int lanes, lane, group, groups;
    __device__ explicit ampc_place(int row_lanes) : lanes(row_lanes) {
        lane = (int)threadIdx.x % lanes;
        group = (int)threadIdx.x / lanes;
        groups = (int)blockDim.x / lanes;
    }
    __device__ int at(int piece) const { return (piece * lanes + lane) * V; }
    __device__ int64_t start(int64_t chunk) const { return ampc_one_chunk(V, E) ? 0 : chunk * (lanes * E); }
    __device__ static int64_t chunks(int64_t planned) { return ampc_one_chunk(V, E) ? 1 : planned; }
    /* How many of the chunk's elements lie below end. */
    __device__ int left(int64_t chunk, int64_t end) const {
        int64_t n = end - start(chunk);
        if (ampc_one_chunk(V, E)) return (int)end;
        return n < 0 ? 0 : n < lanes * E ? (int)n : lanes * E;
    }
};

/* Sums or the largest over the threads of a group, in every thread.  room: 64 N floats of shared memory, of which the
   calls take one half and the other in turn, so that none writes what others may still be reading.  All threads of the
   block call it. */
struct ampc_plus {
    static __device__ __forceinline__ float none() { return 0.0f; }
    static __device__ __forceinline__ float of(float a, float b) { return a + b; }
};
struct ampc_max {
    static __device__ __forceinline__ float none() { return ampi_f32_of_bits(0xff800000u); }
    static __device__ __forceinline__ float of(float a, float b) { return fmaxf(a, b); }
};
template <class Op, int N> __device__ __forceinline__ void ampc_over_warp(float (&x)[N]) {
    AMPC_UNROLL
    for (int step = 16; step > 0; step >>= 1) {
        AMPC_UNROLL
        for (int i = 0; i < N; i++) x[i] = Op::of(x[i], __shfl_xor_sync(0xffffffffu, x[i], step));
    }
}
template <class Op, int N, class Place>
__device__ __forceinline__ void ampc_over_group(float (&x)[N], const Place &place, float *room, int &turn) {
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, warps = place.lanes / 32, first = place.group * warps;
    ampc_over_warp<Op>(x);
    if (warps == 1) return;
    room += 32 * N * turn;
    turn ^= 1;
    AMPC_UNROLL
    for (int i = 0; i < N; i++)
        if (lane == 0) room[32 * i + warp] = x[i];
    __syncthreads();
    room += first;
    if (warps == 2) {
        AMPC_UNROLL
        for (int i = 0; i < N; i++) x[i] = Op::of(room[32 * i], room[32 * i + 1]);
        return;
    }
    AMPC_UNROLL
    for (int i = 0; i < N; i++) x[i] = lane < warps ? room[32 * i + lane] : Op::none();
    ampc_over_warp<Op>(x);
}

/* A chunk of a row as it lies in memory. */
template <int V, int E>
__device__ __forceinline__ void ampc_chunk_read(const ampc_place<V, E> &place, const void *from, amp_dtype dtype, int left,
                                                uint4 (&raw)[E / V]) {
    AMPC_UNROLL
    for (int p = 0; p < E / V; p++) raw[p] = ampc_piece_read<V>(from, dtype, place.at(p), left);
}

/* A chunk in fp32.  The dtype is asked for once, since both ways of a short branch would be gone through. */
template <int V, int P> __device__ __forceinline__ void ampc_chunk_widen(const uint4 (&raw)[P], amp_dtype dtype, float *x) {
    if (V < 8 && dtype == AMP_F32) {
        AMPC_UNROLL
        for (int p = 0; p < P; p++) ampc_widen<V>(raw[p], AMP_F32, x + p * V);
    } else if (dtype == AMP_F16) {
        AMPC_UNROLL
        for (int p = 0; p < P; p++) ampc_widen<V>(raw[p], AMP_F16, x + p * V);
    } else {
        AMPC_UNROLL
        for (int p = 0; p < P; p++) ampc_widen<V>(raw[p], AMP_BF16, x + p * V);
    }
}

/* Has a chunk fetched into the L2 cache for a later read: a thread's part is at most the 128 bytes that it asks for. */
template <int V, int E>
__device__ __forceinline__ void ampc_chunk_expect(const ampc_place<V, E> &place, const void *from, amp_dtype dtype, int left) {
    static_assert(E * 4 <= 128, "a thread's part of a chunk");
    if (place.lane * 128 < left * (dtype == AMP_F32 ? 4 : 2)) ampc_prefetch((const char *)from + place.lane * 128);
}

/* ---- LayerNorm and RMSNorm, forward */

/* A chunk of the row to normalise.  The sum with the residual is rounded to storage before it is used, because that is
   what backward reads; the first pass forms and stores it, later passes read it.  A sum that is not stored (FRESH) is
   formed whenever it is used. */
template <int V, int E, bool FRESH> struct ampc_norm_chunk {
    const amp_k_norm &a;
    const ampc_place<V, E> &place;
    const bool stored;
    int64_t row, start;
    int left;
    uint4 raw[E / V];
    __device__ __forceinline__ ampc_norm_chunk(const amp_k_norm &args, const ampc_place<V, E> &where)
        : a(args), place(where), stored(!FRESH && args.residual.data != NULL) {}
    __device__ __forceinline__ void fetch(int64_t of_row, int64_t chunk, int64_t cols, bool first) {
        const amp_mat &from = stored && !first ? a.sum : a.x;
        row = of_row;
        start = place.start(chunk);
        left = place.left(chunk, cols);
        ampc_chunk_read(place, ampc_row(from, row, start), from.dtype, left, raw);
        if (stored && first) store_sum();
    }
    __device__ __forceinline__ void store_sum() {
        uint4 residual[E / V];
        ampc_chunk_read(place, ampc_row(a.residual, row, start), a.residual.dtype, left, residual);
        AMPC_UNROLL
        for (int p = 0; p < E / V; p++) {
            float s[V];
            ampc_widen<V>(raw[p], a.x.dtype, s);
            ampc_piece_add<V>(residual[p], a.residual.dtype, s);
            raw[p] = ampc_narrow<V>(s, a.sum.dtype);
            ampc_piece_write<V>(ampc_row(a.sum, row, start), a.sum.dtype, place.at(p), left, raw[p]);
        }
    }
    /* Piece p in fp32; 0 beyond the row. */
    __device__ __forceinline__ void get(int p, float *s) const {
        ampc_widen<V>(raw[p], stored ? a.sum.dtype : a.x.dtype, s);
        if (!FRESH) return;
        uint4 residual = ampc_piece_read<V>(ampc_row(a.residual, row, start), a.residual.dtype, place.at(p), left);
        ampc_piece_add<V>(residual, a.residual.dtype, s);
    }
    __device__ __forceinline__ float sum(float total) const {
        AMPC_UNROLL
        for (int p = 0; p < E / V; p++) {
            float s[V];
            get(p, s);
            AMPC_UNROLL
            for (int i = 0; i < V; i++) total += s[i];
        }
        return total;
    }
    /* total + the squares of the distances from `centre`. */
    __device__ __forceinline__ float squares(float total, float centre) const {
        AMPC_UNROLL
        for (int p = 0; p < E / V; p++) {
            float s[V];
            if (place.at(p) >= left) continue;
            get(p, s);
            AMPC_UNROLL
            for (int i = 0; i < V; i++) total = ampc_fma(s[i] - centre, s[i] - centre, total);
        }
        return total;
    }
    __device__ __forceinline__ void write(float mean, float rstd) const {
        AMPC_UNROLL
        for (int p = 0; p < E / V; p++) {
            int at = place.at(p);
            float y[V], weight[V], bias[V];
            if (at >= left) continue;
            if (a.weight) ampc_shared_read<V>(ampc_within(a.weight, a.weight_dtype, start), a.weight_dtype, at, weight);
            if (a.bias) ampc_shared_read<V>(ampc_within(a.bias, a.weight_dtype, start), a.weight_dtype, at, bias);
            get(p, y);
            AMPC_UNROLL
            for (int i = 0; i < V; i++) {
                y[i] = ampc_mul(y[i] - mean, rstd);
                if (a.weight && a.bias) y[i] = ampc_fma(y[i], weight[i], bias[i]);
                else if (a.weight) y[i] = ampc_mul(y[i], weight[i]);
                else if (a.bias) y[i] = ampc_add(y[i], bias[i]);
            }
            ampc_piece_write<V>(ampc_row(a.y, row, start), a.y.dtype, at, left, ampc_narrow<V>(y, a.y.dtype));
        }
    }
};

/* share: 1 / cols. */
template <int V, int E, bool FRESH> __global__ void AMPC_ROW_BOUNDS(!FRESH)
ampc_norm_rows(amp_k_norm a, int lanes, int64_t planned, float share) {
    AMPC_SHARED(float, room, 64);
    const ampc_place<V, E> place(lanes);
    const int64_t chunks = place.chunks(planned);
    ampc_norm_chunk<V, E, FRESH> chunk(a, place);
    int turn = 0;
    for (int64_t first = (int64_t)blockIdx.x * place.groups; first < a.x.rows; first += (int64_t)gridDim.x * place.groups) {
        int64_t row = first + place.group, cols = row < a.x.rows ? a.x.cols : 0, c;
        float sum[1] = {0.0f}, squares[1] = {0.0f}, mean = 0.0f, rstd;
        for (c = 0; c < chunks; c++) {
            chunk.fetch(row, c, cols, true);
            if (!a.rms) sum[0] = chunk.sum(sum[0]);
        }
        if (!a.rms) {
            ampc_over_group<ampc_plus>(sum, place, room, turn);
            mean = ampc_mul(sum[0], share);
        }
        for (c = chunks - 1; c >= 0; c--) {
            if (c != chunks - 1) chunk.fetch(row, c, cols, false);
            squares[0] = chunk.squares(squares[0], mean);
        }
        ampc_over_group<ampc_plus>(squares, place, room, turn);
        rstd = rsqrtf(ampc_fma(squares[0], share, a.eps));
        for (c = 0; c < chunks; c++) {
            if (c != 0) chunk.fetch(row, c, cols, false);
            chunk.write(mean, rstd);
        }
        if (place.lane != 0 || cols == 0) continue;
        if (a.mean && !a.rms) a.mean[row] = mean;
        if (a.rstd) a.rstd[row] = rstd;
    }
}

amp_result ampc_norm(void *dev, const amp_k_norm *args, void *stream) {
    ampc_device *d = (ampc_device *)dev;
    amp_k_norm a = *args;
    int v = ampc_width(ampc_width(ampc_width(ampc_width(8, a.x), a.y), a.residual), a.sum);
    if (a.rms) a.bias = NULL;
    v = ampc_width_shared(ampc_width_shared(v, a.weight, a.weight_dtype), a.bias, a.weight_dtype);
    ampc_row_plan plan = ampc_plan_rows(d, v, a.x.rows, a.x.cols);
    return ampc_pick_shape(plan, [&](auto shape) {
        typedef decltype(shape) S;
        return ampc_launch(d, a.rms ? "amp_rmsnorm" : "amp_layernorm", a.residual.data && !a.sum.data ?
                           ampc_norm_rows<S::v, S::e, true> : ampc_norm_rows<S::v, S::e, false>, plan.grid, (unsigned)plan.block,
                           0, stream, a, plan.lanes, plan.chunks, 1.0f / (float)a.x.cols);
    });
}

/* ---- LayerNorm and RMSNorm, backward.  With g = dy weight, h = (x - mean) rstd and means over the row:
   dx = rstd (g - mean(g) - h mean(g h)), without mean(g) in RMSNorm; dweight = sum of dy h, dbias = sum of dy.
   A thread keeps its columns from row to row and sums dweight and dbias for them.  Each block writes one partial sum, and
   a second kernel adds the partial sums up in order.  These sums alone depend on the size of the grid, and so on the GPU. */

template <int V> __device__ __forceinline__ void ampc_norm_pair(const uint4 &x_raw, amp_dtype x_dtype, const uint4 &dy_raw,
                                                                amp_dtype dy_dtype, float mean, float rstd, float *h,
                                                                float *dy) {
    ampc_widen<V>(x_raw, x_dtype, h);
    ampc_widen<V>(dy_raw, dy_dtype, dy);
    AMPC_UNROLL
    for (int i = 0; i < V; i++) h[i] = ampc_mul(h[i] - mean, rstd);
}

/* g = dy weight */
template <int V> __device__ __forceinline__ void ampc_norm_weigh(const amp_k_norm &a, int64_t start, int at, float *g) {
    float weight[V];
    if (!a.weight) return;
    ampc_shared_read<V>(ampc_within(a.weight, a.weight_dtype, start), a.weight_dtype, at, weight);
    AMPC_UNROLL
    for (int i = 0; i < V; i++) g[i] = ampc_mul(g[i], weight[i]);
}

/* dx for a chunk */
template <int V, int E>
__device__ __forceinline__ void ampc_norm_dx(const amp_k_norm &a, const ampc_place<V, E> &place, int64_t row, int64_t start,
                                             int left, float mean, float rstd, const float *means, const uint4 *x,
                                             const uint4 *dy) {
    AMPC_UNROLL
    for (int p = 0; p < E / V; p++) {
        int at = place.at(p);
        float h[V], g[V];
        if (at >= left) continue;
        ampc_norm_pair<V>(x[p], a.x.dtype, dy[p], a.dy.dtype, mean, rstd, h, g);
        ampc_norm_weigh<V>(a, start, at, g);
        AMPC_UNROLL
        for (int i = 0; i < V; i++) g[i] = ampc_mul(ampc_fma(-h[i], means[1], g[i] - means[0]), rstd);
        if (a.dsum.data)
            ampc_piece_add<V>(ampc_piece_read<V>(ampc_row(a.dsum, row, start), a.dsum.dtype, at, left), a.dsum.dtype, g);
        ampc_piece_write<V>(ampc_row(a.dx, row, start), a.dx.dtype, at, left, ampc_narrow<V>(g, a.dx.dtype));
    }
}

/* The sums of a thread's columns, in its registers or in shared memory.  There they lie as [2, E, stride]. */
template <int V, int E> struct ampc_column_sums {
    enum { own = E < (int)AMPC_SHARED_SUMS ? E : 1 };
    float dweight[own], dbias[own], *const shared;
    const ampc_place<V, E> &place;
    const bool wanted;
    static __device__ int stride(int lanes) { return own == E ? lanes : (int)AMPC_ROW_THREADS; }
    __device__ __forceinline__ ampc_column_sums(const ampc_place<V, E> &where, float *memory, bool want)
        : shared(memory + where.lane), place(where), wanted(want) {
        AMPC_UNROLL
        for (int k = 0; k < own; k++) dweight[k] = dbias[k] = 0.0f;
        AMPC_NO_UNROLL
        for (int k = 0; k < (own == E || !wanted ? 0 : 2 * E); k++) shared[k * stride(place.lanes)] = 0.0f;
    }
    __device__ __forceinline__ void add(int k, float dy, float h) {
        if constexpr (own == E) {
            dweight[k % own] = ampc_fma(dy, h, dweight[k % own]);
            dbias[k % own] += dy;
        } else if (wanted) {
            float *w = shared + k * stride(0), *b = w + E * stride(0);
            *w = ampc_fma(dy, h, *w);
            *b += dy;
        }
    }
    /* Adds a thread's registers to what is shared. */
    __device__ __forceinline__ void gather(bool first) {
        AMPC_UNROLL
        for (int k = 0; k < own && own == E; k++) {
            float *w = shared + k * place.lanes, *b = w + E * place.lanes;
            *w = first ? dweight[k] : *w + dweight[k];
            *b = first ? dbias[k] : *b + dbias[k];
        }
    }
    /* The groups of the block do so in order, and the block writes its partial sum, [2, cols].  Shared sums have one group. */
    __device__ void write(float *partial, int64_t cols) {
        for (int g = 0; g < place.groups; g++) {
            if (place.group == g) gather(g == 0);
            __syncthreads();
        }
        AMPC_NO_UNROLL
        for (int k = 0; k < (place.group == 0 ? 2 * E : 0); k++) {
            int j = place.at(k % E / V) + k % V;
            if (j < cols) partial[(k >= E ? cols : 0) + j] = shared[k * stride(place.lanes)];
        }
    }
};

/* Bytes of shared memory for them. */
size_t ampc_column_room(const ampc_row_plan &p) {
    return (size_t)(p.e < AMPC_SHARED_SUMS ? p.lanes : (int)AMPC_ROW_THREADS) * 2 * (size_t)p.e * sizeof(float);
}

/* The sums over a chunk: of g and g h to means, of the columns' gradients to sums. */
template <int V, int E>
__device__ __forceinline__ void ampc_norm_look(const amp_k_norm &a, const ampc_place<V, E> &place, int64_t start, int left,
                                               float mean, float rstd, const uint4 *x, const uint4 *dy,
                                               ampc_column_sums<V, E> &sums, float (&means)[2]) {
    AMPC_UNROLL
    for (int p = 0; p < E / V; p++) {
        float h[V], g[V];
        ampc_norm_pair<V>(x[p], a.x.dtype, dy[p], a.dy.dtype, mean, rstd, h, g);
        AMPC_UNROLL
        for (int i = 0; i < V; i++) sums.add(p * V + i, g[i], h[i]);
        if (place.at(p) >= left) continue;
        ampc_norm_weigh<V>(a, start, place.at(p), g);
        AMPC_UNROLL
        for (int i = 0; i < V; i++) {
            means[0] += g[i];
            means[1] = ampc_fma(g[i], h[i], means[1]);
        }
    }
}

/* partials NULL: dx alone. */
template <int V, int E> __global__ void __launch_bounds__(ampc_threads(E, true), 1)
ampc_norm_gradient_rows(amp_k_norm a, int lanes, int64_t planned, float share, float *partials) {
    AMPC_SHARED(float, room, 128);
    AMPC_DYNAMIC(memory);
    const ampc_place<V, E> place(lanes);
    const int64_t chunks = place.chunks(planned);
    ampc_column_sums<V, E> sums(place, (float *)(void *)memory, partials != NULL);
    int turn = 0;
    for (int64_t first = (int64_t)blockIdx.x * place.groups; first < a.x.rows; first += (int64_t)gridDim.x * place.groups) {
        int64_t row = first + place.group, cols = row < a.x.rows ? a.x.cols : 0, c;
        float mean = a.rms || cols == 0 ? 0.0f : a.mean[row], rstd = cols == 0 ? 0.0f : a.rstd[row], means[2] = {0.0f, 0.0f};
        uint4 x[E / V], dy[E / V];
        auto fetch = [&](int64_t start, int left) {
            if (a.dsum.data) ampc_chunk_expect(place, ampc_row(a.dsum, row, start), a.dsum.dtype, left);
            ampc_chunk_read(place, ampc_row(a.x, row, start), a.x.dtype, left, x);
            ampc_chunk_read(place, ampc_row(a.dy, row, start), a.dy.dtype, left, dy);
        };
        for (c = 0; c < chunks; c++) {
            fetch(place.start(c), place.left(c, cols));
            ampc_norm_look(a, place, place.start(c), place.left(c, cols), mean, rstd, x, dy, sums, means);
        }
        ampc_over_group<ampc_plus>(means, place, room, turn);
        means[0] = a.rms ? 0.0f : ampc_mul(means[0], share);
        means[1] = ampc_mul(means[1], share);
        for (c = chunks - 1; c >= 0; c--) {
            if (c != chunks - 1) fetch(place.start(c), place.left(c, cols));
            ampc_norm_dx(a, place, row, place.start(c), place.left(c, cols), mean, rstd, means, x, dy);
        }
    }
    if (partials) sums.write(partials + 2 * a.x.cols * blockIdx.x, a.x.cols);
}

/* Partial sums of dweight and dbias where a row or its sums do not fit into a block: block i of `blocks` adds up the rows
   i, i + blocks, ... for a strip of columns. */
template <int V> __global__ void __launch_bounds__(128) ampc_norm_gradient_columns(amp_k_norm a, int64_t blocks, float *partials) {
    int64_t block = blockIdx.x % blocks, cols = a.x.cols, at = (blockIdx.x / blocks * blockDim.x + threadIdx.x) * V;
    float dweight[V], dbias[V];
    if (at >= cols) return;
    AMPC_UNROLL
    for (int i = 0; i < V; i++) dweight[i] = dbias[i] = 0.0f;
    for (int64_t row = block; row < a.x.rows; row += blocks) {
        float h[V], dy[V];
        ampc_norm_pair<V>(ampc_piece_read<V>(ampc_row(a.x, row), a.x.dtype, at, cols), a.x.dtype,
                          ampc_piece_read<V>(ampc_row(a.dy, row), a.dy.dtype, at, cols), a.dy.dtype,
                          a.rms ? 0.0f : a.mean[row], a.rstd[row], h, dy);
        AMPC_UNROLL
        for (int i = 0; i < V; i++) {
            dweight[i] = ampc_fma(dy[i], h[i], dweight[i]);
            dbias[i] += dy[i];
        }
    }
    AMPC_UNROLL
    for (int i = 0; i < V; i++) {
        if (at + i >= cols) continue;
        partials[2 * cols * block + at + i] = dweight[i];
        partials[2 * cols * block + cols + at + i] = dbias[i];
    }
}

/* gradient = (old +) the sum of the partial sums: 32 columns per block, 32 threads for each. */
__global__ void __launch_bounds__(1024) ampc_norm_reduce(amp_k_gradient dweight, amp_k_gradient dbias, const float *partials,
                                                         int64_t blocks, int64_t cols) {
    AMPC_SHARED(float, room, 32 * 33);
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, which = (int)(blockIdx.x % 2);
    int64_t col = blockIdx.x / 2 * (int64_t)32 + lane;
    amp_k_gradient to = which ? dbias : dweight;
    float sum[1] = {0.0f};
    if (to.data == NULL) return;
    if (col < cols) {
        for (int64_t b = warp; b < blocks; b += 32) sum[0] += partials[(2 * b + which) * cols + col];
    }
    room[warp * 33 + lane] = sum[0];
    __syncthreads();
    if (warp != 0 || col >= cols) return;
    for (int i = 1; i < 32; i++) sum[0] += room[i * 33 + lane];
    ampc_piece_sum<1>(to.data, to.dtype, col, cols, sum, to.add);
}

amp_result ampc_norm_backward(void *dev, const amp_k_norm *args, void *stream) {
    ampc_device *d = (ampc_device *)dev;
    amp_k_norm a = *args;
    const char *name = a.rms ? "amp_rmsnorm_backward" : "amp_layernorm_backward";
    ampc_scratch scratch(d, stream);
    int v = ampc_width(ampc_width(ampc_width(ampc_width(8, a.x), a.dy), a.dsum), a.dx);
    if (a.rms) a.dbias.data = NULL;
    v = ampc_width_shared(v, a.weight, a.weight_dtype);
    ampc_row_plan plan = ampc_plan_rows(d, v, a.x.rows, a.x.cols, true);
    size_t shared = ampc_column_room(plan);
    bool sums = a.dweight.data || a.dbias.data, wide = plan.chunks > 1 || shared + 1024 > d->shared_limit;
    unsigned blocks = plan.grid;
    if (sums) AMPC_TRY(scratch.get((size_t)blocks * 2 * (size_t)a.x.cols * sizeof(float), name));
    float *partials = (float *)scratch.data;
    AMPC_TRY(ampc_pick_shape(plan, [&](auto shape) {
        typedef decltype(shape) S;
        return ampc_launch(d, name, ampc_norm_gradient_rows<S::v, S::e>, plan.grid, (unsigned)plan.block,
                           sums && !wide ? shared : 0, stream, a, plan.lanes, plan.chunks, 1.0f / (float)a.x.cols,
                           wide ? NULL : partials);
    }));
    if (!sums) return AMP_OK;
    if (wide)
        AMPC_TRY(ampc_launch(d, name, v == 8 ? ampc_norm_gradient_columns<8> : v == 4 ? ampc_norm_gradient_columns<4>
                             : ampc_norm_gradient_columns<1>, blocks * (unsigned)ampc_blocks(a.x.cols, (int64_t)128 * v), 128,
                             0, stream, a, (int64_t)blocks, partials));
    return ampc_launch(d, name, ampc_norm_reduce, (unsigned)(2 * ampc_blocks(a.x.cols, 32)), 1024, 0, stream, a.dweight,
                       a.dbias, partials, (int64_t)blocks, a.x.cols);
}

/* ---- Masks: what a query sees */

/* Which keys by kind and length: key j if j < first or low <= j < high. */
struct ampc_span { int64_t first, low, high; };

__device__ __forceinline__ int64_t ampc_clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

/* The query stands at `position` among the keys. */
__device__ inline ampc_span ampc_mask_span(const amp_mask &mask, int64_t b, int64_t position, int64_t keys) {
    int64_t length = mask.lengths ? ampc_clamp(mask.lengths[b], 0, keys) : keys, end = position + 1;
    int64_t window = mask.window < INT64_MAX / 4 ? mask.window : INT64_MAX / 4;
    ampc_span s = {keys, 0, 0};
    if (mask.kind == AMP_MASK_CAUSAL) s.first = end;
    else if (mask.kind == AMP_MASK_PREFIX) s.first = end > mask.prefix[b] ? end : mask.prefix[b];
    else if (mask.kind == AMP_MASK_WINDOW || mask.kind == AMP_MASK_WINDOW_GLOBAL) {
        s.low = position - window + 1;
        s.high = mask.bidirectional ? position + window : end;
        if (mask.bidirectional) end = keys;
        s.first = mask.kind == AMP_MASK_WINDOW ? 0 : mask.global < end ? mask.global : end;
        if (mask.kind == AMP_MASK_WINDOW_GLOBAL && position >= 0 && position < mask.global) s.first = end;
    }
    if (mask.documents && position < 0) s.first = s.high = 0;       /* a query of no document */
    s.first = ampc_clamp(s.first, 0, length);
    s.low = ampc_clamp(s.low, 0, length);
    s.high = ampc_clamp(s.high, 0, length);
    return s;
}

struct ampc_sight {
    ampc_span span;
    int64_t end;                    /* no key from here on is seen */
    const int32_t *documents;       /* of the keys; NULL: one document */
    int32_t document;               /* of the query */
    const uint8_t *allowed;         /* of the query; NULL: all */
};

__device__ inline ampc_sight ampc_sight_of(const amp_mask &mask, int64_t b, int64_t h, int64_t query, int64_t queries,
                                           int64_t keys) {
    int64_t position = query + keys - queries;
    ampc_sight s;
    s.span = ampc_mask_span(mask, b, position, keys);
    s.end = s.span.first > s.span.high ? s.span.first : s.span.high;
    s.documents = mask.documents ? mask.documents + b * keys : NULL;
    s.document = s.documents && position >= 0 ? s.documents[position] : 0;
    s.allowed = mask.kind == AMP_MASK_ARBITRARY ? mask.allowed + b * mask.allowed_batch_stride +
                                                  h * mask.allowed_head_stride + query * keys : NULL;
    return s;
}

/* Whether key `at` is within a span, all counted from the same key; whether documents and tensor let the query see a key. */
__device__ __forceinline__ bool ampc_in_span(int at, int first, int low, int high) { return at < first || (at >= low && at < high); }
__device__ __forceinline__ bool ampc_lets_see(const ampc_sight &sight, int64_t key) {
    bool see = true;
    if (sight.documents) see = sight.documents[key] == sight.document;
    if (sight.allowed) see &= sight.allowed[key] != 0;
    return see;
}

/* ---- Softmax over masked rows */

/* What the query of a row sees; most masks need little of it. */
__device__ __forceinline__ ampc_sight ampc_row_sight(const amp_k_softmax &a, int64_t row) {
    const amp_mask &m = a.mask;
    if (m.kind == AMP_MASK_NONE && !m.lengths && !m.documents) return ampc_sight{{a.keys, 0, 0}, a.keys, NULL, 0, NULL};
    int64_t head = row / a.queries, query = row - head * a.queries;
    if (m.kind == AMP_MASK_CAUSAL && !m.lengths && !m.documents) {
        int64_t end = query + a.keys - a.queries + 1;
        end = end < 0 ? 0 : end;
        return ampc_sight{{end, 0, 0}, end, NULL, 0, NULL};
    }
    int64_t b = head / a.heads;
    return ampc_sight_of(m, b, head - b * a.heads, query, a.queries, a.keys);
}

/* -inf for the hidden ones among the scores of a piece; first, low, high and end count from the chunk's first element. */
template <int V>
__device__ __forceinline__ void ampc_hide(const ampc_sight &sight, int64_t start, int at, int first, int low, int high, float *s) {
    const float hidden = ampi_f32_of_bits(0xff800000u);
    int end = first > high ? first : high;
    if (at + V <= first && !sight.documents && !sight.allowed) return;
    AMPC_UNROLL
    for (int i = 0; i < V; i++)
        if (!ampc_in_span(at + i, first, low, high)) s[i] = hidden;
    if (!sight.documents && !sight.allowed) return;
    AMPC_UNROLL
    for (int i = 0; i < V; i++)
        if (at + i < end && !ampc_lets_see(sight, start + at + i)) s[i] = hidden;
}

template <int V, int E>
__device__ __forceinline__ void ampc_scores_fetch(const amp_k_softmax &a, const ampc_place<V, E> &place, const ampc_sight &sight,
                                                  int64_t row, int64_t chunk, float *s) {
    int first = place.left(chunk, sight.span.first), low = place.left(chunk, sight.span.low);
    int high = place.left(chunk, sight.span.high);
    int64_t start = place.start(chunk);
    uint4 x[E / V];
    ampc_chunk_read(place, ampc_within(a.x, a.x_dtype, row * a.keys + start), a.x_dtype, place.left(chunk, sight.end), x);
    ampc_chunk_widen<V>(x, a.x_dtype, s);
    AMPC_UNROLL
    for (int k = 0; k < E; k++) s[k] = ampc_mul(s[k], a.scale);
    AMPC_UNROLL
    for (int p = 0; p < E / V; p++) ampc_hide<V>(sight, start, place.at(p), first, low, high, s + p * V);
}

/* Writes a chunk of a softmax row, cols elements of it: zeros from `end` on. */
template <int V, int E>
__device__ __forceinline__ void ampc_softmax_write(const ampc_place<V, E> &place, void *to, amp_dtype dtype, int cols, int end,
                                                   float inverse, const float *e) {
    AMPC_UNROLL
    for (int p = 0; p < E / V; p++) {
        int at = place.at(p);
        float y[V];
        if (at >= cols) continue;
        AMPC_UNROLL
        for (int i = 0; i < V; i++) y[i] = e[p * V + i] * inverse;
        if (at + V > end) {
            AMPC_UNROLL
            for (int i = 0; i < V; i++) y[i] = at + i < end ? y[i] : 0.0f;
        }
        ampc_piece_put<V>(ampc_within(to, dtype, at), dtype, ampc_narrow<V>(y, dtype));
    }
}

/* A row without a seen key has only -inf, and gives zeros; NaN and +inf make a row NaN. */
template <int V, int E> __global__ void AMPC_ROW_BOUNDS(true)
ampc_softmax_rows(amp_k_softmax a, int64_t rows, int lanes, int64_t planned) {
    AMPC_SHARED(float, room, 64);
    const ampc_place<V, E> place(lanes);
    const int64_t chunks = place.chunks(planned);
    int turn = 0;
    for (int64_t first = (int64_t)blockIdx.x * place.groups; first < rows; first += (int64_t)gridDim.x * place.groups) {
        bool live = first + place.group < rows;
        int64_t row = live ? first + place.group : rows - 1, c;
        const ampc_sight sight = ampc_row_sight(a, row);
        float s[E], max[1] = {ampi_f32_of_bits(0xff800000u)}, sum[1] = {0.0f}, shift;
        for (c = 0; c < chunks; c++) {
            ampc_scores_fetch(a, place, sight, row, c, s);
            AMPC_UNROLL
            for (int k = 0; k < E; k++) max[0] = fmaxf(max[0], s[k]);
        }
        ampc_over_group<ampc_max>(max, place, room, turn);
        shift = ampi_bits_f32(max[0]) == 0xff800000u ? 0.0f : max[0];
        for (c = chunks - 1; c >= 0; c--) {
            if (c != chunks - 1) ampc_scores_fetch(a, place, sight, row, c, s);
            AMPC_UNROLL
            for (int k = 0; k < E; k++) sum[0] += s[k] = ampc_exp_below(s[k], shift);
        }
        ampc_over_group<ampc_plus>(sum, place, room, turn);
        sum[0] = sum[0] == 0.0f ? 0.0f : 1.0f / sum[0];
        for (c = 0; c < chunks; c++) {
            if (c != 0) {
                ampc_scores_fetch(a, place, sight, row, c, s);
                AMPC_UNROLL
                for (int k = 0; k < E; k++) s[k] = ampc_exp_below(s[k], shift);
            }
            ampc_softmax_write(place, ampc_within(a.y, a.y_dtype, row * a.keys + place.start(c)), a.y_dtype,
                               live ? place.left(c, a.keys) : 0, place.left(c, sight.end), sum[0], s);
        }
    }
}

template <int V> __device__ __forceinline__ void ampc_softmax_slopes(const uint4 &y, const uint4 &dy, const amp_k_softmax &a,
                                                                     float sum, float *slope) {
    float value[V];
    ampc_widen<V>(y, a.y_dtype, value);
    ampc_widen<V>(dy, a.y_dtype, slope);
    AMPC_UNROLL
    for (int i = 0; i < V; i++)
        slope[i] = value[i] == 0.0f ? 0.0f : ampc_mul(ampc_mul(value[i], slope[i] - sum), a.scale);
}

/* dx = scale y (dy - sum(y dy)); a probability of 0 contributes 0 whatever its gradient is, and what the mask hides is
   not read. */
template <int V, int E> __global__ void AMPC_ROW_BOUNDS(true)
ampc_softmax_gradient_rows(amp_k_softmax a, int64_t rows, int lanes, int64_t planned) {
    AMPC_SHARED(float, room, 64);
    const ampc_place<V, E> place(lanes);
    const int64_t chunks = place.chunks(planned);
    int turn = 0;
    for (int64_t first = (int64_t)blockIdx.x * place.groups; first < rows; first += (int64_t)gridDim.x * place.groups) {
        int64_t row = first + place.group, cols = row < rows ? a.keys : 0, end = cols ? ampc_row_sight(a, row).end : 0, c;
        float sum[1] = {0.0f}, value[V], slope[V];
        uint4 y[E / V], dy[E / V];
        auto fetch = [&](int64_t chunk) {
            int64_t start = row * a.keys + place.start(chunk);
            ampc_chunk_read(place, ampc_within((const void *)a.y, a.y_dtype, start), a.y_dtype, place.left(chunk, end), y);
            ampc_chunk_read(place, ampc_within(a.dy, a.y_dtype, start), a.y_dtype, place.left(chunk, end), dy);
        };
        for (c = 0; c < chunks; c++) {
            fetch(c);
            AMPC_UNROLL
            for (int p = 0; p < E / V; p++) {
                ampc_widen<V>(y[p], a.y_dtype, value);
                ampc_widen<V>(dy[p], a.y_dtype, slope);
                AMPC_UNROLL
                for (int i = 0; i < V; i++) sum[0] = ampc_fma(value[i], value[i] == 0.0f ? 0.0f : slope[i], sum[0]);
            }
        }
        ampc_over_group<ampc_plus>(sum, place, room, turn);
        for (c = chunks - 1; c >= 0; c--) {
            if (c != chunks - 1) fetch(c);
            int left = place.left(c, cols), seen = place.left(c, end);
            void *to = ampc_within(a.dx, a.x_dtype, row * a.keys + place.start(c));
            AMPC_UNROLL
            for (int p = 0; p < E / V; p++) {
                if (place.at(p) >= left) continue;
                AMPC_UNROLL
                for (int i = 0; i < V; i++) slope[i] = 0.0f;
                if (place.at(p) < seen) ampc_softmax_slopes<V>(y[p], dy[p], a, sum[0], slope);
                ampc_piece_put<V>(ampc_within(to, a.x_dtype, place.at(p)), a.x_dtype, ampc_narrow<V>(slope, a.x_dtype));
            }
        }
    }
}

/* The rows of a softmax, none where there are no keys. */
int64_t ampc_softmax_count(const amp_k_softmax *a) { return a->keys > 0 ? a->batch * a->heads * a->queries : 0; }

amp_result ampc_softmax(void *dev, const amp_k_softmax *args, void *stream) {
    ampc_device *d = (ampc_device *)dev;
    int64_t rows = ampc_softmax_count(args);
    int v = ampc_width(ampc_width(8, args->x, args->x_dtype, 0, args->keys), args->y, args->y_dtype);
    ampc_row_plan plan = ampc_plan_rows(d, v, rows, args->keys);
    return ampc_pick_shape(plan, [&](auto shape) {
        typedef decltype(shape) S;
        return ampc_launch(d, "amp_softmax", ampc_softmax_rows<S::v, S::e>, plan.grid, (unsigned)plan.block, 0, stream,
                           *args, rows, plan.lanes, plan.chunks);
    });
}

amp_result ampc_softmax_backward(void *dev, const amp_k_softmax *args, void *stream) {
    ampc_device *d = (ampc_device *)dev;
    int64_t rows = ampc_softmax_count(args);
    int v = ampc_width(ampc_width(8, args->y, args->y_dtype, 0, args->keys), args->dy, args->y_dtype);
    ampc_row_plan plan = ampc_plan_rows(d, ampc_width(v, args->dx, args->x_dtype), rows, args->keys);
    return ampc_pick_shape(plan, [&](auto shape) {
        typedef decltype(shape) S;
        return ampc_launch(d, "amp_softmax_backward", ampc_softmax_gradient_rows<S::v, S::e>, plan.grid,
                           (unsigned)plan.block, 0, stream, *args, rows, plan.lanes, plan.chunks);
    });
}

/* ==== Pointwise operators ===========================================================================
   One kernel: out[0 to O) = op(in[0 to I)), element by element, over rows or, where no operand has gaps, one long row.
   op has a template run<V>(in, out, index), index being that of the piece's first element, and says how many pieces
   of each input a thread reads ahead.                                                                       */

template <int I, int O> struct ampc_map {
    enum { inputs = I, outputs = O, per_sm = I > 3 ? 3 : 4 };       /* blocks per multiprocessor: many operands need registers */
    amp_mat in[I], out[O];
    int64_t cols, pieces, total;    /* elements and pieces of a row, pieces in all */
};

/* ld 0: rows that are all the same. */
amp_mat ampc_matrix(const void *data, amp_dtype dtype, int64_t rows, int64_t cols, int64_t ld) {
    amp_mat m = {const_cast<void *>(data), dtype, 0, rows, cols, ld};
    return m;
}
amp_mat ampc_flat(const void *data, amp_dtype dtype, int64_t n) { return ampc_matrix(data, dtype, 1, n, n); }

/* i / d and i % d, without a 64-bit division where the numbers are small. */
__device__ __forceinline__ int64_t ampc_divide(int64_t i, int64_t d, int64_t *rest) {
    int64_t q = i == 0 || d == 1 ? i : i < d ? 0 : ((i | d) >> 32) == 0 ? (int64_t)((uint32_t)i / (uint32_t)d) : i / d;
    *rest = i - q * d;
    return q;
}

/* Reads, computes and writes one piece of each operand. */
template <int V, class Map>
__device__ __forceinline__ void ampc_map_read(const Map &m, int64_t row, int64_t at, uint4 *raw) {
    AMPC_UNROLL
    for (int k = 0; k < Map::inputs; k++)
        if (m.in[k].data) raw[k] = ampc_piece_get<V>(ampc_row(m.in[k], row, at), m.in[k].dtype);
}
template <int V, class Op, class Map>
__device__ __forceinline__ void ampc_map_write(const Map &m, const Op &op, int64_t row, int64_t at, const uint4 *raw) {
    float in[Map::inputs][V] = {}, out[Map::outputs][V];
    AMPC_UNROLL
    for (int k = 0; k < Map::inputs; k++)
        if (m.in[k].data) ampc_widen<V>(raw[k], m.in[k].dtype, in[k]);
    op.template run<V>(in, out, row * m.cols + at);
    AMPC_UNROLL
    for (int k = 0; k < Map::outputs; k++)
        ampc_piece_put<V>(ampc_row(m.out[k], row, at), m.out[k].dtype, ampc_narrow<V>(out[k], m.out[k].dtype));
}

/* A row's last elements, if fewer than V, are done one by one. */
template <int V, class Op, class Map> __global__ void __launch_bounds__(256, Map::per_sm) ampc_map_kernel(Map m, Op op) {
    enum { U = Op::ahead };
    int64_t step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < m.total; i += U * step) {
        int64_t row[U], at[U];
        uint4 raw[U][Map::inputs];
        AMPC_UNROLL
        for (int u = 0; u < U; u++) {
            row[u] = m.total == m.pieces ? 0 : ampc_divide(i + u * step, m.pieces, &at[u]);
            at[u] = V * (m.total == m.pieces ? i + u * step : at[u]);
            if (i + u * step < m.total && at[u] + V <= m.cols) ampc_map_read<V>(m, row[u], at[u], raw[u]);
        }
        AMPC_UNROLL
        for (int u = 0; u < U; u++) {
            if (i + u * step >= m.total) continue;
            if (at[u] + V <= m.cols) ampc_map_write<V>(m, op, row[u], at[u], raw[u]);
            else
                for (; at[u] < m.cols; at[u]++) {
                    ampc_map_read<1>(m, row[u], at[u], raw[u]);
                    ampc_map_write<1>(m, op, row[u], at[u], raw[u]);
                }
        }
    }
}

/* Runs op over the shape of the first output. */
template <class Op, class Map> amp_result ampc_map_run(void *dev, const char *name, Map m, Op op, void *stream) {
    ampc_device *d = (ampc_device *)dev;
    int64_t rows = m.out[0].rows, cols = m.out[0].cols;
    bool dense = true;
    int v = 8, k;
    auto look = [&](const amp_mat &a) {
        if (a.data == NULL) return;
        dense = dense && (a.ld == cols || rows <= 1);
        v = ampc_width(v, a.data, a.dtype, rows > 1 ? a.ld : 0);
    };
    for (k = 0; k < Map::inputs; k++) look(m.in[k]);
    for (k = 0; k < Map::outputs; k++) look(m.out[k]);
    m.cols = dense ? rows * cols : cols;
    m.pieces = ampc_blocks(m.cols, v);
    m.total = dense ? m.pieces : rows * m.pieces;
    return ampc_launch(d, name, v == 8 ? ampc_map_kernel<8, Op, Map> : v == 4 ? ampc_map_kernel<4, Op, Map> :
                       ampc_map_kernel<1, Op, Map>, ampc_grid(d, ampc_blocks(m.total, 256), Map::per_sm), 256, 0, stream, m, op);
}

/* ---- Activations */

/* 1 / (1 + exp(-x)); below -88 the exponential is infinite and the result 0. */
__device__ __forceinline__ float ampc_sigmoid(float x) { return ampc_reciprocal(1.0f + ampc_exp(-x)); }

/* The tanh form of GELU is x sigmoid(2 u), because (1 + tanh u) / 2 = sigmoid(2 u), with
   2 u = x (A + B x^2), A = 2 sqrt(2 / pi), B = 0.044715 A. */
#define AMPC_GELU_A 1.5957691216057308f
#define AMPC_GELU_B 0.07135481282740843f

__device__ __forceinline__ float ampc_gelu(float x) {
    return ampc_mul(x, ampc_sigmoid(ampc_mul(x, ampc_fma(AMPC_GELU_B, ampc_mul(x, x), AMPC_GELU_A))));
}
/* s + x s (1 - s) (A + 3 B x^2).  x^2 is cut at 10^4, where s is long 0 or 1. */
__device__ __forceinline__ float ampc_gelu_slope(float x) {
    float square = fminf(ampc_mul(x, x), 1.0e4f), s = ampc_sigmoid(ampc_mul(x, ampc_fma(AMPC_GELU_B, square, AMPC_GELU_A)));
    float inner = ampc_fma(3.0f * AMPC_GELU_B, square, AMPC_GELU_A);
    return ampc_fma(ampc_mul(x, inner), ampc_mul(s, 1.0f - s), s);
}
/* The normal distribution function, (1 + erf(x / sqrt 2)) / 2. */
__device__ __forceinline__ float ampc_normal(float x) { return ampc_fma(0.5f, erff(ampc_mul(x, 0.7071067811865476f)), 0.5f); }
/* normal(x) + x exp(-x^2 / 2) / sqrt(2 pi) */
__device__ __forceinline__ float ampc_gelu_erf_slope(float x) {
    float density = ampc_mul(ampc_exp(ampc_mul(ampc_mul(x, x), -0.5f)), 0.3989422804014327f);
    return ampc_fma(x, density, ampc_normal(x));
}
/* s (1 + x (1 - s)), s = sigmoid(x) */
__device__ __forceinline__ float ampc_silu_slope(float x, float s) { return ampc_mul(s, ampc_fma(x, 1.0f - s, 1.0f)); }
__device__ __forceinline__ float ampc_tanh_slope(float y) { return ampc_fma(-y, y, 1.0f); }
/* x if `by` is above 0 or NaN, else 0 */
__device__ __forceinline__ float ampc_gate(float x, float by) { return by <= 0.0f ? 0.0f : x; }

/* y[i] = f(x[i]), for a function that is chosen once for V elements. */
#define AMPC_EACH(expression) do { AMPC_UNROLL for (int i = 0; i < V; i++) y[i] = (expression); } while (0)

struct ampc_act {
    enum { ahead = 4 };
    amp_activation_kind kind;
    template <int V> __device__ __forceinline__ void run(const float (*in)[V], float (*out)[V], int64_t) const {
        const float *x = in[0];
        float *y = out[0];
        switch (kind) {
            case AMP_ACT_GELU: AMPC_EACH(ampc_gelu(x[i])); break;
            case AMP_ACT_GELU_ERF: AMPC_EACH(ampc_mul(x[i], ampc_normal(x[i]))); break;
            case AMP_ACT_TANH: AMPC_EACH(tanhf(x[i])); break;
            case AMP_ACT_SILU: AMPC_EACH(ampc_mul(x[i], ampc_sigmoid(x[i]))); break;
            case AMP_ACT_RELU: AMPC_EACH(ampc_gate(x[i], x[i])); break;
            default: AMPC_EACH(x[i]);
        }
    }
};

/* in: x (y of tanh, with from_y) and dy */
struct ampc_act_back {
    enum { ahead = 2 };
    amp_activation_kind kind;
    int from_y;
    template <int V> __device__ __forceinline__ void run(const float (*in)[V], float (*out)[V], int64_t) const {
        const float *x = in[0], *dy = in[1];
        float *y = out[0];
        switch (kind) {
            case AMP_ACT_GELU: AMPC_EACH(ampc_mul(dy[i], ampc_gelu_slope(x[i]))); break;
            case AMP_ACT_GELU_ERF: AMPC_EACH(ampc_mul(dy[i], ampc_gelu_erf_slope(x[i]))); break;
            case AMP_ACT_TANH: AMPC_EACH(ampc_mul(dy[i], ampc_tanh_slope(from_y ? x[i] : tanhf(x[i])))); break;
            case AMP_ACT_SILU: AMPC_EACH(ampc_mul(dy[i], ampc_silu_slope(x[i], ampc_sigmoid(x[i])))); break;
            case AMP_ACT_RELU: AMPC_EACH(ampc_gate(dy[i], x[i])); break;
            default: AMPC_EACH(dy[i]);
        }
    }
};

/* op over N inputs, to the first B of which the B inputs after them are added: biases. */
template <class Op, int N, int B> struct ampc_biased {
    enum { ahead = (Op::ahead + 1) / 2 };
    Op op;
    template <int V> __device__ __forceinline__ void run(const float (*in)[V], float (*out)[V], int64_t index) const {
        float sum[N][V];
        AMPC_UNROLL
        for (int k = 0; k < N; k++) {
            AMPC_UNROLL
            for (int i = 0; i < V; i++) sum[k][i] = k < B ? ampc_add(in[k][i], in[N + (k < B ? k : 0)][i]) : in[k][i];
        }
        op.template run<V>(sum, out, index);
    }
};

amp_result ampc_activation(void *dev, const amp_k_activation *args, void *stream) {
    ampc_act op = {args->act};
    if (args->bias != NULL) {
        int64_t rows = args->cols > 0 ? args->n / args->cols : 0;
        ampc_map<2, 1> m;
        m.in[0] = ampc_matrix(args->x, args->x_dtype, rows, args->cols, args->cols);
        m.in[1] = ampc_matrix(args->bias, args->bias_dtype, rows, args->cols, 0);
        m.out[0] = ampc_matrix(args->y, args->y_dtype, rows, args->cols, args->cols);
        return ampc_map_run(dev, "amp_activation", m, ampc_biased<ampc_act, 1, 1>{op}, stream);
    }
    ampc_map<1, 1> m;
    m.in[0] = ampc_flat(args->x, args->x_dtype, args->n);
    m.out[0] = ampc_flat(args->y, args->y_dtype, args->n);
    return ampc_map_run(dev, "amp_activation", m, op, stream);
}

/* The slope of tanh is taken from y where it is given: x may have been overwritten. */
amp_result ampc_activation_backward(void *dev, const amp_k_activation *args, void *stream) {
    int from_y = args->act == AMP_ACT_TANH && args->y != NULL;
    if (args->bias != NULL && !from_y) {
        int64_t rows = args->cols > 0 ? args->n / args->cols : 0;
        ampc_map<3, 1> m;
        m.in[0] = ampc_matrix(args->x, args->x_dtype, rows, args->cols, args->cols);
        m.in[1] = ampc_matrix(args->dy, args->y_dtype, rows, args->cols, args->cols);
        m.in[2] = ampc_matrix(args->bias, args->bias_dtype, rows, args->cols, 0);
        m.out[0] = ampc_matrix(args->dx, args->x_dtype, rows, args->cols, args->cols);
        return ampc_map_run(dev, "amp_activation_backward", m, ampc_biased<ampc_act_back, 2, 1>{{args->act, 0}}, stream);
    }
    ampc_map<2, 1> m;
    m.in[0] = from_y ? ampc_flat(args->y, args->y_dtype, args->n) : ampc_flat(args->x, args->x_dtype, args->n);
    m.in[1] = ampc_flat(args->dy, args->y_dtype, args->n);
    m.out[0] = ampc_flat(args->dx, args->x_dtype, args->n);
    return ampc_map_run(dev, "amp_activation_backward", m, ampc_act_back{args->act, from_y}, stream);
}

/* ---- SwiGLU */

struct ampc_glu {
    enum { ahead = 2 };
    template <int V> __device__ __forceinline__ void run(const float (*in)[V], float (*out)[V], int64_t) const {
        const float *gate = in[0], *up = in[1];
        float *y = out[0];
        AMPC_EACH(ampc_mul(ampc_mul(gate[i], ampc_sigmoid(gate[i])), up[i]));
    }
};

struct ampc_glu_back {
    enum { ahead = 1 };
    template <int V> __device__ __forceinline__ void run(const float (*in)[V], float (*out)[V], int64_t) const {
        AMPC_UNROLL
        for (int i = 0; i < V; i++) {
            float gate = in[0][i], up = in[1][i], dy = in[2][i], s = ampc_sigmoid(gate);
            out[0][i] = ampc_mul(ampc_mul(dy, up), ampc_silu_slope(gate, s));
            out[1][i] = ampc_mul(ampc_mul(dy, gate), s);
        }
    }
};

amp_result ampc_swiglu(void *dev, const amp_k_swiglu *args, void *stream) {
    int64_t rows = args->gate.rows, cols = args->gate.cols;
    if (args->gate_bias != NULL || args->up_bias != NULL) {
        ampc_map<4, 1> m;
        m.in[0] = args->gate;
        m.in[1] = args->up;
        m.in[2] = ampc_matrix(args->gate_bias, args->gate_bias_dtype, rows, cols, 0);
        m.in[3] = ampc_matrix(args->up_bias, args->up_bias_dtype, rows, cols, 0);
        m.out[0] = args->y;
        return ampc_map_run(dev, "amp_swiglu", m, ampc_biased<ampc_glu, 2, 2>(), stream);
    }
    ampc_map<2, 1> m;
    m.in[0] = args->gate;
    m.in[1] = args->up;
    m.out[0] = args->y;
    return ampc_map_run(dev, "amp_swiglu", m, ampc_glu(), stream);
}

amp_result ampc_swiglu_backward(void *dev, const amp_k_swiglu *args, void *stream) {
    int64_t rows = args->gate.rows, cols = args->gate.cols;
    if (args->gate_bias != NULL || args->up_bias != NULL) {
        ampc_map<5, 2> m;
        m.in[0] = args->gate;
        m.in[1] = args->up;
        m.in[2] = args->dy;
        m.in[3] = ampc_matrix(args->gate_bias, args->gate_bias_dtype, rows, cols, 0);
        m.in[4] = ampc_matrix(args->up_bias, args->up_bias_dtype, rows, cols, 0);
        m.out[0] = args->dgate;
        m.out[1] = args->dup;
        return ampc_map_run(dev, "amp_swiglu_backward", m, ampc_biased<ampc_glu_back, 3, 2>(), stream);
    }
    ampc_map<3, 2> m;
    m.in[0] = args->gate;
    m.in[1] = args->up;
    m.in[2] = args->dy;
    m.out[0] = args->dgate;
    m.out[1] = args->dup;
    return ampc_map_run(dev, "amp_swiglu_backward", m, ampc_glu_back(), stream);
}

/* ---- Dropout */

/* Word i of three blocks of random numbers. */
__device__ __forceinline__ uint32_t ampc_pick_word(const uint32_t *words, int shift, int i) {
    return shift == 0 ? words[i] : shift == 1 ? words[i + 1] : shift == 2 ? words[i + 2] : words[i + 3];
}

/* Uniform numbers are multiples of 2^-24, so u >= p exactly where the integer 2^24 u >= threshold = ceil(2^24 p). */
struct ampc_drop {
    enum { ahead = 2 };
    uint32_t threshold;
    float scale;
    uint64_t seed, offset;
    const uint64_t *base;
    template <int V> __device__ __forceinline__ void run(const float (*in)[V], float (*out)[V], int64_t index) const {
        uint64_t first = offset + (base != NULL ? *base : 0) + (uint64_t)index;
        int shift = (int)(first % 4), blocks = V / 4 + 1;
        uint32_t words[(V / 4 + 1) * 4 + 3] = {};
        AMPC_UNROLL
        for (int b = 0; b < blocks; b++)
            if (b == 0 || b < V / 4 || shift != 0) amp_philox(seed, 0, first / 4 + (uint64_t)b, words + 4 * b);
        AMPC_UNROLL
        for (int i = 0; i < V; i++)
            out[0][i] = ampc_pick_word(words, shift, i) >> 8 >= threshold ? ampc_mul(in[0][i], scale) : 0.0f;
    }
};

struct ampc_unchanged {
    enum { ahead = 4 };
    template <int V> __device__ __forceinline__ void run(const float (*in)[V], float (*out)[V], int64_t) const {
        AMPC_UNROLL
        for (int i = 0; i < V; i++) out[0][i] = in[0][i];
    }
};

amp_result ampc_dropout(void *dev, const amp_k_dropout *args, void *stream) {
    uint32_t threshold = (uint32_t)ceil((double)args->p * 16777216.0);
    ampc_map<1, 1> m;
    m.in[0] = ampc_flat(args->x, args->x_dtype, args->n);
    m.out[0] = ampc_flat(args->y, args->y_dtype, args->n);
    if (threshold == 0) return ampc_map_run(dev, "amp_dropout", m, ampc_unchanged(), stream);
    ampc_drop op = {threshold, 1.0f / (1.0f - args->p), args->seed, args->offset, args->base};
    return ampc_map_run(dev, "amp_dropout", m, op, stream);
}

/* ---- Addition */

struct ampc_sum2 {
    enum { ahead = 2 };
    float alpha, beta;
    int both;
    template <int V> __device__ __forceinline__ void run(const float (*in)[V], float (*out)[V], int64_t) const {
        AMPC_UNROLL
        for (int i = 0; i < V; i++) {
            float a = ampc_mul(in[0][i], alpha);
            out[0][i] = both ? ampc_fma(in[1][i], beta, a) : a;
        }
    }
};

amp_result ampc_add(void *dev, const amp_k_add *args, void *stream) {
    ampc_map<2, 1> m;
    m.in[0] = ampc_flat(args->a, args->a_dtype, args->n);
    m.in[1] = ampc_flat(args->b, args->b_dtype, args->n);
    m.out[0] = ampc_flat(args->y, args->y_dtype, args->n);
    return ampc_map_run(dev, "amp_add", m, ampc_sum2{args->alpha, args->beta, args->b != NULL}, stream);
}

/* ==== Losses and embeddings ========================================================================= */

/* Writes 1 + row into a report if it is clear or names a later row.  What an earlier call of the stream found there
   stays: only the host clears it, when it has read it. */
__device__ __forceinline__ void ampc_report(int32_t *report, int64_t row) {
    int32_t mine = row < INT32_MAX - 1 ? (int32_t)(row + 1) : INT32_MAX, seen = *(volatile int32_t *)report;
    while (seen == 0 || mine < seen) {
        int32_t before = atomicCAS(report, seen, mine);
        if (before == seen) return;
        seen = before;
    }
}

/* What one pass over the labels or ids of a call finds. */
struct ampc_labels {
    int64_t counted;                /* that are not ignored */
    int32_t bad;                    /* 1: one is out of range, and the call's other kernels do nothing */
    float scale;                    /* of the gradient */
};

/* One block.  values[i] must lie in 0..limit-1 or, with may_ignore, be `ignore`; scale = factor seed / counted. */
__global__ void __launch_bounds__(1024) ampc_labels_scan(const int32_t *values, int64_t n, int64_t limit, int may_ignore,
                                                         int32_t ignore, int sum, double factor, const float *seed,
                                                         ampc_labels *out, int32_t *report) {
    AMPC_SHARED(int64_t, room, 32);
    enum { U = 8 };                 /* reads under way */
    int64_t counted = 0, first = n;
    for (int64_t i = threadIdx.x; i < n; i += U * blockDim.x) {
        int32_t value[U];
        AMPC_UNROLL
        for (int u = 0; u < U; u++) value[u] = i + u * blockDim.x < n ? values[i + u * blockDim.x] : 0;
        AMPC_UNROLL
        for (int u = 0; u < U; u++) {
            int64_t at = i + u * blockDim.x;
            if (at >= n || (may_ignore && value[u] == ignore)) continue;
            counted++;
            if ((value[u] < 0 || value[u] >= limit) && at < first) first = at;
        }
    }
    counted = ampc_block_sum(counted, room);
    first = -ampc_block_max(-first, room);
    if (threadIdx.x != 0) return;
    out->counted = counted;
    out->bad = first < n;
    out->scale = (float)(factor * (seed ? (double)*seed : 1.0) / (double)(sum ? 1 : counted > 0 ? counted : 1));
    if (out->bad) ampc_report(report, first);
}

/* loss = the sum of n values, or their mean over what `labels` counted (NULL: `counted`), NaN over none.  One block. */
template <class T> __global__ void __launch_bounds__(1024) ampc_loss_total(const T *values, int64_t n, const ampc_labels *labels,
                                                                           int64_t counted, int sum, float *loss) {
    AMPC_SHARED(double, room, 32);
    double total = 0.0;
    if (labels && labels->bad) return;
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) total += (double)values[i];
    total = ampc_block_sum(total, room);
    if (threadIdx.x != 0) return;
    if (labels) counted = labels->counted;
    *loss = (float)(sum ? total : total / (double)counted);         /* 0 / 0 is NaN */
}

/* ---- Cross-entropy.  A block reads a row once, keeps it in shared memory where it fits (KEEP), with a running maximum
   and sum of exponentials, and writes the gradient from there.  A thread finds its own pieces again, so dlogits may be
   the logits.  Rows of any length and distance have pieces that are aligned; what lies before and behind them are the
   row's edges, element by element. */

/* exp(x - max) summed over what a thread has seen, relative to the largest of it. */
struct ampc_running {
    float max, sum, total;          /* total: of the logits themselves */
    template <int V> __device__ __forceinline__ void add(const float (&x)[V], bool smooth) {
        float larger = max, shift;
        AMPC_UNROLL
        for (int i = 0; i < V; i++) larger = fmaxf(larger, x[i]);
        rescale(larger);
        shift = ampi_bits_f32(max) == 0xff800000u ? 0.0f : max;
        AMPC_UNROLL
        for (int i = 0; i < V; i++) sum += ampc_exp_below(x[i], shift);
        if (!smooth) return;
        AMPC_UNROLL
        for (int i = 0; i < V; i++) total += x[i];
    }
    __device__ __forceinline__ void rescale(float larger) {
        if (larger != max) sum = ampc_mul(sum, ampc_exp_below(max, larger));
        max = larger;
    }
};

__device__ __forceinline__ float ampc_logit(const void *row, amp_dtype dtype, int64_t at) {
    float x[1];
    ampc_widen<1>(ampc_piece_get<1>(ampc_within(row, dtype, at), dtype), dtype, x);
    return x[0];
}
__device__ __forceinline__ void ampc_logit_put(void *row, amp_dtype dtype, int64_t at, float x) {
    ampc_piece_put<1>(ampc_within(row, dtype, at), dtype, ampc_narrow<1>(&x, dtype));
}

/* What a block knows of its row. */
struct ampc_logit_row {
    const void *from;
    void *to;                       /* NULL: no gradient */
    unsigned char *kept;            /* the pieces in shared memory, with KEEP; else the row is read again */
    int64_t label, head, edge;      /* label -1: ignored; the pieces of V lie in [head, edge) */
    float at_label, max, sum;
    /* Element k of the edges, those before `head` first. */
    __device__ __forceinline__ int64_t outside(int64_t k) const { return k < head ? k : edge + k - head; }
};

template <int V> __device__ __forceinline__ ampc_logit_row ampc_logits_of(const amp_k_cross_entropy &a, int64_t row,
                                                                          unsigned char *memory) {
    ampc_logit_row r = {ampc_row(a.logits, row), a.dlogits.data ? ampc_row(a.dlogits, row) : NULL, memory, a.labels[row],
                        0, 0, 0.0f, 0.0f, 1.0f};
    if (r.label == a.ignore_index) r.label = -1;
    else r.at_label = ampc_logit(r.from, a.logits.dtype, r.label);
    r.head = (int)((0 - (uintptr_t)r.from / (a.logits.dtype == AMP_F32 ? 4 : 2)) % V);
    if (r.head > a.classes) r.head = a.classes;
    r.edge = r.head + (a.classes - r.head) / V * V;
    return r;
}

/* The first pass. */
template <int V, bool KEEP>
__device__ __forceinline__ ampc_running ampc_logits_scan(const amp_k_cross_entropy &a, const ampc_logit_row &r) {
    enum { U = V == 1 ? 16 : 4 };   /* reads under way */
    const int64_t step = (int64_t)blockDim.x * V, outside = r.head + a.classes - r.edge;
    const amp_dtype dtype = a.logits.dtype;
    const bool smooth = a.smoothing > 0.0f;
    ampc_running found = {ampi_f32_of_bits(0xff800000u), 0.0f, 0.0f};
    for (int64_t at = r.head + (int64_t)threadIdx.x * V; at < r.edge; at += U * step) {
        uint4 raw[U];
        AMPC_UNROLL
        for (int u = 0; u < U; u++) raw[u] = ampc_piece_read<V>(r.from, dtype, at + u * step, r.edge);
        AMPC_UNROLL
        for (int u = 0; u < U; u++) {
            float x[V];
            if (at + u * step >= r.edge) break;
            if (KEEP) ampc_piece_put<V>(ampc_within(r.kept, dtype, at - r.head + u * step), dtype, raw[u]);
            ampc_widen<V>(raw[u], dtype, x);
            found.add(x, smooth);
        }
    }
    for (int64_t k = threadIdx.x; k < outside; k += blockDim.x) {
        float x[1] = {ampc_logit(r.from, dtype, r.outside(k))};
        found.add(x, smooth);
    }
    return found;
}

/* dlogits = scale (e / sum - smoothing / classes), and 1 - smoothing less in the column of the label; 0 beyond the
   classes, and in rows that are ignored.  share = -scale smoothing / classes; less: what the label's column has beside
   e / sum.  The column is written again when the whole row is there. */
template <int V, bool KEEP>
__device__ __forceinline__ void ampc_logits_gradient(const amp_k_cross_entropy &a, const ampc_logit_row &r, float scale,
                                                     float share, float less) {
    enum { U = KEEP ? 1 : V == 1 ? 16 : 4 };
    const int64_t step = (int64_t)blockDim.x * V, outside = r.head + a.dlogits.cols - r.edge;
    const amp_dtype dtype = a.logits.dtype, to_dtype = a.dlogits.dtype;
    const void *from = KEEP ? (const void *)r.kept : ampc_within(r.from, dtype, r.head);
    const float slope = scale / r.sum;
    const int64_t size = r.edge - r.head;
    for (int64_t at = (int64_t)threadIdx.x * V; at < size; at += U * step) {
        uint4 raw[U];
        AMPC_UNROLL
        for (int u = 0; u < U; u++) raw[u] = ampc_piece_read<V>(from, dtype, at + u * step, size);
        AMPC_UNROLL
        for (int u = 0; u < U; u++) {
            float g[V];
            if (at + u * step >= size) break;
            ampc_widen<V>(raw[u], dtype, g);
            AMPC_UNROLL
            for (int i = 0; i < V; i++) g[i] = ampc_fma(ampc_exp_below(g[i], r.max), slope, share);
            ampc_piece_put<V>(ampc_within(r.to, to_dtype, r.head + at + u * step), to_dtype, ampc_narrow<V>(g, to_dtype));
        }
    }
    for (int64_t k = threadIdx.x; k < outside; k += blockDim.x) {
        int64_t at = r.outside(k);
        float g = 0.0f;
        if (at < a.classes) g = ampc_fma(ampc_exp_below(ampc_logit(r.from, dtype, at), r.max), slope, share);
        ampc_logit_put(r.to, to_dtype, at, g);
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    ampc_logit_put(r.to, to_dtype, r.label, ampc_mul(scale, ampc_exp_below(r.at_label, r.max) / r.sum + less));
}
template <int V> __device__ __forceinline__ void ampc_logits_clear(const amp_k_cross_entropy &a, const ampc_logit_row &r) {
    int64_t at, outside = r.head + a.dlogits.cols - r.edge;
    for (at = r.head + (int64_t)threadIdx.x * V; at < r.edge; at += (int64_t)blockDim.x * V)
        ampc_piece_put<V>(ampc_within(r.to, a.dlogits.dtype, at), a.dlogits.dtype, uint4{0, 0, 0, 0});
    for (at = threadIdx.x; at < outside; at += blockDim.x) ampc_logit_put(r.to, a.dlogits.dtype, r.outside(at), 0.0f);
}

/* In a row with NaN, with +inf or with nothing but -inf some x - max is NaN, and so are loss and gradient. */
template <int V, bool KEEP>
__device__ __forceinline__ float ampc_cross_entropy_row(const amp_k_cross_entropy &a, ampc_logit_row &r, float *room) {
    ampc_running found = ampc_logits_scan<V, KEEP>(a, r);
    float loss;
    r.max = ampc_block_max(found.max, room);
    found.rescale(r.max);
    r.sum = ampc_block_sum(found.sum, room);
    loss = logf(r.sum) + (r.max - r.at_label);
    if (a.smoothing > 0.0f) {
        float mean = ampc_block_sum(found.total, room) / (float)a.classes;
        loss = (1.0f - a.smoothing) * loss + a.smoothing * (logf(r.sum) + (r.max - mean));
    }
    return loss;
}

/* even: smoothing / classes. */
template <int V, bool KEEP> __global__ void __launch_bounds__(512, 2)
ampc_cross_entropy_rows(amp_k_cross_entropy a, double even, const ampc_labels *labels, float *losses) {
    AMPC_SHARED(float, room, 32);
    AMPC_DYNAMIC(memory);
    if (labels->bad) return;
    const float scale = labels->scale, share = (float)((double)scale * -even);
    const float less = (float)(-even - (1.0 - (double)a.smoothing));
    for (int64_t row = blockIdx.x; row < a.logits.rows; row += gridDim.x) {
        ampc_logit_row r = ampc_logits_of<V>(a, row, memory);
        float loss = r.label < 0 ? 0.0f : ampc_cross_entropy_row<V, KEEP>(a, r, room);
        if (r.to && r.label < 0) ampc_logits_clear<V>(a, r);
        else if (r.to) ampc_logits_gradient<V, KEEP>(a, r, scale, share, less);
        if (threadIdx.x == 0) losses[row] = loss;
    }
}

template <bool KEEP> void (*ampc_cross_entropy_kernel(int v))(amp_k_cross_entropy, double, const ampc_labels *, float *) {
    return v == 8 ? ampc_cross_entropy_rows<8, KEEP> : v == 4 ? ampc_cross_entropy_rows<4, KEEP> : ampc_cross_entropy_rows<1, KEEP>;
}

/* The widest pieces that are aligned in both matrices at the same columns of every row. */
int ampc_logits_width(const amp_mat &x, const amp_mat &dx) {
    int v = x.dtype == AMP_F32 || (dx.data && dx.dtype == AMP_F32) ? 4 : 8;
    int64_t apart = (int64_t)((uintptr_t)x.data / (uint64_t)ampc_dtype_size(x.dtype) -
                              (uintptr_t)dx.data / (uint64_t)ampc_dtype_size(dx.dtype));
    if (!dx.data) return v;
    while (v > 1 && (apart % v != 0 || (x.rows > 1 && (x.ld - dx.ld) % v != 0))) v = v == 8 ? 4 : 1;
    return v;
}

amp_result ampc_cross_entropy(void *dev, const amp_k_cross_entropy *args, void *stream) {
    const char *name = "amp_cross_entropy";
    ampc_device *d = (ampc_device *)dev;
    ampc_scratch scratch(d, stream);
    amp_k_cross_entropy a = *args;
    int64_t rows = a.logits.rows, bytes = ampc_blocks(a.classes * ampc_dtype_size(a.logits.dtype), 16) * 16;
    int v = ampc_logits_width(a.logits, a.dlogits);
    int64_t threads = ampc_blocks(ampc_blocks(a.logits.cols, v * 4), 32) * 32;
    bool keep = a.dlogits.data != NULL && bytes <= (int64_t)d->shared_limit - 1024;
    size_t shared = keep ? (size_t)bytes : 0;
    AMPC_TRY(scratch.get(256 + (size_t)rows * sizeof(float), name));
    ampc_labels *labels = (ampc_labels *)scratch.data;
    float *losses = a.losses ? a.losses : (float *)(void *)((char *)scratch.data + 256);
    threads = threads < 128 ? 128 : threads < 512 ? threads : 512;
    int per_sm = (int)(1024 / threads);
    while (per_sm > 1 && (size_t)per_sm * (shared + 2048) > d->shared_limit) per_sm--;
    AMPC_TRY(ampc_launch(d, name, ampc_labels_scan, 1, 1024, 0, stream, a.labels, rows, a.classes, 1, a.ignore_index, a.sum,
                         (double)a.factor, a.seed, labels, a.bad_label));
    AMPC_TRY(ampc_launch(d, name, keep ? ampc_cross_entropy_kernel<true>(v) : ampc_cross_entropy_kernel<false>(v),
                         ampc_grid(d, rows, per_sm), (unsigned)threads, shared, stream, a,
                         (double)a.smoothing / (double)a.classes, labels, losses));
    return ampc_launch(d, name, ampc_loss_total<float>, 1, 1024, 0, stream, losses, rows, labels, 0, a.sum, a.loss);
}

/* ---- Mean squared error.  A block adds up a stretch of fixed length in fp64, so that the partial sums depend on the
   number of elements alone. */

enum { AMPC_MSE_STRETCH = 32768 };

template <int V> __device__ __forceinline__ double ampc_mse_piece(const amp_k_mse &a, int64_t at, float scale) {
    float x[V], target[V], sum = 0.0f;
    ampc_widen<V>(ampc_piece_get<V>(ampc_at(a.x, a.x_dtype, at), a.x_dtype), a.x_dtype, x);
    ampc_widen<V>(ampc_piece_get<V>(ampc_at(a.target, a.target_dtype, at), a.target_dtype), a.target_dtype, target);
    AMPC_UNROLL
    for (int i = 0; i < V; i++) {
        float difference = x[i] - target[i];
        sum = ampc_fma(difference, difference, sum);
        x[i] = ampc_mul(difference, scale);
    }
    if (a.dx) ampc_piece_put<V>(ampc_at(a.dx, a.x_dtype, at), a.x_dtype, ampc_narrow<V>(x, a.x_dtype));
    return (double)sum;
}

template <int V> __global__ void __launch_bounds__(256, 4) ampc_mse_stretches(amp_k_mse a, double divisor, double *partials) {
    AMPC_SHARED(double, room, 32);
    float scale = (float)(2.0 * (double)a.factor * (a.seed ? (double)*a.seed : 1.0) / divisor);
    int64_t stretches = ampc_blocks(a.n, AMPC_MSE_STRETCH);
    for (int64_t stretch = blockIdx.x; stretch < stretches; stretch += gridDim.x) {
        int64_t begin = stretch * AMPC_MSE_STRETCH, end = begin + AMPC_MSE_STRETCH < a.n ? begin + AMPC_MSE_STRETCH : a.n;
        double sum = 0.0;
        for (int64_t at = begin + (int64_t)threadIdx.x * V; at < end; at += (int64_t)blockDim.x * V) {
            if (at + V <= end) sum += ampc_mse_piece<V>(a, at, scale);
            else
                for (int64_t i = at; i < end; i++) sum += ampc_mse_piece<1>(a, i, scale);
        }
        sum = ampc_block_sum(sum, room);
        if (threadIdx.x == 0) partials[stretch] = sum;
    }
}

amp_result ampc_mse(void *dev, const amp_k_mse *args, void *stream) {
    ampc_device *d = (ampc_device *)dev;
    ampc_scratch scratch(d, stream);
    int64_t stretches = ampc_blocks(args->n, AMPC_MSE_STRETCH);
    int v = ampc_width(ampc_width(8, args->x, args->x_dtype), args->target, args->target_dtype);
    v = ampc_width(v, args->dx, args->x_dtype);
    AMPC_TRY(scratch.get(256 + (size_t)stretches * sizeof(double), "amp_mse"));
    double *partials = (double *)scratch.data;
    AMPC_TRY(ampc_launch(d, "amp_mse", v == 8 ? ampc_mse_stretches<8> : v == 4 ? ampc_mse_stretches<4> : ampc_mse_stretches<1>,
                         ampc_grid(d, stretches, 4), 256, 0, stream, *args,
                         (double)(args->sum || args->n < 1 ? 1 : args->n), partials));
    return ampc_launch(d, "amp_mse", ampc_loss_total<double>, 1, 1024, 0, stream, partials, stretches, NULL, args->n,
                       args->sum, args->loss);
}

/* ---- Embedding.  A row whose id is out of range is reported and left alone. */

template <int V> __global__ void __launch_bounds__(256, 4) ampc_embedding_rows(amp_k_embedding a, int64_t pieces) {
    int64_t total = a.n * pieces, step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += step) {
        int64_t piece, place, row = ampc_divide(i, pieces, &piece), at = piece * V, id = a.ids[row];
        float y[V], position[V];
        if (id < 0 || id >= a.table.rows) {
            if (piece == 0) ampc_report(a.bad_id, row);
            continue;
        }
        uint4 raw = ampc_piece_get<V>(ampc_row(a.table, id, at), a.table.dtype), other = {0, 0, 0, 0};
        if (a.positions.data) {
            ampc_divide(row, a.seq, &place);
            other = ampc_piece_get<V>(ampc_row(a.positions, place, at), a.positions.dtype);
        }
        ampc_widen<V>(raw, a.table.dtype, y);
        ampc_widen<V>(other, a.positions.dtype, position);
        AMPC_UNROLL
        for (int k = 0; k < V; k++)
            if (a.positions.data) y[k] = ampc_add(y[k], position[k]);
        ampc_piece_put<V>(ampc_row(a.y, row, at), a.y.dtype, ampc_narrow<V>(y, a.y.dtype));
    }
}

amp_result ampc_embedding(void *dev, const amp_k_embedding *args, void *stream) {
    ampc_device *d = (ampc_device *)dev;
    int v = ampc_width(ampc_width(ampc_width(8, args->y), args->table), args->positions);
    int64_t pieces = args->y.cols / v;
    return ampc_launch(d, "amp_embedding", v == 8 ? ampc_embedding_rows<8> : v == 4 ? ampc_embedding_rows<4> :
                       ampc_embedding_rows<1>, ampc_grid(d, ampc_blocks(args->n * pieces, 256), 8), 256, 0, stream, *args,
                       pieces);
}

/* ---- Embedding, backward.  The rows of dy are sorted by id (a stable radix sort of their numbers, 8 bits a pass), and
   each id's rows are added up in that order, in stretches of fixed length: first within each stretch, then, for the ids
   that reach over stretches, stretch by stretch.  No sum depends on the grid, and a frequent id is not one long chain. */

enum { AMPC_SORT_TILE = 1024, AMPC_DIGITS = 256, AMPC_STRETCH = 128 };

struct ampc_sort { const int32_t *ids; const int64_t *from; int64_t *to; int64_t n, tiles; int shift; };

/* The number of the row at place i of the order so far. */
__device__ __forceinline__ int64_t ampc_sorted(const ampc_sort &s, int64_t i) { return s.from ? s.from[i] : i; }
__device__ __forceinline__ int ampc_digit(const ampc_sort &s, int64_t row) { return s.ids[row] >> s.shift & (AMPC_DIGITS - 1); }

/* counts[digit][tile] */
__global__ void __launch_bounds__(256) ampc_sort_count(ampc_sort s, const ampc_labels *labels, int64_t *counts) {
    AMPC_SHARED(unsigned, count, AMPC_DIGITS);
    int64_t first = (int64_t)blockIdx.x * AMPC_SORT_TILE, end = first + AMPC_SORT_TILE < s.n ? first + AMPC_SORT_TILE : s.n;
    if (labels->bad) return;
    count[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t i = first + threadIdx.x; i < end; i += blockDim.x) atomicAdd(&count[ampc_digit(s, ampc_sorted(s, i))], 1u);
    __syncthreads();
    counts[threadIdx.x * s.tiles + blockIdx.x] = count[threadIdx.x];
}

/* The sum over the threads before this one. */
__device__ inline int64_t ampc_block_before(int64_t x, int64_t *room) {
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, warps = (int)blockDim.x / 32;
    int64_t sum = x, before = 0;
    AMPC_UNROLL
    for (int step = 1; step < 32; step *= 2) {
        int64_t other = __shfl_up_sync(0xffffffffu, sum, (unsigned)step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) room[warp] = sum;
    __syncthreads();
    for (int w = 0; w < warps; w++)
        if (w < warp) before += room[w];
    return before + sum - x;
}

/* counts becomes the sum of all counts before it.  One block. */
__global__ void __launch_bounds__(1024) ampc_sort_scan(const ampc_labels *labels, int64_t *counts, int64_t n) {
    AMPC_SHARED(int64_t, room, 32);
    int64_t each = ampc_blocks(n, blockDim.x), begin = each * threadIdx.x, end = begin + each < n ? begin + each : n, sum = 0;
    if (labels->bad) return;
    for (int64_t i = begin; i < end; i++) sum += counts[i];
    sum = ampc_block_before(sum, room);
    for (int64_t i = begin; i < end; i++) {
        int64_t count = counts[i];
        counts[i] = sum;
        sum += count;
    }
}

/* The lanes of the warp whose keys have this digit. */
__device__ __forceinline__ unsigned ampc_same_digit(int digit, bool live) {
    unsigned same = __ballot_sync(0xffffffffu, live);
    AMPC_UNROLL
    for (int bit = 0; bit < 8; bit++) {
        unsigned set = __ballot_sync(0xffffffffu, digit >> bit & 1);
        same &= digit >> bit & 1 ? set : ~set;
    }
    return same;
}

/* Moves the keys of a tile to their places, 256 at a time; thread d keeps the books of digit d. */
__global__ void __launch_bounds__(256) ampc_sort_scatter(ampc_sort s, const ampc_labels *labels, const int64_t *starts) {
    AMPC_SHARED(unsigned, count, 8 * AMPC_DIGITS);
    AMPC_SHARED(int64_t, base, AMPC_DIGITS);
    int64_t first = (int64_t)blockIdx.x * AMPC_SORT_TILE, end = first + AMPC_SORT_TILE < s.n ? first + AMPC_SORT_TILE : s.n;
    unsigned lane = threadIdx.x % 32, *mine = count + threadIdx.x / 32 * AMPC_DIGITS;
    if (labels->bad) return;
    base[threadIdx.x] = starts[threadIdx.x * s.tiles + blockIdx.x];
    for (int64_t strip = first; strip < end; strip += 256) {
        int64_t i = strip + threadIdx.x, row = i < end ? ampc_sorted(s, i) : 0;
        int digit = ampc_digit(s, row);
        unsigned same = ampc_same_digit(digit, i < end), rank = (unsigned)__popc(same & ((1u << lane) - 1)), sum = 0;
        for (int w = 0; w < 8; w++) count[w * AMPC_DIGITS + threadIdx.x] = 0;
        __syncthreads();
        if (i < end && rank == 0) mine[digit] = (unsigned)__popc(same);
        __syncthreads();
        for (int w = 0; w < 8; w++) {
            unsigned here = count[w * AMPC_DIGITS + threadIdx.x];
            count[w * AMPC_DIGITS + threadIdx.x] = sum;
            sum += here;
        }
        __syncthreads();
        if (i < end) s.to[base[digit] + mine[digit] + rank] = row;
        __syncthreads();
        base[threadIdx.x] += sum;
    }
}

/* Zeros the rows of a matrix from `first` on. */
template <int V> __global__ void __launch_bounds__(256) ampc_zero_rows(amp_mat m, int64_t first, const ampc_labels *labels) {
    int64_t pieces = m.cols / V, total = (m.rows - first) * pieces, piece;
    if (labels && labels->bad) return;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += (int64_t)gridDim.x * blockDim.x) {
        int64_t row = first + ampc_divide(i, pieces, &piece);
        ampc_piece_put<V>(ampc_row(m, row, piece * V), m.dtype, uint4{0, 0, 0, 0});
    }
}

/* A call's sorted rows, and the sums of the ids that reach over the stretches' ends: head[stretch] is what belongs to an
   id that began before, tail[stretch] to one that goes on, both [stretches, cols]. */
struct ampc_gather {
    amp_mat dy, dtable;
    const int32_t *ids;
    const int64_t *order;
    float *head, *tail;
    int64_t n, stretches, strips;
    int add;
    __device__ __forceinline__ int64_t id(int64_t i) const { return i >= 0 && i < n ? ids[order[i]] : -1; }
};

/* A warp's part: one stretch and one strip of 32 pieces. */
template <int V> struct ampc_gather_part {
    int64_t stretch, at, begin, end;
    __device__ ampc_gather_part(const ampc_gather &g, int64_t part) {
        int64_t strip;
        stretch = ampc_divide(part, g.strips, &strip);
        at = (strip * 32 + threadIdx.x % 32) * V;
        begin = stretch * AMPC_STRETCH;
        end = begin + AMPC_STRETCH < g.n ? begin + AMPC_STRETCH : g.n;
    }
};

/* What an id has in this stretch goes to the table, or to be added up with what it has in others. */
template <int V> __device__ __forceinline__ void ampc_gather_flush(const ampc_gather &g, const ampc_gather_part<V> &part,
                                                                   int64_t id, bool before, bool after, float *sum) {
    float *to = (before ? g.head : g.tail) + part.stretch * g.dy.cols + part.at;
    if (id < 0 || part.at >= g.dy.cols) return;
    if (!before && !after) ampc_piece_sum<V>(ampc_row(g.dtable, id), g.dtable.dtype, part.at, g.dy.cols, sum, g.add);
    else {
        AMPC_UNROLL
        for (int i = 0; i < V; i++) to[i] = sum[i];
    }
}

/* Adds up the rows of a stretch, four reads under way. */
template <int V> __global__ void __launch_bounds__(128) ampc_gather_stretches(ampc_gather g, const ampc_labels *labels) {
    int64_t parts = g.stretches * g.strips, warps = (int64_t)gridDim.x * (blockDim.x / 32);
    if (labels->bad) return;
    for (int64_t p = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 32; p < parts; p += warps) {
        const ampc_gather_part<V> part(g, p);
        int64_t current = -1, first = g.id(part.begin - 1), next = g.id(part.end);
        float sum[V] = {};
        for (int64_t base = part.begin; base < part.end; base += 32) {
            int64_t i = base + threadIdx.x % 32, mine = i < part.end ? g.order[i] : 0, id = i < part.end ? g.ids[mine] : -1;
            for (int k = 0; k < 32; k += 4) {
                uint4 raw[4];
                int64_t row_id[4];
                AMPC_UNROLL
                for (int u = 0; u < 4; u++) {
                    int64_t row = __shfl_sync(0xffffffffu, mine, k + u);
                    row_id[u] = __shfl_sync(0xffffffffu, id, k + u);
                    raw[u] = ampc_piece_read<V>(ampc_row(g.dy, row), g.dy.dtype, part.at, row_id[u] < 0 ? 0 : g.dy.cols);
                }
                AMPC_UNROLL
                for (int u = 0; u < 4; u++) {
                    float x[V];
                    if (row_id[u] < 0) continue;
                    ampc_widen<V>(raw[u], g.dy.dtype, x);
                    if (row_id[u] != current) ampc_gather_flush<V>(g, part, current, current == first, false, sum);
                    AMPC_UNROLL
                    for (int i2 = 0; i2 < V; i2++) sum[i2] = row_id[u] != current ? x[i2] : sum[i2] + x[i2];
                    current = row_id[u];
                }
            }
        }
        ampc_gather_flush<V>(g, part, current, current == first, current == next, sum);
    }
}

/* For the id that begins in a stretch and goes on: its tail there and its heads in the stretches that follow. */
template <int V> __global__ void __launch_bounds__(128) ampc_gather_join(ampc_gather g, const ampc_labels *labels) {
    int64_t parts = g.stretches * g.strips, warps = (int64_t)gridDim.x * (blockDim.x / 32);
    if (labels->bad) return;
    for (int64_t p = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 32; p < parts; p += warps) {
        const ampc_gather_part<V> part(g, p);
        int64_t id = g.id(part.end - 1), last = part.stretch;
        unsigned whole = 0xffffffffu;
        float sum[V];
        if (id != g.id(part.end) || id == g.id(part.begin - 1)) continue;
        for (; whole == 0xffffffffu; last += __popc(whole))     /* the id is still there where stretch last + 1 + lane begins */
            whole = __ballot_sync(0xffffffffu, g.id((last + 1 + threadIdx.x % 32) * AMPC_STRETCH) == id);
        if (part.at >= g.dy.cols) continue;
        AMPC_UNROLL
        for (int i = 0; i < V; i++) sum[i] = g.tail[part.stretch * g.dy.cols + part.at + i];
        for (int64_t s = part.stretch + 1; s <= last; s++) {
            AMPC_UNROLL
            for (int i = 0; i < V; i++) sum[i] += g.head[s * g.dy.cols + part.at + i];
        }
        ampc_piece_sum<V>(ampc_row(g.dtable, id), g.dtable.dtype, part.at, g.dy.cols, sum, g.add);
    }
}

/* dpositions[p] = (old +) the rows p, p + seq, p + 2 seq, ... of dy. */
template <int V> __global__ void __launch_bounds__(128) ampc_position_rows(amp_k_embedding a, int64_t positions,
                                                                           const ampc_labels *labels) {
    int64_t pieces = a.dy.cols / V, total = positions * pieces, piece;
    if (labels && labels->bad) return;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += (int64_t)gridDim.x * blockDim.x) {
        int64_t p = ampc_divide(i, pieces, &piece), at = piece * V;
        float sum[V] = {};
        for (int64_t row = p; row < a.n; row += 4 * a.seq) {
            uint4 raw[4];
            AMPC_UNROLL
            for (int u = 0; u < 4; u++)
                raw[u] = ampc_piece_read<V>(ampc_row(a.dy, row + u * a.seq), a.dy.dtype, at, row + u * a.seq < a.n ? a.dy.cols : 0);
            AMPC_UNROLL
            for (int u = 0; u < 4; u++) {
                float x[V];
                ampc_widen<V>(raw[u], a.dy.dtype, x);
                AMPC_UNROLL
                for (int k = 0; k < V; k++) sum[k] += x[k];
            }
        }
        ampc_piece_sum<V>(ampc_row(a.dpositions, p), a.dpositions.dtype, at, a.dy.cols, sum, a.add_positions);
    }
}

amp_result ampc_zero(ampc_device *d, const amp_mat &m, int64_t first, const ampc_labels *labels, void *stream) {
    int v = ampc_width(8, m);
    if (first >= m.rows) return AMP_OK;
    return ampc_launch(d, "amp_embedding_backward", v == 8 ? ampc_zero_rows<8> : v == 4 ? ampc_zero_rows<4> : ampc_zero_rows<1>,
                       ampc_grid(d, ampc_blocks((m.rows - first) * m.cols / v, 256), 8), 256, 0, stream, m, first, labels);
}

/* Sorts the numbers of a's rows by id: *order is then in one of the two buffers. */
amp_result ampc_embedding_sort(ampc_device *d, const amp_k_embedding &a, const ampc_labels *labels, int64_t *counts,
                               int64_t *buffers[2], const int64_t **order, void *stream) {
    const char *name = "amp_embedding_backward";
    ampc_sort s = {a.ids, NULL, NULL, a.n, ampc_blocks(a.n, AMPC_SORT_TILE), 0};
    for (int pass = 0; pass == 0 || (pass < 4 && (a.dtable.rows - 1) >> 8 * pass > 0); pass++) {
        s.to = buffers[pass % 2];
        s.shift = 8 * pass;
        AMPC_TRY(ampc_launch(d, name, ampc_sort_count, (unsigned)s.tiles, 256, 0, stream, s, labels, counts));
        AMPC_TRY(ampc_launch(d, name, ampc_sort_scan, 1, 1024, 0, stream, labels, counts, AMPC_DIGITS * s.tiles));
        AMPC_TRY(ampc_launch(d, name, ampc_sort_scatter, (unsigned)s.tiles, 256, 0, stream, s, labels, counts));
        s.from = s.to;
    }
    *order = s.from;
    return AMP_OK;
}

/* Scratch: labels, two orders, the sort's counts, heads and tails. */
amp_result ampc_embedding_table(ampc_device *d, const amp_k_embedding &a, ampc_scratch &scratch, ampc_labels **labels,
                                void *stream) {
    const char *name = "amp_embedding_backward";
    int v = ampc_width(ampc_width(8, a.dy), a.dtable);
    int64_t stretches = ampc_blocks(a.n, AMPC_STRETCH), counts = AMPC_DIGITS * ampc_blocks(a.n, AMPC_SORT_TILE);
    int64_t words = 32 + 2 * a.n + counts, strips = ampc_blocks(a.dy.cols / v, 32);
    AMPC_TRY(scratch.get((size_t)words * 8 + (size_t)(2 * stretches * a.dy.cols) * sizeof(float), name));
    int64_t *memory = (int64_t *)scratch.data, *buffers[2] = {memory + 32, memory + 32 + a.n};
    float *head = (float *)(void *)(memory + words);
    ampc_gather g = {a.dy, a.dtable, a.ids, NULL, head, head + stretches * a.dy.cols, a.n, stretches, strips, a.add_table};
    *labels = (ampc_labels *)(void *)memory;
    AMPC_TRY(ampc_launch(d, name, ampc_labels_scan, 1, 1024, 0, stream, a.ids, a.n, a.dtable.rows, 0, 0, 1, 1.0, NULL, *labels,
                         a.bad_id));
    if (!a.add_table) AMPC_TRY(ampc_zero(d, a.dtable, 0, *labels, stream));
    AMPC_TRY(ampc_embedding_sort(d, a, *labels, memory + 32 + 2 * a.n, buffers, &g.order, stream));
    unsigned grid = ampc_grid(d, ampc_blocks(stretches * strips, 4), 8);
    AMPC_TRY(ampc_launch(d, name, v == 8 ? ampc_gather_stretches<8> : v == 4 ? ampc_gather_stretches<4> : ampc_gather_stretches<1>,
                         grid, 128, 0, stream, g, *labels));
    return ampc_launch(d, name, v == 8 ? ampc_gather_join<8> : v == 4 ? ampc_gather_join<4> : ampc_gather_join<1>, grid, 128, 0,
                       stream, g, *labels);
}

amp_result ampc_embedding_backward(void *dev, const amp_k_embedding *args, void *stream) {
    ampc_device *d = (ampc_device *)dev;
    ampc_scratch scratch(d, stream);
    amp_k_embedding a = *args;
    ampc_labels *labels = NULL;
    int v = ampc_width(ampc_width(8, a.dy), a.dpositions);
    int64_t positions = a.seq < a.dpositions.rows ? a.seq : a.dpositions.rows;
    if (a.dtable.data) AMPC_TRY(ampc_embedding_table(d, a, scratch, &labels, stream));
    if (a.dpositions.data == NULL) return AMP_OK;
    if (!a.add_positions) AMPC_TRY(ampc_zero(d, a.dpositions, positions, labels, stream));
    return ampc_launch(d, "amp_embedding_backward", v == 8 ? ampc_position_rows<8> : v == 4 ? ampc_position_rows<4> :
                       ampc_position_rows<1>, ampc_grid(d, ampc_blocks(positions * a.dy.cols / v, 128), 8), 128, 0, stream, a,
                       positions, labels);
}
/* ==== Matrix products ===============================================================================
   Any layout, dtype and epilogue on the fp32 units: operands are rounded to the compute dtype on their way into shared
   memory, a block computes 64 x 64 of c in tiles of 16 along k, a thread 4 x 4 of them.  Every sum is one chain of
   fused multiply-adds along k, so its bits depend on nothing else.                                      */

enum { AMPC_GEMM_TILE = 64, AMPC_GEMM_DEPTH = 16, AMPC_GEMM_PER_SM = 4 };

__device__ __forceinline__ float ampc_stored(const void *p, amp_dtype dtype, int64_t i) {
    if (dtype == AMP_F16) return ampc_float(((const ampc_f16 *)p)[i]);
    return dtype == AMP_BF16 ? ampc_float(((const ampc_bf16 *)p)[i]) : ((const float *)p)[i];
}
__device__ __forceinline__ void ampc_put_stored(void *p, amp_dtype dtype, int64_t i, float x) {
    if (dtype == AMP_F16) ampc_put((ampc_f16 *)p + i, x);
    else if (dtype == AMP_BF16) ampc_put((ampc_bf16 *)p + i, x);
    else ((float *)p)[i] = x;
}
__device__ __forceinline__ float ampc_rounded(float x, amp_dtype compute) {
    switch (compute) {
        case AMP_F16: return ampc_f16_value(ampc_f16_bits(x));
        case AMP_BF16: return amp_f32_from_bf16(ampc_bf16_bits(x));
        case AMP_TF32: return amp_tf32_from_f32(x, 0);
        default: return x;
    }
}

/* One operand: element (i, j), i along m or n and j along k, at data[i * outer + j * inner]. */
struct ampc_operand {
    const void *data;
    amp_dtype dtype, compute;
    int64_t outer, inner, count;    /* count: of i */
};

/* 64 x 16 elements from (i0, j0) on into tile[j][i], zeros beyond the matrix; neighbouring threads read neighbours. */
__device__ __forceinline__ void ampc_gemm_fetch(const ampc_operand &x, int64_t offset, int64_t i0, int64_t j0, int64_t k,
                                                float (*tile)[AMPC_GEMM_TILE + 4]) {
    for (unsigned e = threadIdx.x; e < AMPC_GEMM_TILE * AMPC_GEMM_DEPTH; e += 256) {
        unsigned i = x.inner == 1 ? e / AMPC_GEMM_DEPTH : e % AMPC_GEMM_TILE;
        unsigned j = x.inner == 1 ? e % AMPC_GEMM_DEPTH : e / AMPC_GEMM_TILE;
        bool inside = i0 + i < x.count && j0 + j < k;
        tile[j][i] = inside ? ampc_rounded(ampc_stored(x.data, x.dtype, offset + (i0 + i) * x.outer + (j0 + j) * x.inner),
                                           x.compute) : 0.0f;
    }
}

/* pre = alpha sum + bias; c = act(pre) + beta c. */
__device__ __forceinline__ void ampc_gemm_finish(const amp_k_gemm &g, int64_t item, int64_t row, int64_t col, float sum) {
    int64_t at = item * g.stride_c + row * g.ldc + col;
    float x[1][1] = {{ampc_mul(g.alpha, sum)}}, y[1][1];
    if (g.bias != NULL) x[0][0] = ampc_add(x[0][0], ampc_stored(g.bias, g.bias_dtype, col));
    if (g.pre != NULL) ampc_put_stored(g.pre, g.pre_dtype, row * g.ld_pre + col, x[0][0]);
    y[0][0] = x[0][0];
    if (g.act != AMP_ACT_NONE) ampc_act{g.act}.run<1>(x, y, 0);
    if (ampi_is_set(g.beta)) y[0][0] = ampc_fma(g.beta, ampc_stored(g.c, g.c_dtype, at), y[0][0]);
    ampc_put_stored(g.c, g.c_dtype, at, y[0][0]);
}

__global__ void __launch_bounds__(256, AMPC_GEMM_PER_SM)
ampc_gemm_kernel(amp_k_gemm g, ampc_operand a, ampc_operand b, int64_t rows, int64_t columns) {
    AMPC_SHARED(float, a_tile, AMPC_GEMM_DEPTH * (AMPC_GEMM_TILE + 4));
    AMPC_SHARED(float, b_tile, AMPC_GEMM_DEPTH * (AMPC_GEMM_TILE + 4));
    float (*as)[AMPC_GEMM_TILE + 4] = (float (*)[AMPC_GEMM_TILE + 4])a_tile;
    float (*bs)[AMPC_GEMM_TILE + 4] = (float (*)[AMPC_GEMM_TILE + 4])b_tile;
    unsigned x = threadIdx.x % 16, y = threadIdx.x / 16;
    for (int64_t tile = blockIdx.x; tile < rows * columns * g.batch; tile += gridDim.x) {
        int64_t item = tile / (rows * columns), i0 = tile / columns % rows * AMPC_GEMM_TILE, j0 = tile % columns * AMPC_GEMM_TILE;
        float sum[4][4] = {};
        for (int64_t k = 0; k < g.k; k += AMPC_GEMM_DEPTH) {
            ampc_gemm_fetch(a, item * g.stride_a, i0, k, g.k, as);
            ampc_gemm_fetch(b, item * g.stride_b, j0, k, g.k, bs);
            __syncthreads();
            for (int d = 0; d < AMPC_GEMM_DEPTH; d++) {
                AMPC_UNROLL
                for (int i = 0; i < 4; i++) {
                    AMPC_UNROLL
                    for (int j = 0; j < 4; j++) sum[i][j] = ampc_fma(as[d][4 * y + i], bs[d][4 * x + j], sum[i][j]);
                }
            }
            __syncthreads();
        }
        AMPC_UNROLL
        for (int i = 0; i < 4; i++) {
            AMPC_UNROLL
            for (int j = 0; j < 4; j++) {
                int64_t row = i0 + 4 * y + i, col = j0 + 4 * x + j;
                if (row < g.m && col < g.n) ampc_gemm_finish(g, item, row, col, sum[i][j]);
            }
        }
    }
}

/* alpha 0 reads neither a nor b, as in BLAS. */
amp_result ampc_gemm(void *device, const amp_k_gemm *args, void *stream) {
    ampc_device *dev = (ampc_device *)device;
    amp_k_gemm g = *args;
    int64_t rows = ampc_blocks(g.m, AMPC_GEMM_TILE), columns = ampc_blocks(g.n, AMPC_GEMM_TILE);
    ampc_operand a = {g.a, g.a_dtype, g.compute, g.trans_a ? 1 : g.lda, g.trans_a ? g.lda : 1, g.m};
    ampc_operand b = {g.b, g.b_dtype, g.compute, g.trans_b ? g.ldb : 1, g.trans_b ? 1 : g.ldb, g.n};
    if (g.m <= 0 || g.n <= 0 || g.batch <= 0) return ampc_usable(dev, "gemm");
    if (!ampi_is_set(g.alpha)) g.k = 0;
    return ampc_launch(dev, "gemm", ampc_gemm_kernel, ampc_grid(dev, rows * columns * g.batch, AMPC_GEMM_PER_SM), 256, 0,
                       stream, g, a, b, rows, columns);
}

/* Matrices are used as they lie. */
size_t ampc_gemm_pack_size(void *, const amp_k_pack *) { return 0; }
amp_result ampc_gemm_pack(void *device, const amp_k_pack *, void *, void *) {
    return ampc_refuse((ampc_device *)device, AMP_ERR_UNSUPPORTED, "gemm_pack", "matrices are used as they lie on this device");
}

/* ==== Table ========================================================================================= */

amp_result ampc_attention(void *device, const amp_k_attention *, void *) {
    return ampc_refuse((ampc_device *)device, AMP_ERR_UNSUPPORTED, "attention",
                       "not part of this backend yet: use a product, amp_softmax and a product");
}

const amp_backend ampc_backend = {
    AMP_ABI(amp_backend), "cuda",
    ampc_open, ampc_close, ampc_describe,
    0, 0,
    ampc_alloc, ampc_free, ampc_alloc_pinned, ampc_free_pinned, ampc_copy, ampc_fill, ampc_memory,
    ampc_stream_create, ampc_stream_destroy, ampc_stream_sync,
    ampc_event_create, ampc_event_destroy, ampc_event_record, ampc_event_wait,
    ampc_event_done, ampc_event_sync, ampc_event_elapsed,
    ampc_graph_begin, ampc_graph_end, ampc_graph_launch, ampc_graph_destroy,
    NULL, NULL, NULL,
    ampc_cast, ampc_gemm, ampc_gemm_pack_size, ampc_gemm_pack, ampc_column_sum,
    ampc_attention, ampc_attention, ampc_norm, ampc_norm_backward,
    ampc_softmax, ampc_softmax_backward, ampc_activation, ampc_activation_backward,
    ampc_swiglu, ampc_swiglu_backward, ampc_cross_entropy, ampc_mse,
    ampc_embedding, ampc_embedding_backward, ampc_dropout, ampc_add,
    ampc_check_grads, ampc_adamw, ampc_sgd, ampc_scale_ranges, ampc_rule
};

} /* namespace */

/* The CUDA backend's table: amp_desc.backend = amp_cuda(). */
extern "C" const amp_backend *amp_cuda(void) { return &ampc_backend; }
