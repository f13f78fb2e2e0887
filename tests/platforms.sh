#!/bin/sh
# platforms.sh - compiles amp.h, and runs what can be run, for other operating systems and processors than this machine's.
# It prints a line for each.  A platform whose compiler or emulator is missing is skipped.  The compilers are cross gccs, and
# zig, with the headers and libraries of macOS, Windows, musl and older glibcs: `zig`, or the Python package ziglang (ZIG
# names another command).  Programs run under wine and qemu.  ONLY="macos-arm64 mingw" selects platforms, and "ci" what CI
# compiles.
. tests/lib.sh
std=c99
strict="-Wall -Wextra -Wpedantic -Werror -I."
printf '#define AMP_IMPLEMENTATION\n#include "amp.h"\n' > "$work/amp.c"
zig=${ZIG:-}
if [ -z "$zig" ]; then
    if have zig; then zig=zig
    elif "${PYTHON:-python3}" -m ziglang version > "$work/log" 2>&1; then zig="${PYTHON:-python3} -m ziglang"; fi
fi
wanted() { if [ -z "${ONLY:-}" ]; then [ "$1" != ci ]; else case " $ONLY " in *" $1 "*) true ;; *) false ;; esac; fi; }
ok() { pass; echo "PASS $1: $2"; }

# built NAME COMPILER...: amp.o and quickstart from it, without warnings or undefined symbols.
built() {
    name=$1; shift
    mkdir -p "$work/$name"
    if "$@" -std=$std $strict -O1 -c "$work/amp.c" -o "$work/$name/amp.o" > "$work/log" 2>&1 &&
        "$@" -std=$std -I. -O1 -DAMP_IMPLEMENTATION_INCLUDED examples/quickstart.c "$work/$name/amp.o" -o "$work/$name/quickstart.exe" $libs > "$work/log" 2>&1 &&
        ! grep -q -e 'warning:' -e 'undefined' "$work/log"; then return; fi
    fail "$name" "$(grep -m 4 -e 'error' -e 'warning' -e 'undefined' "$work/log")"
    return 1
}
# The program of the manual, by BUILD's line for a platform: manual NAME PLATFORM COMPILER...
sed '/^#ifndef AMP_H_INCLUDED/q' amp.h | awk '/^   A PROGRAM/ {title = 1} title && /^    #include "amp.h"/ {on = 1} on {print substr($0, 5)} on && /^    }$/ && main {exit} /int main\(/ {main = 1}' > "$work/program.c"
manual() {
    name=$1
    line=$(sed -n "/^   BUILD/,/^   LEAVING/s/^       $2  *\\(.* -O2 program.c amp.o .*\\)/\\1/p" amp.h)
    options=${line#*-O2 }
    shift 2
    if [ -z "$line" ]; then fail "$name" "the manual has no line for it under BUILD"; return 1; fi
    cp amp.h "$work/program.c" "$work/$name"
    if (cd "$work/$name" && "$@" -O1 $options) > "$work/log" 2>&1; then return; fi
    fail "$name" "BUILD: $line: $(grep -m 3 -e error -e undefined "$work/log")"
    return 1
}
# linked NAME TARGET PLATFORM: by zig, not run.
linked() {
    wanted "$1" || return
    if [ -z "$zig" ]; then skip "$1" "no zig (pip install ziglang)"; return; fi
    built "$1" $zig cc -target "$2" || return
    if [ -n "$3" ]; then manual "$1" "$3" $zig cc -target "$2" || return; fi
    ok "$1" "zig cc -target $2: compiled and linked, not run"
}
# learns NAME COMMAND...: quickstart learns; COMMAND runs it.
learns() {
    name=$1; shift
    (cd "$work/$name" && timeout 900 "$@" ./quickstart.exe) > "$work/log" 2>&1
    awk '/^step/ {loss[++n] = $4 + 0} END {exit !(n > 4 && loss[n] < loss[1] / 4)}' "$work/log" && return
    fail "$name" "quickstart: $(tail -n 3 "$work/log")"
    return 1
}
# scaled NAME COMMAND...: the program in the manual's spirit that ends soon under an emulator: examples/scaler_only.c.
scaled() {
    name=$1; shift
    if (cd "$work/$name" && timeout 600 "$@" ./scaler_only.exe) > "$work/log" 2>&1; then return; fi
    fail "$name" "scaler_only: $(tail -n 3 "$work/log")"
    return 1
}
# emulated NAME ARCHITECTURE TRIPLE: by a cross gcc, run by qemu-user.
emulated() {
    wanted "$1" || return
    if ! have "$3-gcc"; then skip "$1" "no $3-gcc (apt install gcc-$(echo "$3" | tr _ -))"; return; fi
    built "$1" "$3-gcc" || return
    "$3-gcc" -std=c99 -I. -O1 -DAMP_IMPLEMENTATION_INCLUDED examples/scaler_only.c "$work/$1/amp.o" -o "$work/$1/scaler_only.exe" -static $libs > "$work/log" 2>&1 ||
        { fail "$1" "$(head -n 3 "$work/log")"; return; }
    if [ "$1" = arm64 ]; then manual arm64 "Linux on Arm" "$3-gcc" || return; fi
    for qemu in qemu-$2 qemu-$2-static; do have "$qemu" && break; done
    if ! have "$qemu"; then skip "$1" "compiled, but there is no qemu-$2 to run it (apt install qemu-user)"; return; fi
    if scaled "$1" "$qemu"; then ok "$1" "$3-gcc: scaler_only runs under $qemu"; fi
}

# ---- The kernels of arm64, by the unit tests that inside.c holds and by programs, under qemu-user.
arm_gcc=aarch64-linux-gnu-gcc
arm_ready() {
    if ! have $arm_gcc; then skip "$1" "no $arm_gcc (apt install gcc-aarch64-linux-gnu)"; return 1; fi
    for qemu in qemu-aarch64 qemu-aarch64-static; do have $qemu && break; done
    if ! have $qemu; then skip "$1" "no qemu-aarch64 (apt install qemu-user)"; return 1; fi
    mkdir -p "$work/arm"
    if [ -s "$work/arm/inside.o" ]; then return; fi
    if $arm_gcc -std=c99 -w -Itests -O1 -c tests/unit/inside.c -o "$work/arm/inside.o" > "$work/log" 2>&1 &&
        $arm_gcc tests/unit/inside_main.c "$work/arm/inside.o" -o "$work/arm/inside" -static -lm -lpthread > "$work/log" 2>&1; then return; fi
    fail "$1" "$(grep -m 4 -e error -e undefined "$work/log")"
    return 1
}
# on_arm CPU TEST [ARGUMENTS]: runs one of them, and adds its counts to this script's.
on_arm() {
    cpu=$1 test=$2; shift 2
    [ -s "$work/arm/$test" ] || cp "$work/arm/inside" "$work/arm/$test"
    AMPT_LEAVE_OUT=long timeout 3600 $qemu -cpu "$cpu" "$work/arm/$test" "$@" > "$work/log" 2>&1
    last=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$work/log" | tail -n 1)
    case $last in
        "0 passed"*) fail "arm64-$test" "$cpu: no test ran" ;;
        *" passed, 0 failed, "*) ok "arm64-$test" "$cpu: $last" ;;
        *) fail "arm64-$test" "$cpu: $(grep '^FAIL' "$work/log" | head -n 5) $last" ;;
    esac
}
# About a minute of them.  -cpu max has bfdot.
arm_ci() {
    arm_ready arm64-ci || return
    on_arm cortex-a53 t_numbers --filter pairs
    on_arm cortex-a53 t_numbers --filter golden
    on_arm max t_gemm --filter shared_b
    on_arm max t_gemm --filter column_sums
    on_arm cortex-a76 t_attention --filter functions_at
    on_arm cortex-a76 t_attention --filter every_dtype
    on_arm neoverse-n1 t_optimizer --filter torch
}
if wanted ci; then arm_ci; fi
# outside TEST: links a test that uses only public functions.
outside() {
    $arm_gcc -std=c99 -w -Itests -O1 -DAMP_IMPLEMENTATION_INCLUDED "$(source_of "$1")" "$work/arm/inside.o" -o "$work/arm/$1" -static -lm -lpthread \
        > "$work/log" 2>&1 || { fail "arm64-$1" "$(grep -m 4 -e error -e undefined "$work/log")"; return 1; }
}
arm_tests() {
    arm_ready arm64-tests || return
    for cpu in cortex-a53 cortex-a76 neoverse-n1 max; do
        for test in t_numbers t_gemm t_attention; do on_arm $cpu $test; done
    done
    for test in t_kernels t_optimizer t_fp8 t_context t_settings t_state; do on_arm max $test; done
    for test in t_operators t_linear_cross_entropy t_masks; do if outside $test; then on_arm max $test; fi; done
    # Tests that start another process would start it without the emulator.
    if outside t_determinism; then for filter in any_ paths_that flags; do on_arm max t_determinism --filter $filter; done; fi
}
if wanted arm64-tests; then arm_tests; fi

# This machine and arm64 compute the same bits, by AVX2 or more and by NEON.  t_determinism --trace writes a hash of each
# operation; the first 13 are those of the manual's table for which all these paths agree.
arm_bits() {
    arm_ready arm64-bits && outside t_determinism || return
    if ! grep -q ' avx2' /proc/cpuinfo 2>/dev/null; then skip arm64-bits "this machine has no AVX2 to compare with"; return; fi
    if ${CC:-gcc} -std=c99 -w -I. -O1 -c "$work/amp.c" -o "$work/here.o" > "$work/log" 2>&1 &&
        ${CC:-gcc} -std=c99 -w -Itests -O1 -DAMP_IMPLEMENTATION_INCLUDED tests/unit/t_determinism.c "$work/here.o" -o "$work/here" -lm -lpthread > "$work/log" 2>&1 &&
        "$work/here" --trace "$work/trace.here" 1 0 1 - - > "$work/log" 2>&1 &&
        $qemu -cpu cortex-a76 "$work/arm/t_determinism" --trace "$work/trace.arm" 1 0 1 - - > "$work/log" 2>&1 &&
        cmp -n 416 "$work/trace.here" "$work/trace.arm" > "$work/log" 2>&1; then
        ok arm64-bits "conversions, random numbers, activations and optimizers have the bits of this machine"
    else fail arm64-bits "$(head -n 3 "$work/log")"; fi
}
if wanted arm64-bits; then arm_bits; fi

# The losses of programs here and on arm64 are equal to three digits.  qemu takes 50 ns for a multiply-add of a vector,
# so the classifier learns on fewer pictures.
losses_of() { sed -n 's/.*"loss": *\([0-9.]*\).*/\1/p; s/^step .*loss \([0-9.]*\).*/\1/p' "$1"; }
# trains PROGRAM WHERE COMPILER RUN LOG FLAGS...
trains() {
    program=$1 where=$2 compiler=$3 run=$4 log=$5; shift 5
    if [ "$where" = arm ]; then options="-static $libs"; else options=$libs; fi
    [ -s "$work/train/amp.$where.o" ] || $compiler -std=c99 -w -O2 -I. -c "$work/amp.c" -o "$work/train/amp.$where.o" > "$work/log" 2>&1
    $compiler -std=c99 -w -O2 -DAMP_IMPLEMENTATION_INCLUDED "$work/train/examples/$program.c" "$work/train/amp.$where.o" -o "$work/train/$program.$where" $options > "$work/log" 2>&1 &&
        (cd "$work/train" && timeout 900 $run ./$program.$where "$@" > $program.log 2>&1)
    losses_of "$work/train/$log" > "$work/train/losses.$where"
}
arm_training() {
    arm_ready arm64-training || return
    libs="-lm -lpthread"
    mkdir -p "$work/train/examples"
    head -c 100000 README.md > "$work/train/text"
    cp examples/*.h examples/quickstart.c examples/mlp.c examples/train_gpt.c "$work/train/examples"
    cp amp.h "$work/train"
    sed 's/20000, 784/1500, 784/; s/5000, 784/100, 784/' examples/mnist.h > "$work/train/examples/mnist.h"
    for program in quickstart mlp train_gpt; do
        case $program in
            train_gpt) log=out/metrics.jsonl flags="--data text --out out --layers 2 --heads 2 --channels 64 --batch 2 --seq 32 --steps 10 --threads 1 --precision fp32 --log-interval 1 --sample 0" ;;
            quickstart) log=quickstart.log flags=nowhere ;;
            mlp) log=mlp.log flags= ;;
        esac
        trains $program here "${CC:-gcc}" env $log $flags
        rm -rf "$work/train/out"
        trains $program arm $arm_gcc "$qemu -cpu cortex-a76" $log $flags
        if paste "$work/train/losses.here" "$work/train/losses.arm" | awk '{n++; d = $1 - $2; if (d < 0) d = -d; if (NF != 2 || d > 1e-4 + 1e-3 * $1) bad = 1} END {exit bad || n < 3}'; then
            ok arm64-training "$program: $(wc -l < "$work/train/losses.arm") losses as on this machine"
        else fail arm64-training "$program: $(paste "$work/train/losses.here" "$work/train/losses.arm" | head -n 4 | tr '\n' ' ') $(tail -n 1 "$work/train/$program.log")"; fi
    done
}
if wanted arm64-training; then arm_training; fi
# The instructions of kernels, of a step and of inner loops.
if wanted arm64-counts; then
    if sh tests/arm64/counts.sh > "$work/counts.json" 2> "$work/log"; then ok arm64-counts "$(tail -n 1 "$work/log")"
    else fail arm64-counts "$(head -n 4 "$work/log")"; fi
fi

native() {
    libs="-lm -lpthread"
    if built native "${CC:-gcc}" && learns native env; then ok native "${CC:-gcc}: quickstart learns"; fi
}
if wanted native; then native; fi
libs="-lm -lpthread"
linked macos-x86-64 x86_64-macos macOS
linked macos-arm64 aarch64-macos macOS
linked glibc-2.17 x86_64-linux-gnu.2.17 ""
# clang's atomic calls on 64-bit numbers, which i386 aligns to 4 bytes, are functions: it warns that these take longer.
i386() {
    if [ -z "$zig" ]; then skip i386 "no zig (pip install ziglang)"; return; fi
    built i386 $zig cc -target x86-linux-musl -Wno-atomic-alignment || return
    echo 'int main(void) { return 0; }' > "$work/i386/probe.c"
    if ! $zig cc -target x86-linux-musl "$work/i386/probe.c" -o "$work/i386/probe" 2> /dev/null || ! "$work/i386/probe" 2> /dev/null; then
        skip i386 "compiled and linked, but this kernel does not run it"
    elif learns i386 env; then ok i386 "zig cc -target x86-linux-musl: quickstart learns"; fi
}
if wanted i386; then i386; fi
musl() {
    if [ -z "$zig" ]; then skip musl "no zig (pip install ziglang)"; return; fi
    built musl $zig cc -target "$(uname -m)-linux-musl" || return
    manual musl musl $zig cc -target "$(uname -m)-linux-musl" || return
    if learns musl env; then ok musl "zig cc -target $(uname -m)-linux-musl: quickstart learns"; fi
}
if wanted musl; then musl; fi
emulated arm64 aarch64 aarch64-linux-gnu
std=gnu99                           # with c99, gcc computes floats there in fp64, which vectors refuse
emulated s390x s390x s390x-linux-gnu
std=c99
libs="$libs -latomic"              # gcc before 13 calls it for atomic bytes
emulated riscv64 riscv64 riscv64-linux-gnu

# Windows.  wine keeps its registry in a separate folder, and prints no messages.
libs="-lm"
linked windows-x86-64 x86_64-windows-gnu "Windows, clang"
linked windows-arm64 aarch64-windows-gnu "Windows on Arm"
mingw=x86_64-w64-mingw32-gcc
export WINEPREFIX="$work/wine" WINEDEBUG=-all
# Stacks are as large as on Linux: tests have arrays on them.
windows_libs="-static -lm -lpthread -lws2_32 -Wl,--stack,8388608"
compiled_ci() {
    if ! have $mingw; then skip mingw "no $mingw (apt install gcc-mingw-w64-x86-64)"; return; fi
    if $mingw -std=c99 $strict -O0 -c "$work/amp.c" -o "$work/amp.o" > "$work/log" 2>&1; then ok mingw "$mingw: compiled"
    else fail mingw "$(grep -m 4 -e error -e warning "$work/log")"; fi
}
if wanted ci; then compiled_ci; fi
mingw_quickstart() {
    if ! have $mingw; then skip mingw "no $mingw (apt install gcc-mingw-w64-x86-64)"; return; fi
    libs="-lm -static"
    built mingw $mingw || return
    manual mingw Windows $mingw || return
    if ! have wine; then skip mingw "compiled, but there is no wine to run it"; return; fi
    if learns mingw wine; then ok mingw "$mingw: quickstart learns under wine"; fi
}
if wanted mingw; then mingw_quickstart; fi

# Every example builds; those that need no data run; and train_gpt learns on two ranks over Windows' sockets.
windows_examples() {
    if ! have $mingw; then skip wine-examples "no $mingw (apt install gcc-mingw-w64-x86-64)"; return; fi
    mkdir -p "$work/examples"
    $mingw -std=c99 -O1 -I. -c "$work/amp.c" -o "$work/examples/amp.o" > "$work/log" 2>&1
    for file in examples/*.c; do
        program=$work/examples/$(basename "$file" .c).exe
        $mingw -std=c99 -w -O1 -DAMP_IMPLEMENTATION_INCLUDED "$file" "$work/examples/amp.o" -o "$program" $windows_libs > "$work/log" 2>&1 ||
            { fail wine-examples "$file: $(grep -m 3 -e error -e undefined "$work/log")"; return; }
    done
    if ! have wine; then skip wine-examples "all compiled, but there is no wine to run them"; return; fi
    cp README.md "$work/examples/text.txt"
    for program in regression scaler_only mlp sgemm convnet data_parallel; do
        (cd "$work/examples" && timeout 300 wine ./$program.exe) > "$work/log" 2>&1 || { fail wine-examples "$program: $(tail -n 2 "$work/log")"; return; }
    done
    for rank in 1 0; do
        (cd "$work/examples" && RANK=$rank WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29517 timeout 300 wine ./train_gpt.exe \
            --data text.txt --steps 10 --layers 1 --heads 2 --channels 32 --batch 2 --seq 32 --out out > "rank$rank.log" 2>&1; echo $? > "rank$rank.rc") &
    done
    wait
    if [ "$(cat "$work/examples/rank0.rc" "$work/examples/rank1.rc" | tr '\n' ' ')" = "0 0 " ] && grep -aq '"step": 10' "$work/examples/out/metrics.jsonl"; then
        ok wine-examples "$(ls examples/*.c | wc -l) compiled, 6 run, and train_gpt trains on two ranks"
    else fail wine-examples "train_gpt on two ranks: $(tail -n 2 "$work/examples/rank0.log" | tr -cd ' -~')"; fi
}
if wanted wine-examples; then windows_examples; fi

# under_wine TEST PROGRAM: adds its counts to this script's.
under_wine() {
    AMPT_LEAVE_OUT=long timeout 900 wine "$2" > "$work/log" 2>&1
    last=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$work/log" | tail -n 1)
    case $last in
        *" passed, 0 failed, "*) ok "wine-$1" "$last" ;;
        *) fail "wine-$1" "$(grep '^FAIL' "$work/log" | head -n 5) $last" ;;
    esac
}
# The unit tests that inside.c holds, and those that need nothing of what Windows lacks (fork, sockets of POSIX, mmap).
windows_tests() {
    if ! have $mingw; then skip wine-tests "no $mingw (apt install gcc-mingw-w64-x86-64)"; return; fi
    if ! have wine; then skip wine-tests "no wine"; return; fi
    mkdir -p "$work/tests"
    if ! $mingw -std=c99 -w -Itests -O1 -c tests/unit/inside.c -o "$work/inside.o" > "$work/log" 2>&1 ||
        ! $mingw -std=c99 tests/unit/inside_main.c "$work/inside.o" -o "$work/inside.exe" $windows_libs > "$work/log" 2>&1; then
        fail wine-tests "$(grep -m 4 -e error -e undefined "$work/log")"; return
    fi
    for test in $(sed -n 's/^.include "\(t_.*\).c"/\1/p' tests/unit/inside.c); do
        cp "$work/inside.exe" "$work/tests/$test.exe"
        under_wine "$test" "$work/tests/$test.exe"
    done
    for test in $windows_outside $windows_alone; do
        amp="-DAMP_IMPLEMENTATION_INCLUDED $work/inside.o"
        case " $windows_alone " in *" $test "*) amp= ;; esac
        if $mingw -std=c99 -w -Itests -O0 "$(source_of "$test")" $amp -o "$work/tests/$test.exe" $windows_libs > "$work/log" 2>&1; then
            under_wine "$test" "$work/tests/$test.exe"
        else fail "wine-$test" "$(grep -m 4 -e error -e undefined "$work/log")"; fi
    done
}
windows_outside="t_abi t_adapt t_adopt t_autocast t_debug_log t_determinism t_inputs t_linear_cross_entropy t_masks t_operators
    t_hostile t_recompute t_schedule t_shards t_system t_tape t_tensor_stats t_watch t_zeros t_corruption t_errors t_fuzz t_refusals t_traps
    t_differential t_differential_tape t_differential_tensors t_model t_train"
windows_alone="t_lean t_lifetime"          # with an amp.h in each
if wanted wine-tests; then windows_tests; fi
closing
