/* generate.c - loads a GPT-2 and writes: each token is computed alone, against keys and values that are kept.
 *
 *     gcc -O2 examples/generate.c -o generate -lm -lpthread
 *     ./generate gpt2 "Once upon a time" [tokens, default 100] [temperature, default 0.8]
 *
 * AMP_DTYPE=fp32 and its like choose the precision.  gpt2 is a folder as Hugging Face has it, with the model's
 * tokenizer (model_folder.h), or a file in it; a model of 256 tokens needs no tokenizer: its tokens are bytes.
 * train_gpt.c makes such models. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "gpt_files.h"
#include "sample.h"

static amp_context *amp; static gpt model;
static char *kept[2];                   /* keys and values: [layers, positions, channels] each */
static amp_dtype stored;                /* what they are stored in */

static void check(amp_result result) {
    if (result != AMP_OK) { fprintf(stderr, "%s\n", ex_error()); exit(1); }
}

static char *kept_at(int side, int64_t layer, int64_t position) {
    const gpt_config *c = &model.config;
    return kept[side] + (layer * c->positions + position) * c->channels * (int64_t)amp_dtype_size(stored);
}

/* One token at `position`: its logits.  Its keys and values join those of the positions before it. */
static void next_logits(int32_t token, int64_t position, int32_t *id, float *logits) {
    const gpt_config *c = &model.config;
    amp_tensor ids = amp_tensor2(id, AMP_I32, 1, 1), row, fresh;
    amp_attention_op all = {0};
    amp_param *p = model.params + 2;
    amp_value x, h, q, kv[2], *keep = (amp_value *)calloc((size_t)c->layers * 2, sizeof *keep);
    int64_t layer, bytes = c->channels * (int64_t)amp_dtype_size(stored);
    int side;
    if (keep == NULL) check(ex_fail(AMP_ERR_MEMORY, "no memory for a token"));
    check(amp_copy(amp, id, &token, (int64_t)sizeof token, AMP_COPY_TO_DEVICE));
    check(model_tape_begin(model.tape, 0));
    row = model.params[1].weight;       /* the embedding of this position */
    row = amp_tensor3((char *)row.data + position * c->channels * (int64_t)amp_dtype_size(row.dtype), row.dtype, 1, 1,
                      c->channels);
    x = amp_tape_add(gpt_tape(&model, GPT_STREAM), amp_tape_embedding(model.tape, &ids, model.params, NULL),
                     amp_tape_input(model.tape, &row));
    for (layer = 0; layer < c->layers; layer++, p += GPT_PARTS) {
        double scale = c->unscaled ? 1 : 1 / sqrt((double)(c->channels / c->heads));
        if (c->unscaled || c->by_layer) all.scale = (float)(scale / (c->by_layer ? (double)layer + 1 : 1));
        h = gpt_linear(&model, GPT_ATTENTION, gpt_norm(&model, x, p), p + 2, AMP_ACT_NONE);
        q = amp_tape_split(model.tape, h, 2, 0, c->channels);
        for (side = 0; side < 2; side++) {
            kv[side] = amp_tape_split(model.tape, h, 2, (side + 1) * c->channels, c->channels);
            keep[2 * layer + side] = amp_tape_keep(model.tape, kv[side]);
            if (position == 0) continue;
            amp_tensor before = amp_tensor3(kept_at(side, layer, 0), stored, 1, position, c->channels);
            kv[side] = amp_tape_concat(model.tape, amp_tape_input(model.tape, &before), kv[side], 1);
        }
        x = gpt_join(&model, x, amp_tape_attention(model.tape, q, kv[0], kv[1], c->heads, &all), p + 4);
        h = gpt_linear(&model, GPT_MLP, gpt_norm(&model, x, p + 6), p + 8,
                       model_is_fused(c->act) ? c->act : AMP_ACT_NONE);
        if (!model_is_fused(c->act)) h = amp_tape_activation(model.tape, h, NULL, c->act);
        x = gpt_join(&model, x, h, p + 10);
    }
    gpt_head(&model, gpt_norm(&model, x, p));
    check(amp_tape_finish(model.tape));
    for (layer = 0; layer < 2 * c->layers; layer++) {
        check(amp_tape_tensor(model.tape, keep[layer], &fresh));
        check(amp_copy(amp, kept_at((int)(layer % 2), layer / 2, position), fresh.data, bytes, AMP_COPY_ON_DEVICE));
    }
    check(amp_tape_read(model.tape, model.logits, logits, c->vocab));
    free(keep);
}

int main(int argc, char **argv) {
    const char *prompt = argc > 2 ? argv[2] : "";
    int64_t wanted = 100, n, i;
    sampler how = {0.8, 0, 1};
    amp_settings settings = {0};
    amp_desc desc = {0};
    gpt_file file;
    float *logits;
    int32_t *tokens;
    void *id, *memory;
    char *text;
    words_model tokenizer;
    ex_begin();
    if (argc < 2 || argc > 5)
        return fprintf(stderr, "usage: generate folder [prompt] [tokens] [temperature]\n"), 2;
    if (argc > 3 && !ex_integer(argv[3], 1, 1 << 24, &wanted))
        return fprintf(stderr, "tokens: \"%s\" must be a whole number from 1 to 16777216\n", argv[3]), 2;
    if (argc > 4 && !ex_number(argv[4], 0, 1000, &how.temperature))
        return fprintf(stderr, "temperature: \"%s\" must be a number from 0 to 1000\n", argv[4]), 2;
    check(amp_settings_read_env(&settings));
    check(amp_settings_fill(&settings, NULL, &desc, NULL, NULL, NULL));
    check(amp_open(&amp, &desc));
    check(gpt_file_open(&file, argv[1]));
    if (file.config.kv_heads > 0) check(ex_fail(AMP_ERR_UNSUPPORTED, "%s is a Llama, and not a GPT-2", argv[1]));
    file.config.batch = file.config.seq = 1;
    check(model_activations(amp, &file.config.activations));
    stored = file.config.activations;
    check(gpt_create(&model, amp, &file.config));
    check(gpt_file_load(&file, &model));
    if (*file.described.note != 0) fprintf(stderr, "config.json: %s\n", file.described.note);
    if (words_open(&tokenizer, file.weights.path, 0) == AMP_OK) check(words_check(&tokenizer, model.config.vocab));
    else if (model.config.vocab != 256 || strstr(ex_error(), "has no tokenizer") == NULL) check(AMP_ERR_OPEN);
    ex_text[0] = 0;

    tokens = (int32_t *)malloc((strlen(prompt) + WORDS_PARTS + (size_t)wanted) * sizeof *tokens);
    logits = (float *)malloc((size_t)model.config.vocab * 2 * sizeof *logits);
    if (tokens == NULL || logits == NULL) check(ex_fail(AMP_ERR_MEMORY, "no memory for the text"));
    check(sample_prompt(&tokenizer, model.config.vocab, prompt, tokens, &n));
    if (n >= model.config.positions)
        check(ex_fail(AMP_ERR_RANGE, "the prompt has %lld tokens, and the model has %lld positions", (long long)n,
                      (long long)model.config.positions));
    wanted = n + wanted < model.config.positions ? n + wanted : model.config.positions;
    check(amp_alloc(amp, &id, (int64_t)sizeof(int32_t)));
    for (i = 0; i < 2; i++) {
        check(amp_alloc(amp, &memory, model.config.layers * model.config.positions * model.config.channels *
                                          (int64_t)amp_dtype_size(stored)));
        kept[i] = (char *)memory;
    }
    for (i = 0; i + 1 < wanted; i++) {
        next_logits(tokens[i], i, (int32_t *)id, logits);
        if (i + 1 >= n)
            check(sample_next(&how, logits, logits + model.config.vocab, model.config.vocab,
                              (double)amp_random_uniform(how.seed, (uint64_t)i), &tokens[i + 1]));
    }
    text = sample_text(&tokenizer, model.config.vocab, tokens, wanted);
    if (text != NULL) sample_print(text);
    else for (i = 0; i < wanted; i++) printf("%d ", (int)tokens[i]);
    printf("\n");
    free(text); free(tokens); free(logits);
    amp_free(amp, id); amp_free(amp, kept[0]); amp_free(amp, kept[1]);
    gpt_file_close(&file); gpt_destroy(&model); words_close(&tokenizer);
    amp_close(amp);
    return 0;
}
