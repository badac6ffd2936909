/**
 * The guard of the tokenizer: is every character treated here as Rust's `tokenizers` treats it?
 *
 * A JavaScript engine has the Unicode tables of its own age. Each part of a tokenizer is asked about each character
 * that comes to it, once, and the answer is compared with the tables that were asked of `tokenizers`. Where they
 * differ the text is refused by name: a token that is almost right gives a vector that is silently wrong.
 */

import { TfxError } from "./errors.mjs";
import { has, lower } from "./unicode_data.mjs";

/**
 * @callback Agrees does a part treat a character as Rust's does?
 * @param {number} point
 * @param {string} character
 * @returns {boolean}
 */

/** A character that this engine does not treat as the model's tokenizer does. */
export class UnequalCharacter extends TfxError {
  /** @param {number} point */
  constructor(point) {
    const code = point.toString(16).toUpperCase().padStart(4, "0");
    super(`U+${code} is not treated here as the model's tokenizer treats it (another Unicode version); leave it out`);
    this.point = point;
  }
}

/**
 * Return a function that refuses strings with a character that `agrees` denies.
 *
 * @param {Agrees} agrees asked once per character
 * @returns {(text: string) => void} throws UnequalCharacter
 */
export function guard(agrees) {
  const known = new Set();
  /** @param {string} character */
  const ask = (character) => {
    const point = pointOf(character);
    if (!agrees(point, character)) throw new UnequalCharacter(point);
    known.add(character);
  };
  for (let point = 0; point < 128; point++) ask(String.fromCharCode(point));
  return (text) => {
    // Text in ASCII, which has been asked about, is most of what comes.
    if (/^[\x00-\x7f]*$/.test(text)) return; // eslint-disable-line no-control-regex
    for (const character of text) if (!known.has(character)) ask(character);
  };
}

/** @param {string} character */
const pointOf = (character) => /** @type {number} */ (character.codePointAt(0));

const NFD_LOWEST = "\u0334"; // combining classes 1 and 240: the lowest and the highest there are
const NFD_HIGHEST = "\u0345";

/**
 * Does this engine reorder the character beside other marks?
 *
 * @param {string} character
 */
function isMark(character) {
  /** @type {(one: string, other: string) => boolean} */
  const swapped = (one, other) => one !== other && `a${one}${other}`.normalize("NFD") === `a${other}${one}`;
  return character === NFD_HIGHEST || swapped(character, NFD_LOWEST) || swapped(NFD_HIGHEST, character);
}

/**
 * Is the canonical decomposition and ordering of a character that of the tables? What both know never changes.
 *
 * @type {Agrees}
 */
export const nfdAgrees = (point, character) => {
  const changes = character.normalize("NFD") !== character;
  return changes === has("nfd", point) && (changes || isMark(character) === has("mark", point));
};

/** @type {Agrees} */
export const nfkdAgrees = (point, character) =>
  nfdAgrees(point, character) && (character.normalize("NFKD") !== character) === has("nfkd", point);

/** @type {Agrees} */
export const lowerAgrees = (point, character) => withoutFinalSigma(character).toLowerCase() === lower(point);

/**
 * Letters, numbers and spaces of the patterns of byte-level tokenizers.
 *
 * @type {Agrees}
 */
export const patternAgrees = (point, character) =>
  /\p{L}/u.test(character) === has("letter", point) &&
  /\p{N}/u.test(character) === has("number", point) &&
  /\s/.test(character) === has("space", point);

/** @type {Agrees} */
export const trimAgrees = (point, character) => /\s/.test(character) === has("white", point);

/** @type {Agrees} */
export const combiningAgrees = (point, character) => /\p{M}/u.test(character) === has("combining", point);

/**
 * Rust lowercases each character by itself; toLowerCase makes another sigma at the end of a word.
 *
 * @param {string} text
 */
export const withoutFinalSigma = (text) => text.replaceAll("\u03a3", "\u03c3");

/**
 * Put the spaces around the CJK characters that lie beyond U+FFFF; the library sees halves of them.
 *
 * @param {string} text
 */
export function spacedBeyond(text) {
  return text.replace(/[\u{20000}-\u{2ffff}]/gu, (character) =>
    has("cjk", pointOf(character)) ? ` ${character} ` : character,
  );
}

/**
 * Return what Rust's BertNormalizer makes of one character.
 *
 * @param {any} config clean_text, handle_chinese_chars, strip_accents and lowercase
 * @param {number} point
 * @param {string} character
 * @returns {string}
 */
export function bertNormalized(config, point, character) {
  if (config.clean_text && has("control", point)) return "";
  if (config.clean_text && has("white", point)) return " ";
  let text = character;
  if (config.strip_accents ?? config.lowercase) {
    if (has("nfd", point)) text = text.normalize("NFD");
    text = Array.from(text).filter((each) => !has("nonspacing", pointOf(each))).join("");
  }
  if (config.lowercase) text = Array.from(text, (each) => lower(pointOf(each))).join("");
  return config.handle_chinese_chars && has("cjk", point) ? ` ${text} ` : text;
}

/**
 * Return the pieces that Rust's BertPreTokenizer makes of a character between two letters.
 *
 * @param {number} point
 * @param {string} character
 */
export function bertPieces(point, character) {
  if (has("white", point)) return ["a", "a"];
  return has("punctuation", point) ? ["a", character, "a"] : [`a${character}a`];
}
