/* Growing lists that tokenizing is made of. All start as {0}; every function that adds returns false without memory. */
#ifndef TFX_LISTS_H
#define TFX_LISTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 * Make room for `wanted` items of `item` bytes.
 *
 * Return the memory, perhaps moved, NULL where there is none; `data` is as it was then. `*room` is the items it holds.
 */
void *tfx_grow(void *data, size_t *room, size_t wanted, size_t item);

/* Valid UTF-8, without a NUL behind it. */
typedef struct tfx_text {
    char *data;
    size_t size, room; /* bytes */
} tfx_text;

bool tfx_text_add(tfx_text *text, const char *data, size_t size);
bool tfx_text_add_point(tfx_text *text, uint32_t point);

/* Code points. */
typedef struct tfx_points {
    uint32_t *data;
    size_t size, room;
} tfx_points;

bool tfx_points_add(tfx_points *points, uint32_t point);

/* Add the code points of valid UTF-8. */
bool tfx_points_read(tfx_points *points, const char *data, size_t size);

/* Token ids. */
typedef struct tfx_ids {
    int64_t *data;
    size_t size, room;
} tfx_ids;

bool tfx_ids_add(tfx_ids *ids, int64_t id);

#define TFX_NO_TOKEN INT64_C(-1)

/* A part of a text: one that is still to be tokenized (id TFX_NO_TOKEN), or a token already. */
typedef struct tfx_piece {
    size_t start, size; /* bytes of the text; of no meaning for a token */
    int64_t id;
} tfx_piece;

/* A text and its pieces, in order. */
typedef struct tfx_pieces {
    tfx_text text;
    tfx_piece *items;
    size_t count, room;
} tfx_pieces;

/* Add a piece; an empty one that is no token is left out. */
bool tfx_pieces_add(tfx_pieces *pieces, size_t start, size_t size, int64_t id);

void tfx_pieces_free(tfx_pieces *pieces);

#endif
