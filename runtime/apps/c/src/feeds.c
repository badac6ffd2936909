#include "feeds.h"

#include <stdlib.h>
#include <string.h>

#include "tensor.h"

static bool is_mask(const tfx_spec *spec) {
    return strcmp(spec->role, "attention_mask") == 0 || strcmp(spec->role, "padding_mask") == 0;
}

static tfx_axis *find_axis(const tfx_feeds *feeds, const char *name) {
    for (size_t i = 0; i < feeds->axis_count; i++) {
        if (strcmp(feeds->axes[i].name, name) == 0) {
            return &feeds->axes[i];
        }
    }
    return NULL;
}

int64_t tfx_feeds_size(const tfx_feeds *feeds, const char *axis, int64_t otherwise) {
    const tfx_axis *found = find_axis(feeds, axis);
    return found == NULL ? otherwise : found->size;
}

static tfx_status wrong_shape(const tfx_spec *spec, const tfx_tensor *tensor, tfx_error *error) {
    char found[128];
    char wanted[256];
    tfx_show_shape(tensor->shape, NULL, tensor->rank, found, sizeof found);
    tfx_show_shape(spec->shape, spec->axes, spec->rank, wanted, sizeof wanted);
    return tfx_fail(error, TFX_INPUT, "%s: found shape %s, wanted %s", spec->name, found, wanted);
}

static tfx_status check_tensor(const tfx_tensor *tensor, tfx_error *error) {
    size_t count;
    size_t bytes;
    if (tfx_dtype_name(tensor->dtype) == NULL || tensor->rank > TFX_MAX_RANK ||
        !tfx_shape_size(tensor->shape, tensor->rank, tensor->dtype, &count, &bytes) ||
        (tensor->data == NULL && count > 0)) {
        return tfx_fail(error, TFX_INPUT, "%s: no array: its dtype, rank, shape or data is impossible", tensor->name);
    }
    for (size_t i = 0; tensor->dtype == TFX_BOOL && i < count; i++) {
        if (((const uint8_t *)tensor->data)[i] > 1) {
            return tfx_fail(error, TFX_INPUT, "%s: found %u (bool), wanted 0 or 1", tensor->name,
                            (unsigned)((const uint8_t *)tensor->data)[i]);
        }
    }
    return TFX_OK;
}

static tfx_status check_shape(tfx_feeds *feeds, const tfx_spec *spec, const tfx_tensor *tensor, tfx_error *error) {
    if (tensor->rank != spec->rank) {
        return wrong_shape(spec, tensor, error);
    }
    for (size_t i = 0; i < spec->rank; i++) {
        const int64_t size = tensor->shape[i];
        if (spec->axes[i] == NULL) {
            if (size != spec->shape[i]) {
                return wrong_shape(spec, tensor, error);
            }
            continue;
        }
        const tfx_axis *known = find_axis(feeds, spec->axes[i]);
        if (known == NULL) {
            feeds->axes[feeds->axis_count++] = (tfx_axis){spec->axes[i], size, spec->name};
        } else if (known->size != size) {
            return tfx_fail(error, TFX_INPUT, "%s: found %s %lld, wanted %lld as in %s", spec->name, known->name,
                            (long long)size, (long long)known->size, known->owner);
        }
    }
    return TFX_OK;
}

/* Put a caller's array where it belongs, cast if it must be. */
static tfx_status place(const tfx_manifest *manifest, tfx_feeds *feeds, const tfx_tensor *input, tfx_error *error) {
    if (input->name == NULL) {
        return tfx_fail(error, TFX_INPUT, "inputs: found one without a name");
    }
    for (size_t i = 0; i < manifest->input_count; i++) {
        const tfx_spec *spec = &manifest->inputs[i];
        if (strcmp(spec->name, input->name) != 0) {
            continue;
        }
        if (feeds->items[i].name != NULL) {
            return tfx_fail(error, TFX_INPUT, "inputs: found %s twice", input->name);
        }
        TFX_TRY(check_tensor(input, error));
        TFX_TRY(check_shape(feeds, spec, input, error));
        if (input->dtype == spec->dtype) {
            feeds->items[i] = *input;
            return TFX_OK;
        }
        feeds->owned[i] = true;
        return tfx_cast(input, spec->dtype, &feeds->items[i], error);
    }
    char names[512] = "";
    for (size_t i = 0; i < manifest->input_count; i++) {
        const size_t used = strlen(names);
        snprintf(names + used, sizeof names - used, "%s%s", i == 0 ? "" : ", ", manifest->inputs[i].name);
    }
    return tfx_fail(error, TFX_INPUT, "inputs: found \"%.80s\", wanted only %s", input->name, names);
}

/* Refuse to make up a mask for rows that look padded: attending to padding is wrong in silence. */
static tfx_status check_unpadded(const tfx_manifest *manifest, const tfx_feeds *feeds, const tfx_spec *mask,
                                 tfx_error *error) {
    for (size_t i = 0; i < manifest->input_count; i++) {
        const tfx_tensor *ids = &feeds->items[i];
        if (strcmp(manifest->inputs[i].role, "token_ids") != 0 || ids->name == NULL || ids->rank != 2 ||
            ids->shape[1] < 2) {
            continue;
        }
        const size_t length = (size_t)ids->shape[1];
        for (size_t row = 0; row < (size_t)ids->shape[0]; row++) {
            if (tfx_integer(ids, row * length) == manifest->pad_id ||
                tfx_integer(ids, row * length + length - 1) == manifest->pad_id) {
                return tfx_fail(
                    error, TFX_INPUT,
                    "%s: missing, and %s has rows that begin or end with the padding id %lld; give the mask",
                    mask->name, ids->name, (long long)manifest->pad_id);
            }
        }
    }
    return TFX_OK;
}

/* Make up an input that was not given. */
static tfx_status complete(const tfx_manifest *manifest, tfx_feeds *feeds, size_t index, tfx_error *error) {
    const tfx_spec *spec = &manifest->inputs[index];
    const bool zeros = strcmp(spec->role, "token_type_ids") == 0 || strcmp(spec->role, "padding_mask") == 0;
    int64_t shape[TFX_MAX_RANK];
    bool known = zeros || strcmp(spec->role, "attention_mask") == 0;
    for (size_t i = 0; i < spec->rank; i++) {
        shape[i] = spec->axes[i] == NULL ? spec->shape[i] : tfx_feeds_size(feeds, spec->axes[i], -1);
        known = known && shape[i] >= 0;
    }
    if (!known) {
        return tfx_fail(error, TFX_INPUT, "%s: missing", spec->name);
    }
    tfx_tensor bytes;
    TFX_TRY(tfx_tensor_new(&bytes, spec->name, TFX_UINT8, spec->rank, shape, error));
    if (!zeros) {
        memset(bytes.data, 1, tfx_tensor_size(&bytes));
    }
    feeds->owned[index] = true;
    const tfx_status status = tfx_cast(&bytes, spec->dtype, &feeds->items[index], error);
    tfx_tensor_free(&bytes);
    TFX_TRY(status);
    return is_mask(spec) ? check_unpadded(manifest, feeds, spec, error) : TFX_OK;
}

static tfx_status check_lengths(const tfx_manifest *manifest, const tfx_feeds *feeds, tfx_error *error) {
    for (size_t i = 0; i < feeds->axis_count; i++) {
        const tfx_axis *axis = &feeds->axes[i];
        if (axis->size == 0) {
            return tfx_fail(error, TFX_INPUT, "%s: found %s length 0, wanted at least 1", axis->owner, axis->name);
        }
        if (strcmp(axis->name, "sequence") == 0 && manifest->max_length >= 0 && axis->size > manifest->max_length) {
            return tfx_fail(error, TFX_INPUT, "%s: found sequence length %lld, wanted at most %lld", axis->owner,
                            (long long)axis->size, (long long)manifest->max_length);
        }
    }
    return TFX_OK;
}

tfx_status tfx_check_values(const tfx_spec *spec, const tfx_tensor *tensor, tfx_error *error) {
    const size_t count = tfx_tensor_size(tensor);
    const bool mask = is_mask(spec);
    const bool ids = strstr(spec->role, "_ids") != NULL;
    if (!mask && (tfx_is_float(tensor->dtype) || (!ids && spec->limit == 0))) {
        return TFX_OK;
    }
    for (size_t i = 0; i < count; i++) {
        if (tfx_is_float(tensor->dtype)) {
            const double value = tfx_value(tensor, i);
            if (!(value >= 0 && value <= 0) && !(value >= 1 && value <= 1)) {
                return tfx_fail(error, TFX_INPUT, "%s: found %g, wanted 0 or 1", spec->name, value);
            }
            continue;
        }
        const long long value = tfx_integer(tensor, i);
        if (mask && (value < 0 || value > 1)) {
            return tfx_fail(error, TFX_INPUT, "%s: found %lld, wanted 0 or 1", spec->name, value);
        }
        if (!mask && spec->limit > 0 && (value < 0 || value >= spec->limit)) {
            return tfx_fail(error, TFX_INPUT, "%s: found %lld, wanted values of 0 to %lld", spec->name, value,
                            (long long)spec->limit - 1);
        }
        if (ids && value < 0) {
            return tfx_fail(error, TFX_INPUT, "%s: found %lld, wanted at least 0", spec->name, value);
        }
    }
    return TFX_OK;
}

static tfx_status make(const tfx_manifest *manifest, const tfx_tensor *inputs, size_t count, tfx_feeds *feeds,
                       tfx_error *error) {
    for (size_t i = 0; i < count; i++) {
        TFX_TRY(place(manifest, feeds, &inputs[i], error));
    }
    for (size_t i = 0; i < manifest->input_count; i++) {
        if (feeds->items[i].name == NULL) {
            TFX_TRY(complete(manifest, feeds, i, error));
        }
    }
    if (tfx_feeds_size(feeds, "batch", 1) == 0) {
        return TFX_OK; /* nothing runs */
    }
    TFX_TRY(check_lengths(manifest, feeds, error));
    for (size_t i = 0; i < manifest->input_count; i++) {
        TFX_TRY(tfx_check_values(&manifest->inputs[i], &feeds->items[i], error));
    }
    return TFX_OK;
}

tfx_status tfx_feeds_make(const tfx_manifest *manifest, const tfx_tensor *inputs, size_t count, tfx_feeds *feeds,
                          tfx_error *error) {
    *feeds = (tfx_feeds){
        .items = calloc(manifest->input_count, sizeof *feeds->items),
        .owned = calloc(manifest->input_count, sizeof *feeds->owned),
        .count = manifest->input_count,
        .axes = calloc(manifest->input_count * TFX_MAX_RANK, sizeof *feeds->axes),
    };
    tfx_status status = TFX_OK;
    if (feeds->items == NULL || feeds->owned == NULL || feeds->axes == NULL) {
        status = tfx_no_memory(error);
    } else {
        status = make(manifest, inputs, count, feeds, error);
    }
    if (status != TFX_OK) {
        tfx_feeds_free(feeds);
    }
    return status;
}

void tfx_feeds_free(tfx_feeds *feeds) {
    for (size_t i = 0; feeds->items != NULL && feeds->owned != NULL && i < feeds->count; i++) {
        if (feeds->owned[i]) {
            tfx_tensor_free(&feeds->items[i]);
        }
    }
    free(feeds->items);
    free(feeds->owned);
    free(feeds->axes);
    memset(feeds, 0, sizeof *feeds);
}
