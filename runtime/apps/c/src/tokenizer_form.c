/* The normalization forms of Unicode. */
#include <stdlib.h>
#include <string.h>

#include "tokenizer_parts.h"
#include "unicode.h"

/* Sort marks between starters by their rank, those of one rank left in their order; `ranks` goes along. */
static bool sort_marks(tfx_points *points, const unsigned char *ranks) {
    uint32_t *sorted = NULL;
    size_t room = 0;
    for (size_t start = 0; start < points->size;) {
        size_t stop = start;
        bool unsorted = false;
        for (; stop < points->size && ranks[stop] != 0; stop++) {
            unsorted = unsorted || (stop > start && ranks[stop] < ranks[stop - 1]);
        }
        if (unsorted) {
            const size_t count = stop - start;
            uint32_t *grown = tfx_grow(sorted, &room, count, sizeof *grown);
            if (grown == NULL) {
                free(sorted);
                return false;
            }
            sorted = grown;
            size_t filled = 0;
            for (unsigned rank = 1; rank <= tfx_most_rank && filled < count; rank++) {
                for (size_t i = start; i < stop; i++) {
                    if (ranks[i] == rank) {
                        sorted[filled++] = points->data[i];
                    }
                }
            }
            memcpy(points->data + start, sorted, count * sizeof *sorted);
        }
        start = stop + 1;
    }
    free(sorted);
    return true;
}

/* Join code points that are decomposed and sorted with the starter before them, in place. */
static void compose(tfx_points *points) {
    size_t size = 0;
    size_t starter = 0;
    bool started = false;
    unsigned last = 0; /* the rank of the code point behind which the next one would stand */
    for (size_t i = 0; i < points->size; i++) {
        const uint32_t point = points->data[i];
        const unsigned rank = tfx_combining_rank(point);
        /* A mark is blocked by one of its own or a higher rank, a starter by any. */
        const bool blocked = !started || (size > starter + 1 && last >= rank);
        const uint32_t composed = blocked ? 0 : tfx_compose(points->data[starter], point);
        if (composed != 0) {
            points->data[starter] = composed;
            continue;
        }
        if (rank == 0) {
            starter = size;
            started = true;
        }
        last = rank;
        points->data[size++] = point;
    }
    points->size = size;
}

tfx_status tfx_unicode_form(tfx_points *points, bool compatible, bool compose_too, tfx_error *error) {
    tfx_points made = {0};
    bool marks = false;
    for (size_t i = 0; i < points->size; i++) {
        uint32_t parts[TFX_MOST_PARTS];
        const size_t count = tfx_decompose(points->data[i], compatible, parts);
        for (size_t k = 0; k < count; k++) {
            marks = marks || parts[k] >= 0x300;
            if (!tfx_points_add(&made, parts[k])) {
                free(made.data);
                return tfx_no_memory(error);
            }
        }
    }
    free(points->data);
    *points = made;
    if (!marks) { /* no code point below has a rank or is composed of others */
        return TFX_OK;
    }
    unsigned char *ranks = malloc(points->size);
    if (ranks == NULL) {
        return tfx_no_memory(error);
    }
    for (size_t i = 0; i < points->size; i++) {
        ranks[i] = (unsigned char)tfx_combining_rank(points->data[i]);
    }
    const bool sorted = sort_marks(points, ranks);
    free(ranks);
    if (!sorted) {
        return tfx_no_memory(error);
    }
    if (compose_too) {
        compose(points);
    }
    return TFX_OK;
}
