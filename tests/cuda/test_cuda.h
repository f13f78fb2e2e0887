/* test_cuda.h - the harness of the tests of amp_cuda.cu, on the model GPU (coc.h) or on a real one
 * (tests/gpu/on_gpu/coc.h).
 *
 *     CUDA_TEST(cast_rounds) {
 *         cuda_compare c = cuda_on_both([&](cuda_side &s, std::string *out) {
 *             amp_k_cast a = {};
 *             a.src = s.put(input), a.src_dtype = AMP_F32, a.dst = s.room(2 * n), a.dst_dtype = AMP_BF16, a.n = n;
 *             CHECK_OK(s.backend->cast(s.dev, &a, NULL));
 *             s.get(out, a.dst, 2 * n);
 *         });
 *         c.check_same_bits();
 *     }
 *     int main(int argc, char **argv) { TEST_BEGIN(argc, argv); RUN(cast_rounds); return TEST_END(); }
 *
 * The lambda runs once on the CPU backend.  On the model, it runs under every order of threads, blocks and streams.  At the
 * end of a CUDA_TEST, no object of the runtime may be left and no fault may have been seen. */
#ifndef AMPT_TEST_CUDA_H
#define AMPT_TEST_CUDA_H

#include "coc.h"
#include <functional>
#include <math.h>
#include <sys/mman.h>
#include <string>
#include <vector>
#include "amp.h"
#include "../test.h"


/* ---- Tests after which no object of the runtime is left */

static inline void cuda_test_end() {
    coc_check_red_zones();
    std::string faults = coc_take_faults();
    CHECK_MSG(faults.empty(), "%s", faults.c_str());
    coc_alive left = coc_living();
    long sum = left.allocations + left.pinned + left.streams + left.events + left.graphs + left.graph_execs + left.blas_objects;
    CHECK_MSG(sum == 0, "left: %ld allocations, %ld pinned, %ld streams, %ld events, %ld + %ld graphs, %ld of cuBLASLt",
              left.allocations, left.pinned, left.streams, left.events, left.graphs, left.graph_execs, left.blas_objects);
    coc_reset();
}
#define CUDA_TEST(name) \
    static void cuda_test_##name(); \
    TEST(name) { coc_reset(); cuda_test_##name(); cuda_test_end(); } \
    static void cuda_test_##name()

/* Opens a context on amp_cuda().  desc may be NULL. */
static inline amp_context *cuda_context(const amp_desc *desc = NULL) {
    amp_desc d = {};
    amp_context *amp = NULL;
    if (desc) d = *desc;
    d.backend = amp_cuda();
    CHECK_OK(amp_open(&amp, &d));
    return amp;
}

/* Whether attention is tested on the kernels for Hopper (t_cuda_hopper.cpp). */
static inline int &cuda_wgmma() { static int on; return on; }

/* ---- One side of a comparison: the kernels of a backend, without a context around them */

static inline char *cuda_error_text() { static char text[1024]; return text; }
static inline amp_result cuda_host_fail(void *, amp_result result, const char *text) {
    snprintf(cuda_error_text(), 1024, "%s", text);
    return result;
}
static inline void cuda_host_log(void *, amp_log_level, int, const char *) {}
static inline void *cuda_host_alloc(void *, size_t size, size_t align) {
    void *p = NULL;
    return posix_memalign(&p, align < sizeof(void *) ? sizeof(void *) : align, size) == 0 ? p : NULL;
}
static inline void cuda_host_free(void *, void *p, size_t) { free(p); }
static inline const amp_host *cuda_host() {
    static const amp_host host = {NULL, cuda_host_fail, cuda_host_log, cuda_host_alloc, cuda_host_free, NULL};
    return &host;
}

enum { CUDA_SPARSE_FROM = 64 << 20 };       /* bytes from which memory is not backed until it is touched */

struct cuda_side {
    const amp_backend *backend;
    void *dev = NULL;
    bool gpu;
    struct piece { unsigned char *base; size_t offset, bytes; bool sparse; };
    std::vector<piece> pieces;

    cuda_side(const amp_backend *b, const amp_backend_desc &d, const amp_host *host = cuda_host())
        : backend(b), gpu(b == amp_cuda()) {
        CHECK(backend->open(&dev, host, &d) == AMP_OK);
    }
    explicit cuda_side(const amp_backend *b, const amp_device_memory *memory = NULL, amp_cpu_path path = AMP_CPU_DEFAULT)
        : cuda_side(b, desc_of(memory, path)) {}
    cuda_side(const cuda_side &) = delete;
    cuda_side &operator=(const cuda_side &) = delete;
    ~cuda_side() {
        sync();
        for (const piece &p : pieces) release(p);
        if (dev) backend->close(dev);
    }
    void sync() { CHECK(dev && backend->stream_sync(dev, NULL) == AMP_OK); }

    /* `bytes` of this side's memory, 0xFF throughout (zero when sparse), `offset` bytes behind an aligned address: the
       bytes around it must stay as they are. */
    void *room(size_t bytes, size_t offset = 0) {
        piece p = {NULL, offset, bytes, bytes >= CUDA_SPARSE_FROM};
        size_t all = bytes + offset + (bytes + offset == 0);
        if (p.sparse && gpu) p.base = (unsigned char *)coc_sparse_alloc(all);
        else if (p.sparse) p.base = (unsigned char *)map(all);
        else if (!gpu) p.base = (unsigned char *)cuda_host_alloc(NULL, all, 256);
        else if (cudaMalloc((void **)&p.base, all) != cudaSuccess) p.base = NULL;
        CHECK_MSG(p.base != NULL, "no memory for %zu bytes", all);
        if (p.base == NULL) return NULL;
        pieces.push_back(p);
        if (!p.sparse) fill(p.base, all);
        return p.base + offset;
    }
    /* Memory that holds these bytes. */
    void *put(const void *host, size_t bytes, size_t offset = 0) {
        void *mine = room(bytes, offset);
        if (mine && bytes) set(mine, host, bytes);
        return mine;
    }
    template <class T> T *put(const std::vector<T> &host, size_t offset = 0) {
        return (T *)put(host.data(), host.size() * sizeof(T), offset);
    }
    void set(void *mine, const void *host, size_t bytes) {
        if (gpu) CHECK(cudaMemcpy(mine, host, bytes, cudaMemcpyHostToDevice) == cudaSuccess && cudaStreamSynchronize(0) == cudaSuccess);
        else memcpy(mine, host, bytes);
    }
    void read(void *host, const void *mine, size_t bytes) {
        sync();
        if (bytes == 0) return;
        if (gpu) CHECK(cudaMemcpy(host, mine, bytes, cudaMemcpyDeviceToHost) == cudaSuccess);
        else memcpy(host, mine, bytes);
    }
    /* Appends the bytes to `out`. */
    void get(std::string *out, const void *mine, size_t bytes) {
        size_t at = out->size();
        out->resize(at + bytes);
        read(&(*out)[at], mine, bytes);
    }

    /* A matrix of rows x cols, ld elements apart, from dense rows (NULL: 0xFF). */
    amp_mat put_matrix(const void *dense, amp_dtype dtype, int64_t rows, int64_t cols, int64_t ld, size_t offset = 0) {
        size_t size = amp_dtype_size(dtype), row = (size_t)cols * size;
        amp_mat m = {NULL, dtype, 0, rows, cols, ld};
        m.data = room(rows ? ((size_t)(rows - 1) * (size_t)ld + (size_t)cols) * size : 0, offset);
        for (int64_t i = 0; dense && m.data && i < rows && row; i++)
            set((char *)m.data + (size_t)i * (size_t)ld * size, (const char *)dense + (size_t)i * row, row);
        return m;
    }
    /* Appends the dense rows; what lies between them must still be 0xFF. */
    void get_matrix(std::string *out, const amp_mat &m) {
        size_t size = amp_dtype_size(m.dtype), row = (size_t)m.cols * size, gap = (size_t)(m.ld - m.cols) * size;
        std::string between;
        for (int64_t i = 0; i < m.rows; i++) {
            const char *at = (const char *)m.data + (size_t)i * (size_t)m.ld * size;
            get(out, at, row);
            if (gap && gap < CUDA_SPARSE_FROM && i + 1 < m.rows) get(&between, at + row, gap);
        }
        CHECK_MSG(between == std::string(between.size(), '\xff'), "written between the rows of a matrix");
    }

private:
    static amp_backend_desc desc_of(const amp_device_memory *memory, amp_cpu_path path) {
        amp_backend_desc d = {};
        d.threads = 1;
        d.cpu_path = path;
        d.wgmma = cuda_wgmma();
        if (memory) d.memory = *memory;
        return d;
    }
    static void *map(size_t bytes) {
        void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        return p == MAP_FAILED ? NULL : p;
    }
    void fill(unsigned char *p, size_t bytes) {
        if (gpu) CHECK(cudaMemset(p, 0xFF, bytes) == cudaSuccess && cudaStreamSynchronize(0) == cudaSuccess);
        else memset(p, 0xFF, bytes);
    }
    void release(const piece &p) {
        std::string before(p.offset, '\xff'), now(p.offset, 0);
        if (!p.sparse && p.offset) {
            if (gpu) CHECK(cudaMemcpy(&now[0], p.base, p.offset, cudaMemcpyDeviceToHost) == cudaSuccess);
            else memcpy(&now[0], p.base, p.offset);
            CHECK_MSG(now == before, "written before the start of an array");
        }
        if (gpu) CHECK(cudaFree(p.base) == cudaSuccess);
        else if (p.sparse) munmap(p.base, p.bytes + p.offset);
        else free(p.base);
    }
};

/* ---- Numbers */

static inline double cuda_value(const void *data, amp_dtype dtype, size_t i) {
    const unsigned char *p = (const unsigned char *)data + i * amp_dtype_size(dtype);
    float f; double d; uint16_t h; int32_t n; int64_t l;
    switch (dtype) {
        case AMP_F64: memcpy(&d, p, 8); return d;
        case AMP_F16: memcpy(&h, p, 2); return amp_f32_from_f16(h);
        case AMP_BF16: memcpy(&h, p, 2); return amp_f32_from_bf16(h);
        case AMP_U16: memcpy(&h, p, 2); return h;
        case AMP_I32: memcpy(&n, p, 4); return n;
        case AMP_I64: memcpy(&l, p, 8); return (double)l;
        case AMP_U8: return *p;
        default: memcpy(&f, p, 4); return f;
    }
}

/* Values in storage: fp32 values rounded to dtype. */
static inline std::string cuda_stored(const std::vector<float> &values, amp_dtype dtype) {
    std::string out(values.size() * amp_dtype_size(dtype), 0);
    for (size_t i = 0; i < values.size(); i++) {
        double d = values[i];
        uint16_t h = dtype == AMP_F16 ? amp_f16_from_f32(values[i], 0) : amp_bf16_from_f32(values[i], 0);
        if (dtype == AMP_F64) memcpy(&out[8 * i], &d, 8);
        else if (dtype == AMP_F32) memcpy(&out[4 * i], &values[i], 4);
        else memcpy(&out[2 * i], &h, 2);
    }
    return out;
}

/* n numbers in [low, high). */
static inline std::vector<float> cuda_random(int64_t n, uint64_t seed, float low = -1, float high = 1) {
    std::vector<float> values((size_t)n);
    for (size_t i = 0; i < values.size(); i++) values[i] = low + (high - low) * amp_random_uniform(seed, i);
    return values;
}

/* Bounds.  Two results that would be at most d apart without rounding to storage are at most
   d + cuda_spacing(dtype, value) apart in storage: the distance of neighbouring numbers there. */
static inline double cuda_spacing(amp_dtype dtype, double value) {
    int bits = dtype == AMP_F16 ? 10 : dtype == AMP_BF16 ? 7 : dtype == AMP_F64 ? 52 : 23;
    int lowest = dtype == AMP_F16 ? -14 : dtype == AMP_F64 ? -1022 : -126;
    int exponent = value == 0 || !isfinite(value) ? lowest : ilogb(value);
    return ldexp(1, (exponent < lowest ? lowest : exponent) - bits);
}
/* Two sums of n fp32 terms in different orders, sum of magnitudes given: each is off by at most (n - 1) u / (1 - n u)
   of it, u = 2^-24 (Higham, Accuracy and Stability, 4.2). */
static inline double cuda_sum_bound(int64_t n, double magnitudes) {
    double nu = (double)(n > 1 ? n - 1 : 0) * ldexp(1, -24);
    return 2 * nu / (1 - nu) * magnitudes;
}

/* ---- Comparing */

struct cuda_compare {
    std::string expected, actual;       /* the results of the CPU and of the GPU */
    std::string orders;                 /* "" or how two orders differed */
    void check_orders() const { CHECK_MSG(orders.empty(), "%s", orders.c_str()); }
    void check_same_bits() const {
        check_orders();
        CHECK_EQ(actual.size(), expected.size());
        size_t at = 0;
        while (at < actual.size() && at < expected.size() && actual[at] == expected[at]) at++;
        CHECK_MSG(actual == expected, "byte %zu of %zu differs from the CPU's", at, expected.size());
    }
    /* Element i of [from, from + n) bytes-wise at `offset`: |actual - expected| <= bound(i, expected); NaN equals NaN,
       infinities equal themselves.  Returns the offset of the byte behind, for the next array. */
    size_t check_within(size_t offset, amp_dtype dtype, int64_t n, const std::function<double(int64_t, double)> &bound,
                        const char *what = "result") const {
        size_t size = amp_dtype_size(dtype), end = offset + (size_t)n * size;
        check_orders();
        CHECK_MSG(end <= expected.size() && end <= actual.size(), "%s: %zu bytes expected", what, end);
        if (end > expected.size() || end > actual.size()) return end;
        int64_t wrong = 0, first = -1;
        for (int64_t i = 0; i < n; i++) {
            double a = cuda_value(&actual[offset], dtype, (size_t)i);
            double e = cuda_value(&expected[offset], dtype, (size_t)i);
            bool same = a == e || (a != a && e != e);
            if (same || fabs(a - e) <= bound(i, e)) continue;
            if (wrong++ == 0) first = i;
        }
        double a = first < 0 ? 0 : cuda_value(&actual[offset], dtype, (size_t)first);
        double e = first < 0 ? 0 : cuda_value(&expected[offset], dtype, (size_t)first);
        CHECK_MSG(wrong == 0, "%s: %lld of %lld beyond their bound, first %lld: %.9g, the CPU has %.9g, bound %.3g",
                  what, (long long)wrong, (long long)n, (long long)first, a, e, first < 0 ? 0 : bound(first, e));
        return end;
    }
};

typedef std::function<void(cuda_side &, std::string *)> cuda_work;

static inline cuda_compare cuda_on_both(const cuda_work &work) {
    cuda_compare c;
    cuda_side cpu(amp_cpu());
    work(cpu, &c.expected);
    c.orders = coc_every_order([&](std::string *results) {
        cuda_side gpu(amp_cuda());
        work(gpu, results);
        c.actual = *results;
    });
    return c;
}

/* Memory for the kernels of a GPU, filled with the byte that user points to. */
static inline void *cuda_filled_alloc(void *user, size_t bytes, int32_t, void *) {
    void *p = NULL;
    if (cudaMalloc(&p, bytes) != cudaSuccess) return NULL;
    CHECK(cudaMemset(p, *(const int *)user, bytes) == cudaSuccess && cudaStreamSynchronize(0) == cudaSuccess);
    return p;
}
static inline void cuda_filled_free(void *, void *p, size_t, int32_t, void *) { CHECK(cudaFree(p) == cudaSuccess); }

/* For the ends of long arrays.  They run in one order, because other tests compare orders.  `left` is the byte that blocks
   which do not run leave in the kernels' own memory. */
static inline cuda_compare cuda_once_on_both(const cuda_work &work, int left = 0, amp_cpu_path path = AMP_CPU_DEFAULT) {
    const amp_device_memory memory = {&left, cuda_filled_alloc, cuda_filled_free};
    cuda_compare c;
    cuda_side cpu(amp_cpu(), NULL, path), gpu(amp_cuda(), &memory);
    work(cpu, &c.expected);
    work(gpu, &c.actual);
    return c;
}

/* ---- The table of shapes: every kernel over rows x cols (or their product) elements goes through all of them. */

struct cuda_shape {
    int64_t rows, cols;
    int64_t pad;                /* elements between rows */
    int64_t offset;             /* elements that the start is behind an aligned address */
    const char *name;
    int64_t before = 0;         /* elements ahead of these in the GPU's memory, zeros: for kernels that take no ld */
    int64_t ld() const { return cols + pad; }
    int64_t count() const { return rows * cols; }
};
static const cuda_shape cuda_shapes[] = {
    {1, 1, 0, 0, "one element"},        {1, 7, 0, 0, "one odd row"},        {5, 1, 0, 0, "one column"},
    {0, 8, 0, 0, "no rows"},            {3, 8, 0, 0, "small"},              {2, 33, 0, 0, "a warp and one"},
    {3, 127, 0, 0, "odd"},              {3, 128, 0, 0, "aligned"},          {3, 128, 8, 0, "aligned, padded"},
    {3, 128, 3, 0, "rows unaligned"},   {2, 257, 0, 1, "start unaligned"},  {2, 256, 0, 3, "even, start unaligned"},
    {1, 1000, 0, 0, "one row"},         {70, 24, 0, 0, "many short rows"},  {2, 1536, 0, 0, "long"},
    {1, 4099, 0, 0, "longer, odd"},     {9, 768, 0, 0, "more rows than the grid"},
};
/* Element (2, 0) is 2^31 + 2 pad elements behind (0, 0).  Memory is sparse, so this is only for kernels that take ld. */
static const cuda_shape cuda_far_shape = {3, 40, ((int64_t)1 << 30) + 8 - 40, 0, "beyond 2^31 elements"};
/* The last elements of more than 2^32, so that signed and unsigned indices of 32 bits would both be wrong. */
static const cuda_shape cuda_far_ends[] = {
    {5, 1024, 0, 0, "beyond 2^32 elements", (int64_t)1 << 32}, {5, 1024, 0, 1, "beyond 2^32, unaligned", (int64_t)1 << 32},
};

#endif
