#include "golden.h"

#include <stdlib.h>
#include <string.h>

#include "file.h"
#include "json.h"
#include "maps.h"
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

static tfx_status read_texts(const cJSON *entry, const char *where, tfx_case *result, tfx_error *error) {
    const cJSON *texts = tfx_json_given(entry, "texts");
    if (texts == NULL) {
        return TFX_OK;
    }
    const int count = cJSON_IsArray(texts) ? cJSON_GetArraySize(texts) : -1;
    if (count == 0) {
        return TFX_OK;
    }
    if (count != result->batch) {
        return tfx_fail(error, TFX_INPUT, "%s.texts: wanted a list of %lld texts, one per row", where,
                        (long long)result->batch);
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
    int64_t sequence;
    const char *pattern;
    tfx_case *result = &golden->cases[golden->count];
    snprintf(where, sizeof where, "golden: cases[%zu]", golden->count);
    golden->count++; /* at once, so that what it holds is released whatever happens */
    if (!cJSON_IsObject(entry)) {
        return tfx_json_wrong(entry, where, "an object", error);
    }
    TFX_TRY(tfx_json_text(entry, "id", where, &result->id, error));
    TFX_TRY(tfx_json_integer(entry, "batch", where, 1, &result->batch, error));
    TFX_TRY(tfx_json_integer(entry, "sequence", where, 1, &sequence, error));
    TFX_TRY(tfx_json_text(entry, "pattern", where, &pattern, error));
    if (strchr(result->id, '/') != NULL) {
        return tfx_fail(error, TFX_INPUT, "%s.id: found \"%.80s\", wanted no slash", where, result->id);
    }
    return read_texts(entry, where, result, error);
}

/* ids: receives the number of every case by its id. */
static tfx_status read_cases(tfx_golden *golden, tfx_vocab *ids, tfx_error *error) {
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
    for (uint32_t i = 0; i < golden->count; i++) {
        const char *id = golden->cases[i].id;
        uint32_t other;
        if (tfx_vocab_find(ids, id, strlen(id), &other)) {
            return tfx_fail(error, TFX_INPUT, "%s: case %s is there twice", path, id);
        }
        if (!tfx_vocab_put(ids, id, strlen(id), i)) {
            return tfx_no_memory(error);
        }
    }
    return TFX_OK;
}

/* Find the case of a tensor by what is before the first slash of its name; false where there is none. */
static bool find_case(const tfx_golden *golden, const tfx_vocab *ids, const char *name, uint32_t *found, bool *input) {
    const char *slash = strchr(name, '/');
    if (slash == NULL || !tfx_vocab_find(ids, name, (size_t)(slash - name), found)) {
        return false;
    }
    *input = inner_name(name, golden->cases[*found].id, INPUTS) != NULL;
    return *input || inner_name(name, golden->cases[*found].id, OUTPUTS) != NULL;
}

/* Find out which case every tensor belongs to, and put each case's tensors beside one another. */
static tfx_status assign(tfx_golden *golden, const tfx_vocab *ids, tfx_error *error) {
    const tfx_safetensors *file = &golden->file;
    uint32_t *owners = calloc(file->count + 1, sizeof *owners);
    golden->order = calloc(file->count + 1, sizeof *golden->order);
    tfx_status status = owners == NULL || golden->order == NULL ? tfx_no_memory(error) : TFX_OK;
    for (size_t i = 0; i < file->count && status == TFX_OK; i++) {
        bool input = false;
        if (!find_case(golden, ids, file->items[i].name, &owners[i], &input)) {
            status = tfx_fail(error, TFX_INPUT, "%s: tensor %s belongs to no case", file->path, file->items[i].name);
            break;
        }
        tfx_case *owner = &golden->cases[owners[i]];
        ++*(input ? &owner->input_count : &owner->output_count);
    }
    size_t first = 0;
    for (size_t i = 0; i < golden->count && status == TFX_OK; i++) {
        tfx_case *each = &golden->cases[i];
        if (each->input_count == 0 || each->output_count == 0) {
            status = tfx_fail(error, TFX_INPUT, "%s: case %s has no inputs or no outputs", file->path, each->id);
        }
        each->first = first;
        first += each->input_count + each->output_count;
        each->tensor_count = 0;
    }
    for (size_t i = 0; i < file->count && status == TFX_OK; i++) {
        tfx_case *owner = &golden->cases[owners[i]];
        golden->order[owner->first + owner->tensor_count++] = &file->items[i];
    }
    free(owners);
    return status;
}

static tfx_status read_golden(tfx_golden *golden, tfx_error *error) {
    tfx_vocab ids = {0};
    tfx_status status = read_cases(golden, &ids, error);
    if (status == TFX_OK) {
        status = assign(golden, &ids, error);
    }
    tfx_vocab_free(&ids);
    return status;
}

tfx_status tfx_golden_open(const char *path, tfx_golden *golden, tfx_error *error) {
    memset(golden, 0, sizeof *golden);
    TFX_TRY(tfx_safetensors_open(path, &golden->file, error));
    const tfx_status status = read_golden(golden, error);
    if (status != TFX_OK) {
        tfx_golden_close(golden);
    }
    return status;
}

/* Return a tensor of a case by its own name, NULL where it is not recorded. */
static const tfx_stored *find_tensor(const tfx_golden *golden, size_t index, const char *kind, const char *wanted) {
    const tfx_case *each = &golden->cases[index];
    for (size_t i = 0; i < each->tensor_count; i++) {
        const tfx_stored *stored = golden->order[each->first + i];
        const char *name = inner_name(stored->name, each->id, kind);
        if (name != NULL && strcmp(name, wanted) == 0) {
            return stored;
        }
    }
    return NULL;
}

/* Named axes of a case and the sizes that they were first seen with. */
typedef struct {
    const char *names[TFX_MAX_RANK];
    int64_t sizes[TFX_MAX_RANK];
    size_t count;
} axes;

/* Return the size of an axis; one that is new has the size that was found. */
static int64_t axis_size(axes *known, const char *name, int64_t found) {
    for (size_t i = 0; i < known->count; i++) {
        if (strcmp(known->names[i], name) == 0) {
            return known->sizes[i];
        }
    }
    if (known->count < TFX_MAX_RANK) {
        known->names[known->count] = name;
        known->sizes[known->count++] = found;
    }
    return found;
}

static tfx_status check_input(const tfx_golden *golden, size_t index, const tfx_spec *spec, axes *known,
                              tfx_error *error) {
    const char *id = golden->cases[index].id;
    const tfx_stored *stored = find_tensor(golden, index, INPUTS, spec->name);
    if (stored == NULL) {
        return tfx_fail(error, TFX_INPUT, "%s: case %s does not record %s", golden->file.path, id, spec->name);
    }
    int64_t wanted[TFX_MAX_RANK];
    bool same = stored->rank == spec->rank;
    for (size_t i = 0; i < spec->rank; i++) {
        const int64_t found = i < stored->rank ? stored->shape[i] : -1;
        wanted[i] = spec->axes[i] == NULL ? spec->shape[i] : axis_size(known, spec->axes[i], found);
        same = same && wanted[i] == found;
    }
    if (!same) {
        char shown[2][128];
        return tfx_fail(error, TFX_INPUT, "%s: case %s: %s: found shape %s, wanted %s", golden->file.path, id,
                        spec->name, tfx_show_shape(stored->shape, NULL, stored->rank, shown[0], sizeof shown[0]),
                        tfx_show_shape(wanted, stored->rank == spec->rank ? NULL : spec->axes, spec->rank, shown[1],
                                       sizeof shown[1]));
    }
    return TFX_OK;
}

tfx_status tfx_golden_check(const tfx_golden *golden, const tfx_manifest *manifest, tfx_error *error) {
    for (size_t i = 0; i < golden->count; i++) {
        const tfx_case *each = &golden->cases[i];
        axes known = {{"batch"}, {each->batch}, 1};
        for (size_t j = 0; j < manifest->input_count; j++) {
            TFX_TRY(check_input(golden, i, &manifest->inputs[j], &known, error));
        }
        for (size_t j = 0; j < each->tensor_count; j++) {
            const char *name = golden->order[each->first + j]->name;
            const char *output = inner_name(name, each->id, OUTPUTS);
            if (output != NULL && tfx_manifest_output(manifest, output) == NULL) {
                return tfx_fail(error, TFX_INPUT, "%s: case %s records %s, which is no output of the bundle",
                                golden->file.path, each->id, output);
            }
        }
        if (each->input_count != manifest->input_count) { /* names are there once, and all that are wanted were found */
            return tfx_fail(error, TFX_INPUT, "%s: case %s: found %zu inputs, wanted the %zu of the bundle",
                            golden->file.path, each->id, each->input_count, manifest->input_count);
        }
    }
    return TFX_OK;
}

static tfx_status read_tensors(const tfx_golden *golden, size_t index, const char *kind, size_t count,
                               tfx_outputs *tensors, tfx_error *error) {
    memset(tensors, 0, sizeof *tensors);
    TFX_TRY(tfx_outputs_new(tensors, count, error));
    tfx_status status = TFX_OK;
    size_t place = 0;
    const tfx_case *each = &golden->cases[index];
    for (size_t i = 0; i < each->tensor_count && status == TFX_OK; i++) {
        const tfx_stored *stored = golden->order[each->first + i];
        const char *name = inner_name(stored->name, each->id, kind);
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

const tfx_stored *tfx_golden_output(const tfx_golden *golden, size_t index, const char *name) {
    return find_tensor(golden, index, OUTPUTS, name);
}

void tfx_golden_close(tfx_golden *golden) {
    for (size_t i = 0; i < golden->count; i++) {
        free(golden->cases[i].texts);
    }
    free(golden->cases);
    free(golden->order);
    cJSON_Delete(golden->listing);
    tfx_safetensors_close(&golden->file);
    memset(golden, 0, sizeof *golden);
}
