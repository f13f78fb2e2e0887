/* coc_device.h - what device code uses: thread indices, barriers, warp operations, atomics, memory hints, and numbers.  It
 * also has the typed launch.  coc_engine.cpp and coc_hopper.cpp implement these functions. */
#ifndef COC_DEVICE_H
#define COC_DEVICE_H

#include <tuple>
#include <type_traits>
#include <vector>

#if !defined(__launch_bounds__)
#  define __launch_bounds__(...)
#endif

/* ---- Threads, warps, blocks */

struct coc_meeting;             /* lanes of one warp that exchange values */
struct coc_warp {
    unsigned alive;             /* lanes that exist and have not returned */
    coc_meeting *open;          /* meetings that still wait for lanes */
};
struct coc_pending_copy { void *dst; const void *src; size_t bytes, from; int group; };

struct coc_thread {             /* one CUDA thread */
    uint3 index;
    unsigned lane;
    coc_warp *warp;
    coc_meeting *held;          /* the last meeting, whose values may still be read */
    const volatile unsigned *wait;
    unsigned wait_value;        /* runnable when *wait differs from this */
    const char *where;          /* the operation it waits in */
    int line;
    int state;                  /* 0 not started, 1 started, 2 returned */
    void *stack_pointer, *fake_stack;
    int stack;                  /* index of its stack, -1: none */
    int copy_group;
    std::vector<coc_pending_copy> copies;
};
struct coc_block {
    uint3 index;
    dim3 dim, grid;
};
extern __thread coc_thread *coc_current;        /* __thread: no wrapper function around every use */
extern __thread coc_block *coc_current_block;
#define threadIdx (coc_current->index)
#define blockIdx (coc_current_block->index)
#define blockDim (coc_current_block->dim)
#define gridDim (coc_current_block->grid)
static const int warpSize = 32;

/* Ends the kernel with a sticky error and a text for coc_faults (coc.h). */
[[noreturn]] void coc_trap(cudaError_t error, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* All threads of the block meet here; returns how many of them gave a value that is not 0. */
unsigned coc_barrier(int value, const char *name, int line);

static inline void __syncthreads(int line = __builtin_LINE()) { coc_barrier(0, "__syncthreads", line); }
static inline int __syncthreads_count(int p, int line = __builtin_LINE()) {
    return (int)coc_barrier(p, "__syncthreads_count", line);
}
static inline int __syncthreads_or(int p, int line = __builtin_LINE()) {
    return coc_barrier(p, "__syncthreads_or", line) != 0;
}
static inline int __syncthreads_and(int p, int line = __builtin_LINE()) {
    return coc_barrier(!p, "__syncthreads_and", line) == 0;
}
static inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
[[noreturn]] static inline void __trap() { coc_trap(cudaErrorLaunchFailure, "the kernel called __trap"); }

/* ---- Shared memory: each block finds it filled with 0xFF (NaN); red zones lie around every piece. */

unsigned char *coc_dynamic_shared();
void *coc_static_shared(const void *site, size_t bytes);
#define COC_SHARED(type, name, count) \
    static const char name##_site = 0; \
    type(&name)[count] = *(type(*)[count])coc_static_shared(&name##_site, sizeof(type[count]))

/* ---- Warp operations: the lanes of `mask` that have not returned meet, and see each other's values. */

enum { COC_SLOT = 48 };         /* bytes a lane can give */
struct coc_slots {
    unsigned lanes;             /* who took part */
    alignas(16) unsigned char slot[32][COC_SLOT];
};
const coc_slots *coc_exchange(unsigned mask, const void *value, size_t bytes, const char *name);

/* The value lane `lane` gave; that of a lane that took no part is undefined: 0xFF bytes. */
template <class T> static inline T coc_lane_value(const coc_slots *s, unsigned lane) {
    T value;
    if (s->lanes >> lane & 1) memcpy(&value, s->slot[lane], sizeof value);
    else memset(&value, 0xFF, sizeof value);
    return value;
}
template <class T> static inline T coc_shuffle(unsigned mask, T value, unsigned source, const char *name) {
    static_assert(sizeof(T) <= 8, "shuffles move 4 or 8 bytes");
    return coc_lane_value<T>(coc_exchange(mask, &value, sizeof value, name), source);
}
template <class T> static inline T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    unsigned w = (unsigned)width, lane = coc_current->lane;
    return coc_shuffle(mask, value, (lane & ~(w - 1)) | ((unsigned)source & (w - 1)), "__shfl_sync");
}
template <class T> static inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    unsigned lane = coc_current->lane, within = lane & ((unsigned)width - 1);
    return coc_shuffle(mask, value, within < delta ? lane : lane - delta, "__shfl_up_sync");
}
template <class T> static inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    unsigned lane = coc_current->lane, within = lane & ((unsigned)width - 1);
    return coc_shuffle(mask, value, within + delta >= (unsigned)width ? lane : lane + delta, "__shfl_down_sync");
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
    unsigned w = (unsigned)width, lane = coc_current->lane, source = (lane ^ (unsigned)lanes) & 31;
    return coc_shuffle(mask, value, source / w > lane / w ? lane : source, "__shfl_xor_sync");
}
static inline void __syncwarp(unsigned mask = ~0u) { coc_exchange(mask, nullptr, 0, "__syncwarp"); }
static inline unsigned coc_vote(unsigned mask, int p, const char *name, unsigned *lanes) {
    const coc_slots *s = coc_exchange(mask, &p, sizeof p, name);
    unsigned votes = 0;
    for (unsigned i = 0; i < 32; i++)
        if (s->lanes >> i & 1 && coc_lane_value<int>(s, i)) votes |= 1u << i;
    *lanes = s->lanes;
    return votes;
}
static inline unsigned __ballot_sync(unsigned mask, int p) {
    unsigned lanes;
    return coc_vote(mask, p, "__ballot_sync", &lanes);
}
static inline int __any_sync(unsigned mask, int p) {
    unsigned lanes;
    return coc_vote(mask, p, "__any_sync", &lanes) != 0;
}
static inline int __all_sync(unsigned mask, int p) {
    unsigned lanes, votes = coc_vote(mask, p, "__all_sync", &lanes);
    return votes == lanes;
}
template <class T> static inline unsigned __match_any_sync(unsigned mask, T value) {
    const coc_slots *s = coc_exchange(mask, &value, sizeof value, "__match_any_sync");
    unsigned same = 0;
    for (unsigned i = 0; i < 32; i++)
        if (s->lanes >> i & 1 && memcmp(s->slot[i], &value, sizeof value) == 0) same |= 1u << i;
    return same;
}
#define COC_WARP_REDUCE(name, type, expression) \
    static inline type name(unsigned mask, type value) { \
        const coc_slots *s = coc_exchange(mask, &value, sizeof value, #name); \
        type a = 0; \
        for (unsigned i = 0, first = 1; i < 32; i++) { \
            if (!(s->lanes >> i & 1)) continue; \
            type b = coc_lane_value<type>(s, i); \
            a = first ? b : (expression); \
            first = 0; \
        } \
        return a; \
    }
COC_WARP_REDUCE(__reduce_add_sync, unsigned, a + b)
COC_WARP_REDUCE(__reduce_min_sync, unsigned, a < b ? a : b)
COC_WARP_REDUCE(__reduce_max_sync, unsigned, a > b ? a : b)
COC_WARP_REDUCE(__reduce_add_sync, int, (int)((unsigned)a + (unsigned)b))
COC_WARP_REDUCE(__reduce_min_sync, int, a < b ? a : b)
COC_WARP_REDUCE(__reduce_max_sync, int, a > b ? a : b)
COC_WARP_REDUCE(__reduce_and_sync, unsigned, a & b)
COC_WARP_REDUCE(__reduce_or_sync, unsigned, a | b)
COC_WARP_REDUCE(__reduce_xor_sync, unsigned, a ^ b)
#undef COC_WARP_REDUCE

/* ---- Atomics: blocks run in parallel, so they are atomic indeed.  Each returns the old value. */

template <class T, class F> static inline T coc_atomic(T *address, F change) {
    typedef typename std::conditional<sizeof(T) == 8, unsigned long long,
        typename std::conditional<sizeof(T) == 4, unsigned, unsigned short>::type>::type bits;
    static_assert(sizeof(T) == sizeof(bits), "atomics work on 2, 4 or 8 bytes");
    bits old = __atomic_load_n((bits *)(void *)address, __ATOMIC_RELAXED), next;
    T value;
    do {
        memcpy(&value, &old, sizeof value);
        T changed = change(value);
        memcpy(&next, &changed, sizeof next);
    } while (!__atomic_compare_exchange_n((bits *)(void *)address, &old, next, false, __ATOMIC_SEQ_CST,
                                          __ATOMIC_RELAXED));
    return value;
}
#define COC_ATOMIC(name, type, expression) \
    static inline type name(type *address, type value) { \
        return coc_atomic(address, [=](type old) { (void)old; return (type)(expression); }); \
    }
#define COC_ATOMIC_BITS(type) \
    COC_ATOMIC(atomicAnd, type, old & value) \
    COC_ATOMIC(atomicOr, type, old | value) \
    COC_ATOMIC(atomicXor, type, old ^ value) \
    COC_ATOMIC(atomicExch, type, value) \
    COC_ATOMIC(atomicMin, type, old < value ? old : value) \
    COC_ATOMIC(atomicMax, type, old > value ? old : value) \
    static inline type atomicCAS(type *address, type compare, type value) { \
        return coc_atomic(address, [=](type old) { return old == compare ? value : old; }); \
    }
COC_ATOMIC_BITS(int)
COC_ATOMIC_BITS(unsigned)
COC_ATOMIC_BITS(unsigned long long)
COC_ATOMIC(atomicAdd, int, (unsigned)old + (unsigned)value)
COC_ATOMIC(atomicAdd, unsigned, old + value)
COC_ATOMIC(atomicAdd, unsigned long long, old + value)
COC_ATOMIC(atomicAdd, float, old + value)
COC_ATOMIC(atomicAdd, double, old + value)
COC_ATOMIC(atomicSub, int, (unsigned)old - (unsigned)value)
COC_ATOMIC(atomicSub, unsigned, old - value)
COC_ATOMIC(atomicExch, float, value)
COC_ATOMIC(atomicMin, long long, old < value ? old : value)
COC_ATOMIC(atomicMax, long long, old > value ? old : value)
COC_ATOMIC(atomicInc, unsigned, old >= value ? 0 : old + 1)
COC_ATOMIC(atomicDec, unsigned, old == 0 || old > value ? value : old - 1)
#undef COC_ATOMIC
#undef COC_ATOMIC_BITS
static inline unsigned short atomicCAS(unsigned short *address, unsigned short compare, unsigned short value) {
    return coc_atomic(address, [=](unsigned short old) { return old == compare ? value : old; });
}

/* ---- Loads and stores with a cache hint.  The GPU refuses a vector that is not aligned to its size. */

template <class T> static inline void coc_aligned(const T *p, const char *name) {
    if ((uintptr_t)p & (alignof(T) - 1))
        coc_trap(cudaErrorMisalignedAddress, "%s of %zu bytes at %p, which is not aligned", name, sizeof(T),
                 (const void *)p);
}
#define COC_LOAD(name) \
    template <class T> static inline T name(const T *p) { coc_aligned(p, #name); return *p; }
#define COC_STORE(name) \
    template <class T> static inline void name(T *p, T value) { coc_aligned(p, #name); *p = value; }
COC_LOAD(__ldg) COC_LOAD(__ldcs) COC_LOAD(__ldcg) COC_LOAD(__ldca) COC_LOAD(__ldlu) COC_LOAD(__ldcv)
COC_STORE(__stcs) COC_STORE(__stcg) COC_STORE(__stwb) COC_STORE(__stwt)
#undef COC_LOAD
#undef COC_STORE

/* ---- cp.async: the bytes are NaN until the group has been waited for, as late as legal. */

/* bytes: 4, 8 or 16, of which the first `from` are read and the others become 0. */
void coc_copy_async(void *shared, const void *global, size_t bytes, size_t from);
void coc_prefetch(const void *global);
void coc_copy_commit();
void coc_copy_wait(int groups_left);

/* ---- cvt.rn.satfinite.e4m3x2.f32 and .e5m2x2, as the PTX ISA describes them: to nearest even, a first, into the upper half;
   what is larger than the largest number, infinities too, becomes that number of its sign, and each NaN 0x7f.  From compute
   capability 8.9 on. */
int coc_image();                                /* what the program was compiled for, 10 major + minor */
bool coc_image_has_letter();                    /* It was compiled for sm_90a, not sm_90. */
uint16_t coc_cvt_fp8x2(float a, float b, bool e5m2);

/* ---- Tensor cores: fragments lie over the lanes of a warp as the PTX ISA draws them ("Matrix Fragments for
   mma.m16n8k16 with floating point type", "ldmatrix").  With g = lane / 4, t = lane % 4, and low and high half of a
   register as .0 and .1:
       a (16 x 16)  a0.e = A[g][2t + e]   a1.e = A[g + 8][2t + e]   a2.e = A[g][2t + 8 + e]   a3.e = A[g + 8][2t + 8 + e]
       b (16 x 8)   b0.e = B[2t + e][g]   b1.e = B[2t + 8 + e][g]
       c (16 x 8)   c0, c1 = C[g][2t, 2t + 1]   c2, c3 = C[g + 8][2t, 2t + 1]
   ldmatrix.x4: lane 8 i + j names row j of the 8 x 8 matrix i; r[i].e = M[g][2t + e], transposed M[2t + e][g]. */
void coc_mma_m16n8k16(float *c, const uint32_t *a, const uint32_t *b, bool bf16);      /* c += a b, sums in fp32 */
/* The same in TF32 ("Matrix Fragments for mma.m16n8k8"), of which the upper 19 bits of each word are used:
       a (16 x 8)  a0 = A[g][t]   a1 = A[g + 8][t]   a2 = A[g][t + 4]   a3 = A[g + 8][t + 4]
       b (8 x 8)   b0 = B[t][g]   b1 = B[t + 4][g]         c as above */
void coc_mma_m16n8k8_tf32(float *c, const uint32_t *a, const uint32_t *b);
void coc_ldmatrix_x4(uint32_t *r, const void *row, bool transposed);

/* ---- From compute capability 9.0 on (coc_hopper.cpp): barriers in shared memory that count arrivals and bytes
   ("mbarrier"), and bulk copies that complete them.  The destination of a copy is NaN until it lands.  It lands when no
   thread can go on, as late as legal: the oldest first (COC_FORWARD), the youngest first (COC_REVERSE), or any (COC_RANDOM).
   With COC_AHEAD, it lands at once.  Each misuse ends the kernel with a fault. */
void coc_mbarrier_init(void *bar, unsigned count);
void coc_mbarriers_ready(void);                 /* fence.mbarrier_init; a barrier of the block must follow */
void coc_mbarrier_arrive(void *bar, unsigned expect_bytes);
void coc_mbarrier_wait(void *bar, unsigned parity);         /* until the phase of this parity has completed */
/* The box of a tensor map at these coordinates, innermost first. */
void coc_tensor_fetch(void *to, const void *map, void *bar, int c0, int c1, int c2, int c3);
void coc_bulk_fetch(void *to, const void *from, unsigned bytes, void *bar);

/* ---- Of sm_90a alone: products of a warpgroup, which is 128 threads from a multiple of 128 on.  c (64 x n) += a b in fp32, with
   a (64 x 16) by its descriptor, or by four registers if a_words is not NULL, and b (16 x n) by its descriptor.
   b_transposed: the numbers of a row of b, not of a column, are contiguous.  See PTX ISA, "wgmma.mma_async".
       c  c[4 j + 2 h + e] = C[16 warp + 8 h + g][8 j + 2t + e]
       a  as in mma.m16n8k16, with the rows from 16 warp on
   From issue to wait, c is NaN; c and a_words must stay where they are, and must not be changed.  The four warps compute a
   group together, not before all have committed it: when a thread waits for it (COC_FORWARD, COC_AHEAD), as soon as all
   have committed it (COC_REVERSE), or either (COC_RANDOM). */
void coc_wgmma_fence(void);
void coc_wgmma(float *c, int n, const uint32_t *a_words, uint64_t a, uint64_t b, bool b_transposed, bool bf16, bool add);
void coc_wgmma_commit(void);
void coc_wgmma_wait(int groups_left);
/* The address of dynamic shared memory as the GPU numbers it, for descriptors; see coc_set_shared_base. */
uint32_t coc_shared_number(const void *p);
void coc_setmaxnreg(int registers, bool more);
void coc_named_barrier(int id, int threads, bool waits);    /* bar.sync, or bar.arrive if it does not wait */

/* ---- Numbers */

static inline unsigned __float_as_uint(float x) { unsigned u; memcpy(&u, &x, 4); return u; }
static inline int __float_as_int(float x) { int i; memcpy(&i, &x, 4); return i; }
static inline float __uint_as_float(unsigned u) { float x; memcpy(&x, &u, 4); return x; }
static inline float __int_as_float(int i) { float x; memcpy(&x, &i, 4); return x; }
static inline long long __double_as_longlong(double x) { long long i; memcpy(&i, &x, 8); return i; }
static inline double __longlong_as_double(long long i) { double x; memcpy(&x, &i, 8); return x; }

static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
/* Macros, because glibc has functions of these names. */
#define __expf(x) expf(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __powf(x, y) powf(x, y)
static inline float __fdividef(float x, float y) { return x / y; }
static inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1) : 0; }
static inline float __fadd_rn(float x, float y) { return x + y; }
static inline float __fsub_rn(float x, float y) { return x - y; }
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline float __fdiv_rn(float x, float y) { return x / y; }
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline float __frsqrt_rn(float x) { return (float)(1.0 / sqrt((double)x)); }
static inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
static inline double __dadd_rn(double x, double y) { return x + y; }
static inline double __dsub_rn(double x, double y) { return x - y; }
static inline double __dmul_rn(double x, double y) { return x * y; }
static inline double __ddiv_rn(double x, double y) { return x / y; }
static inline double __dsqrt_rn(double x) { return sqrt(x); }
static inline double __fma_rn(double x, double y, double z) { return fma(x, y, z); }
static inline float __double2float_rn(double x) { return (float)x; }
static inline int __float2int_rn(float x) { return (int)rintf(x); }
static inline int __float2int_rz(float x) { return (int)x; }
static inline float __int2float_rn(int x) { return (float)x; }
static inline float __uint2float_rn(unsigned x) { return (float)x; }
static inline float __ll2float_rn(long long x) { return (float)x; }

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
long long coc_clock();
static inline long long clock64() { return coc_clock(); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline unsigned __brev(unsigned x) {
    unsigned r = 0;
    for (unsigned i = 0; i < 32; i++) r |= (x >> i & 1) << (31 - i);
    return r;
}
static inline unsigned __umulhi(unsigned x, unsigned y) { return (unsigned)((unsigned long long)x * y >> 32); }
static inline int __mulhi(int x, int y) { return (int)((long long)x * y >> 32); }
__extension__ typedef unsigned __int128 coc_u128;
static inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
    return (unsigned long long)((coc_u128)x * y >> 64);
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((unsigned long long)high << 32 | low) >> (shift & 31));
}
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((unsigned long long)high << 32 | low) << (shift & 31) >> 32);
}
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    unsigned long long bytes = (unsigned long long)y << 32 | x;
    unsigned r = 0;
    for (unsigned i = 0; i < 4; i++) {
        unsigned pick = selector >> 4 * i & 15, byte = (unsigned)(bytes >> 8 * (pick & 7)) & 255;
        if (pick & 8) byte = byte & 128 ? 255 : 0;
        r |= byte << 8 * i;
    }
    return r;
}
#define COC_MIN_MAX(type) \
    static inline type min(type a, type b) { return a < b ? a : b; } \
    static inline type max(type a, type b) { return a > b ? a : b; }
COC_MIN_MAX(int)
COC_MIN_MAX(unsigned)
COC_MIN_MAX(long)
COC_MIN_MAX(unsigned long)
COC_MIN_MAX(long long)
COC_MIN_MAX(unsigned long long)
#undef COC_MIN_MAX
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }
static inline double min(double a, double b) { return fmin(a, b); }
static inline double max(double a, double b) { return fmax(a, b); }

/* ---- Launching: the overloads recover the kernel's parameter types, so that the values can be copied at the call
   (work is run later, and by graphs again and again) and pointers among them be checked. */

struct coc_call {
    virtual void run() = 0;                             /* what one thread does */
    virtual const void *kernel() = 0;
    virtual void pointers(std::vector<const void *> *out) = 0;
    virtual ~coc_call() {}
};
template <class... P> struct coc_typed_call : coc_call {
    void (*function)(P...);
    std::tuple<typename std::decay<P>::type...> values;
    template <size_t... I> coc_typed_call(void (*f)(P...), void **args, std::index_sequence<I...>)
        : function(f), values(*(typename std::decay<P>::type *)args[I]...) {}
    void run() override { std::apply(function, values); }
    const void *kernel() override { return (const void *)function; }
    void pointers(std::vector<const void *> *out) override {
        std::apply([out](auto &...value) { (void)out; (add(out, value), ...); }, values);
    }
    template <class T> static void add(std::vector<const void *> *out, T &value) {
        if constexpr (std::is_pointer<T>::value) out->push_back((const void *)value);
        else (void)out, (void)value;
    }
};
cudaError_t coc_launch(coc_call *call, dim3 grid, dim3 block, size_t shared, cudaStream_t stream);

template <class... P>
static inline cudaError_t cudaLaunchKernel(void (*kernel)(P...), dim3 grid, dim3 block, void **args, size_t shared = 0,
                                           cudaStream_t stream = 0) {
    coc_call *call = new coc_typed_call<P...>(kernel, args, std::index_sequence_for<P...>());
    return coc_launch(call, grid, block, shared, stream);
}
template <class... P>
static inline cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), enum cudaFuncAttribute attribute, int value) {
    return cudaFuncSetAttribute((const void *)kernel, attribute, value);
}
template <class... P>
static inline cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, void (*kernel)(P...)) {
    return cudaFuncGetAttributes(attributes, (const void *)kernel);
}
template <class... P>
static inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void (*kernel)(P...),
                                                                        int block_size, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, (const void *)kernel, block_size, shared);
}
template <class T> static inline cudaError_t cudaMalloc(T **pointer, size_t size) {
    return cudaMalloc((void **)(void *)pointer, size);
}
template <class T> static inline cudaError_t cudaMallocAsync(T **pointer, size_t size, cudaStream_t stream) {
    return cudaMallocAsync((void **)(void *)pointer, size, stream);
}
template <class T> static inline cudaError_t cudaMallocHost(T **pointer, size_t size) {
    return cudaMallocHost((void **)(void *)pointer, size);
}
template <class T> static inline cudaError_t cudaHostAlloc(T **pointer, size_t size, unsigned int flags) {
    return cudaHostAlloc((void **)(void *)pointer, size, flags);
}

#endif
