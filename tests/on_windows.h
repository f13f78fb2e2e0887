/* on_windows.h - what the tests take from POSIX and MinGW does not have, and names that Windows' headers take.  test.h
 * includes it on Windows.  What Windows does not have at all (fork, pipes with names) fails here, and its tests are
 * skipped. */
#ifndef AMPT_ON_WINDOWS_H
#define AMPT_ON_WINDOWS_H

#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <direct.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <io.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>
#include <windows.h>
#undef IN
#undef OUT
#undef near
#undef far
#undef IGNORE
#undef OPTIONAL
#define tell ampt_tell
#define SIZE ampt_SIZE

#define AMPT_OWN static __attribute__((unused))
#define mkdir(path, mode) _mkdir(path)
#define lstat stat
#define MAP_FAILED NULL
#define PROT_READ 1
#define PROT_WRITE 2
#define MAP_SHARED 1
#define WIFEXITED(status) ((status) == 0)
#define WEXITSTATUS(status) (status)
#define FNM_PERIOD 4

AMPT_OWN int ampt_missing(void) { errno = ENOSYS; return -1; }
AMPT_OWN pid_t fork(void) { return ampt_missing(); }
AMPT_OWN pid_t waitpid(pid_t child, int *status, int how) { (void)child; (void)how; *status = -1; return ampt_missing(); }
AMPT_OWN int mkfifo(const char *path, int mode) { (void)path; (void)mode; return ampt_missing(); }
AMPT_OWN int fnmatch(const char *pattern, const char *name, int how) { (void)pattern; (void)name; (void)how; return ampt_missing(); }
AMPT_OWN void *mmap(void *at, size_t bytes, int access, int how, int file, int64_t offset) {
    (void)at; (void)access; (void)how; (void)file; (void)offset;
    return calloc(1, bytes);
}
AMPT_OWN int munmap(void *at, size_t bytes) { (void)bytes; free(at); return 0; }
AMPT_OWN unsigned alarm(unsigned seconds) { (void)seconds; return 0; }
AMPT_OWN char *mkdtemp(char *path) { return _mktemp(path) != NULL && _mkdir(path) == 0 ? path : NULL; }
AMPT_OWN int setenv(const char *name, const char *value, int over) { (void)over; return _putenv_s(name, value); }
AMPT_OWN int unsetenv(const char *name) { return _putenv_s(name, ""); }

AMPT_OWN int64_t readlink(const char *path, char *text, size_t size) { (void)path; (void)text; (void)size; return ampt_missing(); }
AMPT_OWN int link(const char *from, const char *to) { return CreateHardLinkA(to, from, NULL) ? 0 : -1; }
#define ampi_probe_caches(cpu, folder) ((void)(cpu), (void)(folder))

/* Memory that free() takes: as many blocks as it needs until one is aligned. */
AMPT_OWN int posix_memalign(void **out, size_t align, size_t size) {
    void *block = malloc(size), *rest = NULL;
    if (block != NULL && (uintptr_t)block % align != 0) { (void)posix_memalign(&rest, align, size + 16); free(block); block = rest; }
    *out = block;
    return block != NULL ? 0 : ENOMEM;
}
/* Offsets have 64 bits, and a file that grows has no bytes on the disk yet. */
#define off_t int64_t
AMPT_OWN int ampt_truncate(int file, int64_t bytes) {
    LARGE_INTEGER at;
    at.QuadPart = bytes;
    return SetFilePointerEx((HANDLE)_get_osfhandle(file), at, NULL, FILE_BEGIN) && SetEndOfFile((HANDLE)_get_osfhandle(file)) ? 0 : -1;
}
#define ftruncate ampt_truncate
AMPT_OWN int pwrite(int file, const void *data, size_t bytes, int64_t at) {
    return _lseeki64(file, at, SEEK_SET) == at ? _write(file, data, (unsigned)bytes) : -1;
}
AMPT_OWN FILE *fmemopen(void *data, size_t bytes, const char *mode) {
    FILE *file = tmpfile();
    (void)mode;
    if (file != NULL && fwrite(data, 1, bytes, file) == bytes) rewind(file);
    return file;
}

/* "rm -r" of a folder; there is no other command. */
AMPT_OWN int ampt_remove_all(const char *path) {
    char name[600];
    DIR *folder = opendir(path);
    struct dirent *entry;
    while (folder != NULL && (entry = readdir(folder)) != NULL)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) {
            snprintf(name, sizeof name, "%s/%s", path, entry->d_name);
            if (unlink(name) != 0) (void)ampt_remove_all(name);
        }
    if (folder != NULL) closedir(folder);
    return _rmdir(path);
}
AMPT_OWN int ampt_system(const char *command) {
    char path[600];
    if (sscanf(command, "rm -%*[rf] '%599[^']'", path) != 1 && sscanf(command, "rm -%*[rf] %599s", path) != 1) return -1;
    return ampt_remove_all(path);
}
#define system(command) ampt_system(command)
#define rename(from, to) (MoveFileExA(from, to, MOVEFILE_REPLACE_EXISTING) ? 0 : -1)
AMPT_OWN int ampt_dup2(int from, int to) { return _dup2(from, to) == 0 ? to : -1; }
#define dup2 ampt_dup2
/* wine shows Linux' /proc. */
AMPT_OWN DIR *ampt_opendir(const char *path) { return strncmp(path, "/proc", 5) == 0 ? NULL : opendir(path); }
#define opendir ampt_opendir

#if !defined(EXAMPLE_ON_WINDOWS_H)
#define GLOB_NOMATCH 3
typedef struct glob_t { size_t gl_pathc; char **gl_pathv; } glob_t;
/* Only whether there are such files. */
AMPT_OWN int glob(const char *pattern, int how, int (*failed)(const char *, int), glob_t *found) {
    struct _finddata_t file;
    intptr_t search = _findfirst(pattern, &file);
    (void)how;
    (void)failed;
    memset(found, 0, sizeof *found);
    if (search == -1) return GLOB_NOMATCH;
    _findclose(search);
    return 0;
}
AMPT_OWN void globfree(glob_t *found) { (void)found; }
#endif

/* Files have the bytes that are written, as on other systems. */
static __attribute__((constructor)) void ampt_windows_begin(void) {
    _fmode = _O_BINARY;
    _setmode(1, _O_BINARY);
    _mkdir("/tmp");
}
#endif
