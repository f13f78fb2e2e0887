#!/bin/sh
# shim.sh - tests examples/adopt/cblas.h and ampblas.c, which provide cblas_sgemm and sgemm_ through amp.h.  They are
# linked, preloaded and installed.  The programs of one file use the build/amp.o that `make` builds.  ampblas.c contains its
# own amp.h and is compiled with it.
. tests/lib.sh
made build/amp.o
cc=${CC:-gcc} flags=${CFLAGS:--O2}
shim=examples/adopt own=tests/examples/hosts/blas
for name in $(env | sed -n 's/^\(AMP_[A-Z0-9_]*\)=.*/\1/p'); do unset "$name"; done
unset MAKEFLAGS

# build NAME FLAGS...: compiles without a word.
build() { name=$1; shift; check "compile $name" $cc $flags -O1 -Wall -Wextra -Werror "$@" -o "$work/$name" -lm -lpthread -ldl; }
# says NAME TEXT COMMAND...: the command succeeds, and its output has the text; with `no` for TEXT, the shim says nothing.
says() {
    name=$1 text=$2; shift 2
    if "$@" > "$work/log" 2>&1 && if [ "$text" = no ]; then ! grep -q cblas.h "$work/log"; else grep -q -- "$text" "$work/log"; fi
    then pass; else fail "$name" "$(tail -n 3 "$work/log")"; fi
}
# refused NAME TEXT COMMAND...: it fails, and says why.
refused() {
    name=$1 text=$2; shift 2
    if "$@" > "$work/log" 2>&1; then fail "$name" "accepted"
    elif grep -q -- "$text" "$work/log"; then pass; else fail "$name" "$(head -n 3 "$work/log")"; fi
}

# Every form of cblas_sgemm, in every precision, against loops over rounded operands: by the header, by names that the
# program declares.
check "compile the shim" $cc -O0 -Wall -Wextra -Werror -DAMP_IMPLEMENTATION_INCLUDED -c $shim/cblas.c -o "$work/shim.o"
check "link cblas.o" $cc -r -nostdlib "$work/shim.o" build/amp.o -o "$work/cblas.o"
check "compile ampblas.o" $cc -O0 -Wall -Wextra -Werror -c $shim/ampblas.c -o "$work/ampblas.o"
build host -I$shim -DAMP_CBLAS_ALONE tests/examples/cblas_host.c "$work/cblas.o"
build by_hand -DBY_HAND tests/examples/cblas_host.c "$work/ampblas.o"
build fortran -DFORTRAN tests/examples/cblas_host.c "$work/ampblas.o"
for precision in fp32 tf32 bf16 fp16; do says "host in $precision" "224 products" env AMP_DTYPE=$precision "$work/host" $precision; done
for host in by_hand fortran; do says "$host in bf16" "224 products" env AMP_DTYPE=bf16 "$work/$host" bf16; done
refused "AMP_DTYPE=bf16 has not fp32's error" "of the bound" env AMP_DTYPE=bf16 "$work/host" fp32
says "nothing set: fp32" no "$work/host" fp32
says "four threads" "224 products" env AMP_DTYPE=fp32 "$work/host" threads
says "forks" no env AMP_DTYPE=fp32 "$work/host" fork
says "exit" no env AMP_DTYPE=bf16 "$work/host" exit
says "bad arguments" "lda = 1, must be at least 2" "$work/host" bad
says "bad arguments by Fortran's name" "ldb = 1, must be at least 2" "$work/fortran" bad
says "alpha and beta" no "$work/host" nan

# Settings.
says "no dtype" "unchanged: .*AMP_DTYPE = fp7, must be one of" env AMP_DTYPE=fp7 "$work/host" fp32
says "a dtype not to compute in" "unchanged: .*AMP_DTYPE = fp8_e4m3" env AMP_DTYPE=fp8_e4m3 "$work/host" fp32
says "no setting" "unchanged: .*AMP_DTYP is not a setting" env "AMP_DTYP=bf16" "$work/host" fp32
says "debug says what is computed" "computes in bf16" env AMP_DEBUG=1 AMP_DTYPE=bf16 "$work/host" bf16
says "fp16 without a scaler" "amp_cblas_scaler" env AMP_DTYPE=fp16 "$work/host" fp16
says "fp16 with the scaler off" no env AMP_DTYPE=fp16 AMP_SCALER=off "$work/host" fp16

# A program that uses the context and the scaler; as C and as C++.
cat > "$work/shares.c" <<'SHARES'
#include <cblas.h>
#include <stdio.h>
int main(void) {
    amp_context *amp = amp_cblas_context();
    amp_scaler *scaler = amp_cblas_scaler();
    amp_autocast_desc island;
    amp_choice choice;
    amp_desc desc;
    float x = 1.00390625f, inside = 0, outside = 0;             /* 1 + 2^-8: not in bf16 */
    if (amp == NULL) return puts("none") < 0 || amp_scaler_scale(scaler) != 1;
    memset(&island, 0, sizeof island);
    island.disable = 1;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, 1, 1, 1, 1, &x, 1, &x, 1, 0, &outside, 1);
    if (amp_autocast_begin(amp, &island) != AMP_OK) return 1;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, 1, 1, 1, 1, &x, 1, &x, 1, 0, &inside, 1);
    if (amp_autocast_end(amp) != AMP_OK || amp_query_choice(amp, &choice) != AMP_OK) return 1;
    if (amp_query(amp, &desc) != AMP_OK) return 1;
    printf("%s, scale %g, island %d, outside %d, threads %d\n", amp_dtype_name(choice.dtype), (double)amp_scaler_scale(scaler),
           inside == x * x, outside == x * x, (int)desc.threads);
    return 0;
}
SHARES
build shares -I$shim -DAMP_CBLAS_ALONE "$work/shares.c" "$work/cblas.o"
says "bf16, shared" "bf16, scale 1, island 1, outside 0" env AMP_DTYPE=bf16 "$work/shares"
says "fp16, shared" "fp16, scale 65536, island 1" env AMP_DTYPE=fp16 AMP_INIT_SCALE=65536 "$work/shares"
says "one thread" "threads 1$" env AMP_DTYPE=bf16 AMP_THREADS=1 "$work/shares"
says "nothing is shared" none "$work/shares"
says "an empty dtype is auto" "^[a-z0-9]*, scale 1, island 1, outside" env AMP_DTYPE= "$work/shares"
grep . "$work/log" > "$work/empty"
env AMP_DTYPE=auto "$work/shares" > "$work/auto"
check "an empty dtype is auto" cmp "$work/empty" "$work/auto"
if have g++; then
    check "compile as C++" g++ -O0 -std=c++17 -Wall -Wextra -Werror -I$shim -DAMP_CBLAS_ALONE -x c++ "$work/shares.c" -x none "$work/cblas.o" -o "$work/cxx" -lpthread -ldl
    says "C++" "bf16, scale 1, island 1, outside 0" env AMP_DTYPE=bf16 "$work/cxx"
    check "one file of C++" g++ -std=c++17 -Wall -Wextra -Werror -I$shim -DAMP_CBLAS_IMPLEMENTATION -fsyntax-only -x c++ "$work/shares.c"
else skip "the shim in C++" "no g++"; fi
check "one file with -std=c99" $cc -O0 -std=c99 -Wall -Wextra -Werror -I$shim -DAMP_CBLAS_IMPLEMENTATION -fsyntax-only "$work/shares.c"
printf '#include <cblas.h>\nint main(void) { return amp_cblas_context() == 0; }\n' > "$work/old.c"
check "a file of C90" $cc -ansi -pedantic -Wall -Wextra -Werror -I$shim -fsyntax-only "$work/old.c"
if have g++; then check "a file of C++98" g++ -std=c++98 -pedantic -Wall -Wextra -Werror -I$shim -fsyntax-only -x c++ "$work/old.c"; else skip "C++98" "no g++"; fi
sed '1i #define AMP_IMPLEMENTATION\n#include "amp.h"\n#define AMP_CBLAS_IMPLEMENTATION' "$work/shares.c" > "$work/own.c"
build own -I. -I$shim -DAMP_CBLAS_ALONE -DAMP_IMPLEMENTATION_INCLUDED "$work/own.c" build/amp.o
says "after amp.h" "bf16, scale 1, island 1, outside 0" env AMP_DTYPE=bf16 "$work/own"

# A program with a BLAS.  With nothing set it computes as before, to the bit, be the BLAS shared or static, and used for more
# than this or not; what is not sgemm does so always.
check "compile the BLAS" $cc -O1 -ffp-contract=off -fPIC -c $own/cblas.c -o "$work/blas.o"
check "link the BLAS" $cc -shared -Wl,-soname,libown.so "$work/blas.o" -o "$work/libown.so"
blas="-L$work -Wl,--as-needed -lown -Wl,-rpath,$work"
build before -I$own tests/examples/cblas_host.c $blas
build after -I$shim -I$own tests/examples/cblas_host.c "$work/cblas.o" $blas
build one_file -I$shim -I$own -DAMP_CBLAS_IMPLEMENTATION -DAMP_IMPLEMENTATION_INCLUDED tests/examples/cblas_host.c build/amp.o $blas
build after_static -DOTHERS -I$shim -I$own tests/examples/cblas_host.c "$work/cblas.o" "$work/blas.o"
"$work/before" bits > "$work/bits_before"
for host in after after_static one_file; do
    "$work/$host" bits > "$work/bits_after"
    check "$host: bits of before" cmp "$work/bits_before" "$work/bits_after"
    says "$host: bf16" "224 products" env AMP_DTYPE=bf16 "$work/$host" bf16
done
env AMP_DTYPE=fp32 "$work/after" bits > "$work/bits_after"
if cmp -s "$work/bits_before" "$work/bits_after"; then fail "the bits of before" "amp.h has the same"; else pass; fi
check "dgemm and sgemv are the BLAS's" env AMP_DTYPE=bf16 "$work/after_static" others
if have g++; then
    check "compile as C++ beside a BLAS" g++ -O0 -std=c++17 -Wall -Wextra -Werror -I$shim -I$own -x c++ "$work/shares.c" -x none "$work/cblas.o" -o "$work/cxx" $blas -lpthread
    says "C++ beside a BLAS" "bf16, scale 1, island 1, outside 0" env AMP_DTYPE=bf16 "$work/cxx"
fi

# OpenBLAS, with its own header.
if $cc tests/examples/cblas_host.c -o "$work/openblas_before" -lopenblas -lm -lpthread > /dev/null 2>&1; then
    build openblas -I$shim tests/examples/cblas_host.c "$work/cblas.o" -lopenblas
    "$work/openblas_before" bits > "$work/bits"
    "$work/openblas" bits > "$work/bits_after"
    check "OpenBLAS: bits of before" cmp "$work/bits" "$work/bits_after"
    says "OpenBLAS: bf16" "224 products" env AMP_DTYPE=bf16 "$work/openblas" bf16
else skip "OpenBLAS" "there is none"; fi

# Without a BLAS's header, other calls do not compile; without a BLAS, they do not link.
for call in cblas_dgemm cblas_sgemv cblas_sgemm_batch; do
    printf '#include <cblas.h>\nint main(void) { %s(0); return 0; }\n' $call > "$work/other.c"
    refused "$call: compile" "$call" $cc -DAMP_CBLAS_ALONE -I$shim -c "$work/other.c" -o "$work/other.o"
    printf '#include <cblas.h>\nvoid %s(int);\nint main(void) { %s(0); return 0; }\n' $call $call > "$work/other.c"
    refused "$call: link" "undefined reference to .$call" $cc -DAMP_CBLAS_ALONE -I$shim "$work/other.c" "$work/cblas.o" -o "$work/unlinked" -lm -lpthread
done
refused "without cblas.o" "undefined reference to .amp_cblas_context" $cc -I$shim -I$own tests/examples/cblas_host.c -o "$work/unlinked" $blas -lm -lpthread

mkdir "$work/other"
echo '/* volume and gain */' > "$work/other/amp.h"
refused "another amp.h" "another amp.h than" $cc -I$shim -I"$work/other" -fsyntax-only "$work/shares.c"

# Without memory each product is computed all the same: none at all, and none for scratch.
cat > "$work/poor.c" <<'POOR'
#include <stdlib.h>
int __real_posix_memalign(void **p, size_t align, size_t bytes);
int __wrap_posix_memalign(void **p, size_t align, size_t bytes);
int __wrap_posix_memalign(void **p, size_t align, size_t bytes) {
    return bytes > (size_t)atoll(getenv("MOST_BYTES")) ? 12 : __real_posix_memalign(p, align, bytes);
}
POOR
build poor -DAMP_CBLAS_ALONE -I$shim tests/examples/cblas_host.c "$work/poor.c" "$work/cblas.o" -Wl,--wrap=posix_memalign
says "no memory" "plain loops: .*AMP0301" env MOST_BYTES=0 AMP_DTYPE=fp32 "$work/poor" fp32
says "no scratch" "sgemm: AMP0301" env MOST_BYTES=20000 AMP_DTYPE=fp32 "$work/poor" fp32
if [ "$(grep -c cblas.h "$work/log")" -eq 10 ]; then pass; else fail "no scratch" "$(grep -c cblas.h "$work/log") messages"; fi

# The library: an unchanged binary's products by either name, with its own BLAS for all else, for everything when nothing is
# set, and for libraries that are or use LAPACK; also where the BLAS came with a plugin, out of sight of the program.
if ! make -s CC="$cc" CFLAGS=-O0 BUILD="$work/build" libampblas > "$work/log" 2>&1; then
    if [ "$(uname)" = Linux ]; then fail "make libampblas" "$(tail -n 3 "$work/log")"; else skip "the library" "not Linux"; fi
    closing; exit
fi
preloaded() { env LD_PRELOAD="$work/build/libampblas.so" "$@"; }
build before_fortran -DFORTRAN tests/examples/cblas_host.c $blas
build before_others -DOTHERS -I$own tests/examples/cblas_host.c $blas
build linked -DBY_HAND tests/examples/cblas_host.c -L"$work/build" -lampblas -Wl,-rpath,"$work/build" -L"$work" -Wl,--no-as-needed -lown -Wl,-rpath,"$work"
cat > "$work/plugin.c" <<'PLUGIN'
#include <dlfcn.h>
#include <stddef.h>
int main(int argc, char **argv) {
    void *plugin = dlopen(argv[argc - 1], RTLD_NOW | RTLD_LOCAL);
    int (*run)(int, char **) = NULL;
    if (plugin != NULL) *(void **)&run = dlsym(plugin, "run");
    return run == NULL ? 9 : run(argc, argv) + dlclose(plugin);
}
PLUGIN
build plugin "$work/plugin.c"
build plugin.so -fPIC -shared -Dmain=run -I$own tests/examples/cblas_host.c $blas
for host in before before_fortran linked "plugin $work/plugin.so"; do
    program=$work/${host%% *} last=${host#* }
    set -- ${last##"$host"}
    preloaded "$program" bits "$@" > "$work/bits_after"
    check "preloaded, nothing set: $host" cmp "$work/bits_before" "$work/bits_after"
    says "preloaded: $host in bf16" "224 products" preloaded AMP_DTYPE=bf16 "$program" bf16 "$@"
done
check "preloaded: others" preloaded AMP_DTYPE=bf16 "$work/before_others" others
says "preloaded: threads" "224 products" preloaded AMP_DTYPE=fp32 "$work/before" threads
says "preloaded: fork" no preloaded AMP_DTYPE=fp32 "$work/before" fork
says "preloaded: exit" no preloaded AMP_DTYPE=bf16 "$work/before" exit
says "preloaded: fp16" "gradients below" preloaded AMP_DTYPE=fp16 "$work/before" fp16
cat > "$work/unload.c" <<'UNLOAD'
#include <cblas.h>
#include <dlfcn.h>
#include <stdlib.h>
int main(int argc, char **argv) {           /* its threads run on, so its code must stay */
    void *library = dlopen(argv[argc - 1], RTLD_NOW);
    float *x = (float *)calloc(1 << 20, sizeof *x);
    __typeof__(&cblas_sgemm) sgemm = NULL;
    if (library != NULL) *(void **)&sgemm = dlsym(library, "cblas_sgemm");
    if (sgemm == NULL || x == NULL) return 9;
    sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, 512, 512, 512, 1, x, 512, x, 512, 0, x + (1 << 19), 512);
    if (dlclose(library) != 0) return 8;
    sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, 512, 512, 512, 1, x, 512, x, 512, 0, x + (1 << 19), 512);
    free(x);
    return 0;
}
UNLOAD
build unload -I$own "$work/unload.c"
check "unloaded" env AMP_DTYPE=fp32 "$work/unload" "$work/build/libampblas.so"
says "preloaded: no dtype" "unchanged: .*AMP_DTYPE = fp7, must be" preloaded AMP_DTYPE=fp7 "$work/before" fp32
says "preloaded into a shell" no preloaded AMP_DTYPE=fp7 sh -c "true | true; ls / | cat"
check "link LAPACK" $cc -DLAPACK -fPIC -shared $own/cblas.c -o "$work/liblap.so" $blas
printf '#include <cblas.h>\n#include <stdio.h>\nint main(void) { float x = 1.00390625f; sgetrf_(&x); printf("%%d\\n", x == 2.0117340087890625f); return 0; }\n' > "$work/lapack.c"
build lapack -I$own "$work/lapack.c" -L"$work" -llap $blas
says "preloaded: LAPACK" 1 preloaded AMP_DTYPE=bf16 "$work/lapack"
build lapack_linked -I$own "$work/lapack.c" "$work/ampblas.o" -L"$work" -llap $blas
says "linked: LAPACK" 1 env AMP_DTYPE=bf16 "$work/lapack_linked"

if have gfortran; then
    cat > "$work/f.f90" <<'F90'
program f
    real :: a(2, 2) = 1.00390625, c(2, 2) = 0
    call sgemm('N', 'T', 2, 2, 2, 1.0, a, 2, a, 2, 0.0, c, 2)
    print '(f12.8)', c(1, 2)
end program
F90
    check "compile Fortran" gfortran "$work/f.f90" -o "$work/f" $blas
    says "Fortran before" 2.01565552 "$work/f"
    says "Fortran preloaded" 2.00000000 preloaded AMP_DTYPE=bf16 "$work/f"
    check "link Fortran" gfortran "$work/f.f90" "$work/ampblas.o" -o "$work/f" -lm -lpthread
    says "Fortran linked" 2.00000000 env AMP_DTYPE=bf16 "$work/f"
else skip "Fortran" "no gfortran"; fi

# numpy on a system's BLAS: its float products are bf16's, its float64 and LAPACK's stay, to the bit.
cat > "$work/n.py" <<'PYTHON'
import numpy, sys
random = numpy.random.RandomState(1)
a, b = (random.rand(200, 200).astype(numpy.float32) for i in range(2))
exact = a.astype(float) @ b.astype(float)
print("numpy", abs(a @ b - exact).max() / exact.max(), flush=True)
same = a.astype(float) @ b.astype(float), numpy.linalg.solve(a, b), *numpy.linalg.qr(a), numpy.linalg.svd(a)[1]
sys.stdout.buffer.write(b"".join(x.tobytes() for x in same))
PYTHON
python=; for p in /usr/bin/python3 python3; do
    if have $p && maps=$($p -c 'import numpy; print(open("/proc/self/maps").read())' 2>/dev/null) && echo "$maps" | grep -q '/libc\?blas\.so\|/libopenblas\.so'; then python=$p; break; fi
done
if [ -n "$python" ]; then
    $python "$work/n.py" > "$work/n0"; preloaded $python "$work/n.py" > "$work/n1"; preloaded AMP_DTYPE=bf16 $python "$work/n.py" > "$work/n2"
    check "numpy, nothing set" cmp "$work/n0" "$work/n1"
    if grep -a numpy "$work/n0" | awk '{exit !($2 < 2e-6)}' && grep -a numpy "$work/n2" | awk '{exit !($2 > 1e-4 && $2 < 4e-3)}'; then pass
    else fail "numpy in bf16" "$(grep -ah numpy "$work"/n?)"; fi
    for n in 0 2; do tail -n +2 "$work/n$n" > "$work/same$n"; done
    check "numpy in bf16: float64 and LAPACK" cmp "$work/same0" "$work/same2"
else skip "numpy" "none on a system's BLAS"; fi

# Installed, and copied beside amp.h.
check "make install" make -s install PREFIX="$work/usr"
PKG_CONFIG_PATH=$work/usr/lib/pkgconfig; export PKG_CONFIG_PATH
if have pkg-config; then
    check "the source as installed" cmp $shim/cblas.c "$(pkg-config --variable=source amp-cblas)"
    check "compile as installed" $cc -O0 "$work/shares.c" "$work/cblas.o" $(pkg-config --cflags --libs amp-cblas) -DAMP_CBLAS_ALONE -o "$work/installed"
    says "installed" "bf16, scale 1" env AMP_DTYPE=bf16 "$work/installed"
else skip "installed" "no pkg-config"; fi
mkdir "$work/copy"
cp amp.h $shim/cblas.h $shim/cblas.c $shim/ampblas.c "$work/copy"
for file in "$work/copy" "$work/usr/include/amp"; do for name in cblas ampblas; do
    check "$name.c in $file" $cc -fsyntax-only "$file/$name.c"
done; done
closing
