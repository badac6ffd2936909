/** The self-check: files, runtime, tokens, outputs, vectors; it stops at the first stage that fails. */

import { TfxError } from "./errors.mjs";

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
 */

/**
 * Check a bundle on this machine.
 *
 * @param {object} options
 * @param {string} options.app "node" or "web"
 * @param {import("./bundle.mjs").Bundle} options.bundle read with {verify: false}: checking the files is the first stage
 * @param {() => Promise<import("./encoder.mjs").Encoder>} options.open opens the encoder: the second stage. An
 *   encoder that exists already may be returned; it is not disposed of.
 * @param {string | null} [options.library] path of onnxruntime where there is one
 * @param {(state: {stage: string, done: number, total: number}) => void} [options.onProgress]
 * @returns {Promise<{report: Report, exitCode: number}>} 0 passed, 1 failed, 3 this machine cannot
 */
export async function selfCheck({ app, bundle, open, library = null, onProgress }) {
  throw new TfxError("not written yet");
}

/**
 * Return the report as people read it: a line per stage, and the verdict.
 *
 * @param {Report} report
 * @param {{max_abs: number | null, min_cosine: number | null}} tolerance the manifest's
 * @returns {string[]}
 */
export function reportLines(report, tolerance) {
  throw new TfxError("not written yet");
}
