#!/bin/sh
# nvcc.sh - amp_cuda.cu for a GPU, without a warning.  CUDA_ARCHS names the architectures ("90 100"); "all": every one
# that this nvcc knows.  Default: 90.
. tests/lib.sh
nvcc=${NVCC:-nvcc}
have "$nvcc" || nvcc=${CUDA_HOME:-/usr/local/cuda}/bin/nvcc
if ! have "$nvcc"; then
    skip "amp_cuda.cu for a GPU" "no nvcc"
elif [ ! -e amp_cuda.cu ]; then
    skip "amp_cuda.cu for a GPU" "no amp_cuda.cu"
else
    archs=${CUDA_ARCHS:-90}
    [ "$archs" = all ] && archs=$("$nvcc" --list-gpu-arch | sed 's/compute_//')
    for arch in $archs; do
        check "sm_$arch" "$nvcc" -std=c++17 "-arch=sm_$arch" -Werror all-warnings -I. -c amp_cuda.cu -o "$work/amp_cuda.o"
    done
fi
closing
