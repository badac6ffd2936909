/* JSON on a stream: numbers that read back as the same value, whatever the locale, and escaped strings. */
#ifndef TFX_PRINT_H
#define TFX_PRINT_H

#include "tfx.h"

/* Print a number with as few digits as read back as the same double; null for NaN and infinity. */
void tfx_print_number(FILE *file, double value);

/* Print a string in quotes; UTF-8 stays as it is. */
void tfx_print_text(FILE *file, const char *text);

/* Print an array as nested lists; float32 values have as few digits as read back as the same float32. */
void tfx_print_tensor(FILE *file, const tfx_tensor *tensor);

/* Print {"ids":[...],"types":[...]}. */
void tfx_print_tokens(FILE *file, const tfx_tokens *tokens);

/* Print {"output name": nested list, ...}. */
void tfx_print_outputs(FILE *file, const tfx_outputs *outputs);

#endif
