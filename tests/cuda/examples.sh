#!/bin/sh
# examples.sh - runs the examples on the model GPU.  scaler_only must do the same as on the CPU.  train_gpt runs in every
# precision.  A captured graph and recomputing must give the same bits as the plain run.  Checkpoints must load on the GPU
# when the CPU wrote them, and the other way round.  Error messages must say what is wrong.
. tests/lib.sh
gpt="$PWD/build/model_train_gpt"
small="--layers 2 --heads 2 --channels 32 --batch 2 --seq 16 --sample 0 --eval-batches 1 --log-interval 1 --data $work/text"
head -c 20000 README.md > "$work/text"

train() { name=$1; shift; "$gpt" $small --out "$work/$name" --save "$work/$name" "$@" > "$work/$name.log" 2>&1; }
same() { # NAME A B: two runs' weights, byte for byte
    if [ -s "$work/$2.safetensors" ] && cmp -s "$work/$2.safetensors" "$work/$3.safetensors"; then pass
    else fail "$1" "$(tail -n 2 "$work/$2.log" "$work/$3.log")"; fi
}
losses() { grep '"event": "step"' "$work/$1/metrics.jsonl" | sed 's/.*"loss": \([^,}]*\).*/\1/'; }

# An evaluation comes between captured steps; dropout takes other random numbers in each; fp16 scales the loss.
for precision in fp32 fp16 bf16; do
    flags="--device cuda --precision $precision --steps 6 --eval-interval 4 --dropout 0.1 --accumulation 2"
    train plain $flags
    train graph $flags --graph
    same "$precision with a graph" plain graph
done
train recompute $flags --graph --recompute
same "recomputing in a graph" plain recompute
train O2 --device cuda --precision bf16 --level O2 --steps 4
train O2_graph --device cuda --precision bf16 --level O2 --steps 4 --graph
same "level O2 with a graph" O2 O2_graph

# The file of tuned products is made by one run; the next reads it, finds nothing new, and computes the same.
train tuning --device cuda --precision bf16 --steps 2 --autotune="$work/plans"
cp "$work/plans" "$work/plans.before" 2>/dev/null
train tuned --device cuda --precision bf16 --steps 2 --autotune="$work/plans"
if [ -s "$work/plans" ] && cmp -s "$work/plans" "$work/plans.before" && ! grep -q 'warning' "$work/tuned.log"; then pass
else fail "the file of tuned products" "$(tail -n 2 "$work/tuning.log" "$work/tuned.log")"; fi
same "a run that tunes, and one that reads its file" tuning tuned

# One run in three parts on two devices is nearer to the CPU's run than that one is to itself in bf16.
train cpu --device cpu --precision fp32 --steps 6
train bf16 --device cpu --precision bf16 --steps 6
train parts --device cpu --precision fp32 --steps 6 --stop-after 2
train parts --device cuda --steps 6 --stop-after 2 --resume "$work/parts"
train parts --device cpu --steps 6 --resume "$work/parts"
for run in cpu bf16 parts; do losses $run > "$work/$run.losses"; done
if paste "$work/cpu.losses" "$work/bf16.losses" "$work/parts.losses" |
    awk 'function off(x) {return x < $1 ? $1 - x : x - $1} {own += off($2); other += off($3)} END {exit !(NR == 6 && other < own)}'; then pass
else fail "checkpoints change between devices" "$(tail -n 1 "$work/parts.log") $(paste "$work/cpu.losses" "$work/parts.losses")"; fi

# Two processes, each with a GPU: over NCCL, also from a graph, they train what they train over the host, because two
# numbers have one sum.
ranks() { # NAME FLAGS: both, and 0 if both are done
    name=$1; shift
    rm -f "$work/meet"
    RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 "$gpt" $small --device cuda --precision fp32 --steps 3 --rank-file "$work/meet" \
        --out "$work/$name.other" --save "$work/$name" "$@" > "$work/$name.other.log" 2>&1 &
    RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 train "$name" --device cuda --precision fp32 --steps 3 --rank-file "$work/meet" "$@"
    first=$?
    wait $! && [ $first -eq 0 ]
}
mkdir "$work/nccl" && ln -s "$PWD/build/coc_nccl.so" "$work/nccl/libnccl.so.2"
LD_LIBRARY_PATH=$work/nccl; export LD_LIBRARY_PATH
check "two ranks over the host" ranks over_host
check "two ranks over NCCL" ranks over_nccl --nccl
check "two ranks over NCCL from a graph" ranks over_graph --nccl --graph
same "two ranks over NCCL and over the host" over_host over_nccl
same "two ranks over NCCL from a graph, and over the host" over_host over_graph
unset LD_LIBRARY_PATH

build/scaler_only 300 > "$work/cpu.txt" && build/model_scaler_only 300 > "$work/cuda.txt"
if [ -s "$work/cuda.txt" ] && cmp -s "$work/cpu.txt" "$work/cuda.txt"; then pass; else fail "scaler_only" "$(tail -n 2 "$work/cuda.txt")"; fi

# The classifier learns, and its losses on both devices are nearer to each other than the CPU's in fp32 and in bf16 are.
classify() { # NAME DEVICE PRECISION
    build/model_train_classifier --out "$work/$1" --device $2 --precision $3 --data "$work/few.tsv" --valid "$work/few.tsv" --hidden 32 --batch 4 \
        --seq 16 --dropout 0 --lr 1e-2 --epochs 4 --save none > "$work/$1.log" 2>&1
    grep '"event": "evaluation"' "$work/$1/classifier/metrics.jsonl" | sed 's/.*"validation_loss": *\([^,}]*\).*/\1/' > "$work/$1.losses"
}
printf 'a\tthe first\nb\tnext\na\tthe last of all\nb\tno\n' > "$work/few.tsv"
classify on_cuda cuda fp32; classify on_cpu cpu fp32; classify other cpu bf16
if paste "$work/on_cpu.losses" "$work/on_cuda.losses" "$work/other.losses" |
    awk 'function off(x) {return x < $1 ? $1 - x : x - $1} {apart += off($2); own += off($3)} END {exit !(NR == 4 && $2 < 0.68 && apart < own)}'; then pass
else fail "classifier" "$(paste "$work/on_cpu.losses" "$work/on_cuda.losses" "$work/other.losses") $(tail -n 1 "$work/on_cuda.log")"; fi

# amp_check and amp_bench: the device's own lines are there, and the self-tests pass.
build/model_amp_check --device cuda --quick --size 64 --copies 1 --seconds 0.2 --layers 1 --channels 64 --batch 1 --seq 16 > "$work/check.log" 2>&1
for line in "autocast fp16" "autocast bf16" "loss scaler" "numerics tf32" "numerics fp16" "numerics bf16"; do
    if grep -q "^  PASS      $line " "$work/check.log"; then pass; else fail "amp_check: $line" "$(grep "$line" "$work/check.log" || tail -n 2 "$work/check.log")"; fi
done
if grep -q "^  .* pinned copies .* GB/s .* from ordinary memory" "$work/check.log"; then pass; else fail "amp_check: pinned copies" "$(grep pinned "$work/check.log")"; fi
if build/model_amp_bench --features --feature pinning --device cuda --layers 1 --channels 32 --heads 2 --vocab 64 --batch 2 --seq 16 --iterations 2 \
    --warmup 1 --json none > "$work/bench.log" 2>&1 && grep -qE "^  pinning .* (gain|loss|even) .* (gain|loss|even)\$" "$work/bench.log"; then pass
else fail "amp_bench: pinning" "$(tail -n 2 "$work/bench.log")"; fi

refused() { # FLAGS TEXT
    if train refused $1; then fail "$1" "not refused"
    elif grep -q -e "$2" "$work/refused.log"; then pass; else fail "$1" "$(tail -n 1 "$work/refused.log")"; fi
}
refused "--device cuda:7" "device cuda:7"
refused "--device cuda:x" "auto, cpu, cuda"
refused "--device cpu --graph" "the cpu backend has no graphs"
refused "--device cuda --graph --profile" "contradicts --profile"

# Kernels of a host's own, in one graph with the scaler: what overflows is skipped on the device, and the scale falls.
if OMP_NUM_THREADS=1 build/model_own_kernels > "$work/own.txt" 2>&1 && awk '/^step/ {n++; error[n] = $4 + 0; sub(/.*2\^/, ""); scale[n] = $0 + 0}
    END {exit !(n == 3 && error[1] > 10 && error[3] < 0.001 && scale[3] < scale[1] && scale[1] < 24)}' "$work/own.txt"; then pass
else fail "kernels of a host's own" "$(tail -n 4 "$work/own.txt")"; fi
closing
