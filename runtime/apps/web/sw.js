/*
 * The service worker: the page without a network, and the headers that WebAssembly threads need.
 *
 * - The page's own files and vendor/ are asked of the server first, so that a new version shows at once, and come from
 *   the cache when it cannot be reached; where the page itself did, all of its files do, so that versions do not mix.
 * - A bundle's files are kept by worker.mjs (files.mjs), by the sha256 in the manifest. Its tfx.json is asked of the
 *   server first, too, and what worker.mjs kept is given where there is no answer.
 * - Every answer of this origin is given the headers of a cross-origin isolated page, whatever server is in use, and
 *   the content security policy that index.html asks for, which workers would not inherit.
 */

const CACHE = "tfx-page-1";
const BUNDLES = "tfx-bundles-1"; // of files.mjs
const PATIENCE_MS = 5000; // after which what is kept is shown; the answer is kept for the next visit when it comes

// Small files that the first visit needs again offline. What is large (vendor/) is kept when it is first used.
const PAGE = [
  "./",
  "index.html",
  "style.css",
  "page.mjs",
  "dom.mjs",
  "results.mjs",
  "view.mjs",
  "client.mjs",
  "isolation.mjs",
  "worker.mjs",
  "files.mjs",
  "folders.mjs",
  "core/bundle.mjs",
  "core/check.mjs",
  "core/encoder.mjs",
  "core/errors.mjs",
  "core/external.mjs",
  "core/feeds.mjs",
  "core/golden.mjs",
  "core/manifest.mjs",
  "core/parity.mjs",
  "core/tensors.mjs",
  "core/text.mjs",
  "core/unicode.mjs",
  "core/unicode_data.mjs",
];

const HEADERS = {
  "Cross-Origin-Opener-Policy": "same-origin",
  "Cross-Origin-Embedder-Policy": "require-corp",
  "Cross-Origin-Resource-Policy": "same-origin",
  "Content-Security-Policy":
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; connect-src 'self'; style-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'self'",
};

const scope = new URL(self.registration.scope);

self.addEventListener("install", (event) => {
  self.skipWaiting();
  event.waitUntil(
    caches.open(CACHE).then((cache) => cache.addAll(PAGE.map((path) => new Request(path, { cache: "reload" })))),
  );
});

self.addEventListener("activate", (event) => {
  event.waitUntil(
    (async () => {
      for (const name of await caches.keys()) {
        if (name.startsWith("tfx-page-") && name !== CACHE) await caches.delete(name);
      }
      await self.clients.claim();
    })(),
  );
});

self.addEventListener("fetch", (event) => {
  const { request } = event;
  const url = new URL(request.url);
  if (url.origin !== scope.origin) {
    event.respondWith(Response.error()); // nothing of this page asks for anything elsewhere
  } else if (request.method === "GET") {
    const answer = isPage(url) ? pageFile(event, url) : isManifest(url) ? manifest(request, url) : fetch(request);
    event.respondWith(answer.then(isolated));
  }
});

// The page asks before it says that it works offline: are all its files kept? Those that are not are loaded now.
self.addEventListener("message", (event) => {
  const [port] = event.ports;
  if (port === undefined) return;
  const keep = async () => {
    const cache = await caches.open(CACHE);
    for (const path of [...PAGE, ...event.data.paths]) {
      const url = new URL(path, scope);
      if (!isPage(url)) throw new Error(`${path}: wanted a file of the page`);
      if (!(await cache.match(url.href))) await cache.add(new Request(url, { cache: freshness(url) }));
    }
  };
  event.waitUntil(
    keep().then(
      () => port.postMessage(true),
      () => port.postMessage(false),
    ),
  );
});

/** Whether an address is a file of the page's own. */
function isPage(url) {
  if (!url.href.startsWith(scope.href)) return false;
  const path = url.pathname.slice(scope.pathname.length);
  return path === "" || PAGE.includes(path) || path.startsWith("vendor/");
}

function isManifest(url) {
  return url.pathname.endsWith("/tfx.json");
}

/**
 * How a file is asked for: servers that compare dates only (not ETags) answer 304 for one that was replaced by an older
 * one, as when a bundle is rolled back; what is large does without that care.
 */
function freshness(url) {
  return url.pathname.includes("/vendor/") ? "no-cache" : "reload";
}

/** Pages and workers that came from the cache, by id. */
const cached = new Set();

async function pageFile(event, url) {
  const { request, clientId, resultingClientId } = event;
  const key = url.origin + url.pathname; // what follows "?" changes nothing in a file
  const cache = await caches.open(CACHE).catch(() => null); // no storage: private windows of some browsers
  const kept = await cache?.match(key);
  const asked = fetch(new Request(request, { cache: freshness(url) }));
  const keep = (answer) => (answer.status === 200 && cache ? cache.put(key, answer.clone()) : undefined);
  event.waitUntil(asked.then(keep).catch(() => undefined)); // a full disk must not stop the page
  if (!kept) return asked;
  // On a navigation clientId is of the page that is left.
  const answer = request.mode !== "navigate" && cached.has(clientId) ? null : await inTime(asked);
  if (answer === null && resultingClientId) cached.add(resultingClientId);
  return answer ?? kept;
}

async function manifest(request, url) {
  const asked = fetch(new Request(request, { cache: freshness(url) }));
  const cache = await caches.open(BUNDLES).catch(() => null);
  const kept = await cache?.match(url.origin + url.pathname);
  return kept ? ((await inTime(asked)) ?? kept) : asked;
}

/** Return an answer, null where it fails or takes too long. */
function inTime(asked) {
  const late = new Promise((resolve) => setTimeout(() => resolve(null), PATIENCE_MS));
  return Promise.race([asked, late]).catch(() => null);
}

/** Return an answer with the headers above. */
function isolated(answer) {
  if (answer.type === "error" || answer.type === "opaque" || answer.type === "opaqueredirect") return answer;
  const headers = new Headers(answer.headers);
  for (const [name, value] of Object.entries(HEADERS)) headers.set(name, value);
  const empty = [101, 204, 205, 304].includes(answer.status);
  return new Response(empty ? null : answer.body, { status: answer.status, statusText: answer.statusText, headers });
}
