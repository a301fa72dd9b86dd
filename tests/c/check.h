// What the C tests share: checks that are counted, memory that is there, and an executor of pthreads.
#ifndef FA4_TESTS_CHECK_H
#define FA4_TESTS_CHECK_H

#include "../../csrc/fa4.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

static int failures;

#define CHECK(condition, ...)                               \
    do {                                                    \
        if (!(condition)) {                                 \
            failures++;                                     \
            fprintf(stderr, "%s:%d: ", __FILE__, __LINE__); \
            fprintf(stderr, __VA_ARGS__);                   \
            fputc('\n', stderr);                            \
        }                                                   \
    } while (0)

static inline void *allocate(size_t size)
{
    void *memory = malloc(size ? size : 1);
    if (!memory) {
        fputs("out of memory\n", stderr);
        exit(2);
    }
    return memory;
}

typedef struct {
    void (*run)(void *context, int64_t begin, int64_t end);
    void *context;
    int64_t begin, end;
} job;

static inline void *job_run(void *argument)
{
    const job *j = argument;
    if (j->begin < j->end) j->run(j->context, j->begin, j->end);
    return NULL;
}

// An fa4_executor's parallel_for: as many threads as it says, at most 8, each a range of the tiles.
static inline void parallel_for(const fa4_executor *self, int64_t tiles, void (*run)(void *, int64_t, int64_t),
                                void *context)
{
    enum { THREADS_MAX = 8 };
    pthread_t thread[THREADS_MAX];
    job jobs[THREADS_MAX];
    const int n = self->threads < THREADS_MAX ? self->threads : THREADS_MAX;
    for (int i = 0; i < n; i++) {
        jobs[i] = (job){run, context, tiles * i / n, tiles * (i + 1) / n};
        if (pthread_create(&thread[i], NULL, job_run, &jobs[i])) {
            fputs("no thread\n", stderr);
            exit(2);
        }
    }
    for (int i = 0; i < n; i++) pthread_join(thread[i], NULL);
}

#endif
