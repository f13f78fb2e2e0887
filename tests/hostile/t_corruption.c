/* t_corruption.c - damages a checkpoint in every byte, length and record, and checks that loading rejects it.
 *
 * The checkpoint is that of a small run of the example trainer in the middle of an accumulation cycle: weights, master
 * weights, moments, gradients, scaler, loader, random numbers, options.  Every damaged checkpoint must be rejected, with a
 * text that names the file and the damaged part.  The objects that it would have been loaded into must be unchanged, bit
 * for bit.  Blobs with every dtype are tested in t_state.c, and files of amp_tune in t_care.c. */
#define main train_gpt_main
#include "../examples/train_gpt.c"
#undef main
#include "test.h"
#include <fcntl.h>

/* The format of a blob, as amp.h describes it. */
enum { HEADER = 40, ENTRY = 80 };

static char folder[600];

static const char *path_of(const char *name) {
    static char paths[4][700];
    static int next;
    char *path = paths[next++ & 3];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static void write_file(const char *name, const void *data, size_t bytes) { CHECK_OK(amp_file_write_atomic(NULL, path_of(name), data, bytes)); }

/* ---- The run */

enum { MOST_ARGUMENTS = 64 };

/* read_settings from words; each call begins anew, as a process does. */
static amp_result settings_of(settings *set, amp_state **resumed, const char *more) {
    static char words[2000];
    char *argv[MOST_ARGUMENTS], *at;
    int argc = 0;
    snprintf(words, sizeof words,
             "train_gpt --data %s/text --out %s --save none --metrics none --threads 1 --workers 0 --layers 1 --heads 1 --channels 8 "
             "--vocab 26 --seq 8 --batch 2 --accumulation 2 --precision fp16 --level O2 --dropout 0.1 --init-scale 1024 %s",
             folder, folder, more);
    for (at = strtok(words, " "); at != NULL && argc < MOST_ARGUMENTS; at = strtok(NULL, " ")) argv[argc++] = at;
    memset(flag_given.text, 0, sizeof flag_given.text);
    memset(flag_given.on_command_line, 0, sizeof flag_given.on_command_line);
    free(saved_options);
    saved_options = NULL;
    ex_text[0] = 0;
    *resumed = NULL;
    return read_settings(argc, argv, set, resumed);
}

/* A run after some steps and one micro-batch of the next. */
static void open_trained(run *r, int64_t steps, const char *more) {
    settings set;
    amp_state *resumed;
    amp_batch batch;
    CHECK_MSG(settings_of(&set, &resumed, more) == AMP_OK, "%s", ex_error());
    CHECK_MSG(open_run(r, &set, resumed) == AMP_OK, "%s", ex_error());
    amp_state_destroy(resumed);
    for (; r->step < steps; r->step++) CHECK_MSG(train_step(r, 1e-2f, NULL, 0) == AMP_OK, "%s", ex_error());
    CHECK_OK(next_batch(r, 0, &batch));
    CHECK_OK(micro_step(r, 0, &batch));
}

static amp_state *state_of(run *r) {
    amp_state *state;
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_MSG(put_training(r, state) == AMP_OK, "%s", ex_error());
    return state;
}

typedef struct blob { uint8_t *data; size_t bytes; } blob;
static blob encoded(const amp_state *state) {
    void *data = NULL;
    blob b;
    b.bytes = 0;
    CHECK_OK(amp_state_encode(state, &data, &b.bytes));
    b.data = (uint8_t *)data;
    return b;
}
static void blob_free(blob *b) { amp_file_free(NULL, b->data, b->bytes); }

static blob blob_of(run *r) {
    amp_state *state = state_of(r);
    blob b = encoded(state);
    amp_state_destroy(state);
    return b;
}
/* All that a checkpoint holds is as it was; but for the version of the writer, a state of the same things has the same bytes. */
static int is_as_before(run *r, const blob *before) {
    blob b = blob_of(r);
    int same = b.bytes == before->bytes && memcmp(b.data, before->data, b.bytes) == 0;
    blob_free(&b);
    return same;
}

static size_t element_size(amp_dtype dtype) { return amp_dtype_size(dtype); }

/* Where the bytes of record i lie in the blob. */
static void place_of(const amp_state *state, int64_t i, size_t *first, size_t *end) {
    int64_t k, n = 0;
    amp_dtype dtype;
    while (amp_state_key(state, n) != NULL) n++;
    *end = HEADER + ENTRY * (size_t)n;
    for (k = 0; k <= i; k++) {
        *first = *end;
        *end += (size_t)amp_state_count(state, amp_state_key(state, k), &dtype) * element_size(dtype);
    }
}

/* ---- Bytes */

/* Refused, with the result and the words that this place calls for. */
static void check_refused(const blob *b, size_t at, const char *part) {
    amp_state *out = NULL;
    amp_result result = amp_state_decode(&out, NULL, b->data, b->bytes);
    const char *text = amp_last_error();
    CHECK_MSG(result != AMP_OK && out == NULL, "byte %zu (%s) was accepted", at, part);
    CHECK_MSG(strstr(text, part) != NULL && (strstr(text, amp_result_hint(result)) != NULL || ampt_says_what_to_do(text)), "byte %zu (%s): %s", at, part, text);
    if (out != NULL) amp_state_destroy(out);
}

TEST(every_byte_of_a_checkpoint) {
    run r;
    amp_state *state;
    blob b;
    size_t at, first, end;
    int64_t i;
    char part[80];
    open_trained(&r, 3, "");
    state = state_of(&r);
    b = encoded(state);
    place_of(state, 0, &first, &end);
    for (at = 0; at < first; at++) {
        uint8_t was = b.data[at];
        b.data[at] ^= (uint8_t)(at % 3 == 2 ? 0xff : 1 << at % 8);
        check_refused(&b, at, at < 8 ? "AMPSTATE" : at < 12 ? "" : at < HEADER ? "header" : "directory");
        b.data[at] = was;
    }
    for (i = 0; amp_state_key(state, i) != NULL; i++) {
        place_of(state, i, &first, &end);
        snprintf(part, sizeof part, "record \"%s\"", amp_state_key(state, i));
        for (at = first; at < end; at++) {
            b.data[at] ^= (uint8_t)(at % 3 == 2 ? 0xff : 1 << at % 8);
            check_refused(&b, at, part);
            b.data[at] ^= (uint8_t)(at % 3 == 2 ? 0xff : 1 << at % 8);
        }
    }
    CHECK_EQ(end, b.bytes);
    CHECK(is_as_before(&r, &b));
    blob_free(&b);
    amp_state_destroy(state);
    close_run(&r);
}

/* Cut at the end of each part and one byte before and behind it, and with something behind the end. */
TEST(every_length_of_a_checkpoint) {
    run r;
    amp_state *state, *out = NULL;
    blob b;
    uint8_t *longer;
    size_t first, end, n;
    int64_t i;
    open_trained(&r, 1, "");
    state = state_of(&r);
    b = encoded(state);
    place_of(state, 0, &first, &end);
    for (n = 0; n <= first; n++) CHECK_ERR(amp_state_decode(&out, NULL, b.data, n), AMP_ERR_TRUNCATED);
    for (i = 0; amp_state_key(state, i) != NULL; i++) {
        place_of(state, i, &first, &end);
        for (n = end - 1; n <= end + 1 && n < b.bytes; n++) CHECK_ERR(amp_state_decode(&out, NULL, b.data, n), AMP_ERR_TRUNCATED);
    }
    longer = (uint8_t *)calloc(b.bytes + 4096, 1);
    memcpy(longer, b.data, b.bytes);
    for (n = 1; n <= 4096; n *= 2) CHECK_ERR(amp_state_decode(&out, NULL, longer, b.bytes + n), AMP_ERR_CHECKSUM);
    CHECK(out == NULL);
    free(longer);
    blob_free(&b);
    amp_state_destroy(state);
    close_run(&r);
}

/* The program refuses a damaged file by the flag, the path and the part, and opens nothing. */
static void check_resume_refused(const char *part) {
    settings set;
    amp_state *resumed;
    char more[700];
    snprintf(more, sizeof more, "--resume %s", path_of("checkpoint"));
    CHECK(settings_of(&set, &resumed, more) != AMP_OK && resumed == NULL);
    CHECK_MSG(strstr(ex_error(), "--resume") != NULL && strstr(ex_error(), path_of("checkpoint.state")) != NULL &&
              strstr(ex_error(), part) != NULL, "%s: %s", part, ex_error());
}

TEST(the_program_refuses_them) {
    run r;
    amp_state *state;
    blob b;
    size_t first, end, n;
    int64_t i;
    char part[80];
    open_trained(&r, 2, "");
    state = state_of(&r);
    b = encoded(state);
    for (i = 0; amp_state_key(state, i) != NULL; i++) {
        place_of(state, i, &first, &end);
        if (end == first) continue;
        snprintf(part, sizeof part, "record \"%s\"", amp_state_key(state, i));
        b.data[(first + end) / 2] ^= 0x10;
        write_file("checkpoint.state", b.data, b.bytes);
        check_resume_refused(part);
        b.data[(first + end) / 2] ^= 0x10;
    }
    for (n = 0; n < b.bytes; n += 1 + b.bytes / 40) {
        write_file("checkpoint.state", b.data, n);
        check_resume_refused("bytes");
    }
    write_file("checkpoint.state", "PK\3\4", 4);
    check_resume_refused("AMPSTATE");
    CHECK(is_as_before(&r, &b));
    blob_free(&b);
    amp_state_destroy(state);
    close_run(&r);
}

/* ---- Records with right checksums that no run has written */

typedef enum harm { GONE, OTHER_DTYPE, SHORTER, LONGER, HARMS } harm;

/* The state without record `skip`, which is added in another form, or with byte `byte` of it changed. */
static amp_state *harmed(const amp_state *from, int64_t skip, int kind, int64_t byte) {
    amp_state *to;
    int64_t i;
    CHECK_OK(amp_state_create(&to, NULL));
    for (i = 0; amp_state_key(from, i) != NULL; i++) {
        const char *key = amp_state_key(from, i);
        amp_dtype dtype;
        int64_t n = amp_state_count(from, key, &dtype);
        uint8_t *values = (uint8_t *)calloc((size_t)n + 1, 8);
        CHECK_OK(amp_state_get(from, key, dtype, values, n));
        if (i == skip && byte >= 0) values[byte] ^= (uint8_t)(1 << byte % 8 | 0x80);
        if (i == skip && kind == OTHER_DTYPE) dtype = dtype == AMP_U8 ? AMP_U16 : AMP_U8;
        if (i == skip && kind == SHORTER && n > 0) n--;
        if (i == skip && kind == LONGER) n++;
        if (i != skip || kind != GONE) CHECK_OK(amp_state_put(to, key, dtype, values, n));
        free(values);
    }
    return to;
}

typedef amp_result (*loading)(run *r, const amp_state *state);
static amp_result load_weights(run *r, const amp_state *state) { return model_load_state(r->amp, r->model.params, r->model.n_params, state); }
static amp_result load_optimizer(run *r, const amp_state *state) { return amp_optimizer_load(r->optimizer, state, "optimizer"); }
static amp_result load_scaler(run *r, const amp_state *state) { return amp_scaler_load(r->scaler, state, "scaler"); }
static amp_result load_loader(run *r, const amp_state *state) { return amp_loader_load(r->loader, state, "loader"); }
static amp_result load_random(run *r, const amp_state *state) { return amp_random_load(r->amp, state, "random"); }
static const struct { const char *prefix; loading load; } loadings[] = {
    {"weight.", load_weights}, {"optimizer.", load_optimizer}, {"scaler.", load_scaler}, {"loader.", load_loader}, {"random.", load_random}};
enum { LOADINGS = (int)(sizeof loadings / sizeof *loadings) };

static int loading_of(const char *key) {
    int k;
    for (k = 0; k < LOADINGS; k++) if (strncmp(key, loadings[k].prefix, strlen(loadings[k].prefix)) == 0) return k;
    return -1;
}

/* 1: refused, and nothing has changed.  Where it is accepted, the state before it is loaded again, whole. */
static int refused_whole(run *r, int k, const amp_state *bad, const amp_state *before, const blob *bytes, const char *what) {
    int i;
    ex_text[0] = 0;
    if (loadings[k].load(r, bad) != AMP_OK) {
        CHECK_MSG(is_as_before(r, bytes), "%s: half applied (%s)", what, ex_error());
        CHECK_MSG(strlen(ex_error()) > 20, "%s: %s", what, ex_error());
        return 1;
    }
    for (i = 0; i < LOADINGS; i++) CHECK_MSG(loadings[i].load(r, before) == AMP_OK, "%s: %s", what, ex_error());
    CHECK_MSG(is_as_before(r, bytes), "%s: what was saved does not come back", what);
    return 0;
}

/* Each record of a checkpoint missing, of another dtype, shorter or longer: refused by the name of the
   record (of the parameter, for the list of names), but for records that older checkpoints do not have, and the last line's end in the list of names. */
TEST(records_that_do_not_fit) {
    static const char *const optional[] = {"optimizer.seed", "optimizer.trackers", "optimizer.cycle", "random.rank"};
    run r, other;
    amp_state *before, *good;
    blob bytes;
    int64_t i;
    open_trained(&other, 5, "--seed 2");
    good = state_of(&other);
    close_run(&other);
    open_trained(&r, 3, "--seed 2");
    before = state_of(&r);
    bytes = encoded(before);
    for (i = 0; amp_state_key(good, i) != NULL; i++) {
        const char *key = amp_state_key(good, i);
        int k = loading_of(key), kind, may_lack = 0;
        size_t o;
        for (o = 0; o < sizeof optional / sizeof *optional; o++) may_lack |= strncmp(key, optional[o], strlen(optional[o])) == 0;
        for (kind = 0; kind < HARMS && k >= 0; kind++) {
            amp_state *bad = harmed(good, i, kind, -1);
            char what[100];
            int refused;
            snprintf(what, sizeof what, "%s, kind %d", key, kind);
            refused = refused_whole(&r, k, bad, before, &bytes, what);
            CHECK_MSG(!refused || strstr(ex_error(), key) != NULL || strcmp(key, "optimizer.names") == 0, "%s: the text does not name it: %s", what, ex_error());
            CHECK_MSG(refused || (kind == GONE && may_lack) || (kind == SHORTER && (strcmp(key, "optimizer.names") == 0 || amp_state_count(good, key, NULL) == 0)), "%s was accepted", what);
            amp_state_destroy(bad);
        }
    }
    blob_free(&bytes);
    amp_state_destroy(before);
    amp_state_destroy(good);
    close_run(&r);
}

/* Every byte of the small records changed in turn, behind a right checksum: accepted or refused, never by half. */
TEST(records_with_other_values) {
    enum { SMALL = 128 };
    run r, other;
    amp_state *before, *good;
    blob bytes;
    int64_t i, byte, refused = 0, accepted = 0;
    open_trained(&other, 5, "--seed 2");
    good = state_of(&other);
    close_run(&other);
    open_trained(&r, 3, "--seed 2");
    before = state_of(&r);
    bytes = encoded(before);
    for (i = 0; amp_state_key(good, i) != NULL; i++) {
        const char *key = amp_state_key(good, i);
        amp_dtype dtype;
        int64_t n = amp_state_count(good, key, &dtype) * (int64_t)element_size(dtype);
        int k = loading_of(key);
        for (byte = 0; k > 0 && n <= SMALL && byte < n; byte++) {
            amp_state *bad = harmed(good, i, HARMS, byte);
            char what[100];
            snprintf(what, sizeof what, "%s, byte %lld", key, (long long)byte);
            if (refused_whole(&r, k, bad, before, &bytes, what)) refused++;
            else accepted++;
            amp_state_destroy(bad);
        }
    }
    CHECK_MSG(refused > 100 && accepted > 100, "%lld refused, %lld accepted", (long long)refused, (long long)accepted);
    blob_free(&bytes);
    amp_state_destroy(before);
    amp_state_destroy(good);
    close_run(&r);
}

/* ---- Model files */

/* 1: the weights of this file came into the model. */
static int loads(gpt *g, const void *data, size_t bytes) {
    gpt_file file;
    amp_result result;
    memset(&file, 0, sizeof file);
    ex_text[0] = 0;
    result = ex_st(st_open(&file.weights.tensors, data, bytes));
    if (result != AMP_OK) return 0;
    result = gpt_file_shape(&file, path_of("none.safetensors"));
    if (result == AMP_OK) result = gpt_file_load(&file, g);
    config_close(&file.described);
    st_close(&file.weights.tensors);
    return result == AMP_OK;
}

static blob safetensors_of(run *r) {
    void *data = NULL;
    blob b;
    b.bytes = 0;
    CHECK_OK(gpt_save_safetensors(&r->model, path_of("weights.safetensors"), 1));
    CHECK_OK(amp_file_read_all(NULL, path_of("weights.safetensors"), &data, &b.bytes));
    b.data = (uint8_t *)data;
    return b;
}

/* Every byte and every length: refused by its checksum, and the model is as it was; but for the ten bytes by which the
   checksum is found: without them it is as another program's file, and its weights are right. */
TEST(every_byte_of_a_model_file) {
    run r;
    blob file, before, right;
    size_t at, name, accepted = 0;
    open_trained(&r, 1, "");
    file = safetensors_of(&r);
    name = (size_t)(strstr((const char *)file.data + 8, ST_CHECKSUM) - (const char *)file.data);
    CHECK(loads(&r.model, file.data, file.bytes));
    right = blob_of(&r);            /* loading sets the masters too */
    CHECK_OK(gpt_init(&r.model, 77));
    before = blob_of(&r);
    for (at = 0; at < file.bytes; at++) {
        uint8_t was = file.data[at];
        file.data[at] ^= (uint8_t)(at % 3 == 2 ? 0xff : 1 << at % 8);
        if (loads(&r.model, file.data, file.bytes)) {
            accepted++;
            CHECK_MSG(at >= name && at < name + sizeof ST_CHECKSUM - 1 && is_as_before(&r, &right), "byte %zu was accepted", at);
            file.data[at] = was;
            CHECK_OK(gpt_init(&r.model, 77));
        } else CHECK_MSG(ex_text[0] != 0, "byte %zu: no text", at);
        file.data[at] = was;
    }
    CHECK(accepted < sizeof ST_CHECKSUM && is_as_before(&r, &before));
    for (at = 0; at < file.bytes; at++) CHECK_MSG(!loads(&r.model, file.data, at), "%zu bytes were accepted", at);
    CHECK(is_as_before(&r, &before));
    blob_free(&file);
    blob_free(&before);
    blob_free(&right);
    close_run(&r);
}

/* The text says what to do, the program names flag and file; a file without a checksum is read as ever. */
TEST(model_files_are_named) {
    settings set;
    amp_state *resumed;
    run r;
    blob file;
    char more[700], *name;
    open_trained(&r, 1, "");
    file = safetensors_of(&r);
    file.data[file.bytes - 3] ^= 4;
    write_file("weights.safetensors", file.data, file.bytes);
    close_run(&r);
    snprintf(more, sizeof more, "--init %s", path_of("weights.safetensors"));
    CHECK_OK(settings_of(&set, &resumed, more));
    CHECK(open_run(&r, &set, NULL) != AMP_OK);
    CHECK_MSG(strstr(ex_error(), "--init") != NULL && strstr(ex_error(), "weights") != NULL &&
              strstr(ex_error(), "checksum") != NULL && strstr(ex_error(), "another copy") != NULL, "%s", ex_error());
    close_run(&r);
    file.data[file.bytes - 3] ^= 4;
    name = strstr((char *)file.data + 8, "crc32c");
    if (name != NULL) memcpy(name, "others", 6);
    write_file("weights.safetensors", file.data, file.bytes);
    CHECK_MSG(settings_of(&set, &resumed, more) == AMP_OK && open_run(&r, &set, NULL) == AMP_OK, "%s", ex_error());
    close_run(&r);
    blob_free(&file);
}

/* A file whose last tensor does not fit changes none of the weights before it. */
TEST(model_files_load_whole) {
    static const char *const changes[][2] = {{"ln_f.bias", "ln_f.bits"}, {"\"F32\",\"shape\":[8],\"data_offsets\"", "\"I32\",\"shape\":[8],\"data_offsets\""}};
    run r;
    blob file, before;
    size_t i;
    open_trained(&r, 1, "");
    file = safetensors_of(&r);
    memcpy(strstr((char *)file.data + 8, "crc32c"), "others", 6);
    CHECK_OK(gpt_init(&r.model, 77));
    before = blob_of(&r);
    for (i = 0; i < 2; i++) {
        char *at = (char *)file.data + 8, *found = NULL, was[64];
        while ((at = strstr(at, changes[i][0])) != NULL) found = at++;          /* the last one */
        CHECK(found != NULL);
        if (found == NULL) continue;
        memcpy(was, found, strlen(changes[i][0]));
        memcpy(found, changes[i][1], strlen(changes[i][1]));
        CHECK(!loads(&r.model, file.data, file.bytes));
        CHECK_MSG(strstr(ex_error(), "ln_f.bias") != NULL, "%s", ex_error());
        CHECK(is_as_before(&r, &before));
        memcpy(found, was, strlen(changes[i][0]));
    }
    CHECK(loads(&r.model, file.data, file.bytes) && !is_as_before(&r, &before));
    blob_free(&file);
    blob_free(&before);
    close_run(&r);
}

int main(int argc, char **argv) {
    const char *tmp = getenv("TMPDIR");
    char text[600], command[700];
    int i, failed;
    TEST_BEGIN(argc, argv);
    snprintf(folder, sizeof folder, "%.500s/ampt_corruption_%ld", tmp ? tmp : "/tmp", (long)getpid());
    if (mkdir(folder, 0777) != 0) { perror(folder); return 2; }
    for (i = 0; i < 600; i++) text[i] = (char)(i * i % 23);
    write_file("text", text, sizeof text);
    RUN(every_byte_of_a_checkpoint);
    RUN(every_length_of_a_checkpoint);
    RUN(the_program_refuses_them);
    RUN(records_that_do_not_fit);
    RUN(records_with_other_values);
    RUN(every_byte_of_a_model_file);
    RUN(model_files_are_named);
    RUN(model_files_load_whole);
    failed = TEST_END();
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    return system(command) != 0 || failed;
}
