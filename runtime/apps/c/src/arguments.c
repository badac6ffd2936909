#include "arguments.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#define USAGE                                                                                                          \
    "usage: %s [--bundle DIR] [--threads N] [--library PATH] [--tokens | --raw] TEXT...\n"                             \
    "       %s [...] - [--jsonl]\n"                                                                                    \
    "       %s [...] --self-check [--json]\n"

#define HELP                                                                                                           \
    "\n"                                                                                                               \
    "One JSON array, the text's vector, per text and line.\n"                                                          \
    "\n"                                                                                                               \
    "  -               texts from the standard input, one per line, answered line by line\n"                           \
    "  --jsonl         each line of the standard input is a JSON string\n"                                             \
    "  --tokens        {\"ids\":[...],\"types\":[...]} instead\n"                                                      \
    "  --raw           {\"output\": nested list, ...} instead: every output of the model, cut to the text's tokens\n"  \
    "  --self-check    compare with what was recorded when the bundle was made\n"                                      \
    "  --json          the self-check's report as JSON\n"                                                              \
    "  --bundle DIR    the bundle%s%s\n"                                                                               \
    "  --threads N     threads inside an operator\n"                                                                   \
    "  --library PATH  onnxruntime's library (>= 1.20); else $TFX_ONNXRUNTIME, else the system's\n"                    \
    "  --              what follows is text, even where it begins with -\n"                                            \
    "  --version, --help\n"                                                                                            \
    "\n"                                                                                                               \
    "Exit code: 0 done, 1 the self-check failed, 2 bad usage, input or bundle, 3 this machine cannot.\n"

static tfx_status read_threads(const char *text, int *threads, tfx_error *error) {
    char *end;
    errno = 0;
    const long value = strtol(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || value < 1 || value > INT_MAX) {
        return tfx_fail(error, TFX_INPUT, "--threads: found \"%.40s\", wanted a number of at least 1", text);
    }
    *threads = (int)value;
    return TFX_OK;
}

static bool set_mode(tfx_arguments *given, tfx_mode chosen) {
    const bool first = given->mode == TFX_VECTORS || given->mode == chosen;
    given->mode = chosen;
    return first;
}

/* Read a flag; false where it is none. */
static bool read_flag(const char *word, tfx_arguments *given, bool *clash) {
    static const struct {
        const char *word;
        tfx_mode mode;
    } MODES[] = {{"--tokens", TFX_TOKENS},   {"--raw", TFX_RAW},   {"--self-check", TFX_SELF_CHECK},
                 {"--version", TFX_VERSION}, {"--help", TFX_HELP}, {"-h", TFX_HELP}};
    for (size_t i = 0; i < sizeof MODES / sizeof MODES[0]; i++) {
        if (strcmp(word, MODES[i].word) == 0) {
            *clash = *clash || !set_mode(given, MODES[i].mode);
            return true;
        }
    }
    given->json = given->json || strcmp(word, "--json") == 0;
    given->jsonl = given->jsonl || strcmp(word, "--jsonl") == 0;
    return strcmp(word, "--json") == 0 || strcmp(word, "--jsonl") == 0;
}

static tfx_status read_option(const char *word, const char *value, tfx_arguments *given, tfx_error *error) {
    const bool bundle = strcmp(word, "--bundle") == 0;
    const bool library = strcmp(word, "--library") == 0;
    if (!bundle && !library && strcmp(word, "--threads") != 0) {
        return tfx_fail(error, TFX_INPUT, "found the option %.80s, which there is not; see --help", word);
    }
    if (value == NULL) {
        return tfx_fail(error, TFX_INPUT, "%s: wanted a value behind it", word);
    }
    if (bundle) {
        given->bundle = value;
    } else if (library) {
        given->options.library = value;
    } else {
        return read_threads(value, &given->options.threads, error);
    }
    return TFX_OK;
}

static tfx_status check_arguments(const tfx_arguments *given, bool clash, tfx_error *error) {
    if (given->mode == TFX_VERSION || given->mode == TFX_HELP) {
        return TFX_OK;
    }
    if (clash || (given->json && given->mode != TFX_SELF_CHECK) || (given->jsonl && !given->standard_input)) {
        return tfx_fail(error, TFX_INPUT, "found options that exclude each other; see --help");
    }
    if (given->bundle[0] == '\0') {
        return tfx_fail(error, TFX_INPUT, "--bundle: missing, wanted the folder of a bundle");
    }
    if (given->mode == TFX_SELF_CHECK && (given->count > 0 || given->standard_input)) {
        return tfx_fail(error, TFX_INPUT, "--self-check: found texts, wanted none");
    }
    if (given->mode != TFX_SELF_CHECK && given->count == 0 && !given->standard_input) {
        return tfx_fail(error, TFX_INPUT, "texts: found none, wanted at least one, or - for the standard input");
    }
    if (given->count > 0 && given->standard_input) {
        return tfx_fail(error, TFX_INPUT, "found texts beside -, wanted one or the other");
    }
    return TFX_OK;
}

tfx_status tfx_arguments_read(int count, char **words, const char *bundle, tfx_arguments *given, tfx_error *error) {
    bool clash = false;
    bool only_texts = false;
    *given = (tfx_arguments){.bundle = bundle, .texts = calloc((size_t)count + 1, sizeof(char *))};
    if (given->texts == NULL) {
        return tfx_no_memory(error);
    }
    for (int i = 1; i < count; i++) {
        const char *word = words[i];
        if (only_texts || word[0] != '-') {
            given->texts[given->count++] = word;
        } else if (strcmp(word, "--") == 0) {
            only_texts = true;
        } else if (strcmp(word, "-") == 0) {
            given->standard_input = true;
        } else if (!read_flag(word, given, &clash)) {
            TFX_TRY(read_option(word, i + 1 < count ? words[i + 1] : NULL, given, error));
            i++;
        }
    }
    return check_arguments(given, clash, error);
}

void tfx_arguments_free(tfx_arguments *given) {
    free(given->texts);
    given->texts = NULL;
}

void tfx_arguments_help(FILE *file, const char *program, const char *bundle) {
    fprintf(file, USAGE, program, program, program);
    fprintf(file, HELP, bundle[0] == '\0' ? "" : "; ", bundle);
}
