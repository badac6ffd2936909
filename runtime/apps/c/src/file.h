/* Files of a bundle: read with a limit, hashed as a stream, bytes checked to be UTF-8. */
#ifndef TFX_FILE_H
#define TFX_FILE_H

#include "error.h"

#define TFX_SHA256_DIGITS 64

/* Return `folder`/`name` in new memory that the caller frees, NULL without memory. */
char *tfx_path(const char *folder, const char *name);

/* Return a copy of a string that the caller frees, NULL without memory. */
char *tfx_copy_text(const char *text);

/*
 * Read a regular file whole.
 *
 * largest: more bytes than this are an error.
 * content: receives the bytes and a NUL behind them; the caller frees it. NULL on failure.
 * size:    receives the number of bytes.
 *
 * TFX_INPUT: no such file, no regular file, too large or unreadable. TFX_MACHINE: no memory.
 */
tfx_status tfx_read_file(const char *path, size_t largest, char **content, size_t *size, tfx_error *error);

/*
 * Compute the sha256 of a file, as lower-case hexadecimal digits.
 *
 * size: receives the number of bytes read.
 *
 * TFX_INPUT: the file cannot be read. TFX_MACHINE: OpenSSL cannot hash, or no memory.
 */
tfx_status tfx_sha256_file(const char *path, char digest[TFX_SHA256_DIGITS + 1], int64_t *size, tfx_error *error);

/* Return the place of the first byte that is not part of valid UTF-8, `bytes` where all of it is. */
size_t tfx_utf8_check(const char *text, size_t bytes);

#endif
