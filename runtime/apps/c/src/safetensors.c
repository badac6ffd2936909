#include "platform.h"

#include "safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "file.h"
#include "json.h"
#include "maps.h"
#include "tensor.h"

#define LARGEST_FILE ((int64_t)2 << 30)
#define LARGEST_HEADER ((uint64_t)100 << 20)
#define LENGTH_BYTES 8

/* Read `bytes` bytes at `offset`. */
static tfx_status read_at(const tfx_safetensors *file, void *buffer, size_t bytes, int64_t offset, tfx_error *error) {
    for (size_t done = 0; done < bytes;) {
        const ssize_t count = pread(file->descriptor, (char *)buffer + done, bytes - done, (off_t)offset + (off_t)done);
        if (count < 0 && errno == EINTR) {
            continue;
        }
        if (count < 0) {
            return tfx_fail(error, TFX_INPUT, "%s: cannot be read: %s", file->path, strerror(errno));
        }
        if (count == 0) {
            return tfx_fail(error, TFX_INPUT, "%s: ends inside a tensor", file->path);
        }
        done += (size_t)count;
    }
    return TFX_OK;
}

/* Read the integers of an array; false where it holds anything else, or more than `most`. */
static bool read_integers(const cJSON *array, int64_t *values, size_t most, size_t *count) {
    *count = 0;
    if (!cJSON_IsArray(array)) {
        return false;
    }
    const cJSON *item;
    cJSON_ArrayForEach(item, array) {
        const double value = cJSON_IsNumber(item) ? item->valuedouble : -1;
        if (*count == most || !(value >= 0 && value <= (double)LARGEST_FILE) || value != floor(value)) {
            return false;
        }
        values[(*count)++] = (int64_t)value;
    }
    return true;
}

static tfx_status read_item(const cJSON *entry, const char *path, int64_t data_bytes, tfx_stored *stored,
                            tfx_error *error) {
    const char *name = entry->string;
    const cJSON *dtype = tfx_json_get(entry, "dtype");
    int64_t place[2];
    size_t places;
    size_t count;
    stored->name = name;
    stored->dtype = cJSON_IsString(dtype) ? tfx_dtype_of_safetensors(dtype->valuestring) : (tfx_dtype)0;
    if (tfx_dtype_name(stored->dtype) == NULL) {
        return tfx_fail(error, TFX_INPUT, "%s: tensor %s is of a type that no bundle has", path, name);
    }
    if (!read_integers(tfx_json_get(entry, "shape"), stored->shape, TFX_MAX_RANK, &stored->rank) ||
        !tfx_shape_size(stored->shape, stored->rank, stored->dtype, &count, &stored->bytes)) {
        return tfx_fail(error, TFX_INPUT, "%s: tensor %s has no shape that can be", path, name);
    }
    if (!read_integers(tfx_json_get(entry, "data_offsets"), place, 2, &places) || places != 2 || place[0] > place[1] ||
        place[1] > data_bytes || (uint64_t)(place[1] - place[0]) != stored->bytes) {
        return tfx_fail(error, TFX_INPUT, "%s: tensor %s has a place that does not fit its shape or the file", path,
                        name);
    }
    stored->offset = place[0];
    return TFX_OK;
}

static int by_place(const void *left, const void *right) {
    const tfx_stored *a = left;
    const tfx_stored *b = right;
    if (a->offset != b->offset) {
        return a->offset < b->offset ? -1 : 1;
    }
    return a->bytes < b->bytes ? -1 : a->bytes > b->bytes; /* an empty one before what begins where it lies */
}

/*
 * Put the items in the order of their bytes and check that these cover the file, as the format wants: tensors that
 * shared bytes could be many times larger than the file.
 */
static tfx_status check_places(tfx_safetensors *file, int64_t data_start, int64_t size, tfx_error *error) {
    qsort(file->items, file->count, sizeof *file->items, by_place);
    int64_t end = data_start;
    for (size_t i = 0; i < file->count; i++) {
        const tfx_stored *stored = &file->items[i];
        if (stored->offset != end) {
            return tfx_fail(error, TFX_INPUT,
                            "%s: tensor %s begins at byte %lld, wanted %lld, where the one before ends", file->path,
                            stored->name, (long long)(stored->offset - data_start), (long long)(end - data_start));
        }
        end += (int64_t)stored->bytes;
    }
    if (end != size) {
        return tfx_fail(error, TFX_INPUT, "%s: found %lld bytes behind the last tensor, wanted none", file->path,
                        (long long)(size - end));
    }
    return TFX_OK;
}

static tfx_status check_names(const tfx_safetensors *file, tfx_error *error) {
    tfx_vocab names = {0};
    uint32_t id;
    tfx_status status = TFX_OK;
    for (size_t i = 0; i < file->count && status == TFX_OK; i++) {
        const char *name = file->items[i].name;
        if (tfx_vocab_find(&names, name, strlen(name), &id)) {
            status = tfx_fail(error, TFX_INPUT, "%s: tensor %s is there twice", file->path, name);
        } else if (!tfx_vocab_put(&names, name, strlen(name), 0)) {
            status = tfx_no_memory(error);
        }
    }
    tfx_vocab_free(&names);
    return status;
}

static tfx_status read_items(tfx_safetensors *file, int64_t data_start, int64_t size, tfx_error *error) {
    if (!cJSON_IsObject(file->header)) {
        return tfx_fail(error, TFX_INPUT, "%s: not a safetensors file: its header is no object", file->path);
    }
    const int members = cJSON_GetArraySize(file->header);
    file->items = calloc(members > 0 ? (size_t)members : 1, sizeof *file->items);
    if (file->items == NULL) {
        return tfx_no_memory(error);
    }
    const cJSON *entry;
    cJSON_ArrayForEach(entry, file->header) {
        if (strcmp(entry->string, "__metadata__") == 0) {
            continue;
        }
        tfx_stored *stored = &file->items[file->count];
        TFX_TRY(read_item(entry, file->path, size - data_start, stored, error));
        stored->offset += data_start;
        file->count++;
    }
    TFX_TRY(check_places(file, data_start, size, error));
    return check_names(file, error);
}

static tfx_status read_header(tfx_safetensors *file, tfx_error *error) {
    struct stat found;
    if (fstat(file->descriptor, &found) != 0 || !S_ISREG(found.st_mode)) {
        return tfx_fail(error, TFX_INPUT, "%s: found no file, wanted one", file->path);
    }
    const int64_t size = (int64_t)found.st_size;
    uint64_t length = 0;
    if (size > LARGEST_FILE) {
        return tfx_fail(error, TFX_INPUT, "%s: found %lld bytes, wanted at most %lld", file->path, (long long)size,
                        (long long)LARGEST_FILE);
    }
    if (size >= LENGTH_BYTES) {
        TFX_TRY(read_at(file, &length, sizeof length, 0, error));
    }
    if (size < LENGTH_BYTES || length > LARGEST_HEADER || length > (uint64_t)(size - LENGTH_BYTES)) {
        return tfx_fail(error, TFX_INPUT, "%s: not a safetensors file: its header ends beyond it", file->path);
    }
    char *content = malloc((size_t)length + 1);
    if (content == NULL) {
        return tfx_no_memory(error);
    }
    tfx_status status = read_at(file, content, (size_t)length, LENGTH_BYTES, error);
    if (status == TFX_OK) {
        content[length] = '\0';
        status = tfx_json_parse(content, (size_t)length, file->path, &file->header, error);
    }
    free(content);
    return status == TFX_OK ? read_items(file, LENGTH_BYTES + (int64_t)length, size, error) : status;
}

tfx_status tfx_safetensors_open(const char *path, tfx_safetensors *file, tfx_error *error) {
    memset(file, 0, sizeof *file);
    file->descriptor = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (file->descriptor < 0) {
        return tfx_fail(error, TFX_INPUT, "%s: cannot be read: %s", path, strerror(errno));
    }
    file->opened = true;
    file->path = tfx_copy_text(path);
    const tfx_status status = file->path == NULL ? tfx_no_memory(error) : read_header(file, error);
    if (status != TFX_OK) {
        tfx_safetensors_close(file);
    }
    return status;
}

const char *tfx_safetensors_metadata(const tfx_safetensors *file, const char *key) {
    const cJSON *value = tfx_json_get(tfx_json_get(file->header, "__metadata__"), key);
    return cJSON_IsString(value) ? value->valuestring : NULL;
}

tfx_status tfx_safetensors_read(const tfx_safetensors *file, const tfx_stored *stored, const char *name,
                                tfx_tensor *tensor, tfx_error *error) {
    TFX_TRY(tfx_tensor_new(tensor, name, stored->dtype, stored->rank, stored->shape, error));
    const tfx_status status = read_at(file, tensor->data, stored->bytes, stored->offset, error);
    if (status != TFX_OK) {
        tfx_tensor_free(tensor);
    }
    return status;
}

void tfx_safetensors_close(tfx_safetensors *file) {
    if (file->opened) {
        close(file->descriptor);
    }
    free(file->path);
    free(file->items);
    cJSON_Delete(file->header);
    memset(file, 0, sizeof *file);
}
