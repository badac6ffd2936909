/* How a function reports what went wrong. */
#ifndef TFX_ERROR_H
#define TFX_ERROR_H

#include "tfx.h"

#if defined(__GNUC__) || defined(__clang__)
#define TFX_PRINTF(text, rest) __attribute__((format(printf, text, rest)))
#else
#define TFX_PRINTF(text, rest)
#endif

/*
 * Write the message (cut to what tfx_error holds, at a whole character, control characters made spaces) unless
 * `error` is NULL, and return `status`: `return tfx_fail(error, TFX_INPUT, "%s: missing", name);`
 */
tfx_status tfx_fail(tfx_error *error, tfx_status status, const char *format, ...) TFX_PRINTF(3, 4);

/* Make a line printable: valid UTF-8 even where it was cut inside a character, and no control characters. */
void tfx_clean(char *message);

/* The one failure for memory that ran out: TFX_MACHINE, "out of memory". */
tfx_status tfx_no_memory(tfx_error *error);

/* Return from the calling function with the status of `call` unless it is TFX_OK. */
#define TFX_TRY(call)                                                                                                  \
    do {                                                                                                               \
        const tfx_status tfx_status_ = (call);                                                                         \
        if (tfx_status_ != TFX_OK) {                                                                                   \
            return tfx_status_;                                                                                        \
        }                                                                                                              \
    } while (0)

#endif
