/* The parts of a tokenizer, in the order in which a text goes through them. */
#ifndef TFX_TOKENIZER_PARTS_H
#define TFX_TOKENIZER_PARTS_H

#include "error.h"
#include "json.h"
#include "lists.h"
#include "maps.h"

/* How deep Sequences may hold Sequences. */
#define TFX_DEEPEST 16

/* Every `..._read` below takes a part's JSON and its path for errors, and what it reads is released by `..._free`. */

/*
 * Read a member that may be the empty string.
 *
 * TFX_INPUT: it is missing or no string.
 */
tfx_status tfx_part_string(const cJSON *json, const char *key, const char *where, const char **value, tfx_error *error);

/* Read a boolean that may be missing or null; it is `otherwise` then. */
tfx_status tfx_part_flag(const cJSON *json, const char *key, const char *where, bool otherwise, bool *value,
                         tfx_error *error);

/* --- normalizer: what is done to a text before it is split ------------------------------------------------------- */

typedef enum tfx_normal_kind {
    TFX_NORMAL_BERT,
    TFX_NORMAL_LOWER,
    TFX_NORMAL_FORM, /* NFC, NFD, NFKC, NFKD */
    TFX_NORMAL_NO_ACCENTS,
    TFX_NORMAL_STRIP,
    TFX_NORMAL_REPLACE,
    TFX_NORMAL_PREPEND,
    TFX_NORMAL_BYTES
} tfx_normal_kind;

typedef struct tfx_normal {
    tfx_normal_kind kind;
    bool clean, cjk, accents, lower; /* Bert: what is done; `accents`: they are removed */
    bool compatible, compose;        /* the form */
    bool left, right;                /* Strip: the sides */
    tfx_points from, to;             /* Replace; Prepend has `to` */
} tfx_normal;

/* Steps, Sequences taken apart. */
typedef struct tfx_normals {
    tfx_normal *items;
    size_t count, room;
} tfx_normals;

tfx_status tfx_normals_read(tfx_normals *steps, const cJSON *json, const char *where, tfx_error *error);

/* Normalize valid UTF-8 and add the result to `text`. */
tfx_status tfx_normals_run(const tfx_normals *steps, const char *data, size_t size, tfx_text *text, tfx_error *error);

void tfx_normals_free(tfx_normals *steps);

/* Write the decomposed, and then perhaps composed, form in place. */
tfx_status tfx_unicode_form(tfx_points *points, bool compatible, bool compose, tfx_error *error);

/* Return the character that stands for a byte in byte-level tokens. */
uint32_t tfx_byte_point(unsigned char byte);

/* --- added tokens: found in the text as they are ------------------------------------------------------------------ */

typedef struct tfx_added_token {
    uint32_t id;
    bool single_word, left, right, normalized;
    char *content;
} tfx_added_token;

/* A tree of bytes: the children of a node are a list of siblings. */
typedef struct tfx_trie_node {
    size_t child, sibling; /* 0: none */
    size_t token;          /* index + 1, 0: none ends here */
    unsigned char byte;
} tfx_trie_node;

typedef struct tfx_trie {
    tfx_trie_node *nodes; /* the first is the root */
    size_t count, room;
    bool starts[256]; /* bytes that a token starts with */
} tfx_trie;

typedef struct tfx_added {
    tfx_added_token *tokens;
    size_t count, room;
    tfx_trie raw, normalized; /* matched before and after normalization */
} tfx_added;

/*
 * Read `added_tokens`.
 *
 * vocab: of the model; it gives the ids of those it holds.
 */
tfx_status tfx_added_read(tfx_added *added, const cJSON *json, const char *where, const tfx_vocab *vocab,
                          const tfx_normals *steps, tfx_error *error);

/* Split `size` bytes of the text of `pieces` at the tokens of a trie, and add what that gives. */
tfx_status tfx_added_split(const tfx_added *added, const tfx_trie *trie, tfx_pieces *pieces, size_t start, size_t size,
                           tfx_error *error);

void tfx_added_free(tfx_added *added);

/* --- pre-tokenizer: where a text is split ------------------------------------------------------------------------- */

typedef enum tfx_pattern {
    TFX_PATTERN_CLASS,   /* each code point of a class */
    TFX_PATTERN_LITERAL, /* a string that is not empty */
    TFX_PATTERN_WORDS,   /* \w+|[^\w\s]+ */
    TFX_PATTERN_GPT2
} tfx_pattern;

typedef enum tfx_behavior { TFX_REMOVED, TFX_ISOLATED, TFX_WITH_PREVIOUS, TFX_WITH_NEXT, TFX_CONTIGUOUS } tfx_behavior;

typedef struct tfx_split {
    bool bytes; /* not a split: bytes are written as the characters that stand for them */
    bool space; /* not a split: a space is put in front of pieces without one */
    tfx_pattern pattern;
    int of; /* tfx_class of the pattern */
    char *literal;
    bool invert;
    tfx_behavior behavior;
} tfx_split;

/* Steps, Sequences taken apart. */
typedef struct tfx_splits {
    tfx_split *items;
    size_t count, room;
} tfx_splits;

tfx_status tfx_splits_read(tfx_splits *steps, const cJSON *json, const char *where, tfx_error *error);

/* Split the pieces that are no tokens. */
tfx_status tfx_splits_run(const tfx_splits *steps, tfx_pieces *pieces, tfx_error *error);

void tfx_splits_free(tfx_splits *steps);

/*
 * Find the next match of a pattern in text[at..end).
 *
 * Return false where there is none.
 */
bool tfx_pattern_next(const tfx_split *split, const char *text, size_t at, size_t end, size_t *start, size_t *stop);

/* --- model: a piece to ids ---------------------------------------------------------------------------------------- */

typedef struct tfx_bpe {
    tfx_pairs merges; /* two ids to the merge's rank and the id it makes */
    char *prefix, *suffix;
    bool fuse_unk, byte_fallback, ignore_merges;
    int64_t bytes[256]; /* ids of "<0x00>" and on, or TFX_NO_TOKEN */
} tfx_bpe;

typedef enum tfx_model_kind { TFX_MODEL_WORDPIECE, TFX_MODEL_WORDLEVEL, TFX_MODEL_BPE } tfx_model_kind;

typedef struct tfx_model {
    tfx_model_kind kind;
    tfx_vocab vocab;
    char *unk;       /* NULL: none */
    int64_t unk_id;  /* TFX_NO_TOKEN where the vocabulary does not have it */
    char *prefix;    /* WordPiece: in front of what continues a word */
    int64_t longest; /* WordPiece: characters of the longest word that is taken apart */
    tfx_bpe bpe;
} tfx_model;

/* Memory that words share, released with free. */
typedef struct tfx_scratch {
    void *symbols, *heap;
    size_t symbol_room, heap_room;
} tfx_scratch;

tfx_status tfx_model_read(tfx_model *model, const cJSON *json, const char *where, tfx_error *error);

/* Add the ids of a piece that is not empty. */
tfx_status tfx_model_run(const tfx_model *model, const char *text, size_t size, tfx_ids *ids, tfx_scratch *scratch,
                         tfx_error *error);

void tfx_model_free(tfx_model *model);

/* The parts of tfx_model_read and tfx_model_run that are BPE. */
tfx_status tfx_bpe_read(tfx_model *model, const cJSON *json, const char *where, tfx_error *error);
tfx_status tfx_bpe_run(const tfx_model *model, const char *text, size_t size, tfx_ids *ids, tfx_scratch *scratch,
                       tfx_error *error);

/* The error for a word that needs the unknown token where there is none in the vocabulary. */
tfx_status tfx_no_unk(const tfx_model *model, tfx_error *error);

/* --- post-processor: special tokens around a text's --------------------------------------------------------------- */

typedef struct tfx_post_item {
    bool text; /* here stands the text */
    int64_t id, type;
} tfx_post_item;

typedef struct tfx_post {
    tfx_post_item *items;
    size_t count, room;
    size_t added; /* items that are special tokens */
} tfx_post;

tfx_status tfx_post_read(tfx_post *post, const cJSON *json, const char *where, tfx_error *error);

/* Put `count` ids where the text stands. */
tfx_status tfx_post_run(const tfx_post *post, const int64_t *ids, size_t count, tfx_tokens *tokens, tfx_error *error);

void tfx_post_free(tfx_post *post);

#endif
