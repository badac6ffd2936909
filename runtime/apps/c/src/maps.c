#include "maps.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define LEAST_SLOTS 64

uint64_t tfx_hash(uint64_t state, const char *data, size_t size) { /* FNV-1a */
    for (size_t i = 0; i < size; i++) {
        state = (state ^ (unsigned char)data[i]) * UINT64_C(0x100000001B3);
    }
    return state;
}

/* Spread a hash over `slot_count` slots. */
static size_t first_slot(uint64_t hash, size_t slot_count) {
    hash *= UINT64_C(0x9E3779B97F4A7C15);
    return (size_t)(hash ^ hash >> 32) & (slot_count - 1);
}

static bool same(const tfx_vocab *vocab, const tfx_word *word, const char *head, size_t head_size, const char *tail,
                 size_t tail_size) {
    if (word->size != head_size + tail_size) {
        return false;
    }
    const char *text = vocab->pool.data + word->start;
    return (head_size == 0 || memcmp(text, head, head_size) == 0) &&
           (tail_size == 0 || memcmp(text + head_size, tail, tail_size) == 0);
}

/* Return the slot of a string, or the free one where it belongs. */
static tfx_word *word_slot(const tfx_vocab *vocab, uint64_t hash, const char *head, size_t head_size, const char *tail,
                           size_t tail_size) {
    for (size_t i = first_slot(hash, vocab->slot_count);; i = (i + 1) & (vocab->slot_count - 1)) {
        tfx_word *word = vocab->slots + i;
        if (!word->used || (word->hash == hash && same(vocab, word, head, head_size, tail, tail_size))) {
            return word;
        }
    }
}

/* Keep at least half of the slots free. */
static bool more_words(tfx_vocab *vocab) {
    if (vocab->count < vocab->slot_count / 2) {
        return true;
    }
    tfx_vocab larger = *vocab;
    larger.slot_count = vocab->slot_count == 0 ? LEAST_SLOTS : vocab->slot_count * 2;
    larger.slots = calloc(larger.slot_count, sizeof *larger.slots);
    if (larger.slots == NULL) {
        return false;
    }
    for (size_t i = 0; i < vocab->slot_count; i++) {
        const tfx_word *word = vocab->slots + i;
        if (word->used) {
            *word_slot(&larger, word->hash, vocab->pool.data + word->start, word->size, NULL, 0) = *word;
        }
    }
    free(vocab->slots);
    *vocab = larger;
    return true;
}

bool tfx_vocab_put(tfx_vocab *vocab, const char *text, size_t size, uint32_t id) {
    if (!more_words(vocab)) {
        return false;
    }
    const uint64_t hash = tfx_hash(TFX_HASH_START, text, size);
    tfx_word *word = word_slot(vocab, hash, text, size, NULL, 0);
    if (!word->used) {
        const size_t start = vocab->pool.size;
        if (!tfx_text_add(&vocab->pool, text, size)) {
            return false;
        }
        *word = (tfx_word){hash, start, size, id, true};
        vocab->count++;
        vocab->longest = size > vocab->longest ? size : vocab->longest;
    }
    word->id = id;
    return true;
}

bool tfx_vocab_find_parts(const tfx_vocab *vocab, uint64_t hash, const char *head, size_t head_size, const char *tail,
                          size_t tail_size, uint32_t *id) {
    if (vocab->count == 0) {
        return false;
    }
    const tfx_word *word = word_slot(vocab, hash, head, head_size, tail, tail_size);
    *id = word->id;
    return word->used;
}

bool tfx_vocab_find(const tfx_vocab *vocab, const char *text, size_t size, uint32_t *id) {
    return tfx_vocab_find_parts(vocab, tfx_hash(TFX_HASH_START, text, size), text, size, NULL, 0, id);
}

tfx_status tfx_vocab_read(tfx_vocab *vocab, const cJSON *object, const char *where, tfx_error *error) {
    char path[TFX_WHERE];
    if (!cJSON_IsObject(object)) {
        return tfx_json_wrong(object, where, "an object of token ids", error);
    }
    const cJSON *member;
    cJSON_ArrayForEach(member, object) {
        const double id = cJSON_IsNumber(member) ? member->valuedouble : -1;
        if (!(id >= 0 && id <= UINT32_MAX) || id != floor(id)) {
            return tfx_json_wrong(member, tfx_json_path(path, where, member->string), "an integer of 0 to 4294967295",
                                  error);
        }
        if (!tfx_vocab_put(vocab, member->string, strlen(member->string), (uint32_t)id)) {
            return tfx_no_memory(error);
        }
    }
    return TFX_OK;
}

void tfx_vocab_free(tfx_vocab *vocab) {
    free(vocab->pool.data);
    free(vocab->slots);
    *vocab = (tfx_vocab){0};
}

/* Return the slot of a key, or the free one where it belongs. */
static tfx_pair *pair_slot(const tfx_pairs *pairs, uint64_t key) {
    for (size_t i = first_slot(key, pairs->slot_count);; i = (i + 1) & (pairs->slot_count - 1)) {
        tfx_pair *pair = pairs->slots + i;
        if (!pair->used || pair->key == key) {
            return pair;
        }
    }
}

static bool more_pairs(tfx_pairs *pairs) {
    if (pairs->count < pairs->slot_count / 2) {
        return true;
    }
    tfx_pairs larger = *pairs;
    larger.slot_count = pairs->slot_count == 0 ? LEAST_SLOTS : pairs->slot_count * 2;
    larger.slots = calloc(larger.slot_count, sizeof *larger.slots);
    if (larger.slots == NULL) {
        return false;
    }
    for (size_t i = 0; i < pairs->slot_count; i++) {
        if (pairs->slots[i].used) {
            *pair_slot(&larger, pairs->slots[i].key) = pairs->slots[i];
        }
    }
    free(pairs->slots);
    *pairs = larger;
    return true;
}

bool tfx_pairs_put(tfx_pairs *pairs, uint64_t key, uint32_t first, uint32_t second) {
    if (!more_pairs(pairs)) {
        return false;
    }
    tfx_pair *pair = pair_slot(pairs, key);
    pairs->count += pair->used ? 0 : 1;
    *pair = (tfx_pair){key, first, second, true};
    return true;
}

const tfx_pair *tfx_pairs_find(const tfx_pairs *pairs, uint64_t key) {
    if (pairs->count == 0) {
        return NULL;
    }
    const tfx_pair *pair = pair_slot(pairs, key);
    return pair->used ? pair : NULL;
}

void tfx_pairs_free(tfx_pairs *pairs) {
    free(pairs->slots);
    *pairs = (tfx_pairs){0};
}
