/* The words of the command line, which are the same in every language. */
#ifndef TFX_ARGUMENTS_H
#define TFX_ARGUMENTS_H

#include "error.h"

typedef enum tfx_mode { TFX_VECTORS, TFX_TOKENS, TFX_RAW, TFX_SELF_CHECK, TFX_VERSION, TFX_HELP } tfx_mode;

/* Strings are those of the command line. */
typedef struct tfx_arguments {
    tfx_mode mode;
    bool json;
    bool jsonl;
    bool standard_input;
    const char *bundle;
    tfx_options options;
    const char **texts;
    size_t count;
} tfx_arguments;

/*
 * Read the command line.
 *
 * bundle: the folder where none is given, "" for none.
 * given:  released with tfx_arguments_free, whatever is returned.
 *
 * TFX_INPUT: an option that there is not, or that does not go with another. TFX_MACHINE: no memory.
 */
tfx_status tfx_arguments_read(int count, char **words, const char *bundle, tfx_arguments *given, tfx_error *error);

void tfx_arguments_free(tfx_arguments *given);

/* Print what --help says. */
void tfx_arguments_help(FILE *file, const char *program, const char *bundle);

#endif
