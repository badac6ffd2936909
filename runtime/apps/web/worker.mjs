/**
 * The worker that holds the bundle, the tokenizer and the session; the page stays responsive while it works.
 *
 * It takes messages {id, type, ...} and works on one after the other. Each is answered by any number of
 * {id, type: "progress", phase, done, total, ...} and then by one {id, type: "done", result} or
 * {id, type: "error", message, exitCode, url}, where url is the exact address of a file that is missing, or null.
 *
 *   open    {source: {folder: string} | {files: Map<string, File>, label: string}, provider: "wasm" | "webgpu",
 *            threads: number | null}
 *           reads and checks the bundle and loads the model. Result: {label, manifest, runtime, provider, threads,
 *           bytes, offline: whether the browser keeps it, needs: what of the page it takes to open it again}.
 *   embed   {texts: string[]}
 *           result: {vectors: Float32Array[] | null, outputs: object[] | null, tokens: {count, cut}[],
 *           ms: {tokenize, run}}; outputs where the bundle has no pooling.
 *   check   {source, provider, threads} as open takes them
 *           the self-check; it opens the bundle where that has not been done. Result: {report, exitCode, tolerance, url}.
 *   forget  {} drops what the browser keeps of the bundle. Result: whether there was any.
 *
 * The phases of progress: "read" (bytes, with file), "load", "embed" (texts), "check" (with stage).
 */

import { readBundle, sha256 } from "./core/bundle.mjs";
import { selfCheck } from "./core/check.mjs";
import { Encoder } from "./core/encoder.mjs";
import { EXIT, TfxError, reason } from "./core/errors.mjs";
import { pickedFiles, serverFolder } from "./files.mjs";

/** Of each provider, what is imported and what that loads. */
const RUNTIMES = {
  wasm: ["vendor/ort.wasm.bundle.min.mjs", "vendor/ort-wasm-simd-threaded.wasm"],
  webgpu: ["vendor/ort.webgpu.bundle.min.mjs", "vendor/ort-wasm-simd-threaded.asyncify.wasm"],
};
const TOKENIZERS = "vendor/tokenizers.min.mjs";

/** What open made; check and embed use it. */
/** @type {import("./files.mjs").Source | null} */
let files = null;
/** @type {any} an Encoder */
let encoder = null;
/** @type {import("./core/bundle.mjs").Bundle | null} */
let bundle = null;

let queue = Promise.resolve();

self.onmessage = ({ data }) => {
  queue = queue.then(() => answer(data));
};

async function answer(message) {
  const { id, type } = message;
  const progress = limited((state) => self.postMessage({ id, type: "progress", ...state }));
  try {
    const work = { open, embed, check, forget }[type];
    const result = await work(message, progress);
    self.postMessage({ id, type: "done", result }, buffersOf(result));
  } catch (error) {
    const exitCode = error instanceof TfxError ? error.exitCode : EXIT.machine;
    self.postMessage({ id, type: "error", message: reason(error), exitCode, url: files?.missing ?? null });
  }
}

async function open({ source, provider, threads }, progress) {
  await encoder?.dispose();
  encoder = null;
  files = filesOf(source, progress);
  try {
    bundle = await readBundle(files.read);
  } catch (error) {
    // What was kept may have been damaged since: then it is loaded again. Not where a file cannot be had now.
    const unreachable = error.exitCode === EXIT.machine || files.missing !== null;
    if (unreachable || !(await files.forget())) throw error;
    bundle = await readBundle(files.read);
  }
  const used = await load(bundle, provider, threads, progress);
  const { manifest } = bundle;
  // The session has its own copy of what it needs.
  for (const name of Object.keys(manifest.files)) bundle.release(name);
  await files.settle();
  return {
    label: files.label,
    manifest,
    runtime: encoder.runtime,
    provider: encoder.provider,
    threads: used,
    bytes: Object.values(manifest.files).reduce((sum, file) => sum + file.bytes, 0),
    offline: files.kept(),
    needs: [...RUNTIMES[provider], ...(manifest.tokenizer === null ? [] : [TOKENIZERS])],
  };
}

async function embed({ texts }, progress) {
  if (encoder === null) throw new TfxError("no bundle is open");
  const start = performance.now();
  let between = start;
  let tokens = [];
  const options = {
    onProgress: (done, total) => progress({ phase: "embed", done, total }),
    onTokens: (found) => {
      tokens = found;
      between = performance.now();
    },
  };
  const pooled = encoder.manifest.pooling !== null;
  const rows = pooled ? await encoder.embed(texts, options) : await encoder.runTexts(texts, options);
  return {
    vectors: pooled ? rows : null,
    outputs: pooled ? null : rows,
    tokens,
    ms: { tokenize: between - start, run: performance.now() - between },
  };
}

async function check({ source, provider, threads }, progress) {
  if (files === null) files = filesOf(source, progress);
  files.missing = null;
  const digest = async (name) => {
    const bytes = await files.read(name);
    return bytes === null ? null : { bytes: bytes.length, sha256: await sha256(bytes) };
  };
  const checked = await readBundle(files.read, { verify: false, digest });
  const opened = async () => {
    if (encoder !== null && JSON.stringify(encoder.manifest) !== JSON.stringify(checked.manifest)) {
      // The server has another bundle by now: what is checked is what runs.
      await encoder.dispose();
      encoder = null;
    }
    if (encoder === null) await load(checked, provider, threads, progress, true);
    return encoder;
  };
  const { report, exitCode } = await selfCheck({
    app: "web",
    bundle: checked,
    open: opened,
    onProgress: (state) => progress({ phase: "check", ...state }),
  });
  if (report.passed) await files.settle();
  return { report, exitCode, tolerance: checked.manifest.tolerance, url: report.passed ? null : files.missing };
}

async function forget() {
  return files === null ? false : files.forget();
}

/** Load onnxruntime, the tokenizer (lenient: or what is wrong with it) and the model; return the number of threads. */
async function load(from, provider, threads, progress, lenient = false) {
  progress({ phase: "load", done: 0, total: 0 });
  const cores = navigator.hardwareConcurrency || 1;
  const ort = await vendor(RUNTIMES[provider][0]);
  const { Tokenizer } = from.manifest.tokenizer === null ? {} : await vendor(TOKENIZERS);
  const tuned = from.manifest.tuning?.threads ?? null;
  const wanted = threads ?? (tuned !== null && tuned <= cores ? tuned : Math.min(4, cores));
  // Threads share memory, which takes a cross-origin isolated page. The GPU does the work of WebGPU.
  const used = self.crossOriginIsolated && provider === "wasm" ? wanted : 1;
  ort.env.wasm.numThreads = used;
  ort.env.logLevel = "error";
  encoder = await Encoder.open({ ort, bundle: from, Tokenizer, provider, threads: used, cores, lenient });
  return used;
}

/** Import a file of vendor/. */
async function vendor(path) {
  try {
    return await import(`./${path}`);
  } catch (error) {
    const { href } = new URL(path, self.location.href);
    throw new TfxError(`${href}: cannot be loaded (${reason(error)}); run: npm run setup`, EXIT.machine);
  }
}

function filesOf(source, progress) {
  const onProgress = (state) => progress({ phase: "read", ...state });
  return "folder" in source
    ? serverFolder(source.folder, onProgress)
    : pickedFiles(source.files, source.label, onProgress);
}

/** Tell at most 20 states a second, and every change of what is told about. */
function limited(tell) {
  let last = -Infinity;
  let topic = "";
  return (state) => {
    const now = performance.now();
    const about = `${state.phase}/${state.file ?? state.stage ?? ""}`;
    if (about === topic && now - last < 50 && state.done !== state.total) return;
    last = now;
    topic = about;
    tell(state);
  };
}

/** The buffers of vectors go to the page without a copy. */
function buffersOf(result) {
  const vectors = result?.vectors ?? [];
  return [...new Set(vectors.map((vector) => vector.buffer))];
}
