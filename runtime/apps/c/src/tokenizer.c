#include "tokenizer.h"

#include <stdlib.h>
#include <string.h>

#include "file.h"
#include "tokenizer_parts.h"

/* More than any tokenizer.json has. */
#define LARGEST ((size_t)1 << 29)

struct tfx_tokenizer {
    tfx_normals normals;
    tfx_model model;
    tfx_added added;
    tfx_splits splits;
    tfx_post post;
    int64_t max_length; /* -1: none */
    bool cut_left;
};

tfx_status tfx_part_string(const cJSON *json, const char *key, const char *where, const char **value,
                           tfx_error *error) {
    char path[TFX_WHERE];
    const cJSON *found = tfx_json_get(json, key);
    if (!cJSON_IsString(found)) {
        return tfx_json_wrong(found, tfx_json_path(path, where, key), "a string", error);
    }
    *value = found->valuestring;
    return TFX_OK;
}

tfx_status tfx_part_flag(const cJSON *json, const char *key, const char *where, bool otherwise, bool *value,
                         tfx_error *error) {
    *value = otherwise;
    return tfx_json_given(json, key) == NULL ? TFX_OK : tfx_json_flag(json, key, where, value, error);
}

static tfx_status read_cut(tfx_tokenizer *tokenizer, const cJSON *json, const char *where, tfx_error *error) {
    char path[TFX_WHERE];
    const cJSON *direction = tfx_json_get(tfx_json_given(json, "truncation"), "direction");
    tokenizer->cut_left = cJSON_IsString(direction) && strcmp(direction->valuestring, "Left") == 0;
    if (direction != NULL && !tokenizer->cut_left &&
        !(cJSON_IsString(direction) && strcmp(direction->valuestring, "Right") == 0)) {
        return tfx_json_wrong(direction, tfx_json_path(path, where, "truncation.direction"), "Left or Right", error);
    }
    if (tokenizer->max_length >= 0 && (uint64_t)tokenizer->max_length < tokenizer->post.added) {
        return tfx_fail(error, TFX_INPUT, "%s: adds %zu special tokens, wanted at most %lld, the longest text", where,
                        tokenizer->post.added, (long long)tokenizer->max_length);
    }
    return TFX_OK;
}

static tfx_status read_parts(tfx_tokenizer *made, const cJSON *json, const char *name, tfx_error *error) {
    char path[TFX_WHERE];
    const cJSON *model;
    const cJSON *version = tfx_json_get(json, "version");
    if (version != NULL && !(cJSON_IsString(version) && strcmp(version->valuestring, "1.0") == 0)) {
        return tfx_json_wrong(version, tfx_json_path(path, name, "version"), "1.0", error);
    }
    TFX_TRY(tfx_normals_read(&made->normals, tfx_json_get(json, "normalizer"), tfx_json_path(path, name, "normalizer"),
                             error));
    TFX_TRY(tfx_splits_read(&made->splits, tfx_json_get(json, "pre_tokenizer"),
                            tfx_json_path(path, name, "pre_tokenizer"), error));
    TFX_TRY(tfx_post_read(&made->post, tfx_json_get(json, "post_processor"),
                          tfx_json_path(path, name, "post_processor"), error));
    TFX_TRY(tfx_json_object(json, "model", name, &model, error));
    TFX_TRY(tfx_model_read(&made->model, model, tfx_json_path(path, name, "model"), error));
    TFX_TRY(tfx_added_read(&made->added, tfx_json_get(json, "added_tokens"), tfx_json_path(path, name, "added_tokens"),
                           &made->model.vocab, &made->normals, error));
    return read_cut(made, json, name, error);
}

tfx_status tfx_tokenizer_open(const char *path, int64_t max_length, tfx_tokenizer **tokenizer, tfx_error *error) {
    char *content = NULL;
    size_t size = 0;
    cJSON *json = NULL;
    const char *slash = strrchr(path, '/');
    const char *name = slash == NULL ? path : slash + 1;
    *tokenizer = NULL;
    tfx_tokenizer *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return tfx_no_memory(error);
    }
    made->max_length = max_length;
    tfx_status status = tfx_read_file(path, LARGEST, &content, &size, error);
    if (status == TFX_OK) {
        status = tfx_json_parse(content, size, name, &json, error);
    }
    if (status == TFX_OK) {
        status =
            cJSON_IsObject(json) ? read_parts(made, json, name, error) : tfx_json_wrong(json, name, "an object", error);
    }
    cJSON_Delete(json);
    free(content);
    if (status != TFX_OK) {
        tfx_tokenizer_close(made);
        return status;
    }
    *tokenizer = made;
    return TFX_OK;
}

void tfx_tokenizer_close(tfx_tokenizer *tokenizer) {
    if (tokenizer != NULL) {
        tfx_normals_free(&tokenizer->normals);
        tfx_model_free(&tokenizer->model);
        tfx_added_free(&tokenizer->added);
        tfx_splits_free(&tokenizer->splits);
        tfx_post_free(&tokenizer->post);
        free(tokenizer);
    }
}

/* Normalize what is not a token of its own, and split it at the added tokens that are found only then. */
static tfx_status normalize(const tfx_tokenizer *tokenizer, const tfx_pieces *raw, tfx_pieces *pieces,
                            tfx_error *error) {
    for (size_t i = 0; i < raw->count; i++) {
        const tfx_piece *piece = raw->items + i;
        if (piece->id != TFX_NO_TOKEN) {
            if (!tfx_pieces_add(pieces, 0, 0, piece->id)) {
                return tfx_no_memory(error);
            }
            continue;
        }
        const size_t start = pieces->text.size;
        TFX_TRY(tfx_normals_run(&tokenizer->normals, raw->text.data + piece->start, piece->size, &pieces->text, error));
        if (pieces->text.size > start) {
            TFX_TRY(tfx_added_split(&tokenizer->added, &tokenizer->added.normalized, pieces, start,
                                    pieces->text.size - start, error));
        }
    }
    return TFX_OK;
}

/* Cut a text to pieces; `raw` has the text, and no pieces yet. */
static tfx_status split(const tfx_tokenizer *tokenizer, tfx_pieces *raw, tfx_pieces *pieces, tfx_error *error) {
    if (raw->text.size > 0) {
        TFX_TRY(tfx_added_split(&tokenizer->added, &tokenizer->added.raw, raw, 0, raw->text.size, error));
    }
    TFX_TRY(normalize(tokenizer, raw, pieces, error));
    return tfx_splits_run(&tokenizer->splits, pieces, error);
}

static tfx_status to_ids(const tfx_tokenizer *tokenizer, const tfx_pieces *pieces, tfx_ids *ids, tfx_error *error) {
    tfx_scratch scratch = {0};
    tfx_status status = TFX_OK;
    for (size_t i = 0; i < pieces->count && status == TFX_OK; i++) {
        const tfx_piece *piece = pieces->items + i;
        if (piece->id == TFX_NO_TOKEN) {
            status =
                tfx_model_run(&tokenizer->model, pieces->text.data + piece->start, piece->size, ids, &scratch, error);
        } else if (!tfx_ids_add(ids, piece->id)) {
            status = tfx_no_memory(error);
        }
    }
    free(scratch.symbols);
    free(scratch.heap);
    return status;
}

tfx_status tfx_tokenizer_encode(const tfx_tokenizer *tokenizer, const char *text, size_t bytes, tfx_tokens *tokens,
                                tfx_error *error) {
    tfx_pieces raw = {0};
    tfx_pieces pieces = {0};
    tfx_ids ids = {0};
    *tokens = (tfx_tokens){0};
    const size_t bad = tfx_utf8_check(text, bytes);
    if (bad < bytes) {
        return tfx_fail(error, TFX_INPUT, "not UTF-8 at byte %zu", bad);
    }
    tfx_status status = tfx_text_add(&raw.text, text, bytes) ? TFX_OK : tfx_no_memory(error);
    if (status == TFX_OK) {
        status = split(tokenizer, &raw, &pieces, error);
    }
    if (status == TFX_OK) {
        status = to_ids(tokenizer, &pieces, &ids, error);
    }
    if (status == TFX_OK) {
        const size_t room = tokenizer->max_length < 0 ? SIZE_MAX : (size_t)tokenizer->max_length;
        const size_t most = room - tokenizer->post.added;
        const size_t kept = ids.size < most ? ids.size : most;
        const size_t dropped = ids.size - kept;
        const int64_t *from = tokenizer->cut_left && dropped > 0 ? ids.data + dropped : ids.data;
        status = tfx_post_run(&tokenizer->post, from, kept, tokens, error);
        tokens->dropped = status == TFX_OK ? dropped : 0;
    }
    tfx_pieces_free(&raw);
    tfx_pieces_free(&pieces);
    free(ids.data);
    return status;
}
