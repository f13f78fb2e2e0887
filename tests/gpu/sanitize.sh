#!/bin/sh
# sanitize.sh - a short list of the CUDA backend's tests under compute-sanitizer, in SANITIZE_SECONDS in all.
# GPU_BIN: where the programs are.  The tool is looked for in PATH and beside nvcc.
. tests/lib.sh
bin=${GPU_BIN:-build/gpu}
end=$(($(date +%s) + ${SANITIZE_SECONDS:-100}))
nvcc=$(sh tests/gpu/find.sh nvcc) && PATH=$PATH:$(dirname "$nvcc"):$(dirname "$nvcc")/../compute-sanitizer

# sanitize TOOL PROGRAM FILTER
sanitize() {
    limit=$((end - $(date +%s)))
    [ "$limit" -gt 40 ] && limit=40
    if [ "$limit" -lt 5 ]; then skip "$1 $2 $3" "no time left"; return; fi
    timeout -s KILL "$limit" compute-sanitizer --tool "$1" --error-exitcode 9 "$bin/$2" --filter "$3" > "$work/log" 2>&1
    status=$?
    if grep -q 'Device not supported\|not supported on this' "$work/log"; then
        skip "$1 $2 $3" "compute-sanitizer does not support this device"
    elif [ "$status" -eq 137 ] || [ "$status" -eq 124 ]; then skip "$1 $2 $3" "not done in $limit seconds"
    elif [ "$status" -ne 0 ]; then fail "$1 $2 $3" "$(grep -v '^skip' "$work/log" | tail -n 8)"
    elif ! grep -q '^[1-9][0-9]* passed' "$work/log"; then fail "$1 $2 $3" "ran no test"
    else pass; fi
}
if [ "$GPU_MODEL" = 1 ]; then skip "compute-sanitizer" "the model GPU looks for such faults itself"
elif ! have compute-sanitizer; then skip "compute-sanitizer" "not installed"
else
    sanitize memcheck t_cuda_operators softmax_backward
    sanitize synccheck t_cuda_operators embedding_backward
    sanitize memcheck t_cuda_operators cross_entropy_long_rows
    sanitize racecheck t_cuda_gpt same_bits
    sanitize racecheck t_cuda_operators norm_backward
    sanitize racecheck t_cuda_attention tensor_cores
fi
closing
