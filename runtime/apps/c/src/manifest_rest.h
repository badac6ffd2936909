/* Fields of tfx.json that nothing here needs, checked as Python checks them. */
#ifndef TFX_MANIFEST_REST_H
#define TFX_MANIFEST_REST_H

#include "json.h"
#include "manifest.h"

/* Check what reading the fields that are needed has left: unknown keys, and fields that only Python reads. */
tfx_status tfx_manifest_check_rest(const tfx_manifest *manifest, tfx_error *error);

/* Read a string that is one of several. */
tfx_status tfx_manifest_choice(const cJSON *owner, const char *key, const char *where, const char *const *options,
                               size_t count, const char **value, tfx_error *error);

/* Read a file name that cannot leave its folder. */
tfx_status tfx_manifest_name(const cJSON *owner, const char *key, const char *where, const char **name,
                             tfx_error *error);

#endif
