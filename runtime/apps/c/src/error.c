#include "error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "file.h"

void tfx_clean(char *message) {
    const size_t length = strlen(message);
    for (size_t place = 0; (place += tfx_utf8_check(message + place, length - place)) < length;) {
        message[place] = '?';
    }
    for (char *c = message; *c != '\0'; c++) {
        if ((unsigned char)*c < 0x20 || *c == 0x7F) {
            *c = ' ';
        }
    }
}

tfx_status tfx_fail(tfx_error *error, tfx_status status, const char *format, ...) {
    if (error != NULL) {
        char message[sizeof error->message]; /* an argument may be the message that is there */
        va_list arguments;
        va_start(arguments, format);
        if (vsnprintf(message, sizeof message, format, arguments) < 0) {
            message[0] = '\0';
        }
        va_end(arguments);
        tfx_clean(message);
        memcpy(error->message, message, sizeof message);
    }
    return status;
}

tfx_status tfx_no_memory(tfx_error *error) {
    return tfx_fail(error, TFX_MACHINE, "out of memory");
}
