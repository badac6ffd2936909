#include "error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Make the line printable: no control characters, and no character cut in two at its end. */
static void clean(char *message, size_t size) {
    size_t length = strlen(message);
    if (length == size - 1) {
        size_t start = length;
        while (start > 0 && length - start < 4 && ((unsigned char)message[start - 1] & 0xC0) == 0x80) {
            start--;
        }
        if (start > 0 && ((unsigned char)message[start - 1] & 0x80) != 0) {
            message[start - 1] = '\0';
        }
    }
    for (char *c = message; *c != '\0'; c++) {
        if ((unsigned char)*c < 0x20 || *c == 0x7F) {
            *c = ' ';
        }
    }
}

tfx_status tfx_fail(tfx_error *error, tfx_status status, const char *format, ...) {
    if (error != NULL) {
        va_list arguments;
        va_start(arguments, format);
        if (vsnprintf(error->message, sizeof error->message, format, arguments) < 0) {
            error->message[0] = '\0';
        }
        va_end(arguments);
        clean(error->message, sizeof error->message);
    }
    return status;
}

tfx_status tfx_no_memory(tfx_error *error) {
    return tfx_fail(error, TFX_MACHINE, "out of memory");
}
