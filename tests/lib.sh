# lib.sh - has the functions of the shell tests: pass NAME, fail NAME TEXT, skip NAME REASON, and `closing` at the end.
export LC_ALL=C             # awk's and sort's numbers have points, whatever the locale here
passed=0 failed=0 skipped=0
pass() { passed=$((passed + 1)); }
fail() { failed=$((failed + 1)); echo "FAIL $1: $2"; }
skip() { skipped=$((skipped + 1)); echo "skip $1: $2"; }
have() { command -v "$1" >/dev/null 2>&1; }
# made FILE...: ends the script if one of them, which `make` builds, is not there.
made() { for f in "$@"; do [ -s "$f" ] || { echo "FAIL ${0##*/}: $f is missing: make $f"; exit 1; }; done; }
# Test programs: their names, and the file of one.
test_names() { ls tests/*/t_*.c | sed 's:.*/::; s/\.c$//'; }
source_of() { ls tests/*/"$1.c"; }
# A script that checked nothing has failed.
closing() {
    if [ $((passed + failed + skipped)) -eq 0 ]; then fail "${0##*/}" "checked nothing"; fi
    echo "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ]
}

# check NAME COMMAND...: passes when the command succeeds silently on stderr and stdout.
check() {
    name=$1; shift
    if output=$("$@" 2>&1) && [ -z "$output" ]; then pass; else fail "$name" "$(echo "$output" | head -n 8)"; fi
}
work=$(mktemp -d) || { fail "${0##*/}" "no temporary folder: is TMPDIR one that can be written?"; closing; exit 1; }
trap 'rm -rf "$work"' EXIT

# at_once NAME COMMAND...: the same for several commands at a time, one per core (or CORES), each silent when all is well;
# collect waits for the rest.
cores=${CORES:-$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)} running=0
at_once() {
    running=$((running + 1))
    echo "$1" > "$work/at_once.$running.name"
    shift
    { "$@" || echo "failed: $*"; } > "$work/at_once.$running" 2>&1 &
    if [ $running -eq "$cores" ]; then collect; fi
}
collect() {
    wait
    while [ $running -gt 0 ]; do
        if [ -s "$work/at_once.$running" ]; then fail "$(cat "$work/at_once.$running.name")" "$(head -n 8 "$work/at_once.$running")"; else pass; fi
        running=$((running - 1))
    done
}
