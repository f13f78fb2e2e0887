#!/bin/sh
# cuda.sh [NAME...] - checks on the model GPU that the tests catch each mutant of amp_cuda.cu in cuda.txt.  A mutant is a
# small change of the code.  It is caught if the test program that cuda.txt names for it fails, crashes or does not end.
# With names, only those mutants are tested.  amp_cuda.cu is compiled once with all mutants in it, and $AMP_MUTANT selects
# one.  Before that, every test that is needed must pass without a mutant.  Without names, the results are written to
# build/mutants_cuda.json.
#
# CXX, OMP and MODEL (the model's objects and amp.o) are as in the Makefile.
. tests/lib.sh
cxx=${CXX:-g++}
flags="-std=c++17 -O0 -w -Wno-psabi -I. -Itests/cuda -Itests/cuda/include"
limit=240                               # seconds of CPU time
list=tests/mutants/cuda.txt
begun=$(date +%s)
[ -n "$MODEL" ] || { skip "mutants of amp_cuda.cu" "no C++ compiler"; closing; exit; }

sed -n '/^[a-z0-9_]* |/p' $list | awk '{ print NR " | " $0 }' > "$work/all"
cp "$work/all" "$work/mutants"
if [ $# -gt 0 ]; then for name; do grep "^[0-9]* | $name |" "$work/all" || echo "0 | $name | ? | no_such_mutant"; done > "$work/mutants"; fi
tests() { sed 's/.*| *//' "$work/mutants" | sort -u; }

switched() { awk -f tests/mutants/switch.awk $list amp_cuda.cu > "$work/amp_cuda.cu"; }
compiled() { $cxx $flags $OMP -DAMP_NVTX -x c++ -c "$work/amp_cuda.cu" -o "$work/amp_cuda.o"; }
linked() { $cxx $flags $OMP "tests/cuda/$1.cpp" $MODEL "$work/amp_cuda.o" -o "$work/$1" -ldl -lm -lpthread; }
# ends NUMBER PROGRAM FILTER LOG: its exit status.  One thread each: several run at a time.
ends() {
    (
        (ulimit -t "$limit"; AMP_MUTANT=$1 OMP_NUM_THREADS=1 exec timeout 3600 "$work/$2" --stop --filter "$3" > "$4" 2>&1)
        exit $?
    ) 2> /dev/null
}
passes() {
    ends 0 "$1" "$2" "$work/$1.$2.log" || { echo "$1 $2 fails without a mutant"; tail -n 3 "$work/$1.$2.log"; }
    case $(tail -n 1 "$work/$1.$2.log") in "0 passed"*) echo "$1 $2 runs no test: $(head -n 1 "$work/$1.$2.log")" ;; esac
}
caught() {
    log=$work/log.$2
    ends "$1" "$3" "$4" "$log" && { echo "survives $3 $4"; return; }
    status=$?
    how=$(sed -n 's/^FAIL \([a-z0-9_]*\).*/\1/p' "$log" | head -n 1)
    case $status in 124|152|137) how="no end" ;; 1) ;; *) how="signal $((status - 128))" ;; esac
    echo "    {\"mutant\": \"$2\", \"program\": \"$3\", \"caught_by\": \"$how\"}" > "$work/result.$2"
}

check "the mutants" switched
[ "$failed" -eq 0 ] && check "amp_cuda.cu with its mutants" compiled
[ "$failed" -eq 0 ] || { closing; exit; }
for program in $(tests | sed 's/ .*//' | sort -u); do at_once "$program" linked "$program"; done; collect
tests > "$work/tests"
while read -r program filter; do at_once "$program $filter" passes "$program" "$filter"; done < "$work/tests"; collect
[ "$failed" -eq 0 ] || { closing; exit; }
while IFS='|' read -r number name _ test; do
    set -- $test
    name=$(echo $name)
    at_once "$name" caught "$number" "$name" "$1" "$2"
done < "$work/mutants"
collect
if [ -d build ] && cmp -s "$work/mutants" "$work/all"; then
    { echo "{\"what\": \"mutants of amp_cuda.cu on the model GPU, one changed expression each\", \"command\": \"make mutants-cuda\","
      echo " \"compiler\": \"$($cxx --version | head -n 1)\", \"flags\": \"$flags\","
      echo " \"mutants\": $(wc -l < "$work/mutants"), \"caught\": $(ls "$work" | grep -c '^result\.'), \"seconds\": $(($(date +%s) - begun)),"
      echo " \"each\": ["
      while IFS=' |' read -r _ name _; do cat "$work/result.$name" 2>/dev/null; done < "$work/mutants" | sed '$!s/$/,/'
      echo "  ]}"; } > build/mutants_cuda.json
fi
closing
