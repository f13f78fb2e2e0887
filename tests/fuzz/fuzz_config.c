/* fuzz_config.c - settings as text and one by one, the reader of config.json files, and lines for a monitor's file.
 *
 * What is accepted comes back from its own text, as the same bytes; what is refused changes nothing. */
#include "fuzz.h"

static void config_text(const char *text, size_t bytes) {
    static char first[8192], second[8192];
    amp_settings settings, before, again;
    amp_result result;
    memset(&settings, 0, sizeof settings);
    memset(&before, 0, sizeof before);
    memset(&again, 0, sizeof again);
    result = amp_settings_read_text(&settings, "input", text, bytes);
    fuzz_told(result);
    if (result != AMP_OK) {
        CLAIM(memcmp(&settings, &before, sizeof settings) == 0);
        return;
    }
    fuzz_told(amp_settings_check(&settings));
    size_t n = amp_settings_text(&settings, first, sizeof first);
    CLAIM(n < sizeof first && strlen(first) == n);
    CLAIM(amp_settings_read_text(&again, "input", first, n) == AMP_OK);
    CLAIM(amp_settings_text(&again, second, sizeof second) == n && memcmp(first, second, n) == 0);
    CLAIM(amp_settings_check(&again) == amp_settings_check(&settings));
}

/* The first line as "key value". */
static void config_set(const char *text) {
    char key[64];
    const char *space = strchr(text, ' ');
    amp_settings settings, before;
    memset(&settings, 0, sizeof settings);
    memset(&before, 0, sizeof before);
    if (space == NULL || (size_t)(space - text) >= sizeof key) return;
    snprintf(key, sizeof key, "%.*s", (int)(space - text), text);
    amp_result result = amp_settings_set(&settings, key, space + 1);
    fuzz_told(result);
    if (result != AMP_OK) CLAIM(memcmp(&settings, &before, sizeof settings) == 0);
}

static void config_json(const char *text, size_t bytes) {
    static const char *const keys[] = {"n_head", "model_type", "layer_norm_eps", "a"};
    char value[64];
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        memset(value, 'x', sizeof value);
        if (json_find(json_open(text, bytes), keys[i], value, sizeof value)) CLAIM(memchr(value, 0, sizeof value) != NULL);
    }
}

/* What a monitor takes for a JSON object on one line is one to the reader, too. */
static void config_line(const char *line) {
    static amp_monitor *monitor;
    static amp_optimizer *optimizer;
    static float weight[1], grad[1];
    static amp_param p;
    if (monitor == NULL) {
        amp_optimizer_desc od;
        amp_monitor_desc md;
        memset(&od, 0, sizeof od);
        memset(&md, 0, sizeof md);
        p.name = "line"; p.weight = amp_tensor1(weight, AMP_F32, 1); p.grad = amp_tensor1(grad, AMP_F32, 1);
        od.params = &p; od.n_params = 1;
        CLAIM(amp_optimizer_create(fuzz_context(), &optimizer, &od) == AMP_OK);
        md.optimizer = optimizer;
        CLAIM(amp_monitor_create(fuzz_context(), &monitor, &md) == AMP_OK);
    }
    amp_result result = amp_monitor_write(monitor, line);
    fuzz_told(result);
    if (result != AMP_OK || strstr(line, "\\ud") != NULL || strstr(line, "\\uD") != NULL) return;     /* half a surrogate is no character to the reader */
    json j = json_open(line, strlen(line));
    CLAIM(strchr(line, '\n') == NULL && json_peek(&j) == '{');
    json_skip(&j);
    CLAIM(!j.bad && json_peek(&j) == 0 && j.at == j.end);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char *text = (char *)fuzz_copy(data, size), *line = (char *)malloc(size + 1);
    if (text != NULL && line != NULL) {
        memcpy(line, text, size);
        line[size] = 0;
        config_text(text, size);
        config_set(line);
        config_line(line);
        config_json(text, size);
    }
    free(text);
    free(line);
    return 0;
}
