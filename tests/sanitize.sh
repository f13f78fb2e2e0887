#!/bin/sh
# sanitize.sh - the unit tests under AddressSanitizer and UndefinedBehaviorSanitizer, and those with threads
# under ThreadSanitizer; as many at once as there are cores.
# INSIDE names the tests that bring amp.h themselves, INSIDE_QUICK those of them that compute little; the others share one
# compilation.
. tests/lib.sh
cc=clang rest=
have clang || cc=${CC:-gcc}

# run NAME FLAGS PROGRAMS...
run() {
    name=$1 flags=$2; shift 2
    echo 'int main(void) { return 0; }' > "$work/probe.c"
    if ! $cc $flags "$work/probe.c" -o "$work/probe" 2>/dev/null || ! "$work/probe" 2>/dev/null; then skip "$name" "$cc cannot build with $flags"; return; fi
    echo '#include "amp.h"' | $cc -std=c99 -g -O1 $flags -DAMP_IMPLEMENTATION -I. -x c -c - -o "$work/amp.o"
    for program; do at_once "$name $program" sanitized "$name" "$flags" "$program"; done
    for host in flat online conv; do at_once "$name $host" sanitized_host "$name" "$flags" "$host"; done
    collect
}
sanitized() {
    built="$work/$3.$1" log="$work/$3.$1.log"
    amp="-DAMP_IMPLEMENTATION_INCLUDED $work/amp.o" optimise=-O1
    case " $INSIDE $INSIDE_QUICK " in *" $3 "*) amp= ;; esac
    case " $INSIDE_QUICK " in *" $3 "*) optimise=-O0 ;; esac
    if ! $cc -std=c99 -Itests -g $optimise $2 "$(source_of "$3")" $amp -o "$built" -lm -lpthread -ldl 2> "$log"; then echo "does not build: $(head -n 3 "$log")"
    elif ! "$built" > "$log" 2>&1 || grep -q 'runtime error\|Sanitizer' "$log"; then
        grep -m 5 'runtime error\|ERROR\|WARNING\|FAIL\|#[0-3] ' "$log" || tail -n 5 "$log"
    fi
    rm -f "$built"
}
# A host of tests/examples/hosts/, in widths that are worth two threads: with nothing set, in bf16, and from a scale that is too high.
sanitized_host() {
    built="$work/$3.$1" log="$work/$3.$1.log" steps=2
    [ "$3" != conv ] || steps=30
    sed 's/HIDDEN  *64/HIDDEN 256/; s/BATCH  *64/BATCH 256/' "tests/examples/hosts/$3_after.c" > "$built.c"
    $cc -g -O1 $2 -Itests/examples/hosts/blas -I. -DAMP_IMPLEMENTATION_INCLUDED "$built.c" tests/examples/hosts/blas/cblas.c "$work/amp.o" -o "$built" -lm -lpthread 2>&1
    for settings in "" "AMP_DTYPE=bf16" "AMP_DTYPE=fp16 AMP_INIT_SCALE=1e12"; do
        env $settings "$built" 1 $steps > "$log" 2>&1 || tail -n 5 "$log"
        grep -m 5 'runtime error\|Sanitizer\|#[0-3] ' "$log"
    done
    true
}
# Those that take about as long stand together: what runs at once ends with the longest.
for program in $(test_names); do
    case " $INSIDE $INSIDE_QUICK " in *" $program "*) ;; *) rest="$rest $program" ;; esac
done
run "asan+ubsan" "-fsanitize=address,undefined -fno-sanitize-recover=undefined" $INSIDE $INSIDE_QUICK $rest
run "tsan" "-fsanitize=thread" t_threads t_concurrency t_lifetime t_data t_autocast t_gemm t_context t_debug_log t_differential t_recompute t_ranks t_watch
closing
