/* cblas.c - the shim and amp.h, compiled once for all files of a program that include cblas.h; see there. */
#define AMP_CBLAS_IMPLEMENTATION
#define AMP_CBLAS_ALONE
#include "cblas.h"
