/* on_windows.h - what the tests take from POSIX and MinGW does not have, and names that its headers take.  test.h includes it
 * on Windows.  Tests of what Windows does not have at all (fork, pipes with names, resource limits) are skipped there. */
#ifndef AMPT_WINDOWS_H
#define AMPT_WINDOWS_H

#include <direct.h>
#include <fcntl.h>
#include <io.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>
#undef IN
#undef OUT
#undef near
#undef far

#define mkdir(path, mode) _mkdir(path)
static __attribute__((unused)) char *mkdtemp(char *path) { return _mktemp(path) != NULL && _mkdir(path) == 0 ? path : NULL; }
static __attribute__((unused)) int setenv(const char *name, const char *value, int over) {
    (void)over;
    return _putenv_s(name, value);
}
static __attribute__((unused)) int unsetenv(const char *name) { return _putenv_s(name, ""); }

/* Files have the bytes that are written, as on other systems, and paths of the tests are below the folder they run in. */
static __attribute__((constructor)) void ampt_windows_begin(void) {
    _fmode = _O_BINARY;
    _setmode(1, _O_BINARY);
    _mkdir("/tmp");
}
#endif
