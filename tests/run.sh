#!/bin/sh
# run.sh PROGRAM...: runs test programs (*.sh by sh), shows what they print, and closes with the sum of their
# "N passed, N failed, N skipped" lines.  A program that ends without such a line counts as one failure.
log=$(mktemp) passed=0 failed=0 skipped=0
trap 'rm -f "$log"' EXIT
for program; do
    case $program in *.sh) run="sh $program" ;; */*) run=$program ;; *) run=./$program ;; esac
    echo "== $program"
    $run > "$log" 2>&1
    status=$?
    cat "$log"
    last=$(tail -n 1 "$log")
    case $last in
        *" passed, "*" failed, "*" skipped") ;;
        *) echo "FAIL $program: ended with status $status and no closing line"; last="0 passed, 1 failed, 0 skipped" ;;
    esac
    # shellcheck disable=SC2086
    set_counts() { passed=$((passed + $1)); failed=$((failed + $3)); skipped=$((skipped + $5)); }
    set_counts $(echo "$last" | tr -d ,)
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
