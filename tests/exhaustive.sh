#!/bin/sh
# exhaustive.sh COMMAND... - runs test programs at full size and adds up their results, as run.sh does.  With RECORD=FILE it
# writes a JSON file that says what was run, with which compiler and machine, and the results.
passed=0 failed=0 skipped=0
# breach TEXT: one more failure.
breach() { echo "FAIL exhaustive.sh: $1"; failed=$((failed + 1)); }
closing() { echo "$passed passed, $failed failed, $skipped skipped"; }
{ log=$(mktemp) && rows=$(mktemp); } || { breach "no temporary file: is TMPDIR a folder that can be written?"; closing; exit 1; }
trap 'rm -f "$log" "$rows"' EXIT
text() { printf '"%s"' "$(printf %s "$1" | sed 's/["\\]/ /g; s/  */ /g; s/^ //')"; }
list() { sed 's/["\\]/ /g; s/^ */"/; s/$/"/' | paste -sd, - | sed 's/,"/, "/g'; }
if [ $# -eq 0 ]; then breach "no program to run"; fi
for command; do
    echo "== $command"
    start=$(date +%s)
    $command > "$log" 2>&1
    status=$?
    cat "$log"
    last=$(tail -n 1 "$log")
    case $last in
        [0-9]*" passed, "*" failed, "*" skipped") ;;
        *) breach "$command: status $status and no closing line"; last= ;;
    esac
    # shellcheck disable=SC2046
    set -- $(echo "${last:-0 passed, 0 failed, 0 skipped}" | tr -d ,)
    passed=$((passed + $1)) failed=$((failed + $3)) skipped=$((skipped + $5))
    if [ -z "$last" ]; then :
    elif [ $(($1 + $3 + $5)) -eq 0 ]; then breach "$command ran no test"
    elif [ "$3" -eq 0 ] && [ $status -ne 0 ]; then breach "$command: status $status, and says that nothing failed"
    elif [ "$3" -gt 0 ] && [ $status -eq 0 ]; then breach "$command: status 0, and says that $3 failed"; fi
    if [ -s "$rows" ]; then echo , >> "$rows"; fi
    printf '  {"command": %s, "status": %d, "seconds": %d, "result": %s,\n   "lines": [%s]}' "$(text "$command")" $status \
        $(($(date +%s) - start)) "$(text "$last")" "$(sed '$d' "$log" | list)" >> "$rows"
done
closing
if [ -n "$RECORD" ]; then
    mkdir -p "$(dirname "$RECORD")"
    {
        printf '{"date": "%s", "compiler": %s, "flags": %s,\n' "$(date -u +%Y-%m-%d)" "$(text "$(${CC:-cc} --version | head -n 1)")" "$(text "$CFLAGS")"
        printf ' "cpu": %s, "cores": %d,\n' "$(text "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)")" "$(getconf _NPROCESSORS_ONLN)"
        printf ' "result": "%d passed, %d failed, %d skipped",\n "programs": [\n' $passed $failed $skipped
        cat "$rows"
        printf '\n]}\n'
    } > "$RECORD"
fi
[ "$failed" -eq 0 ]
