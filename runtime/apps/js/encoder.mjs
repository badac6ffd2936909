/** Texts to vectors, and arrays to arrays, through one onnxruntime session. */

import { TfxError } from "./errors.mjs";

/**
 * @typedef {object} Tokens
 * @property {number[]} ids special tokens added
 * @property {number[]} types
 * @property {number} cut how many tokens were cut off to fit the longest the model takes
 *
 * @typedef {object} Tensor
 * @property {string} dtype the manifest's name of it; float16 is handed out as float32
 * @property {number[]} shape
 * @property {Float32Array | Float64Array | Int32Array | BigInt64Array | Uint8Array | Int8Array} data
 *
 * @typedef {object} Load what InferenceSession.create takes
 * @property {string | Uint8Array} model a path or the bytes
 * @property {object} [options] further session options, such as externalData
 */

/**
 * Return session options as Python's sessions have them.
 *
 * @param {import("./bundle.mjs").Manifest} manifest
 * @param {{provider?: string, threads?: number, cores?: number}} [options] provider "cpu", "wasm" or "webgpu"; threads
 *   undefined takes what the bundle was tuned to where there are as many cores, else onnxruntime's choice
 * @returns {object} for InferenceSession.create
 */
export function sessionOptions(manifest, { provider = "cpu", threads, cores = 1 } = {}) {
  throw new TfxError("not written yet");
}

export class Encoder {
  /** @type {import("./bundle.mjs").Manifest} */
  manifest;
  /** @type {string} where the model runs: cpu, wasm or webgpu */
  provider;
  /** @type {string} such as "onnxruntime 1.30.0" */
  runtime;

  /**
   * Load the model and the tokenizer of a bundle.
   *
   * @param {object} options
   * @param {object} options.ort the onnxruntime module (onnxruntime-node or onnxruntime-web)
   * @param {import("./bundle.mjs").Bundle} options.bundle read with readBundle
   * @param {new (tokenizer: object, config: object) => object} [options.Tokenizer] the class of @huggingface/tokenizers;
   *   without it the encoder takes arrays and no text
   * @param {string} [options.provider] cpu, wasm or webgpu
   * @param {number} [options.threads]
   * @param {number} [options.cores] how many there are, for a tuned number of threads
   * @param {object} [options.sessionOptions] added to those of sessionOptions()
   * @param {(bundle: import("./bundle.mjs").Bundle) => Promise<Load>} [options.load] says what to load; by default
   *   the model's checked bytes, with its external data beside, both forgotten by the bundle afterwards
   * @returns {Promise<Encoder>}
   * @throws {TfxError} exit code 2: the bundle; 3: this onnxruntime or machine cannot
   */
  static async open(options) {
    throw new TfxError("not written yet");
  }

  /**
   * @param {string[]} texts at least one
   * @returns {Tokens[]} one per text
   * @throws {TfxError} no tokenizer, no texts, no string, no valid Unicode, no tokens, or a character that this engine
   *   does not treat as the model's tokenizer does; text and character are named
   */
  tokenize(texts) {
    throw new TfxError("not written yet");
  }

  /**
   * Return one vector per text, in the order given.
   *
   * @param {string[]} texts
   * @param {{batchSize?: number, onProgress?: (done: number, total: number) => void}} [options]
   * @returns {Promise<Float32Array[]>}
   * @throws {TfxError} as tokenize, or the bundle has no pooling
   */
  async embed(texts, { batchSize = 32, onProgress } = {}) {
    throw new TfxError("not written yet");
  }

  /**
   * Return every output of every text, cut to the text's own length.
   *
   * @param {string[]} texts
   * @param {{batchSize?: number}} [options]
   * @returns {Promise<Record<string, Tensor>[]>} one per text, without the batch axis
   */
  async runTexts(texts, { batchSize = 32 } = {}) {
    throw new TfxError("not written yet");
  }

  /**
   * Run the model once on arrays.
   *
   * @param {Record<string, {data: ArrayLike<number | bigint | boolean>, shape: number[]} | any[]>} feeds by input name:
   *   data with its shape, or nested arrays. Integers are cast where nothing is lost; floats for integers are refused.
   *   A missing mask attends everywhere, missing segment ids are zeros.
   * @param {string[]} [outputs] names, all by default
   * @returns {Promise<Record<string, Tensor>>}
   * @throws {TfxError} names the input, what was found and what was wanted
   */
  async run(feeds, outputs) {
    throw new TfxError("not written yet");
  }

  /** Give the session's memory back. */
  async dispose() {}
}
