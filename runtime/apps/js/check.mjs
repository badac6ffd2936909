/** The self-check: files, runtime, tokens, outputs, vectors; it stops at the first stage that fails. */

import { checkFiles } from "./bundle.mjs";
import { EXIT, TfxError, reason } from "./errors.mjs";
import { GOLDEN_NAME, readGolden } from "./golden.mjs";
import { allows, attendedPositions, compare } from "./parity.mjs";
import { rowOf } from "./tensors.mjs";

/**
 * @typedef {object} Stage
 * @property {"files" | "runtime" | "tokens" | "outputs" | "vectors"} stage
 * @property {boolean} passed
 * @property {number} [checked] files, texts, or outputs of golden cases
 * @property {number | null} [max_abs]
 * @property {number | null} [min_cosine]
 *
 * @typedef {object} Report
 * @property {string} app
 * @property {boolean} passed
 * @property {string | null} stage the first that failed
 * @property {string | null} problem one line
 * @property {string | null} runtime "onnxruntime 1.30.0"
 * @property {string | null} library
 * @property {string | null} provider
 * @property {string} precision
 * @property {string} target
 * @property {string} layout
 * @property {number | null} max_abs
 * @property {number | null} min_cosine
 * @property {Stage[]} stages
 * @property {number | null} batch_variance
 * @property {number | null} promised_batch_variance
 *
 * @typedef {import("./golden.mjs").GoldenCase} GoldenCase
 * @typedef {import("./encoder.mjs").Encoder} Encoder
 * @typedef {import("./bundle.mjs").Manifest} Manifest
 * @typedef {import("./tensors.mjs").Tensor} Tensor
 * @typedef {(done: number, total: number) => void} Tell
 *
 * @typedef {object} Options
 * @property {string} app "node" or "web"
 * @property {import("./bundle.mjs").Bundle} bundle read with {verify: false}: checking the files is the first stage
 * @property {() => Promise<Encoder>} open opens the encoder: the second stage. An encoder that exists already may be
 *   returned; it is not disposed of.
 * @property {string | null} [library] path of onnxruntime where there is one
 * @property {(state: {stage: string, done: number, total: number}) => void} [onProgress]
 */

/** A stage that failed, with what was found until then. */
class Failed extends Error {
  /**
   * @param {string} problem
   * @param {Partial<Stage>} [found]
   */
  constructor(problem, found = {}) {
    super(problem);
    this.found = found;
  }
}

/**
 * Check a bundle on this machine.
 *
 * @param {Options} options
 * @returns {Promise<{report: Report, exitCode: number}>} 0 passed, 1 failed, 3 this machine cannot
 */
export async function selfCheck({ app, bundle, open, library = null, onProgress }) {
  const { manifest } = bundle;
  /** @type {(stage: string) => Tell} */
  const tell = (stage) => (done, total) => onProgress?.({ stage, done, total });
  /** @type {Report} */
  const report = {
    app,
    passed: false,
    stage: null,
    problem: null,
    runtime: null,
    library,
    provider: null,
    precision: manifest.precision,
    target: manifest.target,
    layout: manifest.layout,
    max_abs: null,
    min_cosine: null,
    stages: [],
    batch_variance: null,
    promised_batch_variance: manifest.quantization?.batch_variance ?? null,
  };
  /** @type {number} */
  let exitCode = EXIT.done;
  /** @type {GoldenCase[]} */
  let cases = [];
  /** @type {any} */
  let encoder = null;
  /** @type {[Stage["stage"], () => Promise<Partial<Stage>>][]} */
  const stages = [
    ["files", async () => {
      const { checked, problem } = await checkFiles(bundle, ({ done, total }) => tell("files")(done, total));
      if (problem !== null) throw new Failed(problem, { checked });
      if (!(GOLDEN_NAME in manifest.files)) throw new Failed(`the bundle has no ${GOLDEN_NAME}`, { checked });
      cases = readGolden(await bundle.file(GOLDEN_NAME), manifest);
      bundle.release(GOLDEN_NAME);
      return { checked };
    }],
    ["runtime", async () => {
      encoder = await open();
      Object.assign(report, { runtime: encoder.runtime, provider: encoder.provider });
      return {};
    }],
    ["tokens", async () => checkTokens(encoder, cases)],
    ["outputs", async () => checkOutputs(encoder, cases, tell("outputs"))],
    ["vectors", async () => {
      const { batchVariance, ...found } = await checkVectors(encoder, cases, tell("vectors"));
      report.batch_variance = batchVariance;
      return found;
    }],
  ];
  for (const [stage, check] of stages) {
    tell(stage)(0, 1);
    try {
      report.stages.push({ stage, passed: true, ...(await check()) });
    } catch (error) {
      const found = error instanceof Failed ? error.found : {};
      report.stages.push({ stage, passed: false, ...found });
      Object.assign(report, { stage, problem: reason(error) });
      exitCode = error instanceof TfxError && error.exitCode === EXIT.machine ? EXIT.machine : EXIT.check;
      if (!(error instanceof Failed || error instanceof TfxError)) throw error;
      break;
    }
  }
  report.passed = report.stage === null;
  const measured = report.stages.filter((stage) => stage.max_abs !== undefined);
  report.max_abs = worst(measured.map((stage) => stage.max_abs ?? NaN), Math.max);
  report.min_cosine = worst(measured.map((stage) => stage.min_cosine ?? NaN), Math.min);
  return { report, exitCode };
}

/**
 * Return the worst of numbers; null where there is none, or one that cannot be said.
 *
 * @param {number[]} numbers
 * @param {(...numbers: number[]) => number} choose
 */
function worst(numbers, choose) {
  const found = numbers.length === 0 ? NaN : numbers.reduce((one, other) => choose(one, other));
  return Number.isFinite(found) ? found : null;
}

/**
 * Return the ids (or segment ids) of a recorded row: where the mask attends.
 *
 * @param {Manifest} manifest
 * @param {GoldenCase} golden
 * @param {string} role
 * @param {number} row
 * @returns {number[] | null} null where the model has no such input
 */
function recorded(manifest, golden, role, row) {
  const name = manifest.inputs.find((spec) => spec.role === role)?.name;
  if (name === undefined || golden.inputs[name] === undefined) return null;
  const { data } = rowOf(golden.inputs[name], row);
  const attended = attendedPositions(manifest.inputs, golden.inputs);
  const values = Array.from(data, Number);
  if (attended !== null) {
    const mask = rowOf({ dtype: "bool", ...attended }, row).data;
    return values.filter((_, i) => mask[i] !== 0);
  }
  return values;
}

/**
 * @param {Encoder} encoder
 * @param {GoldenCase[]} cases
 * @returns {Partial<Stage>}
 */
function checkTokens(encoder, cases) {
  const { manifest } = encoder;
  if (manifest.tokenizer === null) return { checked: 0 };
  if (encoder.tokenizerProblem !== null) throw new Failed(encoder.tokenizerProblem, { checked: 0 });
  let checked = 0;
  for (const golden of cases) {
    for (const [row, text] of golden.texts.entries()) {
      const name = `text ${row} of ${golden.id}`;
      let tokens;
      try {
        [tokens] = encoder.tokenize([text]);
      } catch (error) {
        throw error instanceof TfxError ? new Failed(`${name}: ${error.message}`, { checked }) : error;
      }
      const difference =
        unequal("ids", tokens.ids, recorded(manifest, golden, "token_ids", row)) ??
        unequal("types", tokens.types, recorded(manifest, golden, "token_type_ids", row));
      if (difference !== null) {
        throw new Failed(`${name} (${JSON.stringify(text.slice(0, 40))}): ${difference}`, { checked });
      }
      checked++;
    }
  }
  return { checked };
}

/**
 * Say where two lists differ first.
 *
 * @param {string} what
 * @param {number[]} found
 * @param {number[] | null} wanted null when nothing was recorded
 */
function unequal(what, found, wanted) {
  if (wanted === null) return null;
  for (let i = 0; i < Math.max(found.length, wanted.length); i++) {
    if (found[i] === wanted[i]) continue;
    return `${what}: found ${found[i] ?? "no more"} at ${i}, wanted ${wanted[i] ?? "no more"}`;
  }
  return null;
}

/** Collects comparisons: the worst numbers, and the first that is not allowed. */
class Judge {
  checked = 0;
  /** @type {import("./parity.mjs").Comparison[]} */
  found = [];
  /** @type {string | null} */
  failure = null;

  /** @param {import("./parity.mjs").Tolerance} tolerance */
  constructor(tolerance) {
    this.tolerance = tolerance;
  }

  /**
   * Say what was compared, and how it came out.
   *
   * @param {string} what
   * @param {import("./parity.mjs").Comparison} comparison
   */
  add(what, comparison) {
    this.checked++;
    this.found.push(comparison);
    if (this.failure !== null || allows(this.tolerance, comparison)) return;
    const { maxAbs, minCosine, problem, perToken } = comparison;
    const cosine = (perToken ? this.tolerance.min_token_cosine : null) ?? this.tolerance.min_cosine;
    const numbers = `max abs ${maxAbs.toPrecision(3)} (allowed ${this.tolerance.max_abs ?? "any"}), ` +
      `cosine ${minCosine.toFixed(8)} (wanted ${cosine ?? "any"})`;
    this.failure = `${what}: ${problem ?? numbers}`;
  }

  result() {
    const found = {
      checked: this.checked,
      max_abs: worst(this.found.map((each) => each.maxAbs), Math.max),
      min_cosine: worst(this.found.map((each) => each.minCosine), Math.min),
    };
    if (this.failure !== null) throw new Failed(this.failure, found);
    return this.checked > 0 ? found : { checked: 0 };
  }
}

/**
 * @param {Encoder} encoder
 * @param {GoldenCase[]} cases
 * @param {Tell} tell
 */
async function checkOutputs(encoder, cases, tell) {
  const { inputs, outputs, tolerance } = encoder.manifest;
  const judge = new Judge(tolerance);
  for (const [i, golden] of cases.entries()) {
    tell(i, cases.length);
    const lacking = outputs.find(({ name }) => golden.outputs[name] === undefined);
    if (lacking !== undefined) {
      throw new Failed(`golden: case ${golden.id} does not record ${lacking.name}`, judge.result());
    }
    const found = await encoder.run(golden.inputs);
    const attended = attendedPositions(inputs, golden.inputs);
    for (const { name, shape } of outputs) {
      judge.add(`${name} in ${golden.id}`, compare(found[name], golden.outputs[name], attended, shape));
    }
  }
  return judge.result();
}

/** @type {(outputs: Manifest["outputs"], name: string) => (string | number)[]} */
const axesOf = (outputs, name) => outputs.find((spec) => spec.name === name)?.shape ?? [];

/**
 * @param {Encoder} encoder
 * @param {GoldenCase[]} cases
 * @param {Tell} tell
 */
async function checkVectors(encoder, cases, tell) {
  const { pooling, tokenizer, tolerance } = encoder.manifest;
  if (tokenizer === null) return { checked: 0, batchVariance: null };
  const rows = cases.flatMap((golden) => golden.texts.map((text, row) => ({ golden, text, row })));
  if (rows.length === 0) return { checked: 0, batchVariance: null };
  const texts = rows.map(({ text }) => text);
  const together = await vectorsOf(encoder, texts, (done, total) => tell(done, 2 * total));
  const judge = new Judge(tolerance);
  for (const [i, { golden, row }] of rows.entries()) {
    for (const [name, found] of Object.entries(together[i])) {
      const expected = expectedRow(encoder.manifest, golden, name, row);
      const perToken = pooling === null && expected.shape.length > 1;
      judge.add(`${name} of text ${row} of ${golden.id}`, { ...compare(found, expected), perToken });
    }
  }
  judge.checked = rows.length;
  const found = judge.result();
  let batchVariance = 0;
  for (const [i, text] of texts.entries()) {
    const [alone] = await vectorsOf(encoder, [text]);
    for (const [name, { data }] of Object.entries(alone)) {
      const other = together[i][name].data;
      for (let k = 0; k < data.length; k++) {
        batchVariance = Math.max(batchVariance, Math.abs(Number(data[k]) - Number(other[k])));
      }
    }
    tell(rows.length + i + 1, 2 * rows.length);
  }
  if (!Number.isFinite(batchVariance)) {
    throw new Failed("a text's values alone and beside others: their difference is NaN or infinity", found);
  }
  return { ...found, batchVariance };
}

/**
 * Return the outputs that are judged for each text: the pooled one, or all without pooling.
 *
 * @param {Encoder} encoder
 * @param {string[]} texts
 * @param {Tell} [onProgress]
 * @returns {Promise<Record<string, Tensor>[]>}
 */
async function vectorsOf(encoder, texts, onProgress) {
  const { pooling } = encoder.manifest;
  if (pooling === null) return encoder.runTexts(texts, { onProgress });
  const vectors = await encoder.embed(texts, { onProgress });
  return vectors.map((data) => ({ [pooling.output]: { dtype: "float32", shape: [data.length], data } }));
}

/**
 * @param {Manifest} manifest
 * @param {GoldenCase} golden
 * @param {string} name
 * @param {number} row
 */
function expectedRow(manifest, golden, name, row) {
  const length = recorded(manifest, golden, "token_ids", row)?.length ?? null;
  return rowOf(golden.outputs[name], row, axesOf(manifest.outputs, name)[1] === "sequence" ? length : null);
}

/**
 * Return the report as people read it: a line per stage, and the verdict.
 *
 * @param {Report} report
 * @param {import("./parity.mjs").Tolerance} tolerance the manifest's
 * @returns {string[]}
 */
export function reportLines(report, tolerance) {
  /** @type {Record<string, string>} */
  const units = { files: "files", tokens: "texts", outputs: "outputs", vectors: "texts" };
  const lines = report.stages.map(({ stage, passed, checked, max_abs: maxAbs, min_cosine: minCosine }) => {
    const ran = [report.runtime ?? "none", report.provider ?? ""];
    const parts = checked === undefined ? ran : [`${checked} ${units[stage]}`];
    if (maxAbs !== undefined) parts.push(`max abs ${short(maxAbs)}`, `min cosine ${minCosine?.toFixed(8) ?? "none"}`);
    return `${stage.padEnd(8)} ${passed ? "passed" : "FAILED"}  ${parts.filter(Boolean).join(", ")}`;
  });
  const needed = `max abs ${short(report.max_abs)} (allowed ${tolerance.max_abs ?? "any"}), ` +
    `cosine ${report.min_cosine?.toFixed(8) ?? "none"} (wanted ${tolerance.min_cosine ?? "any"}` +
    `${tolerance.min_token_cosine == null ? "" : `, ${tolerance.min_token_cosine} of single tokens`})`;
  const variance = `batch variance ${short(report.batch_variance)} (promised ${short(report.promised_batch_variance)})`;
  const verdict = report.passed
    ? `self-check passed: ${report.precision}, ${needed}; ${variance}`
    : `self-check failed at ${report.stage}: ${report.problem}`;
  // What a manifest says may hold what a terminal obeys.
  return [...lines, verdict].map((line) => line.replace(/\p{Cc}+/gu, " "));
}

/**
 * Return a number in three digits.
 *
 * @param {number | null | undefined} number
 */
function short(number) {
  if (number === null || number === undefined) return "none";
  return Math.abs(number) < 0.001 && number !== 0 ? number.toExponential(2) : `${Number(number.toPrecision(3))}`;
}
