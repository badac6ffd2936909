/* Where an .onnx file keeps weights outside itself, read without protobuf's own library. */
#ifndef TFX_EXTERNAL_H
#define TFX_EXTERNAL_H

#include "manifest.h"

/*
 * Check that every weight that a model keeps in another file is in a file that the manifest lists, and ends within the
 * size it lists. onnxruntime before 1.24 opens any path that a model names.
 *
 * path: the .onnx file.
 *
 * TFX_INPUT: the file is no protobuf message, or a weight is elsewhere or beyond the end. TFX_MACHINE: no memory.
 */
tfx_status tfx_external_check(const char *path, const tfx_manifest *manifest, tfx_error *error);

#endif
