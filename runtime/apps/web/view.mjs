/** What the page shows: timing, matrix, vectors, report. No state; numbers in, elements out. */

const SHOWN_TEXTS = 200; // rows of the list of vectors
const MATRIX_TEXTS = 40; // rows and columns of the matrix
const PREVIEW = 4; // numbers of a vector that are shown

/**
 * Make an element.
 *
 * @param {string} tag
 * @param {Record<string, string> | null} attributes
 * @param {...(Node | string)} children
 * @returns {HTMLElement}
 */
export function el(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** @param {number} ms */
export function duration(ms) {
  if (ms < 1) return "< 1 ms";
  if (ms < 100) return `${ms.toPrecision(2)} ms`;
  return ms < 10_000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}

/** @param {number} bytes */
export function size(bytes) {
  if (bytes < 1e6) return `${Math.max(1, Math.round(bytes / 1e3))} kB`;
  return bytes < 1e9 ? `${(bytes / 1e6).toFixed(bytes < 1e7 ? 1 : 0)} MB` : `${(bytes / 1e9).toFixed(1)} GB`;
}

/** @param {number} count @param {string} one @param {string} [many] */
export function plural(count, one, many = `${one}s`) {
  return `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
}

/**
 * Fill a definition list.
 *
 * @param {HTMLElement} list
 * @param {[string, string][]} pairs
 */
export function fillList(list, pairs) {
  list.replaceChildren(...pairs.map(([term, value]) => el("div", null, el("dt", null, term), el("dd", null, value))));
}

/**
 * @param {Float32Array} a
 * @param {Float32Array} b
 * @returns {number} their cosine; NaN where one of them is zero
 */
export function cosine(a, b) {
  let dot = 0;
  let aa = 0;
  let bb = 0;
  for (let i = 0; i < a.length; i++) {
    dot += a[i] * b[i];
    aa += a[i] * a[i];
    bb += b[i] * b[i];
  }
  return Math.max(-1, Math.min(1, dot / Math.sqrt(aa * bb)));
}

/**
 * Return the table of cosines.
 *
 * @param {string[]} texts
 * @param {Float32Array[]} vectors
 * @returns {{table: HTMLElement, left: number}} left: how many texts are not in it
 */
export function matrix(texts, vectors) {
  const count = Math.min(texts.length, MATRIX_TEXTS);
  const rows = [];
  for (let i = 0; i < count; i++) {
    rows.push(vectors.slice(0, count).map((other, j) => (i === j ? 1 : cosine(vectors[i], other))));
  }
  const head = el(
    "tr",
    null,
    el("td", { class: "corner" }),
    ...rows.map((_, j) => el("th", { scope: "col", title: texts[j] }, `${j + 1}`)),
  );
  const body = rows.map((row, i) => {
    const others = row.map((value, j) => (i === j || Number.isNaN(value) ? -Infinity : value));
    const best = Math.max(...others);
    const name = el("th", { scope: "row", title: texts[i] }, el("span", { class: "number" }, `${i + 1}`), el("span", { class: "text" }, texts[i]));
    const cells = row.map((value, j) => {
      const nearest = count > 2 && i !== j && others[j] === best;
      const cell = el("td", { class: i === j ? "self" : nearest ? "nearest" : "" });
      cell.append(shownCosine(value));
      if (nearest) cell.append(el("b", { class: "star", "aria-hidden": "true" }, "★"), el("span", { class: "hidden" }, " nearest"));
      cell.style.setProperty("--strength", `${Math.round(Math.abs(value || 0) * 100)}%`);
      if (value < 0) cell.classList.add("opposite");
      return cell;
    });
    return el("tr", null, name, ...cells);
  });
  const caption = el("caption", { class: "hidden" }, "Cosine similarity of every two texts; columns have the rows' numbers");
  const table = el("table", { class: "matrix" }, caption, el("thead", null, head), el("tbody", null, ...body));
  return { table, left: texts.length - count };
}

function shownCosine(value) {
  return Number.isNaN(value) ? "none" : value.toFixed(2).replace("-", "−");
}

/**
 * Return the rows of the list of vectors.
 *
 * @param {string[]} texts
 * @param {(Float32Array | Record<string, {shape: number[], data: any}>)[]} values a vector per text, or
 *   outputs by name
 * @param {{count: number, cut: number}[]} tokens
 * @param {(index: number, button: HTMLElement) => void} copy
 * @returns {{rows: HTMLElement[], left: number}} left: how many texts are not in it
 */
export function vectorRows(texts, values, tokens, copy) {
  const count = Math.min(texts.length, SHOWN_TEXTS);
  const rows = [];
  for (let i = 0; i < count; i++) {
    const about = [plural(tokens[i].count, "token")];
    if (tokens[i].cut > 0) about.push(`${plural(tokens[i].cut, "token")} cut off: the model takes no more`);
    const button = el("button", { type: "button", class: "quiet", "aria-label": `Copy the values of text ${i + 1}` }, "Copy");
    button.addEventListener("click", () => copy(i, button));
    const detail = el("p", { class: tokens[i].cut > 0 ? "hint cut" : "hint" }, about.join(", "));
    rows.push(el("li", null, el("div", { class: "what" }, el("p", { class: "text" }, texts[i]), preview(values[i]), detail), button));
  }
  return { rows, left: texts.length - count };
}

function preview(value) {
  if (value instanceof Float32Array) return el("code", null, numbers(value));
  const parts = Object.entries(value).map(([name, { shape, data }]) => `${name} (${shape.join(" × ")}): ${numbers(data)}`);
  return el("code", null, parts.join("\n"));
}

function numbers(data) {
  const first = Array.from(data.slice(0, PREVIEW), (value) => Number(value).toFixed(4).replace("-", "−"));
  return first.join("  ") + (data.length > PREVIEW ? "  …" : "");
}

const STAGES = { files: "Files", runtime: "Runtime", tokens: "Tokens", outputs: "Outputs", vectors: "Vectors" };
const CHECKED = { files: "file", runtime: null, tokens: "text", outputs: "output", vectors: "text" };

/**
 * Return the self-check's result.
 *
 * @param {import("./core/check.mjs").Report} report
 * @param {import("./core/parity.mjs").Tolerance} tolerance the manifest's
 * @param {string | null} url the exact address of a missing file
 * @returns {Node[]}
 */
export function reportView(report, tolerance, url) {
  const title = report.passed ? "Passed: the numbers are the recorded ones" : `Failed at: ${STAGES[report.stage] ?? report.stage}`;
  const verdict = el("p", { class: report.passed ? "verdict good" : "verdict bad", tabindex: "-1" }, el("span", { class: "mark", "aria-hidden": "true" }), title);
  const nodes = [verdict];
  if (report.problem) nodes.push(el("p", { class: "why" }, report.problem));
  if (url) nodes.push(el("p", { class: "url" }, "Missing: ", el("code", null, url)));
  nodes.push(el("ol", { class: "stages" }, ...Object.keys(STAGES).map((name) => stageRow(name, report.stages.find(({ stage }) => stage === name)))));
  const bound = (value) => (value === null || value === undefined ? "any" : written(value));
  // One token of many is judged by a bound of its own.
  const ofToken = typeof tolerance.min_token_cosine === "number" ? `, of a token ${written(tolerance.min_token_cosine)}` : "";
  const list = el("dl", { class: "facts-list" });
  fillList(list, [
    ["Worst difference", `${figure(report.max_abs)} (allowed ${bound(tolerance.max_abs)})`],
    ["Lowest cosine", `${closeness(report.min_cosine)} (wanted ${bound(tolerance.min_cosine)}${ofToken})`],
    ["Alone or in a batch", `${figure(report.batch_variance)}${report.promised_batch_variance === null ? "" : ` (promised ${figure(report.promised_batch_variance)})`}`],
    ["Runtime", report.runtime ?? "none"],
    ["Provider", report.provider ?? "none"],
    ["Bundle", [report.precision, report.target, report.layout].filter(Boolean).join(", ")],
  ]);
  nodes.push(list);
  return nodes;
}

function stageRow(name, stage) {
  const state = stage === undefined ? "not" : stage.passed ? "good" : "bad";
  const word = { not: "not reached", good: "passed", bad: "failed" }[state];
  const about = [];
  if (stage?.checked !== undefined && CHECKED[name]) about.push(stage.checked === 0 ? "nothing recorded" : plural(stage.checked, CHECKED[name]));
  if (typeof stage?.max_abs === "number") about.push(`difference ${figure(stage.max_abs)}`);
  return el(
    "li",
    { class: state },
    el("span", { class: "mark", "aria-hidden": "true" }),
    el("span", { class: "name" }, STAGES[name]),
    el("span", { class: "word" }, word),
    el("span", { class: "hint" }, about.join(", ")),
  );
}

/** A bound as it is written in the manifest. */
function written(value) {
  return Math.abs(value) < 1e-3 ? value.toExponential().replace("e-", "e−") : `${value}`;
}

/** @param {number | null | undefined} value */
export function figure(value) {
  if (typeof value !== "number") return "not known";
  if (value === 0) return "0";
  return (Math.abs(value) < 1e-3 ? value.toExponential(1) : value.toPrecision(2)).replace("e-", "e−");
}

/** @param {number | null | undefined} value */
export function closeness(value) {
  if (typeof value !== "number") return "not known";
  return value === 1 ? "1" : value.toFixed(7);
}

/**
 * @param {string[]} texts
 * @param {Float32Array[]} vectors
 * @returns {string} a line per text, quoted as RFC 4180 says, float32 numbers that read back as they were
 */
export function toCsv(texts, vectors) {
  const quoted = (text) => `"${text.replaceAll('"', '""')}"`;
  const head = ["text", ...Array.from(vectors[0], (_, i) => `v${i}`)].join(",");
  return [head, ...texts.map((text, i) => [quoted(text), ...vectors[i]].join(","))].join("\r\n") + "\r\n";
}

/**
 * @param {{shape: number[], data: ArrayLike<number | bigint>}} tensor
 * @returns {any[]} its values as nested lists
 */
export function nested({ shape, data }) {
  /** @type {any[]} */
  let values = Array.from(data, Number);
  for (const length of shape.slice(1).reverse()) {
    values = Array.from({ length: length === 0 ? 0 : values.length / length }, (_, i) => values.slice(i * length, (i + 1) * length));
  }
  return values;
}
