/* hf_logits.c - the C half of tests/torch/oracle/hf_roundtrip.py: it computes the logits of a checkpoint and writes the
 * file again.
 *
 *     hf_logits MODEL.safetensors BATCH SEQ SEED OUT.bin [SAVE_FOLDER]
 *     hf_logits llama:MODEL.safetensors BATCH SEQ SEED OUT.bin [SAVE_FOLDER]
 *     hf_logits init:VOCAB,POSITIONS,CHANNELS,HEADS,LAYERS BATCH SEQ SEED OUT.bin [SAVE_FOLDER]
 *
 * The tokens are the integers of stream 1000 of SEED (golden.h).  The logits are written to OUT.bin as fp32. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "../examples/gpt_files.h"
#include "golden.h"

static int fail(const char *what) {
    fprintf(stderr, "hf_logits: %s: %s\n", what, ex_error());
    return 1;
}

/* Fills config and weights from a file, or from the numbers after "init:". */
static amp_result make_model(gpt *g, amp_context *amp, const char *from, int64_t batch, int64_t seq, uint64_t seed) {
    gpt_config config;
    gpt_file file;
    long long n[5];
    amp_result result;
    memset(&config, 0, sizeof config);
    if (sscanf(from, "init:%lld,%lld,%lld,%lld,%lld", &n[0], &n[1], &n[2], &n[3], &n[4]) == 5) {
        config.vocab = n[0]; config.positions = n[1]; config.channels = n[2]; config.heads = n[3]; config.layers = n[4];
        config.batch = batch; config.seq = seq;
        EX_TRY(gpt_create(g, amp, &config));
        return gpt_init(g, seed);
    }
    EX_TRY(gpt_file_open(&file, from));
    config = file.config;
    config.batch = batch; config.seq = seq;
    result = gpt_create(g, amp, &config);
    if (result == AMP_OK && (result = gpt_file_load(&file, g)) != AMP_OK) gpt_destroy(g);
    gpt_file_close(&file);
    return result;
}

static amp_result save_model(gpt *g, const char *folder) {
    char path[512];
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    EX_TRY(gpt_save_safetensors(g, path, 0));
    snprintf(path, sizeof path, "%s/config.json", folder);
    return gpt_save_config(g, path);
}

/* The same of a Llama, whose file stands after "llama:". */
static amp_result llama_run(amp_context *amp, const char *from, const int32_t *ids, int64_t batch, int64_t seq, uint32_t seed,
                            const char *out, const char *folder) {
    char path[512], config[512];
    amp_autocast_desc region = {.mode = AMP_MODE_INFERENCE};
    amp_tensor tokens = amp_tensor2(ids, AMP_I32, batch, seq);
    int64_t n = batch * seq;
    amp_tape *tape;
    amp_value y;
    float *logits;
    llama m;
    EX_TRY(llama_load(&m, amp, from, NULL));
    if (folder != NULL) {
        snprintf(path, sizeof path, "%s/model.safetensors", folder);
        snprintf(config, sizeof config, "%s/config.json", folder);
        EX_TRY(llama_save(&m, path, config));
    }
    n *= m.config.vocab;
    logits = (float *)malloc((size_t)n * 4);
    ampt_integers((int32_t *)(uintptr_t)ids, batch * seq, seed, 1000, (int32_t)m.config.vocab);
    EX_TRY(amp_tape_create(amp, &tape, NULL));
    EX_TRY(amp_tape_begin(tape, &region));
    y = llama_logits(&m, tape, &tokens);
    EX_TRY(amp_tape_finish(tape));
    EX_TRY(amp_tape_read(tape, y, logits, n));
    amp_tape_destroy(tape);
    EX_TRY(amp_file_write_atomic(NULL, out, logits, (size_t)n * 4));
    free(logits);
    llama_free(&m);
    return AMP_OK;
}

int main(int argc, char **argv) {
    int64_t batch, seq, n;
    amp_context *amp = NULL;
    amp_desc desc;
    void *ids = NULL;
    float *logits;
    gpt g;
    if (argc < 6) return fprintf(stderr, "hf_logits: five or six arguments, see its first comment\n"), 2;
    batch = atoll(argv[2]); seq = atoll(argv[3]); n = batch * seq;
    memset(&desc, 0, sizeof desc);
    desc.dtype = AMP_F32;
    if (amp_open(&amp, &desc) != AMP_OK) return fail("amp_open");
    if (strncmp(argv[1], "llama:", 6) == 0) {
        if (amp_alloc(amp, &ids, n * 4) != AMP_OK) return fail("amp_alloc");
        if (llama_run(amp, argv[1] + 6, (const int32_t *)ids, batch, seq, (uint32_t)atoll(argv[4]), argv[5],
                      argc > 6 ? argv[6] : NULL) != AMP_OK)
            return fail(argv[1]);
        amp_close(amp);
        return 0;
    }
    if (make_model(&g, amp, argv[1], batch, seq, (uint64_t)atoll(argv[4])) != AMP_OK) return fail(argv[1]);
    if (argc > 6 && save_model(&g, argv[6]) != AMP_OK) return fail(argv[6]);
    if (amp_alloc(amp, &ids, n * 4) != AMP_OK) return fail("amp_alloc");
    ampt_integers((int32_t *)ids, n, (uint32_t)atoll(argv[4]), 1000, (int32_t)g.config.vocab);
    n *= g.config.vocab;
    logits = (float *)malloc((size_t)n * 4);
    if (gpt_forward(&g, (const int32_t *)ids, batch, seq, 0) != AMP_OK) return fail("forward");
    if (amp_tape_read(g.tape, g.logits, logits, n) != AMP_OK) return fail("logits");
    if (amp_file_write_atomic(NULL, argv[5], logits, (size_t)n * 4) != AMP_OK) return fail(argv[5]);
    free(logits);
    amp_free(amp, ids);
    gpt_destroy(&g);
    amp_close(amp);
    return 0;
}
