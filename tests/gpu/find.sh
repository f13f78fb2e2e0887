#!/bin/sh
# find.sh WHAT - finds the CUDA compiler and the GPU of this machine.  It prints the answer, or prints nothing and fails:
#   nvcc      the compiler: $NVCC if that is set, else of $CUDA_HOME, PATH, pkg-config or /usr/local/cuda
#   release   its release: 13.0
#   archs     the architectures it can build from Volta on, the first that is supported: 70 75 ... 90a before CUDA 13, then
#             75 80 ... 121; 90a in place of 90 from CUDA 12 on, because every GPU of capability 9.0 runs code for sm_90a,
#             which alone has wgmma
#   gpu       the first GPU: "NVIDIA H200, 9.0"
#   arch      the architecture to build for it: that of archs where it is among them
#   usable    1 if there are a compiler and a GPU, else 0; never fails
#   backend   one line that says which backend a program can use here, and why; never fails
have() { command -v "$1" >/dev/null 2>&1; }

find_nvcc() {
    if [ -n "$NVCC" ]; then command -v "$NVCC"; return; fi
    if [ -n "$CUDA_HOME" ] && [ -x "$CUDA_HOME/bin/nvcc" ]; then echo "$CUDA_HOME/bin/nvcc"; return; fi
    if have nvcc; then command -v nvcc; return; fi
    if have pkg-config; then        # the toolkit's packages bring cuda-13.0.pc or cudart-13.0.pc
        for name in $(pkg-config --list-all 2>/dev/null | awk '$1 ~ /^cuda(rt)?(-[0-9.]+)?$/ {print $1}' | sort -r); do
            root=$(pkg-config --variable=cudaroot "$name")
            if [ -x "$root/bin/nvcc" ]; then echo "$root/bin/nvcc"; return; fi
        done
    fi
    [ -x /usr/local/cuda/bin/nvcc ] && echo /usr/local/cuda/bin/nvcc
}
find_release() { nvcc=$(find_nvcc) && "$nvcc" --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p'; }
find_archs() {
    nvcc=$(find_nvcc) || return 1
    case $(find_release) in 11.*) hopper=90 ;; *) hopper=90a ;; esac
    "$nvcc" --list-gpu-arch | sed -n 's/^compute_\([0-9]*\)$/\1/p' | sort -n | awk '$1 >= 70' | sed "s/^90$/$hopper/" |
        tr '\n' ' '
}
find_gpu() {
    have nvidia-smi || return 1
    gpu=$(nvidia-smi --query-gpu=name,compute_cap --format=csv,noheader 2>/dev/null | head -n 1)
    case $gpu in *", "[0-9]*.[0-9]*) echo "$gpu" ;; *) return 1 ;; esac
}
find_arch() {
    gpu=$(find_gpu) || return 1
    arch=$(echo "$gpu" | sed 's/.*, //; s/[.]//')
    case " $(find_archs)" in *" ${arch}a "*) echo "${arch}a" ;; *) echo "$arch" ;; esac
}
find_usable() { if find_nvcc >/dev/null && find_gpu >/dev/null; then echo 1; else echo 0; fi; }
find_backend() {
    gpu=$(find_gpu) && gpu="$(echo "$gpu" | sed 's/, \(.*\)/ (compute capability \1)/')"
    if ! find_nvcc >/dev/null; then
        echo "backend: CPU; no nvcc (CUDA_HOME, PATH, pkg-config), so the CUDA backend is not built${gpu:+ for the $gpu}"
    elif [ -z "$gpu" ]; then
        echo "backend: CPU; no GPU here. nvcc $(find_release) builds the CUDA backend: make cuda"
    else
        echo "backend: CUDA on $gpu, nvcc $(find_release)"
    fi
}
case $1 in
    nvcc|release|archs|gpu|arch|usable|backend) "find_$1" ;;
    *) echo "find.sh: nvcc, release, archs, gpu, arch, usable or backend" >&2; exit 2 ;;
esac
