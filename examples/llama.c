/* llama.c - trains a small Llama on a text, byte by byte, samples from it, and writes it as transformers reads it.
 *
 *     gcc -O2 examples/llama.c -o llama -lm -lpthread
 *     ./llama [text file, default amp.h] [auto, fp32, bf16 or fp16] [steps, default 400]
 *
 * The result lies in out/llama/, with its tokenizer: LlamaForCausalLM.from_pretrained("out/llama").  With such a
 * folder, or model.safetensors, as the first argument it samples from that model instead. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "llama_files.h"

enum { VOCAB = 256, BATCH = 8, SEQ = 96, SAMPLE = 200 };
#define CHECK(call) do { if ((call) != AMP_OK) { fprintf(stderr, "%s\n", ex_error()); exit(1); } } while (0)
static amp_context *amp; static amp_tape *tape; static llama model; static words_model tokenizer;

/* Records the model and its loss on a batch. */
static amp_value network(amp_loader *loader, amp_mode mode) {
    amp_autocast_desc region = {.mode = mode};
    amp_batch batch;
    CHECK(amp_loader_next(loader, &batch));
    amp_tensor ids = amp_tensor2(batch.inputs, AMP_I32, batch.batch, batch.seq);
    CHECK(amp_tape_begin(tape, &region));
    return amp_tape_cross_entropy(tape, llama_logits(&model, tape, &ids), batch.targets, NULL);
}

static float valid_loss(amp_loader *loader, int batches) {
    float loss, sum = 0;
    for (int i = 0; i < batches; i++) {
        amp_value value = network(loader, AMP_MODE_INFERENCE);
        CHECK(amp_tape_finish(tape));
        CHECK(amp_tape_read(tape, value, &loss, 1));
        sum += loss / (float)batches;
    }
    return sum;
}

/* Writes text, byte after byte, from the model's own probabilities; positions behind the last byte are not seen. */
static void sample(uint64_t seed) {
    static float logits[SEQ * VOCAB];
    amp_autocast_desc region = {.mode = AMP_MODE_INFERENCE};
    int32_t window[SEQ] = {'\n'}, *ids;
    int64_t n = 1, seq = model.config.positions < SEQ ? model.config.positions : SEQ;
    CHECK(amp_alloc(amp, (void **)&ids, sizeof window));
    amp_tensor tensor = amp_tensor2(ids, AMP_I32, 1, seq);
    for (uint64_t step = 0; step < SAMPLE; step++) {
        CHECK(amp_copy(amp, ids, window, sizeof window, AMP_COPY_TO_DEVICE));
        CHECK(amp_tape_begin(tape, &region));
        amp_value y = llama_logits(&model, tape, &tensor);
        CHECK(amp_tape_finish(tape));
        CHECK(amp_tape_read(tape, y, logits, seq * VOCAB));
        float *p = logits + (n - 1) * VOCAB, sum = 0, most = p[ex_largest(p, VOCAB)], at;
        for (int64_t i = 0; i < VOCAB; i++) sum += p[i] = expf((p[i] - most) / 0.8f);   /* temperature 0.8 */
        if (!(sum >= 1)) CHECK(ex_fail(AMP_ERR_RANGE, "the model's output is NaN or infinite"));
        int32_t next = 0;
        for (at = amp_random_uniform(seed, step) * sum; next < VOCAB - 1 && at >= p[next]; next++) at -= p[next];
        putchar(next);
        if (n == seq) memmove(window, window + 1, sizeof window - sizeof *window);
        else n++;
        window[n - 1] = next;
    }
    putchar('\n');
}

static void train(const char *path, int64_t steps, const amp_choice *choice) {
    llama_config config = {VOCAB, SEQ, 128, 344, 3, 4, 2, 10000, 1e-5};
    amp_loader_desc text = {.path = path, .format = AMP_TOKENS_BYTES, .shuffle = 1, .batch = BATCH, .seq = SEQ}, rest;
    amp_optimizer_desc adamw = {.weight_decay = 0.1, .beta2 = 0.95, .clip_norm = 1};
    amp_schedule schedule = {.lr = 3e-3, .min_lr = 3e-4, .warmup = steps / 10, .steps = steps};
    amp_scaler_desc scaling = {.disable = !choice->scaler};
    amp_optimizer *optimizer; amp_scaler *scaler; amp_loader *first, *last; amp_loader_info info;
    CHECK(llama_create(&model, amp, config, 1));
    CHECK(amp_loader_create(amp, &first, &text));
    CHECK(amp_loader_info_get(first, &info));
    amp_loader_destroy(first);
    rest = text;
    rest.first = text.last = info.tokens / 10 * 9;          /* the last tenth is for validation */
    CHECK(amp_loader_create(amp, &first, &text));
    CHECK(amp_loader_create(amp, &last, &rest));
    adamw.params = model.params; adamw.n_params = model.n_params;
    CHECK(amp_scaler_create(amp, &scaler, &scaling));
    CHECK(amp_optimizer_create(amp, &optimizer, &adamw));
    for (int64_t step = 0; step < steps; step++) {
        double lr;
        CHECK(amp_schedule_lr(&schedule, step, &lr));
        CHECK(amp_optimizer_set_lr(optimizer, lr));
        CHECK(amp_tape_backward(tape, network(first, AMP_MODE_TRAINING), amp_scaler_scale_ptr(scaler)));
        CHECK(amp_step(optimizer, scaler));
        if (step % 100 == 0 || step == steps - 1)
            printf("step %lld: validation loss %.3f\n", (long long)step + 1, (double)valid_loss(last, 4));
    }
    CHECK(ex_folder_make("out/llama/model.safetensors"));
    CHECK(llama_save(&model, "out/llama/model.safetensors", "out/llama/config.json"));
    CHECK(words_bytes(&tokenizer, 0));
    CHECK(words_save(&tokenizer, "out/llama/model.safetensors"));
    amp_optimizer_destroy(optimizer); amp_scaler_destroy(scaler);
    amp_loader_destroy(first); amp_loader_destroy(last);
}

/* Opens a model, whose tokens must be bytes, by its tokenizer if there is one. */
static void open_model(const char *path) {
    char note[400], weights[PATH_MAX];
    CHECK(llama_load(&model, amp, path, note));
    if (*note != 0) fprintf(stderr, "config.json: %s\n", note);
    CHECK(weights_path(path, weights));
    int opened = words_open(&tokenizer, weights, 0) == AMP_OK;
    if (!opened && strstr(ex_error(), "has no tokenizer") == NULL) CHECK(AMP_ERR_OPEN);
    if (model.config.vocab != VOCAB || (opened && !words_are_bytes(&tokenizer)))
        CHECK(ex_fail(AMP_ERR_UNSUPPORTED, "%s has %lld tokens, and this program needs a model whose tokens are bytes",
                      path, (long long)model.config.vocab));
    ex_text[0] = 0;
}

int main(int argc, char **argv) {
    const char *path = argc > 1 ? argv[1] : "amp.h";
    int64_t steps = 400;
    struct stat info;
    amp_desc desc = {0};
    amp_choice choice;
    ex_begin();
    if (argc > 4) return fprintf(stderr, "usage: llama [text or model] [precision] [steps]\n"), 2;
    if (argc > 3 && !ex_integer(argv[3], 1, 1000000000, &steps))
        return fprintf(stderr, "steps: \"%s\" must be a number from 1 to 1000000000\n", argv[3]), 2;
    CHECK(amp_dtype_parse(argc > 2 ? argv[2] : "auto", &desc.dtype));
    CHECK(amp_open(&amp, &desc));
    CHECK(amp_query_choice(amp, &choice));
    CHECK(amp_tape_create(amp, &tape, NULL));
    if (strstr(path, ".safetensors") != NULL || (stat(path, &info) == 0 && S_ISDIR(info.st_mode))) open_model(path);
    else train(path, steps, &choice);
    sample(1);
    amp_tape_destroy(tape);
    llama_free(&model); words_close(&tokenizer);
    amp_close(amp);
    return 0;
}
