/* Models: WordPiece and WordLevel; BPE has its own file. */
#include <stdlib.h>
#include <string.h>

#include "file.h"
#include "tokenizer_parts.h"
#include "unicode.h"

static tfx_status copy(char **copied, const char *text, tfx_error *error) {
    *copied = tfx_copy_text(text);
    return *copied == NULL ? tfx_no_memory(error) : TFX_OK;
}

static tfx_status read_unk(tfx_model *model, const cJSON *json, const char *where, tfx_error *error) {
    const char *unk;
    uint32_t id;
    TFX_TRY(tfx_part_string(json, "unk_token", where, &unk, error));
    TFX_TRY(copy(&model->unk, unk, error));
    model->unk_id = tfx_vocab_find(&model->vocab, unk, strlen(unk), &id) ? (int64_t)id : TFX_NO_TOKEN;
    return TFX_OK;
}

tfx_status tfx_model_read(tfx_model *model, const cJSON *json, const char *where, tfx_error *error) {
    char path[TFX_WHERE];
    const char *type;
    model->unk_id = TFX_NO_TOKEN;
    TFX_TRY(tfx_json_text(json, "type", where, &type, error));
    const bool piece = strcmp(type, "WordPiece") == 0;
    const bool bpe = strcmp(type, "BPE") == 0;
    if (!piece && !bpe && strcmp(type, "WordLevel") != 0) {
        return tfx_json_wrong(tfx_json_get(json, "type"), tfx_json_path(path, where, "type"),
                              "BPE, WordLevel or WordPiece, which this code does", error);
    }
    model->kind = piece ? TFX_MODEL_WORDPIECE : bpe ? TFX_MODEL_BPE : TFX_MODEL_WORDLEVEL;
    TFX_TRY(tfx_vocab_read(&model->vocab, tfx_json_get(json, "vocab"), tfx_json_path(path, where, "vocab"), error));
    if (bpe) {
        return tfx_bpe_read(model, json, where, error);
    }
    TFX_TRY(read_unk(model, json, where, error));
    if (piece) {
        const char *prefix;
        TFX_TRY(tfx_part_string(json, "continuing_subword_prefix", where, &prefix, error));
        TFX_TRY(copy(&model->prefix, prefix, error));
        TFX_TRY(tfx_json_integer(json, "max_input_chars_per_word", where, 0, &model->longest, error));
    }
    return TFX_OK;
}

void tfx_model_free(tfx_model *model) {
    tfx_vocab_free(&model->vocab);
    tfx_pairs_free(&model->bpe.merges);
    free(model->bpe.prefix);
    free(model->bpe.suffix);
    free(model->unk);
    free(model->prefix);
    *model = (tfx_model){0};
}

tfx_status tfx_no_unk(const tfx_model *model, tfx_error *error) {
    return tfx_fail(error, TFX_INPUT,
                    "has a word that is not in the vocabulary, and neither is the unknown token \"%s\"",
                    model->unk == NULL ? "" : model->unk);
}

static tfx_status add_unk(const tfx_model *model, tfx_ids *ids, tfx_error *error) {
    if (model->unk_id == TFX_NO_TOKEN) {
        return tfx_no_unk(model, error);
    }
    return tfx_ids_add(ids, model->unk_id) ? TFX_OK : tfx_no_memory(error);
}

/*
 * Find the longest entry of the vocabulary that text[start..size) begins with.
 *
 * hashes: memory for as many as the vocabulary's longest entry has bytes.
 *
 * Return its size, 0 where there is none.
 */
static size_t longest_entry(const tfx_model *model, const char *text, size_t start, size_t size, uint64_t *hashes,
                            uint32_t *id) {
    const char *head = start == 0 ? "" : model->prefix;
    const size_t head_size = strlen(head);
    if (head_size > model->vocab.longest) {
        return 0;
    }
    const size_t room = model->vocab.longest - head_size;
    const size_t most = room < size - start ? room : size - start;
    uint64_t hash = tfx_hash(TFX_HASH_START, head, head_size);
    for (size_t i = 0; i < most; i++) {
        hash = hashes[i] = tfx_hash(hash, text + start + i, 1);
    }
    for (size_t length = most; length > 0; length--) {
        const bool whole = start + length == size || ((unsigned char)text[start + length] & 0xC0U) != 0x80U;
        if (whole &&
            tfx_vocab_find_parts(&model->vocab, hashes[length - 1], head, head_size, text + start, length, id)) {
            return length;
        }
    }
    return 0;
}

static tfx_status run_wordpiece(const tfx_model *model, const char *text, size_t size, tfx_ids *ids,
                                tfx_scratch *scratch, tfx_error *error) {
    int64_t characters = 0;
    for (size_t at = 0; at < size; characters++) {
        tfx_utf8_read(text, &at);
    }
    if (characters > model->longest) {
        return add_unk(model, ids, error);
    }
    uint64_t *hashes = tfx_grow(scratch->heap, &scratch->heap_room, model->vocab.longest + 1, sizeof *hashes);
    if (hashes == NULL) {
        return tfx_no_memory(error);
    }
    scratch->heap = hashes;
    const size_t before = ids->size;
    for (size_t at = 0; at < size;) {
        uint32_t id;
        const size_t length = longest_entry(model, text, at, size, hashes, &id);
        if (length == 0) { /* no way to the end: the word as a whole is unknown */
            ids->size = before;
            return add_unk(model, ids, error);
        }
        if (!tfx_ids_add(ids, id)) {
            return tfx_no_memory(error);
        }
        at += length;
    }
    return TFX_OK;
}

tfx_status tfx_model_run(const tfx_model *model, const char *text, size_t size, tfx_ids *ids, tfx_scratch *scratch,
                         tfx_error *error) {
    uint32_t id;
    switch (model->kind) {
        case TFX_MODEL_WORDPIECE: return run_wordpiece(model, text, size, ids, scratch, error);
        case TFX_MODEL_WORDLEVEL:
            if (!tfx_vocab_find(&model->vocab, text, size, &id)) {
                return add_unk(model, ids, error);
            }
            return tfx_ids_add(ids, id) ? TFX_OK : tfx_no_memory(error);
        case TFX_MODEL_BPE: return tfx_bpe_run(model, text, size, ids, scratch, error);
    }
    return TFX_OK;
}
