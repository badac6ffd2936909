/**
 * Parity: do two outputs agree where they have a meaning? The rules are those of Python's runtime/parity.py.
 *
 * Judged on attended positions only, because a padded position has no meaning; outputs without a sequence axis (pooled
 * vectors) are judged whole. NaN, infinity or a constant never agrees with anything. Cosines are per vector along the
 * last axis, in 64-bit floats; equal vectors have 1.
 */

import { isFloat, sizeOf } from "./tensors.mjs";

/**
 * @typedef {import("./tensors.mjs").Tensor} Tensor
 *
 * @typedef {object} Comparison
 * @property {number} maxAbs NaN when it cannot be said
 * @property {number} minCosine likewise
 * @property {string | null} problem why the two can never agree
 * @property {boolean} perToken whether there is a vector for every position
 *
 * @typedef {{max_abs: number | null, min_cosine: number | null, min_token_cosine?: number | null}} Tolerance
 */

/**
 * @param {string} problem
 * @returns {Comparison}
 */
const never = (problem) => ({ maxAbs: NaN, minCosine: NaN, problem, perToken: false });

/**
 * @param {Tensor} actual
 * @param {Tensor} expected
 * @param {{shape: number[], data: Uint8Array} | null} [attended] (batch, sequence), 1 where judged; null judges all
 * @param {(string | number)[]} [axes] of the output; only one that begins with batch, sequence has positions
 * @returns {Comparison}
 */
export function compare(actual, expected, attended = null, axes = []) {
  const { shape } = expected;
  if (actual.shape.length !== shape.length || actual.shape.some((size, i) => size !== shape[i])) {
    return never(`shape (${actual.shape.join(", ")}), wanted (${shape.join(", ")})`);
  }
  const perToken =
    attended !== null && axes[0] === "batch" && axes[1] === "sequence" &&
    shape[0] === attended.shape[0] && shape[1] === attended.shape[1];
  const width = shape.at(-1) ?? 1;
  const perPosition = perToken ? sizeOf(shape.slice(2)) : 0;
  /** @param {number} start */
  const judged = (start) => !perToken || attended.data[Math.floor(start / perPosition)] !== 0;
  // Positions without vectors of their own, (batch, sequence): the judged ones are one vector.
  const vectors = perToken && shape.length === 2 ? joined(attended) : rows(sizeOf(shape), width, judged);
  if (vectors.length === 0 || vectors.every((vector) => vector.length === 0)) {
    return never("nothing to judge: no attended position");
  }
  const floating = isFloat(expected.dtype);
  const problem = unsound(actual.data, vectors, floating) ?? unsound(expected.data, vectors, floating, "expected ");
  if (problem !== null) return never(problem);
  let maxAbs = 0;
  let minCosine = 1;
  for (const vector of vectors) {
    let [dot, one, other, equal] = [0, 0, 0, true];
    for (const i of vector) {
      const [a, b] = [Number(actual.data[i]), Number(expected.data[i])];
      maxAbs = Math.max(maxAbs, Math.abs(a - b));
      dot += a * b;
      one += a * a;
      other += b * b;
      equal &&= a === b;
    }
    const norms = Math.sqrt(one) * Math.sqrt(other);
    if (!equal) minCosine = Math.min(minCosine, Math.max(-1, norms === 0 ? 0 : dot / norms));
  }
  return { maxAbs, minCosine, problem: null, perToken };
}

/**
 * Say why values can never agree.
 *
 * @param {any} data
 * @param {Iterable<number>[]} vectors indices
 * @param {boolean} floating
 * @param {string} [whose]
 */
function unsound(data, vectors, floating, whose = "") {
  let [low, high, count] = [Infinity, -Infinity, 0];
  for (const vector of vectors) {
    for (const i of vector) {
      const value = Number(data[i]);
      if (!Number.isFinite(value)) return `${whose}output holds NaN or infinity`;
      low = Math.min(low, value);
      high = Math.max(high, value);
      count++;
    }
  }
  return floating && count > 1 && low === high ? `${whose}output is constant (${low} everywhere)` : null;
}

/** A range of indices that is walked without being stored. */
class Span {
  /**
   * @param {number} start
   * @param {number} length
   */
  constructor(start, length) {
    this.start = start;
    this.length = length;
  }

  *[Symbol.iterator]() {
    for (let i = this.start; i < this.start + this.length; i++) yield i;
  }
}

/**
 * @param {number} size
 * @param {number} width
 * @param {(start: number) => boolean} judged
 */
function rows(size, width, judged) {
  const found = [];
  for (let start = 0; start < size; start += width) if (judged(start)) found.push(new Span(start, width));
  return found;
}

/** @param {{data: Uint8Array}} attended */
function joined(attended) {
  return [Array.from(attended.data.keys()).filter((i) => attended.data[i] !== 0)];
}

/**
 * @param {Tolerance} tolerance
 * @param {Comparison} comparison
 * @returns {boolean} sound and within the bounds; NaN is within none
 */
export function allows(tolerance, { maxAbs, minCosine, problem, perToken }) {
  const cosine = (perToken ? tolerance.min_token_cosine : null) ?? tolerance.min_cosine;
  return problem === null && (tolerance.max_abs == null || maxAbs <= tolerance.max_abs) &&
    (cosine == null || minCosine >= cosine);
}

/**
 * @param {import("./bundle.mjs").TensorSpec[]} inputs
 * @param {Record<string, Tensor>} feeds
 * @returns {{shape: number[], data: Uint8Array} | null} what all (batch, sequence) masks attend; null without one
 */
export function attendedPositions(inputs, feeds) {
  /** @type {{shape: number[], data: Uint8Array} | null} */
  let found = null;
  for (const { name, role } of inputs) {
    const mask = feeds[name];
    if ((role !== "attention_mask" && role !== "padding_mask") || mask?.shape.length !== 2) continue;
    const attends = role === "attention_mask";
    const data = Uint8Array.from(mask.data, (value) => ((Number(value) !== 0) === attends ? 1 : 0));
    if (found === null) found = { shape: mask.shape, data };
    else if (found.shape.every((size, i) => size === mask.shape[i])) {
      found = { shape: mask.shape, data: found.data.map((value, i) => value & data[i]) };
    }
  }
  return found;
}
