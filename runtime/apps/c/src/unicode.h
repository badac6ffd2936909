/* Unicode as the Rust `tokenizers` sees it, from tables that were asked of it. Code points are uint32_t. */
#ifndef TFX_UNICODE_H
#define TFX_UNICODE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* In the order of the rows of TFX_ASCII and TFX_CLASSES. */
typedef enum tfx_class {
    TFX_IS_CONTROL,     /* removed by BertNormalizer's clean_text; U+0000 and U+FFFD are among them */
    TFX_IS_WHITE,       /* white space everywhere but in patterns */
    TFX_IS_PUNCTUATION, /* of BertPreTokenizer and Punctuation */
    TFX_IS_CJK,         /* BertNormalizer's handle_chinese_chars */
    TFX_IS_NONSPACING,  /* removed by BertNormalizer's strip_accents, of those that NFD leaves alone */
    TFX_IS_COMBINING,   /* removed by StripAccents */
    TFX_IS_NUMERIC,     /* of Digits */
    TFX_IS_WORD,        /* \w of Whitespace and of added tokens */
    TFX_IS_LETTER,      /* \p{L} of patterns */
    TFX_IS_NUMBER,      /* \p{N} of patterns */
    TFX_IS_SPACE        /* \s of patterns */
} tfx_class;

bool tfx_is(tfx_class kind, uint32_t point);

/* Write the lowercase of a code point, 1 or 2 code points, and return how many. */
size_t tfx_lower(uint32_t point, uint32_t lower[2]);

/* The most code points that one becomes by tfx_decompose. */
#define TFX_MOST_PARTS 18

/* Write the full decomposition of a code point, without sorting marks, and return how many code points that is. */
size_t tfx_decompose(uint32_t point, bool compatible, uint32_t parts[TFX_MOST_PARTS]);

/* Return the rank of the canonical combining class among all, 0 for starters. */
unsigned tfx_combining_rank(uint32_t point);

/* Ranks are at most this. */
extern const unsigned tfx_most_rank;

/* Return what two code points compose to, 0 for nothing. */
uint32_t tfx_compose(uint32_t first, uint32_t second);

/* Read one code point of valid UTF-8 and move `*at` behind it. */
uint32_t tfx_utf8_read(const char *text, size_t *at);

/* Return how many bytes of valid UTF-8 the character before `at`, which is not 0, has. */
size_t tfx_utf8_before(const char *text, size_t at);

/* Write one code point as UTF-8 and return how many bytes that is. */
size_t tfx_utf8_write(uint32_t point, char bytes[4]);

#endif
