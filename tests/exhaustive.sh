#!/bin/sh
# exhaustive.sh COMMAND...: runs test programs in their full size and closes with the sum of their lines, as run.sh does.
# With RECORD=FILE it leaves what was run, with what and on what, and what came out, as JSON.
log=$(mktemp) rows=$(mktemp) passed=0 failed=0 skipped=0
trap 'rm -f "$log" "$rows"' EXIT
text() { printf '"%s"' "$(printf %s "$1" | sed 's/["\\]/ /g; s/  */ /g; s/^ //')"; }
list() { sed 's/["\\]/ /g; s/^ */"/; s/$/"/' | paste -sd, - | sed 's/,"/, "/g'; }
for command; do
    echo "== $command"
    start=$(date +%s)
    $command > "$log" 2>&1
    status=$?
    cat "$log"
    last=$(tail -n 1 "$log")
    case $last in *" passed, "*" failed, "*" skipped") ;; *) last="0 passed, 1 failed, 0 skipped" ;; esac
    passed=$((passed + $(echo "$last" | cut -d' ' -f1)))
    failed=$((failed + $(echo "$last" | cut -d' ' -f3)))
    skipped=$((skipped + $(echo "$last" | cut -d' ' -f5)))
    if [ -s "$rows" ]; then echo , >> "$rows"; fi
    printf '  {"command": %s, "status": %d, "seconds": %d, "result": %s,\n   "lines": [%s]}' "$(text "$command")" $status \
        $(($(date +%s) - start)) "$(text "$last")" "$(sed '$d' "$log" | list)" >> "$rows"
done
echo "$passed passed, $failed failed, $skipped skipped"
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
