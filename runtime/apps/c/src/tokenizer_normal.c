#include <stdlib.h>
#include <string.h>

#include "tokenizer_parts.h"
#include "unicode.h"

/* --- reading ------------------------------------------------------------------------------------------------------ */

static tfx_status read_bert(tfx_normal *step, const cJSON *json, const char *where, tfx_error *error) {
    step->kind = TFX_NORMAL_BERT;
    TFX_TRY(tfx_json_flag(json, "clean_text", where, &step->clean, error));
    TFX_TRY(tfx_json_flag(json, "handle_chinese_chars", where, &step->cjk, error));
    TFX_TRY(tfx_json_flag(json, "lowercase", where, &step->lower, error));
    return tfx_part_flag(json, "strip_accents", where, step->lower, &step->accents, error);
}

static tfx_status read_points(tfx_points *points, const cJSON *json, const char *key, const char *where,
                              tfx_error *error) {
    const char *text;
    TFX_TRY(tfx_part_string(json, key, where, &text, error));
    return tfx_points_read(points, text, strlen(text)) ? TFX_OK : tfx_no_memory(error);
}

static tfx_status read_replace(tfx_normal *step, const cJSON *json, const char *where, tfx_error *error) {
    char path[TFX_WHERE];
    const cJSON *pattern;
    step->kind = TFX_NORMAL_REPLACE;
    TFX_TRY(read_points(&step->to, json, "content", where, error));
    TFX_TRY(tfx_json_object(json, "pattern", where, &pattern, error));
    tfx_json_path(path, where, "pattern");
    if (tfx_json_get(pattern, "Regex") != NULL) {
        return tfx_json_wrong(tfx_json_get(pattern, "Regex"), path, "a String, for this code has no such pattern",
                              error);
    }
    TFX_TRY(read_points(&step->from, pattern, "String", path, error));
    return step->from.size > 0 ? TFX_OK : tfx_json_wrong(NULL, path, "a String that is not empty", error);
}

static tfx_status read_one(tfx_normal *step, const char *type, const cJSON *json, const char *where, tfx_error *error) {
    char path[TFX_WHERE];
    if (strcmp(type, "BertNormalizer") == 0) {
        return read_bert(step, json, where, error);
    }
    if (strcmp(type, "Lowercase") == 0) {
        step->kind = TFX_NORMAL_LOWER;
    } else if (strcmp(type, "NFC") == 0 || strcmp(type, "NFD") == 0 || strcmp(type, "NFKC") == 0 ||
               strcmp(type, "NFKD") == 0) {
        step->kind = TFX_NORMAL_FORM;
        step->compatible = type[2] == 'K';
        step->compose = type[strlen(type) - 1] == 'C';
    } else if (strcmp(type, "StripAccents") == 0) {
        step->kind = TFX_NORMAL_NO_ACCENTS;
    } else if (strcmp(type, "Strip") == 0) {
        step->kind = TFX_NORMAL_STRIP;
        TFX_TRY(tfx_json_flag(json, "strip_left", where, &step->left, error));
        TFX_TRY(tfx_json_flag(json, "strip_right", where, &step->right, error));
    } else if (strcmp(type, "Replace") == 0) {
        return read_replace(step, json, where, error);
    } else if (strcmp(type, "Prepend") == 0) {
        step->kind = TFX_NORMAL_PREPEND;
        return read_points(&step->to, json, "prepend", where, error);
    } else if (strcmp(type, "ByteLevel") == 0) {
        step->kind = TFX_NORMAL_BYTES;
    } else {
        return tfx_json_wrong(tfx_json_get(json, "type"), tfx_json_path(path, where, "type"),
                              "BertNormalizer, ByteLevel, Lowercase, NFC, NFD, NFKC, NFKD, Prepend, Replace, "
                              "Sequence, Strip or StripAccents, which this code does",
                              error);
    }
    return TFX_OK;
}

static tfx_status read_steps(tfx_normals *steps, const cJSON *json, const char *where, int depth, tfx_error *error) {
    char path[TFX_WHERE];
    const char *type;
    TFX_TRY(tfx_json_text(json, "type", where, &type, error));
    if (strcmp(type, "Sequence") == 0) {
        const cJSON *members;
        const cJSON *member;
        if (depth == TFX_DEEPEST) {
            return tfx_fail(error, TFX_INPUT, "%s: Sequences in Sequences, wanted at most %d", where, TFX_DEEPEST);
        }
        TFX_TRY(tfx_json_array(json, "normalizers", where, &members, error));
        tfx_json_path(path, where, "normalizers");
        cJSON_ArrayForEach(member, members) {
            TFX_TRY(read_steps(steps, member, path, depth + 1, error));
        }
        return TFX_OK;
    }
    tfx_normal *grown = tfx_grow(steps->items, &steps->room, steps->count + 1, sizeof *grown);
    if (grown == NULL) {
        return tfx_no_memory(error);
    }
    steps->items = grown;
    tfx_normal *step = grown + steps->count++;
    *step = (tfx_normal){0};
    return read_one(step, type, json, where, error);
}

tfx_status tfx_normals_read(tfx_normals *steps, const cJSON *json, const char *where, tfx_error *error) {
    return json == NULL || cJSON_IsNull(json) ? TFX_OK : read_steps(steps, json, where, 0, error);
}

void tfx_normals_free(tfx_normals *steps) {
    for (size_t i = 0; i < steps->count; i++) {
        free(steps->items[i].from.data);
        free(steps->items[i].to.data);
    }
    free(steps->items);
    *steps = (tfx_normals){0};
}

/* --- steps -------------------------------------------------------------------------------------------------------- */

static void remove_class(tfx_points *points, tfx_class kind) {
    size_t size = 0;
    for (size_t i = 0; i < points->size; i++) {
        if (!tfx_is(kind, points->data[i])) {
            points->data[size++] = points->data[i];
        }
    }
    points->size = size;
}

/* Replace the points by another list, which is then its. */
static tfx_status become(tfx_points *points, tfx_points made, bool complete, tfx_error *error) {
    if (!complete) {
        free(made.data);
        return tfx_no_memory(error);
    }
    free(points->data);
    *points = made;
    return TFX_OK;
}

static tfx_status run_lower(tfx_points *points, tfx_error *error) {
    tfx_points made = {0};
    bool complete = true;
    for (size_t i = 0; i < points->size && complete; i++) {
        uint32_t lower[2];
        const size_t count = tfx_lower(points->data[i], lower);
        complete = tfx_points_add(&made, lower[0]) && (count == 1 || tfx_points_add(&made, lower[1]));
    }
    return become(points, made, complete, error);
}

static tfx_status run_bert(const tfx_normal *step, tfx_points *points, tfx_error *error) {
    if (step->clean) {
        remove_class(points, TFX_IS_CONTROL);
        for (size_t i = 0; i < points->size; i++) {
            points->data[i] = tfx_is(TFX_IS_WHITE, points->data[i]) ? ' ' : points->data[i];
        }
    }
    if (step->cjk) {
        tfx_points made = {0};
        bool complete = true;
        for (size_t i = 0; i < points->size && complete; i++) {
            const uint32_t point = points->data[i];
            const bool apart = tfx_is(TFX_IS_CJK, point);
            complete = (!apart || tfx_points_add(&made, ' ')) && tfx_points_add(&made, point) &&
                       (!apart || tfx_points_add(&made, ' '));
        }
        TFX_TRY(become(points, made, complete, error));
    }
    if (step->accents) {
        TFX_TRY(tfx_unicode_form(points, false, false, error));
        remove_class(points, TFX_IS_NONSPACING);
    }
    return step->lower ? run_lower(points, error) : TFX_OK;
}

static void run_strip(const tfx_normal *step, tfx_points *points) {
    size_t start = 0;
    size_t stop = points->size;
    while (step->left && start < stop && tfx_is(TFX_IS_WHITE, points->data[start])) {
        start++;
    }
    while (step->right && stop > start && tfx_is(TFX_IS_WHITE, points->data[stop - 1])) {
        stop--;
    }
    if (start > 0) {
        memmove(points->data, points->data + start, (stop - start) * sizeof *points->data);
    }
    points->size = stop - start;
}

static bool add_all(tfx_points *points, const tfx_points *more) {
    for (size_t i = 0; i < more->size; i++) {
        if (!tfx_points_add(points, more->data[i])) {
            return false;
        }
    }
    return true;
}

static tfx_status run_replace(const tfx_normal *step, tfx_points *points, tfx_error *error) {
    const size_t length = step->from.size;
    tfx_points made = {0};
    bool complete = true;
    for (size_t i = 0; i < points->size && complete;) {
        if (points->size - i >= length &&
            memcmp(points->data + i, step->from.data, length * sizeof *points->data) == 0) {
            complete = add_all(&made, &step->to);
            i += length;
        } else {
            complete = tfx_points_add(&made, points->data[i++]);
        }
    }
    return become(points, made, complete, error);
}

static tfx_status run_prepend(const tfx_normal *step, tfx_points *points, tfx_error *error) {
    tfx_points made = {0};
    return points->size == 0 ? TFX_OK
                             : become(points, made, add_all(&made, &step->to) && add_all(&made, points), error);
}

uint32_t tfx_byte_point(unsigned char byte) {
    /* Printable ones stand for themselves, the others are counted from U+0100: 33, then 34, then one. */
    if ((byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD)) {
        return byte;
    }
    return 0x100U + (byte <= 0x20 ? byte : byte == 0xAD ? 67U : byte - 0x7FU + 33U);
}

static tfx_status run_bytes(tfx_points *points, tfx_error *error) {
    tfx_points made = {0};
    bool complete = true;
    for (size_t i = 0; i < points->size && complete; i++) {
        char bytes[4];
        const size_t count = tfx_utf8_write(points->data[i], bytes);
        for (size_t k = 0; k < count && complete; k++) {
            complete = tfx_points_add(&made, tfx_byte_point((unsigned char)bytes[k]));
        }
    }
    return become(points, made, complete, error);
}

static tfx_status run_step(const tfx_normal *step, tfx_points *points, tfx_error *error) {
    switch (step->kind) {
        case TFX_NORMAL_BERT: return run_bert(step, points, error);
        case TFX_NORMAL_LOWER: return run_lower(points, error);
        case TFX_NORMAL_FORM: return tfx_unicode_form(points, step->compatible, step->compose, error);
        case TFX_NORMAL_NO_ACCENTS: remove_class(points, TFX_IS_COMBINING); return TFX_OK;
        case TFX_NORMAL_STRIP: run_strip(step, points); return TFX_OK;
        case TFX_NORMAL_REPLACE: return run_replace(step, points, error);
        case TFX_NORMAL_PREPEND: return run_prepend(step, points, error);
        case TFX_NORMAL_BYTES: return run_bytes(points, error);
    }
    return TFX_OK;
}

tfx_status tfx_normals_run(const tfx_normals *steps, const char *data, size_t size, tfx_text *text, tfx_error *error) {
    tfx_points points = {0};
    tfx_status status = tfx_points_read(&points, data, size) ? TFX_OK : tfx_no_memory(error);
    for (size_t i = 0; i < steps->count && status == TFX_OK; i++) {
        status = run_step(steps->items + i, &points, error);
    }
    for (size_t i = 0; i < points.size && status == TFX_OK; i++) {
        status = tfx_text_add_point(text, points.data[i]) ? TFX_OK : tfx_no_memory(error);
    }
    free(points.data);
    return status;
}
