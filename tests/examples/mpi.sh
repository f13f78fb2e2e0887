#!/bin/sh
# mpi.sh - checks that train_gpt on two MPI processes gives the same result as one process with twice the batch size.  This
# also holds when it resumes from a checkpoint of two processes.  An overflow on one rank must skip the step on both, and a
# rank that stops must end the other within the time limit.
. tests/lib.sh
made build/amp.o
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
if ! have mpicc || ! have mpirun; then skip "train_gpt with MPI" "mpicc or mpirun not found"; closing; exit; fi
cat README.md amp.h | head -c 100000 > "$work/text"
flags="--layers 2 --heads 2 --channels 32 --seq 32 --threads 1 --sample 0 --eval-batches 2 --log-interval 1 --data $work/text"
check "builds with mpicc" mpicc -DUSE_MPI -O1 -DAMP_IMPLEMENTATION_INCLUDED examples/train_gpt.c build/amp.o -o "$work/train_gpt_mpi" -lm -lpthread
[ -x "$work/train_gpt_mpi" ] || { closing; exit; }

# two NAME FLAGS...: two processes.
two() { name=$1; shift; mpirun -np 2 "$work/train_gpt_mpi" $flags --out "$work/$name" "$@" > "$work/$name.log" 2>&1; }
losses() { grep '"event": "step"' "$work/$1/metrics.jsonl" | sed 's/.*"loss": *\([^,}]*\).*/\1/'; }

if ! two both --steps 8 --batch 4 --precision fp32; then
    skip "train_gpt with MPI" "mpirun does not start two processes here: $(tail -n 2 "$work/both.log")"; closing; exit
fi
"$work/train_gpt_mpi" $flags --out "$work/one" --steps 8 --batch 8 --precision fp32 > "$work/one.log" 2>&1
losses both > "$work/both.losses"; losses one > "$work/one.losses"
# fp32 sums in another order: 2^-24 relative for each of some thousand additions is far below 1e-4
if [ "$(wc -l < "$work/both.losses")" -ge 8 ] && paste "$work/both.losses" "$work/one.losses" |
        awk '{d = $1 - $2; if (d < 0) d = -d; if (d > 1e-4 * $2) bad = 1} END {exit bad}'; then pass
else fail "two processes train as one with the double batch" "$(paste "$work/both.losses" "$work/one.losses" | head -n 9)"; fi

# The checkpoint of two goes on in one process with the same batch in all: the same samples, so the same losses.
two part --steps 8 --stop-after 4 --batch 4 --precision fp32
"$work/train_gpt_mpi" --threads 1 --sample 0 --out "$work/part" --resume "$work/part/model" --batch 8 > "$work/rest.log" 2>&1
losses part > "$work/part.losses"
if [ "$(wc -l < "$work/part.losses")" -eq 8 ] && paste "$work/part.losses" "$work/both.losses" |
        awk '{d = $1 - $2; if (d < 0) d = -d; if (d > 1e-4 * $2) bad = 1} END {exit bad}'; then pass
else fail "one process goes on from the checkpoint of two" "$(tail -n 3 "$work/rest.log"; paste "$work/part.losses" "$work/both.losses" | head -n 9)"; fi

# Whole and sharded states have the same bits where ranks sum in their order, and so has a run that goes on from what
# two ranks have saved of them; buckets of bf16 are close.
hash() { cksum < "$work/$1/model.safetensors"; }
two whole --steps 8 --batch 4 --precision fp32 --deterministic --bucket-mb 1
two shards --steps 8 --batch 4 --precision fp32 --deterministic --bucket-mb 1 --shard states
if [ "$(hash whole)" = "$(hash shards)" ] && grep -q "hidden behind backward" "$work/shards.log"; then pass
else fail "sharded states give the bits of whole ones" "$(tail -n 3 "$work/shards.log")"; fi
two gathered --steps 8 --batch 4 --precision fp32 --deterministic --bucket-mb 1 --shard gradients --overlap-param-gather
if [ "$(hash whole)" = "$(hash gathered)" ]; then pass
else fail "weights gathered behind forward" "$(tail -n 3 "$work/gathered.log")"; fi
two split --steps 8 --stop-after 4 --batch 4 --precision fp32 --deterministic --bucket-mb 1 --shard states
mpirun -np 2 "$work/train_gpt_mpi" --threads 1 --sample 0 --out "$work/split" --resume "$work/split/model" > "$work/split.log" 2>&1
if [ "$(hash whole)" = "$(hash split)" ]; then pass
else fail "sharded states go on" "$(tail -n 3 "$work/split.log")"; fi
two narrow --steps 8 --batch 4 --precision fp32 --wire bf16
losses narrow > "$work/narrow.losses"
# two roundings of gradients to 8 bits move a loss of 8 steps by far less than 1%
if [ "$(wc -l < "$work/narrow.losses")" -ge 8 ] && paste "$work/narrow.losses" "$work/one.losses" |
        awk '{d = $1 - $2; if (d < 0) d = -d; if (d > 1e-2 * $2) bad = 1} END {exit bad}'; then pass
else fail "gradients in bf16 on the wire" "$(paste "$work/narrow.losses" "$work/one.losses" | head -n 9)"; fi

# Loose coupling: two go on from between two outer steps as if they had not stopped; what would end there is refused.
two undisturbed --steps 6 --sync-every 3 --batch 4 --precision fp32
if two loose --steps 6 --sync-every 3 --stop-after 2 --batch 4 --precision fp32 && grep -q "stopped at step 2" "$work/loose.log" &&
        mpirun -np 2 "$work/train_gpt_mpi" --threads 1 --sample 0 --out "$work/loose" --resume "$work/loose/model" > "$work/loose.log" 2>&1 &&
        [ "$(losses loose | wc -l)" -eq 6 ] && [ "$(hash loose)" = "$(hash undisturbed)" ]; then pass
else fail "two processes that step alone" "$(tail -n 3 "$work/loose.log")"; fi
if two uneven --steps 7 --sync-every 3 --batch 4; then fail "steps that end between two outer steps" "they train"
elif grep -q "7 steps would end between two combinations" "$work/uneven.log"; then pass
else fail "steps that end between two outer steps" "$(tail -n 3 "$work/uneven.log")"; fi

check "data_parallel builds with mpicc" mpicc -DUSE_MPI -O1 -DAMP_IMPLEMENTATION_INCLUDED examples/data_parallel.c build/amp.o -o "$work/data_parallel" -lm -lpthread
if mpirun -np 2 "$work/data_parallel" > "$work/parallel.log" 2>&1 && [ "$(grep -c 'error on its points 0.0001' "$work/parallel.log")" -eq 2 ]; then pass
else fail "data_parallel on two processes" "$(tail -n 3 "$work/parallel.log")"; fi

two overflow --steps 6 --batch 4 --precision fp16 --init-scale 1e30
if [ "$(grep -c "Result" "$work/overflow.log")" -eq 1 ] && grep -q "skipped *6 of 6" "$work/overflow.log"; then pass
else fail "an overflow skips on both" "$(tail -n 5 "$work/overflow.log")"; fi
# A rank that stops within its calls, or does not come: every call of the other fails after the limit, and names it.
# When it goes on, its own fail too.
cat > "$work/late.c" << 'end'
#include "amp_mpi.h"
#include <signal.h>
#include <unistd.h>
static amp_reducer r;
static float x[1 << 21], y[1 << 21];
static int call(int kind) {
    switch (kind) {
        case 0: return r.reduce(r.user, x, 1 << 20, AMP_F32, AMP_REDUCE_SUM, NULL);
        case 1: return r.calls->reduce_scatter(r.user, y, x, 1 << 20, AMP_F32, AMP_REDUCE_SUM, NULL);
        case 2: return r.calls->all_gather(r.user, x, y, 1 << 20, NULL);
        case 3: return r.calls->all_to_all(r.user, x, y, 1 << 20, NULL);
        case 4: return r.calls->broadcast(r.user, x, 1 << 20, 1, NULL);
        default: return r.reduce(r.user, y, 1 << 20, AMP_BF16, AMP_REDUCE_SUM, NULL);
    }
}
int main(int argc, char **argv) {
    int kind = atoi(argv[1]), late = strcmp(argv[2], "late") == 0;
    double began;
    MPI_Comm comm;
    MPI_Init(&argc, &argv);
    comm = MPI_COMM_WORLD;
    r = amp_mpi(&comm);
    amp_mpi_timeout_ms = 2000;
    if (call(kind) != 0) return 1;
    if (late && r.rank == 1) sleep(60);
    if (!late && r.rank == 1 && fork() == 0) {      /* stops the parent in whatever call it is, and wakes it up */
        usleep(300000);
        kill(getppid(), SIGSTOP);
        usleep(5000000);
        kill(getppid(), SIGCONT);
        _exit(0);
    }
    do began = amp_mpi_seconds();
    while (call(kind) == 0);
    began = amp_mpi_seconds() - began;
    printf("rank %d, %s: %s\n", r.rank, began < 4 + 4 * r.rank && call(kind) != 0 ? "bounded" : "not bounded",
           r.calls->error(r.user));
    fflush(stdout);
    sleep(r.rank == 1 || late ? 0 : 8);
    MPI_Abort(comm, 3);
}
end
check "late.c builds" mpicc -Iexamples -I. -O1 -DAMP_IMPLEMENTATION_INCLUDED -include amp.h "$work/late.c" build/amp.o -o "$work/late" -lm -lpthread
for kind in 0 1 2 3 4 5; do     # those that start at once would share Open MPI's folder of the session, and race for it
    mkdir "$work/session$kind"
    OMPI_MCA_orte_tmpdir_base="$work/session$kind" timeout 60 mpirun -np 2 "$work/late" $kind stops > "$work/late$kind.log" 2>&1 &
done
timeout 60 mpirun -np 3 "$work/late" 0 late > "$work/late.log" 2>&1
wait
for kind in 0 1 2 3 4 5; do
    if grep -q "^rank 0, bounded: rank 1 has not answered within 2000 ms" "$work/late$kind.log" &&
            grep -q "^rank 1, bounded: rank 1 joined a call after the others had given up" "$work/late$kind.log"; then pass
    else fail "a rank that stops in call $kind under MPI" "$(grep -a "^rank" "$work/late$kind.log" || tail -n 3 "$work/late$kind.log")"; fi
done
if grep -q "bounded: rank 1 has not answered within 2000 ms" "$work/late.log"; then pass
else fail "a rank that does not come under MPI" "$(tail -n 3 "$work/late.log")"; fi

# The same in a training: the program ends with the code of an error.
timeout 60 mpirun -np 2 sh -c 'echo $$ > "'"$work"'/pid$OMPI_COMM_WORLD_RANK"; exec "$@"' sh "$work/train_gpt_mpi" $flags \
    --out "$work/stopped" --steps 100000 --batch 4 --precision fp32 --rank-timeout 2 > "$work/stopped.log" 2>&1 &
run=$!
tries=0
while ! grep -q '"event": "step"' "$work/stopped/metrics.jsonl" 2> /dev/null && [ $tries -lt 100 ]; do
    sleep 0.2; tries=$((tries + 1))
done
kill -STOP "$(cat "$work/pid1")"
if wait $run; then fail "a stopped rank in a training" "it ended well"
elif grep -q "AMP0503.*rank 1 has not answered within 2000 ms" "$work/stopped.log"; then pass
else fail "a stopped rank in a training" "$(tail -n 3 "$work/stopped.log")"; fi
closing
