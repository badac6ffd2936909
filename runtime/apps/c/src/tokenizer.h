/* Text to token ids, as a Hugging Face tokenizer.json says. */
#ifndef TFX_TOKENIZER_H
#define TFX_TOKENIZER_H

#include "tfx.h"

typedef struct tfx_tokenizer tfx_tokenizer;

/*
 * Read a tokenizer.json.
 *
 * path:       the file.
 * max_length: longer texts are cut to this many tokens, special tokens counted; -1 cuts nothing. Padding and cut that
 *             the file itself asks for are not applied (but the side that the file cuts at is kept).
 * tokenizer:  receives the tokenizer, NULL on failure; released with tfx_tokenizer_close.
 *
 * TFX_INPUT: the file cannot be read, is no tokenizer, or is of a kind that this code does not do exactly; the message
 * names the part. TFX_MACHINE: no memory.
 */
tfx_status tfx_tokenizer_open(const char *path, int64_t max_length, tfx_tokenizer **tokenizer, tfx_error *error);

/*
 * Tokenize one text, special tokens added; safe to call from several threads.
 *
 * text:   UTF-8 of `bytes` bytes; NUL bytes are characters like others.
 * tokens: receives ids and types of the same count (at least 0) and the number of tokens cut off; released with
 *         tfx_tokens_free. Empty on failure.
 *
 * TFX_INPUT: invalid UTF-8 (the message has the place), or a character whose meaning is not certain. TFX_MACHINE: no
 * memory.
 */
tfx_status tfx_tokenizer_encode(const tfx_tokenizer *tokenizer, const char *text, size_t bytes, tfx_tokens *tokens,
                                tfx_error *error);

/* Release a tokenizer; NULL is allowed. */
void tfx_tokenizer_close(tfx_tokenizer *tokenizer);

#endif
