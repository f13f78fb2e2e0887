/* fuzz_config.c - fuzzes settings as text and one by one, the reader of config.json files, and lines for a monitor's file.
 *
 * Accepted settings must be written back as the same bytes.  Rejected ones must change nothing. */
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

/* As a model's config.json: read, and written back with all that it had. */
static void config_json(const char *text, size_t bytes) {
    static const config_own own[] = {{"dtype", "\"float32\"", CONFIG_REPLACE, NULL}, {"n_head", "1", CONFIG_ADD, NULL}, {"a", "[]", CONFIG_SET, NULL}};
    const config_rules *const rules[] = {&gpt_config_rules, &encoder_config_rules};
    for (int k = 0; k < 2; k++) {
        json_buffer b = {NULL, 0, 0, 0};
        config_model m;
        int64_t windows[2];
        memset(&m, 0, sizeof m);
        m.text = (char *)malloc(bytes + 1);
        if (m.text == NULL) return;
        memcpy(m.text, text, bytes);
        m.text[bytes] = 0;
        m.bytes = bytes;
        amp_result result = config_check(&m, rules[k]);
        fuzz_told(result);
        if (result == AMP_OK) {
            json members = json_open(text, bytes), value, kept;
            char key[128];
            gpt_config g;
            encoder_config e;
            memset(&g, 0, sizeof g);
            memset(&e, 0, sizeof e);
            g.vocab = 31; g.positions = 13; g.channels = 12; g.layers = 2;
            e.family = ENCODER_LONGFORMER; e.vocab = 31; e.positions = 13; e.types = 1; e.hidden = e.intermediate = e.embedding = 12; e.layers = 2;
            fuzz_told(k == 0 ? gpt_read_config(&m, &g) : encoder_read_config(&m, &e, windows));
            config_merge(&b, m.text, own, 3);
            CLAIM(!b.failed && json_value(json_open(b.text, b.used), "a", &value) && json_value(json_open(b.text, b.used), "n_head", &value));
            json_need(&members, '{');
            for (int more = json_peek(&members) == '"'; more && json_member(&members, key, &value); more = json_take(&members, ',')) {
                if (key[0] == 0 || strcmp(key, "a") == 0 || strcmp(key, "dtype") == 0) continue;
                CLAIM(json_value(json_open(b.text, b.used), key, &kept) && kept.end - kept.at == value.end - value.at);
                CLAIM(memcmp(kept.at, value.at, (size_t)(value.end - value.at)) == 0);
            }
            CLAIM(!members.bad);
        }
        free(b.text);
        config_close(&m);
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
