/* watch.c - a training as it runs, in the terminal and as a page: loss, scale, skips, tokens/s, memory, precision.
 *
 *     gcc -O2 examples/watch.c -o watch -lm -lpthread
 *     ./watch                     the newest run below out/, every second, until it has ended or Ctrl-C; `make watch`
 *     ./watch --run out/fp16 --once
 *
 * Reads the JSON lines of train_gpt, or of any program with an amp_monitor.  Beside them it writes watch.html: served
 * by a web server it reads the lines itself, every two seconds; opened as a file it shows those that are in it, and
 * this program renews it. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "flags.h"
#include "progress.h"
#include "safetensors.h"
#include "watch_page.h"
#include <locale.h>

typedef struct settings {
    const char *run, *page;
    int64_t once, columns, help;
    double interval;
} settings;

#define FIELD(name) offsetof(settings, name)
static const flag_row options[] = {
    {"run", FLAG_TEXT, FIELD(run), "", 0, 0, NULL,
     "The folder of a run, or its JSON lines. If empty, it is the newest run below out/."},
    {"once", FLAG_SWITCH, FIELD(once), "off", 0, 0, NULL,
     "Prints one picture and ends. This is also what happens if the output is not a terminal."},
    {"interval", FLAG_NUMBER, FIELD(interval), "1", 0.1, 3600, NULL, "The number of seconds between two pictures."},
    {"columns", FLAG_INTEGER, FIELD(columns), "auto", 30, 400, "auto=0",
     "The width of the picture. With auto, it is that of the terminal, or 80."},
    {"page", FLAG_TEXT, FIELD(page), "", 0, 0, NULL,
     "The file for the same picture as a web page. If empty, it is watch.html beside the JSON lines. With none, no "
     "page is written."},
    {"help", FLAG_SWITCH, FIELD(help), "off", 0, 0, NULL, "Prints this text."},
};
static flag_program flag_given = {
    .program = "watch", .summary = "shows a training run as it runs, from its JSON lines",
    .parts = {{options, FLAG_ROWS(options), 0}},
    .ending = "Exit codes: 0 shown, also if Ctrl-C ended it, 2 refused."
};

/* ==== A run, from its lines ====================================================================== */

typedef struct series {
    double *step, *value;
    int64_t n, capacity;
} series;
typedef struct layer {
    char name[96], dtype[16];
    series bits;
} layer;
enum { LOSS, VALIDATION, SCALE, SKIPS, SPEED, PEAK, N_SERIES };
enum { KEY_STEP, KEY_STEPS, KEY_LOSS, KEY_SCALE, KEY_SKIPS, KEY_SPEED, KEY_PEAK, N_KEYS };
static const char *const keys[N_KEYS] = {"step", "steps", "loss", "scale", "skips", "tokens_per_s", "peak"};

/* What of a line is of use here; a number that is not there, or null, is NONE. */
typedef struct record {
    char event[16], dtype[16], precision[16], level[16], layer[96], from[16], to[16];
    double number[N_KEYS];
} record;
static const double NONE = -HUGE_VAL;

typedef struct run {
    char path[PATH_MAX], page[PATH_MAX], dtype[16], level[16];
    char remark[100], no_page[300];   /* what was left out, and why there is no page; or "" */
    char *text;
    size_t bytes;
    struct stat read;               /* the file as it was read last */
    series of[N_SERIES];
    layer *layers;
    int64_t n_layers, records;
    double first, last, steps;
} run;

static amp_result series_add(series *s, double step, double value) {
    while (s->n > 0 && s->step[s->n - 1] >= step) s->n--;       /* a resumed run makes steps again */
    if (s->n == s->capacity) {
        int64_t capacity = 2 * s->capacity + 64;
        double *steps = (double *)realloc(s->step, (size_t)capacity * sizeof *steps), *values;
        if (steps == NULL) return ex_fail(AMP_ERR_MEMORY, "no memory for the curves");
        s->step = steps;
        values = (double *)realloc(s->value, (size_t)capacity * sizeof *values);
        if (values == NULL) return ex_fail(AMP_ERR_MEMORY, "no memory for the curves");
        s->value = values;
        s->capacity = capacity;
    }
    s->step[s->n] = step;
    s->value[s->n++] = value;
    return AMP_OK;
}

/* Forgets what a run made after this step. */
static void run_cut(run *r, double step) {
    int64_t i;
    for (i = 0; i < N_SERIES; i++) while (r->of[i].n > 0 && r->of[i].step[r->of[i].n - 1] > step) r->of[i].n--;
    for (i = 0; i < r->n_layers; i++) free(r->layers[i].bits.step), free(r->layers[i].bits.value);
    r->n_layers = 0;
    r->last = step;
}

static double dtype_bits(const char *name) {
    return strncmp(name, "fp8", 3) == 0 ? 8 : strcmp(name, "tf32") == 0 ? 19 : strcmp(name, "fp32") == 0 ? 32 : 16;
}
static amp_result run_layer(run *r, const record *line, double step) {
    layer *l;
    int64_t i;
    for (i = 0; i < r->n_layers && strcmp(r->layers[i].name, line->layer) != 0; i++) {}
    if (i == r->n_layers) {
        l = (layer *)realloc(r->layers, (size_t)(i + 1) * sizeof *l);
        if (l == NULL) return ex_fail(AMP_ERR_MEMORY, "no memory for the layers");
        r->layers = l;
        memset(&l[i], 0, sizeof *l);
        memcpy(l[i].name, line->layer, sizeof l->name);
        r->n_layers++;
        EX_TRY(series_add(&l[i].bits, r->first < step ? r->first : step - 1, dtype_bits(line->from)));
    }
    l = &r->layers[i];
    memcpy(l->dtype, line->to, sizeof l->dtype);
    return series_add(&l->bits, step, dtype_bits(line->to));
}

static amp_result run_add(run *r, const record *line) {
    static const int from[N_SERIES] = {KEY_LOSS, KEY_LOSS, KEY_SCALE, KEY_SKIPS, KEY_SPEED, KEY_PEAK};
    int is_step = strcmp(line->event, "step") == 0, i;
    double step = line->number[KEY_STEP];
    if (strcmp(line->event, "run") == 0) {
        run_cut(r, step > 0 ? step : 0);
        r->steps = line->number[KEY_STEPS];
        memcpy(r->level, line->level, sizeof r->level);
        memcpy(r->dtype, line->precision, sizeof r->dtype);
    } else if (line->dtype[0] != 0 && strcmp(line->event, "stream") != 0)
        memcpy(r->dtype, line->dtype, sizeof r->dtype);
    if (step == NONE) step = r->last;
    if (is_step && (r->first == NONE || step < r->first)) r->first = step;
    if (is_step || step > r->last) r->last = step;
    for (i = 0; i < N_SERIES; i++)
        if (line->number[from[i]] != NONE &&
            (is_step ? i != VALIDATION : i == PEAK || (i == VALIDATION && strcmp(line->event, "validation") == 0)))
            EX_TRY(series_add(&r->of[i], step, line->number[from[i]]));
    return strcmp(line->event, "precision") == 0 && line->layer[0] != 0 ? run_layer(r, line, step) : AMP_OK;
}

/* A line's members; 0: it is no JSON object with an "event". */
static int record_read(record *out, const char *text, size_t bytes) {
    const struct { const char *name; char *text; size_t size; } texts[] = {
        {"event", out->event, sizeof out->event}, {"dtype", out->dtype, sizeof out->dtype},
        {"precision", out->precision, sizeof out->precision}, {"level", out->level, sizeof out->level},
        {"layer", out->layer, sizeof out->layer}, {"from", out->from, sizeof out->from},
        {"to", out->to, sizeof out->to}};
    json j = json_open(text, bytes), value;
    char name[128], *end;
    int more, i;
    memset(out, 0, sizeof *out);
    for (i = 0; i < N_KEYS; i++) out->number[i] = NONE;
    json_need(&j, '{');
    for (more = json_peek(&j) == '"'; more && json_member(&j, name, &value); more = json_take(&j, ',')) {
        for (i = 0; i < 7; i++)
            if (strcmp(name, texts[i].name) == 0 && !json_text(value, texts[i].text, texts[i].size))
                texts[i].text[0] = 0;
        for (i = 0; i < N_KEYS; i++)
            if (strcmp(name, keys[i]) == 0 && *value.at != '"') {
                double x = strtod(value.at, &end);          /* the text ends with a 0 */
                if (end != value.at && amp_is_finite_f64(&x)) out->number[i] = x;
            }
    }
    json_need(&j, '}');
    return !j.bad && json_peek(&j) == 0 && j.at == j.end && out->event[0] != 0;
}

/* NaN or Infinity outside of texts, as some writers of JSON have it; NULL: none. */
static const char *no_number(const char *at, const char *end) {
    int inside = 0;
    for (; at < end; at++) {
        if (inside && *at == '\\') at++;
        else if (*at == '"') inside = !inside;
        else if (!inside && end - at >= 3 && strncmp(at, "NaN", 3) == 0) return "NaN";
        else if (!inside && end - at >= 8 && strncmp(at, "Infinity", 8) == 0) return "Infinity";
    }
    return NULL;
}

/* Reads all lines.  A last line that is still being written is left out; another that was cut off, too, and named. */
static amp_result run_read(run *r) {
    const char *at, *end, *stop;
    int64_t number = 0;
    record line;
    free(r->text);
    r->text = NULL;
    if (st_read_file(r->path, &r->text, &r->bytes) != ST_OK) return ex_fail(AMP_ERR_OPEN, "%s", st_error());
    r->first = NONE;
    r->steps = NONE;
    r->records = 0;
    r->remark[0] = r->dtype[0] = r->level[0] = 0;
    run_cut(r, 0);
    for (at = r->text, stop = r->text + r->bytes; at < stop; at = end + 1) {
        const char *bad;
        end = (const char *)memchr(at, '\n', (size_t)(stop - at));
        if (end == NULL) end = stop;
        number++;
        if (end > at && end[-1] == '\r' ? end - at == 1 : end == at) continue;
        if (record_read(&line, at, (size_t)(end - at))) { EX_TRY(run_add(r, &line)); r->records++; continue; }
        bad = no_number(at, end);
        if (*at == '{' && bad != NULL)
            return ex_fail(AMP_ERR_RANGE, "%s: line %lld: %s is not JSON; write null instead", r->path,
                           (long long)number, bad);
        if (end == stop && (r->records > 0 || *at == '{')) break;
        if (r->records == 0)
            return ex_fail(AMP_ERR_RANGE, "%s: line %lld is not a record: the file must be metrics, JSON lines with "
                                          "an \"event\"",
                           r->path, (long long)number);
        snprintf(r->remark, sizeof r->remark, "line %lld is left out: it is not a whole record", (long long)number);
    }
    return AMP_OK;
}

static amp_result run_find(run *r, const char *given) {
    static const char *const patterns[] = {"out/metrics.jsonl", "out/*/metrics.jsonl", "out/*/*/metrics.jsonl"};
    struct stat info;
    time_t newest = 0;
    glob_t found;
    size_t i;
    int k;
    if (*given != 0) {
        int folder = stat(given, &info) == 0 && S_ISDIR(info.st_mode);
        if (strlen(given) > PATH_MAX - 100) return flag_refuse("run", "the path is too long");
        snprintf(r->path, sizeof r->path, "%.4000s%s", given, folder ? "/metrics.jsonl" : "");
        if (stat(r->path, &info) != 0)
            return flag_refuse("run", "there is no run: %.200s: %s", r->path, strerror(errno));
        return S_ISREG(info.st_mode) ? AMP_OK : flag_refuse("run", "is not a file");
    }
    for (k = 0; k < 3; k++) {
        if (glob(patterns[k], 0, NULL, &found) != 0) continue;
        for (i = 0; i < found.gl_pathc; i++)
            if (stat(found.gl_pathv[i], &info) == 0 && (r->path[0] == 0 || info.st_mtime > newest)) {
                newest = info.st_mtime;
                snprintf(r->path, sizeof r->path, "%.4000s", found.gl_pathv[i]);
            }
        globfree(&found);
    }
    return r->path[0] != 0 ? AMP_OK
        : ex_fail(AMP_ERR_OPEN, "no run was found: there is no metrics.jsonl below out/; name a folder with --run "
                                "(make: RUN=)");
}

/* Where the page goes; "": nowhere. */
static void page_name(run *r, const char *given) {
    const char *slash = strrchr(r->path, '/');
    int folder = slash != NULL ? (int)(slash - r->path) + 1 : 0;
    if (*given == 0) snprintf(r->page, sizeof r->page, "%.*swatch.html", folder, r->path);
    else if (strcmp(given, "none") != 0) snprintf(r->page, sizeof r->page, "%.4000s", given);
}

/* The name of a file for a web server: every byte that is no letter, digit, point, dash or underscore as %xx. */
static void page_add_address(json_buffer *b, const char *name) {
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_";
    for (; *name != 0; name++)
        json_add(b, strchr(plain, *name) != NULL ? "%c" : "%%%02x", (unsigned)(unsigned char)*name);
}

/* Adds a text in which "<" begins nothing. */
static void page_add_text(json_buffer *b, const char *text, size_t bytes) {
    size_t i, from = 0;
    for (i = 0; i <= bytes; i++) {
        if (i < bytes && text[i] != '<') continue;
        json_put(b, text + from, i - from);
        if (i < bytes) json_add(b, "\\u003c");
        from = i + 1;
    }
}

/* The page with the lines in it. */
static amp_result page_write(const run *r) {
    json_buffer b = {NULL, 0, 0, 0}, name = {NULL, 0, 0, 0};
    amp_result result;
    const char *slash = strrchr(r->path, '/'), *file = slash != NULL ? slash + 1 : r->path;
    json_put(&b, watch_page_head, strlen(watch_page_head));
    json_add_escaped(&name, file);
    json_add(&b, "<script>const address=\"");
    page_add_address(&b, file);
    json_add(&b, "\",file=\"");
    page_add_text(&b, name.text, name.used);
    json_add(&b, "\"</script><script type=\"application/json\" id=\"lines\">");
    page_add_text(&b, r->text, r->bytes);
    b.failed |= name.failed;
    free(name.text);
    json_put(&b, watch_page_read, strlen(watch_page_read));
    json_put(&b, watch_page_draw, strlen(watch_page_draw));
    result = b.failed ? ex_fail(AMP_ERR_MEMORY, "no memory for the page") : ex_file_write(r->page, b.text, b.used);
    free(b.text);
    return result;
}

/* ==== The picture ================================================================================ */

enum { WIDEST = 400, HIGHEST = 10, GUTTER = 20 };
typedef struct view {
    int columns, rows, unicode, redraw, lines;
    double from, to;
} view;

/* A line, cut at the right; what a terminal would obey, or this one cannot show, is a question mark. */
static void view_line(view *v, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void view_line(view *v, const char *format, ...) {
    char text[4 * WIDEST + 600];
    const char *at = text, *end;
    va_list args;
    int column;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (v->lines >= v->rows) return;
    end = text + strlen(text);
    while (end > at && end[-1] == ' ') end--;
    for (column = 0; at < end && column < v->columns; column++) {
        uint32_t code;
        int64_t n = utf8_read(at, end - at, &code);
        if (code < 0x20 || (code >= 0x7f && (code < 0xa0 || code == 0xfffd || !v->unicode))) putchar('?');
        else fwrite(at, 1, (size_t)n, stdout);
        at += n;
    }
    printf(v->redraw ? "\033[K\n" : "\n");
    v->lines++;
}

/* The mean of each of n equal parts of the steps; where nothing is, what was before.  No sum or difference is taken
   that could be infinite. */
static void view_bins(const view *v, const series *s, int n, int logarithm, double *out) {
    int64_t i = 0;
    int k;
    for (k = 0; k < n; k++) {
        double mean = 0, count = 0, part = (double)(k + 1) / n, until = v->from * (1 - part) + v->to * part;
        for (; i < s->n && (s->step[i] < until || k == n - 1); i++, count++) {
            double x = logarithm ? log2(s->value[i] > 0 ? s->value[i] : 1e-38) : s->value[i];
            mean = mean * (count / (count + 1)) + x / (count + 1);
        }
        out[k] = count > 0 ? mean : k > 0 ? out[k - 1] : NONE;
    }
}
/* Where x lies between two ends: 0 at the first, 1 at the second; halfway if they are the same. */
static double view_place(double x, double first, double second) {
    double across = second / 2 - first / 2;
    return across != 0 ? (x / 2 - first / 2) / across : 0.5;
}
static void view_range(const double *x, int n, double *lowest, double *highest) {
    int k;
    *lowest = HUGE_VAL;
    *highest = NONE;
    for (k = 0; k < n; k++) {
        if (x[k] == NONE) continue;
        if (x[k] < *lowest) *lowest = x[k];
        if (x[k] > *highest) *highest = x[k];
    }
}

/* The loss: points of half a column by a quarter of a line in Braille, or of a whole character. */
static void view_chart(view *v, const series *s, int height) {
    static const unsigned char dots[2][4] = {{0x01, 0x02, 0x04, 0x40}, {0x08, 0x10, 0x20, 0x80}};
    unsigned char cells[HIGHEST][WIDEST];
    char row[4 * WIDEST], label[16];
    double x[2 * WIDEST], lowest, highest;
    int across = v->unicode ? 2 : 1, down = v->unicode ? 4 : 1, width = v->columns - 10, k, y, before = -1;
    memset(cells, 0, sizeof cells);
    view_bins(v, s, across * width, 0, x);
    view_range(x, across * width, &lowest, &highest);
    for (k = 0; k < across * width; k++) {
        int at, last;
        if (x[k] == NONE) continue;
        at = down * height / 2;
        if (highest > lowest) at = (int)(view_place(x[k], highest, lowest) * (down * height - 1) + 0.5);
        last = before < 0 ? at : before;
        for (y = at < last ? at : last; y <= (at > last ? at : last); y++)
            if (y == at || y != last) cells[y / down][k / across] |= v->unicode ? dots[k % 2][y % 4] : 1;
        before = at;
    }
    for (y = 0; y < height; y++) {
        char *out = row;
        for (k = 0; k < width; k++) {
            if (v->unicode) out += utf8_write(0x2800u + cells[y][k], out);
            else *out++ = cells[y][k] ? '*' : ' ';
        }
        *out = 0;
        label[0] = 0;
        if (s->n > 0 && (y == 0 || y == height - 1)) snprintf(label, sizeof label, "%.4g", y == 0 ? highest : lowest);
        view_line(v, "%8s  %s", label, row);
    }
}

/* A curve in one line.  bits: of a layer's precision, on a scale of its own; marks: where the value rose. */
typedef enum kind { PLAIN, LOGARITHM, BITS, MARKS } kind;
static const char *view_curve(const view *v, const series *s, kind what, int width, char *row) {
    static const char ascii[] = "_.-:=+*#";
    double x[WIDEST], lowest, highest;
    char *out = row;
    int k;
    view_bins(v, s, width, what == LOGARITHM, x);
    view_range(x, width, &lowest, &highest);
    for (k = 0; k < width; k++) {
        int level = 0;
        if (what == BITS) level = x[k] >= 25 ? 7 : x[k] >= 17 ? 5 : x[k] > 8 ? 3 : 1;
        else if (x[k] != NONE) level = (int)(7 * view_place(x[k], lowest, highest) + 0.5);
        if (x[k] == NONE) *out++ = ' ';
        else if (what == MARKS) *out++ = x[k] > (k > 0 && x[k - 1] != NONE ? x[k - 1] : 0) ? '|' : '.';
        else if (v->unicode) out += utf8_write(0x2581u + (uint32_t)level, out);
        else *out++ = what == BITS ? "1234"[level / 2] : ascii[level];
    }
    *out = 0;
    return row;
}

/* A whole number in groups of digits; one that is no longer exact, or no count, in short. */
static const char *count_text(double x, char text[40]) {
    if (x >= 0 && x < 1e15) return progress_grouped((int64_t)(x + 0.5), text, 40);
    snprintf(text, 40, "%.4g", x);
    return text;
}
static const char *last_text(const series *s, double unit, const char *name, char text[64]) {
    char digits[40];
    double x = s->n > 0 ? s->value[s->n - 1] / unit : 0;
    if (s->n == 0) return "none";
    if (x < 1000) snprintf(text, 64, "%.4g%s", x, name);
    else snprintf(text, 64, "%s%s", count_text(x, digits), name);
    return text;
}

/* Characters of a text in UTF-8. */
static int characters(const char *text) {
    int n = 0;
    for (; *text != 0; text++) n += ((unsigned char)*text & 0xc0) != 0x80;
    return n;
}

/* How many layers are in what, then each one's precision by step; of a long name its end, which tells layers apart. */
static void view_layers(view *v, const run *r) {
    static const char *const names[] = {"fp32", "tf32", "bf16", "fp16", "fp8"};
    char text[300] = "", row[4 * WIDEST];
    int64_t i, used = 0;
    int k, left, longest = v->columns < 60 ? 20 : v->columns / 2 - 6;
    for (k = 0; k < 5; k++) {
        int64_t n = 0;
        for (i = 0; i < r->n_layers; i++) n += strncmp(r->layers[i].dtype, names[k], strlen(names[k])) == 0;
        if (n == 0) continue;
        used += snprintf(text + used, sizeof text - (size_t)used, "%s%lld in %s", used > 0 ? ", " : "", (long long)n,
                         names[k]);
    }
    view_line(v, "layers    %s%s", r->n_layers > 0 ? text : "all in ", r->n_layers > 0 ? "" : r->dtype);
    for (i = 0; i < r->n_layers; i++) {
        const char *name;
        int cut;
        left = v->rows - v->lines;
        if (left < 1 || (left == 1 && i + 1 < r->n_layers)) break;
        name = r->layers[i].name;
        cut = characters(name) > longest;
        while (cut && (characters(name) > longest - 2 || ((unsigned char)*name & 0xc0) == 0x80)) name++;
        view_line(v, "  %s%s%*s %-5.5s %s", cut ? ".." : "", name,
                  longest - characters(name) - 2 * cut, "", r->layers[i].dtype,
                  view_curve(v, &r->layers[i].bits, BITS, v->columns - longest - 10, row));
    }
    if (i < r->n_layers) view_line(v, "  and %lld more", (long long)(r->n_layers - i));
}

static int run_over(const run *r) { return r->steps > 0 && r->last >= r->steps; }

static void view_draw(view *v, const run *r) {
    static const struct { const char *name; int of; kind what; double unit; const char *unit_name; } rows[] = {
        {"scale", SCALE, LOGARITHM, 1, ""}, {"skips", SKIPS, MARKS, 1, ""}, {"tokens/s", SPEED, PLAIN, 1, ""},
        {"memory", PEAK, PLAIN, 1048576, " MiB"}};
    char a[64], b[64], row[4 * WIDEST], bar[31] = "", quiet[80] = "";
    double idle = difftime(time(NULL), r->read.st_mtime);
    int k, width = v->columns - GUTTER - 1;
    v->lines = 0;
    v->from = r->first != NONE ? r->first : 0;
    v->to = r->last > v->from ? r->last : v->from + 1;
    for (k = 0; k < 30 && r->steps > 0; k++) bar[k] = r->last >= r->steps * ((k + 1) / 30.0) ? '#' : '.';
    progress_duration(idle, a, sizeof a);
    if (idle > 60) snprintf(quiet, sizeof quiet, "silent for %s", a);
    view_line(v, "%s  %s %s", r->path, r->dtype, r->level);
    view_line(v, "step %s%s%s  %s  %s", count_text(r->last, a), r->steps > 0 ? " of " : "",
              r->steps > 0 ? count_text(r->steps, b) : "",
              run_over(r) ? "finished" : idle > 60 ? quiet : "running", v->columns >= 70 ? bar : "");
    if (r->remark[0] != 0) view_line(v, "%s", r->remark);
    if (r->no_page[0] != 0) view_line(v, "no page: %s", r->no_page);
    if (r->records == 0) view_line(v, "no records yet");
    view_line(v, "loss      %s, validation %s", last_text(&r->of[LOSS], 1, "", a),
              last_text(&r->of[VALIDATION], 1, "", b));
    view_chart(v, &r->of[LOSS], v->rows < 20 ? 4 : 8);
    for (k = 0; k < 4; k++)
        view_line(v, "%-9s %-*s %s", rows[k].name, GUTTER - 10,
                  last_text(&r->of[rows[k].of], rows[k].unit, rows[k].unit_name, a),
                  view_curve(v, &r->of[rows[k].of], rows[k].what, width, row));
    view_layers(v, r);
}

/* ==== Looking again and again ==================================================================== */

static void view_open(view *v, const settings *set) {
    int rows;
    v->redraw = isatty(STDOUT_FILENO) && !set->once;
    v->columns = set->columns > 0 ? (int)set->columns : progress_width();
    if (v->columns > WIDEST) v->columns = WIDEST;
    v->rows = v->redraw && ex_terminal(&rows) > 0 && rows > 5 ? rows - 1 : 10000;
    v->unicode = ex_terminal_is_utf8();
}

/* One look; a file that has not changed is not read again. */
static amp_result look(run *r, view *v, const settings *set) {
    struct stat now;
    view_open(v, set);
    if (stat(r->path, &now) != 0) return ex_fail(AMP_ERR_OPEN, "%s: %s", r->path, strerror(errno));
    if (r->text == NULL || now.st_size != r->read.st_size || now.st_mtime != r->read.st_mtime) {
        r->read = now;
        EX_TRY(run_read(r));
        if (r->records == 0 && !v->redraw) return ex_fail(AMP_ERR_RANGE, "%s: has no records yet", r->path);
        r->no_page[0] = 0;
        if (r->page[0] != 0 && page_write(r) != AMP_OK)
            snprintf(r->no_page, sizeof r->no_page, "%.299s", ex_error());
    }
    if (v->redraw) printf("\033[?25l\033[H");
    view_draw(v, r);
    if (v->redraw) printf("\033[J\033[?25h");
    fflush(stdout);
    return AMP_OK;
}

int main(int argc, char **argv) {
    static run r;
    settings set;
    view v;
    amp_result result;
    int over = 0;
    ex_begin();
    setlocale(LC_CTYPE, "");
    memset(&set, 0, sizeof set);
    result = flag_read(argc, argv);
    if (result == AMP_OK) result = flag_parse_all(&set);
    if (result == AMP_OK && set.help) return flag_print_help(), 0;
    if (result == AMP_OK) result = run_find(&r, set.run);
    if (result == AMP_OK) page_name(&r, set.page);
    if (result == AMP_OK) ex_stop_install();
    while (result == AMP_OK) {
        if (r.text == NULL && isatty(STDOUT_FILENO) && !set.once) printf("\033[2J");
        result = look(&r, &v, &set);
        if (result != AMP_OK || !v.redraw || over || ex_stop_requested) break;
        over = run_over(&r);        /* once more, for the records behind the last step */
        ex_sleep(set.interval);
    }
    if (result != AMP_OK) return fprintf(stderr, "watch: %s\n", ex_error()), 2;
    if (r.page[0] != 0 && r.no_page[0] == 0) printf("the same as a page: %s\n", r.page);
    return 0;
}
