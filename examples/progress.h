/* progress.h - a progress line on a terminal, plain lines in a log file; times and numbers for people to read. */
#ifndef EXAMPLE_PROGRESS_H
#define EXAMPLE_PROGRESS_H

#include "example.h"
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* On a terminal one line, redrawn; in a log file a plain line every `every` steps. */
typedef struct progress {
    int terminal, drawn;
    int64_t total, every;
} progress;

static inline void progress_open(progress *p, int64_t total) {
    memset(p, 0, sizeof *p);
    p->terminal = isatty(STDOUT_FILENO);
    p->total = total;
    p->every = total > 20 ? total / 20 : 1;
    if (!p->terminal) setvbuf(stdout, NULL, _IOLBF, BUFSIZ);
}

/* Clears the line on the terminal, before something else is printed. */
static inline void progress_clear(progress *p) {
    if (p->drawn) printf("\r\033[K");
    p->drawn = 0;
}

static inline int progress_width(void) {
    int rows, columns = ex_terminal(&rows);
    return columns < 20 ? 80 : columns;
}

/* Shows "[####....] text" for step of total; last 1: this was the last one. */
static inline void progress_show(progress *p, int64_t step, const char *text, int last) {
    enum { LONGEST = 30 };
    int columns = progress_width() - (int)strlen(text) - 4, length = columns < LONGEST ? columns : LONGEST, i;
    if (!p->terminal) {
        if (step % p->every == 0 || last) printf("%s\n", text);
        return;
    }
    printf("\r\033[K");
    if (length >= 5) {
        putchar('[');
        for (i = 0; i < length; i++) putchar(i * p->total < length * step ? '#' : '.');
        printf("] ");
    }
    printf("%.*s", progress_width() - 1, text);
    if (last) putchar('\n');
    p->drawn = !last;
    fflush(stdout);
}

/* "1:05" or "2:00:05". */
static inline void progress_duration(double seconds, char *text, size_t size) {
    long long s = (long long)(seconds + 0.5);
    if (s >= 3600) snprintf(text, size, "%lld:%02lld:%02lld", s / 3600, s / 60 % 60, s % 60);
    else snprintf(text, size, "%lld:%02lld", s / 60, s % 60);
}

/* 1234567 as "1,234,567". */
static inline const char *progress_grouped(int64_t n, char *text, size_t size) {
    char digits[32];
    size_t length = (size_t)snprintf(digits, sizeof digits, "%lld", (long long)n), i, used = 0;
    for (i = 0; i < length && used + 2 < size; i++) {
        text[used++] = digits[i];
        if ((length - i) % 3 == 1 && i + 1 < length && digits[i] != '-') text[used++] = ',';
    }
    text[used] = 0;
    return text;
}

#endif
