/*
 * Tokenizes texts for tests/apps/test_tokenizer.py: tokenizer_driver
 * TOKENIZER.JSON MAX_LENGTH
 *
 * Each text on stdin is its size in bytes, a line break and the bytes. Each is
 * answered by a line: ids, types and the number of tokens dropped with a bar
 * between, or "error: ...". Types that are all 0 are left out.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "tokenizer.h"

static bool any(const int64_t *values, size_t count) {
  for (size_t i = 0; i < count; i++) {
    if (values[i] != 0) {
      return true;
    }
  }
  return false;
}

static void print(const int64_t *values, size_t count) {
  for (size_t i = 0; i < count; i++) {
    printf("%s%" PRId64, i == 0 ? "" : " ", values[i]);
  }
}

int main(int argc, char **argv) {
  tfx_error error;
  tfx_tokenizer *tokenizer;
  size_t size;
  if (argc != 3) {
    return TFX_INPUT;
  }
  const tfx_status status = tfx_tokenizer_open(
      argv[1], strtoll(argv[2], NULL, 10), &tokenizer, &error);
  if (status != TFX_OK) {
    fprintf(stderr, "error: %s\n", error.message);
    return (int)status;
  }
  while (scanf("%zu", &size) == 1 && getchar() == '\n') {
    tfx_tokens tokens;
    char *text =
        malloc(size > 0 ? size : 1); /* no byte more than the text has: a
                                        sanitizer sees what is behind */
    if (text == NULL || fread(text, 1, size, stdin) != size) {
      return TFX_MACHINE;
    }
    if (tfx_tokenizer_encode(tokenizer, text, size, &tokens, &error) ==
        TFX_OK) {
      print(tokens.ids, tokens.count);
      putchar('|');
      print(tokens.types, any(tokens.types, tokens.count) ? tokens.count : 0);
      printf("|%zu\n", tokens.dropped);
    } else {
      printf("error: %s\n", error.message);
    }
    tfx_tokens_free(&tokens);
    free(text);
    fflush(stdout);
  }
  tfx_tokenizer_close(tokenizer);
  return 0;
}
