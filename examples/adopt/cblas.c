/* cblas.c - the implementation that files compiled with -DAMP_CBLAS_SHARED share; see cblas.h. */
#define AMP_CBLAS_IMPLEMENTATION
#include "cblas.h"
