#include "manifest_rest.h"

#include <math.h>

#define AT(key) TFX_MANIFEST_NAME ": " key
#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static const char *const TOP[] = {"format",    "source", "inputs",    "outputs",  "max_length",   "pad_id", "pooling",
                                  "tokenizer", "target", "precision", "layout",   "model",        "counts", "refusals",
                                  "tolerance", "parity", "files",     "versions", "quantization", "tuning"};
#define REQUIRED_TOP (COUNT(TOP) - 2) /* the last two may be missing */

/* The member is a string; an empty one is allowed. */
static tfx_status check_text(const cJSON *entry, const char *where, tfx_error *error) {
    return cJSON_IsString(entry) ? TFX_OK : tfx_json_wrong(entry, where, "a string", error);
}

/* Check an array of objects of strings, of these keys and no others. */
static tfx_status check_table(const cJSON *owner, const char *key, const char *where, const char *const *keys,
                              size_t count, tfx_error *error) {
    const cJSON *list;
    TFX_TRY(tfx_json_array(owner, key, where, &list, error));
    char path[TFX_WHERE];
    const cJSON *entry;
    cJSON_ArrayForEach(entry, list) {
        tfx_json_path(path, where, key);
        if (!cJSON_IsObject(entry)) {
            return tfx_json_wrong(entry, path, "objects", error);
        }
        TFX_TRY(tfx_json_only(entry, keys, count, path, error));
        for (size_t i = 0; i < count; i++) {
            char inner[TFX_WHERE];
            TFX_TRY(check_text(tfx_json_get(entry, keys[i]), tfx_json_path(inner, path, keys[i]), error));
        }
    }
    return TFX_OK;
}

static tfx_status check_source(const cJSON *top, tfx_error *error) {
    const cJSON *entry;
    const char *text;
    TFX_TRY(tfx_json_object(top, "source", TFX_MANIFEST_NAME, &entry, error));
    TFX_TRY(tfx_json_text(entry, "kind", AT("source"), &text, error));
    TFX_TRY(tfx_json_text(entry, "name", AT("source"), &text, error));
    return tfx_json_given(entry, "sha256") == NULL ? TFX_OK
                                                   : tfx_json_text(entry, "sha256", AT("source"), &text, error);
}

static tfx_status check_pooling(const cJSON *top, tfx_error *error) {
    static const char *const KEYS[] = {"mode", "normalize", "output"};
    static const char *const MODES[] = {"cls", "mean", "max", "last"};
    const cJSON *entry = tfx_json_given(top, "pooling");
    const char *mode;
    bool normalize;
    if (entry == NULL) {
        return TFX_OK;
    }
    TFX_TRY(tfx_json_only(entry, KEYS, COUNT(KEYS), AT("pooling"), error));
    TFX_TRY(tfx_manifest_choice(entry, "mode", AT("pooling"), MODES, COUNT(MODES), &mode, error));
    return tfx_json_flag(entry, "normalize", AT("pooling"), &normalize, error);
}

static tfx_status check_model(const cJSON *top, tfx_error *error) {
    const cJSON *domains;
    const cJSON *domain;
    TFX_TRY(tfx_json_array(tfx_json_get(top, "model"), "domains", AT("model"), &domains, error));
    cJSON_ArrayForEach(domain, domains) {
        TFX_TRY(check_text(domain, AT("model.domains"), error));
    }
    return TFX_OK;
}

static tfx_status check_counts(const cJSON *top, tfx_error *error) {
    static const char *const KEYS[] = {"attention", "layer_norm", "rms_norm", "gelu", "rotary"};
    const cJSON *entry;
    int64_t count;
    TFX_TRY(tfx_json_object(top, "counts", TFX_MANIFEST_NAME, &entry, error));
    TFX_TRY(tfx_json_only(entry, KEYS, COUNT(KEYS), AT("counts"), error));
    for (size_t i = 0; i < COUNT(KEYS); i++) {
        TFX_TRY(tfx_json_integer(entry, KEYS[i], AT("counts"), 0, &count, error));
    }
    return TFX_OK;
}

static tfx_status check_parity(const cJSON *top, tfx_error *error) {
    static const char *const NUMBERS[] = {"max_abs", "min_cosine"};
    const cJSON *entry;
    double number;
    bool passed;
    if (tfx_json_given(top, "parity") == NULL) {
        return TFX_OK;
    }
    TFX_TRY(tfx_json_object(top, "parity", TFX_MANIFEST_NAME, &entry, error));
    TFX_TRY(tfx_json_flag(entry, "passed", AT("parity"), &passed, error));
    for (size_t i = 0; i < COUNT(NUMBERS); i++) {
        char path[TFX_WHERE];
        if (tfx_json_get(entry, NUMBERS[i]) == NULL) {
            return tfx_json_wrong(NULL, tfx_json_path(path, AT("parity"), NUMBERS[i]), "a number or null", error);
        }
        TFX_TRY(tfx_json_number(entry, NUMBERS[i], AT("parity"), -HUGE_VAL, HUGE_VAL, &number, error));
    }
    return TFX_OK;
}

static tfx_status check_versions(const cJSON *top, tfx_error *error) {
    const cJSON *entry;
    const cJSON *version;
    TFX_TRY(tfx_json_object(top, "versions", TFX_MANIFEST_NAME, &entry, error));
    cJSON_ArrayForEach(version, entry) {
        if (!cJSON_IsString(version) || version->valuestring[0] == '\0') {
            char path[TFX_WHERE];
            return tfx_json_wrong(version, tfx_json_path(path, AT("versions"), version->string), "a non-empty string",
                                  error);
        }
    }
    return TFX_OK;
}

static tfx_status check_quantization(const cJSON *top, tfx_error *error) {
    static const char *const KEYS[] = {"scheme", "changed",      "kept",           "calibration",     "cpu",
                                       "notes",  "worst_cosine", "batch_variance", "padding_variance"};
    static const char *const OBJECTS[] = {"calibration", "cpu", "notes"};
    static const char *const KEPT[] = {"where", "reason"};
    const char *where = AT("quantization");
    const cJSON *entry = tfx_json_given(top, "quantization");
    const cJSON *object;
    const char *scheme;
    int64_t changed;
    double number;
    if (entry == NULL) {
        return TFX_OK;
    }
    TFX_TRY(tfx_json_only(entry, KEYS, COUNT(KEYS), where, error));
    TFX_TRY(tfx_json_text(entry, "scheme", where, &scheme, error));
    TFX_TRY(tfx_json_integer(entry, "changed", where, 0, &changed, error));
    TFX_TRY(check_table(entry, "kept", where, KEPT, COUNT(KEPT), error));
    for (size_t i = 0; i < COUNT(OBJECTS); i++) {
        if (tfx_json_get(entry, OBJECTS[i]) != NULL) {
            TFX_TRY(tfx_json_object(entry, OBJECTS[i], where, &object, error));
        }
    }
    TFX_TRY(tfx_json_number(entry, "worst_cosine", where, -1, 1, &number, error));
    return tfx_json_number(entry, "padding_variance", where, 0, HUGE_VAL, &number, error);
}

static tfx_status check_tuning(const tfx_manifest *manifest, tfx_error *error) {
    static const char *const KEYS[] = {"threads", "spinning", "schedule", "log"};
    static const char *const SCHEDULE[] = {"workers", "threads", "batch_tokens"};
    const char *where = AT("tuning");
    const cJSON *entry = tfx_json_given(manifest->json, "tuning");
    const cJSON *schedule;
    const char *log;
    int64_t number;
    if (entry == NULL) {
        return TFX_OK;
    }
    TFX_TRY(tfx_json_only(entry, KEYS, COUNT(KEYS), where, error));
    if (tfx_json_given(entry, "schedule") != NULL) {
        TFX_TRY(tfx_json_object(entry, "schedule", where, &schedule, error));
        TFX_TRY(tfx_json_only(schedule, SCHEDULE, COUNT(SCHEDULE), AT("tuning.schedule"), error));
        for (size_t i = 0; i < COUNT(SCHEDULE); i++) {
            TFX_TRY(tfx_json_integer(schedule, SCHEDULE[i], AT("tuning.schedule"), 1, &number, error));
        }
    }
    if (tfx_json_given(entry, "log") != NULL) {
        TFX_TRY(tfx_manifest_name(entry, "log", where, &log, error));
        if (tfx_manifest_file(manifest, log) == NULL) {
            return tfx_fail(error, TFX_INPUT, "%s: \"%s\" is not among the files", TFX_MANIFEST_NAME, log);
        }
    }
    return TFX_OK;
}

/* Keys of what was read already. */
static tfx_status check_keys(const cJSON *top, tfx_error *error) {
    static const char *const TOKENIZER[] = {"file", "max_length"};
    static const char *const TOLERANCE[] = {"max_abs", "min_cosine", "min_token_cosine"};
    char path[TFX_WHERE];
    TFX_TRY(tfx_json_only(top, TOP, COUNT(TOP), TFX_MANIFEST_NAME, error));
    for (size_t i = 0; i < REQUIRED_TOP; i++) {
        if (tfx_json_get(top, TOP[i]) == NULL) {
            return tfx_json_wrong(NULL, tfx_json_path(path, TFX_MANIFEST_NAME, TOP[i]), "it, or null", error);
        }
    }
    TFX_TRY(tfx_json_only(tfx_json_get(top, "tolerance"), TOLERANCE, COUNT(TOLERANCE), AT("tolerance"), error));
    return tfx_json_only(tfx_json_get(top, "tokenizer"), TOKENIZER, COUNT(TOKENIZER), AT("tokenizer"), error);
}

tfx_status tfx_manifest_check_rest(const tfx_manifest *manifest, tfx_error *error) {
    static const char *const REFUSAL[] = {"rule", "where", "reason"};
    const cJSON *top = manifest->json;
    TFX_TRY(check_keys(top, error));
    TFX_TRY(check_source(top, error));
    TFX_TRY(check_pooling(top, error));
    TFX_TRY(check_model(top, error));
    TFX_TRY(check_counts(top, error));
    TFX_TRY(check_table(top, "refusals", TFX_MANIFEST_NAME, REFUSAL, COUNT(REFUSAL), error));
    TFX_TRY(check_parity(top, error));
    TFX_TRY(check_versions(top, error));
    TFX_TRY(check_quantization(top, error));
    return check_tuning(manifest, error);
}
