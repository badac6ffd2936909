/* Reading of .safetensors files; every size in them is checked before it is used. */
#ifndef TFX_SAFETENSORS_H
#define TFX_SAFETENSORS_H

#include "error.h"

struct cJSON;

/* One tensor of the file. */
typedef struct tfx_stored {
    const char *name;
    tfx_dtype dtype;
    size_t rank;
    int64_t shape[TFX_MAX_RANK];
    int64_t offset; /* of its first byte in the file */
    size_t bytes;
} tfx_stored;

typedef struct tfx_safetensors {
    char *path;
    bool opened;
    int descriptor;
    struct cJSON *header; /* owns the names */
    tfx_stored *items;    /* in the order of their bytes */
    size_t count;
} tfx_safetensors;

/*
 * Open a file and read its header.
 *
 * TFX_INPUT: no file, larger than 2 GiB, no safetensors file, a tensor whose dtype, shape and place do not fit one
 * another and the file, a name that is there twice, or bytes that belong to no tensor or to several. TFX_MACHINE: no
 * memory. `file` needs no release then.
 */
tfx_status tfx_safetensors_open(const char *path, tfx_safetensors *file, tfx_error *error);

/* Return a string of the file's metadata, NULL where there is none. */
const char *tfx_safetensors_metadata(const tfx_safetensors *file, const char *key);

/*
 * Read one tensor into new memory.
 *
 * name: what the tensor is to be called.
 */
tfx_status tfx_safetensors_read(const tfx_safetensors *file, const tfx_stored *stored, const char *name,
                                tfx_tensor *tensor, tfx_error *error);

void tfx_safetensors_close(tfx_safetensors *file);

#endif
