/* Added tokens: strings that are found in a text before anything else is done with it. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "file.h"
#include "tokenizer_parts.h"
#include "unicode.h"

/* --- the tree ----------------------------------------------------------------------------------------------------- */

static bool add_node(tfx_trie *trie, unsigned char byte) {
    tfx_trie_node *grown = tfx_grow(trie->nodes, &trie->room, trie->count + 1, sizeof *grown);
    if (grown == NULL) {
        return false;
    }
    trie->nodes = grown;
    grown[trie->count++] = (tfx_trie_node){.byte = byte};
    return true;
}

/* Return the child of a node for a byte, 0 where there is none. */
static size_t child_of(const tfx_trie *trie, size_t node, unsigned char byte) {
    size_t child = trie->nodes[node].child;
    while (child != 0 && trie->nodes[child].byte != byte) {
        child = trie->nodes[child].sibling;
    }
    return child;
}

/* Add a token's string; `*same` receives the token that has it already, index + 1, or 0. */
static bool add_string(tfx_trie *trie, const char *text, size_t size, size_t token, size_t *same) {
    size_t node = 0;
    if (trie->count == 0 && !add_node(trie, 0)) {
        return false;
    }
    for (size_t i = 0; i < size; i++) {
        const unsigned char byte = (unsigned char)text[i];
        size_t child = child_of(trie, node, byte);
        if (child == 0) {
            child = trie->count;
            if (!add_node(trie, byte)) {
                return false;
            }
            trie->nodes[child].sibling = trie->nodes[node].child;
            trie->nodes[node].child = child;
        }
        node = child;
    }
    trie->starts[(unsigned char)text[0]] = true;
    *same = trie->nodes[node].token;
    trie->nodes[node].token = token + 1;
    return true;
}

/* Find the longest string at a place; `*token` receives whose it is. Return its size, 0 where there is none. */
static size_t match(const tfx_trie *trie, const char *text, size_t size, size_t *token) {
    size_t longest = 0;
    size_t node = 0;
    if (!trie->starts[(unsigned char)text[0]]) {
        return 0;
    }
    for (size_t i = 0; i < size; i++) {
        node = child_of(trie, node, (unsigned char)text[i]);
        if (node == 0) {
            break;
        }
        if (trie->nodes[node].token != 0) {
            longest = i + 1;
            *token = trie->nodes[node].token - 1;
        }
    }
    return longest;
}

/* --- reading ------------------------------------------------------------------------------------------------------ */

/* What was read so far. */
typedef struct reading {
    tfx_vocab contents; /* contents to ids */
    tfx_pairs places;   /* ids to places in the list */
    int64_t next;       /* the id that the next token gets that the model does not know */
} reading;

static tfx_status read_token(tfx_added_token *token, const cJSON *json, const char *where, int64_t *id,
                             tfx_error *error) {
    const char *content;
    bool special;
    TFX_TRY(tfx_json_integer(json, "id", where, 0, id, error));
    TFX_TRY(tfx_part_string(json, "content", where, &content, error));
    TFX_TRY(tfx_json_flag(json, "single_word", where, &token->single_word, error));
    TFX_TRY(tfx_json_flag(json, "lstrip", where, &token->left, error));
    TFX_TRY(tfx_json_flag(json, "rstrip", where, &token->right, error));
    TFX_TRY(tfx_json_flag(json, "normalized", where, &token->normalized, error));
    TFX_TRY(tfx_json_flag(json, "special", where, &special, error)); /* of meaning for decoding only */
    token->content = tfx_copy_text(content);
    return token->content == NULL ? tfx_no_memory(error) : TFX_OK;
}

/* Give a token its id: the one it has already, the model's, or the next that is free. */
static tfx_status give_id(reading *so_far, tfx_added_token *token, const tfx_vocab *vocab, int64_t id,
                          const char *where, tfx_error *error) {
    const size_t size = strlen(token->content);
    if (tfx_vocab_find(&so_far->contents, token->content, size, &token->id)) {
        return TFX_OK;
    }
    if (!tfx_vocab_find(vocab, token->content, size, &token->id)) {
        token->id = (uint32_t)so_far->next;
        if (id != so_far->next++) {
            return tfx_fail(error, TFX_INPUT, "%s: found the id %lld for \"%.80s\", wanted %lld, the next one free",
                            where, (long long)id, token->content, (long long)token->id);
        }
    }
    if (tfx_pairs_find(&so_far->places, token->id) != NULL) {
        return tfx_fail(error, TFX_INPUT, "%s: \"%.80s\" has the id %lld of another added token", where, token->content,
                        (long long)token->id);
    }
    return tfx_vocab_put(&so_far->contents, token->content, size, token->id) ? TFX_OK : tfx_no_memory(error);
}

/* Keep a token, in place of one of the same content. It is freed on failure. */
static tfx_status keep(tfx_added *added, reading *so_far, tfx_added_token token, tfx_error *error) {
    const tfx_pair *before = tfx_pairs_find(&so_far->places, token.id);
    if (before != NULL) {
        free(added->tokens[before->first].content);
        added->tokens[before->first] = token;
        return TFX_OK;
    }
    tfx_added_token *grown = tfx_grow(added->tokens, &added->room, added->count + 1, sizeof *grown);
    if (grown != NULL) {
        added->tokens = grown;
    }
    if (grown == NULL || !tfx_pairs_put(&so_far->places, token.id, (uint32_t)added->count, 0)) {
        free(token.content);
        return tfx_no_memory(error);
    }
    grown[added->count++] = token;
    return TFX_OK;
}

static tfx_status read_all(tfx_added *added, reading *so_far, const cJSON *json, const char *where,
                           const tfx_vocab *vocab, tfx_error *error) {
    const cJSON *member;
    size_t number = 0;
    cJSON_ArrayForEach(member, json) {
        char path[TFX_WHERE];
        tfx_added_token token = {0};
        int64_t id;
        snprintf(path, sizeof path, "%.200s[%zu]", where, number++);
        TFX_TRY(read_token(&token, member, path, &id, error));
        if (token.content[0] == '\0') {
            free(token.content);
            continue;
        }
        const tfx_status status = give_id(so_far, &token, vocab, id, path, error);
        if (status != TFX_OK) {
            free(token.content);
            return status;
        }
        TFX_TRY(keep(added, so_far, token, error));
    }
    return TFX_OK;
}

/* Put the tokens' strings, normalized where they ask for it, into the trees. */
static tfx_status build(tfx_added *added, const char *where, const tfx_normals *steps, tfx_error *error) {
    for (size_t i = 0; i < added->count; i++) {
        const tfx_added_token *token = added->tokens + i;
        tfx_trie *trie = token->normalized ? &added->normalized : &added->raw;
        tfx_text text = {0};
        size_t same = 0;
        tfx_status status = TFX_OK;
        if (token->normalized) {
            status = tfx_normals_run(steps, token->content, strlen(token->content), &text, error);
        } else if (!tfx_text_add(&text, token->content, strlen(token->content))) {
            status = tfx_no_memory(error);
        }
        if (status == TFX_OK && text.size == 0) {
            status = tfx_fail(error, TFX_INPUT, "%s: nothing is left of \"%.80s\" when it is normalized", where,
                              token->content);
        }
        if (status == TFX_OK && !add_string(trie, text.data, text.size, i, &same)) {
            status = tfx_no_memory(error);
        }
        if (status == TFX_OK && same != 0) {
            status = tfx_fail(error, TFX_INPUT, "%s: \"%.80s\" and \"%.80s\" are the same when they are normalized",
                              where, added->tokens[same - 1].content, token->content);
        }
        free(text.data);
        TFX_TRY(status);
    }
    return TFX_OK;
}

tfx_status tfx_added_read(tfx_added *added, const cJSON *json, const char *where, const tfx_vocab *vocab,
                          const tfx_normals *steps, tfx_error *error) {
    reading so_far = {.next = (int64_t)vocab->count};
    if (json == NULL) {
        return TFX_OK;
    }
    if (!cJSON_IsArray(json)) {
        return tfx_json_wrong(json, where, "an array", error);
    }
    const tfx_status status = read_all(added, &so_far, json, where, vocab, error);
    tfx_vocab_free(&so_far.contents);
    tfx_pairs_free(&so_far.places);
    return status == TFX_OK ? build(added, where, steps, error) : status;
}

void tfx_added_free(tfx_added *added) {
    for (size_t i = 0; i < added->count; i++) {
        free(added->tokens[i].content);
    }
    free(added->tokens);
    free(added->raw.nodes);
    free(added->normalized.nodes);
    *added = (tfx_added){0};
}

/* --- splitting ---------------------------------------------------------------------------------------------------- */

static bool word_before(const char *text, size_t at) {
    if (at == 0) {
        return false;
    }
    size_t start = at - tfx_utf8_before(text, at);
    return tfx_is(TFX_IS_WORD, tfx_utf8_read(text, &start));
}

static bool word_at(const char *text, size_t at, size_t size) {
    return at < size && tfx_is(TFX_IS_WORD, tfx_utf8_read(text, &at));
}

/* Return where the white space before `at` starts. */
static size_t white_before(const char *text, size_t at) {
    while (at > 0) {
        const size_t start = at - tfx_utf8_before(text, at);
        size_t next = start;
        if (!tfx_is(TFX_IS_WHITE, tfx_utf8_read(text, &next))) {
            break;
        }
        at = start;
    }
    return at;
}

static size_t white_behind(const char *text, size_t at, size_t size) {
    while (at < size) {
        size_t next = at;
        if (!tfx_is(TFX_IS_WHITE, tfx_utf8_read(text, &next))) {
            break;
        }
        at = next;
    }
    return at;
}

tfx_status tfx_added_split(const tfx_added *added, const tfx_trie *trie, tfx_pieces *pieces, size_t start, size_t size,
                           tfx_error *error) {
    const char *text = pieces->text.data + start;
    size_t done = 0; /* what is before is in pieces */
    size_t index = 0;
    for (size_t at = 0; at < size && trie->count > 0;) {
        const size_t length = match(trie, text + at, size - at, &index);
        size_t first = at;
        size_t last = at + length;
        at += length > 0 ? length : 1; /* the search goes on behind the match itself */
        if (length == 0) {
            continue;
        }
        const tfx_added_token *token = added->tokens + index;
        if (token->single_word && (word_before(text, first) || word_at(text, last, size))) {
            continue;
        }
        if (token->left) {
            first = white_before(text, first);
            first = first > done ? first : done; /* a token before may have taken the white space */
        }
        if (token->right) {
            last = white_behind(text, last, size);
        }
        if (first > last) {
            return tfx_fail(error, TFX_INPUT, "\"%.80s\" stands where the added token before it has taken all",
                            token->content);
        }
        if ((done < first && !tfx_pieces_add(pieces, start + done, first - done, TFX_NO_TOKEN)) ||
            (first < last && !tfx_pieces_add(pieces, 0, 0, token->id))) {
            return tfx_no_memory(error);
        }
        done = last;
    }
    return done >= size || tfx_pieces_add(pieces, start + done, size - done, TFX_NO_TOKEN) ? TFX_OK
                                                                                           : tfx_no_memory(error);
}
