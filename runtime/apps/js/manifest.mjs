/** tfx.json, format 1: every field checked as Python checks it; an error names the field, what was found and wanted. */

import { TfxError, reason, wrong } from "./errors.mjs";

export const MANIFEST_NAME = "tfx.json";
export const FORMAT = 1;

const DTYPES = [
  "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
];
const ROLES = ["token_ids", "attention_mask", "padding_mask", "token_type_ids", "position_ids", "features"];
const POOLINGS = ["cls", "mean", "max", "last"];
const COUNTS = ["attention", "layer_norm", "rms_norm", "gelu", "rotary"];
const KEYS = [
  "source", "inputs", "outputs", "max_length", "pad_id", "target", "precision", "layout", "model", "counts",
  "tolerance", "pooling", "tokenizer", "refusals", "parity", "files", "versions",
];
const OPTIONAL = ["quantization", "tuning"];

/** @param {string} key */
const at = (key) => `${MANIFEST_NAME}: ${key}`;

/**
 * @param {Uint8Array} bytes of tfx.json
 * @returns {import("./bundle.mjs").Manifest}
 * @throws {TfxError} not JSON, a newer format, or a field that is missing or wrong
 */
export function parseManifest(bytes) {
  let value;
  try {
    value = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes));
  } catch (error) {
    throw new TfxError(`${MANIFEST_NAME}: not JSON: ${reason(error)}`);
  }
  const top = object(value, MANIFEST_NAME);
  const version = integer(required(top, "format", MANIFEST_NAME), at("format"), 1);
  if (version > FORMAT) {
    throw new TfxError(`${at("format")}: found ${version}, this app reads format ${FORMAT}; make it anew with tfx app`);
  }
  onlyKeys(top, ["format", ...KEYS, ...OPTIONAL], MANIFEST_NAME);
  for (const key of KEYS) required(top, key, MANIFEST_NAME);
  checkSource(top.source);
  checkTensors(top.inputs, at("inputs"), false);
  checkTensors(top.outputs, at("outputs"), true);
  if (top.max_length !== null) integer(top.max_length, at("max_length"), 1);
  integer(top.pad_id, at("pad_id"));
  if (top.pooling !== null) checkPooling(top.pooling);
  if (top.tokenizer !== null) checkTokenizer(top.tokenizer);
  text(top.target, at("target"));
  text(top.precision, at("precision"));
  choice(top.layout, ["padded", "ragged"], at("layout"));
  checkModel(top.model);
  onlyKeys(object(top.counts, at("counts")), COUNTS, at("counts"));
  for (const key of COUNTS) integer(required(top.counts, key, at("counts")), at(`counts.${key}`));
  array(top.refusals, at("refusals")).forEach((each, i) => {
    texts(each, ["rule", "where", "reason"], at(`refusals[${i}]`));
  });
  checkTolerance(top.tolerance);
  if (top.parity !== null) checkParity(top.parity);
  checkFileList(top.files);
  for (const [key, each] of Object.entries(object(top.versions, at("versions")))) text(each, at(`versions.${key}`));
  if (top.quantization != null) checkQuantization(top.quantization);
  if (top.tuning != null) checkTuning(top.tuning);
  checkReferences(top);
  return /** @type {import("./bundle.mjs").Manifest} */ (/** @type {unknown} */ (top));
}

/** @param {any} manifest */
function checkReferences(manifest) {
  const { pooling, outputs, files } = manifest;
  const names = outputs.map((/** @type {{name: string}} */ spec) => spec.name);
  if (pooling !== null && !names.includes(pooling.output)) {
    throw wrong(at("pooling.output"), pooling.output, `one of ${names.join(", ")}`);
  }
  /** @type {[string, any][]} */
  const owners = [["model.file", manifest.model?.file], ["tokenizer.file", manifest.tokenizer?.file]];
  if (Object.keys(files).length > 0) owners.push(["tuning.log", manifest.tuning?.log]);
  for (const [where, name] of owners) {
    if (name == null || Object.hasOwn(files, name)) continue;
    throw new TfxError(`${at(where)}: "${name}" is not among the files`);
  }
}

/** @param {unknown} value */
function checkSource(value) {
  const entry = object(value, at("source"));
  for (const key of ["kind", "name"]) text(required(entry, key, at("source")), at(`source.${key}`));
  if (entry.sha256 != null) text(entry.sha256, at("source.sha256"));
}

/**
 * @param {unknown} value
 * @param {string} where
 * @param {boolean} output
 */
function checkTensors(value, where, output) {
  const entries = array(value, where);
  if (entries.length === 0) throw new TfxError(`${where}: found none, wanted at least one`);
  entries.forEach((each, i) => {
    const path = `${where}[${i}]`;
    const entry = object(each, path);
    onlyKeys(entry, output ? ["name", "dtype", "shape"] : ["name", "dtype", "shape", "role", "limit"], path);
    array(required(entry, "shape", path), `${path}.shape`).forEach((axis, j) => {
      if (typeof axis !== "string" || axis === "") integer(axis, `${path}.shape[${j}]`, 1);
    });
    let dtypes = DTYPES;
    if (!output) {
      const role = choice(required(entry, "role", path), ROLES, `${path}.role`);
      // A padding mask of floats is added to the scores: other numbers, with another meaning.
      if (role === "padding_mask") dtypes = DTYPES.filter((dtype) => !dtype.startsWith("float"));
      if (entry.limit != null) integer(entry.limit, `${path}.limit`, 1);
    }
    text(required(entry, "name", path), `${path}.name`);
    choice(required(entry, "dtype", path), dtypes, `${path}.dtype`);
  });
  const names = entries.map((entry) => entry.name);
  if (new Set(names).size !== names.length) throw new TfxError(`${where}: names repeat: ${names.join(", ")}`);
}

/** @param {unknown} value */
function checkPooling(value) {
  const where = at("pooling");
  const entry = object(value, where);
  onlyKeys(entry, ["mode", "normalize", "output"], where);
  choice(required(entry, "mode", where), POOLINGS, `${where}.mode`);
  text(required(entry, "output", where), `${where}.output`);
  boolean(required(entry, "normalize", where), `${where}.normalize`);
}

/** @param {unknown} value */
function checkTokenizer(value) {
  const where = at("tokenizer");
  const entry = object(value, where);
  onlyKeys(entry, ["file", "max_length"], where);
  bareName(required(entry, "file", where), `${where}.file`);
  if (entry.max_length != null) integer(entry.max_length, `${where}.max_length`, 1);
}

/** @param {unknown} value */
function checkModel(value) {
  const where = at("model");
  const entry = object(value, where);
  bareName(required(entry, "file", where), `${where}.file`);
  for (const key of ["opset", "ir_version"]) integer(required(entry, key, where), `${where}.${key}`, 1);
  array(required(entry, "domains", where), `${where}.domains`).forEach((domain, i) => {
    text(domain, `${where}.domains[${i}]`, true);
  });
}

/** @param {unknown} value */
function checkTolerance(value) {
  const where = at("tolerance");
  const entry = object(value, where);
  onlyKeys(entry, ["max_abs", "min_cosine", "min_token_cosine"], where);
  if (entry.max_abs != null) number(entry.max_abs, `${where}.max_abs`, 0);
  for (const key of ["min_cosine", "min_token_cosine"]) {
    if (entry[key] != null) number(entry[key], `${where}.${key}`, -1, 1);
  }
}

/** @param {unknown} value */
function checkParity(value) {
  const where = at("parity");
  const entry = object(value, where);
  boolean(required(entry, "passed", where), `${where}.passed`);
  for (const key of ["max_abs", "min_cosine"]) {
    if (required(entry, key, where) !== null) number(entry[key], `${where}.${key}`);
  }
}

/** @param {unknown} value */
function checkQuantization(value) {
  const where = at("quantization");
  const entry = object(value, where);
  /** @type {Record<string, [number, number]>} */
  const numbers = { worst_cosine: [-1, 1], batch_variance: [0, Infinity], padding_variance: [0, Infinity] };
  const objects = ["calibration", "cpu", "notes"];
  onlyKeys(entry, ["scheme", "changed", "kept", ...objects, ...Object.keys(numbers)], where);
  text(required(entry, "scheme", where), `${where}.scheme`);
  integer(required(entry, "changed", where), `${where}.changed`);
  array(required(entry, "kept", where), `${where}.kept`).forEach((each, i) => {
    texts(each, ["where", "reason"], `${where}.kept[${i}]`);
  });
  for (const key of objects) object(Object.hasOwn(entry, key) ? entry[key] : {}, `${where}.${key}`);
  for (const [key, limits] of Object.entries(numbers)) {
    if (entry[key] != null) number(entry[key], `${where}.${key}`, ...limits);
  }
}

/** @param {unknown} value */
function checkTuning(value) {
  const where = at("tuning");
  const entry = object(value, where);
  onlyKeys(entry, ["threads", "spinning", "schedule", "log"], where);
  if (entry.threads != null) integer(entry.threads, `${where}.threads`, 1);
  if (entry.spinning != null) boolean(entry.spinning, `${where}.spinning`);
  if (entry.schedule != null) {
    const keys = ["workers", "threads", "batch_tokens"];
    onlyKeys(object(entry.schedule, `${where}.schedule`), keys, `${where}.schedule`);
    for (const key of keys) {
      integer(required(entry.schedule, key, `${where}.schedule`), `${where}.schedule.${key}`, 1);
    }
  }
  if (entry.log != null) bareName(entry.log, `${where}.log`);
}

/** @param {unknown} value */
function checkFileList(value) {
  const where = at("files");
  for (const [name, entry] of Object.entries(object(value, where))) {
    bareName(name, where);
    if (name === MANIFEST_NAME) throw new TfxError(`${where}: lists ${MANIFEST_NAME} itself`);
    const inner = `${where}["${name}"]`;
    integer(required(object(entry, inner), "bytes", inner), `${inner}.bytes`);
    const digest = text(required(entry, "sha256", inner), `${inner}.sha256`);
    if (!/^[0-9a-f]{64}$/.test(digest)) throw wrong(`${inner}.sha256`, digest, "64 hexadecimal digits");
  }
}

/**
 * Return a file name that cannot leave its folder: no separators, drives, dots alone or control characters.
 *
 * @param {unknown} value
 * @param {string} where
 */
function bareName(value, where) {
  const name = text(value, where);
  // eslint-disable-next-line no-control-regex
  const leaves = name === "." || name === ".." || /[/\\:\x00-\x1f<>"|?*]/.test(name);
  if (leaves || new TextEncoder().encode(name).length > 255) {
    throw wrong(where, name, "a bare file name inside the bundle");
  }
  return name;
}

/**
 * @param {any} owner
 * @param {string} key
 * @param {string} where
 */
export function required(owner, key, where) {
  if (!Object.hasOwn(owner, key)) throw new TfxError(`${where}.${key}: missing`);
  return owner[key];
}

/**
 * Refuse keys that format 1 does not have: a typing mistake must not be read as an absent option.
 *
 * @param {object} owner
 * @param {string[]} known
 * @param {string} where
 */
function onlyKeys(owner, known, where) {
  for (const key of Object.keys(owner)) {
    if (!known.includes(key)) throw wrong(where, key, `only the keys ${known.join(", ")}`);
  }
}

/**
 * @param {unknown} value
 * @param {string} where
 * @returns {Record<string, any>}
 */
export function object(value, where) {
  if (typeof value !== "object" || value === null || Array.isArray(value)) throw wrong(where, value, "an object");
  return value;
}

/**
 * @param {unknown} value
 * @param {string} where
 * @returns {any[]}
 */
export function array(value, where) {
  if (!Array.isArray(value)) throw wrong(where, value, "an array");
  return value;
}

/**
 * @param {unknown} value
 * @param {string} where
 * @param {boolean} [empty] allow an empty one
 * @returns {string}
 */
export function text(value, where, empty = false) {
  if (typeof value !== "string" || (value === "" && !empty)) {
    throw wrong(where, value, empty ? "a string" : "a non-empty string");
  }
  if (/\p{Surrogate}/u.test(value)) throw wrong(where, value, "valid Unicode (no lone surrogate)");
  return value;
}

/**
 * @param {unknown} value
 * @param {string[]} keys
 * @param {string} where
 */
function texts(value, keys, where) {
  const entry = object(value, where);
  onlyKeys(entry, keys, where);
  for (const key of keys) text(required(entry, key, where), `${where}.${key}`, true);
}

/**
 * @param {unknown} value
 * @param {string[]} options
 * @param {string} where
 */
function choice(value, options, where) {
  if (typeof value !== "string" || !options.includes(value)) throw wrong(where, value, `one of ${options.join(", ")}`);
  return value;
}

/**
 * @param {unknown} value
 * @param {string} where
 */
function boolean(value, where) {
  if (typeof value !== "boolean") throw wrong(where, value, "true or false");
}

/**
 * @param {unknown} value
 * @param {string} where
 * @param {number} [minimum]
 * @returns {number}
 */
export function integer(value, where, minimum = 0) {
  if (typeof value !== "number" || !Number.isInteger(value) || value < minimum) {
    throw wrong(where, value, `an integer of at least ${minimum}`);
  }
  if (!Number.isSafeInteger(value)) throw wrong(where, value, `an integer of at most ${Number.MAX_SAFE_INTEGER}`);
  return value;
}

/**
 * @param {unknown} value
 * @param {string} where
 * @param {number} [minimum]
 * @param {number} [maximum]
 */
function number(value, where, minimum = -Infinity, maximum = Infinity) {
  if (typeof value !== "number" || !Number.isFinite(value) || value < minimum || value > maximum) {
    const least = minimum > -Infinity ? ` of at least ${minimum}` : "";
    throw wrong(where, value, `a finite number${least}${maximum < Infinity ? ` and of at most ${maximum}` : ""}`);
  }
}
