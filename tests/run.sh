#!/bin/sh
# run.sh PROGRAM... [--at-once PROGRAM...]: runs test programs (*.sh by sh), those after --at-once as many at a time as there
# are cores, shows what they print, and closes with the sum of their "N passed, N failed, N skipped" lines.  A program that
# ends without such a line counts as one failure.
work=$(mktemp -d) passed=0 failed=0 skipped=0 running=0 most=1
trap 'rm -rf "$work"' EXIT
export AMPT_ERRORS="${AMPT_ERRORS:-$work/provoked}"     # what tests add for errors.sh

start() {
    case $1 in *.sh) run="sh $1" ;; */*) run=$1 ;; *) run=./$1 ;; esac
    $run > "$work/$2.log" 2>&1
    echo $? > "$work/$2.status"
}
# Waits for what runs, and tells what came of each.
tell() {
    wait
    for i in $(seq "$running"); do
        program=$(cat "$work/$i.name") last=$(tail -n 1 "$work/$i.log")
        [ "$most" -eq 1 ] || echo "== $program"
        cat "$work/$i.log"
        case $last in
            *" passed, "*" failed, "*" skipped") ;;
            *) echo "FAIL $program: ended with status $(cat "$work/$i.status") and no closing line"; last="0 passed, 1 failed, 0 skipped" ;;
        esac
        # shellcheck disable=SC2046
        count $(echo "$last" | tr -d ,)
    done
    running=0
}
count() { passed=$((passed + $1)); failed=$((failed + $3)); skipped=$((skipped + $5)); }

for program; do
    if [ "$program" = --at-once ]; then most=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1); continue; fi
    running=$((running + 1))
    echo "$program" > "$work/$running.name"
    if [ "$most" -eq 1 ]; then echo "== $program"; start "$program" 1
    else start "$program" $running & fi
    [ $running -lt "$most" ] || tell
done
tell
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
