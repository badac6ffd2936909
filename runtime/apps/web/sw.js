/*
 * The service worker: the page without a network, and the headers that WebAssembly threads need.
 *
 * - The page's own files and vendor/ are asked of the server first, so that a new version shows at once, and come from
 *   the cache when it cannot be reached. So does every tfx.json.
 * - A bundle's other files are not touched here: worker.mjs keeps them by the sha256 in the manifest (files.mjs).
 * - Every answer of this origin is given the headers of a cross-origin isolated page, whatever server is in use, and
 *   the content security policy that index.html asks for, which workers would not inherit.
 */

const CACHE = "tfx-page-1";
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
    caches.open(CACHE).then((cache) => cache.addAll(PAGE.map((path) => new Request(path, { cache: "no-cache" })))),
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
    event.respondWith(isKept(url) ? networkFirst(event, url) : fetch(request).then(isolated));
  }
});

/** Whether a path is the page's own or a manifest. */
function isKept(url) {
  if (url.pathname.endsWith("/tfx.json")) return true;
  if (!url.pathname.startsWith(scope.pathname)) return false;
  const path = url.pathname.slice(scope.pathname.length);
  return path === "" || PAGE.includes(path) || path.startsWith("core/") || path.startsWith("vendor/");
}

async function networkFirst(event, url) {
  const { request } = event;
  const key = url.origin + url.pathname; // what follows "?" changes nothing in a file
  const cache = await caches.open(CACHE).catch(() => null); // no storage: private windows of some browsers
  const kept = await cache?.match(key);
  const asked = fetch(request.mode === "navigate" ? request : new Request(request, { cache: "no-cache" }));
  // A full disk must not stop the page.
  const keep = (answer) => (answer.status === 200 && cache ? cache.put(key, answer.clone()) : undefined);
  event.waitUntil(asked.then(keep).catch(() => undefined));
  if (!kept) return isolated(await asked);
  const late = new Promise((resolve) => setTimeout(() => resolve(null), PATIENCE_MS));
  const answer = await Promise.race([asked, late]).catch(() => null);
  return isolated(answer ?? kept);
}

/** Return an answer with the headers above. */
function isolated(answer) {
  if (answer.type === "error" || answer.type === "opaque" || answer.type === "opaqueredirect") return answer;
  const headers = new Headers(answer.headers);
  for (const [name, value] of Object.entries(HEADERS)) headers.set(name, value);
  const empty = [101, 204, 205, 304].includes(answer.status);
  return new Response(empty ? null : answer.body, { status: answer.status, statusText: answer.statusText, headers });
}
