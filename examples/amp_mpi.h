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
 * A call fails on all ranks that have come to it when one has not after amp_mpi_timeout_ms; MPI cannot tell which one
 * it is.  Then nothing is left but MPI_Abort.  A rank that dies is mpirun's to notice, which ends all; one that stops
 * in the middle of a call is noticed by amp_tcp.h, not here. */
#ifndef EXAMPLE_AMP_MPI
#define EXAMPLE_AMP_MPI
#include <mpi.h>
#include <stdio.h>
#include <time.h>
#if defined(OPEN_MPI)
#  include <mpi-ext.h>
#endif

/* Numbers at a time that are converted; bytes, since MPI counts in int. */
enum { EXAMPLE_MPI_PIECE = 1 << 14, EXAMPLE_MPI_MOST = 1 << 30 };

static int amp_mpi_timeout_ms = 60000;
static char amp_mpi_why[100];   /* "": no call was late */
static const char *amp_mpi_error(void *user) { return (void)user, amp_mpi_why; }

static double amp_mpi_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Returns 0 once all ranks have come.  The call itself is MPI's blocking one, which is faster than the kind that could
   be given up. */
static int amp_mpi_meet(MPI_Comm comm) {
    const struct timespec moment = {0, 20000};
    double began = amp_mpi_seconds();
    MPI_Request all;
    int done = 0, code = amp_mpi_why[0] != 0 ? -1 : MPI_Ibarrier(comm, &all);
    long polls;
    for (polls = 0; code == MPI_SUCCESS && !done; polls++) {
        code = MPI_Test(&all, &done, MPI_STATUS_IGNORE);
        if (done || polls < 1000) continue;
        if (amp_mpi_seconds() - began > amp_mpi_timeout_ms * 1e-3) {
            snprintf(amp_mpi_why, sizeof amp_mpi_why, "some rank has not come within %d ms; MPI does not tell which",
                     amp_mpi_timeout_ms);
            return -1;
        }
        nanosleep(&moment, NULL);
    }
    return code;
}

static MPI_Op amp_mpi_op(amp_reduce_op op) { return op == AMP_REDUCE_MAX ? MPI_MAX : MPI_SUM; }
static MPI_Datatype amp_mpi_type(amp_dtype dtype) { return dtype == AMP_F64 ? MPI_DOUBLE : MPI_FLOAT; }

/* 16-bit numbers are summed in fp32, and rounded once. */
static int amp_mpi_reduce(void *user, void *data, int64_t count, amp_dtype dtype, amp_reduce_op op, void *stream) {
    int whole = dtype == AMP_F32 || dtype == AMP_F64, code;
    int64_t most = whole ? EXAMPLE_MPI_MOST / 8 : EXAMPLE_MPI_PIECE;
    float wide[EXAMPLE_MPI_PIECE];
    char *at = (char *)data;
    (void)stream;
    if ((code = amp_mpi_meet(*(MPI_Comm *)user)) != MPI_SUCCESS) return code;
    for (; count > 0; count -= most, at += most * (int64_t)amp_dtype_size(dtype)) {
        int n = (int)(count < most ? count : most);
        if (!whole && amp_convert(wide, AMP_F32, at, dtype, n, NULL, NULL) != AMP_OK) return -1;
        code = MPI_Allreduce(MPI_IN_PLACE, whole ? at : (char *)wide, n, amp_mpi_type(dtype), amp_mpi_op(op),
                             *(MPI_Comm *)user);
        if (code != MPI_SUCCESS) return code;
        if (!whole && amp_convert(at, dtype, wide, AMP_F32, n, NULL, NULL) != AMP_OK) return -1;
    }
    return 0;
}

/* The same for a rank's part.  In pieces where numbers are converted, or where the part lies in what is summed. */
static int amp_mpi_reduce_scatter(void *user, const void *in, void *out, int64_t count_each, amp_dtype dtype,
                                  amp_reduce_op op, void *stream) {
    MPI_Comm comm = *(MPI_Comm *)user;
    int64_t size = (int64_t)amp_dtype_size(dtype), most, i;
    amp_dtype sums = dtype == AMP_F64 ? AMP_F64 : AMP_F32;
    double wide[EXAMPLE_MPI_PIECE / 2], mine[EXAMPLE_MPI_PIECE / 2];
    const char *from = (const char *)in;
    int world, rank, r, n, code;
    (void)stream;
    if ((code = amp_mpi_meet(comm)) != MPI_SUCCESS) return code;
    MPI_Comm_size(comm, &world);
    MPI_Comm_rank(comm, &rank);
    if (dtype == sums && count_each <= EXAMPLE_MPI_MOST / 8 && (char *)out != from + rank * count_each * size)
        return MPI_Reduce_scatter_block(in, out, (int)count_each, amp_mpi_type(dtype), amp_mpi_op(op), comm);
    most = EXAMPLE_MPI_PIECE / 2 / world;
    if (most < 1) return -1;
    for (i = 0; i < count_each; i += n) {
        n = (int)(count_each - i < most ? count_each - i : most);
        for (r = 0; r < world; r++)
            if (amp_convert((char *)wide + r * n * (int64_t)amp_dtype_size(sums), sums,
                            from + (r * count_each + i) * size, dtype, n, NULL, NULL) != AMP_OK)
                return -1;
        code = MPI_Reduce_scatter_block(wide, mine, n, amp_mpi_type(sums), amp_mpi_op(op), comm);
        if (code != MPI_SUCCESS) return code;
        if (amp_convert((char *)out + i * size, dtype, mine, sums, n, NULL, NULL) != AMP_OK) return -1;
    }
    return 0;
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
static int amp_mpi_move(void *user, const char *in, char *out, int64_t bytes_each, int all_to_all) {
    MPI_Comm comm = *(MPI_Comm *)user;
    int code = amp_mpi_meet(comm), rank, n;
    MPI_Datatype piece;
    int64_t i;
    MPI_Comm_rank(comm, &rank);
    for (i = 0; i < bytes_each && code == MPI_SUCCESS; i += n) {
        n = (int)(bytes_each - i < EXAMPLE_MPI_MOST ? bytes_each - i : EXAMPLE_MPI_MOST);
        code = amp_mpi_spaced(n, bytes_each, &piece);
        if (code != MPI_SUCCESS) return code;
        if (all_to_all) code = MPI_Alltoall(in + i, 1, piece, out + i, 1, piece, comm);
        else code = MPI_Allgather(in == out + rank * bytes_each ? MPI_IN_PLACE : (const void *)(in + i), 1, piece,
                                  out + i, 1, piece, comm);
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
    char *at = (char *)data;
    int code = amp_mpi_meet(*(MPI_Comm *)user), n;
    (void)stream;
    for (; bytes > 0 && code == MPI_SUCCESS; bytes -= n, at += n) {
        n = (int)(bytes < EXAMPLE_MPI_MOST ? bytes : EXAMPLE_MPI_MOST);
        code = MPI_Bcast(at, n, MPI_BYTE, root, *(MPI_Comm *)user);
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
    if (MPIX_Query_cuda_support()) r.on_host = 2;
#endif
    return r;
}
#endif
