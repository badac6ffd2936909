#include "print.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tensor.h"

/* Print what snprintf made, with the decimal point that JSON wants. */
static void print_digits(FILE *file, char *digits) {
    for (char *c = digits; *c != '\0'; c++) {
        if (strchr("0123456789+-e", *c) == NULL) {
            *c = '.';
        }
    }
    fputs(digits, file);
}

void tfx_print_number(FILE *file, double value) {
    char digits[32] = "";
    if (!isfinite(value)) {
        fputs("null", file);
        return;
    }
    for (int precision = 6; precision <= 17; precision++) {
        snprintf(digits, sizeof digits, "%.*g", precision, value);
        if (strtod(digits, NULL) == value) {
            break;
        }
    }
    print_digits(file, digits);
}

static void print_float(FILE *file, float value) {
    char digits[32] = "";
    if (!isfinite(value)) {
        fputs("null", file);
        return;
    }
    for (int precision = 6; precision <= 9; precision++) {
        snprintf(digits, sizeof digits, "%.*g", precision, (double)value);
        if (strtof(digits, NULL) == value) {
            break;
        }
    }
    print_digits(file, digits);
}

static void print_value(FILE *file, const tfx_tensor *tensor, size_t i) {
    if (tensor->dtype == TFX_FLOAT32) {
        print_float(file, ((const float *)tensor->data)[i]);
    } else if (tfx_is_float(tensor->dtype)) {
        tfx_print_number(file, tfx_value(tensor, i));
    } else if (tensor->dtype == TFX_BOOL) {
        fputs(tfx_integer(tensor, i) != 0 ? "true" : "false", file);
    } else if (tensor->dtype == TFX_UINT64) {
        fprintf(file, "%llu", (unsigned long long)((const uint64_t *)tensor->data)[i]);
    } else {
        fprintf(file, "%lld", (long long)tfx_integer(tensor, i));
    }
}

/* Print an axis and what is in it, from value *next on. */
static void print_axis(FILE *file, const tfx_tensor *tensor, size_t axis, size_t *next) {
    if (axis == tensor->rank) {
        print_value(file, tensor, (*next)++);
        return;
    }
    fputc('[', file);
    for (int64_t i = 0; i < tensor->shape[axis]; i++) {
        if (i > 0) {
            fputc(',', file);
        }
        print_axis(file, tensor, axis + 1, next);
    }
    fputc(']', file);
}

void tfx_print_tensor(FILE *file, const tfx_tensor *tensor) {
    size_t next = 0;
    print_axis(file, tensor, 0, &next);
}

void tfx_print_text(FILE *file, const char *text) {
    fputc('"', file);
    for (const char *c = text; *c != '\0'; c++) {
        if (*c == '"' || *c == '\\') {
            fprintf(file, "\\%c", *c);
        } else if ((unsigned char)*c < 0x20) {
            fprintf(file, "\\u%04x", (unsigned)*c);
        } else {
            fputc(*c, file);
        }
    }
    fputc('"', file);
}

static void print_integers(FILE *file, const int64_t *values, size_t count) {
    fputc('[', file);
    for (size_t i = 0; i < count; i++) {
        fprintf(file, "%s%lld", i == 0 ? "" : ",", (long long)values[i]);
    }
    fputc(']', file);
}

void tfx_print_tokens(FILE *file, const tfx_tokens *tokens) {
    fputs("{\"ids\":", file);
    print_integers(file, tokens->ids, tokens->count);
    fputs(",\"types\":", file);
    print_integers(file, tokens->types, tokens->count);
    fputc('}', file);
}

void tfx_print_outputs(FILE *file, const tfx_outputs *outputs) {
    fputc('{', file);
    for (size_t i = 0; i < outputs->count; i++) {
        if (i > 0) {
            fputc(',', file);
        }
        tfx_print_text(file, outputs->items[i].name);
        fputc(':', file);
        tfx_print_tensor(file, &outputs->items[i]);
    }
    fputc('}', file);
}
