/* flags.h - flags of a program: its tables drive parsing, checking and --help.
 *
 * A program defines flag_given with its tables; flag_read reads the command line, flag_parse_all writes all values into
 * the program's settings.  A FLAG_SETTING is a key of amp_settings, which says what is legal.  flag_refuse: the error
 * text "--name value: why". */
#ifndef EXAMPLE_FLAGS_H
#define EXAMPLE_FLAGS_H

#include "example.h"

typedef enum flag_type {
    FLAG_HEADING, FLAG_TEXT, FLAG_PATHS, FLAG_CHOICE, FLAG_INTEGER, FLAG_NUMBER, FLAG_SWITCH, FLAG_SWITCH_TEXT,
    FLAG_SETTING, FLAG_SETTING_SWITCH
} flag_type;

/* PATHS: two of them, kept as "first,second".  SWITCH_TEXT: a switch that may take a text, "--name=text".  SETTING: the
   key `words` of the amp_settings in the field, which says what is legal; SETTING_SWITCH: the same, as a switch.
   words: what a CHOICE may be, or words with the numbers they stand for: "preset=0 none=-1". */
typedef struct flag_row {
    const char *name;
    flag_type type;
    size_t field;                   /* in settings: const char *, int64_t, double or amp_settings */
    const char *initial;
    double lowest, highest;
    const char *words, *help;
} flag_row;

/* The help of a flag for ex_device_open. */
static const char flag_device_help[] = "The device: cpu, cuda, or cuda:1 and so on. With auto, it is the first GPU, if "
                                       "this build and this machine have one, and else the CPU.";

/* A table, and where in the program's settings its fields begin: several programs can have the same table. */
typedef struct flag_part { const flag_row *options; int n; size_t at; } flag_part;
#define FLAG_ROWS(table) (int)(sizeof table / sizeof *table)

/* The flags of this program, which defines it with its tables, its name and the texts of --help.  text: the values
   given on the command line or else in the program's other sources. */
enum { FLAG_MOST = 128, FLAG_PARTS = 8 };
typedef struct flag_program {
    const char *program, *summary;
    flag_part parts[FLAG_PARTS];    /* in the order of --help */
    const char *ending;             /* of --help */
    const char *text[FLAG_MOST];
    int on_command_line[FLAG_MOST];
    char pair[2 * PATH_MAX];        /* keeps the two paths of PATHS */
} flag_program;
static flag_program flag_given;

/* Flags are counted through all tables. */
static inline int flag_count(void) {
    int n = 0, part;
    for (part = 0; part < FLAG_PARTS; part++) n += flag_given.parts[part].n;
    return n;
}
/* Flag i, and in *field, unless NULL, where its value lies in the settings. */
static inline const flag_row *flag_place(int i, size_t *field) {
    const flag_part *part = flag_given.parts;
    while (i >= part->n) i -= (part++)->n;
    if (field != NULL) *field = part->at + part->options[i].field;
    return &part->options[i];
}
static inline const flag_row *flag_at(int i) { return flag_place(i, NULL); }
static inline int flag_is_setting(const flag_row *o) {
    return o->type == FLAG_SETTING || o->type == FLAG_SETTING_SWITCH;
}

static inline int flag_index(const char *name) {
    int i, n = flag_count();
    for (i = 0; i < n; i++)
        if (flag_at(i)->type != FLAG_HEADING && strcmp(flag_at(i)->name, name) == 0) return i;
    return -1;
}
static inline int flag_was_given(const char *name) { return flag_given.on_command_line[flag_index(name)]; }
/* Place of a CHOICE's value among its words. */
static inline int flag_choice_place(const char *name, const char *value) {
    return ex_word_place(flag_at(flag_index(name))->words, value);
}

/* Sets the error text "--name value: why". */
static inline amp_result flag_refuse(const char *name, const char *format, ...) __attribute__((format(printf, 2, 3)));
static inline amp_result flag_refuse(const char *name, const char *format, ...) {
    char why[400];
    const char *text = flag_given.text[flag_index(name)];
    va_list args;
    va_start(args, format);
    vsnprintf(why, sizeof why, format, args);
    va_end(args);
    return ex_fail(AMP_ERR_RANGE, "--%s%s%.60s: %s", name, text ? " " : "", text ? text : "", why);
}

/* The number that `text` stands for in "auto=0 none=-1": 1 if it is one of the words. */
static inline int flag_word_value(const char *words, const char *text, double *value) {
    size_t length = strlen(text);
    const char *at = words;
    while (at != NULL && *at != 0) {
        if (strncmp(at, text, length) == 0 && at[length] == '=') { *value = atof(at + length + 1); return 1; }
        at = strchr(at, ' ');
        if (at != NULL) at++;
    }
    return 0;
}

/* "0 to 9 or auto", what an INTEGER or NUMBER may be. */
static inline const char *flag_legal_text(const flag_row *o, char *text, size_t size) {
    int used = snprintf(text, size, "%.10g to %.10g", o->lowest, o->highest);
    const char *at = o->words;
    while (at != NULL && *at != 0) {
        used += snprintf(text + used, size - (size_t)used, " or %.*s", (int)strcspn(at, "="), at);
        at = strchr(at, ' ');
        if (at != NULL) at++;
    }
    return text;
}

static inline amp_result flag_parse_number(const flag_row *o, const char *text, double *value) {
    char *end = NULL, legal[128];
    double x;
    if (o->words != NULL && flag_word_value(o->words, text, value)) return AMP_OK;
    errno = 0;
    x = o->type == FLAG_INTEGER ? (double)strtoll(text, &end, 10) : strtod(text, &end);
    if (end == text || *end != 0 || !amp_is_finite_f64(&x) || (o->type == FLAG_INTEGER && errno == ERANGE))
        return flag_refuse(o->name, "is not a %s; it must be %s", o->type == FLAG_INTEGER ? "whole number" : "number",
                      flag_legal_text(o, legal, sizeof legal));
    if (x < o->lowest || x > o->highest)
        return flag_refuse(o->name, "must be %s", flag_legal_text(o, legal, sizeof legal));
    *value = x;
    return AMP_OK;
}

static inline amp_result flag_parse(int i, const char *text, void *set) {
    size_t at;
    const flag_row *o = flag_place(i, &at);
    void *field = (char *)set + at;
    double value = 0;
    if (o->type == FLAG_TEXT || o->type == FLAG_PATHS || o->type == FLAG_SWITCH_TEXT) memcpy(field, &text, sizeof text);
    if (o->type == FLAG_CHOICE) {
        if (ex_word_place(o->words, text) < 0) return flag_refuse(o->name, "is not one of: %s", o->words);
        memcpy(field, &text, sizeof text);
    }
    if (o->type == FLAG_SWITCH) *(int64_t *)field = strcmp(text, "on") == 0;
    if (flag_is_setting(o) && amp_settings_set((amp_settings *)field, o->words, text) != AMP_OK)
        return flag_refuse(o->name, "%s", amp_last_error());
    if (o->type == FLAG_INTEGER || o->type == FLAG_NUMBER) {
        EX_TRY(flag_parse_number(o, text, &value));
        if (o->type == FLAG_INTEGER) *(int64_t *)field = (int64_t)value;
        else *(double *)field = value;
    }
    return AMP_OK;
}

/* Letters to change, add or drop to turn a into b (Levenshtein). */
static inline int flag_distance(const char *a, const char *b) {
    int row[64], i, j, n = (int)strlen(b);
    if (n > 60) return 99;
    for (j = 0; j <= n; j++) row[j] = j;
    for (i = 1; a[i - 1] != 0; i++) {
        int before = row[0];
        row[0] = i;
        for (j = 1; j <= n; j++) {
            int change = before + (a[i - 1] != b[j - 1]), least = row[j] < row[j - 1] ? row[j] + 1 : row[j - 1] + 1;
            before = row[j];
            row[j] = change < least ? change : least;
        }
    }
    return row[n];
}

static inline amp_result flag_unknown(const char *flag) {
    const char *closest = NULL;
    int i, best = strlen(flag) > 8 ? 4 : 3;
    for (i = 0; i < flag_count(); i++) {
        const flag_row *o = flag_at(i);
        int distance = flag[0] != '-' || o->type == FLAG_HEADING ? 99
                                                                 : flag_distance(flag + strspn(flag, "-"), o->name);
        if (distance < best) { best = distance; closest = o->name; }
    }
    return ex_fail(AMP_ERR_NAME, "unknown flag %.80s%s%s; --help lists all flags", flag,
                        closest ? ": did you mean --" : "", closest ? closest : "");
}

/* "--name value", "--name=value", "--name" for switches, "--name first second" for paths. */
static inline amp_result flag_read(int argc, char **argv) {
    int i;
    for (i = 1; i < argc; i++) {
        char name[64];
        const char *equals = strchr(argv[i], '=');
        const flag_row *o;
        size_t length = equals != NULL ? (size_t)(equals - argv[i]) : strlen(argv[i]);
        int at = -1;
        if (strncmp(argv[i], "--", 2) == 0 && length < sizeof name) {
            memcpy(name, argv[i] + 2, length - 2);
            name[length - 2] = 0;
            at = flag_index(name);
        }
        if (strcmp(argv[i], "-h") == 0) at = flag_index("help");
        if (at < 0) return flag_unknown(argv[i]);
        o = flag_at(at);
        if (o->type == FLAG_SWITCH || o->type == FLAG_SETTING_SWITCH ||
            (o->type == FLAG_SWITCH_TEXT && equals == NULL)) {
            if (equals != NULL) return ex_fail(AMP_ERR_RANGE, "--%s takes no value", o->name);
            flag_given.text[at] = "on";
        } else if (equals != NULL) flag_given.text[at] = equals + 1;
        else if (o->type == FLAG_PATHS) {
            if (i + 2 >= argc || strncmp(argv[i + 1], "--", 2) == 0 || strncmp(argv[i + 2], "--", 2) == 0)
                return ex_fail(AMP_ERR_RANGE, "--%s takes two files; --help lists all flags", o->name);
            snprintf(flag_given.pair, sizeof flag_given.pair, "%.4000s,%.4000s", argv[i + 1], argv[i + 2]);
            flag_given.text[at] = flag_given.pair;
            i += 2;
        }
        else if (i + 1 < argc) flag_given.text[at] = argv[++i];
        else return ex_fail(AMP_ERR_RANGE, "--%s needs a value; --help lists all flags", o->name);
        flag_given.on_command_line[at] = 1;
    }
    return AMP_OK;
}

/* Writes all flags, as given or by default, into the program's settings. */
static inline amp_result flag_parse_all(void *set) {
    int i;
    for (i = 0; i < flag_count(); i++)
        if (flag_at(i)->type != FLAG_HEADING)
            EX_TRY(flag_parse(i, flag_given.text[i] != NULL ? flag_given.text[i] : flag_at(i)->initial, set));
    return AMP_OK;
}

enum { FLAG_COLUMNS = 100, FLAG_INDENT = 21 };

/* Prints words from column `indent` on, in lines of FLAG_COLUMNS that begin there. */
static inline void flag_print_words(const char *text, int indent) {
    int column = indent;
    while (*text != 0) {
        int n = (int)strcspn(text, " ");
        if (column > indent && column + 1 + n > FLAG_COLUMNS) {
            printf("\n%*s", indent, "");
            column = indent;
        } else if (column > indent) column += printf(" ");
        column += printf("%.*s", n, text);
        text += n;
        text += strspn(text, " ");
    }
    printf("\n");
}

/* One flag: its name, what it does, its default and what is legal. */
static inline void flag_print(const flag_row *o) {
    char left[80], legal[128], text[600];
    int used = snprintf(left, sizeof left, "  --%s", o->name);
    printf("%-*s", FLAG_INDENT, left);
    if (used >= FLAG_INDENT) printf("\n%*s", FLAG_INDENT, "");
    flag_print_words(o->help, FLAG_INDENT);
    if (o->type == FLAG_SWITCH || o->type == FLAG_SETTING_SWITCH) return;
    used = snprintf(text, sizeof text, "default %s", *o->initial != 0 ? o->initial : "empty");
    if (o->type == FLAG_CHOICE) snprintf(text + used, sizeof text - (size_t)used, "; one of: %s", o->words);
    if (o->type == FLAG_SETTING)
        snprintf(text + used, sizeof text - (size_t)used, "; key in files of settings: %s", o->words);
    if (o->type == FLAG_INTEGER || o->type == FLAG_NUMBER)
        snprintf(text + used, sizeof text - (size_t)used, "; %s", flag_legal_text(o, legal, sizeof legal));
    printf("%*s", FLAG_INDENT + 2, "");
    flag_print_words(text, FLAG_INDENT + 2);
}

static inline void flag_print_help(void) {
    int i;
    printf("%s - %s\n\nusage: %s [--flag value ...]\n", flag_given.program, flag_given.summary, flag_given.program);
    for (i = 0; i < flag_count(); i++) {
        if (flag_at(i)->type == FLAG_HEADING) printf("\n%s\n", flag_at(i)->name);
        else flag_print(flag_at(i));
    }
    printf("\n%s\n", flag_given.ending);
}

#endif
