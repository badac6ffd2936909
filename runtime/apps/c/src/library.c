#include "platform.h"

#include "library.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

/* Releases of onnxruntime have the first; Debian's package for developers has the second, as has brew on macOS. */
#ifdef __APPLE__
static const char *const DEFAULTS[] = {"libonnxruntime.dylib", "/opt/homebrew/lib/libonnxruntime.dylib"};
#else
static const char *const DEFAULTS[] = {"libonnxruntime.so.1", "libonnxruntime.so"};
#endif

#define REMEDY "install onnxruntime >= 1.20 and give its library by --library or $TFX_ONNXRUNTIME"

typedef const OrtApiBase *(*get_api_base)(void);

/* Return the "20" of "1.20.1": onnxruntime counts its API by it. Of a later major release the library itself knows. */
static long api_version(const char *version) {
    char *minor;
    if (strtol(version, &minor, 10) > 1) {
        return LONG_MAX;
    }
    return *minor == '.' ? strtol(minor + 1, NULL, 10) : 0;
}

/* Load the library that is wanted, else the first of the default names that there is. */
static void *load(const char *wanted, tfx_library *library, tfx_error *error) {
    const char *given = wanted != NULL ? wanted : getenv("TFX_ONNXRUNTIME");
    const bool named = given != NULL && given[0] != '\0';
    const size_t count = named ? 1 : sizeof DEFAULTS / sizeof DEFAULTS[0];
    char reasons[512] = "";
    for (size_t i = 0; i < count; i++) {
        const char *name = named ? given : DEFAULTS[i];
        void *handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
        if (i == 0 || handle != NULL) {
            snprintf(library->path, sizeof library->path, "%s", name);
        }
        if (handle != NULL) {
            return handle;
        }
        const char *reason = dlerror();
        const size_t used = strlen(reasons);
        snprintf(reasons + used, sizeof reasons - used, "%s%s", i == 0 ? "" : "; ", reason == NULL ? name : reason);
    }
    tfx_fail(error, TFX_MACHINE, "onnxruntime: wanted API version %d in %s, found none: %s; " REMEDY, TFX_ORT_API,
             library->path, reasons);
    return NULL;
}

tfx_status tfx_library_open(const char *wanted, tfx_library *library, tfx_error *error) {
    memset(library, 0, sizeof *library);
    void *handle = load(wanted, library, error);
    if (handle == NULL) {
        return TFX_MACHINE;
    }
    void *symbol = dlsym(handle, "OrtGetApiBase");
    Dl_info where;
    if (symbol == NULL) {
        dlclose(handle);
        return tfx_fail(error, TFX_MACHINE, "onnxruntime: wanted API version %d, found another library in %s; " REMEDY,
                        TFX_ORT_API, library->path);
    }
    if (dladdr(symbol, &where) != 0 && where.dli_fname != NULL) {
        snprintf(library->path, sizeof library->path, "%s", where.dli_fname);
    }
    get_api_base get;
    memcpy(&get, &symbol, sizeof get); /* ISO C has no cast from an object pointer to a function pointer */
    const OrtApiBase *base = get();
    snprintf(library->version, sizeof library->version, "%s", base->GetVersionString());
    const long found = api_version(library->version);
    /* An older one is not even asked: it would print a message of its own. */
    library->api = found < TFX_ORT_API ? NULL : base->GetApi(TFX_ORT_API);
    if (library->api == NULL && found == LONG_MAX) {
        return tfx_fail(error, TFX_MACHINE,
                        "onnxruntime: wanted API version %d, found onnxruntime %s without it in %s; " REMEDY,
                        TFX_ORT_API, library->version, library->path);
    }
    if (library->api == NULL) {
        return tfx_fail(error, TFX_MACHINE,
                        "onnxruntime: wanted API version %d or later, found %ld (onnxruntime %s) in %s; " REMEDY,
                        TFX_ORT_API, found, library->version, library->path);
    }
    return TFX_OK;
}
