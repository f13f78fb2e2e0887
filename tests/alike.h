/* alike.h - an all_gather hook for tests that stands for two ranks with the same contents, which therefore always agree. */
#ifndef AMPT_ALIKE_H
#define AMPT_ALIKE_H

static int alike_gather(void *user, const void *in, void *out, int64_t bytes_each, void *stream) {
    (void)user; (void)stream;
    memmove(out, in, (size_t)bytes_each);
    memcpy((char *)out + bytes_each, out, (size_t)bytes_each);
    return 0;
}
static const amp_exchanges alike = {.all_gather = alike_gather};

#endif
