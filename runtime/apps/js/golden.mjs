/** The golden: recorded calls in golden.safetensors, read with every bound checked. */

import { TfxError, reason, wrong } from "./errors.mjs";
import { array, integer, object, required, text } from "./manifest.mjs";
import { ARRAYS, fromFloat16, sizeOf } from "./tensors.mjs";

export const GOLDEN_NAME = "golden.safetensors";

const MAX_HEADER = 100_000_000; // the bound of the safetensors format
const MAX_CASES = 10_000;
/** @type {Record<string, string>} */
const DTYPES = {
  BOOL: "bool", I8: "int8", I16: "int16", I32: "int32", I64: "int64", U8: "uint8", U16: "uint16", U32: "uint32",
  U64: "uint64", F16: "float16", F32: "float32", F64: "float64",
};

/**
 * @typedef {import("./tensors.mjs").Tensor} Tensor
 *
 * @typedef {object} GoldenCase
 * @property {string} id
 * @property {number} batch
 * @property {number} sequence
 * @property {string} pattern
 * @property {string[]} texts one per row, or none
 * @property {Record<string, Tensor>} inputs
 * @property {Record<string, Tensor>} outputs
 */

/**
 * @param {Uint8Array} bytes of golden.safetensors
 * @param {import("./bundle.mjs").Manifest} [manifest] each case must record all of its inputs in their shapes, and no
 *   other outputs than its; by default nothing is asked for
 * @returns {GoldenCase[]}
 * @throws {TfxError} the file is damaged, or not of such a bundle; the message says what
 */
export function readGolden(bytes, manifest) {
  const { tensors, metadata } = readSafetensors(bytes, GOLDEN_NAME);
  const cases = caseList(metadata.cases);
  const byId = new Map(cases.map((each) => [each.id, each]));
  for (const [key, tensor] of tensors) {
    const [id, kind, ...rest] = key.split("/");
    const name = rest.join("/");
    const owner = byId.get(id);
    if (owner === undefined || (kind !== "inputs" && kind !== "outputs") || name === "") {
      throw new TfxError(`${GOLDEN_NAME}: tensor ${key} belongs to no case`);
    }
    owner[kind][name] = tensor;
  }
  for (const golden of cases) {
    if (Object.keys(golden.inputs).length === 0 || Object.keys(golden.outputs).length === 0) {
      throw new TfxError(`${GOLDEN_NAME}: case ${golden.id} has no inputs or no outputs`);
    }
    if (manifest !== undefined) checkCase(golden, manifest);
  }
  return cases;
}

/**
 * Refuse a case whose tensors are not the bundle's, or not of so many rows as it says.
 *
 * @param {GoldenCase} golden
 * @param {import("./bundle.mjs").Manifest} manifest
 */
function checkCase(golden, manifest) {
  const where = `${GOLDEN_NAME}: case ${golden.id}`;
  for (const kind of /** @type {const} */ (["inputs", "outputs"])) {
    const known = new Set(manifest[kind].map((spec) => spec.name));
    const unknown = Object.keys(golden[kind]).find((name) => !known.has(name));
    if (unknown === undefined) continue;
    throw new TfxError(`${where} records ${unknown}, which is no ${kind.slice(0, -1)} of the bundle`);
  }
  /** @type {Map<string | number, number>} */
  const sizes = new Map([["batch", golden.batch]]);
  for (const { name, shape: axes } of manifest.inputs) {
    if (golden.inputs[name] === undefined) throw new TfxError(`${where} does not record ${name}`);
    const { shape } = golden.inputs[name];
    const wanted = axes.map((axis) => sizes.get(axis) ?? axis);
    if (shape.length !== wanted.length || wanted.some((size, i) => typeof size === "number" && size !== shape[i])) {
      throw new TfxError(`${where}: ${name}: found shape (${shape.join(", ")}), wanted (${wanted.join(", ")})`);
    }
    axes.forEach((axis, i) => typeof axis === "string" && sizes.set(axis, shape[i]));
  }
}

/**
 * @param {unknown} listing
 * @returns {GoldenCase[]} without their tensors
 */
function caseList(listing) {
  if (typeof listing !== "string") throw new TfxError(`${GOLDEN_NAME}: no case list in the metadata`);
  let parsed;
  try {
    parsed = JSON.parse(listing);
  } catch (error) {
    throw new TfxError(`${GOLDEN_NAME}: the case list is not JSON: ${reason(error)}`);
  }
  const where = `${GOLDEN_NAME}: cases`;
  const cases = array(parsed, where).map((value, i) => {
    const at = `${where}[${i}]`;
    const entry = object(value, at);
    const batch = integer(required(entry, "batch", at), `${at}.batch`, 1);
    const texts = array(entry.texts ?? [], `${at}.texts`).map((each, j) => text(each, `${at}.texts[${j}]`, true));
    const ended = texts.findIndex((each) => each.includes("\0"));
    if (ended >= 0) throw new TfxError(`${at}.texts[${ended}]: holds NUL, which ends a string in C`);
    if (texts.length !== 0 && texts.length !== batch) {
      throw new TfxError(`${at}.texts: found ${texts.length}, wanted one for each of ${batch} rows`);
    }
    return {
      id: text(required(entry, "id", at), `${at}.id`),
      batch,
      sequence: integer(required(entry, "sequence", at), `${at}.sequence`, 1),
      pattern: text(required(entry, "pattern", at), `${at}.pattern`),
      texts,
      inputs: Object.create(null), // a tensor may have any name
      outputs: Object.create(null),
    };
  });
  if (cases.length < 1 || cases.length > MAX_CASES) {
    throw new TfxError(`${where}: found ${cases.length} cases, wanted 1 to ${MAX_CASES}`);
  }
  const slashed = cases.find((each) => each.id.includes("/"));
  if (slashed !== undefined) throw new TfxError(`${where}: the id "${slashed.id}" has a slash`);
  if (new Set(cases.map((each) => each.id)).size !== cases.length) throw new TfxError(`${where}: ids repeat`);
  return cases;
}

/**
 * @param {Uint8Array} bytes of a safetensors file
 * @param {string} name of it, for errors
 * @returns {{tensors: Map<string, Tensor>, metadata: Record<string, string>}} float16 as float32 values
 * @throws {TfxError}
 */
export function readSafetensors(bytes, name) {
  /** @param {string} what */
  const bad = (what) => new TfxError(`${name}: not a safetensors file: ${what}`);
  if (bytes.length < 8) throw bad(`it has ${bytes.length} bytes`);
  const size = new DataView(bytes.buffer, bytes.byteOffset, 8).getBigUint64(0, true);
  if (size > BigInt(Math.min(MAX_HEADER, bytes.length - 8))) throw bad(`its header of ${size} bytes does not fit`);
  const start = 8 + Number(size);
  let header;
  try {
    header = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes.subarray(8, start)));
  } catch (error) {
    throw bad(reason(error));
  }
  const { __metadata__: metadata = {}, ...entries } = object(header, `${name}: header`);
  object(metadata, `${name}: __metadata__`);
  const tensors = new Map();
  // Tensors lie one behind the other, without gaps, up to the end.
  let end = 0;
  const found = Object.entries(entries).map(([key, entry]) => ({ key, ...checkEntry(entry, `${name}: ${key}`) }));
  found.sort((one, other) => one.from - other.from || one.to - other.to);
  for (const { key, dtype, shape, from, to } of found) {
    if (from !== end || to > bytes.length - start) throw bad(`tensor ${key} lies at ${from} to ${to}`);
    end = to;
    // A copy, because typed arrays begin at multiples of their size. (A Buffer's own slice would be none.)
    const kept = new Uint8Array(bytes.subarray(start + from, start + to));
    const Kind = ARRAYS[dtype];
    const data = new Kind(kept.buffer, 0, kept.length / Kind.BYTES_PER_ELEMENT);
    tensors.set(key, dtype === "float16" ? { dtype, shape, data: fromFloat16(data) } : { dtype, shape, data });
  }
  if (end !== bytes.length - start) throw bad(`${bytes.length - start - end} bytes follow the last tensor`);
  return { tensors, metadata };
}

/**
 * @param {unknown} value
 * @param {string} where
 */
function checkEntry(value, where) {
  const entry = object(value, where);
  const code = required(entry, "dtype", where);
  const dtype = Object.hasOwn(DTYPES, code) ? DTYPES[code] : undefined;
  if (dtype === undefined) throw wrong(`${where}.dtype`, entry.dtype, `one of ${Object.keys(DTYPES).join(", ")}`);
  const shape = array(required(entry, "shape", where), `${where}.shape`).map((axis, i) =>
    integer(axis, `${where}.shape[${i}]`),
  );
  const offsets = array(required(entry, "data_offsets", where), `${where}.data_offsets`);
  if (offsets.length !== 2) throw wrong(`${where}.data_offsets`, offsets, "begin and end");
  const [from, to] = offsets.map((offset, i) => integer(offset, `${where}.data_offsets[${i}]`));
  const wanted = sizeOf(shape) * ARRAYS[dtype].BYTES_PER_ELEMENT;
  if (to - from !== wanted) throw new TfxError(`${where}: found ${to - from} bytes, wanted ${wanted}`);
  return { dtype, shape, from, to };
}
