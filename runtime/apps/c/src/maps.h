/* Hash maps with open addressing; all start as {0}. */
#ifndef TFX_MAPS_H
#define TFX_MAPS_H

#include "error.h"
#include "json.h"
#include "lists.h"

/* Continue a hash over more bytes; a string's hash is that of its parts one after the other. */
uint64_t tfx_hash(uint64_t state, const char *data, size_t size);

#define TFX_HASH_START UINT64_C(0xCBF29CE484222325)

typedef struct tfx_word {
    uint64_t hash;
    size_t start, size; /* in the pool */
    uint32_t id;
    bool used;
} tfx_word;

/* Strings to ids. */
typedef struct tfx_vocab {
    tfx_text pool;
    tfx_word *slots;
    size_t slot_count; /* a power of 2, or 0 */
    size_t count;
    size_t longest; /* bytes of the longest string */
} tfx_vocab;

/* Set the id of a string, which need not be new; false without memory. */
bool tfx_vocab_put(tfx_vocab *vocab, const char *text, size_t size, uint32_t id);

/* Look up a string; false where it is not there. */
bool tfx_vocab_find(const tfx_vocab *vocab, const char *text, size_t size, uint32_t *id);

/* Look up `head` and `tail` put together, whose hash is given. */
bool tfx_vocab_find_parts(const tfx_vocab *vocab, uint64_t hash, const char *head, size_t head_size, const char *tail,
                          size_t tail_size, uint32_t *id);

/*
 * Add every member of a JSON object of ids.
 *
 * TFX_INPUT: no object, or a value that is no integer of 0 to 2^32 - 1; `where` is its path. TFX_MACHINE: no memory.
 */
tfx_status tfx_vocab_read(tfx_vocab *vocab, const cJSON *object, const char *where, tfx_error *error);

void tfx_vocab_free(tfx_vocab *vocab);

typedef struct tfx_pair {
    uint64_t key;
    uint32_t first, second;
    bool used;
} tfx_pair;

/* Integers to two integers. */
typedef struct tfx_pairs {
    tfx_pair *slots;
    size_t slot_count;
    size_t count;
} tfx_pairs;

/* Set the values of a key, which need not be new; false without memory. */
bool tfx_pairs_put(tfx_pairs *pairs, uint64_t key, uint32_t first, uint32_t second);

/* Return the entry of a key, NULL where it is not there. */
const tfx_pair *tfx_pairs_find(const tfx_pairs *pairs, uint64_t key);

void tfx_pairs_free(tfx_pairs *pairs);

#endif
