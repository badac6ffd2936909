#include "tensor.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "file.h"

static const struct {
    const char *name;
    const char *safetensors;
    size_t size;
} DTYPES[] = {
    [TFX_BOOL] = {"bool", "BOOL", 1},      [TFX_INT8] = {"int8", "I8", 1},        [TFX_INT16] = {"int16", "I16", 2},
    [TFX_INT32] = {"int32", "I32", 4},     [TFX_INT64] = {"int64", "I64", 8},     [TFX_UINT8] = {"uint8", "U8", 1},
    [TFX_UINT16] = {"uint16", "U16", 2},   [TFX_UINT32] = {"uint32", "U32", 4},   [TFX_UINT64] = {"uint64", "U64", 8},
    [TFX_FLOAT16] = {"float16", "F16", 2}, [TFX_FLOAT32] = {"float32", "F32", 4}, [TFX_FLOAT64] = {"float64", "F64", 8},
};

#define DTYPE_COUNT (sizeof DTYPES / sizeof DTYPES[0])

static bool known(tfx_dtype dtype) {
    return (size_t)dtype >= 1 && (size_t)dtype < DTYPE_COUNT;
}

size_t tfx_dtype_size(tfx_dtype dtype) {
    return known(dtype) ? DTYPES[dtype].size : 0;
}

const char *tfx_dtype_name(tfx_dtype dtype) {
    return known(dtype) ? DTYPES[dtype].name : NULL;
}

tfx_dtype tfx_dtype_of(const char *name) {
    for (size_t i = 1; i < DTYPE_COUNT; i++) {
        if (strcmp(DTYPES[i].name, name) == 0) {
            return (tfx_dtype)i;
        }
    }
    return (tfx_dtype)0;
}

tfx_dtype tfx_dtype_of_safetensors(const char *name) {
    for (size_t i = 1; i < DTYPE_COUNT; i++) {
        if (strcmp(DTYPES[i].safetensors, name) == 0) {
            return (tfx_dtype)i;
        }
    }
    return (tfx_dtype)0;
}

bool tfx_is_float(tfx_dtype dtype) {
    return dtype == TFX_FLOAT16 || dtype == TFX_FLOAT32 || dtype == TFX_FLOAT64;
}

bool tfx_shape_size(const int64_t *shape, size_t rank, tfx_dtype dtype, size_t *count, size_t *bytes) {
    const size_t largest = (size_t)PTRDIFF_MAX / 8;
    size_t product = 1;
    bool empty = false;
    for (size_t i = 0; i < rank; i++) {
        if (shape[i] < 0) {
            return false;
        }
        empty = empty || shape[i] == 0;
        /* An empty tensor is bounded as well: numpy and onnxruntime multiply the other sizes all the same. */
        const size_t size = shape[i] == 0 ? 1 : (size_t)shape[i];
        if (size > largest / product) {
            return false;
        }
        product *= size;
    }
    *count = empty ? 0 : product;
    *bytes = *count * tfx_dtype_size(dtype);
    return true;
}

size_t tfx_tensor_size(const tfx_tensor *tensor) {
    size_t count = 0;
    size_t bytes = 0;
    return tfx_shape_size(tensor->shape, tensor->rank, tensor->dtype, &count, &bytes) ? count : 0;
}

tfx_status tfx_tensor_new(tfx_tensor *tensor, const char *name, tfx_dtype dtype, size_t rank, const int64_t *shape,
                          tfx_error *error) {
    size_t count;
    size_t bytes;
    memset(tensor, 0, sizeof *tensor);
    if (rank > TFX_MAX_RANK || !known(dtype) || !tfx_shape_size(shape, rank, dtype, &count, &bytes)) {
        char shown[128];
        const size_t most = rank > TFX_MAX_RANK ? TFX_MAX_RANK : rank;
        return tfx_fail(error, TFX_INPUT, "%s: no array can have the shape %s", name,
                        tfx_show_shape(shape, NULL, most, shown, sizeof shown));
    }
    tensor->name = tfx_copy_text(name);
    tensor->dtype = dtype;
    tensor->rank = rank;
    for (size_t i = 0; i < rank; i++) {
        tensor->shape[i] = shape[i];
    }
    tensor->data = calloc(bytes > 0 ? bytes : 1, 1);
    if (tensor->name == NULL || tensor->data == NULL) {
        tfx_tensor_free(tensor);
        return tfx_fail(error, TFX_MACHINE, "out of memory: %s takes %zu bytes", name, bytes);
    }
    return TFX_OK;
}

void tfx_tensor_free(tfx_tensor *tensor) {
    if (tensor != NULL) {
        free((void *)(uintptr_t)tensor->name); /* const for callers' literals; a result's name is ours */
        free(tensor->data);
        memset(tensor, 0, sizeof *tensor);
    }
}

tfx_status tfx_outputs_new(tfx_outputs *outputs, size_t count, tfx_error *error) {
    outputs->items = calloc(count > 0 ? count : 1, sizeof *outputs->items);
    outputs->count = outputs->items == NULL ? 0 : count;
    return outputs->items == NULL ? tfx_no_memory(error) : TFX_OK;
}

const tfx_tensor *tfx_outputs_find(const tfx_outputs *outputs, const char *name) {
    for (size_t i = 0; i < outputs->count; i++) {
        if (outputs->items[i].name != NULL && strcmp(outputs->items[i].name, name) == 0) {
            return &outputs->items[i];
        }
    }
    return NULL;
}

void tfx_outputs_free(tfx_outputs *outputs) {
    if (outputs != NULL) {
        for (size_t i = 0; i < outputs->count; i++) {
            tfx_tensor_free(&outputs->items[i]);
        }
        free(outputs->items);
        memset(outputs, 0, sizeof *outputs);
    }
}

void tfx_tokens_free(tfx_tokens *tokens) {
    if (tokens != NULL) {
        free(tokens->ids);
        free(tokens->types);
        memset(tokens, 0, sizeof *tokens);
    }
}

static float half_value(uint16_t half) {
    const int exponent = (half >> 10) & 0x1F;
    const int fraction = half & 0x3FF;
    float value;
    if (exponent == 0x1F) {
        value = fraction == 0 ? INFINITY : NAN;
    } else if (exponent == 0) {
        value = ldexpf((float)fraction, -24);
    } else {
        value = ldexpf((float)(fraction + 0x400), exponent - 25);
    }
    return (half & 0x8000) != 0 ? -value : value;
}

tfx_status tfx_tensor_widen(tfx_tensor *tensor, tfx_error *error) {
    if (tensor->dtype != TFX_FLOAT16) {
        return TFX_OK;
    }
    const size_t count = tfx_tensor_size(tensor);
    float *values = calloc(count > 0 ? count : 1, sizeof *values);
    if (values == NULL) {
        return tfx_no_memory(error);
    }
    for (size_t i = 0; i < count; i++) {
        values[i] = half_value(((const uint16_t *)tensor->data)[i]);
    }
    free(tensor->data);
    tensor->data = values;
    tensor->dtype = TFX_FLOAT32;
    return TFX_OK;
}

int64_t tfx_integer(const tfx_tensor *tensor, size_t i) {
    const void *data = tensor->data;
    switch (tensor->dtype) {
        case TFX_INT8: return ((const int8_t *)data)[i];
        case TFX_INT16: return ((const int16_t *)data)[i];
        case TFX_INT32: return ((const int32_t *)data)[i];
        case TFX_INT64: return ((const int64_t *)data)[i];
        case TFX_BOOL:
        case TFX_UINT8: return ((const uint8_t *)data)[i];
        case TFX_UINT16: return ((const uint16_t *)data)[i];
        case TFX_UINT32: return ((const uint32_t *)data)[i];
        case TFX_UINT64: {
            const uint64_t value = ((const uint64_t *)data)[i];
            return value > INT64_MAX ? INT64_MAX : (int64_t)value;
        }
        default: return 0;
    }
}

double tfx_value(const tfx_tensor *tensor, size_t i) {
    const void *data = tensor->data;
    switch (tensor->dtype) {
        case TFX_FLOAT16: return (double)half_value(((const uint16_t *)data)[i]);
        case TFX_FLOAT32: return (double)((const float *)data)[i];
        case TFX_FLOAT64: return ((const double *)data)[i];
        case TFX_UINT64: return (double)((const uint64_t *)data)[i];
        default: return (double)tfx_integer(tensor, i);
    }
}

const char *tfx_show_shape(const int64_t *shape, const char *const *axes, size_t rank, char *buffer, size_t size) {
    size_t used = 0;
    buffer[0] = '\0';
    for (size_t i = 0; i < rank && used < size; i++) {
        const char *before = i == 0 ? "(" : ", ";
        const int written = axes != NULL && axes[i] != NULL
                                ? snprintf(buffer + used, size - used, "%s%s", before, axes[i])
                                : snprintf(buffer + used, size - used, "%s%lld", before, (long long)shape[i]);
        used += written > 0 ? (size_t)written : 0;
    }
    if (used < size) {
        snprintf(buffer + used, size - used, "%s", rank == 0 ? "()" : ")");
    }
    return buffer;
}
