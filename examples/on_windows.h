/* on_windows.h - what the examples take from POSIX, in Windows' words: signals, folders, names of files, a console.
 *
 * example.h includes it on Windows.  Files and output have the same bytes as on other systems.  Names on the command
 * line are in the system's code page, and amp.h's own calls read UTF-8: keep to ASCII, or set the page to UTF-8. */
#ifndef EXAMPLE_ON_WINDOWS_H
#define EXAMPLE_ON_WINDOWS_H

#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <direct.h>
#include <errno.h>
#include <fcntl.h>
#include <io.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <winsock2.h>
#include <windows.h>
#undef near
#undef far

/* A limit on the size of files is no signal here, and descriptors are always open. */
static inline void ex_system_begin(void) {
    int fd;
    DWORD mode;
    HANDLE console = GetStdHandle(STD_OUTPUT_HANDLE);
    _fmode = _O_BINARY;
    for (fd = 0; fd < 3; fd++) (void)_setmode(fd, _O_BINARY);
    SetConsoleOutputCP(CP_UTF8);
    if (GetConsoleMode(console, &mode)) SetConsoleMode(console, mode | 4);      /* it obeys escape sequences */
}

/* Windows forgets a handler when it calls it. */
enum { SA_RESETHAND = 1 };
static void (*ex_handler)(int);
static inline void ex_handle_again(int signal_number) {
    signal(signal_number, ex_handle_again);
    ex_handler(signal_number);
}
/* Handles Ctrl-C, and Ctrl-Break, which a closed console sends too. */
static inline void ex_on_ending_signals(void (*handler)(int), int flags) {
    ex_handler = handler;
    signal(SIGINT, flags & SA_RESETHAND ? handler : ex_handle_again);
    signal(SIGBREAK, flags & SA_RESETHAND ? handler : ex_handle_again);
}

static inline int ex_folder_new(const char *path) { return _mkdir(path); }
static inline void ex_host_name(char *name, size_t size) {
    DWORD n = (DWORD)size;
    if (!GetComputerNameA(name, &n)) name[0] = 0;
}
/* 1 unless no process has this number. */
static inline int ex_process_runs(long pid) {
    HANDLE process = OpenProcess(SYNCHRONIZE, FALSE, (DWORD)pid);
    int runs = process != NULL ? WaitForSingleObject(process, 0) == WAIT_TIMEOUT
                               : GetLastError() != ERROR_INVALID_PARAMETER;
    if (process != NULL) CloseHandle(process);
    return runs;
}
static inline void ex_sleep(double seconds) { Sleep((DWORD)(seconds * 1000)); }

/* Columns and rows of the console, or 0. */
static inline int ex_terminal(int *rows) {
    CONSOLE_SCREEN_BUFFER_INFO info;
    if (!GetConsoleScreenBufferInfo(GetStdHandle(STD_OUTPUT_HANDLE), &info)) return *rows = 0;
    *rows = info.srWindow.Bottom - info.srWindow.Top + 1;
    return info.srWindow.Right - info.srWindow.Left + 1;
}
static inline int ex_terminal_is_utf8(void) { return GetConsoleOutputCP() == CP_UTF8; }

/* A file that is read back and gone when it is closed. */
static inline FILE *ex_scratch(void) {
    char folder[MAX_PATH], path[MAX_PATH];
    if (GetTempPathA(MAX_PATH, folder) == 0 || GetTempFileNameA(folder, "amp", 0, path) == 0) return NULL;
    return fopen(path, "w+bTD");
}

#if !defined(GLOB_NOMATCH)
/* glob(pattern, 0, NULL, &found): "*" and "?" in any component, as Windows matches them. */
typedef struct glob_t { size_t gl_pathc; char **gl_pathv; } glob_t;
static inline void globfree(glob_t *found) {
    while (found->gl_pathc > 0) free(found->gl_pathv[--found->gl_pathc]);
    free(found->gl_pathv);
    found->gl_pathv = NULL;
}
static inline void ex_glob_add(glob_t *found, const char *path) {
    char **more = (char **)realloc(found->gl_pathv, (found->gl_pathc + 1) * sizeof *more);
    if (more == NULL) return;
    found->gl_pathv = more;
    more[found->gl_pathc] = _strdup(path);
    if (more[found->gl_pathc] != NULL) found->gl_pathc++;
}
/* Finds what matches `rest` behind the path `done`. */
static inline void ex_glob_below(glob_t *found, const char *done, const char *rest) {
    const char *special = strpbrk(rest, "*?"), *begin = special, *end;
    char path[4096];
    struct _finddata_t entry;
    intptr_t search;
    if (special == NULL) {
        snprintf(path, sizeof path, "%s%s", done, rest);
        if (access(path, F_OK) == 0) ex_glob_add(found, path);
        return;
    }
    while (begin > rest && strchr("/\\:", begin[-1]) == NULL) begin--;
    end = special + strcspn(special, "/\\");
    snprintf(path, sizeof path, "%s%.*s", done, (int)(end - rest), rest);
    search = _findfirst(path, &entry);
    if (search == -1) return;
    do {
        if (entry.name[0] == '.') continue;
        snprintf(path, sizeof path, "%s%.*s%s", done, (int)(begin - rest), rest, entry.name);
        if (*end == 0) ex_glob_add(found, path);
        else ex_glob_below(found, path, end);
    } while (_findnext(search, &entry) == 0);
    _findclose(search);
}
static inline int glob(const char *pattern, int flags, int (*failed)(const char *, int), glob_t *found) {
    (void)flags;
    (void)failed;
    memset(found, 0, sizeof *found);
    ex_glob_below(found, "", pattern);
    return found->gl_pathc == 0;
}
#endif
#endif
