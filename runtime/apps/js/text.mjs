/** Texts to token ids as Rust's `tokenizers` makes them, through the library @huggingface/tokenizers and a guard. */

import { TfxError, reason, wrong } from "./errors.mjs";
import {
  UnequalCharacter, bertNormalized, bertPieces, combiningAgrees, guard, lowerAgrees, nfdAgrees, nfkdAgrees,
  patternAgrees, spacedBeyond, trimAgrees, withoutFinalSigma,
} from "./unicode.mjs";

/**
 * Patterns of Split that the library reads as Rust does: no shorthand or property beyond \p{L}, \p{N} and \s. The
 * last two ignore case in (?i:...), where Rust also takes U+017F for an s; such texts are refused.
 */
const SPLIT_PATTERNS = [
  "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
  ...["\\p{N}{1,3}", "\\p{N}"].map(
    (number) =>
      `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|${number}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*` +
      "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
  ),
];
const LONG_S = 0x17f; // its simple case folding is s
const BYTES = 256;

/**
 * @typedef {{ids: number[], types: number[]}} Encoding the tokens of a text
 * @typedef {any} Config a part of tokenizer.json
 */

export class TextTokenizer {
  /** @type {((text: string) => void) | null} */
  #trimGuard = null;

  /**
   * @param {Uint8Array} bytes of tokenizer.json
   * @param {new (tokenizer: object, config: object) => any} Tokenizer the class of @huggingface/tokenizers
   * @param {number | null} maxLength longer texts are cut to so many tokens, special ones included; null cuts nothing
   * @param {string} [name] of the file, for errors
   * @throws {TfxError} no tokenizer, or one with a part that is not known to be exact here; it is named
   */
  constructor(bytes, Tokenizer, maxLength, name = "tokenizer.json") {
    /** @type {Config} */
    let file;
    try {
      file = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes));
    } catch (error) {
      throw new TfxError(`${name}: not JSON: ${reason(error)}`);
    }
    this.name = name;
    checkModel(file?.model, file?.pre_tokenizer, name);
    this.process = postProcessor(file.post_processor ?? null, name);
    this.added = this.process({ ids: [], types: [] }).ids.length;
    this.maxLength = maxLength;
    if (maxLength !== null && maxLength < this.added) {
      throw new TfxError(`${name}: adds ${this.added} special tokens, and the model takes ${maxLength} tokens`);
    }
    this.fromLeft = file.truncation?.direction === "Left";
    // What is beside the text is done here, and needs no part of the library.
    const absent = { added_tokens: [], normalizer: null, pre_tokenizer: null };
    const parts = { ...absent, ...file, post_processor: null, decoder: null };
    try {
      this.library = new Tokenizer(parts, {});
    } catch (error) {
      throw new TfxError(`${name}: not a tokenizer: ${reason(error)}`);
    }
    this.#guardParts(file);
    this.#guardAdded(file);
  }

  /**
   * @param {string} text
   * @param {string} where what it is called in errors
   * @returns {{ids: number[], types: number[], cut: number}} special tokens added
   * @throws {TfxError}
   */
  encode(text, where) {
    if (typeof text !== "string") throw wrong(where, text, "a string");
    if (/\p{Surrogate}/u.test(text)) throw new TfxError(`${where}: no valid Unicode (a lone surrogate)`);
    let ids;
    try {
      this.#trimGuard?.(text);
      ids = this.library.encode(text).ids;
    } catch (error) {
      if (error instanceof UnequalCharacter) throw new TfxError(`${where}: ${error.message}`);
      throw error;
    }
    if (ids.includes(undefined)) throw new TfxError(`${where}: ${this.name} has no token for a part of it`);
    const room = this.maxLength === null ? Infinity : this.maxLength - this.added;
    const cut = Math.max(0, ids.length - room);
    if (cut > 0) ids = this.fromLeft ? ids.slice(cut) : ids.slice(0, room);
    const whole = this.process({ ids, types: new Array(ids.length).fill(0) });
    if (whole.ids.length === 0) throw new TfxError(`${where}: has no tokens`);
    return { ...whole, cut };
  }

  /**
   * Put guards before the library's parts.
   *
   * @param {Config} file
   */
  #guardParts(file) {
    const { library, name } = this;
    const normalize = library.normalizer === null ? null : guardedNormalizer(file.normalizer, library.normalizer, name);
    const checkPieces = guardedPreTokenizer(file.pre_tokenizer ?? null, library.pre_tokenizer, name);
    const split = library.pre_tokenizer;
    let asked = 0;
    if (normalize !== null) {
      library.normalizer = (/** @type {string} */ text) => {
        asked++;
        return normalize(text);
      };
    }
    library.pre_tokenizer = (/** @type {string} */ text, /** @type {object} */ options) => {
      asked++;
      checkPieces(text);
      return split(text, options);
    };
    library.encode("a");
    if (asked !== (normalize === null ? 1 : 2)) {
      throw new TfxError(`${name}: this version of @huggingface/tokenizers does not call its parts as 0.2 does`);
    }
  }

  /**
   * Refuse added tokens that the library finds in other places than Rust does; take back what it lays over words.
   *
   * @param {Config} file
   */
  #guardAdded(file) {
    const { library, name } = this;
    /** @type {{content: string, single_word?: boolean, normalized?: boolean, lstrip?: boolean, rstrip?: boolean}[]} */
    const tokens = file.added_tokens ?? [];
    const vocab = file.model.vocab;
    for (const token of tokens) {
      const shown = JSON.stringify(token.content);
      if (token.single_word) throw new TfxError(`${name}: the added token ${shown} is single_word`);
      if (token.normalized && library.normalizer !== null) {
        // The library normalized it when it was made, without the guard.
        const wanted = library.normalizer(token.content);
        if (library.added_tokens_map.get(wanted)?.content !== token.content) {
          throw new TfxError(`${name}: the added token ${shown} is normalized in another way here`);
        }
      }
      // A word that happens to have an added token's name is a word.
      if (Object.hasOwn(vocab, token.content)) library.model.tokens_to_ids.set(token.content, vocab[token.content]);
      else library.model.tokens_to_ids.delete(token.content);
    }
    // Rust looks for the tokens that are not normalized first; without a normalizer the library looks for all at once.
    if (library.normalizer === null) {
      const first = tokens.filter((token) => !token.normalized).map((token) => token.content);
      for (const { content } of tokens.filter((token) => token.normalized)) {
        const other = first.find((each) => overlap(content, each));
        if (other === undefined) continue;
        throw new TfxError(`${name}: the added tokens ${JSON.stringify(content)} and ${JSON.stringify(other)} overlap`);
      }
    }
    if (tokens.some((token) => token.lstrip || token.rstrip)) this.#trimGuard = guard(trimAgrees);
  }
}

/**
 * Can two different strings share characters of a text?
 *
 * @param {string} one
 * @param {string} other
 */
function overlap(one, other) {
  if (one.includes(other) || other.includes(one)) return true;
  for (let size = 1; size < Math.min(one.length, other.length); size++) {
    if (one.endsWith(other.slice(0, size)) || other.endsWith(one.slice(0, size))) return true;
  }
  return false;
}

/**
 * @param {string} name
 * @param {string} what
 * @param {unknown} found
 */
function unsupported(name, what, found) {
  const remedy = "use it from Python, or give token ids to run()";
  return new TfxError(`${name}: ${what} ${JSON.stringify(found)} is not known to be exact here; ${remedy}`);
}

/**
 * @param {Config} model
 * @param {Config} preTokenizer
 * @param {string} name
 */
function checkModel(model, preTokenizer, name) {
  if (model === null || typeof model !== "object") throw new TfxError(`${name}: has no model`);
  // Files of before the key "type" are told apart as Rust does, by what they have.
  const type = model.type ?? (model.merges ? "BPE" : "WordPiece");
  const vocab = model.vocab;
  if (!["WordPiece", "BPE"].includes(type) || vocab === null || typeof vocab !== "object" || Array.isArray(vocab)) {
    throw unsupported(name, "the model", type);
  }
  if (type === "WordPiece") {
    if (!Object.hasOwn(vocab, model.unk_token)) throw new TfxError(`${name}: its unk_token is not in the vocabulary`);
    return;
  }
  const last = preTokenizer?.pretokenizers?.at(-1) ?? preTokenizer;
  if (last?.type !== "ByteLevel") throw unsupported(name, "BPE behind the pre-tokenizer", last?.type ?? null);
  for (const key of ["dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"]) {
    if (model[key]) throw unsupported(name, `the model's ${key}`, model[key]);
  }
  const symbols = new Set(Object.keys(vocab).filter((word) => Array.from(word).length === 1));
  const missing = byteSymbols().find((symbol) => !symbols.has(symbol));
  if (missing !== undefined) throw unsupported(name, "a byte-level vocabulary without", missing);
}

/** Return the characters that stand for the bytes 0 to 255 in byte-level vocabularies. */
function byteSymbols() {
  /** @param {number} byte */
  const visible = (byte) => (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
  let next = BYTES;
  return Array.from({ length: BYTES }, (_, byte) => String.fromCharCode(visible(byte) ? byte : next++));
}

/**
 * Return a function that normalizes as Rust does or refuses.
 *
 * @param {Config} config
 * @param {any} part the library's
 * @param {string} name
 * @returns {(text: string) => string}
 */
function guardedNormalizer(config, part, name) {
  /** @type {(text: string) => string} */
  const library = (text) => part.normalize(text);
  switch (config.type) {
    case "Sequence": {
      /** @type {((text: string) => string)[]} */
      const steps = config.normalizers.map((/** @type {Config} */ each, /** @type {number} */ i) =>
        guardedNormalizer(each, part.normalizers[i], name),
      );
      return (text) => steps.reduce((made, step) => step(made), text);
    }
    case "BertNormalizer": {
      /** @param {string} text */
      const prepare = (text) => {
        const spaced = config.handle_chinese_chars ? spacedBeyond(text) : text;
        return config.lowercase ? withoutFinalSigma(spaced) : spaced;
      };
      const strips = config.strip_accents ?? config.lowercase;
      const check = guard(
        (point, character) =>
          library(prepare(character)) === bertNormalized(config, point, character) &&
          (!strips || nfdAgrees(point, character)),
      );
      return (text) => (check(text), library(prepare(text)));
    }
    case "NFC":
    case "NFD":
      return checkedBothWays(nfdAgrees, library);
    case "NFKC":
    case "NFKD":
      return checkedBothWays(nfkdAgrees, library);
    case "Lowercase": {
      const check = guard(lowerAgrees);
      return (text) => (check(text), library(withoutFinalSigma(text)));
    }
    case "StripAccents": {
      const check = guard(combiningAgrees);
      return (text) => (check(text), library(text));
    }
    default:
      throw unsupported(name, "the normalizer", config.type);
  }
}

/**
 * Also look at what was composed: a newer engine composes pairs that the tables do not know.
 *
 * @param {import("./unicode.mjs").Agrees} agrees
 * @param {(text: string) => string} library
 * @returns {(text: string) => string}
 */
function checkedBothWays(agrees, library) {
  const check = guard(agrees);
  return (text) => {
    check(text);
    const made = library(text);
    check(made);
    return made;
  };
}

/**
 * Return a function that refuses texts which the library's pre-tokenizer would split in another way than Rust's.
 *
 * @param {Config} config
 * @param {any} part the library's
 * @param {string} name
 * @returns {(text: string) => void}
 */
function guardedPreTokenizer(config, part, name) {
  switch (config?.type) {
    case "Sequence": {
      const types = config.pretokenizers.map((/** @type {Config} */ each) => each.type);
      // Behind ByteLevel stand bytes and no characters any more.
      if (types.slice(0, -1).includes("ByteLevel")) throw unsupported(name, "the sequence of pre-tokenizers", types);
      /** @type {((text: string) => void)[]} */
      const checks = config.pretokenizers.map((/** @type {Config} */ each, /** @type {number} */ i) =>
        guardedPreTokenizer(each, part.tokenizers[i], name),
      );
      return (text) => checks.forEach((check) => check(text));
    }
    case "BertPreTokenizer":
      return guard((point, character) => {
        const pieces = part.pre_tokenize_text(`a${character}a`);
        return JSON.stringify(pieces) === JSON.stringify(bertPieces(point, character));
      });
    case "ByteLevel":
      return config.use_regex === false ? () => {} : guard(patternAgrees);
    case "Split": {
      const pattern = config.pattern?.Regex;
      const isolated = config.behavior?.toLowerCase() === "isolated" && !config.invert;
      if (!SPLIT_PATTERNS.includes(pattern) || !isolated) throw unsupported(name, "the split", config.pattern);
      const folds = pattern.startsWith("(?i:");
      return guard((point, character) => patternAgrees(point, character) && !(folds && point === LONG_S));
    }
    default:
      throw unsupported(name, "the pre-tokenizer", config?.type ?? null);
  }
}

/**
 * Return the function that adds special tokens to the tokens of one text.
 *
 * @param {Config} config
 * @param {string} name
 * @returns {(encoding: Encoding) => Encoding}
 */
function postProcessor(config, name) {
  switch (config?.type) {
    case undefined:
    case "ByteLevel": // trims offsets, which nothing here uses
      return (encoding) => encoding;
    case "Sequence": {
      /** @type {((encoding: Encoding) => Encoding)[]} */
      const steps = config.processors.map((/** @type {Config} */ each) => postProcessor(each, name));
      return (encoding) => steps.reduce((made, step) => step(made), encoding);
    }
    case "BertProcessing":
    case "RobertaProcessing": {
      const [first, last] = [config.cls[1], config.sep[1]];
      return ({ ids }) => ({ ids: [first, ...ids, last], types: new Array(ids.length + 2).fill(0) });
    }
    case "TemplateProcessing":
      return templateProcessor(config, name);
    default:
      throw unsupported(name, "the post-processor", config.type);
  }
}

/**
 * @param {Config} config
 * @param {string} name
 * @returns {(encoding: Encoding) => Encoding}
 */
function templateProcessor(config, name) {
  /** @type {{ids: number[] | null, type: number}[]} */
  const pieces = config.single.map((/** @type {Config} */ piece) => {
    if (piece.Sequence?.id === "A") return { ids: null, type: piece.Sequence.type_id };
    const ids = config.special_tokens[piece.SpecialToken?.id]?.ids;
    if (!Array.isArray(ids)) throw unsupported(name, "the template's piece", piece);
    return { ids, type: piece.SpecialToken.type_id };
  });
  return (encoding) => {
    const ids = pieces.flatMap((piece) => piece.ids ?? encoding.ids);
    const types = pieces.flatMap((piece) => new Array((piece.ids ?? encoding.ids).length).fill(piece.type));
    return { ids, types };
  };
}
