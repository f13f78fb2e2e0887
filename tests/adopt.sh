#!/bin/sh
# adopt.sh - a program before and after adopting amp.h, and the shim that serves an unchanged program's cblas_sgemm.
. tests/lib.sh
cc=${CC:-gcc} flags=${CFLAGS:--O2}

# build LEVEL NAME FLAGS...: compiles without a word, with -OLEVEL: most programs here compile longer than they run.
build() { level=$1 name=$2; shift 2; check "compile $name" $cc $flags -O$level -Wall -Wextra -Werror "$@" -o "$work/$name" -lm -lpthread; }
# Both share out loops of their own by OpenMP, where the compiler has it.
omp=-Wno-unknown-pragmas
echo 'int main(void) { return 0; }' > "$work/probe.c"
if $cc -fopenmp "$work/probe.c" -o "$work/probe" 2>/dev/null; then omp=-fopenmp; fi
build 3 before $omp examples/adopt/before.c
build 1 after $omp examples/adopt/after.c

lines=$(diff examples/adopt/before.c examples/adopt/after.c | grep -c '^[<>]')
if [ "$lines" -gt 0 ] && [ "$lines" -lt 40 ]; then pass; else fail "the diff" "$lines changed lines, at most 39 are allowed"; fi

# The test loss of n runs in plain fp32 that differ only in their seed has mean m and deviation s.  One more run of their
# kind lies within t s sqrt(1 + 1/n) of m but once in a thousand (Student's t, n - 1 degrees of freedom): a run with amp.h
# must be of their kind.
loss_of() { "$@" | sed -n 's/^test loss \([^,]*\),.*/\1/p'; }
for seed in 1 2 3 4 5 6 7 8; do loss_of "$work/before" $seed 8; done > "$work/losses"
interval=$(awk -v t=5.408 '{n++; s += $1; q += $1 * $1} END {m = s / n; print m, t * sqrt((q - n * m * m) / (n - 1) * (1 + 1 / n))}' "$work/losses")
for precision in fp32 fp16 bf16; do
    loss=$(loss_of "$work/after" 1 8 $precision)
    if echo "$loss $interval" | awk '{exit !(NF == 3 && $3 > 0 && $1 - $2 <= $3 && $2 - $1 <= $3)}'; then pass
    else fail "after in $precision" "test loss $loss, before: $interval (mean, and how far one run may lie from it)"; fi
done
if "$work/after" 1 1 fp7 > /dev/null 2> "$work/error"; then fail "after in fp7" "accepted"
elif grep -q '"fp7"' "$work/error"; then pass; else fail "after in fp7" "$(cat "$work/error")"; fi

# The shim: every form of cblas_sgemm, in every precision, against loops over rounded operands.
build 0 host -Iexamples/adopt tests/cblas_host.c
for precision in fp32 tf32 bf16 fp16; do
    if AMP_DTYPE=$precision "$work/host" $precision > "$work/log" 2>&1 && ! grep -q cblas.h "$work/log"; then pass
    elif grep -q "this CPU lacks" "$work/log"; then skip "the shim in $precision" "$(head -n 1 "$work/log")"
    else fail "the shim in $precision" "$(tail -n 3 "$work/log")"; fi
done
if AMP_DTYPE=bf16 "$work/host" fp32 > "$work/log" 2>&1; then fail "AMP_DTYPE=bf16" "has fp32's error"; else pass; fi

# says NAME TEXT COMMAND...: the command succeeds, and stderr has the text.
says() {
    name=$1 text=$2; shift 2
    if "$@" > "$work/log" 2>&1 && grep -q -- "$text" "$work/log"; then pass; else fail "$name" "$(tail -n 3 "$work/log")"; fi
}
says "no dtype" "AMP_DTYPE=fp7: computing in fp32: .*must be one of" env AMP_DTYPE=fp7 "$work/host" fp32
says "a dtype not to compute in" "AMP_DTYPE=fp8_e4m3: computing in fp32" env AMP_DTYPE=fp8_e4m3 "$work/host" fp32
says "an empty one is none" "computes in" env AMP_DTYPE= CBLAS_VERBOSE=1 "$work/host" bad
says "four threads" "224 products" env AMP_DTYPE=fp32 "$work/host" threads
says "bad arguments" "lda = 1, must be at least 2" "$work/host" bad

# Several files share one implementation, which C++ compiles too; a file that uses amp.h itself shares that.
build 0 shim.o -c examples/adopt/cblas.c
build 0 shared -DAMP_CBLAS_SHARED -Iexamples/adopt tests/cblas_host.c "$work/shim.o"
says "shared" "224 products" env AMP_DTYPE=fp32 "$work/shared" fp32
sed 's/#include <cblas.h>/#define AMP_IMPLEMENTATION\n#include "amp.h"\n&/' tests/cblas_host.c > "$work/own.c"
build 0 own -I. -Iexamples/adopt "$work/own.c"
says "beside amp.h" "224 products" env AMP_DTYPE=fp32 "$work/own" fp32
printf '#include <cblas.h>\nint main(void) { float x = 2, y = 0; cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, 1, 1, 1, 1, &x, 1, &x, 1, 0, &y, 1); return y != 4; }\n' > "$work/c99.c"
build 0 c99 -std=c99 -Iexamples/adopt "$work/c99.c"
check "-std=c99" env AMP_DTYPE=fp16 "$work/c99"
if have g++; then check "C++" g++ -std=c++17 -Wall -Wextra -Werror -Iexamples/adopt -fsyntax-only -x c++ tests/cblas_host.c
else skip "the shim in C++" "no g++"; fi

# Without memory each product is computed all the same: none at all, and none for scratch.
cat > "$work/poor.c" <<'POOR'
#include <stdlib.h>
int __real_posix_memalign(void **p, size_t align, size_t bytes);
int __wrap_posix_memalign(void **p, size_t align, size_t bytes);
int __wrap_posix_memalign(void **p, size_t align, size_t bytes) {
    return bytes > (size_t)atoll(getenv("MOST_BYTES")) ? 12 : __real_posix_memalign(p, align, bytes);
}
POOR
build 0 poor -DAMP_CBLAS_SHARED -Iexamples/adopt tests/cblas_host.c "$work/poor.c" "$work/shim.o" -Wl,--wrap=posix_memalign
says "no memory" "every product by a plain loop: .*AMP0301" env MOST_BYTES=0 AMP_DTYPE=fp32 "$work/poor" fp32
says "no scratch" "cblas_sgemm: AMP0301" env MOST_BYTES=9000 AMP_DTYPE=fp32 "$work/poor" fp32
if [ "$(grep -c cblas.h "$work/log")" -eq 10 ]; then pass; else fail "no scratch" "$(grep -c cblas.h "$work/log") messages"; fi

# What the shim has not comes from the program's BLAS, or does not compile.
printf '#include <cblas.h>\nint main(void) { double x = 2; return (int)cblas_ddot(1, &x, 1, &x, 1) - 4; }\n' > "$work/dot.c"
if $cc $flags -DAMP_CBLAS_SHARED -DAMP_CBLAS_ALONE -Iexamples/adopt -c "$work/dot.c" -o "$work/dot.o" > "$work/log" 2>&1; then fail "cblas_ddot" "compiles without a BLAS"
elif grep -q "cblas_ddot" "$work/log"; then pass; else fail "cblas_ddot" "$(head -n 3 "$work/log")"; fi
if $cc "$work/dot.c" -o "$work/dot" -lopenblas > /dev/null 2>&1; then
    build 0 dot -DAMP_CBLAS_SHARED -Iexamples/adopt "$work/dot.c" "$work/shim.o" -lopenblas
    check "cblas_ddot beside the shim" "$work/dot"
else skip "cblas_ddot beside the shim" "no OpenBLAS"; fi
closing
