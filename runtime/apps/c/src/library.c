#include "platform.h"

#include "library.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#ifdef __APPLE__
#define DEFAULT_NAME "libonnxruntime.dylib"
#else
#define DEFAULT_NAME "libonnxruntime.so.1"
#endif

#define REMEDY "install onnxruntime >= 1.20 and give its library by --library or $TFX_ONNXRUNTIME"

typedef const OrtApiBase *(*get_api_base)(void);

/* Return the "20" of "1.20.1": onnxruntime counts its API by it. */
static long api_version(const char *version) {
    const char *minor = strchr(version, '.');
    return minor == NULL ? 0 : strtol(minor + 1, NULL, 10);
}

tfx_status tfx_library_open(const char *wanted, tfx_library *library, tfx_error *error) {
    memset(library, 0, sizeof *library);
    const char *given = wanted != NULL ? wanted : getenv("TFX_ONNXRUNTIME");
    const char *name = given != NULL && given[0] != '\0' ? given : DEFAULT_NAME;
    snprintf(library->path, sizeof library->path, "%s", name);
    void *handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) {
        const char *reason = dlerror();
        return tfx_fail(error, TFX_MACHINE, "onnxruntime: wanted API version %d in %s, found none: %s; " REMEDY,
                        TFX_ORT_API, name, reason == NULL ? "it cannot be loaded" : reason);
    }
    void *symbol = dlsym(handle, "OrtGetApiBase");
    Dl_info where;
    if (symbol == NULL) {
        dlclose(handle);
        return tfx_fail(error, TFX_MACHINE, "onnxruntime: wanted API version %d, found another library in %s; " REMEDY,
                        TFX_ORT_API, name);
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
    if (library->api == NULL) {
        return tfx_fail(error, TFX_MACHINE,
                        "onnxruntime: wanted API version %d or later, found %ld (onnxruntime %s) in %s; " REMEDY,
                        TFX_ORT_API, found, library->version, library->path);
    }
    return TFX_OK;
}
