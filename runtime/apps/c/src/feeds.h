/* Inputs checked against the manifest before onnxruntime sees them. */
#ifndef TFX_FEEDS_H
#define TFX_FEEDS_H

#include "manifest.h"

/* The size of an axis that has a name, and the input that said it first. */
typedef struct tfx_axis {
    const char *name;
    int64_t size;
    const char *owner;
} tfx_axis;

/* One array per input of the model, in its order and dtype. */
typedef struct tfx_feeds {
    tfx_tensor *items;
    bool *owned; /* whether the item's memory is ours; else the caller's */
    size_t count;
    tfx_axis *axes;
    size_t axis_count;
} tfx_feeds;

/*
 * Check and complete inputs: names, ranks, sizes, ranges and the longest sequence. Numbers are cast where nothing is
 * lost. A missing mask attends everywhere and is an error where ids look padded; missing segment ids are zeros.
 *
 * feeds: receives the arrays; released with tfx_feeds_free before `inputs` are.
 *
 * TFX_INPUT: the message names the input, what was found and what was wanted. TFX_MACHINE: no memory. `feeds` is empty
 * then.
 */
tfx_status tfx_feeds_make(const tfx_manifest *manifest, const tfx_tensor *inputs, size_t count, tfx_feeds *feeds,
                          tfx_error *error);

/* Return the size of a named axis, `otherwise` where no input has it. */
int64_t tfx_feeds_size(const tfx_feeds *feeds, const char *axis, int64_t otherwise);

void tfx_feeds_free(tfx_feeds *feeds);

/*
 * Check the values of one array: masks are 0 or 1, ids are not negative and below the limit.
 *
 * TFX_INPUT: the message has the first bad one.
 */
tfx_status tfx_check_values(const tfx_spec *spec, const tfx_tensor *tensor, tfx_error *error);

/*
 * Copy an array into another dtype where nothing is lost: integers and bool among each other where the range holds
 * them, floats into wider ones, and integers into floats that hold them exactly.
 *
 * TFX_INPUT: something would be lost. TFX_MACHINE: no memory. `cast` is empty then.
 */
tfx_status tfx_cast(const tfx_tensor *tensor, tfx_dtype wanted, tfx_tensor *cast, tfx_error *error);

#endif
