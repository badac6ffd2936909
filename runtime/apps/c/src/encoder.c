#include "encoder.h"

#include <stdlib.h>
#include <string.h>

#include "feeds.h"
#include "tensor.h"

#define VERSION "0.1.0"

const char *tfx_version(void) {
    return VERSION;
}

static int64_t longest(const tfx_manifest *manifest) {
    const int64_t model = manifest->max_length;
    const int64_t tokenizer = manifest->tokenizer_max_length;
    return model < 0 || (tokenizer >= 0 && tokenizer < model) ? tokenizer : model;
}

static void describe(tfx_encoder *encoder) {
    const tfx_manifest *manifest = &encoder->bundle.manifest;
    snprintf(encoder->runtime, sizeof encoder->runtime, "onnxruntime %s", encoder->library.version);
    encoder->info = (tfx_info){
        .runtime = encoder->runtime,
        .library = encoder->library.path,
        .provider = "cpu",
        .precision = manifest->precision,
        .target = manifest->target,
        .layout = manifest->layout,
        .max_length = longest(manifest),
        .pad_id = manifest->pad_id,
        .pooled = manifest->pooled,
        .tokenizer = manifest->tokenizer != NULL,
        .inputs = manifest->inputs,
        .input_count = manifest->input_count,
        .outputs = manifest->outputs,
        .output_count = manifest->output_count,
    };
    const tfx_spec *pooled = encoder->pooled;
    if (pooled != NULL && pooled->rank > 0 && pooled->axes[pooled->rank - 1] == NULL) {
        encoder->info.dimension = pooled->shape[pooled->rank - 1];
    }
}

static tfx_status load_tokenizer(tfx_encoder *encoder, tfx_error *error) {
    const tfx_manifest *manifest = &encoder->bundle.manifest;
    if (manifest->tokenizer == NULL) {
        encoder->tokenizer_status =
            tfx_fail(&encoder->tokenizer_problem, TFX_INPUT, "%s: has no tokenizer, so it takes arrays and no text",
                     encoder->bundle.folder);
        return TFX_OK;
    }
    char *path = tfx_bundle_path(&encoder->bundle, manifest->tokenizer);
    if (path == NULL) {
        return tfx_no_memory(error);
    }
    encoder->tokenizer_status =
        tfx_tokenizer_open(path, longest(manifest), &encoder->tokenizer, &encoder->tokenizer_problem);
    free(path);
    return TFX_OK;
}

static tfx_status load(tfx_encoder *encoder, int threads, tfx_error *error) {
    const tfx_manifest *manifest = &encoder->bundle.manifest;
    char *path = tfx_bundle_path(&encoder->bundle, manifest->model);
    encoder->all_outputs = calloc(manifest->output_count, sizeof *encoder->all_outputs);
    tfx_status status = TFX_OK;
    if (path == NULL || encoder->all_outputs == NULL) {
        status = tfx_no_memory(error);
    } else {
        status = tfx_session_open(&encoder->library, path, manifest, threads, &encoder->session, error);
    }
    free(path);
    TFX_TRY(status);
    for (size_t i = 0; i < manifest->output_count; i++) {
        encoder->all_outputs[i] = &manifest->outputs[i];
    }
    if (manifest->pooled != NULL) {
        encoder->pooled = tfx_manifest_output(manifest, manifest->pooled);
    }
    describe(encoder);
    return load_tokenizer(encoder, error);
}

tfx_status tfx_encoder_new(tfx_bundle *bundle, const tfx_library *library, int threads, tfx_encoder **encoder,
                           tfx_error *error) {
    *encoder = calloc(1, sizeof **encoder);
    if (*encoder == NULL) {
        tfx_bundle_free(bundle);
        return tfx_no_memory(error);
    }
    (*encoder)->bundle = *bundle;
    (*encoder)->library = *library;
    memset(bundle, 0, sizeof *bundle);
    const tfx_status status = load(*encoder, threads, error);
    if (status != TFX_OK) {
        tfx_close(*encoder);
        *encoder = NULL;
    }
    return status;
}

tfx_status tfx_options_check(const tfx_options *options, tfx_error *error) {
    if (options != NULL && options->threads < 0) {
        return tfx_fail(error, TFX_INPUT, "threads: found %d, wanted at least 1, or 0 for the default",
                        options->threads);
    }
    return TFX_OK;
}

tfx_status tfx_open(const char *folder, const tfx_options *options, tfx_encoder **encoder, tfx_error *error) {
    static const tfx_options defaults = {NULL, 0};
    const tfx_options *chosen = options == NULL ? &defaults : options;
    tfx_bundle bundle;
    tfx_library library;
    size_t checked;
    *encoder = NULL;
    TFX_TRY(tfx_options_check(chosen, error));
    TFX_TRY(tfx_bundle_open(folder, &bundle, error));
    tfx_status status = tfx_bundle_check(&bundle, &checked, error);
    if (status == TFX_OK) {
        status = tfx_library_open(chosen->library, &library, error);
    }
    if (status == TFX_OK) {
        status = tfx_encoder_new(&bundle, &library, chosen->threads, encoder, error);
    }
    tfx_bundle_free(&bundle);
    return status;
}

void tfx_close(tfx_encoder *encoder) {
    if (encoder != NULL) {
        tfx_tokenizer_close(encoder->tokenizer);
        tfx_session_close(&encoder->session);
        tfx_bundle_free(&encoder->bundle);
        free(encoder->all_outputs);
        free(encoder);
    }
}

const tfx_info *tfx_get_info(const tfx_encoder *encoder) {
    return &encoder->info;
}

/* Outputs of no rows, without running. */
static tfx_status empty_outputs(const tfx_feeds *feeds, const tfx_spec *const *wanted, size_t count,
                                tfx_outputs *outputs, tfx_error *error) {
    TFX_TRY(tfx_outputs_new(outputs, count, error));
    for (size_t i = 0; i < count; i++) {
        const tfx_spec *spec = wanted[i];
        int64_t shape[TFX_MAX_RANK];
        for (size_t axis = 0; axis < spec->rank; axis++) {
            shape[axis] = spec->axes[axis] == NULL ? spec->shape[axis] : tfx_feeds_size(feeds, spec->axes[axis], 0);
        }
        const tfx_dtype dtype = spec->dtype == TFX_FLOAT16 ? TFX_FLOAT32 : spec->dtype;
        TFX_TRY(tfx_tensor_new(&outputs->items[i], spec->name, dtype, spec->rank, shape, error));
    }
    return TFX_OK;
}

tfx_status tfx_run_some(const tfx_encoder *encoder, const tfx_tensor *inputs, size_t count,
                        const tfx_spec *const *wanted, size_t wanted_count, tfx_outputs *outputs, tfx_error *error) {
    tfx_feeds feeds;
    memset(outputs, 0, sizeof *outputs);
    TFX_TRY(tfx_feeds_make(&encoder->bundle.manifest, inputs, count, &feeds, error));
    tfx_status status;
    if (tfx_feeds_size(&feeds, "batch", 1) == 0) {
        status = empty_outputs(&feeds, wanted, wanted_count, outputs, error);
    } else {
        status = tfx_session_run(&encoder->session, feeds.items, feeds.count, wanted, wanted_count, outputs, error);
    }
    tfx_feeds_free(&feeds);
    if (status != TFX_OK) {
        tfx_outputs_free(outputs);
    }
    return status;
}

tfx_status tfx_run(tfx_encoder *encoder, const tfx_tensor *inputs, size_t count, tfx_outputs *outputs,
                   tfx_error *error) {
    return tfx_run_some(encoder, inputs, count, encoder->all_outputs, encoder->bundle.manifest.output_count, outputs,
                        error);
}
