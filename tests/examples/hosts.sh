#!/bin/sh
# hosts.sh - compares three existing programs, in tests/examples/hosts/, with the same programs after adopting amp.h.
#     flat      parameters and gradients in one array each, a fused RMSprop              at most 10 changed lines
#     online    updates after each sample, without a gradient buffer, in fp64            at most 15
#     conv      layers that keep gradient and momentum in one buffer, for -Ofast         at most 30
# Each program runs with -O2, with -Ofast, and with floating-point exceptions that trap.  With -Ofast, the loss is also
# checked in runs where infinities must be detected.  A changed line counts twice, once as it was and once as it is.  No
# line may be longer than 130 columns.  The BLAS that the programs use is tests/examples/hosts/blas.
. tests/lib.sh
made build/amp.o build/fast_inside.o
cc=${CC:-gcc} flags=${CFLAGS:--O2} linked=-DAMP_IMPLEMENTATION_INCLUDED
for name in $(env | sed -n 's/^\(AMP_[A-Z0-9_]*\)=.*/\1/p'); do unset "$name"; done

# build OUT FLAGS...: compiles without a word.
build() { out=$1; shift; check "compile $out" $cc $flags -Wall -Wextra -Werror "$@" -Itests/examples/hosts/blas -I. -o "$work/$out" -lm -lpthread; }
# loss COMMAND...: the mean of the last losses of three seeds.
loss() { for seed in 1 2 3; do "$@" $seed | sed -n '$s/.*loss //p'; done | awk '{s += $1} END {print NR == 3 ? s / NR : "nan"}'; }
# near NAME LOSS FACTOR OTHER: within so much of the other.
near() {
    if awk "BEGIN {x = \"$2\" + 0; y = \"$4\" + 0; exit !(x > 0 && y > 0 && x < y * $3 && y < x * $3)}"; then pass; else fail "$1" "loss $2, must be within a factor of $3 of $4"; fi
}

build blas.o -c tests/examples/hosts/blas/cblas.c
build shim.o -c $linked examples/adopt/cblas.c
cat > "$work/traps.c" <<'TRAPS'
#define _GNU_SOURCE
#include <fenv.h>
static void __attribute__((constructor)) traps(void) { feenableexcept(FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW); }
TRAPS
$cc -c "$work/traps.c" -Werror -o "$work/traps.o" 2> /dev/null || { rm -f "$work/traps.o"; skip "traps on" "no feenableexcept"; }
for row in "flat 10" "online 15" "conv 30"; do
    host=${row% *} most=${row#* } before=tests/examples/hosts/${row% *}_before.c after=tests/examples/hosts/${row% *}_after.c
    lines=$(diff $before $after | grep -c '^[<>]')
    if [ "$lines" -gt 0 ] && [ "$lines" -le "$most" ] && ! grep -q '.\{131\}' $after; then pass
    else fail "$host: the diff" "$lines changed lines, at most $most are allowed, of at most 130 columns"; fi

    for how in Ofast O2; do
        amp=build/amp.o
        [ $how = O2 ] || amp=build/fast_inside.o
        build "$host.before" -$how $before "$work/blas.o"
        build "$host" -$how $linked $after "$work/blas.o" $amp
        "$work/$host.before" 1 > "$work/before" && "$work/$host" 1 > "$work/after"
        if cmp -s "$work/before" "$work/after"; then pass; else fail "$host, $how: nothing set" "$(diff "$work/before" "$work/after" | head -n 4)"; fi
        plain=$(loss "$work/$host.before")
        if [ $how = O2 ]; then
            near "$host, $how: bf16" "$(loss env AMP_DTYPE=bf16 "$work/$host")" 1.01 "$plain"
            near "$host, $how: fp16" "$(loss env AMP_DTYPE=fp16 "$work/$host")" 1.02 "$plain"
        fi
        near "$host, $how: from a scale of 1e12" "$(loss env AMP_DTYPE=fp16 AMP_INIT_SCALE=1e12 "$work/$host")" 1.1 "$plain"

        # Exceptions that trap, also from a scale that is too high: the hosts ask for infinities before they sum gradients.
        [ -s "$work/traps.o" ] || continue
        build "$host.traps" -$how $linked $after "$work/blas.o" "$work/traps.o" $amp
        for settings in "" AMP_DTYPE=bf16 AMP_DTYPE=fp16 "AMP_DTYPE=fp16 AMP_INIT_SCALE=1e12"; do
            env $settings "$work/$host" 1 > "$work/before"
            if env $settings "$work/$host.traps" 1 > "$work/after" 2>&1 && cmp -s "$work/before" "$work/after"; then pass
            else fail "$host, $how: traps on, $settings" "$(tail -n 3 "$work/after")"; fi
        done
    done
    # A scale of 1e12 that never moves: what the recovery recovers from.
    stuck=$(AMP_DTYPE=fp16 AMP_INIT_SCALE=1e12 AMP_FROZEN=true "$work/$host" 1 2> "$work/log" | sed -n '$s/.*loss //p')
    if awk "BEGIN {exit !(\"$stuck\" + 0 > 1.5 * $plain)}"; then pass; else fail "$host: frozen at 1e12" "loss $stuck beside $plain"; fi
    if AMP_DTYPE=fp17 "$work/$host" > "$work/log" 2>&1; then fail "$host: fp17" "accepted"
    elif grep -q 'AMP_DTYPE = fp17' "$work/log"; then pass; else fail "$host: fp17" "$(cat "$work/log")"; fi

    # The program as it was, its cblas_sgemm from the shim: another -I and another file to link with.
    grep -q cblas_sgemm $before || continue
    build "$host.shim" -O2 -Iexamples/adopt $before "$work/shim.o" build/amp.o "$work/blas.o"
    "$work/$host.before" 1 > "$work/before" && "$work/$host.shim" 1 > "$work/after"
    check "$host: nothing set, by the shim" cmp "$work/before" "$work/after"
    near "$host: bf16 by the shim" "$(loss env AMP_DTYPE=bf16 "$work/$host.shim")" 1.01 "$plain"
done

# Products large enough to be shared out: the same bits on all threads and on one.
if [ "$cores" -gt 1 ] && have taskset && taskset -c 0 true 2> /dev/null; then
    sed 's/HIDDEN  *64/HIDDEN 512/; s/BATCH  *64/BATCH 256/' tests/examples/hosts/flat_after.c > "$work/wide.c"
    build wide -O2 $linked "$work/wide.c" "$work/blas.o" build/amp.o
    for dtype in bf16 fp16; do
        AMP_DTYPE=$dtype "$work/wide" 1 1 > "$work/all"
        AMP_DTYPE=$dtype taskset -c 0 "$work/wide" 1 1 > "$work/one"
        if grep -q loss "$work/one" && cmp -s "$work/all" "$work/one"; then pass; else fail "threads, $dtype" "$(cat "$work/all" "$work/one")"; fi
    done
else skip "threads" "one core, or no taskset"; fi
closing
