#!/bin/sh
# toolkits.sh - compiles amp_cuda.cu with other CUDA toolkits than the installed one, without warnings.  TOOLKITS is a folder
# that has one toolkit per folder.  A toolkit with bin/nvcc is used with that.  Otherwise clang compiles the file against the
# toolkit's headers, and the toolkit's ptxas assembles the kernels for each of TOOLKIT_ARCHS.  CLANGS names the compilers.
# The code of the CPU is linked against the toolkit's libraries.  Each combination prints a line, which has the reason if it
# is skipped.
#
# `toolkits.sh --fetch` makes such toolkits of NVIDIA's packages on PyPI, for the releases of CUDA in RELEASES.  It loads
# 2 GB by PYTHON's pip.
. tests/lib.sh
folder=${TOOLKITS:-build/toolkits}
archs=${TOOLKIT_ARCHS:-70 75 80 90a}

# ---- Fetching

# packages RELEASE: what pip installs for it.  Compiler, headers and runtime, cuBLAS.
packages() {
    case $1 in
        11.8) echo nvidia-cuda-nvcc-cu11==11.8.89 nvidia-cuda-runtime-cu11==11.8.89 nvidia-cublas-cu11==11.11.3.6 ;;
        12.0) echo nvidia-cuda-nvcc-cu12==12.0.140 nvidia-cuda-runtime-cu12==12.0.146 nvidia-cublas-cu12==12.0.2.224 ;;
        12.4) echo nvidia-cuda-nvcc-cu12==12.4.131 nvidia-cuda-runtime-cu12==12.4.127 nvidia-cublas-cu12==12.4.5.8 ;;
        12.9) echo nvidia-cuda-nvcc-cu12==12.9.86 nvidia-cuda-runtime-cu12==12.9.79 nvidia-cublas-cu12==12.9.1.4 ;;
    esac
}
# fetch RELEASE
fetch() {
    wheels=$folder/wheels.$1 root=$folder/cuda-$1
    # shellcheck disable=SC2046
    "${PYTHON:-python3}" -m pip install --quiet --no-deps --only-binary=:all: --platform manylinux1_x86_64 \
        --platform manylinux2010_x86_64 --platform manylinux2014_x86_64 --platform manylinux_2_27_x86_64 \
        --target "$wheels" $(packages "$1") || return 1
    mkdir -p "$root"
    find "$wheels" -name '__*' -prune -exec rm -rf {} +
    for part in "$wheels"/nvidia/*/; do cp -Rl "$part." "$root" || return 1; done
    rm -rf "$wheels"
    chmod +x "$root/bin/ptxas"
}
if [ "$1" = --fetch ]; then
    for release in ${RELEASES:-11.8 12.0 12.4 12.9}; do
        if [ -e "$folder/cuda-$release" ]; then skip "CUDA $release" "$folder/cuda-$release is there"
        elif fetch "$release"; then pass
        else
            rm -rf "$folder/cuda-$release"
            fail "CUDA $release" "cannot be fetched"
        fi
    done
    closing
    exit
fi

# ---- Compiling

# release_of TOOLKIT: 1108 for 11.8, from its headers.
release_of() {
    sed -n 's/^#define CUDA_VERSION  *\([0-9]*\).*/\1/p' "$1/include/cuda.h" | awk '{print int($1 / 1000) * 100 + $1 % 1000 / 10}'
}
major_of() { "$1" --version | sed -n 's/.*clang version \([0-9]*\).*/\1/p'; }

# lacks RELEASE COMPILER MAJOR ARCH: prints why they do not fit together, or nothing.
lacks() {
    arch=${4%a}
    if [ "$4" = 90a ] && [ "$1" -lt 1200 ]; then echo "this CUDA cannot compile for sm_90a"
    elif [ "$4" != host ] && [ "$arch" -lt 75 ] && [ "$1" -ge 1300 ]; then echo "this CUDA no longer compiles for sm_$4"
    elif [ "$4" != host ] && [ "$arch" -ge 100 ] && [ "$1" -lt 1208 ]; then echo "this CUDA cannot compile for sm_$4"
    elif [ "$2" = nvcc ]; then :
    elif [ "$1" -ge 1300 ] && [ "$3" -lt 22 ]; then echo "this clang cannot read its headers"
    elif [ "$4" = 90a ] && [ "$3" -lt 18 ]; then echo "this clang cannot compile for sm_90a"
    elif [ "$4" != host ] && [ "$arch" -ge 100 ] && [ "$3" -lt 20 ]; then echo "this clang cannot compile for sm_$4"; fi
}

# by_clang TOOLKIT CLANG OPTION...: the folder before the toolkit's has an empty header of cuRAND's, which clang asks for.
by_clang() {
    toolkit=$1 clang=$2; shift 2
    "$clang" -x cuda "--cuda-path=$toolkit" -std=c++17 -O1 -Werror -Wno-unknown-cuda-version -Wno-unknown-attributes \
        -isystem "$toolkit/include" -isystem "$work/include" -include tests/gpu/clang_cuda.h -I. "$@" -c amp_cuda.cu
}
# links TOOLKIT OBJECT: everything that the CPU's code calls is in the toolkit's libraries.
links() {
    for library in libcudart.so libcublasLt.so; do
        for place in lib lib64; do
            found=$(ls "$1/$place/$library"* 2>/dev/null | head -n 1)
            [ -n "$found" ] && break
        done
        [ -n "$found" ] || { echo "$library is missing"; return 1; }
        set -- "$@" "$found"
    done
    shift
    "${CXX:-g++}" -shared -Wl,-z,defs,--allow-shlib-undefined "$@" "$work/amp.o" -lm -ldl -lpthread -o "$work/linked.so"
}
# compile TOOLKIT COMPILER ARCH: of the CPU's code, or of the kernels, and looks for these in the result.
compile() {
    object=$work/amp_cuda.o
    rm -f "$object"
    if [ "$2" = nvcc ]; then
        "$1/bin/nvcc" -O2 -std=c++17 -I. -gencode "arch=compute_$3,code=sm_$3" -Werror all-warnings -c amp_cuda.cu -o "$object" &&
            links "$1" "$object"
    elif [ "$3" = host ]; then
        by_clang "$1" "$2" --cuda-host-only --cuda-gpu-arch=sm_70 -fPIC -o "$object" && links "$1" "$object"
    else
        by_clang "$1" "$2" --cuda-device-only "--cuda-gpu-arch=sm_$3" -o "$object" || return 1
        grep -qa ampc_cross_entropy "$object" || { echo "has no kernels"; return 1; }
    fi
}
# try TOOLKIT RELEASE COMPILER ARCH
try() {
    major=$([ "$3" = nvcc ] || major_of "$3")
    name="CUDA $(($2 / 100)).$(($2 % 100)), ${3##*/}, $([ "$4" = host ] && echo "the CPU's code" || echo "sm_$4")"
    why=$(lacks "$2" "$3" "$major" "$4")
    began=$(date +%s)
    if [ -n "$why" ]; then skip "$name" "$why"
    elif compile "$1" "$3" "$4" > "$work/output" 2>&1 && [ ! -s "$work/output" ]; then
        pass
        echo "PASS $name ($(($(date +%s) - began)) s)"
    else fail "$name" "$(head -n 12 "$work/output")"; fi
}

mkdir -p "$work/include"
: > "$work/include/curand_mtgp32_kernel.h"
echo '#include "amp.h"' | "${CC:-gcc}" -std=c99 -DAMP_IMPLEMENTATION -O0 -fPIC -I. -x c -c - -o "$work/amp.o" ||
    fail "amp.h" "does not compile"
clangs=${CLANGS:-$(for n in 16 17 18 19 20 21 22; do command -v "clang-$n"; done)}
count=0
for toolkit in "$folder"/*/; do
    toolkit=${toolkit%/}
    [ -e "$toolkit/include/cuda.h" ] || continue
    count=$((count + 1))
    release=$(release_of "$toolkit")
    if [ -x "$toolkit/bin/nvcc" ]; then
        for arch in $archs; do try "$toolkit" "$release" nvcc "$arch"; done
    elif [ -z "$clangs" ]; then skip "$toolkit" "no clang of 16 or later"
    else
        for clang in $clangs; do
            for arch in host $archs; do try "$toolkit" "$release" "$clang" "$arch"; done
        done
    fi
done
[ $count -gt 0 ] || skip "other toolkits" "none in $folder: sh tests/gpu/toolkits.sh --fetch"
closing
