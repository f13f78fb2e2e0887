#!/bin/sh
# abi.sh - links files that were compiled against a different amp.h than the implementation, and checks that amp_open
# detects them.  amp_open must return 105 and name the file.  The script also checks that every function of the API half is
# a symbol with its plain name, because other languages call it by that name.
. tests/lib.sh
cc=${CC:-gcc}
strict="-std=c99 -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror"
libs="-lm -lpthread"
mkdir "$work/older" "$work/larger"
sed -E 's/^(#define AMP_VERSION_MINOR) .*/\1 1/; s/^(#define AMP_VERSION_PATCH) .*/\1 3/' amp.h > "$work/older/amp.h"
sed 's/^typedef struct amp_linear_op {/&\n    int64_t more;/' amp.h > "$work/larger/amp.h"
echo '#include "amp.h"' | $cc -std=c99 -O0 -fPIC -DAMP_IMPLEMENTATION -I. -x c -c - -o "$work/amp.o"

# opens: prints what amp_open says; 0 for AMP_OK.
cat > "$work/opens.c" << 'END'
#include "amp.h"
#include <stdio.h>
int main(void) {
    amp_context *amp;
    amp_result result = amp_open(&amp, NULL);
    if (result != AMP_OK) puts(amp_last_error());
    else amp_close(amp);
    return result != AMP_OK;
}
END
printf '#include "amp.h"\namp_result layer(amp_context *amp, amp_linear_op *op);\namp_result layer(amp_context *amp, amp_linear_op *op) { return amp_linear(amp, op); }\n' > "$work/layer.c"

# says NAME TEXT PROGRAM: amp_open in it returned 105 with this text, or with TEXT "" opened.
says() {
    said=$("$3" 2>&1)
    case "$2:$said" in
        :) pass ;;
        :*) fail "$1" "$said" ;;
        *) case $said in "AMP0105 amp_open: $2; rebuild every file against the same amp.h") pass ;; *) fail "$1" "$said" ;; esac ;;
    esac
}
version=$(sed -n 's/^#define AMP_VERSION_TEXT "\(.*\)"/\1/p' amp.h)
older="was compiled against amp.h 0.1.3, the implementation is $version"
sizes="was compiled against this version, but struct sizes differ: compiled with other flags or packing"

# One file: compiled by COMPILER with FLAGS against the amp.h in FOLDER.
one() {
    text=$1 folder=$2 compiler=$3; shift 3
    if ! have "${compiler%% *}"; then skip "$compiler" "not installed"; return; fi
    # shellcheck disable=SC2086
    if $compiler -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror "-I$folder" "$@" -c "$work/opens.c" -o "$work/opens.o" &&
        $cc "$work/opens.o" "$work/amp.o" -o "$work/opens" $libs; then says "$compiler $* with $folder" "$text" "$work/opens"
    else fail "$compiler $* with $folder" "does not build"; fi
}
for compiler in "$cc -std=c99" "g++ -x c++ -std=c++11" "clang -std=c99" "clang++ -x c++ -std=c++20"; do
    one "" . "$compiler"
    one "$work/opens.c $older" "$work/older" "$compiler"
    one "$work/opens.c $sizes" "$work/larger" "$compiler"
    one "$work/opens.c $sizes" . "$compiler" -fpack-struct
done

# Two files: the one that opens has the right header, another has not; also where the linker drops or moves what it can.
two() {
    text=$1 folder=$2; shift 2
    # shellcheck disable=SC2086
    if "$@" $strict -I. -c "$work/opens.c" -o "$work/opens.o" && "$@" $strict "-I$folder" -c "$work/layer.c" -o "$work/layer.o" &&
        "$@" "$work/opens.o" "$work/layer.o" "$work/amp.o" -o "$work/opens" $libs; then says "two files: $*" "$text" "$work/opens"
    else fail "two files: $*" "do not build"; fi
}
two "" . "$cc"
two "$work/layer.c $older" "$work/older" "$cc"
two "$work/layer.c $sizes" "$work/larger" "$cc"
two "$work/layer.c $older" "$work/older" "$cc" -O2 -flto
two "$work/layer.c $older" "$work/older" "$cc" -O2 -ffunction-sections -fdata-sections -Wl,--gc-sections
if have clang; then two "$work/layer.c $older" "$work/older" clang -O1 -fsanitize=address; fi
if have clang && have ld.lld; then two "$work/layer.c $older" "$work/older" clang -O2 -fuse-ld=lld -Wl,--gc-sections -Wno-unused-command-line-argument
else skip "lld" "not installed"; fi

# In a shared library: the program's files are held against it.
if $cc -shared "$work/amp.o" -o "$work/libamp.so" $libs; then
    $cc $strict "-I$work/older" -c "$work/layer.c" -o "$work/layer.o"
    $cc "$work/layer.o" -I. "$work/opens.c" -o "$work/shared" "$work/libamp.so" "-Wl,-rpath,$work" $libs
    says "a shared library" "$work/layer.c $older" "$work/shared"
    $cc -I. "$work/opens.c" -o "$work/shared" "$work/libamp.so" "-Wl,-rpath,$work" $libs
    says "a shared library of the same header" "" "$work/shared"
else fail "a shared library" "does not link"; fi

# Every function the header declares is in that library, by dlsym and by its plain name, and nothing else is.
awk '/^\/\* Stop here/ {exit} {print}' amp.h | grep -oE '^AMP_API [^(]*\bamp_[a-z0-9_]+\(' | sed -E 's/.*[ *](amp_[a-z0-9_]+)\($/\1/' | sort -u > "$work/declared"
{
    printf '#include <dlfcn.h>\n#include <stdio.h>\nint main(int n, char **args) {\n    void *library = dlopen(args[n - 1], RTLD_NOW);\n'
    sed 's/.*/    if (library == NULL || dlsym(library, "&") == NULL) puts("&");/' "$work/declared"
    printf '    return 0;\n}\n'
} > "$work/plain.c"
$cc -std=c99 "$work/plain.c" -o "$work/plain" -ldl
missing=$("$work/plain" "$work/libamp.so" | tr '\n' ' ')
if [ "$(wc -l < "$work/declared")" -ge 170 ] && [ -z "$missing" ]; then pass; else fail "plain symbols" "$(wc -l < "$work/declared") declared, not in the library: $missing"; fi
if have nm; then
    nm -g --defined-only "$work/amp.o" | awk '{print $3}' | sort > "$work/exported"
    odd=$(sort "$work/declared" "$work/exported" | uniq -u | tr '\n' ' ')
    if [ -z "$odd" ]; then pass; else fail "plain symbols" "declared or exported, and not both: $odd"; fi
else skip "symbols" "no nm"; fi
inline=$(awk '/^AMPI_INLINE .*\) \{ return amp_[a-z_]+\(/ {n++} /^AMPI_INLINE .*\) \{$/ {on = 1} on && /^    return amp_[a-z_]+\(/ {n++} /^}/ {on = 0} END {print n + 0}' amp.h)
if [ "$inline" -eq 1 ]; then pass; else fail "inline wrappers" "$inline, not amp_open alone"; fi
closing
