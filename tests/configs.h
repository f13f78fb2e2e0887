/* configs.h - tests config.json files that transformers wrote (tests/torch/golden/hf_configs.json).  Weights made here,
 * which look like its own, are put beside them.  The tests say what reading and writing must give.  Needs
 * examples/gpt_files.h, golden.h and test.h. */
#ifndef AMPT_CONFIGS_H
#define AMPT_CONFIGS_H

typedef struct ampt_configs { void *data; size_t bytes; } ampt_configs;

static __attribute__((unused)) ampt_configs ampt_configs_open(void) {
    ampt_configs c;
    if (amp_file_read_all(NULL, AMPT_GOLDEN "/hf_configs.json", &c.data, &c.bytes) != AMP_OK) exit(2);
    return c;
}

/* A folder of this process, which is empty until a file is written there. */
static const char *ampt_folder(void) {
    static char folder[200];
    snprintf(folder, sizeof folder, "%s/ampt_configs_%ld", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp", (long)getpid());
    (void)mkdir(folder, 0777);
    return folder;
}
static const char *ampt_in_folder(const char *name) {
    static char paths[4][256];
    static int next;
    char *path = paths[next++ & 3];
    snprintf(path, sizeof paths[0], "%s/%s", ampt_folder(), name);
    return path;
}
static void ampt_folder_remove(void) {
    remove(ampt_in_folder("model.safetensors"));
    remove(ampt_in_folder("config.json"));
    remove(ampt_folder());
}
static void ampt_put(const char *name, const char *text, size_t bytes) { CHECK_OK(amp_file_write_atomic(NULL, ampt_in_folder(name), text, bytes)); }

static void ampt_replace(char *data, size_t n, const char *from, const char *to) {
    size_t length = strlen(from), i;
    for (i = 0; i + length <= n; i++) if (memcmp(data + i, from, length) == 0) memcpy(data + i, to, length);
}

/* Removes the metadata of model.safetensors, as in a file of another program. */
static void ampt_forget_origin(void) {
    void *data;
    size_t bytes, header = 0;
    int i;
    CHECK_OK(amp_file_read_all(NULL, ampt_in_folder("model.safetensors"), &data, &bytes));
    for (i = 7; i >= 0; i--) header = header << 8 | ((unsigned char *)data)[i];
    ampt_replace((char *)data, header + 8, "\"crc32c\"", "\"others\"");
    ampt_replace((char *)data, header + 8, "\"config\"", "\"konfig\"");
    ampt_put("model.safetensors", (const char *)data, bytes);
    amp_file_free(NULL, data, bytes);
}

/* Writes the tensors of one file and, of three numbers each, those of `more`, "a b c", as model.safetensors. */
static __attribute__((unused)) void ampt_add_tensors(const char *from, const char *more) {
    static const float numbers[3] = {1, 2, 3};
    const int64_t three = 3;
    char names[400], *name;
    model_weights all;
    st_writer w;
    memset(&w, 0, sizeof w);
    CHECK_OK(weights_open(&all, from));
    for (int64_t i = 0; i < all.tensors.n; i++) st_write_tensor(&w, all.tensors.tensors[i].name, all.tensors.tensors[i].ndim, all.tensors.tensors[i].shape);
    snprintf(names, sizeof names, "%s", more);
    for (name = strtok(names, " "); name != NULL; name = strtok(NULL, " ")) st_write_tensor(&w, name, 1, &three);
    CHECK_OK(st_write_begin(&w));
    for (int64_t i = 0; i < all.tensors.n; i++) {
        float *values = (float *)malloc((size_t)all.tensors.tensors[i].count * sizeof *values + 1);
        CHECK_OK(st_floats(&all.tensors.tensors[i], values));
        st_write_floats(&w, values, all.tensors.tensors[i].count);
        free(values);
    }
    snprintf(names, sizeof names, "%s", more);
    for (name = strtok(names, " "); name != NULL; name = strtok(NULL, " ")) st_write_floats(&w, numbers, 3);
    CHECK_OK(st_write_file(&w, ampt_in_folder("model.safetensors")));
    st_write_close(&w);
    weights_close(&all);
}

/* 1: both are the same JSON, apart from blanks. */
static int ampt_same_value(json a, json b) {
    for (;; a.at++, b.at++) {
        while (a.at < a.end && (*a.at == ' ' || *a.at == '\n')) a.at++;
        while (b.at < b.end && (*b.at == ' ' || *b.at == '\n')) b.at++;
        if (a.at == a.end || b.at == b.end) return a.at == a.end && b.at == b.end;
        if (*a.at != *b.at) return 0;
    }
}

/* 1: `text` has every member of `original`, with the same value. */
static int ampt_has_members(json original, const char *text, size_t bytes) {
    json value, mine;
    char key[128];
    int more, all = 1;
    json_need(&original, '{');
    for (more = json_peek(&original) == '"'; more && json_member(&original, key, &value); more = json_take(&original, ',')) {
        int same = json_value(json_open(text, bytes), key, &mine) && ampt_same_value(mine, value);
        if (!same) printf("      %s is not %.*s any more\n", key, (int)(value.end - value.at), value.at);
        all = all && same;
    }
    return all;
}

/* Compares with the golden file the loss, the norm of all gradients, and that of the word embeddings, which come first. */
static __attribute__((unused)) void ampt_check_numbers(const ampt_golden *golden, const char *name, const amp_param *params, int64_t n_params, double loss) {
    double got[3], *exact, norms[2] = {0, 0};
    char record[160];
    int64_t i, k, n;
    for (i = 0; i < n_params; i++)
        for (k = 0; k < amp_tensor_count(&params[i].grad); k++) {
            double x = (double)((const float *)params[i].grad.data)[k];
            norms[0] += x * x;
            if (i == 0) norms[1] += x * x;
        }
    got[0] = loss; got[1] = sqrt(norms[0]); got[2] = sqrt(norms[1]);
    snprintf(record, sizeof record, "%s/numbers", name);
    exact = (double *)ampt_golden_read(golden, record, 2, &n);
    for (i = 0; i < 3; i++) CHECK_MSG(fabs(got[i] - exact[i]) <= 1e-5 * exact[i], "%s: number %d is %.9g, must be %.9g", name, (int)i, got[i], exact[i]);
    free(exact);
}
static __attribute__((unused)) void ampt_check_logits(const ampt_golden *golden, const char *name, const float *logits, int64_t n_logits) {
    char record[160];
    int64_t n;
    ampt_norms none = {0, 1};
    snprintf(record, sizeof record, "%s/logits", name);
    float *exact = (float *)ampt_golden_read(golden, record, 1, &n);
    CHECK_EQ(n, n_logits);
    double error = ampt_error(logits, exact, n, &none);
    CHECK_MSG(error <= 1e-5, "%s: the logits have a relative error of %.2e", name, error);
    ampt_figure("configurations of Hugging Face's, fp32", error, 1e-5);
    free(exact);
}

#endif
