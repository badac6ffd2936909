/* The self-check's parts. */
#ifndef TFX_CHECK_H
#define TFX_CHECK_H

#include "encoder.h"
#include "golden.h"
#include "parity.h"

/* A self-check under way. */
typedef struct tfx_check {
    tfx_report *report;
    tfx_encoder *encoder;
    tfx_golden golden;
} tfx_check;

/* The stage that runs now. */
tfx_stage *tfx_check_stage(const tfx_check *check);

/* Take a comparison into the stage's worst numbers. */
void tfx_check_note(const tfx_check *check, const tfx_comparison *comparison);

/* Stages after the runtime; each returns TFX_CHECK with the problem where something differs. */
tfx_status tfx_check_tokens(tfx_check *check, tfx_error *error);
tfx_status tfx_check_outputs(tfx_check *check, tfx_error *error);
tfx_status tfx_check_vectors(tfx_check *check, tfx_error *error);

#endif
