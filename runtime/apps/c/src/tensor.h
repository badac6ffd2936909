/* Arrays: memory, and values as one type whatever they are stored as. */
#ifndef TFX_TENSOR_H
#define TFX_TENSOR_H

#include "error.h"

/* The dtype that a manifest ("int64") or safetensors ("I64") calls so, 0 for none. */
tfx_dtype tfx_dtype_of(const char *name);
tfx_dtype tfx_dtype_of_safetensors(const char *name);

bool tfx_is_float(tfx_dtype dtype);

/* Compute the number of values and bytes of a shape; false where a size is negative or memory could not hold it. */
bool tfx_shape_size(const int64_t *shape, size_t rank, tfx_dtype dtype, size_t *count, size_t *bytes);

/*
 * Make a tensor that owns a copy of `name` and zeroed data.
 *
 * TFX_INPUT: the shape is impossible. TFX_MACHINE: no memory. `tensor` is empty then.
 */
tfx_status tfx_tensor_new(tfx_tensor *tensor, const char *name, tfx_dtype dtype, size_t rank, const int64_t *shape,
                          tfx_error *error);

/* Make `count` empty items. */
tfx_status tfx_outputs_new(tfx_outputs *outputs, size_t count, tfx_error *error);

/* Turn a float16 tensor that owns its data into float32; leave others as they are. */
tfx_status tfx_tensor_widen(tfx_tensor *tensor, tfx_error *error);

/* Value `i` as a double; 64-bit integers beyond 2^53 are rounded. */
double tfx_value(const tfx_tensor *tensor, size_t i);

/* Value `i` of an integer or bool tensor; of uint64 beyond int64 the largest int64. */
int64_t tfx_integer(const tfx_tensor *tensor, size_t i);

/* Write "(2, 7)" or, with axes, "(batch, 7)" and return `buffer`. */
const char *tfx_show_shape(const int64_t *shape, const char *const *axes, size_t rank, char *buffer, size_t size);

#endif
