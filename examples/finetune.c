/* finetune.c - a BERT from safetensors, fine-tuned on labelled text, evaluated and saved.
 *
 *     gcc -O2 examples/finetune.c -o finetune -lm -lpthread
 *     ./finetune reviews.tsv bert-base-uncased          labels are class numbers from 0, "1<TAB>text", one a line
 *
 * The folder is as Hugging Face has it: weights, config.json, and a tokenizer.  Without a folder, a small model with
 * random weights learns from bytes.  The last tenth of the lines is evaluated on.  What comes out lies in
 * out/finetune/, and is such a folder.
 * train_classifier.c is the tool for this, with names as labels, shuffling, schedules and flags. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "encoder_files.h"

enum { BATCH = 16, SEQ = 64, EPOCHS = 3, CLASSES = 64 };
static amp_context *amp; static encoder model; static int32_t *device;
static encoder_file file; static words_model tokenizer;     /* of the folder */

static void check(amp_result result) {
    if (result != AMP_OK) { fprintf(stderr, "%s\n", ex_error()); exit(1); }
}

/* ---- The texts: [CLS] tokens [SEP], padded to SEQ */

typedef struct text { int32_t ids[SEQ], length, label; } text;

static text *read_texts(const char *path, int64_t *n, int32_t *classes) {
    char *all, *line, *end, *tab;
    size_t bytes;
    int64_t number = 1, label = 0;
    text *texts = NULL, *t;
    check(ex_st(st_read_file(path, &all, &bytes)));
    if (strlen(all) != bytes) check(ex_fail(AMP_ERR_FORMAT, "%s: has a byte 0, so it is no text", path));
    for (*n = 0, *classes = 2, line = all; line < all + bytes; line = end + 1, number++) {
        end = line + strcspn(line, "\n");
        *end = 0;
        if (end > line && end[-1] == '\r') end[-1] = 0;
        if (*line == 0) continue;
        tab = strchr(line, '\t');
        if (tab != NULL) *tab = 0;
        if (tab == NULL || !ex_integer(line, 0, CLASSES - 1, &label))
            check(ex_fail(AMP_ERR_FORMAT, "%s: line %lld is not \"number<TAB>text\", number below %d", path,
                          (long long)number, CLASSES));
        texts = (text *)realloc(texts, (size_t)(*n + 1) * sizeof *texts);
        if (texts == NULL) check(ex_fail(AMP_ERR_MEMORY, "%s: no memory", path));
        memset(t = &texts[(*n)++], 0, sizeof *t);
        t->label = (int32_t)label;
        t->length = (int32_t)words_encode(&tokenizer, tab + 1, (int64_t)strlen(tab + 1), NULL, 0, SEQ, t->ids, NULL);
        if (t->length < 1) check(ex_fail(AMP_ERR_MEMORY, "%s: a text has no tokens: %s", path, ex_error()));
        if (t->label >= *classes) *classes = t->label + 1;
    }
    free(all);
    if (*n < 10 * BATCH / 8) check(ex_fail(AMP_ERR_RANGE, "%s: %lld texts are too few", path, (long long)*n));
    return texts;
}

/* A batch of `count` texts on the device: ids, lengths, labels. */
static encoder_input load(const text *texts, int64_t count, const int32_t **labels) {
    int32_t host[BATCH * (SEQ + 2)];
    encoder_input in = {0};
    int64_t i;
    for (i = 0; i < count; i++) {
        memcpy(host + i * SEQ, texts[i].ids, sizeof texts[i].ids);
        host[count * SEQ + i] = texts[i].length;
        host[count * (SEQ + 1) + i] = texts[i].label;
    }
    check(amp_copy(amp, device, host, count * (SEQ + 2) * (int64_t)sizeof *host, AMP_COPY_TO_DEVICE));
    check(amp_sync(amp));
    in.ids = device; in.lengths = device + count * SEQ; in.batch = count; in.seq = SEQ;
    *labels = device + count * (SEQ + 1);
    return in;
}

/* ---- The model: of the folder, or small and random; its head is new if the file has none for these classes */

static void open_folder(const char *folder) {
    if (folder == NULL) { check(words_bytes(&tokenizer, 1)); return; }
    check(encoder_file_open(&file, folder));
    check(words_open(&tokenizer, file.weights.path, 0));
    check(words_check(&tokenizer, file.config.vocab));
}

static void open_model(const char *folder, int32_t classes) {
    encoder_config config = {.vocab = tokenizer.n, .positions = SEQ, .types = 2, .layers = 2, .heads = 2, .hidden = 64,
                             .intermediate = 256};
    int fresh;
    if (folder != NULL) config = file.config;
    config.classes = classes; config.batch = BATCH; config.seq = SEQ; config.dropout = 0.1f;
    check(encoder_create(&model, amp, &config));
    if (folder == NULL) { check(encoder_init(&model, 1)); return; }
    check(encoder_file_load(&file, &model, 1, &fresh));
    printf("%s: %lld layers, width %lld%s%s%s\n", folder, (long long)config.layers, (long long)config.hidden,
           fresh > 0 ? "; the head is new" : "", *file.described.note ? "; config.json: " : "", file.described.note);
    encoder_file_close(&file);
}

static double accuracy(const text *texts, int64_t n) {
    float logits[BATCH * CLASSES];
    int64_t first, i, right = 0, classes = model.config.classes;
    for (first = 0; first < n; first += BATCH) {
        int64_t count = n - first < BATCH ? n - first : BATCH;
        const int32_t *labels;
        encoder_input in = load(texts + first, count, &labels);
        check(encoder_forward(&model, &in, NULL, NULL, 0));
        check(amp_tape_read(model.tape, model.logits, logits, count * classes));
        for (i = 0; i < count; i++) right += ex_largest(logits + i * classes, classes) == texts[first + i].label;
    }
    return (double)right / (double)n;
}

int main(int argc, char **argv) {
    const char *folder = argc > 2 ? argv[2] : NULL;
    amp_optimizer_desc adamw = {.lr = folder != NULL ? 5e-5 : 1e-3, .weight_decay = 0.01, .clip_norm = 1};
    amp_optimizer *optimizer;
    amp_scaler *scaler;
    amp_choice choice;
    int64_t n, train, epoch, first;
    int32_t classes;
    void *memory;
    text *texts;
    ex_begin();
    if (argc < 2 || argc > 3) return fprintf(stderr, "usage: finetune texts.tsv [folder of a BERT]\n"), 2;
    open_folder(folder);
    texts = read_texts(argv[1], &n, &classes);
    train = n - n / 10;
    check(amp_open(&amp, NULL));
    check(amp_query_choice(amp, &choice));
    check(amp_alloc(amp, &memory, BATCH * (SEQ + 2) * (int64_t)sizeof *device));
    device = (int32_t *)memory;
    open_model(folder, classes);
    amp_scaler_desc scaling = {.disable = !choice.scaler};
    adamw.params = model.params; adamw.n_params = model.n_params;
    check(amp_optimizer_create(amp, &optimizer, &adamw));
    check(amp_scaler_create(amp, &scaler, &scaling));

    for (epoch = 1; epoch <= EPOCHS; epoch++) {
        double sum = 0;
        for (first = 0; first + BATCH <= train; first += BATCH) {
            const int32_t *labels;
            float loss;
            encoder_input in = load(texts + first, BATCH, &labels);
            check(encoder_forward(&model, &in, labels, amp_scaler_scale_ptr(scaler), 1));
            check(encoder_backward(&model));
            check(amp_step(optimizer, scaler));
            check(encoder_loss_read(&model, &loss));
            sum += (double)loss;
        }
        printf("epoch %lld, %s: loss %.4f, accuracy on texts not seen %.1f%%\n", (long long)epoch,
               amp_dtype_name(choice.dtype), sum / (double)(train / BATCH), 100 * accuracy(texts + train, n - train));
    }
    check(ex_folder_make("out/finetune/model.safetensors"));
    check(encoder_save(&model, "out/finetune/model.safetensors"));
    check(encoder_save_config(&model, "out/finetune/config.json"));
    check(words_save(&tokenizer, "out/finetune/model.safetensors"));
    printf("saved out/finetune: model.safetensors, config.json and the tokenizer\n");
    amp_optimizer_destroy(optimizer); amp_scaler_destroy(scaler);
    encoder_destroy(&model); words_close(&tokenizer);
    free(texts); amp_free(amp, device);
    amp_close(amp);
    return 0;
}
