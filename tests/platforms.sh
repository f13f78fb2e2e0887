#!/bin/sh
# platforms.sh - compiles amp.h, and runs what can be run, for other operating systems and processors than this machine's.
# It prints a line for each.  A platform whose compiler or emulator is missing is skipped.  The compilers are cross gccs, and
# zig, with the headers and libraries of macOS, Windows, musl and older glibcs: `zig`, or the Python package ziglang (ZIG
# names another command).  Programs run under wine and qemu.  ONLY="macos-arm64 mingw" selects platforms.
. tests/lib.sh
strict="-Wall -Wextra -Wpedantic -Werror -I. -Iexamples"
printf '#define AMP_IMPLEMENTATION\n#include "amp.h"\n' > "$work/amp.c"
zig=${ZIG:-}
if [ -z "$zig" ]; then
    if have zig; then zig=zig
    elif "${PYTHON:-python3}" -m ziglang version > "$work/log" 2>&1; then zig="${PYTHON:-python3} -m ziglang"; fi
fi
wanted() { [ -z "${ONLY:-}" ] || case " $ONLY " in *" $1 "*) true ;; *) false ;; esac; }
ok() { pass; echo "PASS $1: $2"; }

# built NAME COMPILER...: amp.o and quickstart from it, without warnings or undefined symbols.
built() {
    name=$1; shift
    mkdir -p "$work/$name"
    "$@" -std=c99 $strict -O1 -c "$work/amp.c" -o "$work/$name/amp.o" > "$work/log" 2>&1 &&
        "$@" -std=c99 -I. -O1 -DAMP_IMPLEMENTATION_INCLUDED examples/quickstart.c "$work/$name/amp.o" -o "$work/$name/quickstart.exe" $libs > "$work/log" 2>&1 &&
        ! grep -q -e 'warning:' -e 'undefined' "$work/log" && return
    fail "$name" "$(grep -m 4 -e 'error' -e 'warning' -e 'undefined' "$work/log")"
    return 1
}
# linked NAME TARGET: by zig, not run.
linked() {
    wanted "$1" || return
    if [ -z "$zig" ]; then skip "$1" "no zig (pip install ziglang)"; return; fi
    if built "$1" $zig cc -target "$2"; then ok "$1" "zig cc -target $2: compiled and linked, not run"; fi
}
# learns NAME COMMAND...: quickstart, run as COMMAND does, learns.
learns() {
    name=$1; shift
    (cd "$work/$name" && timeout 600 "$@" ./quickstart.exe) > "$work/log" 2>&1
    awk '/^step/ {n++; loss[n] = $4 + 0} END {exit !(n > 4 && loss[n] < loss[1] / 4)}' "$work/log" && return
    fail "$name" "quickstart: $(tail -n 3 "$work/log")"
    return 1
}

libs="-lm -lpthread"
linked macos-x86-64 x86_64-macos
linked macos-arm64 aarch64-macos

# Windows.  wine has a folder of its own for its registry, and is asked to say nothing.
libs="-lm"
linked windows-x86-64 x86_64-windows-gnu
linked windows-arm64 aarch64-windows-gnu
export WINEPREFIX="$work/wine" WINEDEBUG=-all
mingw() {
    mingw=x86_64-w64-mingw32-gcc libs="-lm -static"
    if ! have $mingw; then skip mingw "no $mingw (apt install gcc-mingw-w64-x86-64)"; return; fi
    built mingw $mingw || return
    if ! have wine; then skip mingw "compiled, but there is no wine to run it"; return; fi
    if learns mingw wine; then ok mingw "$mingw: quickstart learns under wine"; fi
}
if wanted mingw; then mingw; fi
closing
