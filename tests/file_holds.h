/* file_holds.h - whether a file has exactly this text, read by amp.h itself. */
#ifndef AMPT_FILE_HOLDS_H
#define AMPT_FILE_HOLDS_H

#include <string.h>

static int holds(const char *path, const char *text) {
    void *data;
    size_t bytes;
    int same;
    if (amp_file_read_all(NULL, path, &data, &bytes) != AMP_OK) return 0;
    same = bytes == strlen(text) && memcmp(data, text, bytes) == 0;
    amp_file_free(NULL, data, bytes);
    return same;
}

#endif
