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
 */

/** A stage that failed, with what was found until then. */
class Failed extends Error {
  constructor(problem, found = {}) {
    super(problem);
    this.found = found;
  }
}

/**
 * Check a bundle on this machine.
 *
 * @param {object} options
 * @param {string} options.app "node" or "web"
 * @param {import("./bundle.mjs").Bundle} options.bundle read with {verify: false}: checking the files is the first stage
 * @param {() => Promise<Encoder>} options.open opens the encoder: the second stage. An encoder that exists already may
 *   be returned; it is not disposed of.
 * @param {string | null} [options.library] path of onnxruntime where there is one
 * @param {(state: {stage: string, done: number, total: number}) => void} [options.onProgress]
 * @returns {Promise<{report: Report, exitCode: number}>} 0 passed, 1 failed, 3 this machine cannot
 */
export async function selfCheck({ app, bundle, open, library = null, onProgress }) {
  const { manifest } = bundle;
  const tell = (stage) => (done, total) => onProgress?.({ stage, done, total });
  let [encoder, cases, exitCode] = [null, [], EXIT.done];
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
  const stages = {
    files: async () => {
      const { checked, problem } = await checkFiles(bundle, ({ done, total }) => tell("files")(done, total));
      if (problem !== null) throw new Failed(problem, { checked });
      if (!Object.hasOwn(manifest.files, GOLDEN_NAME)) throw new Failed(`the bundle has no ${GOLDEN_NAME}`, { checked });
      cases = readGolden(await bundle.file(GOLDEN_NAME));
      bundle.release(GOLDEN_NAME);
      return { checked };
    },
    runtime: async () => {
      encoder = await open();
      Object.assign(report, { runtime: encoder.runtime, provider: encoder.provider });
      return {};
    },
    tokens: async () => checkTokens(encoder, cases),
    outputs: async () => checkOutputs(encoder, cases, tell("outputs")),
    vectors: async () => {
      const { batchVariance, ...found } = await checkVectors(encoder, cases, tell("vectors"));
      report.batch_variance = batchVariance;
      return found;
    },
  };
  for (const [stage, check] of Object.entries(stages)) {
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
  report.max_abs = worst(measured.map((stage) => stage.max_abs), Math.max);
  report.min_cosine = worst(measured.map((stage) => stage.min_cosine), Math.min);
  return { report, exitCode };
}

/** Return the worst of numbers; null where there is none, or one that cannot be said. */
function worst(numbers, choose) {
  const values = numbers.map((number) => number ?? NaN);
  const found = values.length === 0 ? NaN : choose(...values);
  return Number.isFinite(found) ? found : null;
}

/** Return the ids (or segment ids) of a recorded row: where the mask attends. */
function recorded(manifest, golden, role, row) {
  const name = manifest.inputs.find((spec) => spec.role === role)?.name;
  if (golden.inputs[name] === undefined) return null;
  const { data } = rowOf(golden.inputs[name], row);
  const attended = attendedPositions(manifest.inputs, golden.inputs);
  const values = Array.from(data, Number);
  if (attended !== null) {
    const mask = rowOf({ dtype: "bool", ...attended }, row).data;
    return values.filter((_, i) => mask[i] !== 0);
  }
  return values;
}

function checkTokens(encoder, cases) {
  const { manifest } = encoder;
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
      for (const [role, found, what] of [["token_ids", tokens.ids, "ids"], ["token_type_ids", tokens.types, "types"]]) {
        const wanted = recorded(manifest, golden, role, row);
        const place = wanted === null ? -1 : firstDifference(found, wanted);
        if (place >= 0) {
          const difference = `found ${found[place] ?? "no more"} at ${place}, wanted ${wanted[place] ?? "no more"}`;
          throw new Failed(`${name} (${JSON.stringify(text.slice(0, 40))}): ${what}: ${difference}`, { checked });
        }
      }
      checked++;
    }
  }
  return { checked };
}

function firstDifference(one, other) {
  for (let i = 0; i < Math.max(one.length, other.length); i++) if (one[i] !== other[i]) return i;
  return -1;
}

/** Collects comparisons: the worst numbers, and the first that is not allowed. */
class Judge {
  constructor(tolerance) {
    this.tolerance = tolerance;
    this.checked = 0;
    this.found = [];
    this.failure = null;
  }

  /** Say what was compared, and how it came out. */
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
      max_abs: this.found.length > 0 ? worst(this.found.map((each) => each.maxAbs), Math.max) : null,
      min_cosine: this.found.length > 0 ? worst(this.found.map((each) => each.minCosine), Math.min) : null,
    };
    if (this.failure !== null) throw new Failed(this.failure, found);
    return this.checked > 0 ? found : { checked: 0 };
  }
}

async function checkOutputs(encoder, cases, tell) {
  const { inputs, outputs, tolerance } = encoder.manifest;
  const judge = new Judge(tolerance);
  for (const [i, golden] of cases.entries()) {
    tell(i, cases.length);
    const found = await encoder.run(golden.inputs);
    const attended = attendedPositions(inputs, golden.inputs);
    for (const [name, expected] of Object.entries(golden.outputs)) {
      if (found[name] === undefined) throw new Failed(`output ${name} of ${golden.id} is missing`, judge.result());
      judge.add(`${name} in ${golden.id}`, compare(found[name], expected, attended, axesOf(outputs, name)));
    }
  }
  return judge.result();
}

const axesOf = (outputs, name) => outputs.find((spec) => spec.name === name)?.shape ?? [];

async function checkVectors(encoder, cases, tell) {
  const { pooling, tolerance } = encoder.manifest;
  const rows = cases.flatMap((golden) => golden.texts.map((text, row) => ({ golden, text, row })));
  if (rows.length === 0) return { checked: 0, batchVariance: null };
  const texts = rows.map(({ text }) => text);
  const together = await vectorsOf(encoder, texts, (done, total) => tell(done, 2 * total));
  const judge = new Judge(tolerance);
  for (const [i, { golden, row }] of rows.entries()) {
    for (const [name, found] of Object.entries(together[i])) {
      const expected = expectedRow(encoder.manifest, golden, name, row);
      if (expected === null) continue;
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
      data.forEach((value, k) => (batchVariance = Math.max(batchVariance, Math.abs(Number(value) - Number(other[k])))));
    }
    tell(rows.length + i + 1, 2 * rows.length);
  }
  return { ...found, batchVariance };
}

/** Return the outputs that are judged for each text: the pooled one, or all without pooling. */
async function vectorsOf(encoder, texts, onProgress) {
  const { pooling } = encoder.manifest;
  if (pooling === null) return encoder.runTexts(texts, { onProgress });
  const vectors = await encoder.embed(texts, { onProgress });
  return vectors.map((data) => ({ [pooling.output]: { dtype: "float32", shape: [data.length], data } }));
}

function expectedRow(manifest, golden, name, row) {
  if (golden.outputs[name] === undefined) return null;
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
  const units = { files: "files", tokens: "texts", outputs: "outputs", vectors: "texts" };
  const lines = report.stages.map(({ stage, passed, checked, max_abs: maxAbs, min_cosine: minCosine }) => {
    const parts = checked === undefined ? [report.runtime ?? "none", report.provider ?? ""] : [`${checked} ${units[stage]}`];
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
  return [...lines, verdict];
}

/** Return a number in three digits. */
function short(number) {
  if (number === null || number === undefined) return "none";
  return Math.abs(number) < 0.001 && number !== 0 ? number.toExponential(2) : `${Number(number.toPrecision(3))}`;
}
