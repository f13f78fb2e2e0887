#!/bin/sh
# nccl.sh - compares the NCCL declarations in amp_cuda.cu with nccl.h, and checks that libnccl.so.2 has all the functions it
# calls.  Both are searched in NCCL_HOME (include, lib), in the packages nvidia-nccl-cu12 and -cu13 of PYTHON, and in the
# system's folders.
. tests/lib.sh
cuda=${CUDA_HOME:-/usr/local/cuda}
python=$(command -v "${PYTHON:-python3}")
pypi=$([ -n "$python" ] && "$python" -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0])' 2>/dev/null)
for home in $NCCL_HOME $pypi "$cuda" /usr; do
    [ -z "$header" ] && [ -e "$home/include/nccl.h" ] && header=$home/include
    for lib in "$home/lib" "$home/lib64" "$home/lib/x86_64-linux-gnu" "$home/lib/aarch64-linux-gnu"; do
        [ -z "$library" ] && [ -e "$lib/libnccl.so.2" ] && library=$lib/libnccl.so.2
    done
done

# The declarations, and "function member" of each that is looked for.
sed -n '/^\/\* NCCL\.  Declares/,/^};/p' amp_cuda.cu > "$work/ours.h"
tr -d '\n' < amp_cuda.cu | grep -o 'ampc_symbol(l, "nccl[A-Za-z]*", &n->[a-z_]*' |
    sed 's/.*"\(.*\)", &n->\(.*\)/X(\1, \2)/' > "$work/symbols.h"
check "17 functions" test "$(wc -l < "$work/symbols.h")" -eq 17
cat > "$work/check.cpp" <<'END'
#if defined(HEADER)
#  include <nccl.h>
#else
#  include <stddef.h>
   typedef void *cudaStream_t;
#endif
#include <dlfcn.h>
#include <stdio.h>
#include <type_traits>
#include "amp.h"
#include "ours.h"
#if defined(HEADER)
/* Passed the same way: enums are ints here, and communicators pointers. */
template <class A, class B> constexpr bool same() {
    return std::is_pointer<A>::value || std::is_pointer<B>::value
               ? std::is_pointer<A>::value && std::is_pointer<B>::value
           : std::is_class<A>::value ? std::is_class<B>::value && sizeof(A) == sizeof(B) && alignof(A) == alignof(B)
                                     : !std::is_class<B>::value && sizeof(A) == sizeof(B);
}
template <class A, class B> struct alike;
template <class R, class... A, class S, class... B> struct alike<R (*)(A...), S (*)(B...)> {
    static constexpr bool calls() {
        if constexpr (sizeof...(A) != sizeof...(B)) return false;
        else return same<R, S>() && (same<A, B>() && ...);
    }
};
#define X(name, member) static_assert(alike<decltype(&name), decltype(ampc_nccl::member)>::calls(), #name);
#include "symbols.h"
#undef X
static_assert((int)AMPC_NCCL_SUCCESS == ncclSuccess && (int)AMPC_NCCL_IN_PROGRESS == ncclInProgress, "results");
static_assert((int)AMPC_NCCL_SUM == ncclSum, "operators");
static_assert((int)AMPC_NCCL_U8 == ncclUint8 && (int)AMPC_NCCL_F16 == ncclFloat16 && (int)AMPC_NCCL_F32 == ncclFloat32 &&
              (int)AMPC_NCCL_F64 == ncclFloat64 && (int)AMPC_NCCL_BF16 == ncclBfloat16, "dtypes");
constexpr ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
static_assert((int)AMP_COMMUNICATOR_ID == NCCL_UNIQUE_ID_BYTES && AMPC_NCCL_MAGIC == theirs.magic, "id, magic");
static_assert(offsetof(ampc_nccl_config, size) == offsetof(ncclConfig_t, size) &&
              offsetof(ampc_nccl_config, magic) == offsetof(ncclConfig_t, magic) &&
              offsetof(ampc_nccl_config, version) == offsetof(ncclConfig_t, version) &&
              offsetof(ampc_nccl_config, blocking) == offsetof(ncclConfig_t, blocking) &&
              sizeof(ampc_nccl_config) <= sizeof(ncclConfig_t), "config");
#endif
int main(int argc, char **argv) {
    void *library = dlopen(argc > 1 ? argv[1] : "", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    ampc_nccl n;
    ampc_nccl_id id;
    int version = 0;
    if (library == NULL) return fprintf(stderr, "%s\n", dlerror()), 1;
#define X(name, member) \
    if ((n.member = (decltype(n.member))dlsym(library, #name)) == NULL) return fprintf(stderr, "no %s\n", #name), 1;
#include "symbols.h"
    if (n.version(&version) != AMPC_NCCL_SUCCESS || version < AMPC_NCCL_LEAST) return fprintf(stderr, "version %d\n", version), 1;
    return n.unique_id(&id) == AMPC_NCCL_SUCCESS ? 0 : 77;
}
END
build() { "${CXX:-g++}" -std=c++17 -Wall -Wextra -Wno-unused-const-variable "$@" -I"$work" -I. "$work/check.cpp" -o "$work/check" -ldl; }
if [ -z "$header" ]; then skip "declarations beside nccl.h" "no nccl.h: set NCCL_HOME, or install nvidia-nccl-cu13 for PYTHON"
elif [ ! -e "$cuda/include/cuda_fp8.h" ]; then skip "declarations beside nccl.h" "no CUDA toolkit, which nccl.h includes"
else check "declarations beside $header/nccl.h" build -DHEADER -isystem "$header" -isystem "$cuda/include"; fi
if [ -z "$library" ]; then skip "functions of libnccl.so.2" "none found: set NCCL_HOME, or install nvidia-nccl-cu13 for PYTHON"
elif build; then
    "$work/check" "$library" > "$work/said" 2>&1
    code=$?
    if [ $code -eq 0 ]; then pass
    elif [ $code -eq 77 ]; then skip "ncclGetUniqueId" "$library makes none here"
    else fail "functions of $library" "$(cat "$work/said")"; fi
else fail "functions of libnccl.so.2" "does not build"; fi
closing
