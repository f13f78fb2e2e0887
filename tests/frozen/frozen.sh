#!/bin/sh
# frozen.sh - checks that programs written for amp.h 0.2.0 still compile and still print the same losses.  The examples of
# 0.2.0, kept in an archive, must compile without a warning against today's amp.h.  Those listed in programs.txt must print
# the losses that they printed with 0.2.0.  If other kernels run than the recorded ones (the first line of losses.txt),
# numbers may differ by one part in fifty and by 0.02.  `frozen.sh --record` prints the content of losses.txt, which was
# made with the amp.h of 0.2.0.
. tests/lib.sh
made build/amp.o
cc=${CC:-gcc}
top=$(pwd)
gzip -dc tests/frozen/examples-0.2.0.tar.gz | tar -xf - -C "$work"
mkdir "$work/build"
cp build/amp.o amp.h "$work/"
cd "$work" || exit 1
cp examples/README.md text

# Programs compile one per core.
for source in examples/*.c; do
    name=$(basename "$source" .c)
    at_once "$name compiles" $cc -std=c99 -O0 -Wall -Wextra -Wpedantic -DAMP_IMPLEMENTATION_INCLUDED "$source" amp.o -o "build/$name" -lm -lpthread
done
collect

printf '#include "amp.h"\n#include <stdio.h>\nint main(void) { amp_machine m; if (amp_machine_probe(&m)) return 1; printf("path %%d\\n", (int)m.cpu.path); return 0; }\n' > path.c
$cc -O0 -I. path.c amp.o -o build/path -lm -lpthread

# What each program says of losses, without speeds.
losses() {
    ./build/path
    while read -r command; do
        echo "# $command"
        # shellcheck disable=SC2086
        build/$command 2>/dev/null < /dev/null | grep -E "(loss|error on its points|error|validation) [0-9]" | sed "s: | [0-9,]* tok.*::" | sort
    done < "$top/tests/frozen/programs.txt"
}
losses > now
if [ "${1:-}" = --record ]; then cat now; exit; fi
differs=$(awk '
    function near(a, b) {return a - b <= 0.02 + (b < 0 ? -b : b) / 50 && b - a <= 0.02 + (b < 0 ? -b : b) / 50}
    function same(a, b,  x, y, n, m, i) {
        n = split(a, x, /[ ,;|]+/); m = split(b, y, /[ ,;|]+/)
        if (n != m) return 0
        for (i = 1; i <= n; i++)
            if (x[i] != y[i] && !(x[i] ~ /^-?[0-9.]+(e[-+][0-9]+)?$/ && y[i] ~ /^-?[0-9.]+(e[-+][0-9]+)?$/ && near(x[i] + 0, y[i] + 0))) return 0
        return 1
    }
    NR == FNR {was[FNR] = $0; lines = FNR; next}
    FNR == 1 {strict = $0 == was[1]; next}
    /^# / {program = $0}
    strict ? $0 != was[FNR] : !same($0, was[FNR]) {print program ": " $0 " where 0.2.0 said: " was[FNR]}
    END {if (FNR != lines) print "now " FNR " lines, then " lines}' "$top/tests/frozen/losses.txt" now | head -n 5)
if [ -s now ] && [ -z "$differs" ]; then pass; else fail "losses of 0.2.0" "$differs"; fi
cd "$top" || exit 1
closing
