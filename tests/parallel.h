/* parallel.h - a program's own thread pool, for amp_desc.parallel and for devices that tests open themselves.  It starts
 * one thread for each number in every call, and joins it. */
#ifndef AMPT_PARALLEL_H
#define AMPT_PARALLEL_H

#include <pthread.h>
#include <stdint.h>

enum { AMPT_THREADS = 64 };

typedef struct ampt_part { pthread_t thread; void (*run)(void *arg, int32_t i); void *arg; int32_t i; int started; } ampt_part;

static void *ampt_part_main(void *part) {
    ampt_part *p = (ampt_part *)part;
    p->run(p->arg, p->i);
    return NULL;
}

static __attribute__((unused)) void ampt_parallel(void *user, int32_t n, void (*run)(void *arg, int32_t i), void *arg) {
    ampt_part parts[AMPT_THREADS];
    int32_t i;
    (void)user;
    for (i = 1; i < n; i++) {
        ampt_part *p = &parts[i % AMPT_THREADS];
        p->run = run;
        p->arg = arg;
        p->i = i;
        p->started = i < AMPT_THREADS && pthread_create(&p->thread, NULL, ampt_part_main, p) == 0;
        if (!p->started) run(arg, i);
    }
    run(arg, 0);
    for (i = 1; i < n && i < AMPT_THREADS; i++)
        if (parts[i].started) pthread_join(parts[i].thread, NULL);
}

#endif
