#!/bin/sh
# run.sh - runs test programs side by side, one per core, and adds up their results.
#     run.sh PROGRAM... [--waiting PROGRAM...] [--alone PROGRAM...]
# Programs whose names end in .sh are run by sh.  Programs after --waiting spend most of their time waiting: they run one at
# a time beside the others.  Programs after --alone run one at a time when all others have ended.  JOBS sets how many run at
# a time.  With JOBS=1, no two programs run at the same time.  The script shows the whole output of each program, then the
# five that took longest, and closes with the sum of their "N passed, N failed, N skipped" lines.  One failure is added for
# each program that did not run, that ended without such a line, whose line counts no tests, or whose exit status
# contradicts its line.  One is also added if there is no program to run.  With TIMES=FILE, the wall-clock and CPU seconds
# of each program are written to FILE.
passed=0 failed=0 skipped=0 told=0
# lost TEXT: nothing can run.
lost() { echo "FAIL run.sh: $1"; echo "0 passed, 1 failed, 0 skipped"; exit 1; }
work=$(mktemp -d) || lost "no temporary folder: is TMPDIR one that can be written?"
trap 'rm -rf "$work"' EXIT
export LC_ALL=C
export AMPT_ERRORS="${AMPT_ERRORS:-$work/provoked}"     # what tests add for errors.sh
jobs=${JOBS:-$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)}
mkfifo "$work/ended" || lost "no fifo in $work"

now() { date +%s.%N; }
# run LOG PROGRAM: with its status in LOG.status, when it began and ended in LOG.clock, and its processor time in LOG.cpu.
run() (
    case $2 in *.sh) set -- "$1" "sh $2" ;; */*) ;; *) set -- "$1" "./$2" ;; esac
    now > "$1.clock"
    $2 > "$1.log" 2>&1
    echo $? > "$1.status"
    times > "$1.cpu"
    now >> "$1.clock"
)
# worker LIST PROGRAM...  Takes the next program of the list that no other worker has begun, until there is none; tells the
# folder of each that ended.
worker() {
    list=$1 number=0
    shift
    for program; do
        number=$((number + 1))
        mkdir "$work/$list$number" 2>/dev/null || continue
        run "$work/$list$number/of" "$program"
        echo "$list$number $program"
    done
}
seconds() {     # by the clock, and of the processor, which `times` tells as 0m1.250000s 0m0.010000s of shell and children
    awk 'FILENAME ~ /clock$/ {t = $1 - t; next} {for (i = 1; i < 3; i++) {split($i, part, "m"); cpu += part[1] * 60 + part[2]}}
        END {printf "%.1f %.1f", t, cpu}' "$1.clock" "$1.cpu"
}
count() { passed=$((passed + $1)); failed=$((failed + $3)); skipped=$((skipped + $5)); ran=$(($1 + $3 + $5)) wrong=$3; }
# breach PROGRAM TEXT: one more failure.
breach() { echo "FAIL $1: $2"; failed=$((failed + 1)); }
tell() {
    echo "== $2"
    cat "$work/$1/of.log"
    last=$(tail -n 1 "$work/$1/of.log") status=$(cat "$work/$1/of.status") told=$((told + 1))
    case $last in
        [0-9]*" passed, "*" failed, "*" skipped")
            # shellcheck disable=SC2046
            count $(echo "$last" | tr -d ,)
            if [ "$wrong" -eq 0 ] && [ "$status" != 0 ]; then breach "$2" "ended with status $status, and says that nothing failed"
            elif [ "$wrong" -gt 0 ] && [ "$status" = 0 ]; then breach "$2" "ended with status 0, and says that $wrong failed"
            elif [ "$ran" -eq 0 ] && ! grep -q ' tests left out' "$work/$1/of.log"; then breach "$2" "ran no test"; fi ;;
        *) breach "$2" "ended with status $status and no closing line" ;;
    esac
    echo "$(seconds "$work/$1/of") $2" >> "$work/times"
}
# One thread of OpenMP's each, for the model GPU's would wait in loops for those of others.
# shellcheck disable=SC2086
side_by_side() {
    export OMP_NUM_THREADS=1
    for _ in $(seq "$jobs"); do worker together $together & done
    worker waiting $waiting
    wait
}
tell_all() { while read -r folder program; do tell "$folder" "$program"; done < "$work/ended"; }

began=$(now) together= waiting= alone= into=together asked=0
for program; do
    case $into,$program in
        *,--waiting | *,--alone) into=${program#--}; continue ;;
        together,*) together="$together $program" ;;
        waiting,*) waiting="$waiting $program" ;;
        alone,*) alone="$alone $program" ;;
    esac
    asked=$((asked + 1))
done
if [ "$jobs" -eq 1 ]; then alone="$together $waiting $alone" together= waiting=; fi
side_by_side > "$work/ended" & tell_all
# shellcheck disable=SC2086
worker alone $alone > "$work/ended" & tell_all
sort -rn "$work/times" | awk -v began="$began" -v ended="$(now)" '{cpu += $2} NR <= 5 {slowest = slowest ", " $3 " " $1 " s"}
    END {print "slowest: " substr(slowest, 3); printf "%.0f s, %.0f s of the processor\n", ended - began, cpu}'
[ -z "$TIMES" ] || cp "$work/times" "$TIMES"
if [ "$asked" -eq 0 ]; then breach run.sh "no program to run"; fi
if [ "$told" -ne "$asked" ]; then breach run.sh "$told of $asked programs ran"; fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
