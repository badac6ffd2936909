/** Typed arrays by the dtype names of the manifest. */

/**
 * @typedef {Int8Array | Uint8Array | Int16Array | Uint16Array | Int32Array | Uint32Array | BigInt64Array
 *   | BigUint64Array | Float32Array | Float64Array} TypedArray
 *
 * @typedef {object} Tensor
 * @property {string} dtype the manifest's name of it; numbers of float16 are a Float32Array
 * @property {number[]} shape
 * @property {any} data a TypedArray
 *
 * @typedef {object} Kind the class of a typed array
 * @property {number} BYTES_PER_ELEMENT
 */

/** @type {Record<string, Kind & (new (...args: any[]) => any)>} */
export const ARRAYS = {
  bool: Uint8Array,
  int8: Int8Array,
  uint8: Uint8Array,
  int16: Int16Array,
  uint16: Uint16Array,
  int32: Int32Array,
  uint32: Uint32Array,
  int64: BigInt64Array,
  uint64: BigUint64Array,
  float16: Uint16Array, // its bits; engines without Float16Array have no other form
  float32: Float32Array,
  float64: Float64Array,
};

/** @type {Record<string, bigint>} */
const LOWEST = { bool: 0n, int8: -(2n ** 7n), int16: -(2n ** 15n), int32: -(2n ** 31n), int64: -(2n ** 63n) };
/** @type {Record<string, bigint>} */
const HIGHEST = {
  bool: 1n, int8: 2n ** 7n - 1n, int16: 2n ** 15n - 1n, int32: 2n ** 31n - 1n, int64: 2n ** 63n - 1n,
  uint8: 2n ** 8n - 1n, uint16: 2n ** 16n - 1n, uint32: 2n ** 32n - 1n, uint64: 2n ** 64n - 1n,
};

/** @param {string} dtype */
export const isFloat = (dtype) => dtype.startsWith("float");
/** @param {string} dtype */
export const isWide = (dtype) => dtype === "int64" || dtype === "uint64";

/**
 * @param {string} dtype an integer one, or bool
 * @returns {[bigint, bigint]} the least and the greatest value
 */
export const rangeOf = (dtype) => [LOWEST[dtype] ?? 0n, HIGHEST[dtype]];

/** @param {number[]} shape */
export const sizeOf = (shape) => shape.reduce((product, size) => product * size, 1);

/**
 * @param {Uint16Array} bits
 * @returns {Float32Array} the same numbers
 */
export function fromFloat16(bits) {
  const values = new Float32Array(bits.length);
  for (let i = 0; i < bits.length; i++) values[i] = halfToNumber(bits[i]);
  return values;
}

/** @param {number} bits */
function halfToNumber(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 0x1f;
  const fraction = bits & 0x3ff;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 0x1f) return fraction === 0 ? sign * Infinity : NaN;
  return sign * (1024 + fraction) * 2 ** (exponent - 25);
}

/**
 * @param {number} value
 * @returns {number | null} the bits of a half float, null where the value is none exactly
 */
export function toFloat16(value) {
  if (Number.isNaN(value)) return 0x7e00;
  const sign = value < 0 || Object.is(value, -0) ? 0x8000 : 0;
  const size = Math.abs(value);
  if (size === Infinity) return sign | 0x7c00;
  if (size === 0) return sign;
  const exponent = Math.max(-14, Math.floor(Math.log2(size)));
  for (const power of [exponent, exponent - 1, exponent + 1]) {
    // log2 may be off by one at a power of two
    if (power < -14 || power > 15) continue;
    const fraction = size * 2 ** (10 - power);
    if (!Number.isInteger(fraction)) continue;
    if (fraction >= 1024 && fraction < 2048) return sign | ((power + 15) << 10) | (fraction - 1024);
    if (power === -14 && fraction < 1024) return sign | fraction;
  }
  return null;
}

/**
 * Cut a row of a batch to the first positions.
 *
 * @param {Tensor} tensor (batch, ...)
 * @param {number} row
 * @param {number | null} length positions kept of the second axis, null for all
 * @returns {Tensor} without the batch axis; a copy
 */
export function rowOf({ dtype, shape, data }, row, length = null) {
  const [, ...rest] = shape;
  const size = sizeOf(rest);
  if (length !== null && rest.length > 0) rest[0] = length;
  return { dtype, shape: rest, data: data.slice(row * size, row * size + sizeOf(rest)) };
}
