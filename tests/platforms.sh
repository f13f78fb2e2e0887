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
