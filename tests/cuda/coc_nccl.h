/* coc_nccl.h - the settings and counters of the model of NCCL, which exports one of these structs as coc_nccl. */
#ifndef COC_NCCL_H
#define COC_NCCL_H

struct coc_nccl_state {
    int version;                /* the result of ncclGetVersion; default 2.30.7 */
    int fail_id;                /* 1: ncclGetUniqueId fails */
    int hang;                   /* 1: work that this process begins does not end until its communicator is aborted */
    int async_error;            /* not 0: the state of every communicator, and no work runs */
    int communicators;          /* communicators that exist */
};
extern "C" coc_nccl_state coc_nccl;

#endif
