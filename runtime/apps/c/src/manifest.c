#include "manifest.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "file.h"
#include "json.h"
#include "manifest_rest.h"
#include "tensor.h"

#define LARGEST ((size_t)16 << 20) /* bytes of a tfx.json */

static const char *const ROLES[] = {"token_ids",      "attention_mask", "padding_mask",
                                    "token_type_ids", "position_ids",   "features"};
static const char *const LAYOUTS[] = {"padded", "ragged"};

/* Whether a file name cannot leave its folder: no separators, drives, dots alone or control characters. */
static bool is_bare(const char *name) {
    if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0 || strlen(name) > 255) {
        return false;
    }
    for (const char *c = name; *c != '\0'; c++) {
        if ((unsigned char)*c < 0x20 || strchr("/\\:<>\"|?*", *c) != NULL) {
            return false;
        }
    }
    return true;
}

tfx_status tfx_manifest_name(const cJSON *owner, const char *key, const char *where, const char **name,
                             tfx_error *error) {
    TFX_TRY(tfx_json_text(owner, key, where, name, error));
    if (!is_bare(*name)) {
        char path[TFX_WHERE];
        return tfx_json_wrong(tfx_json_get(owner, key), tfx_json_path(path, where, key),
                              "a bare file name inside the bundle", error);
    }
    return TFX_OK;
}

tfx_status tfx_manifest_choice(const cJSON *owner, const char *key, const char *where, const char *const *options,
                               size_t count, const char **value, tfx_error *error) {
    TFX_TRY(tfx_json_text(owner, key, where, value, error));
    char wanted[160] = "one of";
    for (size_t i = 0; i < count; i++) {
        if (strcmp(*value, options[i]) == 0) {
            return TFX_OK;
        }
        const size_t used = strlen(wanted);
        snprintf(wanted + used, sizeof wanted - used, "%s %s", i == 0 ? "" : ",", options[i]);
    }
    char path[TFX_WHERE];
    return tfx_json_wrong(tfx_json_get(owner, key), tfx_json_path(path, where, key), wanted, error);
}

static tfx_status read_shape(const cJSON *entry, const char *where, tfx_spec *spec, tfx_error *error) {
    const cJSON *axes;
    TFX_TRY(tfx_json_array(entry, "shape", where, &axes, error));
    const cJSON *axis;
    cJSON_ArrayForEach(axis, axes) {
        const bool named = cJSON_IsString(axis) && axis->valuestring[0] != '\0';
        const double size = cJSON_IsNumber(axis) ? axis->valuedouble : 0;
        if (spec->rank == TFX_MAX_RANK) {
            return tfx_fail(error, TFX_INPUT, "%s.shape: found more than %d axes", where, TFX_MAX_RANK);
        }
        if (!named && !(size >= 1 && size <= 2147483647.0 && size == floor(size))) {
            return tfx_json_wrong(axis, where, "axes that are names or sizes of at least 1", error);
        }
        spec->axes[spec->rank] = named ? axis->valuestring : NULL;
        spec->shape[spec->rank++] = named ? -1 : (int64_t)size;
    }
    return TFX_OK;
}

static tfx_status read_spec(const cJSON *entry, const char *where, bool output, tfx_spec *spec, tfx_error *error) {
    static const char *const KEYS[] = {"name", "dtype", "shape", "role", "limit"};
    const char *dtype;
    TFX_TRY(tfx_json_only(entry, KEYS, output ? 3 : 5, where, error));
    TFX_TRY(tfx_json_text(entry, "name", where, &spec->name, error));
    TFX_TRY(tfx_json_text(entry, "dtype", where, &dtype, error));
    spec->dtype = tfx_dtype_of(dtype);
    TFX_TRY(read_shape(entry, where, spec, error));
    spec->role = "output";
    if (!output) {
        TFX_TRY(tfx_manifest_choice(entry, "role", where, ROLES, sizeof ROLES / sizeof ROLES[0], &spec->role, error));
        TFX_TRY(tfx_json_optional(entry, "limit", where, 1, 0, &spec->limit, error));
    }
    const bool ignores = strcmp(spec->role, "padding_mask") == 0; /* of floats it would be added to the scores */
    if (tfx_dtype_name(spec->dtype) == NULL || (ignores && tfx_is_float(spec->dtype))) {
        return tfx_fail(error, TFX_INPUT, "%s.dtype: found \"%.80s\", wanted a type that a %s has", where, dtype,
                        output ? "tensor" : spec->role);
    }
    return TFX_OK;
}

static tfx_status read_specs(const cJSON *top, const char *key, bool output, tfx_spec **specs, size_t *count,
                             tfx_error *error) {
    const cJSON *list;
    TFX_TRY(tfx_json_array(top, key, TFX_MANIFEST_NAME, &list, error));
    const int length = cJSON_GetArraySize(list);
    if (length < 1) {
        return tfx_fail(error, TFX_INPUT, "%s: %s: found none, wanted at least one", TFX_MANIFEST_NAME, key);
    }
    if (length > TFX_MOST_TENSORS) {
        return tfx_fail(error, TFX_INPUT, "%s: %s: found %d, wanted at most %d", TFX_MANIFEST_NAME, key, length,
                        TFX_MOST_TENSORS);
    }
    *specs = calloc((size_t)length, sizeof **specs);
    if (*specs == NULL) {
        return tfx_no_memory(error);
    }
    const cJSON *entry;
    cJSON_ArrayForEach(entry, list) {
        char where[64];
        snprintf(where, sizeof where, "%s: %s[%zu]", TFX_MANIFEST_NAME, key, *count);
        if (!cJSON_IsObject(entry)) {
            return tfx_json_wrong(entry, where, "an object", error);
        }
        TFX_TRY(read_spec(entry, where, output, &(*specs)[*count], error));
        for (size_t i = 0; i < *count; i++) {
            if (strcmp((*specs)[i].name, (*specs)[*count].name) == 0) {
                return tfx_fail(error, TFX_INPUT, "%s: found \"%s\" twice", where, (*specs)[i].name);
            }
        }
        ++*count;
    }
    return TFX_OK;
}

static tfx_status read_digest(const cJSON *entry, const char *where, const char **digest, tfx_error *error) {
    TFX_TRY(tfx_json_text(entry, "sha256", where, digest, error));
    size_t digits = 0;
    while (isdigit((unsigned char)(*digest)[digits]) || ((*digest)[digits] >= 'a' && (*digest)[digits] <= 'f')) {
        digits++;
    }
    if (digits != TFX_SHA256_DIGITS || (*digest)[digits] != '\0') {
        return tfx_fail(error, TFX_INPUT, "%s.sha256: found \"%.80s\", wanted 64 hexadecimal digits", where, *digest);
    }
    return TFX_OK;
}

static tfx_status read_files(const cJSON *top, tfx_manifest *manifest, tfx_error *error) {
    const cJSON *files;
    TFX_TRY(tfx_json_object(top, "files", TFX_MANIFEST_NAME, &files, error));
    const int length = cJSON_GetArraySize(files);
    if (length > TFX_MOST_FILES) {
        return tfx_fail(error, TFX_INPUT, "%s: files: found %d, wanted at most %d", TFX_MANIFEST_NAME, length,
                        TFX_MOST_FILES);
    }
    manifest->files = calloc(length > 0 ? (size_t)length : 1, sizeof *manifest->files);
    if (manifest->files == NULL) {
        return tfx_no_memory(error);
    }
    const cJSON *entry;
    cJSON_ArrayForEach(entry, files) {
        tfx_file *file = &manifest->files[manifest->file_count];
        const char *name = entry->string;
        char where[160];
        snprintf(where, sizeof where, "%s: files[\"%.100s\"]", TFX_MANIFEST_NAME, name);
        if (name[0] == '\0' || !is_bare(name) || strcmp(name, TFX_MANIFEST_NAME) == 0) {
            return tfx_fail(error, TFX_INPUT, "%s: wanted a bare file name inside the bundle", where);
        }
        if (!cJSON_IsObject(entry)) {
            return tfx_json_wrong(entry, where, "an object", error);
        }
        file->name = name;
        TFX_TRY(tfx_json_integer(entry, "bytes", where, 0, &file->bytes, error));
        TFX_TRY(read_digest(entry, where, &file->sha256, error));
        manifest->file_count++;
    }
    return TFX_OK;
}

/* What may be null or missing: pooling, tokenizer, quantization, tuning. */
static tfx_status read_optional(const cJSON *top, tfx_manifest *manifest, tfx_error *error) {
    const cJSON *entry;
    manifest->tokenizer_max_length = -1;
    manifest->batch_variance = NAN;
    manifest->spinning = true;
    if (tfx_json_given(top, "pooling") != NULL) {
        TFX_TRY(tfx_json_object(top, "pooling", TFX_MANIFEST_NAME, &entry, error));
        TFX_TRY(tfx_json_text(entry, "output", TFX_MANIFEST_NAME ": pooling", &manifest->pooled, error));
        if (tfx_manifest_output(manifest, manifest->pooled) == NULL) {
            return tfx_fail(error, TFX_INPUT, "%s: pooling.output: found \"%s\", wanted one of the outputs",
                            TFX_MANIFEST_NAME, manifest->pooled);
        }
    }
    if (tfx_json_given(top, "tokenizer") != NULL) {
        const char *where = TFX_MANIFEST_NAME ": tokenizer";
        TFX_TRY(tfx_json_object(top, "tokenizer", TFX_MANIFEST_NAME, &entry, error));
        TFX_TRY(tfx_manifest_name(entry, "file", where, &manifest->tokenizer, error));
        TFX_TRY(tfx_json_optional(entry, "max_length", where, 1, -1, &manifest->tokenizer_max_length, error));
    }
    if (tfx_json_given(top, "quantization") != NULL) {
        TFX_TRY(tfx_json_object(top, "quantization", TFX_MANIFEST_NAME, &entry, error));
        TFX_TRY(tfx_json_number(entry, "batch_variance", TFX_MANIFEST_NAME ": quantization", 0, HUGE_VAL,
                                &manifest->batch_variance, error));
    }
    if (tfx_json_given(top, "tuning") != NULL) {
        const char *where = TFX_MANIFEST_NAME ": tuning";
        TFX_TRY(tfx_json_object(top, "tuning", TFX_MANIFEST_NAME, &entry, error));
        TFX_TRY(tfx_json_optional(entry, "threads", where, 1, 0, &manifest->threads, error));
        if (tfx_json_given(entry, "spinning") != NULL) {
            TFX_TRY(tfx_json_flag(entry, "spinning", where, &manifest->spinning, error));
        }
    }
    return TFX_OK;
}

static tfx_status read_tolerance(const cJSON *top, tfx_manifest *manifest, tfx_error *error) {
    const char *where = TFX_MANIFEST_NAME ": tolerance";
    const cJSON *entry;
    TFX_TRY(tfx_json_object(top, "tolerance", TFX_MANIFEST_NAME, &entry, error));
    TFX_TRY(tfx_json_number(entry, "max_abs", where, 0, HUGE_VAL, &manifest->max_abs, error));
    TFX_TRY(tfx_json_number(entry, "min_cosine", where, -1, 1, &manifest->min_cosine, error));
    return tfx_json_number(entry, "min_token_cosine", where, -1, 1, &manifest->min_token_cosine, error);
}

static tfx_status check_listed(const tfx_manifest *manifest, const char *name, tfx_error *error) {
    if (name != NULL && tfx_manifest_file(manifest, name) == NULL) {
        return tfx_fail(error, TFX_INPUT, "%s: \"%s\" is not among the files", TFX_MANIFEST_NAME, name);
    }
    return TFX_OK;
}

static tfx_status read_all(tfx_manifest *manifest, tfx_error *error) {
    const char *where = TFX_MANIFEST_NAME;
    const cJSON *top = manifest->json;
    const cJSON *model;
    int64_t format;
    if (!cJSON_IsObject(top)) {
        return tfx_json_wrong(top, where, "an object", error);
    }
    TFX_TRY(tfx_json_integer(top, "format", where, 1, &format, error));
    if (format > TFX_MANIFEST_FORMAT) {
        return tfx_fail(error, TFX_INPUT,
                        "%s: format: found %lld, this app reads format %d; make it anew with a newer tfx", where,
                        (long long)format, TFX_MANIFEST_FORMAT);
    }
    TFX_TRY(read_specs(top, "inputs", false, &manifest->inputs, &manifest->input_count, error));
    TFX_TRY(read_specs(top, "outputs", true, &manifest->outputs, &manifest->output_count, error));
    TFX_TRY(tfx_json_optional(top, "max_length", where, 1, -1, &manifest->max_length, error));
    TFX_TRY(tfx_json_integer(top, "pad_id", where, 0, &manifest->pad_id, error));
    TFX_TRY(tfx_json_text(top, "target", where, &manifest->target, error));
    TFX_TRY(tfx_json_text(top, "precision", where, &manifest->precision, error));
    TFX_TRY(tfx_manifest_choice(top, "layout", where, LAYOUTS, sizeof LAYOUTS / sizeof LAYOUTS[0], &manifest->layout,
                                error));
    TFX_TRY(tfx_json_object(top, "model", where, &model, error));
    TFX_TRY(tfx_manifest_name(model, "file", TFX_MANIFEST_NAME ": model", &manifest->model, error));
    TFX_TRY(tfx_json_integer(model, "opset", TFX_MANIFEST_NAME ": model", 1, &manifest->opset, error));
    TFX_TRY(tfx_json_integer(model, "ir_version", TFX_MANIFEST_NAME ": model", 1, &manifest->ir_version, error));
    TFX_TRY(read_tolerance(top, manifest, error));
    TFX_TRY(read_files(top, manifest, error));
    TFX_TRY(read_optional(top, manifest, error));
    TFX_TRY(check_listed(manifest, manifest->model, error));
    TFX_TRY(check_listed(manifest, manifest->tokenizer, error));
    return tfx_manifest_check_rest(manifest, error);
}

tfx_status tfx_manifest_read(const char *path, tfx_manifest *manifest, tfx_error *error) {
    memset(manifest, 0, sizeof *manifest);
    char *content;
    size_t size;
    TFX_TRY(tfx_read_file(path, LARGEST, &content, &size, error));
    tfx_status status = tfx_json_parse(content, size, TFX_MANIFEST_NAME, &manifest->json, error);
    free(content);
    if (status == TFX_OK) {
        status = read_all(manifest, error);
    }
    if (status != TFX_OK) {
        tfx_manifest_free(manifest);
    }
    return status;
}

void tfx_manifest_free(tfx_manifest *manifest) {
    free(manifest->inputs);
    free(manifest->outputs);
    free(manifest->files);
    cJSON_Delete(manifest->json);
    memset(manifest, 0, sizeof *manifest);
}

const tfx_file *tfx_manifest_file(const tfx_manifest *manifest, const char *name) {
    for (size_t i = 0; i < manifest->file_count; i++) {
        if (strcmp(manifest->files[i].name, name) == 0) {
            return &manifest->files[i];
        }
    }
    return NULL;
}

const tfx_spec *tfx_manifest_output(const tfx_manifest *manifest, const char *name) {
    for (size_t i = 0; i < manifest->output_count; i++) {
        if (strcmp(manifest->outputs[i].name, name) == 0) {
            return &manifest->outputs[i];
        }
    }
    return NULL;
}

bool tfx_has_axis(const tfx_spec *spec, size_t i, const char *name) {
    return i < spec->rank && spec->axes[i] != NULL && strcmp(spec->axes[i], name) == 0;
}
