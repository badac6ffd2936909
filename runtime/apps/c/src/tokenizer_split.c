/* Pre-tokenizers: a text is split at the matches of patterns, one step after the other. */
#include <stdlib.h>
#include <string.h>

#include "file.h"
#include "tokenizer_parts.h"
#include "unicode.h"

#define GPT2 "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

/* --- reading ------------------------------------------------------------------------------------------------------ */

static tfx_status add(tfx_splits *steps, tfx_split step, tfx_error *error) {
    tfx_split *grown = tfx_grow(steps->items, &steps->room, steps->count + 1, sizeof *grown);
    if (grown == NULL) {
        free(step.literal);
        return tfx_no_memory(error);
    }
    steps->items = grown;
    grown[steps->count++] = step;
    return TFX_OK;
}

static tfx_status add_class(tfx_splits *steps, tfx_class of, tfx_behavior behavior, tfx_error *error) {
    return add(steps, (tfx_split){.pattern = TFX_PATTERN_CLASS, .of = (int)of, .behavior = behavior}, error);
}

static tfx_status read_behavior(const cJSON *json, const char *where, bool optional, tfx_behavior *behavior,
                                tfx_error *error) {
    static const char *const names[] = {"Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"};
    char path[TFX_WHERE];
    const cJSON *found = tfx_json_get(json, "behavior");
    *behavior = TFX_ISOLATED;
    if (found == NULL && optional) {
        return TFX_OK;
    }
    for (size_t i = 0; i < sizeof names / sizeof *names && cJSON_IsString(found); i++) {
        if (strcmp(found->valuestring, names[i]) == 0) {
            *behavior = (tfx_behavior)i;
            return TFX_OK;
        }
    }
    return tfx_json_wrong(found, tfx_json_path(path, where, "behavior"),
                          "Contiguous, Isolated, MergedWithNext, MergedWithPrevious or Removed", error);
}

static tfx_status read_split(tfx_splits *steps, const cJSON *json, const char *where, tfx_error *error) {
    char path[TFX_WHERE];
    const cJSON *pattern;
    tfx_split step = {0};
    TFX_TRY(read_behavior(json, where, false, &step.behavior, error));
    TFX_TRY(tfx_json_flag(json, "invert", where, &step.invert, error));
    TFX_TRY(tfx_json_object(json, "pattern", where, &pattern, error));
    tfx_json_path(path, where, "pattern");
    const cJSON *regex = tfx_json_get(pattern, "Regex");
    if (regex != NULL) {
        step.pattern = TFX_PATTERN_GPT2;
        if (!cJSON_IsString(regex) || strcmp(regex->valuestring, GPT2) != 0) {
            return tfx_json_wrong(regex, path, "a String or the Regex of GPT-2, which this code does", error);
        }
    } else {
        const char *literal;
        step.pattern = TFX_PATTERN_LITERAL;
        TFX_TRY(tfx_json_text(pattern, "String", path, &literal, error));
        step.literal = tfx_copy_text(literal);
        if (step.literal == NULL) {
            return tfx_no_memory(error);
        }
    }
    return add(steps, step, error);
}

static tfx_status read_bytes(tfx_splits *steps, const cJSON *json, const char *where, tfx_error *error) {
    bool space;
    bool split;
    TFX_TRY(tfx_json_flag(json, "add_prefix_space", where, &space, error));
    TFX_TRY(tfx_part_flag(json, "use_regex", where, true, &split, error));
    if (space) {
        TFX_TRY(add(steps, (tfx_split){.space = true}, error));
    }
    if (split) {
        TFX_TRY(add(steps, (tfx_split){.pattern = TFX_PATTERN_GPT2, .behavior = TFX_ISOLATED}, error));
    }
    return add(steps, (tfx_split){.bytes = true}, error);
}

static tfx_status read_one(tfx_splits *steps, const char *type, const cJSON *json, const char *where,
                           tfx_error *error) {
    char path[TFX_WHERE];
    if (strcmp(type, "BertPreTokenizer") == 0) {
        TFX_TRY(add_class(steps, TFX_IS_WHITE, TFX_REMOVED, error));
        return add_class(steps, TFX_IS_PUNCTUATION, TFX_ISOLATED, error);
    }
    if (strcmp(type, "ByteLevel") == 0) {
        return read_bytes(steps, json, where, error);
    }
    if (strcmp(type, "Whitespace") == 0) { /* what is no match is left out */
        return add(steps, (tfx_split){.pattern = TFX_PATTERN_WORDS, .invert = true, .behavior = TFX_REMOVED}, error);
    }
    if (strcmp(type, "WhitespaceSplit") == 0) {
        return add_class(steps, TFX_IS_WHITE, TFX_REMOVED, error);
    }
    if (strcmp(type, "Punctuation") == 0) {
        tfx_behavior behavior;
        TFX_TRY(read_behavior(json, where, true, &behavior, error));
        return add_class(steps, TFX_IS_PUNCTUATION, behavior, error);
    }
    if (strcmp(type, "Digits") == 0) {
        bool single;
        TFX_TRY(tfx_json_flag(json, "individual_digits", where, &single, error));
        return add_class(steps, TFX_IS_NUMERIC, single ? TFX_ISOLATED : TFX_CONTIGUOUS, error);
    }
    if (strcmp(type, "Split") == 0) {
        return read_split(steps, json, where, error);
    }
    return tfx_json_wrong(tfx_json_get(json, "type"), tfx_json_path(path, where, "type"),
                          "BertPreTokenizer, ByteLevel, Digits, Punctuation, Sequence, Split, Whitespace or "
                          "WhitespaceSplit, which this code does",
                          error);
}

static tfx_status read_steps(tfx_splits *steps, const cJSON *json, const char *where, int depth, tfx_error *error) {
    char path[TFX_WHERE];
    const char *type;
    TFX_TRY(tfx_json_text(json, "type", where, &type, error));
    if (strcmp(type, "Sequence") != 0) {
        return read_one(steps, type, json, where, error);
    }
    const cJSON *members;
    const cJSON *member;
    if (depth == TFX_DEEPEST) {
        return tfx_fail(error, TFX_INPUT, "%s: Sequences in Sequences, wanted at most %d", where, TFX_DEEPEST);
    }
    TFX_TRY(tfx_json_array(json, "pretokenizers", where, &members, error));
    tfx_json_path(path, where, "pretokenizers");
    cJSON_ArrayForEach(member, members) {
        TFX_TRY(read_steps(steps, member, path, depth + 1, error));
    }
    return TFX_OK;
}

tfx_status tfx_splits_read(tfx_splits *steps, const cJSON *json, const char *where, tfx_error *error) {
    return json == NULL || cJSON_IsNull(json) ? TFX_OK : read_steps(steps, json, where, 0, error);
}

void tfx_splits_free(tfx_splits *steps) {
    for (size_t i = 0; i < steps->count; i++) {
        free(steps->items[i].literal);
    }
    free(steps->items);
    *steps = (tfx_splits){0};
}

/* --- running ------------------------------------------------------------------------------------------------------ */

typedef struct part {
    size_t start, stop;
    bool match;
} part;

typedef struct parts {
    part *items;
    size_t count, room;
} parts;

static bool add_part(parts *found, size_t start, size_t stop, bool match) {
    part *grown = tfx_grow(found->items, &found->room, found->count + 1, sizeof *grown);
    if (grown == NULL) {
        return false;
    }
    found->items = grown;
    grown[found->count++] = (part){start, stop, match};
    return true;
}

/* Cut text[start..stop) into matches and what is between them. */
static bool find_parts(const tfx_split *step, const char *text, size_t start, size_t stop, parts *found) {
    size_t first;
    size_t last;
    size_t at = start;
    while (at < stop && tfx_pattern_next(step, text, at, stop, &first, &last)) {
        if ((first > at && !add_part(found, at, first, step->invert)) || !add_part(found, first, last, !step->invert)) {
            return false;
        }
        at = last;
    }
    return at == stop || add_part(found, at, stop, step->invert);
}

/*
 * Join parts as the behavior says. Of matches that follow each other only the first is joined with its neighbour; and
 * a first part, before which there is none, counts as following what is no match.
 */
static void join_parts(tfx_behavior behavior, parts *found) {
    const bool backwards = behavior == TFX_WITH_NEXT;
    const size_t total = found->count;
    size_t count = 0;
    bool previous = false;
    if (behavior == TFX_REMOVED || behavior == TFX_ISOLATED) {
        return;
    }
    for (size_t i = 0; i < total; i++) { /* kept parts are moved to the end that was begun with */
        const part one = found->items[backwards ? total - 1 - i : i];
        const bool join = behavior == TFX_CONTIGUOUS ? one.match == previous : one.match && !previous;
        previous = one.match;
        if (join && count > 0) {
            if (backwards) {
                found->items[total - count].start = one.start;
            } else {
                found->items[count - 1].stop = one.stop;
            }
        } else {
            count++;
            found->items[backwards ? total - count : count - 1] = one;
        }
    }
    if (backwards && count > 0) {
        memmove(found->items, found->items + (total - count), count * sizeof *found->items);
    }
    found->count = count;
}

static tfx_status run_split(const tfx_split *step, tfx_pieces *pieces, tfx_error *error) {
    tfx_pieces made = {0};
    parts found = {0};
    bool complete = true;
    for (size_t i = 0; i < pieces->count && complete; i++) {
        const tfx_piece piece = pieces->items[i];
        if (piece.id != TFX_NO_TOKEN) {
            complete = tfx_pieces_add(&made, 0, 0, piece.id);
            continue;
        }
        found.count = 0;
        complete = find_parts(step, pieces->text.data, piece.start, piece.start + piece.size, &found);
        if (complete) {
            join_parts(step->behavior, &found);
        }
        for (size_t k = 0; k < found.count && complete; k++) {
            const part one = found.items[k];
            if (!one.match || step->behavior != TFX_REMOVED) {
                complete = tfx_pieces_add(&made, one.start, one.stop - one.start, TFX_NO_TOKEN);
            }
        }
    }
    free(found.items);
    if (!complete) {
        tfx_pieces_free(&made);
        return tfx_no_memory(error);
    }
    free(pieces->items);
    made.text = pieces->text;
    *pieces = made;
    return TFX_OK;
}

/* Write the pieces anew: with a space in front, or byte by byte. */
static tfx_status run_rewrite(const tfx_split *step, tfx_pieces *pieces, tfx_error *error) {
    tfx_text text = {0};
    bool complete = true;
    for (size_t i = 0; i < pieces->count && complete; i++) {
        tfx_piece *piece = pieces->items + i;
        const size_t start = text.size;
        const char *data = pieces->text.data + piece->start;
        if (piece->id != TFX_NO_TOKEN) {
            continue;
        }
        if (step->space) {
            complete = (data[0] == ' ' || tfx_text_add(&text, " ", 1)) && tfx_text_add(&text, data, piece->size);
        } else {
            for (size_t k = 0; k < piece->size && complete; k++) {
                complete = tfx_text_add_point(&text, tfx_byte_point((unsigned char)data[k]));
            }
        }
        piece->start = start;
        piece->size = text.size - start;
    }
    if (!complete) {
        free(text.data);
        return tfx_no_memory(error);
    }
    free(pieces->text.data);
    pieces->text = text;
    return TFX_OK;
}

tfx_status tfx_splits_run(const tfx_splits *steps, tfx_pieces *pieces, tfx_error *error) {
    for (size_t i = 0; i < steps->count; i++) {
        const tfx_split *step = steps->items + i;
        TFX_TRY(step->bytes || step->space ? run_rewrite(step, pieces, error) : run_split(step, pieces, error));
    }
    return TFX_OK;
}
