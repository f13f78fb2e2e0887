/* metrics.h - records of a run as JSON lines, into a file or through amp.h's monitor. */
#ifndef EXAMPLE_METRICS_H
#define EXAMPLE_METRICS_H

#include "example.h"
#include "safetensors.h"

/* A text as JSON has it. */
static inline void metrics_string(FILE *file, const char *text) {
    json_buffer b = {NULL, 0, 0, 0};
    json_add_escaped(&b, text);
    fprintf(file, "\"%s\"", b.text != NULL && !b.failed ? b.text : "");
    free(b.text);
}

/* Metrics as JSON lines: metrics_begin, any number of values, metrics_end.  file NULL: nothing is written. */
static inline void metrics_begin(FILE *file, const char *event) {
    if (file != NULL) fprintf(file, "{\"event\": \"%s\"", event);
}
static inline void metrics_integer(FILE *file, const char *key, int64_t value) {
    if (file != NULL) fprintf(file, ", \"%s\": %lld", key, (long long)value);
}
static inline void metrics_number(FILE *file, const char *key, double value) {
    if (file == NULL) return;
    if (amp_is_finite_f64(&value)) fprintf(file, ", \"%s\": %.9g", key, value);
    else fprintf(file, ", \"%s\": null", key);      /* JSON has no infinity */
}
static inline void metrics_text(FILE *file, const char *key, const char *value) {
    if (file == NULL) return;
    fprintf(file, ", \"%s\": ", key);
    metrics_string(file, value);
}
static inline void metrics_end(FILE *file) {
    if (file == NULL) return;
    fprintf(file, "}\n");
    fflush(file);
}

/* Metrics through a monitor, a line at a time: made between metrics_begin(m->file, ...) and metrics_line_end. */
typedef struct metrics_line {
    FILE *file;                     /* the line in memory (open_memstream), on Windows in a file; NULL: no metrics */
    char *text;
    size_t bytes;
    int warned;                     /* 1: the user knows that metrics cannot be written */
} metrics_line;

static inline amp_result metrics_line_open(metrics_line *m) {
#if defined(_WIN32)
    m->file = ex_scratch();
#else
    m->file = open_memstream(&m->text, &m->bytes);
#endif
    return m->file != NULL ? AMP_OK : ex_fail(AMP_ERR_MEMORY, "no memory for metrics");
}
static inline void metrics_line_close(metrics_line *m) {
    if (m->file != NULL) fclose(m->file);
    free(m->text);
    memset(m, 0, sizeof *m);
}

/* A full disk is reported once, and training continues: the monitor keeps lines that it cannot write. */
static inline amp_result metrics_tolerate(metrics_line *m, amp_result result) {
    if (result != AMP_ERR_WRITE) return result;
    if (!m->warned) fprintf(stderr, "metrics are kept in memory until they can be written: %s\n", amp_last_error());
    m->warned = 1;
    return AMP_OK;
}
/* Sets text and bytes to what was written. */
static inline int metrics_line_text(metrics_line *m) {
#if defined(_WIN32)
    long n = ftell(m->file);
    char *text = (char *)realloc(m->text, (size_t)(n > 0 ? n : 1));
    if (text == NULL) return 0;
    m->text = text;
    rewind(m->file);
    m->bytes = fread(text, 1, (size_t)(n > 0 ? n : 0), m->file);
#endif
    return m->bytes > 0;
}
static inline void metrics_line_end(metrics_line *m, amp_monitor *monitor) {
    if (m->file == NULL) return;
    metrics_end(m->file);
    if (!metrics_line_text(m)) return;
    m->text[m->bytes - 1] = 0;
    (void)metrics_tolerate(m, amp_monitor_write(monitor, m->text));
    rewind(m->file);
}

#endif
