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
 * @typedef {import("./tensors.mjs").Tensor} Tensor
 * @typedef {import("./bundle.mjs").Manifest} Manifest
 * @typedef {{shape: number[], data: any}} Dense flat data with its shape
 * @typedef {Map<string, number>} Sizes of named axes
 * @typedef {Map<string, string>} Owners the input that gave an axis its size
 */

/**
 * Check and complete what a caller passes.
 *
 * @param {Record<string, any>} feeds by input name: nested arrays, or {data, shape} (or {data, dims})
 * @param {Manifest} manifest
 * @returns {{tensors: Record<string, Tensor>, sizes: Sizes}} in the graph's dtypes
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
  /** @type {Record<string, Dense>} */
  const given = Object.create(null); // an input may have any name
  /** @type {Sizes} */
  const sizes = new Map();
  /** @type {Owners} */
  const owners = new Map();
  for (const spec of inputs) {
    if (!Object.hasOwn(feeds, spec.name) || feeds[spec.name] === undefined) continue;
    given[spec.name] = dense(spec.name, feeds[spec.name]);
    checkShape(spec, given[spec.name].shape, sizes, owners);
  }
  /** @type {Record<string, Tensor>} */
  const tensors = Object.create(null);
  for (const spec of inputs) {
    if (given[spec.name] === undefined) {
      tensors[spec.name] = standIn(spec, sizes);
      if (MASK_ROLES.includes(spec.role ?? "")) checkUnpadded(spec, given, manifest);
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

/**
 * Return nested arrays, or data with a shape, as flat data with a shape.
 *
 * @param {string} name
 * @param {any} value
 * @returns {Dense}
 */
function dense(name, value) {
  if (Array.isArray(value)) {
    const shape = [];
    for (let level = value; Array.isArray(level) || isTyped(level); level = level[0]) shape.push(level.length);
    /** @type {any[]} */
    const data = [];
    flatten(name, value, shape, 0, data);
    return { shape, data };
  }
  const shape = value?.shape ?? value?.dims;
  const data = value?.data;
  if (!Array.isArray(data) && !isTyped(data)) {
    throw wrong(name, value, "nested arrays, or {data, shape}");
  }
  if (!Array.isArray(shape) || shape.some((size) => !Number.isSafeInteger(size) || size < 0)) {
    throw wrong(`${name}: shape`, shape, "sizes");
  }
  if (sizeOf(shape) !== data.length) {
    const wanted = `${sizeOf(shape)} for the shape (${shape.join(", ")})`;
    throw new TfxError(`${name}: found ${data.length} values, wanted ${wanted}`);
  }
  return { shape: Array.from(shape), data };
}

/** @param {unknown} value */
const isTyped = (value) => ArrayBuffer.isView(value) && !(value instanceof DataView);

/**
 * @param {string} name
 * @param {any} value
 * @param {number[]} shape
 * @param {number} depth
 * @param {any[]} data filled
 */
function flatten(name, value, shape, depth, data) {
  if (depth === shape.length) {
    if (Array.isArray(value)) throw new TfxError(`${name}: rows differ in depth`);
    data.push(value);
    return;
  }
  if ((!Array.isArray(value) && !isTyped(value)) || value.length !== shape[depth]) {
    throw new TfxError(`${name}: rows differ in length; pad them to one length`);
  }
  for (const each of value) flatten(name, each, shape, depth + 1, data);
}

/**
 * @param {TensorSpec} spec
 * @param {number[]} shape
 * @param {Sizes} sizes filled
 * @param {Owners} owners filled
 */
function checkShape(spec, shape, sizes, owners) {
  const [found, wanted] = [shape, spec.shape].map((each) => `(${each.join(", ")})`);
  const unequal = () => new TfxError(`${spec.name}: found shape ${found}, wanted ${wanted}`);
  if (shape.length !== spec.shape.length) throw unequal();
  spec.shape.forEach((axis, i) => {
    if (typeof axis === "number") {
      if (axis !== shape[i]) throw unequal();
    } else if (!sizes.has(axis)) {
      sizes.set(axis, shape[i]);
      owners.set(axis, spec.name);
    } else if (sizes.get(axis) !== shape[i]) {
      const first = `${sizes.get(axis)} as in ${owners.get(axis)}`;
      throw new TfxError(`${spec.name}: found ${axis} ${shape[i]}, wanted ${first}`);
    }
  });
}

/**
 * @param {Sizes} sizes
 * @param {Owners} owners
 * @param {number | null} longest
 */
function checkLengths(sizes, owners, longest) {
  for (const [axis, size] of sizes) {
    if (size === 0) throw new TfxError(`${owners.get(axis)}: found ${axis} length 0, wanted at least 1`);
  }
  const length = sizes.get("sequence");
  if (length !== undefined && longest !== null && length > longest) {
    const name = owners.get("sequence");
    throw new TfxError(`${name}: found sequence length ${length}, wanted at most ${longest}`);
  }
}

/**
 * Refuse to make up a mask for rows that look padded: attending to padding is wrong in silence.
 *
 * @param {TensorSpec} mask
 * @param {Record<string, Dense>} given
 * @param {Manifest} manifest
 */
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

/**
 * Return what stands for a missing input: a mask that attends everywhere, segment ids of zeros.
 *
 * @param {TensorSpec} spec
 * @param {Sizes} sizes
 * @returns {Tensor}
 */
function standIn(spec, sizes) {
  const shape = spec.shape.map((axis) => (typeof axis === "number" ? axis : (sizes.get(axis) ?? -1)));
  const fill = FILLS.get(spec.role ?? "");
  if (fill === undefined || shape.includes(-1)) throw new TfxError(`${spec.name}: missing`);
  return { dtype: spec.dtype, shape, data: new ARRAYS[spec.dtype](sizeOf(shape)).fill(elementOf(spec.dtype)(fill)) };
}

const FILLS = new Map([["attention_mask", 1], ["padding_mask", 0], ["token_type_ids", 0]]);

/**
 * Return the function that makes a small number an element of a typed array.
 *
 * @param {string} dtype
 * @returns {(value: number) => any}
 */
const elementOf = (dtype) => (isWide(dtype) ? BigInt : dtype === "float16" ? toFloat16 : Number);

/**
 * Return a copy of the values in the wanted dtype if that loses nothing: a call that waits for its turn must not see
 * what its caller writes into the array meanwhile.
 *
 * @param {TensorSpec} spec
 * @param {Dense} values
 * @returns {Tensor}
 */
function cast(spec, { shape, data }) {
  const { dtype } = spec;
  if (data instanceof ARRAYS[dtype] && dtype !== "bool") return { dtype, shape, data: data.slice() };
  return { dtype, shape, data: isFloat(dtype) ? castFloats(spec, data) : castIntegers(spec, data) };
}

/**
 * @param {TensorSpec} spec
 * @param {any} data
 */
function castIntegers({ name, dtype }, data) {
  if (data instanceof Float32Array || data instanceof Float64Array) {
    throw new TfxError(`${name}: found ${data instanceof Float32Array ? "float32" : "float64"}, wanted ${dtype}`);
  }
  const [low, high] = rangeOf(dtype);
  const values = new ARRAYS[dtype](data.length);
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

/**
 * Return an integer as bigint; null for anything else, and for numbers so large that they may have been rounded.
 *
 * @param {unknown} value
 */
function integerOf(value) {
  if (typeof value === "bigint") return value;
  if (typeof value === "boolean") return value ? 1n : 0n;
  return typeof value === "number" && Number.isSafeInteger(value) ? BigInt(value) : null;
}

/**
 * @param {TensorSpec} spec
 * @param {any} data
 */
function castFloats({ name, dtype }, data) {
  if (dtype === "float32" && data instanceof Float64Array) throw new TfxError(`${name}: found float64, wanted float32`);
  const values = new ARRAYS[dtype](data.length);
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

/**
 * Refuse ids that an embedding table does not have and masks that are neither 0 nor 1.
 *
 * @param {TensorSpec} spec
 * @param {any} data
 */
function checkValues(spec, data) {
  const role = spec.role ?? "";
  const isMask = MASK_ROLES.includes(role);
  if (isFloat(spec.dtype)) {
    const one = elementOf(spec.dtype)(1);
    const odd = isMask ? data.find((/** @type {number} */ value) => value !== 0 && value !== one) : undefined;
    if (odd !== undefined) throw new TfxError(`${spec.name}: found ${odd}, wanted 0 or 1`);
    return;
  }
  if (spec.dtype === "bool" || !(isMask || spec.limit != null || ID_ROLES.includes(role))) return;
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
 * @param {Manifest} manifest
 * @returns {Record<string, Dense>}
 * @throws {TfxError} the model has an input that tokens do not give
 */
export function pad(encodings, { inputs, pad_id: padId }) {
  const length = encodings.reduce((longest, { ids }) => Math.max(longest, ids.length), 0);
  const shape = [encodings.length, length];
  /** @type {Record<string, (encoding: {ids: number[], types: number[]}, i: number) => number>} by role */
  const values = {
    token_ids: (encoding, i) => encoding.ids[i] ?? padId,
    attention_mask: (encoding, i) => (i < encoding.ids.length ? 1 : 0),
    padding_mask: (encoding, i) => (i < encoding.ids.length ? 0 : 1),
    token_type_ids: (encoding, i) => encoding.types[i] ?? 0,
    position_ids: (_, i) => i,
  };
  /** @type {Record<string, Dense>} */
  const feeds = Object.create(null);
  for (const spec of inputs) {
    const value = values[spec.role ?? ""];
    if (value === undefined) throw new TfxError(`${spec.name}: text gives no ${spec.role}; this bundle takes arrays`);
    const data = new ARRAYS[spec.dtype](shape[0] * length);
    const as = elementOf(spec.dtype);
    encodings.forEach((encoding, row) => {
      for (let i = 0; i < length; i++) data[row * length + i] = as(value(encoding, i));
    });
    feeds[spec.name] = { data, shape };
  }
  return feeds;
}
