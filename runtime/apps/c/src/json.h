/* Checked reading of JSON: every function returns the value in its wanted type or names the bad field. */
#ifndef TFX_JSON_H
#define TFX_JSON_H

#include <cjson/cJSON.h>

#include "error.h"

/*
 * Parse `size` bytes that a NUL follows.
 *
 * name: what the text is called in errors.
 * json: receives the value, released with cJSON_Delete; NULL on failure.
 *
 * TFX_INPUT: no UTF-8, no JSON, something behind it, or a NUL character in a string.
 */
tfx_status tfx_json_parse(const char *content, size_t size, const char *name, cJSON **json, tfx_error *error);

/* Return the member of this name, of several the last; NULL where there is none or `owner` is no object. */
const cJSON *tfx_json_get(const cJSON *owner, const char *key);

/* The same; NULL also where the member is null. */
const cJSON *tfx_json_given(const cJSON *owner, const char *key);

#define TFX_WHERE 256

/* Write the path of a member, "tfx.json: model.file" of "tfx.json: model" and "file", and return `buffer`. */
const char *tfx_json_path(char buffer[TFX_WHERE], const char *where, const char *key);

/* Refuse members that are not among `keys`: a typing mistake must not be read as an option that is not there. */
tfx_status tfx_json_only(const cJSON *owner, const char *const *keys, size_t count, const char *where,
                         tfx_error *error);

/* The error "where: found ..., wanted ..."; `found` NULL says "missing". */
tfx_status tfx_json_wrong(const cJSON *found, const char *where, const char *wanted, tfx_error *error);

/* Check that a member is there and is an object or an array. `where` is the path of the owner. */
tfx_status tfx_json_object(const cJSON *owner, const char *key, const char *where, const cJSON **value,
                           tfx_error *error);
tfx_status tfx_json_array(const cJSON *owner, const char *key, const char *where, const cJSON **value,
                          tfx_error *error);

/* Read a string that is not empty; the pointer is owned by the JSON. */
tfx_status tfx_json_text(const cJSON *owner, const char *key, const char *where, const char **value, tfx_error *error);

/* Read an integer of at least `minimum` and at most 2^53, which JSON numbers hold exactly. */
tfx_status tfx_json_integer(const cJSON *owner, const char *key, const char *where, int64_t minimum, int64_t *value,
                            tfx_error *error);

/* Read an integer that may be null or missing; `otherwise` is its value then. */
tfx_status tfx_json_optional(const cJSON *owner, const char *key, const char *where, int64_t minimum, int64_t otherwise,
                             int64_t *value, tfx_error *error);

/* Read a finite number between two bounds that may be null or missing; NaN then. */
tfx_status tfx_json_number(const cJSON *owner, const char *key, const char *where, double minimum, double maximum,
                           double *value, tfx_error *error);

/* Read a boolean. */
tfx_status tfx_json_flag(const cJSON *owner, const char *key, const char *where, bool *value, tfx_error *error);

#endif
