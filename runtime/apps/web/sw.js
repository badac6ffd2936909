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
const SILENCE_MS = 60_000; // for which a server that outlasted patience is not waited for again, unless it answers

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
    event.respondWith(isKept(url) ? networkFirst(event, url) : fetch(request).then(isolated));
  }
});

// The page asks before it says that it works offline: are all these files kept? Those that are not are loaded now.
self.addEventListener("message", (event) => {
  const [port] = event.ports;
  const keep = async () => {
    const cache = await caches.open(CACHE);
    for (const path of [...PAGE, ...event.data.paths]) {
      const { href } = new URL(path, scope);
      if (!(await cache.match(href))) await cache.add(href);
    }
  };
  event.waitUntil(
    keep().then(
      () => port.postMessage(true),
      () => port.postMessage(false),
    ),
  );
});

/** Whether a path is the page's own or a manifest. */
function isKept(url) {
  if (url.pathname.endsWith("/tfx.json")) return true;
  if (!url.pathname.startsWith(scope.pathname)) return false;
  const path = url.pathname.slice(scope.pathname.length);
  return path === "" || PAGE.includes(path) || path.startsWith("vendor/");
}

let silentUntil = 0;

async function networkFirst(event, url) {
  const { request } = event;
  const key = url.origin + url.pathname; // what follows "?" changes nothing in a file
  const cache = await caches.open(CACHE).catch(() => null); // no storage: private windows of some browsers
  const kept = await cache?.match(key);
  // Servers that compare dates only (not ETags) answer 304 for a file that was replaced by an older one, as when a bundle
  // is rolled back; what is large does without that care.
  const mode = url.pathname.includes("/vendor/") ? "no-cache" : "reload";
  const asked = fetch(request.mode === "navigate" ? request : new Request(request, { cache: mode }));
  const keep = (answer) => {
    silentUntil = 0;
    return answer.status === 200 && cache ? cache.put(key, answer.clone()) : undefined;
  };
  event.waitUntil(asked.then(keep).catch(() => undefined)); // a full disk must not stop the page
  if (!kept) return isolated(await asked);
  let timer;
  const late = new Promise((resolve) => {
    const stop = () => {
      silentUntil = Date.now() + SILENCE_MS;
      resolve(null);
    };
    timer = setTimeout(stop, Date.now() < silentUntil ? 0 : PATIENCE_MS);
  });
  const answer = await Promise.race([asked, late]).catch(() => null);
  clearTimeout(timer);
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
