#!/bin/sh
# compilers.sh - compiles amp.h without warnings by every installed gcc, clang and zig, at every level of optimisation.  It
# does this with amp.h alone, under every language standard, without parts, behind macros that a program may define, and with
# ThreadSanitizer.  COMPILERS="gcc-13 clang-19" selects compilers.  Five compilers take more than an hour of CPU time.
. tests/lib.sh
strict="-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror -I."
printf '#define AMP_IMPLEMENTATION\n#include "amp.h"\nint main(void) { return amp_version() != AMP_VERSION; }\n' > "$work/impl.c"
found() {
    for name in gcc clang; do
        have $name && echo $name
        for number in $(seq 7 30); do if have "$name-$number"; then echo "$name-$number"; fi; done
    done
    if have zig; then echo "zig cc"; fi
}
# compiled COMPILER FLAGS...: without a word.
compiled() { $1 $strict $2 -c "$work/impl.c" -o "$work/$running.o"; }
# The parts that the manual lets a program leave out, and all that its smallest command leaves out.
parts=$(sed -n '/^   LEAVING PARTS OUT/,/^   STEP BY STEP/p' amp.h | grep -oE '^       AMP_NO_[A-Z0-9]+' | sed 's/ *//; s/^/-D/')
smallest=$(sed -n 's/^       gcc -O2 \(-DAMP_NO_.*\) -c amp.c$/\1/p' amp.h)
list=${COMPILERS:-$(found | sed 's/ /_/')}
for name in $list; do
    compiler=$(echo "$name" | tr _ ' ')
    if ! have "${compiler%% *}"; then fail "$compiler" "not installed"; continue; fi
    for flags in -O0 -O1 -O2 -O3 -Os "-O3 -ffast-math" "-O1 -march=x86-64-v4" "-O0 -fsanitize=thread" "-O1 -include tests/host_macros.h"; do
        case $flags in *x86-64*) [ "$(uname -m)" = x86_64 ] || continue ;; esac
        at_once "$compiler $flags" compiled "$compiler" "-std=gnu99 $flags"
    done
    for standard in c99 c11 c17 c++11 c++14 c++17 c++20; do
        case $standard in c++*) language=c++ ;; *) language=c ;; esac
        $compiler -x $language -std=$standard -fsyntax-only /dev/null 2>/dev/null || continue        # too old to know it
        at_once "$compiler -std=$standard" compiled "$compiler" "-fsyntax-only -x $language -std=$standard"
    done
    for without in $parts "$smallest" "-DAMP_NO_CARE -DAMP_NO_WATCH"; do
        for standard in "-x c -std=c99" "-x c++ -std=c++11"; do
            at_once "$compiler $without $standard" compiled "$compiler" "-fsyntax-only $standard -Wundef -Wsign-conversion $without"
        done
    done
done
collect
closing
