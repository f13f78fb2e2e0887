/* cublas_v2.h - the handle of cuBLAS, which cuBLASLt also accepts, and nothing else of cuBLAS. */
#if defined(COC_TOOLKIT)
#include_next <cublas_v2.h>
#elif !defined(COC_CUBLAS_V2_H)
#define COC_CUBLAS_V2_H

#include "cublasLt.h"

#define cublasCreate cublasCreate_v2
#define cublasDestroy cublasDestroy_v2

extern "C" {
cublasStatus_t cublasCreate_v2(cublasHandle_t *handle);
cublasStatus_t cublasDestroy_v2(cublasHandle_t handle);
}

#endif
