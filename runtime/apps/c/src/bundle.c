#include "platform.h"

#include "bundle.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "external.h"
#include "file.h"

tfx_status tfx_bundle_open(const char *folder, tfx_bundle *bundle, tfx_error *error) {
    memset(bundle, 0, sizeof *bundle);
    struct stat found;
    const bool exists = stat(folder, &found) == 0;
    if (!exists || !S_ISDIR(found.st_mode)) {
        return tfx_fail(error, TFX_INPUT, "%s: found %s, wanted a bundle folder (tfx export makes one)", folder,
                        exists ? "a file" : "nothing");
    }
    bundle->folder = tfx_copy_text(folder);
    char *path = tfx_path(folder, TFX_MANIFEST_NAME);
    tfx_status status = TFX_OK;
    if (bundle->folder == NULL || path == NULL) {
        status = tfx_no_memory(error);
    } else if (stat(path, &found) != 0 && errno == ENOENT) {
        status = tfx_fail(error, TFX_INPUT, "%s: not a bundle: it has no %s", folder, TFX_MANIFEST_NAME);
    } else {
        status = tfx_manifest_read(path, &bundle->manifest, error);
    }
    free(path);
    if (status != TFX_OK) {
        tfx_bundle_free(bundle);
    }
    return status;
}

/* Links inside the folder are how some volume mounts present files; one that leads out is not ours to follow. */
static bool leaves(const char *folder, const char *path) {
    char *inside = realpath(folder, NULL);
    char *target = realpath(path, NULL);
    bool out = false;
    if (inside != NULL && target != NULL) {
        const size_t length = strlen(inside);
        const size_t root = length > 0 && inside[length - 1] == '/' ? length - 1 : length;
        out = strncmp(inside, target, root) != 0 || target[root] != '/';
    }
    free(inside);
    free(target);
    return out;
}

static tfx_status check_file(const char *folder, const char *path, const tfx_file *file, tfx_error *error) {
    struct stat found;
    if (leaves(folder, path)) {
        return tfx_fail(error, TFX_INPUT, "%s: is a link that leaves the bundle", path);
    }
    if (stat(path, &found) != 0) {
        if (errno != ENOENT) {
            return tfx_fail(error, TFX_INPUT, "%s: cannot be read: %s", path, strerror(errno));
        }
        return tfx_fail(error, TFX_INPUT, "%s: found nothing, wanted %lld bytes", path, (long long)file->bytes);
    }
    if (!S_ISREG(found.st_mode)) {
        return tfx_fail(error, TFX_INPUT, "%s: found no file, wanted %lld bytes", path, (long long)file->bytes);
    }
    int64_t size = (int64_t)found.st_size;
    char digest[TFX_SHA256_DIGITS + 1] = "";
    if (size == file->bytes) {
        TFX_TRY(tfx_sha256_file(path, digest, &size, error));
    }
    if (size != file->bytes) {
        return tfx_fail(error, TFX_INPUT, "%s: found %lld bytes, wanted %lld; the file is incomplete or altered", path,
                        (long long)size, (long long)file->bytes);
    }
    if (strcmp(digest, file->sha256) != 0) {
        return tfx_fail(error, TFX_INPUT, "%s: altered: its sha256 is not the one in %s", path, TFX_MANIFEST_NAME);
    }
    return TFX_OK;
}

tfx_status tfx_bundle_check(const tfx_bundle *bundle, size_t *checked, tfx_error *error) {
    const tfx_manifest *manifest = &bundle->manifest;
    for (*checked = 0; *checked < manifest->file_count; ++*checked) {
        char *path = tfx_bundle_path(bundle, manifest->files[*checked].name);
        const tfx_status status =
            path == NULL ? tfx_no_memory(error) : check_file(bundle->folder, path, &manifest->files[*checked], error);
        free(path);
        TFX_TRY(status);
    }
    char *model = tfx_bundle_path(bundle, manifest->model);
    const tfx_status status = model == NULL ? tfx_no_memory(error) : tfx_external_check(model, manifest, error);
    free(model);
    return status;
}

char *tfx_bundle_path(const tfx_bundle *bundle, const char *name) {
    return tfx_path(bundle->folder, name);
}

void tfx_bundle_free(tfx_bundle *bundle) {
    free(bundle->folder);
    tfx_manifest_free(&bundle->manifest);
    memset(bundle, 0, sizeof *bundle);
}
