#!/bin/sh
# sanitize.sh - runs tests of the CUDA backend under compute-sanitizer.  SANITIZE="TOOL PROGRAM FILTER" selects the tool,
# the program, and the tests whose names contain FILTER.  SANITIZE_SECONDS is the time limit.  Errors that were found before
# the limit count too.  GPU_BIN is the folder of the programs.  The tool is searched in PATH and beside nvcc.
. tests/lib.sh
bin=${GPU_BIN:-build/gpu} limit=${SANITIZE_SECONDS:-100}
nvcc=$(sh tests/gpu/find.sh nvcc) && PATH=$PATH:$(dirname "$nvcc"):$(dirname "$nvcc")/../compute-sanitizer

# sanitize TOOL PROGRAM FILTER
sanitize() {
    timeout -s INT -k 5 "$limit" compute-sanitizer --tool "$1" --error-exitcode 9 "$bin/$2" --filter "$3" > "$work/log" 2>&1
    status=$?
    if grep -q 'Device not supported\|not supported on this' "$work/log"; then
        skip "$1 $2 $3" "compute-sanitizer does not support this device"
    elif grep -q 'Race reported\|========= Invalid\|Barrier error\|ERROR SUMMARY: [1-9]' "$work/log"; then
        fail "$1 $2 $3" "$(grep '=====' "$work/log" | head -n 12)"
    elif [ "$status" -eq 137 ] || [ "$status" -eq 124 ] || [ "$status" -eq 130 ]; then
        skip "$1 $2 $3" "not done in $limit seconds, nothing found by then: $(grep -c '^ok\|^PASS' "$work/log") tests ended"
    elif [ "$status" -ne 0 ]; then fail "$1 $2 $3" "$(grep -v '^skip' "$work/log" | tail -n 8)"
    elif ! grep -q '^[1-9][0-9]* passed' "$work/log"; then fail "$1 $2 $3" "ran no test"
    else pass; fi
}
if [ "$GPU_MODEL" = 1 ]; then skip "compute-sanitizer" "the model GPU looks for such faults itself"
elif ! have compute-sanitizer; then skip "compute-sanitizer" "not installed"
elif [ -z "$SANITIZE" ]; then fail "sanitize.sh" "SANITIZE names nothing to run"
else
    # shellcheck disable=SC2086
    sanitize $SANITIZE
fi
closing
