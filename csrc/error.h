// Reasons: how the C layers say what went wrong. They live in thread-local memory of dispatch.c.
#ifndef FA4_ERROR_H
#define FA4_ERROR_H

#include "fa4.h"

#ifdef __cplusplus
extern "C" {
#endif

#ifdef __GNUC__
#    define FA4_PRINTF_LIKE(text, first) __attribute__((format(printf, text, first)))
#else
#    define FA4_PRINTF_LIKE(text, first)
#endif

// Keeps the reason for fa4_last_error() and returns status.
fa4_status fa4_fail(fa4_status status, const char *format, ...) FA4_PRINTF_LIKE(2, 3);

// The sentence of an fa4_*_unsupported(): lives until the thread's next one.
const char *fa4_reason(const char *format, ...) FA4_PRINTF_LIKE(1, 2);

#ifdef __cplusplus
}
#endif
#endif
