/* The command line: texts to vectors, tokens or raw outputs, and the self-check. */
#include "platform.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#include "arguments.h"
#include "error.h"
#include "file.h"
#include "json.h"
#include "print.h"

#ifndef TFX_DEFAULT_BUNDLE
#define TFX_DEFAULT_BUNDLE ""
#endif

/* ---- texts ---- */

/*
 * Tokenize a text, say on stderr where it was cut, and print its tokens where they are wanted. `number` counts from 0.
 */
static tfx_status make_tokens(tfx_encoder *encoder, const char *text, size_t number, bool print, tfx_tokens *tokens,
                              tfx_error *error) {
    tfx_error reason;
    const tfx_status status = tfx_tokenize(encoder, text, tokens, &reason);
    if (status != TFX_OK) {
        return tfx_fail(error, status, "texts[%zu]: %s", number, reason.message);
    }
    if (tokens->dropped > 0) {
        fprintf(stderr, "note: texts[%zu]: cut to %zu tokens, which is the most; %zu were left out\n", number,
                tokens->count, tokens->dropped);
    }
    if (print) {
        tfx_print_tokens(stdout, tokens);
        fputc('\n', stdout);
    }
    return TFX_OK;
}

static tfx_status print_vectors(tfx_encoder *encoder, const tfx_tokens *tokens, size_t count, tfx_error *error) {
    tfx_tensor vectors;
    TFX_TRY(tfx_embed_tokens(encoder, tokens, count, &vectors, error));
    const size_t width = (size_t)vectors.shape[1];
    for (size_t i = 0; i < count; i++) {
        const tfx_tensor vector = {vectors.name, TFX_FLOAT32, 1, {(int64_t)width}, (float *)vectors.data + i * width};
        tfx_print_tensor(stdout, &vector);
        fputc('\n', stdout);
    }
    tfx_tensor_free(&vectors);
    return TFX_OK;
}

static tfx_status print_raw(tfx_encoder *encoder, const tfx_tokens *tokens, size_t count, tfx_error *error) {
    tfx_outputs *results = calloc(count, sizeof *results);
    if (results == NULL) {
        return tfx_no_memory(error);
    }
    const tfx_status status = tfx_run_tokens(encoder, tokens, count, results, error);
    for (size_t i = 0; i < count && status == TFX_OK; i++) {
        tfx_print_outputs(stdout, &results[i]);
        fputc('\n', stdout);
        tfx_outputs_free(&results[i]);
    }
    free(results);
    return status;
}

/* Answer texts, of which the first has this number. */
static tfx_status answer(tfx_encoder *encoder, tfx_mode chosen, const char *const *texts, size_t count, size_t first,
                         tfx_error *error) {
    tfx_tokens *tokens = calloc(count, sizeof *tokens);
    tfx_status status = tokens == NULL ? tfx_no_memory(error) : TFX_OK;
    for (size_t i = 0; i < count && status == TFX_OK; i++) {
        status = make_tokens(encoder, texts[i], first + i, chosen == TFX_TOKENS, &tokens[i], error);
    }
    if (status == TFX_OK && chosen == TFX_VECTORS) {
        status = print_vectors(encoder, tokens, count, error);
    } else if (status == TFX_OK && chosen == TFX_RAW) {
        status = print_raw(encoder, tokens, count, error);
    }
    for (size_t i = 0; tokens != NULL && i < count; i++) {
        tfx_tokens_free(&tokens[i]);
    }
    free(tokens);
    return status;
}

static tfx_status answer_line(tfx_encoder *encoder, const tfx_arguments *given, char *line, size_t length,
                              size_t number, tfx_error *error) {
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

/* Read a line; glibc's getline sets no error flag where memory runs out, so that it looks like the end. */
static ssize_t read_line(char **line, size_t *room, tfx_status *status, tfx_error *error) {
    errno = 0;
    const ssize_t length = getline(line, room, stdin);
    if (length < 0 && !feof(stdin)) {
        *status = tfx_fail(error, errno == ENOMEM ? TFX_MACHINE : TFX_INPUT, "standard input: %s", strerror(errno));
    }
    return length;
}

/* Answer the standard input line by line. */
static tfx_status answer_lines(tfx_encoder *encoder, const tfx_arguments *given, tfx_error *error) {
    char *line = NULL;
    size_t room = 0;
    size_t number = 0;
    ssize_t length;
    tfx_status status = TFX_OK;
    while (status == TFX_OK && (length = read_line(&line, &room, &status, error)) >= 0) {
        size_t end = (size_t)length;
        end -= end > 0 && line[end - 1] == '\n' ? 1 : 0;
        end -= end > 0 && line[end - 1] == '\r' ? 1 : 0;
        line[end] = '\0';
        status = answer_line(encoder, given, line, end, number++, error);
        if (fflush(stdout) != 0) {
            break;
        }
    }
    free(line);
    return status;
}

static tfx_status run(const tfx_arguments *given, tfx_error *error) {
    tfx_encoder *encoder;
    TFX_TRY(tfx_open(given->bundle, &given->options, &encoder, error));
    const tfx_status status = given->standard_input
                                  ? answer_lines(encoder, given, error)
                                  : answer(encoder, given->mode, given->texts, given->count, 0, error);
    tfx_close(encoder);
    return status;
}

static tfx_status self_check(const tfx_arguments *given, tfx_error *error) {
    tfx_report report;
    const tfx_status status = tfx_self_check(given->bundle, &given->options, &report, error);
    if (given->json) {
        tfx_report_json(&report, stdout);
    } else {
        tfx_report_print(&report, stdout);
    }
    return status;
}

static tfx_status act(const tfx_arguments *given, const char *program, tfx_error *error) {
    switch (given->mode) {
        case TFX_VERSION: printf("%s\n", tfx_version()); return TFX_OK;
        case TFX_HELP: tfx_arguments_help(stdout, program, TFX_DEFAULT_BUNDLE); return TFX_OK;
        case TFX_SELF_CHECK: return self_check(given, error);
        default: return run(given, error);
    }
}

int main(int count, char **words) {
    tfx_error error = {""};
    tfx_arguments given;
    tfx_status status = tfx_arguments_read(count, words, TFX_DEFAULT_BUNDLE, &given, &error);
    if (status == TFX_OK) {
        status = act(&given, words[0], &error);
    }
    tfx_arguments_free(&given);
    if ((fflush(stdout) != 0 || ferror(stdout)) && status == TFX_OK) {
        status = tfx_fail(&error, TFX_INPUT, "standard output: %s", strerror(errno));
    }
    if (status != TFX_OK) {
        fprintf(stderr, "error: %s\n", error.message);
    }
    return (int)status;
}
