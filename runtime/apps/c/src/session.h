/* One onnxruntime session on the CPU, set up as Python's sessions of tfx are. */
#ifndef TFX_SESSION_H
#define TFX_SESSION_H

#include "library.h"
#include "manifest.h"

typedef struct tfx_session {
    const OrtApi *api;
    OrtEnv *env;
    OrtSession *session;
    OrtMemoryInfo *memory;
} tfx_session;

/*
 * Load a model from its path, so that weights beside it are found, and check that its inputs and outputs are those of
 * the manifest.
 *
 * threads: threads inside an operator, 0 for what the bundle was tuned to, else onnxruntime's choice.
 *
 * TFX_INPUT: onnxruntime refuses the model, or its inputs or outputs are others. TFX_MACHINE: the model is newer than
 * this onnxruntime, an operator has no kernel here, or no memory. `session` needs no release then.
 */
tfx_status tfx_session_open(const tfx_library *library, const char *path, const tfx_manifest *manifest, int threads,
                            tfx_session *session, tfx_error *error);

/*
 * Run the graph; safe to call from several threads.
 *
 * inputs:  all of the graph's inputs, in its own dtypes.
 * wanted:  specs of the outputs to compute.
 * outputs: receives an array for each, float16 as float32; released with tfx_outputs_free.
 *
 * TFX_INPUT: onnxruntime refuses the inputs. TFX_MACHINE: no memory. `outputs` is empty then.
 */
tfx_status tfx_session_run(const tfx_session *session, const tfx_tensor *inputs, size_t count,
                           const tfx_spec *const *wanted, size_t wanted_count, tfx_outputs *outputs, tfx_error *error);

/* Release a session; an empty one is allowed. */
void tfx_session_close(tfx_session *session);

#endif
