#include "platform.h"

#include "session.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "cores.h"
#include "tensor.h"

/* onnxruntime's number of a dtype, by ours. */
static const ONNXTensorElementDataType TYPES[] = {
    [TFX_BOOL] = ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL,     [TFX_INT8] = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8,
    [TFX_INT16] = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16,   [TFX_INT32] = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32,
    [TFX_INT64] = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64,   [TFX_UINT8] = ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8,
    [TFX_UINT16] = ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16, [TFX_UINT32] = ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT32,
    [TFX_UINT64] = ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT64, [TFX_FLOAT16] = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16,
    [TFX_FLOAT32] = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, [TFX_FLOAT64] = ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE,
};

/* Whether `text` holds `part`, which is in lower case. */
static bool mentions(const char *text, const char *part) {
    const size_t length = strlen(part);
    for (; *text != '\0'; text++) {
        size_t same = 0;
        while (same < length && tolower((unsigned char)text[same]) == part[same]) {
            same++;
        }
        if (same == length) {
            return true;
        }
    }
    return false;
}

/*
 * Copy a reason without the place in onnxruntime's source and the function there, which stand before some:
 * "failed:/a/b.h:46 void ns::f(const T&) The reason".
 */
static void without_place(const char *reason, char *copy, size_t size) {
    static const char *const SUFFIXES[] = {".h:", ".cc:", ".cpp:"};
    const char *place = NULL;
    for (size_t i = 0; i < sizeof SUFFIXES / sizeof SUFFIXES[0] && place == NULL; i++) {
        place = strstr(reason, SUFFIXES[i]);
        place = place == NULL ? NULL : place + strlen(SUFFIXES[i]);
    }
    const char *rest = place;
    while (rest != NULL && isdigit((unsigned char)*rest)) {
        rest++;
    }
    if (rest == NULL || rest == place || *rest != ' ') {
        snprintf(copy, size, "%s", reason);
        return;
    }
    const char *start = place;
    while (start > reason && strchr(" :", start[-1]) == NULL) {
        start--;
    }
    while (start > reason && start[-1] != ' ' && !(start[-1] == ':' && *start == '/')) {
        start--; /* over the colon before the line's number, up to the path's beginning */
    }
    int depth = 0;
    const char *end = rest;
    for (; *end != '\0'; end++) { /* to the end of the parameters: a bracket that closes, with a space behind it */
        depth += strchr("(<[{", *end) != NULL ? 1 : strchr(")>]}", *end) != NULL ? -1 : 0;
        if (*end == ')' && depth == 0 && (end[1] == ' ' || end[1] == '\0')) {
            end++;
            break;
        }
    }
    end = strncmp(end, " const ", 7) == 0 ? end + 6 : end;
    if (strncmp(end, " [with ", 7) == 0 && strchr(end, ']') != NULL) {
        end = strchr(end, ']') + 1;
    }
    snprintf(copy, size, "%.*s%s", (int)(start - reason), reason, *end == '\0' ? rest : end);
}

/* A model of a later IR version or opset than this onnxruntime knows. */
static bool is_newer(const char *reason) {
    return mentions(reason, "unsupported model ir version") ||
           (mentions(reason, "opset") && mentions(reason, "is under development"));
}

/* Turn onnxruntime's status into ours and release it. */
static tfx_status translate(const OrtApi *api, OrtStatus *status, const char *what, tfx_error *error) {
    if (status == NULL) {
        return TFX_OK;
    }
    char reason[1024];
    without_place(api->GetErrorMessage(status), reason, sizeof reason);
    tfx_status result;
    if (mentions(reason, "bad alloc") || mentions(reason, "bad_alloc") || mentions(reason, "failed to allocate") ||
        mentions(reason, "out of memory")) {
        result = tfx_fail(error, TFX_MACHINE, "%s: out of memory: %.600s", what, reason);
    } else if (api->GetErrorCode(status) == ORT_NOT_IMPLEMENTED) {
        result =
            tfx_fail(error, TFX_MACHINE, "%s: this onnxruntime has no kernel for an operator: %.600s", what, reason);
    } else {
        result = tfx_fail(error, TFX_INPUT, "%s: onnxruntime refuses it: %.600s", what, reason);
    }
    api->ReleaseStatus(status);
    return result;
}

#define ORT_TRY(call) TFX_TRY(translate(api, (call), what, error))

static tfx_status set_options(const OrtApi *api, OrtSessionOptions *options, const tfx_manifest *manifest, int threads,
                              tfx_error *error) {
    const char *what = "session options";
    /* Tuned elsewhere, the bundle may want more cores than there are here. */
    if (threads == 0 && manifest->threads <= tfx_usable_cores()) {
        threads = (int)manifest->threads;
    }
    ORT_TRY(api->SetSessionLogSeverityLevel(options, ORT_LOGGING_LEVEL_FATAL)); /* errors are returned, not printed */
    ORT_TRY(api->SetIntraOpNumThreads(options, threads));
    ORT_TRY(api->SetInterOpNumThreads(options, 1));
    ORT_TRY(api->DisableMemPattern(options)); /* a plan for every shape that comes would be kept */
    ORT_TRY(api->EnableCpuMemArena(options));
    if (!manifest->spinning) {
        ORT_TRY(api->AddSessionConfigEntry(options, "session.intra_op.allow_spinning", "0"));
    }
    /* Slower on the CPU than what it replaces, and applied at load. */
    ORT_TRY(api->AddSessionConfigEntry(options, "optimization.disable_specified_optimizers", "SkipLayerNormFusion"));
    return TFX_OK;
}

static tfx_status create(tfx_session *session, const char *version, const char *path, const tfx_manifest *manifest,
                         const OrtSessionOptions *options, tfx_error *error) {
    const OrtApi *api = session->api;
    OrtStatus *status = api->CreateSession(session->env, path, options, &session->session);
    if (status != NULL && is_newer(api->GetErrorMessage(status))) {
        api->ReleaseStatus(status);
        return tfx_fail(error, TFX_MACHINE,
                        "%s: found IR version %lld and opset %lld, newer than onnxruntime %s reads; install a newer "
                        "onnxruntime, or export with --target portable",
                        path, (long long)manifest->ir_version, (long long)manifest->opset, version);
    }
    return translate(api, status, path, error);
}

static tfx_status load(tfx_session *session, const char *version, const char *path, const tfx_manifest *manifest,
                       int threads, tfx_error *error) {
    const OrtApi *api = session->api;
    const char *what = path;
    OrtSessionOptions *options;
    ORT_TRY(api->CreateEnv(ORT_LOGGING_LEVEL_FATAL, "tfx", &session->env));
    ORT_TRY(api->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &session->memory));
    ORT_TRY(api->CreateSessionOptions(&options));
    tfx_status status = set_options(api, options, manifest, threads, error);
    if (status == TFX_OK) {
        status = create(session, version, path, manifest, options, error);
    }
    api->ReleaseSessionOptions(options);
#ifdef __GLIBC__
    malloc_trim(0); /* what loading freed, about a fifth of the weights, goes back to the system */
#endif
    return status;
}

/* Read name and element type of an input or output; UNDEFINED where it is no tensor. */
static tfx_status describe(const tfx_session *session, bool output, size_t index, OrtAllocator *allocator, char **name,
                           ONNXTensorElementDataType *type, tfx_error *error) {
    const OrtApi *api = session->api;
    const char *what = "the graph";
    OrtTypeInfo *info = NULL;
    *type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
    ORT_TRY(output ? api->SessionGetOutputTypeInfo(session->session, index, &info)
                   : api->SessionGetInputTypeInfo(session->session, index, &info));
    const OrtTensorTypeAndShapeInfo *tensor = NULL;
    OrtStatus *status = api->CastTypeInfoToTensorInfo(info, &tensor);
    if (status == NULL && tensor != NULL) {
        status = api->GetTensorElementType(tensor, type);
    }
    api->ReleaseTypeInfo(info);
    ORT_TRY(status);
    ORT_TRY(output ? api->SessionGetOutputName(session->session, index, allocator, name)
                   : api->SessionGetInputName(session->session, index, allocator, name));
    return TFX_OK;
}

/* Check that the graph's inputs or outputs are those of the manifest, by name and dtype. */
static tfx_status check_side(const tfx_session *session, const char *path, bool output, const tfx_spec *specs,
                             size_t count, tfx_error *error) {
    const OrtApi *api = session->api;
    const char *what = path;
    const char *side = output ? "output" : "input";
    OrtAllocator *allocator;
    size_t found = 0;
    ORT_TRY(api->GetAllocatorWithDefaultOptions(&allocator));
    ORT_TRY(output ? api->SessionGetOutputCount(session->session, &found)
                   : api->SessionGetInputCount(session->session, &found));
    for (size_t i = 0; i < found; i++) {
        char *name = NULL;
        ONNXTensorElementDataType type;
        TFX_TRY(describe(session, output, i, allocator, &name, &type, error));
        bool same = false;
        for (size_t j = 0; j < count && !same; j++) {
            same = strcmp(specs[j].name, name) == 0 && TYPES[specs[j].dtype] == type;
        }
        tfx_status status = TFX_OK;
        if (!same) {
            status = tfx_fail(error, TFX_INPUT, "%s: %s %s is not in %s, or of another type there", path, side, name,
                              TFX_MANIFEST_NAME);
        }
        ORT_TRY(api->AllocatorFree(allocator, name));
        TFX_TRY(status);
    }
    if (found != count) {
        return tfx_fail(error, TFX_INPUT, "%s: found %zu %ss, %s says %zu", path, found, side, TFX_MANIFEST_NAME,
                        count);
    }
    return TFX_OK;
}

tfx_status tfx_session_open(const tfx_library *library, const char *path, const tfx_manifest *manifest, int threads,
                            tfx_session *session, tfx_error *error) {
    memset(session, 0, sizeof *session);
    session->api = library->api;
    tfx_status status = load(session, library->version, path, manifest, threads, error);
    if (status == TFX_OK) {
        status = check_side(session, path, false, manifest->inputs, manifest->input_count, error);
    }
    if (status == TFX_OK) {
        status = check_side(session, path, true, manifest->outputs, manifest->output_count, error);
    }
    if (status != TFX_OK) {
        tfx_session_close(session);
    }
    return status;
}

/* Copy an output into memory of our own. */
static tfx_status take(const OrtApi *api, OrtValue *value, const tfx_spec *spec, tfx_tensor *tensor, tfx_error *error) {
    const char *what = spec->name;
    OrtTensorTypeAndShapeInfo *info;
    int64_t shape[TFX_MAX_RANK];
    size_t rank = 0;
    void *data = NULL;
    ORT_TRY(api->GetTensorTypeAndShape(value, &info));
    OrtStatus *status = api->GetDimensionsCount(info, &rank);
    if (status == NULL && rank <= TFX_MAX_RANK) {
        status = api->GetDimensions(info, shape, rank);
    }
    api->ReleaseTensorTypeAndShapeInfo(info);
    ORT_TRY(status);
    if (rank != spec->rank) { /* a graph need not say the rank of its outputs */
        return tfx_fail(error, TFX_INPUT, "%s: found rank %zu, wanted %zu as in %s", spec->name, rank, spec->rank,
                        TFX_MANIFEST_NAME);
    }
    ORT_TRY(api->GetTensorMutableData(value, &data));
    TFX_TRY(tfx_tensor_new(tensor, spec->name, spec->dtype, rank, shape, error));
    const size_t bytes = tfx_tensor_size(tensor) * tfx_dtype_size(spec->dtype);
    if (bytes > 0) {
        memcpy(tensor->data, data, bytes);
    }
    return tfx_tensor_widen(tensor, error);
}

/* What a call hands to onnxruntime; values borrow the tensors' memory. */
typedef struct {
    const char **names; /* of inputs, then of outputs */
    OrtValue **values;
    size_t count;
} call;

static void release(const OrtApi *api, call *c) {
    for (size_t i = 0; c->values != NULL && i < c->count; i++) {
        if (c->values[i] != NULL) {
            api->ReleaseValue(c->values[i]);
        }
    }
    free(c->names);
    free(c->values);
}

static tfx_status run(const tfx_session *session, call *c, const tfx_tensor *inputs, size_t count,
                      const tfx_spec *const *wanted, size_t wanted_count, tfx_outputs *outputs, tfx_error *error) {
    const OrtApi *api = session->api;
    const char *what = "run";
    TFX_TRY(tfx_outputs_new(outputs, wanted_count, error));
    for (size_t i = 0; i < count; i++) {
        const tfx_tensor *input = &inputs[i];
        const size_t bytes = tfx_tensor_size(input) * tfx_dtype_size(input->dtype);
        c->names[i] = input->name;
        ORT_TRY(api->CreateTensorWithDataAsOrtValue(session->memory, input->data, bytes, input->shape, input->rank,
                                                    TYPES[input->dtype], &c->values[i]));
    }
    for (size_t i = 0; i < wanted_count; i++) {
        c->names[count + i] = wanted[i]->name;
    }
    ORT_TRY(api->Run(session->session, NULL, c->names, (const OrtValue *const *)c->values, count, c->names + count,
                     wanted_count, c->values + count));
    for (size_t i = 0; i < wanted_count; i++) {
        TFX_TRY(take(api, c->values[count + i], wanted[i], &outputs->items[i], error));
    }
    return TFX_OK;
}

tfx_status tfx_session_run(const tfx_session *session, const tfx_tensor *inputs, size_t count,
                           const tfx_spec *const *wanted, size_t wanted_count, tfx_outputs *outputs, tfx_error *error) {
    memset(outputs, 0, sizeof *outputs);
    call c = {calloc(count + wanted_count, sizeof *c.names), calloc(count + wanted_count, sizeof *c.values),
              count + wanted_count};
    tfx_status status = c.names == NULL || c.values == NULL
                            ? tfx_no_memory(error)
                            : run(session, &c, inputs, count, wanted, wanted_count, outputs, error);
    release(session->api, &c);
    if (status != TFX_OK) {
        tfx_outputs_free(outputs);
    }
    return status;
}

void tfx_session_close(tfx_session *session) {
    if (session->session != NULL) {
        session->api->ReleaseSession(session->session);
    }
    if (session->memory != NULL) {
        session->api->ReleaseMemoryInfo(session->memory);
    }
    if (session->env != NULL) {
        session->api->ReleaseEnv(session->env);
    }
    memset(session, 0, sizeof *session);
}
