/* What callers get of their texts: one vector each, or every output. */
#include <stdlib.h>
#include <string.h>

#include "encoder.h"
#include "tensor.h"

/* The vectors of all texts, made when the first batch says how long they are. */
typedef struct {
    tfx_tensor *vectors;
    size_t count;
} vectors_of;

static tfx_status take_vectors(void *target, const tfx_outputs *outputs, const tfx_tokens *tokens, const size_t *rows,
                               size_t row_count, tfx_error *error) {
    (void)tokens;
    const vectors_of *all = target;
    const tfx_tensor *found = &outputs->items[0];
    if (found->rank != 2 || found->shape[0] != (int64_t)row_count || !tfx_is_float(found->dtype) ||
        (all->vectors->data != NULL && all->vectors->shape[1] != found->shape[1])) {
        char shown[128];
        return tfx_fail(error, TFX_INPUT, "%s: found shape %s, wanted one vector for each of %zu texts", found->name,
                        tfx_show_shape(found->shape, NULL, found->rank, shown, sizeof shown), row_count);
    }
    const size_t width = (size_t)found->shape[1];
    if (all->vectors->data == NULL) {
        const int64_t shape[] = {(int64_t)all->count, found->shape[1]};
        TFX_TRY(tfx_tensor_new(all->vectors, found->name, TFX_FLOAT32, 2, shape, error));
    }
    for (size_t row = 0; row < row_count; row++) {
        float *vector = (float *)all->vectors->data + rows[row] * width;
        for (size_t i = 0; i < width; i++) {
            vector[i] = (float)tfx_value(found, row * width + i);
        }
    }
    return TFX_OK;
}

static tfx_status want_pooling(const tfx_encoder *encoder, tfx_error *error) {
    if (encoder->pooled == NULL) {
        return tfx_fail(error, TFX_INPUT,
                        "%s: has no pooling, so a text has no one vector; take its raw outputs (--raw, tfx_run_texts), "
                        "or export it with --pooling mean",
                        encoder->bundle.folder);
    }
    return TFX_OK;
}

/* Callers may have made the tokens of something else than a text. */
static tfx_status check_tokens(const tfx_tokens *tokens, size_t count, tfx_error *error) {
    if (count == 0) {
        return tfx_fail(error, TFX_INPUT, "tokens: found an empty list, wanted those of at least one text");
    }
    for (size_t i = 0; i < count; i++) {
        if (tokens[i].count == 0 || tokens[i].ids == NULL || tokens[i].types == NULL) {
            return tfx_fail(error, TFX_INPUT, "tokens[%zu]: found none, wanted ids and types", i);
        }
    }
    return TFX_OK;
}

tfx_status tfx_embed(tfx_encoder *encoder, const char *const *texts, size_t count, tfx_tensor *vectors,
                     tfx_error *error) {
    memset(vectors, 0, sizeof *vectors);
    TFX_TRY(want_pooling(encoder, error));
    tfx_tokens *tokens;
    TFX_TRY(tfx_tokenize_all(encoder, texts, count, &tokens, error));
    const tfx_status status = tfx_embed_tokens(encoder, tokens, count, vectors, error);
    tfx_tokens_free_all(tokens, count);
    return status;
}

tfx_status tfx_embed_tokens(tfx_encoder *encoder, const tfx_tokens *tokens, size_t count, tfx_tensor *vectors,
                            tfx_error *error) {
    memset(vectors, 0, sizeof *vectors);
    TFX_TRY(want_pooling(encoder, error));
    TFX_TRY(check_tokens(tokens, count, error));
    vectors_of all = {vectors, count};
    const tfx_status status = tfx_run_batches(encoder, tokens, count, &encoder->pooled, 1, take_vectors, &all, error);
    if (status != TFX_OK) {
        tfx_tensor_free(vectors);
    }
    return status;
}

tfx_status tfx_copy_row(const tfx_spec *spec, const tfx_tensor *output, size_t row, size_t length, tfx_tensor *copy,
                        tfx_error *error) {
    int64_t shape[TFX_MAX_RANK];
    size_t rank = 0;
    const bool batched = output->rank > 0 && tfx_has_axis(spec, 0, "batch");
    const size_t first = batched ? 1 : 0;
    for (size_t i = first; i < output->rank; i++) {
        const bool cut = batched && i == 1 && tfx_has_axis(spec, 1, "sequence") && output->shape[1] > (int64_t)length;
        shape[rank++] = cut ? (int64_t)length : output->shape[i];
    }
    if (batched && (int64_t)row >= output->shape[0]) {
        return tfx_fail(error, TFX_INPUT, "%s: found %lld rows, wanted row %zu", spec->name,
                        (long long)output->shape[0], row);
    }
    TFX_TRY(tfx_tensor_new(copy, spec->name, output->dtype, rank, shape, error));
    const size_t size = tfx_dtype_size(output->dtype);
    const size_t stride = batched ? tfx_tensor_size(output) / (size_t)output->shape[0] * size : 0;
    const size_t bytes = tfx_tensor_size(copy) * size; /* positions beyond the length lie behind the others */
    if (bytes > 0) {
        memcpy(copy->data, (const char *)output->data + row * stride, bytes);
    }
    return TFX_OK;
}

/* The outputs of all texts. */
typedef struct {
    const tfx_encoder *encoder;
    tfx_outputs *results;
} results_of;

static tfx_status take_results(void *target, const tfx_outputs *outputs, const tfx_tokens *tokens, const size_t *rows,
                               size_t row_count, tfx_error *error) {
    const results_of *all = target;
    for (size_t row = 0; row < row_count; row++) {
        tfx_outputs *result = &all->results[rows[row]];
        TFX_TRY(tfx_outputs_new(result, outputs->count, error));
        for (size_t i = 0; i < outputs->count; i++) {
            TFX_TRY(tfx_copy_row(all->encoder->all_outputs[i], &outputs->items[i], row, tokens[rows[row]].count,
                                 &result->items[i], error));
        }
    }
    return TFX_OK;
}

tfx_status tfx_run_texts(tfx_encoder *encoder, const char *const *texts, size_t count, tfx_outputs *results,
                         tfx_error *error) {
    for (size_t i = 0; i < count; i++) {
        memset(&results[i], 0, sizeof results[i]);
    }
    tfx_tokens *tokens;
    TFX_TRY(tfx_tokenize_all(encoder, texts, count, &tokens, error));
    const tfx_status status = tfx_run_tokens(encoder, tokens, count, results, error);
    tfx_tokens_free_all(tokens, count);
    return status;
}

tfx_status tfx_run_tokens(tfx_encoder *encoder, const tfx_tokens *tokens, size_t count, tfx_outputs *results,
                          tfx_error *error) {
    for (size_t i = 0; i < count; i++) {
        memset(&results[i], 0, sizeof results[i]);
    }
    TFX_TRY(check_tokens(tokens, count, error));
    results_of all = {encoder, results};
    const tfx_status status = tfx_run_batches(encoder, tokens, count, encoder->all_outputs,
                                              encoder->bundle.manifest.output_count, take_results, &all, error);
    for (size_t i = 0; status != TFX_OK && i < count; i++) {
        tfx_outputs_free(&results[i]);
    }
    return status;
}
