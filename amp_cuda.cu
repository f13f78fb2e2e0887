/* amp_cuda.cu - the CUDA backend of amp.h: memory, streams, graphs and kernels of one NVIDIA GPU.

   BUILD     Compile this file and link it to your program; it is not included.

       nvcc -O2 -std=c++17 -arch=sm_90a -c amp_cuda.cu
       cc -c train.c && nvcc train.o amp_cuda.o -o train -lcublasLt

     -arch=native compiles for the GPU of this machine.  For a GPU of compute capability 9.0 (H100, H200, GH200), use
     sm_90a.  Code for sm_90 and -arch=native lacks wgmma, which amp_desc.wgmma asks for.  With -DAMP_NVTX, profilers
     show the ranges of amp_profile_push and amp_monitor_phase (nsys profile -t nvtx,cuda ./train).  Do not build with
     --use_fast_math, which flushes subnormal numbers and would change the optimizers' bits.

     CUDA 11.8 or later is needed.  Before CUDA 13, the oldest architecture is sm_70 (Volta), and then sm_75.  From CUDA
     12 on, there is sm_90a.  nvcc 13.0 has compiled the file for sm_75 to sm_121.  With the headers and ptxas of CUDA
     11.8, 12.0, 12.4 and 12.9, clang 16 and 19 have compiled the CPU's code, and clang 19 the kernels: for sm_70 with
     11.8, 12.4 and 12.9, and for sm_80 and sm_90a with 12.0 (make test-toolkits).  nvcc of these releases has not been
     tried.  nvcc 11.8 takes g++ 11 at most (-ccbin g++-11).

   USE     Name the backend when you open a context.

       amp_desc d = {0};
       d.backend = amp_cuda();
       d.device = 0;                    index of the GPU; several contexts may be open, on one GPU or on several
       d.stream = my_stream;            a cudaStream_t; if NULL, the context makes one
       d.blas = my_handle;              a cublasLtHandle_t or cublasHandle_t of this GPU; if NULL, the context makes one
       d.autotune = AMP_AUTOTUNE_ON;    measure cuBLASLt's algorithms at the first product of each shape
       d.wgmma = 1;                     compute attention in 16 bits by wgmma; see below
       d.memory = my_memory;            your alloc and free; if zeros, cudaMalloc and cudaFree
       amp_open(&amp, &d);

   WHAT HOLDS FOR EVERY ENTRY OF THE TABLE

   - An entry works on the context's GPU and restores the calling thread's current device.  It does not restore a device
     on which the process has no CUDA context.  Restoring would create one, which takes memory on an unused GPU.
   - Kernels, copies and fills go to the stream and return at once.  Only stream_sync and event_sync wait.  Copies
     from and to pageable memory may wait too.  A step allocates nothing once its sizes have been seen.
   - Memory comes from an arena that keeps freed blocks.  The same stream may reuse a freed block at once, in stream
     order.  Scratch memory that is taken while amp_graph_begin or your program captures a stream belongs to that graph
     until it is destroyed.
   - The text of a failure names the CUDA error and the call.  CUDA does not recover from some errors, such as an
     illegal address.  After one of these every call fails, and its text names that error.  Close the context then, and
     restart the process.
   - Kernels compute in fp32, with sums in fp32 or wider, and round once to storage.  Their indices have 64 bits.  They
     use no floating-point atomics, and so give the same bits every time on one kind of GPU.  The norms' gradients of
     weight and bias are summed by block.  Their last bits may differ between GPUs with another number of
     multiprocessors, but nothing else does.
   - cuBLASLt computes products, with its epilogues where they fit.  Kernels of this file do the rest.  Split sums are
     kept in fp32 and added in order, so one plan gives the same bits every time.  Autotuning may choose another plan in
     each run, and .autotune_file keeps the choice; see AUTOTUNING.
   - In products, TF32 operands are rounded or truncated, and are off by 2^-10 at most.  Biases are rounded to the
     result's dtype, and so may be beta c and the product before its epilogue.  A product beyond fp16 is then infinite,
     and GELU makes NaN of -infinity.  RELU may turn NaN into 0.
   - On compute capability 9.0, large products in TF32 read transposed copies of operands that are not contiguous along
     k.  Without memory for the copies, products are computed directly, with other last bits, and warning 5008 says so
     once.  The copies have never run on a GPU.
   - The kernels of attention by wgmma and TMA are for compute capability 9.0, in code for sm_90a.  They pass every test
     on a model of the GPU, but have never run on one.  They are therefore off unless amp_desc.wgmma is 1, and a wait of
     theirs that does not end becomes an error of the kernel.
   - FP8 products never use Hopper's fast accumulation, which keeps about 14 bits of a sum.
   - With .reduce_on_device, ranks exchange device memory over NCCL 2.14 or later.  Its library, libnccl.so.2, is opened
     at run time and is not needed to build.  NCCL computes the sums.  It may round 16-bit numbers at each hop between
     ranks, and a sum's order depends on NCCL's version and on the machines.
   - NCCL's calls go to the stream, and into a graph that captures it.  A thread of the context watches them and aborts
     what does not end within .reduce_timeout_ms.  A graph that your program itself captures and launches is not
     watched, and must be destroyed before the context is closed.
   - GPUs need compute capability 7.0 (Volta) or later.  With CUDA 13 they need 7.5 (Turing), because it builds for no
     older one.  On both, amp_open refuses bf16, TF32 and FP8, unless it may fall back to fp16.  Products in fp16 are
     cuBLASLt's, and attention uses the fp32 units.  The backend has run on the model of these GPUs alone.

   AUTOTUNING

   - With .autotune, the first product of each shape outside a capture times up to 16 algorithms of cuBLASLt.  Results
     are compared on whole numbers first, and an algorithm that is wrong is not used.  The algorithms then take turns on
     random numbers, because these draw the power of a training.  The rounds take about a quarter of a second for each
     shape, and up to a quarter of the GPU's memory.  GPT-2's step has 19 products, which is estimated to take ten
     seconds on an H100.  This was not measured.
   - Each choice is logged once at level info, as message 5003.  The message has the shape, the dtypes and the epilogue,
     the algorithm's attributes, the median times, and whether a bias gradient is fused or summed apart.
   - .autotune_file is read by amp_open and written by amp_close.  It is for one kind of GPU and one version of
     cuBLASLt.  The kind is the name, the compute capability and the number of multiprocessors.  Elsewhere it is
     ignored, with warning 5004, which names both.
   - To ship tuned products, run a few steps of your program on each kind of GPU with .autotune and a file for that
     kind.  With .autotune off, the file is read but never written, and what it lacks is not timed.  Steps then have the
     same bits in each run.

   CONTENTS AT A GLANCE     Search for the tags.  They are amp.h's, and so is the order of the sections.  Only the two
                            of >>backends at the end stand elsewhere: C++ requires them after the kernels that they
                            name.  Subjects of amp.h that are not in this list have no code here

        1 >>base: the device                        the data of an open context, and the features of its GPU
        1 >>base: errors                            failures and their texts, and the current device
        1 >>base: launches                          how kernels start, sizes of grids, division, scratch memory
        2 >>numbers: storage                        conversions to and from fp32, and arithmetic that rounds once
        2 >>numbers: lanes                          loads and stores of a thread's piece of an array, random words
        2 >>numbers: sums                           sums and maxima over a warp and over a block
        6 >>backends: the arena                     freed memory and who may reuse it, captures, locks
        6 >>backends: runtime                       opening and closing, memory, streams, events, graphs
        7 >>masks                                   the keys that a query sees
        8 >>autocast: casts                         arrays in another dtype, with any rounding
        9 >>operators: column sums                  gradients of biases, which are sums over rows
        9 >>operators: pieces                       the width of accesses, asynchronous copies, exponentials
        9 >>operators: rows                         LayerNorm, RMSNorm, softmax
        9 >>operators: pointwise                    activations, SwiGLU, dropout, addition, RoPE
        9 >>operators: losses and embeddings        cross-entropy, mean squared error, embedding
        9 >>operators: products                     on the fp32 units, through cuBLASLt, in FP8; plans and autotuning
        9 >>operators: tensor cores                 products of fragments, and tiles in shared memory
        9 >>operators: attention on tensor cores    for heads of up to 128 numbers
        9 >>operators: attention on Hopper          in 16 bits by wgmma and TMA, in code for sm_90a
        9 >>operators: launches of attention        which kernels take a call, and the copies that they need
        9 >>operators: attention on the fp32 units  every other attention
       11 >>gradients                               check and scale, optimizers, rules
       12 >>ranks                                   the reducer over NCCL
       14 >>watch                                   telemetry, a profiler's ranges, statistics of tensors
        6 >>backends: large shared memory           which kernels may use it
        6 >>backends: the table                     all entries, and amp_cuda

   The file is CUDA C++17 that g++ also compiles.  ampc_launch launches the kernels, and PTX is confined to small
   functions with a twin in plain C++. */

#include <cublasLt.h>
#include <cuda_runtime.h>
#if defined(AMP_NVTX)
#  include <nvtx3/nvToolsExt.h>
#endif
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include "amp.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 700
#  error "amp_cuda.cu needs compute capability 7.0 or later: -arch=sm_70 with CUDA 11.8 to 12.9, -arch=sm_75 with any"
#endif
#if CUDART_VERSION < 11080
#  error "amp_cuda.cu needs CUDA 11.8 or later"
#endif

/* AMPC_UNROLL unrolls the loop after it, and AMPC_NO_UNROLL keeps the compiler from unrolling it.  AMPC_SHARED is an
   array of `count` elements in shared memory.  AMPC_DYNAMIC is the launch's dynamic shared memory, as aligned bytes.
   Under g++, these two come from the model that runs kernels on the CPU.  AMPC_KERNEL is a kernel as cudaLaunchKernel
   takes it.  Older toolkits have a template for typed pointers too, which not every compiler can resolve. */
#if defined(__CUDACC__)
#  define AMPC_UNROLL _Pragma("unroll")
#  define AMPC_NO_UNROLL _Pragma("unroll 1")
#  define AMPC_SHARED(type, name, count) __shared__ __align__(16) type name[count]
#  define AMPC_DYNAMIC(name) extern __shared__ __align__(128) unsigned char name[]
#  define AMPC_KERNEL(kernel) ((const void *)(kernel))
#else
#  define AMPC_UNROLL
#  define AMPC_NO_UNROLL
#  define AMPC_SHARED(type, name, count) COC_SHARED(type, name, count)
#  define AMPC_DYNAMIC(name) unsigned char *const name = coc_dynamic_shared()
#  define AMPC_KERNEL(kernel) (kernel)
#endif

namespace {

/* ==== 1 >>base: the device ====
   What an open context holds of its GPU, and the features that decide which kernels run. */

struct ampc_block;
struct ampc_graph;
struct ampc_capture;

enum { AMPC_BUCKETS = 1024, AMPC_CLASSES = 512, AMPC_PLANS = 256 };

struct ampc_plan;

/* cuBLASLt and its plans for products. */
struct ampc_blas {
    cublasLtHandle_t handle;
    int owned;                      /* 1: made by this file; 0: the program's */
    int autotune;
    int64_t cache;                  /* bytes of the GPU's second-level cache */
    int unturned;                   /* 1: a product in TF32 had no memory for transposed operands; atomic */
    int tuning;                     /* threads that measure a product now; atomic */
    pthread_mutex_t lock;           /* guards everything below and the algorithms in plans */
    ampc_plan *plans[AMPC_PLANS];   /* by the hash of their keys; they stay until the context closes */
    int found;                      /* 1 if there are tuned plans that plans_load did not load */
};

/* NVML is the driver's library of sensors, and `device` is its handle of this GPU.  The functions that are used are
   declared here, so that building needs no nvml.h.  Results other than 0 are failures. */
/* In percent of the time since the previous sample. */
struct ampc_nvml_utilization { unsigned gpu, memory; };
struct ampc_nvml_temperature { unsigned version; int sensor, celsius; };
struct ampc_nvml {
    int looked_for;                 /* 1 once it was searched for; what is NULL then does not exist */
    void *library, *device;
    int (*shutdown)(void);
    int (*utilization)(void *device, ampc_nvml_utilization *out);
    int (*temperature)(void *device, ampc_nvml_temperature *out);       /* of newer drivers */
    int (*temperature_before)(void *device, int sensor, unsigned *celsius);
    int (*power)(void *device, unsigned *milliwatts);
};

/* NCCL.  Declares only what is used, so that building needs no nccl.h.  Enumerations are declared as int, and
   communicators as pointers. */
enum { AMPC_NCCL_LEAST = 21400 };       /* 2.14, the first with calls that do not wait for other ranks */
enum { AMPC_NCCL_SUCCESS = 0, AMPC_NCCL_IN_PROGRESS = 7, AMPC_NCCL_SUM = 0 };
enum { AMPC_NCCL_U8 = 1, AMPC_NCCL_F16 = 6, AMPC_NCCL_F32 = 7, AMPC_NCCL_F64 = 8, AMPC_NCCL_BF16 = 9 };
const unsigned AMPC_NCCL_MAGIC = 0xcafebeefu;
struct ampc_nccl_id { char bytes[AMP_COMMUNICATOR_ID]; };
struct ampc_nccl_config { size_t size; unsigned magic, version; int blocking; };
struct ampc_nccl {
    void *opened;                   /* libnccl.so.2, or NULL */
    int (*version)(int *out);
    int (*unique_id)(ampc_nccl_id *out);
    int (*init)(void **comm, int world, ampc_nccl_id id, int rank, ampc_nccl_config *config);
    int (*async_error)(void *comm, int *out);
    int (*finalize)(void *comm);
    int (*destroy)(void *comm);
    int (*abort)(void *comm);
    const char *(*error_text)(int code);
    const char *(*last_error)(void *comm);
    int (*group_start)(void);
    int (*group_end)(void);
    int (*all_reduce)(const void *in, void *out, size_t count, int dtype, int op, void *comm, cudaStream_t stream);
    int (*reduce_scatter)(const void *in, void *out, size_t each, int dtype, int op, void *comm, cudaStream_t stream);
    int (*all_gather)(const void *in, void *out, size_t each, int dtype, void *comm, cudaStream_t stream);
    int (*broadcast)(const void *in, void *out, size_t count, int dtype, int root, void *comm, cudaStream_t stream);
    int (*send)(const void *in, size_t count, int dtype, int peer, void *comm, cudaStream_t stream);
    int (*receive)(void *out, size_t count, int dtype, int peer, void *comm, cudaStream_t stream);
};

/* One call of the reducer.  `count` is how many numbers one part has.  Bytes are passed as numbers of AMP_U8. */
enum ampc_verb { AMPC_REDUCES, AMPC_SCATTERS, AMPC_GATHERS, AMPC_EXCHANGES, AMPC_BROADCASTS };
struct ampc_collective {
    ampc_verb verb;
    const void *in; void *out;
    int64_t count;
    amp_dtype dtype; amp_reduce_op op;
    int32_t root;
    void *all;                      /* for a maximum: every rank's numbers; NULL for other calls */
};

/* This context as a rank among others.  If comm is NULL, it is not a rank. */
enum { AMPC_GROUP = 64, AMPC_WATCHED = 64, AMPC_LOOK_MS = 20 };
struct ampc_ranks {
    ampc_nccl nccl;
    void *comm;
    int32_t rank, world;
    int64_t limit;                  /* how long a rank waits for the others, in ns */
    ampc_collective group[AMPC_GROUP];      /* calls that are not yet begun */
    int32_t grouped, in_group;      /* calls in group; 1 between group_begin and group_end */
    cudaStream_t stream;            /* the group's stream */
    pthread_t watcher;
    int watching, stop;             /* stop is atomic */
    cudaEvent_t events[AMPC_WATCHED];       /* a ring of events, each recorded behind work under way */
    pthread_mutex_t lock;           /* guards everything below */
    int first, watched;             /* the ring's oldest taken place, and how many are taken */
    int8_t noted[AMPC_WATCHED];     /* per place: 0 until its event is recorded, then 1; -1 if recording failed */
    int64_t since;                  /* when the ring's oldest event became the oldest, in ns */
    int users;                      /* calls of NCCL that are under way */
    int broken;                     /* 1 if every call fails, with `why` as the text; atomic */
    char why[384];
};

/* cuTensorMapEncodeTiled, declared here so that building needs no cuda.h, and the values of its enumerations. */
typedef int (*ampc_encode_tiled)(void *map, int type, unsigned rank, void *data, const uint64_t *sizes,
                                 const uint64_t *strides, const unsigned *box, const unsigned *steps, int interleave,
                                 int swizzle, int promotion, int fill);
enum { AMPC_MAP_F16 = 6, AMPC_MAP_BF16 = 9 };
enum { AMPC_MAP_PLAIN = 0, AMPC_MAP_SWIZZLE_128 = 3, AMPC_MAP_L2_128 = 2, AMPC_MAP_ZEROS = 0 };

/* The features of the GPU and of this build.  They are filled at open, and only they decide which kernels run. */
struct ampc_features {
    int cc, image;                  /* compute capability of the GPU and of the code that runs, as 10 major + minor */
    int multiprocessors;
    size_t shared_limit;            /* bytes of shared memory per block */
    size_t workspace;               /* bytes per product; cuBLAS itself takes as many */
    bool bf16, fp8;                 /* usable in products; bf16 stands for TF32 too */
    bool fp8_blocks, fp8_mx;        /* cuBLASLt multiplies fp8 with scales per block; with scales per 32 values */
    bool tensor_cores;              /* kernels of this file use them; in code for older GPUs these are empty */
    bool warpgroups;                /* attention uses wgmma and TMA, which only code for sm_90a has */
    bool pools;                     /* CUDA has memory that is taken and given back in a stream's order */
};
/* The oldest GPU.  CUDA 13 builds for none before Turing, and its libraries do not run on them. */
enum { AMPC_LEAST = CUDART_VERSION >= 13000 ? 75 : 70, AMPC_TENSOR_CORES_FROM = 80 };
/* 1 if this toolkit's cuBLASLt has scales per block. */
#if CUBLAS_VERSION >= 120900
enum { AMPC_BLAS_MODES = 1 };
#else
enum { AMPC_BLAS_MODES = 0 };
#endif

/* One open context's GPU. */
struct ampc_device {
    amp_host host;
    amp_device info;
    int index;
    ampc_features has;
    int (*context_state)(int index, unsigned *flags, int *active);      /* cuDevicePrimaryCtxGetState, or NULL */
    ampc_encode_tiled encode_tiled;         /* cuTensorMapEncodeTiled, or NULL */
    int64_t declined;               /* passes of attention that the driver gave no tensor map for; atomic */
    cudaStream_t stream;            /* the context's stream, which the program gave or amp_open made */
    int owns_stream;
    ampc_blas blas;
    amp_device_memory memory;       /* the program's allocator, or zeros */
    cudaError_t sticky;             /* if not 0, this process can no longer use the GPU; atomic */
    pthread_mutex_t lock;           /* guards everything below but ranks */
    ampc_nvml nvml;
    ampc_ranks ranks;               /* has a separate lock */
    ampc_block *busy[AMPC_BUCKETS]; /* blocks handed out, by address */
    ampc_block *idle[AMPC_CLASSES]; /* blocks to reuse, by size class */
    ampc_graph *graphs;             /* being captured, or made and not destroyed */
    ampc_capture *captures;         /* captures that the program began and that use scratch memory */
    /* In bytes: handed out (rounded up), taken from CUDA, the most handed out so far, pinned. */
    int64_t allocated, reserved, peak, pinned;
};

enum {
    AMPC_LOG_REFUSED = 5001,
    AMPC_LOG_WRONG = 5002,
    AMPC_LOG_TUNED = 5003,
    AMPC_LOG_PLANS = 5004,
    AMPC_LOG_CAPTURE = 5005,
    AMPC_LOG_IMAGE = 5006,
    AMPC_LOG_MAPS = 5007,
    AMPC_LOG_TURNED = 5008
}; /* ids of log messages */

/* ==== 1 >>base: errors ==== */

/* True for errors after which the process can no longer use the GPU. */
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

/* The hint for an error when the call gives none. */
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

/* The error that ended the use of the GPU, or cudaSuccess. */
cudaError_t ampc_loss(const ampc_device *dev) { return __atomic_load_n(&dev->sticky, __ATOMIC_RELAXED); }
/* Notes the error if it is the first.  Returns true to the one thread that noted it. */
bool ampc_first_loss(ampc_device *dev, cudaError_t error) {
    cudaError_t none = cudaSuccess;
    return __atomic_compare_exchange_n(&dev->sticky, &none, error, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

/* Returns AMP_OK, or a failure whose text has the CUDA error's name, the call and a hint.  If `hint` is NULL, the hint
   is that of ampc_advice.  A sticky error is logged once.  Afterwards every call fails in ampc_usable. */
amp_result ampc_check(ampc_device *dev, cudaError_t error, const char *call, const char *hint) {
    char text[512];
    if (error == cudaSuccess) return AMP_OK;
    (void)cudaGetLastError();       /* clear it, so that the program's checks do not see it */
    if (hint == NULL) hint = ampc_advice(error);
    snprintf(text, sizeof text, "amp_cuda: %s on device %d: %s (%s); %s", call, dev->index, cudaGetErrorName(error),
             cudaGetErrorString(error), hint);
    if (ampc_is_sticky(error) && ampc_first_loss(dev, error)) {
        dev->host.log(dev->host.user, AMP_LOG_ERROR, AMP_ERR_DEVICE, text);
    }
    return dev->host.fail(dev->host.user, ampc_result_of(error), text);
}

/* Returns AMP_OK unless an earlier call met a sticky error, or a reduction over the ranks failed. */
amp_result ampc_usable(ampc_device *dev, const char *call) {
    char text[256];
    if (__atomic_load_n(&dev->ranks.broken, __ATOMIC_ACQUIRE))
        return dev->host.fail(dev->host.user, AMP_ERR_REDUCE, dev->ranks.why);
    if (ampc_loss(dev) == cudaSuccess) return AMP_OK;
    snprintf(text, sizeof text,
             "amp_cuda: %s: device %d failed earlier with %s; close the context and start the process "
             "again",
             call, dev->index, cudaGetErrorName(ampc_loss(dev)));
    return dev->host.fail(dev->host.user, AMP_ERR_DEVICE, text);
}

amp_result ampc_refuse(ampc_device *dev, amp_result result, const char *kernel, const char *why) {
    char text[256];
    snprintf(text, sizeof text, "amp_cuda: %s: %s", kernel, why);
    return dev->host.fail(dev->host.user, result, text);
}

#define AMPC_TRY(call) do { amp_result ampc_tried = (call); if (ampc_tried != AMP_OK) return ampc_tried; } while (0)

/* ---- Functions found at run time, and the current device */

/* Finds a function by name.  Returns false if the library lacks it. */
template <class F> bool ampc_symbol(void *library, const char *name, F *out) {
    *out = (F)dlsym(library, name);
    return *out != NULL;
}

/* Finds a function of the driver as it is from `version` of CUDA on.  Returns false if the driver is older.  A toolkit
   before 12.5 takes its own version instead, and if that is older too, it does not find the function. */
template <class F> bool ampc_driver_symbol(const char *name, unsigned version, F *out) {
    void *function = NULL;
#if CUDART_VERSION >= 12050
    cudaDriverEntryPointQueryResult found;
    (void)cudaGetDriverEntryPointByVersion(name, &function, version, 0, &found);
#elif CUDART_VERSION >= 12000
    cudaDriverEntryPointQueryResult found;
    (void)version;
    (void)cudaGetDriverEntryPoint(name, &function, 0, &found);
#else
    (void)version;
    (void)cudaGetDriverEntryPoint(name, &function, 0);
#endif
    (void)cudaGetLastError();
    *out = (F)function;
    return function != NULL;
}
/* Whether the process has a CUDA context on a GPU.  If it has none, cudaSetDevice makes one, from CUDA 12 on. */
bool ampc_has_context(const ampc_device *dev, int index) {
    unsigned flags = 0;
    int active = 0;
    return dev->context_state == NULL || dev->context_state(index, &flags, &active) != 0 || active != 0;
}

/* Makes a context's GPU current for a scope, then restores the previous one.  ready returns AMP_OK, or the failure that
   the call must return. */
struct ampc_current {
    ampc_device *dev;
    int before;
    cudaError_t error;
    explicit ampc_current(ampc_device *d) : dev(d), before(-1), error(cudaSuccess) {
        if (ampc_loss(dev) != cudaSuccess) return;
        error = cudaGetDevice(&before);
        if (error == cudaSuccess && before != dev->index) error = cudaSetDevice(dev->index);
    }
    ~ampc_current() {
        if (before >= 0 && before != dev->index && ampc_has_context(dev, before)) (void)cudaSetDevice(before);
    }
    amp_result ready(const char *call) {
        AMPC_TRY(ampc_usable(dev, call));
        return ampc_check(dev, error, before < 0 ? "cudaGetDevice" : "cudaSetDevice", NULL);
    }
    ampc_current(const ampc_current &) = delete;
    ampc_current &operator=(const ampc_current &) = delete;
};

/* Runs the rest of the function on the context's GPU, or returns why it cannot. */
#define AMPC_ENTER(dev, call) ampc_current ampc_here(dev); AMPC_TRY(ampc_here.ready(call))

/* ==== 1 >>base: launches ==== */

/* The stream of a call.  NULL means the context's stream. */
cudaStream_t ampc_stream(const ampc_device *dev, void *stream) { return stream ? (cudaStream_t)stream : dev->stream; }

template <class T> struct ampc_identity { typedef T type; };

/* Allows kernels all the dynamic shared memory that their static memory leaves.  By default the two together have 48
   KiB.  The setting belongs to the function, and other contexts may be about to launch it.  It is therefore the same
   for all contexts.  ampc_allow_large calls this at open for every kernel that may need so much. */
template <class... K> amp_result ampc_allow_shared(ampc_device *dev, K... kernels) {
    for (const void *kernel : {(const void *)kernels...}) {
        cudaFuncAttributes own;
        AMPC_TRY(ampc_check(dev, cudaFuncGetAttributes(&own, kernel), "cudaFuncGetAttributes", NULL));
        int most = (int)(dev->has.shared_limit - own.sharedSizeBytes);
        AMPC_TRY(ampc_check(dev, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most),
                            "cudaFuncSetAttribute", NULL));
    }
    return AMP_OK;
}

/* Starts a kernel.  `name` is the call that it serves.  Arguments are converted to the kernel's parameter types, so
   that an int is not read as an int64_t.  An empty grid starts nothing. */
template <class... P>
amp_result ampc_launch(ampc_device *dev, const char *name, void (*kernel)(P...), unsigned grid, unsigned block,
                       size_t shared, void *stream, typename ampc_identity<P>::type... args) {
    void *pointers[] = {(void *)&args...};
    cudaError_t error = cudaSuccess;
    char call[96];
    AMPC_ENTER(dev, name);
    if (grid == 0) return AMP_OK;
    error = cudaLaunchKernel(AMPC_KERNEL(kernel), dim3(grid), dim3(block), pointers, shared,
                             ampc_stream(dev, stream));
    if (error == cudaSuccess) return AMP_OK;
    snprintf(call, sizeof call, "cudaLaunchKernel for %s", name);
    return ampc_check(dev, error, call, NULL);
}

/* Multiprocessors do not reach memory equally fast.  If all blocks of a grid run at once, the slowest one decides how
   long the grid takes.  A grid therefore has more blocks with less work each, unless a block first prepares something
   that its loop then reuses.  It has one block for each part of the work, or AMPC_WAVES times as many blocks as run at
   once. */
enum { AMPC_WAVES = 16 };

unsigned ampc_full_grid(int64_t blocks) {
    return (unsigned)(blocks < 0 ? 0 : blocks < INT32_MAX ? blocks : INT32_MAX);
}

/* The number of blocks of a persistent grid.  They are enough for the work, and at most per_sm per multiprocessor. */
unsigned ampc_grid(const ampc_device *dev, int64_t blocks, int per_sm) {
    int64_t most = (int64_t)dev->has.multiprocessors * per_sm;
    return (unsigned)(blocks < 0 ? 0 : blocks < most ? blocks : most);
}

/* How many blocks of `size` elements n elements need. */
__host__ __device__ inline int64_t ampc_blocks(int64_t n, int64_t size) { return (n + size - 1) / size; }

/* A divisor for kernels.  For 0 <= i < 2^63, i / d = 2 i factor / 2^(64 + shift) (Granlund and Montgomery 1994).  A
   64-bit division would take a hundred instructions. */
struct ampc_divisor {
    int64_t d;
    uint64_t factor;
    int shift;
    ampc_divisor(int64_t by = 1) : d(by), shift(0) {
        __extension__ typedef unsigned __int128 wide;
        const uint64_t least = d > 1 ? (uint64_t)d : 1;
        while ((uint64_t)1 << shift < least) shift++;
        factor = (uint64_t)((((wide)1 << (63 + shift)) + (wide)(least - 1)) / (wide)least);
    }
};
/* i / d, and i % d in *rest. */
__device__ __forceinline__ int64_t ampc_divide(int64_t i, const ampc_divisor &by, int64_t *rest) {
    int64_t q = (int64_t)(__umul64hi(2 * (uint64_t)i, by.factor) >> by.shift);
    *rest = i - q * by.d;
    return q;
}

/* Device memory for the kernels of one call, in its stream's order.  It is freed when the scope ends.  get returns
   AMP_OK and sets .data, which is 256-byte aligned, or it fails, with AMP_ERR_MEMORY if there is no memory. */
struct ampc_scratch {
    ampc_device *dev;
    cudaStream_t stream;
    void *data;
    ampc_scratch(ampc_device *d, void *s) : dev(d), stream(ampc_stream(d, s)), data(NULL) {}
    ~ampc_scratch();
    amp_result get(size_t bytes, const char *kernel);
    void *keep() {                  /* the caller frees it with ampc_free */
        void *kept = data;
        data = NULL;
        return kept;
    }
    ampc_scratch(const ampc_scratch &) = delete;
    ampc_scratch &operator=(const ampc_scratch &) = delete;
};

/* ==== 2 >>numbers: storage ====
   Storage types, and their conversions to and from fp32.  These give the bits of amp.h's scalar functions. */

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

/* The address of element i of an array whose dtype is known only at run time. */
__host__ __device__ inline void *ampc_at(void *data, amp_dtype dtype, int64_t i) {
    return (char *)data + i * ampc_dtype_size(dtype);
}
__host__ __device__ inline const void *ampc_at(const void *data, amp_dtype dtype, int64_t i) {
    return (const char *)data + i * ampc_dtype_size(dtype);
}

/* Conversions to fp16 and bf16 keep a NaN's sign and upper payload bits, as amp.h does.  The hardware alone would make
   all NaNs the same.  In conversions from fp16, NaN stays NaN, but its payload may change. */
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
    return x;
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

/* Products, sums, quotients and roots with one rounding each.  No compiler fuses or replaces them. */
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

/* Returns x in a way that the compiler cannot see through.  The compiler then does not keep values computed from x,
   such as each piece's address, in registers. */
template <class T> __device__ __forceinline__ T ampc_afresh(T x) {
#if defined(__CUDA_ARCH__)
    asm volatile("" : "+r"(x));
#endif
    return x;
}

/* Returns AMP_OK if the dtype is one of storage, and refuses other dtypes. */
amp_result ampc_check_storage(ampc_device *dev, const char *kernel, amp_dtype dtype) {
    if (dtype == AMP_F32 || dtype == AMP_F16 || dtype == AMP_BF16) return AMP_OK;
    return ampc_refuse(dev, AMP_ERR_DTYPE, kernel, "storage must be fp32, fp16 or bf16");
}

/* Calls run(dtype) with a constant, so that the dtype is tested once.  If short branches tested it at each use, both
   ways would be executed.  V is the width of the pieces.  A dtype other than fp16 and bf16 is taken as fp32.  Pieces of
   8 are never in fp32, so with a V of 8 a dtype other than fp16 is taken as bf16. */
template <amp_dtype D> struct ampc_constant {
    __device__ constexpr operator amp_dtype() const { return D; }
};
template <int V = 1, class F> __device__ __forceinline__ auto ampc_by_dtype(amp_dtype dtype, F run) {
    if (dtype == AMP_F16) return run(ampc_constant<AMP_F16>());
    if (V == 8 || dtype == AMP_BF16) return run(ampc_constant<AMP_BF16>());
    if constexpr (V < 8) return run(ampc_constant<AMP_F32>());
}

/* ==== 2 >>numbers: lanes ====
   A piece is a thread's part of an array: V neighbouring elements, read and written at once and held as they lie in
   memory.  It has 16 bytes at most, which are 8 elements of 16 bits or 4 of 32.  All loads and stores belong to one
   family.  A dtype may be a constant.

       ampc_get_bytes   ampc_put_bytes     2 to 16 bytes
       ampc_piece_get   ampc_piece_put     a piece
       ampc_piece_read  ampc_piece_write   a piece of a row; beyond the row's end it reads 0, and writes nothing
       ampc_widen       ampc_narrow        a piece in fp32
       ampc_load        ampc_store         V numbers in fp32; 8 may be of 32 bits, in two pieces
       ampc_load_upto   ampc_store_upto    the first n of them, at any address
       ampc_stored      ampc_put_stored    number i
       ampc_fetch       ampc_leave         N elements in the array's type; with _upto the first n, at any address

   The other addresses are multiples of the piece's bytes. */

enum { AMPC_LANES = 8 };
enum ampc_reuse { AMPC_KEEP, AMPC_ONCE };       /* ONCE: not used again soon, so the cache may drop it first */

template <int BYTES, ampc_reuse R = AMPC_KEEP> __device__ __forceinline__ uint4 ampc_get_bytes(const void *p) {
    uint4 raw = {0, 0, 0, 0};
    if constexpr (BYTES == 16) {
#if defined(__CUDA_ARCH__)
        if (R == AMPC_ONCE) return __ldcs((const uint4 *)p);
#endif
        raw = *(const uint4 *)p;
    } else if constexpr (BYTES == 8) {
        uint2 half = *(const uint2 *)p;
        raw.x = half.x;
        raw.y = half.y;
    } else if constexpr (BYTES == 4) raw.x = *(const uint32_t *)p;
    else raw.x = *(const uint16_t *)p;
    return raw;
}
template <int BYTES, ampc_reuse R = AMPC_KEEP>
__device__ __forceinline__ void ampc_put_bytes(void *p, const uint4 &raw) {
    if constexpr (BYTES == 16) {
#if defined(__CUDA_ARCH__)
        if (R == AMPC_ONCE) return __stcs((uint4 *)p, raw);
#endif
        *(uint4 *)p = raw;
    } else if constexpr (BYTES == 8) *(uint2 *)p = uint2{raw.x, raw.y};
    else if constexpr (BYTES == 4) *(uint32_t *)p = raw.x;
    else *(uint16_t *)p = (uint16_t)raw.x;
}

__device__ __forceinline__ uint32_t ampc_word(const uint4 &x, int i) {
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}
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
template <int V> __device__ __forceinline__ void ampc_widen(const uint4 &raw, amp_dtype dtype, float *x) {
    if (V < 8 && dtype == AMP_F32) {
        AMPC_UNROLL
        for (int i = 0; i < V; i++) x[i] = ampi_f32_of_bits(ampc_word(raw, i & 3));
    } else if (dtype == AMP_F16) {
        AMPC_UNROLL
        for (int i = 0; i < V; i++) x[i] = ampc_f16_value((uint16_t)(ampc_word(raw, i / 2) >> 16 * (i & 1)));
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

/* The address of element `at` of a stored row.  I is int within a chunk, so that a thread keeps 32-bit offsets. */
template <class I> __device__ __forceinline__ const void *ampc_within(const void *row, amp_dtype dtype, I at) {
    return (const char *)row + at * (dtype == AMP_F32 ? 4 : 2);
}
template <class I> __device__ __forceinline__ void *ampc_within(void *row, amp_dtype dtype, I at) {
    return (char *)row + at * (dtype == AMP_F32 ? 4 : 2);
}

template <int V, ampc_reuse R = AMPC_KEEP>
__device__ __forceinline__ uint4 ampc_piece_get(const void *p, amp_dtype dtype) {
    if (V < 8 && dtype == AMP_F32) return ampc_get_bytes<V < 8 ? 4 * V : 16, R>(p);
    return ampc_get_bytes<2 * V, R>(p);
}
template <int V, ampc_reuse R = AMPC_KEEP>
__device__ __forceinline__ void ampc_piece_put(void *p, amp_dtype dtype, const uint4 &raw) {
    if (V < 8 && dtype == AMP_F32) ampc_put_bytes<V < 8 ? 4 * V : 16, R>(p, raw);
    else ampc_put_bytes<2 * V, R>(p, raw);
}

/* The piece at `at` of a row that ends at `end`, a multiple of V. */
template <int V, class I>
__device__ __forceinline__ uint4 ampc_piece_read(const void *row, amp_dtype dtype, I at, I end) {
    return at < end ? ampc_piece_get<V>(ampc_within(row, dtype, at), dtype) : uint4{0, 0, 0, 0};
}
template <int V, class I> __device__ __forceinline__ void ampc_piece_write(void *row, amp_dtype dtype, I at, I end,
                                                                           const uint4 &raw) {
    if (at < end) ampc_piece_put<V>(ampc_within(row, dtype, at), dtype, raw);
}

template <int V, ampc_reuse R = AMPC_KEEP>
__device__ __forceinline__ void ampc_load(const void *p, amp_dtype dtype, float *x) {
    if (V == 8 && dtype == AMP_F32) {
        uint4 low = ampc_piece_get<4, R>(p, dtype), high = ampc_piece_get<4, R>(ampc_within(p, dtype, 4), dtype);
        ampc_widen<4>(low, dtype, x);
        ampc_widen<4>(high, dtype, x + V - 4);
    } else ampc_widen<V>(ampc_piece_get<V, R>(p, dtype), dtype, x);
}
template <int V, ampc_reuse R = AMPC_KEEP>
__device__ __forceinline__ void ampc_store(void *p, amp_dtype dtype, const float *x) {
    if (V == 8 && dtype == AMP_F32) {
        ampc_piece_put<4, R>(p, dtype, ampc_narrow<4>(x, dtype));
        ampc_piece_put<4, R>(ampc_within(p, dtype, 4), dtype, ampc_narrow<4>(x + V - 4, dtype));
    } else ampc_piece_put<V, R>(p, dtype, ampc_narrow<V>(x, dtype));
}

__device__ __forceinline__ float ampc_stored(const void *p, amp_dtype dtype, int64_t i) {
    float x;
    ampc_load<1>(ampc_within(p, dtype, i), dtype, &x);
    return x;
}
__device__ __forceinline__ void ampc_put_stored(void *p, amp_dtype dtype, int64_t i, float x) {
    ampc_store<1>(ampc_within(p, dtype, i), dtype, &x);
}

/* True if the pointer allows accesses of 16 bytes.  For rows, their distance in bytes must allow them too. */
__host__ __device__ inline bool ampc_aligned(const void *p, int64_t row_bytes = 0) {
    return (((uintptr_t)p | (uintptr_t)row_bytes) & 15) == 0;
}

/* Loads give 0 for numbers beyond n, and stores leave those numbers in memory as they are. */
template <int V, ampc_reuse R = AMPC_KEEP>
__device__ __forceinline__ void ampc_load_upto(const void *p, amp_dtype dtype, float *x, int64_t n) {
    if (n >= V && ampc_aligned(p)) return ampc_load<V, R>(p, dtype, x);
    AMPC_UNROLL
    for (int i = 0; i < V; i++) x[i] = i < n ? ampc_stored(p, dtype, i) : 0.0f;
}
template <int V, ampc_reuse R = AMPC_KEEP>
__device__ __forceinline__ void ampc_store_upto(void *p, amp_dtype dtype, const float *x, int64_t n) {
    if (n >= V && ampc_aligned(p)) return ampc_store<V, R>(p, dtype, x);
    AMPC_UNROLL
    for (int i = 0; i < V; i++)
        if (i < n) ampc_put_stored(p, dtype, i, x[i]);
}

/* The N elements of one thread, which take up to 16 bytes or a multiple of 16.  An access takes `each` bytes.  whole is
   true if all N elements exist and are aligned for such accesses. */
template <class T, int N> struct ampc_own {
    enum { bytes = N * (int)sizeof(T), each = bytes < 16 ? bytes : 16 };
    static __device__ bool whole(const T *p, int64_t n) { return n >= N && (uintptr_t)p % each == 0; }
};
template <ampc_reuse R = AMPC_KEEP, class T, int N> __device__ __forceinline__ void ampc_fetch(const T *p, T (&x)[N]) {
    enum { each = ampc_own<T, N>::each };
    AMPC_UNROLL
    for (int i = 0; i < ampc_own<T, N>::bytes; i += each) {
        uint4 raw = ampc_get_bytes<each, R>((const char *)p + i);
        memcpy((char *)x + i, &raw, each);
    }
}
template <ampc_reuse R = AMPC_KEEP, class T, int N> __device__ __forceinline__ void ampc_leave(T *p, const T (&x)[N]) {
    enum { each = ampc_own<T, N>::each };
    AMPC_UNROLL
    for (int i = 0; i < ampc_own<T, N>::bytes; i += each) {
        uint4 raw = {0, 0, 0, 0};
        memcpy(&raw, (const char *)x + i, each);
        ampc_put_bytes<each, R>((char *)p + i, raw);
    }
}
template <ampc_reuse R = AMPC_KEEP, class T, int N>
__device__ __forceinline__ void ampc_fetch_upto(const T *p, T (&x)[N], int64_t n) {
    if (ampc_own<T, N>::whole(p, n)) return ampc_fetch<R>(p, x);
    AMPC_UNROLL
    for (int i = 0; i < N; i++) x[i] = i < n ? p[i] : T();
}
template <ampc_reuse R = AMPC_KEEP, class T, int N>
__device__ __forceinline__ void ampc_leave_upto(T *p, const T (&x)[N], int64_t n) {
    if (ampc_own<T, N>::whole(p, n)) return ampc_leave<R>(p, x);
    AMPC_UNROLL
    for (int i = 0; i < N; i++)
        if (i < n) p[i] = x[i];
}

/* The random words of a seed from `first` on; N is 1 or a multiple of 4. */
template <int N> __device__ __forceinline__ void ampc_random(uint64_t seed, uint64_t first, uint32_t (&words)[N]) {
    const int shift = (int)(first % 4);
    uint32_t all[(N / 4 + 1) * 4 + 3] = {};
    AMPC_UNROLL
    for (int b = 0; b < N / 4 + 1; b++)
        if (b == 0 || b < N / 4 || shift != 0) amp_philox(seed, 0, first / 4 + (uint64_t)b, all + 4 * b);
    AMPC_UNROLL
    for (int i = 0; i < N; i++)
        words[i] = shift == 0 ? all[i] : shift == 1 ? all[i + 1] : shift == 2 ? all[i + 2] : all[i + 3];
}

/* ==== 2 >>numbers: sums ====
   Sums and maxima over a warp and over a block, in one fixed order, with the result in every thread.  Blocks consist of
   whole warps.  `scratch` is 32 values of shared memory, which may be used again at once. */

template <class T> __device__ __forceinline__ T ampc_warp_sum(T x) {
    AMPC_UNROLL
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}
/* The larger number, or NaN if one of them is NaN. */
template <class T> __device__ __forceinline__ T ampc_larger(T a, T b) { return a >= b || a != a ? a : b; }
template <class T> __device__ __forceinline__ T ampc_warp_max(T x) {
    AMPC_UNROLL
    for (int step = 16; step > 0; step >>= 1) x = ampc_larger(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}
template <class T> __device__ __forceinline__ T ampc_block_sum(T x, T *scratch) {
    unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    x = ampc_warp_sum(x);
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    x = ampc_warp_sum(lane < warps ? scratch[lane] : (T)0);
    __syncthreads();
    return x;
}
template <class T> __device__ __forceinline__ T ampc_block_max(T x, T *scratch) {
    unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    x = ampc_warp_max(x);
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    x = ampc_warp_max(scratch[lane < warps ? lane : 0]);
    __syncthreads();
    return x;
}

/* ==== 6 >>backends: the arena ====
   Freed memory stays in the arena for later requests of the same size class.  There are eight classes per octave, so at
   most an eighth is lost to rounding.  The arena notes the last owner of each idle block, which is a stream or a graph.
   A stream's later work runs after all work that uses the block, so only that stream may reuse the block at once.  A
   graph uses its blocks again at every launch.  When CUDA has no more memory, blocks that no graph holds go back to
   CUDA, and the request is tried once more.

   The program may destroy any stream but the context's, without waiting for its work, and a new stream may then have
   the same handle.  Therefore an event marks the end of each use by such a stream, and the next use in a stream of that
   handle waits for the event.  cudaStreamGetId would tell the two streams apart, but not when the first one's work is
   done, and needs CUDA 12. */

struct ampc_block {
    void *data;
    size_t bytes;                   /* the size of its class */
    const void *owner;              /* a stream, an ampc_graph or an ampc_capture; NULL: unused */
    cudaEvent_t used;               /* NULL before the first mark */
    bool marked;                    /* `used` is recorded behind the last use */
    bool ordered;                   /* taken while a product is measured; goes back after it, in its stream's order */
    ampc_block *next;
};

/* A graph, from the beginning of its capture on. */
struct ampc_graph {
    cudaStream_t stream;            /* the captured one; later the last one that it was launched on */
    int capturing;
    int reduces;                    /* 1 if it exchanges data with other ranks */
    cudaGraphExec_t exec;
    cudaEvent_t used;               /* behind its last launch on another stream than the context's; NULL: none yet */
    ampc_graph *next;
};

/* One stream's part in a capture that the program itself began.  Streams that were forked from it are branches of one
   graph.  Branches run at the same time, so each has separate memory.  The arena holds this record.  A CUDA user object
   holds it too while the graph or an instance of it lives, possibly longer than the context. */
struct ampc_capture {
    unsigned long long id;
    cudaStream_t stream;
    int holders;
    bool lasting;                   /* no user object tells when the graph ends: held until the context is closed */
    ampc_capture *next;
};

/* Locks a mutex for a scope.  While it is locked, no function is called that may wait or call back.  That excludes the
   functions of CUDA, of cuBLASLt and of amp_host, and the program's allocator. */
struct ampc_locked {
    pthread_mutex_t *lock;
    explicit ampc_locked(pthread_mutex_t *l) : lock(l) { pthread_mutex_lock(lock); }
    explicit ampc_locked(ampc_device *dev) : ampc_locked(&dev->lock) {}
    ~ampc_locked() { pthread_mutex_unlock(lock); }
    ampc_locked(const ampc_locked &) = delete;
    ampc_locked &operator=(const ampc_locked &) = delete;
};

/* Lets a thread allocate while it captures a stream.  The allocation does not become part of the graph. */
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

/* Rounds a size up to the size of its class.  The classes are an eighth of their octave apart, and 512 bytes at
   least. */
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

/* Hands one owner's idle blocks to another.  Nothing may use them any more if there is none. */
void ampc_hand_over(ampc_device *dev, const void *from, const void *to) {
    for (int i = 0; i < AMPC_CLASSES; i++)
        for (ampc_block *block = dev->idle[i]; block != NULL; block = block->next) {
            if (block->owner != from) continue;
            block->owner = to;
            if (to == NULL) block->marked = false;
        }
}

void ampc_capture_release(void *held) {
    ampc_capture *capture = (ampc_capture *)held;
    if (__atomic_sub_fetch(&capture->holders, 1, __ATOMIC_ACQ_REL) == 0) free(capture);
}

/* Releases the memory of captures whose graphs are known to exist no longer.  If `all` is true, it does the same for
   the other captures. */
void ampc_captures_end(ampc_device *dev, bool all) {
    for (ampc_capture **link = &dev->captures, *capture; (capture = *link) != NULL;) {
        const bool held = capture->lasting || __atomic_load_n(&capture->holders, __ATOMIC_ACQUIRE) > 1;
        if (held && !all) { link = &capture->next; continue; }
        *link = capture->next;
        ampc_hand_over(dev, capture, NULL);
        ampc_capture_release(capture);
    }
}

/* Makes the record of a stream's part in a capture that the program began.  The arena and the graph hold it.  If CUDA
   makes no user object, or does not tie it to the graph, nothing tells when the graph ends.  Then the memory stays the
   graph's until the context is closed. */
ampc_capture *ampc_capture_new(unsigned long long id, cudaStream_t stream, cudaGraph_t graph) {
    cudaUserObject_t object;
    ampc_capture *capture = (ampc_capture *)malloc(sizeof *capture);
    if (capture == NULL) return NULL;
    capture->id = id;
    capture->stream = stream;
    capture->holders = 2;
    capture->lasting = true;
    if (cudaUserObjectCreate(&object, capture, ampc_capture_release, 1, cudaUserObjectNoDestructorSync) != cudaSuccess)
        capture->holders = 1;
    else if (cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove) != cudaSuccess)
        (void)cudaUserObjectRelease(object, 1);         /* which takes its hold back */
    else capture->lasting = false;
    (void)cudaGetLastError();
    return capture;
}

cudaError_t ampc_capture_info(cudaStream_t stream, cudaStreamCaptureStatus *status, unsigned long long *id,
                              cudaGraph_t *graph) {
#if CUDART_VERSION >= 13000
    return cudaStreamGetCaptureInfo(stream, status, id, graph);
#else
    return cudaStreamGetCaptureInfo_v2(stream, status, id, graph);
#endif
}

cudaError_t ampc_graph_instantiate(cudaGraphExec_t *exec, cudaGraph_t graph) {
#if CUDART_VERSION >= 12000
    return cudaGraphInstantiate(exec, graph, 0);
#else
    return cudaGraphInstantiate(exec, graph, NULL, NULL, 0);
#endif
}

/* The owner of the memory that a stream uses in a capture, or NULL if there is none yet.  If `made` is not NULL, it is
   a new record, which is added to the list then and returned. */
const void *ampc_capture_owner(ampc_device *dev, cudaStream_t stream, unsigned long long id, ampc_capture *made) {
    ampc_locked locked(dev);
    ampc_capture *capture = dev->captures;
    for (ampc_graph *graph = dev->graphs; graph != NULL; graph = graph->next)
        if (graph->capturing && graph->stream == stream) return graph;
    while (capture != NULL && (capture->id != id || capture->stream != stream)) capture = capture->next;
    if (capture != NULL || made == NULL) return capture;
    made->next = dev->captures;
    return dev->captures = made;
}

/* Sets *owner to the owner of scratch memory that is used on a stream.  It is the stream, or the stream's branch of the
   graph that it is being captured into. */
amp_result ampc_owner_of(ampc_device *dev, cudaStream_t stream, const char *kernel, const void **owner) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    cudaGraph_t captured = NULL;
    AMPC_TRY(ampc_check(dev, ampc_capture_info(stream, &status, &id, &captured), "cudaStreamGetCaptureInfo", NULL));
    *owner = stream;
    if (status != cudaStreamCaptureStatusActive) return AMP_OK;
    *owner = ampc_capture_owner(dev, stream, id, NULL);
    if (*owner != NULL) return AMP_OK;
    ampc_capture *made = ampc_capture_new(id, stream, captured);
    if (made == NULL) return ampc_refuse(dev, AMP_ERR_MEMORY, kernel, "no host memory for the capture");
    *owner = ampc_capture_owner(dev, stream, id, made);
    /* another thread that captures from the same stream was faster */
    if (*owner != made) ampc_capture_release(made);
    return AMP_OK;
}

/* The stream whose work uses an owner's memory.  *held is set to whether a graph may use the memory at any time. */
cudaStream_t ampc_stream_of(ampc_device *dev, const void *owner, bool *held) {
    *held = true;
    for (ampc_graph *graph = dev->graphs; graph != NULL; graph = graph->next)
        if (graph == owner) return graph->stream;
    for (ampc_capture *capture = dev->captures; capture != NULL; capture = capture->next)
        if (capture == owner) return dev->stream;
    *held = false;
    return owner == NULL ? dev->stream : (cudaStream_t)const_cast<void *>(owner);
}

/* Gets memory from CUDA or from the program's allocator.  ampc_block_new refuses blocks of the latter that are aligned
   less than CUDA's.  cudaFree takes memory of either kind. */
enum { AMPC_ALIGN = 256 };
cudaError_t ampc_memory_get(ampc_device *dev, cudaStream_t stream, void **data, size_t bytes, bool ordered) {
    if (dev->memory.alloc == NULL)
        return ordered && dev->has.pools ? cudaMallocAsync(data, bytes, stream) : cudaMalloc(data, bytes);
    *data = dev->memory.alloc(dev->memory.user, bytes, dev->index, stream);
    return *data != NULL ? cudaSuccess : cudaErrorMemoryAllocation;
}

void ampc_memory_give(ampc_device *dev, void *data, size_t bytes, void *stream) {
    if (dev->memory.alloc == NULL) (void)cudaFree(data);
    else dev->memory.free(dev->memory.user, data, bytes, dev->index, stream);
}

/* Takes idle blocks out of the arena.  Without `all`, it leaves those that a graph holds.  A block's owner is then the
   stream in whose order it is given back.  That is the context's if the owner may have been destroyed. */
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
            block->owner = block->marked ? dev->stream : stream;
            block->next = unused;
            unused = block;
            dev->reserved -= (int64_t)block->bytes;
        }
    }
    return unused;
}

/* Gives these blocks back to CUDA, or to the program's allocator.  cudaFree waits for the device.  The program's
   allocator may not wait, so this waits for the mark. */
void ampc_trim(ampc_device *dev, bool all) {
    ampc_relaxed relaxed;
    for (ampc_block *block = ampc_unused(dev, all), *next; block != NULL; block = next) {
        next = block->next;
        if (block->marked && dev->memory.alloc != NULL) (void)cudaEventSynchronize(block->used);
        if (block->used != NULL) (void)cudaEventDestroy(block->used);
        ampc_memory_give(dev, block->data, block->bytes, const_cast<void *>(block->owner));
        dev->host.free(dev->host.user, block, sizeof *block);
    }
    (void)cudaGetLastError();
}

/* Gives back the ordered memory that a stream has taken, in the stream's order.  Only if CUDA has no such memory, it
   waits for the device, as cudaFree does. */
void ampc_trim_ordered(ampc_device *dev, cudaStream_t stream) {
    ampc_block *unused = NULL;
    {
        ampc_locked locked(dev);
        for (int i = 0; i < AMPC_CLASSES; i++)
            for (ampc_block **link = &dev->idle[i], *block; (block = *link) != NULL;) {
                if (!block->ordered || block->owner != stream) { link = &block->next; continue; }
                *link = block->next;
                block->next = unused;
                unused = block;
                dev->reserved -= (int64_t)block->bytes;
            }
    }
    for (ampc_block *block = unused, *next; block != NULL; block = next) {
        next = block->next;
        if (block->marked) (void)cudaStreamWaitEvent(stream, block->used, 0);
        if (block->used != NULL) (void)cudaEventDestroy(block->used);
        if (dev->memory.alloc != NULL || !dev->has.pools || cudaFreeAsync(block->data, stream) != cudaSuccess)
            ampc_memory_give(dev, block->data, block->bytes, stream);
        dev->host.free(dev->host.user, block, sizeof *block);
    }
    (void)cudaGetLastError();
}

amp_result ampc_no_memory(ampc_device *dev, cudaError_t error, size_t bytes, const char *call, bool ordered) {
    const char *function = ordered && dev->has.pools ? "cudaMallocAsync" : "cudaMalloc";
    char hint[192];
    long long allocated, reserved;
    {
        ampc_locked locked(dev);
        allocated = dev->allocated;
        reserved = dev->reserved;
    }
    snprintf(hint, sizeof hint, "%zu bytes for %s with %lld in use of %lld reserved: use a smaller batch", bytes, call,
             allocated, reserved);
    return ampc_check(dev, error, dev->memory.alloc == NULL ? function : "the host's own alloc",
                      error == cudaErrorMemoryAllocation ? hint : NULL);
}

/* Makes a block.  `stream` is the stream of its first use, and an ordered block's only one. */
amp_result ampc_block_new(ampc_device *dev, cudaStream_t stream, size_t bytes, const char *call, bool ordered,
                          ampc_block **out) {
    ampc_relaxed relaxed;
    ampc_block *block = (ampc_block *)dev->host.alloc(dev->host.user, sizeof *block, sizeof(void *));
    if (block == NULL) return ampc_refuse(dev, AMP_ERR_MEMORY, call, "no host memory for the arena's list");
    cudaError_t error = ampc_memory_get(dev, stream, &block->data, bytes, ordered);
    if (error == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError();
        ampc_trim(dev, false);
        error = ampc_memory_get(dev, stream, &block->data, bytes, ordered);
    }
    if (error != cudaSuccess) {
        dev->host.free(dev->host.user, block, sizeof *block);
        return ampc_no_memory(dev, error, bytes, call, ordered);
    }
    if ((uintptr_t)block->data % AMPC_ALIGN != 0) {
        amp_result r = ampc_refuse(dev, AMP_ERR_RANGE, call,
                                   ".memory.alloc must return memory that is 256-byte aligned, as cudaMalloc's is");
        ampc_memory_give(dev, block->data, bytes, stream);
        dev->host.free(dev->host.user, block, sizeof *block);
        return r;
    }
    block->bytes = bytes;
    block->used = NULL;
    block->marked = false;
    block->ordered = ordered;
    *out = block;
    return AMP_OK;
}

/* Takes out an idle block of this class that `owner` may use at once, or returns NULL.  *stream is set to the owner's
   stream. */
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

void ampc_give(ampc_device *dev, const void *data);

/* Takes memory for `owner`, and for a while only if it is ordered.  The device must be current. */
amp_result ampc_take(ampc_device *dev, const void *owner, size_t bytes, const char *call, bool ordered, void **data) {
    size_t size = ampc_class_bytes(bytes);
    cudaStream_t stream;
    ampc_block *block = ampc_idle(dev, owner, size, &stream);
    bool made = block == NULL;
    if (made) AMPC_TRY(ampc_block_new(dev, stream, size, call, ordered, &block));
    {
        ampc_locked locked(dev);
        ampc_block **bucket = ampc_busy_bucket(dev, block->data);
        block->owner = owner;
        block->next = *bucket;
        *bucket = block;
        if (made) dev->reserved += (int64_t)size;
        dev->allocated += (int64_t)size;
        if (dev->allocated > dev->peak) dev->peak = dev->allocated;
    }
    *data = block->data;
    if (!block->marked) return AMP_OK;
    amp_result result = ampc_check(dev, cudaStreamWaitEvent(stream, block->used, 0), "cudaStreamWaitEvent", NULL);
    if (result == AMP_OK) return AMP_OK;
    *data = NULL;
    ampc_locked locked(dev);
    ampc_give(dev, block->data);
    return result;
}

/* The list's link to the block at this address.  It holds NULL if no such block is handed out. */
ampc_block **ampc_busy_link(ampc_device *dev, const void *data) {
    ampc_block **link = ampc_busy_bucket(dev, data);
    while (*link != NULL && (*link)->data != data) link = &(*link)->next;
    return link;
}

void ampc_give(ampc_device *dev, const void *data) {
    ampc_block **link = ampc_busy_link(dev, data), *block = *link;
    if (block == NULL) return;
    *link = block->next;
    block->next = dev->idle[ampc_class(block->bytes)];
    dev->idle[ampc_class(block->bytes)] = block;
    dev->allocated -= (int64_t)block->bytes;
}

/* Marks the end of a stream's use of a block.  Without an event, this waits for the stream. */
void ampc_mark(ampc_device *dev, ampc_block *block, cudaStream_t stream) {
    cudaError_t error = cudaSuccess;
    if (ampc_loss(dev) != cudaSuccess) return;
    ampc_current current(dev);
    if (block->used == NULL) error = cudaEventCreateWithFlags(&block->used, cudaEventDisableTiming);
    if (error == cudaSuccess) error = cudaEventRecord(block->used, stream);
    block->marked = error == cudaSuccess;
    if (block->marked) return;
    (void)cudaStreamSynchronize(stream);
    (void)cudaGetLastError();
    block->owner = NULL;
}

/* Takes back memory that is no longer used after the work that its owner has queued. */
void ampc_release(ampc_device *dev, const void *data) {
    cudaStream_t stream;
    ampc_block *block;
    {
        bool held = true;
        ampc_locked locked(dev);
        block = *ampc_busy_link(dev, data);
        stream = block == NULL ? dev->stream : ampc_stream_of(dev, block->owner, &held);
        if (held || stream == dev->stream) {
            ampc_give(dev, data);
            return;
        }
    }
    ampc_mark(dev, block, stream);
    ampc_locked locked(dev);
    ampc_give(dev, data);
}

amp_result ampc_scratch::get(size_t bytes, const char *kernel) {
    AMPC_ENTER(dev, kernel);
    const void *owner;
    AMPC_TRY(ampc_owner_of(dev, stream, kernel, &owner));
    const bool ordered = owner == stream && __atomic_load_n(&dev->blas.tuning, __ATOMIC_RELAXED) > 0;
    return ampc_take(dev, owner, bytes, kernel, ordered, &data);
}

ampc_scratch::~ampc_scratch() {
    if (data != NULL) ampc_release(dev, data);
}

/* ==== 6 >>backends: runtime ====
   The table's entries for opening and closing, memory, streams, events and graphs. */

amp_result ampc_image(ampc_device *dev, int *image, bool *is_90a);
amp_result ampc_allow_large(ampc_device *dev);
void ampc_graph_destroy(void *device, void *graph);
ampc_graph *ampc_captured(ampc_device *dev, cudaStream_t stream);
void ampc_capture_drop(ampc_device *dev, cudaStream_t stream);
amp_result ampc_blas_open(ampc_device *dev);
void ampc_blas_close(ampc_device *dev);
void ampc_nvml_close(ampc_nvml *nvml);
void ampc_ranks_close(ampc_device *dev);
amp_result ampc_ranks_note(ampc_device *dev, cudaStream_t stream);

/* ---- Opening and closing */

/* The attributes of this kernel name the architecture that the running code was compiled for.  Without -arch, nvcc
   builds for its oldest architecture, and the driver translates that code for newer GPUs.  __CUDA_ARCH__, and all code
   under #if, are then those of the old architecture.  The size of its shared memory, which the compiler may round up,
   tells sm_90a from sm_90. */
enum { AMPC_MARKER = 16, AMPC_MARKER_90A = 1024 };
__global__ void ampc_marker_kernel() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    AMPC_SHARED(unsigned char, marker, AMPC_MARKER_90A);
#else
    AMPC_SHARED(unsigned char, marker, AMPC_MARKER);
#endif
    volatile unsigned char *kept = marker;      /* without a use, the compiler would leave it out */
    *kept = 0;
}

amp_result ampc_image(ampc_device *dev, int *image, bool *is_90a) {
    cudaFuncAttributes attributes;
    char hint[96];
    snprintf(hint, sizeof hint, "compile amp_cuda.cu with -arch for this GPU: -arch=sm_%d%s", dev->has.cc,
             dev->has.cc == 90 ? "a" : "");
    AMPC_TRY(ampc_check(dev, cudaFuncGetAttributes(&attributes, (const void *)ampc_marker_kernel),
                        "cudaFuncGetAttributes", hint));
    /* ptxVersion is 10 __CUDA_ARCH__ / 100, also for machine code; cub::PtxVersion relies on it */
    *image = attributes.ptxVersion;
    *is_90a = attributes.sharedSizeBytes >= AMPC_MARKER_90A;
    return AMP_OK;
}

/* Finds out whether attention can use warpgroups, which amp_desc.wgmma asks for.  If something is missing, it is
   logged. */
void ampc_find_warpgroups(ampc_device *dev, bool is_90a, const char *name) {
    char text[320];
    bool encodes = ampc_driver_symbol("cuTensorMapEncodeTiled", 12000, &dev->encode_tiled);
    dev->has.warpgroups = dev->has.cc == 90 && is_90a && encodes;
    if (dev->has.warpgroups) return;
    snprintf(text, sizeof text, "amp_cuda: amp_desc.wgmma is set, but attention on %.127s uses mma.sync: %s", name,
             dev->has.cc != 90        ? "it needs a GPU of compute capability 9.0"
             : CUDART_VERSION < 12000 ? "compile amp_cuda.cu with CUDA 12 or later and -arch=sm_90a"
             : !is_90a                ? "compile amp_cuda.cu with -arch=sm_90a"
                                      : "the driver is older than CUDA 12; update it");
    dev->host.log(dev->host.user, AMP_LOG_WARNING, AMPC_LOG_IMAGE, text);
}

/* Refuses a GPU below AMPC_LEAST. */
amp_result ampc_refuse_gpu(ampc_device *dev, const cudaDeviceProp &prop) {
    char text[320];
    snprintf(text, sizeof text, "%.127s has compute capability %d.%d; %s", prop.name, prop.major, prop.minor,
             AMPC_LEAST == 70 ? "7.0 (Volta) or later is needed"
                              : "7.5 (Turing) or later is needed, as CUDA 13 does not build for older ones; compile "
                                "for 7.0 (Volta) with CUDA 11.8 to 12.9");
    return ampc_refuse(dev, AMP_ERR_UNSUPPORTED, "amp_open", text);
}

/* Fills the features, and refuses GPUs below AMPC_LEAST. */
amp_result ampc_check_gpu(ampc_device *dev, const cudaDeviceProp &prop, int wgmma) {
    ampc_features *has = &dev->has;
    bool is_90a;
    int pools = 0;
    char text[320];
    has->cc = 10 * prop.major + prop.minor;
    if (has->cc < AMPC_LEAST) return ampc_refuse_gpu(dev, prop);
    AMPC_TRY(ampc_image(dev, &has->image, &is_90a));
    has->multiprocessors = prop.multiProcessorCount;
    has->shared_limit = prop.sharedMemPerBlockOptin;
    has->workspace = (size_t)(has->cc >= 90 ? 32 : 4) << 20;
    AMPC_TRY(ampc_check(dev, cudaDeviceGetAttribute(&pools, cudaDevAttrMemoryPoolsSupported, dev->index),
                        "cudaDeviceGetAttribute", NULL));
    has->pools = pools != 0;
    has->bf16 = has->cc >= 80;
    has->fp8 = has->cc >= 89;
    /* see "Narrow Precision Data Types Usage" in cuBLAS's manual; since CUDA 12.9 and 12.8 */
    has->fp8_blocks = has->cc == 90 && AMPC_BLAS_MODES && cublasLtGetVersion() >= 120900;
    has->fp8_mx = has->cc >= 100 && AMPC_BLAS_MODES && cublasLtGetVersion() >= 120800;
    has->tensor_cores = has->cc >= AMPC_TENSOR_CORES_FROM && has->image >= AMPC_TENSOR_CORES_FROM;
    if (wgmma) ampc_find_warpgroups(dev, is_90a, prop.name);
    if (has->tensor_cores || has->cc < AMPC_TENSOR_CORES_FROM) return AMP_OK;
    snprintf(text, sizeof text,
             "amp_cuda: compiled for compute capability %d.%d, but %.127s has %d.%d: attention runs without tensor "
             "cores; compile amp_cuda.cu with -arch=sm_%d",
             has->image / 10, has->image % 10, prop.name, prop.major, prop.minor, has->cc);
    dev->host.log(dev->host.user, AMP_LOG_WARNING, AMPC_LOG_IMAGE, text);
    return AMP_OK;
}

amp_result ampc_open_device(ampc_device *dev, const amp_backend_desc *desc) {
    cudaDeviceProp prop;
    char text[160];
    int count = 0, driver = 0, runtime = 0;
    AMPC_TRY(ampc_check(dev, cudaGetDeviceCount(&count), "cudaGetDeviceCount", NULL));
    if (desc->device < 0 || desc->device >= count) {
        snprintf(text, sizeof text, ".device = %d, must be 0 to %d", (int)desc->device, count - 1);
        return ampc_refuse(dev, AMP_ERR_RANGE, "amp_open", text);
    }
    (void)ampc_driver_symbol("cuDevicePrimaryCtxGetState", 7000, &dev->context_state);
    AMPC_ENTER(dev, "amp_open");
    AMPC_TRY(ampc_check(dev, cudaGetDeviceProperties(&prop, dev->index), "cudaGetDeviceProperties", NULL));
    AMPC_TRY(ampc_check_gpu(dev, prop, desc->wgmma));
    dev->blas.cache = prop.l2CacheSize;
    snprintf(dev->info.name, sizeof dev->info.name, "%.127s", prop.name);
    snprintf(dev->info.kind, sizeof dev->info.kind, "cuda");
    dev->info.index = dev->index;
    dev->info.cc_major = prop.major;
    dev->info.cc_minor = prop.minor;
    dev->info.fp16 = 1;
    dev->info.bf16 = dev->info.tf32 = dev->has.bf16;
    dev->info.fp8 = dev->has.fp8;
    dev->info.multiprocessors = prop.multiProcessorCount;
    dev->info.memory = (int64_t)prop.totalGlobalMem;
    AMPC_TRY(ampc_check(dev, cudaDriverGetVersion(&driver), "cudaDriverGetVersion", NULL));
    AMPC_TRY(ampc_check(dev, cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion", NULL));
    snprintf(dev->info.versions, sizeof dev->info.versions, "CUDA %d.%d, driver for CUDA %d.%d, cuBLASLt %zu",
             runtime / 1000, runtime / 10 % 100, driver / 1000, driver / 10 % 100, cublasLtGetVersion());
    AMPC_TRY(ampc_allow_large(dev));
    AMPC_TRY(ampc_blas_open(dev));
    if (desc->stream != NULL) return AMP_OK;
    AMPC_TRY(ampc_check(dev, cudaStreamCreateWithFlags(&dev->stream, cudaStreamNonBlocking),
                        "cudaStreamCreateWithFlags", NULL));
    dev->owns_stream = 1;
    return AMP_OK;
}

/* Takes back everything handed out, and returns it to CUDA. */
void ampc_drop_memory(ampc_device *dev) {
    while (dev->graphs != NULL) ampc_graph_destroy(dev, dev->graphs);
    for (int i = 0; i < AMPC_BUCKETS; i++)
        while (dev->busy[i] != NULL) ampc_give(dev, dev->busy[i]->data);
    ampc_captures_end(dev, true);
    ampc_trim(dev, true);
}

/* Says how many passes of attention the kernels for Hopper did not take, if that was more than the one logged. */
void ampc_log_declined(const ampc_device *dev) {
    char text[160];
    if (dev->declined < 2) return;
    snprintf(text, sizeof text, "amp_cuda: %lld passes of attention ran by mma.sync, because the driver refused a map",
             (long long)dev->declined);
    dev->host.log(dev->host.user, AMP_LOG_WARNING, AMPC_LOG_MAPS, text);
}

void ampc_close(void *device) {
    ampc_device *dev = (ampc_device *)device;
    amp_host host = dev->host;
    ampc_log_declined(dev);
    if (dev->owns_stream || dev->blas.owned || dev->reserved > 0 || dev->graphs != NULL || dev->captures != NULL ||
        dev->ranks.nccl.opened != NULL) {
        ampc_current current(dev);
        for (ampc_graph *open; (open = ampc_captured(dev, NULL)) != NULL;) ampc_graph_destroy(dev, open);
        if (dev->owns_stream) (void)cudaStreamSynchronize(dev->stream);
        ampc_blas_close(dev);
        ampc_drop_memory(dev);
        ampc_ranks_close(dev);      /* after the graphs, which use the communicator */
        if (dev->owns_stream) (void)cudaStreamDestroy(dev->stream);
        (void)cudaGetLastError();
    }
    ampc_nvml_close(&dev->nvml);
    pthread_mutex_destroy(&dev->ranks.lock);
    pthread_mutex_destroy(&dev->blas.lock);
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
    pthread_mutex_init(&dev->blas.lock, NULL);
    pthread_mutex_init(&dev->ranks.lock, NULL);
    dev->host = *host;
    dev->index = desc->device;
    dev->stream = (cudaStream_t)desc->stream;
    dev->blas.handle = (cublasLtHandle_t)desc->blas;        /* any cublasHandle_t is also a cublasLtHandle_t */
    dev->memory = desc->memory;
    dev->blas.autotune = desc->autotune;
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
    return ampc_take(dev, dev->stream, bytes, "amp_alloc", false, ptr);
}

void ampc_free(void *device, void *ptr, size_t bytes) {
    ampc_device *dev = (ampc_device *)device;
    (void)bytes;
    if (ptr != NULL) ampc_release(dev, ptr);
}

amp_result ampc_trim_idle(void *device) {
    ampc_device *dev = (ampc_device *)device;
    AMPC_ENTER(dev, "amp_cleanup");
    {
        ampc_locked locked(dev);
        ampc_captures_end(dev, false);
    }
    ampc_trim(dev, false);
    return AMP_OK;
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

amp_result ampc_copy(void *device, void *dst, const void *src, size_t bytes, amp_copy_kind kind, void *stream) {
    ampc_device *dev = (ampc_device *)device;
    cudaMemcpyKind way = kind == AMP_COPY_TO_DEVICE ? cudaMemcpyHostToDevice
                         : kind == AMP_COPY_TO_HOST ? cudaMemcpyDeviceToHost
                         : kind == AMP_COPY_ON_DEVICE ? cudaMemcpyDeviceToDevice : cudaMemcpyDefault;
    AMPC_ENTER(dev, "amp_copy");
    if (bytes == 0) return AMP_OK;
    AMPC_TRY(ampc_check(dev, cudaMemcpyAsync(dst, src, bytes, way, ampc_stream(dev, stream)), "cudaMemcpyAsync", NULL));
    return ampc_usable(dev, "amp_copy");        /* it may have waited for a reduction that failed */
}

amp_result ampc_fill(void *device, void *dst, int byte, size_t bytes, void *stream) {
    ampc_device *dev = (ampc_device *)device;
    AMPC_ENTER(dev, "amp_fill");
    if (bytes == 0) return AMP_OK;
    return ampc_check(dev, cudaMemsetAsync(dst, byte, bytes, ampc_stream(dev, stream)), "cudaMemsetAsync", NULL);
}

amp_result ampc_place_of(void *device, const void *ptr, amp_memory_kind *out) {
    ampc_device *dev = (ampc_device *)device;
    cudaPointerAttributes where;
    *out = AMP_MEMORY_UNKNOWN;
    AMPC_ENTER(dev, "place");
    if (ptr == NULL) return AMP_OK;
    AMPC_TRY(ampc_check(dev, cudaPointerGetAttributes(&where, ptr), "cudaPointerGetAttributes", NULL));
    switch (where.type) {
        case cudaMemoryTypeDevice:
            *out = where.device == dev->index ? AMP_MEMORY_DEVICE : AMP_MEMORY_OTHER_DEVICE;
            break;
        case cudaMemoryTypeHost: *out = AMP_MEMORY_PINNED; break;
        case cudaMemoryTypeManaged: *out = AMP_MEMORY_MANAGED; break;
        default: *out = AMP_MEMORY_HOST; break;
    }
    return AMP_OK;
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

/* This context's capture that runs on a stream, or NULL.  If `stream` is NULL, the capture may run on any stream. */
ampc_graph *ampc_captured(ampc_device *dev, cudaStream_t stream) {
    ampc_locked locked(dev);
    ampc_graph *graph = dev->graphs;
    while (graph != NULL && !(graph->capturing && (stream == NULL || graph->stream == stream))) graph = graph->next;
    return graph;
}

/* Ends an abandoned capture while its stream still exists.  If it stayed open, the thread that began it could no longer
   allocate or wait (error 900), and CUDA lets no other thread end it. */
void ampc_capture_drop(ampc_device *dev, cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cudaGraph_t graph = NULL;
    cudaError_t error = cudaStreamIsCapturing(stream, &status);
    if (error == cudaSuccess && status != cudaStreamCaptureStatusNone) error = cudaStreamEndCapture(stream, &graph);
    if (graph != NULL) (void)cudaGraphDestroy(graph);
    (void)cudaGetLastError();
    if (error == cudaErrorStreamCaptureWrongThread)
        dev->host.log(dev->host.user, AMP_LOG_ERROR, AMPC_LOG_CAPTURE,
                      "amp_cuda: a capture is left open, and only the thread that began it can end it: that thread's "
                      "cudaMalloc and waits fail from now on; end captures before you close");
}

amp_result ampc_stream_create(void *device, void **stream) {
    ampc_device *dev = (ampc_device *)device;
    cudaStream_t made = NULL;
    *stream = NULL;
    AMPC_ENTER(dev, "stream_create");
    AMPC_TRY(
        ampc_check(dev, cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "cudaStreamCreateWithFlags", NULL));
    *stream = made;
    return AMP_OK;
}

/* Waits for the stream, because another stream may get its scratch memory.  Drops a running capture. */
void ampc_stream_destroy(void *device, void *stream) {
    ampc_device *dev = (ampc_device *)device;
    if (stream == NULL) return;
    ampc_current current(dev);
    ampc_graph_destroy(dev, ampc_captured(dev, (cudaStream_t)stream));
    ampc_capture_drop(dev, (cudaStream_t)stream);
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
    AMPC_TRY(ampc_check(dev, cudaStreamSynchronize(ampc_stream(dev, stream)), "cudaStreamSynchronize", NULL));
    return ampc_usable(dev, "stream_sync");     /* it may have waited for a reduction that failed */
}

/* ---- Events */

amp_result ampc_event_create(void *device, void **event, int32_t timed) {
    ampc_device *dev = (ampc_device *)device;
    cudaEvent_t made = NULL;
    *event = NULL;
    AMPC_ENTER(dev, "event_create");
    AMPC_TRY(ampc_check(dev, cudaEventCreateWithFlags(&made, timed ? cudaEventDefault : cudaEventDisableTiming),
                        "cudaEventCreateWithFlags", NULL));
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
    AMPC_TRY(ampc_check(dev, error, "cudaEventQuery", NULL));
    return ampc_usable(dev, "event_done");
}

/* Returns at once if the event is done. */
amp_result ampc_event_sync(void *device, void *event) {
    ampc_device *dev = (ampc_device *)device;
    int32_t done;
    AMPC_TRY(ampc_event_done(device, event, &done));
    if (done) return AMP_OK;
    AMPC_ENTER(dev, "event_sync");
    AMPC_TRY(ampc_check(dev, cudaEventSynchronize((cudaEvent_t)event), "cudaEventSynchronize", NULL));
    return ampc_usable(dev, "event_sync");
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
    graph->reduces = 0;
    graph->exec = NULL;
    graph->used = NULL;
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

/* Takes the graph out of the list.  If its last launch was on the context's stream, that becomes the owner of its
   scratch memory.  Otherwise the graph's work is done, and any stream may have the memory. */
void ampc_graph_forget(ampc_device *dev, ampc_graph *graph) {
    ampc_graph **link = &dev->graphs;
    ampc_locked locked(dev);
    while (*link != NULL && *link != graph) link = &(*link)->next;
    if (*link != NULL) *link = graph->next;
    ampc_hand_over(dev, graph, graph->stream == dev->stream ? graph->stream : NULL);
}

/* Waits for a launch on another stream than the context's.  The program may have destroyed that stream. */
void ampc_graph_wait(const ampc_graph *graph) {
    ampc_relaxed relaxed;
    (void)cudaEventSynchronize(graph->used);
}

void ampc_graph_destroy(void *device, void *made) {
    ampc_device *dev = (ampc_device *)device;
    ampc_graph *graph = (ampc_graph *)made;
    if (graph == NULL) return;
    {
        ampc_current current(dev);
        if (graph->capturing) ampc_capture_drop(dev, graph->stream);
        if (graph->exec != NULL) (void)cudaGraphExecDestroy(graph->exec);
        if (graph->used != NULL && graph->stream != dev->stream) ampc_graph_wait(graph);
        if (graph->used != NULL) (void)cudaEventDestroy(graph->used);
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
                        "the capture contained a call that cannot be captured, such as a wait");
    if (result == AMP_OK) {
        ampc_locked locked(dev);
        graph->capturing = 0;
    }
    if (result == AMP_OK) result = current.ready("graph_end");
    if (result == AMP_OK)
        result = ampc_check(dev, ampc_graph_instantiate(&graph->exec, captured), "cudaGraphInstantiate", NULL);
    if (captured != NULL) (void)cudaGraphDestroy(captured);
    if (result == AMP_OK) *out = graph;
    else ampc_graph_destroy(dev, graph);
    return result;
}

/* Marks the end of a launch on another stream than the context's. */
amp_result ampc_graph_mark(ampc_device *dev, ampc_graph *graph, cudaStream_t stream) {
    if (stream == dev->stream) return AMP_OK;
    if (graph->used == NULL)
        AMPC_TRY(ampc_check(dev, cudaEventCreateWithFlags(&graph->used, cudaEventDisableTiming),
                            "cudaEventCreateWithFlags", NULL));
    return ampc_check(dev, cudaEventRecord(graph->used, stream), "cudaEventRecord", NULL);
}

amp_result ampc_graph_launch(void *device, void *made, void *stream) {
    ampc_device *dev = (ampc_device *)device;
    ampc_graph *graph = (ampc_graph *)made;
    AMPC_ENTER(dev, "graph_launch");
    {
        ampc_locked locked(dev);
        graph->stream = ampc_stream(dev, stream);
    }
    AMPC_TRY(ampc_check(dev, cudaGraphLaunch(graph->exec, ampc_stream(dev, stream)), "cudaGraphLaunch", NULL));
    AMPC_TRY(ampc_graph_mark(dev, graph, ampc_stream(dev, stream)));
    return graph->reduces ? ampc_ranks_note(dev, ampc_stream(dev, stream)) : AMP_OK;
}

/* ==== 7 >>masks ====
   Which keys a query sees. */

/* The keys that a mask's kind and lengths let a query see.  They are those with j < first or low <= j < high. */
struct ampc_span { int64_t first, low, high; };

__device__ __forceinline__ int64_t ampc_clamp(int64_t x, int64_t low, int64_t high) {
    return x < low ? low : x > high ? high : x;
}

/* `position` is the query's position among the keys. */
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
    if (mask.documents && position < 0) s.first = s.high = 0;       /* the query belongs to no document */
    s.first = ampc_clamp(s.first, 0, length);
    s.low = ampc_clamp(s.low, 0, length);
    s.high = ampc_clamp(s.high, 0, length);
    return s;
}

struct ampc_sight {
    ampc_span span;
    int64_t end;                    /* keys from here on are hidden */
    const int32_t *documents;       /* per key; NULL: one document */
    int32_t document;               /* of the query */
    const uint8_t *allowed;         /* per key, for this query; NULL: all */
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

/* ampc_in_span is whether key `at` is in a span, with all numbers counted from the same key.  ampc_lets_see is whether
   the documents and the mask's tensor allow a key. */
__device__ __forceinline__ bool ampc_in_span(int at, int first, int low, int high) {
    return at < first || (at >= low && at < high);
}
__device__ __forceinline__ bool ampc_lets_see(const ampc_sight &sight, int64_t key) {
    bool see = true;
    if (sight.documents) see = sight.documents[key] == sight.document;
    if (sight.allowed) see &= sight.allowed[key] != 0;
    return see;
}

/* ==== 8 >>autocast: casts ====
   A number is converted through its fp32 pattern, as in amp.h's bulk conversion.  From fp64 it is converted directly,
   because rounding twice can differ from rounding once.  A thread takes pieces of 16 bytes of the wider side. */

struct ampc_tf32 { uint32_t bits; };
struct ampc_e4m3 { uint8_t bits; };
struct ampc_e5m2 { uint8_t bits; };
__host__ __device__ constexpr bool ampc_is_e4m3(const void *) { return false; }
__host__ __device__ constexpr bool ampc_is_e4m3(const ampc_e4m3 *) { return true; }

/* The 8-bit pattern of a finite or infinite fp32 magnitude, rounded to nearest even.  Beyond the largest finite pattern
   it is LARGEST + 1, or LARGEST if `saturate` is set.  Subnormal results are rounded by adding a number whose last
   place is the smallest subnormal. */
template <int M, int BIAS, uint32_t LARGEST>
__device__ __forceinline__ uint32_t ampc_narrow8(uint32_t magnitude, int saturate) {
    const uint32_t normal = (uint32_t)(128 - BIAS) << 23, magic = (uint32_t)(127 - BIAS + 23 - M + 1) << 23;
    uint32_t r;
    if (magnitude < normal)
        r = ampi_bits_f32(ampc_add(ampi_f32_of_bits(magnitude), ampi_f32_of_bits(magic))) - magic;
    else
        r = ((magnitude + ((1u << (22 - M)) - 1) + (magnitude >> (23 - M) & 1)) >> (23 - M)) -
            ((uint32_t)(127 - BIAS) << M);
    return r <= LARGEST ? r : saturate ? LARGEST : LARGEST + 1;
}
template <int M, int BIAS, uint32_t LARGEST>
__device__ __forceinline__ uint8_t ampc_to_8bit(uint32_t bits, int saturate) {
    uint32_t magnitude = bits & 0x7fffffffu, r;
    if (magnitude > 0x7f800000u) r = (LARGEST + 1) | 1u << (M - 1) | (magnitude - 0x7f800000u) >> (23 - M);
    else r = ampc_narrow8<M, BIAS, LARGEST>(magnitude, saturate);
    return (uint8_t)((bits >> 24 & 0x80u) | r);
}

/* The fp32 pattern of a stored number, with a NaN's payload. */
__device__ __forceinline__ uint32_t ampc_pattern(float x) { return ampi_bits_f32(x); }
__device__ __forceinline__ uint32_t ampc_pattern(ampc_f16 x) {
    uint32_t bits = ampi_bits_f32(ampc_f16_value(x.bits));
    return (x.bits & 0x7fffu) <= 0x7c00u ? bits : (x.bits & 0x8000u) << 16 | 0x7fc00000u | (x.bits & 0x3ffu) << 13;
}
__device__ __forceinline__ uint32_t ampc_pattern(ampc_bf16 x) { return (uint32_t)x.bits << 16; }
__device__ __forceinline__ uint32_t ampc_pattern(ampc_e4m3 x) { return ampi_bits_of_e4m3(x.bits); }
__device__ __forceinline__ uint32_t ampc_pattern(ampc_e5m2 x) { return ampi_bits_of_f16((uint16_t)(x.bits << 8)); }

/* Conversions from an fp32 pattern, rounded to nearest. */
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
/* Conversions from an fp32 or fp64 pattern, in one step, with any rounding that the format has.  `wide` is 1 for
   fp64. */
struct ampc_rounding { int wide, saturate, mode; uint32_t random; };

__device__ __forceinline__ void ampc_round(float *to, uint64_t x, const ampc_rounding &r) {
    *to = ampi_f32_of_bits(ampi_to_f32(x, r.saturate));
}
__device__ __forceinline__ void ampc_round(double *to, uint64_t x, const ampc_rounding &) { *to = ampi_f64_of_bits(x); }
__device__ __forceinline__ void ampc_round(ampc_tf32 *to, uint64_t x, const ampc_rounding &r) {
    to->bits = ampi_to_tf32(x, r.wide, r.saturate);
}
__device__ __forceinline__ void ampc_round(ampc_f16 *to, uint64_t x, const ampc_rounding &r) {
    to->bits = ampi_to_f16(x, r.wide, r.saturate, r.mode, r.random);
}
__device__ __forceinline__ void ampc_round(ampc_bf16 *to, uint64_t x, const ampc_rounding &r) {
    to->bits = ampi_to_bf16(x, r.wide, r.saturate, r.mode, r.random);
}
__device__ __forceinline__ void ampc_round(ampc_e4m3 *to, uint64_t x, const ampc_rounding &r) {
    to->bits = ampi_to_e4m3(x, r.wide, r.saturate, r.mode, r.random);
}
__device__ __forceinline__ void ampc_round(ampc_e5m2 *to, uint64_t x, const ampc_rounding &r) {
    to->bits = ampi_to_e5m2(x, r.wide, r.saturate, r.mode, r.random);
}

template <class D, class S> __device__ __forceinline__ D ampc_convert(S x, int saturate) {
    D y;
    ampc_narrow(&y, ampc_pattern(x), saturate);
    return y;
}
template <class D> __device__ __forceinline__ D ampc_convert(double x, int saturate) {
    D y;
    ampc_round(&y, ampi_bits_f64(x), ampc_rounding{1, saturate, AMPI_EVEN, 0});
    return y;
}
template <class D, class S> __device__ __forceinline__ D ampc_convert_stochastic(S x, int saturate, uint32_t random) {
    D y;
    if constexpr (sizeof(S) == 8) ampc_round(&y, ampi_bits_f64(x), ampc_rounding{1, saturate, AMPI_STOCHASTIC, random});
    else ampc_round(&y, ampc_pattern(x), ampc_rounding{0, saturate, AMPI_STOCHASTIC, random});
    return y;
}

/* From compute capability 8.9 on, an instruction converts to 8 bits, saturated and rounded to nearest.  It drops a
   NaN's sign, which amp.h keeps, so the sign is set again here.  In E5M2 it also drops a NaN's payload, which amp.h
   keeps. */
__device__ __forceinline__ bool ampc_fp8_units() {
#if defined(__CUDA_ARCH__)
    return __CUDA_ARCH__ >= 890;
#elif !defined(__CUDACC__)
    return coc_image() >= 89;
#else
    return false;
#endif
}
__device__ __forceinline__ uint32_t ampc_fp8_pair(uint32_t low, uint32_t high, bool e5m2) {
    uint16_t pair = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    float x = __uint_as_float(low), y = __uint_as_float(high);
    if (e5m2) asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(y), "f"(x));
    else asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(y), "f"(x));
#elif !defined(__CUDACC__)
    pair = coc_cvt_fp8x2(ampi_f32_of_bits(high), ampi_f32_of_bits(low), e5m2);
#else
    (void)e5m2;
#endif
    return pair | (low >> 24 & 0x80u) | (high >> 16 & 0x8000u);
}

/* Converts a piece by that instruction where it can, and returns whether it did. */
template <class D, class S, int N>
__device__ __forceinline__ bool ampc_convert_pairs(const S (&x)[N], D (&y)[N], int saturate) {
    if constexpr (ampc_is_e4m3((D *)NULL) && sizeof(S) < 8) {
        if (saturate && ampc_fp8_units()) {
            AMPC_UNROLL
            for (int j = 0; j < N; j += 2) {
                uint32_t pair = ampc_fp8_pair(ampc_pattern(x[j]), ampc_pattern(x[j + 1]), false);
                y[j].bits = (uint8_t)pair, y[j + 1].bits = (uint8_t)(pair >> 8);
            }
            return true;
        }
    }
    return false;
}

/* 1 if the number is infinite or NaN. */
__device__ __forceinline__ int ampc_beyond(float x) { return !ampc_finite(x); }
__device__ __forceinline__ int ampc_beyond(double x) { return !amp_is_finite_f64(&x); }
__device__ __forceinline__ int ampc_beyond(ampc_f16 x) { return !amp_is_finite_f16(x.bits); }
__device__ __forceinline__ int ampc_beyond(ampc_bf16 x) { return !amp_is_finite_bf16(x.bits); }
__device__ __forceinline__ int ampc_beyond(ampc_tf32 x) { return (x.bits & 0x7f800000u) == 0x7f800000u; }
__device__ __forceinline__ int ampc_beyond(ampc_e4m3 x) { return (x.bits & 0x7f) == 0x7f; }
__device__ __forceinline__ int ampc_beyond(ampc_e5m2 x) { return (x.bits & 0x7c) == 0x7c; }

/* Adds a block's counts to a 64-bit total, such as new_inf.  Integer atomics give the same result in any order. */
__device__ __forceinline__ void ampc_count(unsigned long long *total, int mine, int *scratch) {
    int sum = ampc_block_sum(mine, scratch);
    if (threadIdx.x == 0 && sum != 0) atomicAdd(total, (unsigned long long)sum);
}

/* The number of blocks of 256 threads that a multiprocessor holds.  A multiprocessor holds 2048 threads, but 1536 from
   8.6 on except on 9.0 and 10.x, and 1024 on 7.5 (CUDA Programming Guide, technical specifications per compute
   capability).  Code for 10.0 and later takes more registers, and so has fewer blocks. */
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 750 || __CUDA_ARCH__ >= 1100)
enum { AMPC_RESIDENT = 4 };
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ > 800 && __CUDA_ARCH__ / 100 != 9
enum { AMPC_RESIDENT = 6 };
#else
enum { AMPC_RESIDENT = 8 };
#endif

/* `width` is the number of elements in a piece.  A piece has 16 bytes of the wider side, so that a warp writes whole
   sectors.  `pieces` is the number of a thread's pieces that are in flight. */
template <class D, class S> struct ampc_cast_shape {
    enum {
        wide = sizeof(D) > sizeof(S) ? sizeof(D) : sizeof(S),
        least = sizeof(D) < sizeof(S) ? sizeof(D) : sizeof(S)
    };
    enum { width = 16 / wide, pieces = wide == 8 ? 4 : wide / least, per_sm = wide == 8 ? 5 : 8 };
    /* for stochastic rounding: at least 4, which is one block of random numbers, and at most 8 */
    enum { rounded = sizeof(S) == 8 ? 4 : sizeof(S) == 1 ? 8 : (int)width, rounded_per_sm = sizeof(S) == 8 ? 6 : 0 };
};

template <class D, class S> __global__ void
__launch_bounds__(256, (ampc_cast_shape<D, S>::per_sm < AMPC_RESIDENT ? ampc_cast_shape<D, S>::per_sm : AMPC_RESIDENT))
ampc_cast_kernel(D *dst, const S *src, int64_t n, int saturate, int aligned, unsigned long long *new_inf) {
    enum { W = ampc_cast_shape<D, S>::width, U = ampc_cast_shape<D, S>::pieces };
    AMPC_SHARED(int, scratch, 32);
    int64_t at = (int64_t)blockIdx.x * blockDim.x * U + threadIdx.x, step = (int64_t)gridDim.x * blockDim.x * U;
    int64_t pieces = aligned ? n / W : 0, i;
    int found = 0;
    for (i = at; i < pieces; i += step) {
        S x[U][W];
        AMPC_UNROLL
        for (int u = 0; u < U; u++)
            if (i + u * 256 < pieces) ampc_fetch<AMPC_ONCE>(src + (i + u * 256) * W, x[u]);
        AMPC_UNROLL
        for (int u = 0; u < U; u++) {
            D y[W];
            if (i + u * 256 >= pieces) continue;
            if (!ampc_convert_pairs(x[u], y, saturate)) {
                AMPC_UNROLL
                for (int j = 0; j < W; j++) {
                    y[j] = ampc_convert<D>(x[u][j], saturate);
                    if (new_inf != NULL) found += ampc_beyond(y[j]) - ampc_beyond(x[u][j]);
                }
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
    if (new_inf != NULL) ampc_count(new_inf, found, scratch);
}

/* Casts with stochastic rounding to 16 and 8 bits. */
template <class D, class S> __global__ void
__launch_bounds__(256, (ampc_cast_shape<D, S>::rounded_per_sm < AMPC_RESIDENT ? ampc_cast_shape<D, S>::rounded_per_sm
                                                                              : AMPC_RESIDENT))
ampc_cast_stochastic_kernel(D *dst, const S *src, int64_t n, int saturate, uint64_t seed, uint64_t offset,
                            unsigned long long *new_inf) {
    enum { W = ampc_cast_shape<D, S>::rounded };
    AMPC_SHARED(int, scratch, 32);
    int found = 0;
    for (int64_t i = W * ((int64_t)blockIdx.x * blockDim.x + threadIdx.x); i < n;
         i += W * (int64_t)gridDim.x * blockDim.x) {
        uint32_t words[W];
        S x[W];
        D y[W];
        ampc_fetch_upto<AMPC_ONCE>(src + i, x, n - i);
        ampc_random(seed, offset + (uint64_t)i, words);
        AMPC_UNROLL
        for (int j = 0; j < W; j++) {
            y[j] = ampc_convert_stochastic<D>(x[j], saturate, words[j]);
            if (new_inf != NULL) found += ampc_beyond(y[j]) - ampc_beyond(x[j]);
        }
        ampc_leave_upto(dst + i, y, n - i);
    }
    if (new_inf != NULL) ampc_count(new_inf, found, scratch);
}

/* Token ids are copied as u16 and used as i32. */
__global__ void __launch_bounds__(256)
    ampc_widen_ids_kernel(int32_t *dst, const uint16_t *src, int64_t n, int aligned) {
    int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, step = (int64_t)gridDim.x * blockDim.x, i;
    int64_t pieces = aligned ? n / 4 : 0;
    for (i = at; i < pieces; i += step) {
        uint2 raw = ((const uint2 *)src)[i];
        uint4 wide = {raw.x & 0xffffu, raw.x >> 16, raw.y & 0xffffu, raw.y >> 16};
        ampc_put_bytes<16>(dst + 4 * i, wide);
    }
    for (i = 4 * pieces + at; i < n; i += step) dst[i] = src[i];
}

enum { AMPC_CAST_PER_SM = 8 };

template <class D, class S> amp_result ampc_cast_as(ampc_device *dev, const amp_k_cast *a, void *stream) {
    const int width = ampc_cast_shape<D, S>::width * ampc_cast_shape<D, S>::pieces;
    int saturate = a->how.saturate != 0, aligned = ampc_aligned(a->dst) && ampc_aligned(a->src);
    unsigned grid = ampc_full_grid(ampc_blocks(a->n, 256 * (aligned ? width : 1)));
    unsigned long long *new_inf = saturate ? NULL : (unsigned long long *)a->new_inf;
    if (a->how.rounding != AMP_ROUND_STOCHASTIC)
        return ampc_launch(dev, "amp_cast", ampc_cast_kernel<D, S>, grid, 256, 0, stream, (D *)a->dst,
                           (const S *)a->src, a->n, saturate, aligned, new_inf);
    if constexpr (sizeof(D) <= 2)
        return ampc_launch(dev, "amp_cast", ampc_cast_stochastic_kernel<D, S>,
                           ampc_grid(dev, ampc_blocks(a->n, 256 * ampc_cast_shape<D, S>::rounded),
                                     AMPC_WAVES * AMPC_CAST_PER_SM),
                           256, 0, stream, (D *)a->dst, (const S *)a->src, a->n, saturate, a->how.seed, a->how.offset,
                           new_inf);
    else return ampc_refuse(dev, AMP_ERR_DTYPE, "amp_cast", "stochastic rounding must be to fp16, bf16 or fp8");
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

amp_result ampc_cast(void *device, const amp_k_cast *a, void *stream) {
    ampc_device *dev = (ampc_device *)device;
    if (a->n <= 0) return ampc_usable(dev, "amp_cast");
    if (a->src_dtype == AMP_U16 && a->dst_dtype == AMP_I32) {
        int aligned = ampc_aligned(a->dst) && ((uintptr_t)a->src & 7) == 0;
        int64_t blocks = ampc_blocks(a->n, aligned ? 4 * 256 : 256);
        return ampc_launch(dev, "amp_cast", ampc_widen_ids_kernel,
                           ampc_grid(dev, blocks, AMPC_WAVES * AMPC_CAST_PER_SM), 256, 0, stream, (int32_t *)a->dst,
                           (const uint16_t *)a->src, a->n, aligned);
    }
    if (a->src_dtype == a->dst_dtype && a->dst_dtype != AMP_TF32 && !a->how.saturate &&
        a->how.rounding != AMP_ROUND_STOCHASTIC)
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

/* ==== 9 >>operators: column sums ====
   A warp adds every eighth row of 256 columns, with eight columns per lane.  Then the sums of the block's eight warps
   are added in order.  Tall matrices are cut into runs of rows, and a second kernel adds the sums of the runs in order,
   in fp64.  The number of runs depends on the shape alone. */

enum { AMPC_SUM_COLS = 256, AMPC_SUM_ROWS = 256, AMPC_SUM_RUNS = 256, AMPC_SUM_CHAIN = 32 };

/* Adds `sum` to a stored number or replaces it. */
__device__ __forceinline__ void ampc_put_sum(const amp_k_gradient &out, int64_t i, float sum) {
    ampc_put_stored(out.data, out.dtype, i, out.add ? ampc_add(sum, ampc_stored(out.data, out.dtype, i)) : sum);
}

/* If `partial` is NULL, there is one run, whose sums go directly to `out`. */
__global__ void __launch_bounds__(256)
ampc_column_sum_kernel(amp_mat x, bool aligned, int64_t tiles, int64_t run, float *partial, amp_k_gradient out) {
    AMPC_SHARED(float, scratch, 8 * AMPC_SUM_COLS);
    int64_t tile = blockIdx.x % tiles, number = blockIdx.x / tiles;
    int64_t begin = number * run, end = begin + run < x.rows ? begin + run : x.rows;
    unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int64_t column = tile * AMPC_SUM_COLS + lane * AMPC_LANES, mine = tile * AMPC_SUM_COLS + threadIdx.x;
    float sum[AMPC_LANES] = {}, total = 0;
    ampc_by_dtype(x.dtype, [&](auto dtype) {
        auto add_rows = [&](auto load) {
            for (int64_t row = begin + warp; row < end; row += 8) {
                float v[AMPC_LANES];
                load(ampc_within(x.data, dtype, row * x.ld + column), v);
                AMPC_UNROLL
                for (int i = 0; i < AMPC_LANES; i++) sum[i] += v[i];
            }
        };
        if (aligned && column + AMPC_LANES <= x.cols)
            add_rows([&](const void *p, float *v) { ampc_load<AMPC_LANES, AMPC_ONCE>(p, dtype, v); });
        else add_rows([&](const void *p, float *v) { ampc_load_upto<AMPC_LANES>(p, dtype, v, x.cols - column); });
    });
    AMPC_UNROLL
    for (int i = 0; i < AMPC_LANES; i++) scratch[warp * AMPC_SUM_COLS + lane * AMPC_LANES + i] = sum[i];
    __syncthreads();
    if (mine >= x.cols) return;
    for (int i = 0; i < 8; i++) total += scratch[i * AMPC_SUM_COLS + threadIdx.x];
    if (partial != NULL) partial[number * x.cols + mine] = total;
    else ampc_put_sum(out, mine, total);
}

/* A block has 32 columns.  Each warp adds every eighth run, and then the sums of the warps are added in order. */
__global__ void __launch_bounds__(256)
    ampc_column_finish_kernel(const float *partial, int64_t runs, int64_t cols, amp_k_gradient out) {
    AMPC_SHARED(double, scratch, 256);
    int64_t column = (int64_t)blockIdx.x * 32 + threadIdx.x % 32;
    double sum = 0;
    if (column < cols)
        for (int64_t i = threadIdx.x / 32; i < runs; i += 8) sum += (double)partial[i * cols + column];
    scratch[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x >= 32 || column >= cols) return;
    for (int i = 1; i < 8; i++) sum += scratch[32 * i + threadIdx.x];
    ampc_put_sum(out, column, (float)sum);
}

/* ---- Sums that another kernel computes beside its own results.  Each of its blocks or warps writes a run, which is
   the sums of its rows.  One launch then adds the runs of up to three such sums, in order, in fp32. */

struct ampc_runs {
    const float *first;             /* the first run; the next is `apart` numbers further */
    int64_t runs, apart;
    amp_k_gradient to;              /* NULL: not wanted */
};
struct ampc_run_sums { ampc_runs of[3]; };

/* A block has 32 columns, and 32 threads for each. */
__global__ void __launch_bounds__(1024) ampc_add_runs(ampc_run_sums sums, int n, int64_t cols) {
    AMPC_SHARED(float, scratch, 32 * 33);
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, which = (int)blockIdx.x % n;
    const ampc_runs x = which == 0 ? sums.of[0] : which == 1 ? sums.of[1] : sums.of[2];
    const int64_t column = blockIdx.x / (unsigned)n * (int64_t)32 + lane;
    float sum = 0.0f;
    if (x.to.data == NULL) return;
    for (int64_t i = warp; i < x.runs && column < cols; i += 32) sum += x.first[i * x.apart + column];
    scratch[warp * 33 + lane] = sum;
    __syncthreads();
    if (warp != 0 || column >= cols) return;
    for (int i = 1; i < 32; i++) sum += scratch[i * 33 + lane];
    ampc_put_sum(x.to, column, sum);
}
amp_result ampc_finish_runs(ampc_device *dev, const char *name, const ampc_run_sums &sums, int n, int64_t cols,
                            void *stream) {
    return ampc_launch(dev, name, ampc_add_runs, (unsigned)(n * ampc_blocks(cols, 32)), 1024, 0, stream, sums, n, cols);
}

amp_result ampc_column_sum(void *device, const amp_k_column_sum *a, void *stream) {
    ampc_device *dev = (ampc_device *)device;
    const amp_k_gradient out = {a->out, a->out_dtype, a->add};
    amp_mat x = a->x;
    if (x.rows < 0) x.rows = 0;
    int64_t tiles = ampc_blocks(x.cols, AMPC_SUM_COLS), runs = ampc_blocks(x.rows, AMPC_SUM_ROWS), run;
    ampc_scratch partial(dev, stream);
    if (x.cols <= 0) return ampc_usable(dev, "column_sum");
    AMPC_TRY(ampc_check_storage(dev, "column_sum", x.dtype));
    AMPC_TRY(ampc_check_storage(dev, "column_sum", out.dtype));
    if (runs > AMPC_SUM_RUNS) runs = AMPC_SUM_RUNS;
    if (runs < 1) runs = 1;
    run = ampc_blocks(x.rows, runs);
    if (runs > 1) AMPC_TRY(partial.get((size_t)(runs * x.cols) * sizeof(float), "column_sum"));
    AMPC_TRY(ampc_launch(dev, "column_sum", ampc_column_sum_kernel, (unsigned)(tiles * runs), 256, 0, stream, x,
                         ampc_aligned(x.data, x.ld * ampc_dtype_size(x.dtype)), tiles, run, (float *)partial.data,
                         out));
    if (runs == 1) return AMP_OK;
    return ampc_launch(dev, "column_sum", ampc_column_finish_kernel, (unsigned)ampc_blocks(x.cols, 32), 256, 0, stream,
                       (const float *)partial.data, runs, x.cols, out);
}

amp_result ampc_sum_columns(ampc_device *dev, const amp_mat &x, const amp_k_gradient &out, void *stream) {
    amp_k_column_sum s = {x, out.data, out.dtype, out.add};
    return out.data == NULL ? AMP_OK : ampc_column_sum(dev, &s, stream);
}

/* ==== 9 >>operators: pieces ====
   A row's pieces have 8 elements of 16 bits, or 4 of any storage dtype if one operand is fp32.  The lanes of a warp
   then always access neighbouring bytes.  Where a pointer, a row distance or a row's length does not fit, pieces are
   narrower, down to 1 element.  A piece is held in its storage dtype until it is used. */

/* The widest V, at most v, for an array that starts at p.  If the array has rows of `cols` elements, ld apart, each row
   must be a whole number of pieces. */
int ampc_width(int v, const void *p, amp_dtype dtype, int64_t ld = 0, int64_t cols = 0) {
    int64_t size = ampc_dtype_size(dtype);
    if (p == NULL) return v;
    if (v == 8 && size == 4) v = 4;
    while (v > 1 && ((uintptr_t)p % (uint64_t)(v * size) != 0 || ld % v != 0 || cols % v != 0)) v = v == 8 ? 4 : 1;
    return v;
}
int ampc_width(int v, const amp_mat &m) { return ampc_width(v, m.data, m.dtype, m.rows > 1 ? m.ld : 0, m.cols); }
/* The same for arrays that all rows share, such as a norm's weight.  Here fp32 may have a V of 8 too, as two pieces. */
int ampc_width_shared(int v, const void *p, amp_dtype dtype) {
    return v == 8 && dtype == AMP_F32 && ampc_aligned(p) ? v : ampc_width(v, p, dtype);
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
#elif !defined(__CUDACC__)
    coc_prefetch(p);
#else
    (void)p;
#endif
}

/* Adds a piece of sums to the stored one if `add` is 1, and overwrites it otherwise. */
template <int V, class I>
__device__ __forceinline__ void ampc_piece_sum(void *row, amp_dtype dtype, I at, I end, float *sum, int add) {
    if (add) ampc_piece_add<V>(ampc_piece_read<V>(row, dtype, at, end), dtype, sum);
    ampc_piece_write<V>(row, dtype, at, end, ampc_narrow<V>(sum, dtype));
}

/* ---- Asynchronous copies into shared memory, by cp.async.  Before compute capability 8.0 they are done at once. */

/* An address in shared memory. */
#if defined(__CUDACC__)
typedef uint32_t ampc_address;
#else
typedef uintptr_t ampc_address;
#endif
[[maybe_unused]] __device__ __forceinline__ ampc_address ampc_address_of(const void *shared) {
#if defined(__CUDA_ARCH__)
    return (uint32_t)__cvta_generic_to_shared(shared);
#else
    return (ampc_address)(uintptr_t)shared;
#endif
}

/* Starts to copy 8 or 16 bytes into shared memory.  If `there` is false, it writes zeros and does not read `from`.
   This thread may read the bytes after ampc_copy_wait.  Other threads need a barrier after that.  A group holds the
   copies started since the last commit. */
template <int BYTES = 16> __device__ __forceinline__ void ampc_copy_async(void *shared, const void *from, bool there) {
    static_assert(BYTES == 8 || BYTES == 16, "a piece");
#if defined(__CUDA_ARCH__)
#  if __CUDA_ARCH__ >= 800
    if (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :: "r"(ampc_address_of(shared)), "l"(from), "r"(there ? 16 : 0) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;"
                     :: "r"(ampc_address_of(shared)), "l"(from), "r"(there ? 8 : 0) : "memory");
#  else
    if (BYTES == 16) *(uint4 *)shared = there ? *(const uint4 *)from : uint4{0, 0, 0, 0};
    else *(uint2 *)shared = there ? *(const uint2 *)from : uint2{0, 0};
#  endif
#elif !defined(__CUDACC__)
    coc_copy_async(shared, from, BYTES, there ? BYTES : 0);
#endif
}
__device__ __forceinline__ void ampc_copy_commit() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#elif !defined(__CUDACC__)
    coc_copy_commit();
#endif
}
/* Waits for all groups but the last LEFT. */
template <int LEFT> __device__ __forceinline__ void ampc_copy_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory");
#elif !defined(__CUDACC__)
    coc_copy_wait(LEFT);
#endif
}

/* ---- Exponentials.  The hardware computes 2^x and 1/x with relative errors below 2^-22 and 2^-23.  Results below
   2^-126 become 0. */

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
/* exp(x), with a relative error of 2^-22 + 1.25 |x| 2^-24.  For exp(x - max) with x <= max, the error is small unless
   the result is small. */
__device__ __forceinline__ float ampc_exp(float x) { return ampc_exp2(ampc_mul(x, AMPC_LOG2_E)); }
__device__ __forceinline__ float ampc_exp_below(float x, float max) { return ampc_exp(x - max); }

/* ==== 9 >>operators: rows ====
   A group of `lanes` threads, which are whole warps, processes a row.  Thread i holds E of the row's elements, in the
   pieces i, i + lanes, i + 2 lanes and so on.  A row of more than lanes times E elements is processed in chunks, which
   later passes read again.  Passes alternate in direction, so the chunk at the turn is still held. */

/* The most threads of a block.  They have 64 registers each for rows of one chunk, so that a multiprocessor holds 1024
   threads, and 128 for other rows.  Kernels that also sum columns have one block per multiprocessor.  Their threads
   have 168 registers if registers hold the sums.  With AMPC_SHARED_SUMS elements per thread, shared memory holds them,
   and the block has one group. */
enum { AMPC_ROW_THREADS = 512, AMPC_SUM_THREADS = 384, AMPC_SHARED_SUMS = 32 };
__host__ __device__ constexpr bool ampc_one_chunk(int v, int e) { return v > 1 && e < 32; }
__host__ __device__ constexpr int ampc_threads(int e, bool sums) {
    return sums && e < AMPC_SHARED_SUMS ? AMPC_SUM_THREADS : AMPC_ROW_THREADS;
}
#define AMPC_ROW_BOUNDS(light) __launch_bounds__(AMPC_ROW_THREADS, (light) && ampc_one_chunk(V, E) ? 2 : 1)

template <int V, int E> struct ampc_shape { enum { v = V, e = E }; };
struct ampc_row_plan {
    int v, e, lanes, block, per_sm;     /* per_sm: blocks that run at once on a multiprocessor */
    unsigned grid;
    int64_t chunks;
};

/* Takes the fewest warps per row that 8, 16 or 24 elements per thread allow, and then the fewest elements.  Rows that
   would not fit otherwise have 32 elements per thread. */
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
    p.per_sm = sums ? 1 : (ampc_one_chunk(v, p.e) ? 2 : 1) * threads / p.block;
    p.grid = ampc_grid(dev, ampc_blocks(rows, p.block / p.lanes), sums ? 1 : AMPC_WAVES * p.per_sm);
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

/* A thread's place, which is the group of its row and its pieces in a chunk.  Elements are counted from the chunk's
   first. */
template <int V, int E> struct ampc_place {
    int lanes, lane, group, groups;
    __device__ explicit ampc_place(int row_lanes) : lanes(row_lanes) {
        lane = (int)threadIdx.x % lanes;
        group = (int)threadIdx.x / lanes;
        groups = (int)blockDim.x / lanes;
    }
    __device__ int at(int piece) const { return (piece * ampc_afresh(lanes) + lane) * V; }
    __device__ int64_t start(int64_t chunk) const { return ampc_one_chunk(V, E) ? 0 : chunk * (lanes * E); }
    __device__ static int64_t chunks(int64_t planned) { return ampc_one_chunk(V, E) ? 1 : planned; }
    /* How many of the chunk's elements lie below end. */
    __device__ int left(int64_t chunk, int64_t end) const {
        int64_t n = end - start(chunk);
        if (ampc_one_chunk(V, E)) return (int)end;
        return n < 0 ? 0 : n < lanes * E ? (int)n : lanes * E;
    }
};

/* Sums or maxima over the threads of a group, with the result in every thread.  `scratch` is 64 N floats of shared
   memory.  Calls alternate between its halves, so that no call overwrites what other threads may still be reading.  All
   threads of the block must call it. */
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
__device__ __forceinline__ void ampc_over_group(float (&x)[N], const Place &place, float *scratch, int &turn) {
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, warps = place.lanes / 32,
        first = place.group * warps;
    ampc_over_warp<Op>(x);
    if (warps == 1) return;
    scratch += 32 * N * turn;
    turn ^= 1;
    AMPC_UNROLL
    for (int i = 0; i < N; i++)
        if (lane == 0) scratch[32 * i + warp] = x[i];
    __syncthreads();
    scratch += first;
    if (warps == 2) {
        AMPC_UNROLL
        for (int i = 0; i < N; i++) x[i] = Op::of(scratch[32 * i], scratch[32 * i + 1]);
        return;
    }
    AMPC_UNROLL
    for (int i = 0; i < N; i++) x[i] = lane < warps ? scratch[32 * i + lane] : Op::none();
    ampc_over_warp<Op>(x);
}

/* A chunk of a row as it lies in memory. */
template <int V, int E>
__device__ __forceinline__ void ampc_chunk_read(const ampc_place<V, E> &place, const void *from, amp_dtype dtype,
                                                int left, uint4 (&raw)[E / V]) {
    AMPC_UNROLL
    for (int p = 0; p < E / V; p++) raw[p] = ampc_piece_read<V>(from, dtype, place.at(p), left);
}

/* A chunk in fp32. */
template <int V, int P>
__device__ __forceinline__ void ampc_chunk_widen(const uint4 (&raw)[P], amp_dtype dtype, float *x) {
    ampc_by_dtype<V>(dtype, [&](auto one) {
        AMPC_UNROLL
        for (int p = 0; p < P; p++) ampc_widen<V>(raw[p], one, x + p * V);
    });
}

/* Prefetches a chunk into the L2 cache.  A thread requests 128 bytes, and its part of a chunk is at most as long. */
template <int V, int E>
__device__ __forceinline__ void ampc_chunk_expect(const ampc_place<V, E> &place, const void *from, amp_dtype dtype,
                                                  int left) {
    static_assert(E * 4 <= 128, "a thread's part of a chunk");
    if (place.lane * 128 < left * (dtype == AMP_F32 ? 4 : 2)) ampc_prefetch((const char *)from + place.lane * 128);
}

/* ---- LayerNorm and RMSNorm, forward */

/* Weight and bias, for y = h weight + bias.  A missing weight is 1 and a missing bias is -0, which change no h.  In
   rows of one chunk a thread always has the same columns.  If shared memory has room (KEEP), a block holds weight and
   bias there in fp32, in the order in which a warp reads 16 bytes per thread.  Otherwise they are read again for each
   row. */
template <int V, int E, bool KEEP> struct ampc_norm_affine {
    const amp_k_norm &a;
    const ampc_place<V, E> &place;
    uint4 *const scratch;              /* [2, E / 4, lanes] */
    __device__ __forceinline__ ampc_norm_affine(const amp_k_norm &args, const ampc_place<V, E> &where, void *memory)
        : a(args), place(where), scratch((uint4 *)memory) {
        if constexpr (KEEP) fill();
    }
    __device__ __forceinline__ void fill() {
        AMPC_NO_UNROLL
        for (int p = place.group; p < E / V; p += place.groups) {
            float weight[V], bias[V];
            if (place.at(p) >= a.x.cols) continue;
            read(0, place.at(p), weight, bias);
            AMPC_UNROLL
            for (int i = 0; i < V; i += 4) {
                *slot(0, p * V + i) = ampc_narrow<4>(weight + i, AMP_F32);
                *slot(1, p * V + i) = ampc_narrow<4>(bias + i, AMP_F32);
            }
        }
        __syncthreads();
    }
    /* The place of element k of a thread's part of the weight (array 0) or the bias (1), and of the next three. */
    __device__ __forceinline__ uint4 *slot(int array, int k) const {
        return scratch + (array * (E / 4) + k / 4) * ampc_afresh(place.lanes) + place.lane;
    }
    __device__ __forceinline__ void read(int64_t start, int at, float *weight, float *bias) const {
        AMPC_UNROLL
        for (int i = 0; i < V; i++) weight[i] = 1.0f, bias[i] = -0.0f;
        if (a.weight) ampc_load<V>(ampc_within(a.weight, a.weight_dtype, start + at), a.weight_dtype, weight);
        if (a.bias) ampc_load<V>(ampc_within(a.bias, a.weight_dtype, start + at), a.weight_dtype, bias);
    }
    /* Gets weight and bias for piece p of the chunk at `start`. */
    __device__ __forceinline__ void get(int64_t start, int p, float *weight, float *bias) const {
        if constexpr (!KEEP) read(start, place.at(p), weight, bias);
        else {
            AMPC_UNROLL
            for (int i = 0; i < V; i += 4) {
                ampc_widen<4>(*slot(0, p * V + i), AMP_F32, weight + i);
                ampc_widen<4>(*slot(1, p * V + i), AMP_F32, bias + i);
            }
        }
    }
};

/* A chunk of the row to normalise, in fp32.  If the sum with the residual is stored, it is rounded to storage before it
   is used, because the backward pass reads the stored one.  The first pass computes and stores it, and later passes
   read it. */
template <int V, int E> struct ampc_norm_chunk {
    const amp_k_norm &a;
    const ampc_place<V, E> &place;
    int64_t row, start;
    int left;
    float s[E];
    __device__ __forceinline__ ampc_norm_chunk(const amp_k_norm &args, const ampc_place<V, E> &where)
        : a(args), place(where) {}
    __device__ __forceinline__ void fetch(int64_t of_row, int64_t chunk, int64_t cols, bool first) {
        const bool add = a.residual.data && (first || !a.sum.data);
        const amp_mat &from = a.residual.data && !add ? a.sum : a.x;
        uint4 raw[E / V];
        row = of_row;
        start = place.start(chunk);
        left = place.left(chunk, cols);
        if (add) ampc_chunk_expect(place, ampc_row(a.residual, row, start), a.residual.dtype, left);
        ampc_chunk_read(place, ampc_row(from, row, start), from.dtype, left, raw);
        ampc_chunk_widen<V>(raw, from.dtype, s);
        if (!add) return;
        AMPC_UNROLL
        for (int p = 0; p < E / V; p++)
            ampc_piece_add<V>(
                ampc_piece_read<V>(ampc_row(a.residual, row, start), a.residual.dtype, place.at(p), left),
                a.residual.dtype, s + p * V);
        if (first && a.sum.data) store_sum();
    }
    __device__ __forceinline__ void store_sum() {
        void *to = ampc_row(a.sum, row, start);
        AMPC_UNROLL
        for (int p = 0; p < E / V; p++) {
            uint4 sum = ampc_narrow<V>(s + p * V, a.sum.dtype);
            ampc_piece_write<V>(to, a.sum.dtype, place.at(p), left, sum);
            ampc_widen<V>(sum, a.sum.dtype, s + p * V);
        }
    }
    /* Elements beyond the row are 0. */
    __device__ __forceinline__ float sum(float total) const {
        AMPC_UNROLL
        for (int k = 0; k < E; k++) total += s[k];
        return total;
    }
    /* total + the squares of the distances from `centre`. */
    __device__ __forceinline__ float squares(float total, float centre) const {
        AMPC_UNROLL
        for (int p = 0; p < E / V; p++) {
            if (place.at(p) >= left) continue;
            AMPC_UNROLL
            for (int k = p * V; k < p * V + V; k++) total = ampc_fma(s[k] - centre, s[k] - centre, total);
        }
        return total;
    }
    template <class Affine> __device__ __forceinline__ void write(const Affine &affine, float mean, float rstd) const {
        void *to = ampc_row(a.y, row, start);
        AMPC_UNROLL
        for (int p = 0; p < E / V; p++) {
            const int at = place.at(p);
            float y[V], weight[V], bias[V];
            if (at >= left) continue;
            affine.get(start, p, weight, bias);
            AMPC_UNROLL
            for (int i = 0; i < V; i++) y[i] = ampc_fma(ampc_mul(s[p * V + i] - mean, rstd), weight[i], bias[i]);
            ampc_piece_put<V>(ampc_within(to, a.y.dtype, at), a.y.dtype, ampc_narrow<V>(y, a.y.dtype));
        }
    }
};

/* `share` is 1 / cols. */
template <int V, int E, bool KEEP> __global__ void AMPC_ROW_BOUNDS(KEEP)
ampc_norm_rows(amp_k_norm a, int lanes, int64_t planned, float share) {
    AMPC_SHARED(float, scratch, 64);
    AMPC_DYNAMIC(memory);
    const ampc_place<V, E> place(lanes);
    const int64_t chunks = place.chunks(planned);
    const int64_t begin = (int64_t)blockIdx.x * place.groups;
    if (begin + place.group < a.x.rows)
        ampc_chunk_expect(place, ampc_row(a.x, begin + place.group), a.x.dtype, place.left(0, a.x.cols));
    const ampc_norm_affine<V, E, KEEP> affine(a, place, memory);
    ampc_norm_chunk<V, E> chunk(a, place);
    int turn = 0;
    for (int64_t first = begin; first < a.x.rows; first += (int64_t)gridDim.x * place.groups) {
        int64_t row = first + place.group, cols = row < a.x.rows ? a.x.cols : 0, c;
        float sum[1] = {0.0f}, squares[1] = {0.0f}, mean = 0.0f, rstd;
        for (c = 0; c < chunks; c++) {
            chunk.fetch(row, c, cols, true);
            if (!a.rms) sum[0] = chunk.sum(sum[0]);
        }
        if (!a.rms) {
            ampc_over_group<ampc_plus>(sum, place, scratch, turn);
            mean = ampc_mul(sum[0], share);
        }
        for (c = chunks - 1; c >= 0; c--) {
            if (c != chunks - 1) chunk.fetch(row, c, cols, false);
            squares[0] = chunk.squares(squares[0], mean);
        }
        ampc_over_group<ampc_plus>(squares, place, scratch, turn);
        rstd = rsqrtf(ampc_fma(squares[0], share, a.eps));
        for (c = 0; c < chunks; c++) {
            if (c != 0) chunk.fetch(row, c, cols, false);
            chunk.write(affine, mean, rstd);
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
    size_t kept = (size_t)plan.lanes * 2 * (size_t)plan.e * sizeof(float);
    bool keep = ampc_one_chunk(plan.v, plan.e) && (size_t)plan.per_sm * (kept + 2048) <= d->has.shared_limit;
    if (plan.lanes == plan.block)       /* its weights are as long as its one row, so it keeps them for many rows */
        plan.grid = ampc_grid(d, plan.grid, plan.per_sm);
    return ampc_pick_shape(plan, [&](auto shape) {
        typedef decltype(shape) S;
        return ampc_launch(d, a.rms ? "amp_rmsnorm" : "amp_layernorm",
                           keep ? ampc_norm_rows<S::v, S::e, ampc_one_chunk(S::v, S::e)>
                                : ampc_norm_rows<S::v, S::e, false>,
                           plan.grid, (unsigned)plan.block, keep ? kept : 0, stream, a, plan.lanes, plan.chunks,
                           1.0f / (float)a.x.cols);
    });
}

/* ---- LayerNorm and RMSNorm, backward.  With g = dy weight, h = (x - mean) rstd and means over the row,
   dx = rstd (g - mean(g) - h mean(g h)).  RMSNorm leaves out mean(g).  dweight is the sum of dy h, and dbias the sum of
   dy.  A thread keeps its columns from row to row and sums their dweight and dbias.  Each block writes one partial sum,
   and a second kernel adds these in order.  Only these sums depend on the size of the grid, and so on the GPU. */

template <int V>
__device__ __forceinline__ void ampc_norm_pair(const uint4 &x_raw, amp_dtype x_dtype, const uint4 &dy_raw,
                                               amp_dtype dy_dtype, float mean, float rstd, float *h, float *dy) {
    ampc_widen<V>(x_raw, x_dtype, h);
    ampc_widen<V>(dy_raw, dy_dtype, dy);
    AMPC_UNROLL
    for (int i = 0; i < V; i++) h[i] = ampc_mul(h[i] - mean, rstd);
}

/* g = dy weight */
template <int V> __device__ __forceinline__ void ampc_norm_weigh(const amp_k_norm &a, int64_t start, int at, float *g) {
    float weight[V];
    if (!a.weight) return;
    ampc_load<V>(ampc_within(a.weight, a.weight_dtype, start + at), a.weight_dtype, weight);
    AMPC_UNROLL
    for (int i = 0; i < V; i++) g[i] = ampc_mul(g[i], weight[i]);
}

/* Adds V numbers to a thread's sums in shared memory, where words of the same thread are `apart` words apart. */
template <int V> __device__ __forceinline__ void ampc_add_shared(float *sums, int apart, const float *x) {
    AMPC_UNROLL
    for (int i = 0; i < V; i++) sums[i * apart] += x[i];
}

/* Computes dx for a chunk.  `dsum` is the chunk of a.dsum, or NULL if it is to be read here.  `sums` are the thread's
   sums of dx, one per column, or NULL. */
template <int V, int E>
__device__ __forceinline__ void ampc_norm_dx(const amp_k_norm &a, const ampc_place<V, E> &place, int64_t row,
                                             int64_t start, int left, float mean, float rstd, const float *means,
                                             const uint4 *x, const uint4 *dy, const uint4 *dsum, float *sums) {
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
            ampc_piece_add<V>(dsum ? dsum[p] : ampc_piece_read<V>(ampc_row(a.dsum, row, start), a.dsum.dtype, at, left),
                              a.dsum.dtype, g);
        ampc_piece_write<V>(ampc_row(a.dx, row, start), a.dx.dtype, at, left, ampc_narrow<V>(g, a.dx.dtype));
        if (a.dx_low.data)
            ampc_piece_write<V>(ampc_row(a.dx_low, row, start), a.dx_low.dtype, at, left,
                                ampc_narrow<V>(g, a.dx_low.dtype));
        if (sums) ampc_add_shared<V>(sums + p * V * (int)blockDim.x, (int)blockDim.x, g);
    }
}

/* The sums of a thread's columns, in its registers or in shared memory as [2, E, stride]. */
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
    /* Adds a thread's registers to the shared sums. */
    __device__ __forceinline__ void gather(bool first) {
        AMPC_UNROLL
        for (int k = 0; k < own && own == E; k++) {
            float *w = shared + k * place.lanes, *b = w + E * place.lanes;
            *w = first ? dweight[k] : *w + dweight[k];
            *b = first ? dbias[k] : *b + dbias[k];
        }
    }
    /* Gathers the block's groups in order and writes its partial sum, [2, cols].  With shared sums there is one
       group. */
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

/* Bytes of shared memory for the sums. */
size_t ampc_column_scratch(const ampc_row_plan &p) {
    return (size_t)(p.e < AMPC_SHARED_SUMS ? p.lanes : (int)AMPC_ROW_THREADS) * 2 * (size_t)p.e * sizeof(float);
}

/* Adds the chunk's g and g h to `means`, and its gradients of the columns to `sums`. */
template <int V, int E>
__device__ __forceinline__ void ampc_norm_look(const amp_k_norm &a, const ampc_place<V, E> &place, int64_t start,
                                               int left, float mean, float rstd, const uint4 *x, const uint4 *dy,
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

/* A row of one chunk and the next row, in shared memory.  A thread copies and reads only its own pieces. */
template <int V, int E> struct ampc_norm_stage {
    uint4 *const mine;              /* [2, 2, E / V, threads] */
    __device__ __forceinline__ explicit ampc_norm_stage(void *memory) : mine((uint4 *)memory + threadIdx.x) {}
    __device__ __forceinline__ uint4 *at(int half, int which, int p) const {
        return mine + ((half * 2 + which) * (E / V) + p) * (int)blockDim.x;
    }
    __device__ __forceinline__ void fetch(const ampc_place<V, E> &place, const amp_mat &m, int64_t row, int left,
                                          int half, int which) const {
        const void *from = ampc_row(m, row);
        AMPC_UNROLL
        for (int p = 0; p < E / V; p++) {
            if (V == 8 || m.dtype == AMP_F32)
                ampc_copy_async<16>(at(half, which, p), ampc_within(from, m.dtype, place.at(p)), place.at(p) < left);
            else ampc_copy_async<8>(at(half, which, p), ampc_within(from, m.dtype, place.at(p)), place.at(p) < left);
        }
    }
    __device__ __forceinline__ void get(int half, uint4 (&x)[E / V], uint4 (&dy)[E / V]) const {
        AMPC_UNROLL
        for (int p = 0; p < E / V; p++) x[p] = *at(half, 0, p), dy[p] = *at(half, 1, p);
    }
};

/* Bytes of shared memory for the stage, at least as many as for the sums. */
size_t ampc_norm_stage_bytes(const ampc_row_plan &p) {
    return (size_t)p.block * (size_t)(4 * p.e / p.v) * sizeof(uint4);
}

/* Sums of dx over a block's rows, for the bias of the layer whose gradient dx is.  They are in shared memory behind the
   stage, [E, threads], because the registers are needed for dweight and dbias. */
template <int V, int E> struct ampc_norm_dx_sums {
    float *const mine;              /* NULL: not wanted */
    __device__ __forceinline__ ampc_norm_dx_sums(const amp_k_norm &a, unsigned char *behind)
        : mine(a.dx_sum.data ? (float *)(void *)behind + threadIdx.x : NULL) {
        AMPC_UNROLL
        for (int k = 0; k < E; k++)
            if (mine) mine[k * (int)blockDim.x] = 0.0f;
    }
    /* The first group of the block adds the sums of all groups, after a barrier. */
    __device__ void write(const ampc_place<V, E> &place, float *run, int64_t cols) const {
        if (mine == NULL || place.group != 0) return;
        AMPC_NO_UNROLL
        for (int k = 0; k < E; k++) {
            const int j = place.at(k / V) + k % V;
            float sum = 0.0f;
            for (int g = 0; g < place.groups; g++) sum += mine[k * (int)blockDim.x + g * place.lanes];
            if (j < cols) run[j] = sum;
        }
    }
};
/* Bytes of shared memory for them. */
size_t ampc_norm_dx_sum_bytes(const ampc_row_plan &p) { return (size_t)p.block * (size_t)p.e * sizeof(float); }

/* For rows of one chunk.  The next row is fetched while this one is processed.  A block's run has the sums for dweight,
   dbias and, if it is wanted, a.dx_sum.  If `partials` is NULL, only dx is computed. */
template <int V, int E> __global__ void __launch_bounds__(AMPC_SUM_THREADS, 1)
ampc_norm_gradient_rows(amp_k_norm a, int lanes, float share, float *partials) {
    AMPC_SHARED(float, scratch, 128);
    AMPC_DYNAMIC(memory);
    const ampc_place<V, E> place(lanes);
    const ampc_norm_stage<V, E> stage(memory);
    const ampc_norm_dx_sums<V, E> dx_sums(a, memory + (int)blockDim.x * (4 * E / V) * (int)sizeof(uint4));
    ampc_column_sums<V, E> sums(place, (float *)(void *)memory, false);
    const int64_t step = (int64_t)gridDim.x * place.groups;
    float next_mean, next_rstd;
    int turn = 0, half = 0;
    auto fetch = [&](int64_t row, int to) {
        int left = row < a.x.rows ? (int)a.x.cols : 0;
        next_mean = a.rms || left == 0 ? 0.0f : a.mean[row];
        next_rstd = left == 0 ? 0.0f : a.rstd[row];
        stage.fetch(place, a.x, row, left, to, 0);
        stage.fetch(place, a.dy, row, left, to, 1);
        if (a.dsum.data) ampc_chunk_expect(place, ampc_row(a.dsum, row), a.dsum.dtype, left);
        ampc_copy_commit();
    };
    int64_t first = (int64_t)blockIdx.x * place.groups;
    fetch(first + place.group, 0);
    for (; first < a.x.rows; first += step, half ^= 1) {
        int64_t row = first + place.group;
        float mean = next_mean, rstd = next_rstd, means[2] = {0.0f, 0.0f};
        int left = row < a.x.rows ? (int)a.x.cols : 0;
        uint4 x[E / V], dy[E / V], dsum[E / V];
        fetch(row + step, half ^ 1);
        ampc_copy_wait<1>();
        stage.get(half, x, dy);
        ampc_norm_look(a, place, 0, left, mean, rstd, x, dy, sums, means);
        if (a.dsum.data) ampc_chunk_read(place, ampc_row(a.dsum, row), a.dsum.dtype, left, dsum);
        ampc_over_group<ampc_plus>(means, place, scratch, turn);
        means[0] = a.rms ? 0.0f : ampc_mul(means[0], share);
        means[1] = ampc_mul(means[1], share);
        stage.get(half, x, dy);
        ampc_norm_dx(a, place, row, 0, left, mean, rstd, means, x, dy, dsum, dx_sums.mine);
    }
    ampc_copy_wait<0>();
    __syncthreads();                            /* the sums reuse the memory of the rows */
    if (partials == NULL) return;
    float *run = partials + (dx_sums.mine ? 3 : 2) * a.x.cols * blockIdx.x;
    dx_sums.write(place, run + 2 * a.x.cols, a.x.cols);
    sums.write(run, a.x.cols);
}

/* For rows of any length.  The next chunk is prefetched into the L2 cache during this one and across a row's
   barrier. */
template <int V, int E> __global__ void __launch_bounds__(ampc_threads(E, true), 1)
ampc_norm_gradient_wide(amp_k_norm a, int lanes, int64_t chunks, float share, float *partials) {
    AMPC_SHARED(float, scratch, 128);
    AMPC_DYNAMIC(memory);
    const ampc_place<V, E> place(lanes);
    ampc_column_sums<V, E> sums(place, (float *)(void *)memory, partials != NULL);
    const int64_t step = (int64_t)gridDim.x * place.groups;
    int turn = 0;
    auto expect = [&](int64_t row, int64_t c) {
        int64_t start = place.start(c);
        int left = place.left(c, row < a.x.rows ? a.x.cols : 0);
        if (left == 0) return;
        ampc_chunk_expect(place, ampc_row(a.x, row, start), a.x.dtype, left);
        ampc_chunk_expect(place, ampc_row(a.dy, row, start), a.dy.dtype, left);
        if (a.dsum.data) ampc_chunk_expect(place, ampc_row(a.dsum, row, start), a.dsum.dtype, left);
    };
    expect((int64_t)blockIdx.x * place.groups + place.group, 0);
    for (int64_t first = (int64_t)blockIdx.x * place.groups; first < a.x.rows; first += step) {
        int64_t row = first + place.group, cols = row < a.x.rows ? a.x.cols : 0, c;
        float mean = a.rms || cols == 0 ? 0.0f : a.mean[row], rstd = cols == 0 ? 0.0f : a.rstd[row],
              means[2] = {0.0f, 0.0f};
        uint4 x[E / V], dy[E / V];
        auto fetch = [&](int64_t start, int left) {
            ampc_chunk_read(place, ampc_row(a.x, row, start), a.x.dtype, left, x);
            ampc_chunk_read(place, ampc_row(a.dy, row, start), a.dy.dtype, left, dy);
        };
        for (c = 0; c < chunks; c++) {
            bool last = c + 1 == chunks;
            expect(last ? row + step : row, last ? 0 : c + 1);
            fetch(place.start(c), place.left(c, cols));
            ampc_norm_look(a, place, place.start(c), place.left(c, cols), mean, rstd, x, dy, sums, means);
        }
        ampc_over_group<ampc_plus>(means, place, scratch, turn);
        means[0] = a.rms ? 0.0f : ampc_mul(means[0], share);
        means[1] = ampc_mul(means[1], share);
        for (c = chunks - 1; c >= 0; c--) {
            if (c != chunks - 1) fetch(place.start(c), place.left(c, cols));
            ampc_norm_dx(a, place, row, place.start(c), place.left(c, cols), mean, rstd, means, x, dy, NULL, NULL);
        }
    }
    if (partials) sums.write(partials + 2 * a.x.cols * blockIdx.x, a.x.cols);
}

/* Partial sums of dweight and dbias, for the case that a row or its sums do not fit into a block.  Block i of `blocks`
   adds rows i, i + blocks, ... for a strip of columns. */
template <int V>
__global__ void __launch_bounds__(128) ampc_norm_gradient_columns(amp_k_norm a, int64_t blocks, float *partials) {
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

/* Plans the rows of a backward pass.  If shared memory is too small for the rows that wait there, a block has fewer
   groups.  If one group is still too much, the kernel for rows of any length is planned. */
ampc_row_plan ampc_norm_plan(const ampc_device *d, int v, int64_t rows, int64_t cols) {
    ampc_row_plan p = ampc_plan_rows(d, v, rows, cols, true);
    if (!ampc_one_chunk(p.v, p.e)) return p;
    while (p.block > p.lanes && ampc_norm_stage_bytes(p) + 1024 > d->has.shared_limit) p.block -= p.lanes;
    if (ampc_norm_stage_bytes(p) + 1024 > d->has.shared_limit) {
        p.e = AMPC_SHARED_SUMS;
        p.block = p.lanes = (int)ampc_blocks(cols, 32 * p.e) * 32;
    }
    p.grid = ampc_grid(d, ampc_blocks(rows, p.block / p.lanes), 1);
    return p;
}

/* How a backward pass runs. */
struct ampc_norm_way {
    int v;                          /* the width of accesses */
    ampc_row_plan plan;
    size_t shared;                  /* bytes */
    bool sums, wide, dx_sums;       /* sums: some are wanted; wide: another kernel does dweight and dbias */
};
ampc_norm_way ampc_norm_way_of(const ampc_device *d, const amp_k_norm &a) {
    ampc_norm_way w;
    w.v = ampc_width(ampc_width(ampc_width(ampc_width(ampc_width(8, a.x), a.dy), a.dsum), a.dx), a.dx_low);
    w.v = ampc_width_shared(w.v, a.weight, a.weight_dtype);
    w.plan = ampc_norm_plan(d, w.v, a.x.rows, a.x.cols);
    const bool staged = ampc_one_chunk(w.plan.v, w.plan.e);
    const size_t room = d->has.shared_limit - 1024, stage = ampc_norm_stage_bytes(w.plan),
                 behind = ampc_norm_dx_sum_bytes(w.plan), sums = ampc_column_scratch(w.plan);
    w.dx_sums = a.dx_sum.data && staged && stage + behind <= room;
    w.sums = a.dweight.data || a.dbias.data || w.dx_sums;
    w.wide = w.plan.chunks > 1 || sums > room;
    w.shared = staged ? stage + (w.dx_sums ? behind : 0) : w.sums && !w.wide ? sums : 0;
    return w;
}

amp_result ampc_norm_gradient_sums(ampc_device *d, const char *name, const amp_k_norm &a, const ampc_norm_way &w,
                                   float *partials, void *stream) {
    const int64_t blocks = w.plan.grid, cols = a.x.cols, apart = (w.dx_sums ? 3 : 2) * cols;
    if (w.wide)
        AMPC_TRY(ampc_launch(d, name,
                             w.v == 8   ? ampc_norm_gradient_columns<8>
                             : w.v == 4 ? ampc_norm_gradient_columns<4>
                                        : ampc_norm_gradient_columns<1>,
                             w.plan.grid * (unsigned)ampc_blocks(cols, (int64_t)128 * w.v), 128, 0, stream, a, blocks,
                             partials));
    return ampc_finish_runs(d, name, ampc_run_sums{{{partials, blocks, apart, a.dweight},
                                                    {partials + cols, blocks, apart, a.dbias},
                                                    {partials + 2 * cols, blocks, apart, a.dx_sum}}},
                            w.dx_sums ? 3 : 2, cols, stream);
}

amp_result ampc_norm_backward(void *dev, const amp_k_norm *args, void *stream) {
    ampc_device *d = (ampc_device *)dev;
    amp_k_norm a = *args;
    const char *name = a.rms ? "amp_rmsnorm_backward" : "amp_layernorm_backward";
    ampc_scratch scratch(d, stream);
    if (a.rms) a.dbias.data = NULL;
    const ampc_norm_way w = ampc_norm_way_of(d, a);
    const ampc_row_plan &plan = w.plan;
    float share = 1.0f / (float)a.x.cols;
    if (!w.dx_sums) a.dx_sum.data = NULL;
    if (w.sums)
        AMPC_TRY(scratch.get((size_t)plan.grid * (w.dx_sums ? 3 : 2) * (size_t)a.x.cols * sizeof(float), name));
    float *partials = (float *)scratch.data;
    AMPC_TRY(ampc_pick_shape(plan, [&](auto shape) {
        typedef decltype(shape) S;
        if constexpr (ampc_one_chunk(S::v, S::e))
            return ampc_launch(d, name, ampc_norm_gradient_rows<S::v, S::e>, plan.grid, (unsigned)plan.block, w.shared,
                               stream, a, plan.lanes, share, partials);
        else
            return ampc_launch(d, name, ampc_norm_gradient_wide<S::v, S::e>, plan.grid, (unsigned)plan.block, w.shared,
                               stream, a, plan.lanes, plan.chunks, share, w.wide ? NULL : partials);
    }));
    if (w.sums) AMPC_TRY(ampc_norm_gradient_sums(d, name, a, w, partials, stream));
    return w.dx_sums ? AMP_OK : ampc_sum_columns(d, args->dx, args->dx_sum, stream);
}

/* ---- Softmax over masked rows */

/* How a softmax's rows are counted. */
struct ampc_softmax_index { int64_t rows; ampc_divisor queries, heads; };

/* The keys that a row's query sees.  Most masks need few of the fields. */
__device__ __forceinline__ ampc_sight ampc_row_sight(const amp_k_softmax &a, const ampc_softmax_index &of,
                                                     int64_t row) {
    const amp_mask &m = a.mask;
    if (m.kind == AMP_MASK_NONE && !m.lengths && !m.documents) return ampc_sight{{a.keys, 0, 0}, a.keys, NULL, 0, NULL};
    int64_t query, h, head = ampc_divide(row, of.queries, &query);
    if (m.kind == AMP_MASK_CAUSAL && !m.lengths && !m.documents) {
        int64_t end = query + a.keys - a.queries + 1;
        end = end < 0 ? 0 : end;
        return ampc_sight{{end, 0, 0}, end, NULL, 0, NULL};
    }
    int64_t b = ampc_divide(head, of.heads, &h);
    return ampc_sight_of(m, b, h, query, a.queries, a.keys);
}

/* Sets a piece's hidden scores to -inf.  `at`, `first`, `low` and `high` count from the chunk's first element. */
template <int V>
__device__ __forceinline__ void ampc_hide(const ampc_sight &sight, int64_t start, int at, int first, int low, int high,
                                          float *s) {
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
__device__ __forceinline__ void ampc_scores_fetch(const amp_k_softmax &a, const ampc_place<V, E> &place,
                                                  const ampc_sight &sight, int64_t row, int64_t chunk, float *s) {
    int first = place.left(chunk, sight.span.first), low = place.left(chunk, sight.span.low);
    int high = place.left(chunk, sight.span.high);
    int64_t start = place.start(chunk);
    uint4 x[E / V];
    ampc_chunk_read(place, ampc_within(a.x, a.x_dtype, row * a.keys + start), a.x_dtype, place.left(chunk, sight.end),
                    x);
    ampc_chunk_widen<V>(x, a.x_dtype, s);
    AMPC_UNROLL
    for (int k = 0; k < E; k++) s[k] = ampc_mul(s[k], a.scale);
    AMPC_UNROLL
    for (int p = 0; p < E / V; p++) ampc_hide<V>(sight, start, place.at(p), first, low, high, s + p * V);
}

/* Writes `cols` elements, which are a chunk of a softmax row.  They are zeros from `end` on. */
template <int V, int E>
__device__ __forceinline__ void ampc_softmax_write(const ampc_place<V, E> &place, void *to, amp_dtype dtype, int cols,
                                                   int end, float inverse, const float *e) {
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

/* A row without visible keys has only scores of -inf, and gives zeros.  NaN and +inf make the whole row NaN. */
template <int V, int E> __global__ void AMPC_ROW_BOUNDS(true)
ampc_softmax_rows(amp_k_softmax a, ampc_softmax_index of, int lanes, int64_t planned) {
    AMPC_SHARED(float, scratch, 64);
    const ampc_place<V, E> place(lanes);
    const int64_t chunks = place.chunks(planned);
    int turn = 0;
    for (int64_t first = (int64_t)blockIdx.x * place.groups; first < of.rows;
         first += (int64_t)gridDim.x * place.groups) {
        bool live = first + place.group < of.rows;
        int64_t row = live ? first + place.group : of.rows - 1, c;
        const ampc_sight sight = ampc_row_sight(a, of, row);
        float s[E], max[1] = {ampi_f32_of_bits(0xff800000u)}, sum[1] = {0.0f}, shift;
        for (c = 0; c < chunks; c++) {
            ampc_scores_fetch(a, place, sight, row, c, s);
            AMPC_UNROLL
            for (int k = 0; k < E; k++) max[0] = fmaxf(max[0], s[k]);
        }
        ampc_over_group<ampc_max>(max, place, scratch, turn);
        shift = ampi_bits_f32(max[0]) == 0xff800000u ? 0.0f : max[0];
        for (c = chunks - 1; c >= 0; c--) {
            if (c != chunks - 1) ampc_scores_fetch(a, place, sight, row, c, s);
            AMPC_UNROLL
            for (int k = 0; k < E; k++) sum[0] += s[k] = ampc_exp_below(s[k], shift);
        }
        ampc_over_group<ampc_plus>(sum, place, scratch, turn);
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

template <int V>
__device__ __forceinline__ void ampc_softmax_slopes(const uint4 &y, const uint4 &dy, const amp_k_softmax &a, float sum,
                                                    float *slope) {
    float value[V];
    ampc_widen<V>(y, a.y_dtype, value);
    ampc_widen<V>(dy, a.y_dtype, slope);
    AMPC_UNROLL
    for (int i = 0; i < V; i++)
        slope[i] = value[i] == 0.0f ? 0.0f : ampc_mul(ampc_mul(value[i], slope[i] - sum), a.scale);
}

/* dx = scale y (dy - sum(y dy)).  A probability of 0 contributes 0, whatever its gradient.  Hidden elements are not
   read. */
template <int V, int E> __global__ void AMPC_ROW_BOUNDS(true)
ampc_softmax_gradient_rows(amp_k_softmax a, ampc_softmax_index of, int lanes, int64_t planned) {
    AMPC_SHARED(float, scratch, 64);
    const ampc_place<V, E> place(lanes);
    const int64_t chunks = place.chunks(planned);
    int turn = 0;
    for (int64_t first = (int64_t)blockIdx.x * place.groups; first < of.rows;
         first += (int64_t)gridDim.x * place.groups) {
        int64_t row = first + place.group, cols = row < of.rows ? a.keys : 0,
                end = cols ? ampc_row_sight(a, of, row).end : 0, c;
        float sum[1] = {0.0f}, value[V], slope[V];
        uint4 y[E / V], dy[E / V];
        auto fetch = [&](int64_t chunk) {
            int64_t start = row * a.keys + place.start(chunk);
            ampc_chunk_read(place, ampc_within((const void *)a.y, a.y_dtype, start), a.y_dtype, place.left(chunk, end),
                            y);
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
        ampc_over_group<ampc_plus>(sum, place, scratch, turn);
        for (c = chunks - 1; c >= 0; c--) {
            if (c != chunks - 1) fetch(c);
            int left = place.left(c, cols), seen = place.left(c, end);
            void *to = ampc_within(a.dx, a.x_dtype, row * a.keys + place.start(c));
            AMPC_UNROLL
            for (int p = 0; p < E / V; p++) {
                const int at = place.at(p);
                if (at >= left) continue;
                AMPC_UNROLL
                for (int i = 0; i < V; i++) slope[i] = 0.0f;
                if (at < seen) ampc_softmax_slopes<V>(y[p], dy[p], a, sum[0], slope);
                ampc_piece_put<V>(ampc_within(to, a.x_dtype, at), a.x_dtype, ampc_narrow<V>(slope, a.x_dtype));
            }
        }
    }
}

/* The rows of a softmax, of which there are none without keys. */
ampc_softmax_index ampc_softmax_count(const amp_k_softmax *a) {
    int64_t rows = a->keys > 0 ? a->batch * a->heads * a->queries : 0;
    return ampc_softmax_index{rows, a->queries, a->heads};
}

amp_result ampc_softmax(void *dev, const amp_k_softmax *args, void *stream) {
    ampc_device *d = (ampc_device *)dev;
    const ampc_softmax_index of = ampc_softmax_count(args);
    int v = ampc_width(ampc_width(8, args->x, args->x_dtype, 0, args->keys), args->y, args->y_dtype);
    ampc_row_plan plan = ampc_plan_rows(d, v, of.rows, args->keys);
    return ampc_pick_shape(plan, [&](auto shape) {
        typedef decltype(shape) S;
        return ampc_launch(d, "amp_softmax", ampc_softmax_rows<S::v, S::e>, plan.grid, (unsigned)plan.block, 0, stream,
                           *args, of, plan.lanes, plan.chunks);
    });
}

amp_result ampc_softmax_backward(void *dev, const amp_k_softmax *args, void *stream) {
    ampc_device *d = (ampc_device *)dev;
    const ampc_softmax_index of = ampc_softmax_count(args);
    int v = ampc_width(ampc_width(8, args->y, args->y_dtype, 0, args->keys), args->dy, args->y_dtype);
    ampc_row_plan plan = ampc_plan_rows(d, ampc_width(v, args->dx, args->x_dtype), of.rows, args->keys);
    return ampc_pick_shape(plan, [&](auto shape) {
        typedef decltype(shape) S;
        return ampc_launch(d, "amp_softmax_backward", ampc_softmax_gradient_rows<S::v, S::e>, plan.grid,
                           (unsigned)plan.block, 0, stream, *args, of, plan.lanes, plan.chunks);
    });
}

/* ==== 9 >>operators: pointwise ====
   One kernel computes out[0 to O) = op(in[0 to I)), element by element.  It works over rows or, if no operand has gaps,
   over one long row.  op has a template run<V>(in, out, index), where index is the piece's first element.  Its constant
   `ahead` is how many pieces of each input a thread reads ahead. */

template <int I, int O> struct ampc_map {
    /* per_sm is blocks per multiprocessor, fewer with many operands, which need registers */
    enum { inputs = I, outputs = O, per_sm = I > 3 ? 3 : 4 };
    amp_mat in[I], out[O];
    int64_t cols, total;            /* elements of a row, pieces in all */
    ampc_divisor pieces;            /* pieces of a row */
};

/* If ld is 0, all rows are the same. */
amp_mat ampc_matrix(const void *data, amp_dtype dtype, int64_t rows, int64_t cols, int64_t ld) {
    amp_mat m = {const_cast<void *>(data), dtype, 0, rows, cols, ld};
    return m;
}
amp_mat ampc_flat(const void *data, amp_dtype dtype, int64_t n) { return ampc_matrix(data, dtype, 1, n, n); }

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
template <int V, class Op, class Map>
__global__ void __launch_bounds__(256, Map::per_sm) ampc_map_kernel(Map m, Op op) {
    enum { U = Op::ahead };
    const int64_t step = (int64_t)gridDim.x * (256 * U);
    for (int64_t i = (int64_t)blockIdx.x * (256 * U) + threadIdx.x; i < m.total; i += step) {
        int64_t row[U], at[U];
        uint4 raw[U][Map::inputs];
        AMPC_UNROLL
        for (int u = 0; u < U; u++) {
            row[u] = m.total == m.pieces.d ? 0 : ampc_divide(i + u * 256, m.pieces, &at[u]);
            at[u] = V * (m.total == m.pieces.d ? i + u * 256 : at[u]);
            if (i + u * 256 < m.total && at[u] + V <= m.cols) ampc_map_read<V>(m, row[u], at[u], raw[u]);
        }
        AMPC_UNROLL
        for (int u = 0; u < U; u++) {
            if (i + u * 256 >= m.total) continue;
            if (at[u] + V <= m.cols) ampc_map_write<V>(m, op, row[u], at[u], raw[u]);
            else
                for (; at[u] < m.cols; at[u]++) {
                    ampc_map_read<1>(m, row[u], at[u], raw[u]);
                    ampc_map_write<1>(m, op, row[u], at[u], raw[u]);
                }
        }
    }
}

/* Runs op over the shape of the first output.  W is the widest piece that its operands allow. */
template <int W = 8, class Op, class Map>
amp_result ampc_map_run(void *dev, const char *name, Map m, Op op, void *stream) {
    ampc_device *d = (ampc_device *)dev;
    int64_t rows = m.out[0].rows, cols = m.out[0].cols;
    bool dense = true;
    int v = W, k;
    auto look = [&](const amp_mat &a) {
        if (a.data == NULL) return;
        dense = dense && (a.ld == cols || rows <= 1);
        v = ampc_width(v, a.data, a.dtype, rows > 1 ? a.ld : 0);
    };
    for (k = 0; k < Map::inputs; k++) look(m.in[k]);
    for (k = 0; k < Map::outputs; k++) look(m.out[k]);
    m.cols = dense ? rows * cols : cols;
    m.pieces = ampc_blocks(m.cols, v);
    m.total = (dense ? 1 : rows) * m.pieces.d;
    return ampc_launch(d, name,
                       v == 8   ? ampc_map_kernel<W, Op, Map>
                       : v == 4 ? ampc_map_kernel<4, Op, Map>
                                : ampc_map_kernel<1, Op, Map>,
                       ampc_full_grid(ampc_blocks(m.total, 256 * Op::ahead)), 256, 0, stream, m, op);
}

/* ---- Activations */

/* 1 / (1 + exp(-x)).  Below -88 the exponential is infinite, and the result is 0. */
__device__ __forceinline__ float ampc_sigmoid(float x) { return ampc_reciprocal(1.0f + ampc_exp(-x)); }

/* The tanh form of GELU is x sigmoid(2 u), because (1 + tanh u) / 2 = sigmoid(2 u), with
   2 u = x (A + B x^2), A = 2 sqrt(2 / pi), B = 0.044715 A. */
#define AMPC_GELU_A 1.5957691216057308f
#define AMPC_GELU_B 0.07135481282740843f

__device__ __forceinline__ float ampc_gelu(float x) {
    return ampc_mul(x, ampc_sigmoid(ampc_mul(x, ampc_fma(AMPC_GELU_B, ampc_mul(x, x), AMPC_GELU_A))));
}
/* x where p, which is 0 or above, is not 0, and 0 elsewhere.  x may be infinite; the product x p is then 0 where p is
   0, instead of NaN. */
__device__ __forceinline__ float ampc_where_not_zero(float x, float p) { return p == 0.0f ? 0.0f : x; }
/* s + x s (1 - s) (A + 3 B x^2).  x^2 is limited to 10^4, where s has long been 0 or 1. */
__device__ __forceinline__ float ampc_gelu_slope(float x) {
    float square = fminf(ampc_mul(x, x), 1.0e4f),
          s = ampc_sigmoid(ampc_mul(x, ampc_fma(AMPC_GELU_B, square, AMPC_GELU_A)));
    float inner = ampc_fma(3.0f * AMPC_GELU_B, square, AMPC_GELU_A);
    float both = ampc_mul(s, 1.0f - s);
    return ampc_fma(ampc_where_not_zero(ampc_mul(x, inner), both), both, s);
}
/* The normal distribution function, (1 + erf(x / sqrt 2)) / 2. */
__device__ __forceinline__ float ampc_normal(float x) {
    return ampc_fma(0.5f, erff(ampc_mul(x, 0.7071067811865476f)), 0.5f);
}
/* normal(x) + x exp(-x^2 / 2) / sqrt(2 pi) */
__device__ __forceinline__ float ampc_gelu_erf_slope(float x) {
    float density = ampc_mul(ampc_exp(ampc_mul(ampc_mul(x, x), -0.5f)), 0.3989422804014327f);
    return ampc_fma(ampc_where_not_zero(x, density), density, ampc_normal(x));
}
/* s (1 + x (1 - s)), s = sigmoid(x) */
__device__ __forceinline__ float ampc_silu_slope(float x, float s) {
    float rest = 1.0f - s;
    return ampc_mul(s, ampc_fma(ampc_where_not_zero(x, ampc_mul(s, rest)), rest, 1.0f));
}
__device__ __forceinline__ float ampc_tanh_slope(float y) { return ampc_fma(-y, y, 1.0f); }
/* x if `by` is above 0 or NaN, else 0 */
__device__ __forceinline__ float ampc_gate(float x, float by) { return by <= 0.0f ? 0.0f : x; }

/* y[i] = f(x[i]), with the function chosen once for V elements. */
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

/* The inputs are x and dy.  With from_y, y of tanh stands in place of x. */
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

/* op over N inputs.  The B inputs after them are biases, which are added to the first B. */
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

/* Takes the slope of tanh from y if y is given, because x may have been overwritten. */
amp_result ampc_activation_backward(void *dev, const amp_k_activation *args, void *stream) {
    int from_y = args->act == AMP_ACT_TANH && args->y != NULL;
    if (args->bias != NULL && !from_y) {
        int64_t rows = args->cols > 0 ? args->n / args->cols : 0;
        ampc_map<3, 1> m;
        m.in[0] = ampc_matrix(args->x, args->x_dtype, rows, args->cols, args->cols);
        m.in[1] = ampc_matrix(args->dy, args->y_dtype, rows, args->cols, args->cols);
        m.in[2] = ampc_matrix(args->bias, args->bias_dtype, rows, args->cols, 0);
        m.out[0] = ampc_matrix(args->dx, args->x_dtype, rows, args->cols, args->cols);
        return ampc_map_run(dev, "amp_activation_backward", m, ampc_biased<ampc_act_back, 2, 1>{{args->act, 0}},
                            stream);
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

/* Uniform numbers are multiples of 2^-24, so u >= p exactly where the integer 2^24 u >= threshold = ceil(2^24 p). */
struct ampc_drop {
    enum { ahead = 2 };
    uint32_t threshold;
    float scale;
    uint64_t seed, offset;
    const uint64_t *base;
    template <int V> __device__ __forceinline__ void run(const float (*in)[V], float (*out)[V], int64_t index) const {
        uint32_t words[V];
        ampc_random(seed, offset + (base != NULL ? *base : 0) + (uint64_t)index, words);
        AMPC_UNROLL
        for (int i = 0; i < V; i++) out[0][i] = words[i] >> 8 >= threshold ? ampc_mul(in[0][i], scale) : 0.0f;
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

/* Adds views.  A thread takes one element at a time. */
__global__ void __launch_bounds__(256) ampc_add_views_kernel(amp_k_add_views v, int64_t total) {
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += (int64_t)gridDim.x * blockDim.x) {
        int64_t rest = i, a = 0, b = 0, y = 0;
        for (int k = 3; k >= 0; k--) {
            int64_t index = rest % v.shape[k];
            rest /= v.shape[k];
            a += index * v.a_stride[k]; b += index * v.b_stride[k]; y += index * v.y_stride[k];
        }
        float x = ampc_mul(ampc_stored(v.a, v.a_dtype, a), v.alpha);
        if (v.b != NULL) x = ampc_fma(ampc_stored(v.b, v.b_dtype, b), v.beta, x);
        ampc_put_stored(v.y, v.y_dtype, y, x);
    }
}

amp_result ampc_add_views(void *dev, const amp_k_add_views *args, void *stream) {
    ampc_device *d = (ampc_device *)dev;
    const int64_t total = args->shape[0] * args->shape[1] * args->shape[2] * args->shape[3];
    if (total == 0) return AMP_OK;
    return ampc_launch(d, "amp_add", ampc_add_views_kernel, ampc_grid(d, ampc_blocks(total, 256), 8), 256, 0, stream,
                       *args, total);
}

/* ---- RoPE.  A thread finds the angles of V pairs of one position, and turns these pairs in every `slices`-th head. */

template <bool Adjacent, int V>
__device__ __forceinline__ void ampc_rope_pairs(const uint4 *from, amp_dtype dtype, const float *cosine,
                                                const float *sine, uint4 *to) {
    float x[2 * V];
    ampc_widen<V>(from[0], dtype, x);
    ampc_widen<V>(from[1], dtype, x + V);
    AMPC_UNROLL
    for (int i = 0; i < V; i++) {
        const int j = Adjacent ? 2 * i : i, k = Adjacent ? 2 * i + 1 : V + i;
        float a = x[j], b = x[k];
        x[j] = ampc_add(ampc_mul(a, cosine[i]), ampc_mul(b, -sine[i]));
        x[k] = ampc_add(ampc_mul(b, cosine[i]), ampc_mul(a, sine[i]));
    }
    to[0] = ampc_narrow<V>(x, dtype);
    to[1] = ampc_narrow<V>(x + V, dtype);
}

/* `pieces`, `slices` and `positions` say how many there are of each. */
template <bool Adjacent, int V>
__global__ void __launch_bounds__(256, 2)
    ampc_rope_kernel(amp_k_rope a, ampc_divisor pieces, ampc_divisor slices, ampc_divisor positions, int64_t total) {
    enum { U = 2 };                 /* heads that a thread reads at once */
    const int64_t heads = a.heads[0] + a.heads[1];
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += (int64_t)gridDim.x * blockDim.x) {
        int64_t piece, slice, p, token = ampc_divide(ampc_divide(i, pieces, &piece), slices, &slice);
        int64_t b = ampc_divide(token, positions, &p);
        int64_t position = a.offset + (a.at ? a.at[b * a.at_stride + p] : p);
        int64_t first = (Adjacent ? 2 : 1) * V * piece, second = Adjacent ? first + V : first + a.rotary / 2;
        float cosine[V], sine[V];
        AMPC_UNROLL
        for (int k = 0; k < V; k++) {
            double frequency = ampc_mul(exp2(ampc_mul(a.step, (double)(V * piece + k))), 0.63661977236758134);
            ampi_rope_angle(ampc_mul((double)position, frequency), &cosine[k], &sine[k]);
            if (a.backward) sine[k] = -sine[k];
        }
        for (int64_t h = slice; h < heads; h += U * slices.d) {
            void *head[U];
            uint4 x[U][2];
            AMPC_UNROLL
            for (int u = 0; u < U; u++) {
                int64_t at = h + u * slices.d;
                int which = at >= a.heads[0];
                if (at >= heads) continue;
                at = b * a.stride[which][0] + p * a.stride[which][1] + (at - which * a.heads[0]) * a.stride[which][2];
                head[u] = ampc_within(a.x[which], a.dtype, at);
                x[u][0] = ampc_piece_get<V>(ampc_within(head[u], a.dtype, first), a.dtype);
                x[u][1] = ampc_piece_get<V>(ampc_within(head[u], a.dtype, second), a.dtype);
            }
            AMPC_UNROLL
            for (int u = 0; u < U; u++) {
                if (h + u * slices.d >= heads) continue;
                ampc_rope_pairs<Adjacent, V>(x[u], a.dtype, cosine, sine, x[u]);
                ampc_piece_put<V>(ampc_within(head[u], a.dtype, first), a.dtype, x[u][0]);
                ampc_piece_put<V>(ampc_within(head[u], a.dtype, second), a.dtype, x[u][1]);
            }
        }
    }
}

template <bool Adjacent> amp_result ampc_rope_as(ampc_device *d, const amp_k_rope *a, void *stream) {
    const int64_t heads = a->heads[0] + a->heads[1], tokens = a->batch * a->positions;
    int64_t slices;
    int v = 4, k, i;                /* with 8 the angles do not fit in a thread's registers */
    for (k = 0; k < 2; k++) {
        v = ampc_width(v, a->x[k], a->dtype, 0, a->rotary / 2);
        for (i = 0; i < 3 && a->x[k]; i++) v = ampc_width(v, a->x[k], a->dtype, a->stride[k][i]);
    }
    ampc_divisor pieces(a->rotary / 2 / v);
    slices = ampc_blocks(d->has.multiprocessors * 512, tokens * pieces.d > 0 ? tokens * pieces.d : 1);
    slices = slices < heads ? slices : heads;
    return ampc_launch(d, "amp_rope", v == 4 ? ampc_rope_kernel<Adjacent, 4> : ampc_rope_kernel<Adjacent, 1>,
                       ampc_grid(d, ampc_blocks(tokens * slices * pieces.d, 256), 2), 256, 0, stream, *a, pieces,
                       ampc_divisor(slices), ampc_divisor(a->positions), tokens * slices * pieces.d);
}

amp_result ampc_rope(void *dev, const amp_k_rope *args, void *stream) {
    ampc_device *d = (ampc_device *)dev;
    return args->adjacent ? ampc_rope_as<true>(d, args, stream) : ampc_rope_as<false>(d, args, stream);
}

/* ==== 9 >>operators: losses and embeddings ==== */

/* Writes 1 + row into a report that is clear or names a later row.  An earlier call's report stays until the CPU has
   read and cleared it. */
__device__ __forceinline__ void ampc_report(int32_t *report, int64_t row) {
    int32_t mine = row < INT32_MAX - 1 ? (int32_t)(row + 1) : INT32_MAX, seen = *(volatile int32_t *)report;
    while (seen == 0 || mine < seen) {
        int32_t before = atomicCAS(report, seen, mine);
        if (before == seen) return;
        seen = before;
    }
}

/* The findings of one pass over a call's labels or ids. */
struct ampc_labels {
    int64_t counted;                /* labels that are not ignored */
    int32_t bad;                    /* 1: one is out of range, so the call's other kernels do nothing */
    float scale;                    /* of the gradient */
};

/* Runs as one block.  values[i] must lie in 0..limit-1 or, with may_ignore, be `ignore`.  scale is factor grad_scale /
   counted, or factor grad_scale with `sum`. */
__global__ void __launch_bounds__(1024)
    ampc_labels_scan(const int32_t *values, int64_t n, int64_t limit, int may_ignore, int32_t ignore, int sum,
                     double factor, const float *grad_scale, ampc_labels *out, int32_t *report) {
    AMPC_SHARED(int64_t, scratch, 32);
    enum { U = 8 };                 /* reads in flight */
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
    counted = ampc_block_sum(counted, scratch);
    first = -ampc_block_max(-first, scratch);
    if (threadIdx.x != 0) return;
    out->counted = counted;
    out->bad = first < n;
    out->scale = (float)(factor * (grad_scale ? (double)*grad_scale : 1.0) /
                         (double)(sum           ? 1
                                  : counted > 0 ? counted
                                                : 1));
    if (out->bad) ampc_report(report, first);
}

/* Sets *loss to the sum of n values, or to their mean over the count in `labels`.  If `labels` is NULL, the count is
   `counted`.  The mean over a count of 0 is NaN.  Runs as one block. */
template <class T>
__global__ void __launch_bounds__(1024)
    ampc_loss_total(const T *values, int64_t n, const ampc_labels *labels, int64_t counted, int sum, float *loss) {
    AMPC_SHARED(double, scratch, 32);
    enum { U = 8, THREADS = 1024 };         /* reads in flight, and the block */
    double total = 0.0;
    if (labels && labels->bad) return;
    for (int64_t i = threadIdx.x; i < n; i += U * THREADS) {
        T value[U];
        AMPC_UNROLL
        for (int u = 0; u < U; u++) value[u] = i + u * THREADS < n ? values[i + u * THREADS] : (T)0;
        AMPC_UNROLL
        for (int u = 0; u < U; u++) total += (double)value[u];
    }
    total = ampc_block_sum(total, scratch);
    if (threadIdx.x != 0) return;
    if (labels) counted = labels->counted;
    *loss = (float)(sum ? total : total / (double)counted);         /* 0 / 0 is NaN */
}

/* ---- Cross-entropy.  A block reads a row once, with a running maximum and sum of exponentials.  It keeps the row in
   shared memory if it fits (KEEP), and writes the gradient from there.  A thread writes only pieces that it has read,
   so dlogits may be the logits.  Rows of any length and distance have aligned pieces.  The elements before and after
   these are the row's edges, which are done one by one. */

/* The sum of exp(x - max) over a thread's elements so far, where max is the largest of them. */
struct ampc_running {
    float max, sum, total;          /* total is the sum of the logits */
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

/* A block's row. */
struct ampc_logit_row {
    const void *from;
    void *to;                       /* NULL: no gradient */
    unsigned char *kept;            /* with KEEP, the pieces in shared memory; else the row is read again */
    int64_t label, head, edge;      /* label -1: ignored; the pieces of V lie in [head, edge) */
    float at_label, max, sum;
    /* The column of element k of the edges.  The elements before `head` come first. */
    __device__ __forceinline__ int64_t outside(int64_t k) const { return k < head ? k : edge + k - head; }
};

template <int V> __device__ __forceinline__ ampc_logit_row ampc_logits_of(const amp_k_cross_entropy &a, int64_t row,
                                                                          unsigned char *memory, bool bad) {
    ampc_logit_row r = {ampc_row(a.logits, row),
                        a.dlogits.data ? ampc_row(a.dlogits, row) : NULL,
                        memory,
                        bad ? -1 : a.labels[row],
                        0,
                        0,
                        0.0f,
                        0.0f,
                        1.0f};
    if (bad || r.label == a.ignore_index) r.label = -1;
    else r.at_label = ampc_stored(r.from, a.logits.dtype, r.label);
    r.head = (int)((0 - (uintptr_t)r.from / (a.logits.dtype == AMP_F32 ? 4 : 2)) % V);
    if (r.head > a.classes) r.head = a.classes;
    r.edge = r.head + (a.classes - r.head) / V * V;
    return r;
}

/* The first pass over a row.  With KEEP, it also copies the pieces to shared memory. */
template <int V, bool KEEP>
__device__ __forceinline__ ampc_running ampc_logits_scan(const amp_k_cross_entropy &a, const ampc_logit_row &r) {
    enum { U = V == 1 ? 8 : 4 };    /* reads in flight */
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
        float x[1] = {ampc_stored(r.from, dtype, r.outside(k))};
        found.add(x, smooth);
    }
    return found;
}

/* dlogits = scale (e / sum - smoothing / classes) with e = exp(x - max).  In the label's column, 1 - smoothing is
   subtracted within the brackets.  Beyond the classes and in ignored rows, dlogits is 0.  `share` is -scale smoothing /
   classes, and `less` is what the label's column adds to e / sum.  That column is written again after the whole row. */
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
            ampc_piece_put<V>(ampc_within(r.to, to_dtype, r.head + at + u * step), to_dtype,
                              ampc_narrow<V>(g, to_dtype));
        }
    }
    for (int64_t k = threadIdx.x; k < outside; k += blockDim.x) {
        int64_t at = r.outside(k);
        float g = 0.0f;
        if (at < a.classes) g = ampc_fma(ampc_exp_below(ampc_stored(r.from, dtype, at), r.max), slope, share);
        ampc_put_stored(r.to, to_dtype, at, g);
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    ampc_put_stored(r.to, to_dtype, r.label, ampc_mul(scale, ampc_exp_below(r.at_label, r.max) / r.sum + less));
}
/* Fills the row with `bits`, which are those of 0, or all set, which is NaN in each dtype. */
template <int V>
__device__ __forceinline__ void ampc_logits_fill(const amp_k_cross_entropy &a, const ampc_logit_row &r, uint32_t bits) {
    int64_t at, outside = r.head + a.dlogits.cols - r.edge;
    for (at = r.head + (int64_t)threadIdx.x * V; at < r.edge; at += (int64_t)blockDim.x * V)
        ampc_piece_put<V>(ampc_within(r.to, a.dlogits.dtype, at), a.dlogits.dtype, uint4{bits, bits, bits, bits});
    for (at = threadIdx.x; at < outside; at += blockDim.x)
        ampc_put_stored(r.to, a.dlogits.dtype, r.outside(at), ampi_f32_of_bits(bits));
}

/* In a row with NaN or +inf, or with only -inf, some x - max is NaN, and so are loss and gradient. */
template <int V, bool KEEP>
__device__ __forceinline__ float ampc_cross_entropy_row(const amp_k_cross_entropy &a, ampc_logit_row &r,
                                                        float *scratch) {
    ampc_running found = ampc_logits_scan<V, KEEP>(a, r);
    float loss;
    r.max = ampc_block_max(found.max, scratch);
    found.rescale(r.max);
    r.sum = ampc_block_sum(found.sum, scratch);
    loss = logf(r.sum) + (r.max - r.at_label);
    if (a.smoothing > 0.0f) {
        float mean = ampc_block_sum(found.total, scratch) / (float)a.classes;
        loss = (1.0f - a.smoothing) * loss + a.smoothing * (logf(r.sum) + (r.max - mean));
    }
    return loss;
}

/* `even` is smoothing / classes. */
template <int V, bool KEEP> __global__ void __launch_bounds__(512, 2)
ampc_cross_entropy_rows(amp_k_cross_entropy a, double even, const ampc_labels *labels, float *losses) {
    AMPC_SHARED(float, scratch, 32);
    AMPC_DYNAMIC(memory);
    const bool bad = labels->bad;
    if (bad && !a.spoil) return;
    const float scale = labels->scale, share = (float)((double)scale * -even);
    const float less = (float)(-even - (1.0 - (double)a.smoothing));
    for (int64_t row = blockIdx.x; row < a.logits.rows; row += gridDim.x) {
        ampc_logit_row r = ampc_logits_of<V>(a, row, memory, bad);
        float loss = r.label < 0 ? 0.0f : ampc_cross_entropy_row<V, KEEP>(a, r, scratch);
        if (r.to && r.label < 0) ampc_logits_fill<V>(a, r, bad ? 0xffffffffu : 0);
        else if (r.to) ampc_logits_gradient<V, KEEP>(a, r, scale, share, less);
        if (threadIdx.x == 0 && !bad) losses[row] = loss;
    }
}

template <bool KEEP>
void (*ampc_cross_entropy_kernel(int v))(amp_k_cross_entropy, double, const ampc_labels *, float *) {
    return v == 8   ? ampc_cross_entropy_rows<8, KEEP>
           : v == 4 ? ampc_cross_entropy_rows<4, KEEP>
                    : ampc_cross_entropy_rows<1, KEEP>;
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
    int64_t rows = a.logits.rows, batch = a.batch ? a.batch : rows;
    int64_t bytes = ampc_blocks(a.classes * ampc_dtype_size(a.logits.dtype), 16) * 16;
    int v = ampc_logits_width(a.logits, a.dlogits);
    int64_t threads = ampc_blocks(ampc_blocks(a.logits.cols, v * 4), 32) * 32;
    bool keep = a.dlogits.data != NULL && bytes <= (int64_t)d->has.shared_limit - 1024;
    size_t shared = keep ? (size_t)bytes : 0;
    AMPC_TRY(scratch.get(256 + (size_t)rows * sizeof(float), name));
    ampc_labels *labels = (ampc_labels *)scratch.data;
    float *losses = a.losses ? a.losses : (float *)(void *)((char *)scratch.data + 256);
    threads = threads < 128 ? 128 : threads < 512 ? threads : 512;
    int per_sm = (int)(1024 / threads);
    while (per_sm > 1 && (size_t)per_sm * (shared + 2048) > d->has.shared_limit) per_sm--;
    AMPC_TRY(ampc_launch(d, name, ampc_labels_scan, 1, 1024, 0, stream, a.labels, batch, a.classes, 1,
                         a.ignore_index, a.sum, (double)a.factor, a.grad_scale, labels, a.bad_label));
    a.labels += a.first;
    AMPC_TRY(ampc_launch(d, name, keep ? ampc_cross_entropy_kernel<true>(v) : ampc_cross_entropy_kernel<false>(v),
                         ampc_grid(d, rows, AMPC_WAVES * per_sm), (unsigned)threads, shared, stream, a,
                         (double)a.smoothing / (double)a.classes, labels, losses + a.first));
    if (a.first + rows < batch) return AMP_OK;
    return ampc_launch(d, name, ampc_loss_total<float>, 1, 1024, 0, stream, losses, batch, labels, 0, a.sum, a.loss);
}

/* ---- Mean squared error.  A block sums a stretch in fp64.  The length of a stretch, and so each partial sum, depends
   only on the number of elements.  From 2 million elements on there are at least 512 stretches, which are enough for
   any GPU. */

__host__ __device__ inline int64_t ampc_mse_stretch(int64_t n) {
    int64_t stretch = 4096;
    while (stretch < 32768 && n / stretch >= 1024) stretch *= 2;
    return stretch;
}

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

template <int V>
__global__ void __launch_bounds__(256, 4) ampc_mse_stretches(amp_k_mse a, double divisor, double *partials) {
    AMPC_SHARED(double, scratch, 32);
    float scale = (float)(2.0 * (double)a.factor * (a.grad_scale ? (double)*a.grad_scale : 1.0) / divisor);
    const int64_t length = ampc_mse_stretch(a.n), stretches = ampc_blocks(a.n, length);
    for (int64_t stretch = blockIdx.x; stretch < stretches; stretch += gridDim.x) {
        int64_t begin = stretch * length, end = begin + length < a.n ? begin + length : a.n;
        double sum = 0.0;
        for (int64_t at = begin + (int64_t)threadIdx.x * V; at < end; at += (int64_t)blockDim.x * V) {
            if (at + V <= end) sum += ampc_mse_piece<V>(a, at, scale);
            else
                for (int64_t i = at; i < end; i++) sum += ampc_mse_piece<1>(a, i, scale);
        }
        sum = ampc_block_sum(sum, scratch);
        if (threadIdx.x == 0) partials[stretch] = sum;
    }
}

amp_result ampc_mse(void *dev, const amp_k_mse *args, void *stream) {
    ampc_device *d = (ampc_device *)dev;
    ampc_scratch scratch(d, stream);
    int64_t stretches = ampc_blocks(args->n, ampc_mse_stretch(args->n));
    int v = ampc_width(ampc_width(8, args->x, args->x_dtype), args->target, args->target_dtype);
    v = ampc_width(v, args->dx, args->x_dtype);
    AMPC_TRY(scratch.get(256 + (size_t)stretches * sizeof(double), "amp_mse"));
    double *partials = (double *)scratch.data;
    AMPC_TRY(ampc_launch(d, "amp_mse",
                         v == 8   ? ampc_mse_stretches<8>
                         : v == 4 ? ampc_mse_stretches<4>
                                  : ampc_mse_stretches<1>,
                         ampc_full_grid(stretches), 256, 0, stream, *args,
                         (double)(args->sum || args->n < 1 ? 1 : args->n), partials));
    return ampc_launch(d, "amp_mse", ampc_loss_total<double>, 1, 1024, 0, stream, partials, stretches, NULL, args->n,
                       args->sum, args->loss);
}

/* ---- Embedding.  A row whose id is out of range is reported and left alone. */

template <int V> __global__ void __launch_bounds__(256, 4) ampc_embedding_rows(amp_k_embedding a, ampc_divisor pieces,
                                                                                                 ampc_divisor seq) {
    int64_t total = a.n * pieces.d, step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += step) {
        int64_t piece, place, row = ampc_divide(i, pieces, &piece), at = piece * V, id = a.ids[row];
        float y[V], position[V];
        if (id < 0 || id >= a.table.rows) {
            if (piece == 0) ampc_report(a.bad_id, row);
            continue;
        }
        uint4 raw = ampc_piece_get<V>(ampc_row(a.table, id, at), a.table.dtype), other = {0, 0, 0, 0};
        if (a.positions.data) {
            ampc_divide(row, seq, &place);
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
    return ampc_launch(d, "amp_embedding",
                       v == 8   ? ampc_embedding_rows<8>
                       : v == 4 ? ampc_embedding_rows<4>
                                : ampc_embedding_rows<1>,
                       ampc_grid(d, ampc_blocks(args->n * pieces, 256), AMPC_WAVES * 8), 256, 0, stream, *args, pieces,
                       args->seq);
}

/* ---- Embedding, backward.  The rows of dy are sorted by id, by a stable radix sort of the rows' numbers with 8 bits
   per pass.  Each id's rows are added in that order, in stretches of fixed length.  The rows within each stretch are
   added first.  Then, for ids that span stretches, the stretches are added one by one.  No sum depends on the grid, and
   a frequent id does not make one long chain. */

enum { AMPC_SORT_TILE = 1024, AMPC_DIGITS = 256, AMPC_STRETCH = 128 };

struct ampc_sort { const int32_t *ids; const int64_t *from; int64_t *to; int64_t n, tiles; int shift; };

/* The number of the row at place i of the current order. */
__device__ __forceinline__ int64_t ampc_sorted(const ampc_sort &s, int64_t i) { return s.from ? s.from[i] : i; }
__device__ __forceinline__ int ampc_digit(const ampc_sort &s, int64_t row) {
    return s.ids[row] >> s.shift & (AMPC_DIGITS - 1);
}

/* Counts the digits of a tile, into counts[digit][tile]. */
__global__ void __launch_bounds__(256) ampc_sort_count(ampc_sort s, const ampc_labels *labels, int64_t *counts) {
    AMPC_SHARED(unsigned, count, AMPC_DIGITS);
    int64_t first = (int64_t)blockIdx.x * AMPC_SORT_TILE,
            end = first + AMPC_SORT_TILE < s.n ? first + AMPC_SORT_TILE : s.n;
    if (labels->bad) return;
    count[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t i = first + threadIdx.x; i < end; i += blockDim.x)
        atomicAdd(&count[ampc_digit(s, ampc_sorted(s, i))], 1u);
    __syncthreads();
    counts[threadIdx.x * s.tiles + blockIdx.x] = count[threadIdx.x];
}

/* The sum over the threads before this one.  *all is set to the sum over the block. */
__device__ inline int64_t ampc_block_before(int64_t x, int64_t *scratch, int64_t *all) {
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, warps = (int)blockDim.x / 32;
    int64_t sum = x, before = 0;
    AMPC_UNROLL
    for (int step = 1; step < 32; step *= 2) {
        int64_t other = __shfl_up_sync(0xffffffffu, sum, (unsigned)step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) scratch[warp] = sum;
    __syncthreads();
    *all = 0;
    for (int w = 0; w < warps; w++) {
        if (w == warp) before = *all;
        *all += scratch[w];
    }
    return before + sum - x;
}

/* Each of counts becomes the sum of all counts before it.  Runs as one block.  A thread has eight counts at a time,
   which it reads together. */
__global__ void __launch_bounds__(1024) ampc_sort_scan(const ampc_labels *labels, int64_t *counts, int64_t n) {
    AMPC_SHARED(int64_t, scratch, 32);
    enum { U = 8, THREADS = 1024 };
    int64_t done = 0, all;
    if (labels->bad) return;
    for (int64_t base = 0; base < n; base += U * THREADS, done += all) {
        int64_t begin = base + U * threadIdx.x, count[U], sum = 0;
        AMPC_UNROLL
        for (int u = 0; u < U; u++) sum += count[u] = begin + u < n ? counts[begin + u] : 0;
        sum = done + ampc_block_before(sum, scratch, &all);
        AMPC_UNROLL
        for (int u = 0; u < U; u++) {
            if (begin + u < n) counts[begin + u] = sum;
            sum += count[u];
        }
        __syncthreads();            /* scratch has been read */
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

/* Moves the keys of a tile to their places, 256 at a time.  Thread d counts digit d. */
__global__ void __launch_bounds__(256)
    ampc_sort_scatter(ampc_sort s, const ampc_labels *labels, const int64_t *starts) {
    AMPC_SHARED(unsigned, count, 8 * AMPC_DIGITS);
    AMPC_SHARED(int64_t, base, AMPC_DIGITS);
    int64_t first = (int64_t)blockIdx.x * AMPC_SORT_TILE,
            end = first + AMPC_SORT_TILE < s.n ? first + AMPC_SORT_TILE : s.n;
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
template <int V> __global__ void __launch_bounds__(256) ampc_zero_rows(amp_mat m, int64_t first, ampc_divisor pieces,
                                                                             const ampc_labels *labels) {
    int64_t total = (m.rows - first) * pieces.d, piece;
    if (labels && labels->bad) return;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += (int64_t)gridDim.x * blockDim.x) {
        int64_t row = first + ampc_divide(i, pieces, &piece);
        ampc_piece_put<V>(ampc_row(m, row, piece * V), m.dtype, uint4{0, 0, 0, 0});
    }
}

/* A call's sorted rows, and the sums of ids that span stretches.  head[stretch] belongs to an id that began before the
   stretch, and tail[stretch] to one that continues after it.  Both are [stretches, cols]. */
struct ampc_gather {
    amp_mat dy, dtable;
    const int32_t *ids;
    const int64_t *order;
    float *head, *tail;
    int64_t n, stretches;
    ampc_divisor strips;
    int add;
    __device__ __forceinline__ int64_t id(int64_t i) const { return i >= 0 && i < n ? ids[order[i]] : -1; }
};

/* A warp's part, which is one stretch and one strip of 32 pieces. */
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

/* Writes an id's sum in this stretch to the table, or keeps it to be added to the sums of other stretches. */
template <int V>
__device__ __forceinline__ void ampc_gather_flush(const ampc_gather &g, const ampc_gather_part<V> &part, int64_t id,
                                                  bool before, bool after, float *sum) {
    float *to = (before ? g.head : g.tail) + part.stretch * g.dy.cols + part.at;
    if (id < 0 || part.at >= g.dy.cols) return;
    if (!before && !after) ampc_piece_sum<V>(ampc_row(g.dtable, id), g.dtable.dtype, part.at, g.dy.cols, sum, g.add);
    else {
        AMPC_UNROLL
        for (int i = 0; i < V; i++) to[i] = sum[i];
    }
}

/* Adds the rows of a stretch, with four reads in flight. */
template <int V>
__global__ void __launch_bounds__(128) ampc_gather_stretches(ampc_gather g, const ampc_labels *labels) {
    int64_t parts = g.stretches * g.strips.d, warps = (int64_t)gridDim.x * (blockDim.x / 32);
    if (labels->bad) return;
    for (int64_t p = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 32; p < parts; p += warps) {
        const ampc_gather_part<V> part(g, p);
        int64_t current = -1, first = g.id(part.begin - 1), next = g.id(part.end);
        float sum[V] = {};
        for (int64_t base = part.begin; base < part.end; base += 32) {
            int64_t i = base + threadIdx.x % 32, mine = i < part.end ? g.order[i] : 0,
                    id = i < part.end ? g.ids[mine] : -1;
            for (int k = 0; k < 32; k += 4) {
                uint4 raw[4];
                int64_t row_id[4];
                AMPC_UNROLL
                for (int u = 0; u < 4; u++) {
                    int64_t row = __shfl_sync(0xffffffffu, mine, k + u);
                    row_id[u] = __shfl_sync(0xffffffffu, id, k + u);
                    raw[u] =
                        ampc_piece_read<V>(ampc_row(g.dy, row), g.dy.dtype, part.at, row_id[u] < 0 ? 0 : g.dy.cols);
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

/* For an id that begins in a stretch and continues after it, adds its tail there and its heads in the next stretches,
   in fp64. */
template <int V> __global__ void __launch_bounds__(128) ampc_gather_join(ampc_gather g, const ampc_labels *labels) {
    int64_t parts = g.stretches * g.strips.d, warps = (int64_t)gridDim.x * (blockDim.x / 32);
    if (labels->bad) return;
    for (int64_t p = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 32; p < parts; p += warps) {
        const ampc_gather_part<V> part(g, p);
        int64_t id = g.id(part.end - 1), last = part.stretch;
        unsigned whole = 0xffffffffu;
        double total[V];
        float sum[V];
        if (id != g.id(part.end) || id == g.id(part.begin - 1)) continue;
        for (; whole == 0xffffffffu;
             last += __popc(whole)) /* stretch last + 1 + lane begins with the same id */
            whole = __ballot_sync(0xffffffffu, g.id((last + 1 + threadIdx.x % 32) * AMPC_STRETCH) == id);
        if (part.at >= g.dy.cols) continue;
        AMPC_UNROLL
        for (int i = 0; i < V; i++) total[i] = (double)g.tail[part.stretch * g.dy.cols + part.at + i];
        for (int64_t s = part.stretch + 1; s <= last; s++) {
            AMPC_UNROLL
            for (int i = 0; i < V; i++) total[i] += (double)g.head[s * g.dy.cols + part.at + i];
        }
        AMPC_UNROLL
        for (int i = 0; i < V; i++) sum[i] = (float)total[i];
        ampc_piece_sum<V>(ampc_row(g.dtable, id), g.dtable.dtype, part.at, g.dy.cols, sum, g.add);
    }
}

/* Sets dpositions[p] to the sum of the rows p, p + seq, p + 2 seq, ... of dy, or adds that sum to it. */
template <int V>
__global__ void __launch_bounds__(128)
    ampc_position_rows(amp_k_embedding a, int64_t positions, ampc_divisor pieces, const ampc_labels *labels) {
    int64_t total = positions * pieces.d, piece;
    if (labels && labels->bad) return;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += (int64_t)gridDim.x * blockDim.x) {
        int64_t p = ampc_divide(i, pieces, &piece), at = piece * V;
        float sum[V] = {};
        for (int64_t row = p; row < a.n; row += 4 * a.seq) {
            uint4 raw[4];
            AMPC_UNROLL
            for (int u = 0; u < 4; u++)
                raw[u] = ampc_piece_read<V>(ampc_row(a.dy, row + u * a.seq), a.dy.dtype, at,
                                            row + u * a.seq < a.n ? a.dy.cols : 0);
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
    return ampc_launch(d, "amp_embedding_backward",
                       v == 8   ? ampc_zero_rows<8>
                       : v == 4 ? ampc_zero_rows<4>
                                : ampc_zero_rows<1>,
                       ampc_grid(d, ampc_blocks((m.rows - first) * m.cols / v, 256), 8), 256, 0, stream, m, first,
                       m.cols / v, labels);
}

/* Sorts the numbers of a's rows by id.  *order is set to the buffer that holds the result. */
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

/* The scratch memory holds the labels, two orders, the sort's counts, the heads and the tails. */
amp_result ampc_embedding_table(ampc_device *d, const amp_k_embedding &a, ampc_scratch &scratch, ampc_labels **labels,
                                void *stream) {
    const char *name = "amp_embedding_backward";
    int v = ampc_width(ampc_width(8, a.dy), a.dtable);
    int64_t stretches = ampc_blocks(a.n, AMPC_STRETCH), counts = AMPC_DIGITS * ampc_blocks(a.n, AMPC_SORT_TILE);
    int64_t words = 32 + 2 * a.n + counts, strips = ampc_blocks(a.dy.cols / v, 32);
    AMPC_TRY(scratch.get((size_t)words * 8 + (size_t)(2 * stretches * a.dy.cols) * sizeof(float), name));
    int64_t *memory = (int64_t *)scratch.data, *buffers[2] = {memory + 32, memory + 32 + a.n};
    float *head = (float *)(void *)(memory + words);
    ampc_gather g = {a.dy, a.dtable, a.ids, NULL, head, head + stretches * a.dy.cols, a.n, stretches, strips,
                     a.add_table};
    *labels = (ampc_labels *)(void *)memory;
    AMPC_TRY(ampc_launch(d, name, ampc_labels_scan, 1, 1024, 0, stream, a.ids, a.n, a.dtable.rows, 0, 0, 1, 1.0, NULL,
                         *labels, a.bad_id));
    if (!a.add_table) AMPC_TRY(ampc_zero(d, a.dtable, 0, *labels, stream));
    AMPC_TRY(ampc_embedding_sort(d, a, *labels, memory + 32 + 2 * a.n, buffers, &g.order, stream));
    unsigned grid = ampc_grid(d, ampc_blocks(stretches * strips, 4), 8);
    AMPC_TRY(ampc_launch(d, name,
                         v == 8   ? ampc_gather_stretches<8>
                         : v == 4 ? ampc_gather_stretches<4>
                                  : ampc_gather_stretches<1>,
                         grid, 128, 0, stream, g, *labels));
    return ampc_launch(d, name,
                       v == 8   ? ampc_gather_join<8>
                       : v == 4 ? ampc_gather_join<4>
                                : ampc_gather_join<1>,
                       grid, 128, 0, stream, g, *labels);
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
    return ampc_launch(d, "amp_embedding_backward",
                       v == 8   ? ampc_position_rows<8>
                       : v == 4 ? ampc_position_rows<4>
                                : ampc_position_rows<1>,
                       ampc_grid(d, ampc_blocks(positions * a.dy.cols / v, 128), 8), 128, 0, stream, a, positions,
                       a.dy.cols / v, labels);
}

/* ==== 9 >>operators: products ====
   The first kernel multiplies on the fp32 units.  Products through cuBLASLt follow it, by plans that are made once per
   shape. */

/* ---- On the fp32 units, in any layout and dtype and with any epilogue.  Operands are rounded to the compute dtype
   when they enter shared memory.  A block computes 64 x 64 elements of c in tiles of 16 along k, and a thread 4 x 4 of
   them.  Every sum is one chain of fused multiply-adds along k. */

enum { AMPC_GEMM_TILE = 64, AMPC_GEMM_DEPTH = 16, AMPC_GEMM_PER_SM = 3 };

__device__ __forceinline__ float ampc_rounded(float x, amp_dtype compute) {
    switch (compute) {
        case AMP_F16: return ampc_f16_value(ampc_f16_bits(x));
        case AMP_BF16: return amp_f32_from_bf16(ampc_bf16_bits(x));
        case AMP_TF32: return amp_tf32_from_f32(x, 0);
        default: return x;
    }
}

/* One operand.  Element (i, j), with i along m or n and j along k, is at data[i * outer + j * inner]. */
struct ampc_operand {
    const void *data;
    amp_dtype dtype, compute;
    int64_t outer, inner, count;    /* count is how many values i has */
};

typedef float ampc_strip[AMPC_GEMM_TILE + 4];      /* a row of a tile in shared memory, padded against bank conflicts */

/* Reads the elements at from + n step for n = 0 to 3, where n di < i_left and n dj < j_left.  The other values are 0.
   The reads overlap in time. */
__device__ __forceinline__ void ampc_gemm_read(const ampc_operand &x, int64_t from, int64_t step, int i_left, int di,
                                               int j_left, int dj, float (&value)[4]) {
    const bool exact = x.compute == AMP_F32 || x.compute == x.dtype || (x.compute == AMP_TF32 && x.dtype != AMP_F32);
    uint4 raw[4];
    AMPC_UNROLL
    for (int n = 0; n < 4; n++)
        raw[n] = ampc_piece_read<1>(ampc_within(x.data, x.dtype, from + n * step), x.dtype, 0,
                                    n * di < i_left && n * dj < j_left ? 1 : 0);
    AMPC_UNROLL
    for (int n = 0; n < 4; n++) ampc_widen<1>(raw[n], x.dtype, value + n);
    if (exact) return;
    AMPC_UNROLL
    for (int n = 0; n < 4; n++) value[n] = ampc_rounded(value[n], x.compute);
}

/* Copies 64 x 16 elements from (i0, j0) on into tile[j][i], with zeros beyond the matrix.  Neighbouring threads read
   neighbouring elements.  Returns whether this thread found an infinity or NaN. */
__device__ __forceinline__ bool ampc_gemm_fetch(const ampc_operand &x, int64_t offset, int64_t i0, int64_t j0,
                                                int64_t k, ampc_strip *tile) {
    const bool rows = x.inner == 1;
    const int t = ampc_afresh((int)threadIdx.x);
    const int i = rows ? t / AMPC_GEMM_DEPTH : t % AMPC_GEMM_TILE, di = rows ? 16 : 0;
    const int j = rows ? t % AMPC_GEMM_DEPTH : t / AMPC_GEMM_TILE, dj = rows ? 0 : 4;
    const int64_t from = offset + (i0 + i) * x.outer + (j0 + j) * x.inner, step = rows ? 16 * x.outer : 4 * x.inner;
    const int i_left = (int)ampc_clamp(x.count - i0 - i, 0, AMPC_GEMM_TILE),
              j_left = (int)ampc_clamp(k - j0 - j, 0, AMPC_GEMM_TILE);
    float value[4];
    bool wild = false;
    ampc_gemm_read(x, from, step, i_left, di, j_left, dj, value);
    AMPC_UNROLL
    for (int n = 0; n < 4; n++) {
        tile[j + n * dj][i + n * di] = value[n];
        wild |= !ampc_finite(value[n]);
    }
    return wild;
}

/* sum[i][j] += a[d][4 y + i] b[d][4 x + j], for each d in order.  With WEIGHTS, a holds weights, and 0 times infinity
   is 0. */
template <bool WEIGHTS>
__device__ __forceinline__ void ampc_gemm_add(const ampc_strip *a, const ampc_strip *b, float (&sum)[4][4]) {
    unsigned x = threadIdx.x % 16, y = threadIdx.x / 16;
    for (int d = 0; d < AMPC_GEMM_DEPTH; d++) {
        AMPC_UNROLL
        for (int i = 0; i < 4; i++) {
            float factor = a[d][4 * y + i];
            AMPC_UNROLL
            for (int j = 0; j < 4; j++)
                if (!WEIGHTS || factor != 0.0f) sum[i][j] = ampc_fma(factor, b[d][4 * x + j], sum[i][j]);
        }
    }
}

/* sum[i][j] = row i0 + 4 y + i of a times row j0 + 4 x + j of b.  The tiles may be used again at once. */
__device__ __forceinline__ void ampc_gemm_sum(const ampc_operand &a, int64_t a_offset, int64_t i0,
                                              const ampc_operand &b, int64_t b_offset, int64_t j0, int64_t depth,
                                              ampc_strip *as, ampc_strip *bs, float (&sum)[4][4]) {
    AMPC_UNROLL
    for (int i = 0; i < 16; i++) sum[i / 4][i % 4] = 0.0f;
    for (int64_t k = 0; k < depth; k += AMPC_GEMM_DEPTH) {
        ampc_gemm_fetch(a, a_offset, i0, k, depth, as);
        ampc_gemm_fetch(b, b_offset, j0, k, depth, bs);
        __syncthreads();
        ampc_gemm_add<false>(as, bs, sum);
        __syncthreads();
    }
}

/* pre = alpha sum + bias; c = act(pre) + beta c. */
__device__ __forceinline__ void ampc_gemm_finish(const amp_k_gemm &g, int64_t item, int64_t row, int64_t col,
                                                 float sum) {
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
    AMPC_SHARED(ampc_strip, a_tile, AMPC_GEMM_DEPTH);
    AMPC_SHARED(ampc_strip, b_tile, AMPC_GEMM_DEPTH);
    unsigned x = threadIdx.x % 16, y = threadIdx.x / 16;
    for (int64_t tile = blockIdx.x; tile < rows * columns * g.batch; tile += gridDim.x) {
        int64_t item = tile / (rows * columns), i0 = tile / columns % rows * AMPC_GEMM_TILE,
                j0 = tile % columns * AMPC_GEMM_TILE;
        float sum[4][4];
        ampc_gemm_sum(a, item * g.stride_a, i0, b, item * g.stride_b, j0, g.k, a_tile, b_tile, sum);
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

amp_result ampc_gemm_units(ampc_device *dev, const amp_k_gemm &g, void *stream) {
    int64_t rows = ampc_blocks(g.m, AMPC_GEMM_TILE), columns = ampc_blocks(g.n, AMPC_GEMM_TILE);
    ampc_operand a = {g.a, g.a_dtype, g.compute, g.trans_a ? 1 : g.lda, g.trans_a ? g.lda : 1, g.m};
    ampc_operand b = {g.b, g.b_dtype, g.compute, g.trans_b ? g.ldb : 1, g.trans_b ? 1 : g.ldb, g.n};
    return ampc_launch(dev, "gemm", ampc_gemm_kernel, ampc_grid(dev, rows * columns * g.batch, AMPC_GEMM_PER_SM), 256,
                       0, stream, g, a, b, rows, columns);
}

/* ---- Around a product: operands in the compute dtype, epilogues that cuBLASLt lacks, and sums */

/* The dtype that stores operands of a compute dtype. */
amp_dtype ampc_operand_dtype(amp_dtype compute) { return compute == AMP_TF32 ? AMP_F32 : compute; }

/* Operand a or b as it is stored.  The references are to fields of its product. */
struct ampc_gemm_operand {
    const void *&data;
    amp_dtype &dtype;
    const amp_k_cut *&cut;
    int64_t &ld, &stride, items, rows, cols;
    ampc_gemm_operand(amp_k_gemm &g, bool b)
        : data(b ? g.b : g.a), dtype(b ? g.b_dtype : g.a_dtype), cut(g.cut[b]), ld(b ? g.ldb : g.lda),
          stride(b ? g.stride_b : g.stride_a), items(stride == 0 ? 1 : g.batch), rows(b ? g.trans_b ? g.n : g.k
                                                                                      : g.trans_a ? g.k
                                                                                                  : g.m),
          cols(b           ? g.trans_b ? g.k : g.n
               : g.trans_a ? g.m
                           : g.k) {}
    size_t bytes_in(amp_dtype to) const { return (size_t)(items * rows * cols * ampc_dtype_size(to)); }
    int64_t extent() const { return (items - 1) * stride + (rows - 1) * ld + cols; }
    bool is_dense() const { return extent() == items * rows * cols; }
    bool is(const ampc_gemm_operand &x) const {
        return data == x.data && dtype == x.dtype && ld == x.ld && stride == x.stride && items == x.items &&
               rows == x.rows && cols == x.cols;
    }
    /* Makes this the operand after its cast, which is at `copy`. */
    void become(const void *copy, amp_dtype to) {
        if (cut != NULL || !is_dense()) ld = cols, stride = items == 1 ? 0 : rows * cols;
        data = copy, dtype = to, cut = NULL;
    }
};

/* An operand that saturates.  It is [n[0], n[1], n[2], cols], with contiguous columns. */
struct ampc_cut {
    const void *x; void *to;
    amp_dtype from, dtype;
    ampc_divisor n[3], cols;
    int64_t stride[3];
    amp_k_cut how;
};

/* Copies the whole operand, saturated, to `to` without gaps. */
__global__ void __launch_bounds__(256) ampc_cut_kernel(ampc_cut c, int64_t total) {
    AMPC_SHARED(int, scratch, 32);
    int found = 0;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += (int64_t)gridDim.x * blockDim.x) {
        int64_t at, rest = ampc_divide(i, c.cols, &at);
        AMPC_UNROLL
        for (int d = 2; d >= 0; d--) {
            int64_t index;
            rest = ampc_divide(rest, c.n[d], &index);
            at += index * c.stride[d];
        }
        float x = ampc_stored(c.x, c.from, at);
        uint32_t bits = ampi_bits_f32(x), magnitude = bits & 0x7fffffffu;
        if (magnitude >= c.how.beyond && magnitude < 0x7f800000u) {
            found++;
            x = ampi_f32_of_bits((bits & 0x80000000u) | c.how.largest);
        }
        ampc_put_stored(c.to, c.dtype, i, x);
    }
    found = ampc_block_sum(found, scratch);
    if (threadIdx.x != 0 || found == 0) return;
    atomicAdd((unsigned long long *)c.how.count, (unsigned long long)found);
    *c.how.last = c.how.note;
}

amp_result ampc_cut_run(ampc_device *dev, const ampc_cut &c, const char *name, void *stream) {
    int64_t total = c.n[0].d * c.n[1].d * c.n[2].d * c.cols.d;
    return ampc_launch(dev, name, ampc_cut_kernel, ampc_grid(dev, ampc_blocks(total, 256), AMPC_CAST_PER_SM), 256, 0,
                       stream, c, total);
}

amp_result ampc_cast_flat(ampc_device *dev, void *dst, amp_dtype to, const void *src, amp_dtype from, int64_t n,
                          void *stream) {
    amp_k_cast cast = {};
    cast.dst = dst, cast.dst_dtype = to, cast.src = src, cast.src_dtype = from, cast.n = n;
    return ampc_cast(dev, &cast, stream);
}

/* Casts operand a or b.  The copy has the operand's layout if its elements fill their memory.  Otherwise, and if the
   operand saturates, the copy has row after row without gaps. */
amp_result ampc_gemm_cast(ampc_device *dev, amp_k_gemm &g, bool b, ampc_scratch &own, void *stream) {
    ampc_gemm_operand x(g, b);
    const amp_dtype to = ampc_operand_dtype(g.compute);
    bool shared = g.shares == 1 + b;
    if (!shared) AMPC_TRY(own.get(x.bytes_in(to), "gemm"));
    void *copy = shared ? g.scratch : own.data;
    if (x.cut != NULL) {
        ampc_cut c = {x.data, copy, x.dtype, to, {1, x.items, x.rows}, x.cols, {0, x.stride, x.ld}, *x.cut};
        AMPC_TRY(ampc_cut_run(dev, c, "gemm", stream));
    } else if (x.is_dense())
        AMPC_TRY(ampc_cast_flat(dev, copy, to, x.data, x.dtype, x.items * x.rows * x.cols, stream));
    for (int64_t i = 0; i < x.items && x.cut == NULL && !x.is_dense(); i++) {
        ampc_map<1, 1> m;
        m.in[0] = ampc_matrix(ampc_at(x.data, x.dtype, i * x.stride), x.dtype, x.rows, x.cols, x.ld);
        m.out[0] = ampc_matrix(ampc_at(copy, to, i * x.rows * x.cols), to, x.rows, x.cols, x.cols);
        AMPC_TRY(ampc_map_run(dev, "gemm", m, ampc_unchanged(), stream));
    }
    x.become(copy, to);
    return AMP_OK;
}

/* The inputs are the product, which is multiplied by *factor; the bias, or act's saved input; and the old c.  The
   outputs are c and act's input. */
template <int O> struct ampc_finish {
    enum { ahead = 2 };
    amp_activation_kind act;
    int backward;
    float beta;
    const float *factor;            /* NULL: 1 */
    template <int V> __device__ __forceinline__ void run(const float (*in)[V], float (*out)[V], int64_t at) const {
        const float by = factor == NULL ? 1.0f : *factor;
        float x[2][V], y[1][V];
        AMPC_UNROLL
        for (int i = 0; i < V; i++) {
            x[1][i] = ampc_mul(by, in[0][i]);
            x[0][i] = backward ? in[1][i] : x[1][i] + in[1][i];
        }
        if (backward) ampc_act_back{act, 0}.run<V>(x, y, at);
        else ampc_act{act}.run<V>(x, y, at);
        AMPC_UNROLL
        for (int i = 0; i < V; i++) {
            out[0][i] = ampi_is_set(beta) ? ampc_fma(beta, in[2][i], y[0][i]) : y[0][i];
            if (O == 2) out[1][i] = x[0][i];
        }
    }
};

template <int O>
amp_result ampc_gemm_map_as(ampc_device *dev, const amp_k_gemm &g, const amp_k_gemm &product, const float *factor,
                            void *stream) {
    for (int64_t i = 0; i < g.batch; i++) {
        const amp_mat c = {ampc_at(g.c, g.c_dtype, i * g.stride_c), g.c_dtype, 0, g.m, g.n, g.ldc};
        const amp_mat pre = {g.pre, g.pre_dtype, 0, g.m, g.n, g.ld_pre};
        ampc_map<3, O> m;
        m.in[0] = ampc_matrix(ampc_at(product.c, AMP_F32, i * product.stride_c), AMP_F32, g.m, g.n, product.ldc);
        m.in[1] = g.backward ? pre : ampc_matrix(g.bias, g.bias_dtype, g.m, g.n, 0);
        m.in[2] = ampi_is_set(g.beta) ? c : ampc_matrix(NULL, AMP_F32, g.m, g.n, g.n);
        m.out[0] = c;
        if (O == 2) m.out[O - 1] = pre;
        /* 4, because the product is fp32 */
        AMPC_TRY(ampc_map_run<4>(dev, "gemm", m, ampc_finish<O>{g.act, g.backward, g.beta, factor}, stream));
    }
    return AMP_OK;
}
amp_result ampc_gemm_map(ampc_device *dev, const amp_k_gemm &g, const amp_k_gemm &product, const float *factor,
                         void *stream) {
    return g.pre && !g.backward ? ampc_gemm_map_as<2>(dev, g, product, factor, stream)
                                : ampc_gemm_map_as<1>(dev, g, product, factor, stream);
}

/* A warp adds a row.  A lane adds AMPC_SUM_CHAIN numbers in fp32 at a time, and then these sums in fp64. */
__global__ void __launch_bounds__(256) ampc_row_sum_kernel(amp_mat x, amp_k_gradient out) {
    for (int64_t row = (int64_t)blockIdx.x * 8 + threadIdx.x / 32; row < x.rows; row += (int64_t)gridDim.x * 8) {
        double total = 0;
        ampc_by_dtype(x.dtype, [&](auto dtype) {
            for (int64_t i = threadIdx.x % 32; i < x.cols;) {
                int64_t end = i + 32 * AMPC_SUM_CHAIN < x.cols ? i + 32 * AMPC_SUM_CHAIN : x.cols;
                float sum = 0;
                for (; i < end; i += 32) sum += ampc_stored(x.data, dtype, row * x.ld + i);
                total += (double)sum;
            }
        });
        total = ampc_warp_sum(total);
        if (threadIdx.x % 32 == 0) ampc_put_sum(out, row, (float)total);
    }
}

/* Computes the sums that no epilogue computed. */
amp_result ampc_gemm_sums(ampc_device *dev, const amp_k_gemm &g, void *stream) {
    const amp_k_gradient &out = g.row_sum;
    void *a = const_cast<void *>(g.a);
    AMPC_TRY(ampc_sum_columns(dev, amp_mat{g.c, g.c_dtype, 0, g.m, g.n, g.ldc}, g.column_sum, stream));
    if (g.trans_a) return ampc_sum_columns(dev, amp_mat{a, g.a_dtype, 0, g.k, g.m, g.lda}, out, stream);
    if (out.data == NULL) return AMP_OK;
    AMPC_TRY(ampc_check_storage(dev, "gemm", g.a_dtype));
    AMPC_TRY(ampc_check_storage(dev, "gemm", out.dtype));
    return ampc_launch(dev, "gemm", ampc_row_sum_kernel, ampc_grid(dev, ampc_blocks(g.m, 8), 8), 256, 0, stream,
                       amp_mat{a, g.a_dtype, 0, g.m, g.k, g.lda}, out);
}

/* ---- Through cuBLASLt.  It is column-major, so it reads a row-major matrix as the transpose, and
   c^T = op(b)^T op(a)^T.  Its A is therefore b, and its B is a.  Its rows are our columns, and a vector along its rows
   is a bias. */

/* Everything that a product's plan depends on.  Keys are compared byte by byte, so there is no padding. */
struct ampc_product_key {
    int64_t m, n, k, batch, lda, ldb, ldc, ld_aux, stride_a, stride_b, stride_c;
    int32_t compute, c_dtype, trans_a, trans_b, epilogue;
    int32_t adds;                   /* 1: beta is not 0 */
    uint8_t align[8];               /* log2 of the alignment of a, b, c, bias, aux, 8 at most */
};
/* The key of a call's plan has the first way in place of the epilogue, and `around` says how operands and vectors are
   stored.  In the key of a product's plan, `around` is zeros. */
struct ampc_plan_key : ampc_product_key { uint8_t around[16]; };
static_assert(sizeof(ampc_plan_key) % 8 == 0, "whole words");

/* Ways to do a call, of which the first that cuBLASLt accepts is used. */
enum ampc_way {
    AMPC_FUSED,      /* the product with its whole epilogue, in cuBLASLt */
    AMPC_SUMS_APART, /* the same, but kernels compute sums over rows or columns */
    AMPC_INTO_PRE,   /* act's input with its bias in cuBLASLt, into pre, and a map from there to c */
    AMPC_UNFUSED,    /* the plain product in cuBLASLt, in fp32 (in c itself if possible), and a map for the rest */
    AMPC_UNITS       /* the kernel of the fp32 units */
};
/* The steps of a call, in order of execution.  With AMPC_ADD_SUM, the epilogue sums into scratch memory, and a kernel
   then takes the sums to the gradient. */
enum {
    AMPC_CAST_A = 1,
    AMPC_CAST_B = 2,
    AMPC_CAST_BIAS = 4,
    AMPC_MATMUL = 8,
    AMPC_SIMT = 16,
    AMPC_MAP = 32,
    AMPC_ADD_SUM = 64,
    AMPC_SUMS = 128
};

/* A call's plan has steps.  The plan of a product in cuBLASLt has the other fields.  Calls work on copies, which share
   the layouts. */
struct ampc_plan {
    ampc_plan_key key;
    ampc_plan *next;
    ampc_way way;
    int steps;
    ampc_plan *product;             /* of AMPC_MATMUL; in a product's plan, the plan itself */
    cublasLtMatrixLayout_t a, b, c; /* of our a, b and c; NULL: from a file and not used yet */
    cublasLtMatmulAlgo_t algo;
    size_t workspace;               /* bytes */
    int refused;                    /* 1: cuBLASLt has no algorithm for it */
    int tuned;                      /* 1: algo and apart were measured; -1: there was no memory to measure in */
    int apart;                      /* 1: the plain product and separate kernels are faster */
    int measuring;                  /* 1: a thread measures; others use the heuristic's choice meanwhile */
};

const char *ampc_blas_hint(cublasStatus_t status) {
    switch (status) {
        case CUBLAS_STATUS_NOT_INITIALIZED: return "the driver may be older than cuBLAS, or GPU memory is full";
        case CUBLAS_STATUS_ALLOC_FAILED: return "free memory on the GPU or use a smaller batch";
        case CUBLAS_STATUS_ARCH_MISMATCH: return "this GPU does not support the dtype: choose another";
        default: return "set CUBLASLT_LOG_LEVEL=2 for details";
    }
}

/* Returns AMP_OK, or a failure that names the call, its shape (g may be NULL), the status and what to do. */
amp_result ampc_blas_check(ampc_device *dev, cublasStatus_t status, const char *call, const amp_k_gemm *g) {
    char text[512], shape[160] = "";
    cudaError_t error;
    if (status == CUBLAS_STATUS_SUCCESS) return AMP_OK;
    error = cudaGetLastError();
    if (ampc_is_sticky(error)) return ampc_check(dev, error, call, NULL);
    if (g != NULL)
        snprintf(shape, sizeof shape, " for c[%lld, %lld] of k = %lld, batch %lld, %s%s times %s%s in %s into %s",
                 (long long)g->m, (long long)g->n, (long long)g->k, (long long)g->batch, amp_dtype_name(g->a_dtype),
                 g->trans_a ? "^T" : "", amp_dtype_name(g->b_dtype), g->trans_b ? "^T" : "", amp_dtype_name(g->compute),
                 amp_dtype_name(g->c_dtype));
    snprintf(text, sizeof text, "amp_cuda: %s%s on device %d: %s; %s", call, shape, dev->index,
             cublasLtGetStatusName(status), ampc_blas_hint(status));
    return dev->host.fail(dev->host.user, status == CUBLAS_STATUS_ALLOC_FAILED ? AMP_ERR_MEMORY : AMP_ERR_DEVICE, text);
}

amp_result ampc_blas_open(ampc_device *dev) {
    if (dev->blas.handle != NULL) return AMP_OK;
    AMPC_TRY(ampc_blas_check(dev, cublasLtCreate(&dev->blas.handle), "cublasLtCreate", NULL));
    dev->blas.owned = 1;
    return AMP_OK;
}

void ampc_plan_free(ampc_device *dev, ampc_plan *plan) {
    if (plan->a) (void)cublasLtMatrixLayoutDestroy(plan->a);
    if (plan->b) (void)cublasLtMatrixLayoutDestroy(plan->b);
    if (plan->c) (void)cublasLtMatrixLayoutDestroy(plan->c);
    dev->host.free(dev->host.user, plan, sizeof *plan);
}

void ampc_blas_close(ampc_device *dev) {
    for (ampc_plan *first : dev->blas.plans)
        for (ampc_plan *next; first != NULL; first = next) {
            next = first->next;
            ampc_plan_free(dev, first);
        }
    if (dev->blas.owned) (void)cublasLtDestroy(dev->blas.handle);
}

cudaDataType ampc_blas_type(amp_dtype dtype) {
    switch (dtype) {
        case AMP_F16: return CUDA_R_16F;
        case AMP_BF16: return CUDA_R_16BF;
        case AMP_E4M3: return CUDA_R_8F_E4M3;
        case AMP_E5M2: return CUDA_R_8F_E5M2;
        default: return CUDA_R_32F;
    }
}

/* The part of a key that is the compute dtype and, for FP8, every attribute of the operands that cuBLASLt gets. */
int32_t ampc_compute_key(const amp_k_gemm &g) {
    if (g.compute != AMP_FP8) return g.compute;
    int32_t key = g.compute | g.fp8[0]->scaling << 8;
    for (int i = 0; i < 2; i++) key |= (2 * (g.fp8[i]->dtype == AMP_E5M2) + (g.fp8[i]->square != 0)) << (16 + 2 * i);
    return key;
}

int ampc_align_class(const void *p, int64_t stride_bytes = 0) {
    return __builtin_ctzll((uint64_t)(uintptr_t)p | (uint64_t)stride_bytes | 256);
}

/* Whether an epilogue can sum into this gradient.  An epilogue overwrites, in c's dtype.  Sums that are to be added or
   rounded otherwise need fp32. */
bool ampc_epilogue_sums(const amp_k_gemm &g, const amp_k_gradient &sum) {
    return g.c_dtype == AMP_F32 || (sum.dtype == g.c_dtype && !sum.add);
}

/* The epilogue of cuBLASLt that does all of g, or -1.  The activations of epilogues also apply to beta c.  Of GELU they
   have only the tanh form, in an approximation that is good enough for 16 bits.  They save only the signs of RELU's
   input.  aux must be like c, 16-byte aligned, with rows a multiple of 8 apart (cublasLt.h,
   CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD). */
int ampc_gemm_epilogue(const amp_k_gemm &g) {
    amp_dtype in = ampc_operand_dtype(g.compute);
    bool column = g.column_sum.data != NULL, row = g.row_sum.data != NULL,
         plain = g.act == AMP_ACT_NONE && g.pre == NULL;
    bool aux = g.pre_dtype == g.c_dtype && g.ld_pre % 8 == 0 && ampc_aligned(g.pre);
    if (g.c_dtype != AMP_F32 && g.c_dtype != in) return -1;
    if (plain && g.bias == NULL && !column && !row) return CUBLASLT_EPILOGUE_DEFAULT;
    if (g.batch != 1) return -1;
    if (row)
        return plain && g.bias == NULL && !column && ampc_epilogue_sums(g, g.row_sum) ? CUBLASLT_EPILOGUE_BGRADB : -1;
    if (column && !(g.backward && ampc_epilogue_sums(g, g.column_sum))) return -1;
    if (plain) return CUBLASLT_EPILOGUE_BIAS;
    if (ampi_is_set(g.beta) || (g.pre != NULL && !aux)) return -1;
    if (g.act == AMP_ACT_RELU && g.pre == NULL) return g.bias ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_RELU;
    if (g.act != AMP_ACT_GELU || g.c_dtype == AMP_F32) return -1;
    if (g.backward) return column ? CUBLASLT_EPILOGUE_DGELU_BGRAD : CUBLASLT_EPILOGUE_DGELU;
    if (g.pre == NULL) return g.bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
    return g.bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
}

/* ampc_epilogue_sum is the gradient that an epilogue sums into.  ampc_epilogue_vector is the epilogue's vector, which
   is that gradient, scratch memory for it, or a bias.  NULL means that there is none. */
const amp_k_gradient *ampc_epilogue_sum(const amp_k_gemm &g) {
    return g.row_sum.data ? &g.row_sum : g.column_sum.data ? &g.column_sum : NULL;
}
const void *ampc_epilogue_vector(const amp_k_gemm &g) {
    const amp_k_gradient *sum = ampc_epilogue_sum(g);
    return g.bias == NULL && sum != NULL ? sum->data : g.bias;
}

ampc_plan_key ampc_plan_key_of(const amp_k_gemm &g, int epilogue) {
    ampc_plan_key key;
    int64_t size = ampc_dtype_size(ampc_operand_dtype(g.compute));
    memset((void *)&key, 0, sizeof key);
    key.m = g.m, key.n = g.n, key.k = g.k, key.batch = g.batch;
    key.lda = g.lda, key.ldb = g.ldb, key.ldc = g.ldc, key.ld_aux = g.pre ? g.ld_pre : 0;
    key.stride_a = g.stride_a, key.stride_b = g.stride_b, key.stride_c = g.stride_c;
    key.compute = ampc_compute_key(g), key.c_dtype = g.c_dtype, key.trans_a = g.trans_a, key.trans_b = g.trans_b;
    key.epilogue = epilogue, key.adds = ampi_is_set(g.beta);
    key.align[0] = (uint8_t)ampc_align_class(g.a, g.stride_a * size);
    key.align[1] = (uint8_t)ampc_align_class(g.b, g.stride_b * size);
    key.align[2] = (uint8_t)ampc_align_class(g.c, g.stride_c * ampc_dtype_size(g.c_dtype));
    key.align[3] = (uint8_t)ampc_align_class(ampc_epilogue_vector(g));
    key.align[4] = (uint8_t)ampc_align_class(g.pre);
    return key;
}

ampc_plan_key ampc_call_key_of(const amp_k_gemm &g, ampc_way first) {
    ampc_plan_key key = ampc_plan_key_of(g, first);
    auto sum = [](const amp_k_gradient &s) { return s.data == NULL ? 0 : 1 + 2 * (int)s.dtype + (s.add != 0); };
    const int around[] = {1 + g.a_dtype,
                          g.b_dtype,
                          g.bias_dtype,
                          g.pre_dtype,
                          g.act,
                          g.backward,
                          g.cut[0] != NULL,
                          g.cut[1] != NULL,
                          sum(g.column_sum),
                          ampc_align_class(g.column_sum.data),
                          sum(g.row_sum),
                          ampc_align_class(g.row_sum.data)};
    for (size_t i = 0; i < sizeof around / sizeof *around; i++) key.around[i] = (uint8_t)around[i];
    return key;
}

ampc_plan **ampc_plan_slot(ampc_device *dev, const ampc_plan_key &key) {
    uint64_t words[sizeof key / 8], hash = 0;
    memcpy(words, &key, sizeof key);
    for (uint64_t word : words) hash = (hash ^ word) * 0x9e3779b97f4a7c15u, hash ^= hash >> 29;
    return &dev->blas.plans[hash % AMPC_PLANS];
}

/* ---- An operand of a product in FP8, rounded to 8 bits.  Its numbers come first.  They are contiguous along k, and
   both sizes are filled up with zeros to what cuBLASLt needs.  Behind them is a head, and behind that are the scales of
   blocks, as cuBLASLt reads them. */

enum { AMPC_FP8_TILE = 128, AMPC_FP8_THREADS = 512, AMPC_FP8_MX = 32, AMPC_FP8_HEAD = 256 };

struct ampc_fp8_head {
    float inverse;                  /* undoes the scale of a tensor; 1 with scales of blocks */
    uint32_t amax, blocks;          /* amax: the largest magnitude, as bits; blocks: how many have added theirs */
};
__host__ __device__ inline bool ampc_fp8_in_blocks(const amp_k_fp8 &how) {
    return how.scaling == AMP_FP8_BLOCK || how.scaling == AMP_FP8_MX;
}

struct ampc_fp8_place {
    int64_t outer, k, blocks;       /* outer and k are filled up; blocks: scales along k */
    size_t head, scales, bytes;     /* offsets */
};

int64_t ampc_filled(int64_t n, int64_t to) { return ampc_blocks(n, to) * to; }

ampc_fp8_place ampc_fp8_place_of(int64_t outer, int64_t k, const amp_k_fp8 &how) {
    ampc_fp8_place p;
    const bool mx = how.scaling == AMP_FP8_MX;
    p.outer = ampc_filled(outer, 16), p.k = ampc_filled(k, mx ? AMPC_FP8_MX : 16);
    p.head = (size_t)ampc_filled(p.outer * p.k, AMPC_FP8_HEAD);
    p.scales = p.bytes = p.head + AMPC_FP8_HEAD;
    int64_t tiles = ampc_blocks(p.k, AMPC_FP8_TILE);
    p.blocks = how.square ? ampc_filled(tiles, 4) : tiles;
    if (mx) p.bytes += (size_t)(ampc_blocks(outer, AMPC_FP8_TILE) * tiles * 512);
    else if (how.square) p.bytes += (size_t)(ampc_blocks(outer, AMPC_FP8_TILE) * p.blocks * 4);
    else if (how.scaling == AMP_FP8_BLOCK) p.bytes += (size_t)(p.outer * p.blocks * 4);
    return p;
}

/* The scales by which cuBLASLt multiplies operand a or b of a product.  k is filled up, and with scales of blocks the
   other sizes are too. */
const void *ampc_fp8_scales(const amp_k_gemm &g, int b) {
    const ampc_fp8_place p = ampc_fp8_place_of(b ? g.n : g.m, g.k, *g.fp8[b]);
    return (const char *)(b ? g.b : g.a) + (ampc_fp8_in_blocks(*g.fp8[b]) ? p.scales : p.head);
}
#if CUBLAS_VERSION >= 120900
int32_t ampc_fp8_mode(const amp_k_fp8 &how) {
    if (how.scaling == AMP_FP8_MX) return CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0;
    if (how.scaling != AMP_FP8_BLOCK) return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
    return how.square ? CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F : CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
}
#endif

/* Each call makes a new description, because it holds addresses, and threads share plans. */
cublasStatus_t ampc_describe_product(cublasLtMatmulDesc_t product, const ampc_plan &plan, const amp_k_gemm &g) {
    cublasComputeType_t compute = g.compute == AMP_TF32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    cublasOperation_t of_b = g.trans_b ? CUBLAS_OP_T : CUBLAS_OP_N, of_a = g.trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    uint32_t epilogue = (uint32_t)plan.key.epilogue;
    int64_t ld = g.ld_pre;
    const void *vector = ampc_epilogue_vector(g);
    cublasStatus_t status = cublasLtMatmulDescInit(product, compute, CUDA_R_32F);
    auto set = [&](cublasLtMatmulDescAttributes_t attribute, const void *value, size_t size) {
        if (status == CUBLAS_STATUS_SUCCESS) status = cublasLtMatmulDescSetAttribute(product, attribute, value, size);
    };
    set(CUBLASLT_MATMUL_DESC_TRANSA, &of_b, sizeof of_b);
    set(CUBLASLT_MATMUL_DESC_TRANSB, &of_a, sizeof of_a);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue);
    if (vector != NULL) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, &vector, sizeof vector);
    if (g.pre != NULL) set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &ld, sizeof ld);
    if (g.pre != NULL) set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &g.pre, sizeof g.pre);
    for (int i = 0; i < 2 && g.compute == AMP_FP8; i++) {      /* cuBLASLt's A is our b */
        const void *scale = ampc_fp8_scales(g, 1 - i);
        set(i ? CUBLASLT_MATMUL_DESC_B_SCALE_POINTER : CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &scale, sizeof scale);
#if CUBLAS_VERSION >= 120900
        int32_t mode = ampc_fp8_mode(*g.fp8[1 - i]);
        set(i ? CUBLASLT_MATMUL_DESC_B_SCALE_MODE : CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &mode, sizeof mode);
#endif
    }
    return status;
}

/* A row-major matrix of rows x cols, as cuBLASLt sees it. */
cublasStatus_t ampc_plan_describe_matrix(cublasLtMatrixLayout_t *out, amp_dtype dtype, int64_t rows, int64_t cols,
                                         int64_t ld, int64_t batch, int64_t stride) {
    int32_t items = (int32_t)batch;
    cublasStatus_t status = cublasLtMatrixLayoutCreate(out, ampc_blas_type(dtype), (uint64_t)cols, (uint64_t)rows, ld);
    if (items == 1 || status != CUBLAS_STATUS_SUCCESS) return status;
    status = cublasLtMatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &items, sizeof items);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    return cublasLtMatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride);
}

/* The ways in which cuBLASLt may keep the partial sums of a product whose k it splits.  COMPUTE_TYPE keeps them in
   fp32.  OUTPUT_TYPE keeps them in c's dtype, which is the same if c is fp32, and otherwise rounds them.  INPLACE adds
   them to c itself, and does not promise the same bits in each run. */
uint32_t ampc_plan_reductions(const ampc_plan *plan) {
    const uint32_t in_fp32 = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    return plan->key.c_dtype == AMP_F32 ? in_fp32 | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE : in_fp32;
}

/* Asks cuBLASLt for algorithms. */
cublasStatus_t ampc_plan_ask(ampc_device *dev, const ampc_plan *plan, cublasLtMatmulDesc_t product, int most,
                             cublasLtMatmulHeuristicResult_t *found, int *n) {
    cublasLtMatmulPreference_t wish = NULL;
    uint64_t workspace = dev->has.workspace;
    uint32_t reductions = ampc_plan_reductions(plan), align[3];
    cublasStatus_t status = cublasLtMatmulPreferenceCreate(&wish);
    auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const void *value, size_t size) {
        if (status == CUBLAS_STATUS_SUCCESS)
            status = cublasLtMatmulPreferenceSetAttribute(wish, attribute, value, size);
    };
    for (int i = 0; i < 3; i++) align[i] = 1u << plan->key.align[i];
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace);
    set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions, sizeof reductions);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &align[1], sizeof align[1]);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &align[0], sizeof align[0]);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &align[2], sizeof align[2]);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &align[2], sizeof align[2]);
    *n = 0;
    if (status == CUBLAS_STATUS_SUCCESS)
        status = cublasLtMatmulAlgoGetHeuristic(dev->blas.handle, product, plan->b, plan->a, plan->c, plan->c, wish,
                                                most, found, n);
    if (wish != NULL) (void)cublasLtMatmulPreferenceDestroy(wish);
    return status;
}

/* Whether a status says that cuBLASLt cannot do this product, so that another way is needed. */
bool ampc_blas_declines(cublasStatus_t status) {
    return status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_ARCH_MISMATCH ||
           status == CUBLAS_STATUS_INVALID_VALUE;
}

amp_result ampc_plan_describe(ampc_device *dev, amp_k_gemm g, ampc_plan *plan) {
    const amp_dtype in = ampc_operand_dtype(g.compute);
    const bool fp8 = g.compute == AMP_FP8;
    ampc_gemm_operand a(g, 0), b(g, 1);
    cublasStatus_t status =
        ampc_plan_describe_matrix(&plan->a, fp8 ? g.a_dtype : in, a.rows, a.cols, a.ld, g.batch, a.stride);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = ampc_plan_describe_matrix(&plan->b, fp8 ? g.b_dtype : in, b.rows, b.cols, b.ld, g.batch, b.stride);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = ampc_plan_describe_matrix(&plan->c, g.c_dtype, g.m, g.n, g.ldc, g.batch, g.stride_c);
    return ampc_blas_check(dev, status, "describing a matrix to cublasLt", &g);
}

/* Takes the algorithm from a file if it can still run, and otherwise the heuristic's first one.  In the latter case
   nothing is measured, so that every run gives the same bits.  Sums over k are then taken apart, because many versions
   of cuBLASLt refuse them or have slow kernels for them. */
amp_result ampc_plan_choose(ampc_device *dev, const amp_k_gemm &g, ampc_plan *plan) {
    cublasLtMatmulHeuristicResult_t found;
    cublasLtMatmulDescOpaque_t product;
    cublasStatus_t status = ampc_describe_product(&product, *plan, g);
    int n = 0;
    AMPC_TRY(ampc_blas_check(dev, status, "describing a product to cublasLt", &g));
    memset(&found, 0, sizeof found);
    if (plan->tuned > 0) {
        status = cublasLtMatmulAlgoCheck(dev->blas.handle, &product, plan->b, plan->a, plan->c, plan->c, &plan->algo,
                                         &found);
        plan->workspace = found.workspaceSize;
        if (status == CUBLAS_STATUS_SUCCESS && plan->workspace <= dev->has.workspace) return AMP_OK;
        plan->tuned = 0;
    }
    plan->apart = plan->key.epilogue == CUBLASLT_EPILOGUE_BGRADB;
    status = ampc_plan_ask(dev, plan, &product, 1, &found, &n);
    plan->refused =
        ampc_blas_declines(status) || (status == CUBLAS_STATUS_SUCCESS && (n == 0 || found.state != status));
    if (plan->refused) {
        char text[200];
        snprintf(text, sizeof text,
                 "amp_cuda: cuBLASLt has no algorithm for c[%lld, %lld] of k = %lld in %s with epilogue %d",
                 (long long)g.m, (long long)g.n, (long long)g.k, amp_dtype_name(g.compute), (int)plan->key.epilogue);
        dev->host.log(dev->host.user, AMP_LOG_INFO, AMPC_LOG_REFUSED, text);
        return AMP_OK;
    }
    plan->algo = found.algo;
    plan->workspace = found.workspaceSize;
    return ampc_blas_check(dev, status, "cublasLtMatmulAlgoGetHeuristic", &g);
}

/* The plan with this key, or NULL.  The lock of the plans must be held. */
ampc_plan *ampc_plan_find(ampc_device *dev, const ampc_plan_key &key) {
    ampc_plan *plan = *ampc_plan_slot(dev, key);
    while (plan != NULL && memcmp(&plan->key, &key, sizeof key) != 0) plan = plan->next;
    return plan;
}

/* Copies the plan with this key and its product's plan.  Returns false if there is none. */
bool ampc_plan_look(ampc_device *dev, const ampc_plan_key &key, ampc_plan *out, ampc_plan *product) {
    ampc_locked locked(&dev->blas.lock);
    const ampc_plan *plan = ampc_plan_find(dev, key);
    if (plan == NULL) return false;
    *out = *plan;
    if (plan->product != NULL) *product = *plan->product;
    return true;
}

amp_result ampc_plan_new(ampc_device *dev, const ampc_plan_key &key, ampc_plan **out) {
    ampc_plan *plan = (ampc_plan *)dev->host.alloc(dev->host.user, sizeof *plan, sizeof(void *));
    if (plan == NULL) return ampc_refuse(dev, AMP_ERR_MEMORY, "gemm", "no host memory for its plan");
    memset((void *)plan, 0, sizeof *plan);
    plan->key = key;
    *out = plan;
    return AMP_OK;
}

/* Keeps a plan, in place of one that came from a file or has outdated steps.  Frees it if another thread was faster. */
void ampc_plan_keep(ampc_device *dev, ampc_plan *plan) {
    bool known;
    {
        ampc_locked locked(&dev->blas.lock);
        const ampc_plan *other = ampc_plan_find(dev, plan->key);
        ampc_plan **slot = ampc_plan_slot(dev, plan->key);
        known = other != NULL && plan->steps == 0 && (other->c != NULL || plan->c == NULL);
        plan->next = *slot;
        if (!known) *slot = plan;
    }
    if (known) ampc_plan_free(dev, plan);
}

/* Copies the current plan of a product with this epilogue, and makes it first if there is none. */
amp_result ampc_plan_get(ampc_device *dev, const amp_k_gemm &g, int epilogue, ampc_plan *out) {
    ampc_plan_key key = ampc_plan_key_of(g, epilogue);
    bool known = ampc_plan_look(dev, key, out, out);
    ampc_plan *plan;
    amp_result result;
    if (known && out->c != NULL) return AMP_OK;
    ampc_relaxed relaxed;
    AMPC_TRY(ampc_plan_new(dev, key, &plan));
    plan->product = plan;
    if (known) {                    /* from a file */
        plan->tuned = out->tuned;
        plan->algo = out->algo, plan->apart = out->apart;
    }
    result = ampc_plan_describe(dev, g, plan);
    if (result == AMP_OK) result = ampc_plan_choose(dev, g, plan);
    if (result != AMP_OK) {
        ampc_plan_free(dev, plan);
        return result;
    }
    ampc_plan_keep(dev, plan);
    (void)ampc_plan_look(dev, key, out, out);
    return AMP_OK;
}

/* Runs the product of a plan.  *done is set to false if cuBLASLt declines after all. */
amp_result ampc_plan_run(ampc_device *dev, const ampc_plan &plan, const amp_k_gemm &g, void *stream, bool *done) {
    ampc_scratch workspace(dev, stream);
    cublasLtMatmulDescOpaque_t product;
    cublasStatus_t status = ampc_describe_product(&product, plan, g);
    *done = false;
    AMPC_TRY(ampc_blas_check(dev, status, "describing a product to cublasLt", &g));
    if (plan.workspace > 0) AMPC_TRY(workspace.get(dev->has.workspace, "gemm"));
    status = cublasLtMatmul(dev->blas.handle, &product, &g.alpha, g.b, plan.b, g.a, plan.a, &g.beta, g.c, plan.c, g.c,
                            plan.c, &plan.algo, workspace.data, workspace.data ? dev->has.workspace : 0,
                            ampc_stream(dev, stream));
    if (ampc_blas_declines(status)) return AMP_OK;
    *done = status == CUBLAS_STATUS_SUCCESS;
    return ampc_blas_check(dev, status, "cublasLtMatmul", &g);
}

/* Publishes the findings in a plan. */
void ampc_plan_learn(ampc_device *dev, const ampc_plan &found) {
    ampc_locked locked(&dev->blas.lock);
    ampc_plan *plan = found.product;
    plan->algo = found.algo, plan->workspace = found.workspace, plan->refused = found.refused;
    plan->tuned = found.tuned, plan->apart = found.apart, plan->measuring = 0;
}
void ampc_plan_refuse(ampc_device *dev, ampc_plan *shared) {
    ampc_locked locked(&dev->blas.lock);
    shared->refused = 1;
}

/* Whether a plan's first use must measure something. */
bool ampc_plan_is_new(const ampc_device *dev, const ampc_plan *plan) {
    return dev->blas.autotune && !plan->refused && !plan->tuned;
}
/* True for the one thread that measures a plan. */
bool ampc_tune_claim(ampc_device *dev, ampc_plan *shared) {
    ampc_locked locked(&dev->blas.lock);
    bool mine = ampc_plan_is_new(dev, shared) && !shared->measuring;
    if (mine) shared->measuring = 1;
    return mine;
}

amp_result ampc_tune(ampc_device *dev, const amp_k_gemm &g, ampc_plan *plan, void *stream);

bool ampc_is_captured(const ampc_device *dev, void *stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    return cudaStreamGetCaptureInfo(ampc_stream(dev, stream), &status, &id) != cudaSuccess ||
           status != cudaStreamCaptureStatusNone;
}

/* ---- One call.  The planner lists its steps once for all calls that are alike. */

/* Whether cuBLASLt can do a product at all.  It counts in 32 bits.  If alpha is 0, neither a nor b may be read, as in
   BLAS. */
bool ampc_gemm_for_library(const amp_k_gemm &g) {
    int64_t most = g.m, least = g.m;
    for (int64_t size : {g.n, g.k, g.batch, g.lda, g.ldb, g.ldc, g.ld_pre}) most = size > most ? size : most;
    for (int64_t size : {g.n, g.k, g.batch}) least = size < least ? size : least;
    return most <= INT32_MAX && least > 0 && ampi_is_set(g.alpha);
}

/* Removes what a call does not use.  Unused strides become those of a packed matrix. */
void ampc_gemm_tidy(amp_k_gemm *g) {
    if ((g->trans_a ? g->k : g->m) == 1) g->lda = g->trans_a ? g->m : g->k;
    if ((g->trans_b ? g->n : g->k) == 1) g->ldb = g->trans_b ? g->k : g->n;
    if (g->m == 1) g->ldc = g->ld_pre = g->n;
    if (g->batch == 1) g->stride_a = g->stride_b = g->stride_c = 0;
    if (g->backward) g->bias = NULL;
    if (g->act == AMP_ACT_NONE && g->backward) g->backward = 0, g->pre = NULL;
    if (!ampi_is_set(g->alpha)) g->k = 0;
}

/* Stands for scratch memory in a plan, where only the alignment of that memory matters. */
void *ampc_scratch_place() { return (void *)(uintptr_t)AMPC_ALIGN; }

/* Whether cuBLASLt can leave act's input in pre.  Its biases have the result's dtype. */
bool ampc_pre_holds_product(const amp_k_gemm &g) {
    return g.pre != NULL && !g.backward && g.pre_dtype == AMP_F32 && g.batch == 1 &&
           (g.bias == NULL || (g.bias_dtype == AMP_F32 && ampc_aligned(g.bias)));
}

/* ampc_way_maps is whether a map computes c from a plain product.  ampc_way_product is the product of a way.  A plain
   product is in c itself if possible, and otherwise in scratch memory. */
bool ampc_way_maps(const amp_k_gemm &g, ampc_way way) {
    return way == AMPC_INTO_PRE || way == AMPC_UNFUSED || (way == AMPC_UNITS && g.backward);
}
amp_k_gemm ampc_way_product(const amp_k_gemm &g, ampc_way way) {
    amp_k_gemm p = g;
    if (way != AMPC_FUSED) p.column_sum.data = p.row_sum.data = NULL;
    if (!ampc_way_maps(g, way)) return p;
    if (way == AMPC_INTO_PRE) p.c = g.pre, p.ldc = g.ld_pre;
    else if (g.c_dtype != AMP_F32 || ampi_is_set(g.beta))
        p.c = ampc_scratch_place(), p.ldc = g.n, p.stride_c = g.m * g.n;
    if (way != AMPC_INTO_PRE) p.bias = NULL;
    p.pre = NULL, p.act = AMP_ACT_NONE, p.backward = 0, p.beta = 0, p.c_dtype = AMP_F32;
    return p;
}

/* What the map of a way does with its product. */
amp_k_gemm ampc_way_rest(const amp_k_gemm &g, ampc_way way) {
    amp_k_gemm rest = g;
    if (way == AMPC_INTO_PRE) rest.bias = NULL, rest.pre = NULL;
    return rest;
}

/* The steps of a way, or 0 if there is no such way to do the call.  *product is set to the product after the operands'
   casts.  Vectors must be in c's dtype and 16-byte aligned.  Other vectors, and sums that are to be added, go through
   scratch memory. */
int ampc_way_steps(const amp_k_gemm &args, ampc_way way, amp_k_gemm *product) {
    const amp_dtype in = ampc_operand_dtype(args.compute);
    const amp_k_gradient *sum = ampc_epilogue_sum(args);
    bool library = ampc_gemm_for_library(args), fused = way == AMPC_FUSED;
    int steps = way == AMPC_UNITS ? AMPC_SIMT : AMPC_MATMUL;
    amp_k_gemm g = args;
    for (int i = 0; i < 2; i++) {
        ampc_gemm_operand x(g, i);
        if (x.cut != NULL || (library && x.dtype != in)) steps |= AMPC_CAST_A << i, x.become(ampc_scratch_place(), in);
    }
    *product = ampc_way_product(g, way);
    if (way != AMPC_UNITS) {
        if (!library || ampc_gemm_epilogue(*product) < 0 || (way == AMPC_SUMS_APART && sum == NULL)) return 0;
        if (way == AMPC_INTO_PRE && !ampc_pre_holds_product(g)) return 0;
        if (way == AMPC_UNFUSED &&
            ampc_gemm_epilogue(ampc_way_product(g, AMPC_SUMS_APART)) == CUBLASLT_EPILOGUE_DEFAULT)
            return 0;
        if (product->bias != NULL && (g.bias_dtype != product->c_dtype || !ampc_aligned(g.bias)))
            steps |= AMPC_CAST_BIAS;
    }
    if (sum != NULL && fused && (sum->add || sum->dtype != g.c_dtype || !ampc_aligned(sum->data)))
        steps |= AMPC_ADD_SUM;
    return steps | (ampc_way_maps(g, way) ? AMPC_MAP : 0) | (sum != NULL && !fused ? AMPC_SUMS : 0);
}

/* The product as the plan sees it.  A vector that goes through scratch memory has that memory's alignment. */
amp_k_gemm ampc_way_told(const amp_k_gemm &product, int steps) {
    amp_k_gemm told = product;
    if (steps & (AMPC_CAST_BIAS | AMPC_ADD_SUM)) told.bias = ampc_scratch_place();
    return told;
}

/* Whether the bias has a copy in c's dtype, aligned as the plan assumes. */
bool ampc_bias_copied(const amp_k_gemm &g) {
    return g.bias != NULL && g.bias_copy != NULL && (uintptr_t)g.bias_copy % AMPC_ALIGN == 0;
}

/* Takes the steps after the operands' casts.  `plan` is the product's plan.  *done is set to false if cuBLASLt declines
   after all, and nothing is written then. */
amp_result ampc_gemm_run(ampc_device *dev, const amp_k_gemm &g, ampc_way way, int steps, const ampc_plan &plan,
                         void *stream, bool *done) {
    ampc_scratch vector(dev, stream), wide(dev, stream);
    const amp_k_gradient *sum = ampc_epilogue_sum(g);
    int64_t count = g.row_sum.data && !(steps & AMPC_CAST_BIAS) ? g.m : g.n;
    bool copied = (steps & AMPC_CAST_BIAS) && ampc_bias_copied(g);
    if (!copied && steps & (AMPC_CAST_BIAS | AMPC_ADD_SUM))
        AMPC_TRY(vector.get((size_t)(count * ampc_dtype_size(g.c_dtype)), "gemm"));
    if (!copied && steps & AMPC_CAST_BIAS)
        AMPC_TRY(ampc_cast_flat(dev, vector.data, g.c_dtype, g.bias, g.bias_dtype, g.n, stream));
    amp_k_gemm product = ampc_way_product(g, way);
    if (copied) product.bias = g.bias_copy;
    if (vector.data != NULL) product.bias = vector.data;
    if (product.c == ampc_scratch_place()) {
        AMPC_TRY(wide.get((size_t)(g.batch * g.m * g.n) * sizeof(float), "gemm"));
        product.c = wide.data;
    }
    *done = true;
    if (steps & AMPC_MATMUL) AMPC_TRY(ampc_plan_run(dev, plan, product, stream, done));
    if (!*done) return AMP_OK;
    if (steps & AMPC_SIMT) AMPC_TRY(ampc_gemm_units(dev, product, stream));
    if (steps & AMPC_MAP) AMPC_TRY(ampc_gemm_map(dev, ampc_way_rest(g, way), product, NULL, stream));
    if (steps & AMPC_ADD_SUM) {
        amp_k_add add =
            {vector.data, sum->add ? sum->data : NULL, sum->data, g.c_dtype, sum->dtype, sum->dtype, count, 1, 1};
        AMPC_TRY(ampc_add(dev, &add, stream));
    }
    return steps & AMPC_SUMS ? ampc_gemm_sums(dev, g, stream) : AMP_OK;
}

/* The planner finds the first way from `first` on that works.  Until everything is measured, the next call plans
   again. */
amp_result ampc_gemm_plan(ampc_device *dev, const amp_k_gemm &g, ampc_way first, void *stream, ampc_plan *call,
                          ampc_plan *plan) {
    ampc_plan_key key = ampc_call_key_of(g, first);
    ampc_plan *kept;
    amp_k_gemm product;
    bool settled = true;
    if (ampc_plan_look(dev, key, call, plan) && (call->product == NULL || !(plan->refused || plan->apart)))
        return AMP_OK;
    for (int way = first;; way++) {
        call->way = (ampc_way)way, call->product = NULL;
        call->steps = ampc_way_steps(g, call->way, &product);
        if (call->steps & AMPC_SIMT) break;
        if (call->steps == 0) continue;
        AMPC_TRY(ampc_plan_get(dev, ampc_way_told(product, call->steps), ampc_gemm_epilogue(product), plan));
        if (ampc_plan_is_new(dev, plan) && !ampc_is_captured(dev, stream) && ampc_tune_claim(dev, plan->product))
            AMPC_TRY(ampc_tune(dev, product, plan, stream));
        settled = settled && !ampc_plan_is_new(dev, plan);
        call->product = plan->product;
        if (!plan->refused && !plan->apart) break;
    }
    if (!settled) return AMP_OK;
    AMPC_TRY(ampc_plan_new(dev, key, &kept));
    kept->way = call->way, kept->steps = call->steps, kept->product = call->product;
    ampc_plan_keep(dev, kept);
    return AMP_OK;
}

/* Does the call by one of the ways from `first` on. */
amp_result ampc_gemm_from(ampc_device *dev, amp_k_gemm g, ampc_way first, void *stream) {
    ampc_scratch a(dev, stream), b(dev, stream);
    for (bool done = false; !done;) {
        ampc_plan call, plan;
        AMPC_TRY(ampc_gemm_plan(dev, g, first, stream, &call, &plan));
        if (call.steps & AMPC_CAST_A) AMPC_TRY(ampc_gemm_cast(dev, g, false, a, stream));
        if (call.steps & AMPC_CAST_B) AMPC_TRY(ampc_gemm_cast(dev, g, true, b, stream));
        AMPC_TRY(ampc_gemm_run(dev, g, call.way, call.steps, plan, stream, &done));
        if (!done) ampc_plan_refuse(dev, plan.product);
    }
    return AMP_OK;
}

/* ---- Products in TF32 on Hopper, whose wgmma reads operands of TF32 only if they are contiguous along k.  An operand
   that is not is copied, transposed, into scratch memory, where the copy takes less time than it saves. */

enum { AMPC_TURN_A = 1, AMPC_TURN_B = 2, AMPC_TURN_TILE = 64 };
enum { AMPC_TURN_PART = 16 };       /* the copies take at most a sixteenth of the GPU's memory */

/* Which operands to copy.  An H100 with 132 multiprocessors computed 368 TFLOP/s where both operands are contiguous
   along k, 275 where only a is, and 140 where neither is.  No product was measured in which only b is, and it is taken
   to be as slow as the last.  A copy reads and writes 4 bytes of each number, is assumed to move 2.4 TB/s, of the 3.0
   that plain copies reached, and takes 3 us to launch.  Copies must save a twentieth of the time. */
int ampc_turned_operands(const ampc_device *dev, const amp_k_gemm &g) {
    const int64_t most = dev->info.memory / AMPC_TURN_PART / 4;
    const double operations = 2.0 * (double)g.m * (double)g.n * (double)g.k, scale = dev->has.multiprocessors / 132.0;
    const bool along[] = {g.trans_a == 0, g.trans_b != 0};
    const int64_t numbers[] = {g.m * g.k, g.n * g.k};
    double least = 0;
    int best = 0;
    if (g.compute != AMP_TF32 || dev->has.cc != 90 || g.batch != 1 || !ampc_gemm_for_library(g)) return 0;
    for (int which = 0; which <= (AMPC_TURN_A | AMPC_TURN_B); which++) {
        double seconds = 0;
        int64_t copied = 0;
        bool possible = true;
        for (int i = 0; i < 2; i++) {
            if (!(which >> i & 1)) continue;
            possible = possible && !along[i] && (i ? g.b_dtype : g.a_dtype) == AMP_F32 && g.cut[i] == NULL;
            copied += numbers[i];
            seconds += 3e-6 + 8.0 * (double)numbers[i] / 2.4e12;
        }
        const bool a = along[0] || (which & AMPC_TURN_A), b = along[1] || (which & AMPC_TURN_B);
        const double product = operations / (scale * (!a ? 140e12 : !b ? 275e12 : 368e12));
        seconds = which ? seconds + product : 0.95 * product;
        if (!possible || copied > most || (which && seconds >= least)) continue;
        least = seconds, best = which;
    }
    return best;
}

/* Copies a matrix of words transposed: y[c ld + r] = x[r][c].  Rows of y are filled up to ld with zeros, and ld is a
   multiple of 4.  A block copies tiles of 64 x 64 through shared memory, and a thread 4 x 4 words of each, where `wide`
   says that 16 bytes can be read at a time. */
__global__ void __launch_bounds__(256) ampc_turn_kernel(amp_mat x, int wide, uint32_t *y, int64_t ld, int64_t tiles) {
    AMPC_SHARED(uint32_t, tile, AMPC_TURN_TILE * (AMPC_TURN_TILE + 1));
    const int line = (int)threadIdx.x / 16, four = 4 * ((int)threadIdx.x % 16);
    const int64_t across = ampc_blocks(x.cols, AMPC_TURN_TILE);
    for (int64_t at = blockIdx.x; at < tiles; at += gridDim.x) {
        const int64_t row = at / across * AMPC_TURN_TILE, col = at % across * AMPC_TURN_TILE;
        uint4 words[4];
        AMPC_UNROLL
        for (int i = 0; i < 4; i++) {
            const int64_t r = row + 16 * i + line, left = r < x.rows ? x.cols - col - four : 0;
            const uint32_t *from = (const uint32_t *)x.data + r * x.ld + col + four;
            words[i] = make_uint4(0, 0, 0, 0);
            if (wide && left >= 4) words[i] = *(const uint4 *)from;
            else {
                if (left > 0) words[i].x = from[0];
                if (left > 1) words[i].y = from[1];
                if (left > 2) words[i].z = from[2];
                if (left > 3) words[i].w = from[3];
            }
        }
        AMPC_UNROLL
        for (int i = 0; i < 4; i++) {
            uint32_t *to = tile + (16 * i + line) * (AMPC_TURN_TILE + 1) + four;
            to[0] = words[i].x, to[1] = words[i].y, to[2] = words[i].z, to[3] = words[i].w;
        }
        __syncthreads();
        AMPC_UNROLL
        for (int i = 0; i < 4; i++) {
            const int c = 16 * i + line, step = AMPC_TURN_TILE + 1;
            const uint32_t *from = tile + four * step + c;
            const uint4 word = {from[0], from[step], from[2 * step], from[3 * step]};
            if (col + c < x.cols && row + four < ld) ((uint4 *)y)[((col + c) * ld + row + four) >> 2] = word;
        }
        __syncthreads();
    }
}

amp_result ampc_turn(ampc_device *dev, const amp_mat &x, void *y, int64_t ld, void *stream) {
    const int64_t tiles = ampc_blocks(x.rows, AMPC_TURN_TILE) * ampc_blocks(x.cols, AMPC_TURN_TILE);
    return ampc_launch(dev, "gemm", ampc_turn_kernel, ampc_full_grid(tiles), 256, 0, stream, x,
                       ampc_aligned(x.data) && x.ld % 4 == 0, (uint32_t *)y, ld, tiles);
}

/* A product is computed without copies if there is no memory for them, which changes its last bits. */
void ampc_turn_log(ampc_device *dev, size_t bytes) {
    char text[200];
    if (__atomic_exchange_n(&dev->blas.unturned, 1, __ATOMIC_RELAXED)) return;
    snprintf(text, sizeof text,
             "amp_cuda: no memory for %zu bytes of transposed operands: products in tf32 are slower without them, and "
             "have other last bits", bytes);
    dev->host.log(dev->host.user, AMP_LOG_WARNING, AMPC_LOG_TURNED, text);
}

/* Does the call with copies of `which` operands.  Sums over rows read the operand as it was, so that they have the same
   bits with and without copies. */
amp_result ampc_gemm_turned(ampc_device *dev, const amp_k_gemm &g, int which, void *stream) {
    ampc_scratch copy(dev, stream);
    const int64_t ld = ampc_filled(g.k, 4), rows = (which & AMPC_TURN_A ? g.m : 0) + (which & AMPC_TURN_B ? g.n : 0);
    const size_t bytes = (size_t)(rows * ld) * sizeof(float);
    amp_k_gemm p = g, sums = g;
    amp_result result = copy.get(bytes, "gemm");
    if (result == AMP_ERR_MEMORY) {
        ampc_turn_log(dev, bytes);
        return ampc_gemm_from(dev, g, AMPC_FUSED, stream);
    }
    AMPC_TRY(result);
    float *to = (float *)copy.data;
    for (int i = 0; i < 2; i++) {
        ampc_gemm_operand x(p, i != 0);
        if (!(which >> i & 1)) continue;
        AMPC_TRY(ampc_turn(dev, ampc_matrix(x.data, AMP_F32, x.rows, x.cols, x.ld), to, ld, stream));
        x.data = to, x.ld = ld, to += x.cols * ld;
        (i ? p.trans_b : p.trans_a) ^= 1;
    }
    sums.column_sum.data = NULL;
    if (which & AMPC_TURN_A) p.row_sum.data = NULL;
    AMPC_TRY(ampc_gemm_from(dev, p, AMPC_FUSED, stream));
    return which & AMPC_TURN_A ? ampc_gemm_sums(dev, sums, stream) : AMP_OK;
}

/* ---- Products in FP8.  Operands are rounded to 8 bits, and cuBLASLt multiplies them.  Where it cannot, they are
   multiplied in bf16, which holds each of their numbers exactly.  Fast accumulation (CUBLASLT_MATMUL_DESC_FAST_ACCUM)
   stays off, in the forward pass too, where PyTorch and TransformerEngine turn it on.  With it, Hopper keeps sums of
   about 14 bits.  Without it, Hopper adds these sums to sums in fp32. */

/* Rounds a matrix.  Entry (row >> row_shift) pitch + (col >> col_shift) of a tile's table scales (row, col). */
struct ampc_fp8_job {
    amp_mat x;
    amp_k_fp8 how;
    uint8_t *out[2];                /* along x's rows; along its columns; NULL: not wanted */
    int64_t outer[2], k[2];         /* their sizes, filled up */
    ampc_fp8_head *head[2];
    unsigned char *scales;          /* of blocks; `blocks` of them along k, rows of MX's tiles `stride` bytes apart */
    int64_t blocks, stride;
    int row_shift, col_shift, pitch;
};
/* AMPC_FP8_MEASURE only adds to amax in the heads. */
enum ampc_fp8_kind { AMPC_FP8_MEASURE, AMPC_FP8_TENSOR, AMPC_FP8_BLOCKS };

/* Reads 8 neighbours of a row, which are 0 beyond the matrix. */
template <int W>
__device__ __forceinline__ void ampc_fp8_read(const amp_mat &x, int64_t row, int64_t col, float (&v)[8]) {
    AMPC_UNROLL
    for (int p = 0; p < 8; p += W)
        ampc_widen<W>(ampc_piece_read<W>(ampc_row(x, row), x.dtype, col + p, row < x.rows ? x.cols : 0), x.dtype,
                      v + p);
}

__device__ __forceinline__ uint32_t ampc_magnitude(float x) { return ampi_bits_f32(x) & 0x7fffffffu; }

/* Rounds one number of any kind.  Finite numbers saturate.  NaN stays NaN, and infinities keep their sign.  E4M3 has no
   infinity, so they become NaN there.  A scale may be NaN. */
__device__ __forceinline__ uint32_t ampc_fp8_one(float x, uint32_t scaled, bool e5m2) {
    const bool finite = ampc_finite(x);
    const uint32_t bits = !finite ? ampi_bits_f32(x) : (scaled & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : scaled;
    return e5m2 ? ampc_to_8bit<2, 15, 0x7b>(bits, finite) : ampc_to_8bit<3, 7, 0x7e>(bits, finite);
}

struct ampc_fp8_counts { int saturated, underflowed, nonfinite; };

/* Multiplies four numbers by their scales and rounds the results.  Counts those that saturate, underflow or are not
   finite. */
__device__ __forceinline__ uint32_t ampc_fp8_four(const float *x, const float *scale, bool e5m2, ampc_fp8_counts &n) {
    const uint32_t beyond = e5m2 ? 0x47700000u : 0x43e80001u;       /* rounds to more than the largest number */
    uint32_t scaled[4], four = 0;
    bool special = false;
    AMPC_UNROLL
    for (int i = 0; i < 4; i++) {
        scaled[i] = ampi_bits_f32(ampc_mul(x[i], scale[i]));
        special |= !ampc_finite(x[i]) || (scaled[i] & 0x7fffffffu) > 0x7f800000u;
    }
    if (ampc_fp8_units() && !special)
        four = ampc_fp8_pair(scaled[0], scaled[1], e5m2) | ampc_fp8_pair(scaled[2], scaled[3], e5m2) << 16;
    else {
        AMPC_UNROLL
        for (int i = 0; i < 4; i++) four |= ampc_fp8_one(x[i], scaled[i], e5m2) << 8 * i;
    }
    AMPC_UNROLL
    for (int i = 0; i < 4; i++) {
        const uint32_t magnitude = scaled[i] & 0x7fffffffu;
        const bool bad = !ampc_finite(x[i]) || magnitude > 0x7f800000u;
        n.nonfinite += bad;
        n.saturated += !bad && magnitude >= beyond;
        n.underflowed += !bad && x[i] != 0.0f && (four >> 8 * i & 0x7fu) == 0;
    }
    return four;
}

/* Computes a block's scale from its amax, as bits.  Stores the factor that undoes the scale where cuBLASLt reads it.
   `outer` and `block` are positions in the operand. */
__device__ __forceinline__ uint32_t ampc_fp8_scale_block(const ampc_fp8_job &j, int64_t all, uint32_t amax,
                                                         int64_t outer, int64_t block) {
    if (j.how.scaling == AMP_FP8_MX) {
        const int e = ampi_fp8_mx_scale(amax, j.how.dtype);
        const int64_t tile = outer / 128 * j.stride + block / 4 * 512;
        j.scales[tile + outer % 32 * 16 + outer % 128 / 32 * 4 + block % 4] = (unsigned char)e;
        return e == 255 ? 0x7fc00000u : ampi_bits_f32(ampi_power_of_2(127 - e));
    }
    const uint32_t scale = ampi_bits_f32(ampi_fp8_block_scale(amax, j.how.dtype));
    const int64_t at = j.how.square ? outer / 128 * j.blocks + block : block * all + outer;
    if (outer < all && block < j.blocks) ((float *)j.scales)[at] = ampi_power_of_2(127 - (int)(scale >> 23));
    return scale;
}

/* Finds the largest magnitudes of a tile's blocks in `most`, and then replaces them by the blocks' scales, as bits. */
__device__ __forceinline__ void ampc_fp8_blocks(const ampc_fp8_job &j, const float (&v)[4][8], int64_t row0,
                                                int64_t col0, uint32_t *most) {
    const unsigned t = threadIdx.x, row = t / 16 * 4, col = t % 16 * 8, pitch = (unsigned)j.pitch;
    const int count = (128 >> j.row_shift) * j.pitch;
    const bool columns = j.out[0] == NULL;      /* k lies along the columns */
    uint32_t whole = 0;
    if ((int)t < count) most[t] = 0;
    __syncthreads();
    if (j.col_shift == 0) {         /* each column has a separate scale; the warp's other half has the next rows */
        AMPC_UNROLL
        for (int c = 0; c < 8; c++) {
            uint32_t m = 0;
            AMPC_UNROLL
            for (int i = 0; i < 4; i++) m = ampc_larger(m, ampc_magnitude(v[i][c]));
            m = ampc_larger(m, __shfl_xor_sync(0xffffffffu, m, 16));
            if (t % 32 < 16) atomicMax(&most[(row >> j.row_shift) * pitch + col + (unsigned)c], m);
        }
    } else {
        AMPC_UNROLL
        for (int i = 0; i < 4; i++) {
            uint32_t m = 0;
            AMPC_UNROLL
            for (int c = 0; c < 8; c++) m = ampc_larger(m, ampc_magnitude(v[i][c]));
            whole = ampc_larger(whole, m);
            if (j.row_shift != 0) continue;
            for (int step = 1; step < 1 << j.col_shift >> 3; step *= 2)
                m = ampc_larger(m, __shfl_xor_sync(0xffffffffu, m, step));
            if ((col & ((1u << j.col_shift) - 1)) == 0) most[(row + (unsigned)i) * pitch + (col >> j.col_shift)] = m;
        }
    }
    whole = ampc_warp_max(whole);
    if (j.how.square && t % 32 == 0) atomicMax(&most[0], whole);
    __syncthreads();
    if ((int)t < count) {
        const int64_t r = row0 + (int64_t)(t / pitch << j.row_shift), c = col0 + (int64_t)(t % pitch << j.col_shift);
        const int64_t outer = columns ? c : r, k = columns ? r : c, all = columns ? j.outer[1] : j.outer[0];
        most[t] = ampc_fp8_scale_block(j, all, most[t], outer, j.how.scaling == AMP_FP8_MX ? k / 32 : k / 128);
    }
    __syncthreads();
}

/* Transposes a tile's bytes in shared memory, and writes them along its columns. */
__device__ __forceinline__ void ampc_fp8_leave(const ampc_fp8_job &j, const uint32_t (&q)[4][2], int64_t row0,
                                               int64_t col0, uint32_t *turned) {
    const unsigned t = threadIdx.x;
    AMPC_UNROLL
    for (int c = 0; c < 8; c++) {
        uint32_t word = 0;
        AMPC_UNROLL
        for (int i = 0; i < 4; i++) word |= (q[i][c / 4] >> 8 * (c % 4) & 0xffu) << 8 * i;
        turned[(t % 16 * 8 + (unsigned)c) * 33 + t / 16] = word;
    }
    __syncthreads();
    for (unsigned n = t; n < AMPC_FP8_TILE * 8; n += AMPC_FP8_THREADS) {
        const uint32_t *from = turned + n / 8 * 33 + n % 8 * 4;
        const int64_t outer = col0 + n / 8, at = row0 + n % 8 * 16;
        if (outer < j.outer[1] && at < j.k[1])
            ampc_put_bytes<16>(j.out[1] + outer * j.k[1] + at, uint4{from[0], from[1], from[2], from[3]});
    }
}

/* The scale of a tensor, by its history, or by its current amax if it has none. */
__device__ __forceinline__ float ampc_fp8_tensor_scale(const ampc_fp8_job &j) {
    const bool delayed = j.how.scaling == AMP_FP8_DELAYED;
    if (delayed && j.how.slot->scale > 0.0f) return j.how.slot->scale;
    const ampc_fp8_head *head = j.head[0] ? j.head[0] : j.head[1];
    return ampi_fp8_margin_scale(head->amax, j.how.dtype, delayed ? j.how.margin : 0);
}

/* Adds a block's largest magnitude to the tensor's.  The last block adds the tensor's largest magnitude to the history,
   if it is finite. */
__device__ __forceinline__ void ampc_fp8_remember(const ampc_fp8_job &j, uint32_t amax) {
    ampc_fp8_head *head = j.head[0] ? j.head[0] : j.head[1];
    atomicMax(&head->amax, amax);
    __threadfence();
    if (atomicAdd(&head->blocks, 1u) != gridDim.x - 1) return;
    amax = atomicMax(&head->amax, 0u);
    if (amax < 0x7f800000u) atomicMax(j.how.amax, amax);
}

/* Casts, transposes and takes amax in one pass.  A block has a tile of 128 x 128, and a thread 4 x 8 of it. */
template <int W, ampc_fp8_kind KIND>
__global__ void __launch_bounds__(AMPC_FP8_THREADS, KIND == AMPC_FP8_MEASURE ? 2 : 1)
ampc_fp8_kernel(ampc_fp8_job j, ampc_divisor across, int64_t tiles) {
    AMPC_SHARED(uint32_t, most, 512);
    AMPC_SHARED(uint32_t, turned, AMPC_FP8_TILE * 33);      /* a word between rows of 128 bytes */
    AMPC_SHARED(int, sums, 32);
    AMPC_SHARED(uint32_t, scratch, 32);
    const unsigned t = threadIdx.x;
    const bool blocks = KIND == AMPC_FP8_BLOCKS, e5m2 = j.how.dtype == AMP_E5M2;
    const bool remembers = KIND == AMPC_FP8_TENSOR && j.how.scaling == AMP_FP8_DELAYED && j.how.record;
    ampc_fp8_counts counts = {0, 0, 0};
    uint32_t amax = 0;
    if (KIND == AMPC_FP8_MEASURE && j.how.scaling == AMP_FP8_DELAYED && j.how.slot->scale > 0.0f) return;
    if (t == 0 && KIND != AMPC_FP8_MEASURE) {
        const float scale = blocks ? 1.0f : ampc_fp8_tensor_scale(j);
        most[0] = ampi_bits_f32(scale);
        if (blockIdx.x == 0 && j.head[0] != NULL) j.head[0]->inverse = ampi_inverse(scale);
        if (blockIdx.x == 0 && j.head[1] != NULL) j.head[1]->inverse = ampi_inverse(scale);
    }
    __syncthreads();
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        int64_t col0;
        const int64_t row0 = ampc_divide(tile, across, &col0) * AMPC_FP8_TILE;
        col0 *= AMPC_FP8_TILE;
        const int64_t row = row0 + t / 16 * 4, col = col0 + t % 16 * 8;
        float v[4][8];
        AMPC_UNROLL
        for (int i = 0; i < 4; i++) ampc_fp8_read<W>(j.x, row + i, col, v[i]);
        if (KIND == AMPC_FP8_MEASURE || remembers) {
            AMPC_UNROLL
            for (int i = 0; i < 32; i++) amax = ampc_larger(amax, ampc_magnitude(v[i / 8][i % 8]));
        }
        if (KIND == AMPC_FP8_MEASURE) continue;
        if (blocks) ampc_fp8_blocks(j, v, row0, col0, most);
        uint32_t q[4][2];
        AMPC_UNROLL
        for (int i = 0; i < 4; i++) {
            AMPC_UNROLL
            for (int half = 0; half < 2; half++) {
                const unsigned r = t / 16 * 4 + (unsigned)i, first = t % 16 * 8 + 4 * (unsigned)half;
                const unsigned from = blocks ? (r >> j.row_shift) * (unsigned)j.pitch : 0;
                float scale[4];
                AMPC_UNROLL
                for (unsigned c = 0; c < 4; c++)
                    scale[c] = ampi_f32_of_bits(most[blocks ? from + ((first + c) >> j.col_shift) : 0]);
                q[i][half] = ampc_fp8_four(v[i] + 4 * half, scale, e5m2, counts);
            }
            if (j.out[0] != NULL && row + i < j.outer[0] && col < j.k[0])
                *(uint2 *)(j.out[0] + (row + i) * j.k[0] + col) = uint2{q[i][0], q[i][1]};
        }
        if (j.out[1] != NULL) ampc_fp8_leave(j, q, row0, col0, turned);
        __syncthreads();
    }
    if (KIND == AMPC_FP8_MEASURE) {
        amax = ampc_block_max(amax, scratch);
        if (t == 0 && j.head[0] != NULL) atomicMax(&j.head[0]->amax, amax);
        if (t == 0 && j.head[1] != NULL) atomicMax(&j.head[1]->amax, amax);
        return;
    }
    if (remembers) {
        amax = ampc_block_max(amax, scratch);
        if (t == 0) ampc_fp8_remember(j, amax);
    }
    if (!j.how.record || j.how.slot == NULL) return;
    amp_k_fp8_count *now = &j.how.slot->now;
    ampc_count((unsigned long long *)&now->saturated, counts.saturated, sums);
    ampc_count((unsigned long long *)&now->underflowed, counts.underflowed, sums);
    ampc_count((unsigned long long *)&now->nonfinite, counts.nonfinite, sums);
    if (t != 0 || blockIdx.x != 0) return;
    atomicAdd((unsigned long long *)&now->values, (unsigned long long)(j.x.rows * j.x.cols));
}

template <ampc_fp8_kind KIND> amp_result ampc_fp8_launch(ampc_device *dev, const ampc_fp8_job &j, void *stream) {
    const int64_t down = ampc_blocks(j.x.rows, AMPC_FP8_TILE), across = ampc_blocks(j.x.cols, AMPC_FP8_TILE);
    const int width = ampc_width(8, j.x);
    return ampc_launch(dev, "fp8",
                       width == 8   ? ampc_fp8_kernel<8, KIND>
                       : width == 4 ? ampc_fp8_kernel<4, KIND>
                                    : ampc_fp8_kernel<1, KIND>,
                       ampc_grid(dev, down * across, 2), AMPC_FP8_THREADS, 0, stream, j, across, down * across);
}

/* Rounds x to `rows`, with k along x's rows, and to `columns`, with k along x's columns.  NULL means that one is not
   wanted.  With scales of blocks, only one of them may be wanted.  Blocks are read once, and so is x if its scale is
   delayed.  A current scale is known only when all of x has been read, so it takes a second pass. */
amp_result ampc_fp8_round(ampc_device *dev, const amp_k_fp8 &how, const amp_mat &x, void *rows, void *columns,
                          void *stream) {
    void *const to[2] = {rows, columns};
    const int shift = how.scaling == AMP_FP8_MX ? 5 : 7;
    ampc_fp8_job j = {};
    j.x = x, j.how = how;
    j.row_shift = rows != NULL && !how.square ? 0 : shift, j.col_shift = rows == NULL && !how.square ? 0 : shift;
    j.pitch = AMPC_FP8_TILE >> j.col_shift;
    for (int i = 0; i < 2; i++) {
        const ampc_fp8_place p = ampc_fp8_place_of(i ? x.cols : x.rows, i ? x.rows : x.cols, how);
        if (to[i] == NULL) continue;
        j.out[i] = (uint8_t *)to[i], j.outer[i] = p.outer, j.k[i] = p.k;
        j.head[i] = (ampc_fp8_head *)(j.out[i] + p.head);
        j.scales = j.out[i] + p.scales, j.blocks = p.blocks, j.stride = ampc_blocks(p.k, AMPC_FP8_TILE) * 512;
        if (!ampc_fp8_in_blocks(how)) AMPC_TRY(ampc_fill(dev, j.head[i], 0, AMPC_FP8_HEAD, stream));
    }
    if (ampc_fp8_in_blocks(how)) return ampc_fp8_launch<AMPC_FP8_BLOCKS>(dev, j, stream);
    AMPC_TRY(ampc_fp8_launch<AMPC_FP8_MEASURE>(dev, j, stream));
    return ampc_fp8_launch<AMPC_FP8_TENSOR>(dev, j, stream);
}

/* Writes an operand's numbers as bf16.  Scales of blocks are undone.  Of a tensor's scale, only the part that the
   factor cannot hold is undone. */
__global__ void __launch_bounds__(256)
ampc_fp8_widen_kernel(const uint8_t *from, uint16_t *to, ampc_fp8_place p, amp_k_fp8 how, ampc_divisor by_k,
                      int64_t total) {
    for (int64_t n = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; n < total; n += (int64_t)gridDim.x * blockDim.x) {
        int64_t at = 4 * n, k, outer = ampc_divide(at, by_k, &k);
        const uint32_t four = *(const uint32_t *)(from + at);
        const unsigned char *scales = from + p.scales;
        float by = 1.0f, x[4];
        if (!ampc_fp8_in_blocks(how))
            by = ampi_power_of_2(ampi_fp8_spread(((const ampc_fp8_head *)(from + p.head))->inverse));
        if (how.scaling == AMP_FP8_BLOCK)
            by = ((const float *)scales)[how.square ? outer / 128 * p.blocks + k / 128 : k / 128 * p.outer + outer];
        if (how.scaling == AMP_FP8_MX) {
            const int e = scales[(outer / 128 * ampc_blocks(p.k, 128) + k / 128) * 512 + outer % 32 * 16 +
                                 outer % 128 / 32 * 4 + k / 32 % 4];
            by = e == 255 ? ampi_f32_of_bits(0x7fc00000u) : ampi_power_of_2(e - 127);
        }
        AMPC_UNROLL
        for (int i = 0; i < 4; i++) {
            const uint8_t byte = (uint8_t)(four >> 8 * i);
            x[i] = ampc_mul(how.dtype == AMP_E4M3 ? amp_f32_from_e4m3(byte) : amp_f32_from_e5m2(byte), by);
        }
        *(uint2 *)(to + at) = uint2{ampc_pair(x[0], x[1], AMP_BF16), ampc_pair(x[2], x[3], AMP_BF16)};
    }
}

/* The factor that undoes an operand's scale, without the part that is undone in its copy in bf16. */
__device__ __forceinline__ double ampc_fp8_undo(const void *head) {
    const float inverse = ((const ampc_fp8_head *)head)->inverse;
    return ampc_mul((double)inverse, (double)ampi_power_of_2(-ampi_fp8_spread(inverse)));
}
/* Computes the factor by which a product of tensors in bf16 is multiplied, in the same way as on the CPU. */
__global__ void ampc_fp8_factor_kernel(float alpha, const void *head_a, const void *head_b, float *factor) {
    *factor = (float)ampc_mul(ampc_mul((double)alpha, ampc_fp8_undo(head_a)), ampc_fp8_undo(head_b));
}

/* Multiplies rounded operands in cuBLASLt.  g has the operands and c.  *done is set to false if cuBLASLt declines.
   Vectors are in c's dtype.  cuBLASLt multiplies by both scales in fp32.  Where the scales' product is too large for
   fp32, c is infinite or NaN, so a scaler skips the step.  Where it is below 2^-126, each of c's numbers is off by k
   2^-108 at most. */
amp_result ampc_fp8_library(ampc_device *dev, amp_k_gemm g, int epilogue, void *stream, bool *done) {
    ampc_scratch vector(dev, stream);
    const bool cast = g.bias != NULL && (g.bias_dtype != g.c_dtype || !ampc_aligned(g.bias));
    ampc_plan plan;
    *done = false;
    AMPC_TRY(ampc_plan_get(dev, ampc_way_told(g, cast ? AMPC_CAST_BIAS : 0), epilogue, &plan));
    if (plan.refused) return AMP_OK;
    if (cast && !ampc_bias_copied(g)) {
        AMPC_TRY(vector.get((size_t)(g.n * ampc_dtype_size(g.c_dtype)), "gemm"));
        AMPC_TRY(ampc_cast_flat(dev, vector.data, g.c_dtype, g.bias, g.bias_dtype, g.n, stream));
    }
    if (cast) g.bias = vector.data != NULL ? vector.data : g.bias_copy;
    AMPC_TRY(ampc_plan_run(dev, plan, g, stream, done));
    if (!*done) ampc_plan_refuse(dev, plan.product);
    return AMP_OK;
}

/* Does the same in bf16, into g.c, which is fp32.  `factor` is set to the number by which the result must be
   multiplied. */
amp_result ampc_fp8_emulated(ampc_device *dev, const amp_k_gemm &g, ampc_scratch &factor, void *stream) {
    ampc_scratch wide(dev, stream);
    const ampc_fp8_place a = ampc_fp8_place_of(g.m, g.k, *g.fp8[0]), b = ampc_fp8_place_of(g.n, g.k, *g.fp8[1]);
    const int64_t at_b = a.outer * a.k, total = at_b + b.outer * b.k;
    amp_k_gemm p = g;
    AMPC_TRY(wide.get((size_t)total * 2, "gemm"));
    AMPC_TRY(factor.get(sizeof(float), "gemm"));
    p.a = wide.data, p.b = (uint16_t *)wide.data + at_b, p.a_dtype = p.b_dtype = p.compute = AMP_BF16, p.alpha = 1;
    for (int i = 0; i < 2; i++) {
        const int64_t fours = (i ? total - at_b : at_b) / 4;
        AMPC_TRY(ampc_launch(dev, "gemm", ampc_fp8_widen_kernel, ampc_grid(dev, ampc_blocks(fours, 256), 8), 256, 0,
                             stream, (const uint8_t *)(i ? g.b : g.a), (uint16_t *)wide.data + (i ? at_b : 0),
                             i ? b : a, *g.fp8[i], a.k, fours));
    }
    AMPC_TRY(ampc_launch(dev, "gemm", ampc_fp8_factor_kernel, 1, 1, 0, stream, g.alpha, (const char *)g.a + a.head,
                         (const char *)g.b + b.head, (float *)factor.data));
    return ampc_gemm_from(dev, p, AMPC_FUSED, stream);
}

/* Whether this GPU's cuBLASLt has such products. */
bool ampc_fp8_has(const ampc_device *dev, const amp_k_gemm &g) {
    switch (g.fp8[0]->scaling) {
        case AMP_FP8_BLOCK: return dev->has.fp8_blocks;
        case AMP_FP8_MX: return dev->has.fp8_mx;
        default: return dev->has.fp8;
    }
}

/* Whether cuBLASLt can write c itself.  c must be aligned to 16 bytes, and the length of its rows and their distance
   must be multiples of 16 bytes.  With AMP_FP8_BLOCK, m and n must not have been filled up. */
bool ampc_fp8_direct(const amp_k_gemm &g) {
    const bool blocks = g.fp8[0]->scaling == AMP_FP8_BLOCK;
    return ampc_aligned(g.c, (g.n | g.ldc) * ampc_dtype_size(g.c_dtype)) && (!blocks || (g.m | g.n) % 16 == 0);
}
/* The epilogue that does all of g, or -1.  No document names an epilogue for FP8 that writes aux matrices, nor any with
   scales of blocks.  The bias of an fp32 result would be bf16. */
int ampc_fp8_epilogue(amp_k_gemm g) {
    if (g.act == AMP_ACT_NONE && g.pre == NULL && g.bias == NULL) return CUBLASLT_EPILOGUE_DEFAULT;
    if (ampc_fp8_in_blocks(*g.fp8[0]) || g.pre != NULL || g.c_dtype == AMP_F32) return -1;
    g.compute = g.c_dtype;
    return ampc_gemm_epilogue(g);
}

/* Does the call g.  `p` has its operands, rounded, and g's sizes, alpha, beta and c. */
amp_result ampc_fp8_product(ampc_device *dev, const amp_k_gemm &g, amp_k_gemm p, void *stream) {
    ampc_scratch wide(dev, stream), factor(dev, stream);
    bool native = ampc_fp8_has(dev, g) && ampc_gemm_for_library(p), done = false;
    p.column_sum.data = p.row_sum.data = NULL;
    const int epilogue = ampc_fp8_epilogue(p);
    if (native && epilogue >= 0 && ampc_fp8_direct(g)) AMPC_TRY(ampc_fp8_library(dev, p, epilogue, stream, &done));
    if (done) return AMP_OK;
    p.bias = NULL, p.pre = NULL, p.act = AMP_ACT_NONE, p.backward = 0, p.beta = 0, p.c_dtype = AMP_F32;
    p.m = ampc_filled(g.m, 16), p.n = p.ldc = ampc_filled(g.n, 16);
    AMPC_TRY(wide.get((size_t)(p.m * p.n) * sizeof(float), "gemm"));
    p.c = wide.data;
    if (native) AMPC_TRY(ampc_fp8_library(dev, p, CUBLASLT_EPILOGUE_DEFAULT, stream, &done));
    if (!done) AMPC_TRY(ampc_fp8_emulated(dev, p, factor, stream));
    return ampc_gemm_map(dev, g, p, (const float *)factor.data, stream);
}

bool ampc_fp8_is_rounded(amp_dtype dtype) { return dtype == AMP_E4M3 || dtype == AMP_E5M2; }
/* Whether an operand's k lies along its rows. */
bool ampc_fp8_along(const amp_k_gemm &g, int b) { return b ? g.trans_b != 0 : g.trans_a == 0; }

/* Rounds operand a or b, unless gemm_pack or the previous product did.  If both products of a pair take the operand, it
   is rounded in both directions. */
amp_result ampc_fp8_operand(ampc_device *dev, const amp_k_gemm &g, int b, ampc_scratch &own, const void **out,
                            void *stream) {
    amp_k_gemm stored = g;
    ampc_gemm_operand x(stored, b != 0);
    const ampc_fp8_place p = ampc_fp8_place_of(b ? g.n : g.m, g.k, *g.fp8[b]);
    const bool shared = g.shares == 1 + b, along = ampc_fp8_along(g, b);
    *out = b && g.packed_b != NULL ? g.packed_b : x.data;
    if ((b && g.packed_b != NULL) || ampc_fp8_is_rounded(x.dtype)) return AMP_OK;
    if (!shared) AMPC_TRY(own.get(p.bytes, "gemm"));
    void *first = shared ? g.scratch : own.data;
    void *second = shared ? (char *)first + ampc_filled((int64_t)p.bytes, AMPC_ALIGN) : NULL;
    *out = first;
    return ampc_fp8_round(dev, *g.fp8[b], ampc_matrix(x.data, x.dtype, x.rows, x.cols, x.ld), along ? first : second,
                          along ? second : first, stream);
}

amp_result ampc_gemm_fp8(ampc_device *dev, const amp_k_gemm &g, void *stream) {
    ampc_scratch a(dev, stream), b(dev, stream);
    amp_k_gemm p = g;
    if (g.k <= 0) {                 /* neither operand is read */
        p.compute = AMP_BF16;
        return ampc_gemm_from(dev, p, AMPC_FUSED, stream);
    }
    AMPC_TRY(ampc_fp8_operand(dev, g, 0, a, &p.a, stream));
    AMPC_TRY(ampc_fp8_operand(dev, g, 1, b, &p.b, stream));
    p.a_dtype = g.fp8[0]->dtype, p.b_dtype = g.fp8[1]->dtype, p.trans_a = 0, p.trans_b = 1;
    p.k = p.lda = p.ldb = ampc_fp8_place_of(g.m, g.k, *g.fp8[0]).k;
    AMPC_TRY(ampc_fp8_product(dev, g, p, stream));
    return ampc_gemm_sums(dev, g, stream);
}

__global__ void __launch_bounds__(64) ampc_fp8_update_kernel(const __grid_constant__ amp_k_fp8_update u) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < u.n && ampi_fp8_is_due(&u, i)) ampi_fp8_update(&u, i, &u.slots[i], &u.amax[i]);
}
amp_result ampc_fp8_update(void *device, const amp_k_fp8_update *args, void *stream) {
    return ampc_launch((ampc_device *)device, "fp8_update", ampc_fp8_update_kernel, (unsigned)ampc_blocks(args->n, 64),
                       64, 0, stream, *args);
}

/* If two products read an operand in both directions, the first product rounds it for both.  Scales of blocks differ
   with the direction, so such operands are not shared. */
amp_result ampc_fp8_reserve(ampc_device *dev, amp_k_gemm *args) {
    ampc_scratch scratch(dev, NULL);
    for (int i = 0; i < 4 && scratch.data == NULL; i++) {
        const int of_x = i / 2, of_y = i % 2;
        ampc_gemm_operand x(args[0], of_x != 0), y(args[1], of_y != 0);
        const amp_k_fp8 &how = *args[0].fp8[of_x];
        if (!x.is(y) || ampc_fp8_in_blocks(how) || how.dtype != args[1].fp8[of_y]->dtype) continue;
        if (ampc_fp8_along(args[0], of_x) == ampc_fp8_along(args[1], of_y) || args[1].row_sum.data != NULL) continue;
        const int64_t first = (int64_t)ampc_fp8_place_of(of_x ? args[0].n : args[0].m, args[0].k, how).bytes;
        const size_t second = ampc_fp8_place_of(of_y ? args[1].n : args[1].m, args[1].k, how).bytes;
        AMPC_TRY(scratch.get((size_t)ampc_filled(first, AMPC_ALIGN) + second, "gemm"));
        args[0].shares = 1 + of_x;
        y.data = (char *)scratch.data + ampc_filled(first, AMPC_ALIGN), y.dtype = how.dtype;
    }
    args[0].scratch = scratch.keep();
    return AMP_OK;
}

amp_result ampc_gemm(void *device, const amp_k_gemm *args, void *stream) {
    ampc_device *dev = (ampc_device *)device;
    amp_k_gemm g = *args;
    AMPC_ENTER(dev, "gemm");
    ampc_gemm_tidy(&g);
    if (g.m <= 0 || g.n <= 0 || g.batch <= 0) return ampc_gemm_sums(dev, g, stream);
    if (g.compute == AMP_FP8) return ampc_gemm_fp8(dev, g, stream);
    const int turned = ampc_turned_operands(dev, g);
    return turned ? ampc_gemm_turned(dev, g, turned, stream) : ampc_gemm_from(dev, g, AMPC_FUSED, stream);
}

/* If two products read an operand that must be cast, the first product casts it for both. */
amp_result ampc_gemm_reserve(void *device, amp_k_gemm *args, int64_t n) {
    ampc_device *dev = (ampc_device *)device;
    amp_dtype in = ampc_operand_dtype(args->compute);
    ampc_scratch scratch(dev, NULL);
    for (int64_t i = 0; i < n; i++) {
        ampc_gemm_tidy(&args[i]);
        if (!ampc_gemm_for_library(args[i]) || args[i].compute != args->compute) return AMP_OK;
    }
    if (args->compute == AMP_FP8) return n == 2 ? ampc_fp8_reserve(dev, args) : AMP_OK;
    for (int i = 0; i < 4 && n == 2 && scratch.data == NULL; i++) {
        ampc_gemm_operand x(args[0], i / 2), y(args[1], i % 2);
        if (!x.is(y) || x.dtype == in || x.cut != NULL || y.cut != NULL) continue;
        AMPC_TRY(scratch.get(x.bytes_in(in), "gemm"));
        args[0].shares = 1 + i / 2;
        y.become(scratch.data, in);
    }
    args[0].scratch = scratch.keep();
    return AMP_OK;
}
amp_result ampc_call_scratch(void *device, void **ptr, size_t bytes) {
    ampc_scratch scratch((ampc_device *)device, NULL);
    *ptr = NULL;
    AMPC_TRY(scratch.get(bytes, "amp_alloc"));
    *ptr = scratch.keep();
    return AMP_OK;
}
void ampc_gemm_release(void *device, const amp_k_gemm *args) { ampc_free(device, args->scratch, args->scratch_bytes); }

/* ---- Autotuning.  It has separate memory, and runs in the caller's stream.  Each algorithm that cuBLASLt names is
   compared with the fp32 units' result and timed, and so are the parts of each epilogue.  The compared operands are
   small whole numbers, so any order of summation must give the same bits.  The first of them are all ones, which expose
   a product that skips part of k.  The timed operands are random fractions, because the GPU's power limits its clock,
   and small whole numbers draw less power than the numbers of a training. */

enum { AMPC_TUNE_ALGORITHMS = 16, AMPC_TUNE_PRODUCTS = 4, AMPC_TUNE_SETS = 16 };
enum { AMPC_TUNE_RUNS = 7, AMPC_TUNE_FEW = 3 };     /* rounds of timing, and those of long products */
enum { AMPC_TUNE_PART = 4 };        /* the buffers take at most a quarter of the GPU's memory */
enum { AMPC_TUNE_SPIN = 60000 };    /* clocks for each product: 30 us, enough for a few launches */
#define AMPC_TUNE_SECONDS 0.25      /* the rounds of a product take no longer, if AMPC_TUNE_FEW of them do not */

enum ampc_tune_numbers { AMPC_TUNE_WHOLE, AMPC_TUNE_ONES, AMPC_TUNE_RANDOM };

/* The buffers of a product.  There are `sets` of them, so that the next run does not read from the cache.  The last set
   holds the correct results, and has the inputs of the first.  The product of GPT-2's head with 64 sequences of 1024
   thus takes 13.4 GB forward, twice its logits, and 6.7 GB for each gradient. */
struct ampc_tuning {
    ampc_device *dev;
    void *stream;
    amp_k_gemm g;                   /* the caller's product */
    ampc_plan *plan;
    size_t bytes, results;          /* of one set; of those, its results */
    int sets, timed;                /* timed: how many sets the runs alternate between */
    ampc_scratch scratch;
    void *marks[AMPC_TUNE_ALGORITHMS + 2];  /* events before, between and behind the ways of a round */
    ampc_tuning(ampc_device *d, const amp_k_gemm &args, ampc_plan *p, void *s)
        : dev(d), stream(s), g(args), plan(p), bytes(0), results(0), sets(0), timed(0), scratch(d, s), marks() {}
    ~ampc_tuning() {
        for (void *mark : marks) ampc_event_destroy(dev, mark);
    }
};

int64_t ampc_extent_c(const amp_k_gemm &g) { return (g.batch - 1) * g.stride_c + (g.m - 1) * g.ldc + g.n; }
int64_t ampc_extent_pre(const amp_k_gemm &g) { return (g.m - 1) * g.ld_pre + g.n; }

/* The product on set i.  Its buffers are consecutive, and each is aligned as the caller's is.  *bytes is set to their
   total, and *results to that of all but a, b and the bias. */
amp_k_gemm ampc_tune_set(const ampc_tuning *t, int i, size_t *bytes = NULL, size_t *results = NULL) {
    amp_k_gemm g = t->g;
    const uintptr_t first = (uintptr_t)t->scratch.data, set = first + (size_t)i * t->bytes;
    uintptr_t end = set;
    auto place = [&](const void *p, int64_t elements, amp_dtype dtype) {
        uintptr_t at = end + ((uintptr_t)p & 255);
        if (p != NULL) end = (at + (size_t)(elements * ampc_dtype_size(dtype)) + 255) & ~(uintptr_t)255;
        return p != NULL ? (void *)at : NULL;
    };
    g.c = place(g.c, ampc_extent_c(g), g.c_dtype);
    g.pre = place(g.pre, ampc_extent_pre(g), g.pre_dtype);
    g.row_sum.data = place(g.row_sum.data, g.m, g.row_sum.dtype);
    g.column_sum.data = place(g.column_sum.data, g.n, g.column_sum.dtype);
    if (results != NULL) *results = end - set;
    if (i > 0 && i == t->sets - 1) end = first + (end - set);
    g.a = place(g.a, ampc_gemm_operand(g, 0).extent(), g.a_dtype);
    g.b = place(g.b, ampc_gemm_operand(g, 1).extent(), g.b_dtype);
    g.bias = place(g.bias, g.n, g.bias_dtype);
    if (bytes != NULL) *bytes = end - set;
    return g;
}

/* Fills an array with whole numbers from -2 to 2, with ones, or with random fractions between -1 and 1. */
__global__ void __launch_bounds__(256)
    ampc_tune_fill_kernel(void *p, amp_dtype dtype, int64_t n, ampc_tune_numbers numbers, uint32_t seed) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        uint32_t hash = ((uint32_t)i ^ seed) * 0x9e3779b9u;
        hash = (hash ^ hash >> 15) * 0x85ebca6bu;
        const float whole = (float)((int)((hash >> 16) % 5) - 2), fraction = (float)(int)hash * 0x1p-31f;
        ampc_put_stored(p, dtype, i, numbers == AMPC_TUNE_ONES ? 1.0f : numbers == AMPC_TUNE_WHOLE ? whole : fraction);
    }
}

/* Counts the numbers of two matrices that differ by more than `share` of their size. */
__global__ void __launch_bounds__(256)
ampc_tune_compare_kernel(amp_mat x, amp_mat y, int64_t total, float share, unsigned long long *wrong) {
    AMPC_SHARED(int, scratch, 32);
    int found = 0;
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < total; i += (int64_t)gridDim.x * blockDim.x) {
        int64_t row = i / x.cols, col = i - row * x.cols;
        float u = ampc_stored(x.data, x.dtype, row * x.ld + col), v = ampc_stored(y.data, y.dtype, row * y.ld + col);
        float far = share * (1.0f + fabsf(v));
        found += !(u == v || (u != u && v != v) || fabsf(u - v) <= far);
    }
    ampc_count(wrong, found, scratch);
}

/* Fills the inputs of a set.  c is 0, so that beta changes nothing. */
amp_result ampc_tune_inputs(const ampc_tuning *t, int i, ampc_tune_numbers numbers) {
    amp_k_gemm g = ampc_tune_set(t, i);
    const struct { const void *p; int64_t n; amp_dtype dtype; } inputs[] = {
        {g.a, ampc_gemm_operand(g, 0).extent(), g.a_dtype}, {g.b, ampc_gemm_operand(g, 1).extent(), g.b_dtype},
        {g.bias, g.n, g.bias_dtype}, {g.pre, ampc_extent_pre(g), g.pre_dtype}};
    AMPC_TRY(ampc_fill(t->dev, g.c, 0, (size_t)(ampc_extent_c(g) * ampc_dtype_size(g.c_dtype)), t->stream));
    for (uint32_t k = 0; k < 4; k++)
        if (inputs[k].p != NULL)
            AMPC_TRY(ampc_launch(t->dev, "autotune", ampc_tune_fill_kernel,
                                 ampc_grid(t->dev, ampc_blocks(inputs[k].n, 256), 8), 256, 0, t->stream,
                                 const_cast<void *>(inputs[k].p), inputs[k].dtype, inputs[k].n, numbers, k + 1));
    return AMP_OK;
}

/* Takes the memory of the sets, and makes the events.  All sets but the last are for timing.  Fails with AMP_ERR_MEMORY
   if two sets are too large. */
amp_result ampc_tune_open(ampc_tuning *t) {
    const size_t most = (size_t)t->dev->info.memory / AMPC_TUNE_PART;
    size_t all;
    (void)ampc_tune_set(t, 0, &t->bytes, &t->results);
    const int64_t sets = 2 + 2 * t->dev->blas.cache / (int64_t)t->bytes;
    t->sets = sets < AMPC_TUNE_SETS ? (int)sets : (int)AMPC_TUNE_SETS;
    while (all = t->bytes * (size_t)(t->sets - 1) + t->results, ampc_class_bytes(all) > most)
        if (--t->sets < 2) return AMP_ERR_MEMORY;
    t->timed = t->sets - 1;
    AMPC_TRY(t->scratch.get(all, "autotune"));
    for (void *&mark : t->marks) AMPC_TRY(ampc_event_create(t->dev, &mark, 1));
    return AMP_OK;
}

amp_k_gemm ampc_tune_alone(amp_k_gemm g) {      /* sums overwrite, so that runs are independent */
    g.row_sum.add = g.column_sum.add = 0;
    return g;
}

/* Runs the product with its epilogue, by the measured plan. */
amp_result ampc_tune_trial(const ampc_tuning *t, const amp_k_gemm &g, bool *done) {
    amp_k_gemm product;
    return ampc_gemm_run(t->dev, g, AMPC_FUSED, ampc_way_steps(g, AMPC_FUSED, &product), *t->plan, t->stream, done);
}

/* Adds to *wrong the number of outputs that differ between sets i and j.  GELU's may differ a little, because cuBLASLt
   approximates it. */
amp_result ampc_tune_compare(const ampc_tuning *t, int i, int j, int ones, unsigned long long *wrong) {
    amp_k_gemm x = ampc_tune_set(t, i), y = ampc_tune_set(t, j);
    const amp_k_gradient *xs = ampc_epilogue_sum(x), *ys = ampc_epilogue_sum(y);
    float share = x.act == AMP_ACT_GELU ? 0.03125f : x.k > 1 << 21 ? 0.001f : 0.0f;
    auto compare = [&](const void *p, const void *q, amp_dtype dtype, int64_t rows, int64_t cols, int64_t ld) {
        amp_mat u = {const_cast<void *>(p), dtype, 0, rows, cols, ld}, v = u;
        v.data = const_cast<void *>(q);
        return ampc_launch(t->dev, "autotune", ampc_tune_compare_kernel,
                           ampc_grid(t->dev, ampc_blocks(rows * cols, 256), 8), 256, 0, t->stream, u, v, rows * cols,
                           share, wrong);
    };
    for (int64_t item = 0; item < x.batch; item++)
        AMPC_TRY(compare(ampc_at(x.c, x.c_dtype, item * x.stride_c), ampc_at(y.c, y.c_dtype, item * y.stride_c),
                         x.c_dtype, x.m, x.n, x.ldc));
    if (x.pre && !x.backward) AMPC_TRY(compare(x.pre, y.pre, x.pre_dtype, x.m, x.n, x.ld_pre));
    if (xs && (ones || xs == &x.row_sum))
        AMPC_TRY(compare(xs->data, ys->data, xs->dtype, 1, x.row_sum.data ? x.m : x.n, x.m));
    return AMP_OK;
}

/* The algorithms that cuBLASLt names for a plan. */
struct ampc_candidates {
    cublasLtMatmulHeuristicResult_t found[AMPC_TUNE_ALGORITHMS];
    int count;
    bool right[AMPC_TUNE_ALGORITHMS];
};

void ampc_tune_take(ampc_plan *plan, const cublasLtMatmulHeuristicResult_t &found) {
    plan->algo = found.algo;
    plan->workspace = found.workspaceSize;
    plan->refused = 0;
}

/* Sets *right to false if the result of the plan's algorithm differs from the last set's. */
amp_result ampc_tune_verify(const ampc_tuning *t, ampc_tune_numbers numbers, bool *right) {
    ampc_scratch count(t->dev, t->stream);
    unsigned long long wrong = 0;
    bool done = false;
    AMPC_TRY(count.get(sizeof wrong, "autotune"));
    AMPC_TRY(ampc_fill(t->dev, count.data, 0, sizeof wrong, t->stream));
    AMPC_TRY(ampc_tune_inputs(t, 0, numbers));
    AMPC_TRY(ampc_tune_trial(t, ampc_tune_alone(ampc_tune_set(t, 0)), &done));
    AMPC_TRY(ampc_tune_compare(t, 0, t->sets - 1, numbers == AMPC_TUNE_ONES, (unsigned long long *)count.data));
    AMPC_TRY(ampc_copy(t->dev, &wrong, count.data, sizeof wrong, AMP_COPY_TO_HOST, t->stream));
    AMPC_TRY(ampc_stream_sync(t->dev, t->stream));
    *right = *right && done && wrong == 0;
    return AMP_OK;
}

/* Finds the algorithms that are correct, both on ones and on other numbers. */
amp_result ampc_tune_check(ampc_tuning *t, ampc_candidates *all) {
    for (int i = 0; i < all->count; i++)
        all->right[i] =
            all->found[i].state == CUBLAS_STATUS_SUCCESS && all->found[i].workspaceSize <= t->dev->has.workspace;
    for (ampc_tune_numbers numbers : {AMPC_TUNE_ONES, AMPC_TUNE_WHOLE}) {
        AMPC_TRY(ampc_tune_inputs(t, t->sets - 1, numbers));
        AMPC_TRY(ampc_gemm_from(t->dev, ampc_tune_alone(ampc_tune_set(t, t->sets - 1)), AMPC_UNITS, t->stream));
        for (int i = 0; i < all->count; i++) {
            if (!all->right[i]) continue;
            ampc_tune_take(t->plan, all->found[i]);
            AMPC_TRY(ampc_tune_verify(t, numbers, &all->right[i]));
        }
    }
    return AMP_OK;
}

__global__ void ampc_tune_spin_kernel(long long clocks) {
    long long from = clock64();
    while (clock64() - from < clocks) {}
}

/* The ways to do a product that are timed: algorithms of cuBLASLt with the whole epilogue, by their number, and at the
   end the plain product with kernels for the rest (AMPC_TUNE_ALGORITHMS). */
struct ampc_race {
    int ways[AMPC_TUNE_ALGORITHMS + 1], count;
    int products[AMPC_TUNE_ALGORITHMS + 1];         /* in a row */
    bool declined[AMPC_TUNE_ALGORITHMS + 1];        /* cuBLASLt refused to run it */
    double times[AMPC_TUNE_ALGORITHMS + 1][AMPC_TUNE_RUNS];
    int rounds;
    int set;                                        /* that the next product takes */
};

/* Queues products of one way in a row. */
amp_result ampc_tune_queue(ampc_tuning *t, const ampc_candidates &all, ampc_race *race, int at) {
    const int way = race->ways[at];
    bool done = true;               /* of the last product; none is declined alone */
    if (way < AMPC_TUNE_ALGORITHMS) ampc_tune_take(t->plan, all.found[way]);
    for (int n = 0; n < race->products[at]; n++) {
        amp_k_gemm g = ampc_tune_set(t, race->set++ % t->timed);
        if (way == AMPC_TUNE_ALGORITHMS) AMPC_TRY(ampc_gemm_from(t->dev, g, AMPC_SUMS_APART, t->stream));
        else AMPC_TRY(ampc_tune_trial(t, g, &done));
    }
    race->declined[at] |= !done;
    return AMP_OK;
}

/* Runs each way once, and sets seconds[] to their times.  The ways follow one another without a gap, so that the GPU
   draws the power, and has the clock, of a training.  The stream is kept busy until all are queued, because the CPU
   takes longer to launch a small product than the GPU takes to run it. */
amp_result ampc_tune_round(ampc_tuning *t, const ampc_candidates &all, ampc_race *race, double *seconds) {
    long long products = 0;
    for (int i = 0; i < race->count; i++) products += race->products[i];
    AMPC_TRY(ampc_launch(t->dev, "autotune", ampc_tune_spin_kernel, 1, 1, 0, t->stream, AMPC_TUNE_SPIN * products));
    AMPC_TRY(ampc_event_record(t->dev, t->marks[0], t->stream));
    for (int i = 0; i < race->count; i++) {
        AMPC_TRY(ampc_tune_queue(t, all, race, i));
        AMPC_TRY(ampc_event_record(t->dev, t->marks[i + 1], t->stream));
    }
    AMPC_TRY(ampc_event_sync(t->dev, t->marks[race->count]));
    for (int i = 0; i < race->count; i++) {
        AMPC_TRY(ampc_event_elapsed(t->dev, t->marks[i], t->marks[i + 1], &seconds[i]));
        seconds[i] /= race->products[i];
    }
    return AMP_OK;
}

/* Times all ways, round by round, so that a change of the clock affects all alike.  The first round is a warm-up, and
   decides how many products and rounds there are. */
amp_result ampc_tune_time(ampc_tuning *t, const ampc_candidates &all, ampc_race *race) {
    double seconds[AMPC_TUNE_ALGORITHMS + 1], total = 0;
    for (int i = 0; i < t->timed; i++) AMPC_TRY(ampc_tune_inputs(t, i, AMPC_TUNE_RANDOM));
    for (int &products : race->products) products = AMPC_TUNE_PRODUCTS;
    AMPC_TRY(ampc_tune_round(t, all, race, seconds));
    for (int i = 0; i < race->count; i++) {
        if (seconds[i] * AMPC_TUNE_PRODUCTS > 1e-3) race->products[i] = 1;  /* one is long enough */
        total += seconds[i] * race->products[i];
    }
    race->rounds = total * AMPC_TUNE_RUNS > AMPC_TUNE_SECONDS ? (int)(AMPC_TUNE_SECONDS / total) : AMPC_TUNE_RUNS;
    if (race->rounds < AMPC_TUNE_FEW) race->rounds = AMPC_TUNE_FEW;
    for (int round = 0; round < race->rounds; round++) {
        AMPC_TRY(ampc_tune_round(t, all, race, seconds));
        for (int i = 0; i < race->count; i++) {
            double *times = race->times[i];
            int at = round;
            for (; at > 0 && times[at - 1] > seconds[i]; at--) times[at] = times[at - 1];
            times[at] = seconds[i];
        }
    }
    return AMP_OK;
}

const char *ampc_epilogue_name(int epilogue) {
    switch (epilogue) {
        case CUBLASLT_EPILOGUE_DEFAULT: return "DEFAULT";
        case CUBLASLT_EPILOGUE_BIAS: return "BIAS";
        case CUBLASLT_EPILOGUE_RELU: return "RELU";
        case CUBLASLT_EPILOGUE_RELU_BIAS: return "RELU_BIAS";
        case CUBLASLT_EPILOGUE_GELU: return "GELU";
        case CUBLASLT_EPILOGUE_GELU_BIAS: return "GELU_BIAS";
        case CUBLASLT_EPILOGUE_GELU_AUX: return "GELU_AUX";
        case CUBLASLT_EPILOGUE_GELU_AUX_BIAS: return "GELU_AUX_BIAS";
        case CUBLASLT_EPILOGUE_DGELU: return "DGELU";
        case CUBLASLT_EPILOGUE_DGELU_BGRAD: return "DGELU_BGRAD";
        case CUBLASLT_EPILOGUE_BGRADB: return "BGRADB";
        default: return "of another kind";
    }
}

void ampc_tune_log(const ampc_tuning *t, amp_log_level level, int id, const char *what) {
    const amp_k_gemm &g = t->g;
    char text[512];
    snprintf(text, sizeof text,
             "amp_cuda: autotune: c[%lld, %lld] of k = %lld, batch %lld, %c%c of %s and %s into %s by %s, "
             "epilogue %s: %s",
             (long long)g.m, (long long)g.n, (long long)g.k, (long long)g.batch, g.trans_a ? 'T' : 'N',
             g.trans_b ? 'T' : 'N', amp_dtype_name(g.a_dtype), amp_dtype_name(g.b_dtype), amp_dtype_name(g.c_dtype),
             amp_dtype_name(g.compute), ampc_epilogue_name(t->plan->key.epilogue), what);
    t->dev->host.log(t->dev->host.user, level, id, text);
}

/* Writes the attributes of an algorithm that cuBLASLt tells.  The tile, the stages and the cluster are numbers of
   cublasLt.h's enumerations. */
void ampc_tune_describe(const cublasLtMatmulAlgo_t &algo, char *text, size_t size) {
    const struct { const char *name; cublasLtMatmulAlgoConfigAttributes_t of; size_t bytes; } all[] = {
        {"id", CUBLASLT_ALGO_CONFIG_ID, 4},           {"tile", CUBLASLT_ALGO_CONFIG_TILE_ID, 4},
        {"stages", CUBLASLT_ALGO_CONFIG_STAGES_ID, 4}, {"split", CUBLASLT_ALGO_CONFIG_SPLITK_NUM, 4},
        {"reduction", CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, 4},
        {"swizzle", CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, 4}, {"option", CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, 4},
        {"cluster", CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, 2}};
    size_t at = 0, written;
    for (const auto &one : all) {
        uint32_t value = 0;                         /* attributes of 16 bits fill its lower half */
        if (cublasLtMatmulAlgoConfigGetAttribute(&algo, one.of, &value, one.bytes, &written) != CUBLAS_STATUS_SUCCESS)
            continue;
        at += (size_t)snprintf(text + at, at < size ? size - at : 0, "%s %u, ", one.name, value);
        if (at > size) at = size;
    }
}

/* A way must take less than this share of the time of the one that it replaces, if that is the heuristic's first
   algorithm or an epilogue of cuBLASLt. */
#define AMPC_TUNE_GAIN 0.98

/* Logs the choice: race.ways[best], and whether its epilogue is done in parts. */
void ampc_tune_say(const ampc_tuning *t, const ampc_candidates &all, const ampc_race &race, int best) {
    const int middle = race.rounds / 2, way = race.ways[best];
    const bool sums = ampc_epilogue_sum(t->g) != NULL;
    char config[160] = "", first[64] = "", parts[96] = "", what[400];
    ampc_tune_describe(all.found[way].algo, config, sizeof config);
    if (best > 0) snprintf(first, sizeof first, ", the first %.2f us", 1e6 * race.times[0][middle]);
    if (race.ways[race.count - 1] == AMPC_TUNE_ALGORITHMS)
        snprintf(parts, sizeof parts, "; %s %s %.2f us", sums ? "bias gradient" : "epilogue",
                 t->plan->apart ? "apart:" : "fused, apart:", 1e6 * race.times[race.count - 1][middle]);
    snprintf(what, sizeof what, "algorithm %d of %d, %.2f us (%s%d rounds)%s%s", way, all.count,
             1e6 * race.times[best][middle], config, race.rounds, first, parts);
    ampc_tune_log(t, AMP_LOG_INFO, AMPC_LOG_TUNED, what);
}

/* Times the correct algorithms, and the parts if the product has an epilogue.  Takes the fastest algorithm, or the
   first if the fastest gains little over it.  The plan is refused if none is correct. */
amp_result ampc_tune_choose(ampc_tuning *t, const ampc_candidates &all) {
    ampc_plan *plan = t->plan;
    ampc_race race = {};
    char what[96];
    int best = 0;
    for (int i = 0; i < all.count; i++) {
        if (all.right[i]) race.ways[race.count++] = i;
        if (all.right[i]) continue;
        snprintf(what, sizeof what, "algorithm %d of cuBLASLt gives wrong results and is not used", i);
        ampc_tune_log(t, AMP_LOG_WARNING, AMPC_LOG_WRONG, what);
    }
    const int algorithms = race.count;
    plan->refused = algorithms == 0;
    if (plan->refused) return AMP_OK;
    if (plan->key.epilogue != CUBLASLT_EPILOGUE_DEFAULT) race.ways[race.count++] = AMPC_TUNE_ALGORITHMS;
    AMPC_TRY(ampc_tune_time(t, all, &race));
    auto time = [&](int i) { return race.declined[i] ? 1e9 : race.times[i][race.rounds / 2]; };
    for (int i = 1; i < algorithms; i++)
        if (time(i) < time(best) * (best == 0 ? AMPC_TUNE_GAIN : 1)) best = i;
    ampc_tune_take(plan, all.found[race.ways[best]]);
    plan->refused = race.declined[best];
    plan->apart = race.count > algorithms && time(algorithms) < time(best) * AMPC_TUNE_GAIN;
    ampc_tune_say(t, all, race, best);
    return AMP_OK;
}

/* Leaves the best choice in the plan. */
amp_result ampc_tune_plan(ampc_tuning *t) {
    ampc_candidates all;
    ampc_plan *plan = t->plan;
    cublasLtMatmulDescOpaque_t product;
    amp_k_gemm told;
    AMPC_TRY(ampc_tune_open(t));
    plan->apart = 0;
    const int steps = ampc_way_steps(t->g, AMPC_FUSED, &told);
    told = ampc_way_told(t->g, steps);
    AMPC_TRY(ampc_blas_check(t->dev, ampc_describe_product(&product, *plan, told), "describing a product to cublasLt",
                             &t->g));
    AMPC_TRY(ampc_blas_check(t->dev, ampc_plan_ask(t->dev, plan, &product, AMPC_TUNE_ALGORITHMS, all.found, &all.count),
                             "cublasLtMatmulAlgoGetHeuristic", &t->g));
    AMPC_TRY(ampc_tune_check(t, &all));
    return ampc_tune_choose(t, all);
}

/* Measures a plan.  Without enough memory the plan stays as it was.  The memory goes back to CUDA afterwards, because
   it may be much.  It goes back in the stream's order, so that work in other streams is not waited for.  `plan` is the
   caller's copy; other threads see its findings once it is measured. */
amp_result ampc_tune(ampc_device *dev, const amp_k_gemm &g, ampc_plan *plan, void *stream) {
    ampc_plan before = *plan;
    amp_result result;
    ampc_relaxed relaxed;
    /* each set has a separate bias, in the dtype of the copy if steady steps have one */
    amp_k_gemm alone = g;
    if (ampc_bias_copied(g)) alone.bias = g.bias_copy, alone.bias_dtype = g.c_dtype;
    alone.bias_copy = NULL;
    plan->tuned = 1;
    __atomic_add_fetch(&dev->blas.tuning, 1, __ATOMIC_RELAXED);
    {
        ampc_tuning t(dev, alone, plan, stream);
        result = ampc_tune_plan(&t);
        if (result != AMP_OK) {
            plan->algo = before.algo, plan->workspace = before.workspace;
            plan->refused = 0, plan->apart = before.apart;
            plan->tuned = result == AMP_ERR_MEMORY ? -1 : before.tuned;
        }
        if (result == AMP_ERR_MEMORY)
            ampc_tune_log(&t, AMP_LOG_INFO, AMPC_LOG_TUNED, "not measured, for lack of memory");
    }
    ampc_plan_learn(dev, *plan);
    if (result == AMP_OK) __atomic_store_n(&dev->blas.found, 1, __ATOMIC_RELAXED);
    __atomic_sub_fetch(&dev->blas.tuning, 1, __ATOMIC_RELAXED);
    ampc_trim_ordered(dev, ampc_stream(dev, stream));
    return result == AMP_ERR_MEMORY ? AMP_OK : result;
}

/* ---- Plans in a file, for one device and one library, in the format that they have in memory */

enum { AMPC_PLANS_FORMAT = 4 };

struct ampc_plans_head {
    char device[128];
    uint64_t format, cublas, entry, capability, multiprocessors, count;
};
struct ampc_plans_entry {
    ampc_product_key key;
    cublasLtMatmulAlgo_t algo;
    int64_t apart;
};

ampc_plans_head ampc_plans_head_of(const ampc_device *dev) {
    ampc_plans_head head;
    memset(&head, 0, sizeof head);
    memcpy(head.device, dev->info.name,
           sizeof dev->info.name < sizeof head.device ? sizeof dev->info.name : sizeof head.device);
    head.format = AMPC_PLANS_FORMAT;
    head.cublas = cublasLtGetVersion();
    head.entry = sizeof(ampc_plans_entry);
    head.capability = (uint64_t)dev->has.cc;
    head.multiprocessors = (uint64_t)dev->has.multiprocessors;
    return head;
}

/* Calls each(plan) for measured plans in use and for unused ones from a file. */
template <class F> void ampc_for_tuned(ampc_device *dev, F each) {
    for (ampc_plan *first : dev->blas.plans)
        for (ampc_plan *plan = first; plan != NULL; plan = plan->next)
            if (plan->tuned > 0 && !plan->refused && ampc_plan_find(dev, plan->key) == plan)
                each(plan);
}

size_t ampc_plans_save(void *device, void *buffer, size_t size) {
    ampc_device *dev = (ampc_device *)device;
    ampc_plans_head head = ampc_plans_head_of(dev);
    char *at = (char *)buffer + sizeof head;
    ampc_locked locked(&dev->blas.lock);
    size_t bytes;
    if (!__atomic_load_n(&dev->blas.found, __ATOMIC_RELAXED)) return 0;
    ampc_for_tuned(dev, [&](ampc_plan *) { head.count++; });
    bytes = sizeof head + head.count * sizeof(ampc_plans_entry);
    if (size < bytes) return bytes;
    memcpy(buffer, &head, sizeof head);
    ampc_for_tuned(dev, [&](ampc_plan *plan) {
        ampc_plans_entry entry = {plan->key, plan->algo, plan->apart};
        memcpy(at, &entry, sizeof entry);
        at += sizeof entry;
    });
    return bytes;
}

/* Returns whether a file of this size, which begins with `head`, is for this GPU and library.  If not, `why` says for
   what it is. */
bool ampc_plans_fit(const ampc_device *dev, ampc_plans_head head, size_t size, char *why, size_t room) {
    const ampc_plans_head own = ampc_plans_head_of(dev);
    head.device[sizeof head.device - 1] = 0;
    if (head.format != own.format || head.entry != own.entry)
        snprintf(why, room, "their format is of another version");
    else if (memcmp(head.device, own.device, sizeof own.device) != 0 || head.capability != own.capability ||
             head.multiprocessors != own.multiprocessors)
        snprintf(why, room,
                 "they are of another kind of GPU, %s of compute capability %d.%d with %d multiprocessors, and this is "
                 "%s of %d.%d with %d",
                 head.device, (int)head.capability / 10, (int)head.capability % 10, (int)head.multiprocessors,
                 own.device, dev->has.cc / 10, dev->has.cc % 10, dev->has.multiprocessors);
    else if (head.cublas != own.cublas)
        snprintf(why, room, "they are of another version of cuBLASLt, %llu, and this is %llu",
                 (unsigned long long)head.cublas, (unsigned long long)own.cublas);
    else if (head.count != (size - sizeof head) / sizeof(ampc_plans_entry))
        snprintf(why, room, "their number does not fit the file");
    else return true;
    return false;
}

amp_result ampc_plans_load(void *device, const void *buffer, size_t size) {
    ampc_device *dev = (ampc_device *)device;
    ampc_plans_head head;
    char why[480] = "the file ends early", text[560];
    memset(&head, 0, sizeof head);
    memcpy(&head, buffer, size < sizeof head ? size : sizeof head);
    if (size < sizeof head || !ampc_plans_fit(dev, head, size, why, sizeof why)) {
        snprintf(text, sizeof text, "amp_cuda: tuned plans ignored: %s", why);
        dev->host.log(dev->host.user, AMP_LOG_WARNING, AMPC_LOG_PLANS, text);
        return AMP_OK;
    }
    for (uint64_t i = 0; i < head.count; i++) {
        ampc_plans_entry entry;
        ampc_plan_key key = {};
        ampc_plan *plan;
        memcpy((void *)&entry, (const char *)buffer + sizeof head + i * sizeof entry, sizeof entry);
        (ampc_product_key &)key = entry.key;
        AMPC_TRY(ampc_plan_new(dev, key, &plan));
        plan->algo = entry.algo;
        plan->apart = entry.apart != 0;
        plan->tuned = 1;
        ampc_plan_keep(dev, plan);
    }
    return AMP_OK;
}

/* Matrices are used unpacked, except for FP8, where packing rounds them. */
size_t ampc_gemm_pack_size(void *, const amp_k_pack *args) {
    return args->compute == AMP_FP8 ? ampc_fp8_place_of(args->n, args->k, *args->fp8).bytes : 0;
}
amp_result ampc_gemm_pack(void *device, const amp_k_pack *args, void *packed, void *stream) {
    ampc_device *dev = (ampc_device *)device;
    if (args->compute != AMP_FP8)
        return ampc_refuse(dev, AMP_ERR_UNSUPPORTED, "gemm_pack", "this device uses matrices unpacked");
    AMPC_ENTER(dev, "gemm_pack");
    const bool t = args->trans_b != 0;
    amp_mat b = ampc_matrix(args->b, args->b_dtype, t ? args->n : args->k, t ? args->k : args->n, args->ldb);
    return ampc_fp8_round(dev, *args->fp8, b, t ? packed : NULL, t ? NULL : packed, stream);
}

/* ==== 9 >>operators: tensor cores ====
   Products that are summed in fp32, and their operands: 16-bit numbers, or fp32 numbers in TF32.  They need compute
   capability 8.0 or later.  For the layout of a fragment in a warp see PTX ISA, "Matrix Fragments for mma.m16n8k16 with
   floating point type", "Matrix Fragments for mma.m16n8k8" and "ldmatrix". */

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#  define AMPC_TENSOR_CORES 1
#else
#  define AMPC_TENSOR_CORES 0
#endif

#if AMPC_TENSOR_CORES

/* c += a b, where a is 16 x 16 and b is 16 x 8, each as a fragment. */
template <bool BF16>
__device__ __forceinline__ void ampc_mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if defined(__CUDA_ARCH__)
    if (BF16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, "
            "%1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
            "%2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#elif !defined(__CUDACC__)
    coc_mma_m16n8k16(c, a, b, BF16);
#endif
}

/* Loads four 8 x 8 matrices from shared memory.  Lane 8 i + j gives the address of row j of matrix i. */
__device__ __forceinline__ void ampc_matrix_load(uint32_t (&r)[4], ampc_address row) {
#if defined(__CUDA_ARCH__)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
#elif !defined(__CUDACC__)
    coc_ldmatrix_x4(r, (const void *)row, false);
#endif
}
__device__ __forceinline__ void ampc_matrix_load_transposed(uint32_t (&r)[4], ampc_address row) {
#if defined(__CUDA_ARCH__)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
#elif !defined(__CUDACC__)
    coc_ldmatrix_x4(r, (const void *)row, true);
#endif
}

/* c += a b, where a is 16 x 8 and b is 8 x 8, each as a fragment.  Of each operand only the upper 19 bits count, which
   are a TF32 number. */
__device__ __forceinline__ void ampc_mma_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if defined(__CUDA_ARCH__)
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#elif !defined(__CUDACC__)
    coc_mma_m16n8k8_tf32(c, a, b);
#endif
}

/* ---- Operands in the dtype C that products compute in.  Numbers of 16 bits are multiplied as they are, two in a word.
   For TF32, fp32 numbers are rounded.  For fp32, each number becomes the sum of two TF32 numbers, and three products
   replace one.  The fourth would be below 2^-22 of the result. */

#endif /* AMPC_TENSOR_CORES */

/* Whether operands are stored in fp32. */
__host__ __device__ constexpr bool ampc_in_words(amp_dtype c) { return c == AMP_F32 || c == AMP_TF32; }
/* The 16-bit halves of d numbers.  Tiles of fp32 numbers have this many columns of 16 bits. */
[[maybe_unused]] __host__ __device__ constexpr int ampc_halves(int d, amp_dtype c) {
    return ampc_in_words(c) ? 2 * d : d;
}

#if AMPC_TENSOR_CORES

template <amp_dtype C, int N> struct ampc_factor {
    uint32_t high[N], low[C == AMP_F32 ? N : 1];
    /* An infinity, or a number that becomes one when it is rounded, gets low = NaN, and so do its products. */
    __device__ __forceinline__ void set(int i, uint32_t x) {
        if (C == AMP_F32) {
            high[i] = (x + 0x1000u) & 0xffffe000u;
            low[C == AMP_F32 ? i : 0] = ampi_bits_f32(ampi_f32_of_bits(x) - ampi_f32_of_bits(high[i]));
        } else if (C == AMP_TF32) {
#if defined(__CUDA_ARCH__)
            asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(high[i]) : "f"(ampi_f32_of_bits(x)));
#else
            high[i] = ampi_to_tf32(x, 0, 0);
#endif
        } else high[i] = x;
    }
    __device__ __forceinline__ ampc_factor() {}
    template <int K> __device__ __forceinline__ ampc_factor(const uint32_t (&x)[K], int first) {
        AMPC_UNROLL
        for (int i = 0; i < N; i++) set(i, x[first + i]);
    }
};

/* c += a b.  The small products come first. */
template <amp_dtype C>
__device__ __forceinline__ void ampc_product(float (&c)[4], const ampc_factor<C, 4> &a, const ampc_factor<C, 2> &b) {
    if constexpr (C == AMP_F32) {
        ampc_mma_tf32(c, a.low, b.high);
        ampc_mma_tf32(c, a.high, b.low);
    }
    if constexpr (ampc_in_words(C)) ampc_mma_tf32(c, a.high, b.high);
    else ampc_mma<C == AMP_BF16>(c, a.high, b.high);
}

/* ---- Warpgroups: what compute capability 9.0 has beyond mma.  A warpgroup is four warps, from a multiple of 128
   threads on.  It multiplies operands in shared memory.  Bulk copies fetch them, and a gate (an mbarrier) counts these.
   Only code for sm_90a has these instructions.  Elsewhere the functions are empty, and nothing may call them.  See PTX
   ISA, "Asynchronous Warpgroup Level Matrix Instructions", "mbarrier" and "cp.async.bulk.tensor". */

#endif /* AMPC_TENSOR_CORES */

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDACC__)
#  define AMPC_WARPGROUPS 1
#else
#  define AMPC_WARPGROUPS 0
#endif

/* A CUtensorMap, so that cuda.h is not needed.  A kernel takes it as const __grid_constant__. */
struct alignas(64) ampc_tensor_map {
    uint64_t words[16];
};

#if AMPC_TENSOR_CORES

/* The GPU's number of a byte in shared memory.  Tiles start at multiples of 1024 in these numbers. */
[[maybe_unused]] __device__ __forceinline__ uint32_t ampc_shared_number(const void *shared) {
#if defined(__CUDA_ARCH__)
    return ampc_address_of(shared);
#elif !defined(__CUDACC__)
    return coc_shared_number(shared);
#else
    return 0;
#endif
}

/* Makes a gate of 8 bytes in shared memory.  A phase of it completes after `count` arrivals and all expected bytes.
   The thread that made gates calls ampc_gates_ready, and then the block meets in __syncthreads. */
[[maybe_unused]] __device__ __forceinline__ void ampc_gate_init(void *gate, unsigned count) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(ampc_address_of(gate)), "r"(count) : "memory");
#elif !defined(__CUDACC__)
    coc_mbarrier_init(gate, count);
#endif
}
[[maybe_unused]] __device__ __forceinline__ void ampc_gates_ready() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#elif !defined(__CUDACC__)
    coc_mbarriers_ready();
#endif
}
/* Arrives at a gate.  Its phase then also needs `bytes` bytes of copies, which are started after this call. */
[[maybe_unused]] __device__ __forceinline__ void ampc_gate_expect(void *gate, unsigned bytes) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(ampc_address_of(gate)), "r"(bytes) : "memory");
#elif !defined(__CUDACC__)
    coc_mbarrier_arrive(gate, bytes);
#endif
}
[[maybe_unused]] __device__ __forceinline__ void ampc_gate_arrive(void *gate) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(ampc_address_of(gate)) : "memory");
#elif !defined(__CUDACC__)
    coc_mbarrier_arrive(gate, 0);
#endif
}
/* Waits until the phase of this parity has completed.  The first phase has parity 0, and the one before it counts as
   completed.  A gate that never completes is an error of the kernel, which then traps and does not block the GPU. */
[[maybe_unused]] __device__ __forceinline__ void ampc_gate_wait(void *gate, unsigned parity) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("{\n .reg .pred done, late;\n .reg .u32 polls;\n mov.u32 polls, 0;\n again%=:\n"
                 " mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n @done bra passed%=;\n"
                 " add.u32 polls, polls, 1;\n setp.gt.u32 late, polls, 67108864;\n @!late bra again%=;\n trap;\n"
                 " passed%=:\n}"
                 :: "r"(ampc_address_of(gate)), "r"(parity) : "memory");
#elif !defined(__CUDACC__)
    coc_mbarrier_wait(gate, parity);
#endif
}

/* Starts to copy the box of a map at these coordinates, innermost first.  What lies outside the tensor becomes 0. */
[[maybe_unused]] __device__ __forceinline__ void ampc_box_fetch(void *to, const ampc_tensor_map *map, void *gate,
                                                                int c0, int c1, int c2, int c3) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
                 "%4, %5, %6}], [%2];"
                 :: "r"(ampc_address_of(to)), "l"(map), "r"(ampc_address_of(gate)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
#elif !defined(__CUDACC__)
    coc_tensor_fetch(to, map, gate, c0, c1, c2, c3);
#endif
}
/* Starts to copy contiguous bytes.  Addresses and size are multiples of 16. */
[[maybe_unused]] __device__ __forceinline__ void ampc_bytes_fetch(void *to, const void *from, unsigned bytes,
                                                                  void *gate) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(ampc_address_of(to)), "l"(from), "r"(bytes), "r"(ampc_address_of(gate)) : "memory");
#elif !defined(__CUDACC__)
    coc_bulk_fetch(to, from, bytes, gate);
#endif
}

/* The descriptor of an operand in shared memory, in tiles whose rows of 128 bytes are swizzled as by a map with a
   swizzle of 128 bytes.  Groups of 8 rows are `stride` bytes apart.  If the depth runs across rows, `leading` is the
   distance between tiles of 64 columns.  Otherwise it is not used. */
[[maybe_unused]] __device__ __forceinline__ uint64_t ampc_descriptor(const void *tile, unsigned leading,
                                                                     unsigned stride) {
    return (uint64_t)(ampc_shared_number(tile) >> 4 & 0x3fff) | (uint64_t)(leading >> 4 & 0x3fff) << 16 |
           (uint64_t)(stride >> 4 & 0x3fff) << 32 | (uint64_t)1 << 62;
}

/* Must come before the first product of each group: it orders earlier uses of registers before the products. */
[[maybe_unused]] __device__ __forceinline__ void ampc_group_fence() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#elif !defined(__CUDACC__)
    coc_wgmma_fence();
#endif
}
/* Ends a group, which holds the products since the last commit. */
[[maybe_unused]] __device__ __forceinline__ void ampc_group_commit() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#elif !defined(__CUDACC__)
    coc_wgmma_commit();
#endif
}
/* Waits for all groups but the last LEFT.  Until then, sums and left operands in registers may not be used. */
template <int LEFT> __device__ __forceinline__ void ampc_group_wait() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LEFT) : "memory");
#elif !defined(__CUDACC__)
    coc_wgmma_wait(LEFT);
#endif
}

#define AMPC_SUM(c, n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define AMPC_SUMS_32(c, n) \
    AMPC_SUM(c, n), AMPC_SUM(c, n + 1), AMPC_SUM(c, n + 2), AMPC_SUM(c, n + 3), AMPC_SUM(c, n + 4), \
        AMPC_SUM(c, n + 5), AMPC_SUM(c, n + 6), AMPC_SUM(c, n + 7)
#define AMPC_NAMES_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
    "%24, %25, %26, %27, %28, %29, %30, %31"
#define AMPC_NAMES_64 \
    AMPC_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, " \
    "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
/* wgmma.mma_async with the names of its sums, of whether to add to them, and of its other operands. */
#define AMPC_WGMMA(n, type, sums, add, operands) \
    "{\n .reg .pred p;\n setp.ne.b32 p, " add ", 0;\n wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type \
    " {" sums "}, " operands ";\n}"

/* c = a b, or c += a b, where a is 64 x 16 and b is 16 x N.  A warp has the sums of 16 rows, as N / 8 fragments of
   ampc_mma side by side.  a and b are descriptors.  ACROSS: the depth of b runs across the rows of its tiles, not along
   them. */
template <int N, bool BF16, bool ACROSS>
__device__ __forceinline__ void ampc_group_mma(float (&c)[N / 8][4], uint64_t a, uint64_t b, bool add) {
    static_assert(N == 64 || N == 128, "see AMPC_NAMES");
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if constexpr (N == 64 && BF16)
        asm volatile(AMPC_WGMMA("64", "bf16", AMPC_NAMES_32, "%34", "%32, %33, p, 1, 1, 0, %35")
                     : AMPC_SUMS_32(c, 0) : "l"(a), "l"(b), "r"((int)add), "n"((int)ACROSS));
    else if constexpr (N == 64)
        asm volatile(AMPC_WGMMA("64", "f16", AMPC_NAMES_32, "%34", "%32, %33, p, 1, 1, 0, %35")
                     : AMPC_SUMS_32(c, 0) : "l"(a), "l"(b), "r"((int)add), "n"((int)ACROSS));
    else if constexpr (BF16)
        asm volatile(AMPC_WGMMA("128", "bf16", AMPC_NAMES_64, "%66", "%64, %65, p, 1, 1, 0, %67")
                     : AMPC_SUMS_32(c, 0), AMPC_SUMS_32(c, 8) : "l"(a), "l"(b), "r"((int)add), "n"((int)ACROSS));
    else
        asm volatile(AMPC_WGMMA("128", "f16", AMPC_NAMES_64, "%66", "%64, %65, p, 1, 1, 0, %67")
                     : AMPC_SUMS_32(c, 0), AMPC_SUMS_32(c, 8) : "l"(a), "l"(b), "r"((int)add), "n"((int)ACROSS));
#elif !defined(__CUDACC__)
    coc_wgmma(&c[0][0], N, NULL, a, b, ACROSS, BF16, add);
#endif
}
/* The same with a in registers: a warp has its 16 rows, as a fragment of ampc_mma. */
template <int N, bool BF16, bool ACROSS>
__device__ __forceinline__ void ampc_group_mma(float (&c)[N / 8][4], const uint32_t (&a)[4], uint64_t b, bool add) {
    static_assert(N == 64 || N == 128, "see AMPC_NAMES");
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if constexpr (N == 64 && BF16)
        asm volatile(AMPC_WGMMA("64", "bf16", AMPC_NAMES_32, "%37", "{%32, %33, %34, %35}, %36, p, 1, 1, %38")
                     : AMPC_SUMS_32(c, 0)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add), "n"((int)ACROSS));
    else if constexpr (N == 64)
        asm volatile(AMPC_WGMMA("64", "f16", AMPC_NAMES_32, "%37", "{%32, %33, %34, %35}, %36, p, 1, 1, %38")
                     : AMPC_SUMS_32(c, 0)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add), "n"((int)ACROSS));
    else if constexpr (BF16)
        asm volatile(AMPC_WGMMA("128", "bf16", AMPC_NAMES_64, "%69", "{%64, %65, %66, %67}, %68, p, 1, 1, %70")
                     : AMPC_SUMS_32(c, 0), AMPC_SUMS_32(c, 8)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add), "n"((int)ACROSS));
    else
        asm volatile(AMPC_WGMMA("128", "f16", AMPC_NAMES_64, "%69", "{%64, %65, %66, %67}, %68, p, 1, 1, %70")
                     : AMPC_SUMS_32(c, 0), AMPC_SUMS_32(c, 8)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add), "n"((int)ACROSS));
#elif !defined(__CUDACC__)
    coc_wgmma(&c[0][0], N, a, 0, b, ACROSS, BF16, add);
#endif
}

/* Sets how many registers each thread of the warpgroup may use from here on.  The kernel's launch bounds name one block
   per multiprocessor. */
template <int REGISTERS> __device__ __forceinline__ void ampc_registers_less() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(REGISTERS));
#elif !defined(__CUDACC__)
    coc_setmaxnreg(REGISTERS, false);
#endif
}
template <int REGISTERS> __device__ __forceinline__ void ampc_registers_more() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
#elif !defined(__CUDACC__)
    coc_setmaxnreg(REGISTERS, true);
#endif
}

/* Waits at barrier `id` (1 to 15) until `threads` threads have met there.  With ampc_pass, a warp counts as met and
   does not wait. */
[[maybe_unused]] __device__ __forceinline__ void ampc_meet(int id, int threads) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
#elif !defined(__CUDACC__)
    coc_named_barrier(id, threads, true);
#endif
}
[[maybe_unused]] __device__ __forceinline__ void ampc_pass(int id, int threads) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory");
#elif !defined(__CUDACC__)
    coc_named_barrier(id, threads, false);
#endif
}

/* ---- Tiles, which are rows of D 16-bit numbers in shared memory.  Exclusive-or with the row's number spreads the same
   piece of 8 neighbouring rows over all banks.  Therefore neither copies nor ldmatrix have bank conflicts.  A row of
   fp32 numbers is one of twice as many halves: an 8 x 8 matrix of ldmatrix then has 8 x 4 numbers, as TF32 needs. */

template <int D> __device__ __forceinline__ int ampc_tile_at(int row, int piece) {
    return row * 2 * D + ((piece ^ (row & 7)) << 4);
}
/* The address `by` pieces after that of an even piece of a row, in a tile that starts at a multiple of 128. */
__device__ __forceinline__ ampc_address ampc_tile_on(ampc_address at, int by) {
    return (at ^ (ampc_address)((by & 7) << 4)) + (ampc_address)(by >> 3) * 128;
}

/* Starts to copy ROWS rows of `dim` numbers, which are `stride` bytes apart.  Numbers from dim on, and rows from
   `count` on, become 0. */
template <int D, int ROWS, int THREADS>
__device__ __forceinline__ void ampc_tile_fetch(unsigned char *tile, const void *from, int64_t stride, int dim,
                                                int count) {
    const int pieces = D / 8, step = THREADS / pieces;
    int thread = (int)ampc_afresh(threadIdx.x), piece = thread % pieces, row = thread / pieces;
    const char *p = (const char *)from + row * stride + piece * 16;
    static_assert(step % 8 == 0 && ROWS % step == 0, "every pass has the same exclusive-or");
    if (8 * piece >= dim) count = 0;
    AMPC_UNROLL
    for (int i = 0; i < ROWS; i += step, p += step * stride)
        ampc_copy_async(tile + ampc_tile_at<D>(row, piece) + i * 2 * D, p, row + i < count);
}

/* 16 M rows of D numbers, which are left operands of products.  They are held in registers (HELD), or loaded for each
   product. */
template <int D, int M, bool HELD> struct ampc_tile_rows {
    uint32_t x[HELD ? D / 16 : 1][M][4];
    const unsigned char *rows;
    static __device__ __forceinline__ ampc_address at(const unsigned char *tile) {
        int lane = (int)ampc_afresh(threadIdx.x) % 32;
        return ampc_address_of(tile + ampc_tile_at<D>(lane % 16, lane / 16));
    }
    static __device__ __forceinline__ void load(uint32_t (&to)[M][4], ampc_address from, int k) {
        AMPC_UNROLL
        for (int m = 0; m < M; m++) ampc_matrix_load(to[m], ampc_tile_on(from, 2 * k) + m * 32 * D);
    }
    /* `tile` holds the rows.  Without HELD, it must hold them until the last product. */
    __device__ __forceinline__ explicit ampc_tile_rows(const unsigned char *tile) : rows(tile) {
        AMPC_UNROLL
        for (int k = 0; k < (HELD ? D / 16 : 0); k++) load(x[k], at(tile), k);
    }
};

/* c = a b^T, where a has 16 M rows and b has 8 N rows of D halves. */
template <int D, amp_dtype C, int M, int N, bool HELD>
__device__ __forceinline__ void ampc_tile_scores(float (&c)[M][N][4], const ampc_tile_rows<D, M, HELD> &a,
                                                 const unsigned char *b) {
    int lane = (int)ampc_afresh(threadIdx.x) % 32;
    ampc_address b_at = ampc_address_of(b + ampc_tile_at<D>(lane % 8 + lane / 16 * 8, lane / 8 % 2));
    ampc_address a_at = HELD ? b_at : a.at(a.rows);
    AMPC_UNROLL
    for (int m = 0; m < M; m++) {
        AMPC_UNROLL
        for (int n = 0; n < N; n++) c[m][n][0] = c[m][n][1] = c[m][n][2] = c[m][n][3] = 0.0f;
    }
    auto step = [&](const uint32_t (&x)[M][4], int k) {
        ampc_factor<C, 4> left[M];
        AMPC_UNROLL
        for (int m = 0; m < M; m++) left[m] = ampc_factor<C, 4>(x[m], 0);
        AMPC_UNROLL
        for (int n = 0; n < N; n += 2) {
            uint32_t y[4];
            ampc_matrix_load(y, ampc_tile_on(b_at, 2 * k) + n * 16 * D);
            const ampc_factor<C, 2> first(y, 0), second(y, 2);
            AMPC_UNROLL
            for (int m = 0; m < M; m++) {
                ampc_product(c[m][n], left[m], first);
                ampc_product(c[m][n + 1], left[m], second);
            }
        }
    };
    AMPC_UNROLL
    for (int k = 0; k < D / 16; k++) {
        if constexpr (HELD) step(a.x[k], k);
        else {
            uint32_t x[M][4];
            a.load(x, a_at, k);
            step(x, k);
        }
    }
}

/* c += w b for operands in fp32, see ampc_tile_weigh.  The sum over 8 rows may be taken in any order.  Row 2 t + e
   therefore takes the place of row t + 4 e, so that each lane has the weights that it needs.  Loads have no bank
   conflicts. */
template <int D, amp_dtype C, int M, int N>
__device__ __forceinline__ void ampc_tile_weigh_words(float (&c)[M][D / 8][4], const float (&w)[M][N][4],
                                                      const unsigned char *b) {
    const int lane = (int)ampc_afresh(threadIdx.x) % 32, row = lane % 4 * 2, column = lane / 4;
    const int at[2] = {ampc_tile_at<2 * D>(row, column / 4) + column % 4 * 4,
                       ampc_tile_at<2 * D>(row + 1, column / 4) + column % 4 * 4};
    AMPC_UNROLL
    for (int k = 0; k < N; k++) {
        ampc_factor<C, 4> x[M];
        AMPC_UNROLL
        for (int m = 0; m < M; m++) {
            AMPC_UNROLL
            for (int i = 0; i < 4; i++) x[m].set(i, ampi_bits_f32(w[m][k][i % 2 * 2 + i / 2]));
        }
        AMPC_UNROLL
        for (int n = 0; n < D / 8; n++) {
            ampc_factor<C, 2> y;
            AMPC_UNROLL
            for (int e = 0; e < 2; e++) {
                const int from = (at[e] ^ (2 * n & 7) << 4) + (2 * n >> 3) * 128;
                y.set(e, *(const uint32_t *)(b + from + k * 32 * D));
            }
            AMPC_UNROLL
            for (int m = 0; m < M; m++) ampc_product(c[m][n], x[m], y);
        }
    }
}

/* c += w b, where w is 16 M x 8 N weights in the layout of ampc_tile_scores, and b has 8 N rows of D numbers.  The
   weights are rounded as operands are. */
template <int D, amp_dtype C, int M, int N>
__device__ __forceinline__ void ampc_tile_weigh(float (&c)[M][D / 8][4], const float (&w)[M][N][4],
                                                const unsigned char *b) {
    int lane = (int)ampc_afresh(threadIdx.x) % 32;
    ampc_address b_at = ampc_address_of(b + ampc_tile_at<D>(lane % 16, lane / 16));
    AMPC_UNROLL
    for (int k = 0; k < N; k += 2) {
        uint32_t x[M][4];
        AMPC_UNROLL
        for (int m = 0; m < M; m++) {
            AMPC_UNROLL
            for (int i = 0; i < 4; i++)
                x[m][i] = ampc_pair(w[m][k + i / 2][2 * (i % 2)], w[m][k + i / 2][2 * (i % 2) + 1], C);
        }
        AMPC_UNROLL
        for (int n = 0; n < D / 8; n += 2) {
            uint32_t y[4];
            ampc_matrix_load_transposed(y, ampc_tile_on(b_at, n) + k * 16 * D);
            AMPC_UNROLL
            for (int m = 0; m < M; m++) {
                ampc_mma<C == AMP_BF16>(c[m][n], x[m], {y[0], y[1]});
                ampc_mma<C == AMP_BF16>(c[m][n + 1], x[m], {y[2], y[3]});
            }
        }
    }
}

template <int D, amp_dtype C, int M, int N>
__device__ __forceinline__ void ampc_tile_add(float (&c)[M][D / 8][4], const float (&w)[M][N][4],
                                              const unsigned char *b) {
    if constexpr (ampc_in_words(C)) ampc_tile_weigh_words<D, C>(c, w, b);
    else ampc_tile_weigh<D, C>(c, w, b);
}

/* Rounds factor times 16 M rows of results as they are stored, and writes the first `dim` numbers of the first `count`
   rows.  `scratch` is the warp's part of a tile. */
template <int D, amp_dtype C, int M>
__device__ __forceinline__ void ampc_tile_write(const float (&c)[M][D / 8][4], const float (&factor)[M][2],
                                                unsigned char *scratch, void *to, int64_t stride, int dim, int count) {
    const int H = ampc_halves(D, C), pieces = H / 8, step = 32 / pieces;
    int lane = (int)threadIdx.x % 32, piece = lane % pieces, row = lane / pieces;
    __syncwarp();
    AMPC_UNROLL
    for (int m = 0; m < M; m++) {
        AMPC_UNROLL
        for (int n = 0; n < D / 8; n++) {
            AMPC_UNROLL
            for (int h = 0; h < 2; h++) {
                const int at = 16 * m + 8 * h + lane / 4;
                const float x = ampc_mul(c[m][n][2 * h], factor[m][h]), y = ampc_mul(c[m][n][2 * h + 1], factor[m][h]);
                if constexpr (ampc_in_words(C))
                    *(float2 *)(scratch + ampc_tile_at<H>(at, 2 * n + lane % 4 / 2) + lane % 2 * 8) = float2{x, y};
                else *(uint32_t *)(scratch + ampc_tile_at<H>(at, n) + lane % 4 * 4) = ampc_pair(x, y, C);
            }
        }
    }
    __syncwarp();
    char *p = (char *)to + row * stride + piece * 16;
    if (8 * piece >= H / D * dim) count = 0;
    AMPC_UNROLL
    for (int i = 0; i < 16 * M; i += step, p += step * stride)
        if (row + i < count) ampc_put_bytes<16>(p, ampc_get_bytes<16>(scratch + ampc_tile_at<H>(row + i, piece)));
}

#endif /* AMPC_TENSOR_CORES */

/* ==== 9 >>operators: attention on tensor cores ====
   These kernels follow FlashAttention-2 (Dao 2023).  They compute in fp16, bf16, TF32 or fp32, for heads of D = 64 and
   128 numbers, and other heads are padded with zeros.  A block owns 128 queries or keys of one head.  The other side
   comes in tiles, which are fetched into one half of a double buffer while the other half is processed.  Tiles that the
   mask hides are neither fetched nor computed, and fully visible tiles are not tested number by number.  The registers
   of a warp hold its sums, the weights between two products and, if there is room, the rows that it owns.

   Backward takes two passes.  One thread computes each sum, in a fixed order, without atomic operations or an fp32 copy
   of dq.  Blocks that own keys compute dk and dv.  Blocks that own queries compute the weights again and dq.  That is 7
   products, where one pass that sums dq over blocks takes 5.  In return, no weight goes through memory. */

/* From this size on, the rounding of a maximum in powers of 2 is no longer negligible.  Such a maximum is subtracted
   before the scores are scaled. */
#define AMPC_FLASH_STEEP 1048576.0f

/* Weights follow a row's maximum only when it has grown by more than this power of 2.  That seldom happens after the
   first tiles.  Until it happens, weights may be above 1, and o and the sums need not shrink.  This is
   FlashAttention-4's conditional rescaling. */
#define AMPC_FLASH_LAG 8.0f

enum ampc_flash_pass { AMPC_FORWARD, AMPC_TO_QUERIES, AMPC_TO_KEYS };
enum {
    AMPC_FLASH_OWN = 128,           /* rows of a block */
    AMPC_FLASH_LONGEST = 1 << 28,   /* the most queries, and the most keys */
    AMPC_FLASH_FAR = 1 << 29,       /* beyond any distance between a query and a key */
    AMPC_SWEEP_BYTES = 512          /* for a block's ampc_sweep, at the end of its shared memory */
};
__host__ __device__ constexpr int ampc_flash_width(int64_t dim) { return dim <= 64 ? 64 : 128; }
/* A pass for heads of D numbers.  `threads` are those of a block, and `blocks` those per multiprocessor.  `tile` is how
   many rows a tile of the other side has, and `columns` is how many of them go through the products at a time.  `held`
   is how many of the own operands are held in registers.  With four warps, each has 32 own rows, and with eight, each
   has 16.  A pass's sums take most of its registers, and dk and dv leave no room for k and v.  Forward gains more from
   a third block, or from more columns, than from q in registers.  For operands in fp32, `words` is true.  Their tiles
   are twice as large, and their two parts take registers, so they have fewer columns or rows.  For heads of 64 numbers
   a block fits the 99 KB of the smaller GPUs, and for heads of 128 the 163 KB of 8.0. */
struct ampc_flash_shape { int threads, blocks, tile, columns, held; };
__host__ __device__ constexpr ampc_flash_shape ampc_flash_shape_of(int d, ampc_flash_pass pass, bool words) {
    if (words && d == 64) return ampc_flash_shape{128, 2, 32, pass == AMPC_TO_KEYS ? 16 : 32, 0};
    if (words) return pass == AMPC_FORWARD ? ampc_flash_shape{256, 1, 32, 32, 0} : ampc_flash_shape{256, 1, 16, 16, 0};
    if (pass == AMPC_FORWARD)
        return d == 64 ? ampc_flash_shape{128, 3, 64, 32, 0} : ampc_flash_shape{128, 2, 64, 32, 0};
    if (pass == AMPC_TO_QUERIES)
        return d == 64 ? ampc_flash_shape{128, 2, 64, 32, 2} : ampc_flash_shape{256, 1, 64, 64, 2};
    return d == 64 ? ampc_flash_shape{128, 2, 64, 32, 0} : ampc_flash_shape{256, 1, 32, 32, 0};
}
/* If registers hold all own rows, the second half of the double buffer reuses their shared memory. */
__host__ __device__ constexpr bool ampc_flash_holds_all(int d, ampc_flash_pass pass, bool words) {
    return ampc_flash_shape_of(d, pass, words).held == 2;
}
__host__ __device__ constexpr size_t ampc_flash_shared(int d, ampc_flash_pass pass, bool words) {
    return (size_t)(AMPC_FLASH_OWN * (pass == AMPC_FORWARD ? 1 : 2) +
                    (ampc_flash_holds_all(d, pass, words) ? 2 : 4) * ampc_flash_shape_of(d, pass, words).tile) *
               (words ? 4 : 2) * (size_t)d
         + (pass == AMPC_FORWARD ? 0 : 128 * sizeof(float2)) + AMPC_SWEEP_BYTES;
}

/* A head and the rows of it that a block owns. */
struct ampc_flash_place { int b, h, tile; };

/* One operand, with strides in bytes. */
struct ampc_flash_operand {
    char *data;
    int64_t batch, row, head;
#if AMPC_TENSOR_CORES
    __device__ char *at(const ampc_flash_place &p, int64_t i) const {
        return data + p.b * batch + i * row + p.h * head;
    }
#endif
};

/* An arbitrary mask as bits.  Bit j % 32 of word j / 32 of a row says whether key j is visible.  Rows are padded with
   zeros to a multiple of 128 keys.  Strides are in words. */
struct ampc_flash_bits {
    uint32_t *data;                 /* NULL: the mask is of another kind */
    int64_t batch, head, row;
};

/* One launch.  In AMPC_FORWARD, own is q, others are k and v, and out is o.  In AMPC_TO_QUERIES, own are q and do,
   others are k and v, and out is dq.  In AMPC_TO_KEYS, own are k and v, others are q and do, and out are dk and dv.
   Blocks are numbered so that `together` heads, whose operands fit the L2 cache, come in sequence.  The sequence begins
   with the tiles that see most, which are the last queries or the first keys. */
struct ampc_flash_call {
    int64_t heads, all_heads;       /* of a sequence, of the batch */
    int queries, keys, dim, together, tiles;
    float scale, factor;            /* of the scores, with log2(e); of the first result */
    bool hides;
    amp_mask mask;
    ampc_flash_bits bits;
    ampc_flash_operand own[2], others[2], out[2];
    float *lse;
    const float2 *stats;            /* backward: lse, as ampc_flash_power takes it, and delta of every query */
    int64_t padded;                 /* queries of a head in stats, padded to a multiple of 128 */
    /* backward: the sums over each warp's rows of the results, [batch, runs, results, heads * dim], or NULL */
    float *sums;
    int runs;                       /* of a sequence */
};

#if AMPC_TENSOR_CORES

/* The keys that query i sees.  They are those with low(i) <= j < high(i), where both bounds grow with i, and those with
   j < first(i).  Of these, query i sees the keys in its document that are set in the bits. */
struct ampc_band {
    int queries, length, floor, above, below, start, offset;
    /* globals: global positions; global_queries: as many if the mask looks both ways, else 0; ahead: see
       first_globals */
    int globals, global_queries, ahead;
    bool special;                   /* low and high alone do not decide */
    const int32_t *documents;       /* per key; NULL: one document */
    const uint32_t *bits;           /* of the head; NULL: all visible */
    int64_t words;                  /* of a row of bits */
    __device__ int low(int i) const { return min(length, max(i - below, 0)); }
    __device__ int high(int i) const { return i < start ? 0 : min(length, max(i + above, floor)); }
    /* first_globals is how many global keys query i may see.  For a global query, first is the number of all keys, and
       for others it is first_globals. */
    __device__ int first_globals(int i) const { return i < start ? 0 : min(min(length, globals), max(i + ahead, 0)); }
    __device__ int first(int i) const {
        return (unsigned)(i + offset) < (unsigned)global_queries ? length : first_globals(i);
    }
    /* The first query whose high, or whose low, is beyond key j, or AMPC_FLASH_FAR if there is none. */
    __device__ int sees_beyond(int j) const {
        return j >= length ? (int)AMPC_FLASH_FAR : max(start, floor > j ? 0 : max(j - above + 1, 0));
    }
    __device__ int hides_up_to(int j) const { return j >= length ? (int)AMPC_FLASH_FAR : max(j + below + 1, 0); }
    /* The document of the key or query at a position.  Beyond them it is any document. */
    __device__ int document(int position) const { return documents[min(max(position, 0), queries + offset - 1)]; }
    /* The bits of the 32 keys around key j.  Beyond the queries they are any bits. */
    __device__ uint32_t word(int i, int j) const { return bits[min(i, queries - 1) * words + j / 32]; }
    __device__ bool sees(int i, int j) const {
        return (j < first(i) || (j >= low(i) && j < high(i))) &&
               (documents == NULL || document(j) == document(i + offset)) &&
               (bits == NULL || (word(i, j) >> j % 32 & 1));
    }
};

__device__ __forceinline__ ampc_band ampc_band_of(const ampc_flash_call &a, const ampc_flash_place &p) {
    const amp_mask &mask = a.mask;
    int offset = a.keys - a.queries, window = (int)min(mask.window, (int64_t)AMPC_FLASH_FAR);
    bool windowed = mask.kind == AMP_MASK_WINDOW || mask.kind == AMP_MASK_WINDOW_GLOBAL,
         both = windowed && mask.bidirectional;
    ampc_band s;
    s.queries = a.queries;
    s.offset = offset;
    s.length = mask.lengths ? max(0, min(mask.lengths[p.b], a.keys)) : a.keys;
    s.floor = mask.kind == AMP_MASK_NONE || a.bits.data ? a.keys
              : mask.kind == AMP_MASK_PREFIX            ? max(mask.prefix[p.b], 0)
                                                        : 0;
    s.above = both ? offset + window : offset + 1;
    s.below = windowed ? window - 1 - offset : AMPC_FLASH_FAR;
    s.globals = mask.kind == AMP_MASK_WINDOW_GLOBAL ? (int)min(mask.global, (int64_t)a.keys) : 0;
    s.global_queries = both ? s.globals : 0;
    s.ahead = both ? (int)AMPC_FLASH_FAR : offset + 1;
    s.documents = mask.documents ? mask.documents + (int64_t)p.b * a.keys : NULL;
    s.bits = a.bits.data ? a.bits.data + p.b * a.bits.batch + p.h * a.bits.head : NULL;
    s.words = a.bits.row;
    s.start = s.documents ? -offset : 0;        /* queries before the first key have no document */
    s.special = s.documents || s.bits || s.globals > 0;
    return s;
}

/* Finds the least and the largest document number at n positions.  All lanes of a warp must call it. */
__device__ __forceinline__ void ampc_band_documents(const ampc_band &s, int from, int n, int &least, int &most) {
    least = INT32_MAX;
    most = INT32_MIN;
    AMPC_NO_UNROLL
    for (int i = (int)threadIdx.x % 32; i < n; i += 32) {
        int document = s.document(from + i);
        least = min(least, document);
        most = max(most, document);
    }
    least = __reduce_min_sync(0xffffffffu, least);
    most = __reduce_max_sync(0xffffffffu, most);
}

/* Finds whether some and whether all of the bits of n queries and of `columns` keys are set.  All lanes of a warp must
   call it. */
__device__ __forceinline__ void ampc_band_bits(const ampc_band &s, int query, int n, int key, int columns, bool &some,
                                               bool &all) {
    some = false;
    all = true;
    AMPC_NO_UNROLL
    for (int i = (int)threadIdx.x % 32; i < n; i += 32) {
        AMPC_NO_UNROLL
        for (int j = key; j < key + columns; j += 32) {
            uint32_t full = columns < 32 ? (1u << columns) - 1 : 0xffffffffu,
                     seen = s.word(query + i, j) >> key % 32 & full;
            some = some || seen != 0;
            all = all && seen == full;
        }
    }
    some = __any_sync(0xffffffffu, some) != 0;
    all = __all_sync(0xffffffffu, all) != 0;
}

enum { AMPC_HIDDEN, AMPC_PARTLY, AMPC_OPEN };

/* On the other side, only [some_from, some_to) is visible to any row, and all of [all_from, all_to) is visible to all
   rows. */
struct ampc_reach { int some_from, some_to, all_from, all_to; };

/* The reach of the queries or keys [from, to). */
__device__ __forceinline__ ampc_reach ampc_reach_of(const ampc_band &s, bool keys, int from, int to) {
    if (keys) return ampc_reach{s.sees_beyond(from), s.hides_up_to(to - 1), s.sees_beyond(to - 1), s.hides_up_to(from)};
    to = min(to, s.queries);
    if (from >= to) return ampc_reach{0, 0, 0, 0};
    return ampc_reach{s.low(from), s.high(to - 1), s.low(to - 1), s.high(from)};
}

/* The same through global positions. */
__device__ __forceinline__ ampc_reach ampc_reach_of_globals(const ampc_band &s, bool keys, int from, int to) {
    const int none = AMPC_FLASH_FAR, here = max(0, -s.offset), globals = min(s.length, s.globals);
    ampc_reach r = {none, 0, none, 0};
    if (globals == 0 || (!keys && from >= s.queries)) return r;
    if (!keys) {
        to = min(to, s.queries);
        bool some = from + s.offset < s.global_queries && to + s.offset > 0;
        bool all = from + s.offset >= 0 && to + s.offset <= s.global_queries;
        return ampc_reach{0, some ? s.length : s.first_globals(to - 1), 0, all ? s.length : s.first_globals(from)};
    }
    if (from < s.length) r.some_from = here, r.some_to = s.global_queries - s.offset;
    if (to <= s.length) r.all_from = here, r.all_to = s.global_queries - s.offset;
    if (from < globals) r.some_from = max(s.start, from - s.ahead + 1), r.some_to = none;
    if (to <= globals) r.all_from = max(s.start, to - s.ahead), r.all_to = none;
    return r;
}

__device__ __forceinline__ ampc_flash_place ampc_flash_here(const ampc_flash_call &a, bool last_first) {
    int64_t block = blockIdx.x, first = block / ((int64_t)a.together * a.tiles) * a.together;
    int64_t within = block - first * a.tiles, count = min((int64_t)a.together, a.all_heads - first);
    int64_t head = first + within % count;
    int tile = (int)(within / count);
    return ampc_flash_place{(int)(head / a.heads), (int)(head % a.heads), last_first ? a.tiles - 1 - tile : tile};
}

/* A block's own queries or keys, from row `own` on, and its path over the other side.  It is in shared memory, because
   the loop has no registers to spare. */
template <bool KEYS> struct ampc_sweep {
    /* parts: of the warps or warpgroups.  [0]: by the band; [1]: through global positions */
    ampc_reach parts[8][2], block[2];
    ampc_flash_place place;
    ampc_band band;
    int own, tile, first, end;      /* tile: its rows; first, end: on the other side */
    /* One thread calls this for each of the `count` parts that share the own rows equally. */
    __device__ __forceinline__ void open(const ampc_flash_call &a, int tile_rows, int part, int count) {
        const ampc_flash_place here = ampc_flash_here(a, !KEYS);
        const ampc_band seen = ampc_band_of(a, here);
        int from = here.tile * AMPC_FLASH_OWN, each = AMPC_FLASH_OWN / count;
        parts[part][0] = ampc_reach_of(seen, KEYS, from + part * each, from + (part + 1) * each);
        parts[part][1] = ampc_reach_of_globals(seen, KEYS, from + part * each, from + (part + 1) * each);
        if (part != 0) return;
        const ampc_reach near = ampc_reach_of(seen, KEYS, from, from + AMPC_FLASH_OWN);
        const ampc_reach global = ampc_reach_of_globals(seen, KEYS, from, from + AMPC_FLASH_OWN);
        block[0] = near;
        block[1] = global;
        place = here;
        band = seen;
        own = from;
        tile = tile_rows;
        first = max(0, min(near.some_from, global.some_from < global.some_to ? global.some_from : (int)AMPC_FLASH_FAR));
        first = first / tile * tile;
        end = min(max(near.some_to, global.some_to), KEYS ? a.queries : a.keys);
    }
    /* How the rows [from, from + n), which have these reaches, see the columns [other, other + columns). */
    __device__ __forceinline__ int state(const ampc_reach (&r)[2], int from, int n, int other, int columns) const {
        int to = other + columns, least[2], most[2];
        bool hidden = other >= r[0].some_to || to <= r[0].some_from, open = other >= r[0].all_from && to <= r[0].all_to;
        if (!band.special) return hidden ? AMPC_HIDDEN : open ? AMPC_OPEN : AMPC_PARTLY;
        open = open || (other >= r[1].all_from && to <= r[1].all_to);
        if (hidden && (other >= r[1].some_to || to <= r[1].some_from)) return AMPC_HIDDEN;
        if (band.bits) {
            bool some, all;
            ampc_band_bits(band, KEYS ? other : from, KEYS ? columns : n, KEYS ? from : other, KEYS ? n : columns, some,
                           all);
            if (!some) return AMPC_HIDDEN;
            open = open && all;
        }
        if (band.documents == NULL) return open ? AMPC_OPEN : AMPC_PARTLY;
        ampc_band_documents(band, from + (KEYS ? 0 : band.offset), n, least[0], most[0]);
        ampc_band_documents(band, other + (KEYS ? band.offset : 0), columns, least[1], most[1]);
        if (most[0] < least[1] || most[1] < least[0]) return AMPC_HIDDEN;
        return open && min(least[0], least[1]) == max(most[0], most[1]) ? AMPC_OPEN : AMPC_PARTLY;
    }
    /* The next tile from `other` on that is not hidden.  If there is none, it is `end` or more.  Global positions come
       before the band. */
    __device__ __forceinline__ int next(int other) const {
        if (!band.special) return other;
        if (other >= block[1].some_to) other = max(other, block[0].some_from / tile * tile);
        while (other < end && state(block, own, AMPC_FLASH_OWN, other, tile) == AMPC_HIDDEN) other += tile;
        return other;
    }
    __device__ __forceinline__ bool sees(int mine, int other) const {
        return KEYS ? band.sees(other, mine) : band.sees(mine, other);
    }
    /* The part of `hide` for the bits.  `mine` and `other` are the lane's. */
    template <int M, int N>
    __device__ __forceinline__ void hide_unset(int mine, int other, float (&x)[M][N][4], float (&y)[M][N][4],
                                               float value) const {
        const int each = KEYS ? 2 * M : N < 4 ? 2 * N : 8;      /* a query's keys in a word */
        AMPC_UNROLL
        for (int k = 0; k < 4 * M * N; k += each) {
            int r = KEYS ? 0 : k / (2 * N), c = KEYS ? k / each : k % (2 * N),
                i = KEYS ? other + c / 2 * 8 + c % 2 : mine + 8 * r;
            int j = KEYS ? mine : other + c / 2 * 8;
            uint32_t seen = band.word(i, j) >> j % 32;
            AMPC_UNROLL
            for (int e = 0; e < each; e++) {
                int row = KEYS ? e : r, column = KEYS ? c : c + e;
                if (!(seen >> (KEYS ? 8 * e : e / 2 * 8 + e % 2) & 1))
                    x[row / 2][column / 2][row % 2 * 2 + column % 2] =
                        y[row / 2][column / 2][row % 2 * 2 + column % 2] = value;
            }
        }
    }
    /* Sets hidden elements of x and y to `value`.  Their rows are those from `mine` on, and their columns those from
       `other` on. */
    template <int M, int N>
    __device__ __forceinline__ void hide(int mine, int other, float (&x)[M][N][4], float (&y)[M][N][4],
                                         float value) const {
        int lane = (int)threadIdx.x % 32;
        mine += lane / 4;
        other += lane % 4 * 2;
        AMPC_UNROLL
        for (int k = 0; k < 4 * M * N; k++) {           /* along keys, so that a query's bounds are needed once */
            int r = KEYS ? k % (2 * M) : k / (2 * N), c = KEYS ? k / (2 * M) : k % (2 * N);
            int row = mine + 8 * r, column = other + c / 2 * 8 + c % 2, j = KEYS ? row : column,
                i = KEYS ? column : row;
            bool hidden = (j >= band.first(i)) & ((j < band.low(i)) | (j >= band.high(i)));
            x[r / 2][c / 2][r % 2 * 2 + c % 2] = hidden ? value : x[r / 2][c / 2][r % 2 * 2 + c % 2];
            y[r / 2][c / 2][r % 2 * 2 + c % 2] = hidden ? value : y[r / 2][c / 2][r % 2 * 2 + c % 2];
        }
        if (band.bits) hide_unset(mine, other, x, y, value);
        if (band.documents == NULL) return;
        AMPC_UNROLL
        for (int c = 0; c < 2 * N; c++) {
            int document = band.document(other + c / 2 * 8 + c % 2 + (KEYS ? band.offset : 0));
            AMPC_UNROLL
            for (int r = 0; r < 2 * M; r++)
                if (band.document(mine + 8 * r + (KEYS ? 0 : band.offset)) != document)
                    x[r / 2][c / 2][r % 2 * 2 + c % 2] = y[r / 2][c / 2][r % 2 * 2 + c % 2] = value;
        }
    }
};

/* A warp's first row in its block. */
template <int M> __device__ __forceinline__ int ampc_warp_row() { return (int)ampc_afresh(threadIdx.x) / 32 * 16 * M; }

static_assert(sizeof(ampc_sweep<true>) <= AMPC_SWEEP_BYTES, "it fits");

/* Starts to copy the rows from i on of two operands into two consecutive tiles.  Rows have D and dim halves. */
template <int D, int ROWS, int THREADS>
__device__ __forceinline__ void ampc_flash_fetch(unsigned char *tiles, const ampc_flash_operand (&x)[2],
                                                 const ampc_flash_place &p, int dim, int i, int rows) {
    ampc_tile_fetch<D, ROWS, THREADS>(tiles, x[0].at(p, i), x[0].row, dim, rows - i);
    ampc_tile_fetch<D, ROWS, THREADS>(tiles + ROWS * 2 * D, x[1].at(p, i), x[1].row, dim, rows - i);
}

/* ---- Hidden keys and queries may hold infinities or NaN.  A weight of 0 times such a number must give 0, but tensor
   cores give NaN.  If that happens under a mask, a warp computes its rows again, one by one.  With operands in fp32 it
   does so without a mask too.  In fp32 the two parts of an infinity give NaN where the infinity itself may give another
   number, and a tile's rows beyond the last query are 0, which times an infinite key is NaN. */

/* A lane's D / 32 numbers of a row. */
template <int D, amp_dtype C> struct ampc_flash_part {
    float x[D / 32];
    __device__ __forceinline__ ampc_flash_part() {
        AMPC_UNROLL
        for (int i = 0; i < D / 32; i++) x[i] = 0.0f;
    }
    /* How many of this lane's numbers are within dim.  The count may be negative. */
    static __device__ __forceinline__ int count(int dim) { return dim - (int)threadIdx.x % 32 * (D / 32); }
    __device__ __forceinline__ ampc_flash_part(const char *row, int dim) : ampc_flash_part() {
        const unsigned first = threadIdx.x % 32 * (D / 32);
        const uint16_t *p = (const uint16_t *)row + first;
        AMPC_UNROLL
        for (int i = 0; i < D / 32; i++) {
            if (i >= count(dim)) continue;
            if constexpr (ampc_in_words(C)) x[i] = ampc_rounded(((const float *)row)[first + i], C);
            else x[i] = C == AMP_BF16 ? amp_f32_from_bf16(p[i]) : ampc_f16_value(p[i]);
        }
    }
    __device__ __forceinline__ float dot(const ampc_flash_part &y) const {
        float sum = 0.0f;
        AMPC_UNROLL
        for (int i = 0; i < D / 32; i++) sum = ampc_fma(x[i], y.x[i], sum);
        return ampc_warp_sum(sum);
    }
    __device__ __forceinline__ void add(float weight, const ampc_flash_part &y, bool hides) {
        weight = ampc_rounded(weight, C);
        if (weight == 0.0f && hides) return;
        AMPC_UNROLL
        for (int i = 0; i < D / 32; i++) x[i] = ampc_fma(weight, y.x[i], x[i]);
    }
    __device__ __forceinline__ void write(char *row, float factor, int dim) const {
        const unsigned first = threadIdx.x % 32 * (D / 32);
        uint16_t *p = (uint16_t *)row + first;
        AMPC_UNROLL
        for (int i = 0; i < D / 32; i++) {
            if (i >= count(dim)) continue;
            if constexpr (ampc_in_words(C)) ((float *)row)[first + i] = x[i] * factor;
            else p[i] = C == AMP_BF16 ? ampc_bf16_bits(x[i] * factor) : ampc_f16_bits(x[i] * factor);
        }
    }
};

/* The exponent of 2 of a score's weight, at most `most`.  `stat` is the maximum or log-sum-exp to subtract.  It is
   given in powers of 2 while its rounding is negligible, and otherwise as twice itself. */
__device__ __forceinline__ float ampc_flash_power(const ampc_flash_call &a, float score, float stat,
                                                  float most = 0.0f) {
    float x = fabsf(stat) < AMPC_FLASH_STEEP ? ampc_fma(score, a.scale, -stat)
                                             : ampc_mul(ampc_mul(score, a.factor) - 0.5f * stat, AMPC_LOG2_E);
    return x > most ? most : x;
}

/* Computes row `mine` of the results.  `stats` are those of the other side's queries in AMPC_TO_KEYS, and of this query
   otherwise. */
template <ampc_flash_pass PASS, int D, amp_dtype C>
__device__ __forceinline__ void ampc_flash_recompute_row(const ampc_flash_call &a,
                                                         const ampc_sweep<PASS == AMPC_TO_KEYS> &sweep, int mine,
                                                         const float2 *stats) {
    const ampc_flash_place &p = sweep.place;
    typedef ampc_flash_part<D, C> part;
    const bool hides = !ampc_in_words(C) || a.hides;
    const part x(a.own[0].at(p, mine), a.dim), y = PASS == AMPC_FORWARD ? part() : part(a.own[1].at(p, mine), a.dim);
    part first, second;
    AMPC_NO_UNROLL
    for (int other = 0; other < (PASS == AMPC_TO_KEYS ? a.queries : a.keys); other++) {
        if (!sweep.sees(mine, other)) continue;
        const part u(a.others[0].at(p, other), a.dim), w(a.others[1].at(p, other), a.dim);
        float2 stat = stats[PASS == AMPC_TO_KEYS ? other : 0];
        float power = ampc_flash_power(a, x.dot(u), stat.x, PASS == AMPC_FORWARD ? AMPC_FLASH_LAG : 0.0f);
        float weight = ampc_exp2(power);
        if (PASS == AMPC_FORWARD) first.add(weight, w, hides);
        else first.add(ampc_mul(weight, y.dot(w) - stat.y), u, hides);
        if (PASS == AMPC_TO_KEYS) second.add(weight, w, hides);
    }
    first.write(a.out[0].at(p, mine), PASS == AMPC_FORWARD ? stats->y : a.factor, a.dim);
    if (PASS == AMPC_TO_KEYS) second.write(a.out[1].at(p, mine), 1.0f, a.dim);
}

/* Computes the stats of query `mine` for ampc_flash_recompute_row from its scores in fp32.  Its log-sum-exp is written
   to lse, unless lse is NULL. */
template <int D>
__device__ __forceinline__ void ampc_flash_row_stats(const ampc_flash_call &a, const ampc_sweep<false> &sweep, int mine,
                                                     float2 *stats, float *lse) {
    const ampc_flash_place &p = sweep.place;
    const float lowest = ampi_f32_of_bits(0xff800000u);
    const ampc_flash_part<D, AMP_F32> x(a.own[0].at(p, mine), a.dim);
    float top = lowest, total = 0.0f, stat = 0.0f;
    AMPC_NO_UNROLL
    for (int k = 0; k < 2 * a.keys; k++) {      /* the largest score, and then the sum */
        const int other = k < a.keys ? k : k - a.keys;
        if (k == a.keys && top != lowest) {
            stat = ampc_mul(top, a.scale);
            if (!(fabsf(stat) < AMPC_FLASH_STEEP)) stat = 2.0f * ampc_mul(top, a.factor);
        }
        if (!sweep.sees(mine, other)) continue;
        const float score = x.dot(ampc_flash_part<D, AMP_F32>(a.others[0].at(p, other), a.dim));
        if (k < a.keys) top = fmaxf(top, score);
        else total += ampc_exp2(ampc_flash_power(a, score, stat));
    }
    if (threadIdx.x % 32 == 0) {
        *stats = float2{stat, total == 0.0f ? 0.0f : 1.0f / total};
        if (lse != NULL)
            *lse = total == 0.0f ? lowest : (top == lowest ? 0.0f : ampc_mul(top, a.factor)) + logf(total);
    }
    __syncwarp();
}

template <int M, int N> __device__ __forceinline__ bool ampc_has_nan(const float (&x)[M][N][4]) {
    bool nan = false;
    AMPC_UNROLL
    for (int m = 0; m < M; m++) {
        AMPC_UNROLL
        for (int n = 0; n < N; n++) {
            AMPC_UNROLL
            for (int i = 0; i < 4; i++) nan = nan || x[m][n][i] != x[m][n][i];
        }
    }
    return __any_sync(0xffffffffu, nan) != 0;
}

/* ---- Forward */

/* Turns raw scores into exp(scaled score - running maximum).  When the maximum grows, here by more than AMPC_FLASH_LAG,
   the sums shrink (Milakov and Gimelshein 2018), and o must shrink by `factor` too.  Returns whether that is so for any
   row of the warp.  `max` are maxima of raw scores.  A row without visible keys so far has -inf, and weights of 0.
   Each step is done for all rows before the next, so that they hide each other's latency. */
template <int D, int M, int N>
__device__ __forceinline__ bool ampc_flash_online_weights(float (&s)[M][N][4], float scale, float (&max)[M][2],
                                                          float (&sum)[M][2], float (&factor)[2 * M]) {
    float top[2 * M], base[2 * M];
    bool grown = false, steep = false;
    AMPC_UNROLL
    for (int r = 0; r < 2 * M; r++) {
        top[r] = fmaxf(s[r / 2][0][r % 2 * 2], s[r / 2][0][r % 2 * 2 + 1]);
        AMPC_UNROLL
        for (int n = 1; n < N; n++) top[r] = fmaxf(top[r], fmaxf(s[r / 2][n][r % 2 * 2], s[r / 2][n][r % 2 * 2 + 1]));
    }
    AMPC_UNROLL
    for (int step = 1; step < 4; step *= 2) {
        AMPC_UNROLL
        for (int r = 0; r < 2 * M; r++) top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], step));
    }
    AMPC_UNROLL
    for (int r = 0; r < 2 * M; r++) {
        float &most = max[r / 2][r % 2];
        top[r] = ampc_mul(top[r] - most, scale) > AMPC_FLASH_LAG ? top[r] : most;
        base[r] = ampi_bits_f32(top[r]) == 0xff800000u ? 0.0f : top[r];
        factor[r] = ampc_exp2(ampc_mul(most - base[r], scale));
        grown = grown || factor[r] != 1.0f;
        steep = steep || (D <= 64 && fabsf(ampc_mul(base[r], scale)) >= AMPC_FLASH_STEEP);
        most = top[r];
    }
    auto shift = [&](bool any_steep) {
        AMPC_UNROLL
        for (int r = 0; r < 2 * M; r++) {
            const float by = ampc_mul(base[r], scale);
            const bool exact = D > 64 || (any_steep && fabsf(by) >= AMPC_FLASH_STEEP);  /* no register for both ways */
            AMPC_UNROLL
            for (int k = 0; k < 2 * N; k++) {
                float &x = s[r / 2][k / 2][r % 2 * 2 + k % 2];
                x = exact ? ampc_mul(x - base[r], scale) : ampc_fma(x, scale, -by);
            }
        }
    };
    if (steep) shift(true);
    else shift(false);
    AMPC_UNROLL
    for (int r = 0; r < 2 * M; r++) {
        float total = 0.0f;
        AMPC_UNROLL
        for (int k = 0; k < 2 * N; k++) {
            float &x = s[r / 2][k / 2][r % 2 * 2 + k % 2];
            total = ampc_add(total, x = ampc_exp2(x));
        }
        sum[r / 2][r % 2] = ampc_fma(sum[r / 2][r % 2], factor[r], total);
    }
    return __any_sync(0xffffffffu, grown) != 0;
}

template <int D, int M>
__device__ __forceinline__ void ampc_flash_shrink(float (&o)[M][D / 8][4], const float (&factor)[2 * M]) {
    AMPC_UNROLL
    for (int m = 0; m < M; m++) {
        AMPC_UNROLL
        for (int n = 0; n < D / 8; n++) {
            AMPC_UNROLL
            for (int i = 0; i < 4; i++) o[m][n][i] = ampc_mul(o[m][n][i], factor[2 * m + i / 2]);
        }
    }
}

/* Turns sums into o's factors, and `max` into the stats of ampc_flash_power.  The log-sum-exp of rows below `left` is
   written to lse, unless lse is NULL. */
template <int M>
__device__ __forceinline__ void ampc_flash_normalise(const ampc_flash_call &a, float (&max)[M][2], float (&sum)[M][2],
                                                     float *lse, int left) {
    int lane = (int)threadIdx.x % 32;
    AMPC_UNROLL
    for (int m = 0; m < M; m++) {
        AMPC_UNROLL
        for (int h = 0; h < 2; h++) {
            int row = 16 * m + 8 * h + lane / 4;
            float total = sum[m][h], top = ampc_mul(max[m][h], a.factor), power = ampc_mul(max[m][h], a.scale);
            total += __shfl_xor_sync(0xffffffffu, total, 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            max[m][h] = total == 0.0f ? 0.0f : fabsf(power) < AMPC_FLASH_STEEP ? power : 2.0f * top;
            sum[m][h] = total == 0.0f ? 0.0f : 1.0f / total;
            if (lse != NULL && lane % 4 == 0 && row < left)
                lse[row] = total == 0.0f ? ampi_f32_of_bits(0xff800000u) : top + logf(total);
        }
    }
}

/* Saves each row's stats for ampc_flash_recompute_row. */
template <int M>
__device__ __forceinline__ void ampc_flash_note(float2 *scratch, const float (&shift)[M][2],
                                                const float (&inverse)[M][2]) {
    int lane = (int)threadIdx.x % 32;
    __syncwarp();
    AMPC_UNROLL
    for (int i = 0; i < 2 * M; i++)
        if (lane % 4 == 0) scratch[8 * i + lane / 4] = float2{shift[i / 2][i % 2], inverse[i / 2][i % 2]};
    __syncwarp();
}

/* Writes the warp's rows of o, which begin with row `mine` of the block, and their log-sum-exp. */
template <int D, amp_dtype C, int M>
__device__ __forceinline__ void ampc_flash_put(const ampc_flash_call &a, const ampc_sweep<false> &sweep,
                                               unsigned char *scratch, int mine, const float (&o)[M][D / 8][4],
                                               float (&max)[M][2], float (&sum)[M][2]) {
    int own = sweep.own + mine, left = a.queries - own;
    int64_t head = (int64_t)sweep.place.b * a.heads + sweep.place.h;
    float2 *notes = (float2 *)(scratch + mine * 2 * ampc_halves(D, C));
    if (left <= 0) return;
    ampc_flash_normalise(a, max, sum, a.lse ? a.lse + head * a.queries + own : NULL, left);
    ampc_tile_write<D, C>(o, sum, (unsigned char *)notes, a.out[0].at(sweep.place, own), a.out[0].row, a.dim, left);
    if ((!ampc_in_words(C) && !a.hides) || !ampc_has_nan(o)) return;
    ampc_flash_note(notes, max, sum);
    for (int i = 0; i < min(left, 16 * M); i++) {
        if constexpr (C == AMP_F32)
            ampc_flash_row_stats<D>(a, sweep, own + i, notes + i,
                                    a.lse ? a.lse + head * a.queries + own + i : NULL);
        ampc_flash_recompute_row<AMPC_FORWARD, D, C>(a, sweep, own + i, notes + i);
    }
}

/* Hides from the compiler that a loop may have only one turn.  The code of a loop needs fewer registers than straight
   code, but on 8.0 it needs more. */
__device__ __forceinline__ int ampc_flash_step(int columns) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 800
    return columns;
#else
    return ampc_afresh(columns);
#endif
}

#endif /* AMPC_TENSOR_CORES */

template <int D, amp_dtype C>
__global__ void __launch_bounds__(ampc_flash_shape_of(D, AMPC_FORWARD, ampc_in_words(C)).threads,
                                  ampc_flash_shape_of(D, AMPC_FORWARD, ampc_in_words(C)).blocks)
ampc_flash_rows(ampc_flash_call a) {
#if AMPC_TENSOR_CORES
    constexpr ampc_flash_shape shape = ampc_flash_shape_of(D, AMPC_FORWARD, ampc_in_words(C));
    const int R = AMPC_FLASH_OWN, T = shape.tile, M = R / (shape.threads / 2), N = shape.columns / 8,
              H = ampc_halves(D, C), half = 2 * T * 2 * H;
    const float lowest = ampi_f32_of_bits(0xff800000u);
    AMPC_DYNAMIC(shared);
    ampc_sweep<false> *sweep = (ampc_sweep<false> *)(shared + ampc_flash_shared(D, AMPC_FORWARD, ampc_in_words(C)) -
                                                     AMPC_SWEEP_BYTES);
    if (threadIdx.x % 32 == 0) sweep->open(a, T, (int)threadIdx.x / 32, (int)blockDim.x / 32);
    __syncthreads();
    unsigned char *others = shared + R * 2 * H;
    float o[M][D / 8][4] = {}, max[M][2], sum[M][2] = {};
    AMPC_UNROLL
    for (int i = 0; i < 2 * M; i++) max[i / 2][i % 2] = lowest;
    ampc_tile_fetch<H, R, shape.threads>(shared, a.own[0].at(sweep->place, sweep->own), a.own[0].row, H / D * a.dim,
                                         a.queries - sweep->own);
    ampc_copy_commit();
    int j = sweep->next(sweep->first), turn = 0;
    if (j < sweep->end) ampc_flash_fetch<H, T, shape.threads>(others, a.others, sweep->place, H / D * a.dim, j, a.keys);
    ampc_copy_commit();
    const ampc_tile_rows<H, M, false> q(shared + ampc_warp_row<M>() * 2 * H);
    while (j < sweep->end) {
        int following = sweep->next(j + T);
        ampc_copy_wait<0>();
        __syncthreads();                        /* the rows have arrived, and no warp still reads the other half */
        if (following < sweep->end)
            ampc_flash_fetch<H, T, shape.threads>(others + (turn ^ 1) * half, a.others, sweep->place, H / D * a.dim,
                                                  following, a.keys);
        ampc_copy_commit();
        AMPC_NO_UNROLL
        for (int c = 0; c < T; c += ampc_flash_step(8 * N)) {
            int mine = ampc_warp_row<M>();
            int state = sweep->state(sweep->parts[mine / (16 * M)], sweep->own + mine, 16 * M, j + c, 8 * N);
            const unsigned char *k = others + turn * half + c * 2 * H;
            float s[M][N][4], factor[2 * M];
            if (state == AMPC_HIDDEN) continue;
            ampc_tile_scores<H, C>(s, q, k);
            if (state == AMPC_PARTLY) sweep->hide(sweep->own + mine, j + c, s, s, lowest);
            if (ampc_flash_online_weights<D>(s, a.scale, max, sum, factor)) ampc_flash_shrink<D>(o, factor);
            ampc_tile_add<D, C>(o, s, k + half / 2);
        }
        turn ^= 1;
        j = following;
    }
    ampc_copy_wait<0>();
    __syncthreads();
    ampc_flash_put<D, C, M>(a, *sweep, shared, ampc_warp_row<M>(), o, max, sum);
#endif
}

/* ---- Backward.  With s the raw scores and lse in powers of 2, p = 2^(scale s - lse) (ampc_flash_power).  With delta
   the sum of do o over a row, ds = p (do v^T - delta).  Then dv = p^T do, dk = factor ds^T q and dq = factor ds k. */

/* Computes lse and delta of all queries, with LANES threads per row and V numbers at a time.  V is 8 or 4 for the
   tensor cores, and lse is then as ampc_flash_power takes it.  Queries that see nothing and padding rows get
   lse = infinity, which makes their p and ds 0. */
template <int V, int LANES> __global__ void __launch_bounds__(256)
ampc_attention_delta(amp_k_attention a, ampc_divisor padded, ampc_divisor heads, float2 *stats) {
    int64_t rows = a.batch * a.heads * padded.d;
    for (int64_t row = ((int64_t)blockIdx.x * 256 + threadIdx.x) / LANES; row < rows;
         row += (int64_t)gridDim.x * (256 / LANES)) {
        int64_t i, h, head = ampc_divide(row, padded, &i), b = ampc_divide(head, heads, &h);
        int64_t o = b * a.o_stride[0] + i * a.o_stride[1] + h * a.o_stride[2];
        int64_t d_o = b * a.do_stride[0] + i * a.do_stride[1] + h * a.do_stride[2];
        float sum = 0.0f, lse = i < a.queries ? a.lse[head * a.queries + i] : ampi_f32_of_bits(0xff800000u);
        for (int64_t d = threadIdx.x % LANES * V; i < a.queries && d < a.dim; d += LANES * V) {
            float x[V], y[V];
            ampc_widen<V>(ampc_piece_get<V>(ampc_within(a.o, a.dtype, o + d), a.dtype), a.dtype, x);
            ampc_widen<V>(ampc_piece_get<V>(ampc_within(a.d_o, a.dtype, d_o + d), a.dtype), a.dtype, y);
            AMPC_UNROLL
            for (int e = 0; e < V; e++)
                sum = ampc_fma(a.compute == a.dtype ? y[e] : ampc_rounded(y[e], a.compute), x[e], sum);
        }
        AMPC_UNROLL
        for (int step = LANES / 2; step > 0; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (ampi_bits_f32(lse) == 0xff800000u) lse = ampi_f32_of_bits(0x7f800000u);
        float power = ampc_mul(lse, AMPC_LOG2_E);
        if (V > 1) lse = fabsf(power) < AMPC_FLASH_STEEP ? power : 2.0f * lse;
        if (threadIdx.x % LANES == 0) stats[row] = float2{lse, sum};
    }
}

template <int V, int LANES>
amp_result ampc_attention_stats(ampc_device *dev, const amp_k_attention &a, int64_t padded, float2 *stats,
                                void *stream) {
    return ampc_launch(dev, "amp_attention_backward", ampc_attention_delta<V, LANES>,
                       ampc_grid(dev, ampc_blocks(a.batch * a.heads * padded, 256 / LANES), 8), 256, 0, stream, a,
                       padded, a.heads, stats);
}

#if AMPC_TENSOR_CORES

/* lse and delta of a head's queries. */
__device__ __forceinline__ const float2 *ampc_flash_stats(const ampc_flash_call &a, const ampc_flash_place &p) {
    return a.stats + ((int64_t)p.b * a.heads + p.h) * a.padded;
}

/* Starts to copy lse and delta of n queries. */
__device__ __forceinline__ void ampc_flash_fetch_stats(float2 *scratch, const float2 *stats, int n) {
    int i = 2 * (int)threadIdx.x;
    if (i < n) ampc_copy_async(scratch + i, stats + i, true);
}

/* Turns scores into p, and do v^T into ds.  `stats` are those of the columns if the columns are the queries, and
   otherwise of the warp's rows. */
template <bool KEYS, int M, int N>
__device__ __forceinline__ void ampc_flash_slopes(const ampc_flash_call &a, float (&s)[M][N][4], float (&ds)[M][N][4],
                                                  const float2 *stats) {
    int lane = (int)threadIdx.x % 32;
    AMPC_UNROLL
    for (int k = 0; k < 2 * (KEYS ? N : M); k++) {
        float2 stat = stats[KEYS ? k / 2 * 8 + lane % 4 * 2 + k % 2 : 8 * k + lane / 4];
        float by = a.scale, shift = stat.x;
        if (fabsf(stat.x) >= AMPC_FLASH_STEEP) {
            AMPC_UNROLL
            for (int l = 0; l < 2 * (KEYS ? M : N); l++) {
                float &score = s[(KEYS ? l : k) / 2][(KEYS ? k : l) / 2][(KEYS ? l : k) % 2 * 2 + (KEYS ? k : l) % 2];
                score = ampc_flash_power(a, score, stat.x);
            }
            by = 1.0f;
            shift = 0.0f;
        }
        AMPC_UNROLL
        for (int l = 0; l < 2 * (KEYS ? M : N); l++) {
            int r = KEYS ? l : k, c = KEYS ? k : l, i = r % 2 * 2 + c % 2;
            float p = ampc_exp2(ampc_fma(s[r / 2][c / 2][i], by, -shift));
            s[r / 2][c / 2][i] = p;
            ds[r / 2][c / 2][i] = ampc_mul(p, ds[r / 2][c / 2][i] - stat.y);
        }
    }
}

/* Sums the rows [own, own + n) of a result over its columns, as they were stored.  Lanes take pieces of a row side by
   side, and several rows at once. */
template <int D, amp_dtype C>
__device__ __forceinline__ void ampc_flash_sum(const ampc_flash_call &a, const ampc_flash_operand &x,
                                               const ampc_flash_place &p, int own, int n, float *run) {
    constexpr int V = ampc_in_words(C) ? 4 : 8, LANES = D / V;
    constexpr amp_dtype stored = ampc_in_words(C) ? AMP_F32 : C;
    const int lane = (int)threadIdx.x % 32, at = lane % LANES * V;
    float sum[V] = {};
    for (int i = lane / LANES; i < n && at < a.dim; i += 32 / LANES) {
        float row[V];
        ampc_widen<V>(ampc_piece_get<V>(ampc_within(x.at(p, own + i), stored, at), stored), stored, row);
        AMPC_UNROLL
        for (int e = 0; e < V; e++) sum[e] += row[e];
    }
    AMPC_UNROLL
    for (int e = 0; e < V; e++) {
        AMPC_UNROLL
        for (int step = LANES; step < 32; step *= 2) sum[e] += __shfl_xor_sync(0xffffffffu, sum[e], step);
        if (lane < LANES && at < a.dim) run[at + e] = sum[e];
    }
}

/* Writes the warp's rows of the results, which begin with row `mine` of the block, and then their sums. */
template <ampc_flash_pass PASS, int D, amp_dtype C, int M>
__device__ __forceinline__ void ampc_flash_put_gradient(const ampc_flash_call &a,
                                                        const ampc_sweep<PASS == AMPC_TO_KEYS> &sweep,
                                                        unsigned char *scratch, int mine,
                                                        const float (&first)[M][D / 8][4],
                                                        const float (&second)[M][D / 8][4]) {
    const bool KEYS = PASS == AMPC_TO_KEYS;
    int own = sweep.own + mine, left = (KEYS ? a.keys : a.queries) - own;
    const float2 *stats = ampc_flash_stats(a, sweep.place);
    float factor[M][2];
    if (left <= 0) return;
    AMPC_UNROLL
    for (int i = 0; i < 2 * M; i++) factor[i / 2][i % 2] = a.factor;
    scratch += mine * 2 * ampc_halves(D, C);
    ampc_tile_write<D, C>(first, factor, scratch, a.out[0].at(sweep.place, own), a.out[0].row, a.dim, left);
    AMPC_UNROLL
    for (int i = 0; i < 2 * M; i++) factor[i / 2][i % 2] = 1.0f;
    if (KEYS)
        ampc_tile_write<D, C>(second, factor, scratch, a.out[1].at(sweep.place, own), a.out[1].row, a.dim, left);
    if ((ampc_in_words(C) || a.hides) && (ampc_has_nan(first) || (KEYS && ampc_has_nan(second)))) {
        __syncwarp();
        for (int i = own; i < own + min(left, 16 * M); i++)
            ampc_flash_recompute_row<PASS, D, C>(a, sweep, i, KEYS ? stats : stats + i);
    }
    if (a.sums == NULL) return;
    const int64_t columns = a.heads * a.dim, run = (int64_t)sweep.place.b * a.runs + own / (16 * M);
    float *sums = a.sums + (run * (KEYS ? 2 : 1)) * columns + (int64_t)sweep.place.h * a.dim;
    __syncwarp();                               /* the lanes read rows that others wrote */
    ampc_flash_sum<D, C>(a, a.out[0], sweep.place, own, min(left, 16 * M), sums);
    if (KEYS) ampc_flash_sum<D, C>(a, a.out[1], sweep.place, own, min(left, 16 * M), sums + columns);
}

#endif /* AMPC_TENSOR_CORES */

template <ampc_flash_pass PASS, int D, amp_dtype C>
__global__ void __launch_bounds__(ampc_flash_shape_of(D, PASS, ampc_in_words(C)).threads,
                                  ampc_flash_shape_of(D, PASS, ampc_in_words(C)).blocks)
ampc_flash_gradient_rows(ampc_flash_call a) {
#if AMPC_TENSOR_CORES
    const bool KEYS = PASS == AMPC_TO_KEYS;
    constexpr bool words = ampc_in_words(C);
    constexpr ampc_flash_shape shape = ampc_flash_shape_of(D, PASS, words);
    const int R = AMPC_FLASH_OWN, T = shape.tile, M = R / (shape.threads / 2), N = shape.columns / 8,
              H = ampc_halves(D, C), half = 2 * T * 2 * H;
    const int other_half = ampc_flash_holds_all(D, PASS, words) ? -half : half;
    AMPC_DYNAMIC(shared);
    ampc_sweep<KEYS> *sweep = (ampc_sweep<KEYS> *)(shared + ampc_flash_shared(D, PASS, words) - AMPC_SWEEP_BYTES);
    if (threadIdx.x % 32 == 0) sweep->open(a, T, (int)threadIdx.x / 32, (int)blockDim.x / 32);
    __syncthreads();
    unsigned char *others = shared + 2 * R * 2 * H;
    /* the stats of the tiles' queries, or of the own queries */
    float2 *stats_scratch = (float2 *)(others + half + (other_half > 0 ? half : 0));
    const int rows = KEYS ? a.keys : a.queries, columns = KEYS ? a.queries : a.keys;
    float first[M][D / 8][4] = {}, second[M][D / 8][4] = {};
    auto fetch = [&](int from, int to) {
        ampc_flash_fetch<H, T, shape.threads>(others + to * other_half, a.others, sweep->place, H / D * a.dim, from,
                                              columns);
        if (KEYS) ampc_flash_fetch_stats(stats_scratch + to * T, ampc_flash_stats(a, sweep->place) + from, T);
    };
    ampc_flash_fetch<H, R, shape.threads>(shared, a.own, sweep->place, H / D * a.dim, sweep->own, rows);
    if (!KEYS) ampc_flash_fetch_stats(stats_scratch, ampc_flash_stats(a, sweep->place) + sweep->own, R);
    ampc_copy_commit();
    int at = sweep->next(sweep->first), turn = 0;
    if (at < sweep->end) fetch(at, 0);
    ampc_copy_commit();
    ampc_copy_wait<1>();
    __syncthreads();                            /* the own rows have arrived */
    const ampc_tile_rows<H, M, (shape.held > 0)> x(shared + ampc_warp_row<M>() * 2 * H);
    const ampc_tile_rows<H, M, (shape.held > 1)> y(shared + (R + ampc_warp_row<M>()) * 2 * H);
    while (at < sweep->end) {
        int following = sweep->next(at + T);
        ampc_copy_wait<0>();
        __syncthreads();                        /* the tile has arrived, and no warp still reads the other half */
        if (following < sweep->end) fetch(following, turn ^ 1);
        ampc_copy_commit();
        AMPC_NO_UNROLL
        for (int c = 0; c < T; c += 8 * N) {
            int mine = ampc_warp_row<M>();
            int state = sweep->state(sweep->parts[mine / (16 * M)], sweep->own + mine, 16 * M, at + c, 8 * N);
            const unsigned char *u = others + turn * other_half + c * 2 * H, *w = u + half / 2;
            float s[M][N][4], ds[M][N][4];
            if (state == AMPC_HIDDEN) continue;
            ampc_tile_scores<H, C>(s, x, u);
            __syncwarp();                       /* else the compiler loads for both products at once, and spills */
            ampc_tile_scores<H, C>(ds, y, w);
            ampc_flash_slopes<KEYS>(a, s, ds, stats_scratch + (KEYS ? turn * T + c : mine));
            if (state == AMPC_PARTLY) sweep->hide(sweep->own + mine, at + c, s, ds, 0.0f);
            if (KEYS) ampc_tile_add<D, C>(second, s, w);
            ampc_tile_add<D, C>(first, ds, u);
        }
        turn ^= 1;
        at = following;
    }
    ampc_copy_wait<0>();
    __syncthreads();
    ampc_flash_put_gradient<PASS, D, C, M>(a, *sweep, shared, ampc_warp_row<M>(), first, second);
#endif
}

/* ==== 9 >>operators: attention on Hopper ====
   The same passes for compute capability 9.0, after FlashAttention-3 (Shah et al. 2024).  A block has three warpgroups
   of 128 threads.  The first is the producer, of which one lane fetches tiles into shared memory with the tensor memory
   accelerator (TMA).  The other two are consumers.  Each owns 64 rows of the block, and computes with wgmma, which
   reads its operands from shared memory and runs beside the other instructions of the warp.  In forward, the scores of
   the next tile are computed while v is multiplied by the weights of the current one.

   Tiles come in stages.  A stage has two mbarriers.  `full` completes when the tile has arrived, and `empty` when both
   consumers have released it.  Only the producer walks over the mask.  It writes into the stage which tile it fetches:

       producer     wait for empty, write the tile's number, fetch            next stage, ...; -1 ends
       consumer     wait for full, read the number, compute, arrive at empty  next stage, ...

   Between the issue of a wgmma and the wait for it there is no branch, because the compiler would then wait at once.  A
   tile that is hidden from one consumer only is therefore computed and masked.  The mask of a tile becomes bits before
   its products, while registers are free. */

enum { AMPC_HOPPER_FROM = 64 };     /* for fewer queries or keys, the kernels above are as fast */
enum { AMPC_WARPGROUP = 128, AMPC_CONSUMERS = 2, AMPC_CONSUMER_ROWS = AMPC_FLASH_OWN / AMPC_CONSUMERS };
enum { AMPC_HOPPER_THREADS = AMPC_WARPGROUP * (1 + AMPC_CONSUMERS) };
/* Registers per thread.  A thread starts with 168, and 40 + 2 x 232 is at most three times that. */
enum { AMPC_PRODUCER_REGISTERS = 40, AMPC_CONSUMER_REGISTERS = 232 };

/* An operand as TMA reads it.  A step is 1, or 0 if the batch or all heads share their rows. */
struct alignas(64) ampc_hopper_operand {
    ampc_tensor_map map;
    int head_step, batch_step;
};
/* One launch. */
struct alignas(64) ampc_hopper_call {
    ampc_hopper_operand own[2], others[2];
    ampc_flash_call flash;
};

/* Shared memory of a block, as offsets from a multiple of AMPC_SWIZZLED bytes.  A tile of D columns consists of D / 64
   parts of 128 bytes per row, which TMA and wgmma both swizzle.  Each consumer's own rows are one tile. */
enum { AMPC_SWIZZLED = 1024, AMPC_STAGES = 2 };
__host__ __device__ constexpr int ampc_hopper_tile(int d, ampc_flash_pass pass) {
    return pass != AMPC_FORWARD && d == 128 ? 64 : 128;
}
/* The gates are mbarriers.  Forward has separate gates for k, at [0], and for v, at [1]. */
struct ampc_hopper_ring {
    uint64_t own, full[2][AMPC_STAGES], empty[2][AMPC_STAGES];
    volatile int tile[AMPC_STAGES];         /* the first row of the stage's tile, or -1 */
};
template <ampc_flash_pass PASS, int D> struct ampc_hopper_layout {
    enum : int {
        N = ampc_hopper_tile(D, PASS),
        consumer = AMPC_CONSUMER_ROWS * 2 * D,          /* bytes of a consumer's own rows of one operand */
        own = AMPC_CONSUMERS * consumer,
        tile = N * 2 * D,
        stages = (PASS == AMPC_FORWARD ? 1 : 2) * own,  /* a stage has a tile of each of the other two operands */
        stats = stages + AMPC_STAGES * 2 * tile,        /* lse and delta of a stage's queries, or of the own ones */
        stats_rows = PASS == AMPC_FORWARD ? 0 : PASS == AMPC_TO_KEYS ? AMPC_STAGES * N : (int)AMPC_FLASH_OWN,
        sweep = stats + stats_rows * (int)sizeof(float2),
        ring = sweep + AMPC_SWEEP_BYTES,
        all = ring + (int)sizeof(ampc_hopper_ring) + AMPC_SWIZZLED
    };
};

#if AMPC_WARPGROUPS

/* A place in the ring, and the parity of the phase in which its gates are waited for. */
struct ampc_hopper_place {
    int stage;
    unsigned parity;
    __device__ __forceinline__ void advance() {
        if (++stage == AMPC_STAGES) stage = 0, parity ^= 1;
    }
};

/* The block's parts of shared memory. */
template <ampc_flash_pass PASS, int D> struct ampc_hopper_shared {
    typedef ampc_hopper_layout<PASS, D> L;
    unsigned char *base;
    __device__ __forceinline__ unsigned char *own(int operand, int consumer) const {
        return base + operand * L::own + consumer * L::consumer;
    }
    __device__ __forceinline__ unsigned char *tile(int operand, int stage) const {
        return base + L::stages + (2 * stage + operand) * L::tile;
    }
    __device__ __forceinline__ float2 *stats(int row) const { return (float2 *)(base + L::stats) + row; }
    __device__ __forceinline__ ampc_sweep<PASS == AMPC_TO_KEYS> *sweep() const {
        return (ampc_sweep<PASS == AMPC_TO_KEYS> *)(base + L::sweep);
    }
    __device__ __forceinline__ ampc_hopper_ring *ring() const { return (ampc_hopper_ring *)(base + L::ring); }
};

/* The first byte whose number in shared memory is a multiple of AMPC_SWIZZLED. */
__device__ __forceinline__ unsigned char *ampc_hopper_base(unsigned char *shared) {
    return shared + (AMPC_SWIZZLED - ampc_shared_number(shared) % AMPC_SWIZZLED) % AMPC_SWIZZLED;
}

/* Opens the sweep and the gates.  All threads of the block call it. */
template <ampc_flash_pass PASS, int D>
__device__ __forceinline__ void ampc_hopper_open(const ampc_hopper_call &a, const ampc_hopper_shared<PASS, D> &s) {
    const int group = (int)threadIdx.x / AMPC_WARPGROUP;
    ampc_hopper_ring *ring = s.ring();
    if (threadIdx.x % AMPC_WARPGROUP == 0 && group > 0)
        s.sweep()->open(a.flash, ampc_hopper_tile(D, PASS), group - 1, AMPC_CONSUMERS);
    if (threadIdx.x == 0) {
        ampc_gate_init(&ring->own, 1);
        for (int i = 0; i < 2 * AMPC_STAGES; i++) {
            ampc_gate_init(&ring->full[i / AMPC_STAGES][i % AMPC_STAGES], 1);
            ampc_gate_init(&ring->empty[i / AMPC_STAGES][i % AMPC_STAGES], AMPC_CONSUMERS);
        }
        ampc_gates_ready();
    }
    __syncthreads();
}

/* ---- The producer */

/* Starts to fetch ROWS rows from `row` on. */
template <int D, int ROWS>
__device__ __forceinline__ void ampc_hopper_fetch(unsigned char *tile, const ampc_hopper_operand &x, uint64_t *gate,
                                                  int row, const ampc_flash_place &p) {
    AMPC_UNROLL
    for (int i = 0; i < D / 64; i++)
        ampc_box_fetch(tile + i * ROWS * 128, &x.map, gate, 64 * i, row, p.h * x.head_step, p.b * x.batch_step);
}

template <ampc_flash_pass PASS, int D>
__device__ __forceinline__ void ampc_hopper_fetch_own(const ampc_hopper_call &a,
                                                      const ampc_hopper_shared<PASS, D> &s) {
    typedef ampc_hopper_layout<PASS, D> L;
    const auto *sweep = s.sweep();
    uint64_t *gate = &s.ring()->own;
    const int stats = PASS == AMPC_TO_QUERIES ? (int)(AMPC_FLASH_OWN * sizeof(float2)) : 0;
    ampc_gate_expect(gate, L::stages + stats);
    AMPC_UNROLL
    for (int i = 0; i < (PASS == AMPC_FORWARD ? 1 : 2); i++) {
        AMPC_UNROLL
        for (int c = 0; c < AMPC_CONSUMERS; c++)
            ampc_hopper_fetch<D, AMPC_CONSUMER_ROWS>(s.own(i, c), a.own[i], gate,
                                                     sweep->own + c * AMPC_CONSUMER_ROWS, sweep->place);
    }
    if (stats) ampc_bytes_fetch(s.stats(0), ampc_flash_stats(a.flash, sweep->place) + sweep->own, stats, gate);
}

/* Fetches the tile from row j on into a stage as soon as the stage is free.  j = -1 ends. */
template <ampc_flash_pass PASS, int D>
__device__ __forceinline__ void ampc_hopper_fetch_stage(const ampc_hopper_call &a,
                                                        const ampc_hopper_shared<PASS, D> &s,
                                                        const ampc_hopper_place &at, int j) {
    typedef ampc_hopper_layout<PASS, D> L;
    const auto *sweep = s.sweep();
    ampc_hopper_ring *ring = s.ring();
    uint64_t *gate = &ring->full[0][at.stage];
    const int stats = PASS == AMPC_TO_KEYS ? (int)(L::N * sizeof(float2)) : 0;
    ampc_gate_wait(&ring->empty[0][at.stage], at.parity);
    ring->tile[at.stage] = j;
    if (j < 0) {
        ampc_gate_arrive(gate);
        return;
    }
    ampc_gate_expect(gate, (PASS == AMPC_FORWARD ? 1 : 2) * L::tile + stats);
    ampc_hopper_fetch<D, L::N>(s.tile(0, at.stage), a.others[0], gate, j, sweep->place);
    if (PASS == AMPC_FORWARD) {
        gate = &ring->full[1][at.stage];
        ampc_gate_wait(&ring->empty[1][at.stage], at.parity);
        ampc_gate_expect(gate, L::tile);
    }
    ampc_hopper_fetch<D, L::N>(s.tile(1, at.stage), a.others[1], gate, j, sweep->place);
    if (stats)
        ampc_bytes_fetch(s.stats(at.stage * L::N), ampc_flash_stats(a.flash, sweep->place) + j, stats, gate);
}

/* The producer's first warp calls this.  The search for the next tile takes all of its lanes.  The gates of a stage are
   in phase 0 at first, so a wait for the phase of parity 1, which is over, does not block. */
template <ampc_flash_pass PASS, int D>
__device__ __forceinline__ void ampc_hopper_produce(const ampc_hopper_call &a, const ampc_hopper_shared<PASS, D> &s) {
    const auto *sweep = s.sweep();
    const int N = ampc_hopper_tile(D, PASS);
    ampc_hopper_place at = {0, 1};
    if (threadIdx.x == 0) ampc_hopper_fetch_own(a, s);
    for (int j = sweep->next(sweep->first);; j = sweep->next(j + N)) {
        const bool more = j < sweep->end;
        if (threadIdx.x == 0) ampc_hopper_fetch_stage(a, s, at, more ? j : -1);
        if (!more) break;
        at.advance();
    }
}

/* ---- Products and masks of a consumer.  A consumer's 64 x N accumulators are, for each of its warps, 16 x N numbers
   in the layout of ampc_tile_scores with M = 1. */

/* Lets go of a stage.  The producer fetches into it when both consumers have called this. */
__device__ __forceinline__ void ampc_hopper_release(uint64_t *gate) {
    if (threadIdx.x % AMPC_WARPGROUP == 0) ampc_gate_arrive(gate);
}

/* The descriptor of 16 numbers of depth in a tile, whose parts of 64 columns are `apart` bytes apart. */
__device__ __forceinline__ uint64_t ampc_hopper_operand_at(const unsigned char *at, unsigned apart) {
    return ampc_descriptor(at, apart, 8 * 128);
}

/* Starts c = own tile^T, where own has 64 rows of D numbers, and the tile has N. */
template <int D, amp_dtype C, int N>
__device__ __forceinline__ void ampc_hopper_scores(float (&c)[1][N / 8][4], const unsigned char *own,
                                                   const unsigned char *tile) {
    ampc_group_fence();
    AMPC_UNROLL
    for (int k = 0; k < D / 16; k++) {
        const int part = k / 4, on = k % 4 * 32;
        ampc_group_mma<N, C == AMP_BF16, false>(
            c[0], ampc_hopper_operand_at(own + part * AMPC_CONSUMER_ROWS * 128 + on, 16),
            ampc_hopper_operand_at(tile + part * N * 128 + on, 16), k > 0);
    }
    ampc_group_commit();
}

/* Starts c += w tile, where w is 64 x N weights, and the tile has N rows of D numbers. */
template <int D, amp_dtype C, int N>
__device__ __forceinline__ void ampc_hopper_weigh(float (&c)[1][D / 8][4], const uint32_t (&w)[N / 16][4],
                                                  const unsigned char *tile) {
    ampc_group_fence();
    AMPC_UNROLL
    for (int k = 0; k < N / 16; k++)
        ampc_group_mma<D, C == AMP_BF16, true>(c[0], w[k], ampc_hopper_operand_at(tile + k * 16 * 128, N * 128), true);
    ampc_group_commit();
}

/* Rounds weights to 16 bits, as left operands of products. */
template <amp_dtype C, int N>
__device__ __forceinline__ void ampc_hopper_pack(uint32_t (&w)[N / 16][4], const float (&c)[1][N / 8][4]) {
    AMPC_UNROLL
    for (int i = 0; i < N / 4; i++)
        w[i / 4][i % 4] = ampc_pair(c[0][i / 2][i % 2 * 2], c[0][i / 2][i % 2 * 2 + 1], C);
}

/* Sets the bits of the columns [from, to) of a tile for row lane / 4 + 8 r.  Element i of the lane's N / 2 is bit
   i % 32 of word i / 32, so that of column 8 n + 2 (lane % 4) + e is bit 4 (n % 8) + 2 r + e of word n / 8. */
template <int N>
__device__ __forceinline__ void ampc_hopper_interval(uint32_t (&seen)[N / 64], int r, int from, int to) {
    const int column = (int)ampc_afresh(threadIdx.x) % 4 * 2;
    AMPC_UNROLL
    for (int e = 0; e < 2; e++) {
        const int first = (max(from - column - e, 0) + 7) / 8, end = (max(to - column - e, 0) + 7) / 8;
        AMPC_UNROLL
        for (int w = 0; w < N / 64; w++) {
            const int below = 4 * min(max(first - 8 * w, 0), 8), upto = 4 * min(max(end - 8 * w, 0), 8);
            seen[w] |= (0x11111111u << (2 * r + e)) & (uint32_t)((1ull << upto) - 1) & ~(uint32_t)((1ull << below) - 1);
        }
    }
}

/* Sets the bits of the lane's elements that are visible in the tile from `other` on.  `mine` is the warp's first
   row. */
template <bool KEYS, int N>
__device__ __forceinline__ void ampc_hopper_seen(const ampc_sweep<KEYS> &sweep, int mine, int other,
                                                 uint32_t (&seen)[N / 64]) {
    const int lane = (int)ampc_afresh(threadIdx.x) % 32;
    const ampc_band &band = sweep.band;
    if (!band.special) {
        AMPC_UNROLL
        for (int r = 0; r < 2; r++) {
            const int row = mine + lane / 4 + 8 * r, from = KEYS ? band.sees_beyond(row) : band.low(row),
                      to = KEYS ? band.hides_up_to(row) : band.high(row);
            ampc_hopper_interval<N>(seen, r, from - other, to - other);
        }
        return;
    }
    AMPC_NO_UNROLL
    for (int i = 0; i < N / 2; i++) {
        const int row = mine + lane / 4 + i / 2 % 2 * 8, column = other + i / 4 * 8 + lane % 4 * 2 + i % 2;
        const uint32_t bit = (uint32_t)sweep.sees(row, column) << i % 32;
        if (N == 64 || i < 32) seen[0] |= bit;
        else seen[N / 64 - 1] |= bit;
    }
}

template <int N>
__device__ __forceinline__ void ampc_hopper_hide(float (&x)[1][N / 8][4], const uint32_t (&seen)[N / 64], float value) {
    AMPC_UNROLL
    for (int i = 0; i < N / 2; i++) x[0][i / 4][i % 4] = seen[i / 32] >> i % 32 & 1 ? x[0][i / 4][i % 4] : value;
}

/* What a consumer finds out about a tile before its products: whether it must hide elements, and which ones are
   visible. */
template <bool KEYS, int N> struct ampc_hopper_view {
    bool hides;
    uint32_t seen[N / 64];
    __device__ __forceinline__ void look(const ampc_sweep<KEYS> &sweep, int consumer, int mine, int other) {
        const int from = sweep.own + consumer * AMPC_CONSUMER_ROWS;
        AMPC_UNROLL
        for (int w = 0; w < N / 64; w++) seen[w] = 0;
        hides = sweep.state(sweep.parts[consumer], from, AMPC_CONSUMER_ROWS, other, N) != AMPC_OPEN;
        if (hides) ampc_hopper_seen<KEYS, N>(sweep, mine, other, seen);
    }
};

#endif /* AMPC_WARPGROUPS */

/* ---- Forward.  Of a consumer's tiles, the first is apart, because no weights are there yet.  In the loop, the scores
   of the next tile and the product of v with the weights of the one before run at the same time. */

template <int D, amp_dtype C>
__global__ void __launch_bounds__(AMPC_HOPPER_THREADS, 1)
    ampc_flash_hopper_rows(const __grid_constant__ ampc_hopper_call a) {
#if AMPC_WARPGROUPS
    const int N = ampc_hopper_tile(D, AMPC_FORWARD), group = (int)threadIdx.x / AMPC_WARPGROUP, consumer = group - 1;
    AMPC_DYNAMIC(raw);
    const ampc_hopper_shared<AMPC_FORWARD, D> s = {ampc_hopper_base(raw)};
    ampc_hopper_open(a, s);
    if (group == 0) {
        ampc_registers_less<AMPC_PRODUCER_REGISTERS>();
        if (threadIdx.x < 32) ampc_hopper_produce(a, s);
        return;
    }
    ampc_registers_more<AMPC_CONSUMER_REGISTERS>();
    const ampc_sweep<false> *sweep = s.sweep();
    const int warp = (int)threadIdx.x / 32 % 4, row = consumer * AMPC_CONSUMER_ROWS + 16 * warp;
    const float lowest = ampi_f32_of_bits(0xff800000u);
    float c[1][N / 8][4], o[1][D / 8][4] = {}, most[1][2] = {{lowest, lowest}}, sum[1][2] = {}, factor[2];
    uint32_t w[N / 16][4];
    ampc_hopper_ring *ring = s.ring();
    ampc_hopper_place at = {0, 0}, before;
    ampc_hopper_view<false, N> view;
    ampc_gate_wait(&ring->own, 0);
    ampc_gate_wait(&ring->full[0][0], 0);
    int j = ring->tile[0];
    if (j >= 0) {
        view.look(*sweep, consumer, sweep->own + row, j);
        ampc_hopper_scores<D, C, N>(c, s.own(0, consumer), s.tile(0, 0));
        ampc_group_wait<0>();
        ampc_hopper_release(&ring->empty[0][0]);
        if (view.hides) ampc_hopper_hide<N>(c, view.seen, lowest);
        (void)ampc_flash_online_weights<D>(c, a.flash.scale, most, sum, factor);
        ampc_hopper_pack<C, N>(w, c);
        for (;;) {
            before = at;
            at.advance();
            ampc_gate_wait(&ring->full[0][at.stage], at.parity);
            j = ring->tile[at.stage];
            if (j < 0) break;
            view.look(*sweep, consumer, sweep->own + row, j);
            ampc_gate_wait(&ring->full[1][before.stage], before.parity);
            ampc_hopper_scores<D, C, N>(c, s.own(0, consumer), s.tile(0, at.stage));
            ampc_hopper_weigh<D, C, N>(o, w, s.tile(1, before.stage));
            ampc_group_wait<1>();
            ampc_hopper_release(&ring->empty[0][at.stage]);
            if (view.hides) ampc_hopper_hide<N>(c, view.seen, lowest);
            const bool grown = ampc_flash_online_weights<D>(c, a.flash.scale, most, sum, factor);
            ampc_group_wait<0>();
            ampc_hopper_release(&ring->empty[1][before.stage]);
            if (grown) ampc_flash_shrink<D>(o, factor);
            ampc_hopper_pack<C, N>(w, c);
        }
        ampc_gate_wait(&ring->full[1][before.stage], before.parity);
        ampc_hopper_weigh<D, C, N>(o, w, s.tile(1, before.stage));
        ampc_group_wait<0>();
    }
    ampc_meet(group, AMPC_WARPGROUP);           /* no warp of the consumer reads its own rows any more */
    ampc_flash_put<D, C, 1>(a.flash, *sweep, s.base, row, o, most, sum);
#endif
}

/* ---- Backward */

template <ampc_flash_pass PASS, int D, amp_dtype C>
__global__ void __launch_bounds__(AMPC_HOPPER_THREADS, 1)
    ampc_flash_hopper_gradient_rows(const __grid_constant__ ampc_hopper_call a) {
#if AMPC_WARPGROUPS
    const bool KEYS = PASS == AMPC_TO_KEYS;
    const int N = ampc_hopper_tile(D, PASS), group = (int)threadIdx.x / AMPC_WARPGROUP, consumer = group - 1;
    AMPC_DYNAMIC(raw);
    const ampc_hopper_shared<PASS, D> s = {ampc_hopper_base(raw)};
    ampc_hopper_open(a, s);
    if (group == 0) {
        ampc_registers_less<AMPC_PRODUCER_REGISTERS>();
        if (threadIdx.x < 32) ampc_hopper_produce(a, s);
        return;
    }
    ampc_registers_more<AMPC_CONSUMER_REGISTERS>();
    const ampc_sweep<KEYS> *sweep = s.sweep();
    const int warp = (int)threadIdx.x / 32 % 4, row = consumer * AMPC_CONSUMER_ROWS + 16 * warp;
    float first[1][D / 8][4] = {}, second[1][D / 8][4] = {}, p[1][N / 8][4], ds[1][N / 8][4];
    ampc_hopper_ring *ring = s.ring();
    ampc_hopper_place at = {0, 0};
    ampc_gate_wait(&ring->own, 0);
    for (;; at.advance()) {
        ampc_gate_wait(&ring->full[0][at.stage], at.parity);
        const int j = ring->tile[at.stage];
        if (j < 0) break;
        const unsigned char *u = s.tile(0, at.stage), *v = s.tile(1, at.stage);
        ampc_hopper_view<KEYS, N> view;
        uint32_t w[N / 16][4];
        view.look(*sweep, consumer, sweep->own + row, j);
        ampc_hopper_scores<D, C, N>(p, s.own(0, consumer), u);
        ampc_hopper_scores<D, C, N>(ds, s.own(1, consumer), v);
        ampc_group_wait<0>();
        ampc_flash_slopes<KEYS>(a.flash, p, ds, s.stats(KEYS ? at.stage * N : row));
        if (view.hides) {
            ampc_hopper_hide<N>(p, view.seen, 0.0f);
            ampc_hopper_hide<N>(ds, view.seen, 0.0f);
        }
        if constexpr (KEYS) {
            ampc_hopper_pack<C, N>(w, p);
            ampc_hopper_weigh<D, C, N>(second, w, v);
        }
        uint32_t slopes[N / 16][4];
        ampc_hopper_pack<C, N>(slopes, ds);
        ampc_hopper_weigh<D, C, N>(first, slopes, u);
        ampc_group_wait<0>();
        ampc_hopper_release(&ring->empty[0][at.stage]);
    }
    ampc_meet(group, AMPC_WARPGROUP);           /* no warp of the consumer reads its own rows any more */
    ampc_flash_put_gradient<PASS, D, C, 1>(a.flash, *sweep, s.base, row, first, second);
#endif
}

/* ==== 9 >>operators: launches of attention ====
   A call of attention on tensor cores goes to the kernels for Hopper if they take it, and otherwise to those for every
   GPU from capability 8.0 on. */

/* `size` is that of a number. */
ampc_flash_operand ampc_flash_operand_of(const void *data, const int64_t (&stride)[3], int64_t size) {
    return ampc_flash_operand{(char *)const_cast<void *>(data), size * stride[0], size * stride[1], size * stride[2]};
}

bool ampc_flash_aligned(const void *data, const int64_t (&stride)[3], int64_t size) {
    return ampc_aligned(data, size * (stride[0] | stride[1] | stride[2]));
}

/* Whether the kernels can take the rows of the call as they are, in pieces of 16 bytes. */
bool ampc_flash_fits(const amp_k_attention &a) {
    const int64_t size = ampc_dtype_size(a.dtype);
    auto fits = [=](const void *data, const int64_t (&stride)[3]) { return ampc_flash_aligned(data, stride, size); };
    return a.dim * size % 16 == 0 && fits(a.q, a.q_stride) && fits(a.k, a.k_stride) && fits(a.v, a.v_stride) &&
           fits(a.o, a.o_stride) && fits(a.d_o, a.do_stride) && fits(a.dq, a.dq_stride) && fits(a.dk, a.dk_stride) &&
           fits(a.dv, a.dv_stride);
}

/* Whether operands in fp32 are cast to 16 bits, in which they are multiplied. */
bool ampc_flash_casts(const amp_k_attention &a) {
    return a.dtype == AMP_F32 && (a.compute == AMP_F16 || a.compute == AMP_BF16);
}

/* Whether the tensor cores can do this attention.  Operands are cast, or copied if their rows do not fit, only to 16
   bits.  For fewer than 16 queries a copy of all keys and values costs more than they save. */
bool ampc_flash_serves(const ampc_device *dev, const amp_k_attention &a) {
    const bool words = ampc_in_words(a.compute), casts = ampc_flash_casts(a);
    if (!dev->has.tensor_cores || (a.dtype != (words ? AMP_F32 : a.compute) && !casts)) return false;
    if (!words && a.compute != AMP_F16 && a.compute != AMP_BF16) return false;
    if (a.dim < 1 || a.dim > 128) return false;
    if (dev->has.shared_limit < ampc_flash_shared(ampc_flash_width(a.dim), AMPC_TO_KEYS, words)) return false;
    if ((a.queries < 16 || words) && (casts || !ampc_flash_fits(a))) return false;
    if (!(a.scale > 0 && a.scale < 1e30f)) return false;       /* the largest score is found before scaling */
    if (a.batch < 1 || a.heads < 1 || a.queries < 1 || a.keys < 1 || a.queries > AMPC_FLASH_LONGEST ||
        a.keys > AMPC_FLASH_LONGEST)
        return false;
    return a.batch * a.heads <= INT32_MAX / ampc_blocks(a.queries > a.keys ? a.queries : a.keys, 64);
}

ampc_flash_call ampc_flash_prepare(const amp_k_attention &a, ampc_flash_pass pass, const ampc_flash_bits &bits) {
    const int64_t cache = 32 << 20, rows = pass == AMPC_TO_KEYS ? a.queries : a.keys, size = ampc_dtype_size(a.dtype);
    auto operand = [=](const void *data, const int64_t (&stride)[3]) {
        return ampc_flash_operand_of(data, stride, size);
    };
    ampc_flash_call c = {};
    ampc_flash_operand q = operand(a.q, a.q_stride), d_o = operand(a.d_o, a.do_stride);
    ampc_flash_operand k = operand(a.k, a.k_stride), v = operand(a.v, a.v_stride);
    c.heads = a.heads;
    c.all_heads = a.batch * a.heads;
    c.queries = (int)a.queries;
    c.keys = (int)a.keys;
    c.dim = (int)a.dim;
    c.together = (int)(cache / (rows * a.dim * 2 * size) + 1);
    c.tiles = (int)ampc_blocks(pass == AMPC_TO_KEYS ? a.keys : a.queries, AMPC_FLASH_OWN);
    c.scale = a.scale * AMPC_LOG2_E;
    c.factor = a.scale;
    c.mask = a.mask;
    c.bits = bits;
    c.hides = a.mask.kind != AMP_MASK_NONE || a.mask.lengths != NULL || a.mask.documents != NULL;
    c.own[0] = pass == AMPC_TO_KEYS ? k : q;
    c.own[1] = pass == AMPC_TO_KEYS ? v : d_o;
    c.others[0] = pass == AMPC_TO_KEYS ? q : k;
    c.others[1] = pass == AMPC_TO_KEYS ? d_o : v;
    c.out[0] = pass == AMPC_FORWARD      ? operand(a.o, a.o_stride)
               : pass == AMPC_TO_QUERIES ? operand(a.dq, a.dq_stride)
                                         : operand(a.dk, a.dk_stride);
    c.out[1] = operand(a.dv, a.dv_stride);
    c.lse = a.lse;
    c.padded = ampc_blocks(a.queries, 128) * 128;
    return c;
}

/* ---- Launches on Hopper */

/* Describes an operand of [batch, positions, heads, dim], of which TMA fetches `rows` rows and 64 columns at a time.  A
   dimension along which nothing changes has size 1.  Its stride is not used, but must be a multiple of 16.  Returns
   whether the driver takes it. */
bool ampc_hopper_encode(const ampc_device *dev, const ampc_flash_call &c, amp_dtype dtype, const ampc_flash_operand &x,
                        int positions, int rows, ampc_hopper_operand *out) {
    const int64_t any = ampc_blocks(x.row * positions, 16) * 16, batch = c.all_heads / c.heads;
    out->head_step = x.head != 0 && c.heads > 1;
    out->batch_step = x.batch != 0 && batch > 1;
    const uint64_t sizes[] = {(uint64_t)c.dim, (uint64_t)positions, out->head_step ? (uint64_t)c.heads : 1,
                              out->batch_step ? (uint64_t)batch : 1};
    const uint64_t strides[] = {(uint64_t)x.row, (uint64_t)(out->head_step ? x.head : any),
                                (uint64_t)(out->batch_step ? x.batch : any)};
    const unsigned box[] = {64, (unsigned)rows, 1, 1}, steps[] = {1, 1, 1, 1};
    return dev->encode_tiled(&out->map, dtype == AMP_BF16 ? AMPC_MAP_BF16 : AMPC_MAP_F16, 4, x.data, sizes, strides,
                             box, steps, AMPC_MAP_PLAIN, AMPC_MAP_SWIZZLE_128, AMPC_MAP_L2_128, AMPC_MAP_ZEROS) == 0;
}

/* Logs that a call with warpgroups runs without them.  Only the first such call of a context is logged. */
void ampc_hopper_declined(ampc_device *dev) {
    if (__atomic_fetch_add(&dev->declined, 1, __ATOMIC_RELAXED) > 0) return;
    dev->host.log(dev->host.user, AMP_LOG_WARNING, AMPC_LOG_MAPS,
                  "amp_cuda: the driver refused a tensor map: this attention runs by mma.sync instead of wgmma, and is "
                  "slower; later ones are counted, and amp_close logs how many there were");
}

/* Whether warpgroups do this pass.  If so, fills in the launch. */
bool ampc_hopper_takes(ampc_device *dev, const ampc_flash_call &c, ampc_flash_pass pass, amp_dtype compute,
                       ampc_hopper_call *out) {
    const bool keys = pass == AMPC_TO_KEYS;
    const int own = keys ? c.keys : c.queries, others = keys ? c.queries : c.keys,
              tile = ampc_hopper_tile(ampc_flash_width(c.dim), pass);
    bool taken = true;
    if (!dev->has.warpgroups || ampc_in_words(compute)) return false;
    if (c.queries < AMPC_HOPPER_FROM || c.keys < AMPC_HOPPER_FROM) return false;
    memset((void *)out, 0, sizeof *out);
    out->flash = c;
    for (int i = 0; i < 2; i++) {
        if (i == 0 || pass != AMPC_FORWARD)
            taken = taken && ampc_hopper_encode(dev, c, compute, c.own[i], own, AMPC_CONSUMER_ROWS, &out->own[i]);
        taken = taken && ampc_hopper_encode(dev, c, compute, c.others[i], others, tile, &out->others[i]);
    }
    if (!taken) ampc_hopper_declined(dev);
    return taken;
}

template <int D, amp_dtype C> struct ampc_flash_kind {
    static constexpr int d = D;
    static constexpr amp_dtype compute = C;
    static constexpr bool words = ampc_in_words(C);
};
template <int D, class F> amp_result ampc_flash_pick_dtype(amp_dtype compute, F run) {
    switch (compute) {
        case AMP_F32: return run(ampc_flash_kind<D, AMP_F32>());
        case AMP_TF32: return run(ampc_flash_kind<D, AMP_TF32>());
        case AMP_BF16: return run(ampc_flash_kind<D, AMP_BF16>());
        default: return run(ampc_flash_kind<D, AMP_F16>());
    }
}
template <class F> amp_result ampc_flash_pick(const amp_k_attention &a, F run) {
    return ampc_flash_width(a.dim) == 64 ? ampc_flash_pick_dtype<64>(a.compute, run)
                                         : ampc_flash_pick_dtype<128>(a.compute, run);
}

/* Packs those of the mask's heads that differ, in order. */
__global__ void __launch_bounds__(256)
    ampc_flash_pack(amp_mask mask, ampc_flash_bits to, int64_t heads, int64_t queries, int64_t keys, int64_t groups) {
    const int lane = (int)threadIdx.x % 32;
    for (int64_t group = (int64_t)blockIdx.x * 8 + threadIdx.x / 32; group < groups; group += (int64_t)gridDim.x * 8) {
        int64_t row = group / (to.row / 4), key = (group - row * (to.row / 4)) * 128 + lane, head = row / queries,
                b = head / heads;
        const uint8_t *from = mask.allowed + b * mask.allowed_batch_stride +
                              (head - b * heads) * mask.allowed_head_stride + (row - head * queries) * keys;
        bool seen[4];
        AMPC_UNROLL
        for (int i = 0; i < 4; i++) seen[i] = key + 32 * i < keys && from[key + 32 * i] != 0;
        uint4 words = {__ballot_sync(0xffffffffu, seen[0]), __ballot_sync(0xffffffffu, seen[1]),
                       __ballot_sync(0xffffffffu, seen[2]), __ballot_sync(0xffffffffu, seen[3])};
        if (lane == 0) ((uint4 *)(void *)to.data)[group] = words;
    }
}

/* Packs an arbitrary mask into scratch memory, and only once if sequences or heads share it.  Other masks need no
   bits. */
amp_result ampc_flash_mask(ampc_device *dev, const amp_k_attention &a, const char *name, void *stream,
                           ampc_scratch *scratch, ampc_flash_bits *bits) {
    const amp_mask &mask = a.mask;
    int64_t heads = mask.allowed_head_stride ? a.heads : 1, batch = mask.allowed_batch_stride ? a.batch : 1, words;
    *bits = ampc_flash_bits{NULL, 0, 0, 0};
    if (mask.kind != AMP_MASK_ARBITRARY) return AMP_OK;
    bits->row = ampc_blocks(a.keys, 128) * 4;
    bits->head = heads > 1 ? a.queries * bits->row : 0;
    bits->batch = batch > 1 ? heads * a.queries * bits->row : 0;
    words = batch * heads * a.queries * bits->row;
    AMPC_TRY(scratch->get((size_t)words * sizeof(uint32_t), name));
    bits->data = (uint32_t *)scratch->data;
    return ampc_launch(dev, name, ampc_flash_pack, ampc_grid(dev, ampc_blocks(words, 4 * 8), 8), 256, 0, stream, mask,
                       *bits, heads, a.queries, a.keys, words / 4);
}

/* ---- Rows that are not aligned, or are no multiple of 16 bytes, and rows in fp32 that are multiplied in 16 bits.  The
   kernels run on copies, filled up with zeros.  Their results are copied back, and have 16 bits then too. */

/* A tensor [batch, positions, heads, dim]. */
struct ampc_heads {
    void *data;
    int64_t stride[3];
    int dim;
    amp_dtype dtype;
    __device__ int64_t at(int64_t b, int64_t position, int64_t head) const {
        return b * stride[0] + position * stride[1] + head * stride[2];
    }
};
struct ampc_heads_copy {
    ampc_heads from, to;
    ampc_divisor positions;
};
struct ampc_heads_copies {
    ampc_heads_copy each[5];
    int count;
};

/* `pieces` is how many pieces of 8 numbers a row has.  Without CAST, all numbers have 16 bits and stay as they are. */
template <bool CAST> __global__ void __launch_bounds__(256)
    ampc_copy_heads(ampc_heads_copies copies, int64_t batch, ampc_divisor heads, ampc_divisor pieces) {
    for (int k = 0; k < copies.count; k++) {
        const ampc_heads_copy &x = copies.each[k];
        const int64_t all = batch * x.positions.d * heads.d * pieces.d;
        for (int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x; i < all; i += (int64_t)gridDim.x * 256) {
            int64_t piece, head, position, b = ampc_divide(ampc_divide(i, pieces, &piece), heads, &head);
            b = ampc_divide(b, x.positions, &position);
            if constexpr (CAST) {
                const int64_t from = x.from.at(b, position, head) + 8 * piece;
                const int64_t to = x.to.at(b, position, head) + 8 * piece;
                float numbers[AMPC_LANES];
                ampc_load_upto<AMPC_LANES, AMPC_ONCE>(ampc_within(x.from.data, x.from.dtype, from), x.from.dtype,
                                                      numbers, x.from.dim - 8 * piece);
                ampc_store_upto<AMPC_LANES, AMPC_ONCE>(ampc_within(x.to.data, x.to.dtype, to), x.to.dtype, numbers,
                                                       x.to.dim - 8 * piece);
            } else {
                uint16_t bits[AMPC_LANES];
                ampc_fetch_upto<AMPC_ONCE>((uint16_t *)x.from.data + x.from.at(b, position, head) + 8 * piece, bits,
                                           x.from.dim - 8 * piece);
                ampc_leave_upto<AMPC_ONCE>((uint16_t *)x.to.data + x.to.at(b, position, head) + 8 * piece, bits,
                                           x.to.dim - 8 * piece);
            }
        }
    }
}

/* A call whose rows are copied or cast where that is necessary.  The copies exist as long as this object does. */
struct ampc_filled_heads {
    ampc_device *dev;
    amp_k_attention a;
    const char *name;
    void *stream;
    ampc_scratch memory;
    ampc_heads_copies in, out;
    int64_t used;                   /* numbers of the memory that are taken */
    bool casts;
    ampc_filled_heads(ampc_device *d, const amp_k_attention &given, const char *call, void *s)
        : dev(d), a(given), name(call), stream(s), memory(d, s), in(), out(), used(0), casts(ampc_flash_casts(given)) {}
    int64_t filled() const { return ampc_blocks(a.dim, 8) * 8; }
    template <class T> void copy(bool result, T *&data, int64_t (&stride)[3], int64_t positions) {
        const int64_t wide = filled(), row = a.heads * wide;
        const ampc_heads given = {const_cast<void *>(data), {stride[0], stride[1], stride[2]}, (int)a.dim, a.dtype};
        const ampc_heads made = {(uint16_t *)memory.data + used, {positions * row, row, wide}, (int)wide, a.compute};
        ampc_heads_copies &list = result ? out : in;
        list.each[list.count++] = ampc_heads_copy{result ? made : given, result ? given : made, positions};
        data = made.data;
        for (int i = 0; i < 3; i++) stride[i] = made.stride[i];
        used += a.batch * positions * row;
    }
    amp_result run(const ampc_heads_copies &copies) const {
        int64_t pieces = a.batch * (a.queries > a.keys ? a.queries : a.keys) * a.heads * (a.dim / 8);
        return ampc_launch(dev, name, casts ? ampc_copy_heads<true> : ampc_copy_heads<false>,
                           ampc_grid(dev, ampc_blocks(pieces, 256), 8), 256, 0, stream, copies, a.batch, a.heads,
                           a.dim / 8);
    }
    amp_result open(bool backward) {
        if (!casts && ampc_flash_fits(a)) return AMP_OK;
        AMPC_TRY(memory.get((size_t)((backward ? 8 : 4) * a.batch * (a.queries + a.keys) * a.heads * filled()), name));
        copy(false, a.q, a.q_stride, a.queries);
        copy(false, a.k, a.k_stride, a.keys);
        copy(false, a.v, a.v_stride, a.keys);
        copy(!backward, a.o, a.o_stride, a.queries);
        if (backward) {
            copy(false, a.d_o, a.do_stride, a.queries);
            copy(true, a.dq, a.dq_stride, a.queries);
            copy(true, a.dk, a.dk_stride, a.keys);
            copy(true, a.dv, a.dv_stride, a.keys);
        }
        a.dim = filled();
        a.dtype = a.compute;
        return run(in);
    }
    /* `result` is that of the kernels. */
    amp_result close(amp_result result) const { return result == AMP_OK && out.count > 0 ? run(out) : result; }
};

amp_result ampc_flash_forward(ampc_device *dev, const amp_k_attention &given, void *stream) {
    ampc_filled_heads heads(dev, given, "amp_attention", stream);
    ampc_scratch scratch(dev, stream);
    ampc_flash_bits bits;
    const amp_k_attention &a = heads.a;
    AMPC_TRY(heads.open(false));
    AMPC_TRY(ampc_flash_mask(dev, a, "amp_attention", stream, &scratch, &bits));
    const ampc_flash_call call = ampc_flash_prepare(a, AMPC_FORWARD, bits);
    const unsigned blocks = (unsigned)(call.all_heads * call.tiles);
    ampc_hopper_call hopper;
    const bool warpgroups = ampc_hopper_takes(dev, call, AMPC_FORWARD, a.compute, &hopper);
    return heads.close(ampc_flash_pick(a, [&](auto kind) {
        typedef decltype(kind) K;
        if constexpr (!K::words) {
            if (warpgroups)
                return ampc_launch(dev, "amp_attention", ampc_flash_hopper_rows<K::d, K::compute>, blocks,
                                   AMPC_HOPPER_THREADS, ampc_hopper_layout<AMPC_FORWARD, K::d>::all, stream, hopper);
        }
        return ampc_launch(dev, "amp_attention", ampc_flash_rows<K::d, K::compute>, blocks,
                           (unsigned)ampc_flash_shape_of(K::d, AMPC_FORWARD, K::words).threads,
                           ampc_flash_shared(K::d, AMPC_FORWARD, K::words), stream, call);
    }));
}

/* ---- Sums of the gradients over all rows, for the bias of the layer that made q, k and v.  A warp adds the rows that
   it has written to a run, and one launch at the end adds the runs. */

bool ampc_attention_sums(const amp_k_attention &a) {
    return a.sums[0].data != NULL || a.sums[1].data != NULL || a.sums[2].data != NULL;
}
/* The same by column sums of dq, dk and dv. */
amp_result ampc_attention_sums_apart(ampc_device *dev, const amp_k_attention &a, void *stream) {
    void *const data[] = {a.dq, a.dk, a.dv};
    const int64_t *const stride[] = {a.dq_stride, a.dk_stride, a.dv_stride};
    for (int i = 0; i < 3; i++) {
        const int64_t rows = i == 0 ? a.queries : a.keys, apart = rows > 1 ? stride[i][1] : stride[i][0];
        AMPC_TRY(ampc_sum_columns(dev, amp_mat{data[i], a.dtype, 0, a.batch * rows, a.heads * a.dim, apart}, a.sums[i],
                                  stream));
    }
    return AMP_OK;
}

/* The runs of a backward, with memory for runs of 16 rows, the shortest that a kernel writes. */
struct ampc_flash_runs {
    ampc_scratch memory;
    float *of[2];                   /* of dq; of dk and dv; NULL: not wanted */
    int runs[2];                    /* of a sequence */
    ampc_flash_runs(ampc_device *dev, void *stream) : memory(dev, stream), of(), runs() {}
    amp_result open(const amp_k_attention &a, const char *name) {
        const int64_t columns = a.heads * a.dim, queries = a.batch * ampc_blocks(a.queries, 16) * columns,
                      keys = a.batch * ampc_blocks(a.keys, 16) * columns;
        AMPC_TRY(memory.get((size_t)(queries + 2 * keys) * sizeof(float), name));
        of[0] = (float *)memory.data;
        of[1] = of[0] + queries;
        return AMP_OK;
    }
    void give(ampc_flash_call *call, bool keys, int rows) {
        call->sums = of[keys];
        call->runs = runs[keys] = (int)ampc_blocks(keys ? call->keys : call->queries, rows);
    }
    amp_result close(ampc_device *dev, const amp_k_attention &a, const char *name, void *stream) const {
        const int64_t columns = a.heads * a.dim, queries = a.batch * runs[0], keys = a.batch * runs[1];
        return ampc_finish_runs(dev, name, ampc_run_sums{{{of[0], queries, columns, a.sums[0]},
                                                          {of[1], keys, 2 * columns, a.sums[1]},
                                                          {of[1] + columns, keys, 2 * columns, a.sums[2]}}},
                                3, columns, stream);
    }
};

template <ampc_flash_pass PASS, int D, amp_dtype C>
amp_result ampc_flash_gradient(ampc_device *dev, const amp_k_attention &a, void *stream, const ampc_flash_bits &bits,
                               const float2 *stats, ampc_flash_runs *runs) {
    constexpr bool keys = PASS == AMPC_TO_KEYS, words = ampc_in_words(C);
    constexpr ampc_flash_shape shape = ampc_flash_shape_of(D, PASS, words);
    ampc_flash_call call = ampc_flash_prepare(a, PASS, bits);
    const unsigned blocks = (unsigned)(call.all_heads * call.tiles);
    ampc_hopper_call hopper;
    call.stats = stats;
    runs->give(&call, keys, 16);
    if constexpr (!words) {
        if (ampc_hopper_takes(dev, call, PASS, C, &hopper))
            return ampc_launch(dev, "amp_attention_backward", ampc_flash_hopper_gradient_rows<PASS, D, C>, blocks,
                               AMPC_HOPPER_THREADS, ampc_hopper_layout<PASS, D>::all, stream, hopper);
    }
    runs->give(&call, keys, 32 * AMPC_FLASH_OWN / shape.threads);
    return ampc_launch(dev, "amp_attention_backward", ampc_flash_gradient_rows<PASS, D, C>, blocks,
                       (unsigned)shape.threads, ampc_flash_shared(D, PASS, words), stream, call);
}

amp_result ampc_flash_backward(ampc_device *dev, const amp_k_attention &given, void *stream) {
    const char *name = "amp_attention_backward";
    ampc_filled_heads heads(dev, given, name, stream);
    ampc_scratch scratch(dev, stream), mask(dev, stream);
    ampc_flash_runs runs(dev, stream);
    ampc_flash_bits bits;
    const amp_k_attention &a = heads.a;
    AMPC_TRY(heads.open(true));
    const bool apart = a.dim != given.dim;      /* a filled head has more columns than the bias */
    AMPC_TRY(ampc_flash_mask(dev, a, name, stream, &mask, &bits));
    const ampc_flash_call call = ampc_flash_prepare(a, AMPC_TO_QUERIES, bits);
    int64_t rows = call.all_heads * call.padded;
    AMPC_TRY(scratch.get((size_t)rows * sizeof(float2), name));
    if (ampc_attention_sums(a) && !apart) AMPC_TRY(runs.open(a, name));
    const amp_result result = heads.close(ampc_flash_pick(a, [&](auto kind) {
        typedef decltype(kind) K;
        float2 *stats = (float2 *)scratch.data;
        constexpr int v = K::words ? 4 : 8;
        AMPC_TRY((ampc_attention_stats<v, K::d / v>(dev, a, call.padded, stats, stream)));
        AMPC_TRY((ampc_flash_gradient<AMPC_TO_KEYS, K::d, K::compute>(dev, a, stream, bits, stats, &runs)));
        return ampc_flash_gradient<AMPC_TO_QUERIES, K::d, K::compute>(dev, a, stream, bits, stats, &runs);
    }));
    AMPC_TRY(result);
    if (runs.of[0] == NULL) return ampc_attention_sums_apart(dev, given, stream);
    return runs.close(dev, a, name, stream);
}

/* ==== 9 >>operators: attention on the fp32 units ====
   These kernels take any shape, mask, dtype and head dimension, after Dao et al. 2022 and with the semantics of the CPU
   backend.  Operands and probabilities are rounded to the compute dtype, and products and sums are fp32.  A block owns
   64 rows, which are queries, or keys in the pass for dk and dv.  It visits in order the other side's tiles of 64 that
   it sees, so nothing depends on the order of blocks.  It sums 64 or 128 columns of its results at once, and computes
   the scores again for further ones.  Thread (x, y) of 16 x 16 holds 4 x 4 of every tile, which are the owned rows 4 y
   to 4 y + 3 and the others 4 x to 4 x + 3. */

enum { AMPC_ATTENTION_PER_SM = 2 };

/* A block's work, which is the rows from i0 on and the columns from c0 on of a head. */
struct ampc_attention_item { int64_t b, h, i0, c0; };

/* Where a head of a tensor starts. */
__device__ __forceinline__ int64_t ampc_head_at(const ampc_attention_item &i, const int64_t (&stride)[3]) {
    return i.b * stride[0] + i.h * stride[2];
}
/* A head as an operand.  ampc_head_rows has its rows, for products along columns.  ampc_head_columns has its columns
   from c0 on, for products along rows. */
__device__ __forceinline__ ampc_operand ampc_head_rows(const amp_k_attention &a, const ampc_attention_item &i,
                                                       const void *data, const int64_t (&stride)[3], int64_t rows) {
    return ampc_operand{ampc_at(data, a.dtype, ampc_head_at(i, stride)), a.dtype, a.compute, stride[1], 1, rows};
}
__device__ __forceinline__ ampc_operand ampc_head_columns(const amp_k_attention &a, const ampc_attention_item &i,
                                                          const void *data, const int64_t (&stride)[3]) {
    return ampc_operand{ampc_at(data, a.dtype, ampc_head_at(i, stride) + i.c0),
                        a.dtype,
                        a.compute,
                        1,
                        stride[1],
                        a.dim - i.c0};
}

/* Shared memory of a block, which each product reuses at once. */
struct ampc_attention_scratch {
    ampc_strip tiles[2][AMPC_GEMM_DEPTH];
    ampc_strip weights[AMPC_GEMM_TILE];         /* of [other row][owned row] */
    ampc_sight sights[AMPC_GEMM_TILE];          /* of the current queries */
    float lse[AMPC_GEMM_TILE], delta[AMPC_GEMM_TILE];
    ampc_attention_item item;
    ampc_span reach;                            /* of the owned queries: keys below `first`, and those in [low, high) */
};

/* Sets the block's next item.  A tile has `groups` items of 64 N columns.  Heads vary fastest, so that tiles at the
   same place, which cost the same, run together.  The item is in shared memory, to leave the registers to sums. */
template <int N>
__device__ __forceinline__ void ampc_attention_begin(const amp_k_attention &a, int64_t number, int64_t groups,
                                                     int64_t tiles, bool last_first, ampc_attention_scratch *scratch) {
    int64_t heads = a.batch * a.heads, place = number / heads, head = number - place * heads, tile = place / groups;
    if (threadIdx.x == 0)
        scratch->item =
            ampc_attention_item{head / a.heads, head % a.heads, (last_first ? tiles - 1 - tile : tile) * AMPC_GEMM_TILE,
                                (place - tile * groups) * AMPC_GEMM_TILE * N};
    __syncthreads();
}

/* Looks up what the 64 queries from `query` on see and, with `stats`, their lse and delta.  Queries beyond the last one
   see nothing. */
__device__ __forceinline__ void ampc_attention_open(const amp_k_attention &a, int64_t query, const float2 *stats,
                                                    ampc_attention_scratch *scratch) {
    const ampc_attention_item &item = scratch->item;
    if (threadIdx.x < AMPC_GEMM_TILE) {
        int64_t q = query + threadIdx.x;
        ampc_sight blind = {{0, INT64_MAX, 0}, 0, NULL, 0, NULL};
        bool live = q < a.queries;
        if (stats != NULL) {
            const float2 stat = live ? stats[(item.b * a.heads + item.h) * a.queries + q] : float2{0.0f, 0.0f};
            scratch->lse[threadIdx.x] = stat.x;
            scratch->delta[threadIdx.x] = stat.y;
        }
        scratch->sights[threadIdx.x] = live ? ampc_sight_of(a.mask, item.b, item.h, q, a.queries, a.keys) : blind;
    }
    __syncthreads();
}

/* Finds the range of keys that these queries see. */
__device__ __forceinline__ void ampc_attention_reach(ampc_attention_scratch *scratch) {
    if (threadIdx.x < 32) {
        const ampc_span &s = scratch->sights[threadIdx.x].span, &t = scratch->sights[threadIdx.x + 32].span;
        int64_t first = ampc_warp_max(s.first > t.first ? s.first : t.first);
        int64_t low = ampc_warp_max(-(s.low < t.low ? s.low : t.low)),
                high = ampc_warp_max(s.high > t.high ? s.high : t.high);
        if (threadIdx.x == 0) scratch->reach = ampc_span{first, -low, high};
    }
    __syncthreads();
}

/* Bit 4 i + j says whether this thread's owned row i and other row j see each other.  The current keys start at `key`.
   With KEYS, they are the owned rows. */
template <bool KEYS>
__device__ __forceinline__ unsigned ampc_attention_look(const ampc_attention_scratch *scratch, int64_t key) {
    int x = 4 * (int)(threadIdx.x % 16), y = 4 * (int)(threadIdx.x / 16);
    unsigned seen = 0;
    AMPC_UNROLL
    for (int q = 0; q < 4; q++) {
        const ampc_sight &s = scratch->sights[(KEYS ? x : y) + q];
        int first = (int)ampc_clamp(s.span.first - key, 0, AMPC_GEMM_TILE);
        int low = (int)ampc_clamp(s.span.low - key, 0, AMPC_GEMM_TILE);
        int high = (int)ampc_clamp(s.span.high - key, 0, AMPC_GEMM_TILE);
        AMPC_UNROLL
        for (int k = 0; k < 4; k++) {
            int at = (KEYS ? y : x) + k;
            bool see = ampc_in_span(at, first, low, high) && ampc_lets_see(s, key + at);
            seen |= (see ? 1u : 0u) << (KEYS ? 4 * k + q : 4 * q + k);
        }
    }
    return seen;
}

/* sum[i][j] = row i0 + 4 y + i of x times row j0 + 4 x + j of y */
__device__ __forceinline__ void ampc_attention_sum(const amp_k_attention &a, const ampc_operand &own, int64_t i0,
                                                   const ampc_operand &other, int64_t j0,
                                                   ampc_attention_scratch *scratch, float (&sum)[4][4]) {
    ampc_gemm_sum(own, 0, i0, other, 0, j0, a.dim, scratch->tiles[0], scratch->tiles[1], sum);
}

/* Shares this thread's weights with the block, rounded to the compute dtype. */
__device__ __forceinline__ void ampc_attention_hand(const float (&w)[4][4], amp_dtype compute,
                                                    ampc_attention_scratch *scratch) {
    unsigned x = threadIdx.x % 16, y = threadIdx.x / 16;
    AMPC_UNROLL
    for (int j = 0; j < 4; j++) {
        AMPC_UNROLL
        for (int i = 0; i < 4; i++) scratch->weights[4 * x + j][4 * y + i] = ampc_rounded(w[i][j], compute);
    }
}

/* Adds to `sum` the weights times rows [begin, begin + 64) of z, which has `rows` rows.  Under a mask a weight of 0
   gives 0, even times the infinities and NaN that hidden rows may hold. */
template <int N>
__device__ __forceinline__ void ampc_attention_add(const ampc_operand &z, int64_t begin, int64_t rows, bool masked,
                                                   ampc_attention_scratch *scratch, float (&sum)[N][4][4]) {
    for (int d = 0; d < AMPC_GEMM_TILE && begin + d < rows; d += AMPC_GEMM_DEPTH) {
        bool wild = false;
        AMPC_UNROLL
        for (int n = 0; n < N; n++)
            wild |= ampc_gemm_fetch(z, 0, n * AMPC_GEMM_TILE, begin + d, rows, scratch->tiles[n]);
        bool careful = __syncthreads_or(wild && masked);
        AMPC_UNROLL
        for (int n = 0; n < N; n++) {
            if (careful) ampc_gemm_add<true>(scratch->weights + d, scratch->tiles[n], sum[n]);
            else ampc_gemm_add<false>(scratch->weights + d, scratch->tiles[n], sum[n]);
        }
        __syncthreads();
    }
}

__device__ __forceinline__ bool ampc_mask_hides(const amp_mask &mask) {
    return mask.kind != AMP_MASK_NONE || mask.lengths != NULL || mask.documents != NULL;
}

/* Rounds factor[i] * sum into a head of a tensor of `rows` rows. */
template <int N>
__device__ __forceinline__ void ampc_attention_store(const amp_k_attention &a, const ampc_attention_item &item,
                                                     void *data, const int64_t (&stride)[3], int64_t rows,
                                                     const float (&sum)[N][4][4], const float (&factor)[4]) {
    unsigned x = threadIdx.x % 16, y = threadIdx.x / 16;
    AMPC_UNROLL
    for (int e = 0; e < 16 * N; e++) {
        int n = e / 16, i = e / 4 % 4, j = e % 4;
        int64_t row = item.i0 + 4 * y + i, column = item.c0 + n * AMPC_GEMM_TILE + 4 * x + j;
        if (row < rows && column < a.dim)
            ampc_put_stored(data, a.dtype, ampc_head_at(item, stride) + row * stride[1] + column,
                            ampc_mul(sum[n][i][j], factor[i]));
    }
}

/* ---- Forward, by the running softmax of Milakov and Gimelshein 2018.  A tile of scores gives m = max(m, scores),
   p = exp(score - m) and rescale = exp(old m - m).  Then sum = sum rescale + all p, and o = o rescale + p v. */

/* The running softmax of a thread's four rows.  `max` is over the whole row, and `sum` is over the thread's keys. */
struct ampc_online_softmax {
    float max[4], sum[4];
    /* Turns scores into weights, which are 0 if hidden. */
    __device__ __forceinline__ void add(float (&s)[4][4], unsigned seen, float scale, float (&rescale)[4]) {
        AMPC_UNROLL
        for (int i = 0; i < 4; i++) {
            float top = max[i], shift;
            AMPC_UNROLL
            for (int j = 0; j < 4; j++) {
                s[i][j] = seen >> (4 * i + j) & 1 ? ampc_mul(s[i][j], scale) : ampi_f32_of_bits(0xff800000u);
                top = fmaxf(top, s[i][j]);
            }
            AMPC_UNROLL
            for (int step = 8; step > 0; step >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
            shift = ampi_bits_f32(top) == 0xff800000u ? 0.0f : top;
            rescale[i] = ampc_exp_below(max[i], shift);
            sum[i] = ampc_mul(sum[i], rescale[i]);
            AMPC_UNROLL
            for (int j = 0; j < 4; j++) sum[i] += s[i][j] = ampc_exp_below(s[i][j], shift);
            max[i] = top;
        }
    }
    /* Returns row i's log-sum-exp, and replaces its sum by 1 / sum.  If no key is visible, these are -inf and 0. */
    __device__ __forceinline__ float finish(int i) {
        float total = sum[i];
        AMPC_UNROLL
        for (int step = 8; step > 0; step >>= 1) total += __shfl_xor_sync(0xffffffffu, total, step);
        sum[i] = total == 0.0f ? 0.0f : ampc_div(1.0f, total);
        return total == 0.0f ? ampi_f32_of_bits(0xff800000u) : max[i] + logf(total);
    }
};

template <int N> __global__ void __launch_bounds__(256, AMPC_ATTENTION_PER_SM)
ampc_attention_kernel(amp_k_attention a, int64_t tiles, int64_t groups) {
    AMPC_SHARED(ampc_attention_scratch, scratch, 1);
    const bool masked = ampc_mask_hides(a.mask);
    const ampc_attention_item &item = scratch->item;
    const ampc_span &reach = scratch->reach;
    for (int64_t number = blockIdx.x; number < a.batch * a.heads * tiles * groups; number += gridDim.x) {
        const float lowest = ampi_f32_of_bits(0xff800000u);
        ampc_online_softmax running = {{lowest, lowest, lowest, lowest}, {0.0f, 0.0f, 0.0f, 0.0f}};
        float sum[N][4][4] = {};
        ampc_attention_begin<N>(a, number, groups, tiles, true, scratch);
        ampc_attention_open(a, item.i0, NULL, scratch);
        ampc_attention_reach(scratch);
        for (int64_t key = 0; key < reach.first || key < reach.high; key += AMPC_GEMM_TILE) {
            float s[4][4], rescale[4];
            if (key >= reach.first && key + AMPC_GEMM_TILE <= reach.low) continue;
            unsigned seen = ampc_attention_look<false>(scratch, key);
            if (!__syncthreads_or(seen != 0)) continue;
            ampc_attention_sum(a, ampc_head_rows(a, item, a.q, a.q_stride, a.queries), item.i0,
                               ampc_head_rows(a, item, a.k, a.k_stride, a.keys), key, scratch, s);
            running.add(s, seen, a.scale, rescale);
            AMPC_UNROLL
            for (int e = 0; e < 16 * N; e++)
                sum[e / 16][e / 4 % 4][e % 4] = ampc_mul(sum[e / 16][e / 4 % 4][e % 4], rescale[e / 4 % 4]);
            ampc_attention_hand(s, a.compute, scratch);
            ampc_attention_add<N>(ampc_head_columns(a, item, a.v, a.v_stride), key, a.keys, masked, scratch, sum);
        }
        AMPC_UNROLL
        for (int i = 0; i < 4; i++) {
            int64_t row = item.i0 + 4 * (threadIdx.x / 16) + i;
            float lse = running.finish(i);
            if (threadIdx.x % 16 == 0 && row < a.queries && item.c0 == 0 && a.lse != NULL)
                a.lse[(item.b * a.heads + item.h) * a.queries + row] = lse;
        }
        ampc_attention_store<N>(a, item, a.o, a.o_stride, a.queries, sum, running.sum);
        __syncthreads();
    }
}

/* ---- Backward.  With s the scaled scores, p = exp(s - lse), dp = do v^T, delta is the sum over d of do o, and
   ds = p (dp - delta).  Then dq = scale ds k, dk = scale ds^T q and dv = p^T do.  One kernel owns queries and sums dq,
   or owns keys and sums dk and dv. */

/* Turns scores into p and dp into ds, which are 0 if hidden. */
template <bool KEYS>
__device__ __forceinline__ void ampc_attention_slopes(float (&s)[4][4], float (&dp)[4][4], unsigned seen, float scale,
                                                      const ampc_attention_scratch *scratch) {
    AMPC_UNROLL
    for (int e = 0; e < 16; e++) {
        int i = e / 4, j = e % 4, q = KEYS ? 4 * (int)(threadIdx.x % 16) + j : 4 * (int)(threadIdx.x / 16) + i;
        float p = ampc_exp_below(ampc_mul(s[i][j], scale), scratch->lse[q]);
        bool see = seen >> e & 1;
        s[i][j] = see ? p : 0.0f;
        dp[i][j] = see ? ampc_mul(p, dp[i][j] - scratch->delta[q]) : 0.0f;
    }
}

template <int N, bool KEYS> __global__ void __launch_bounds__(256, KEYS && N > 1 ? 1 : AMPC_ATTENTION_PER_SM)
ampc_attention_gradient_kernel(amp_k_attention a, const float2 *stats, int64_t tiles, int64_t groups) {
    AMPC_SHARED(ampc_attention_scratch, scratch, 1);
    const bool masked = ampc_mask_hides(a.mask);
    const ampc_attention_item &item = scratch->item;
    const ampc_span &reach = scratch->reach;
    for (int64_t number = blockIdx.x; number < a.batch * a.heads * tiles * groups; number += gridDim.x) {
        float first[N][4][4] = {}, second[KEYS ? N : 1][4][4] = {};         /* dq; or dk and dv */
        ampc_attention_begin<N>(a, number, groups, tiles, !KEYS, scratch);
        if (!KEYS) {
            ampc_attention_open(a, item.i0, stats, scratch);
            ampc_attention_reach(scratch);
        }
        for (int64_t other = 0; KEYS ? other < a.queries : other < reach.first || other < reach.high;
             other += AMPC_GEMM_TILE) {
            const ampc_operand q = ampc_head_rows(a, item, a.q, a.q_stride, a.queries);
            const ampc_operand k = ampc_head_rows(a, item, a.k, a.k_stride, a.keys);
            const ampc_operand v = ampc_head_rows(a, item, a.v, a.v_stride, a.keys);
            const ampc_operand d_o = ampc_head_rows(a, item, a.d_o, a.do_stride, a.queries);
            float s[4][4], dp[4][4];
            if (!KEYS && other >= reach.first && other + AMPC_GEMM_TILE <= reach.low) continue;
            if (KEYS) ampc_attention_open(a, other, stats, scratch);
            unsigned seen = ampc_attention_look<KEYS>(scratch, KEYS ? item.i0 : other);
            if (!__syncthreads_or(seen != 0)) continue;
            ampc_attention_sum(a, KEYS ? k : q, item.i0, KEYS ? q : k, other, scratch, s);
            ampc_attention_sum(a, KEYS ? v : d_o, item.i0, KEYS ? d_o : v, other, scratch, dp);
            ampc_attention_slopes<KEYS>(s, dp, seen, a.scale, scratch);
            if constexpr (KEYS) {
                ampc_attention_hand(s, a.compute, scratch);
                ampc_attention_add<N>(ampc_head_columns(a, item, a.d_o, a.do_stride), other, a.queries, masked, scratch,
                                      second);
            }
            ampc_attention_hand(dp, a.compute, scratch);
            ampc_attention_add<N>(KEYS ? ampc_head_columns(a, item, a.q, a.q_stride)
                                       : ampc_head_columns(a, item, a.k, a.k_stride),
                                  other, KEYS ? a.queries : a.keys, masked, scratch, first);
        }
        const float scales[4] = {a.scale, a.scale, a.scale, a.scale}, ones[4] = {1.0f, 1.0f, 1.0f, 1.0f};
        if constexpr (KEYS) {
            ampc_attention_store<N>(a, item, a.dk, a.dk_stride, a.keys, first, scales);
            ampc_attention_store<N>(a, item, a.dv, a.dv_stride, a.keys, second, ones);
        } else ampc_attention_store<N>(a, item, a.dq, a.dq_stride, a.queries, first, scales);
        __syncthreads();
    }
}

/* Calls run(tiles, groups, grid) for `rows` owned rows.  `tiles` is the number of their tiles, and `groups` the number
   of groups of `width` columns. */
template <class F>
amp_result ampc_attention_launch(ampc_device *dev, const amp_k_attention *a, int64_t rows, int64_t width, F run) {
    int64_t tiles = ampc_blocks(rows, AMPC_GEMM_TILE), groups = a->dim > 0 ? ampc_blocks(a->dim, width) : 1;
    return run(tiles, groups, ampc_grid(dev, a->batch * a->heads * tiles * groups, AMPC_ATTENTION_PER_SM));
}

template <int N> amp_result ampc_attention_as(ampc_device *dev, const amp_k_attention *a, void *stream) {
    return ampc_attention_launch(dev, a, a->queries, N * AMPC_GEMM_TILE,
                                 [&](int64_t tiles, int64_t groups, unsigned grid) {
                                     return ampc_launch(dev, "amp_attention", ampc_attention_kernel<N>, grid, 256, 0,
                                                        stream, *a, tiles, groups);
                                 });
}

template <int N>
amp_result ampc_attention_gradients_as(ampc_device *dev, const amp_k_attention *a, const float2 *stats, void *stream) {
    const char *name = "amp_attention_backward";
    amp_result result =
        ampc_attention_launch(dev, a, a->queries, N * AMPC_GEMM_TILE,
                              [&](int64_t tiles, int64_t groups, unsigned grid) {
                                  return ampc_launch(dev, name, ampc_attention_gradient_kernel<N, false>, grid, 256, 0,
                                                     stream, *a, stats, tiles, groups);
                              });
    if (result != AMP_OK) return result;
    return ampc_attention_launch(dev, a, a->keys, N * AMPC_GEMM_TILE,
                                 [&](int64_t tiles, int64_t groups, unsigned grid) {
                                     return ampc_launch(dev, name, ampc_attention_gradient_kernel<N, true>, grid, 256,
                                                        0, stream, *a, stats, tiles, groups);
                                 });
}

/* Replaces one of q, k and v by a saturated copy, unless `cut` is NULL. */
amp_result ampc_attention_cut(ampc_device *dev, ampc_scratch &scratch, const amp_k_cut *cut, const amp_k_attention &a,
                              int64_t positions, const void **x, int64_t (&stride)[3], void *stream) {
    if (cut == NULL) return AMP_OK;
    AMPC_TRY(scratch.get((size_t)(a.batch * positions * a.heads * a.dim * ampc_dtype_size(a.dtype)), "amp_attention"));
    ampc_cut c =
        {*x,  scratch.data, a.dtype, a.dtype, {a.batch, positions, a.heads}, a.dim, {stride[0], stride[1], stride[2]},
         *cut};
    AMPC_TRY(ampc_cut_run(dev, c, "amp_attention", stream));
    *x = scratch.data;
    stride[2] = a.dim, stride[1] = a.heads * a.dim, stride[0] = positions * a.heads * a.dim;
    return AMP_OK;
}

/* The call with saturated operands.  Their copies exist as long as this object does. */
struct ampc_attention_operands {
    amp_k_attention a;
    ampc_scratch q, k, v;
    ampc_attention_operands(ampc_device *dev, const amp_k_attention &given, void *stream)
        : a(given), q(dev, stream), k(dev, stream), v(dev, stream) {}
    amp_result cut(ampc_device *dev, void *stream) {
        AMPC_TRY(ampc_attention_cut(dev, q, a.cut[0], a, a.queries, &a.q, a.q_stride, stream));
        AMPC_TRY(ampc_attention_cut(dev, k, a.cut[1], a, a.keys, &a.k, a.k_stride, stream));
        return ampc_attention_cut(dev, v, a.cut[2], a, a.keys, &a.v, a.v_stride, stream);
    }
};

amp_result ampc_attention(void *device, const amp_k_attention *given, void *stream) {
    ampc_device *dev = (ampc_device *)device;
    ampc_attention_operands operands(dev, *given, stream);
    const amp_k_attention *a = &operands.a;
    AMPC_TRY(operands.cut(dev, stream));
    if (ampc_flash_serves(dev, *a)) return ampc_flash_forward(dev, *a, stream);
    return a->dim <= AMPC_GEMM_TILE ? ampc_attention_as<1>(dev, a, stream) : ampc_attention_as<2>(dev, a, stream);
}

amp_result ampc_attention_backward(void *device, const amp_k_attention *given, void *stream) {
    ampc_device *dev = (ampc_device *)device;
    ampc_attention_operands operands(dev, *given, stream);
    const amp_k_attention *a = &operands.a;
    int64_t rows = a->batch * a->heads * a->queries;
    ampc_scratch stats(dev, stream);
    AMPC_TRY(operands.cut(dev, stream));
    if (ampc_flash_serves(dev, *a)) return ampc_flash_backward(dev, *a, stream);
    if (rows > 0) AMPC_TRY(stats.get((size_t)rows * sizeof(float2), "amp_attention_backward"));
    AMPC_TRY((ampc_attention_stats<1, 32>(dev, *a, a->queries, (float2 *)stats.data, stream)));
    AMPC_TRY(a->dim <= AMPC_GEMM_TILE ? ampc_attention_gradients_as<1>(dev, a, (const float2 *)stats.data, stream)
                                      : ampc_attention_gradients_as<2>(dev, a, (const float2 *)stats.data, stream));
    return ampc_attention_sums_apart(dev, *given, stream);
}

/* ==== 11 >>gradients ====
   One launch of a multi-tensor kernel covers a table of any number of rows.  Rows are cut into chunks, which are
   numbered across the table.  Block b takes chunks b, b + grid, b + 2 grid and so on.  A warp finds a chunk's row by
   summing the chunks of 32 rows at a time.  Since chunks come in ascending order, it goes through the table once. */

enum { AMPC_CHUNK = 8192, AMPC_MULTI_THREADS = 256, AMPC_MULTI_PER_SM = 4, AMPC_OPTIMIZER_PER_SM = 3,
       AMPC_CHECK_BLOCKS = 512 };

struct ampc_cursor {
    const amp_k_tensor *table;
    int tensors, base;              /* base: the first of the 32 rows in view */
    int at;                         /* the chunk's number from that row on */
    int upto, tail;                 /* chunks of the rows in view up to this lane's, and elements of its last one */
};

__device__ inline void ampc_cursor_look(ampc_cursor *c) {
    int row = c->base + (int)(threadIdx.x % 32);
    c->upto = c->tail = 0;
    if (row < c->tensors && c->table[row].live) {
        c->upto = (int)ampc_blocks(c->table[row].count, AMPC_CHUNK);
        c->tail = (int)(c->table[row].count - (int64_t)(c->upto - 1) * AMPC_CHUNK);
    }
    for (unsigned step = 1; step < 32; step *= 2) {
        int other = __shfl_up_sync(0xffffffffu, c->upto, step);
        if (threadIdx.x % 32 >= step) c->upto += other;
    }
}

__device__ inline ampc_cursor ampc_cursor_begin(const amp_k_tensor *table, int64_t tensors) {
    ampc_cursor c = {table, (int)tensors, 0, (int)blockIdx.x, 0, 0};
    ampc_cursor_look(&c);
    return c;
}

/* The n elements of a row's chunk `inside`, and their table entry as it was loaded.  Nothing is computed from the entry
   before the chunk's turn, so that no thread waits for the load.  row is -1 if there is no chunk. */
struct ampc_entry {
    void *grad;                     /* of the row */
    int row, inside, n;
    amp_dtype dtype;                /* of grad */
};

/* The entry of the chunk that the cursor is at. */
__device__ inline ampc_entry ampc_cursor_find(ampc_cursor *c) {
    ampc_entry e = {NULL, -1, 0, 0, AMP_F32};
    int total = __shfl_sync(0xffffffffu, c->upto, 31), lane, before;
    while (c->at >= total) {
        c->at -= total;
        c->base += 32;
        if (c->base >= c->tensors) return e;
        ampc_cursor_look(c);
        total = __shfl_sync(0xffffffffu, c->upto, 31);
    }
    lane = __ffs((int)__ballot_sync(0xffffffffu, c->upto > c->at)) - 1;
    before = __shfl_sync(0xffffffffu, c->upto, lane - 1);
    e.row = c->base + lane;
    e.inside = c->at - (lane > 0 ? before : 0);
    e.n = __shfl_sync(0xffffffffu, c->upto - c->at == 1 ? c->tail : (int)AMPC_CHUNK, lane);
    e.grad = c->table[e.row].grad;
    e.dtype = c->table[e.row].grad_dtype;
    return e;
}

/* n elements of a row, from `first` on. */
struct ampc_chunk {
    void *grad;                     /* the gradient of the first of them */
    int64_t first;
    int row, n;
    amp_dtype dtype;                /* of grad */
};

/* Calls piece(chunk) for the block's chunks, with all its threads.  The next chunk's table entry is fetched while this
   chunk is processed. */
template <class F>
__device__ __forceinline__ void ampc_for_chunks(const amp_k_tensor *table, int64_t tensors, F piece) {
    ampc_cursor cursor = ampc_cursor_begin(table, tensors);
    ampc_entry next = ampc_cursor_find(&cursor);
    while (next.row >= 0) {
        const int64_t first = (int64_t)next.inside * AMPC_CHUNK;
        const ampc_chunk chunk = {ampc_at(next.grad, next.dtype, first), first, next.row, next.n, next.dtype};
        cursor.at += (int)gridDim.x;
        next = ampc_cursor_find(&cursor);
        piece(chunk);
    }
}

/* ---- Check and scale */

struct ampc_partial { double sum_sq; int32_t bad_row, reserved; };      /* bad_row: INT32_MAX if none */

__device__ __forceinline__ double ampc_square(double x) { return x * x; }

/* The sum of the squares of 1, 4 or 8 numbers.  Squares of 16-bit numbers, 8 per piece, are exact in fp32, and their
   sum is off by 3 2^-24 at most.  Where fp32 may not hold it, as with bf16's largest and smallest numbers, the sum is
   in fp64. */
template <int N> __device__ __forceinline__ double ampc_squares(const float (&x)[N]) {
    double squares = 0;
    if constexpr (N == 8) {
        /* least is 2^-100; beside such a sum, underflow is negligible */
        const uint32_t least = 0x0d800000u, most = 0x7f7fffffu;
        float pair[4], sum;
        bool zeros = true;
        AMPC_UNROLL
        for (int i = 0; i < 4; i++) pair[i] = ampc_fma(x[2 * i], x[2 * i], ampc_mul(x[2 * i + 1], x[2 * i + 1]));
        sum = ampc_add(ampc_add(pair[0], pair[1]), ampc_add(pair[2], pair[3]));
        if (ampi_bits_f32(sum) - least <= most - least) return (double)sum;
        AMPC_UNROLL
        for (int i = 0; i < 8; i++) zeros &= x[i] == 0.0f;
        if (zeros) return 0;
    }
    if constexpr (N == 1) squares = ampc_square(x[0]);
    else {
        AMPC_UNROLL
        for (int i = 0; i < N; i += 4)
            squares += (ampc_square(x[i]) + ampc_square(x[i + 1])) + (ampc_square(x[i + 2]) + ampc_square(x[i + 3]));
    }
    return squares;
}

/* Checks the numbers of a piece, and multiplies them in place. */
template <bool SUM, int V>
__device__ __forceinline__ void ampc_check_lanes(uint4 &raw, amp_dtype dtype, float factor, double *sum, int *bad) {
    float x[V];
    ampc_widen<V>(raw, dtype, x);
    if (SUM) {
        AMPC_UNROLL
        for (int k = 0; k < V; k++) *bad |= !ampc_finite(x[k]);
        *sum += ampc_squares(x);
    }
    AMPC_UNROLL
    for (int k = 0; k < V; k++) x[k] = ampc_mul(x[k], factor);
    raw = ampc_narrow<V>(x, dtype);
}

/* Calls run(piece, its dtype, V) for n elements at p, with the whole block.  Single elements follow the whole pieces.
   If `write` is true, the pieces are stored again. */
template <int V> struct ampc_lanes { enum { v = V }; };
template <class F>
__device__ __forceinline__ void ampc_for_pieces(void *p, amp_dtype dtype, int n, bool write, F run) {
    enum { U = 4 };                 /* pieces in flight */
    const int width = dtype == AMP_F32 ? 4 : 8, whole = ampc_aligned(p) ? n / width : 0;
    int i;
    for (i = (int)threadIdx.x; i < whole; i += U * AMPC_MULTI_THREADS) {
        uint4 raw[U], *at = (uint4 *)p + i;
        AMPC_UNROLL
        for (int u = 0; u < U; u++)
            if (i + u * AMPC_MULTI_THREADS < whole) raw[u] = ampc_get_bytes<16>(at + u * AMPC_MULTI_THREADS);
        AMPC_UNROLL
        for (int u = 0; u < U; u++) {
            if (i + u * AMPC_MULTI_THREADS >= whole) continue;
            if (dtype == AMP_F32) run(raw[u], AMP_F32, ampc_lanes<4>());
            else if (dtype == AMP_F16) run(raw[u], AMP_F16, ampc_lanes<8>());
            else run(raw[u], AMP_BF16, ampc_lanes<8>());
            if (write) ampc_put_bytes<16>(at + u * AMPC_MULTI_THREADS, raw[u]);
        }
    }
    for (i = whole * width + (int)threadIdx.x; i < n; i += AMPC_MULTI_THREADS) {
        void *at = ampc_within(p, dtype, i);
        uint4 raw = ampc_piece_get<1>(at, dtype);
        run(raw, dtype, ampc_lanes<1>());
        if (write) ampc_piece_put<1>(at, dtype, raw);
    }
}
template <bool SUM>
__device__ __forceinline__ void ampc_check_doubles(double *p, int n, float factor, int write, double *sum, int *bad) {
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
__device__ __forceinline__ void ampc_check_chunk(const ampc_chunk &c, float factor, int write, double *sum, int *bad) {
    if (c.dtype == AMP_F64) ampc_check_doubles<SUM>((double *)c.grad, c.n, factor, write, sum, bad);
    else
        ampc_for_pieces(c.grad, c.dtype, c.n, write, [&](uint4 &raw, amp_dtype dtype, auto lanes) {
            ampc_check_lanes<SUM, decltype(lanes)::v>(raw, dtype, factor, sum, bad);
        });
}

__device__ __forceinline__ int ampc_is_one(float x) { return ampi_bits_f32(x) == 0x3f800000u; }

/* The grid is always AMPC_CHECK_BLOCKS, so the order of the sum is the same on every GPU.  A block without a chunk
   forms no sum.  In small models nearly all blocks are without one. */
__global__ void __launch_bounds__(AMPC_MULTI_THREADS, AMPC_MULTI_PER_SM)
ampc_check_kernel(const amp_k_tensor *table, int64_t tensors, const float *multiply, ampc_partial *partials) {
    AMPC_SHARED(double, sums, 32);
    AMPC_SHARED(int, rows, 32);
    float factor = multiply != NULL ? *multiply : 1.0f;
    int write = !ampc_is_one(factor), bad_row = INT32_MAX, any = 0;
    double sum = 0;
    ampc_for_chunks(table, tensors, [&](const ampc_chunk &c) {
        int bad = 0;
        ampc_check_chunk<true>(c, factor, write, &sum, &bad);
        if (bad && c.row < bad_row) bad_row = c.row;
        any = 1;
    });
    if (any) {
        sum = ampc_block_sum(sum, sums);
        bad_row = -ampc_block_max(-bad_row, rows);
    }
    if (threadIdx.x != 0) return;
    partials[blockIdx.x].sum_sq = sum;
    partials[blockIdx.x].bad_row = bad_row;
}

__global__ void __launch_bounds__(AMPC_CHECK_BLOCKS)
    ampc_check_finish_kernel(const ampc_partial *partials, amp_k_grad_stats *found) {
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
    ampc_for_chunks(table, tensors, [&](const ampc_chunk &c) { ampc_check_chunk<false>(c, factor, 1, NULL, NULL); });
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
    unsigned grid = a->tensors > 0 ? (unsigned)(dev->has.multiprocessors * AMPC_MULTI_PER_SM) : 0;
    return ampc_launch(dev, "scale_ranges", ampc_scale_kernel, grid, AMPC_MULTI_THREADS, 0, stream, a->table,
                       a->tensors, a->factor);
}

/* ---- Optimizers.  A row's fp32 weight is its master, the weight itself, or a 16-bit weight widened.  A first launch
   computes each row's constants in fp64, as the CPU does.  It also computes the maps of 8-bit moments if a row has
   them.  The second launch then needs no fp64. */

/* Updates one element.  Every operation rounds once, in the order of amp.h's CPU kernels. */
__device__ __forceinline__ float ampc_adamw_one(float w, float g, float *m, float *v, const ampi_adamw_step &s) {
    float root;
    g = ampc_mul(g, s.multiplier);
    *m = ampc_fma(ampc_add(g, -*m), s.rest1, *m);
    *v = ampc_fma(ampc_mul(g, s.rest2), g, ampc_mul(*v, s.beta2));
    root = ampc_fma(ampc_sqrt(*v), s.correction, s.eps);
    return ampc_fma(-s.rate, ampc_div(*m, root), ampc_mul(w, s.keep));
}
__device__ __forceinline__ float ampc_sgd_one(float w, float g, float *m, const ampi_sgd_step &s, bool momentum) {
    g = ampc_mul(g, s.multiplier);
    if (s.decay != 0) g = ampc_fma(w, s.decay, g);
    if (momentum) {
        *m = ampc_fma(s.momentum, *m, ampc_mul(g, s.rest));
        g = s.nesterov ? ampc_fma(s.momentum, *m, g) : *m;
    }
    return ampc_fma(-s.rate, g, w);
}

__device__ __forceinline__ float ampc_lion_one(float w, float g, float *m, const ampi_lion_step &s) {
    float sum;
    g = ampc_mul(g, s.multiplier);
    sum = ampc_fma(*m, s.beta1, ampc_mul(g, s.rest1));
    *m = ampc_fma(*m, s.beta2, ampc_mul(g, s.rest2));
    return ampc_fma(-s.rate, sum > 0 ? 1.0f : sum < 0 ? -1.0f : sum, ampc_mul(w, s.keep));
}

/* The 16-bit copy of a row's fp32 weight, and the count of finite weights that become infinite in it.  If data() is
   NULL, there is no copy. */
struct ampc_low_copy {
    const amp_range *range;
    int64_t *new_inf;
    __device__ __forceinline__ void *data() const { return range != NULL ? range->data : NULL; }
    __device__ __forceinline__ void count(int found) const {
        if (found != 0 && data() != NULL) atomicAdd((unsigned long long *)new_inf, (unsigned long long)found);
    }
};
/* Numbers round to infinity from 2^16 - 2^4 on in fp16, and from 2^128 - 2^119 on in bf16. */
__device__ __forceinline__ bool ampc_gains_inf(float w, amp_dtype dtype) {
    const uint32_t least = dtype == AMP_F16 ? 0x477ff000u : 0x7f7f8000u;
    return (ampi_bits_f32(w) & 0x7fffffffu) - least < 0x7f800000u - least;
}

/* A row's elements from `first` on.  `w` is the fp32 weights, or NULL if there are only 16-bit ones.  `low` is the
   16-bit weights, or a copy, whose infinities are counted. */
struct ampc_row_piece {
    float *w, *m, *v;
    void *low;
    const void *g;
    bool aligned;
};
__device__ __forceinline__ ampc_row_piece ampc_piece_of(const amp_k_tensor &row, const ampc_low_copy &copy,
                                                        amp_dtype low, amp_dtype grad, int64_t first) {
    ampc_row_piece p;
    bool wide = row.weight_dtype == AMP_F32;
    p.w = row.master != NULL ? (float *)row.master + first : wide ? (float *)row.weight + first : NULL;
    p.m = row.m != NULL ? (float *)row.m + first : NULL;
    p.v = row.v != NULL ? (float *)row.v + first : NULL;
    p.low = copy.data() != NULL          ? ampc_within(copy.data(), low, first)
            : wide && row.master == NULL ? NULL
                                         : ampc_within(row.weight, low, first);
    p.g = ampc_within(row.grad, grad, first);
    p.aligned = ampc_aligned(p.w) && ampc_aligned(p.m) && ampc_aligned(p.v) && ampc_aligned(p.low) && ampc_aligned(p.g);
    return p;
}

/* Updates n elements with the whole block.  UPDATE is a function float (float w, float g, float *m, float *v).  Returns
   how many of this thread's finite weights become infinite in 16 bits. */
template <bool SECOND, class UPDATE>
__device__ __forceinline__ int ampc_update_piece(const ampc_row_piece &p, amp_dtype low, amp_dtype grad, int n,
                                                 UPDATE update) {
    enum { L = 4 };                 /* elements of a piece: 16 bytes of fp32, so that a warp writes whole sectors */
    int whole = p.aligned ? n / L : 0, found = 0, i;
    AMPC_NO_UNROLL
    for (i = (int)threadIdx.x; i < whole; i += AMPC_MULTI_THREADS) {
        int at = i * L;
        float w[L], g[L], m[L] = {}, v[L] = {};
        ampc_load<L, AMPC_ONCE>(ampc_within(p.g, grad, at), grad, g);
        if (p.w != NULL) ampc_load<L, AMPC_ONCE>(p.w + at, AMP_F32, w);
        else ampc_load<L, AMPC_ONCE>(ampc_within(p.low, low, at), low, w);
        if (p.m != NULL) ampc_load<L, AMPC_ONCE>(p.m + at, AMP_F32, m);
        if (SECOND) ampc_load<L, AMPC_ONCE>(p.v + at, AMP_F32, v);
        AMPC_UNROLL
        for (int j = 0; j < L; j++) w[j] = update(w[j], g[j], &m[j], &v[j]);
        if (p.w != NULL) ampc_store<L, AMPC_ONCE>(p.w + at, AMP_F32, w);
        if (p.m != NULL) ampc_store<L, AMPC_ONCE>(p.m + at, AMP_F32, m);
        if (SECOND) ampc_store<L, AMPC_ONCE>(p.v + at, AMP_F32, v);
        if (p.low != NULL) ampc_store<L>(ampc_within(p.low, low, at), low, w);
        AMPC_UNROLL
        for (int j = 0; j < L && low != AMP_F32; j++) found += ampc_gains_inf(w[j], low);
    }
    AMPC_NO_UNROLL
    for (i = whole * L + (int)threadIdx.x; i < n; i += AMPC_MULTI_THREADS) {
        float w = p.w != NULL ? p.w[i] : ampc_stored(p.low, low, i), m = p.m != NULL ? p.m[i] : 0.0f,
              v = SECOND ? p.v[i] : 0.0f;
        w = update(w, ampc_stored(p.g, grad, i), &m, &v);
        if (p.w != NULL) p.w[i] = w;
        if (p.m != NULL) p.m[i] = m;
        if (SECOND) p.v[i] = v;
        if (p.low != NULL) ampc_put_stored(p.low, low, i, w);
        found += low != AMP_F32 && ampc_gains_inf(w, low);
    }
    return found;
}

template <bool SECOND, class UPDATE>
__device__ __forceinline__ int ampc_update_row(const amp_k_tensor &row, const ampc_low_copy &copy, int64_t first, int n,
                                                UPDATE update) {
    return ampc_by_dtype(copy.data() != NULL ? copy.range->dtype : row.weight_dtype, [&](auto low) {
        return ampc_by_dtype(row.grad_dtype, [&](auto grad) {
            return ampc_update_piece<SECOND>(ampc_piece_of(row, copy, low, grad, first), low, grad, n, update);
        });
    });
}

/* ---- Rows whose storage needs more than a conversion, which are those with remainders, stochastic rounding, bf16
   moments or 8-bit moments.  Their dtypes are known only at run time.  They are kept apart, so they cost plain rows no
   registers. */

__device__ inline bool ampc_is_plain(const amp_k_tensor &row) {
    return row.master_kind != AMP_MASTER_REMAINDER && row.master_kind != AMP_MASTER_STOCHASTIC &&
           row.moment_dtype != AMP_BF16 && row.moment_dtype != AMP_MOMENTS_8BIT;
}

/* Loads or stores up to 8 numbers from element i on. */
__device__ inline void ampc_load_some(const void *p, amp_dtype dtype, int64_t i, float (&x)[AMPC_LANES], int n) {
    ampc_by_dtype(dtype, [&](auto one) { ampc_load_upto<AMPC_LANES, AMPC_ONCE>(ampc_within(p, one, i), one, x, n); });
}
__device__ inline void ampc_store_some(void *p, amp_dtype dtype, int64_t i, const float (&x)[AMPC_LANES], int n) {
    ampc_by_dtype(dtype, [&](auto one) { ampc_store_upto<AMPC_LANES, AMPC_ONCE>(ampc_within(p, one, i), one, x, n); });
}

__device__ inline void ampc_load_weights(const amp_k_tensor &row, int64_t i, float (&w)[AMPC_LANES], int n) {
    uint16_t high[AMPC_LANES], rest[AMPC_LANES];
    if (row.master_kind != AMP_MASTER_REMAINDER) {
        ampc_load_some(row.master != NULL ? row.master : row.weight, row.master != NULL ? AMP_F32 : row.weight_dtype, i,
                     w, n);
        return;
    }
    ampc_fetch_upto<AMPC_ONCE>((const uint16_t *)row.weight + i, high, n);
    ampc_fetch_upto<AMPC_ONCE>((const uint16_t *)row.master + i, rest, n);
    AMPC_UNROLL
    for (int j = 0; j < AMPC_LANES; j++) w[j] = amp_f32_join(high[j], rest[j]);
}
__device__ inline void ampc_store_weights(const amp_k_tensor &row, int64_t i, const float (&w)[AMPC_LANES],
                                          const uint32_t (&random)[AMPC_LANES], int n) {
    uint16_t high[AMPC_LANES], rest[AMPC_LANES];
    if (row.master_kind != AMP_MASTER_REMAINDER && row.master_kind != AMP_MASTER_STOCHASTIC) {
        if (row.master != NULL) ampc_store_some(row.master, AMP_F32, i, w, n);
        ampc_store_some(row.weight, row.weight_dtype, i, w, n);
        return;
    }
    AMPC_UNROLL
    for (int j = 0; j < AMPC_LANES; j++) {
        rest[j] = 0;
        high[j] = row.master_kind == AMP_MASTER_REMAINDER ? amp_bf16_split(w[j], &rest[j])
                  : row.weight_dtype == AMP_BF16 ? amp_bf16_stochastic(w[j], random[j], 0)
                                                 : amp_f16_stochastic(w[j], random[j], 0);
    }
    ampc_leave_upto<AMPC_ONCE>((uint16_t *)row.weight + i, high, n);
    if (row.master_kind == AMP_MASTER_REMAINDER) ampc_leave_upto<AMPC_ONCE>((uint16_t *)row.master + i, rest, n);
}
static_assert(AMPI_MOMENT_BLOCK == 32 * AMPC_LANES, "a warp has a block of 8-bit moments");
/* Codes stay packed, because as an array of bytes they would take more registers than AdamW has. */
__device__ inline void ampc_unpack_moments(const ampi_moment_map *map, void *p, int64_t count, int64_t i,
                                           float (&x)[AMPC_LANES], int n) {
    const uint8_t *codes = (const uint8_t *)p + i;
    const bool whole = n >= AMPC_LANES;
    float scale = n > 0 ? ampi_moment_scales(p, count)[i / AMPI_MOMENT_BLOCK] : 0;
    uint4 raw = whole ? ampc_get_bytes<AMPC_LANES>(codes) : uint4{0, 0, 0, 0};
    AMPC_UNROLL
    for (int j = 0; j < AMPC_LANES; j++) {
        uint32_t code = whole ? ampc_word(raw, j / 4) >> j % 4 * 8 & 0xffu : j < n ? codes[j] : 0u;
        x[j] = ampc_mul(map->value[code], scale);
    }
}
__device__ inline void ampc_pack_moments(const ampi_moment_map *map, void *p, int64_t count, int64_t i,
                                         const float (&x)[AMPC_LANES], int n) {
    uint8_t *codes = (uint8_t *)p + i;
    uint4 raw = {0, 0, 0, 0};
    uint32_t largest = 0;
    float inverse;
    AMPC_UNROLL
    for (int j = 0; j < AMPC_LANES; j++)
        if (j < n) largest = ampc_larger(largest, ampi_bits_f32(x[j]) & 0x7fffffffu);
    largest = ampc_warp_max(largest);
    inverse = ampc_div(1.0f, ampc_larger(ampi_f32_of_bits(largest), 1e-38f));
    AMPC_UNROLL
    for (int j = 0; j < AMPC_LANES; j++) {
        uint32_t code = largest < 0x7f800000u ? (uint32_t)ampi_moment_code(map, ampc_mul(x[j], inverse))
                                              : (uint32_t)AMPI_MOMENT_CODES - 1;
        (j < 4 ? raw.x : raw.y) |= code << j % 4 * 8;
    }
    if (n >= AMPC_LANES) ampc_put_bytes<AMPC_LANES>(codes, raw);
    AMPC_UNROLL
    for (int j = 0; j < AMPC_LANES; j++)
        if (n < AMPC_LANES && j < n) codes[j] = (uint8_t)(ampc_word(raw, j / 4) >> j % 4 * 8);
    if (threadIdx.x % 32 == 0)
        ampi_moment_scales(p, count)[i / AMPI_MOMENT_BLOCK] =
            ampi_f32_of_bits(largest < 0x7f800000u ? largest : (uint32_t)AMPI_MOMENT_NAN);
}

__device__ inline void ampc_store_moments(void *p, amp_dtype dtype, int64_t i, const float (&x)[AMPC_LANES],
                                          const uint32_t (&random)[AMPC_LANES], int n) {
    uint16_t bits[AMPC_LANES];
    if (dtype != AMP_BF16) {
        ampc_store_some(p, AMP_F32, i, x, n);
        return;
    }
    AMPC_UNROLL
    for (int j = 0; j < AMPC_LANES; j++) bits[j] = ampi_moment_round(x[j], random[j]);
    ampc_leave_upto<AMPC_ONCE>((uint16_t *)p + i, bits, n);
}

template <bool SECOND, class UPDATE>
__device__ __forceinline__ void ampc_update_stored(const amp_k_tensor &row, const ampi_moment_map *maps, int64_t first,
                                                   int n, uint64_t seed, UPDATE update) {
    const bool stochastic = row.master_kind == AMP_MASTER_STOCHASTIC || row.moment_dtype == AMP_BF16;
    const bool eight = row.moment_dtype == AMP_MOMENTS_8BIT;
    const int lane = (int)threadIdx.x % 32 * AMPC_LANES;        /* whole warps; beyond n there is nothing to load */
    AMPC_NO_UNROLL
    for (int at = (int)threadIdx.x * AMPC_LANES; at - lane < n; at += AMPC_MULTI_THREADS * AMPC_LANES) {
        int64_t i = first + at;
        float w[AMPC_LANES], g[AMPC_LANES], m[AMPC_LANES] = {}, v[AMPC_LANES] = {};
        uint32_t random[AMPC_LANES] = {};
        AMPC_UNROLL
        for (int k = 0; k < AMPC_LANES / 4; k++)
            if (stochastic) amp_philox(seed, 0, (uint64_t)(row.first + i) / 4 + (uint64_t)k, random + 4 * k);
        ampc_load_some(row.grad, row.grad_dtype, i, g, n - at);
        ampc_load_weights(row, i, w, n - at);
        if (eight) {
            if (row.m != NULL) ampc_unpack_moments(&maps[1], row.m, row.count, i, m, n - at);
            if (SECOND) ampc_unpack_moments(&maps[0], row.v, row.count, i, v, n - at);
        } else {
            if (row.m != NULL) ampc_load_some(row.m, row.moment_dtype, i, m, n - at);
            if (SECOND) ampc_load_some(row.v, row.moment_dtype, i, v, n - at);
        }
        AMPC_UNROLL
        for (int j = 0; j < AMPC_LANES; j++) w[j] = update(w[j], g[j], &m[j], &v[j]);
        ampc_store_weights(row, i, w, random, n - at);
        if (eight) {
            if (row.m != NULL) ampc_pack_moments(&maps[1], row.m, row.count, i, m, n - at);
            if (SECOND) ampc_pack_moments(&maps[0], row.v, row.count, i, v, n - at);
        } else {
            if (row.m != NULL) ampc_store_moments(row.m, row.moment_dtype, i, m, random, n - at);
            if (SECOND) ampc_store_moments(row.v, row.moment_dtype, i, v, random, n - at);
        }
    }
}
/* Copies each thread's elements.  It is a separate function because the one above has no registers left. */
__device__ __forceinline__ void ampc_copy_stored(const amp_k_tensor &row, const ampc_low_copy &copy, int64_t first,
                                                 int n) {
    int found = 0;
    if (copy.data() == NULL) return;
    AMPC_NO_UNROLL
    for (int at = (int)threadIdx.x * AMPC_LANES; at < n; at += AMPC_MULTI_THREADS * AMPC_LANES) {
        float w[AMPC_LANES];
        ampc_load_some(row.weight, AMP_F32, first + at, w, n - at);
        ampc_store_some(copy.data(), copy.range->dtype, first + at, w, n - at);
        AMPC_UNROLL
        for (int j = 0; j < AMPC_LANES; j++) found += j < n - at && ampc_gains_inf(w[j], copy.range->dtype);
    }
    copy.count(found);
}

/* nvcc would fuse 1 - lr decay, and 1 - beta^count, and round once where the CPU rounds twice.  ampc_mul prevents
   that. */
__device__ inline float ampc_keep(const amp_k_grad_stats *found, const amp_k_tensor *row) {
    return (float)(1.0 - ampc_mul(ampc_mul(found->lr, row->lr_scale), row->weight_decay));
}
__device__ inline void ampc_row_counted(const amp_k_tensor *row, const amp_k_grad_stats *found, double beta1,
                                        double beta2) {
    amp_k_steps *k = (amp_k_steps *)row->steps;
    if (k == NULL || found->skip) return;
    k->beta1_power = k->count > 0 ? ampc_mul(k->beta1_power, beta1) : beta1;
    k->beta2_power = k->count > 0 ? ampc_mul(k->beta2_power, beta2) : beta2;
    k->count++;
}
__device__ inline ampi_adamw_step ampc_row_step(const amp_k_adamw *args, const amp_k_tensor *row) {
    ampi_adamw_step s;
    ampc_row_counted(row, args->found, args->beta1, args->beta2);
    s = ampi_adamw_row(args, row);
    s.keep = ampc_keep(args->found, row);
    return s;
}
__device__ inline ampi_sgd_step ampc_row_step(const amp_k_sgd *args, const amp_k_tensor *row) {
    ampc_row_counted(row, args->found, 1, 1);
    return ampi_sgd_row(args, row);
}
__device__ inline ampi_lion_step ampc_row_step(const amp_k_lion *args, const amp_k_tensor *row) {
    ampi_lion_step s = ampi_lion_row(args, row);
    s.keep = ampc_keep(args->found, row);
    return s;
}

/* maps[0] is for v, and maps[1] is for m.  Every block whose rows need the maps writes the same. */
template <class A, class S>
__global__ void __launch_bounds__(128) ampc_row_steps_kernel(A args, S *steps, ampi_moment_map *maps) {
    int64_t row = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (row < args.tensors && args.table[row].live) steps[row] = ampc_row_step(&args, &args.table[row]);
    if (!__syncthreads_or(row < args.tensors && args.table[row].moment_dtype == AMP_MOMENTS_8BIT)) return;
    for (int i = (int)threadIdx.x; i < 2 * AMPI_MOMENT_CODES; i += (int)blockDim.x)
        ampi_moment_map_set(&maps[i / AMPI_MOMENT_CODES], i % AMPI_MOMENT_CODES, i / AMPI_MOMENT_CODES);
}

/* Updates a chunk of a row, and its copy. */
template <bool SECOND, class UPDATE>
__device__ __forceinline__ void ampc_update_chunk(const amp_k_tensor *table, const ampc_chunk &c, uint64_t seed,
                                                  const amp_range *copies, int64_t *new_inf,
                                                  const ampi_moment_map *maps, UPDATE update) {
    const amp_k_tensor &row = table[c.row];
    const ampc_low_copy copy = {copies != NULL ? copies + c.row : NULL, new_inf};
    if (ampc_is_plain(row)) {
        copy.count(ampc_update_row<SECOND>(row, copy, c.first, c.n, update));
        return;
    }
    ampc_update_stored<SECOND>(row, maps, c.first, c.n, seed, update);
    ampc_copy_stored(row, copy, c.first, c.n);
}

__global__ void __launch_bounds__(AMPC_MULTI_THREADS, AMPC_OPTIMIZER_PER_SM)
    ampc_adamw_kernel(const amp_k_tensor *table, int64_t tensors, const amp_k_grad_stats *found,
                      const ampi_adamw_step *steps, const ampi_moment_map *maps, const amp_range *copies,
                      int64_t *new_inf) {
    if (found->skip) return;
    ampc_for_chunks(table, tensors, [&](const ampc_chunk &c) {
        const ampi_adamw_step s = steps[c.row];
        auto update = [&](float w, float g, float *m, float *v) { return ampc_adamw_one(w, g, m, v, s); };
        ampc_update_chunk<true>(table, c, s.seed, copies, new_inf, maps, update);
    });
}

__global__ void __launch_bounds__(AMPC_MULTI_THREADS, AMPC_OPTIMIZER_PER_SM)
ampc_sgd_kernel(const amp_k_tensor *table, int64_t tensors, const amp_k_grad_stats *found, const ampi_sgd_step *steps,
                const ampi_moment_map *maps, const amp_range *copies, int64_t *new_inf) {
    if (found->skip) return;
    ampc_for_chunks(table, tensors, [&](const ampc_chunk &c) {
        const ampi_sgd_step s = steps[c.row];
        bool momentum = table[c.row].m != NULL;
        auto update = [&](float w, float g, float *m, float *) { return ampc_sgd_one(w, g, m, s, momentum); };
        ampc_update_chunk<false>(table, c, s.seed, copies, new_inf, maps, update);
    });
}

__global__ void __launch_bounds__(AMPC_MULTI_THREADS, AMPC_OPTIMIZER_PER_SM)
    ampc_lion_kernel(const amp_k_tensor *table, int64_t tensors, const amp_k_grad_stats *found,
                     const ampi_lion_step *steps, const ampi_moment_map *maps, const amp_range *copies,
                     int64_t *new_inf) {
    if (found->skip) return;
    ampc_for_chunks(table, tensors, [&](const ampc_chunk &c) {
        const ampi_lion_step s = steps[c.row];
        auto update = [&](float w, float g, float *m, float *) { return ampc_lion_one(w, g, m, s); };
        ampc_update_chunk<false>(table, c, s.seed, copies, new_inf, maps, update);
    });
}

template <class A, class S>
amp_result ampc_optimize(ampc_device *dev, const char *name, const A *a, void *stream,
                         void (*kernel)(const amp_k_tensor *, int64_t, const amp_k_grad_stats *, const S *,
                                        const ampi_moment_map *, const amp_range *, int64_t *)) {
    ampc_scratch scratch(dev, stream);
    ampi_moment_map *maps;
    S *steps;
    if (a->tensors <= 0) return ampc_usable(dev, name);
    AMPC_TRY(scratch.get(2 * sizeof *maps + (size_t)a->tensors * sizeof *steps, name));
    steps = (S *)scratch.data;
    maps = (ampi_moment_map *)(steps + a->tensors);
    AMPC_TRY(ampc_launch(dev, name, ampc_row_steps_kernel<A, S>, (unsigned)ampc_blocks(a->tensors, 128), 128, 0, stream,
                         *a, steps, maps));
    return ampc_launch(dev, name, kernel, (unsigned)(dev->has.multiprocessors * AMPC_OPTIMIZER_PER_SM),
                       AMPC_MULTI_THREADS, 0, stream, a->table, a->tensors, a->found, (const S *)steps,
                       (const ampi_moment_map *)maps, a->copies, a->new_inf);
}

amp_result ampc_adamw(void *device, const amp_k_adamw *a, void *stream) {
    return ampc_optimize((ampc_device *)device, "amp_step (AdamW)", a, stream, ampc_adamw_kernel);
}

amp_result ampc_sgd(void *device, const amp_k_sgd *a, void *stream) {
    return ampc_optimize((ampc_device *)device, "amp_step (SGD)", a, stream, ampc_sgd_kernel);
}

amp_result ampc_lion(void *device, const amp_k_lion *a, void *stream) {
    return ampc_optimize((ampc_device *)device, "amp_step (Lion)", a, stream, ampc_lion_kernel);
}

/* ---- Rules.  amp.h's arithmetic runs on one thread, but its rows run on all threads of a block. */

__global__ void ampc_rule_kernel(amp_k_rule rule) {
    AMPC_SHARED(int, apart, 1);
    int32_t own;
    if (threadIdx.x == 0) *apart = INT32_MAX;
    __syncthreads();
    own = ampi_rule_rows(&rule, (int32_t)threadIdx.x, (int32_t)blockDim.x);
    if (own != INT32_MAX) atomicMin(apart, own);
    __syncthreads();
    if (threadIdx.x != 0) return;
    ampi_rule_apart(&rule, *apart);
    ampi_rule_run(&rule);
}

amp_result ampc_rule(void *device, const amp_k_rule *a, void *stream) {
    const unsigned threads = a->tensors > 0 ? 128 : 1;
    return ampc_launch((ampc_device *)device, "rule", ampc_rule_kernel, 1, threads, 0, stream, *a);
}

/* ==== 12 >>ranks ====
   The reducer of .reduce_on_device is NCCL.  Its communicator does not block, so no call waits for another rank without
   end.  A thread watches what the GPU does, which only ncclCommAbort can stop. */

int64_t ampc_now() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}
void ampc_nap(int microseconds) {
    const struct timespec t = {microseconds / 1000000, microseconds % 1000000 * 1000};
    (void)nanosleep(&t, NULL);
}

/* ---- The library */

/* Finds NCCL's functions.  Returns the name of the first one that the library lacks, or NULL. */
const char *ampc_nccl_lacks(ampc_nccl *n) {
    void *l = n->opened;
    return !ampc_symbol(l, "ncclGetVersion", &n->version)             ? "ncclGetVersion"
           : !ampc_symbol(l, "ncclGetUniqueId", &n->unique_id)        ? "ncclGetUniqueId"
           : !ampc_symbol(l, "ncclCommInitRankConfig", &n->init)      ? "ncclCommInitRankConfig"
           : !ampc_symbol(l, "ncclCommGetAsyncError", &n->async_error) ? "ncclCommGetAsyncError"
           : !ampc_symbol(l, "ncclCommFinalize", &n->finalize)        ? "ncclCommFinalize"
           : !ampc_symbol(l, "ncclCommDestroy", &n->destroy)          ? "ncclCommDestroy"
           : !ampc_symbol(l, "ncclCommAbort", &n->abort)              ? "ncclCommAbort"
           : !ampc_symbol(l, "ncclGetErrorString", &n->error_text)    ? "ncclGetErrorString"
           : !ampc_symbol(l, "ncclGetLastError", &n->last_error)      ? "ncclGetLastError"
           : !ampc_symbol(l, "ncclGroupStart", &n->group_start)       ? "ncclGroupStart"
           : !ampc_symbol(l, "ncclGroupEnd", &n->group_end)           ? "ncclGroupEnd"
           : !ampc_symbol(l, "ncclAllReduce", &n->all_reduce)         ? "ncclAllReduce"
           : !ampc_symbol(l, "ncclReduceScatter", &n->reduce_scatter) ? "ncclReduceScatter"
           : !ampc_symbol(l, "ncclAllGather", &n->all_gather)         ? "ncclAllGather"
           : !ampc_symbol(l, "ncclBroadcast", &n->broadcast)          ? "ncclBroadcast"
           : !ampc_symbol(l, "ncclSend", &n->send)                    ? "ncclSend"
           : !ampc_symbol(l, "ncclRecv", &n->receive)                 ? "ncclRecv"
                                                                      : NULL;
}

amp_result ampc_nccl_refuse(ampc_device *dev, const char *format, const char *detail, int version) {
    char why[176], text[240];
    snprintf(why, sizeof why, format, detail, version / 10000, version / 100 % 100, version % 100);
    snprintf(text, sizeof text, ".reduce_on_device: %s; without it none is needed", why);
    return ampc_refuse(dev, AMP_ERR_UNSUPPORTED, "amp_open", text);
}

/* Opens NCCL's library.  It stays loaded until the process ends, because it has threads. */
amp_result ampc_nccl_open(ampc_device *dev) {
    ampc_nccl *n = &dev->ranks.nccl;
    const char *lacks;
    int version = 0;
    if (n->opened != NULL) return AMP_OK;
    n->opened = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (n->opened == NULL)
        return ampc_nccl_refuse(dev, "%.90s; install NCCL, and name its folder in LD_LIBRARY_PATH", dlerror(), 0);
    lacks = ampc_nccl_lacks(n);
    if (n->version != NULL && n->version(&version) == AMPC_NCCL_SUCCESS && version < AMPC_NCCL_LEAST)
        return version >= 10000
                   ? ampc_nccl_refuse(dev, "libnccl.so.2 is NCCL%s %d.%d.%d, and 2.14 or later is needed", "", version)
                   : ampc_nccl_refuse(dev, "libnccl.so.2 is NCCL%s before 2.9, and 2.14 or later is needed", "", 0);
    return lacks == NULL ? AMP_OK : ampc_nccl_refuse(dev, "libnccl.so.2 has no %s", lacks, 0);
}

/* ---- Failing.  A failure is final, because NCCL's communicators do not recover. */

/* Holds the communicator.  ampc_ranks_abort waits for such holders, but not longer than a second.  .comm is NULL if
   there is no communicator any more, or if the ranks are broken. */
struct ampc_nccl_use {
    ampc_ranks *r;
    void *comm;
    explicit ampc_nccl_use(ampc_device *dev) : r(&dev->ranks), comm(NULL) {
        ampc_locked locked(&r->lock);
        comm = r->broken ? NULL : r->comm;
        r->users += comm != NULL;
    }
    ~ampc_nccl_use() {
        ampc_locked locked(&r->lock);
        r->users -= comm != NULL;
    }
    ampc_nccl_use(const ampc_nccl_use &) = delete;
    ampc_nccl_use &operator=(const ampc_nccl_use &) = delete;
};

/* Ends what the GPU does for the communicator.  If a call of NCCL is under way, this waits for its end, but not longer
   than a second, because the call may stand behind the work that hangs.  ncclCommAbort stops that work at once, but
   returns only when no graph refers to the communicator any more. */
void ampc_ranks_abort(ampc_device *dev) {
    ampc_ranks *r = &dev->ranks;
    bool busy = true;
    for (int i = 0; i < 1000 && busy; i++) {
        {
            ampc_locked locked(&r->lock);
            busy = r->users > 0;
        }
        if (busy) ampc_nap(1000);
    }
    if (r->comm != NULL) (void)r->nccl.abort(r->comm);
    r->comm = NULL;
}

/* Makes all later calls fail.  The first reason stays.  If there is a watcher, it is the watcher that aborts, because
   this thread is the one that destroys graphs. */
void ampc_ranks_break(ampc_device *dev, const char *why) {
    ampc_ranks *r = &dev->ranks;
    {
        ampc_locked locked(&r->lock);
        if (r->broken) return;
        snprintf(r->why, sizeof r->why, "amp_cuda: rank %d of %d: %s", r->rank, r->world, why);
        __atomic_store_n(&r->broken, 1, __ATOMIC_RELEASE);
    }
    if (!r->watching) ampc_ranks_abort(dev);
}

void ampc_ranks_break_late(ampc_device *dev, const char *what) {
    char why[160];
    snprintf(why, sizeof why, "%s within %lld ms: a rank has died, hangs, or makes other calls than the rest", what,
             (long long)(dev->ranks.limit / 1000000));
    ampc_ranks_break(dev, why);
}

/* Breaks the reducer, with NCCL's description of the error as the reason. */
void ampc_nccl_break(ampc_device *dev, const char *call, int code) {
    char why[320];
    {
        ampc_nccl_use use(dev);
        const char *last = use.comm != NULL ? dev->ranks.nccl.last_error(use.comm) : NULL;
        snprintf(why, sizeof why, "%s: %s (NCCL's error %d)%s%.160s", call, dev->ranks.nccl.error_text(code), code,
                 last != NULL && last[0] != 0 ? ": " : "", last != NULL ? last : "");
    }
    ampc_ranks_break(dev, why);
}

/* Waits until NCCL has done what it began.  That does not include the GPU's work. */
amp_result ampc_nccl_settle(ampc_device *dev, const char *call, int code) {
    const int64_t deadline = ampc_now() + dev->ranks.limit;
    while (code == AMPC_NCCL_IN_PROGRESS) {
        {
            ampc_nccl_use use(dev);
            if (use.comm == NULL) break;
            int asked = dev->ranks.nccl.async_error(use.comm, &code);
            if (asked != AMPC_NCCL_SUCCESS) code = asked;
        }
        if (code != AMPC_NCCL_IN_PROGRESS) break;
        if (ampc_now() > deadline) { ampc_ranks_break_late(dev, "not all ranks have come"); break; }
        ampc_nap(200);
    }
    if (code != AMPC_NCCL_SUCCESS && code != AMPC_NCCL_IN_PROGRESS) ampc_nccl_break(dev, call, code);
    return ampc_usable(dev, call);
}

/* ---- Watching */

/* Takes a place in the ring for the caller alone.  Returns -1 if none is free. */
int ampc_ranks_place(ampc_ranks *r) {
    ampc_locked locked(&r->lock);
    if (r->watched == AMPC_WATCHED) return -1;
    if (r->watched == 0) r->since = ampc_now();
    int at = (r->first + r->watched++) % AMPC_WATCHED;
    r->noted[at] = 0;
    return at;
}

amp_result ampc_ranks_record(ampc_device *dev, cudaEvent_t *event, cudaStream_t stream) {
    if (*event == NULL)
        AMPC_TRY(ampc_check(dev, cudaEventCreateWithFlags(event, cudaEventDisableTiming),
                            "cudaEventCreateWithFlags", NULL));
    return ampc_check(dev, cudaEventRecord(*event, stream), "cudaEventRecord", NULL);
}

/* Notes that the work which is in the stream now must end in time. */
amp_result ampc_ranks_note(ampc_device *dev, cudaStream_t stream) {
    ampc_ranks *r = &dev->ranks;
    int at;
    AMPC_ENTER(dev, "reducer");
    AMPC_TRY(ampc_usable(dev, "reducer"));
    while ((at = ampc_ranks_place(r)) < 0) {
        ampc_nap(1000);
        AMPC_TRY(ampc_usable(dev, "reducer"));
    }
    amp_result result = ampc_ranks_record(dev, &r->events[at], stream);
    ampc_locked locked(&r->lock);
    r->noted[at] = result == AMP_OK ? 1 : -1;
    return result;
}

/* Returns whether the oldest work that was noted is done.  Work that is done is forgotten. */
bool ampc_ranks_step(ampc_device *dev) {
    ampc_ranks *r = &dev->ranks;
    int noted = 0;
    {
        ampc_locked locked(&r->lock);
        if (r->watched > 0) noted = r->noted[r->first];
    }
    if (noted == 0) return false;
    /* nobody else takes this place's event before the place is free again */
    cudaError_t error = noted < 0 ? cudaSuccess : cudaEventQuery(r->events[r->first]);
    if (error != cudaSuccess) (void)cudaGetLastError();
    bool late;
    {
        ampc_locked locked(&r->lock);
        late = error == cudaErrorNotReady && ampc_now() - r->since > r->limit;
        if (error != cudaErrorNotReady) {
            r->first = (r->first + 1) % AMPC_WATCHED;
            r->watched--;
            r->since = ampc_now();
        }
    }
    if (late) ampc_ranks_break_late(dev, "a reduction has not ended");
    return error != cudaErrorNotReady;
}

/* Asks NCCL what other ranks and the network did to the communicator meanwhile. */
void ampc_ranks_ask(ampc_device *dev) {
    int code = AMPC_NCCL_SUCCESS, asked = AMPC_NCCL_SUCCESS;
    {
        ampc_nccl_use use(dev);
        if (use.comm != NULL) asked = dev->ranks.nccl.async_error(use.comm, &code);
    }
    if (asked != AMPC_NCCL_SUCCESS) code = asked;
    if (code != AMPC_NCCL_SUCCESS && code != AMPC_NCCL_IN_PROGRESS) ampc_nccl_break(dev, "a reduction", code);
}

void *ampc_ranks_watch(void *device) {
    ampc_device *dev = (ampc_device *)device;
    ampc_current current(dev);
    ampc_relaxed relaxed;           /* captures on other threads do not restrict this one */
    while (!__atomic_load_n(&dev->ranks.stop, __ATOMIC_RELAXED) &&
           !__atomic_load_n(&dev->ranks.broken, __ATOMIC_ACQUIRE)) {
        while (ampc_ranks_step(dev)) {}
        ampc_ranks_ask(dev);
        ampc_nap(1000 * AMPC_LOOK_MS);
    }
    if (dev->ranks.broken) ampc_ranks_abort(dev);
    return NULL;
}

/* ---- Calls */

/* The largest of each of n numbers over the ranks, by their bits.  NaN counts as larger, which it does not in NCCL's
   maximum.  `inf` is infinity's bits. */
template <class U> __global__ void ampc_largest_kernel(const U *all, U *out, int64_t n, int world, U inf) {
    const U sign = (U)((U)1 << (8 * sizeof(U) - 1));
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        U best = 0, most = 0;
        for (int rank = 0; rank < world; rank++) {
            const U x = all[rank * n + i], magnitude = (U)(x & (U)~sign);
            const U key = (U)(magnitude > inf ? (U)~(U)0 : x & sign ? (U)~x : (U)(x | sign));
            if (rank > 0 && key <= most) continue;
            best = x;
            most = key;
        }
        out[i] = best;
    }
}
template <class U> amp_result ampc_largest_of(ampc_device *dev, const ampc_collective &c, U inf) {
    return ampc_launch(dev, "reducer", ampc_largest_kernel<U>, ampc_grid(dev, ampc_blocks(c.count, 256), 4), 256, 0,
                       dev->ranks.stream, (const U *)c.all, (U *)c.out, c.count, dev->ranks.world, inf);
}
amp_result ampc_largest(ampc_device *dev, const ampc_collective &c) {
    switch (c.dtype) {
        case AMP_F64: return ampc_largest_of<uint64_t>(dev, c, (uint64_t)0x7ff << 52);
        case AMP_F32: return ampc_largest_of<uint32_t>(dev, c, 0x7f800000u);
        default: return ampc_largest_of<uint16_t>(dev, c, c.dtype == AMP_F16 ? 0x7c00 : 0x7f80);
    }
}

int ampc_nccl_dtype(amp_dtype dtype) {
    switch (dtype) {
        case AMP_F32: return AMPC_NCCL_F32;
        case AMP_F64: return AMPC_NCCL_F64;
        case AMP_F16: return AMPC_NCCL_F16;
        case AMP_BF16: return AMPC_NCCL_BF16;
        default: return AMPC_NCCL_U8;
    }
}

/* Sends part r of `in` to rank r, and receives that rank's part at its place in `out`. */
int ampc_nccl_exchange(const ampc_ranks *r, void *comm, const void *in, void *out, size_t each) {
    int code = AMPC_NCCL_SUCCESS;
    for (int peer = 0; peer < r->world; peer++) {
        int sent = r->nccl.send((const char *)in + (size_t)peer * each, each, AMPC_NCCL_U8, peer, comm, r->stream);
        int came = r->nccl.receive((char *)out + (size_t)peer * each, each, AMPC_NCCL_U8, peer, comm, r->stream);
        if (code == AMPC_NCCL_SUCCESS) code = sent != AMPC_NCCL_SUCCESS ? sent : came;
    }
    return code;
}
/* Makes one call of NCCL.  For a maximum, the call only brings every rank's numbers together. */
int ampc_nccl_call(const ampc_ranks *r, void *comm, const ampc_collective &c) {
    const size_t count = (size_t)c.count, bytes = count * amp_dtype_size(c.dtype);
    const int dtype = ampc_nccl_dtype(c.dtype);
    const void *in = c.in;
    switch (c.verb) {
        case AMPC_REDUCES:
            if (c.all != NULL) return r->nccl.all_gather(in, c.all, bytes, AMPC_NCCL_U8, comm, r->stream);
            return r->nccl.all_reduce(in, c.out, count, dtype, AMPC_NCCL_SUM, comm, r->stream);
        case AMPC_SCATTERS:
            if (c.all != NULL) return ampc_nccl_exchange(r, comm, in, c.all, bytes);
            return r->nccl.reduce_scatter(in, c.out, count, dtype, AMPC_NCCL_SUM, comm, r->stream);
        case AMPC_GATHERS: return r->nccl.all_gather(in, c.out, bytes, AMPC_NCCL_U8, comm, r->stream);
        case AMPC_EXCHANGES: return ampc_nccl_exchange(r, comm, in, c.out, bytes);
        default: return r->nccl.broadcast(in, c.out, bytes, AMPC_NCCL_U8, c.root, comm, r->stream);
    }
}
/* Begins these calls in the stream. */
amp_result ampc_nccl_begin(ampc_device *dev, const ampc_collective *calls, int n) {
    ampc_ranks *r = &dev->ranks;
    int code = AMPC_NCCL_SUCCESS, ended;
    AMPC_ENTER(dev, "reducer");
    {
        ampc_nccl_use use(dev);
        if (use.comm == NULL) return ampc_usable(dev, "reducer");
        code = r->nccl.group_start();
        for (int i = 0; i < n && (code == AMPC_NCCL_SUCCESS || code == AMPC_NCCL_IN_PROGRESS); i++)
            code = ampc_nccl_call(r, use.comm, calls[i]);
        ended = r->nccl.group_end();
    }
    if (code == AMPC_NCCL_SUCCESS || code == AMPC_NCCL_IN_PROGRESS) code = ended;
    return ampc_nccl_settle(dev, "a reduction", code);
}

/* Whether the stream is captured.  If amp_graph_begin began a capture, this notes in its graph that it reduces. */
bool ampc_ranks_captured(ampc_device *dev, cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    ampc_graph *graph = ampc_captured(dev, NULL);
    if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) (void)cudaGetLastError();
    if (status == cudaStreamCaptureStatusNone) return false;
    if (graph != NULL) graph->reduces = 1;
    return true;
}

amp_result ampc_group_run(ampc_device *dev, ampc_collective *calls, int n) {
    ampc_ranks *r = &dev->ranks;
    const bool captured = ampc_ranks_captured(dev, r->stream);
    int i;
    for (i = 0; i < n; i++) {
        if (calls[i].op != AMP_REDUCE_MAX || calls[i].verb > AMPC_SCATTERS) continue;
        ampc_scratch all(dev, r->stream);
        AMPC_TRY(all.get((size_t)(r->world * calls[i].count) * amp_dtype_size(calls[i].dtype), "reducer"));
        calls[i].all = all.keep();
    }
    AMPC_TRY(ampc_nccl_begin(dev, calls, n));
    if (!captured) AMPC_TRY(ampc_ranks_note(dev, r->stream));
    for (i = 0; i < n; i++)
        if (calls[i].all != NULL) AMPC_TRY(ampc_largest(dev, calls[i]));
    return AMP_OK;
}
/* Begins the calls that were put into the group. */
amp_result ampc_group_flush(ampc_device *dev) {
    ampc_ranks *r = &dev->ranks;
    const int n = r->grouped;
    amp_result result;
    if (n == 0) return ampc_usable(dev, "reducer");
    r->grouped = 0;
    result = ampc_group_run(dev, r->group, n);
    for (int i = 0; i < n; i++) ampc_free(dev, r->group[i].all, 0);
    return result;
}

amp_result ampc_group_add(ampc_device *dev, const ampc_collective &c, void *stream) {
    ampc_ranks *r = &dev->ranks;
    const bool numbers = c.dtype == AMP_F32 || c.dtype == AMP_F64 || c.dtype == AMP_F16 || c.dtype == AMP_BF16;
    if (c.verb <= AMPC_SCATTERS && !numbers)
        return ampc_refuse(dev, AMP_ERR_DTYPE, "reducer", "NCCL sums F32, F64, F16 and BF16 here");
    AMPC_TRY(ampc_usable(dev, "reducer"));
    if (c.count == 0) return AMP_OK;
    if (r->grouped > 0 && r->stream != ampc_stream(dev, stream)) AMPC_TRY(ampc_group_flush(dev));
    r->stream = ampc_stream(dev, stream);
    r->group[r->grouped++] = c;
    return r->in_group && r->grouped < AMPC_GROUP ? AMP_OK : ampc_group_flush(dev);
}

int ampc_reduce(void *device, void *data, int64_t count, amp_dtype dtype, amp_reduce_op op, void *stream) {
    return ampc_group_add((ampc_device *)device, {AMPC_REDUCES, data, data, count, dtype, op, 0, NULL}, stream);
}
int ampc_reduce_scatter(void *device, const void *in, void *out, int64_t each, amp_dtype dtype, amp_reduce_op op,
                        void *stream) {
    return ampc_group_add((ampc_device *)device, {AMPC_SCATTERS, in, out, each, dtype, op, 0, NULL}, stream);
}
int ampc_all_gather(void *device, const void *in, void *out, int64_t each, void *stream) {
    return ampc_group_add((ampc_device *)device, {AMPC_GATHERS, in, out, each, AMP_U8, AMP_REDUCE_SUM, 0, NULL},
                          stream);
}
int ampc_all_to_all(void *device, const void *in, void *out, int64_t each, void *stream) {
    return ampc_group_add((ampc_device *)device, {AMPC_EXCHANGES, in, out, each, AMP_U8, AMP_REDUCE_SUM, 0, NULL},
                          stream);
}
int ampc_broadcast(void *device, void *data, int64_t bytes, int32_t root, void *stream) {
    return ampc_group_add((ampc_device *)device,
                          {AMPC_BROADCASTS, data, data, bytes, AMP_U8, AMP_REDUCE_SUM, root, NULL}, stream);
}
int ampc_group_begin(void *device, void *) {
    ((ampc_device *)device)->ranks.in_group = 1;
    return 0;
}
int ampc_group_end(void *device, void *) {
    ((ampc_device *)device)->ranks.in_group = 0;
    return ampc_group_flush((ampc_device *)device);
}

const amp_exchanges ampc_exchanges = {ampc_reduce_scatter, ampc_all_gather,  ampc_all_to_all, ampc_broadcast,
                                      ampc_group_begin,    ampc_group_end,   NULL};

/* ---- Joining and leaving */

amp_result ampc_communicator_id(void *device, void *id) {
    ampc_device *dev = (ampc_device *)device;
    AMPC_ENTER(dev, "amp_open");
    AMPC_TRY(ampc_nccl_open(dev));
    if (id == NULL) return AMP_OK;
    int code = dev->ranks.nccl.unique_id((ampc_nccl_id *)id);
    return code == AMPC_NCCL_SUCCESS
               ? AMP_OK
               : ampc_nccl_refuse(dev, "ncclGetUniqueId: %.120s", dev->ranks.nccl.last_error(NULL), 0);
}

amp_result ampc_communicator(void *device, const amp_k_communicator *a, amp_reducer *out) {
    ampc_device *dev = (ampc_device *)device;
    ampc_ranks *r = &dev->ranks;
    ampc_nccl_config config = {sizeof config, AMPC_NCCL_MAGIC, AMPC_NCCL_LEAST, 0};
    ampc_nccl_id id;
    int code;
    AMPC_ENTER(dev, "amp_open");
    AMPC_TRY(ampc_nccl_open(dev));
    memcpy(id.bytes, a->id, sizeof id.bytes);
    r->rank = a->rank;
    r->world = a->world;
    r->limit = (int64_t)a->timeout_ms * 1000000;
    code = r->nccl.init(&r->comm, r->world, id, r->rank, &config);
    AMPC_TRY(ampc_nccl_settle(dev, "ncclCommInitRankConfig", code));
    r->watching = pthread_create(&r->watcher, NULL, ampc_ranks_watch, dev) == 0;
    if (!r->watching) return ampc_refuse(dev, AMP_ERR_THREAD, "amp_open", "no thread to watch the ranks");
    memset(out, 0, sizeof *out);
    out->user = dev;
    out->rank = r->rank;
    out->world = r->world;
    out->reduce = ampc_reduce;
    out->calls = &ampc_exchanges;
    return AMP_OK;
}

/* Leaves the communicator.  A rank that no longer exists must not keep this one waiting, so after the time limit this
   one leaves without the others. */
void ampc_ranks_close(ampc_device *dev) {
    ampc_ranks *r = &dev->ranks;
    const int64_t deadline = ampc_now() + r->limit;
    int state = AMPC_NCCL_IN_PROGRESS;
    __atomic_store_n(&r->stop, 1, __ATOMIC_RELAXED);
    if (r->watching) (void)pthread_join(r->watcher, NULL);
    for (cudaEvent_t event : r->events)
        if (event != NULL) (void)cudaEventDestroy(event);
    if (r->comm != NULL && !r->broken) {
        int code = r->nccl.finalize(r->comm);
        while ((code == AMPC_NCCL_SUCCESS || code == AMPC_NCCL_IN_PROGRESS) && state == AMPC_NCCL_IN_PROGRESS &&
               ampc_now() < deadline) {
            code = r->nccl.async_error(r->comm, &state);
            if (state == AMPC_NCCL_IN_PROGRESS) ampc_nap(200);
        }
        (void)(state == AMPC_NCCL_SUCCESS ? r->nccl.destroy(r->comm) : r->nccl.abort(r->comm));
        r->comm = NULL;
    }
    if (r->nccl.opened != NULL) (void)dlclose(r->nccl.opened);
}

/* ==== 14 >>watch ==== */

/* ---- Telemetry, and a profiler's ranges */

void ampc_nvml_close(ampc_nvml *nvml) {
    if (nvml->shutdown != NULL) (void)nvml->shutdown();
    if (nvml->library != NULL) (void)dlclose(nvml->library);
    memset((void *)nvml, 0, sizeof *nvml);
}

/* Finds the GPU by its PCI address, because NVML's numbers do not follow CUDA_VISIBLE_DEVICES. */
void ampc_nvml_open(ampc_nvml *nvml, int index) {
    int (*init)(void);
    int (*find)(const char *address, void **device);
    char address[32];
    nvml->library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (nvml->library == NULL) return;
    ampc_symbol(nvml->library, "nvmlInit_v2", &init);
    ampc_symbol(nvml->library, "nvmlDeviceGetHandleByPciBusId_v2", &find);
    if (init == NULL || find == NULL || init() != 0) return;
    ampc_symbol(nvml->library, "nvmlShutdown", &nvml->shutdown);
    if (cudaDeviceGetPCIBusId(address, (int)sizeof address, index) != cudaSuccess) (void)cudaGetLastError();
    else if (find(address, &nvml->device) != 0) nvml->device = NULL;
    ampc_symbol(nvml->library, "nvmlDeviceGetUtilizationRates", &nvml->utilization);
    ampc_symbol(nvml->library, "nvmlDeviceGetTemperatureV", &nvml->temperature);
    ampc_symbol(nvml->library, "nvmlDeviceGetTemperature", &nvml->temperature_before);
    ampc_symbol(nvml->library, "nvmlDeviceGetPowerUsage", &nvml->power);
}

/* Number 0 is the sensor of the GPU itself.  A struct's version holds its size and, above 24 bits, its number. */
float ampc_temperature(const ampc_nvml *nvml) {
    ampc_nvml_temperature now = {(unsigned)sizeof now | 1u << 24, 0, 0};
    unsigned celsius = 0;
    if (nvml->temperature != NULL && nvml->temperature(nvml->device, &now) == 0) return (float)now.celsius;
    if (nvml->temperature_before != NULL && nvml->temperature_before(nvml->device, 0, &celsius) == 0)
        return (float)celsius;
    return -1;
}

/* Returns NVML, which the first thread that asks opens.  A thread that asks meanwhile opens a second copy, and closes
   it again. */
ampc_nvml ampc_nvml_of(ampc_device *dev) {
    ampc_nvml nvml, mine = {};
    {
        ampc_locked locked(dev);
        nvml = dev->nvml;
    }
    if (nvml.looked_for) return nvml;
    ampc_nvml_open(&mine, dev->index);
    mine.looked_for = 1;
    {
        ampc_locked locked(dev);
        nvml = dev->nvml;
        if (!nvml.looked_for) dev->nvml = mine;
    }
    if (!nvml.looked_for) return mine;
    ampc_nvml_close(&mine);
    return nvml;
}

/* Unavailable values stay -1.  They are unavailable without the driver's library, on a virtual GPU without sensors, and
   on a lost GPU. */
amp_result ampc_telemetry(void *device, amp_telemetry *out) {
    ampc_device *dev = (ampc_device *)device;
    const ampc_nvml nvml = ampc_nvml_of(dev);
    ampc_nvml_utilization busy = {0, 0};
    unsigned milliwatts = 0;
    out->utilization = out->memory_utilization = out->temperature = out->power = -1;
    if (nvml.device == NULL) return AMP_OK;
    if (nvml.utilization != NULL && nvml.utilization(nvml.device, &busy) == 0) {
        out->utilization = (float)busy.gpu / 100;
        out->memory_utilization = (float)busy.memory / 100;
    }
    if (nvml.power != NULL && nvml.power(nvml.device, &milliwatts) == 0) out->power = (float)milliwatts / 1000;
    out->temperature = ampc_temperature(&nvml);
    return AMP_OK;
}

#if defined(AMP_NVTX)
void ampc_profile_push(void *device, const char *name) { (void)device; (void)nvtxRangePushA(name); }
void ampc_profile_pop(void *device) { (void)device; (void)nvtxRangePop(); }
#else
void (*const ampc_profile_push)(void *device, const char *name) = NULL;
void (*const ampc_profile_pop)(void *device) = NULL;
#endif

/* ---- Statistics of tensors.  A thread counts over a row, and a warp adds its counts to the row's in memory.  Counts
   are integers, so the order does not matter. */

struct ampc_fits { ampi_fit of32, of64; };
/* `above` is as in ampi_fit, but without the `plain` numbers, which become normal numbers below the last binade. */
struct ampc_tally { int plain, above[AMPI_FIT_LIMITS]; uint32_t largest; };

template <int N>
__device__ __forceinline__ void ampc_inspect_lanes(const uint4 &raw, amp_dtype dtype, const ampi_fit &fit,
                                                   ampc_tally *t) {
    float x[N];
    ampc_widen<N>(raw, dtype, x);
    uint32_t first = (uint32_t)fit.limit[AMPI_FIT_NORMAL] + 1, plain = (uint32_t)fit.limit[AMPI_FIT_LAST] - first,
             largest = 0;
    bool all = true;
    AMPC_UNROLL
    for (int i = 0; i < N; i++) {
        uint32_t bits = ampi_bits_f32(x[i]) & 0x7fffffffu;
        all &= bits - first <= plain;
        if (bits > largest) largest = bits;
    }
    if (all) {
        t->plain += N;
        if (largest > t->largest) t->largest = largest;
        return;
    }
    AMPC_UNROLL
    for (int i = 0; i < N; i++) {
        uint32_t bits = ampi_bits_f32(x[i]) & 0x7fffffffu;
        AMPC_UNROLL
        for (int k = 0; k < AMPI_FIT_LIMITS; k++) t->above[k] += bits > (uint32_t)fit.limit[k];
        if (bits > t->largest && bits <= (uint32_t)fit.limit[AMPI_FIT_INFINITE]) t->largest = bits;
    }
}

__device__ __forceinline__ void ampc_inspect_doubles(const double *p, int n, const ampc_fits &fits, ampc_tally *t) {
    for (int i = (int)threadIdx.x; i < n; i += AMPC_MULTI_THREADS) {
        uint64_t bits = ampi_bits_f64(p[i]) & ~(uint64_t)0 >> 1;
        uint32_t narrow = bits <= fits.of64.limit[AMPI_FIT_INFINITE] ? ampi_to_f32(bits, 1) : 0;
        AMPC_UNROLL
        for (int k = 0; k < AMPI_FIT_LIMITS; k++) t->above[k] += bits > fits.of64.limit[k];
        if (narrow > t->largest) t->largest = narrow;
    }
}

__device__ __forceinline__ void ampc_count_add(int64_t *total, int64_t more) {
    if (more != 0) atomicAdd((unsigned long long *)total, (unsigned long long)more);
}
__device__ __forceinline__ void ampc_tally_add(const ampc_tally &t, amp_k_inspected *out) {
    uint32_t largest = ampc_warp_max(t.largest);
    int64_t above[AMPI_FIT_LIMITS];
    amp_k_inspected sum;
    AMPC_UNROLL
    for (int k = 0; k < AMPI_FIT_LIMITS; k++)
        above[k] = ampc_warp_sum(t.above[k] + (k <= AMPI_FIT_NORMAL ? t.plain : 0));
    if (threadIdx.x % 32 != 0) return;
    ampi_fit_count(above, &sum);
    ampc_count_add(&out->nan, sum.nan);
    ampc_count_add(&out->infinite, sum.infinite);
    ampc_count_add(&out->nonzero, sum.nonzero);
    ampc_count_add(&out->underflow, sum.underflow);
    ampc_count_add(&out->subnormal, sum.subnormal);
    ampc_count_add(&out->overflow, sum.overflow);
    ampc_count_add(&out->saturated, sum.saturated);
    atomicMax((unsigned *)&out->largest, largest);
}

__global__ void __launch_bounds__(AMPC_MULTI_THREADS, AMPC_MULTI_PER_SM)
ampc_inspect_kernel(const amp_k_tensor *table, int64_t tensors, ampc_fits fits, amp_k_inspected *out) {
    ampc_tally t = {};
    int mine = -1;
    ampc_for_chunks(table, tensors, [&](const ampc_chunk &c) {
        if (c.row != mine) {
            if (mine >= 0) ampc_tally_add(t, out + mine);
            t = {};
            mine = c.row;
        }
        if (c.dtype == AMP_F64) ampc_inspect_doubles((const double *)c.grad, c.n, fits, &t);
        else
            ampc_for_pieces(c.grad, c.dtype, c.n, false, [&](const uint4 &raw, amp_dtype dtype, auto lanes) {
                ampc_inspect_lanes<decltype(lanes)::v>(raw, dtype, fits.of32, &t);
            });
    });
    if (mine >= 0) ampc_tally_add(t, out + mine);
}

amp_result ampc_inspect(void *device, const amp_k_inspect *a, void *stream) {
    ampc_device *dev = (ampc_device *)device;
    unsigned grid = (unsigned)(dev->has.multiprocessors * AMPC_MULTI_PER_SM);
    ampc_fits fits = {ampi_fit_of(0, a->dtype), ampi_fit_of(1, a->dtype)};
    if (a->tensors <= 0) return ampc_usable(dev, "amp_tensor_stats_step");
    AMPC_TRY(ampc_fill(dev, a->out, 0, (size_t)a->tensors * sizeof *a->out, stream));
    return ampc_launch(dev, "amp_tensor_stats_step", ampc_inspect_kernel, grid, AMPC_MULTI_THREADS, 0, stream, a->table,
                       a->tensors, fits, a->out);
}

/* ==== 6 >>backends: large shared memory ====
   When a context is opened, every kernel that may need more shared memory than CUDA's default is allowed to use it. */

template <int D, amp_dtype C> amp_result ampc_allow_hopper_heads(ampc_device *dev) {
    return ampc_allow_shared(dev, ampc_flash_hopper_rows<D, C>, ampc_flash_hopper_gradient_rows<AMPC_TO_KEYS, D, C>,
                             ampc_flash_hopper_gradient_rows<AMPC_TO_QUERIES, D, C>);
}
amp_result ampc_allow_hopper(ampc_device *dev) {
    AMPC_TRY((ampc_allow_hopper_heads<64, AMP_F16>(dev)));
    AMPC_TRY((ampc_allow_hopper_heads<64, AMP_BF16>(dev)));
    AMPC_TRY((ampc_allow_hopper_heads<128, AMP_F16>(dev)));
    return ampc_allow_hopper_heads<128, AMP_BF16>(dev);
}

amp_result ampc_allow_large(ampc_device *dev) {
    amp_k_attention a = {};
    for (int shape : {808, 816, 824, 832, 408, 416, 432, 108}) {
        ampc_row_plan plan = {};
        plan.v = shape / 100, plan.e = shape % 100;
        AMPC_TRY(ampc_pick_shape(plan, [&](auto picked) {
            typedef decltype(picked) S;
            if constexpr (ampc_one_chunk(S::v, S::e))
                return ampc_allow_shared(dev, ampc_norm_rows<S::v, S::e, true>, ampc_norm_gradient_rows<S::v, S::e>);
            else return ampc_allow_shared(dev, ampc_norm_rows<S::v, S::e, false>, ampc_norm_gradient_wide<S::v, S::e>);
        }));
    }
    AMPC_TRY(ampc_allow_shared(dev, ampc_cross_entropy_rows<8, true>, ampc_cross_entropy_rows<4, true>,
                               ampc_cross_entropy_rows<1, true>));
    for (int way = 0; way < 8 && dev->has.tensor_cores; way++) {
        const amp_dtype dtypes[] = {AMP_F16, AMP_BF16, AMP_TF32, AMP_F32};
        a.dim = way & 1 ? 128 : 64, a.compute = dtypes[way / 2];
        AMPC_TRY(ampc_flash_pick(a, [&](auto kind) {
            typedef decltype(kind) K;
            return ampc_allow_shared(dev, ampc_flash_rows<K::d, K::compute>,
                                     ampc_flash_gradient_rows<AMPC_TO_KEYS, K::d, K::compute>,
                                     ampc_flash_gradient_rows<AMPC_TO_QUERIES, K::d, K::compute>);
        }));
    }
    return dev->has.warpgroups ? ampc_allow_hopper(dev) : AMP_OK;
}

/* ==== 6 >>backends: the table ==== */

__extension__ const amp_backend ampc_backend = {.abi = AMP_ABI,
                                                .name = "cuda",
                                                .open = ampc_open,
                                                .close = ampc_close,
                                                .describe = ampc_describe,
                                                .fuses = 1,
                                                .sums = 1,
                                                .host_visible = 0,
                                                .saturates = 1,
                                                .quantizes = 1,
                                                .alloc = ampc_alloc,
                                                .free = ampc_free,
                                                .alloc_pinned = ampc_alloc_pinned,
                                                .free_pinned = ampc_free_pinned,
                                                .copy = ampc_copy,
                                                .fill = ampc_fill,
                                                .memory_kind = ampc_place_of,
                                                .memory = ampc_memory,
                                                .stream_create = ampc_stream_create,
                                                .stream_destroy = ampc_stream_destroy,
                                                .stream_sync = ampc_stream_sync,
                                                .event_create = ampc_event_create,
                                                .event_destroy = ampc_event_destroy,
                                                .event_record = ampc_event_record,
                                                .event_wait = ampc_event_wait,
                                                .event_done = ampc_event_done,
                                                .event_sync = ampc_event_sync,
                                                .event_elapsed = ampc_event_elapsed,
                                                .graph_begin = ampc_graph_begin,
                                                .graph_end = ampc_graph_end,
                                                .graph_launch = ampc_graph_launch,
                                                .graph_destroy = ampc_graph_destroy,
                                                .communicator_id = ampc_communicator_id,
                                                .communicator = ampc_communicator,
                                                .telemetry = ampc_telemetry,
                                                .profile_push = ampc_profile_push,
                                                .profile_pop = ampc_profile_pop,
                                                .plans_save = ampc_plans_save,
                                                .plans_load = ampc_plans_load,
                                                .trim = ampc_trim_idle,
                                                .cast = ampc_cast,
                                                .gemm = ampc_gemm,
                                                .gemm_pack_size = ampc_gemm_pack_size,
                                                .gemm_pack = ampc_gemm_pack,
                                                .gemm_reserve = ampc_gemm_reserve,
                                                .gemm_release = ampc_gemm_release,
                                                .scratch = ampc_call_scratch,
                                                .scratch_release = ampc_free,
                                                .column_sum = ampc_column_sum,
                                                .attention = ampc_attention,
                                                .attention_backward = ampc_attention_backward,
                                                .rope = ampc_rope,
                                                .norm = ampc_norm,
                                                .norm_backward = ampc_norm_backward,
                                                .softmax = ampc_softmax,
                                                .softmax_backward = ampc_softmax_backward,
                                                .activation = ampc_activation,
                                                .activation_backward = ampc_activation_backward,
                                                .swiglu = ampc_swiglu,
                                                .swiglu_backward = ampc_swiglu_backward,
                                                .cross_entropy = ampc_cross_entropy,
                                                .mse = ampc_mse,
                                                .embedding = ampc_embedding,
                                                .embedding_backward = ampc_embedding_backward,
                                                .dropout = ampc_dropout,
                                                .add = ampc_add,
                                                .add_views = ampc_add_views,
                                                .check = ampc_check_grads,
                                                .adamw = ampc_adamw,
                                                .sgd = ampc_sgd,
                                                .lion = ampc_lion,
                                                .scale_ranges = ampc_scale_ranges,
                                                .inspect = ampc_inspect,
                                                .rule = ampc_rule,
                                                .fp8_update = ampc_fp8_update};

} /* namespace */

/* The CUDA backend's table, for amp_desc.backend. */
extern "C" const amp_backend *amp_cuda(void) { return &ampc_backend; }
