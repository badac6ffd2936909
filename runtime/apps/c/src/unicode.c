#include "unicode.h"

#include "unicode_data.h"

#define COUNT(table) (sizeof(table) / sizeof *(table))

/* Hangul syllables are computed: leading consonant, vowel, and perhaps a trailing consonant. */
#define SYLLABLES 0xAC00U
#define LEADING 0x1100U
#define VOWELS 0x1161U
#define TRAILING 0x11A7U /* one before the first */
#define VOWEL_COUNT 21U
#define TRAILING_COUNT 28U
#define SYLLABLE_COUNT (19U * VOWEL_COUNT * TRAILING_COUNT)

const unsigned tfx_most_rank = TFX_MOST_RANK;

/*
 * Find the row that a code point belongs to in a sorted table.
 *
 * rows:    numbers of the table, of which the first two of each row are its first and last code point.
 * columns: numbers of each row.
 *
 * Return the row, NULL where there is none.
 */
static const uint32_t *find(const uint32_t *rows, size_t count, size_t columns, uint32_t point) {
    size_t low = 0;
    size_t high = count;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (rows[middle * columns + 1] < point) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < count && rows[low * columns] <= point ? rows + low * columns : NULL;
}

bool tfx_is(tfx_class kind, uint32_t point) {
    if (point < 128) {
        return (TFX_ASCII[kind][point / 64] >> (point % 64) & 1) != 0;
    }
    return find(*TFX_CLASSES[kind].ranges, TFX_CLASSES[kind].count, 2, point) != NULL;
}

size_t tfx_lower(uint32_t point, uint32_t lower[2]) {
    lower[0] = point;
    if (point < 128) {
        lower[0] += point >= 'A' && point <= 'Z' ? 'a' - 'A' : 0;
        return 1;
    }
    if (point == 0x130) { /* the only one that becomes two: I with a dot above */
        lower[0] = 'i';
        lower[1] = 0x307;
        return 2;
    }
    const uint32_t *row = find(*TFX_LOWER, COUNT(TFX_LOWER), 4, point);
    if (row != NULL && (point - row[0]) % row[2] == 0) {
        lower[0] = point + row[3];
    }
    return 1;
}

size_t tfx_decompose(uint32_t point, bool compatible, uint32_t parts[TFX_MOST_PARTS]) {
    parts[0] = point;
    if (point < 128) {
        return 1;
    }
    if (point - SYLLABLES < SYLLABLE_COUNT) {
        const uint32_t index = point - SYLLABLES;
        parts[0] = LEADING + index / (VOWEL_COUNT * TRAILING_COUNT);
        parts[1] = VOWELS + index / TRAILING_COUNT % VOWEL_COUNT;
        parts[2] = TRAILING + index % TRAILING_COUNT;
        return index % TRAILING_COUNT == 0 ? 2 : 3;
    }
    const uint32_t *pool = TFX_COMPATIBLE_POOL;
    const uint32_t *row = compatible ? find(*TFX_COMPATIBLE, COUNT(TFX_COMPATIBLE), 4, point) : NULL;
    if (row == NULL) {
        pool = TFX_CANONICAL_POOL;
        row = find(*TFX_CANONICAL, COUNT(TFX_CANONICAL), 4, point);
    }
    if (row == NULL) {
        return 1;
    }
    pool += row[3] + (point - row[0]) * row[2];
    for (size_t i = 0; i < row[2]; i++) {
        parts[i] = pool[i];
    }
    return row[2];
}

unsigned tfx_combining_rank(uint32_t point) {
    const uint32_t *row = point < 0x300 ? NULL : find(*TFX_RANK, COUNT(TFX_RANK), 3, point);
    return row == NULL ? 0 : (unsigned)row[2];
}

uint32_t tfx_compose(uint32_t first, uint32_t second) {
    if (first - LEADING < 19U && second - VOWELS < VOWEL_COUNT) {
        return SYLLABLES + ((first - LEADING) * VOWEL_COUNT + (second - VOWELS)) * TRAILING_COUNT;
    }
    if (first - SYLLABLES < SYLLABLE_COUNT && (first - SYLLABLES) % TRAILING_COUNT == 0 && second > TRAILING &&
        second - TRAILING < TRAILING_COUNT) {
        return first + (second - TRAILING);
    }
    size_t low = 0;
    size_t high = COUNT(TFX_COMPOSED);
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        const uint32_t *row = TFX_COMPOSED[middle];
        if (row[0] < first || (row[0] == first && row[1] < second)) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    const bool found = low < COUNT(TFX_COMPOSED) && TFX_COMPOSED[low][0] == first && TFX_COMPOSED[low][1] == second;
    return found ? TFX_COMPOSED[low][2] : 0;
}

uint32_t tfx_utf8_read(const char *text, size_t *at) {
    const unsigned char *bytes = (const unsigned char *)text + *at;
    if (bytes[0] < 0x80) {
        *at += 1;
        return bytes[0];
    }
    const size_t size = bytes[0] < 0xE0 ? 2 : bytes[0] < 0xF0 ? 3 : 4;
    uint32_t point = bytes[0] & (0x7FU >> size);
    for (size_t i = 1; i < size; i++) {
        point = point << 6 | (bytes[i] & 0x3FU);
    }
    *at += size;
    return point;
}

size_t tfx_utf8_before(const char *text, size_t at) {
    size_t size = 1;
    while (size < at && ((unsigned char)text[at - size] & 0xC0U) == 0x80U) {
        size++;
    }
    return size;
}

size_t tfx_utf8_write(uint32_t point, char bytes[4]) {
    if (point < 0x80) {
        bytes[0] = (char)point;
        return 1;
    }
    const size_t size = point < 0x800 ? 2 : point < 0x10000 ? 3 : 4;
    for (size_t i = size; --i > 0; point >>= 6) {
        bytes[i] = (char)(0x80U | (point & 0x3FU));
    }
    bytes[0] = (char)((0xF00U >> size & 0xFFU) | point);
    return size;
}
