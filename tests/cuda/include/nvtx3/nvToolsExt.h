/* nvToolsExt.h - the ranges of NVTX; coc_ranges (coc.h) tells what was asked for. */
#ifndef COC_NVTX_H
#define COC_NVTX_H

extern "C" {
int nvtxRangePushA(const char *message);        /* the new range's depth, from 0 */
int nvtxRangePop(void);                         /* the depth of the range that ended; below 0: none was open */
}

#endif
