#!/bin/sh
# run.sh - measures which lines and branches of amp.h and amp_cuda.cu the tests reach.  Every t_ program is built without
# optimisation and with gcov's counters, and is run.  The counts of all programs are added up.  Those of amp_cuda.cu come
# from the tests on the model GPU.  The script fails below 95% of the lines or 85% of the branches of either file.  It also
# fails if code is not reached and unreached.txt or unreached_cuda.txt gives no reason for it.  The lists are written to
# build/coverage.txt and build/coverage_cuda.txt, and the figures to .json files of the same names.  `run.sh PROGRAM...`
# runs those programs alone and prints what they reach, without a verdict.
#
# INSIDE names the tests that contain amp.h themselves.  The others share one compilation of it.  The tests on the model GPU
# share another one (MODEL names its objects), and run the CPU side of amp_cuda.cu.  CC, CXX and OMP (for the model) are as
# in the Makefile.
. tests/lib.sh
cc=${CC:-gcc} cxx=${CXX:-g++} gcov=${GCOV:-gcov}
flags="-O0 --coverage -w -DAMPI_ALWAYS=inline"     # what is inlined many times is one function
only="-fprofile-filter-files=.*amp\\.h"      # the tests themselves are not counted, which would only slow them down
begun=$(date +%s)
if ! $cc --version | head -n 1 | grep -qi 'gcc\|^cc'; then echo "FAIL coverage: needs gcc and its gcov"; exit 1; fi

cp tests/coverage/*.awk tests/coverage/unreached*.txt "$work"
echo '#include "amp.h"' > "$work/amp.c"
shared() { $cc -std=c99 $flags -DAMP_IMPLEMENTATION -I. -c "$work/amp.c" -o "$work/amp.o"; }
c_test() {
    case " $INSIDE " in *" $1 "*) amp= ;; *) amp="-DAMP_IMPLEMENTATION_INCLUDED $work/amp.o" ;; esac
    $cc -std=c99 -Itests $flags "$only" "$(source_of "$1")" $amp -o "$work/$1" -lm -lpthread -ldl
}
# Without exceptions, whose branches are none of the source's; an inlined function is one function (COC_COUNTED).
of_model="-std=c++17 $OMP -DAMP_NVTX -I. -Itests/cuda -Itests/cuda/include"
cuda() { $cxx $flags $of_model -fno-exceptions -DCOC_COUNTED -x c++ -c amp_cuda.cu -o "$work/amp_cuda.o"; }
model_test() {
    $cxx $flags "$only" $of_model "tests/cuda/$1.cpp" $MODEL "$work/amp.o" "$work/amp_cuda.o" -o "$work/$1" -rdynamic -ldl -lm -lpthread
}
# Of the tests on the model, and of those that compute most, one thread reaches the same, and counters that several write
# are slow.
run() {
    case $1 in t_gemm|t_attention) one="taskset -c 0" ;; *) one= ;; esac
    OMP_NUM_THREADS=1 ${one:-} "$work/$1" > "$work/$1.log" 2>&1 || tail -n 5 "$work/$1.log"
}
# Runs programs of which no other worker has begun with, one after the other.
worker() { for program in $models $tests; do mkdir "$work/begun.$program" 2>/dev/null && run "$program"; done; true; }

all_models=$([ -z "$MODEL" ] || (cd tests/cuda && ls -S t_cuda_*.cpp | sed 's/\.cpp$//'))
tests= models=
for program in ${*:-$(test_names) $all_models}; do
    case $program in t_cuda_*) models="$models $program" ;; *) tests="$tests $program" ;; esac
done
check "amp.o" shared
if [ -n "$models" ]; then
    cp build/coc_nvml.so build/coc_nccl.so "$work"
    check "amp_cuda.o" cuda
fi
for program in $models; do at_once "build $program" model_test "$program"; done
for program in $tests; do at_once "build $program" c_test "$program"; done; collect
for number in $(seq "$cores"); do at_once "the programs" worker; done; collect
[ "$failed" -eq 0 ] || { closing; exit 1; }

value() { echo "$figures" | sed "s/.*\"$1\": \([0-9.]*\).*/\1/"; }
# report FILE LIST OUT PROGRAMS COMPILER: $work/table of FILE beside its list of reasons, as build/OUT.txt and OUT.json.
report() {
    cp "$work/table" "build/$3.table"
    awk -f tests/coverage/report.awk "tests/coverage/$2" "$1" "$work/table" > "build/$3.txt"
    figures=$(tail -n 1 "build/$3.txt")
    { echo "{\"what\": \"lines and branches of $1 that the tests reach\", \"command\": \"make coverage\","
      echo " \"compiler\": \"$($5 --version | head -n 1)\", \"flags\": \"$flags\","
      echo " \"cpu\": \"$(sed -n 's/^model name.*: //p' /proc/cpuinfo 2>/dev/null | head -n 1)\", \"seconds\": $(($(date +%s) - begun)),"
      echo " \"programs\": \"$4\","
      echo " \"figures\": $figures}"; } > "build/$3.json"
    echo "$1: $(value lines_percent)% of $(value lines) lines, $(value branches_percent)% of $(value branches) branches"
}
at_least() { if awk "BEGIN { exit !($2 >= $3) }"; then pass; else fail "$1" "$2, must be at least $3"; fi; }
none() { if [ "$2" -eq 0 ]; then pass; else fail "$1" "$2 without a reason in tests/coverage/$3: $(grep '^!' "build/$4.txt" | head -n 5)"; fi; }
verdict() {
    at_least "lines of $1" "$(value lines_percent)" 95
    at_least "branches of $1" "$(value branches_percent)" 85
    none "unreached lines of $1" "$(value unlisted_lines)" "$2" "$3"
    none "untaken branches of $1" "$(value unlisted_branches)" "$2" "$3"
}
counts() { (cd "$work" && $gcov -b -j -t "$1" 2>/dev/null | awk -v file="$2" -f merge.awk); }
added() { awk '$1 == "L" { n[$1 " " $2 " " $3] += $4 } $1 == "B" { n[$1 " " $2 " " $3 " " $4] += $5 } END { for (k in n) print k, n[k] }' | sort -k2,2n -k1,1r -k3,3; }

for of in "$work"/*.gcda; do
    [ "$of" = "$work/amp_cuda.gcda" ] || counts "$of" amp.h
done | added > "$work/table"
report amp.h unreached.txt coverage "$(echo $tests $models)" "$cc"
[ $# -gt 0 ] || verdict amp.h unreached.txt coverage
if [ -n "$models" ]; then
    counts "$work/amp_cuda.gcda" amp_cuda.cu | awk -f tests/coverage/functions.awk amp_cuda.cu - | added > "$work/table"
    report amp_cuda.cu unreached_cuda.txt coverage_cuda "$(echo $models)" "$cxx"
    [ $# -gt 0 ] || verdict amp_cuda.cu unreached_cuda.txt coverage_cuda
elif [ $# -eq 0 ]; then skip "coverage of amp_cuda.cu" "no C++ compiler"
fi
closing
