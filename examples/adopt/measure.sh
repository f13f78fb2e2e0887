#!/bin/sh
# measure.sh - what adopting amp.h gained: before.c and after.c in every precision, run in turn, medians of their times.
#
#     sh examples/adopt/measure.sh [rounds [steps]]       from the project's folder; `make adopt` runs it
#
# Both are compiled for this machine with -O3 -march=native, which amp.h does not need and the loops of before.c do.
set -e
export LC_ALL=C             # numbers have points, whatever the locale here
cc=${CC:-gcc} rounds=${1:-5} steps=${2:-200}
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
$cc -O3 -march=native -fopenmp examples/adopt/before.c -o "$work/before" -lm
$cc -O3 -march=native -fopenmp examples/adopt/after.c -o "$work/after" -lm -lpthread

# one ROW COMMAND...: notes the time and the result of a run.
one() { row=$1; shift; "$@" | awk -v row="$row" '/^trained/ {t = $3} /^test/ {print row, t, $3 + 0, $5}' >> "$work/runs"; }
round=0
while [ $round -lt "$rounds" ]; do
    one before "$work/before" 1 "$steps"
    for precision in fp32 fp16 bf16; do one "after,$precision" "$work/after" 1 "$steps" $precision; done
    round=$((round + 1))
done
lines=$(diff examples/adopt/before.c examples/adopt/after.c | grep -c '^[<>]')
echo "$lines changed lines; medians of $rounds rounds of $steps steps"
printf '%-14s %8s %9s %10s %9s\n' program seconds speedup "test loss" accuracy
for row in before after,fp32 after,fp16 after,bf16; do
    grep "^$row " "$work/runs" | sort -k2n | awk -v n="$rounds" -v row="$row" '
        NR == int((n + 1) / 2) {low = $2} NR == int(n / 2) + 1 {print row, (low + $2) / 2, $3, $4}'
done | awk 'NR == 1 {base = $2} {printf "%-14s %8.2f %8.1fx %10s %9s\n", $1, $2, base / $2, $3, $4}'
