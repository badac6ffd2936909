/** Texts to vectors from Node: `const encoder = await open(); const [vector] = await encoder.embed(["a text"]);` */

import { createHash } from "node:crypto";
import { closeSync, createReadStream, existsSync, fstatSync, openSync, readSync } from "node:fs";
import { readFile, realpath, stat } from "node:fs/promises";
import { createRequire } from "node:module";
import { availableParallelism } from "node:os";
import path from "node:path";
import { fileURLToPath } from "node:url";

import { readBundle } from "./core/bundle.mjs";
import { selfCheck as check, reportLines } from "./core/check.mjs";
import { Encoder } from "./core/encoder.mjs";
import { EXIT, TfxError, reason } from "./core/errors.mjs";
import { MANIFEST_NAME } from "./core/manifest.mjs";

export { EXIT, TfxError, reportLines };

const BUNDLE = "@TFX_BUNDLE@";

/** The bundle this app was made for, a path. */
export const DEFAULT_BUNDLE = path.resolve(path.dirname(fileURLToPath(import.meta.url)), BUNDLE);

const MAX_MANIFEST = 16 * 2 ** 20;
const INSTALL = "run: npm install --ignore-scripts";

/**
 * Open a bundle: every file is checked, the model and the tokenizer are loaded.
 *
 * @param {string} [bundle] its folder
 * @param {{threads?: number}} [options] threads inside an operator
 * @returns {Promise<Encoder>}
 * @throws {TfxError} exitCode 2: the bundle; 3: this machine cannot, and what to do
 */
export async function open(bundle = DEFAULT_BUNDLE, options = {}) {
  return openEncoder(bundle, await read(bundle, true), { threads: options.threads });
}

/**
 * Check a bundle on this machine against what was recorded when it was exported.
 *
 * @param {string} [bundle] its folder
 * @param {{threads?: number, onProgress?: (state: {stage: string, done: number, total: number}) => void}} [options]
 * @returns {Promise<{report: import("./core/check.mjs").Report, exitCode: number, lines: string[]}>}
 * @throws {TfxError} the folder has no manifest that can be read
 */
export async function selfCheck(bundle = DEFAULT_BUNDLE, { threads, onProgress } = {}) {
  const opened = await read(bundle, false);
  /** @type {Encoder | undefined} */
  let encoder;
  const { report, exitCode } = await check({
    app: "node",
    bundle: opened,
    open: async () => {
      encoder = await openEncoder(bundle, opened, { threads, lenient: true });
      return encoder;
    },
    library: libraryPath(),
    onProgress,
  });
  await /** @type {Encoder | undefined} */ (encoder)?.dispose();
  return { report, exitCode, lines: reportLines(report, opened.manifest.tolerance) };
}

/**
 * @param {string} folder
 * @param {import("./core/bundle.mjs").Bundle} bundle
 * @param {{threads?: number, lenient?: boolean}} options
 */
async function openEncoder(folder, bundle, { threads, lenient = false }) {
  const [ort, { Tokenizer }] = [await onnxruntime(), await load("@huggingface/tokenizers")];
  return Encoder.open({
    ort,
    bundle,
    Tokenizer,
    threads,
    lenient,
    cores: availableParallelism(),
    // By its path, so that onnxruntime maps the file and finds what lies beside it.
    load: async () => {
      const model = path.join(folder, bundle.manifest.model.file);
      const file = openSync(model, "r");
      try {
        await bundle.externalFiles(fileBytes(file));
      } finally {
        closeSync(file);
      }
      return { model };
    },
  });
}

/**
 * @param {string} folder
 * @param {boolean} verify
 */
async function read(folder, verify) {
  const found = await statOf(folder);
  if (!found?.isDirectory()) {
    const what = found ? "a file" : "nothing";
    throw new TfxError(`${folder}: found ${what}, wanted a bundle folder (tfx export makes one)`);
  }
  const size = (await statOf(path.join(folder, MANIFEST_NAME)))?.size ?? 0;
  if (size > MAX_MANIFEST) throw new TfxError(`${MANIFEST_NAME}: found ${size} bytes, wanted at most ${MAX_MANIFEST}`);
  /** @param {string} name */
  const bytesOf = async (name) => ((await present(folder, name)) ? readFile(path.join(folder, name)) : null);
  try {
    return await readBundle(bytesOf, { verify, digest: (name) => digest(folder, name) });
  } catch (error) {
    throw error instanceof TfxError ? new TfxError(`${folder}: ${error.message}`, error.exitCode) : error;
  }
}

/**
 * Is the file there, inside the folder? Links inside it are how some volumes present files.
 *
 * @param {string} folder
 * @param {string} name
 */
async function present(folder, name) {
  const file = path.join(folder, name);
  if (!(await statOf(file))?.isFile()) return false;
  const [inner, outer] = [await realpath(file), await realpath(folder)];
  if (!inner.startsWith(outer.endsWith(path.sep) ? outer : outer + path.sep)) {
    throw new TfxError(`${name}: is a link that leaves the bundle`);
  }
  return true;
}

/** @param {string} file */
async function statOf(file) {
  try {
    return await stat(file);
  } catch (error) {
    if (["ENOENT", "ENOTDIR"].includes(codeOf(error))) return null;
    throw new TfxError(`${file}: cannot be read: ${reason(error)}`);
  }
}

/** @param {unknown} error */
const codeOf = (error) => String(/** @type {NodeJS.ErrnoException} */ (error).code);

/**
 * @param {string} folder
 * @param {string} name
 */
async function digest(folder, name) {
  if (!(await present(folder, name))) return null;
  const hash = createHash("sha256");
  let bytes = 0;
  try {
    for await (const chunk of createReadStream(path.join(folder, name), { highWaterMark: 2 ** 20 })) {
      hash.update(chunk);
      bytes += chunk.length;
    }
  } catch (error) {
    throw new TfxError(`${name}: cannot be read: ${reason(error)}`);
  }
  return { bytes, sha256: hash.digest("hex") };
}

/**
 * Random access to an open file through a window: a model is mostly weights, which are jumped over.
 *
 * @param {number} file
 * @returns {import("./core/external.mjs").Bytes}
 */
function fileBytes(file) {
  const window = Buffer.alloc(2 ** 16);
  let [start, end] = [0, 0];
  return {
    length: fstatSync(file).size,
    byte(position) {
      if (position < start || position >= end) {
        start = position;
        end = position + readSync(file, window, 0, window.length, position);
        if (end === start) throw new RangeError("beyond the end");
      }
      return window[position - start];
    },
    slice(from, to) {
      if (to - from > window.length) throw new RangeError("a text of an impossible length");
      const bytes = Buffer.alloc(to - from);
      readSync(file, bytes, 0, bytes.length, from);
      return bytes;
    },
  };
}

async function onnxruntime() {
  const found = await load("onnxruntime-node");
  const ort = found.default ?? found;
  // What goes wrong is in the errors, not to be printed twice.
  if (ort.env.logLevel === "warning") ort.env.logLevel = "fatal";
  return ort;
}

/** @param {string} name */
async function load(name) {
  try {
    return await import(name);
  } catch (error) {
    const why = reason(error);
    const platform = `${process.platform}/${process.arch}`;
    const missing = codeOf(error).endsWith("MODULE_NOT_FOUND");
    if (missing && why.includes("onnxruntime_binding.node")) {
      throw new TfxError(`${name} has no library for ${platform}; run on another machine: ${why}`, EXIT.machine);
    }
    if (missing) throw new TfxError(`${name} is not installed; ${INSTALL}`, EXIT.machine);
    throw new TfxError(`${name} does not load on ${platform}, Node ${process.version}: ${why}`, EXIT.machine);
  }
}

/** Return the path of the onnxruntime library, null where it cannot be found. */
function libraryPath() {
  try {
    const main = createRequire(import.meta.url).resolve("onnxruntime-node");
    const folder = path.resolve(path.dirname(main), "..", "bin", "napi-v6", process.platform, process.arch);
    /** @type {Record<string, string>} */
    const names = { win32: "onnxruntime.dll", darwin: "libonnxruntime.1.dylib" };
    const library = path.join(folder, names[process.platform] ?? "libonnxruntime.so.1");
    return existsSync(library) ? library : null;
  } catch {
    return null;
  }
}
