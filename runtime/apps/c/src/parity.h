/* Do two arrays agree where they have a meaning? The rules are those of `tfx verify`. */
#ifndef TFX_PARITY_H
#define TFX_PARITY_H

#include "manifest.h"

/* Which positions of a batch all of its masks attend. */
typedef struct tfx_mask {
    bool *attended; /* (batch, sequence), NULL where the inputs have no such mask */
    int64_t batch;
    int64_t sequence;
} tfx_mask;

typedef struct tfx_comparison {
    double max_abs;    /* largest difference; NaN where it cannot be said */
    double min_cosine; /* smallest cosine of any vector along the last axis; likewise */
    bool per_token;    /* whether there is a vector for every position */
    char problem[160]; /* why the arrays can never agree; empty where they may */
} tfx_comparison;

/* Find the attended positions; `mask` is released with free(mask->attended). */
tfx_status tfx_mask_of(const tfx_manifest *manifest, const tfx_outputs *inputs, tfx_mask *mask, tfx_error *error);

/*
 * Compare an output with what it should be, over a whole batch: at attended positions only where it has a vector for
 * every position. NaN, infinity and a constant agree with nothing.
 *
 * mask: NULL, or without `attended`, judges every position.
 */
tfx_comparison tfx_compare(const tfx_spec *spec, const tfx_tensor *actual, const tfx_tensor *expected,
                           const tfx_mask *mask);

/* The same for the rows of one text, of which every position is judged. */
tfx_comparison tfx_compare_row(const tfx_spec *spec, const tfx_tensor *actual, const tfx_tensor *expected);

/* Whether a comparison is sound and within the manifest's tolerance. */
bool tfx_allows(const tfx_manifest *manifest, const tfx_comparison *comparison);

/* The larger difference and the smaller cosine; what cannot be said wins. */
double tfx_worse_difference(double a, double b);
double tfx_worse_cosine(double a, double b);

#endif
