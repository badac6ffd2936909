/* onnxruntime's library, loaded at run time so that one binary runs with any version >= 1.20. */
#ifndef TFX_LIBRARY_H
#define TFX_LIBRARY_H

#include <onnxruntime_c_api.h>

#include "error.h"

/* The API that this code is written for; onnxruntime 1.20 is the first to have it. */
#define TFX_ORT_API 20

#if ORT_API_VERSION < TFX_ORT_API
#error "onnxruntime's headers are older than 1.20"
#endif

typedef struct tfx_library {
    const OrtApi *api;
    char version[32]; /* "1.31.1" */
    char path[1024];  /* of the file that was loaded, as far as the system can tell */
} tfx_library;

/*
 * Load onnxruntime and check its version. It stays loaded until the process ends: it is not made to be unloaded.
 *
 * wanted: the file; NULL takes the environment variable TFX_ONNXRUNTIME, else what the loader finds.
 *
 * TFX_MACHINE: not found, not onnxruntime, or too old; the message has the path and the API version wanted and found.
 * `path` and `version` are filled in as far as they are known even then.
 */
tfx_status tfx_library_open(const char *wanted, tfx_library *library, tfx_error *error);

#endif
