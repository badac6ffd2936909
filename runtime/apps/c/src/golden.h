/* The golden: inputs and outputs that were recorded when the bundle was made. */
#ifndef TFX_GOLDEN_H
#define TFX_GOLDEN_H

#include "manifest.h"
#include "safetensors.h"

/* One recorded call. */
typedef struct tfx_case {
    const char *id;
    int64_t batch;      /* rows of every input */
    const char **texts; /* what the rows were tokenized from, one per row */
    size_t text_count;  /* 0 where the inputs are random */
    size_t input_count;
    size_t output_count;
    size_t first; /* of its tensors in `order` */
    size_t tensor_count;
} tfx_case;

typedef struct tfx_golden {
    tfx_safetensors file;
    struct cJSON *listing; /* owns ids and texts */
    tfx_case *cases;
    size_t count;
    const tfx_stored **order; /* the tensors, case by case */
} tfx_golden;

/*
 * Open a golden.safetensors and read which cases there are.
 *
 * TFX_INPUT: the file is damaged, has no cases, or a tensor or a list of texts does not fit its case. TFX_MACHINE: no
 * memory. `golden` needs no release then.
 */
tfx_status tfx_golden_open(const char *path, tfx_golden *golden, tfx_error *error);

/* Read a case's inputs or outputs, by their own names; released with tfx_outputs_free. */
tfx_status tfx_golden_inputs(const tfx_golden *golden, size_t index, tfx_outputs *inputs, tfx_error *error);
tfx_status tfx_golden_outputs(const tfx_golden *golden, size_t index, tfx_outputs *outputs, tfx_error *error);

/*
 * Check that every case has the bundle's inputs, in their shapes and as many rows as it says, and no outputs but the
 * bundle's.
 *
 * TFX_INPUT: one has not; the message names it.
 */
tfx_status tfx_golden_check(const tfx_golden *golden, const tfx_manifest *manifest, tfx_error *error);

/* Return what a case has recorded of an output, NULL where it has not. */
const tfx_stored *tfx_golden_output(const tfx_golden *golden, size_t index, const char *name);

void tfx_golden_close(tfx_golden *golden);

#endif
