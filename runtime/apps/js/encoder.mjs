/** Texts to vectors, and arrays to arrays, through one onnxruntime session. */

import { EXIT, TfxError, reason, wrong } from "./errors.mjs";
import { checkFeeds, pad } from "./feeds.mjs";
import { ARRAYS, fromFloat16, rowOf, sizeOf } from "./tensors.mjs";
import { TextTokenizer } from "./text.mjs";

/**
 * @typedef {object} Tokens
 * @property {number[]} ids special tokens added
 * @property {number[]} types
 * @property {number} cut how many tokens were cut off to fit the longest the model takes
 *
 * @typedef {import("./bundle.mjs").Bundle} Bundle
 * @typedef {import("./bundle.mjs").Manifest} Manifest
 * @typedef {import("./tensors.mjs").Tensor} Tensor
 * @typedef {new (tokenizer: object, config: object) => any} TokenizerClass of @huggingface/tokenizers
 *
 * @typedef {object} OpenOptions
 * @property {any} ort the onnxruntime module (onnxruntime-node or onnxruntime-web)
 * @property {Bundle} bundle read with readBundle
 * @property {TokenizerClass} [Tokenizer] without it the encoder takes arrays and no text
 * @property {string} [provider] cpu, wasm or webgpu
 * @property {number} [threads] inside an operator
 * @property {number} [cores] how many there are, for a tuned number of threads
 * @property {boolean} [lenient] leave a tokenizer that cannot be opened for tokenize() to say, in place of throwing
 * @property {object} [sessionOptions] added to those of sessionOptions()
 * @property {(bundle: Bundle) => Promise<Load>} [load] says what to load; by default the model's checked bytes, with
 *   its external data beside, both forgotten by the bundle afterwards
 *
 * @typedef {object} TextOptions
 * @property {number} [batchSize] texts in one call, 32 by default
 * @property {(done: number, total: number) => void} [onProgress] told after each call how many texts are done
 * @property {(tokens: {count: number, cut: number}[]) => void} [onTokens] told once of all texts, before they run
 * @property {(text: number, cut: number) => void} [onCut] told of each text that is longer than the model takes, and
 *   how many tokens were cut off
 *
 * @typedef {object} Load what InferenceSession.create takes
 * @property {string | Uint8Array} model a path or the bytes
 * @property {object} [options] further session options, such as externalData
 * @property {() => void} [done] called when the model is loaded or was refused
 */

/**
 * Return session options as Python's sessions have them.
 *
 * @param {Manifest} manifest
 * @param {{provider?: string, threads?: number, cores?: number}} [options] provider "cpu", "wasm" or "webgpu"; threads
 *   undefined takes what the bundle was tuned to where there are as many cores, else onnxruntime's choice
 * @returns {object} for InferenceSession.create
 */
export function sessionOptions(manifest, { provider = "cpu", threads, cores = 1 } = {}) {
  if (threads !== undefined && !(Number.isSafeInteger(threads) && threads >= 1)) {
    throw wrong("threads", threads, "a number of at least 1");
  }
  const options = { executionProviders: [provider], interOpNumThreads: 1, logSeverityLevel: 4 };
  if (provider === "webgpu") return options;
  const tuned = manifest.tuning ?? { threads: null, spinning: null };
  const inside = threads ?? ((tuned.threads ?? 0) <= cores ? tuned.threads : null);
  return {
    ...options,
    ...(inside ? { intraOpNumThreads: inside } : {}),
    // No plan per shape: the arena is shared by calls of every shape, and stays as large as the largest.
    enableMemPattern: false,
    enableCpuMemArena: true,
    extra: {
      ...(tuned.spinning === false ? { session: { intra_op: { allow_spinning: "0" } } } : {}),
      // Slower on the CPU than what it replaces.
      optimization: { disable_specified_optimizers: "SkipLayerNormFusion" },
    },
  };
}

export class Encoder {
  /** @type {Manifest} */
  manifest;
  /** @type {string} where the model runs: cpu, wasm or webgpu */
  provider;
  /** @type {string} such as "onnxruntime 1.30.0" */
  runtime;

  /** @type {any} */
  #ort;
  /** @type {any} null when disposed of */
  #session;
  /** @type {TextTokenizer | null} */
  #tokenizer;
  /** @type {TfxError | null} why there is no tokenizer although the bundle has one */
  #problem;
  /** @type {Promise<any>} calls wait for each other: a session in a browser runs one at a time */
  #last = Promise.resolve();

  /**
   * Made by Encoder.open.
   *
   * @param {{manifest: Manifest, provider: string, ort: any, session: any, tokenizer: TextTokenizer | null,
   *   problem: TfxError | null}} parts
   */
  constructor({ manifest, provider, ort, session, tokenizer, problem }) {
    this.manifest = manifest;
    this.provider = provider;
    this.runtime = runtimeName(ort);
    this.#ort = ort;
    this.#session = session;
    this.#tokenizer = tokenizer;
    this.#problem = problem;
  }

  /** Why the bundle's tokenizer could not be opened; null where it could, or there is none. */
  get tokenizerProblem() {
    return this.#problem?.message ?? null;
  }

  /**
   * Load the model and the tokenizer of a bundle.
   *
   * @param {OpenOptions} options
   * @returns {Promise<Encoder>}
   * @throws {TfxError} exit code 2: the bundle; 3: this onnxruntime or machine cannot
   */
  static async open({ ort, bundle, Tokenizer, provider = "cpu", threads, cores = 1, load = loadBytes, ...more }) {
    const { manifest } = bundle;
    let tokenizer = null;
    let problem = null;
    try {
      if (Tokenizer !== undefined) tokenizer = await openTokenizer(bundle, Tokenizer);
    } catch (error) {
      if (!(more.lenient && error instanceof TfxError)) throw error;
      problem = error;
    }
    const options = { ...sessionOptions(manifest, { provider, threads, cores }), ...more.sessionOptions };
    const loaded = await load(bundle);
    let session;
    try {
      session = await ort.InferenceSession.create(loaded.model, { ...options, ...loaded.options });
    } catch (error) {
      throw loadError(error, manifest.model, runtimeName(ort));
    } finally {
      loaded.done?.();
    }
    checkGraph(session, manifest);
    return new Encoder({ manifest, provider, ort, session, tokenizer, problem });
  }

  /**
   * @param {string[]} texts at least one
   * @returns {Tokens[]} one per text
   * @throws {TfxError} no tokenizer, no texts, no string, no valid Unicode, no tokens, or a character that this engine
   *   does not treat as the model's tokenizer does; text and character are named
   */
  tokenize(texts) {
    const tokenizer = this.#tokenizer;
    if (this.#problem !== null) throw this.#problem;
    if (tokenizer === null) throw new TfxError("this bundle has no tokenizer, so it takes arrays and no text");
    if (!Array.isArray(texts)) throw wrong("texts", texts, "an array of strings");
    if (texts.length === 0) throw new TfxError("texts: found an empty array, wanted at least one text");
    return texts.map((text, i) => tokenizer.encode(text, `texts[${i}]`));
  }

  /**
   * Return one vector per text, in the order given.
   *
   * @param {string[]} texts
   * @param {TextOptions} [options]
   * @returns {Promise<Float32Array[]>}
   * @throws {TfxError} as tokenize, or the bundle has no pooling
   */
  async embed(texts, options = {}) {
    const { pooling } = this.manifest;
    if (pooling === null) {
      throw new TfxError("this bundle has no pooling, so a text has no one vector; ask for raw outputs");
    }
    /** @type {Float32Array[]} */
    const vectors = new Array(texts?.length);
    await this.#batches(texts, options, [pooling.output], (i, row, outputs) => {
      const { data } = rowOf(outputs[pooling.output], row);
      vectors[i] = data instanceof Float32Array ? data : Float32Array.from(data, Number);
    });
    return vectors;
  }

  /**
   * Return every output of every text, cut to the text's own length.
   *
   * @param {string[]} texts
   * @param {TextOptions} [options]
   * @returns {Promise<Record<string, Tensor>[]>} one per text, without the batch axis
   */
  async runTexts(texts, options = {}) {
    const { outputs: specs } = this.manifest;
    /** @type {Record<string, Tensor>[]} */
    const results = new Array(texts?.length);
    await this.#batches(texts, options, undefined, (i, row, outputs, length) => {
      results[i] = Object.fromEntries(
        specs.map(({ name, shape }) => [name, rowOf(outputs[name], row, shape[1] === "sequence" ? length : null)]),
      );
    });
    return results;
  }

  /**
   * Tokenize, run neighbours in length together, and hand out each text's row.
   *
   * @param {string[]} texts
   * @param {TextOptions} options
   * @param {string[] | undefined} outputs
   * @param {(text: number, row: number, outputs: Record<string, Tensor>, length: number) => void} take
   */
  async #batches(texts, { batchSize = 32, onProgress, onTokens, onCut }, outputs, take) {
    if (!Number.isSafeInteger(batchSize) || batchSize < 1) throw wrong("batchSize", batchSize, "at least 1");
    const encodings = this.tokenize(texts);
    onTokens?.(encodings.map(({ ids, cut }) => ({ count: ids.length, cut })));
    encodings.forEach(({ cut }, i) => cut > 0 && onCut?.(i, cut));
    const lengths = encodings.map(({ ids }) => ids.length);
    const order = Array.from(lengths.keys()).sort((one, other) => lengths[other] - lengths[one]);
    for (let start = 0; start < order.length; start += batchSize) {
      const rows = order.slice(start, start + batchSize);
      const found = await this.run(pad(rows.map((i) => encodings[i]), this.manifest), outputs);
      rows.forEach((i, row) => take(i, row, found, lengths[i]));
      onProgress?.(start + rows.length, order.length);
    }
  }

  /**
   * Run the model once on arrays.
   *
   * @param {Record<string, {data: ArrayLike<number | bigint | boolean>, shape: number[]} | any[]>} feeds by input name:
   *   data with its shape, or nested arrays. Integers are cast where nothing is lost; floats for integers are refused.
   *   A missing mask attends everywhere, missing segment ids are zeros.
   * @param {string[]} [outputs] names, all by default
   * @returns {Promise<Record<string, Tensor>>} a batch of 0 rows gives outputs of 0 rows without running
   * @throws {TfxError} names the input, what was found and what was wanted
   */
  async run(feeds, outputs) {
    if (this.#session === null) throw new TfxError("the encoder was disposed of");
    const specs = this.manifest.outputs;
    const known = specs.map((spec) => spec.name);
    const names = [...new Set(Array.isArray(outputs ?? known) ? (outputs ?? known) : [])];
    if (names.length === 0) throw wrong("outputs", outputs, `some of ${known.join(", ")}`);
    for (const name of names) if (!known.includes(name)) throw wrong("outputs", name, `only ${known.join(", ")}`);
    const { tensors, sizes } = checkFeeds(feeds, this.manifest);
    if (sizes.get("batch") === 0) return emptyOutputs(specs.filter((spec) => names.includes(spec.name)), sizes);
    const turn = this.#last.then(() => this.#run(tensors, names));
    this.#last = turn.catch(() => {});
    return turn;
  }

  /**
   * @param {Record<string, Tensor>} tensors
   * @param {string[]} names of outputs
   */
  async #run(tensors, names) {
    if (this.#session === null) throw new TfxError("the encoder was disposed of");
    const { Tensor } = this.#ort;
    /** @type {Record<string, any>} */
    const feeds = Object.create(null); // inputs and outputs may have any name
    for (const [name, { dtype, data, shape }] of Object.entries(tensors)) feeds[name] = new Tensor(dtype, data, shape);
    let found;
    try {
      found = await this.#session.run(feeds, names);
    } catch (error) {
      throw runError(error);
    }
    /** @type {[string, Tensor][]} */
    const results = [];
    for (const name of names) {
      const { type: dtype, dims: shape } = found[name];
      const data = await found[name].getData(); // from a GPU where it is there
      results.push([name, { dtype, shape: Array.from(shape), data: dtype === "float16" ? halves(data) : data }]);
      found[name].dispose();
    }
    return Object.fromEntries(results);
  }

  /** Give the session's memory back, when the calls that run have ended. */
  async dispose() {
    const session = this.#session;
    this.#session = null;
    await this.#last;
    await session?.release();
  }
}

/**
 * Newer engines give Float16Array, the others the bits.
 *
 * @param {any} data
 */
const halves = (data) => (data instanceof Uint16Array ? fromFloat16(data) : Float32Array.from(data));

/**
 * @param {import("./bundle.mjs").TensorSpec[]} specs
 * @param {Map<string, number>} sizes
 */
function emptyOutputs(specs, sizes) {
  return Object.fromEntries(
    specs.map(({ name, dtype, shape: axes }) => {
      const shape = axes.map((axis) => (typeof axis === "number" ? axis : (sizes.get(axis) ?? 0)));
      const Kind = dtype === "float16" ? Float32Array : ARRAYS[dtype];
      return [name, { dtype, shape, data: new Kind(sizeOf(shape)) }];
    }),
  );
}

/**
 * @param {Bundle} bundle
 * @returns {Promise<Load>}
 */
async function loadBytes(bundle) {
  const { file } = bundle.manifest.model;
  const beside = await bundle.externalFiles();
  const model = await bundle.file(file);
  const externalData = [];
  for (const path of beside) externalData.push({ path, data: await bundle.file(path) });
  return {
    model,
    options: externalData.length > 0 ? { externalData } : {},
    done: () => [file, ...beside].forEach((name) => bundle.release(name)),
  };
}

/**
 * @param {Bundle} bundle
 * @param {TokenizerClass} Tokenizer
 * @returns {Promise<TextTokenizer | null>} null where the bundle has none
 */
async function openTokenizer(bundle, Tokenizer) {
  const { tokenizer, max_length: longest } = bundle.manifest;
  if (tokenizer === null) return null;
  const limits = [tokenizer.max_length, longest].filter((limit) => limit != null);
  const bytes = await bundle.file(tokenizer.file);
  bundle.release(tokenizer.file);
  return new TextTokenizer(bytes, Tokenizer, limits.length > 0 ? Math.min(...limits) : null, tokenizer.file);
}

/**
 * Refuse a graph whose inputs or outputs are not those of the manifest.
 *
 * @param {any} session
 * @param {Manifest} manifest
 */
function checkGraph(session, manifest) {
  /** @param {{name: string, type?: string, dtype?: string}[]} entries */
  const list = (entries) => entries.map(({ name, type, dtype }) => `${name} ${type ?? dtype}`).sort().join(", ");
  const file = manifest.model.file;
  const [inputs, outputs] = [list(session.inputMetadata), list(session.outputMetadata)];
  const [wanted, promised] = [list(manifest.inputs), list(manifest.outputs)];
  if (inputs !== wanted) throw new TfxError(`${file}: found inputs ${inputs}, tfx.json says ${wanted}`);
  if (outputs !== promised) throw new TfxError(`${file}: found outputs ${outputs}, tfx.json says ${promised}`);
}

/**
 * @param {any} ort
 * @returns {string}
 */
function runtimeName(ort) {
  const versions = ort.env?.versions ?? {};
  return `onnxruntime ${versions.node ?? versions.web ?? versions.common ?? "of an unknown version"}`;
}

const MEMORY = /bad.?alloc|failed to allocate|out of memory|allocation failed|invalid array length/i;

/**
 * @param {unknown} error
 * @param {Manifest["model"]} model
 * @param {string} runtime
 */
function loadError(error, model, runtime) {
  const why = reason(error);
  if (MEMORY.test(why)) return new TfxError(`${model.file}: out of memory: ${why}`, EXIT.machine);
  if (/unsupported model ir version|opset \d+ is under development/i.test(String(error))) {
    const limit = /max supported IR version: \d+|till opset \d+/.exec(String(error))?.[0];
    return new TfxError(
      `${model.file}: found IR version ${model.ir_version} and opset ${model.opset}, newer than ${runtime} reads ` +
        `(${limit}); install a newer onnxruntime, or export with --target web or portable`,
      EXIT.machine,
    );
  }
  if (/not.?implemented|could not find an implementation|no available backend|backend not found|webgpu/i.test(why)) {
    return new TfxError(`${model.file}: does not run on this ${runtime}: ${why}`, EXIT.machine);
  }
  return new TfxError(`${model.file}: onnxruntime refuses it: ${why}`);
}

/** @param {unknown} error */
function runError(error) {
  const why = reason(error);
  if (MEMORY.test(why)) return new TfxError(`run: out of memory: ${why}`, EXIT.machine);
  return new TfxError(`run: onnxruntime refuses it: ${why}`);
}
