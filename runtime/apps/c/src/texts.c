/* Texts to the model's inputs and its outputs back to the texts. */
#include <stdlib.h>
#include <string.h>

#include "encoder.h"
#include "tensor.h"

#define BATCH_ROWS 32

static tfx_status encode(const tfx_encoder *encoder, const char *text, tfx_tokens *tokens, tfx_error *error) {
    memset(tokens, 0, sizeof *tokens);
    if (encoder->tokenizer == NULL) {
        return tfx_fail(error, encoder->tokenizer_status, "%s", encoder->tokenizer_problem.message);
    }
    if (text == NULL) {
        return tfx_fail(error, TFX_INPUT, "found NULL, wanted a text");
    }
    TFX_TRY(tfx_tokenizer_encode(encoder->tokenizer, text, strlen(text), tokens, error));
    if (tokens->count == 0) {
        tfx_tokens_free(tokens);
        return tfx_fail(error, TFX_INPUT, "has no tokens");
    }
    return TFX_OK;
}

tfx_status tfx_tokenize(tfx_encoder *encoder, const char *text, tfx_tokens *tokens, tfx_error *error) {
    return encode(encoder, text, tokens, error);
}

tfx_status tfx_tokenize_all(const tfx_encoder *encoder, const char *const *texts, size_t count, tfx_tokens **tokens,
                            tfx_error *error) {
    *tokens = NULL;
    if (count == 0) {
        return tfx_fail(error, TFX_INPUT, "texts: found an empty list, wanted at least one text");
    }
    if (encoder->tokenizer == NULL) { /* the fault of no single text */
        return tfx_fail(error, encoder->tokenizer_status, "%s", encoder->tokenizer_problem.message);
    }
    *tokens = calloc(count, sizeof **tokens);
    if (*tokens == NULL) {
        return tfx_no_memory(error);
    }
    for (size_t i = 0; i < count; i++) {
        tfx_error reason;
        const tfx_status status = encode(encoder, texts[i], &(*tokens)[i], &reason);
        if (status != TFX_OK) {
            tfx_tokens_free_all(*tokens, count);
            *tokens = NULL;
            return tfx_fail(error, status, "texts[%zu]: %s", i, reason.message);
        }
    }
    return TFX_OK;
}

void tfx_tokens_free_all(tfx_tokens *tokens, size_t count) {
    for (size_t i = 0; tokens != NULL && i < count; i++) {
        tfx_tokens_free(&tokens[i]);
    }
    free(tokens);
}

typedef enum { IDS, ATTENDED, IGNORED, TYPES, POSITIONS } content;

static const struct {
    const char *role;
    content what;
} CONTENTS[] = {
    {"token_ids", IDS},        {"attention_mask", ATTENDED}, {"padding_mask", IGNORED},
    {"token_type_ids", TYPES}, {"position_ids", POSITIONS},
};

static int64_t value_at(content what, const tfx_tokens *row, size_t place, int64_t pad_id) {
    const bool padding = place >= row->count;
    switch (what) {
        case IDS: return padding ? pad_id : row->ids[place];
        case ATTENDED: return padding ? 0 : 1;
        case IGNORED: return padding ? 1 : 0;
        case TYPES: return padding ? 0 : row->types[place];
        case POSITIONS: return (int64_t)place;
    }
    return 0;
}

static tfx_status fill(const tfx_spec *spec, const tfx_tokens *tokens, const size_t *rows, size_t count, size_t length,
                       int64_t pad_id, tfx_tensor *input, tfx_error *error) {
    for (size_t i = 0; i < sizeof CONTENTS / sizeof CONTENTS[0]; i++) {
        if (strcmp(CONTENTS[i].role, spec->role) != 0) {
            continue;
        }
        const int64_t shape[] = {(int64_t)count, (int64_t)length};
        TFX_TRY(tfx_tensor_new(input, spec->name, TFX_INT64, 2, shape, error));
        int64_t *values = input->data;
        for (size_t row = 0; row < count; row++) {
            for (size_t place = 0; place < length; place++) {
                *values++ = value_at(CONTENTS[i].what, &tokens[rows[row]], place, pad_id);
            }
        }
        return TFX_OK;
    }
    return tfx_fail(error, TFX_INPUT, "%s: text gives no %s; this bundle takes arrays", spec->name, spec->role);
}

/* Pad rows on the right with the model's pad id, to one (rows, length) array per input. */
static tfx_status pad(const tfx_manifest *manifest, const tfx_tokens *tokens, const size_t *rows, size_t count,
                      tfx_outputs *inputs, tfx_error *error) {
    size_t length = 0;
    for (size_t i = 0; i < count; i++) {
        length = tokens[rows[i]].count > length ? tokens[rows[i]].count : length;
    }
    TFX_TRY(tfx_outputs_new(inputs, manifest->input_count, error));
    for (size_t i = 0; i < manifest->input_count; i++) {
        const tfx_status status =
            fill(&manifest->inputs[i], tokens, rows, count, length, manifest->pad_id, &inputs->items[i], error);
        if (status != TFX_OK) {
            tfx_outputs_free(inputs);
            return status;
        }
    }
    return TFX_OK;
}

static tfx_status run_batch(const tfx_encoder *encoder, const tfx_tokens *tokens, const size_t *rows, size_t count,
                            const tfx_spec *const *wanted, size_t wanted_count, tfx_take take, void *target,
                            tfx_error *error) {
    tfx_outputs inputs;
    tfx_outputs outputs;
    TFX_TRY(pad(&encoder->bundle.manifest, tokens, rows, count, &inputs, error));
    tfx_status status = tfx_run_some(encoder, inputs.items, inputs.count, wanted, wanted_count, &outputs, error);
    if (status == TFX_OK) {
        status = take(target, &outputs, tokens, rows, count, error);
        tfx_outputs_free(&outputs);
    }
    tfx_outputs_free(&inputs);
    return status;
}

typedef struct {
    size_t length;
    size_t index;
} item;

/* The longest first; texts of one length keep their order. */
static int compare(const void *a, const void *b) {
    const item *x = a;
    const item *y = b;
    if (x->length != y->length) {
        return x->length < y->length ? 1 : -1;
    }
    return x->index < y->index ? -1 : 1;
}

static size_t *order_by_length(const tfx_tokens *tokens, size_t count) {
    item *items = calloc(count, sizeof *items);
    size_t *order = calloc(count, sizeof *order);
    if (items == NULL || order == NULL) {
        free(items);
        free(order);
        return NULL;
    }
    for (size_t i = 0; i < count; i++) {
        items[i] = (item){tokens[i].count, i};
    }
    qsort(items, count, sizeof *items, compare);
    for (size_t i = 0; i < count; i++) {
        order[i] = items[i].index;
    }
    free(items);
    return order;
}

tfx_status tfx_run_batches(const tfx_encoder *encoder, const tfx_tokens *tokens, size_t count,
                           const tfx_spec *const *wanted, size_t wanted_count, tfx_take take, void *target,
                           tfx_error *error) {
    size_t *order = order_by_length(tokens, count);
    if (order == NULL) {
        return tfx_no_memory(error);
    }
    tfx_status status = TFX_OK;
    for (size_t start = 0; start < count && status == TFX_OK; start += BATCH_ROWS) {
        const size_t rows = count - start < BATCH_ROWS ? count - start : BATCH_ROWS;
        status = run_batch(encoder, tokens, order + start, rows, wanted, wanted_count, take, target, error);
    }
    free(order);
    return status;
}
