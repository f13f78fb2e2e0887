/* bench_sums.c - measures error and time of long sums: of columns, of gradients over rows, along rows, and of products over
 * k.
 *
 *     cc -std=c99 -D_GNU_SOURCE -O2 -fopenmp -o bench_sums tests/bench/bench_sums.c -lm -lpthread
 *     ./bench_sums [--case NAME] [--threads N] [--path N] [--repeats N]
 *
 * It can be compared with another amp.h in one process and on the same buffers.  A few calls of each run in turn (A B B A).
 * What a backward reads from its forward is computed by this amp.h:
 *
 *     cc ... -DSUMS_BESIDE -c -o beside.o OTHER/tests/bench/bench_sums.c     # this file, in the tree of the other amp.h
 *     cc ... -DSUMS_PAIR -o bench_sums tests/bench/bench_sums.c beside.o -lm -lpthread
 *
 * The error is |result - exact| / |exact| over all results, in units of 2^-24.  exact is the sum in fp64 of the same fp32
 * numbers, which are uniform in [-1, 1).  The time is the least of the repeated calls.  tests/bench/sums.py compares this
 * program with the same program with another amp.h, and with PyTorch on the same numbers. */
#define AMP_IMPLEMENTATION
#if defined(SUMS_BESIDE)
#  define AMP_STATIC
#  define SUMS_SHARED extern        /* the buffers are the other's */
#elif defined(SUMS_PAIR)
#  define AMP_STATIC
#  define SUMS_SHARED
#else
#  define SUMS_SHARED static
#endif
#include "../../amp.h"
#include "bench.h"

#include <math.h>

typedef struct sums_case {
    const char *name;
    int64_t rows, cols;             /* numbers that one sum is over, and sums */
    int timed;                      /* 0: for its error alone */
} sums_case;

/* The sizes in tests/bench/sums.py are these. */
static const sums_case cases[] = {
    {"columns", 1000, 16, 0}, {"columns", 10000, 16, 0}, {"columns", 400000, 16, 1},
    {"columns", 256, 768, 1}, {"columns", 2048, 3072, 1}, {"columns", 16384, 768, 1},
    {"columns_bf16", 256, 768, 1}, {"columns_bf16", 2048, 3072, 1}, {"columns_bf16", 400000, 16, 1},
    {"positions", 1000, 16, 0}, {"positions", 10000, 16, 0}, {"positions", 400000, 16, 1}, {"positions", 8, 98304, 1}, {"positions", 64, 49152, 1},
    {"table", 1000, 16, 0}, {"table", 10000, 16, 0}, {"table", 400000, 16, 1}, {"table", 2, 393216, 1}, {"table", 64, 49152, 1},
    {"norm", 1000, 16, 0}, {"norm", 10000, 16, 0}, {"norm", 400000, 16, 1}, {"norm", 1024, 768, 1}, {"norm", 8192, 768, 1},
    {"softmax", 1000, 64, 1}, {"softmax", 10000, 64, 1}, {"softmax", 400000, 4, 1},
    {"softmax_backward", 1000, 64, 1}, {"softmax_backward", 10000, 64, 1}, {"softmax_backward", 400000, 4, 1},
    {"row_times_matrix", 1000, 64, 1}, {"row_times_matrix", 4096, 1024, 1}, {"row_times_matrix", 400000, 64, 1},
    {"matrix_times_column", 1000, 64, 1}, {"matrix_times_column", 4096, 1024, 1}, {"matrix_times_column", 400000, 64, 1},
    {"product", 256, 256, 1}, {"product", 512, 512, 1}, {"product", 1024, 512, 1}, {"product", 2048, 256, 1},
    {"product", 4096, 256, 1}, {"product", 16384, 64, 1}, {"product", 400000, 64, 1},
    {"product_nt", 768, 768, 1}, {"product_tn", 1024, 768, 1},
    {"attention_keys", 1024, 64, 1}, {"attention_keys", 16384, 64, 1},
    {"attention_queries", 1024, 64, 1}, {"attention_queries", 16384, 64, 1},
};
enum { CASES = sizeof cases / sizeof *cases, POSITIONS = 2, KEYS = 64 };

static ampi_cpu cpu;
SUMS_SHARED const sums_case *now_case;
SUMS_SHARED float *x, *w, *y, *y2, *aux;
SUMS_SHARED uint16_t *half;
SUMS_SHARED int32_t *ids, bad;
static double *exact;

static void *bench_host_alloc(void *user, size_t bytes, size_t align) { (void)user; (void)align; return bench_memory(bytes); }
static void bench_host_free(void *user, void *p, size_t bytes) { (void)user; (void)bytes; free(p); }

/* n numbers uniform in [-1, 1), number i of the stream `seed` */
static float *numbers(uint64_t seed, int64_t n) {
    float *to = (float *)bench_memory((size_t)n * sizeof *to);
    uint32_t room[1024];
    int64_t i, j, m;
    for (i = 0; i < n; i += m) {
        m = AMPI_MIN(n - i, (int64_t)1024);
        AMPI_PICK(ampi_numbers_kernels, cpu.path)->random(room, m, seed, (uint64_t)i);
        for (j = 0; j < m; j++) to[i + j] = ((float)(room[j] >> 8) - 8388608.0f) * (1.0f / 8388608.0f);
    }
    return to;
}

static int is(const char *name) { return strcmp(now_case->name, name) == 0; }
static int begins(const char *name) { return strncmp(now_case->name, name, strlen(name)) == 0; }

static amp_mat mat(void *data, int64_t rows, int64_t cols) {
    amp_mat m;
    memset(&m, 0, sizeof m);
    m.data = data; m.dtype = AMP_F32; m.rows = rows; m.cols = m.ld = cols;
    return m;
}

/* The results, how many there are, and what they should be. */
static int64_t results(void) {
    if (begins("softmax")) return now_case->rows * now_case->cols;
    if (begins("product")) return now_case->cols * now_case->cols;
    if (begins("attention")) return KEYS * now_case->cols;
    return now_case->cols;
}

/* Sums of columns `to` (doubles), rows * cols numbers. */
static void exact_columns(const float *from, const float *factor, double *to) {
    int64_t i, j, rows = now_case->rows, cols = now_case->cols;
    for (j = 0; j < cols; j++) to[j] = 0;
    for (i = 0; i < rows; i++)
        for (j = 0; j < cols; j++) to[j] += (double)from[i * cols + j] * (factor != NULL ? (double)factor[i] : 1.0);
}

static void exact_softmax(void) {
    int64_t i, j, n = now_case->rows;
    for (i = 0; i < now_case->cols; i++) {
        double sum = 0, dot = 0;
        for (j = 0; j < n; j++) sum += exp((double)x[i * n + j]);
        for (j = 0; j < n; j++) dot += exp((double)x[i * n + j]) / sum * (double)w[i * n + j];
        for (j = 0; j < n; j++) {
            double p = exp((double)x[i * n + j]) / sum;
            exact[i * n + j] = is("softmax") ? p : p * ((double)w[i * n + j] - dot);
        }
    }
}

static void exact_product(void) {
    int64_t n = now_case->cols, k = now_case->rows, i, j, p;
    int ta = is("product_tn"), tb = is("product_nt");
    for (i = 0; i < n * n; i++) exact[i] = 0;
    for (p = 0; p < k; p++)
        for (i = 0; i < n; i++) {
            double a = (double)x[ta ? p * n + i : i * k + p];
            for (j = 0; j < n; j++) exact[i * n + j] += a * (double)w[tb ? j * k + p : p * n + j];
        }
}

/* ---- Attention of one head: KEYS queries over many keys, or many queries over KEYS keys and the gradients of those */

static void attention_args(amp_k_attention *a) {
    int64_t n = now_case->rows, dim = now_case->cols, queries = is("attention_keys") ? KEYS : n, keys = is("attention_keys") ? n : KEYS, i;
    int64_t *strides[8];
    memset(a, 0, sizeof *a);
    a->batch = a->heads = 1;
    a->queries = queries; a->keys = keys; a->dim = dim; a->scale = 0.125f;
    a->dtype = a->compute = AMP_F32;
    a->q = x; a->k = w; a->v = w + keys * dim; a->o = y; a->lse = aux;
    a->d_o = x + queries * dim; a->dq = y + queries * dim; a->dk = y2; a->dv = y2 + keys * dim;
    strides[0] = a->q_stride; strides[1] = a->k_stride; strides[2] = a->v_stride; strides[3] = a->o_stride;
    strides[4] = a->do_stride; strides[5] = a->dq_stride; strides[6] = a->dk_stride; strides[7] = a->dv_stride;
    for (i = 0; i < 8; i++) { strides[i][0] = 0; strides[i][1] = dim; strides[i][2] = 0; }
}

static double dot(const float *a, const float *b, int64_t n) {
    double sum = 0;
    int64_t i;
    for (i = 0; i < n; i++) sum += (double)a[i] * (double)b[i];
    return sum;
}

/* o of a few queries, or dv of a few keys. */
static void exact_attention(void) {
    amp_k_attention a;
    int64_t i, j, d;
    double *p;
    attention_args(&a);
    p = (double *)bench_memory((size_t)a.keys * sizeof *p);
    for (i = 0; i < KEYS * a.dim; i++) exact[i] = 0;
    for (i = 0; i < a.queries; i++) {
        double sum = 0;
        for (j = 0; j < a.keys; j++) sum += p[j] = exp(0.125 * dot(x + i * a.dim, w + j * a.dim, a.dim));
        for (j = 0; j < a.keys; j++)
            for (d = 0; d < a.dim; d++) {
                if (is("attention_keys")) exact[i * a.dim + d] += p[j] / sum * (double)w[(a.keys + j) * a.dim + d];
                else exact[j * a.dim + d] += p[j] / sum * (double)x[(a.queries + i) * a.dim + d];
            }
    }
    free(p);
}

/* ---- A case: its numbers, its call, its error */

static void prepare(void) {
    int64_t rows = now_case->rows, cols = now_case->cols, n = rows * cols, i;
    if (begins("attention")) n = 2 * AMPI_MAX(rows, (int64_t)KEYS) * cols;
    x = numbers(1, n);
    w = numbers(2, begins("norm") ? cols : begins("row") || begins("matrix") ? rows : n);
    y = (float *)bench_memory((size_t)AMPI_MAX(n, results()) * sizeof *y);
    y2 = (float *)bench_memory((size_t)AMPI_MAX(2 * KEYS * cols, results()) * sizeof *y2);
    aux = (float *)bench_memory((size_t)(2 * rows + KEYS) * sizeof *aux);
    half = (uint16_t *)bench_memory((size_t)n * sizeof *half);
    ids = (int32_t *)bench_memory((size_t)rows * POSITIONS * sizeof *ids);
    exact = (double *)bench_memory((size_t)results() * sizeof *exact);
    if (is("columns_bf16"))
        for (i = 0; i < n; i++) { half[i] = amp_bf16_from_f32(x[i], 0); x[i] = amp_f32_from_bf16(half[i]); }
    if (is("norm"))                 /* mean 0 and rstd 1 by hand, so that dweight is the sum of x dy and dbias that of dy */
        for (i = 0; i < rows; i++) { aux[i] = 0; aux[rows + i] = 1; }
    for (i = 0; i < rows * POSITIONS; i++) ids[i] = (int32_t)(i % POSITIONS);
    if (begins("softmax")) exact_softmax();
    else if (begins("product")) exact_product();
    else if (begins("attention")) exact_attention();
    else if (is("matrix_times_column")) for (i = 0; i < cols; i++) exact[i] = dot(x + i * rows, w, rows);
    else if (is("row_times_matrix")) exact_columns(x, w, exact);
    else exact_columns(x, NULL, exact);
}

static amp_result call_sums(void) {
    int64_t rows = now_case->rows, cols = now_case->cols;
    if (begins("columns")) {
        amp_k_column_sum s;
        memset(&s, 0, sizeof s);
        s.x = mat(is("columns") ? (void *)x : (void *)half, rows, cols);
        if (is("columns_bf16")) s.x.dtype = AMP_BF16;
        s.out = y2; s.out_dtype = AMP_F32;
        return ampi_cpu_column_sum(&cpu, &s, NULL);
    }
    if (is("positions") || is("table")) {           /* cols / POSITIONS columns, so that both have `cols` sums */
        amp_k_embedding e;
        memset(&e, 0, sizeof e);
        e.ids = ids; e.n = rows * POSITIONS; e.seq = is("positions") ? POSITIONS : rows * POSITIONS; e.bad_id = &bad;
        e.dy = mat(x, rows * POSITIONS, cols / POSITIONS);
        if (is("positions")) e.dpositions = mat(y2, POSITIONS, cols / POSITIONS);
        else e.dtable = mat(y2, POSITIONS, cols / POSITIONS);
        return ampi_cpu_embedding_backward(&cpu, &e, NULL);
    }
    if (is("norm")) {
        amp_k_norm k;
        memset(&k, 0, sizeof k);
        k.x = mat(x, rows, cols); k.dy = mat(x, rows, cols); k.dx = mat(y, rows, cols);
        k.weight = w; k.weight_dtype = AMP_F32; k.mean = aux; k.rstd = aux + rows;
        k.dbias.data = y2; k.dbias.dtype = AMP_F32;
        k.dweight.data = w; k.dweight.dtype = AMP_F32;
        return ampi_cpu_norm_backward(&cpu, &k, NULL);
    }
    if (begins("softmax")) {
        amp_k_softmax k;
        memset(&k, 0, sizeof k);
        k.batch = k.heads = 1; k.queries = cols; k.keys = rows; k.scale = 1; k.x_dtype = k.y_dtype = AMP_F32;
        k.x = x; k.y = y;
        if (is("softmax")) return ampi_cpu_softmax(&cpu, &k, NULL);
        k.dy = w; k.dx = y2;
        return ampi_cpu_softmax_backward(&cpu, &k, NULL);
    }
    if (begins("attention")) {
        amp_k_attention a;
        attention_args(&a);
        return is("attention_keys") ? ampi_cpu_attention(&cpu, &a, NULL) : ampi_cpu_attention_backward(&cpu, &a, NULL);
    }
    {
        amp_k_gemm g;
        int row = is("row_times_matrix"), column = is("matrix_times_column");
        memset(&g, 0, sizeof g);
        g.m = row ? 1 : cols; g.n = column ? 1 : cols; g.k = rows; g.batch = 1; g.alpha = 1; g.compute = AMP_F32;
        g.a = row ? w : x; g.b = row ? x : w; g.c = y2;
        g.a_dtype = g.b_dtype = g.c_dtype = AMP_F32;
        g.trans_a = is("product_tn"); g.trans_b = is("product_nt");
        g.lda = g.trans_a ? g.m : g.k; g.ldb = g.trans_b ? g.k : g.n; g.ldc = g.n;
        return ampi_cpu_gemm(&cpu, &g, NULL);
    }
}

/* What a backward reads of its forward. */
static void before_call(void) {
    amp_k_softmax k;
    amp_k_attention a;
    if (is("softmax_backward")) {
        memset(&k, 0, sizeof k);
        k.batch = k.heads = 1; k.queries = now_case->cols; k.keys = now_case->rows; k.scale = 1; k.x_dtype = k.y_dtype = AMP_F32;
        k.x = x; k.y = y;
        bench_need(ampi_cpu_softmax(&cpu, &k, NULL), "softmax");
    }
    if (is("attention_queries")) {
        attention_args(&a);
        bench_need(ampi_cpu_attention(&cpu, &a, NULL), "attention");
    }
}

static double error(void) {
    const float *got = is("softmax") || is("attention_keys") ? y : is("attention_queries") ? y2 + KEYS * now_case->cols : y2;
    double off = 0, own = 0;
    int64_t i;
    for (i = 0; i < results(); i++) {
        off += ((double)got[i] - exact[i]) * ((double)got[i] - exact[i]);
        own += exact[i] * exact[i];
    }
    return sqrt(off / own) * 16777216;
}

/* Seconds of one call, the mean of `calls`. */
static double seconds_of(amp_result (*call)(void), int64_t calls) {
    double start = bench_thread_seconds();
    int64_t c;
    for (c = 0; c < calls; c++) (void)call();
    return (bench_thread_seconds() - start) / (double)calls;
}

static void open_cpu(int64_t threads, int64_t path) {
    cpu.host.alloc = bench_host_alloc; cpu.host.free = bench_host_free;
    cpu.threads = (int)threads; cpu.path = (amp_cpu_path)path; cpu.pooled = 1;
    pthread_mutex_init(&cpu.lock, NULL);
}

#if defined(SUMS_BESIDE) || defined(SUMS_PAIR)
void sums_beside_open(int64_t threads, int64_t path);
amp_result sums_beside(void);
#endif

#if defined(SUMS_BESIDE)
void sums_beside_open(int64_t threads, int64_t path) { open_cpu(threads, path); }
amp_result sums_beside(void) { return call_sums(); }
#else

#if defined(SUMS_PAIR)
static int ascending(const void *a, const void *b) {
    double p = *(const double *)a, q = *(const double *)b;
    return p < q ? -1 : p > q;
}

/* Some 50 us of each in turn: the least and the median time of both, and the median of the ratios other / this. */
static void print_beside(int64_t repeats) {
    double *time = (double *)bench_memory(3 * (size_t)repeats * sizeof *time), *other = time + repeats, *ratio = other + repeats, one;
    int64_t r, calls;
    (void)sums_beside();
    one = seconds_of(call_sums, 1);
    calls = (int64_t)AMPI_MAX(1.0, 5e-5 / one);
    for (r = 0; r < repeats; r++) {
        if (r % 2) other[r] = seconds_of(sums_beside, calls);
        time[r] = seconds_of(call_sums, calls);
        if (r % 2 == 0) other[r] = seconds_of(sums_beside, calls);
        ratio[r] = other[r] / time[r];
    }
    qsort(time, (size_t)repeats, sizeof *time, ascending);
    qsort(other, (size_t)repeats, sizeof *other, ascending);
    qsort(ratio, (size_t)repeats, sizeof *ratio, ascending);
    printf(", \"seconds\": %.4g, \"seconds_base\": %.4g, \"least\": %.4g, \"least_base\": %.4g, \"speed\": %.3f, \"speed_of_least\": %.3f",
           time[repeats / 2], other[repeats / 2], time[0], other[0], ratio[repeats / 2], other[0] / time[0]);
    free(time);
}
#endif

int main(int argc, char **argv) {
    int64_t threads = 1, path = (int64_t)ampi_cpu_best_path(), repeats = 5, i, r, calls;
    const char *only = "";
    const bench_flag flags[] = {
        {"case", NULL, &only, "cases whose name begins so"},
        {"threads", &threads, NULL, "threads"},
        {"path", &path, NULL, "amp_cpu_path"},
        {"repeats", &repeats, NULL, "timed calls"},
    };
    bench_flags(argc, argv, flags, 4);
    open_cpu(threads, path);
#if defined(SUMS_PAIR)
    sums_beside_open(threads, path);
#endif
    for (i = 0; i < CASES; i++) {
        double least = 1e30, one;
        now_case = &cases[i];
        if (strncmp(now_case->name, only, strlen(only)) != 0) continue;
        prepare();
        before_call();
        bench_need(call_sums(), now_case->name);
        printf("{\"event\": \"sum\", \"case\": \"%s\", \"rows\": %lld, \"cols\": %lld, \"error\": %.3f", now_case->name,
               (long long)now_case->rows, (long long)now_case->cols, error());
#if defined(SUMS_PAIR)
        bench_need(sums_beside(), now_case->name);
        printf(", \"error_base\": %.3f", error());
        if (now_case->timed) print_beside(repeats);
        (void)least; (void)one; (void)r; (void)calls;
#else
        if (now_case->timed) {
            for (r = 0, calls = 1; r < repeats; r++) {
                one = seconds_of(call_sums, calls);
                least = AMPI_MIN(least, one);
                if (r == 0) calls = (int64_t)AMPI_MAX(1.0, 0.002 / one);
            }
            printf(", \"seconds\": %.4g", least);
        }
#endif
        printf("}\n");
        fflush(stdout);
        free(x); free(w); free(y); free(y2); free(aux); free(half); free(ids); free(exact);
    }
    return 0;
}
#endif
