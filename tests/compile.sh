#!/bin/sh
# compile.sh - compiles amp.h under every language standard and with every installed compiler, and in every way that it may be
# included.  Some compilations go on to machine code, which has warnings of its own: those about unused functions once per
# compiler that needs it, and those from gcc's optimisation in C.  compilers.sh has every pair of a compiler and a standard or
# a part left out, every version of the compilers, and every level of optimisation.
. tests/lib.sh
strict="-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wundef -Werror -I."
printf '#define AMP_IMPLEMENTATION\n#include "amp.h"\nint main(void) { return amp_version() != AMP_VERSION; }\n' > "$work/impl.c"
printf '#include "amp.h"\nint user(void);\nint user(void) { return amp_version(); }\n' > "$work/user.c"
printf '#define AMP_STATIC\n#define AMP_IMPLEMENTATION\n#include "amp.h"\nint main(void) { return amp_version() != AMP_VERSION; }\n' > "$work/static.c"
printf '#define AMP_IMPLEMENTATION\n#include "amp.h"\n#include "amp.h"\nint main(void) { return 0; }\n' > "$work/twice.c"
printf '#include "amp.h"\n#define AMP_IMPLEMENTATION\n#include "amp.h"\nint main(void) { return 0; }\n' > "$work/later.c"

# matrix COMPILER LANGUAGE STANDARDS...: what a program sees under each standard; the implementation under the first, and
# under the last, where amp.h is included twice.  compilers.sh has it under each.
matrix() {
    compiler=$1 language=$2; shift 2
    if ! have "$compiler"; then skip "$compiler" "not installed"; return; fi
    for standard; do
        at_once "$compiler -std=$standard user" "$compiler" -x "$language" "-std=$standard" $strict -Wsign-conversion -fsyntax-only "$work/user.c"
        last=$standard
    done
    at_once "$compiler -std=$1 impl" "$compiler" -x "$language" "-std=$1" $strict -Wsign-conversion -fsyntax-only "$work/impl.c"
    at_once "$compiler -std=$last twice" "$compiler" -x "$language" "-std=$last" $strict -Wsign-conversion -fsyntax-only "$work/twice.c"
    at_once "$compiler static" "$compiler" -x "$language" "-std=$1" -O0 $strict $static -Wsign-conversion "$work/static.c" -o "$work/static_$language.o"
    collect
}
# behind_macros COMPILER: after macros that a program may have, the declarations and the implementation with its vector kernels.
behind_macros() {
    have "$1" || return
    for file in impl user; do
        at_once "$1 $file behind a program's macros" "$1" -std=gnu99 $strict -include tests/host_macros.h -fsyntax-only "$work/$file.c"
    done
}
static="-fsanitize=thread -c"       # gcc's says so where amp.h uses what it does not know
matrix "${CC:-gcc}" c c99 c11 c17
static=-fsyntax-only
matrix clang c c11 c99
matrix clang++ c++ c++20 c++11
behind_macros "${CC:-gcc}"
behind_macros clang
static=-c
matrix g++ c++ c++14 c++11 c++20 c++17

# What AMP_STATIC compiles exports nothing but its program's main.  In C++ the headers of the library leave weak symbols.
if have nm; then
    for language in c c++; do
        if [ "$language" = c++ ] && ! have g++; then skip "static mode exports, C++" "no g++"; continue; fi
        stray=$(nm -g --defined-only "$work/static_$language.o" | awk '$3 != "main" && ($2 !~ /^[WVu]$/ || tolower($3) ~ /amp/) {print $3}' | tr '\n' ' ')
        if [ -s "$work/static_$language.o" ] && [ -z "$stray" ]; then pass; else fail "static mode exports, $language" "$stray"; fi
    done
else skip "static mode exports" "no nm"; fi

# To look at a program, and to link one, clang needs a third of gcc's time.
quick=clang
have clang || quick=${CC:-gcc}
hidden='-DAMP_API=__attribute__((visibility("hidden"))) extern'
at_once "declarations first, implementation later" $quick -std=gnu99 -fPIC "$hidden" $strict -c "$work/later.c" -o "$work/later.o"
# A host may be older than the implementation, which says so once.
printf '#include "amp.h"\nint main(void) { amp_convert_desc d; d.saturate = 0; return amp_version() && d.saturate; }\n' > "$work/old.c"
for old in "${CC:-gcc} -ansi" "clang -ansi" "g++ -x c++ -std=c++98" "clang++ -x c++ -std=c++98"; do
    if have "${old%% *}"; then
        check "$old" $old -pedantic -Wall -Wextra -Werror -I. -fsyntax-only "$work/old.c"
        said=$($old -DAMP_IMPLEMENTATION -I. -fsyntax-only "$work/old.c" 2>&1 | grep -c 'error: ')
        if [ "$said" -eq 1 ]; then pass; else fail "$old with AMP_IMPLEMENTATION" "$said errors, must be one"; fi
    else skip "$old" "not installed"; fi
done
# Every public struct is one that a host may set to {0}.
{
    echo '#include "amp.h"'
    awk '/^#define AMPI_STRUCTS\(X\)/ {p = 1} p {print} p && !/\\$/ {exit}' amp.h | grep -oE 'X\([a-z0-9_]+\)' |
        sed 's/X(\(.*\))/extern amp_\1 zero_\1; amp_\1 zero_\1 = {0};/'
} > "$work/zero.c"
if [ "$(wc -l < "$work/zero.c")" -ge 90 ]; then check "= {0} under -Wc++-compat" "${CC:-gcc}" -std=c99 -Wc++-compat -Werror -I. -fsyntax-only "$work/zero.c"
else fail "= {0} under -Wc++-compat" "no list of structs"; fi
if [ "$(uname -m)" = x86_64 ]; then         # a host's own flags may give every function registers that only AVX-512 has
    at_once "${CC:-gcc} -Ofast -march=x86-64-v4" "${CC:-gcc}" -std=c99 -Ofast -march=x86-64-v4 $strict -Wsign-conversion -c "$work/impl.c" -o "$work/v4.o"
    # clang 16 recursed until its stack ended, from -O1 on.
    if have clang-16; then clang=clang-16; else clang=clang; skip "clang-16 -O1" "not installed"; fi
    have $clang && at_once "$clang -O1 -march=x86-64-v4" $clang -std=c99 -O1 -ffast-math -march=x86-64-v4 $strict -c "$work/impl.c" -o "$work/v4_clang.o"
fi
collect
# A shared library with amp.h inside exports nothing of it where AMP_API says so.
if have nm; then
    check "a shared library builds" "${CC:-gcc}" -shared -fPIC -I. "$hidden" "$work/later.o" "$work/user.c" -o "$work/hidden.so" -lm -lpthread
    stray=$(nm -D --defined-only "$work/hidden.so" | awk '$3 != "main" && $3 != "user" {print $3}' | tr '\n' ' ')
    if [ -s "$work/hidden.so" ] && [ -z "$stray" ]; then pass; else fail "a shared library exports" "$stray"; fi
else skip "a shared library exports" "no nm"; fi

# A host's own thread pools.
if have g++; then
    check "a pool of std::thread builds" g++ -std=c++11 $strict tests/host_pool.cpp -o "$work/host_pool" -lpthread
    check "a pool of std::thread runs" "$work/host_pool"
    if g++ -fopenmp tests/host_pool.cpp -o "$work/host_pool" -lpthread 2>/dev/null; then check "a pool of OpenMP runs" "$work/host_pool"
    else skip "a pool of OpenMP" "this g++ has none"; fi
else skip "a host's thread pools" "no g++"; fi

# Two files linked: one brings the implementation, the other calls it; and twice the static mode.
printf '#define AMP_IMPLEMENTATION\n#include "amp.h"\nint other(void);\nint main(void) { return other() != amp_version(); }\n' > "$work/one.c"
printf '#include "amp.h"\nint other(void);\nint other(void) { return amp_version(); }\n' > "$work/two.c"
check "two files link" $quick -std=c99 $strict "$work/one.c" "$work/two.c" -o "$work/linked" -lm -lpthread
check "two files run" "$work/linked"
printf '#define AMP_STATIC\n#define AMP_IMPLEMENTATION\n#include "amp.h"\nint other(void);\nint other(void) { return amp_version(); }\n' > "$work/two.c"
sed "s:^#define AMP_IMPLEMENTATION:#define AMP_STATIC\n&:" "$work/one.c" > "$work/one_static.c"
check "two static copies link" $quick -std=c99 $strict "$work/one_static.c" "$work/two.c" -o "$work/linked" -lm -lpthread
check "two static copies run" "$work/linked"

# In parts, as the manual names them: each macro alone, its smallest command, and without care and watch.  Clean in every
# language, no larger than it was, and what is left out is missed by name.
parts=$(sed -n '/^   LEAVING PARTS OUT/,/^   STEP BY STEP/p' amp.h | grep -oE '^       AMP_NO_[A-Z0-9]+' | sed 's/ *//; s/^/-D/' | tr '\n' ' ')
smallest=$(sed -n 's/^       gcc -O2 \(-DAMP_NO_.*\) -c amp.c$/\1/p' amp.h)
if [ "$(echo $parts | wc -w)" -eq 8 ] && [ -n "$smallest" ]; then pass; else fail "parts" "the manual names: $parts; $smallest"; fi
lean="-DAMP_NO_CARE -DAMP_NO_WATCH"
# Each of these by clang and by one of three other compilers in turn; compilers.sh has them by all.
turn=0
for without in $parts "$smallest" "$lean"; do
    at_once "implementation $without" $quick -std=c99 $strict -Wsign-conversion $without -fsyntax-only "$work/impl.c"
    turn=$((turn % 3 + 1))
    compiler=$(printf '%s\n' "${CC:-gcc} -std=c99" "g++ -x c++ -std=c++11" "clang++ -x c++ -std=c++11" | sed -n ${turn}p)
    if have "${compiler%% *}"; then at_once "$compiler $without" $compiler $strict -Wsign-conversion $without -fsyntax-only "$work/impl.c"
    else skip "$compiler $without" "not installed"; fi
    at_once "user $without" "${CC:-gcc}" -std=c99 $strict $without -fsyntax-only "$work/user.c"
done
at_once "static $lean" $quick -std=c99 $strict -Wsign-conversion $lean -fsyntax-only "$work/static.c"
collect
for without in $parts "$lean"; do
    check "t_lean.c $without builds" $quick -std=c99 -O0 -I. -Itests -DLEAN $without tests/unit/t_lean.c -o "$work/lean" -lm -lpthread
    if "$work/lean" > "$work/said"; then pass; else fail "t_lean.c $without" "$(tail -n 3 "$work/said")"; fi
done
$quick -std=c99 -O0 -I. $lean -c "$work/impl.c" -o "$work/lean.o"
for call in amp_verify amp_gradcheck amp_advise amp_tune amp_recovery_create amp_status_get amp_profile_push amp_monitor_create amp_monitor_step \
    amp_monitor_next amp_monitor_epoch amp_monitor_summary amp_tensor_stats_create; do
    printf '#include "amp.h"\nvoid (*called)(void);\nint main(void) { called = (void (*)(void))%s; return called == 0; }\n' $call > "$work/caller.c"
    if "${CC:-gcc}" -std=c99 -I. $lean -fsyntax-only "$work/caller.c" 2>&1 | grep -q "error: .*$call"; then pass
    else fail "$call, left out" "a file with $lean sees its declaration"; fi
    $quick -std=c99 -I. -c "$work/caller.c" -o "$work/caller.o"
    if "${CC:-gcc}" "$work/lean.o" "$work/caller.o" -o "$work/linked" -lm -lpthread 2>&1 | grep -q "undefined reference.*$call"; then pass
    else fail "$call, left out" "a file that sees its declaration links"; fi
done
$quick -std=c99 -O0 -I. $smallest -c "$work/impl.c" -o "$work/smallest.o"
for call in amp_linear amp_gemm amp_add amp_tape_create amp_model_create amp_ranks_create amp_params_broadcast amp_state_save_ranks amp_fp8_save amp_verify \
    amp_optimizer_create amp_step amp_graph_begin amp_schedule_lr; do
    printf '#include "amp.h"\nvoid (*called)(void);\nint main(void) { called = (void (*)(void))%s; return called == 0; }\n' $call > "$work/caller.c"
    $quick -std=c99 -I. -c "$work/caller.c" -o "$work/caller.o"
    if "${CC:-gcc}" "$work/smallest.o" "$work/caller.o" -o "$work/linked" -lm -lpthread 2>&1 | grep -q "undefined reference.*$call"; then pass
    else fail "$call, left out" "a file that sees its declaration links"; fi
done
# How much of amp.h is compiled then, comments included: each run of lines between two conditions, if the preprocessor keeps it.
mkdir -p "$work/marked"
awk '{print} /^ *#  *(if|elif|else|endif)|^ *#(if|elif|else|endif)/ {d = 1} d && !/\\$/ {print "#pragma AMPT_KEPT " NR; d = 0}' amp.h > "$work/marked/amp.h"
"${CC:-gcc}" -std=c99 $lean -I"$work/marked" -E "$work/impl.c" | sed -n 's/^#pragma AMPT_KEPT //p' | sort -u > "$work/kept"
kept=$(awk 'FILENAME == ARGV[1] {kept[$1] = 1; next} FNR == 1 {on = 1} /^ *#  *(if|elif|else|endif)|^ *#(if|elif|else|endif)/ {d = 1}
    on || d {n += length($0) + 1} d && !/\\$/ {on = FNR in kept; d = 0} END {print n}' "$work/kept" amp.h)
# What is left out is at least what it was in 0.2.0.
all=$(wc -c < amp.h)
if [ "$kept" -gt 400000 ] && [ $((all - kept)) -gt 279830 ]; then pass; else fail "size without care and watch" "$kept of $all bytes"; fi

# Programs that only their own targets build, with amp.h's implementation where they look inside.
for program in tests/bench/bench_*.c tests/hostile/crash/*.c; do
    outside=-DAMP_IMPLEMENTATION_INCLUDED
    if grep -qE 'ampi_|AMPI_|amp->' "$program"; then outside=; fi
    at_once "$program" $quick -std=c99 $strict -Wno-shadow -I. -Itests $outside -fsyntax-only "$program"
done
collect

if have nvcc; then
    printf '#include "amp.h"\n__global__ void k(uint16_t *out, float x) { *out = amp_bf16_from_f32(x, 0); }\nint main() { return 0; }\n' > "$work/user.cu"
    printf '#define AMP_IMPLEMENTATION\n#include "amp.h"\nint main() { return amp_version() != AMP_VERSION; }\n' > "$work/impl.cu"
    check "included in a .cu" nvcc -Werror all-warnings -I. -c "$work/user.cu" -o "$work/user.o"
    check "implemented in a .cu" nvcc -Werror all-warnings -I. -c "$work/impl.cu" -o "$work/impl_cu.o"
else
    skip "included in a .cu" "no nvcc"
fi
closing
