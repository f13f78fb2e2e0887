/* recording_backend.h - a third backend, for tests: it counts every call and passes it to the CPU kernels.  It reports that
 * its memory is not visible to the CPU, and that its products fuse.  Therefore amp.h takes the paths for real devices.  A
 * kernel can be made to fail: recording.fail_at = n makes the n-th call from now return AMP_ERR_DEVICE. */
#ifndef AMPT_RECORDING_BACKEND_H
#define AMPT_RECORDING_BACKEND_H

#include "gemm_parts.h"

static struct { int calls, allocs, frees, copies, fail_at; char last[32]; } recording;

static amp_result recording_call(const char *name) {
    recording.calls++;
    snprintf(recording.last, sizeof recording.last, "%s", name);
    return recording.fail_at > 0 && --recording.fail_at == 0 ? AMP_ERR_DEVICE : AMP_OK;
}

static amp_result recording_alloc(void *dev, void **ptr, size_t bytes) { recording.allocs++; return amp_cpu()->alloc(dev, ptr, bytes); }
static void recording_free(void *dev, void *ptr, size_t bytes) { recording.frees++; amp_cpu()->free(dev, ptr, bytes); }
static amp_result recording_copy(void *dev, void *dst, const void *src, size_t bytes, amp_copy_kind kind, void *stream) {
    recording.copies++;
    return amp_cpu()->copy(dev, dst, src, bytes, kind, stream);
}
static amp_result recording_describe(void *dev, amp_device *out) {
    amp_result result = amp_cpu()->describe(dev, out);
    snprintf(out->kind, sizeof out->kind, "recording");
    snprintf(out->name, sizeof out->name, "recording device");
    out->bf16 = out->fp16 = out->tf32 = 1;
    return result;
}

#define RECORDED(name, args_type) \
    static amp_result recording_##name(void *dev, const args_type *args, void *stream) { \
        amp_result result = recording_call(#name); \
        return result != AMP_OK ? result : amp_cpu()->name(dev, args, stream); \
    }
#define RECORDED_KERNELS(X) \
    X(cast, amp_k_cast) X(column_sum, amp_k_column_sum) \
    X(attention, amp_k_attention) X(attention_backward, amp_k_attention) X(rope, amp_k_rope) X(norm, amp_k_norm) X(norm_backward, amp_k_norm) \
    X(softmax, amp_k_softmax) X(softmax_backward, amp_k_softmax) \
    X(activation, amp_k_activation) X(activation_backward, amp_k_activation) \
    X(swiglu, amp_k_swiglu) X(swiglu_backward, amp_k_swiglu) X(cross_entropy, amp_k_cross_entropy) X(mse, amp_k_mse) \
    X(embedding, amp_k_embedding) X(embedding_backward, amp_k_embedding) X(dropout, amp_k_dropout) X(add, amp_k_add) X(add_views, amp_k_add_views) \
    X(check, amp_k_check) X(adamw, amp_k_adamw) X(sgd, amp_k_sgd) X(lion, amp_k_lion) X(scale_ranges, amp_k_scale_ranges) \
    X(inspect, amp_k_inspect) X(rule, amp_k_rule)
RECORDED_KERNELS(RECORDED)
static amp_result recording_gemm(void *dev, const amp_k_gemm *args, void *stream) {
    amp_result result = recording_call("gemm");
    (void)stream;
    return result != AMP_OK ? result : gemm_parts(dev, args);
}

static const amp_backend *recording_backend(void) {
    static amp_backend table;
    table = *amp_cpu();
    table.name = "recording";
    table.fuses = 1;
    table.host_visible = 0;
    table.describe = recording_describe;
    table.alloc = recording_alloc;
    table.free = recording_free;
    table.copy = recording_copy;
    table.gemm = recording_gemm;
#define RECORDED_ENTRY(name, args_type) table.name = recording_##name;
    RECORDED_KERNELS(RECORDED_ENTRY)
    return &table;
}

#endif
