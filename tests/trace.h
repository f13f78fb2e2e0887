/* trace.h - what the tests share that replay a trace of tests/torch/oracle/scaler.py or fuzz_logic.py.  It has the
 * generator and the checksum of the oracle, functions for the bits of numbers, and the operators of
 * tests/torch/golden/autocast.txt.  Needs amp.h and test.h. */
#ifndef AMPT_TRACE_H
#define AMPT_TRACE_H

#include <stdint.h>
#include <string.h>

/* Knuth's MMIX generator, upper 31 bits. */
typedef struct { uint64_t x; } rng;
static __attribute__((unused)) uint32_t below(rng *r, uint32_t n) {
    r->x = r->x * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((r->x >> 33) % n);
}

/* FNV-1a over 64-bit words. */
static const uint64_t hash_start = 0xCBF29CE484222325u;
static __attribute__((unused)) void hash_add(uint64_t *h, uint64_t word) { *h = (*h ^ word) * 0x100000001B3u; }

static __attribute__((unused)) uint32_t bits(float x) { uint32_t b; memcpy(&b, &x, 4); return b; }
static __attribute__((unused)) float of_bits(uint32_t b) { float x; memcpy(&x, &b, 4); return x; }
static __attribute__((unused)) int is_nan_bits(uint32_t b) { return (b & 0x7fffffff) > 0x7f800000; }

/* ---- The operators of autocast.txt: those of amp.h, and one registered by the program for each policy */

static const char *const user_ops[5] = {"user_lower", "user_fp32", "user_promote", "user_fallthrough", "user_banned"};
static const amp_cast_policy user_policies[5] = {AMP_CAST_LOWER, AMP_CAST_FP32, AMP_CAST_PROMOTE, AMP_CAST_FALLTHROUGH,
                                                 AMP_CAST_BANNED};

static __attribute__((unused)) void register_user_ops(amp_context *amp) {
    int i;
    for (i = 0; i < 5; i++) {
        int32_t op = 0;
        CHECK_OK(amp_operator_register(amp, user_ops[i], user_policies[i], &op));
        CHECK_EQ(op, AMP_OP_USER + i);
    }
}

static __attribute__((unused)) int32_t op_number(const char *name) {
    static const char *const names[] = {"none", "linear", "matmul", "gemm", "attention", "layernorm", "rmsnorm",
                                        "softmax", "activation", "swiglu", "cross_entropy", "mse", "embedding",
                                        "dropout", "add"};
    int32_t i;
    for (i = 0; i < 15; i++) if (strcmp(names[i], name) == 0) return i;
    for (i = 0; i < 5; i++) if (strcmp(user_ops[i], name) == 0) return AMP_OP_USER + i;
    return -1;
}

#endif
