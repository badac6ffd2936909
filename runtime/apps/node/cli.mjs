#!/usr/bin/env node
/** Texts to vectors on the command line; `node cli.mjs --help` says how. */

import { once } from "node:events";
import { readFileSync } from "node:fs";
import { parseArgs } from "node:util";

import { DEFAULT_BUNDLE, EXIT, TfxError, open, selfCheck } from "./index.mjs";

const HELP = `Texts to vectors with a tfx bundle.

  node cli.mjs TEXT...        one JSON array per text
  node cli.mjs -              texts from standard input, one per line, each answered at once
  node cli.mjs --self-check   files, runtime, token ids, outputs and vectors against what was recorded

  --bundle DIR    the bundle (${DEFAULT_BUNDLE})
  --threads N     threads inside an operator
  --tokens        token ids and types of each text: {"ids": [...], "types": [...]}
  --raw           every output of each text, cut to its own length: {"name": nested arrays, ...}
  --jsonl         each line of standard input is a JSON string, so that texts may have line ends
  --json          the report of --self-check as one JSON object
  --version       of this app and of its packages
  --help          this text

A text that begins with a dash comes after --. Exit codes: 0 done, 1 a check failed, 2 wrong input or a damaged bundle,
3 this machine cannot (a package is missing, no memory).`;

/** @type {import("node:util").ParseArgsConfig["options"]} */
const OPTIONS = {
  bundle: { type: "string", default: DEFAULT_BUNDLE },
  threads: { type: "string" },
  tokens: { type: "boolean", default: false },
  raw: { type: "boolean", default: false },
  jsonl: { type: "boolean", default: false },
  "self-check": { type: "boolean", default: false },
  json: { type: "boolean", default: false },
  version: { type: "boolean", default: false },
  help: { type: "boolean", default: false },
};

/**
 * @typedef {import("./index.mjs").Encoder} Encoder
 * @typedef {{bundle: string, threads?: string, tokens: boolean, raw: boolean, jsonl: boolean, "self-check": boolean,
 *   json: boolean, version: boolean, help: boolean}} Values
 */

/**
 * @param {string[]} args
 * @returns {Promise<number>} the exit code
 */
async function main(args) {
  const { values, positionals } = parse(args);
  if (values.help) return say(HELP);
  if (values.version) return say(version());
  const threads = values.threads === undefined ? undefined : whole(values.threads);
  if (values["self-check"]) return runCheck(values, positionals, threads);
  if (values.json) throw new TfxError("--json goes with --self-check");
  if (values.tokens && values.raw) throw new TfxError("--tokens and --raw: choose one");
  if (positionals.length === 0) throw new TfxError("found no text, wanted texts or - for standard input; see --help");
  const stream = positionals.length === 1 && positionals[0] === "-";
  if (values.jsonl && !stream) throw new TfxError("--jsonl goes with - (texts from standard input)");
  const encoder = await open(values.bundle, { threads });
  const what = values.tokens ? "tokens" : values.raw ? "raw" : "vectors";
  try {
    if (!stream) {
      for (const line of await answers(encoder, what, positionals, (i) => `text ${i + 1}`)) await say(line);
    } else {
      let number = 0;
      for await (const bytes of linesOf(process.stdin)) {
        number++;
        const where = `line ${number}`;
        const text = decode(bytes, values.jsonl, where);
        for (const line of await answers(encoder, what, [text], () => where)) await say(line);
      }
    }
  } finally {
    await encoder.dispose();
  }
  return EXIT.done;
}

/**
 * @param {string[]} args
 * @returns {{values: Values, positionals: string[]}}
 */
function parse(args) {
  try {
    const { values, positionals } = parseArgs({ args, options: OPTIONS, allowPositionals: true });
    return { values: /** @type {Values} */ (/** @type {unknown} */ (values)), positionals };
  } catch (error) {
    throw new TfxError(`${/** @type {Error} */ (error).message.split(". ")[0]}; see --help`);
  }
}

/** @param {string} text */
function whole(text) {
  const number = Number(text);
  if (!/^\d+$/.test(text) || !Number.isSafeInteger(number) || number < 1) {
    throw new TfxError(`--threads: found ${JSON.stringify(text)}, wanted a number of at least 1`);
  }
  return number;
}

/**
 * @param {Values} values
 * @param {string[]} positionals
 * @param {number | undefined} threads
 */
async function runCheck({ bundle, json }, positionals, threads) {
  if (positionals.length > 0) throw new TfxError("--self-check takes no texts");
  const { report, exitCode, lines } = await selfCheck(bundle, { threads });
  await say(json ? JSON.stringify(report) : lines.join("\n"));
  return exitCode;
}

function version() {
  /** @param {string} name */
  const of = (name) => {
    try {
      return JSON.parse(readFileSync(new URL(name, import.meta.url), "utf8")).version;
    } catch {
      return "not installed";
    }
  };
  const modules = ["onnxruntime-node", "@huggingface/tokenizers"];
  const packages = modules.map((name) => `${name} ${of(`./node_modules/${name}/package.json`)}`);
  return [`app ${of("./package.json")}`, ...packages, `node ${process.versions.node}`].join(", ");
}

/**
 * Return one line for each text.
 *
 * @param {Encoder} encoder
 * @param {string} what
 * @param {string[]} texts
 * @param {(i: number) => string} name of a text
 */
async function answers(encoder, what, texts, name) {
  /** @type {(i: number, cut: number) => void} */
  const onCut = (i, cut) => {
    process.stderr.write(`note: ${name(i)}: longer than the model takes, ${cut} tokens were cut off\n`);
  };
  try {
    if (what === "tokens") {
      return encoder.tokenize(texts).map(({ ids, types, cut }, i) => {
        if (cut > 0) onCut(i, cut);
        return JSON.stringify({ ids, types });
      });
    }
    if (what === "raw") return (await encoder.runTexts(texts, { onCut })).map(rawLine);
    if (encoder.manifest.pooling === null) {
      throw new TfxError("this bundle has no pooling, so a text has no one vector; use --raw");
    }
    return (await encoder.embed(texts, { onCut })).map((vector) => nested(vector, [vector.length]));
  } catch (error) {
    if (!(error instanceof TfxError)) throw error;
    throw new TfxError(error.message.replace(/^texts\[(\d+)\]/, (_, i) => name(Number(i))), error.exitCode);
  }
}

/** @param {Record<string, import("./index.mjs").Tensor>} outputs */
function rawLine(outputs) {
  const entries = Object.entries(outputs);
  return `{${entries.map(([name, { data, shape }]) => `${JSON.stringify(name)}:${nested(data, shape)}`).join(",")}}`;
}

/**
 * Return nested JSON arrays.
 *
 * @param {import("./index.mjs").TypedArray} data
 * @param {number[]} shape
 * @param {number} [start]
 * @param {number} [size]
 * @returns {string}
 */
function nested(data, shape, start = 0, size = data.length) {
  if (shape.length === 0) return element(data, start);
  const [count, ...rest] = shape;
  const step = count === 0 ? 0 : size / count;
  return `[${Array.from({ length: count }, (_, i) => nested(data, rest, start + i * step, step)).join(",")}]`;
}

/**
 * @param {import("./index.mjs").TypedArray} data
 * @param {number} i
 */
function element(data, i) {
  const value = data[i];
  if (typeof value === "bigint") return `${value}`;
  // 9 digits tell every float32 apart.
  return JSON.stringify(data instanceof Float32Array ? Number(value.toPrecision(9)) : value);
}

/**
 * Yield the lines of a stream as bytes, reading on only when the one before was taken.
 *
 * @param {AsyncIterable<Buffer>} stream
 */
async function* linesOf(stream) {
  /** @type {Buffer[]} */
  let rest = [];
  for await (const chunk of stream) {
    let start = 0;
    for (let end = chunk.indexOf(10); end >= 0; end = chunk.indexOf(10, start)) {
      yield Buffer.concat([...rest, chunk.subarray(start, end)]);
      rest = [];
      start = end + 1;
    }
    if (start < chunk.length) rest.push(chunk.subarray(start));
  }
  if (rest.length > 0) yield Buffer.concat(rest);
}

/**
 * @param {Buffer} bytes
 * @param {boolean} jsonl
 * @param {string} where
 */
function decode(bytes, jsonl, where) {
  const ending = bytes.at(-1) === 13 ? bytes.subarray(0, -1) : bytes; // lines of Windows end in CR LF
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(ending);
  } catch {
    throw new TfxError(`${where}: no valid UTF-8`);
  }
  if (!jsonl) return text;
  try {
    text = JSON.parse(text);
  } catch {
    throw new TfxError(`${where}: not JSON`);
  }
  if (typeof text !== "string") {
    throw new TfxError(`${where}: found ${JSON.stringify(text).slice(0, 40)}, wanted a JSON string`);
  }
  return text;
}

/**
 * Print a line; wait where the reader is slower than we are.
 *
 * @param {string} line
 */
async function say(line) {
  if (!process.stdout.write(`${line}\n`)) await once(process.stdout, "drain");
  return EXIT.done;
}

process.stdout.on("error", (error) => {
  if (error.code === "EPIPE") process.exit(EXIT.done); // the reader has seen enough
  throw error;
});

try {
  process.exitCode = await main(process.argv.slice(2));
} catch (error) {
  const memory = error instanceof RangeError && /allocation|invalid (array|string) length/i.test(error.message);
  const message = memory ? `out of memory: ${error.message}` : error instanceof Error ? error.message : String(error);
  process.stderr.write(`error: ${message.replace(/[\s\p{Cc}]+/gu, " ")}\n`);
  process.exitCode = error instanceof TfxError ? error.exitCode : memory ? EXIT.machine : EXIT.input;
}
