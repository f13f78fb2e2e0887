/* t_cuda_runtime.cpp - tests the CUDA backend's runtime, casts, multi-tensor kernels and products, on the model GPU. */
#include "test_cuda.h"
#include <stdlib.h>
#include <thread>

#define TRY(call) do { amp_result tried = (call); if (tried != AMP_OK) return tried; } while (0)

/* The CPU's instruction set; it needs a fused multiply-add to give the GPU's bits. */
static amp_cpu_path cpu_path() {
    amp_machine machine;
    return amp_machine_probe(&machine) == AMP_OK ? machine.cpu.path : AMP_CPU_SCALAR;
}

/* ---- One open device, without a context around it */

static std::string last_text;
static long host_blocks;        /* of host memory that the backend holds */
static int host_logs, host_fail_alloc;

static amp_result host_fail(void *, amp_result result, const char *text) {
    last_text = text;
    return result;
}
static void host_log(void *, amp_log_level, int, const char *text) {
    host_logs++;
    if (last_text.empty()) last_text = text;
}
static void *host_alloc(void *, size_t size, size_t align) {
    void *p = NULL;
    if (host_fail_alloc > 0 && --host_fail_alloc == 0) return NULL;
    if (posix_memalign(&p, align < sizeof p ? sizeof p : align, size) != 0) return NULL;
    host_blocks++;
    return p;
}
static void host_free(void *, void *p, size_t) {
    host_blocks--;
    free(p);
}

struct side {
    const amp_backend *b;
    void *dev = NULL;
    std::vector<void *> owned;
    std::vector<size_t> sizes;

    explicit side(const amp_backend *backend, int device = 0, void *stream = NULL, const amp_device_memory *memory = NULL)
        : b(backend) {
        const amp_host host = {NULL, host_fail, host_log, host_alloc, host_free, NULL};
        amp_backend_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.device = device;
        desc.threads = 1;
        desc.cpu_path = cpu_path();
        desc.stream = stream;
        if (memory) desc.memory = *memory;
        if (b->open(&dev, &host, &desc) != AMP_OK) dev = NULL;
    }
    ~side() { close(); }
    void close() {
        if (dev == NULL) return;
        for (size_t i = 0; i < owned.size(); i++) b->free(dev, owned[i], sizes[i]);
        b->close(dev);
        dev = NULL;
    }
    /* A copy of these bytes in device memory, `offset` bytes from an aligned address, with room behind. */
    void *up(const void *data, size_t bytes, size_t offset = 0) {
        void *p = NULL;
        CHECK_EQ(b->alloc(dev, &p, bytes + offset + 1), AMP_OK);
        if (p == NULL) return NULL;
        owned.push_back(p);
        sizes.push_back(bytes + offset + 1);
        if (bytes > 0) CHECK_EQ(b->copy(dev, (char *)p + offset, data, bytes, AMP_COPY_TO_DEVICE, NULL), AMP_OK);
        return (char *)p + offset;
    }
    template <class T> T *up(const std::vector<T> &data, size_t offset = 0) {
        return (T *)up(data.data(), data.size() * sizeof(T), offset);
    }
    template <class T> void down(std::vector<T> *data, const void *p) {
        if (data->empty()) return;
        CHECK_EQ(b->copy(dev, data->data(), p, data->size() * sizeof(T), AMP_COPY_TO_HOST, NULL), AMP_OK);
        CHECK_EQ(b->stream_sync(dev, NULL), AMP_OK);
    }
    template <class T> T one(const void *p) {
        std::vector<T> value(1);
        down(&value, p);
        return value[0];
    }
};

static uint64_t random_state = 1;
static uint32_t random_word() { return amp_random_u32(77, random_state++); }
static float random_unit() { return (float)(random_word() >> 8) * (1.0f / 16777216); }

typedef std::vector<uint8_t> bytes;

static const char *name_of(amp_dtype d) { return amp_dtype_name(d); }

/* n finite numbers of a dtype: mostly within 2^-6..2^6, with zeros, subnormals and large ones among them. */
static bytes numbers(amp_dtype dtype, int64_t n, float scale = 1) {
    std::vector<float> x((size_t)n);
    bytes out((size_t)n * amp_dtype_size(dtype));
    for (float &v : x) {
        int kind = (int)(random_word() % 64);
        v = ldexpf(2 * random_unit() - 1, (int)(random_word() % 13) - 6) * scale;
        if (kind == 0) v = 0;
        if (kind == 1) v = ldexpf(v, -100);
        if (kind == 2) v = ldexpf(v, 8);
    }
    amp_convert(out.data(), dtype, x.data(), AMP_F32, n, NULL, NULL);
    return out;
}

static bytes any_bits(amp_dtype dtype, int64_t n) {
    bytes out((size_t)n * amp_dtype_size(dtype));
    for (uint8_t &byte : out) byte = (uint8_t)random_word();
    /* a uniform pattern is rarely near the narrow formats' limits: aim half of the wide ones there */
    for (int64_t i = 0; i < n && (dtype == AMP_F32 || dtype == AMP_TF32); i += 2) {
        uint32_t bits = (random_word() & 0x807fffffu) | (100 + random_word() % 60) << 23;
        if (i % 16 == 0) bits = (bits & 0x80000000u) | (0x477fe000u + (random_word() % 5 << 11));   /* fp16's largest */
        if (i % 16 == 2) bits = (bits & 0x80000000u) | (0x43e00000u + (random_word() % 5 << 18));   /* e4m3's */
        if (i % 16 == 4) bits = (bits & 0x80000000u) | (0x47600000u + (random_word() % 5 << 19));   /* e5m2's */
        if (i % 16 == 6) bits |= 0x7f800000u;                                                       /* inf and NaN */
        memcpy(&out[(size_t)i * 4], &bits, 4);
    }
    for (int64_t i = 0; i < n && dtype == AMP_F64; i += 2) {
        uint64_t bits = (uint64_t)(random_word() & 0x800fffffu) << 32 | random_word();
        bits |= (uint64_t)(1023 - 30 + random_word() % 60) << 52;
        memcpy(&out[(size_t)i * 8], &bits, 8);
    }
    return out;
}

static const int64_t lengths[] = {0, 1, 7, 8, 15, 16, 33, 255, 2049, 5003};

/* ---- Opening */

TEST(open_and_describe) {
    coc_reset();
    {
        side cuda(amp_cuda());
        amp_device d;
        amp_memory_info info;
        memset(&info, 0, sizeof info);
        CHECK(cuda.dev != NULL);
        CHECK_EQ(cuda.b->describe(cuda.dev, &d), AMP_OK);
        CHECK(strcmp(d.kind, "cuda") == 0 && d.name[0] != 0);
        if (CUDA_IS_MODEL) CHECK(d.cc_major == 9 && d.cc_minor == 0 && d.fp16 && d.bf16 && d.tf32 && d.fp8);
        if (CUDA_IS_MODEL) CHECK_EQ(d.multiprocessors, 4);
        CHECK(d.cc_major >= 7 && d.multiprocessors > 0 && d.memory > 0 && d.index == 0);
        CHECK_EQ(cuda.b->memory(cuda.dev, &info), AMP_OK);
        CHECK(info.reserved == 0 && info.device_total == d.memory);
        CHECK(!cuda.b->host_visible && cuda.b->abi == AMP_ABI);
    }
    {
        side wrong(amp_cuda(), 7);
        CHECK(wrong.dev == NULL && last_text.find(".device = 7") != std::string::npos);
    }
    coc_alive alive = coc_living();
    CHECK(alive.allocations + alive.pinned + alive.streams + alive.events == 0);
    CHECK_EQ(host_blocks, 0);
    CHECK_EQ(coc_faults(), 0);
}

/* Contexts on both devices at once; the thread's current device stays what it was. */
TEST(several_contexts) {
    int devices = 0;
    coc_reset();
    CHECK_EQ(cudaGetDeviceCount(&devices), cudaSuccess);
    if (devices < 2) SKIP("needs two GPUs");
    CHECK_EQ(cudaSetDevice(0), cudaSuccess);
    {
        side a(amp_cuda(), 0), b(amp_cuda(), 1), c(amp_cuda(), 1);
        std::vector<float> x(1000, 1.5f), y(1000);
        float *on_a = a.up(x), *on_b = b.up(x), *on_c = c.up(x);
        amp_device d;
        int current = -1;
        CHECK_EQ(b.b->describe(b.dev, &d), AMP_OK);
        CHECK_EQ(d.index, 1);
        CHECK(on_a && on_b && on_c && on_b != on_c);
        cudaPointerAttributes where;
        CHECK_EQ(cudaPointerGetAttributes(&where, on_b), cudaSuccess);
        CHECK_EQ(where.device, 1);
        amp_memory_kind place = AMP_MEMORY_UNKNOWN;
        CHECK(b.b->memory_kind(b.dev, on_c, &place) == AMP_OK && place == AMP_MEMORY_DEVICE);
        CHECK(b.b->memory_kind(b.dev, on_a, &place) == AMP_OK && place == AMP_MEMORY_OTHER_DEVICE);
        b.down(&y, on_b);
        CHECK(y == x);
        CHECK_EQ(cudaGetDevice(&current), cudaSuccess);
        CHECK_EQ(current, 0);
    }
    CHECK_EQ(coc_living().allocations, 0);
    CHECK_EQ(coc_faults(), 0);
}

/* Whether the process has a CUDA context on a device. */
static bool has_context(int device) {
    cudaDriverEntryPointQueryResult found;
    void *function = NULL;
    unsigned flags = 0;
    int active = -1;
    CHECK_EQ(cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &function, 7000, 0, &found), cudaSuccess);
    CHECK(function != NULL && ((int (*)(int, unsigned *, int *))function)(device, &flags, &active) == 0 && active >= 0);
    return active != 0;
}

/* Work on one GPU makes no context on another: not on the first one of a thread that never chose. */
TEST(no_context_elsewhere) {
    int devices = 0, current = -1;
    coc_reset();
    CHECK_EQ(cudaGetDeviceCount(&devices), cudaSuccess);
    if (devices < 2) SKIP("needs two GPUs");
    if (!CUDA_IS_MODEL) SKIP("tests before this one use the first GPU");
    CHECK(!has_context(0) && !has_context(1));
    std::vector<float> x(1000, 1.5f), y(1000);
    {
        side cuda(amp_cuda(), 1);
        cuda.down(&y, cuda.up(x));
    }
    CHECK(x == y && !has_context(0) && has_context(1));
    CHECK_EQ(cudaSetDevice(0), cudaSuccess);
    {
        side cuda(amp_cuda(), 1);
        cuda.down(&y, cuda.up(x));
        CHECK(cudaGetDevice(&current) == cudaSuccess && current == 0);
    }
    CHECK_EQ(coc_faults(), 0);
    /* a driver without the function: the thread goes back, whatever that makes */
    coc_reset();
    coc_fail("cudaGetDriverEntryPointByVersion", 1, cudaErrorUnknown);
    {
        side cuda(amp_cuda(), 1);
        cuda.down(&y, cuda.up(x));
        CHECK(cudaGetDevice(&current) == cudaSuccess && current == 0);
    }
    CHECK(x == y && has_context(0));
    CHECK_EQ(coc_faults(), 0);
}

/* The host's own stream is used and not destroyed. */
TEST(host_stream) {
    coc_reset();
    cudaStream_t stream = NULL;
    CHECK_EQ(cudaStreamCreate(&stream), cudaSuccess);
    {
        side cuda(amp_cuda(), 0, stream);
        std::vector<float> x(100, 2.0f), y(100);
        float *p = cuda.up(x);
        CHECK_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        cuda.down(&y, p);
        CHECK(x == y);
        if (CUDA_IS_MODEL) CHECK_EQ(coc_living().streams, 1);
    }
    if (CUDA_IS_MODEL) CHECK_EQ(coc_living().streams, 1);
    CHECK_EQ(cudaStreamDestroy(stream), cudaSuccess);
    CHECK_EQ(coc_faults(), 0);
}

/* ---- Memory */

TEST(arena) {
    coc_reset();
    {
        side cuda(amp_cuda());
        amp_memory_info info;
        void *a = NULL, *b = NULL, *c = NULL, *pinned = NULL;
        memset(&info, 0, sizeof info);
        coc_reset_counts();
        CHECK_EQ(cuda.b->alloc(cuda.dev, &a, 1000), AMP_OK);
        CHECK_EQ(cuda.b->alloc(cuda.dev, &b, 5 << 20), AMP_OK);
        CHECK(((uintptr_t)a & 255) == 0 && ((uintptr_t)b & 255) == 0);
        CHECK_EQ(coc_calls("cudaMalloc"), 2);
        cuda.b->memory(cuda.dev, &info);
        CHECK(info.allocated >= 1000 + (5 << 20) && info.allocated <= (int64_t)((1000 + (5 << 20)) * 1.125) + 512);
        CHECK_EQ(info.reserved, info.allocated);
        cuda.b->free(cuda.dev, b, 5 << 20);
        CHECK_EQ(cuda.b->alloc(cuda.dev, &c, (5 << 20) - 100), AMP_OK);     /* the same class: used again */
        CHECK(c == b);
        CHECK_EQ(coc_calls("cudaMalloc"), 2);
        CHECK_EQ(coc_calls("cudaFree"), 0);
        CHECK_EQ(cuda.b->alloc_pinned(cuda.dev, &pinned, 4096), AMP_OK);
        cuda.b->memory(cuda.dev, &info);
        CHECK_EQ(info.pinned, 4096);
        cuda.b->free_pinned(cuda.dev, pinned, 4096);
        cuda.b->free(cuda.dev, a, 1000);
        cuda.b->free(cuda.dev, c, (5 << 20) - 100);
        cuda.b->memory(cuda.dev, &info);
        CHECK(info.allocated == 0 && info.reserved > (5 << 20) && info.pinned == 0);
    }
    CHECK_EQ(coc_living().allocations, 0);
    CHECK_EQ(coc_faults(), 0);
}

/* When the GPU is full, idle blocks of other sizes are given back; when that does not help, the text says the sizes. */
TEST(arena_full) {
    coc_reset();
    coc_set_devices(1, 64 << 20);
    {
        side cuda(amp_cuda());
        void *a = NULL, *b = NULL;
        CHECK_EQ(cuda.b->alloc(cuda.dev, &a, 40 << 20), AMP_OK);
        CHECK_EQ(cuda.b->alloc(cuda.dev, &b, 48 << 20), AMP_ERR_MEMORY);
        CHECK(b == NULL && last_text.find("cudaErrorMemoryAllocation") != std::string::npos);
        CHECK(last_text.find("cudaMalloc") != std::string::npos && last_text.find("smaller batch") != std::string::npos);
        cuda.b->free(cuda.dev, a, 40 << 20);
        CHECK_EQ(cuda.b->alloc(cuda.dev, &b, 48 << 20), AMP_OK);
        CHECK_EQ(coc_living().allocations, 1);
        cuda.b->free(cuda.dev, b, 48 << 20);
    }
    CHECK_EQ(coc_living().allocations, 0);
    CHECK_EQ(coc_faults(), 0);
    coc_reset();
    coc_set_devices(2);
}

/* The host's functions may ask the context that calls them: for its list of blocks, its allocator, its logger. */
static const amp_backend *asked;
static void *asked_device;
static int answers;
static void ask() {
    amp_memory_info info;
    memset(&info, 0, sizeof info);
    if (asked_device != NULL && asked->memory(asked_device, &info) == AMP_OK) answers++;
}
static void *asking_alloc(void *user, size_t size, size_t align) { return ask(), host_alloc(user, size, align); }
static void asking_free(void *user, void *p, size_t size) { ask(), host_free(user, p, size); }
static void asking_log(void *, amp_log_level, int, const char *) { ask(); }
static void *asking_memory(void *, size_t size, int, void *) {
    void *p = NULL;
    ask();
    return cudaMalloc(&p, size) == cudaSuccess ? p : NULL;
}
static void asking_release(void *, void *p, size_t, int, void *) { ask(), (void)cudaFree(p); }

TEST(callbacks) {
    coc_reset();
    const amp_host host = {NULL, host_fail, asking_log, asking_alloc, asking_free, NULL};
    amp_backend_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.memory.alloc = asking_memory;
    desc.memory.free = asking_release;
    asked = amp_cuda();
    void *dev = NULL, *graph = NULL, *p = NULL;
    CHECK_EQ(asked->open(&dev, &host, &desc), AMP_OK);
    asked_device = dev;
    answers = 0;
    CHECK_EQ(asked->alloc(dev, &p, 1000), AMP_OK);
    asked->free(dev, p, 1000);
    CHECK_EQ(answers, 2);
    CHECK_EQ(asked->graph_begin(dev, NULL), AMP_OK);
    CHECK_EQ(asked->graph_end(dev, NULL, &graph), AMP_OK);
    asked->graph_destroy(dev, graph);
    CHECK_EQ(answers, 4);
    if (CUDA_IS_MODEL) {                /* what is reported within an allocation */
        desc.memory.alloc = NULL;
        coc_fail("cudaGetDevice", 1, cudaErrorIllegalAddress, 1);
        CHECK_EQ(asked->alloc(dev, &p, 100000), AMP_ERR_DEVICE);
        CHECK_EQ(answers, 5);
    }
    asked_device = NULL;
    asked->close(dev);
    CHECK_EQ(host_blocks, 0);
    coc_fail_clear();
    (void)coc_take_faults();
    coc_reset();
}

/* A block that vectors and cuBLASLt could not use is given back and refused by name. */
static void *crooked_memory(void *, size_t size, int, void *) {
    char *p = NULL;
    return cudaMalloc((void **)&p, size + 64) == cudaSuccess ? p + 64 : NULL;
}
static void crooked_release(void *, void *p, size_t, int, void *) { (void)cudaFree((char *)p - 64); }
TEST(crooked_memory_is_refused) {
    coc_reset();
    amp_desc d;
    amp_context *amp = NULL;
    void *p = NULL;
    memset(&d, 0, sizeof d);
    d.backend = amp_cuda();
    CHECK_OK(amp_open(&amp, &d));
    amp_close(amp);
    d.memory.alloc = crooked_memory, d.memory.free = crooked_release;
    amp_result opened = amp_open(&amp, &d);
    if (opened == AMP_OK) {
        CHECK_ERR(amp_alloc(amp, &p, 1000), AMP_ERR_RANGE);
        CHECK(strstr(amp_last_error(), ".memory.alloc") != NULL);
        amp_close(amp);
    }
    else CHECK(opened == AMP_ERR_RANGE && strstr(amp_last_error(), ".memory.alloc") != NULL);
    coc_reset();
}

/* ---- Streams and events */

TEST(streams_and_events) {
    coc_reset();
    {
        side cuda(amp_cuda());
        const amp_backend *b = cuda.b;
        void *stream = NULL, *from = NULL, *to = NULL, *pinned = NULL;
        std::vector<int32_t> x(5000, 7);
        int32_t done = -1;
        double seconds = -1;
        CHECK_EQ(b->stream_create(cuda.dev, &stream), AMP_OK);
        CHECK_EQ(b->event_create(cuda.dev, &from, 1), AMP_OK);
        CHECK_EQ(b->event_create(cuda.dev, &to, 1), AMP_OK);
        CHECK_EQ(b->alloc_pinned(cuda.dev, &pinned, x.size() * 4), AMP_OK);
        int32_t *p = cuda.up(x);
        /* fill on one stream, copy on the other after the event: the copy sees the fill */
        CHECK_EQ(b->event_record(cuda.dev, from, NULL), AMP_OK);
        CHECK_EQ(b->fill(cuda.dev, p, 1, x.size() * 4, NULL), AMP_OK);
        CHECK_EQ(b->event_record(cuda.dev, to, NULL), AMP_OK);
        CHECK_EQ(b->event_wait(cuda.dev, to, stream), AMP_OK);
        CHECK_EQ(b->copy(cuda.dev, pinned, p, x.size() * 4, AMP_COPY_TO_HOST, stream), AMP_OK);
        CHECK_EQ(b->stream_sync(cuda.dev, stream), AMP_OK);
        CHECK_EQ(*(int32_t *)pinned, 0x01010101);
        CHECK_EQ(((int32_t *)pinned)[4999], 0x01010101);
        CHECK_EQ(b->event_sync(cuda.dev, to), AMP_OK);
        CHECK_EQ(b->event_done(cuda.dev, to, &done), AMP_OK);
        CHECK_EQ(done, 1);
        CHECK_EQ(b->event_elapsed(cuda.dev, from, to, &seconds), AMP_OK);
        CHECK(seconds >= 0);
        b->event_destroy(cuda.dev, from);
        b->event_destroy(cuda.dev, to);
        b->stream_destroy(cuda.dev, stream);
        b->free_pinned(cuda.dev, pinned, x.size() * 4);
    }
    coc_alive alive = coc_living();
    CHECK(alive.allocations + alive.pinned + alive.streams + alive.events == 0);
    CHECK_EQ(coc_faults(), 0);
}

/* ---- Casts */

static const amp_dtype floats[] = {AMP_F32, AMP_F64, AMP_F16, AMP_BF16, AMP_TF32, AMP_E4M3, AMP_E5M2};
enum { FLOATS = 7 };

static void cast_both(side *cuda, side *cpu, amp_dtype from, amp_dtype to, int64_t n, const amp_convert_desc *how,
                      size_t from_offset, size_t to_offset) {
    bytes x = any_bits(from, n), y((size_t)n * amp_dtype_size(to) + 64, 0xa5), expected = y;  /* what follows stays */
    side *sides[2] = {cpu, cuda};
    int64_t counts[2] = {0, 0};
    for (int s = 0; s < 2; s++) {
        int64_t start = 5;
        amp_k_cast k;
        memset(&k, 0, sizeof k);
        k.src = sides[s]->up(x, from_offset);
        k.dst = sides[s]->up(y, to_offset);
        k.src_dtype = from;
        k.dst_dtype = to;
        k.n = n;
        k.how = *how;
        k.new_inf = (int64_t *)sides[s]->up(&start, sizeof start);
        CHECK_EQ(sides[s]->b->cast(sides[s]->dev, &k, NULL), AMP_OK);
        sides[s]->down(s ? &y : &expected, k.dst);
        counts[s] = sides[s]->one<int64_t>(k.new_inf);
        if (s == 0) y.assign(y.size(), 0xa5);
    }
    CHECK_MSG(y == expected, "%s to %s, n = %lld, saturate %d, rounding %d, offsets %d %d", name_of(from), name_of(to),
              (long long)n, how->saturate, (int)how->rounding, (int)from_offset, (int)to_offset);
    CHECK_MSG(counts[0] == counts[1], "%s to %s: %lld new infinities, expected %lld", name_of(from), name_of(to),
              (long long)counts[1], (long long)counts[0]);
}

TEST(casts) {
    coc_reset();
    for (int f = 0; f < FLOATS; f++)
        for (int t = 0; t < FLOATS; t++) {
            side cuda(amp_cuda()), cpu(amp_cpu());
            for (int saturate = 0; saturate < 2; saturate++)
                for (int64_t n : lengths) {
                    amp_convert_desc how;
                    memset(&how, 0, sizeof how);
                    how.saturate = saturate;
                    size_t odd = n % 3 == 0 ? amp_dtype_size(floats[f]) : 0, odd_to = n % 4 == 3 ? amp_dtype_size(floats[t]) : 0;
                    cast_both(&cuda, &cpu, floats[f], floats[t], n, &how, odd, odd_to);
                }
        }
    CHECK_EQ(coc_living().allocations, 0);
    CHECK_EQ(coc_faults(), 0);
}

TEST(casts_stochastic) {
    coc_reset();
    for (int f = 0; f < FLOATS; f++)
        for (int t = 2; t < FLOATS; t++) {
            side cuda(amp_cuda()), cpu(amp_cpu());
            if (floats[t] == AMP_TF32) continue;
            for (int64_t n : lengths) {
                amp_convert_desc how = {AMP_ROUND_STOCHASTIC, (int32_t)(n & 1), 42, (uint64_t)n * 3 + 1};
                cast_both(&cuda, &cpu, floats[f], floats[t], n, &how, 0, n % 2 ? amp_dtype_size(floats[t]) : 0);
                how.offset = (uint64_t)n * 4 + ((uint64_t)1 << 40);
                cast_both(&cuda, &cpu, floats[f], floats[t], n, &how, 0, 0);
            }
        }
    CHECK_EQ(coc_faults(), 0);
}

/* Every 61st fp32 pattern to fp8 and fp16: the ways that are not amp.h's own functions. */
TEST(casts_many_patterns) {
    coc_reset();
    const int64_t n = 1 << 20;
    const amp_dtype to[] = {AMP_E4M3, AMP_E5M2, AMP_F16};
    for (int part = 0; part < 4; part++) {
        std::vector<uint32_t> x((size_t)n);
        for (int64_t i = 0; i < n; i++) x[(size_t)i] = (uint32_t)part * 0x40000000u + (uint32_t)i * 1021u;
        for (amp_dtype t : to) {
            side cuda(amp_cuda());
            bytes y((size_t)n * amp_dtype_size(t)), expected = y;
            amp_k_cast k;
            memset(&k, 0, sizeof k);
            k.src = cuda.up(x);
            k.dst = cuda.up(y);
            k.src_dtype = AMP_F32;
            k.dst_dtype = t;
            k.n = n;
            amp_convert(expected.data(), t, x.data(), AMP_F32, n, NULL, NULL);
            CHECK_EQ(cuda.b->cast(cuda.dev, &k, NULL), AMP_OK);
            cuda.down(&y, k.dst);
            CHECK_MSG(y == expected, "fp32 to %s, part %d", name_of(t), part);
        }
    }
    CHECK_EQ(coc_faults(), 0);
}

/* To E4M3 saturated: by the GPU's instruction where the image and the rounding allow it, by integers elsewhere; the bits are the
   same, of NaN, zeros, ties and infinities too. */
TEST(casts_to_e4m3) {
    static const uint32_t low[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
    std::vector<uint32_t> x;
    for (uint32_t high = 0; high < 0x10000; high++)
        for (uint32_t l : low) x.push_back(high << 16 | l);
    for (int image : {90, 80}) {
        coc_reset();
        coc_set_devices(1, (size_t)1 << 28, 4, 90, image);
        for (amp_dtype from : {AMP_F32, AMP_F16, AMP_BF16, AMP_E5M2})
            for (int saturate = 0; saturate < 2; saturate++) {
                side cuda(amp_cuda());
                int64_t n = (int64_t)(x.size() * 4 / amp_dtype_size(from));
                bytes y((size_t)n), expected = y;
                amp_k_cast k = {};
                k.src = cuda.up(x), k.src_dtype = from;
                k.dst = cuda.up(y), k.dst_dtype = AMP_E4M3;
                k.n = n;
                k.how.saturate = saturate;
                amp_convert(expected.data(), AMP_E4M3, x.data(), from, n, &k.how, NULL);
                coc_reset_counts();
                CHECK_EQ(cuda.b->cast(cuda.dev, &k, NULL), AMP_OK);
                cuda.down(&y, k.dst);
                CHECK_MSG(y == expected, "%s to E4M3, saturate %d, image %d", name_of(from), saturate, image);
                CHECK_EQ(coc_count().fp8_pairs, image == 90 && saturate ? n / 2 : 0);
            }
    }
    coc_set_devices(2);
    CHECK_EQ(coc_faults(), 0);
}

TEST(casts_ids_and_refusals) {
    coc_reset();
    side cuda(amp_cuda());
    std::vector<uint16_t> ids(5001);
    std::vector<int32_t> wide(5001, -1);
    amp_k_cast k;
    for (size_t i = 0; i < ids.size(); i++) ids[i] = (uint16_t)(i * 40503u);
    memset(&k, 0, sizeof k);
    k.src = cuda.up(ids);
    k.dst = cuda.up(wide);
    k.src_dtype = AMP_U16;
    k.dst_dtype = AMP_I32;
    k.n = 5001;
    CHECK_EQ(cuda.b->cast(cuda.dev, &k, NULL), AMP_OK);
    cuda.down(&wide, k.dst);
    for (size_t i = 0; i < ids.size(); i++)
        if (wide[i] != ids[i]) CHECK_EQ(wide[i], ids[i]);
    k.dst_dtype = AMP_I64;
    CHECK_EQ(cuda.b->cast(cuda.dev, &k, NULL), AMP_ERR_DTYPE);
    k.dst_dtype = AMP_F32;
    CHECK_EQ(cuda.b->cast(cuda.dev, &k, NULL), AMP_ERR_DTYPE);
    k.src_dtype = AMP_F32;
    k.how.rounding = AMP_ROUND_STOCHASTIC;
    CHECK_EQ(cuda.b->cast(cuda.dev, &k, NULL), AMP_ERR_DTYPE);
    CHECK_EQ(coc_faults(), 0);
}

/* ---- Multi-tensor kernels */

/* odd: elements off 16 bytes */
struct row_spec { amp_dtype weight, grad; int64_t count; int master, live; size_t odd; amp_master_kind kind; amp_dtype moments; };

static std::vector<row_spec> many_rows(int n) {
    static const amp_dtype storage[] = {AMP_F32, AMP_F16, AMP_BF16};
    static const int64_t counts[] = {1, 8191, 0, 8192, 8193, 77, 3, 20000, 256, 1000, 16};
    std::vector<row_spec> rows;
    for (int i = 0; i < n; i++) {
        row_spec r;
        r.weight = storage[i % 3];
        r.grad = i % 4 == 0 ? AMP_F32 : storage[(i + i / 3) % 3];
        r.count = i > 40 ? counts[i % 11] % 50 : counts[i % 11];
        r.master = i % 5 < 2;
        r.live = i % 7 != 3;
        r.odd = i % 6 == 5 ? 1 : 0;
        r.kind = AMP_MASTER_DEFAULT;
        r.moments = AMP_F32;
        rows.push_back(r);
    }
    return rows;
}

/* The same with every way to store masters and moments in turn. */
static std::vector<row_spec> stored_rows(int n) {
    std::vector<row_spec> rows = many_rows(n);
    for (int i = 0; i < n; i++) {
        row_spec &r = rows[(size_t)i];
        r.moments = i % 4 == 1 ? AMP_BF16 : i % 4 == 3 || i % 4 == 2 ? AMP_MOMENTS_8BIT : AMP_F32;
        r.kind = r.weight == AMP_F32 ? AMP_MASTER_NONE : i / 3 % 4 == 0 ? AMP_MASTER_F32 : i / 3 % 4 == 1 ? AMP_MASTER_NONE
                 : i / 3 % 4 == 2 || r.weight == AMP_F16 ? AMP_MASTER_STOCHASTIC : AMP_MASTER_REMAINDER;
        r.master = r.kind == AMP_MASTER_F32 || r.kind == AMP_MASTER_REMAINDER;
    }
    return rows;
}

/* The arrays of a table, once in host memory and then on each side. */
struct row_data { bytes weight, grad, master, m, v, copy, steps; };

/* Of a row that was updated 0 to 3 times. */
static bytes steps_of(size_t row) {
    amp_k_steps k = {(int64_t)(row % 4), 1, 1};
    for (size_t i = 0; i < row % 4; i++) k.beta1_power *= 0.9, k.beta2_power *= 0.999;
    return bytes((const uint8_t *)&k, (const uint8_t *)(&k + 1));
}

/* 8-bit moments, with a block of zeros, one of subnormal numbers, and one that is not finite. */
static bytes eight_bit_numbers(int64_t n) {
    int64_t blocks = ampi_moment_blocks(n);
    bytes out = numbers(AMP_F32, blocks * AMPI_MOMENT_BLOCK / 4), scales = numbers(AMP_F32, blocks, 0.1f);
    static const float odd[] = {0, 1e-40f, NAN};
    for (size_t i = 3; i < scales.size(); i += 4) scales[i] &= 0x7f;
    for (int64_t i = 1; i < 4 && i < blocks; i++) memcpy(&scales[(size_t)i * 4], &odd[i - 1], 4);
    out.insert(out.end(), scales.begin(), scales.end());
    return out;
}

static std::vector<row_data> fill_rows(const std::vector<row_spec> &specs, float grad_scale) {
    std::vector<row_data> out;
    for (const row_spec &s : specs) {
        row_data d;
        d.steps = steps_of(out.size());
        d.weight = numbers(s.weight, s.count);
        d.grad = numbers(s.grad, s.count, grad_scale);
        d.master = numbers(AMP_F32, s.count);
        bool eight = s.moments == AMP_MOMENTS_8BIT;
        d.m = eight ? eight_bit_numbers(s.count) : numbers(s.moments, s.count, 0.1f);
        d.v = eight ? eight_bit_numbers(s.count) : numbers(s.moments, s.count, 0.1f);
        for (size_t i = eight ? d.v.size() + 1 : amp_dtype_size(s.moments); i <= d.v.size(); i += amp_dtype_size(s.moments)) d.v[i - 1] &= 0x7f;
        if (s.weight == AMP_F32 && !s.master && s.count != 20000) {          /* the others have no copy */
            static const float edges[] = {65519.998f, 65520, -70000, 3.4e38f, -3.4028233e38f, INFINITY, NAN, 65500, 1e-40f, -6e-8f};
            d.copy = bytes((size_t)s.count * 2, 0x5a);
            for (size_t i = 0; i < 10 && (int64_t)i * 3 < s.count; i++) memcpy(&d.weight[i * 12], &edges[i], 4);
        }
        out.push_back(d);
    }
    return out;
}

static std::vector<amp_k_tensor> table_of(side *s, const std::vector<row_spec> &specs, const std::vector<row_data> &data,
                                          int moments) {
    std::vector<amp_k_tensor> table;
    for (size_t i = 0; i < specs.size(); i++) {
        const row_spec &r = specs[i];
        amp_k_tensor t;
        memset(&t, 0, sizeof t);
        t.weight = s->up(data[i].weight, r.odd * amp_dtype_size(r.weight));
        t.grad = s->up(data[i].grad, r.odd * amp_dtype_size(r.grad));
        t.master = r.master ? s->up(data[i].master, r.odd * 4) : NULL;          /* twice what remainders need */
        t.m = moments > 0 ? s->up(data[i].m, r.moments == AMP_MOMENTS_8BIT ? 0 : r.odd * amp_dtype_size(r.moments)) : NULL;
        t.v = moments > 1 ? s->up(data[i].v) : NULL;
        t.steps = moments > 0 ? s->up(data[i].steps) : NULL;
        t.weight_dtype = r.weight;
        t.grad_dtype = r.grad;
        t.moment_dtype = r.moments;
        t.master_kind = r.kind;
        t.count = r.count;
        t.lr_scale = i % 3 == 1 ? 0.5 : 1.0;
        t.weight_decay = i % 2 ? 0.1 : 0.0;
        t.live = r.live;
        table.push_back(t);
    }
    return table;
}

static void bring_rows(side *s, const std::vector<amp_k_tensor> &table, std::vector<row_data> *data) {
    for (size_t i = 0; i < table.size(); i++) {
        s->down(&(*data)[i].weight, table[i].weight);
        s->down(&(*data)[i].grad, table[i].grad);
        if (table[i].master) s->down(&(*data)[i].master, table[i].master);
        if (table[i].m) s->down(&(*data)[i].m, table[i].m);
        if (table[i].v) s->down(&(*data)[i].v, table[i].v);
        if (table[i].steps) s->down(&(*data)[i].steps, table[i].steps);
    }
}

static bool is_nan(const bytes &x, amp_dtype dtype, size_t i) {
    double value = cuda_value(x.data(), dtype, i);
    return value != value;
}
/* The same numbers: every NaN is one, as a GPU makes its own of a NaN that a CPU passes on. */
static bool same_numbers(const bytes &a, const bytes &b, amp_dtype dtype) {
    if (a.size() != b.size()) return false;
    for (size_t i = 0, size = amp_dtype_size(dtype); i * size < a.size(); i++)
        if (memcmp(&a[i * size], &b[i * size], size) != 0 && !(is_nan(a, dtype, i) && is_nan(b, dtype, i))) return false;
    return true;
}
/* Masters; behind a NaN a remainder has any bits. */
static bool same_masters(const row_spec &spec, const row_data &a, const row_data &b) {
    if (spec.kind != AMP_MASTER_REMAINDER) return same_numbers(a.master, b.master, AMP_F32);
    for (size_t i = 0; i < a.master.size(); i += 2)
        if (memcmp(&a.master[i], &b.master[i], 2) != 0 && (i >= a.weight.size() || !is_nan(a.weight, spec.weight, i / 2))) return false;
    return a.master.size() == b.master.size();
}

static amp_dtype copy_dtype(size_t row) { return row % 2 ? AMP_BF16 : AMP_F16; }

static void compare_rows(const std::vector<row_spec> &specs, const std::vector<row_data> &got, const std::vector<row_data> &want) {
    for (size_t i = 0; i < specs.size(); i++) {
        const char *w = name_of(specs[i].weight), *g = name_of(specs[i].grad);
        amp_dtype moments = specs[i].moments == AMP_BF16 ? AMP_BF16 : specs[i].moments == AMP_F32 ? AMP_F32 : AMP_U8;
        CHECK_MSG(same_numbers(got[i].weight, want[i].weight, specs[i].weight), "weight of row %zu: %s, gradient %s, %lld", i, w, g, (long long)specs[i].count);
        CHECK_MSG(same_masters(specs[i], got[i], want[i]), "master of row %zu", i);
        CHECK_MSG(same_numbers(got[i].m, want[i].m, moments), "m of row %zu", i);
        CHECK_MSG(same_numbers(got[i].v, want[i].v, moments), "v of row %zu", i);
        CHECK_MSG(got[i].steps == want[i].steps, "steps of row %zu", i);
        CHECK_MSG(same_numbers(got[i].copy, want[i].copy, copy_dtype(i)), "copy of row %zu", i);
        CHECK_MSG(same_numbers(got[i].grad, want[i].grad, specs[i].grad), "gradient of row %zu: %s, %lld", i, g, (long long)specs[i].count);
    }
}

static amp_k_grad_stats a_found() {
    amp_k_grad_stats f;
    memset(&f, 0, sizeof f);
    f.first_bad = -1;
    f.multiplier = 0.37f;
    f.factor = 0.125f + 0.001f;
    f.lr = 1e-3;
    f.step = 3;
    return f;
}

/* kind 0: AdamW, 1: SGD with momentum, 2: plain SGD, 3: scale_ranges, 4: Lion */
static amp_result update(side *s, int kind, const amp_k_tensor *table, int64_t n, const amp_k_grad_stats *found, int variant,
                         const amp_range *copies = NULL, int64_t *new_inf = NULL) {
    if (kind == 0) {
        amp_k_adamw a = {table, n, found, 0.9, 0.999, 1e-8, 7, variant & 1, 0, copies, new_inf};
        return s->b->adamw(s->dev, &a, NULL);
    }
    if (kind == 3) {
        amp_k_scale_ranges a = {table, n, &found->factor};
        return s->b->scale_ranges(s->dev, &a, NULL);
    }
    if (kind == 4) {
        amp_k_lion a = {table, n, found, 0.9, 0.99, 7, variant & 1, 0, copies, new_inf};
        return s->b->lion(s->dev, &a, NULL);
    }
    amp_k_sgd a = {table, n, found, kind == 1 ? 0.9 : 0.0, variant & 2 ? 0.1 : 0.0, 7, variant & 1, variant >> 2 & 1, copies, new_inf};
    return s->b->sgd(s->dev, &a, NULL);
}

static void update_both(int kind, int variant, int skip, const std::vector<row_spec> &specs) {
    static const int moments[] = {2, 1, 0, 0, 1};
    int rows = (int)specs.size();
    std::vector<row_data> before = fill_rows(specs, 0.5f), results[2] = {before, before};
    amp_k_grad_stats found = a_found();
    found.skip = skip;
    if (variant == 3) found.step = 1;
    for (int s = 0; s < 2; s++) {
        side x(s ? amp_cuda() : amp_cpu());
        std::vector<amp_k_tensor> table = table_of(&x, specs, before, moments[kind]);
        amp_k_tensor *on = x.up(table);
        amp_k_grad_stats *f = (amp_k_grad_stats *)x.up(&found, sizeof found);
        std::vector<amp_range> copies(specs.size());
        for (size_t i = 0; i < specs.size(); i++) {
            bool has = !before[i].copy.empty();
            copies[i] = {NULL, has ? x.up(before[i].copy, specs[i].odd * 2) : NULL, 0, copy_dtype(i)};
        }
        int64_t zero = 0, *new_inf = (int64_t *)x.up(&zero, sizeof zero);
        CHECK_EQ(update(&x, kind, on, rows, f, variant, x.up(copies), new_inf), AMP_OK);
        bring_rows(&x, table, &results[s]);
        int64_t expected = 0;
        for (size_t i = 0; i < specs.size(); i++) {
            if (before[i].copy.empty()) continue;
            x.down(&results[s][i].copy, copies[i].data);
            if (skip || kind == 3 || !specs[i].live) continue;
            bytes cast(before[i].copy.size());              /* what amp_cast makes of the new weight */
            int64_t beyond = 0;
            CHECK_OK(amp_convert(cast.data(), copy_dtype(i), results[s][i].weight.data(), AMP_F32, specs[i].count, NULL, &beyond));
            expected += beyond;
            CHECK_MSG(same_numbers(results[s][i].copy, cast, copy_dtype(i)), "copy of row %zu, side %d", i, s);
        }
        CHECK_EQ(x.one<int64_t>(new_inf), expected);
        if (!skip && kind != 3 && rows >= 11) CHECK(expected >= 2);
    }
    compare_rows(specs, results[1], results[0]);
    if (skip) compare_rows(specs, results[1], before);
    CHECK_EQ(coc_faults(), 0);
}

#define NEEDS_FMA() \
    if (cpu_path() < AMP_CPU_AVX2) SKIP("the CPU has no fused multiply-add, as the GPU does, to compare with")

TEST(adamw_bits) {
    NEEDS_FMA();
    coc_reset();
    update_both(0, 0, 0, many_rows(22));
    update_both(0, 1, 0, many_rows(1));
    update_both(0, 0, 0, many_rows(0));
    update_both(0, 0, 1, many_rows(11));
    update_both(0, 0, 0, many_rows(100));
}
/* 1 - lr decay where rounding the product or not decides between two fp32 numbers. */
static void decay_rounds_twice(int kind) {
    coc_reset();
    amp_k_grad_stats found = a_found();
    double decay = 0;
    found.lr = 0.7;
    for (int k = 1; k < 20000 && decay == 0; k += 2) {
        double tie = 0.25 + ldexp(k, -26), at = (1 - tie) / found.lr;    /* halfway between fp32 numbers */
        for (double d : {at, nextafter(at, 2), nextafter(at, 0)}) {
            volatile double product = found.lr * d;
            if ((float)(1.0 - product) != (float)fma(-found.lr, d, 1.0)) decay = d;
        }
    }
    CHECK(decay > 0);
    float w[2];
    for (int s = 0; s < 2; s++) {
        side x(s ? amp_cuda() : amp_cpu());
        std::vector<float> zero(8, 0.0f), one(8, 1.0f);
        amp_k_tensor row;
        memset(&row, 0, sizeof row);
        row.weight = x.up(one);
        row.grad = x.up(zero);
        row.m = x.up(zero);
        row.v = x.up(zero);
        row.steps = x.up(steps_of(0));
        row.count = 8;
        row.lr_scale = 1;
        row.weight_decay = decay;
        row.live = 1;
        const amp_k_tensor *table = (const amp_k_tensor *)x.up(&row, sizeof row);
        amp_k_grad_stats *f = (amp_k_grad_stats *)x.up(&found, sizeof found);
        CHECK_EQ(update(&x, kind, table, 1, f, 0), AMP_OK);
        w[s] = x.one<float>(row.weight);
    }
    volatile double product = found.lr * decay;
    CHECK(w[0] == w[1] && w[1] == (float)(1.0 - product));
    CHECK_EQ(coc_faults(), 0);
}
TEST(adamw_decay_rounds_twice) { decay_rounds_twice(0); }
TEST(lion_decay_rounds_twice) { decay_rounds_twice(4); }
TEST(sgd_bits) {
    NEEDS_FMA();
    coc_reset();
    for (int variant = 0; variant < 8; variant++) update_both(1, variant, 0, many_rows(13));
    update_both(2, 0, 0, many_rows(22));
    update_both(2, 4, 1, many_rows(22));
}
TEST(lion_bits) {
    NEEDS_FMA();
    coc_reset();
    update_both(4, 0, 0, many_rows(22));
    update_both(4, 1, 0, many_rows(1));
    update_both(4, 0, 0, many_rows(0));
    update_both(4, 0, 1, many_rows(11));
    update_both(4, 0, 0, many_rows(100));
}
/* Without decay nothing is added to the gradient: 0 times an infinite weight would be NaN. */
TEST(sgd_without_decay_leaves_infinity) {
    coc_reset();
    amp_k_grad_stats found = a_found();
    for (int s = 0; s < 2; s++) {
        side x(s ? amp_cuda() : amp_cpu());
        std::vector<float> infinite(11, HUGE_VALF), zero(11, 0.0f);
        amp_k_tensor row;
        memset(&row, 0, sizeof row);
        row.weight = x.up(infinite);
        row.grad = x.up(zero);
        row.count = 11;
        row.lr_scale = 1;
        row.live = 1;
        const amp_k_tensor *table = (const amp_k_tensor *)x.up(&row, sizeof row);
        amp_k_grad_stats *f = (amp_k_grad_stats *)x.up(&found, sizeof found);
        CHECK_EQ(update(&x, 2, table, 1, f, 0), AMP_OK);
        CHECK(x.one<float>(row.weight) == HUGE_VALF);
    }
    CHECK_EQ(coc_faults(), 0);
}
TEST(storage_bits) {
    NEEDS_FMA();
    coc_reset();
    update_both(0, 0, 0, stored_rows(66));
    update_both(0, 1, 0, stored_rows(30));
    update_both(0, 0, 1, stored_rows(24));
    for (int variant = 0; variant < 4; variant++) update_both(1, variant, 0, stored_rows(24));
    update_both(2, 0, 0, stored_rows(24));
    for (int variant = 0; variant < 2; variant++) update_both(4, variant, 0, stored_rows(66));
    update_both(4, 0, 1, stored_rows(24));
}
TEST(scale_bits) {
    coc_reset();
    update_both(3, 0, 0, many_rows(33));
}

/* bad 0: all finite; 1: NaN and inf in some rows; 2: also elements whose squares are beyond fp32.  Eight squares of 16-bit
   numbers may be added in fp32, with three roundings of 2^-24. */
static void check_both(int rows, int multiply, int bad) {
    std::vector<row_spec> specs = many_rows(rows);
    for (size_t i = 0; i < specs.size(); i++)
        if (i % 5 == 4) specs[i].grad = AMP_F64;
    std::vector<row_data> before = fill_rows(specs, 1.0f), results[2] = {before, before};
    amp_k_grad_stats found[2];
    int64_t total = 0, first = -1;
    double sixteen = 0;
    for (size_t i = 0; i < specs.size(); i++) {
        size_t size = amp_dtype_size(specs[i].grad);
        if (specs[i].live) total += specs[i].count;
        if (specs[i].live && size == 2)
            for (int64_t e = 0; e < specs[i].count; e++) {
                double value = cuda_value(before[i].grad.data(), specs[i].grad, e);
                sixteen += value * value;
            }
        if (bad == 2 && specs[i].grad == AMP_F32 && specs[i].count > 0) {
            float large = 1e30f;
            memcpy(&before[i].grad[0], &large, 4);
        }
        if (bad != 1 || i % 4 != 2 || specs[i].count == 0) continue;
        memset(&before[i].grad[before[i].grad.size() - size], 0x7f, size);      /* 0x7f7f is finite in bf16 and fp32 */
        if (specs[i].grad == AMP_F32 || specs[i].grad == AMP_BF16) before[i].grad[before[i].grad.size() - 2] = 0x80;
        if (specs[i].live && first < 0) first = (int64_t)i;
    }
    results[0] = results[1] = before;
    for (int s = 0; s < 2; s++) {
        side x(s ? amp_cuda() : amp_cpu());
        std::vector<amp_k_tensor> table = table_of(&x, specs, before, 0);
        amp_k_tensor *on = x.up(table);
        amp_k_grad_stats start = a_found();
        start.sum_sq = 1.0;
        amp_k_grad_stats *f = (amp_k_grad_stats *)x.up(&start, sizeof start);
        amp_k_check k = {on, rows, multiply ? &f->factor : NULL, f};
        if (s) coc_reset_counts();
        CHECK_EQ(x.b->check(x.dev, &k, NULL), AMP_OK);
        if (s && CUDA_IS_MODEL) CHECK(coc_count().launches <= 2);
        found[s] = x.one<amp_k_grad_stats>(f);
        bring_rows(&x, table, &results[s]);
    }
    if (bad == 1) for (int s = 0; s < 2; s++) found[s].sum_sq = 0;      /* inf or NaN: which of them is not promised */
    if (bad == 1) CHECK(first >= 0);
    CHECK_EQ(found[0].first_bad, first);
    CHECK_EQ(found[1].first_bad, first);
    CHECK(found[0].found_inf == found[1].found_inf && (found[1].found_inf != 0) == (first >= 0));
    /* n roundings of 2^-53 each, in either order */
    CHECK_MSG(fabs(found[1].sum_sq - found[0].sum_sq) <= 2 * ldexp((double)total + 2, -53) * found[0].sum_sq + 3 * ldexp(sixteen, -24),
              "sums of squares %.17g and %.17g", found[1].sum_sq, found[0].sum_sq);
    if (bad != 1) compare_rows(specs, results[1], results[0]);
    CHECK_EQ(coc_faults(), 0);
}

TEST(checks) {
    coc_reset();
    for (int multiply = 0; multiply < 2; multiply++)
        for (int bad = 0; bad < 3; bad++) check_both(30, multiply, bad);
    check_both(0, 0, 0);
    check_both(1, 1, 0);
    check_both(100, 0, 1);
}

/* A row of one 16-bit number over and over, of each exponent: the largest, the smallest, and those around where squares leave
   fp32. */
TEST(check_of_extremes) {
    coc_reset();
    const int64_t n = 4099;
    for (amp_dtype dtype : {AMP_F16, AMP_BF16}) {
        side x(amp_cuda());
        const int one_exponent = dtype == AMP_F16 ? 1024 : 128, largest = dtype == AMP_F16 ? 0x7bff : 0x7f7f;
        for (int from = 0; from < 0x8000; from += one_exponent) {
            uint16_t number = (uint16_t)std::min(from + 1, largest);
            double value = dtype == AMP_F16 ? (double)amp_f32_from_f16(number) : (double)amp_f32_from_bf16(number);
            std::vector<uint16_t> grad((size_t)n, number);
            amp_k_grad_stats start = a_found();
            amp_k_tensor row = {};
            start.sum_sq = 0;
            row.grad = x.up(grad), row.grad_dtype = dtype, row.weight_dtype = AMP_F32, row.count = n, row.live = 1;
            amp_k_grad_stats *f = (amp_k_grad_stats *)x.up(&start, sizeof start);
            amp_k_check k = {(amp_k_tensor *)x.up(&row, sizeof row), 1, NULL, f};
            CHECK_EQ(x.b->check(x.dev, &k, NULL), AMP_OK);
            amp_k_grad_stats found = x.one<amp_k_grad_stats>(f);
            CHECK_MSG(fabs(found.sum_sq / ((double)n * value * value) - 1) <= 3 * ldexp(1, -24) && found.found_inf == 0,
                      "%s %g: %.17g for %.17g", name_of(dtype), value, found.sum_sq, (double)n * value * value);
        }
    }
    CHECK_EQ(coc_faults(), 0);
}

/* One number that is not finite, at each end of a piece of 16 bytes and within, and in the row's tail; what follows is finite. */
TEST(checks_find_each) {
    const int64_t count = 43;
    coc_reset();
    for (amp_dtype dtype : {AMP_F32, AMP_F16, AMP_BF16, AMP_F64})
        for (int factor = 0; factor < 2; factor++) {
            side gpu(amp_cuda());
            for (int64_t bad : {16, 17, 20, 23, 42}) {
                std::vector<float> x((size_t)count, 0.5f);
                x[(size_t)bad] = bad % 2 ? -HUGE_VALF : NAN;
                std::vector<amp_k_tensor> table(3);
                for (size_t i = 0; i < 3; i++) {
                    std::string stored = cuda_stored(i == 1 ? x : std::vector<float>((size_t)count, 2.0f), dtype);
                    table[i].grad = gpu.up(stored.data(), stored.size());
                    table[i].grad_dtype = dtype;
                    table[i].count = count;
                    table[i].live = 1;
                }
                amp_k_grad_stats start = a_found();
                amp_k_grad_stats *f = (amp_k_grad_stats *)gpu.up(&start, sizeof start);
                amp_k_check k = {gpu.up(table), 3, factor ? &f->factor : NULL, f};
                CHECK_EQ(gpu.b->check(gpu.dev, &k, NULL), AMP_OK);
                amp_k_grad_stats found = gpu.one<amp_k_grad_stats>(f);
                CHECK_MSG(found.found_inf == 1 && found.first_bad == 1, "%s, number %d: %d, row %d", name_of(dtype), (int)bad,
                          (int)found.found_inf, (int)found.first_bad);
            }
        }
    CHECK_EQ(coc_faults(), 0);
}

/* Rules run on the device leave the same bits as on the host. */
TEST(rules) {
    coc_reset();
    side cuda(amp_cuda());
    amp_k_scaler scaler;
    amp_k_grad_stats found = a_found();
    std::vector<amp_k_step_result> ring(AMP_STEP_RESULTS);
    memset(&scaler, 0, sizeof scaler);
    memset((void *)ring.data(), 0, ring.size() * sizeof ring[0]);
    scaler.scale = 65536;
    scaler.inv_scale = 1.0f / 65536;
    scaler.growth_interval = 3;
    found.step = 0;
    amp_k_scaler *d_scaler = (amp_k_scaler *)cuda.up(&scaler, sizeof scaler);
    amp_k_grad_stats *d_found = (amp_k_grad_stats *)cuda.up(&found, sizeof found);
    amp_k_step_result *d_ring = cuda.up(ring);
    for (int step = 0; step < 12; step++)
        for (int kind = AMP_RULE_BEGIN; kind <= AMP_RULE_UPDATE; kind++) {
            amp_k_rule r;
            memset(&r, 0, sizeof r);
            r.kind = (amp_rule_kind)kind;
            r.scaler_rule.growth_factor = 2;
            r.scaler_rule.backoff_factor = 0.5;
            r.scaler_rule.min_scale = 1;
            r.scaler_rule.max_scale = INFINITY;
            r.scaler_rule.growth_interval = 3;
            r.scaler_rule.hysteresis = 1;
            r.step_rule.divisor = 3;
            r.step_rule.lr = 1e-3 * (step + 1);
            r.step_rule.clip_norm = 1;
            if (kind == AMP_RULE_CHECKED) {     /* what a check would have found */
                found.sum_sq = 1e9 * (step + 0.3);
                found.found_inf = step % 5 == 2;
                CHECK_EQ(cuda.b->copy(cuda.dev, d_found, &found, sizeof found, AMP_COPY_TO_DEVICE, NULL), AMP_OK);
            }
            r.scaler = d_scaler;
            r.found = d_found;
            r.results = d_ring;
            CHECK_EQ(cuda.b->rule(cuda.dev, &r, NULL), AMP_OK);
            r.scaler = &scaler;
            r.found = &found;
            r.results = ring.data();
            ampi_rule_run(&r);
            amp_k_grad_stats f = cuda.one<amp_k_grad_stats>(d_found);
            amp_k_scaler s = cuda.one<amp_k_scaler>(d_scaler);
            CHECK(memcmp(&f, &found, sizeof f) == 0);
            CHECK(memcmp(&s, &scaler, sizeof s) == 0);
        }
    std::vector<amp_k_step_result> got(AMP_STEP_RESULTS);
    cuda.down(&got, d_ring);
    CHECK(memcmp(got.data(), ring.data(), got.size() * sizeof got[0]) == 0);
    CHECK(found.skips == 2 && found.step == 10);
    CHECK_EQ(coc_faults(), 0);
}

/* What ranks say of the rows, and what follows: three ranks' flags are combined here. */
TEST(rules_of_rows) {
    coc_reset();
    side cuda(amp_cuda());
    enum { ROWS = 300, WORLD = 3 };
    const size_t bytes_found = sizeof(amp_k_grad_stats) + 2 * ROWS * sizeof(float);
    for (int frozen_apart = 0; frozen_apart < 2; frozen_apart++) {
        std::vector<float> said(2 * ROWS), got(2 * ROWS);
        std::vector<amp_k_tensor> rows(ROWS), table(ROWS);
        int apart = 0;
        amp_k_rule r;
        memset(&r, 0, sizeof r);
        r.tensors = ROWS;
        r.step_rule.divisor = 1;
        r.found = (amp_k_grad_stats *)cuda.up(std::vector<unsigned char>(bytes_found));
        float *const flags = (float *)(void *)((char *)r.found + sizeof(amp_k_grad_stats));
        for (int rank = 0; rank < WORLD; rank++) {
            for (int i = 0; i < ROWS; i++) {
                memset((void *)&rows[(size_t)i], 0, sizeof rows[0]);
                /* used by all, by one, by none; frozen on all, and on the last rank alone */
                rows[(size_t)i].said = i % 5 == 3 || (frozen_apart && i % 50 == 44 && rank == WORLD - 1) ? 2 : i % 5 == 0 || (i % 5 == 1 && rank == 1);
            }
            r.table = cuda.up(rows);
            r.rank = rank;
            r.kind = AMP_RULE_BEGIN;
            CHECK_EQ(cuda.b->rule(cuda.dev, &r, NULL), AMP_OK);
            cuda.down(&table, r.table);
            cuda.down(&got, flags);
            for (int i = 0; i < 2 * ROWS; i++) said[(size_t)i] = fmaxf(said[(size_t)i], got[(size_t)i]);
            for (int i = 0; i < ROWS; i++) CHECK_EQ(table[(size_t)i].live, rows[(size_t)i].said != 2);
        }
        CHECK_EQ(cuda.b->copy(cuda.dev, flags, said.data(), said.size() * sizeof said[0], AMP_COPY_TO_DEVICE, NULL), AMP_OK);
        r.kind = AMP_RULE_CHECKED;
        CHECK_EQ(cuda.b->rule(cuda.dev, &r, NULL), AMP_OK);
        cuda.down(&table, r.table);
        for (int i = 0; i < ROWS; i++) {
            if (frozen_apart && i % 50 == 44 && apart == 0) apart = 1 + i;
            CHECK_EQ(table[(size_t)i].live, i % 5 < 2);
        }
        amp_k_grad_stats f = cuda.one<amp_k_grad_stats>(r.found);
        CHECK_EQ(f.apart_row, apart);
        if (apart) CHECK(f.apart_frozen == WORLD - 1 && f.apart_other == WORLD - 2);
    }
    CHECK_EQ(coc_faults(), 0);
}

/* ---- Column sums.  The chain of fp32 additions into one sum: the rows of a warp, the warps, the runs, the runs' warps. */

static double unit_of(amp_dtype dtype) { return dtype == AMP_F16 ? ldexp(1, -11) : dtype == AMP_BF16 ? ldexp(1, -8) : ldexp(1, -24); }

static void column_sum_one(side *cuda, int64_t rows, int64_t cols, int64_t ld, amp_dtype from, amp_dtype to, int add) {
    bytes x = numbers(from, rows * ld + 1), out = numbers(to, cols);
    std::vector<float> wide((size_t)(rows * ld + 1)), old((size_t)cols), got((size_t)cols);
    size_t odd = rows % 2 ? amp_dtype_size(from) : 0;
    amp_k_column_sum k;
    int64_t runs = rows < 256 ? 1 : (rows + 255) / 256 > 256 ? 256 : (rows + 255) / 256, run = (rows + runs - 1) / runs;
    double chain = (double)((run + 7) / 8 + 8 + (runs + 7) / 8 + 8 + 1);
    memset(&k, 0, sizeof k);
    k.x.data = cuda->up(x, odd);
    k.x.dtype = from;
    k.x.rows = rows;
    k.x.cols = cols;
    k.x.ld = ld;
    k.out = cuda->up(out);
    k.out_dtype = to;
    k.add = add;
    amp_convert(wide.data(), AMP_F32, x.data(), from, rows * ld + 1, NULL, NULL);
    amp_convert(old.data(), AMP_F32, out.data(), to, cols, NULL, NULL);
    CHECK_EQ(cuda->b->column_sum(cuda->dev, &k, NULL), AMP_OK);
    cuda->down(&out, k.out);
    amp_convert(got.data(), AMP_F32, out.data(), to, cols, NULL, NULL);
    for (int64_t j = 0; j < cols; j++) {
        double sum = add ? (double)old[(size_t)j] : 0, size = fabs(sum);
        for (int64_t i = 0; i < rows; i++) {
            sum += (double)wide[(size_t)(i * ld + j)];
            size += fabs((double)wide[(size_t)(i * ld + j)]);
        }
        double bound = chain * ldexp(1, -24) * 1.01 * size;
        bound += unit_of(to) * (fabs(sum) + bound) + ldexp(1, -25);
        CHECK_MSG(fabs((double)got[(size_t)j] - sum) <= bound, "%lld x %lld, %s to %s, column %lld: %g, expected %g +- %g",
                  (long long)rows, (long long)cols, name_of(from), name_of(to), (long long)j, (double)got[(size_t)j], sum, bound);
    }
}

TEST(column_sums) {
    coc_reset();
    static const amp_dtype storage[] = {AMP_F32, AMP_F16, AMP_BF16};
    static const int64_t shapes[][3] = {{0, 5, 5}, {1, 1, 1}, {1, 300, 304}, {700, 1, 1}, {257, 264, 264}, {300, 37, 40}, {5, 513, 513}};
    for (int f = 0; f < 3; f++)
        for (int t = 0; t < 3; t++) {
            side cuda(amp_cuda());
            for (auto &s : shapes) column_sum_one(&cuda, s[0], s[1], s[2], storage[f], storage[t], (f + t) % 2);
        }
    {
        side cuda(amp_cuda());
        amp_k_column_sum k;
        memset(&k, 0, sizeof k);
        CHECK_EQ(cuda.b->column_sum(cuda.dev, &k, NULL), AMP_OK);      /* no columns */
    }
    CHECK_EQ(coc_faults(), 0);
}

/* ---- Matrix products, against sums in fp64 of the rounded operands */

static double activated(amp_activation_kind act, double x) {
    if (act == AMP_ACT_GELU) return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    if (act == AMP_ACT_GELU_ERF) return 0.5 * x * (1 + erf(x / sqrt(2.0)));
    return act == AMP_ACT_RELU && x < 0 ? 0 : x;
}

struct product {
    int64_t m, n, k, batch;
    int trans_a, trans_b;
    amp_dtype a, b, c, compute;
    float alpha, beta;
    int bias, pre;
    amp_activation_kind act;
};

static std::vector<float> widened(const bytes &x, amp_dtype dtype, amp_dtype through) {
    size_t n = x.size() / amp_dtype_size(dtype);
    std::vector<float> out(n);
    bytes narrow(n * 4);
    amp_convert(out.data(), AMP_F32, x.data(), dtype, (int64_t)n, NULL, NULL);
    if (through == AMP_F32) return out;
    amp_convert(narrow.data(), through, out.data(), AMP_F32, (int64_t)n, NULL, NULL);
    amp_convert(out.data(), AMP_F32, narrow.data(), through == AMP_TF32 ? AMP_F32 : through, (int64_t)n, NULL, NULL);
    return out;
}

static void product_one(const product &p) {
    side cuda(amp_cuda());
    int64_t lda = (p.trans_a ? p.m : p.k) + 3, ldb = (p.trans_b ? p.k : p.n) + 1, ldc = p.n + 2;
    int64_t na = (p.trans_a ? p.k : p.m) * lda, nb = (p.trans_b ? p.n : p.k) * ldb, nc = p.m * ldc;
    bytes a = numbers(p.a, na * p.batch), b = numbers(p.b, nb * p.batch), c = numbers(p.c, nc * p.batch);
    bytes bias = numbers(AMP_F32, p.n);
    std::vector<float> wa = widened(a, p.a, p.compute), wb = widened(b, p.b, p.compute), wc = widened(c, p.c, AMP_F32);
    std::vector<float> wbias = widened(bias, AMP_F32, AMP_F32), pre((size_t)(p.m * p.n), 0.0f), got;
    amp_k_gemm g;
    memset(&g, 0, sizeof g);
    g.m = p.m; g.n = p.n; g.k = p.k; g.batch = p.batch;
    g.a = cuda.up(a); g.b = cuda.up(b); g.c = cuda.up(c);
    g.a_dtype = p.a; g.b_dtype = p.b; g.c_dtype = p.c; g.compute = p.compute;
    g.trans_a = p.trans_a; g.trans_b = p.trans_b;
    g.lda = lda; g.ldb = ldb; g.ldc = ldc;
    g.stride_a = na; g.stride_b = nb; g.stride_c = nc;
    g.alpha = p.alpha; g.beta = p.beta;
    if (p.bias) { g.bias = cuda.up(bias); g.bias_dtype = AMP_F32; }
    if (p.pre) { g.pre = cuda.up(pre); g.pre_dtype = AMP_F32; g.ld_pre = p.n; }
    g.act = p.act;
    CHECK_EQ(cuda.b->gemm(cuda.dev, &g, NULL), AMP_OK);
    cuda.down(&c, g.c);
    if (p.pre) cuda.down(&pre, g.pre);
    got = widened(c, p.c, AMP_F32);
    for (int64_t item = 0; item < p.batch; item++)
        for (int64_t i = 0; i < p.m; i++)
            for (int64_t j = 0; j < ldc; j++) {
                double sum = 0, size = 0, want, bound;
                size_t at = (size_t)(item * nc + i * ldc + j);
                if (j >= p.n) {                 /* what lies between the rows stays */
                    CHECK(got[at] == wc[at]);
                    continue;
                }
                for (int64_t k = 0; k < p.k; k++) {
                    double x = (double)wa[(size_t)(item * na + (p.trans_a ? k * lda + i : i * lda + k))];
                    double y = (double)wb[(size_t)(item * nb + (p.trans_b ? j * ldb + k : k * ldb + j))];
                    sum += x * y;
                    size += fabs(x * y);
                }
                sum *= (double)p.alpha;
                size = size * fabs((double)p.alpha) + (p.bias ? fabs((double)wbias[(size_t)j]) : 0);
                if (p.bias) sum += (double)wbias[(size_t)j];
                bound = (double)(p.k + 3) * ldexp(1.01, -24) * size;
                if (p.compute == AMP_TF32) bound += ldexp(2.01, -10) * size;    /* operands are rounded here, perhaps cut there */
                if (p.bias && p.c != AMP_F32) bound += unit_of(p.c) * fabs((double)wbias[(size_t)j]);   /* in c's dtype first */
                if (p.pre) CHECK(fabs((double)pre[(size_t)(i * p.n + j)] - sum) <= bound);
                if (!CUDA_IS_MODEL && p.c != AMP_F32) {     /* and so may the product be */
                    if (p.c == AMP_F16 && p.act == AMP_ACT_GELU && fabs(sum) > 65504) continue;     /* GELU of an infinity */
                    bound += unit_of(p.c) * (size + bound);
                }
                /* the activations' slopes are at most 1.13; they are computed to 2^-20 of their argument, or from the
                   hardware's tanh, which is within 2^-11 */
                want = activated(p.act, sum);
                bound = 1.13 * bound + (p.act ? ldexp(fabs(sum), p.act == AMP_ACT_GELU && p.c != AMP_F32 ? -12 : -20) : 0);
                if (p.beta != 0.0f) {
                    want += (double)p.beta * (double)wc[at];
                    bound += ldexp(fabs(want) + fabs((double)wc[at]), -23);
                }
                bound += unit_of(p.c) * (fabs(want) + bound) + ldexp(1, -25);
                if (p.c == AMP_F16 && fabs(want) > 65520 - bound) {             /* beyond fp16, or next to that */
                    CHECK(fabs((double)got[at]) > 65520 - 2 * bound && (want > 0) == (got[at] > 0));
                    continue;
                }
                CHECK_MSG(fabs((double)got[at] - want) <= bound, "%lld x %lld x %lld at %lld, %lld: %g, expected %g +- %g", (long long)p.m,
                          (long long)p.n, (long long)p.k, (long long)i, (long long)j, (double)got[at], want, bound);
            }
}

TEST(products) {
    coc_reset();
    static const amp_dtype storage[] = {AMP_F32, AMP_F16, AMP_BF16}, computes[] = {AMP_F32, AMP_TF32, AMP_F16, AMP_BF16};
    static const amp_activation_kind acts[] = {AMP_ACT_NONE, AMP_ACT_GELU, AMP_ACT_GELU_ERF, AMP_ACT_RELU};
    for (int i = 0; i < 24; i++) {
        product p = {1 + i * 7 % 70, 1 + i * 29 % 80, i * 13 % 40, i % 5 == 4 ? 3 : 1, i & 1, i >> 1 & 1,
                     storage[i % 3], storage[i / 3 % 3], storage[i / 2 % 3], computes[i % 4],
                     i % 7 == 3 ? 0.0f : 0.5f, i % 3 == 1 ? 1.0f : 0.0f, i % 4 > 1, 0, acts[i / 2 % 4]};
        p.pre = p.batch == 1 && i % 3 == 0;
        for (int cuts = 0; cuts < 2; cuts++) {
            coc_set_blas_cuts_tf32(cuts);
            product_one(p);
        }
    }
    CHECK_EQ(coc_faults(), 0);
}

/* Rows further apart than 2^31 elements. */
TEST(beyond_31_bits) {
    coc_reset();
    side cuda(amp_cuda());
    const int64_t far = ((int64_t)1 << 31) + 8;
    uint16_t *x = (uint16_t *)coc_sparse_alloc((size_t)(2 * far + 64) * 2);
    if (x == NULL) SKIP("no address space for 8 GiB");
    std::vector<uint16_t> ones(16, 0x3f80);
    std::vector<float> out(16, 0.0f);
    amp_k_column_sum k;
    for (int64_t row = 0; row < 3; row++)
        CHECK_EQ(cuda.b->copy(cuda.dev, x + row * far, ones.data(), 32, AMP_COPY_TO_DEVICE, NULL), AMP_OK);
    memset(&k, 0, sizeof k);
    k.x.data = x;
    k.x.dtype = AMP_BF16;
    k.x.rows = 3;
    k.x.cols = 16;
    k.x.ld = far;
    k.out = cuda.up(out);
    k.out_dtype = AMP_F32;
    CHECK_EQ(cuda.b->column_sum(cuda.dev, &k, NULL), AMP_OK);
    cuda.down(&out, k.out);
    for (float v : out) CHECK(v == 3.0f);
    CHECK_EQ(coc_faults(), 0);
}

/* ---- Order: the same bits whatever thread, block and stream comes first */

TEST(orders) {
    coc_reset();
    std::vector<row_spec> specs = many_rows(25);
    std::vector<row_data> before = fill_rows(specs, 0.5f);
    bytes matrix = numbers(AMP_BF16, 600 * 72);
    std::string differs = coc_every_order([&](std::string *results) {
        side x(amp_cuda());
        std::vector<row_data> after = before;
        std::vector<amp_k_tensor> table = table_of(&x, specs, before, 2);
        amp_k_tensor *on = x.up(table);
        amp_k_grad_stats start = a_found();
        amp_k_grad_stats *f = (amp_k_grad_stats *)x.up(&start, sizeof start);
        amp_k_check k = {on, 25, &f->factor, f};
        std::vector<float> sums(72);
        amp_k_column_sum c;
        memset(&c, 0, sizeof c);
        c.x.data = x.up(matrix);
        c.x.dtype = AMP_BF16;
        c.x.rows = 600;
        c.x.cols = c.x.ld = 72;
        c.out = x.up(sums);
        c.out_dtype = AMP_F32;
        CHECK_EQ(x.b->check(x.dev, &k, NULL), AMP_OK);
        CHECK_EQ(update(&x, 0, on, 25, f, 0), AMP_OK);
        CHECK_EQ(x.b->column_sum(x.dev, &c, NULL), AMP_OK);
        bring_rows(&x, table, &after);
        x.down(&sums, c.out);
        start = x.one<amp_k_grad_stats>(f);
        results->append((const char *)&start, sizeof start);
        results->append((const char *)sums.data(), sums.size() * 4);
        for (row_data &d : after) {
            results->append((const char *)d.weight.data(), d.weight.size());
            results->append((const char *)d.m.data(), d.m.size());
        }
    });
    CHECK_MSG(differs.empty(), "%s", differs.c_str());
    CHECK_EQ(coc_faults(), 0);
}

/* The number of multiprocessors, and with it the grid, changes nothing either. */
TEST(grids) {
    std::vector<row_spec> specs = many_rows(25);
    std::vector<row_data> before = fill_rows(specs, 0.5f);
    amp_k_grad_stats found[2];
    for (int i = 0; i < 2; i++) {
        coc_reset();
        coc_set_devices(1, (size_t)1 << 30, i ? 132 : 1);
        side x(amp_cuda());
        std::vector<amp_k_tensor> table = table_of(&x, specs, before, 2);
        amp_k_tensor *on = x.up(table);
        amp_k_grad_stats start = a_found();
        amp_k_grad_stats *f = (amp_k_grad_stats *)x.up(&start, sizeof start);
        amp_k_check k = {on, 25, NULL, f};
        CHECK_EQ(x.b->check(x.dev, &k, NULL), AMP_OK);
        CHECK_EQ(update(&x, 0, on, 25, f, 0), AMP_OK);
        found[i] = x.one<amp_k_grad_stats>(f);
    }
    CHECK(memcmp(&found[0], &found[1], sizeof found[0]) == 0);
    CHECK_EQ(coc_faults(), 0);
    coc_reset();
    coc_set_devices(2);
}

/* ---- Graphs */

/* check + AdamW as a graph, launched three times with the same arguments, against three eager calls; between the
   launches eager work of the same size runs, and must not get the graph's scratch memory. */
TEST(graph_replays) {
    coc_reset();
    std::vector<row_spec> specs = many_rows(12);
    std::vector<row_data> before = fill_rows(specs, 0.5f), results[2] = {before, before};
    amp_k_grad_stats found[2];
    for (int graphed = 0; graphed < 2; graphed++) {
        side x(amp_cuda());
        std::vector<amp_k_tensor> table = table_of(&x, specs, before, 2);
        amp_k_tensor *on = x.up(table);
        amp_k_grad_stats start = a_found();
        amp_k_grad_stats *f = (amp_k_grad_stats *)x.up(&start, sizeof start), *other = (amp_k_grad_stats *)x.up(&start, sizeof start);
        void *graph = NULL, *stream = NULL;
        CHECK_EQ(x.b->stream_create(x.dev, &stream), AMP_OK);
        CHECK_EQ(x.b->stream_sync(x.dev, NULL), AMP_OK);
        amp_k_check k = {on, 12, NULL, f}, k2 = {on, 12, NULL, other};
        amp_k_adamw a = {on, 12, f, 0.9, 0.999, 1e-8, 0, 0, 0, NULL, NULL};
        if (graphed) {
            CHECK_EQ(x.b->graph_begin(x.dev, stream), AMP_OK);
            CHECK_EQ(x.b->check(x.dev, &k, stream), AMP_OK);
            CHECK_EQ(x.b->adamw(x.dev, &a, stream), AMP_OK);
            CHECK_EQ(x.b->graph_end(x.dev, stream, &graph), AMP_OK);
            CHECK(graph != NULL);
            coc_reset_counts();
            CHECK_EQ(x.b->check(x.dev, &k2, stream), AMP_OK);       /* the graph keeps its scratch memory: this takes more */
            if (CUDA_IS_MODEL) CHECK_EQ(coc_calls("cudaMalloc"), 1);
            CHECK_EQ(x.b->check(x.dev, &k2, stream), AMP_OK);
            if (CUDA_IS_MODEL) CHECK_EQ(coc_calls("cudaMalloc"), 1);
        }
        for (int i = 0; i < 3; i++) {
            if (graphed) CHECK_EQ(x.b->graph_launch(x.dev, graph, stream), AMP_OK);
            else {
                CHECK_EQ(x.b->check(x.dev, &k, stream), AMP_OK);
                CHECK_EQ(x.b->adamw(x.dev, &a, stream), AMP_OK);
            }
            CHECK_EQ(x.b->check(x.dev, &k2, NULL), AMP_OK);
            CHECK_EQ(x.b->stream_sync(x.dev, stream), AMP_OK);
        }
        found[graphed] = x.one<amp_k_grad_stats>(f);
        bring_rows(&x, table, &results[graphed]);
        if (graphed) {
            coc_reset_counts();
            x.b->graph_destroy(x.dev, graph);
            CHECK_EQ(x.b->check(x.dev, &k2, stream), AMP_OK);       /* now the graph's scratch memory is free */
            if (CUDA_IS_MODEL) CHECK_EQ(coc_calls("cudaMalloc"), 0);
        }
        x.b->stream_destroy(x.dev, stream);
    }
    CHECK(memcmp(&found[0], &found[1], sizeof found[0]) == 0);
    compare_rows(specs, results[1], results[0]);
    CHECK_EQ(coc_living().graph_execs, 0);
    CHECK_EQ(coc_living().graphs, 0);
    CHECK_EQ(coc_faults(), 0);
}

/* The host captures calls itself, again and again: each graph keeps its scratch memory while it lives and no longer. */
TEST(host_captures) {
    coc_reset();
    std::vector<row_spec> specs = many_rows(5);
    std::vector<row_data> before = fill_rows(specs, 0.5f);
    amp_k_grad_stats start = a_found(), eager;
    cudaGraphExec_t execs[5] = {};
    cudaStream_t stream = NULL;
    CHECK_EQ(cudaStreamCreate(&stream), cudaSuccess);
    {
        side x(amp_cuda());
        std::vector<amp_k_tensor> table = table_of(&x, specs, before, 0);
        amp_k_check k = {x.up(table), 5, NULL, (amp_k_grad_stats *)x.up(&start, sizeof start)};
        amp_memory_info info[5];
        CHECK_EQ(x.b->check(x.dev, &k, NULL), AMP_OK);
        eager = x.one<amp_k_grad_stats>(k.found);
        for (int i = 0; i < 5; i++) {
            cudaGraph_t graph = NULL;
            CHECK_EQ(x.b->copy(x.dev, k.found, &start, sizeof start, AMP_COPY_TO_DEVICE, NULL), AMP_OK);
            CHECK_EQ(x.b->stream_sync(x.dev, NULL), AMP_OK);
            if (i > 1) CHECK_EQ(cudaGraphExecDestroy(execs[i - 2]), cudaSuccess);       /* two live at a time */
            CHECK_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
            CHECK_EQ(x.b->check(x.dev, &k, stream), AMP_OK);
            CHECK_EQ(x.b->check(x.dev, &k, stream), AMP_OK);
            CHECK_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
            CHECK_EQ(cudaGraphInstantiate(&execs[i], graph, 0), cudaSuccess);
            CHECK_EQ(cudaGraphDestroy(graph), cudaSuccess);
            memset(&info[i], 0, sizeof info[i]);
            x.b->memory(x.dev, &info[i]);
            CHECK_EQ(x.b->copy(x.dev, k.found, &start, sizeof start, AMP_COPY_TO_DEVICE, stream), AMP_OK);
            CHECK_EQ(cudaGraphLaunch(execs[i], stream), cudaSuccess);
            CHECK_EQ(cudaStreamSynchronize(stream), cudaSuccess);
            CHECK(x.one<amp_k_grad_stats>(k.found).sum_sq == 2 * eager.sum_sq);
        }
        CHECK_EQ(info[1].reserved - info[0].reserved, 512 * 16);       /* the first lives: more memory */
        if (CUDA_IS_MODEL) CHECK_EQ(info[4].reserved, info[1].reserved);
    }
    for (int i = 3; i < 5; i++) CHECK_EQ(cudaGraphExecDestroy(execs[i]), cudaSuccess);      /* after their memory */
    CHECK_EQ(cudaStreamDestroy(stream), cudaSuccess);
    CHECK_EQ(coc_living().allocations, 0);
    CHECK_EQ(coc_faults(), 0);
}

/* Two streams of one capture are branches of a graph, which run at the same time: each has scratch memory of its own, in
   a capture of the host's and in the context's.  Returns the bytes reserved for both. */
static int64_t sum_in_branches(bool own_capture, std::string *results) {
    const int64_t rows = 600, cols = 40;
    cudaStream_t streams[2] = {};
    cudaEvent_t events[2] = {};
    amp_memory_info before, after;
    side x(amp_cuda());
    void *graph = NULL;
    cudaGraphExec_t exec = NULL;
    float sums[2][40];
    amp_k_column_sum k[2] = {};
    for (int i = 0; i < 2; i++) {
        std::vector<float> values((size_t)(rows * cols), (float)(i + 1));
        CHECK_EQ(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking), cudaSuccess);
        CHECK_EQ(cudaEventCreateWithFlags(&events[i], cudaEventDisableTiming), cudaSuccess);
        k[i].x = amp_mat{x.up(values), AMP_F32, 0, rows, cols, cols};
        k[i].out = x.up(values.data(), cols * 4), k[i].out_dtype = AMP_F32;
    }
    CHECK_EQ(x.b->stream_sync(x.dev, NULL), AMP_OK);
    x.b->memory(x.dev, &before);
    if (own_capture) CHECK_EQ(x.b->graph_begin(x.dev, streams[0]), AMP_OK);
    else CHECK_EQ(cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeThreadLocal), cudaSuccess);
    CHECK(cudaEventRecord(events[0], streams[0]) == cudaSuccess && cudaStreamWaitEvent(streams[1], events[0], 0) == cudaSuccess);
    for (int turn = 0; turn < 2; turn++)
        for (int i = 0; i < 2; i++) CHECK_EQ(x.b->column_sum(x.dev, &k[i], streams[i]), AMP_OK);
    CHECK(cudaEventRecord(events[1], streams[1]) == cudaSuccess && cudaStreamWaitEvent(streams[0], events[1], 0) == cudaSuccess);
    if (own_capture) CHECK_EQ(x.b->graph_end(x.dev, streams[0], &graph), AMP_OK);
    else {
        cudaGraph_t captured = NULL;
        CHECK_EQ(cudaStreamEndCapture(streams[0], &captured), cudaSuccess);
        CHECK(cudaGraphInstantiate(&exec, captured, 0) == cudaSuccess && cudaGraphDestroy(captured) == cudaSuccess);
    }
    x.b->memory(x.dev, &after);
    if (own_capture) CHECK_EQ(x.b->graph_launch(x.dev, graph, streams[0]), AMP_OK);
    else CHECK_EQ(cudaGraphLaunch(exec, streams[0]), cudaSuccess);
    CHECK_EQ(x.b->stream_sync(x.dev, streams[0]), AMP_OK);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(cudaMemcpy(sums[i], k[i].out, sizeof sums[i], cudaMemcpyDeviceToHost), cudaSuccess);
        CHECK_MSG(sums[i][0] == 600.0f * (float)(i + 1) && sums[i][39] == sums[i][0], "branch %d: %g", i, (double)sums[i][0]);
    }
    results->append((const char *)sums, sizeof sums);
    if (own_capture) x.b->graph_destroy(x.dev, graph);
    else CHECK_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
    for (int i = 0; i < 2; i++)
        CHECK(cudaEventDestroy(events[i]) == cudaSuccess && cudaStreamDestroy(streams[i]) == cudaSuccess);
    return after.reserved - before.reserved;
}
TEST(branches_of_a_capture) {
    coc_reset();
    for (bool own_capture : {false, true}) {
        std::string difference = coc_every_order([=](std::string *results) {
            int64_t reserved = sum_in_branches(own_capture, results), one;
            {
                side x(amp_cuda());
                std::vector<float> values(600 * 40, 1.0f);
                amp_k_column_sum k = {};
                amp_memory_info before, after;
                k.x = amp_mat{x.up(values), AMP_F32, 0, 600, 40, 40}, k.out = x.up(values.data(), 160), k.out_dtype = AMP_F32;
                x.b->memory(x.dev, &before);
                CHECK_EQ(x.b->column_sum(x.dev, &k, NULL), AMP_OK);
                x.b->memory(x.dev, &after);
                one = after.reserved - before.reserved;
            }
            CHECK(one > 0);
            CHECK_EQ(reserved, 2 * one);
        });
        CHECK_MSG(difference.empty(), "%s", difference.c_str());
    }
    CHECK_EQ(coc_living().allocations, 0);
    CHECK_EQ(coc_faults(), 0);
}

/* Without a user object nothing tells when a captured graph ends: its memory stays its own until the context is closed. */
TEST(captures_without_user_objects) {
    if (!CUDA_IS_MODEL) SKIP("calls that fail need the model");
    for (const char *function : {"cudaUserObjectCreate", "cudaGraphRetainUserObject"}) {
        coc_reset();
        cudaStream_t stream = NULL;
        CHECK_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
        {
            side x(amp_cuda(), 0, stream);
            std::vector<float> values(600 * 40, 1.0f), sums;
            cudaGraph_t graph = NULL;
            cudaGraphExec_t exec = NULL;
            amp_k_column_sum k = {}, other = {};
            amp_memory_info before, captured, after;
            k.x = other.x = amp_mat{x.up(values), AMP_F32, 0, 600, 40, 40};
            k.out = x.up(values.data(), 160), other.out = x.up(values.data(), 160);
            k.out_dtype = other.out_dtype = AMP_F32;
            x.b->memory(x.dev, &before);
            CHECK_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
            coc_fail(function, 1, cudaErrorUnknown);
            CHECK_EQ(x.b->column_sum(x.dev, &k, NULL), AMP_OK);
            CHECK(!coc_fail_pending());
            CHECK_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
            CHECK(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess && cudaGraphDestroy(graph) == cudaSuccess);
            x.b->memory(x.dev, &captured);
            CHECK_EQ(x.b->column_sum(x.dev, &other, NULL), AMP_OK);
            x.b->memory(x.dev, &after);
            CHECK(captured.reserved > before.reserved);
            CHECK_MSG(after.reserved - captured.reserved == captured.reserved - before.reserved,
                      "%s failed: other work got the graph's memory", function);
            CHECK_EQ(x.b->trim(x.dev), AMP_OK);
            x.b->memory(x.dev, &after);
            CHECK_MSG(after.reserved == captured.reserved, "%s failed: the graph's memory went back to CUDA", function);
            CHECK_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
            sums.resize(40);
            x.down(&sums, k.out);
            CHECK(sums[0] == 600 && sums[39] == 600);
            CHECK_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
        }
        CHECK_EQ(cudaStreamDestroy(stream), cudaSuccess);
        CHECK_EQ(coc_living().allocations, 0);
        CHECK_EQ(coc_faults(), 0);
    }
}

/* If CUDA does not say whether a stream is captured, the call fails: with the stream's memory, work outside the graph would
   use what the graph uses. */
TEST(captures_that_cannot_be_seen) {
    if (!CUDA_IS_MODEL) SKIP("calls that fail need the model");
    coc_reset();
    {
        side x(amp_cuda());
        std::vector<float> values(600 * 40, 1.0f);
        amp_k_column_sum k = {};
        k.x = amp_mat{x.up(values), AMP_F32, 0, 600, 40, 40}, k.out = x.up(values.data(), 160), k.out_dtype = AMP_F32;
        coc_fail("cudaStreamGetCaptureInfo", 1, cudaErrorUnknown);
        CHECK_EQ(x.b->column_sum(x.dev, &k, NULL), AMP_ERR_DEVICE);
        CHECK_MSG(last_text.find("cudaStreamGetCaptureInfo") != std::string::npos && last_text.find("cudaErrorUnknown") != std::string::npos,
                  "%s", last_text.c_str());
        CHECK_EQ(x.b->column_sum(x.dev, &k, NULL), AMP_OK);
        CHECK(x.one<float>(k.out) == 600);
    }
    CHECK_EQ(coc_living().allocations, 0);
    CHECK_EQ(coc_faults(), 0);
}

/* Memory of a graph whose stream is gone is given back on the context's stream. */
static std::vector<void *> given_back;
static void *plain_memory(void *, size_t size, int, void *) {
    void *p = NULL;
    return cudaMalloc(&p, size) == cudaSuccess ? p : NULL;
}
static void noted_release(void *, void *p, size_t, int, void *stream) {
    given_back.push_back(stream);
    (void)cudaFree(p);
}
TEST(graph_outlives_its_stream) {
    coc_reset();
    std::vector<row_spec> specs = many_rows(3);
    std::vector<row_data> before = fill_rows(specs, 0.5f);
    amp_k_grad_stats start = a_found();
    amp_device_memory memory;
    memset(&memory, 0, sizeof memory);
    memory.alloc = plain_memory;
    memory.free = noted_release;
    given_back.clear();
    void *stream = NULL, *graph = NULL;
    {
        side x(amp_cuda(), 0, NULL, &memory);
        std::vector<amp_k_tensor> table = table_of(&x, specs, before, 0);
        amp_k_check k = {x.up(table), 3, NULL, (amp_k_grad_stats *)x.up(&start, sizeof start)};
        CHECK_EQ(x.b->stream_sync(x.dev, NULL), AMP_OK);
        CHECK_EQ(x.b->stream_create(x.dev, &stream), AMP_OK);
        CHECK_EQ(x.b->graph_begin(x.dev, stream), AMP_OK);
        CHECK_EQ(x.b->check(x.dev, &k, stream), AMP_OK);
        CHECK_EQ(x.b->graph_end(x.dev, stream, &graph), AMP_OK);
        CHECK_EQ(x.b->graph_launch(x.dev, graph, stream), AMP_OK);
        x.b->stream_destroy(x.dev, stream);
        x.b->graph_destroy(x.dev, graph);
    }
    CHECK(given_back.size() > 3);
    for (void *s : given_back) CHECK(s != stream && s == given_back[0]);
    CHECK_EQ(coc_faults(), 0);
}

/* The program destroys a stream with work left, and the next stream has the same handle.  The two streams' work must not
   share scratch memory at the same time.  ways: the first work is the call itself, or a graph that is destroyed too; then the
   event that marks its end cannot be made, or cannot be recorded. */
struct column_sums_of {
    side &x;
    amp_k_column_sum k = {};
    column_sums_of(side &on, float value) : x(on) {
        std::vector<float> values(600 * 40, value);
        k.x = amp_mat{x.up(values), AMP_F32, 0, 600, 40, 40}, k.out = x.up(values.data(), 160), k.out_dtype = AMP_F32;
        CHECK_EQ(x.b->stream_sync(x.dev, NULL), AMP_OK);
    }
    amp_result run(cudaStream_t stream) const { return x.b->column_sum(x.dev, &k, stream); }
    float sum() const {
        std::vector<float> sums(40);
        x.down(&sums, k.out);
        return sums[0] == sums[39] ? sums[0] : NAN;
    }
};
static void sum_on_streams_of_one_handle(int way, std::string *results) {
    side x(amp_cuda());
    column_sums_of first(x, 1), second(x, 2), own(x, 3);
    cudaStream_t stream = NULL, again = NULL;
    void *graph = NULL;
    CHECK_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    if (way == 1) {
        CHECK_EQ(x.b->graph_begin(x.dev, stream), AMP_OK);
        CHECK_EQ(first.run(stream), AMP_OK);
        CHECK_EQ(x.b->graph_end(x.dev, stream, &graph), AMP_OK);
        CHECK_EQ(x.b->graph_launch(x.dev, graph, stream), AMP_OK);
    } else {
        if (way > 1) coc_fail(way == 2 ? "cudaEventCreateWithFlags" : "cudaEventRecord", 1, cudaErrorUnknown);
        CHECK_EQ(first.run(stream), AMP_OK);
        if (way > 1) CHECK(!coc_fail_pending());
    }
    CHECK_EQ(cudaStreamDestroy(stream), cudaSuccess);
    x.b->graph_destroy(x.dev, graph);
    CHECK_EQ(cudaStreamCreateWithFlags(&again, cudaStreamNonBlocking), cudaSuccess);
    if (CUDA_IS_MODEL) CHECK(again == stream);
    CHECK_EQ(second.run(again), AMP_OK);
    CHECK_EQ(own.run(NULL), AMP_OK);
    CHECK_EQ(x.b->stream_sync(x.dev, NULL), AMP_OK);        /* other work that may run does */
    CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
    CHECK_MSG(first.sum() == 600 && second.sum() == 1200 && own.sum() == 1800, "way %d: %g %g %g", way, (double)first.sum(),
              (double)second.sum(), (double)own.sum());
    results->append(std::to_string(second.sum()));
    CHECK_EQ(cudaStreamDestroy(again), cudaSuccess);
}
TEST(streams_of_one_handle) {
    coc_reset();
    for (int way = 0; way < (CUDA_IS_MODEL ? 4 : 2); way++) {
        std::string difference = coc_every_order([=](std::string *results) { sum_on_streams_of_one_handle(way, results); });
        CHECK_MSG(difference.empty(), "way %d: %s", way, difference.c_str());
        CHECK_EQ(coc_living().events, 0);
    }
    CHECK_EQ(coc_living().allocations, 0);
    CHECK_EQ(coc_faults(), 0);
}

/* The wait for that event may fail: the call says so, and the memory is there for the next. */
TEST(wait_for_a_handle_fails) {
    if (!CUDA_IS_MODEL) SKIP("calls that fail need the model");
    coc_reset();
    cudaStream_t stream = NULL;
    CHECK_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    {
        side x(amp_cuda());
        column_sums_of work(x, 1);
        amp_memory_info before, after;
        CHECK_EQ(work.run(stream), AMP_OK);
        x.b->memory(x.dev, &before);
        coc_fail("cudaStreamWaitEvent", 1, cudaErrorUnknown);
        CHECK_EQ(work.run(stream), AMP_ERR_DEVICE);
        CHECK_MSG(last_text.find("cudaStreamWaitEvent") != std::string::npos, "%s", last_text.c_str());
        CHECK_EQ(work.run(stream), AMP_OK);
        x.b->memory(x.dev, &after);
        CHECK(before.reserved == after.reserved && before.allocated == after.allocated);
        CHECK_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        CHECK(work.sum() == 600);
    }
    CHECK_EQ(cudaStreamDestroy(stream), cudaSuccess);
    CHECK_EQ(coc_living().allocations + coc_living().events, 0);
    CHECK_EQ(coc_faults(), 0);
}

/* The program's allocator gets a stream that still exists, and memory whose work is done. */
TEST(memory_of_destroyed_streams) {
    coc_reset();
    amp_device_memory memory;
    memset(&memory, 0, sizeof memory);
    memory.alloc = plain_memory;
    memory.free = noted_release;
    given_back.clear();
    cudaStream_t stream = NULL;
    {
        side x(amp_cuda(), 0, NULL, &memory);
        column_sums_of work(x, 1);
        CHECK_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
        CHECK_EQ(work.run(stream), AMP_OK);
        CHECK_EQ(cudaStreamDestroy(stream), cudaSuccess);
        CHECK_EQ(x.b->trim(x.dev), AMP_OK);
        CHECK_EQ(given_back.size(), 1);
        CHECK(work.sum() == 600);
    }
    CHECK(given_back.size() == 3);
    for (void *s : given_back) CHECK(s != stream && s == given_back[0]);
    CHECK_EQ(coc_faults(), 0);
}

TEST(graph_misuse) {
    coc_reset();
    {
        side x(amp_cuda());
        void *graph = NULL;
        CHECK_EQ(x.b->graph_end(x.dev, NULL, &graph), AMP_ERR_STATE);
        CHECK_EQ(x.b->graph_begin(x.dev, NULL), AMP_OK);
        CHECK_EQ(x.b->graph_begin(x.dev, NULL), AMP_ERR_DEVICE);
        CHECK_EQ(x.b->stream_sync(x.dev, NULL), AMP_ERR_DEVICE);        /* a wait cannot be captured */
        CHECK(last_text.find("cudaStreamSynchronize") != std::string::npos);
        CHECK_EQ(x.b->graph_end(x.dev, NULL, &graph), AMP_ERR_DEVICE);
        CHECK(graph == NULL);
        CHECK_EQ(x.b->stream_sync(x.dev, NULL), AMP_OK);                /* the stream works on */
    }
    CHECK_EQ(coc_living().graphs, 0);
    CHECK_EQ(host_blocks, 0);
    (void)coc_take_faults();
}

/* A capture that nobody ends is dropped with whatever goes away: after it this thread allocates and waits as before. */
static bool thread_is_free() {
    void *p = NULL;
    return cudaMalloc(&p, 64) == cudaSuccess && cudaFree(p) == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess;
}
TEST(captures_left_open) {
    coc_reset();
    for (int way = 0; way < 6; way++) {
        cudaStream_t host = NULL;
        void *stream = NULL, *graph = NULL;
        if (way == 1 || way == 5) CHECK_EQ(cudaStreamCreateWithFlags(&host, cudaStreamNonBlocking), cudaSuccess);
        host_logs = 0;
        {
            side x(amp_cuda(), 0, host);
            std::vector<float> v(64, 1.0f);
            amp_k_cast k = {};
            k.src = k.dst = x.up(v);
            k.src_dtype = AMP_F32, k.dst_dtype = AMP_TF32, k.n = 64;
            CHECK_EQ(x.b->stream_sync(x.dev, NULL), AMP_OK);
            if (way == 2 || way == 3) CHECK_EQ(x.b->stream_create(x.dev, &stream), AMP_OK);
            if (way == 3)       /* the host's own, from a stream of ours */
                CHECK_EQ(cudaStreamBeginCapture((cudaStream_t)stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
            else CHECK_EQ(x.b->graph_begin(x.dev, stream), AMP_OK);
            CHECK_EQ(x.b->cast(x.dev, &k, stream), AMP_OK);
            CHECK(!thread_is_free());       /* which puts an end to the graph, but not to the capture */
            (void)cudaGetLastError();
            if (way == 2 || way == 3) x.b->stream_destroy(x.dev, stream);
            if (way == 4) {
                if (CUDA_IS_MODEL) coc_fail("cudaStreamEndCapture", 1, cudaErrorUnknown);
                CHECK_EQ(x.b->graph_end(x.dev, NULL, &graph), AMP_ERR_DEVICE);
            }
            if (way >= 2 && way <= 4) {
                CHECK_MSG(thread_is_free(), "way %d", way);
                CHECK_EQ(x.b->graph_end(x.dev, NULL, &graph), AMP_ERR_STATE);
                CHECK_EQ(x.b->cast(x.dev, &k, NULL), AMP_OK);
            }
            if (way == 5) std::thread([&] { x.close(); }).join();       /* not the thread that could end it: that is said */
        }
        CHECK_MSG(host_blocks == 0, "way %d: %ld blocks of host memory", way, (long)host_blocks);
        const bool open = way == 5 && (CUDA_IS_MODEL || host_logs);     /* a driver lets any thread end what has failed */
        CHECK_EQ(host_logs, open);
        if (open) {
            cudaGraph_t left = NULL;
            CHECK(!thread_is_free());
            (void)cudaStreamEndCapture(host, &left);
            if (left != NULL) (void)cudaGraphDestroy(left);
            (void)cudaGetLastError();
        }
        CHECK_MSG(thread_is_free(), "way %d: the capture is still open", way);
        if (host != NULL) CHECK_EQ(cudaStreamDestroy(host), cudaSuccess);
        CHECK_EQ(coc_living().graphs, 0);
    }
    (void)cudaGetLastError();
    CHECK_EQ(coc_faults(), 0);
}

/* Kernels are chosen by what the build was compiled for too, and what is too old or too new is refused by name. */
TEST(images) {
    struct image_case { int cc, image; amp_result result; int logs; const char *text; int wgmma = 0, driver = 13000; };
    static const image_case cases[] = {
        {90, 90 + COC_LETTER_A, AMP_OK, 0, NULL, 1}, {90, 90, AMP_OK, 1, "compile amp_cuda.cu with -arch=sm_90a", 1},
        {90, 90 + COC_LETTER_A, AMP_OK, 1, "the driver is older than CUDA 12", 1, 11080},
        {80, 80, AMP_OK, 1, "mma.sync: it needs a GPU of compute capability 9.0", 1},
        {90, 90 + COC_LETTER_A, AMP_OK, 0, NULL}, {90, 90, AMP_OK, 0, NULL}, {90, 80, AMP_OK, 0, NULL}, {75, 75, AMP_OK, 0, NULL}, {86, 80, AMP_OK, 0, NULL},
        {90, 75, AMP_OK, 1, "compiled for compute capability 7.5, but model has 9.0: attention runs without tensor cores; compile "
                            "amp_cuda.cu with -arch=sm_90"},
        {80, 75, AMP_OK, 1, "-arch=sm_80"},
        {70, 70, AMP_ERR_UNSUPPORTED, 0, "model has compute capability 7.0; 7.5 (Turing) or later is needed, as CUDA 13 does "
                                          "not build for older ones; compile for 7.0 (Volta) with CUDA 11.8 to 12.9"},
        {90, 120, AMP_ERR_DEVICE, 0, "compile amp_cuda.cu with -arch for this GPU: -arch=sm_90a"},
        {80, 90, AMP_ERR_DEVICE, 0, "cudaErrorNoKernelImageForDevice"},
        {100, 90 + COC_LETTER_A, AMP_ERR_DEVICE, 0, "compile amp_cuda.cu with -arch for this GPU: -arch=sm_100"},
    };
    for (const auto &c : cases) {
        coc_set_devices(1, (size_t)1 << 28, 4, c.cc, c.image);
        coc_set_driver(c.driver);
        void *dev = NULL;
        const amp_host host = {NULL, host_fail, host_log, host_alloc, host_free, NULL};
        amp_backend_desc desc = {};
        desc.wgmma = c.wgmma;
        host_logs = 0;
        last_text.clear();
        CHECK_MSG(amp_cuda()->open(&dev, &host, &desc) == c.result, "%d on %d: %s", c.image, c.cc, last_text.c_str());
        CHECK_EQ(host_logs, c.logs);
        CHECK_MSG(c.text == NULL || last_text.find(c.text) != std::string::npos, "%d on %d: %s", c.image, c.cc, last_text.c_str());
        if (dev != NULL) amp_cuda()->close(dev);
        CHECK_EQ(host_blocks, 0);
    }
    coc_set_driver(13000);
    coc_set_devices(2);
    CHECK_EQ(coc_faults(), 0);
}

/* ---- Failures */

/* Everything the runtime can do, once; stops at the first failure and cleans up. */
struct session {
    void *dev = NULL, *a = NULL, *table = NULL, *pinned = NULL, *stream = NULL, *event = NULL, *second = NULL, *graph = NULL;
    const amp_backend *b = amp_cuda();

    amp_result kernels(int captured) {
        amp_k_grad_stats *f = (amp_k_grad_stats *)a;
        const amp_k_tensor *t = (const amp_k_tensor *)table;
        amp_k_column_sum sum = {{(char *)a + 16384, AMP_F32, 0, 300, 8, 8}, (char *)a + 4096, AMP_F32, 0};
        amp_k_adamw adamw = {t, 1, f, 0.9, 0.999, 1e-8, 0, 0, 0, NULL, NULL};
        amp_k_scale_ranges scale = {t, 1, &f->factor};
        amp_k_cast cast;
        amp_k_rule rule;
        memset(&rule, 0, sizeof rule);
        memset(&cast, 0, sizeof cast);
        cast.dst = (char *)a + 4096;
        cast.src = (char *)a + 8192;
        cast.dst_dtype = AMP_BF16;
        cast.src_dtype = AMP_F32;
        cast.n = 100;
        rule.kind = AMP_RULE_BEGIN;
        rule.found = f;
        rule.step_rule.divisor = 1;
        TRY(b->cast(dev, &cast, NULL));
        TRY(b->rule(dev, &rule, NULL));
        if (!captured) TRY(b->column_sum(dev, &sum, NULL));
        TRY(b->scale_ranges(dev, &scale, NULL));
        return b->adamw(dev, &adamw, NULL);
    }
    amp_result run() {
        const amp_host host = {NULL, host_fail, host_log, host_alloc, host_free, NULL};
        amp_backend_desc desc;
        int32_t done;
        double seconds;
        memset(&desc, 0, sizeof desc);
        desc.device = CUDA_IS_MODEL;        /* the second GPU, where there is one for certain */
        TRY(b->open(&dev, &host, &desc));
        TRY(b->alloc(dev, &a, 65536));
        TRY(b->alloc(dev, &table, sizeof(amp_k_tensor)));
        TRY(b->fill(dev, a, 0, 65536, NULL));
        TRY(b->fill(dev, table, 0, sizeof(amp_k_tensor), NULL));
        TRY(b->alloc_pinned(dev, &pinned, 256));
        TRY(b->stream_create(dev, &stream));
        TRY(b->event_create(dev, &event, 1));
        TRY(b->event_create(dev, &second, 1));
        TRY(b->event_record(dev, event, NULL));
        TRY(kernels(0));
        TRY(b->event_record(dev, second, NULL));
        TRY(b->event_wait(dev, second, stream));
        TRY(b->copy(dev, pinned, a, 256, AMP_COPY_TO_HOST, stream));
        TRY(b->event_sync(dev, second));
        TRY(b->stream_sync(dev, stream));
        TRY(b->event_done(dev, second, &done));
        TRY(b->event_elapsed(dev, event, second, &seconds));
        TRY(b->graph_begin(dev, NULL));
        amp_result captured = kernels(1), ended = b->graph_end(dev, NULL, &graph);
        TRY(captured);
        TRY(ended);
        TRY(b->graph_launch(dev, graph, NULL));
        return b->stream_sync(dev, NULL);
    }
    ~session() {
        if (dev == NULL) return;
        b->graph_destroy(dev, graph);
        b->event_destroy(dev, event);
        b->event_destroy(dev, second);
        b->stream_destroy(dev, stream);
        b->free_pinned(dev, pinned, 256);
        b->free(dev, table, sizeof(amp_k_tensor));
        b->free(dev, a, 65536);
        b->close(dev);
    }
};

static void nothing_left(const char *function, int n) {
    coc_alive alive = coc_living();
    CHECK_MSG(alive.allocations + alive.pinned + alive.streams + alive.events + alive.graphs + alive.graph_execs == 0,
              "after call %d of %s: %ld blocks, %ld pinned, %ld streams, %ld events, %ld graphs, %ld executable", n, function,
              alive.allocations, alive.pinned, alive.streams, alive.events, alive.graphs, alive.graph_execs);
    CHECK_MSG(host_blocks == 0, "after call %d of %s: %ld blocks of host memory", n, function, host_blocks);
    CHECK_MSG(coc_faults() == 0, "%s", coc_fault_text().c_str());
    host_blocks = 0;
    coc_fail_clear();
    coc_reset();
}

TEST(every_call_may_fail) {
    static const char *const functions[] = {
        "cudaGetDeviceCount", "cudaGetDevice", "cudaSetDevice", "cudaGetDeviceProperties", "cudaFuncGetAttributes", "cudaDeviceGetAttribute",
        "cudaStreamCreateWithFlags", "cudaMalloc", "cudaHostAlloc", "cudaMemcpyAsync", "cudaMemsetAsync",
        "cudaEventCreateWithFlags", "cudaEventRecord", "cudaStreamWaitEvent", "cudaEventQuery", "cudaEventSynchronize",
        "cudaEventElapsedTime", "cudaLaunchKernel", "cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaGraphInstantiate",
        "cudaGraphLaunch", "cudaStreamSynchronize"};
    coc_reset();
    for (const char *function : functions) {
        bool restores = strcmp(function, "cudaSetDevice") == 0;     /* every second call makes the thread's own GPU current */
        int n = 0, failed = 0, pending = 0;
        while (!pending && n < 200) {
            n += n < 10 ? 1 : 7;                /* those that every call makes: a sample of the later ones */
            coc_fail(function, n, cudaErrorUnknown);
            {
                session s;
                last_text.clear();
                amp_result result = s.run();
                if (coc_fail_pending() || (restores && result == AMP_OK)) {     /* later, among what cannot fail */
                    CHECK_MSG(result == AMP_OK, "%s: %s", function, last_text.c_str());
                } else {
                    failed++;
                    CHECK_MSG(result == AMP_ERR_DEVICE, "call %d of %s failed: result %d", n, function, (int)result);
                    CHECK_MSG(last_text.find("cudaErrorUnknown") != std::string::npos && last_text.find(function) != std::string::npos,
                              "call %d of %s: %s", n, function, last_text.c_str());
                }
            }
            pending = coc_fail_pending();
            nothing_left(function, n);
        }
        CHECK_MSG(failed > 0, "%s is never called", function);
    }
}

TEST(host_memory_may_fail) {
    coc_reset();
    for (int n = 1; n < 40; n++) {
        amp_result result;
        host_fail_alloc = n;
        {
            session s;
            result = s.run();
        }
        if (host_fail_alloc > 0) {
            host_fail_alloc = 0;
            CHECK_EQ(result, AMP_OK);
            CHECK(n > 3);
            nothing_left("host_alloc", n);
            return;
        }
        CHECK_EQ(result, AMP_ERR_MEMORY);
        nothing_left("host_alloc", n);
    }
    CHECK(0);
}

/* An error that lasts is reported with its name and logged once; then every call fails, and says why. */
TEST(sticky_error) {
    coc_reset();
    host_logs = 0;
    {
        side x(amp_cuda());
        std::vector<float> v(64, 1.0f);
        float *p = x.up(v);
        void *ptr = NULL;
        amp_k_cast k;
        memset(&k, 0, sizeof k);
        k.dst = p;
        k.src = p;
        k.dst_dtype = AMP_TF32;
        k.src_dtype = AMP_F32;
        k.n = 64;
        coc_fail("cudaStreamSynchronize", 1, cudaErrorIllegalAddress, 1);
        CHECK_EQ(x.b->cast(x.dev, &k, NULL), AMP_OK);
        CHECK_EQ(x.b->stream_sync(x.dev, NULL), AMP_ERR_DEVICE);
        CHECK(last_text.find("cudaErrorIllegalAddress") != std::string::npos);
        CHECK(last_text.find("cudaStreamSynchronize") != std::string::npos);
        CHECK_EQ(host_logs, 1);
        coc_reset_counts();
        CHECK_EQ(x.b->cast(x.dev, &k, NULL), AMP_ERR_DEVICE);
        CHECK(last_text.find("failed earlier with cudaErrorIllegalAddress") != std::string::npos);
        CHECK_EQ(x.b->alloc(x.dev, &ptr, 100000), AMP_ERR_DEVICE);
        CHECK_EQ(x.b->copy(x.dev, v.data(), p, 256, AMP_COPY_TO_HOST, NULL), AMP_ERR_DEVICE);
        CHECK_EQ(x.b->graph_begin(x.dev, NULL), AMP_ERR_DEVICE);
        CHECK_EQ(host_logs, 1);
        CHECK_EQ(coc_count().calls, 0);         /* CUDA is left alone */
    }
    CHECK_EQ(host_blocks, 0);
    coc_fail_clear();
    coc_reset();
}

/* A kernel that really goes wrong: the fault shows at the next wait. */
TEST(kernel_fault) {
#if defined(__SANITIZE_ADDRESS__)
    SKIP("AddressSanitizer ends the program at the read beyond the end");
#endif
    if (!CUDA_IS_MODEL) SKIP("a fault on a GPU is for compute-sanitizer to find");
    coc_reset();
    {
        side x(amp_cuda());
        std::vector<float> v(64, 1.0f);
        float *p = x.up(v), *q = x.up(v);
        amp_k_cast k;
        amp_result first;
        memset(&k, 0, sizeof k);
        k.dst = p;
        k.src = q;
        k.dst_dtype = AMP_BF16;
        k.src_dtype = AMP_F32;
        k.n = 64 + 4096;                        /* runs past the end */
        first = x.b->cast(x.dev, &k, NULL);
        if (first == AMP_OK) first = x.b->stream_sync(x.dev, NULL);
        (void)first;
        coc_check_red_zones();
        CHECK(coc_faults() > 0);
        (void)coc_take_faults();
    }
    coc_reset();
}

/* ---- The step through amp.h: no wait, no allocation, the CPU backend's bits */

struct training {
    amp_context *amp = NULL;
    amp_optimizer *optimizer = NULL;
    amp_scaler *scaler = NULL;
    std::vector<amp_param> params;
    std::vector<void *> memory;
    std::vector<bytes> grads;

    void *device(const bytes &data) {
        void *p = NULL;
        CHECK_OK(amp_alloc(amp, &p, (int64_t)data.size()));
        CHECK_OK(amp_copy(amp, p, data.data(), (int64_t)data.size(), AMP_COPY_TO_DEVICE));
        memory.push_back(p);
        return p;
    }
    void open(const amp_backend *backend) {
        static const int64_t counts[] = {700, 8200, 3, 16384};
        static const amp_dtype weights[] = {AMP_F32, AMP_F16, AMP_F16, AMP_F32}, gradients[] = {AMP_F32, AMP_F16, AMP_F32, AMP_F32};
        static const char *const names[] = {"a", "b", "c", "d"};
        amp_desc d;
        amp_scaler_desc s;
        amp_optimizer_desc o;
        memset(&d, 0, sizeof d);
        d.backend = backend;
        d.dtype = AMP_F16;
        d.threads = 1;
        d.allow_fallback = 1;
        CHECK_OK(amp_open(&amp, &d));
        params.resize(4);
        random_state = 99;
        for (int i = 0; i < 4; i++) {
            memset(&params[(size_t)i], 0, sizeof params[0]);
            params[(size_t)i].name = names[i];
            params[(size_t)i].weight = amp_tensor1(device(numbers(weights[i], counts[i])), weights[i], counts[i]);
            grads.push_back(numbers(gradients[i], counts[i], 0.01f));
            params[(size_t)i].grad = amp_tensor1(device(grads.back()), gradients[i], counts[i]);
        }
        CHECK_OK(amp_param_register(amp, params.data(), 4));
        memset(&s, 0, sizeof s);
        s.init_scale = 1024;
        s.growth_interval = 3;
        CHECK_OK(amp_scaler_create(amp, &scaler, &s));
        memset(&o, 0, sizeof o);
        o.params = params.data();
        o.n_params = 4;
        o.lr = 1e-2;
        CHECK_OK(amp_optimizer_create(amp, &optimizer, &o));
        CHECK_OK(amp_sync(amp));
    }
    void step(int poison) {
        float infinite = INFINITY;
        if (poison) CHECK_OK(amp_copy(amp, (char *)params[3].grad.data + 400, &infinite, 4, AMP_COPY_TO_DEVICE));
        else CHECK_OK(amp_fill(amp, (char *)params[3].grad.data + 400, 0, 4));
        for (amp_param &p : params) p.grad_live = 1;
        CHECK_OK(amp_step(optimizer, scaler));
    }
    void close() {
        amp_optimizer_destroy(optimizer);
        amp_scaler_destroy(scaler);
        for (void *p : memory) amp_free(amp, p);
        amp_close(amp);
    }
};

TEST(steady_step) {
    NEEDS_FMA();
    training runs[2];
    std::vector<amp_step_result> outcomes[2];
    std::vector<bytes> weights[2];
    coc_reset();
    coc_set_patience(0);
    for (int r = 0; r < 2; r++) {
        training &t = runs[r];
        t.open(r ? amp_cuda() : amp_cpu());
        for (int i = 0; i < 12; i++) {
            amp_step_result o;
            if (i == 3) coc_reset_counts();
            if (CUDA_IS_MODEL && i == 8 && r) {             /* the five clean steps 3 to 7 */
                coc_counts c = coc_count();
                CHECK_MSG(c.synchronising == 0, "%s", coc_synchronising_calls().c_str());
                CHECK_EQ(c.allocations, 0);
                CHECK_EQ(c.frees, 0);
                CHECK_EQ(c.launches, 5 * 8);    /* begin, 2 of the check, checked, stepped, 2 of AdamW, update */
                CHECK_EQ(c.copies, 5);          /* outcomes */
            }
            t.step(i == 9);
            while (amp_step_result_next(t.optimizer, &o)) outcomes[r].push_back(o);
        }
        CHECK_EQ((int)outcomes[r].size(), 10);  /* the last two are not due */
        CHECK_OK(amp_step_result_flush(t.optimizer));
        for (amp_step_result o; amp_step_result_next(t.optimizer, &o);) outcomes[r].push_back(o);
        for (amp_param &p : t.params) {
            bytes w((size_t)amp_tensor_count(&p.weight) * amp_dtype_size(p.weight.dtype));
            CHECK_OK(amp_copy(t.amp, w.data(), p.weight.data, (int64_t)w.size(), AMP_COPY_TO_HOST));
            CHECK_OK(amp_sync(t.amp));
            weights[r].push_back(w);
        }
    }
    CHECK(outcomes[0].size() == 12 && outcomes[1].size() == 12);
    for (size_t i = 0; i < outcomes[0].size() && i < outcomes[1].size(); i++) {
        const amp_step_result &a = outcomes[0][i], &b = outcomes[1][i];
        CHECK(a.step == b.step && a.applied == b.applied && a.scale == b.scale && a.lr == b.lr);
        CHECK(a.total_skips == b.total_skips && a.applied_steps == b.applied_steps);
        CHECK((a.first_bad == NULL) == (b.first_bad == NULL) && (a.first_bad == NULL || strcmp(a.first_bad, b.first_bad) == 0));
        if (a.applied) CHECK(fabsf(a.norm - b.norm) <= ldexpf(a.norm, -23));
        CHECK_EQ(a.applied, i != 9);
    }
    for (int i = 0; i < 4; i++) CHECK_MSG(weights[0][(size_t)i] == weights[1][(size_t)i], "parameter %d", i);
    for (training &t : runs) t.close();
    coc_alive alive = coc_living();
    CHECK(alive.allocations + alive.pinned + alive.streams + alive.events == 0);
    CHECK_MSG(coc_faults() == 0, "%s", coc_fault_text().c_str());
    coc_set_patience(1);
    coc_reset();
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(open_and_describe);
    RUN(several_contexts);
    RUN(no_context_elsewhere);
    RUN(host_stream);
    RUN(arena);
    RUN(arena_full);
    RUN(callbacks);
    RUN(crooked_memory_is_refused);
    RUN(streams_and_events);
    RUN(casts);
    RUN(casts_stochastic);
    RUN(casts_to_e4m3);
    RUN(casts_many_patterns);
    RUN(casts_ids_and_refusals);
    RUN(adamw_bits);
    RUN(adamw_decay_rounds_twice);
    RUN(sgd_bits);
    RUN(lion_bits);
    RUN(lion_decay_rounds_twice);
    RUN(sgd_without_decay_leaves_infinity);
    RUN(storage_bits);
    RUN(scale_bits);
    RUN(checks);
    RUN_PLAIN(check_of_extremes);
    RUN(checks_find_each);
    RUN(rules);
    RUN(rules_of_rows);
    RUN(column_sums);
    RUN(products);
    RUN(beyond_31_bits);
    RUN(orders);
    RUN(grids);
    RUN(graph_replays);
    RUN(host_captures);
    RUN(branches_of_a_capture);
    RUN(captures_without_user_objects);
    RUN(captures_that_cannot_be_seen);
    RUN(graph_outlives_its_stream);
    RUN(streams_of_one_handle);
    RUN(wait_for_a_handle_fails);
    RUN(memory_of_destroyed_streams);
    RUN(graph_misuse);
    RUN(captures_left_open);
    RUN(images);
    RUN(every_call_may_fail);
    RUN(host_memory_may_fail);
    RUN(sticky_error);
    RUN(kernel_fault);
    RUN(steady_step);
    return TEST_END();
}
