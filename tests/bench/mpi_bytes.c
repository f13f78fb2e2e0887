/* mpi_bytes.c - prints, when an MPI program ends, how many bytes each rank gave to collectives.  It is linked with the
 * program and uses the profiling interface of MPI.
 *
 *     mpicc -DUSE_MPI -O2 examples/train_gpt.c tests/bench/mpi_bytes.c -o train_gpt_mpi -lm -lpthread */
#include <mpi.h>
#include <stdio.h>

static long long calls, bytes;
static void count(int n, MPI_Datatype type) {
    int size = 0;
    PMPI_Type_size(type, &size);
    calls++;
    bytes += (long long)n * size;
}
int MPI_Allreduce(const void *in, void *out, int n, MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
    count(n, type);
    return PMPI_Allreduce(in, out, n, type, op, comm);
}
int MPI_Reduce_scatter_block(const void *in, void *out, int n, MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
    count(n, type);
    return PMPI_Reduce_scatter_block(in, out, n, type, op, comm);
}
int MPI_Allgather(const void *in, int n, MPI_Datatype type, void *out, int m, MPI_Datatype to, MPI_Comm comm) {
    count(n, type);
    return PMPI_Allgather(in, n, type, out, m, to, comm);
}
int MPI_Alltoall(const void *in, int n, MPI_Datatype type, void *out, int m, MPI_Datatype to, MPI_Comm comm) {
    count(n, type);
    return PMPI_Alltoall(in, n, type, out, m, to, comm);
}
int MPI_Bcast(void *data, int n, MPI_Datatype type, int root, MPI_Comm comm) {
    count(n, type);
    return PMPI_Bcast(data, n, type, root, comm);
}
int MPI_Finalize(void) {
    int rank = 0;
    PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
    fprintf(stderr, "rank %d: %lld collectives, %lld bytes\n", rank, calls, bytes);
    return PMPI_Finalize();
}
