/**
 * The page: what a person does, and what is shown for it. The work is done in worker.mjs.
 *
 * Address: ?bundle=PATH opens another folder of this server; ?provider=wasm|webgpu and ?threads=N choose what it runs
 * on; ?report=URL runs the self-check at once and posts its result there. That is for a program on this machine: the
 * page's own server on loopback, and no other, since anybody can write such a link.
 */

import { Client, WorkerError } from "./client.mjs";
import { $, announce, radios } from "./dom.mjs";
import { dropped, picked } from "./folders.mjs";
import { isolate, keepPage, obstacle } from "./isolation.mjs";
import { copy, save, showResults, toCsv, toJson } from "./results.mjs";
import * as view from "./view.mjs";

const APP = { name: "@TFX_NAME@", bundle: "@TFX_BUNDLE@" };

const LOOPBACK = ["localhost", "127.0.0.1", "[::1]"];

const parameters = new URLSearchParams(location.search);

/** @type {Client} */
let client;
/** What is open, or was tried; null before. */
let opened = null;
let source = { folder: "" };
let provider = parameters.get("provider") ?? "wasm";
let oneThread = null; // why there are no more, null where there may be

/** Own bundle of the page, or the one the address names. */
function ownSource() {
  const own = APP.bundle.startsWith("@") ? "bundle" : APP.bundle;
  const url = sameOrigin(parameters.get("bundle") ?? own, "bundle");
  return { folder: url.href };
}

function sameOrigin(path, what) {
  const url = new URL(path, location.href);
  if (url.origin !== location.origin) {
    throw new WorkerError(`?${what}=${path}: found another server, wanted an address of ${location.origin}`, { exitCode: 2 });
  }
  return url;
}

function threads() {
  const text = parameters.get("threads");
  if (text === null) return null;
  if (!/^[1-9]\d?$/.test(text)) throw new WorkerError(`?threads=${text}: wanted a number of 1 to 99`, { exitCode: 2 });
  return Number(text);
}

/* ------------------------------------------------------------------ state */

/**
 * @param {"loading" | "ready" | "doubt" | "busy" | "bad"} state doubt: it runs, and the self-check has failed
 * @param {string} text
 */
function setState(state, text) {
  $("state").dataset.state = state;
  $("state-text").textContent = text;
  const working = state === "loading" || state === "busy";
  if (!working) $("progress").hidden = true;
  document.body.setAttribute("aria-busy", String(working));
  $("embed").disabled = state !== "ready" && state !== "doubt";
  $("check").disabled = working || client === undefined;
  $("providers").disabled = working;
}

function onProgress({ phase, done, total, stage }) {
  const bar = $("progress");
  bar.hidden = false;
  if (total > 0) bar.value = Math.min(1, done / total);
  else bar.removeAttribute("value");
  const text = {
    read: () => `Loading ${view.size(done)} of ${view.size(total)}`,
    load: () => "Starting the model",
    embed: () => `Embedding ${done} of ${total}`,
    check: () => `Checking ${stage}${total > 0 ? ` ${done} of ${total}` : ""}`,
  }[phase]();
  bar.setAttribute("aria-label", text);
  $("state-text").textContent = text;
}

/**
 * @param {Error | null} error null takes the notice away
 * @param {[string, () => void][]} [actions] buttons
 */
function setProblem(error, actions = []) {
  $("problem").hidden = error === null;
  if (error === null) return;
  $("problem-text").textContent = error.message;
  const url = error instanceof WorkerError && error.url && !error.message.includes(error.url) ? error.url : null;
  $("problem-url").hidden = url === null;
  $("problem-url").textContent = url === null ? "" : `Missing: ${url}`;
  $("problem-actions").hidden = actions.length === 0;
  $("problem-actions").replaceChildren(
    ...actions.map(([text, action]) => {
      const button = view.el("button", { type: "button" }, text);
      button.addEventListener("click", action);
      return button;
    }),
  );
}

/* ------------------------------------------------------------------- open */

/** Open a bundle in a new worker; the old one's memory goes back. */
async function open(next) {
  source = next;
  client?.close();
  client = new Client(onProgress);
  const mine = client;
  opened = null;
  setProblem(null);
  $("report").hidden = true;
  $("results").hidden = true;
  $("empty").hidden = false;
  setState("loading", "Loading");
  announce("Loading the model");
  try {
    const result = await client.ask("open", { source, provider, threads: threads() });
    if (mine !== client) return;
    opened = result;
    showModel();
    // Drivers differ, and operators that a GPU lacks are mixed with those of the CPU: vectors that are not the recorded
    // ones are worse than none.
    const report = provider === "webgpu" ? await check() : null;
    if (mine !== client) return;
    if (report !== null && !report.passed) refuseGpu(report);
    else {
      setState("ready", `Ready · ${runsOn()}`);
      announce(`Ready. ${runsOn()}`);
    }
  } catch (error) {
    if (mine !== client) return; // another bundle was chosen meanwhile
    setState("bad", "Not loaded");
    /** @type {[string, () => void][]} */
    const actions = [["Try again", () => open(source)]];
    if (provider === "webgpu") actions.unshift(["Use WebAssembly", () => choose("wasm")]);
    setProblem(error, actions);
  }
}

function refuseGpu({ problem }) {
  setState("bad", "Wrong numbers on WebGPU");
  setProblem(new Error(`WebGPU does not give this bundle's numbers here: ${problem}. WebAssembly does; a bundle exported with --target portable, whose operators are plainer, may.`), [
    ["Use WebAssembly", () => choose("wasm")],
  ]);
}

function choose(next) {
  provider = next;
  for (const radio of radios()) radio.checked = radio.value === next;
  return open(source);
}

function runsOn() {
  if (opened.provider === "webgpu") return "WebGPU";
  return `WebAssembly, ${view.plural(opened.threads, "thread")}`;
}

function showModel() {
  const { manifest, label } = opened;
  const own = "folder" in source;
  const named = own && !parameters.has("bundle") && !APP.name.startsWith("@");
  const name = named ? APP.name : label;
  document.title = `${name} – embed texts`;
  const output = manifest.outputs.find((spec) => spec.name === manifest.pooling?.output) ?? manifest.outputs[0];
  const width = output.shape.at(-1);
  const limits = [manifest.tokenizer?.max_length, manifest.max_length].filter((limit) => typeof limit === "number");
  view.fillList($("model"), [
    ["Bundle", label],
    ["Vector", typeof width === "number" ? `${width} numbers${manifest.pooling?.normalize ? ", length 1" : ""}` : "varies"],
    ["Pooling", manifest.pooling?.mode ?? "none: a vector per token"],
    ["Longest text", limits.length ? view.plural(Math.min(...limits), "token") : "no limit"],
    ["Precision", manifest.precision],
    ["Made for", `${manifest.target}, ${manifest.layout}`],
    ["Size", view.size(opened.bytes)],
    ["Runtime", opened.runtime],
  ]);
  const size = typeof width === "number" ? `${width} numbers a text` : null;
  const about = [name, manifest.pooling ? size : null, "nothing you type leaves this browser"];
  $("facts").textContent = about.filter(Boolean).join(" · ");
  const few = opened.provider === "wasm" && opened.threads === 1 && oneThread !== null && navigator.hardwareConcurrency > 1;
  $("provider-hint").textContent = few ? `One thread: ${oneThread}.` : $("provider-hint").dataset.gpu ?? "";
  $("default").hidden = own;
  $("offline").hidden = true;
  $("offline-text").textContent = `Works offline: ${view.size(opened.bytes)} are kept in this browser.`;
  const shown = opened;
  if (shown.offline) keepPage(shown.needs).then((kept) => shown === opened && ($("offline").hidden = !kept));
}

/* ------------------------------------------------------------------ embed */

function lines() {
  return $("texts").value.split(/\r\n|\r|\n/).filter((line) => line.trim() !== "");
}

function countLines() {
  $("count").textContent = view.plural(lines().length, "text");
}

async function embed() {
  const texts = lines();
  setProblem(null);
  if (texts.length === 0) {
    setProblem(new Error("Texts: found none, wanted at least one line"));
    $("texts").focus();
    return;
  }
  /** @type {[any, string]} */
  const before = [$("state").dataset.state, $("state-text").textContent];
  setState("busy", "Embedding");
  $("stop").hidden = texts.length < 20;
  const mine = client;
  try {
    const answer = await client.ask("embed", { texts });
    showResults({ texts, ...answer });
    setState(...before);
    announce(`${view.plural(texts.length, "text")} embedded in ${view.duration(answer.ms.tokenize + answer.ms.run)}. Similarity and vectors follow.`);
  } catch (error) {
    if (mine !== client) return;
    setState(...before);
    setProblem(error);
  } finally {
    $("stop").hidden = true;
  }
}

/* ------------------------------------------------------------- self-check */

/** Run it and show its result; return the report. */
async function check() {
  setProblem(null);
  $("report").hidden = true;
  /** @type {[any, string]} */
  const before = opened === null ? ["bad", "Not loaded"] : [$("state").dataset.state, $("state-text").textContent];
  setState("busy", "Checking");
  announce("Self-check started");
  const mine = client;
  try {
    const { report, exitCode, tolerance, url } = await client.ask("check", { source, provider, threads: threads() });
    const copyReport = view.el("button", { type: "button", class: "quiet" }, "Copy report");
    copyReport.addEventListener("click", () => copy(JSON.stringify(report, null, 2), copyReport));
    $("report").replaceChildren(...view.reportView(report, tolerance, url), copyReport);
    $("report").hidden = false;
    $("report").dataset.passed = String(report.passed);
    if (opened === null || before[0] === "bad") setState(...before);
    else if (report.passed) setState("ready", `Ready · ${runsOn()}`);
    else setState("doubt", "Self-check failed");
    announce(`Self-check ${report.passed ? "passed" : "failed"}`);
    return { ...report, exit_code: exitCode };
  } catch (error) {
    if (mine !== client) throw error;
    setState(...before);
    setProblem(error);
    throw error;
  }
}

/** Check at once, for programs that drive the page. */
async function checkAlone() {
  client = new Client(onProgress);
  const body = await check();
  setState(body.passed ? "ready" : "bad", body.passed ? "Passed" : "Failed");
  $("embed").disabled = true; // the bundle is not open for texts here
  return body;
}

/** Return what a program is told where there is no report. */
function withoutReport(error) {
  return { ...NO_REPORT, problem: [error.message, error.url].filter(Boolean).join(" "), exit_code: error.exitCode ?? 3 };
}

/** Post a report to an address of this server. */
async function post(path, body) {
  const headers = { "Content-Type": "application/json" };
  const url = sameOrigin(path, "report");
  if (!LOOPBACK.includes(url.hostname)) {
    throw new WorkerError(`?report=${path}: found ${url.hostname}, wanted a server of this machine`, { exitCode: 2 });
  }
  await fetch(url, { method: "POST", headers, credentials: "omit", body: JSON.stringify(body) });
}

const NO_REPORT = {
  app: "web", passed: false, stage: null, problem: null, runtime: null, library: null, provider: null, precision: null,
  target: null, layout: null, max_abs: null, min_cosine: null, stages: [], batch_variance: null, promised_batch_variance: null,
};

/* ------------------------------------------------------------------ start */

/** Offer WebGPU where there is an adapter. */
async function offerGpu() {
  const { gpu } = /** @type {any} */ (navigator);
  const adapter = await gpu?.requestAdapter().catch(() => null);
  for (const radio of radios()) radio.disabled = radio.value === "webgpu" && !adapter;
  const hint = adapter ? "" : gpu ? "WebGPU: no adapter was found here." : "WebGPU is not in this browser.";
  $("provider-hint").dataset.gpu = hint;
  $("provider-hint").textContent = hint;
  if (provider === "webgpu" && !adapter) {
    throw new WorkerError(`?provider=webgpu: ${hint || "not here"}`, { exitCode: 3 });
  }
  for (const radio of radios()) radio.checked = radio.value === provider;
}

function connect() {
  $("form").addEventListener("submit", (/** @type {Event} */ event) => {
    event.preventDefault();
    if (!$("embed").disabled) embed();
  });
  $("texts").addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
  });
  $("texts").addEventListener("input", countLines);
  $("clear").addEventListener("click", () => {
    $("texts").value = "";
    countLines();
    $("texts").focus();
  });
  $("stop").addEventListener("click", () => open(source));
  $("copy-all").addEventListener("click", () => copy(toJson(), $("copy-all")));
  $("save-json").addEventListener("click", () => save("vectors.json", "application/json", toJson()));
  $("save-csv").addEventListener("click", () => save("vectors.csv", "text/csv", toCsv()));
  $("check").addEventListener("click", () =>
    check().then(
      () => $("report").querySelector(".verdict").focus(),
      () => {}, // shown already
    ),
  );
  $("default").addEventListener("click", () => open(ownSource()));
  $("forget").addEventListener("click", async () => {
    try {
      await client.ask("forget");
      $("offline").hidden = true;
      announce("Removed; the page loads the bundle again next time");
    } catch (error) {
      setProblem(error);
    }
  });
  for (const radio of radios()) radio.addEventListener("change", () => choose(radio.value));
  $("folder").addEventListener("change", () => {
    openPicked(picked($("folder").files));
    $("folder").value = ""; // the same folder may be chosen again
  });
  addEventListener("dragover", (event) => {
    event.preventDefault();
    $("drop").classList.add("over");
  });
  addEventListener("dragleave", (event) => {
    if (event.relatedTarget === null) $("drop").classList.remove("over");
  });
  addEventListener("drop", (event) => {
    event.preventDefault();
    $("drop").classList.remove("over");
    openPicked(dropped(event.dataTransfer));
  });
}

/** @param {Promise<{files: Map<string, File>, label: string}>} choice */
async function openPicked(choice) {
  try {
    await open(await choice);
  } catch (error) {
    setProblem(error);
  }
}

async function start() {
  $("not-started").remove();
  connect();
  countLines();
  const report = parameters.get("report");
  try {
    const why = obstacle();
    if (why !== null) throw new WorkerError(why);
    if (!["wasm", "webgpu"].includes(provider)) {
      throw new WorkerError(`?provider=${provider}: wanted wasm or webgpu`, { exitCode: 2 });
    }
    oneThread = await isolate();
    await offerGpu();
    source = ownSource();
    if (report === null) await open(source);
    else await post(report, await checkAlone());
  } catch (error) {
    setState("bad", "Cannot start");
    setProblem(error);
    if (report !== null) await post(report, withoutReport(error)).catch(setProblem);
  }
}

start();
