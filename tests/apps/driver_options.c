/*
 * Calls the C app's library for tests/apps/test_forged.py: driver_options LIBRARY BUNDLE.
 *
 * Options are refused alike by all that take them, tokens may be given by callers, and files are closed.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "golden.h"

#define WANT(condition)                                                                                                \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "line %d: %s: %s\n", __LINE__, #condition, error.message);                                 \
            return 1;                                                                                                  \
        }                                                                                                              \
    } while (0)

int main(int count, char **words) {
    tfx_error error = {""};
    WANT(count == 3);
    tfx_options options = {words[1], -3};
    tfx_encoder *encoder;
    tfx_report report;
    WANT(tfx_open(words[2], &options, &encoder, &error) == TFX_INPUT && strstr(error.message, "threads: found -3"));
    error.message[0] = '\0';
    WANT(tfx_self_check(words[2], &options, &report, &error) == TFX_INPUT);
    WANT(!report.passed && strstr(error.message, "threads: found -3") && strstr(report.problem, "threads"));

    options.threads = 1;
    WANT(tfx_open(words[2], &options, &encoder, &error) == TFX_OK);
    tfx_tokens tokens;
    tfx_outputs by_text;
    tfx_outputs by_tokens;
    const char *text = "a b c";
    WANT(tfx_tokenize(encoder, text, &tokens, &error) == TFX_OK && tokens.count == 3);
    WANT(tfx_run_texts(encoder, &text, 1, &by_text, &error) == TFX_OK);
    WANT(tfx_run_tokens(encoder, &tokens, 1, &by_tokens, &error) == TFX_OK);
    WANT(by_text.count == 1 && by_tokens.count == 1 && tfx_tensor_size(by_tokens.items) == 3);
    WANT(memcmp(by_text.items[0].data, by_tokens.items[0].data, 3 * sizeof(float)) == 0);
    tfx_outputs_free(&by_text);
    tfx_outputs_free(&by_tokens);
    tfx_tensor vectors;
    WANT(tfx_embed_tokens(encoder, &tokens, 1, &vectors, &error) == TFX_INPUT && vectors.data == NULL);
    WANT(tfx_run_tokens(encoder, NULL, 0, &by_tokens, &error) == TFX_INPUT && strstr(error.message, "empty"));
    tfx_tokens_free(&tokens);
    WANT(tfx_run_tokens(encoder, &tokens, 1, &by_tokens, &error) == TFX_INPUT && strstr(error.message, "tokens[0]"));
    WANT(by_tokens.items == NULL);
    tfx_close(encoder);

    /* A file may be opened as descriptor 0; it is closed all the same, and one that was never opened closes none. */
    char path[4096];
    tfx_golden golden;
    tfx_safetensors none = {0};
    snprintf(path, sizeof path, "%s/golden.safetensors", words[2]);
    close(0);
    WANT(tfx_golden_open(path, &golden, &error) == TFX_OK && golden.file.descriptor == 0);
    tfx_safetensors_close(&none);
    tfx_outputs inputs;
    WANT(tfx_golden_inputs(&golden, 0, &inputs, &error) == TFX_OK);
    tfx_outputs_free(&inputs);
    tfx_golden_close(&golden);
    WANT(tfx_golden_open(path, &golden, &error) == TFX_OK && golden.file.descriptor == 0);
    tfx_golden_close(&golden);
    puts("all as wanted");
    return 0;
}
