#include "golden.h"

#include <stdlib.h>
#include <string.h>

#include "file.h"
#include "json.h"
#include "tensor.h"

#define MOST_CASES 10000
#define INPUTS "inputs/"
#define OUTPUTS "outputs/"

/* Return what follows "<case id>/<kind>" in a tensor's name, NULL where it is another case's or kind's. */
static const char *inner_name(const char *name, const char *id, const char *kind) {
    const size_t length = strlen(id);
    if (strncmp(name, id, length) != 0 || name[length] != '/' || strncmp(name + length + 1, kind, strlen(kind)) != 0) {
        return NULL;
    }
    const char *inner = name + length + 1 + strlen(kind);
    return inner[0] == '\0' ? NULL : inner;
}

static tfx_status read_texts(const cJSON *entry, const char *where, int64_t batch, tfx_case *result, tfx_error *error) {
    const cJSON *texts = tfx_json_given(entry, "texts");
    if (texts == NULL) {
        return TFX_OK;
    }
    const int count = cJSON_IsArray(texts) ? cJSON_GetArraySize(texts) : -1;
    if (count < 0 || count != batch) {
        return tfx_fail(error, TFX_INPUT, "%s.texts: wanted a list of %lld texts, one per row", where,
                        (long long)batch);
    }
    result->texts = calloc((size_t)count, sizeof *result->texts);
    if (result->texts == NULL) {
        return tfx_no_memory(error);
    }
    const cJSON *text;
    cJSON_ArrayForEach(text, texts) {
        if (!cJSON_IsString(text)) {
            return tfx_json_wrong(text, where, "texts that are strings", error);
        }
        result->texts[result->text_count++] = text->valuestring;
    }
    return TFX_OK;
}

static tfx_status read_case(tfx_golden *golden, const cJSON *entry, tfx_error *error) {
    char where[64];
    int64_t batch;
    tfx_case *result = &golden->cases[golden->count];
    snprintf(where, sizeof where, "golden: cases[%zu]", golden->count);
    golden->count++; /* at once, so that what it holds is released whatever happens */
    if (!cJSON_IsObject(entry)) {
        return tfx_json_wrong(entry, where, "an object", error);
    }
    TFX_TRY(tfx_json_text(entry, "id", where, &result->id, error));
    TFX_TRY(tfx_json_integer(entry, "batch", where, 1, &batch, error));
    if (strchr(result->id, '/') != NULL) {
        return tfx_fail(error, TFX_INPUT, "%s.id: found \"%.80s\", wanted no slash", where, result->id);
    }
    return read_texts(entry, where, batch, result, error);
}

static tfx_status read_cases(tfx_golden *golden, tfx_error *error) {
    const char *path = golden->file.path;
    const char *listing = tfx_safetensors_metadata(&golden->file, "cases");
    if (listing == NULL) {
        return tfx_fail(error, TFX_INPUT, "%s: no case list in the metadata", path);
    }
    TFX_TRY(tfx_json_parse(listing, strlen(listing), path, &golden->listing, error));
    const int count = cJSON_IsArray(golden->listing) ? cJSON_GetArraySize(golden->listing) : 0;
    if (count < 1 || count > MOST_CASES) {
        return tfx_fail(error, TFX_INPUT, "%s: found %d cases, wanted 1 to %d", path, count, MOST_CASES);
    }
    golden->cases = calloc((size_t)count, sizeof *golden->cases);
    if (golden->cases == NULL) {
        return tfx_no_memory(error);
    }
    const cJSON *entry;
    cJSON_ArrayForEach(entry, golden->listing) {
        TFX_TRY(read_case(golden, entry, error));
    }
    for (size_t i = 1; i < golden->count; i++) {
        for (size_t j = 0; j < i; j++) {
            if (strcmp(golden->cases[i].id, golden->cases[j].id) == 0) {
                return tfx_fail(error, TFX_INPUT, "%s: case %s is there twice", path, golden->cases[i].id);
            }
        }
    }
    return TFX_OK;
}

/* Find out which case every tensor belongs to. */
static tfx_status assign(tfx_golden *golden, tfx_error *error) {
    const tfx_safetensors *file = &golden->file;
    golden->owners = calloc(file->count > 0 ? file->count : 1, sizeof *golden->owners);
    if (golden->owners == NULL) {
        return tfx_no_memory(error);
    }
    size_t last = 0; /* a case's tensors are neighbours in the file */
    for (size_t i = 0; i < file->count; i++) {
        const char *name = file->items[i].name;
        bool found = false;
        for (size_t step = 0; step < golden->count && !found; step++) {
            const size_t candidate = (last + step) % golden->count;
            tfx_case *each = &golden->cases[candidate];
            const bool input = inner_name(name, each->id, INPUTS) != NULL;
            found = input || inner_name(name, each->id, OUTPUTS) != NULL;
            if (found) {
                golden->owners[i] = last = candidate;
                ++*(input ? &each->input_count : &each->output_count);
            }
        }
        if (!found) {
            return tfx_fail(error, TFX_INPUT, "%s: tensor %s belongs to no case", file->path, name);
        }
    }
    for (size_t i = 0; i < golden->count; i++) {
        if (golden->cases[i].input_count == 0 || golden->cases[i].output_count == 0) {
            return tfx_fail(error, TFX_INPUT, "%s: case %s has no inputs or no outputs", file->path,
                            golden->cases[i].id);
        }
    }
    return TFX_OK;
}

tfx_status tfx_golden_open(const char *path, tfx_golden *golden, tfx_error *error) {
    memset(golden, 0, sizeof *golden);
    TFX_TRY(tfx_safetensors_open(path, &golden->file, error));
    tfx_status status = read_cases(golden, error);
    if (status == TFX_OK) {
        status = assign(golden, error);
    }
    if (status != TFX_OK) {
        tfx_golden_close(golden);
    }
    return status;
}

static tfx_status read_tensors(const tfx_golden *golden, size_t index, const char *kind, size_t count,
                               tfx_outputs *tensors, tfx_error *error) {
    memset(tensors, 0, sizeof *tensors);
    TFX_TRY(tfx_outputs_new(tensors, count, error));
    tfx_status status = TFX_OK;
    size_t place = 0;
    for (size_t i = 0; i < golden->file.count && status == TFX_OK; i++) {
        const tfx_stored *stored = &golden->file.items[i];
        const char *name = golden->owners[i] == index ? inner_name(stored->name, golden->cases[index].id, kind) : NULL;
        if (name != NULL && place < count) {
            status = tfx_safetensors_read(&golden->file, stored, name, &tensors->items[place++], error);
        }
    }
    if (status != TFX_OK) {
        tfx_outputs_free(tensors);
    }
    return status;
}

tfx_status tfx_golden_inputs(const tfx_golden *golden, size_t index, tfx_outputs *inputs, tfx_error *error) {
    return read_tensors(golden, index, INPUTS, golden->cases[index].input_count, inputs, error);
}

tfx_status tfx_golden_outputs(const tfx_golden *golden, size_t index, tfx_outputs *outputs, tfx_error *error) {
    return read_tensors(golden, index, OUTPUTS, golden->cases[index].output_count, outputs, error);
}

void tfx_golden_close(tfx_golden *golden) {
    for (size_t i = 0; i < golden->count; i++) {
        free(golden->cases[i].texts);
    }
    free(golden->cases);
    free(golden->owners);
    cJSON_Delete(golden->listing);
    tfx_safetensors_close(&golden->file);
    memset(golden, 0, sizeof *golden);
}
