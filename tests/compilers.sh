#!/bin/sh
# compilers.sh - compiles amp.h without warnings by every installed gcc, clang and zig, at every level of optimisation.  It
# does this with amp.h alone, behind macros that a program may define, and with ThreadSanitizer.  COMPILERS="gcc-13
# clang-19" selects compilers.  Five compilers take about an hour of CPU time.
. tests/lib.sh
strict="-std=gnu99 -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror -I."
printf '#define AMP_IMPLEMENTATION\n#include "amp.h"\nint main(void) { return amp_version() != AMP_VERSION; }\n' > "$work/impl.c"
found() {
    for name in gcc clang; do
        have $name && echo $name
        for number in $(seq 7 30); do if have "$name-$number"; then echo "$name-$number"; fi; done
    done
    if have zig; then echo "zig cc"; fi
}
# compiled COMPILER FLAGS...: without a word.
compiled() { $1 $strict -c "$work/impl.c" -o "$work/$running.o" $2; }
list=${COMPILERS:-$(found | sed 's/ /_/')}
for name in $list; do
    compiler=$(echo "$name" | tr _ ' ')
    if ! have "${compiler%% *}"; then fail "$compiler" "not installed"; continue; fi
    for flags in -O0 -O1 -O2 -O3 -Os "-O3 -ffast-math" "-O1 -march=x86-64-v4" "-O0 -fsanitize=thread" "-O1 -include tests/host_macros.h"; do
        case $flags in *x86-64*) [ "$(uname -m)" = x86_64 ] || continue ;; esac
        at_once "$compiler $flags" compiled "$compiler" "$flags"
    done
done
collect
closing
