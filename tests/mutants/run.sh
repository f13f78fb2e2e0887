#!/bin/sh
# run.sh [NAME...] - checks that the tests catch each mutant of amp.h in mutants.txt.  A mutant is a small change of the
# code that still compiles.  It is caught if the test program that mutants.txt names for it fails, crashes or does not end.
# With names, only those mutants are tested.  Before that, every test that is needed must pass on the unchanged amp.h, built
# in the same way.  Without names, the results are written to build/mutants.json.
#
# INSIDE names the tests that contain amp.h themselves.  The others share one compilation of it.  clang is used where it is
# installed, because it compiles this in half the time.  OpenMP is off, because the mutants change what the threads compute.
. tests/lib.sh
cc=clang
have clang || cc=${CC:-gcc}
flags="-std=c99 -O0 -w"
limit=120                               # seconds of CPU time; the slowest test needs a tenth of that
list=tests/mutants/mutants.txt
begun=$(date +%s)

# The CPU flag without which the code of a mutant does not run, or nothing.
needs() { sed -n "/^$1 |/,/^\$/s/^? //p" $list; }

# build TREE PROGRAM: the test and the amp.h of this tree.
build() {
    case " $INSIDE " in
        *" $2 "*) $cc $flags -I"$1/tests" "$1/$(source_of "$2")" -o "$1/$2" -lm -lpthread -ldl ;;
        *)  echo '#include "amp.h"' > "$1/amp.c"
            $cc $flags -DAMP_IMPLEMENTATION -I"$1" -c "$1/amp.c" -o "$1/amp.o" &&
            $cc $flags -DAMP_IMPLEMENTATION_INCLUDED -I"$1/tests" "$1/$(source_of "$2")" "$1/amp.o" -o "$1/$2" -lm -lpthread -ldl ;;
    esac
}
# ends PROGRAM FILTER: its exit status.  Only CPU time says that a test does not end: on a busy machine all take long.  The
# outer shell swallows what the inner one says of a program that was killed.
ends() {
    (
        (ulimit -t "$limit"; exec timeout 3600 "$1" --stop ${2:+--filter "$2"} > "$1.log" 2>&1)
        exit $?
    ) 2> /dev/null
}

# One tree per core: the tests include ../amp.h and ../examples.
for i in $(seq "$cores"); do
    mkdir -p "$work/tree.$i"
    tar cf - amp.h tests/*.h tests/*/*.[ch] examples/*.[ch] | tar xf - -C "$work/tree.$i"
done
same() { echo "$work/tree.$running"; }

passes() {
    tree=$(same)
    cp amp.h "$tree"
    if ! build "$tree" "$1" 2> "$tree/log"; then echo "does not build: $(head -n 3 "$tree/log")"; return; fi
    grep "^[a-z0-9_]* |.*| *$1\( \|\$\)" "$work/mutants" | sed "s/.*| *$1 *//" | sort -u > "$tree/filters"
    while read -r filter; do
        ends "$tree/$1" "$filter" || { echo "$1 $filter fails on amp.h as it is"; tail -n 3 "$tree/$1.log"; }
        case $(tail -n 1 "$tree/$1.log") in "0 passed"*) echo "$1 $filter runs no test" ;; esac
    done < "$tree/filters"
}

caught() {
    tree=$(same) mutant=$1 program=$2 filter=$3
    awk -v name="$mutant" -f tests/mutants/mutate.awk $list amp.h > "$tree/amp.h" || return
    if ! build "$tree" "$program" 2> "$tree/log"; then echo "does not build: $(head -n 3 "$tree/log")"; return; fi
    ends "$tree/$program" "$filter" && { echo "survives $program $filter"; return; }
    status=$?
    how=$(sed -n 's/^FAIL \([a-z0-9_]*\).*/\1/p' "$tree/$program.log" | head -n 1)
    case $status in 124|152|137) how="no end" ;; 1) ;; *) how="signal $((status - 128))" ;; esac
    echo "    {\"mutant\": \"$mutant\", \"program\": \"$program\", \"caught_by\": \"$how\"}" > "$work/result.$mutant"
}

sed -n '/^[a-z0-9_]* |/p' $list > "$work/mutants"
if [ $# -gt 0 ]; then for name; do grep "^$name |" "$work/mutants" || echo "$name | ? | no_such_mutant"; done > "$work/some"; mv "$work/some" "$work/mutants"; fi
for program in $(sed 's/.*| *\([a-z_0-9]*\).*/\1/' "$work/mutants" | sort -u); do at_once "$program unchanged" passes "$program"; done
collect
if [ "$failed" -gt 0 ]; then closing; exit; fi
while IFS='|' read -r name _ test; do
    set -- $test
    name=${name% }
    flag=$(needs "$name")
    if [ -n "$flag" ] && ! grep -qw "$flag" /proc/cpuinfo; then skip "$name" "this CPU has no $flag"; continue; fi
    at_once "$name" caught "$name" "$1" "$2"
done < "$work/mutants"
collect
if [ -d build ] && [ "$(wc -l < "$work/mutants")" -eq "$(grep -c '^[a-z0-9_]* |' $list)" ]; then
    { echo "{\"what\": \"mutants of amp.h, one change of a token each\", \"command\": \"make mutants\","
      echo " \"compiler\": \"$($cc --version | head -n 1)\", \"flags\": \"$flags\","
      echo " \"cpu\": \"$(sed -n 's/^model name.*: //p' /proc/cpuinfo 2>/dev/null | head -n 1)\", \"cores\": $cores,"
      echo " \"mutants\": $(wc -l < "$work/mutants"), \"skipped\": $skipped, \"caught\": $(ls "$work" | grep -c '^result\.'), \"seconds\": $(($(date +%s) - begun)),"
      echo " \"each\": ["
      while IFS=' |' read -r name _; do cat "$work/result.$name" 2>/dev/null; done < "$work/mutants" | sed '$!s/$/,/'
      echo "  ]}"; } > build/mutants.json
fi
closing
