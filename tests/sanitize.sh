#!/bin/sh
# sanitize.sh - runs the unit tests under AddressSanitizer and UndefinedBehaviorSanitizer, and those with threads under
# ThreadSanitizer.  As many run at once as there are cores.  INSIDE names the tests of unit/inside.c.  That file is compiled
# once for each of the two and provides amp.h to the other tests.  INSIDE_ALONE names the tests that contain amp.h
# themselves.
. tests/lib.sh
rest=

# gcc compiles inside.c with AddressSanitizer in half of clang's time; its ThreadSanitizer does not know fences.
compiler() { if [ "$1" = tsan ] && have clang; then echo clang; else echo "${CC:-gcc}"; fi; }

# shared NAME FLAGS: the object of inside.c.
shared() {
    mkdir "$work/$1"
    $cc -std=c99 -g1 -O1 -w $2 -Itests -c tests/unit/inside.c -o "$work/$1/inside.o" &&
        $cc $2 tests/unit/inside_main.c "$work/$1/inside.o" -o "$work/$1/t_inside" -lm -lpthread
}
# run NAME FLAGS PROGRAMS...
run() {
    name=$1 flags=$2 cc=$(compiler "$1"); shift 2
    [ -d "$work/$name" ] || return
    for program; do at_once "$name $program" sanitized "$name" "$flags" "$program"; done
    for host in flat online conv; do at_once "$name $host" sanitized_host "$name" "$flags" "$host"; done
    collect
}
sanitized() {
    built="$work/$1/$3" log="$work/$3.$1.log" amp="-DAMP_IMPLEMENTATION_INCLUDED $work/$1/inside.o"
    case " $INSIDE_ALONE " in *" $3 "*) amp= ;; esac
    case " $INSIDE " in
        *" $3 "*) ln -s t_inside "$built" ;;
        *) $cc -std=c99 -Itests -g -O0 $2 "$(source_of "$3")" $amp -o "$built" -lm -lpthread -ldl 2> "$log" ||
               { echo "does not build: $(head -n 3 "$log")"; return; } ;;
    esac
    if ! "$built" > "$log" 2>&1 || grep -q 'runtime error\|Sanitizer:' "$log"; then
        grep -m 5 'runtime error\|ERROR\|WARNING\|FAIL\|#[0-3] ' "$log" || tail -n 5 "$log"
    fi
    rm -f "$built"
}
# A host of tests/examples/hosts/, in widths that are worth two threads: with nothing set, in bf16, and from a scale that
# is too high.
sanitized_host() {
    built="$work/$1/$3" log="$work/$3.$1.log" steps=2
    [ "$3" != conv ] || steps=30
    sed 's/HIDDEN  *64/HIDDEN 256/; s/BATCH  *64/BATCH 256/' "tests/examples/hosts/$3_after.c" > "$built.c"
    $cc -g -O1 $2 -Itests/examples/hosts/blas -I. -DAMP_IMPLEMENTATION_INCLUDED "$built.c" tests/examples/hosts/blas/cblas.c "$work/$1/inside.o" -o "$built" -lm -lpthread 2>&1
    for settings in "" "AMP_DTYPE=bf16" "AMP_DTYPE=fp16 AMP_INIT_SCALE=1e12"; do
        env $settings "$built" 1 $steps > "$log" 2>&1 || tail -n 5 "$log"
        grep -m 5 'runtime error\|Sanitizer:\|#[0-3] ' "$log"
    done
    true
}
asan="-fsanitize=address,undefined -fno-sanitize-recover=undefined" tsan=-fsanitize=thread
echo 'int main(void) { return 0; }' > "$work/probe.c"
for name in asan tsan; do
    eval "flags=\$$name" cc=$(compiler $name)
    if $cc $flags "$work/probe.c" -o "$work/probe" 2>/dev/null && "$work/probe" 2>/dev/null; then at_once "$name inside.c" shared $name "$flags"
    else skip "$name" "$cc cannot build with $flags"; fi
done
collect
# Those that take about as long stand together: what runs at once ends with the longest.  What t_fuzz does to the seeds
# libFuzzer does with the same sanitizers, where there is clang; t_concurrency is ThreadSanitizer's; t_lean's amp.h is a part
# of the others'.
for program in $(test_names); do
    case " $INSIDE $INSIDE_ALONE " in *" $program "*) continue ;; esac
    [ "$program" = t_fuzz ] && have clang || rest="$rest $program"
done
run asan "$asan" $INSIDE t_lifetime $rest
# Without what is long: t_gemm's walks over shapes and dtypes.  Where its threads meet, large, past_the_caches and
# four_host_threads show.
export AMPT_LEAVE_OUT=long
run tsan "$tsan" t_threads t_concurrency t_lifetime t_data t_autocast t_gemm t_context t_debug_log t_differential t_recompute t_ranks t_watch
closing
