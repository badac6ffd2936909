/** The results of a press on Embed: what is shown of them, copied and downloaded. */

import { $, announce } from "./dom.mjs";
import * as view from "./view.mjs";

/**
 * @typedef {object} Results
 * @property {string[]} texts
 * @property {Float32Array[] | null} vectors one per text
 * @property {Record<string, {shape: number[], data: any}>[] | null} outputs raw ones, where
 *   the bundle has no pooling
 * @property {{count: number, cut: number}[]} tokens
 * @property {{tokenize: number, run: number}} ms
 */

/** @type {Results} */
let results;

/** @param {Results} found */
export function showResults(found) {
  results = found;
  const { texts, vectors, outputs, tokens, ms } = found;
  $("results").hidden = false;
  $("empty").hidden = true;
  view.fillList($("timing"), [
    ["Texts", texts.length.toLocaleString("en")],
    ["Tokens", tokens.reduce((sum, { count }) => sum + count, 0).toLocaleString("en")],
    ["Tokenizing", view.duration(ms.tokenize)],
    ["Model", view.duration(ms.run)],
    ["Per text", view.duration((ms.tokenize + ms.run) / texts.length)],
  ]);
  $("matrix-card").hidden = vectors === null;
  $("save-csv").hidden = vectors === null;
  if (vectors !== null) {
    const { table, left } = view.matrix(texts, vectors);
    $("matrix").replaceChildren(table);
    $("matrix-hint").textContent = left > 0 ? `Cosine of the first ${texts.length - left} texts.` : "Cosine of every two texts.";
  }
  const { rows, left } = view.vectorRows(texts, vectors ?? outputs, tokens, copyOne);
  $("vectors").replaceChildren(...rows);
  const width = vectors?.[0].length;
  const what = vectors === null ? "Raw outputs: the bundle has no pooling." : `${width} numbers each.`;
  $("vectors-hint").textContent = left > 0 ? `${what} The first ${texts.length - left} are shown; downloads have all.` : what;
}

function valuesOf(index) {
  const { vectors, outputs } = results;
  if (vectors !== null) return Array.from(vectors[index]);
  return Object.fromEntries(Object.entries(outputs[index]).map(([name, tensor]) => [name, view.nested(tensor)]));
}

export function toJson() {
  const { texts, vectors } = results;
  const key = vectors === null ? "outputs" : "vector";
  const rows = texts.map((text, i) => `  ${JSON.stringify({ text, [key]: valuesOf(i) })}`);
  return `[\n${rows.join(",\n")}\n]\n`;
}

export function toCsv() {
  return view.toCsv(results.texts, results.vectors ?? []);
}

function copyOne(index, button) {
  return copy(JSON.stringify(valuesOf(index)), button);
}

export async function copy(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
    announce("Copied");
  } catch {
    button.textContent = "Not allowed";
    announce("The browser did not allow copying");
  }
  setTimeout(() => (button.textContent = label), 1500);
}

export function save(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = view.el("a", { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
  announce(`${name} saved`);
}
