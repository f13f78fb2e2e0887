#!/bin/sh
# docs.sh - every code block of README.md and of the manual compiles.  A block with main is a whole program;
# any other stands inside a function after the declarations of tests/docs_names.h.
. tests/lib.sh
cc=${CC:-gcc}
warn="-Wall -Wextra -Werror -Wno-unused -I. -Itests"

# compile FILE LANGUAGE NAME
compile() {
    case $2 in
        c) check "$3" $cc -std=c99 $warn -fsyntax-only -x c "$1" ;;
        cpp) if have g++; then check "$3" g++ -std=c++11 $warn -fsyntax-only -x c++ "$1"; else skip "$3" "no g++"; fi ;;
        cuda) if have nvcc; then check "$3" nvcc -I. -Itests -x cu -c "$1" -o "$work/cuda.o"; else skip "$3" "no nvcc"; fi ;;
    esac
}

awk -v dir="$work" '
    /^```(c|cpp|cuda)$/ {lang = substr($0, 4); n++; file = sprintf("%s/readme_%02d.%s", dir, n, lang); printf "" > file; on = 1; next}
    /^```/ {on = 0; if (file) close(file)}
    on {print > file}' README.md
# The manual: the lines between "#define AMP_IMPLEMENTATION" and the end of main, indented by 7.
awk '/^       #define AMP_IMPLEMENTATION/ {on = 1; text = ""} on {text = text substr($0, 8) "\n"}
     on && /^       }$/ {printf "%s", text; exit} /^   [A-Z]/ {on = 0}' amp.h > "$work/manual_01.c"
for file in "$work"/readme_*.* "$work"/manual_*.c; do
    [ -e "$file" ] || continue
    language=${file##*.}
    if ! grep -q 'main(' "$file"; then
        { echo '#include "docs_names.h"'; grep '^#' "$file"; echo 'amp_result block(void); amp_result block(void) {'; grep -v '^#' "$file"; echo '; return AMP_OK; }'; } > "$file.new"
        mv "$file.new" "$file"
    fi
    compile "$file" "$language" "$(basename "$file")"
done
# The README shows every line that adopting amp.h changed, but for the two comments at the top.
awk '/^```diff$/ {on = 1; next} /^```/ {on = 0} on' README.md > "$work/shown"
diff -U0 examples/adopt/before.c examples/adopt/after.c | grep '^[-+]' | grep -v -e '^---' -e '^+++' -e '^[-+]/\* ' -e '^[-+] \*' -e '^[-+]$' > "$work/changed"
if [ -s "$work/shown" ] && cmp -s "$work/shown" "$work/changed"; then pass; else fail "README's diff" "is not that of examples/adopt: $(diff "$work/shown" "$work/changed" | head -n 5)"; fi
[ "$passed" -gt 2 ] || fail "code blocks" "only $passed found"
closing
