#include "lists.h"

#include <stdlib.h>
#include <string.h>

#include "unicode.h"

void *tfx_grow(void *data, size_t *room, size_t wanted, size_t item) {
    if (wanted <= *room && data != NULL) {
        return data;
    }
    size_t larger = *room < 16 ? 16 : *room;
    while (larger < wanted) {
        if (larger > SIZE_MAX / 2) {
            return NULL;
        }
        larger *= 2;
    }
    void *grown = larger > SIZE_MAX / item ? NULL : realloc(data, larger * item);
    if (grown != NULL) {
        *room = larger;
    }
    return grown;
}

bool tfx_text_add(tfx_text *text, const char *data, size_t size) {
    char *grown = size > SIZE_MAX - text->size ? NULL : tfx_grow(text->data, &text->room, text->size + size, 1);
    if (grown == NULL) {
        return false;
    }
    text->data = grown;
    if (size > 0) {
        memcpy(grown + text->size, data, size);
    }
    text->size += size;
    return true;
}

bool tfx_text_add_point(tfx_text *text, uint32_t point) {
    char bytes[4];
    return tfx_text_add(text, bytes, tfx_utf8_write(point, bytes));
}

bool tfx_points_add(tfx_points *points, uint32_t point) {
    uint32_t *grown = tfx_grow(points->data, &points->room, points->size + 1, sizeof *grown);
    if (grown == NULL) {
        return false;
    }
    points->data = grown;
    grown[points->size++] = point;
    return true;
}

bool tfx_points_read(tfx_points *points, const char *data, size_t size) {
    for (size_t at = 0; at < size;) {
        if (!tfx_points_add(points, tfx_utf8_read(data, &at))) {
            return false;
        }
    }
    return true;
}

bool tfx_ids_add(tfx_ids *ids, int64_t id) {
    int64_t *grown = tfx_grow(ids->data, &ids->room, ids->size + 1, sizeof *grown);
    if (grown == NULL) {
        return false;
    }
    ids->data = grown;
    grown[ids->size++] = id;
    return true;
}

bool tfx_pieces_add(tfx_pieces *pieces, size_t start, size_t size, int64_t id) {
    if (size == 0 && id == TFX_NO_TOKEN) {
        return true;
    }
    tfx_piece *grown = tfx_grow(pieces->items, &pieces->room, pieces->count + 1, sizeof *grown);
    if (grown == NULL) {
        return false;
    }
    pieces->items = grown;
    grown[pieces->count++] = (tfx_piece){start, size, id};
    return true;
}

void tfx_pieces_free(tfx_pieces *pieces) {
    free(pieces->text.data);
    free(pieces->items);
    *pieces = (tfx_pieces){0};
}
