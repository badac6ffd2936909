/* The command line: texts to vectors, tokens or raw outputs, and the self-check. */
#include "platform.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#include "error.h"
#include "file.h"
#include "json.h"
#include "print.h"

#ifndef TFX_DEFAULT_BUNDLE
#define TFX_DEFAULT_BUNDLE ""
#endif

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
    "  --version, --help\n"                                                                                            \
    "\n"                                                                                                               \
    "Exit code: 0 done, 1 the self-check failed, 2 bad usage, input or bundle, 3 this machine cannot.\n"

typedef enum { VECTORS, TOKENS, RAW, SELF_CHECK, VERSION, HELP_TEXT } mode;

typedef struct {
    mode mode;
    bool json;
    bool jsonl;
    bool standard_input;
    const char *bundle;
    tfx_options options;
    const char **texts;
    size_t count;
} arguments;

/* ---- arguments ---- */

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

static bool set_mode(arguments *given, mode chosen) {
    const bool first = given->mode == VECTORS || given->mode == chosen;
    given->mode = chosen;
    return first;
}

/* Read a flag; false where it is none. */
static bool read_flag(const char *word, arguments *given, bool *clash) {
    static const struct {
        const char *word;
        mode mode;
    } MODES[] = {{"--tokens", TOKENS},   {"--raw", RAW},        {"--self-check", SELF_CHECK},
                 {"--version", VERSION}, {"--help", HELP_TEXT}, {"-h", HELP_TEXT}};
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

static tfx_status read_option(const char *word, const char *value, arguments *given, tfx_error *error) {
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

static tfx_status check_arguments(const arguments *given, bool clash, tfx_error *error) {
    if (given->mode == VERSION || given->mode == HELP_TEXT) {
        return TFX_OK;
    }
    if (clash || (given->json && given->mode != SELF_CHECK) || (given->jsonl && !given->standard_input)) {
        return tfx_fail(error, TFX_INPUT, "found options that exclude each other; see --help");
    }
    if (given->bundle[0] == '\0') {
        return tfx_fail(error, TFX_INPUT, "--bundle: missing, wanted the folder of a bundle");
    }
    if (given->mode == SELF_CHECK && (given->count > 0 || given->standard_input)) {
        return tfx_fail(error, TFX_INPUT, "--self-check: found texts, wanted none");
    }
    if (given->mode != SELF_CHECK && given->count == 0 && !given->standard_input) {
        return tfx_fail(error, TFX_INPUT, "texts: found none, wanted at least one, or - for the standard input");
    }
    if (given->count > 0 && given->standard_input) {
        return tfx_fail(error, TFX_INPUT, "found texts beside -, wanted one or the other");
    }
    return TFX_OK;
}

/* Read the command line; `given->texts` has room for all of it. */
static tfx_status read_arguments(int count, char **words, arguments *given, tfx_error *error) {
    bool clash = false;
    bool only_texts = false;
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

/* ---- texts ---- */

/* Say on stderr that a text was cut, and print its tokens where they are wanted. `number` counts from 0. */
static tfx_status look_at_tokens(tfx_encoder *encoder, const char *text, size_t number, bool print, tfx_error *error) {
    tfx_tokens tokens;
    tfx_error reason;
    const tfx_status status = tfx_tokenize(encoder, text, &tokens, &reason);
    if (status != TFX_OK) {
        return tfx_fail(error, status, "texts[%zu]: %s", number, reason.message);
    }
    if (tokens.dropped > 0) {
        fprintf(stderr, "note: texts[%zu]: cut to %zu tokens, which is the most; %zu were left out\n", number,
                tokens.count, tokens.dropped);
    }
    if (print) {
        tfx_print_tokens(stdout, &tokens);
        fputc('\n', stdout);
    }
    tfx_tokens_free(&tokens);
    return TFX_OK;
}

static tfx_status print_vectors(tfx_encoder *encoder, const char *const *texts, size_t count, tfx_error *error) {
    tfx_tensor vectors;
    TFX_TRY(tfx_embed(encoder, texts, count, &vectors, error));
    const size_t width = (size_t)vectors.shape[1];
    for (size_t i = 0; i < count; i++) {
        const tfx_tensor vector = {vectors.name, TFX_FLOAT32, 1, {(int64_t)width}, (float *)vectors.data + i * width};
        tfx_print_tensor(stdout, &vector);
        fputc('\n', stdout);
    }
    tfx_tensor_free(&vectors);
    return TFX_OK;
}

static tfx_status print_raw(tfx_encoder *encoder, const char *const *texts, size_t count, tfx_error *error) {
    tfx_outputs *results = calloc(count, sizeof *results);
    if (results == NULL) {
        return tfx_no_memory(error);
    }
    const tfx_status status = tfx_run_texts(encoder, texts, count, results, error);
    for (size_t i = 0; i < count && status == TFX_OK; i++) {
        tfx_print_outputs(stdout, &results[i]);
        fputc('\n', stdout);
        tfx_outputs_free(&results[i]);
    }
    free(results);
    return status;
}

/* Answer texts, of which the first has this number. */
static tfx_status answer(tfx_encoder *encoder, mode chosen, const char *const *texts, size_t count, size_t first,
                         tfx_error *error) {
    for (size_t i = 0; i < count; i++) {
        TFX_TRY(look_at_tokens(encoder, texts[i], first + i, chosen == TOKENS, error));
    }
    if (chosen == VECTORS) {
        return print_vectors(encoder, texts, count, error);
    }
    return chosen == RAW ? print_raw(encoder, texts, count, error) : TFX_OK;
}

static tfx_status answer_line(tfx_encoder *encoder, const arguments *given, char *line, size_t length, size_t number,
                              tfx_error *error) {
    if (strlen(line) < length) {
        return tfx_fail(error, TFX_INPUT, "texts[%zu]: holds a NUL character", number);
    }
    if (!given->jsonl) {
        const char *text = line;
        return answer(encoder, given->mode, &text, 1, number, error);
    }
    cJSON *json;
    char name[48];
    snprintf(name, sizeof name, "texts[%zu]", number);
    TFX_TRY(tfx_json_parse(line, length, name, &json, error));
    const char *text = cJSON_GetStringValue(json);
    const tfx_status status = text == NULL ? tfx_json_wrong(json, name, "a string", error)
                                           : answer(encoder, given->mode, &text, 1, number, error);
    cJSON_Delete(json);
    return status;
}

/* Answer the standard input line by line. */
static tfx_status answer_lines(tfx_encoder *encoder, const arguments *given, tfx_error *error) {
    char *line = NULL;
    size_t room = 0;
    size_t number = 0;
    ssize_t length;
    tfx_status status = TFX_OK;
    while (status == TFX_OK && (length = getline(&line, &room, stdin)) >= 0) {
        size_t end = (size_t)length;
        end -= end > 0 && line[end - 1] == '\n' ? 1 : 0;
        end -= end > 0 && line[end - 1] == '\r' ? 1 : 0;
        line[end] = '\0';
        status = answer_line(encoder, given, line, end, number++, error);
        if (fflush(stdout) != 0) {
            break;
        }
    }
    if (status == TFX_OK && ferror(stdin)) {
        status = tfx_fail(error, TFX_INPUT, "standard input: %s", strerror(errno));
    }
    free(line);
    return status;
}

static tfx_status run(const arguments *given, tfx_error *error) {
    tfx_encoder *encoder;
    TFX_TRY(tfx_open(given->bundle, &given->options, &encoder, error));
    const tfx_status status = given->standard_input
                                  ? answer_lines(encoder, given, error)
                                  : answer(encoder, given->mode, given->texts, given->count, 0, error);
    tfx_close(encoder);
    return status;
}

static tfx_status self_check(const arguments *given, tfx_error *error) {
    tfx_report report;
    const tfx_status status = tfx_self_check(given->bundle, &given->options, &report, error);
    if (given->json) {
        tfx_report_json(&report, stdout);
    } else {
        tfx_report_print(&report, stdout);
    }
    return status;
}

static tfx_status act(const arguments *given, const char *program, tfx_error *error) {
    switch (given->mode) {
        case VERSION: printf("%s\n", tfx_version()); return TFX_OK;
        case HELP_TEXT:
            printf(USAGE, program, program, program);
            printf(HELP, TFX_DEFAULT_BUNDLE[0] == '\0' ? "" : "; ", TFX_DEFAULT_BUNDLE);
            return TFX_OK;
        case SELF_CHECK: return self_check(given, error);
        default: return run(given, error);
    }
}

int main(int count, char **words) {
    tfx_error error = {""};
    arguments given = {.bundle = TFX_DEFAULT_BUNDLE, .texts = calloc((size_t)count + 1, sizeof(char *))};
    tfx_status status = given.texts == NULL ? tfx_no_memory(&error) : read_arguments(count, words, &given, &error);
    if (status == TFX_OK) {
        status = act(&given, words[0], &error);
    }
    free(given.texts);
    if ((fflush(stdout) != 0 || ferror(stdout)) && status == TFX_OK) {
        status = tfx_fail(&error, TFX_INPUT, "standard output: %s", strerror(errno));
    }
    if (status != TFX_OK) {
        fprintf(stderr, "error: %s\n", error.message);
    }
    return (int)status;
}
