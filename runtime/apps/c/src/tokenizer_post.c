/* Post-processors: special tokens are put around a text's. */
#include <stdlib.h>
#include <string.h>

#include "tokenizer_parts.h"

static tfx_status add(tfx_post *post, tfx_post_item item, tfx_error *error) {
    tfx_post_item *grown = tfx_grow(post->items, &post->room, post->count + 1, sizeof *grown);
    if (grown == NULL) {
        return tfx_no_memory(error);
    }
    post->items = grown;
    grown[post->count++] = item;
    post->added += item.text ? 0 : 1;
    return TFX_OK;
}

/* Add a special token that is given as ["[CLS]", 101]. */
static tfx_status add_pair(tfx_post *post, const cJSON *json, const char *key, const char *where, tfx_error *error) {
    char path[TFX_WHERE];
    const cJSON *pair = tfx_json_get(json, key);
    const cJSON *id = cJSON_IsArray(pair) && cJSON_IsString(pair->child) ? pair->child->next : NULL;
    if (!cJSON_IsNumber(id) || !(id->valuedouble >= 0 && id->valuedouble <= UINT32_MAX)) {
        return tfx_json_wrong(pair, tfx_json_path(path, where, key), "a token and its id", error);
    }
    return add(post, (tfx_post_item){.id = (int64_t)id->valuedouble}, error);
}

static tfx_status add_around(tfx_post *post, const cJSON *json, const char *where, tfx_error *error) {
    TFX_TRY(add_pair(post, json, "cls", where, error));
    TFX_TRY(add(post, (tfx_post_item){.text = true}, error));
    return add_pair(post, json, "sep", where, error);
}

static tfx_status add_special(tfx_post *post, const cJSON *piece, const cJSON *specials, const char *where,
                              tfx_error *error) {
    const char *name;
    const cJSON *ids;
    const cJSON *id;
    int64_t type;
    TFX_TRY(tfx_part_string(piece, "id", where, &name, error));
    TFX_TRY(tfx_json_integer(piece, "type_id", where, 0, &type, error));
    const cJSON *special = tfx_json_get(specials, name);
    if (special == NULL) {
        return tfx_fail(error, TFX_INPUT, "%s: \"%.80s\" is not among the special tokens", where, name);
    }
    TFX_TRY(tfx_json_array(special, "ids", where, &ids, error));
    cJSON_ArrayForEach(id, ids) {
        if (!cJSON_IsNumber(id) || !(id->valuedouble >= 0 && id->valuedouble <= UINT32_MAX)) {
            return tfx_json_wrong(id, where, "ids of the special token", error);
        }
        TFX_TRY(add(post, (tfx_post_item){.id = (int64_t)id->valuedouble, .type = type}, error));
    }
    return TFX_OK;
}

static tfx_status add_template(tfx_post *post, const cJSON *json, const char *where, tfx_error *error) {
    char path[TFX_WHERE];
    const cJSON *pieces;
    const cJSON *specials;
    const cJSON *piece;
    TFX_TRY(tfx_json_array(json, "single", where, &pieces, error));
    TFX_TRY(tfx_json_object(json, "special_tokens", where, &specials, error));
    tfx_json_path(path, where, "single");
    cJSON_ArrayForEach(piece, pieces) {
        const cJSON *special = tfx_json_get(piece, "SpecialToken");
        const cJSON *sequence = tfx_json_get(piece, "Sequence");
        const cJSON *id = tfx_json_get(sequence, "id");
        if (special != NULL) {
            TFX_TRY(add_special(post, special, specials, path, error));
        } else if (cJSON_IsString(id) && strcmp(id->valuestring, "A") == 0) {
            tfx_post_item item = {.text = true};
            TFX_TRY(tfx_json_integer(sequence, "type_id", path, 0, &item.type, error));
            TFX_TRY(add(post, item, error));
        } else {
            return tfx_json_wrong(id, path, "SpecialToken, or Sequence with id A", error);
        }
    }
    return TFX_OK;
}

/* `*placed`: an earlier processor has placed the text and its special tokens. */
static tfx_status read_one(tfx_post *post, const cJSON *json, const char *where, int depth, bool *placed,
                           tfx_error *error) {
    char path[TFX_WHERE];
    const char *type;
    TFX_TRY(tfx_json_text(json, "type", where, &type, error));
    if (strcmp(type, "ByteLevel") == 0) { /* changes nothing but the tokens' places in the text */
        return TFX_OK;
    }
    if (strcmp(type, "Sequence") == 0) {
        const cJSON *members;
        const cJSON *member;
        if (depth == TFX_DEEPEST) {
            return tfx_fail(error, TFX_INPUT, "%s: Sequences in Sequences, wanted at most %d", where, TFX_DEEPEST);
        }
        TFX_TRY(tfx_json_array(json, "processors", where, &members, error));
        tfx_json_path(path, where, "processors");
        cJSON_ArrayForEach(member, members) {
            TFX_TRY(read_one(post, member, path, depth + 1, placed, error));
        }
        return TFX_OK;
    }
    const bool around = strcmp(type, "BertProcessing") == 0 || strcmp(type, "RobertaProcessing") == 0;
    if (!around && strcmp(type, "TemplateProcessing") != 0) {
        return tfx_json_wrong(tfx_json_get(json, "type"), tfx_json_path(path, where, "type"),
                              "BertProcessing, ByteLevel, RobertaProcessing, Sequence or TemplateProcessing, which "
                              "this code does",
                              error);
    }
    if (*placed) {
        return tfx_fail(error, TFX_INPUT, "%s: found %s behind another, wanted one that adds special tokens", where,
                        type);
    }
    *placed = true;
    return around ? add_around(post, json, where, error) : add_template(post, json, where, error);
}

tfx_status tfx_post_read(tfx_post *post, const cJSON *json, const char *where, tfx_error *error) {
    bool placed = false;
    if (json != NULL && !cJSON_IsNull(json)) {
        TFX_TRY(read_one(post, json, where, 0, &placed, error));
    }
    return placed ? TFX_OK : add(post, (tfx_post_item){.text = true}, error);
}

void tfx_post_free(tfx_post *post) {
    free(post->items);
    *post = (tfx_post){0};
}

tfx_status tfx_post_run(const tfx_post *post, const int64_t *ids, size_t count, tfx_tokens *tokens, tfx_error *error) {
    tfx_ids all = {0};
    tfx_ids types = {0};
    bool complete = true;
    for (size_t i = 0; i < post->count && complete; i++) {
        const tfx_post_item *item = post->items + i;
        for (size_t k = 0; k < (item->text ? count : 1) && complete; k++) {
            complete = tfx_ids_add(&all, item->text ? ids[k] : item->id) && tfx_ids_add(&types, item->type);
        }
    }
    if (!complete) {
        free(all.data);
        free(types.data);
        return tfx_no_memory(error);
    }
    tokens->ids = all.data;
    tokens->types = types.data;
    tokens->count = all.size;
    return TFX_OK;
}
