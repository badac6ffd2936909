/* The folder of a bundle: its manifest, and its files checked against it. */
#ifndef TFX_BUNDLE_H
#define TFX_BUNDLE_H

#include "manifest.h"

#define TFX_GOLDEN_NAME "golden.safetensors"

typedef struct tfx_bundle {
    char *folder;
    tfx_manifest manifest;
} tfx_bundle;

/*
 * Find the folder and read its tfx.json; files are not looked at.
 *
 * TFX_INPUT: no such folder, no tfx.json in it, or it is wrong. TFX_MACHINE: no memory. `bundle` is empty then.
 */
tfx_status tfx_bundle_open(const char *folder, tfx_bundle *bundle, tfx_error *error);

/*
 * Check size and sha256 of every file that the manifest lists, and that weights outside the model lie in one of them
 * and are all there.
 *
 * checked: receives the number of files that are right.
 *
 * TFX_INPUT: a file is missing, short, altered or a link that leaves the folder; the message names it with its sizes.
 */
tfx_status tfx_bundle_check(const tfx_bundle *bundle, size_t *checked, tfx_error *error);

/* Return the path of a file in new memory that the caller frees, NULL without memory. */
char *tfx_bundle_path(const tfx_bundle *bundle, const char *name);

/* Release a bundle; an empty one is allowed. */
void tfx_bundle_free(tfx_bundle *bundle);

#endif
