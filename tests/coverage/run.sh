#!/bin/sh
# run.sh - which lines and branches of amp.h the tests reach: every t_ program is built with gcov's counters and without
# optimisation, run, and what they reach is added up.  Fails below 95% of the lines or 85% of the branches, and where
# something is not reached without a reason in unreached.txt.  The list goes to build/coverage.txt, the figures to
# build/coverage.json.  run.sh PROGRAM...: those programs alone, and the list of what they reach, without a verdict.
#
# INSIDE names the tests that bring amp.h themselves; the others share one compilation of it, and so do those on the model
# GPU (MODEL: their objects), which run the host's side of it.  CC, CXX, OMP (the model's): as in the Makefile.
. tests/lib.sh
cc=${CC:-gcc} cxx=${CXX:-g++} gcov=${GCOV:-gcov}
flags="-O0 --coverage -w"
only="-fprofile-filter-files=.*amp\\.h"      # the tests themselves are not counted, which would only slow them down
begun=$(date +%s)
if ! $cc --version | head -n 1 | grep -qi 'gcc\|^cc'; then echo "FAIL coverage: needs gcc and its gcov"; exit 1; fi

cp tests/coverage/*.awk tests/coverage/unreached.txt "$work"
echo '#include "amp.h"' > "$work/amp.c"
shared() { $cc -std=c99 $flags -DAMP_IMPLEMENTATION -I. -c "$work/amp.c" -o "$work/amp.o"; }
c_test() {
    case " $INSIDE " in *" $1 "*) amp= ;; *) amp="-DAMP_IMPLEMENTATION_INCLUDED $work/amp.o" ;; esac
    $cc -std=c99 $flags "$only" "tests/$1.c" $amp -o "$work/$1" -lm -lpthread -ldl
}
model_test() { $cxx -std=c++17 -w $OMP --coverage -I. -Itests/cuda_on_cpu -Itests/cuda_on_cpu/include "tests/cuda_on_cpu/$1.cpp" $MODEL "$work/amp.o" -o "$work/$1" -ldl -lm -lpthread; }
# These compute most, and counters that several threads write slow them down: one thread reaches the same.
run() {
    case $1 in t_gemm|t_attention) one="taskset -c 0" ;; *) one= ;; esac
    ${one:-} "$work/$1" > "$work/$1.log" 2>&1 || tail -n 5 "$work/$1.log"
}
tests=${*:-$(cd tests && ls t_*.c | sed 's/\.c$//')}
[ -n "$MODEL" ] && [ $# -eq 0 ] && models="t_cuda_training t_cuda_operators"
check "amp.o" shared
for test in $tests; do at_once "build $test" c_test "$test"; done; collect
for test in $models; do at_once "build $test" model_test "$test"; done; collect
for test in $tests $models; do at_once "$test" run "$test"; done; collect
[ "$failed" -eq 0 ] || { closing; exit 1; }

for counts in "$work"/*.gcda; do
    (cd "$work" && $gcov -b -j -t "$counts" 2>/dev/null | awk -f merge.awk)
done | awk '$1 == "L" { n[$1 " " $2 " " $3] += $4 } $1 == "B" { n[$1 " " $2 " " $3 " " $4] += $5 } END { for (k in n) print k, n[k] }' |
    sort -k2,2n -k1,1r -k3,3 > "$work/table"
cp "$work/table" build/coverage.table
awk -f tests/coverage/report.awk tests/coverage/unreached.txt amp.h "$work/table" > build/coverage.txt
figures=$(tail -n 1 build/coverage.txt)
value() { echo "$figures" | sed "s/.*\"$1\": \([0-9.]*\).*/\1/"; }
{ echo "{\"what\": \"lines and branches of amp.h that the tests reach\", \"command\": \"make coverage\","
  echo " \"compiler\": \"$($cc --version | head -n 1)\", \"flags\": \"$flags\","
  echo " \"cpu\": \"$(sed -n 's/^model name.*: //p' /proc/cpuinfo 2>/dev/null | head -n 1)\", \"seconds\": $(($(date +%s) - begun)),"
  echo " \"programs\": \"$(echo $tests $models)\","
  echo " \"figures\": $figures}"; } > build/coverage.json
echo "$(value lines_percent)% of $(value lines) lines, $(value branches_percent)% of $(value branches) branches"
if [ $# -gt 0 ]; then closing; exit; fi
at_least() { if awk "BEGIN { exit !($2 >= $3) }"; then pass; else fail "$1" "$2, must be at least $3"; fi; }
at_least "lines" "$(value lines_percent)" 95
at_least "branches" "$(value branches_percent)" 85
none() { if [ "$2" -eq 0 ]; then pass; else fail "$1" "$2 without a reason in tests/coverage/unreached.txt: $(grep '^!' build/coverage.txt | head -n 5)"; fi; }
none "unreached lines" "$(value unlisted_lines)"
none "untaken branches" "$(value unlisted_branches)"
closing
