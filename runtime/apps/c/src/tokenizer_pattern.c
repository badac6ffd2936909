/* The patterns that texts are split at, each written out. */
#include <string.h>

#include "tokenizer_parts.h"
#include "unicode.h"

/* Move behind all code points from `at` on that `is` takes. */
static size_t run_of(bool (*is)(uint32_t), const char *text, size_t at, size_t end) {
    while (at < end) {
        size_t next = at;
        if (!is(tfx_utf8_read(text, &next))) {
            break;
        }
        at = next;
    }
    return at;
}

static bool is_letter(uint32_t point) {
    return tfx_is(TFX_IS_LETTER, point);
}

static bool is_number(uint32_t point) {
    return tfx_is(TFX_IS_NUMBER, point);
}

static bool is_space(uint32_t point) {
    return tfx_is(TFX_IS_SPACE, point);
}

static bool is_other(uint32_t point) {
    return !is_letter(point) && !is_number(point) && !is_space(point);
}

static bool is_word(uint32_t point) {
    return tfx_is(TFX_IS_WORD, point);
}

static bool is_mark(uint32_t point) {
    return !is_word(point) && !tfx_is(TFX_IS_WHITE, point);
}

/* 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ at `at`, where it always matches. */
static size_t gpt2(const char *text, size_t at, size_t end) {
    static const char *const endings[] = {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"};
    static bool (*const runs[])(uint32_t) = {is_letter, is_number, is_other};
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++) {
        const size_t size = strlen(endings[i]);
        if (end - at >= size && memcmp(text + at, endings[i], size) == 0) {
            return at + size;
        }
    }
    const size_t behind = at + (text[at] == ' ' ? 1 : 0);
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        const size_t stop = run_of(runs[i], text, behind, end);
        if (stop > behind) {
            return stop;
        }
    }
    const size_t stop = run_of(is_space, text, at, end);
    const size_t last = tfx_utf8_before(text, stop);
    return stop < end && stop - last > at ? stop - last : stop; /* one space is left for what follows */
}

static bool next_class(const tfx_split *split, const char *text, size_t at, size_t end, size_t *start, size_t *stop) {
    while (at < end) {
        size_t next = at;
        if (tfx_is((tfx_class)split->of, tfx_utf8_read(text, &next))) {
            *start = at;
            *stop = next;
            return true;
        }
        at = next;
    }
    return false;
}

static bool next_literal(const char *literal, const char *text, size_t at, size_t end, size_t *start, size_t *stop) {
    const size_t size = strlen(literal);
    for (; end - at >= size; at++) {
        if (memcmp(text + at, literal, size) == 0) {
            *start = at;
            *stop = at + size;
            return true;
        }
    }
    return false;
}

static bool next_word(const char *text, size_t at, size_t end, size_t *start, size_t *stop) {
    for (; at < end; at = *stop) {
        *start = at;
        *stop = run_of(is_word, text, at, end);
        if (*stop == at) {
            *stop = run_of(is_mark, text, at, end);
        }
        if (*stop > at) {
            return true;
        }
        tfx_utf8_read(text, stop); /* white space */
    }
    return false;
}

bool tfx_pattern_next(const tfx_split *split, const char *text, size_t at, size_t end, size_t *start, size_t *stop) {
    switch (split->pattern) {
        case TFX_PATTERN_CLASS: return next_class(split, text, at, end, start, stop);
        case TFX_PATTERN_LITERAL: return next_literal(split->literal, text, at, end, start, stop);
        case TFX_PATTERN_WORDS: return next_word(text, at, end, start, stop);
        case TFX_PATTERN_GPT2:
            *start = at;
            *stop = gpt2(text, at, end);
            return true;
    }
    return false;
}
