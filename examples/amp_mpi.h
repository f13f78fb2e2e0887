/* amp_mpi.h - the ranks of an MPI communicator train one model together.
 *
 *     MPI_Comm comm = MPI_COMM_WORLD;             lives as long as the context
 *     desc.reducer = amp_mpi(&comm);
 *     amp_open(&amp, &desc);
 *
 * Each rank holds the whole model and reads its own batches (a loader takes rank and world from the context); amp_step
 * sums gradients over all.  Build with mpicc, start with mpirun.  A device's memory goes through the host, so any MPI
 * will do. */
#ifndef EXAMPLE_AMP_MPI
#define EXAMPLE_AMP_MPI
#include <mpi.h>

/* 16-bit numbers are summed in fp32, and rounded once. */
static int amp_mpi_reduce(void *user, void *data, int64_t count, amp_dtype dtype, amp_reduce_op op, void *stream) {
    enum { PIECE = 1 << 14 };
    int whole = dtype == AMP_F32 || dtype == AMP_F64, code;
    int64_t most = whole ? 1 << 28 : PIECE;     /* MPI counts in int */
    MPI_Op how = op == AMP_REDUCE_MAX ? MPI_MAX : MPI_SUM;
    float wide[PIECE];
    char *at = (char *)data;
    (void)stream;
    for (; count > 0; count -= most, at += most * (int64_t)amp_dtype_size(dtype)) {
        int n = (int)(count < most ? count : most);
        if (!whole && amp_convert(wide, AMP_F32, at, dtype, n, NULL, NULL) != AMP_OK) return -1;
        code = MPI_Allreduce(MPI_IN_PLACE, whole ? at : (char *)wide, n, dtype == AMP_F64 ? MPI_DOUBLE : MPI_FLOAT, how,
                             *(MPI_Comm *)user);
        if (code != MPI_SUCCESS) return code;
        if (!whole && amp_convert(at, dtype, wide, AMP_F32, n, NULL, NULL) != AMP_OK) return -1;
    }
    return 0;
}

static amp_reducer amp_mpi(MPI_Comm *comm) {
    amp_reducer r = {amp_mpi_reduce, comm, 0, 1, 1, 0};
    int rank, world;
    MPI_Comm_rank(*comm, &rank);
    MPI_Comm_size(*comm, &world);
    r.rank = rank;
    r.world = world;
    return r;
}
#endif
