/* pingpong.c - measures what the model in sim.py is fitted on: messages between two processes, and the sum of two arrays.
 *
 *     mpicc -O2 tests/sim/pingpong.c -o pingpong && mpirun -np 2 ./pingpong
 *
 * Prints lines of "bytes seconds", in one direction, as medians.  The last line is "add seconds", per byte.  Messages and
 * sums use memory that is in no cache, because gradients are written long before they are sent. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 1 << 24, ALL = 1 << 28, ROUNDS = 41 };
static int compare(const void *a, const void *b) { return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b); }

int main(int argc, char **argv) {
    static double times[ROUNDS];
    char *data = (char *)malloc(ALL), *more = (char *)malloc(ALL);
    int rank, i, k, at = 0;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    memset(data, 0, ALL);
    memset(more, 0, ALL);
    for (int n = 4; n <= MOST; n *= 4) {
        int inner = n < 1 << 16 ? 100 : 2;
        for (i = 0; i < ROUNDS; i++) {
            double begin = MPI_Wtime();
            for (k = 0; k < inner; k++) {
                if (rank == 0) MPI_Send(data + at, n, MPI_BYTE, 1, 0, MPI_COMM_WORLD);
                MPI_Recv(more + at, n, MPI_BYTE, 1 - rank, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
                if (rank == 1) MPI_Send(data + at, n, MPI_BYTE, 0, 0, MPI_COMM_WORLD);
                at = (at + n) % (ALL - MOST);
            }
            times[i] = (MPI_Wtime() - begin) / (2 * inner);
        }
        qsort(times, ROUNDS, sizeof *times, compare);
        if (rank == 0) printf("%d %.9f\n", n, times[ROUNDS / 2]);
    }
    for (i = 0; i < ROUNDS && rank == 0; i++) {
        double begin = MPI_Wtime();
        float *sum = (float *)(void *)(data + at / MOST * MOST), *term = (float *)(void *)(more + at / MOST * MOST);
        for (k = 0; k < MOST / 4; k++) sum[k] += term[k];
        at = (at + MOST) % (ALL - MOST);
        times[i] = (MPI_Wtime() - begin) / MOST;
    }
    qsort(times, ROUNDS, sizeof *times, compare);
    if (rank == 0) printf("add %.12f\n", times[ROUNDS / 2]);
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Finalize();
    free(data);
    free(more);
    return 0;
}
