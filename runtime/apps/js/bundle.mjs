/** A bundle's folder: the manifest, and files that are checked by size and sha256. */

import { TfxError } from "./errors.mjs";

/**
 * @callback Read
 * @param {string} name a bare file name of the bundle
 * @returns {Promise<Uint8Array | null>} its bytes; null where there is no such file
 *
 * @callback Progress
 * @param {{file: string, done: number, total: number}} state bytes of all files checked so far, and in all
 *
 * @callback Digest hashes a file without holding it; hosts with streams give one
 * @param {string} name
 * @returns {Promise<{bytes: number, sha256: string} | null>} null where there is no such file
 *
 * @typedef {object} TensorSpec
 * @property {string} name
 * @property {string} dtype
 * @property {(string | number)[]} shape
 * @property {string} [role]
 * @property {number | null} [limit]
 *
 * @typedef {object} Manifest what tfx.json holds; the keys are described in the README of tfx
 * @property {TensorSpec[]} inputs
 * @property {TensorSpec[]} outputs
 * @property {number | null} max_length
 * @property {number} pad_id
 * @property {{mode: string, normalize: boolean, output: string} | null} pooling
 * @property {{file: string, max_length: number | null} | null} tokenizer
 * @property {string} target
 * @property {string} precision
 * @property {string} layout
 * @property {{file: string, opset: number, ir_version: number, domains: string[]}} model
 * @property {{max_abs: number | null, min_cosine: number | null, min_token_cosine?: number | null}} tolerance
 * @property {Record<string, {bytes: number, sha256: string}>} files
 * @property {{batch_variance?: number | null} | null} [quantization]
 * @property {{threads: number | null, spinning: boolean | null} | null} [tuning]
 */

export class Bundle {
  /**
   * Made by readBundle.
   *
   * @param {Manifest} manifest
   * @param {Read} read
   * @param {Digest | undefined} digest
   */
  constructor(manifest, read, digest) {
    this.manifest = manifest;
    this.read = read;
    this.digest = digest;
  }

  /**
   * Return a file's bytes, checked against the manifest; they are kept until release(name).
   *
   * @param {string} name
   * @returns {Promise<Uint8Array>}
   * @throws {TfxError} not listed, missing, of another size, altered, or too large for one buffer
   */
  async file(name) {
    throw new TfxError(`${name}: not written yet`);
  }

  /**
   * Forget the bytes of a file; the next file(name) reads and checks it again.
   *
   * @param {string} name
   */
  release(name) {}
}

/**
 * Read and check tfx.json, and with `verify` every file that it lists.
 *
 * @param {Read} read
 * @param {{verify?: boolean, onProgress?: Progress, digest?: Digest}} [options]
 * @returns {Promise<Bundle>}
 * @throws {TfxError} exit code 2
 */
export async function readBundle(read, { verify = true, onProgress, digest } = {}) {
  throw new TfxError("not written yet");
}

/**
 * Check every file that the manifest lists.
 *
 * @param {Bundle} bundle
 * @param {Progress} [onProgress]
 * @returns {Promise<{checked: number, problem: string | null}>} the first file that is missing, short or altered
 */
export async function checkFiles(bundle, onProgress) {
  throw new TfxError("not written yet");
}
