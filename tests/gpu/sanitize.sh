#!/bin/sh
# sanitize.sh - a short list of the CUDA backend's tests under compute-sanitizer.  GPU_BIN: where the programs are.
. tests/lib.sh
bin=${GPU_BIN:-build/gpu}
limit=25

# sanitize TOOL PROGRAM FILTER
sanitize() {
    timeout "$limit" compute-sanitizer --tool "$1" --error-exitcode 9 "$bin/$2" --filter "$3" > "$work/log" 2>&1
    status=$?
    if grep -q 'Device not supported\|not supported on this' "$work/log"; then
        skip "$1 $2 $3" "compute-sanitizer does not support this device"
    elif [ "$status" -eq 124 ]; then skip "$1 $2 $3" "not done in $limit seconds"
    elif [ "$status" -ne 0 ]; then fail "$1 $2 $3" "$(grep -v '^skip' "$work/log" | tail -n 8)"
    elif ! grep -q '^[1-9][0-9]* passed' "$work/log"; then fail "$1 $2 $3" "ran no test"
    else pass; fi
}
if [ "$GPU_MODEL" = 1 ]; then skip "compute-sanitizer" "the model GPU looks for such faults itself"
elif ! have compute-sanitizer; then skip "compute-sanitizer" "not installed"
else
    sanitize memcheck t_cuda_operators softmax
    sanitize memcheck t_cuda_operators cross_entropy
    sanitize racecheck t_cuda_operators norm
    sanitize synccheck t_cuda_operators embedding
fi
closing
