#!/bin/sh
# nvcc.sh - compiles amp_cuda.cu with nvcc without warnings, and checks the machine code of its kernels for sm_90a.  The
# kernels may need no more registers, divisions and shared memory than tests/gpu/resources.txt says.  They may not spill
# registers.  Those listed in tests/gpu/wide.txt must access memory 16 bytes at a time.  The compiler may not serialise the
# wgmma of a kernel, which its notes C7510 to C7519 report.  The code for GPUs without tensor cores, in which much is left
# out, is compiled to PTX.  CUDA_ARCHS names further architectures to compile for ("80 100", "all").
#
# `nvcc.sh --table` writes resources.txt again.
. tests/lib.sh
build=${BUILD:-build}
object=$build/amp_cuda_sm90a.o
table=tests/gpu/resources.txt
topics="kernels registers shared accesses divisions spills wide"
nvcc=$(sh tests/gpu/find.sh nvcc)
release=$(sh tests/gpu/find.sh release)

# compile ARCH OBJECT: a note that wgmma is serialised is no warning for nvcc, but a failure here.
compile() {
    "$nvcc" -O2 -std=c++17 -I. -DAMP_NVTX -gencode "arch=compute_$1,code=sm_$1" --no-compress -Werror all-warnings \
        -c amp_cuda.cu -o "$2" > "$work/notes" 2>&1
    compiled=$?
    cat "$work/notes"
    [ "$compiled" -eq 0 ] && ! grep -q 'C75[0-9][0-9]' "$work/notes"
}
# Compiling takes a minute: what is there and newer than the sources is used again.
compile_sm90a() {
    if [ -e "$object" ] && [ -z "$(find amp.h amp_cuda.cu -newer "$object")" ]; then return; fi
    mkdir -p "$build"
    compile 90a "$work/amp_cuda.o" && mv "$work/amp_cuda.o" "$object"
}
reader() {
    "${CXX:-g++}" -std=c++17 -O1 -Wall -Wextra -Wshadow -Wconversion tests/gpu/resources.cpp -o "$work/resources"
}
write_table() {
    {
        echo "# resources.txt - what each kernel of amp_cuda.cu needs on sm_90a; made by \`make gpu-table\`."
        echo "# Columns: registers, bytes of stack, bytes of static shared memory, loads and stores of 16 bytes, 64-bit divisions."
        echo "# nvcc $release"
        "$work/resources" "$object"
    } > "$work/table" && cp "$work/table" "$table"
}

# found WHAT RELEASE CAPABILITY: what find.sh says of an nvcc of that release, and of a GPU of that capability.
found() {
    {
        echo '#!/bin/sh'
        echo "case \$1 in --version) echo 'release $2, V$2.1' ;; *) printf 'compute_%s\\n' 35 62 70 75 90 ;; esac"
    } > "$work/nvcc"
    printf '#!/bin/sh\necho "A GPU, %s"\n' "$3" > "$work/nvidia-smi"
    chmod +x "$work/nvcc" "$work/nvidia-smi"
    PATH="$work:$PATH" NVCC=$work/nvcc sh tests/gpu/find.sh "$1"
}
expect_found() {
    is=$(found "$1" "$2" "$3")
    if [ "$is" = "$4" ]; then pass; else fail "find.sh $1, CUDA $2, a GPU of $3" "$is, expected $4"; fi
}
expect_found archs 11.8 9.0 "70 75 90 "
expect_found archs 12.4 9.0 "70 75 90a "
expect_found arch 11.8 9.0 90
expect_found arch 12.4 9.0 90a
expect_found arch 12.4 7.0 70

if [ -z "$nvcc" ]; then
    skip "amp_cuda.cu for a GPU, registers, spills, shared memory, 16-byte accesses" "no nvcc"
elif [ "$1" = --table ]; then
    compile_sm90a && reader && write_table
    exit
else
    check "sm_75, as PTX" "$nvcc" -std=c++17 -I. -arch=compute_75 -Xcicc -O0 -Werror all-warnings -ptx amp_cuda.cu \
        -o "$work/amp_cuda.ptx"
    check "sm_90a" compile_sm90a
    check "tests/gpu/resources.cpp" reader
    if [ -e "$object" ] && [ -x "$work/resources" ]; then
        "$work/resources" "$object" "$table" tests/gpu/wide.txt > "$work/found" || fail "machine code" "cannot be read"
        for topic in $topics; do
            wrong=$(grep "^$topic " "$work/found" | head -n 8)
            made=$(sed -n 's/^# nvcc //p' "$table")
            case $topic in registers|shared|accesses|divisions) same=$made ;; *) same=$release ;; esac
            if [ "$same" != "$release" ]; then skip "$topic" "the table is of nvcc $made, here is $release"
            elif [ -z "$wrong" ]; then pass
            else fail "$topic" "$wrong"; fi
        done
    fi
    archs=$CUDA_ARCHS
    [ "$archs" = all ] && archs=$(sh tests/gpu/find.sh archs)
    for arch in $archs; do
        check "sm_$arch" compile "$arch" "$work/amp_cuda.o"
    done
fi
closing
