#!/bin/sh
# sanitize.sh - the unit tests under AddressSanitizer and UndefinedBehaviorSanitizer, and those with threads
# under ThreadSanitizer (without OpenMP, whose runtime it does not know).
. tests/lib.sh
cc=clang
have clang || cc=${CC:-gcc}

# run NAME FLAGS PROGRAMS...
run() {
    name=$1 flags=$2; shift 2
    echo 'int main(void) { return 0; }' > "$work/probe.c"
    if ! $cc $flags "$work/probe.c" -o "$work/probe" 2>/dev/null || ! "$work/probe" 2>/dev/null; then skip "$name" "$cc cannot build with $flags"; return; fi
    for program; do
        if ! $cc -std=c99 -g -O1 $flags "tests/$program.c" -o "$work/$program" -lm -lpthread 2> "$work/log"; then
            fail "$name $program" "does not build: $(head -n 3 "$work/log")"
        elif ! "$work/$program" > "$work/log" 2>&1 || grep -q 'runtime error\|Sanitizer' "$work/log"; then
            fail "$name $program" "$(grep -m 5 'runtime error\|ERROR\|WARNING\|FAIL\|#[0-3] ' "$work/log" || tail -n 5 "$work/log")"
        else pass; fi
    done
}
all=$(cd tests && ls t_*.c | sed 's/\.c$//')
run "asan+ubsan" "-fsanitize=address,undefined -fno-sanitize-recover=undefined" $all
run "tsan" "-fsanitize=thread" t_data t_autocast t_gemm t_context
closing
