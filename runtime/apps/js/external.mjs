/**
 * Where an .onnx file keeps weights outside itself. The file is walked as protobuf, past everything but the fields
 * that lead to TensorProto.external_data, so that a missing file is named with its size before the model is loaded.
 */

import { TfxError } from "./errors.mjs";

/**
 * Message -> field number -> message of that field, along onnx.proto: only what can hold a tensor.
 *
 * @type {Record<string, Record<number, string>>}
 */
const MESSAGES = {
  Model: { 7: "Graph", 20: "TrainingInfo", 25: "Function" },
  TrainingInfo: { 1: "Graph", 2: "Graph" },
  Function: { 7: "Node", 11: "Attribute" },
  Graph: { 1: "Node", 5: "Tensor", 15: "SparseTensor" },
  Node: { 5: "Attribute" },
  Attribute: { 5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph", 22: "SparseTensor", 23: "SparseTensor" },
  SparseTensor: { 1: "Tensor", 2: "Tensor" },
  Tensor: { 13: "Entry" },
};

/**
 * @typedef {object} Bytes random access to a file
 * @property {number} length
 * @property {(position: number) => number} byte
 * @property {(start: number, end: number) => Uint8Array} slice
 *
 * @typedef {object} ExternalData
 * @property {string} location name of the file
 * @property {number} end byte of it at which the tensor ends, 0 when the model does not say
 */

/**
 * @param {Uint8Array} buffer
 * @returns {Bytes}
 */
export function bytesOf(buffer) {
  return {
    length: buffer.length,
    byte: (position) => buffer[position],
    slice: (start, end) => buffer.subarray(start, end),
  };
}

/**
 * @param {Bytes} bytes of an .onnx file
 * @param {string} name of it, for errors
 * @returns {ExternalData[]} the file that each external tensor lies in, and where it ends
 * @throws {TfxError} the file is no protobuf message
 */
export function externalData(bytes, name) {
  /** @type {ExternalData[]} */
  const found = [];
  const decoder = new TextDecoder("utf-8", { fatal: true });
  // An explicit stack: graphs nest as deep as whoever made the file likes.
  /** @type {[string, number, number][]} */
  const stack = [["Model", 0, bytes.length]];
  try {
    if (bytes.length === 0) throw new RangeError("empty");
    for (let top = stack.pop(); top !== undefined; top = stack.pop()) {
      const [message, start, end] = top;
      const entries = new Map();
      for (const [field, from, to] of fields(bytes, start, end)) {
        const inner = MESSAGES[message][field];
        if (inner === "Entry") {
          const entry = new Map();
          for (const [number, a, b] of fields(bytes, from, to)) entry.set(number, decoder.decode(bytes.slice(a, b)));
          entries.set(entry.get(1) ?? "", entry.get(2) ?? "");
        } else if (inner !== undefined) {
          stack.push([inner, from, to]);
        }
      }
      if (entries.has("location")) {
        const last = Number(entries.get("offset") || 0) + Number(entries.get("length") || 0);
        if (!Number.isSafeInteger(last)) throw new RangeError("offset");
        found.push({ location: entries.get("location"), end: last });
      }
    }
  } catch (error) {
    if (error instanceof RangeError || error instanceof TypeError) throw new TfxError(`${name}: not an ONNX file`);
    throw error;
  }
  return found;
}

/**
 * Yield number, start and end of each length-delimited field of a message; skip the others.
 *
 * @param {Bytes} bytes
 * @param {number} position
 * @param {number} end
 * @returns {Generator<[number, number, number]>}
 */
function* fields(bytes, position, end) {
  while (position < end) {
    let key;
    [key, position] = varint(bytes, position, end);
    const kind = key % 8;
    if (kind === 0) [, position] = varint(bytes, position, end);
    else if (kind === 1) position += 8;
    else if (kind === 5) position += 4;
    else if (kind === 2) {
      let size;
      [size, position] = varint(bytes, position, end);
      if (position + size > end) throw new RangeError("field beyond its message");
      yield [Math.floor(key / 8), position, position + size];
      position += size;
    } else throw new RangeError("unknown wire type");
  }
  if (position > end) throw new RangeError("field beyond its message");
}

/**
 * @param {Bytes} bytes
 * @param {number} position
 * @param {number} end
 * @returns {[number, number]} the number, and where the next thing begins
 */
function varint(bytes, position, end) {
  let value = 0;
  for (let scale = 1, count = 0; count < 10; count++, scale *= 128) {
    if (position >= end) throw new RangeError("number beyond its message");
    const byte = bytes.byte(position++);
    value += (byte & 0x7f) * scale; // beyond 2^53 it is inexact, and beyond any file as well
    if (byte < 0x80) return [value, position];
  }
  throw new RangeError("varint of more than 10 bytes");
}
