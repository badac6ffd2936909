/* Byte pair encoding: the characters of a word are merged in the order of the merges' ranks. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "file.h"
#include "tokenizer_parts.h"
#include "unicode.h"

#define NOWHERE SIZE_MAX

/* --- reading ------------------------------------------------------------------------------------------------------ */

/* Read a string that may be missing or null; NULL then. */
static tfx_status read_optional(const cJSON *json, const char *key, const char *where, char **value, tfx_error *error) {
    const char *text;
    if (tfx_json_given(json, key) == NULL) {
        return TFX_OK;
    }
    TFX_TRY(tfx_part_string(json, key, where, &text, error));
    *value = tfx_copy_text(text);
    return *value == NULL ? tfx_no_memory(error) : TFX_OK;
}

/* Add the merge of two tokens, `a` of `a_size` bytes. */
static tfx_status add_merge(tfx_model *model, const char *a, size_t a_size, const char *b, uint32_t rank,
                            const char *where, tfx_error *error) {
    const size_t b_size = strlen(b);
    const size_t skipped = model->bpe.prefix == NULL ? 0 : strlen(model->bpe.prefix);
    uint32_t first;
    uint32_t second;
    uint32_t made;
    if (b_size < skipped) {
        return tfx_fail(error, TFX_INPUT, "%s[%u]: \"%.80s\" is shorter than the prefix of what continues a word",
                        where, (unsigned)rank, b);
    }
    const uint64_t hash = tfx_hash(tfx_hash(TFX_HASH_START, a, a_size), b + skipped, b_size - skipped);
    if (!tfx_vocab_find(&model->vocab, a, a_size, &first) || !tfx_vocab_find(&model->vocab, b, b_size, &second) ||
        !tfx_vocab_find_parts(&model->vocab, hash, a, a_size, b + skipped, b_size - skipped, &made)) {
        return tfx_fail(error, TFX_INPUT, "%s[%u]: \"%.*s\" and \"%.80s\", or both together, are not in the vocabulary",
                        where, (unsigned)rank, (int)(a_size > 80 ? 80 : a_size), a, b);
    }
    const uint64_t key = (uint64_t)first << 32 | second;
    return tfx_pairs_put(&model->bpe.merges, key, rank, made) ? TFX_OK : tfx_no_memory(error);
}

static tfx_status read_merges(tfx_model *model, const cJSON *merges, const char *where, tfx_error *error) {
    const cJSON *merge;
    const bool lines = merges->child != NULL && cJSON_IsString(merges->child);
    uint32_t rank = 0;
    cJSON_ArrayForEach(merge, merges) {
        const cJSON *first = cJSON_IsArray(merge) ? merge->child : NULL;
        const cJSON *second = first == NULL ? NULL : first->next;
        if (lines && cJSON_IsString(merge)) {
            const char *line = merge->valuestring;
            const char *space = strchr(line, ' ');
            if (strncmp(line, "#version", 8) == 0) {
                continue;
            }
            if (space == NULL || strchr(space + 1, ' ') != NULL) {
                return tfx_fail(error, TFX_INPUT, "%s[%u]: found \"%.80s\", wanted two tokens with a space between",
                                where, (unsigned)rank, line);
            }
            TFX_TRY(add_merge(model, line, (size_t)(space - line), space + 1, rank, where, error));
        } else if (!lines && cJSON_IsString(first) && cJSON_IsString(second) && second->next == NULL) {
            TFX_TRY(add_merge(model, first->valuestring, strlen(first->valuestring), second->valuestring, rank, where,
                              error));
        } else {
            return tfx_fail(error, TFX_INPUT, "%s[%u]: wanted two tokens, as the first merge has them", where,
                            (unsigned)rank);
        }
        rank++;
    }
    return TFX_OK;
}

tfx_status tfx_bpe_read(tfx_model *model, const cJSON *json, const char *where, tfx_error *error) {
    char path[TFX_WHERE];
    const cJSON *merges;
    const cJSON *dropout = tfx_json_given(json, "dropout");
    tfx_bpe *bpe = &model->bpe;
    uint32_t id;
    if (dropout != NULL && !(cJSON_IsNumber(dropout) && fpclassify(dropout->valuedouble) == FP_ZERO)) {
        return tfx_json_wrong(dropout, tfx_json_path(path, where, "dropout"), "null: tokens are not drawn by chance",
                              error);
    }
    TFX_TRY(read_optional(json, "unk_token", where, &model->unk, error));
    TFX_TRY(read_optional(json, "continuing_subword_prefix", where, &bpe->prefix, error));
    TFX_TRY(read_optional(json, "end_of_word_suffix", where, &bpe->suffix, error));
    TFX_TRY(tfx_part_flag(json, "fuse_unk", where, false, &bpe->fuse_unk, error));
    TFX_TRY(tfx_part_flag(json, "byte_fallback", where, false, &bpe->byte_fallback, error));
    TFX_TRY(tfx_part_flag(json, "ignore_merges", where, false, &bpe->ignore_merges, error));
    if (model->unk != NULL && tfx_vocab_find(&model->vocab, model->unk, strlen(model->unk), &id)) {
        model->unk_id = id;
    }
    for (int byte = 0; byte < 256; byte++) {
        char name[8];
        const int size = snprintf(name, sizeof name, "<0x%02X>", (unsigned)byte);
        bpe->bytes[byte] = tfx_vocab_find(&model->vocab, name, (size_t)size, &id) ? (int64_t)id : TFX_NO_TOKEN;
    }
    TFX_TRY(tfx_json_array(json, "merges", where, &merges, error));
    return read_merges(model, merges, tfx_json_path(path, where, "merges"), error);
}

/* --- the symbols of a word ---------------------------------------------------------------------------------------- */

typedef struct symbol {
    uint32_t id;
    bool gone; /* merged into the one before it */
    size_t previous, next;
} symbol;

typedef struct word {
    symbol *symbols;
    size_t count;
    size_t heap_count;
    tfx_scratch *scratch;
} word;

static bool add_symbol(word *made, int64_t id) {
    symbol *grown = tfx_grow(made->scratch->symbols, &made->scratch->symbol_room, made->count + 1, sizeof *grown);
    if (grown == NULL) {
        return false;
    }
    made->scratch->symbols = made->symbols = grown;
    if (made->count > 0) {
        grown[made->count - 1].next = made->count;
    }
    grown[made->count] = (symbol){(uint32_t)id, false, made->count == 0 ? NOWHERE : made->count - 1, NOWHERE};
    made->count++;
    return true;
}

/*
 * Look up one character of a word, with what is put around it by its place.
 *
 * Return its id, TFX_NO_TOKEN where the vocabulary does not have it.
 */
static int64_t find_character(const tfx_model *model, const char *text, size_t start, size_t stop, size_t size) {
    const tfx_bpe *bpe = &model->bpe;
    const bool head = start > 0 && bpe->prefix != NULL;
    const bool tail = stop == size && bpe->suffix != NULL;
    uint32_t id;
    if (!head && !tail) {
        return tfx_vocab_find(&model->vocab, text + start, stop - start, &id) ? (int64_t)id : TFX_NO_TOKEN;
    }
    const char *prefix = head ? bpe->prefix : "";
    const char *suffix = tail ? bpe->suffix : "";
    tfx_text whole = {0};
    const bool complete = tfx_text_add(&whole, prefix, strlen(prefix)) &&
                          tfx_text_add(&whole, text + start, stop - start) &&
                          tfx_text_add(&whole, suffix, strlen(suffix));
    const bool found = complete && tfx_vocab_find(&model->vocab, whole.data, whole.size, &id);
    free(whole.data);
    return found ? (int64_t)id : TFX_NO_TOKEN;
}

/*
 * Add the bytes of a character, with what is put around it, as tokens of their own.
 *
 * Return false where one of them has none; nothing is added then.
 */
static bool add_bytes(const tfx_model *model, const char *text, size_t start, size_t stop, size_t size, word *made,
                      bool *complete) {
    const tfx_bpe *bpe = &model->bpe;
    const char *parts[3] = {start > 0 && bpe->prefix != NULL ? bpe->prefix : "", text + start,
                            stop == size && bpe->suffix != NULL ? bpe->suffix : ""};
    const size_t sizes[3] = {strlen(parts[0]), stop - start, strlen(parts[2])};
    for (int write = 0; write < 2; write++) {
        for (size_t i = 0; i < 3; i++) {
            for (size_t k = 0; k < sizes[i]; k++) {
                const int64_t id = bpe->bytes[(unsigned char)parts[i][k]];
                if (id == TFX_NO_TOKEN) {
                    return false;
                }
                *complete = *complete && (write == 0 || add_symbol(made, id));
            }
        }
    }
    return true;
}

/* The unknown token stands in the word when the next known character comes: bytes in between go before it. */
static tfx_status spell(const tfx_model *model, const char *text, size_t size, word *made, tfx_error *error) {
    bool complete = true;
    bool unknown = false;
    for (size_t start = 0; start < size && complete;) {
        size_t stop = start;
        tfx_utf8_read(text, &stop);
        const int64_t id = find_character(model, text, start, stop, size);
        if (id != TFX_NO_TOKEN) {
            complete = (!unknown || add_symbol(made, model->unk_id)) && add_symbol(made, id);
            unknown = false;
        } else if (model->bpe.byte_fallback && add_bytes(model, text, start, stop, size, made, &complete)) {
            /* done */
        } else if (model->unk != NULL) {
            if (model->unk_id == TFX_NO_TOKEN) {
                return tfx_no_unk(model, error);
            }
            complete = !unknown || model->bpe.fuse_unk || add_symbol(made, model->unk_id);
            unknown = true;
        }
        start = stop;
    }
    complete = complete && (!unknown || add_symbol(made, model->unk_id));
    return complete ? TFX_OK : tfx_no_memory(error);
}

/* --- merging ------------------------------------------------------------------------------------------------------ */

typedef struct merge {
    size_t place; /* of the left symbol */
    uint32_t rank, made;
} merge;

static bool earlier(const merge *one, const merge *other) {
    return one->rank != other->rank ? one->rank < other->rank : one->place < other->place;
}

/* Add the merge of a symbol with the next one to the heap, if there is one. */
static bool push(const tfx_model *model, word *made, size_t place) {
    const size_t next = made->symbols[place].next;
    if (next == NOWHERE) {
        return true;
    }
    const uint64_t key = (uint64_t)made->symbols[place].id << 32 | made->symbols[next].id;
    const tfx_pair *pair = tfx_pairs_find(&model->bpe.merges, key);
    if (pair == NULL) {
        return true;
    }
    merge *heap = tfx_grow(made->scratch->heap, &made->scratch->heap_room, made->heap_count + 1, sizeof *heap);
    if (heap == NULL) {
        return false;
    }
    made->scratch->heap = heap;
    const merge added = {place, pair->first, pair->second};
    size_t at = made->heap_count++;
    for (; at > 0 && earlier(&added, heap + (at - 1) / 2); at = (at - 1) / 2) {
        heap[at] = heap[(at - 1) / 2];
    }
    heap[at] = added;
    return true;
}

static merge pop(word *made) {
    merge *heap = made->scratch->heap;
    const merge top = heap[0];
    const merge last = heap[--made->heap_count];
    size_t at = 0;
    for (size_t child = 1; child < made->heap_count; child = 2 * at + 1) {
        if (child + 1 < made->heap_count && earlier(heap + child + 1, heap + child)) {
            child++;
        }
        if (!earlier(heap + child, &last)) {
            break;
        }
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = last;
    return top;
}

static bool merge_all(const tfx_model *model, word *made) {
    for (size_t i = 0; i + 1 < made->count; i++) {
        if (!push(model, made, i)) {
            return false;
        }
    }
    while (made->heap_count > 0) {
        const merge top = pop(made);
        symbol *left = made->symbols + top.place;
        if (left->gone || left->next == NOWHERE) {
            continue;
        }
        symbol *right = made->symbols + left->next;
        const tfx_pair *pair = tfx_pairs_find(&model->bpe.merges, (uint64_t)left->id << 32 | right->id);
        if (pair == NULL || pair->second != top.made) { /* one of the two was merged with another since */
            continue;
        }
        left->id = top.made;
        left->next = right->next;
        right->gone = true;
        if (right->next != NOWHERE) {
            made->symbols[right->next].previous = top.place;
        }
        if ((left->previous != NOWHERE && !push(model, made, left->previous)) || !push(model, made, top.place)) {
            return false;
        }
    }
    return true;
}

tfx_status tfx_bpe_run(const tfx_model *model, const char *text, size_t size, tfx_ids *ids, tfx_scratch *scratch,
                       tfx_error *error) {
    word made = {.scratch = scratch};
    uint32_t id;
    if (model->bpe.ignore_merges && tfx_vocab_find(&model->vocab, text, size, &id)) {
        return tfx_ids_add(ids, id) ? TFX_OK : tfx_no_memory(error);
    }
    TFX_TRY(spell(model, text, size, &made, error));
    if (!merge_all(model, &made)) {
        return tfx_no_memory(error);
    }
    for (size_t i = 0; i < made.count; i++) {
        if (!made.symbols[i].gone && !tfx_ids_add(ids, made.symbols[i].id)) {
            return tfx_no_memory(error);
        }
    }
    return TFX_OK;
}
