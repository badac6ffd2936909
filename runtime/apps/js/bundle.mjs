/** A bundle's folder: the manifest, and files that are checked by size and sha256. */

import { EXIT, TfxError, reason } from "./errors.mjs";
import { bytesOf, externalData } from "./external.mjs";
import { MANIFEST_NAME, parseManifest } from "./manifest.mjs";

const ONE_BUFFER = 2 ** 31; // what any engine holds in one piece

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
  /** @type {Map<string, Uint8Array>} */
  #kept = new Map();

  /**
   * Made by readBundle.
   *
   * @param {Manifest} manifest
   * @param {Read} read
   * @param {Digest} [digest]
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
    const kept = this.#kept.get(name);
    if (kept !== undefined) return kept;
    const wanted = this.manifest.files[name];
    if (wanted === undefined) throw new TfxError(`${MANIFEST_NAME}: "${name}" is not among the files`);
    if (wanted.bytes >= ONE_BUFFER) {
      const most = ONE_BUFFER - 1;
      throw new TfxError(`${name}: found ${wanted.bytes} bytes, wanted at most ${most} in one buffer`, EXIT.machine);
    }
    const bytes = await this.#whole(name);
    const problem = problemOf(name, wanted, bytes && { bytes: bytes.length, sha256: await sha256(bytes) });
    if (bytes === null || problem !== null) throw new TfxError(problem ?? name);
    this.#kept.set(name, bytes);
    return bytes;
  }

  /**
   * Forget the bytes of a file; the next file(name) reads and checks it again.
   *
   * @param {string} name
   */
  release(name) {
    this.#kept.delete(name);
  }

  /**
   * Check one file, without holding it where the host can hash a stream.
   *
   * @param {string} name
   * @returns {Promise<string | null>} what is wrong with it
   */
  async check(name) {
    if (this.digest !== undefined) return problemOf(name, this.manifest.files[name], await this.digest(name));
    try {
      await this.file(name);
      return null;
    } catch (error) {
      if (error instanceof TfxError && error.exitCode === EXIT.input) return error.message;
      throw error;
    }
  }

  /**
   * Check that the model's external data is among the files and long enough.
   *
   * @param {import("./external.mjs").Bytes} [model] random access to the model; its checked bytes by default
   * @returns {Promise<string[]>} the files beside the model
   * @throws {TfxError}
   */
  async externalFiles(model) {
    const { files, model: entry } = this.manifest;
    const ends = new Map();
    for (const { location, end } of externalData(model ?? bytesOf(await this.file(entry.file)), entry.file)) {
      ends.set(location, Math.max(end, ends.get(location) ?? 0));
    }
    for (const [location, end] of ends) {
      if (!Object.hasOwn(files, location)) {
        throw new TfxError(`${entry.file}: external data "${location}" (${end} bytes) is not among the files`);
      }
      if (files[location].bytes < end) {
        const found = files[location].bytes;
        throw new TfxError(`${location}: found ${found} bytes, wanted at least ${end}; the file is incomplete`);
      }
    }
    return [...ends.keys()];
  }

  /** @param {string} name */
  async #whole(name) {
    try {
      return await this.read(name);
    } catch (error) {
      throw error instanceof TfxError ? error : new TfxError(`${name}: cannot be read: ${reason(error)}`);
    }
  }
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
  let bytes;
  try {
    bytes = await read(MANIFEST_NAME);
  } catch (error) {
    throw error instanceof TfxError ? error : new TfxError(`${MANIFEST_NAME}: cannot be read: ${reason(error)}`);
  }
  if (bytes === null) throw new TfxError(`not a bundle: it has no ${MANIFEST_NAME}`);
  const bundle = new Bundle(parseManifest(bytes), read, digest);
  if (verify) {
    const { problem } = await checkFiles(bundle, onProgress);
    if (problem !== null) throw new TfxError(problem);
  }
  return bundle;
}

/**
 * Check every file that the manifest lists.
 *
 * @param {Bundle} bundle
 * @param {Progress} [onProgress]
 * @returns {Promise<{checked: number, problem: string | null}>} how many are whole, and the first that is missing,
 *   short or altered
 */
export async function checkFiles(bundle, onProgress) {
  const files = Object.entries(bundle.manifest.files);
  const total = files.reduce((sum, [, entry]) => sum + entry.bytes, 0);
  let done = 0;
  for (const [checked, [name, entry]] of files.entries()) {
    onProgress?.({ file: name, done, total });
    const problem = await bundle.check(name);
    if (problem !== null) return { checked, problem };
    done += entry.bytes;
    onProgress?.({ file: name, done, total });
  }
  return { checked: files.length, problem: null };
}

/**
 * @param {string} name
 * @param {{bytes: number, sha256: string}} wanted
 * @param {{bytes: number, sha256: string} | null} found
 * @returns {string | null} what is wrong
 */
function problemOf(name, wanted, found) {
  if (found === null) return `${name}: found nothing, wanted ${wanted.bytes} bytes`;
  if (found.bytes !== wanted.bytes) {
    return `${name}: found ${found.bytes} bytes, wanted ${wanted.bytes}; the file is incomplete or altered`;
  }
  return found.sha256 === wanted.sha256 ? null : `${name}: altered: its sha256 is not the one in ${MANIFEST_NAME}`;
}

/**
 * @param {Uint8Array} bytes
 * @returns {Promise<string>} in hexadecimal
 * @throws {TfxError} a page that is not served securely has no crypto.subtle
 */
export async function sha256(bytes) {
  if (globalThis.crypto?.subtle === undefined) {
    throw new TfxError("sha256: crypto.subtle is missing; serve the page from localhost or by https", EXIT.machine);
  }
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", /** @type {Uint8Array<ArrayBuffer>} */ (bytes)));
  return Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
