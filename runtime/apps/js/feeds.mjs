/**
 * Feeds checked against the manifest before onnxruntime sees them. Casts that lose nothing are made; everything else
 * that differs is an error that names the input, what was found and what was wanted.
 */

import { TfxError, shown, wrong } from "./errors.mjs";
import { ARRAYS, isFloat, isWide, rangeOf, sizeOf, toFloat16 } from "./tensors.mjs";

const MASK_ROLES = ["attention_mask", "padding_mask"];
const ID_ROLES = ["token_ids", "token_type_ids", "position_ids"];

/**
 * @typedef {import("./bundle.mjs").TensorSpec} TensorSpec
 * @typedef {{dtype: string, shape: number[], data: any}} Tensor
 */

/**
 * Check and complete what a caller passes.
 *
 * @param {Record<string, any>} feeds by input name: nested arrays, or {data, shape} (or {data, dims})
 * @param {import("./bundle.mjs").Manifest} manifest
 * @returns {{tensors: Record<string, Tensor>, sizes: Map<string, number>}} in the graph's dtypes; sizes of named axes
 * @throws {TfxError}
 */
export function checkFeeds(feeds, manifest) {
  const { inputs } = manifest;
  const names = inputs.map((spec) => spec.name).join(", ");
  if (feeds === null || typeof feeds !== "object" || Array.isArray(feeds)) {
    throw wrong("feeds", feeds, `arrays by input name: ${names}`);
  }
  for (const name of Object.keys(feeds)) {
    if (!inputs.some((spec) => spec.name === name)) throw new TfxError(`feeds: found "${name}", wanted only ${names}`);
  }
  const given = {};
  const [sizes, owners] = [new Map(), new Map()];
  for (const spec of inputs) {
    if (feeds[spec.name] === undefined) continue;
    given[spec.name] = dense(spec.name, feeds[spec.name]);
    checkShape(spec, given[spec.name].shape, sizes, owners);
  }
  const tensors = {};
  for (const spec of inputs) {
    if (given[spec.name] === undefined) {
      tensors[spec.name] = standIn(spec, sizes);
      if (MASK_ROLES.includes(spec.role)) checkUnpadded(spec, given, manifest);
    } else {
      tensors[spec.name] = cast(spec, given[spec.name]);
    }
  }
  if (sizes.get("batch") !== 0) {
    checkLengths(sizes, owners, manifest.max_length);
    for (const spec of inputs) checkValues(spec, tensors[spec.name].data);
  }
  return { tensors, sizes };
}

/** Return nested arrays, or data with a shape, as flat data with a shape. */
function dense(name, value) {
  if (Array.isArray(value)) {
    const shape = [];
    for (let level = value; Array.isArray(level) || ArrayBuffer.isView(level); level = level[0]) shape.push(level.length);
    const data = [];
    flatten(name, value, shape, 0, data);
    return { shape, data };
  }
  const shape = value?.shape ?? value?.dims;
  const data = value?.data;
  if (!Array.isArray(data) && !(ArrayBuffer.isView(data) && !(data instanceof DataView))) {
    throw wrong(name, value, "nested arrays, or {data, shape}");
  }
  if (!Array.isArray(shape) || shape.some((size) => !Number.isSafeInteger(size) || size < 0)) {
    throw wrong(`${name}: shape`, shape, "sizes");
  }
  if (sizeOf(shape) !== data.length) {
    throw new TfxError(`${name}: found ${data.length} values, wanted ${sizeOf(shape)} for the shape (${shape.join(", ")})`);
  }
  return { shape, data };
}

function flatten(name, value, shape, depth, data) {
  if (depth === shape.length) {
    if (Array.isArray(value)) throw new TfxError(`${name}: rows differ in depth`);
    data.push(value);
    return;
  }
  if ((!Array.isArray(value) && !ArrayBuffer.isView(value)) || value.length !== shape[depth]) {
    throw new TfxError(`${name}: rows differ in length; pad them to one length`);
  }
  for (const each of value) flatten(name, each, shape, depth + 1, data);
}

function checkShape(spec, shape, sizes, owners) {
  const unequal = () => new TfxError(`${spec.name}: found shape (${shape.join(", ")}), wanted (${spec.shape.join(", ")})`);
  if (shape.length !== spec.shape.length) throw unequal();
  spec.shape.forEach((axis, i) => {
    if (typeof axis === "number") {
      if (axis !== shape[i]) throw unequal();
    } else if (!sizes.has(axis)) {
      sizes.set(axis, shape[i]);
      owners.set(axis, spec.name);
    } else if (sizes.get(axis) !== shape[i]) {
      throw new TfxError(`${spec.name}: found ${axis} ${shape[i]}, wanted ${sizes.get(axis)} as in ${owners.get(axis)}`);
    }
  });
}

function checkLengths(sizes, owners, longest) {
  for (const [axis, size] of sizes) {
    if (size === 0) throw new TfxError(`${owners.get(axis)}: found ${axis} length 0, wanted at least 1`);
  }
  const length = sizes.get("sequence");
  if (length !== undefined && longest !== null && length > longest) {
    throw new TfxError(`${owners.get("sequence")}: found sequence length ${length}, wanted at most ${longest}`);
  }
}

/** Refuse to make up a mask for rows that look padded: attending to padding is wrong in silence. */
function checkUnpadded(mask, given, { inputs, pad_id: padId }) {
  for (const { name, role } of inputs) {
    const ids = role === "token_ids" ? given[name] : undefined;
    if (ids === undefined || ids.shape.length !== 2 || ids.shape[1] < 2) continue;
    const [rows, length] = ids.shape;
    for (let row = 0; row < rows; row++) {
      if (Number(ids.data[row * length]) === padId || Number(ids.data[(row + 1) * length - 1]) === padId) {
        throw new TfxError(
          `${mask.name}: missing, and ${name} has rows that begin or end with the padding id ${padId}; give the mask`,
        );
      }
    }
  }
}

/** Return what stands for a missing input: a mask that attends everywhere, segment ids of zeros. */
function standIn(spec, sizes) {
  const shape = spec.shape.map((axis) => (typeof axis === "number" ? axis : sizes.get(axis)));
  const fill = { attention_mask: 1, padding_mask: 0, token_type_ids: 0 }[spec.role];
  if (fill === undefined || shape.includes(undefined)) throw new TfxError(`${spec.name}: missing`);
  const one = spec.dtype === "float16" ? toFloat16(fill) : fill;
  return { dtype: spec.dtype, shape, data: new ARRAYS[spec.dtype](sizeOf(shape)).fill(isWide(spec.dtype) ? BigInt(one) : one) };
}

/** Return the values in the wanted dtype if that loses nothing. */
function cast(spec, { shape, data }) {
  const Kind = ARRAYS[spec.dtype];
  const sameKind = data instanceof Kind && spec.dtype !== "bool" && !(spec.dtype === "uint8" && data instanceof Uint8ClampedArray);
  if (sameKind) return { dtype: spec.dtype, shape, data };
  return { dtype: spec.dtype, shape, data: isFloat(spec.dtype) ? castFloats(spec, data, Kind) : castIntegers(spec, data, Kind) };
}

function castIntegers({ name, dtype }, data, Kind) {
  if (data instanceof Float32Array || data instanceof Float64Array) {
    throw new TfxError(`${name}: found ${data instanceof Float32Array ? "float32" : "float64"}, wanted ${dtype}`);
  }
  const [low, high] = rangeOf(dtype);
  const values = new Kind(data.length);
  for (let i = 0; i < data.length; i++) {
    const value = integerOf(data[i]);
    if (value === null) throw new TfxError(`${name}: found ${shown(data[i])}, wanted ${dtype}`);
    if (value < low || value > high) {
      throw new TfxError(`${name}: found ${value}, wanted ${dtype} values of ${low} to ${high}`);
    }
    values[i] = isWide(dtype) ? value : Number(value);
  }
  return values;
}

/** Return an integer as bigint; null for anything else, and for numbers so large that they may have been rounded. */
function integerOf(value) {
  if (typeof value === "bigint") return value;
  if (typeof value === "boolean") return value ? 1n : 0n;
  return Number.isSafeInteger(value) ? BigInt(value) : null;
}

function castFloats({ name, dtype }, data, Kind) {
  if (dtype === "float32" && data instanceof Float64Array) throw new TfxError(`${name}: found float64, wanted float32`);
  const values = new Kind(data.length);
  for (let i = 0; i < data.length; i++) {
    const value = typeof data[i] === "bigint" || typeof data[i] === "boolean" ? Number(data[i]) : data[i];
    if (typeof value !== "number") throw new TfxError(`${name}: found ${shown(data[i])}, wanted ${dtype}`);
    const bits = dtype === "float16" ? toFloat16(value) : null;
    values[i] = dtype === "float16" ? (bits ?? NaN) : value;
    // Fractions in plain numbers are rounded, as anywhere; an integer has to stay what it is.
    const lost = dtype === "float16" ? bits === null : Number.isInteger(value) && values[i] !== value;
    if (lost || (typeof data[i] === "bigint" && BigInt(value) !== data[i])) {
      throw new TfxError(`${name}: found ${shown(data[i])}, wanted a number that ${dtype} holds`);
    }
  }
  return values;
}

/** Refuse ids that an embedding table does not have and masks that are neither 0 nor 1. */
function checkValues(spec, data) {
  const isMask = MASK_ROLES.includes(spec.role);
  if (isFloat(spec.dtype)) {
    const one = spec.dtype === "float16" ? toFloat16(1) : 1;
    const odd = isMask ? data.find((value) => value !== 0 && value !== one) : undefined;
    if (odd !== undefined) throw new TfxError(`${spec.name}: found ${odd}, wanted 0 or 1`);
    return;
  }
  if (spec.dtype === "bool" || !(isMask || spec.limit != null || ID_ROLES.includes(spec.role))) return;
  const limit = isMask ? 2 : (spec.limit ?? Infinity);
  for (const value of data) {
    if (value >= 0 && value < limit) continue;
    if (isMask) throw new TfxError(`${spec.name}: found ${value}, wanted 0 or 1`);
    const wanted = limit === Infinity ? "at least 0" : `values of 0 to ${limit - 1}`;
    throw new TfxError(`${spec.name}: found ${value}, wanted ${wanted}`);
  }
}

/**
 * Pad tokens on the right to one (batch, sequence) array per input of the model.
 *
 * @param {{ids: number[], types: number[]}[]} encodings none of them empty
 * @param {import("./bundle.mjs").Manifest} manifest
 * @returns {Record<string, {data: any, shape: number[]}>}
 * @throws {TfxError} the model has an input that tokens do not give
 */
export function pad(encodings, { inputs, pad_id: padId }) {
  const length = Math.max(...encodings.map((encoding) => encoding.ids.length));
  const shape = [encodings.length, length];
  const values = {
    token_ids: (encoding, i) => encoding.ids[i] ?? padId,
    attention_mask: (encoding, i) => (i < encoding.ids.length ? 1 : 0),
    padding_mask: (encoding, i) => (i < encoding.ids.length ? 0 : 1),
    token_type_ids: (encoding, i) => encoding.types[i] ?? 0,
    position_ids: (_, i) => i,
  };
  const feeds = {};
  for (const spec of inputs) {
    const value = values[spec.role];
    if (value === undefined) throw new TfxError(`${spec.name}: text gives no ${spec.role}; this bundle takes arrays`);
    const data = new ARRAYS[spec.dtype](shape[0] * length);
    const as = isWide(spec.dtype) ? BigInt : spec.dtype === "float16" ? toFloat16 : Number;
    encodings.forEach((encoding, row) => {
      for (let i = 0; i < length; i++) data[row * length + i] = as(value(encoding, i));
    });
    feeds[spec.name] = { data, shape };
  }
  return feeds;
}
