#include <float.h>
#include <string.h>

#include "feeds.h"
#include "tensor.h"

/* Smallest and largest value of an integer dtype; uint64's is cut to int64's, which is what can be compared. */
static void range(tfx_dtype dtype, int64_t *low, int64_t *high) {
    *low = 0;
    *high = INT64_MAX;
    switch (dtype) {
        case TFX_BOOL: *high = 1; break;
        case TFX_INT8: *low = INT8_MIN, *high = INT8_MAX; break;
        case TFX_INT16: *low = INT16_MIN, *high = INT16_MAX; break;
        case TFX_INT32: *low = INT32_MIN, *high = INT32_MAX; break;
        case TFX_INT64: *low = INT64_MIN; break;
        case TFX_UINT8: *high = UINT8_MAX; break;
        case TFX_UINT16: *high = UINT16_MAX; break;
        case TFX_UINT32: *high = UINT32_MAX; break;
        default: break;
    }
}

static void store_integer(tfx_tensor *tensor, size_t i, int64_t value) {
    void *data = tensor->data;
    switch (tensor->dtype) {
        case TFX_INT8: ((int8_t *)data)[i] = (int8_t)value; break;
        case TFX_INT16: ((int16_t *)data)[i] = (int16_t)value; break;
        case TFX_INT32: ((int32_t *)data)[i] = (int32_t)value; break;
        case TFX_INT64: ((int64_t *)data)[i] = value; break;
        case TFX_BOOL:
        case TFX_UINT8: ((uint8_t *)data)[i] = (uint8_t)value; break;
        case TFX_UINT16: ((uint16_t *)data)[i] = (uint16_t)value; break;
        case TFX_UINT32: ((uint32_t *)data)[i] = (uint32_t)value; break;
        case TFX_UINT64: ((uint64_t *)data)[i] = (uint64_t)value; break;
        default: break;
    }
}

static bool is_huge(const tfx_tensor *tensor, size_t i) {
    return tensor->dtype == TFX_UINT64 && ((const uint64_t *)tensor->data)[i] > INT64_MAX;
}

static tfx_status cast_integers(const tfx_tensor *tensor, tfx_tensor *cast, tfx_error *error) {
    int64_t low;
    int64_t high;
    range(cast->dtype, &low, &high);
    const size_t count = tfx_tensor_size(tensor);
    for (size_t i = 0; i < count; i++) {
        const int64_t value = tfx_integer(tensor, i);
        if (is_huge(tensor, i)) {
            return tfx_fail(error, TFX_INPUT, "%s: found %llu (uint64), wanted %s values of %lld to %lld", tensor->name,
                            (unsigned long long)((const uint64_t *)tensor->data)[i], tfx_dtype_name(cast->dtype),
                            (long long)low, (long long)high);
        }
        if (value < low || value > high) {
            return tfx_fail(error, TFX_INPUT, "%s: found %lld (%s), wanted %s values of %lld to %lld", tensor->name,
                            (long long)value, tfx_dtype_name(tensor->dtype), tfx_dtype_name(cast->dtype),
                            (long long)low, (long long)high);
        }
        store_integer(cast, i, value);
    }
    return TFX_OK;
}

/* Largest integer up to which a float dtype holds all: 2 to the number of its digits. */
static int64_t exact_integers(tfx_dtype dtype) {
    return dtype == TFX_FLOAT32 ? (int64_t)1 << FLT_MANT_DIG : (int64_t)1 << DBL_MANT_DIG;
}

static tfx_status cast_to_float(const tfx_tensor *tensor, tfx_tensor *cast, tfx_error *error) {
    const int64_t most = exact_integers(cast->dtype);
    const size_t count = tfx_tensor_size(tensor);
    for (size_t i = 0; i < count; i++) {
        const int64_t whole = tfx_is_float(tensor->dtype) ? 0 : tfx_integer(tensor, i);
        if (whole > most || whole < -most) {
            return tfx_fail(error, TFX_INPUT, "%s: found %lld (%s), wanted %s, which does not hold it", tensor->name,
                            (long long)whole, tfx_dtype_name(tensor->dtype), tfx_dtype_name(cast->dtype));
        }
        const double value = tfx_value(tensor, i);
        if (cast->dtype == TFX_FLOAT32) {
            ((float *)cast->data)[i] = (float)value;
        } else {
            ((double *)cast->data)[i] = value;
        }
    }
    return TFX_OK;
}

/* Zeros and ones are what masks hold; no other integer is worth a conversion to float16 here. */
static tfx_status cast_to_half(const tfx_tensor *tensor, tfx_tensor *cast, tfx_error *error) {
    const size_t count = tfx_tensor_size(tensor);
    for (size_t i = 0; i < count; i++) {
        const int64_t value = tfx_integer(tensor, i);
        if (value != 0 && value != 1) {
            return tfx_fail(error, TFX_INPUT, "%s: found %lld (%s), wanted float16", tensor->name, (long long)value,
                            tfx_dtype_name(tensor->dtype));
        }
        ((uint16_t *)cast->data)[i] = value == 1 ? 0x3C00 : 0;
    }
    return TFX_OK;
}

tfx_status tfx_cast(const tfx_tensor *tensor, tfx_dtype wanted, tfx_tensor *cast, tfx_error *error) {
    memset(cast, 0, sizeof *cast);
    const bool from_float = tfx_is_float(tensor->dtype);
    const bool to_float = tfx_is_float(wanted);
    const bool wider = from_float && to_float && tfx_dtype_size(tensor->dtype) < tfx_dtype_size(wanted);
    if (from_float && !wider && tensor->dtype != wanted && tfx_tensor_size(tensor) > 0) {
        return tfx_fail(error, TFX_INPUT, "%s: found %s, wanted %s", tensor->name, tfx_dtype_name(tensor->dtype),
                        tfx_dtype_name(wanted));
    }
    TFX_TRY(tfx_tensor_new(cast, tensor->name, wanted, tensor->rank, tensor->shape, error));
    tfx_status status = TFX_OK;
    if (tensor->dtype == wanted) {
        memcpy(cast->data, tensor->data, tfx_tensor_size(tensor) * tfx_dtype_size(wanted));
    } else if (wanted == TFX_FLOAT16) {
        status = cast_to_half(tensor, cast, error);
    } else if (to_float) {
        status = cast_to_float(tensor, cast, error);
    } else {
        status = cast_integers(tensor, cast, error);
    }
    if (status != TFX_OK) {
        tfx_tensor_free(cast);
    }
    return status;
}
