/* tfx.json: all fields checked, those that this code needs kept. */
#ifndef TFX_MANIFEST_H
#define TFX_MANIFEST_H

#include "error.h"

#define TFX_MANIFEST_NAME "tfx.json"
#define TFX_MANIFEST_FORMAT 1
#define TFX_MOST_TENSORS 256
#define TFX_MOST_FILES 1000

struct cJSON;

/* A file that the manifest lists. */
typedef struct tfx_file {
    const char *name;
    int64_t bytes;
    const char *sha256; /* 64 lower-case hexadecimal digits */
} tfx_file;

typedef struct tfx_manifest {
    struct cJSON *json; /* owns every string below */
    tfx_spec *inputs;
    size_t input_count;
    tfx_spec *outputs;
    size_t output_count;
    int64_t max_length; /* of the model, -1 for no limit */
    int64_t pad_id;
    const char *pooled;           /* output with one vector per text, NULL without pooling */
    const char *tokenizer;        /* file, NULL without a tokenizer */
    int64_t tokenizer_max_length; /* -1 for no limit */
    const char *target;
    const char *precision;
    const char *layout;
    const char *model; /* file */
    int64_t opset;
    int64_t ir_version;
    double max_abs; /* tolerance; NaN allows any */
    double min_cosine;
    double min_token_cosine; /* NaN: min_cosine */
    double batch_variance;   /* promised, NaN where nothing is */
    int64_t threads;         /* tuned, 0 where it was not */
    bool spinning;           /* tuned, true where it was not */
    tfx_file *files;
    size_t file_count;
} tfx_manifest;

/*
 * Read a tfx.json.
 *
 * path: the file.
 *
 * TFX_INPUT: no file, no JSON, a newer format, or a field that is missing, unknown or wrong, whether it is needed here
 * or not; the message names it. More than TFX_MOST_TENSORS inputs or outputs or TFX_MOST_FILES files. TFX_MACHINE: no
 * memory. `manifest` is empty then.
 */
tfx_status tfx_manifest_read(const char *path, tfx_manifest *manifest, tfx_error *error);

/* Release a manifest; an empty one is allowed. */
void tfx_manifest_free(tfx_manifest *manifest);

/* Return the entry of a file, NULL where the manifest does not list it. */
const tfx_file *tfx_manifest_file(const tfx_manifest *manifest, const char *name);

/* Return the output of this name, NULL where there is none. */
const tfx_spec *tfx_manifest_output(const tfx_manifest *manifest, const char *name);

/* Whether axis `i` of a tensor has this name. */
bool tfx_has_axis(const tfx_spec *spec, size_t i, const char *name);

#endif
