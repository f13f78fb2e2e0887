/* csv.c - a classifier learns a CSV file: numbers, and in the last column the class, a number from 0.
 *
 *     gcc -O2 examples/csv.c -o csv -lm -lpthread
 *     ./csv data.csv [auto, fp32, bf16 or fp16]
 *
 * The first line may be names.  Columns are brought to mean 0 and deviation 1; every tenth row is kept to validate. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { MOST_COLUMNS = 256, HIDDEN = 64, BATCH = 32, STEPS = 1000 };
static float *x; static int32_t *y; static int64_t rows, columns, classes = 2;      /* x [rows, columns] */

static void check(amp_result result) {
    if (result != AMP_OK) { fprintf(stderr, "%s\n", amp_last_error()); exit(1); }
}
static void stop(const char *path, int64_t line, const char *why) {
    fprintf(stderr, "%s: line %lld: %s\n", path, (long long)line, why);
    exit(2);
}

static void read_csv(const char *path) {
    char line[16384];
    int64_t number, n;
    FILE *file = fopen(path, "r");
    if (file == NULL) { perror(path); exit(2); }
    for (number = 1; fgets(line, sizeof line, file) != NULL; number++) {
        float values[MOST_COLUMNS];
        char *at = line, *end;
        for (n = 0; *at != 0 && *at != '\n' && *at != '\r' && n < MOST_COLUMNS; at = *end == ',' ? end + 1 : end, n++) {
            values[n] = strtof(at, &end);
            if (end == at) break;
        }
        if (number == 1 && n == 0) continue;                    /* names */
        if (n == 0 && strspn(line, " \r\n") == strlen(line)) continue;
        if (n < 2 || (*at != 0 && *at != '\n' && *at != '\r'))
            stop(path, number, "must be numbers with commas between them, at most 256");
        if (rows > 0 && n - 1 != columns) stop(path, number, "has another number of columns than the lines before");
        columns = n - 1;
        if (values[columns] < 0 || values[columns] > 999 || floorf(values[columns]) < values[columns])
            stop(path, number, "the last column must be a class, 0 to 999");
        x = (float *)realloc(x, (size_t)((rows + 1) * columns) * sizeof *x);
        y = (int32_t *)realloc(y, (size_t)(rows + 1) * sizeof *y);
        if (x == NULL || y == NULL) stop(path, number, "no memory");
        memcpy(x + rows * columns, values, (size_t)columns * sizeof *x);
        y[rows] = (int32_t)values[columns];
        if (y[rows] >= classes) classes = y[rows] + 1;
        rows++;
    }
    fclose(file);
    if (rows < 10 * BATCH) stop(path, number, "the file has fewer than 320 rows");
}

/* Mean 0 and deviation 1 in each column; every tenth row goes to the end, for validation.  Returns how many stay. */
static int64_t prepare(void) {
    float *sorted = (float *)malloc((size_t)(rows * columns) * sizeof *sorted);
    int32_t *classes_of = (int32_t *)malloc((size_t)rows * sizeof *classes_of);
    int64_t pass, i, k, n = 0, train = 0;
    if (sorted == NULL || classes_of == NULL) { fprintf(stderr, "no memory\n"); exit(1); }
    for (k = 0; k < columns; k++) {
        double sum = 0, square = 0, mean, deviation;
        for (i = 0; i < rows; i++) sum += (double)x[i * columns + k];
        mean = sum / (double)rows;
        for (i = 0; i < rows; i++) square += ((double)x[i * columns + k] - mean) * ((double)x[i * columns + k] - mean);
        deviation = sqrt(square / (double)rows);
        if (!(deviation > 0)) deviation = 1;
        for (i = 0; i < rows; i++) x[i * columns + k] = (float)(((double)x[i * columns + k] - mean) / deviation);
    }
    for (pass = 0; pass < 2; pass++) {
        for (i = 0; i < rows; i++) {
            if ((i % 10 == 9) != (pass == 1)) continue;
            memcpy(sorted + n * columns, x + i * columns, (size_t)columns * sizeof *x);
            classes_of[n++] = y[i];
        }
        if (pass == 0) train = n;
    }
    free(x); free(y);
    x = sorted; y = classes_of;
    return train;
}

int main(int argc, char **argv) {
    amp_desc desc = {0}; amp_choice choice; amp_context *amp; amp_model *model; amp_tape *tape; amp_optimizer *adamw;
    amp_scaler *scaler; amp_loader *data; amp_batch batch; amp_autocast_desc inference = {.mode = AMP_MODE_INFERENCE};
    amp_optimizer_desc optimizer = {.lr = 3e-3, .weight_decay = 0.01, .clip_norm = 1};
    int64_t train, i, k, right = 0, held;
    float *logits, loss;
    if (argc < 2) return fprintf(stderr, "usage: csv data.csv [auto, fp32, bf16 or fp16]\n"), 2;
    read_csv(argv[1]);
    train = prepare();
    held = rows - train;
    check(amp_dtype_parse(argc > 2 ? argv[2] : "auto", &desc.dtype));
    check(amp_open(&amp, &desc)); check(amp_query_choice(amp, &choice));
    check(amp_model_create(amp, &model, 1, 0)); check(amp_tape_create(amp, &tape, NULL));
    amp_param *w1 = amp_model_param(model, "1.weight", HIDDEN, columns, AMP_INIT_KAIMING_NORMAL, 0);
    amp_param *b1 = amp_model_param(model, "1.bias", HIDDEN, 0, AMP_INIT_ZEROS, 0);
    amp_param *w2 = amp_model_param(model, "2.weight", classes, HIDDEN, AMP_INIT_XAVIER_NORMAL, 0);
    amp_param *b2 = amp_model_param(model, "2.bias", classes, 0, AMP_INIT_ZEROS, 0);
    amp_tensor arrays[2] = {amp_tensor2(x, AMP_F32, rows, columns), amp_tensor1(y, AMP_I32, rows)};
    amp_loader_desc first = {.tensors = arrays, .n_tensors = 2, .batch = BATCH, .last = train, .shuffle = 1};
    amp_scaler_desc scaling = {.disable = !choice.scaler};
    check(amp_model_params(model, &optimizer.params, &optimizer.n_params));
    check(amp_optimizer_create(amp, &adamw, &optimizer)); check(amp_scaler_create(amp, &scaler, &scaling));
    check(amp_loader_create(amp, &data, &first));
    for (i = 1; i <= STEPS; i++) {
        check(amp_loader_next(data, &batch)); check(amp_tape_begin(tape, NULL));
        amp_tensor in = amp_tensor2((void *)(uintptr_t)batch.fields[0], AMP_F32, batch.batch, columns);
        amp_value h = amp_tape_linear(tape, amp_tape_input(tape, &in), w1, b1, AMP_ACT_RELU);
        h = amp_tape_linear(tape, h, w2, b2, AMP_ACT_NONE);
        h = amp_tape_cross_entropy(tape, h, (const int32_t *)batch.fields[1], NULL);
        check(amp_tape_backward(tape, h, amp_scaler_scale_ptr(scaler))); check(amp_step(adamw, scaler));
        check(amp_tape_read(tape, h, &loss, 1));
        if (i % 250 == 0) printf("step %lld: loss %.4f\n", (long long)i, (double)loss);
    }
    logits = (float *)malloc((size_t)(held * classes) * sizeof *logits);
    if (logits == NULL) return 1;
    check(amp_tape_begin(tape, &inference));
    amp_tensor in = amp_tensor2(x + train * columns, AMP_F32, held, columns);
    amp_value out = amp_tape_linear(tape, amp_tape_input(tape, &in), w1, b1, AMP_ACT_RELU);
    out = amp_tape_linear(tape, out, w2, b2, AMP_ACT_NONE);
    check(amp_tape_finish(tape)); check(amp_tape_read(tape, out, logits, held * classes));
    for (i = 0; i < held; i++) {
        int64_t best = 0;
        for (k = 1; k < classes; k++) if (logits[i * classes + k] > logits[i * classes + best]) best = k;
        right += best == y[train + i];
    }
    printf("%s: %.1f%% of %lld rows that it has not seen\n", amp_dtype_name(choice.dtype),
           100.0 * (double)right / (double)held, (long long)held);
    amp_loader_destroy(data); amp_optimizer_destroy(adamw); amp_scaler_destroy(scaler); amp_tape_destroy(tape);
    amp_model_destroy(model); amp_close(amp);
    free(logits); free(x); free(y);
    return fflush(stdout) != 0 || ferror(stdout);
}
