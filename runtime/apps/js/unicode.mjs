/**
 * The guard of the tokenizer: is every character treated here as Rust's `tokenizers` treats it?
 *
 * A JavaScript engine has the Unicode tables of its own age. Each part of a tokenizer is asked about each character
 * that comes to it, once, and the answer is compared with the tables that were asked of `tokenizers`. Where they
 * differ the text is refused by name: a token that is almost right gives a vector that is silently wrong.
 */

import { TfxError } from "./errors.mjs";
import { has, lower } from "./unicode_data.mjs";

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
 * @param {(point: number, character: string) => boolean} agrees asked once per character
 * @returns {(text: string) => void} throws UnequalCharacter
 */
export function guard(agrees) {
  const known = new Set();
  const ask = (character) => {
    const point = character.codePointAt(0);
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

const NFD_LOWEST = "\u0334"; // combining classes 1 and 240: the lowest and the highest there are
const NFD_HIGHEST = "\u0345";

/** Does this engine reorder the character beside other marks? */
function isMark(character) {
  const swapped = (one, other) => one !== other && `a${one}${other}`.normalize("NFD") === `a${other}${one}`;
  return character === NFD_HIGHEST || swapped(character, NFD_LOWEST) || swapped(NFD_HIGHEST, character);
}

/** Is the canonical decomposition and ordering of a character that of the tables? What both know never changes. */
export function nfdAgrees(point, character) {
  const changes = character.normalize("NFD") !== character;
  return changes === has("nfd", point) && (changes || isMark(character) === has("mark", point));
}

export const nfkdAgrees = (point, character) =>
  nfdAgrees(point, character) && (character.normalize("NFKD") !== character) === has("nfkd", point);

export const lowerAgrees = (point, character) => withoutFinalSigma(character).toLowerCase() === lower(point);

/** Letters, numbers and spaces of the patterns of byte-level tokenizers. */
export const patternAgrees = (point, character) =>
  /\p{L}/u.test(character) === has("letter", point) &&
  /\p{N}/u.test(character) === has("number", point) &&
  /\s/.test(character) === has("space", point);

export const trimAgrees = (point, character) => /\s/.test(character) === has("white", point);

export const combiningAgrees = (point, character) => /\p{M}/u.test(character) === has("combining", point);

/** Rust lowercases each character by itself; toLowerCase makes another sigma at the end of a word. */
export const withoutFinalSigma = (text) => text.replaceAll("\u03a3", "\u03c3");

/** Put the spaces around the CJK characters that lie beyond U+FFFF; the library sees halves of them. */
export function spacedBeyond(text) {
  return text.replace(/[\u{20000}-\u{2ffff}]/gu, (character) =>
    has("cjk", character.codePointAt(0)) ? ` ${character} ` : character,
  );
}

/**
 * Return what Rust's BertNormalizer makes of one character.
 *
 * @param {{clean_text: boolean, handle_chinese_chars: boolean, strip_accents: boolean | null, lowercase: boolean}} config
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
    text = Array.from(text).filter((each) => !has("nonspacing", each.codePointAt(0))).join("");
  }
  if (config.lowercase) text = Array.from(text, (each) => lower(each.codePointAt(0))).join("");
  return config.handle_chinese_chars && has("cjk", point) ? ` ${text} ` : text;
}

/** Return the pieces that Rust's BertPreTokenizer makes of a character between two letters. */
export function bertPieces(point, character) {
  if (has("white", point)) return ["a", "a"];
  return has("punctuation", point) ? ["a", character, "a"] : [`a${character}a`];
}
