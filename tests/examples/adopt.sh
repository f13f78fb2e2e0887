#!/bin/sh
# adopt.sh - compares a program before and after it adopts amp.h: both compile, few lines differ, and both learn equally
# well.
. tests/lib.sh
made build/amp.o
cc=${CC:-gcc} flags=${CFLAGS:--O2}

# build LEVEL NAME FLAGS...: compiles without a word, with -OLEVEL: most programs here compile longer than they run.
build() { level=$1 name=$2; shift 2; check "compile $name" $cc $flags -O$level -Wall -Wextra -Werror "$@" -o "$work/$name" -lm -lpthread; }
# Both share out loops of their own by OpenMP, where the compiler has it.
omp=-Wno-unknown-pragmas
echo 'int main(void) { return 0; }' > "$work/probe.c"
if $cc -fopenmp "$work/probe.c" -o "$work/probe" 2>/dev/null; then omp=-fopenmp; fi
build 3 before $omp examples/adopt/before.c
build 1 after $omp -DAMP_IMPLEMENTATION_INCLUDED examples/adopt/after.c build/amp.o

# What adopts amp.h also compiles alone, with the flags and where the line in its head says, and brings the implementation:
# here without code, which takes long.
alone() {
    line=$(sed -n "s|^ \*     gcc \(.*$2\) -o $1 .*|\1|p" "examples/adopt/$1.c")
    if [ -n "$line" ] && grep -q '^#define AMP_IMPLEMENTATION$' "examples/adopt/$1.c"; then
        check "$1 alone" sh -c "cd $3 && $cc -Wall -Wextra -fsyntax-only $(echo "$line" | sed "s/-fopenmp/$omp/")"
    else fail "$1 alone" "its head does not say how it compiles, or it lacks AMP_IMPLEMENTATION"; fi
}
alone after after.c examples/adopt
alone momentum examples/adopt/momentum.c .

lines=$(diff examples/adopt/before.c examples/adopt/after.c | grep -c '^[<>]')
if [ "$lines" -gt 0 ] && [ "$lines" -lt 40 ]; then pass; else fail "the diff" "$lines changed lines, at most 39 are allowed"; fi

# The test loss of n runs in plain fp32 that differ only in their seed has mean m and deviation s.  One more run of their
# kind lies within t s sqrt(1 + 1/n) of m but once in a thousand (Student's t, n - 1 degrees of freedom): a run with amp.h
# must be of their kind.
loss_of() { "$@" | sed -n 's/^test loss \([^,]*\),.*/\1/p'; }
for seed in 1 2 3 4 5 6 7 8; do loss_of "$work/before" $seed 8; done > "$work/losses"
interval=$(awk -v t=5.408 '{n++; s += $1; q += $1 * $1} END {m = s / n; print m, t * sqrt((q - n * m * m) / (n - 1) * (1 + 1 / n))}' "$work/losses")
for precision in fp32 fp16 bf16; do
    loss=$(loss_of "$work/after" 1 8 $precision)
    if echo "$loss $interval" | awk '{exit !(NF == 3 && $3 > 0 && $1 - $2 <= $3 && $2 - $1 <= $3)}'; then pass
    else fail "after in $precision" "test loss $loss, before: $interval (mean, and how far one run may lie from it)"; fi
done
if "$work/after" 1 1 fp7 > /dev/null 2> "$work/error"; then fail "after in fp7" "accepted"
elif grep -q '"fp7"' "$work/error"; then pass; else fail "after in fp7" "$(cat "$work/error")"; fi
closing
