/* The encoder's parts, for the files that make it up. */
#ifndef TFX_ENCODER_H
#define TFX_ENCODER_H

#include "bundle.h"
#include "session.h"
#include "tokenizer.h"

/* Nothing in it changes between tfx_open and tfx_close, so that threads need no lock. */
struct tfx_encoder {
    tfx_bundle bundle;
    tfx_library library;
    tfx_session session;
    tfx_tokenizer *tokenizer;    /* NULL without one, or where it cannot be used */
    tfx_status tokenizer_status; /* why not; a model can still run on arrays */
    tfx_error tokenizer_problem;
    const tfx_spec **all_outputs; /* of the manifest */
    const tfx_spec *pooled;       /* output with one vector per text, NULL without */
    char runtime[64];
    tfx_info info;
};

/* Check options, which may be NULL. */
tfx_status tfx_options_check(const tfx_options *options, tfx_error *error);

/*
 * Load what a bundle holds, whose files are checked already.
 *
 * bundle:  taken over, whatever happens: it is empty afterwards.
 * library: onnxruntime, loaded.
 */
tfx_status tfx_encoder_new(tfx_bundle *bundle, const tfx_library *library, int threads, tfx_encoder **encoder,
                           tfx_error *error);

/* Run the model on arrays and return only some of its outputs; otherwise as tfx_run. */
tfx_status tfx_run_some(const tfx_encoder *encoder, const tfx_tensor *inputs, size_t count,
                        const tfx_spec *const *wanted, size_t wanted_count, tfx_outputs *outputs, tfx_error *error);

/* Tokenize texts. `tokens` receives `count` elements in new memory; released with tfx_tokens_free_all. */
tfx_status tfx_tokenize_all(const tfx_encoder *encoder, const char *const *texts, size_t count, tfx_tokens **tokens,
                            tfx_error *error);

void tfx_tokens_free_all(tfx_tokens *tokens, size_t count);

/*
 * Takes the outputs of one batch: row i of each belongs to text `rows[i]`, which has `tokens[rows[i]]`.
 */
typedef tfx_status (*tfx_take)(void *target, const tfx_outputs *outputs, const tfx_tokens *tokens, const size_t *rows,
                               size_t row_count, tfx_error *error);

/* Run texts in batches of neighbours in length, the longest first, and hand over each batch's outputs. */
tfx_status tfx_run_batches(const tfx_encoder *encoder, const tfx_tokens *tokens, size_t count,
                           const tfx_spec *const *wanted, size_t wanted_count, tfx_take take, void *target,
                           tfx_error *error);

/*
 * Copy a row of an output, without the batch axis and, where it has a sequence axis, cut to `length` positions. An
 * output without batch axis is copied whole.
 */
tfx_status tfx_copy_row(const tfx_spec *spec, const tfx_tensor *output, size_t row, size_t length, tfx_tensor *copy,
                        tfx_error *error);

#endif
