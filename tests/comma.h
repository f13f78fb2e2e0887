/* comma.h - switches to a locale with a decimal comma: if (!comma_begin()) SKIP(NO_COMMA); ... comma_end();
 *
 * The locale is the system's de_DE.UTF-8.  If the system has none, localedef makes one for the test. */
#ifndef AMPT_COMMA_H
#define AMPT_COMMA_H

#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define NO_COMMA "no locale with a decimal comma, and no localedef with sources to make one (Debian: locales)"

static int comma_in_force(void) {
    return setlocale(LC_NUMERIC, "de_DE.UTF-8") != NULL && localeconv()->decimal_point[0] == ',';
}

static int comma_begin(void) {
    char folder[] = "/tmp/ampt_locale_XXXXXX", command[200];
    int made;
    if (comma_in_force()) return 1;
    if (mkdtemp(folder) == NULL) return 0;
    snprintf(command, sizeof command, "localedef -i de_DE -f UTF-8 %s/de_DE.UTF-8 > %s/log 2>&1", folder, folder);
    made = system(command) == 0 && setenv("LOCPATH", folder, 1) == 0 && comma_in_force();
    unsetenv("LOCPATH");
    snprintf(command, sizeof command, "rm -rf %s", folder);         /* the loaded locale remains in force */
    return system(command) == 0 && made;
}

static void comma_end(void) { setlocale(LC_NUMERIC, "C"); }

#endif
