#include "json.h"

#include <math.h>
#include <string.h>

#include "file.h"

#define LARGEST 9007199254740992.0 /* 2^53 */

/* cJSON ends a string at a NUL character: what is behind it would be lost without a word. */
static bool has_nul(const char *content) {
    for (const char *at = content; (at = strchr(at, '\\')) != NULL && at[1] != '\0'; at += 2) {
        if (strncmp(at + 1, "u0000", 5) == 0) {
            return true;
        }
    }
    return false;
}

tfx_status tfx_json_parse(const char *content, size_t size, const char *name, cJSON **json, tfx_error *error) {
    *json = NULL;
    const size_t bad = tfx_utf8_check(content, size);
    if (bad < size) {
        return tfx_fail(error, TFX_INPUT, "%s: not UTF-8 at byte %zu", name, bad);
    }
    if (strlen(content) < size || has_nul(content)) {
        return tfx_fail(error, TFX_INPUT, "%s: holds a NUL character", name);
    }
    const char *end = NULL;
    *json = cJSON_ParseWithLengthOpts(content, size + 1, &end, true);
    if (*json == NULL) {
        const size_t place = end == NULL || end < content ? 0 : (size_t)(end - content);
        return tfx_fail(error, TFX_INPUT, "%s: not JSON at byte %zu", name, place);
    }
    return TFX_OK;
}

const cJSON *tfx_json_get(const cJSON *owner, const char *key) {
    const cJSON *found = NULL;
    const cJSON *member;
    if (!cJSON_IsObject(owner)) {
        return NULL;
    }
    cJSON_ArrayForEach(member, owner) {
        if (member->string != NULL && strcmp(member->string, key) == 0) {
            found = member;
        }
    }
    return found;
}

const cJSON *tfx_json_given(const cJSON *owner, const char *key) {
    const cJSON *found = tfx_json_get(owner, key);
    return cJSON_IsNull(found) ? NULL : found;
}

tfx_status tfx_json_wrong(const cJSON *found, const char *where, const char *wanted, tfx_error *error) {
    if (found == NULL) {
        return tfx_fail(error, TFX_INPUT, "%s: missing, wanted %s", where, wanted);
    }
    if (cJSON_IsString(found)) {
        return tfx_fail(error, TFX_INPUT, "%s: found \"%.80s\", wanted %s", where, found->valuestring, wanted);
    }
    if (cJSON_IsNumber(found)) {
        return tfx_fail(error, TFX_INPUT, "%s: found %.17g, wanted %s", where, found->valuedouble, wanted);
    }
    const char *kind = cJSON_IsObject(found)  ? "an object"
                       : cJSON_IsArray(found) ? "an array"
                       : cJSON_IsTrue(found)  ? "true"
                       : cJSON_IsFalse(found) ? "false"
                                              : "null";
    return tfx_fail(error, TFX_INPUT, "%s: found %s, wanted %s", where, kind, wanted);
}

tfx_status tfx_json_only(const cJSON *owner, const char *const *keys, size_t count, const char *where,
                         tfx_error *error) {
    const cJSON *member;
    cJSON_ArrayForEach(member, owner) {
        size_t i = 0;
        while (i < count && strcmp(keys[i], member->string) != 0) {
            i++;
        }
        if (i == count) {
            return tfx_fail(error, TFX_INPUT, "%s: found the unknown key \"%.80s\"", where, member->string);
        }
    }
    return TFX_OK;
}

const char *tfx_json_path(char buffer[TFX_WHERE], const char *where, const char *key) {
    snprintf(buffer, TFX_WHERE, "%.150s%s%.90s", where, strchr(where, ' ') == NULL ? ": " : ".", key);
    return buffer;
}

tfx_status tfx_json_object(const cJSON *owner, const char *key, const char *where, const cJSON **value,
                           tfx_error *error) {
    char path[TFX_WHERE];
    *value = tfx_json_get(owner, key);
    return cJSON_IsObject(*value) ? TFX_OK
                                  : tfx_json_wrong(*value, tfx_json_path(path, where, key), "an object", error);
}

tfx_status tfx_json_array(const cJSON *owner, const char *key, const char *where, const cJSON **value,
                          tfx_error *error) {
    char path[TFX_WHERE];
    *value = tfx_json_get(owner, key);
    return cJSON_IsArray(*value) ? TFX_OK : tfx_json_wrong(*value, tfx_json_path(path, where, key), "an array", error);
}

tfx_status tfx_json_text(const cJSON *owner, const char *key, const char *where, const char **value, tfx_error *error) {
    char path[TFX_WHERE];
    const cJSON *found = tfx_json_get(owner, key);
    if (!cJSON_IsString(found) || found->valuestring[0] == '\0') {
        return tfx_json_wrong(found, tfx_json_path(path, where, key), "a non-empty string", error);
    }
    *value = found->valuestring;
    return TFX_OK;
}

tfx_status tfx_json_integer(const cJSON *owner, const char *key, const char *where, int64_t minimum, int64_t *value,
                            tfx_error *error) {
    char path[TFX_WHERE];
    char wanted[64];
    const cJSON *found = tfx_json_get(owner, key);
    const double number = cJSON_IsNumber(found) ? found->valuedouble : NAN;
    if (!(number >= (double)minimum && number <= LARGEST) || number != floor(number)) {
        snprintf(wanted, sizeof wanted, "an integer of at least %lld", (long long)minimum);
        return tfx_json_wrong(found, tfx_json_path(path, where, key), wanted, error);
    }
    *value = (int64_t)number;
    return TFX_OK;
}

tfx_status tfx_json_optional(const cJSON *owner, const char *key, const char *where, int64_t minimum, int64_t otherwise,
                             int64_t *value, tfx_error *error) {
    if (tfx_json_given(owner, key) == NULL) {
        *value = otherwise;
        return TFX_OK;
    }
    return tfx_json_integer(owner, key, where, minimum, value, error);
}

tfx_status tfx_json_number(const cJSON *owner, const char *key, const char *where, double minimum, double maximum,
                           double *value, tfx_error *error) {
    char path[TFX_WHERE];
    char wanted[96];
    const cJSON *found = tfx_json_given(owner, key);
    *value = NAN;
    if (found == NULL) {
        return TFX_OK;
    }
    const double number = cJSON_IsNumber(found) ? found->valuedouble : NAN;
    if (!isfinite(number) || number < minimum || number > maximum) {
        snprintf(wanted, sizeof wanted, "a finite number of %g to %g", minimum, maximum);
        return tfx_json_wrong(found, tfx_json_path(path, where, key), wanted, error);
    }
    *value = number;
    return TFX_OK;
}

tfx_status tfx_json_flag(const cJSON *owner, const char *key, const char *where, bool *value, tfx_error *error) {
    char path[TFX_WHERE];
    const cJSON *found = tfx_json_get(owner, key);
    if (!cJSON_IsBool(found)) {
        return tfx_json_wrong(found, tfx_json_path(path, where, key), "true or false", error);
    }
    *value = cJSON_IsTrue(found) != 0;
    return TFX_OK;
}
