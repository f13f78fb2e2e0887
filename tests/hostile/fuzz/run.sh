#!/bin/sh
# run.sh [SECONDS [NAME...]] - builds the fuzzers with AddressSanitizer, UndefinedBehaviorSanitizer and leak detection, and
# runs them.  Each fuzzer, or each one that is named, runs for SECONDS (default: FUZZ_SECONDS, or 30), with as many at once
# as there are cores.  In build/fuzz, corpus/NAME grows from run to run, found/ has the inputs that caused a failure, and
# record.json says what was run.  SEED=n sets the seed of libFuzzer's random numbers (default 1; 0: a new seed for each
# run).
. tests/lib.sh
seconds=${1:-${FUZZ_SECONDS:-30}} folder=build/fuzz
if [ $# -gt 0 ]; then shift; fi
[ $# -gt 0 ] || set -- $(ls tests/hostile/fuzz/fuzz_*.c | sed 's:.*/fuzz_::; s:\.c$::')
[ "$seconds" -le 10 ] && level=-O0 || level=-O1   # to optimise amp.h takes clang longer than a short run is
flags="-std=c99 -gline-tables-only $level -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined -fsanitize=fuzzer"
mkdir -p "$folder/corpus" "$folder/found"

# stat LOG NAME: of libFuzzer's closing figures; coverage LOG NAME: of its last line of progress.
stat() { sed -n "s/^stat::$2: *//p" "$1"; }
coverage() { grep -o " $2: [0-9]*" "$1" | tail -n 1 | cut -d' ' -f3; }

fuzz() {
    built=$folder/fuzz_$1 log=$folder/$1.log
    if ! clang $flags -DAMP_IMPLEMENTATION_INCLUDED "tests/hostile/fuzz/fuzz_$1.c" "$work/amp.o" -o "$built" -lm -lpthread 2> "$log"; then
        echo "does not build: $(head -n 3 "$log")"
        return
    fi
    mkdir -p "$folder/corpus/$1"
    "$built" -seed="${SEED:-1}" -max_total_time="$seconds" -timeout=20 -max_len=4096 -print_final_stats=1 -dict="tests/hostile/fuzz/$1.dict" \
        -artifact_prefix="$folder/found/$1-" "$folder/corpus/$1" "tests/hostile/fuzz/seeds/$1" > "$log" 2>&1 \
        || { echo "fuzz_$1 failed"; grep -m 6 'not true\|runtime error\|ERROR\|SUMMARY\|Test unit' "$log" || tail -n 3 "$log"; }
    times > "$work/$1.times"
    cpu=$(awk 'NR == 2 {for (i = 1; i < 3; i++) {split($i, t, "m"); s += t[1] * 60 + t[2]} printf "%.0f", s}' "$work/$1.times")
    echo "    \"$1\": {\"executions\": $(stat "$log" number_of_executed_units), \"cpu_seconds\": $cpu, \"coverage\": $(coverage "$log" cov)," \
        "\"features\": $(coverage "$log" ft), \"seeds\": $(ls "tests/hostile/fuzz/seeds/$1" | wc -l), \"corpus\": $(ls "$folder/corpus/$1" | wc -l)," \
        "\"found\": $(find "$folder/found" -name "$1-*" | wc -l)}" > "$work/$1.json"
}

echo 'int LLVMFuzzerTestOneInput(const unsigned char *data, unsigned long size) { return data == 0 && size > 0; }' > "$work/probe.c"
if ! have clang || ! clang $flags "$work/probe.c" -o "$work/probe" 2> /dev/null || ! "$work/probe" -runs=1 > /dev/null 2>&1; then
    skip "fuzzers" "no clang that links libFuzzer and its sanitizers"
    closing
    exit
fi
echo '#include "amp.h"' | clang ${flags}-no-link -DAMP_IMPLEMENTATION -I. -x c -c - -o "$work/amp.o" || exit 1
for name; do at_once "fuzz $name" fuzz "$name"; done
collect
{
    echo "{\"command\": \"sh tests/hostile/fuzz/run.sh $seconds\", \"libfuzzer_seed\": ${SEED:-1}, \"seconds_each\": $seconds,"
    echo " \"compiler\": \"$(clang --version | head -n 1)\", \"cpu\": \"$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo 2> /dev/null | head -n 1)\","
    echo " \"fuzzers\": {"
    for name; do if [ -s "$work/$name.json" ]; then echo "$(cat "$work/$name.json"),"; fi; done | sed '$s/,$//'
    echo " }}"
} > "$folder/record.json"
closing
