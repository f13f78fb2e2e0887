/* amp_mpi.h - the ranks of an MPI communicator train one model together.
 *
 *     MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided);
 *     MPI_Comm comm = MPI_COMM_WORLD;             lives as long as the context
 *     desc.reducer = amp_mpi(&comm);
 *     amp_open(&amp, &desc);
 *
 * Each rank holds the whole model and reads its own batches (a loader takes rank and world from the context); amp_step
 * sums gradients over all.  Build with mpicc, start with mpirun.  Below MPI_THREAD_SERIALIZED all calls come from the
 * thread that trains; from there on also from another one during backward, so calls of your own between backward and
 * amp_step need MPI_THREAD_MULTIPLE and a communicator of their own.  Where Open MPI reads a device's memory it does so
 * here; else that goes through the host, so any MPI will do.
 *
 * A rank that stops, hangs or does not come is noticed after amp_mpi_timeout_ms: the call fails in all others, and all
 * later ones, with a text that names it.  What MPI has begun cannot be taken back, so memory of the calls must stay and
 * MPI_Finalize would wait for ever: end with MPI_Abort.  A rank that dies is mpirun's to notice, which ends all.  Only
 * inside sums of a device's memory, which MPI can but block for, a rank that stops is not noticed. */
#ifndef EXAMPLE_AMP_MPI
#define EXAMPLE_AMP_MPI
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#if defined(OPEN_MPI)
#  include <mpi-ext.h>
#endif

/* Numbers at a time that are summed, where Open MPI is fastest, or converted too; bytes at a time, since MPI counts in
   int; the tag of what ranks say when they give up. */
enum {
    EXAMPLE_MPI_PIECE = 1 << 17, EXAMPLE_MPI_NARROW = 1 << 14, EXAMPLE_MPI_MOST = 1 << 30, EXAMPLE_MPI_TAG = 20503
};

static int amp_mpi_timeout_ms = 60000;
static int amp_mpi_on_device;   /* 1: calls may get a device's memory */
static char amp_mpi_why[160];   /* why every call fails from now on; "": they do not */
static const char *amp_mpi_error(void *user) { return (void)user, amp_mpi_why; }

/* What calls that were given up may still write to. */
static float amp_mpi_wide[EXAMPLE_MPI_NARROW];
static double amp_mpi_parts[EXAMPLE_MPI_PIECE];

/* ---- Waiting */

static double amp_mpi_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
static void amp_mpi_sleep(double seconds) {
    struct timespec moment = {0, 0};
    moment.tv_nsec = (long)(1e9 * (seconds < 2e-5 ? 2e-5 : seconds > 1e-3 ? 1e-3 : seconds));
    nanosleep(&moment, NULL);
}

/* Whoever gives up says so to all, and all who wait answer the same.  Returns how many do not; *first: one of them. */
static int amp_mpi_ask(MPI_Comm comm, int rank, int world, MPI_Request *answers, int *first) {
    static char word;
    double began = amp_mpi_seconds(), wait = amp_mpi_timeout_ms < 2000 ? amp_mpi_timeout_ms * 0.5e-3 : 1;
    int r, done, silent = 1;
    MPI_Request sent;
    for (r = 0; r < world; r++) {
        answers[r] = MPI_REQUEST_NULL;
        if (r == rank) continue;
        MPI_Irecv(&word, 0, MPI_CHAR, r, EXAMPLE_MPI_TAG, comm, &answers[r]);
        MPI_Isend(&word, 0, MPI_CHAR, r, EXAMPLE_MPI_TAG, comm, &sent);
    }
    while (silent > 0 && amp_mpi_seconds() - began < wait) {
        amp_mpi_sleep(1e-3);
        for (r = world - 1, silent = 0; r >= 0; r--) {
            MPI_Test(&answers[r], &done, MPI_STATUS_IGNORE);
            silent += !done;
            if (!done) *first = r;
        }
    }
    return silent;
}

/* Says who is missing; told: another rank gave up first.  What is allocated here stays MPI's. */
static int amp_mpi_give_up(MPI_Comm comm, int told) {
    const char *format = told ? "rank %d%s joined a call after the others had given up, which they do after %d ms"
                              : "rank %d%s: MPI has not finished a call within %d ms, although all ranks are there";
    int rank, world, silent, who;
    MPI_Request *answers;
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &world);
    who = rank;
    answers = (MPI_Request *)malloc((size_t)world * sizeof *answers);
    silent = answers != NULL ? amp_mpi_ask(comm, rank, world, answers, &who) : 0;
    if (silent > 0) format = "rank %d%s not answered within %d ms";
    snprintf(amp_mpi_why, sizeof amp_mpi_why, format, who, silent > 1 ? " and others have" : silent > 0 ? " has" : "",
             amp_mpi_timeout_ms);
    return -1;
}

static int amp_mpi_wait(MPI_Comm comm, MPI_Request *request) {
    double began = 0, now;
    int code, done, told;
    long polls;
    for (polls = 0;; polls++) {
        code = MPI_Test(request, &done, MPI_STATUS_IGNORE);
        if (code != MPI_SUCCESS || done) return code;
        if (polls < 1000) continue;
        now = amp_mpi_seconds();
        if (began == 0) began = now;
        MPI_Iprobe(MPI_ANY_SOURCE, EXAMPLE_MPI_TAG, comm, &told, MPI_STATUS_IGNORE);
        if (told || now - began > amp_mpi_timeout_ms * 1e-3) return amp_mpi_give_up(comm, told);
        amp_mpi_sleep((now - began) / 16);
    }
}

/* Begins a call.  Sums of a device's memory are MPI's blocking ones, and wait here until all ranks have come. */
static int amp_mpi_begin(MPI_Comm comm, int blocks) {
    MPI_Request all;
    int code;
    if (amp_mpi_why[0] != 0) return -1;
    if (!blocks) return MPI_SUCCESS;
    code = MPI_Ibarrier(comm, &all);
    return code == MPI_SUCCESS ? amp_mpi_wait(comm, &all) : code;
}

/* ---- Sums */

static MPI_Op amp_mpi_op(amp_reduce_op op) { return op == AMP_REDUCE_MAX ? MPI_MAX : MPI_SUM; }
static MPI_Datatype amp_mpi_type(amp_dtype dtype) { return dtype == AMP_F64 ? MPI_DOUBLE : MPI_FLOAT; }
static int amp_mpi_is_whole(amp_dtype dtype) { return dtype == AMP_F32 || dtype == AMP_F64; }

/* Piece by piece, of which two are on their way. */
static int amp_mpi_reduce_whole(MPI_Comm comm, char *at, int64_t count, amp_dtype dtype, amp_reduce_op op) {
    MPI_Request two[2] = {MPI_REQUEST_NULL, MPI_REQUEST_NULL};
    int code = MPI_SUCCESS, n, k = 0;
    for (; count > 0 && code == MPI_SUCCESS; count -= n, at += n * (int64_t)amp_dtype_size(dtype), k ^= 1) {
        n = (int)(count < EXAMPLE_MPI_PIECE ? count : EXAMPLE_MPI_PIECE);
        code = amp_mpi_wait(comm, &two[k]);
        if (code == MPI_SUCCESS && amp_mpi_on_device)
            code = MPI_Allreduce(MPI_IN_PLACE, at, n, amp_mpi_type(dtype), amp_mpi_op(op), comm);
        else if (code == MPI_SUCCESS)
            code = MPI_Iallreduce(MPI_IN_PLACE, at, n, amp_mpi_type(dtype), amp_mpi_op(op), comm, &two[k]);
    }
    if (code == MPI_SUCCESS) code = amp_mpi_wait(comm, &two[k]);
    return code == MPI_SUCCESS ? amp_mpi_wait(comm, &two[k ^ 1]) : code;
}

/* 16-bit numbers are summed in fp32, and rounded once. */
static int amp_mpi_reduce(void *user, void *data, int64_t count, amp_dtype dtype, amp_reduce_op op, void *stream) {
    MPI_Comm comm = *(MPI_Comm *)user;
    int whole = amp_mpi_is_whole(dtype), code = amp_mpi_begin(comm, whole && amp_mpi_on_device);
    char *at = (char *)data;
    int64_t n;
    (void)stream;
    if (code == MPI_SUCCESS && whole) return amp_mpi_reduce_whole(comm, at, count, dtype, op);
    for (; count > 0 && code == MPI_SUCCESS; count -= n, at += n * (int64_t)amp_dtype_size(dtype)) {
        n = count < EXAMPLE_MPI_NARROW ? count : EXAMPLE_MPI_NARROW;
        if (amp_convert(amp_mpi_wide, AMP_F32, at, dtype, n, NULL, NULL) != AMP_OK) return -1;
        code = amp_mpi_reduce_whole(comm, (char *)amp_mpi_wide, n, AMP_F32, op);
        if (code == MPI_SUCCESS && amp_convert(at, dtype, amp_mpi_wide, AMP_F32, n, NULL, NULL) != AMP_OK) return -1;
    }
    return code;
}

/* A piece of n bytes of each part. */
static int amp_mpi_spaced(int n, int64_t bytes_each, MPI_Datatype *out) {
    MPI_Datatype piece;
    int code = MPI_Type_contiguous(n, MPI_BYTE, &piece);
    if (code != MPI_SUCCESS) return code;
    code = MPI_Type_create_resized(piece, 0, (MPI_Aint)bytes_each, out);
    MPI_Type_free(&piece);
    return code == MPI_SUCCESS ? MPI_Type_commit(out) : code;
}

/* out = the sum, or the largest, of n numbers of each rank that lie in amp_mpi_parts; in the order of ranks. */
static int amp_mpi_combine(char *out, int n, int world, amp_dtype dtype, amp_reduce_op op) {
    const amp_dtype sums = amp_mpi_is_whole(dtype) ? dtype : AMP_F32;
    const int64_t size = (int64_t)amp_dtype_size(dtype);
    double sum[512], x[512];
    int at, k, r, code = MPI_SUCCESS;
    for (at = 0; at < n; at += k) {
        k = n - at < 512 ? n - at : 512;
        for (r = 0; r < world && code == MPI_SUCCESS; r++) {
            const char *part = (const char *)amp_mpi_parts + ((int64_t)r * n + at) * size;
            if (amp_convert(r == 0 ? sum : x, sums, part, dtype, k, NULL, NULL) != AMP_OK) return -1;
            if (r > 0) code = MPI_Reduce_local(x, sum, k, amp_mpi_type(sums), amp_mpi_op(op));
        }
        if (amp_convert(out + at * size, dtype, sum, sums, k, NULL, NULL) != AMP_OK) return -1;
    }
    return code;
}

/* The same for a rank's part: each gets all the others' numbers of it, and sums them. */
static int amp_mpi_reduce_scatter(void *user, const void *in, void *out, int64_t count_each, amp_dtype dtype,
                                  amp_reduce_op op, void *stream) {
    MPI_Comm comm = *(MPI_Comm *)user;
    const int64_t size = (int64_t)amp_dtype_size(dtype);
    int blocks = amp_mpi_is_whole(dtype) && amp_mpi_on_device, code = amp_mpi_begin(comm, blocks), world, n;
    MPI_Datatype piece;
    MPI_Request all;
    int64_t i, most;
    (void)stream;
    MPI_Comm_size(comm, &world);
    most = (int64_t)sizeof amp_mpi_parts / size / world;
    if (code == MPI_SUCCESS && blocks)
        return MPI_Reduce_scatter_block(in, out, (int)count_each, amp_mpi_type(dtype), amp_mpi_op(op), comm);
    if (most < 1) return -1;
    for (i = 0; i < count_each && code == MPI_SUCCESS; i += n) {
        n = (int)(count_each - i < most ? count_each - i : most);
        code = amp_mpi_spaced(n * (int)size, count_each * size, &piece);
        if (code != MPI_SUCCESS) return code;
        code = MPI_Ialltoall((const char *)in + i * size, 1, piece, amp_mpi_parts, n * (int)size, MPI_BYTE, comm, &all);
        if (code == MPI_SUCCESS) code = amp_mpi_wait(comm, &all);
        MPI_Type_free(&piece);
        if (code == MPI_SUCCESS) code = amp_mpi_combine((char *)out + i * size, n, world, dtype, op);
    }
    return code;
}

/* ---- Bytes */

static int amp_mpi_move(void *user, const char *in, char *out, int64_t bytes_each, int all_to_all) {
    MPI_Comm comm = *(MPI_Comm *)user;
    int code = amp_mpi_begin(comm, 0), rank, n;
    MPI_Datatype piece;
    MPI_Request all;
    int64_t i;
    MPI_Comm_rank(comm, &rank);
    for (i = 0; i < bytes_each && code == MPI_SUCCESS; i += n) {
        n = (int)(bytes_each - i < EXAMPLE_MPI_MOST ? bytes_each - i : EXAMPLE_MPI_MOST);
        code = amp_mpi_spaced(n, bytes_each, &piece);
        if (code != MPI_SUCCESS) return code;
        if (all_to_all) code = MPI_Ialltoall(in + i, 1, piece, out + i, 1, piece, comm, &all);
        else code = MPI_Iallgather(in == out + rank * bytes_each ? MPI_IN_PLACE : (const void *)(in + i), 1, piece,
                                   out + i, 1, piece, comm, &all);
        if (code == MPI_SUCCESS) code = amp_mpi_wait(comm, &all);
        MPI_Type_free(&piece);
    }
    return code;
}
static int amp_mpi_all_gather(void *user, const void *in, void *out, int64_t bytes_each, void *stream) {
    (void)stream;
    return amp_mpi_move(user, (const char *)in, (char *)out, bytes_each, 0);
}
static int amp_mpi_all_to_all(void *user, const void *in, void *out, int64_t bytes_each, void *stream) {
    (void)stream;
    return amp_mpi_move(user, (const char *)in, (char *)out, bytes_each, 1);
}

static int amp_mpi_broadcast(void *user, void *data, int64_t bytes, int32_t root, void *stream) {
    MPI_Comm comm = *(MPI_Comm *)user;
    int code = amp_mpi_begin(comm, 0), n;
    char *at = (char *)data;
    MPI_Request all;
    (void)stream;
    for (; bytes > 0 && code == MPI_SUCCESS; bytes -= n, at += n) {
        n = (int)(bytes < EXAMPLE_MPI_MOST ? bytes : EXAMPLE_MPI_MOST);
        code = MPI_Ibcast(at, n, MPI_BYTE, root, comm, &all);
        if (code == MPI_SUCCESS) code = amp_mpi_wait(comm, &all);
    }
    return code;
}

static const amp_exchanges amp_mpi_calls = {
    amp_mpi_reduce_scatter, amp_mpi_all_gather, amp_mpi_all_to_all, amp_mpi_broadcast, NULL, NULL, amp_mpi_error
};
static amp_reducer amp_mpi(MPI_Comm *comm) {
    amp_reducer r;
    int rank, world, threads;
    MPI_Comm_rank(*comm, &rank);
    MPI_Comm_size(*comm, &world);
    MPI_Query_thread(&threads);
    memset(&r, 0, sizeof r);
    r.reduce = amp_mpi_reduce;
    r.calls = &amp_mpi_calls;
    r.user = comm;
    r.rank = rank;
    r.world = world;
    r.one_thread = threads < MPI_THREAD_SERIALIZED;
    r.on_host = 1;
#if defined(MPIX_CUDA_AWARE_SUPPORT) && MPIX_CUDA_AWARE_SUPPORT
    if (MPIX_Query_cuda_support()) r.on_host = 2, amp_mpi_on_device = 1;
#endif
    return r;
}
#endif
