/**
 * What the page needs of the browser: SIMD, and the service worker with, through it, cross-origin isolation, without
 * which WebAssembly has one thread.
 */

const TRIED = "tfx-reloaded"; // in sessionStorage: no second reload when the first did not help
const KEEPING = 600_000; // ms: the first visit may load tens of megabytes over a slow line
const PATIENCE = 5000; // ms to wait for the service worker; the page works without

/** Return why this browser or address cannot run the page, null when it can. */
export function obstacle() {
  if (!isSecureContext || !globalThis.crypto?.subtle) {
    return `${location.origin} is no secure address, so the browser gives no SHA-256 to check files with: use https:// or http://localhost`;
  }
  if (typeof WebAssembly !== "object") return "this browser has no WebAssembly: wanted one from 2023 or later";
  // (func (drop (i8x16.splat (i32.const 0))))
  const simd = [0, 97, 115, 109, 1, 0, 0, 0, 1, 4, 1, 96, 0, 0, 3, 2, 1, 0, 10, 9, 1, 7, 0, 65, 0, 253, 15, 26, 11];
  if (!WebAssembly.validate(new Uint8Array(simd))) {
    return "this browser's WebAssembly has no SIMD, which onnxruntime needs: wanted a browser from 2023 or later";
  }
  return null;
}

/**
 * Register the service worker, and load the page once more where that gives threads.
 *
 * @returns {Promise<string | null>} why there is one thread only, null where there may be several. It does not return
 *   when the page is being loaded again.
 */
export async function isolate() {
  if (!("serviceWorker" in navigator)) {
    return crossOriginIsolated ? null : "this window has no service worker, so no cross-origin isolation";
  }
  try {
    const registered = navigator.serviceWorker.register("sw.js");
    // Of a later visit nothing is waited for: the browser first looks for a newer one, at a server that may be silent.
    if (navigator.serviceWorker.controller) registered.catch(() => undefined);
    else await registered.then(controlled);
  } catch (error) {
    return crossOriginIsolated ? null : `the service worker did not start (${error.message})`;
  }
  if (crossOriginIsolated) {
    sessionStorage.removeItem(TRIED);
    return null;
  }
  if (sessionStorage.getItem(TRIED) === null) {
    sessionStorage.setItem(TRIED, "1");
    location.reload();
    await new Promise(() => {}); // the page ends here
  }
  return "this browser gives the page no cross-origin isolation";
}

/**
 * Have the service worker keep the page's own files.
 *
 * @param {string[]} paths what is needed beside those that it knows of
 * @returns {Promise<boolean>} whether it keeps all of them: the next visit needs no server for them
 */
export async function keepPage(paths) {
  const { serviceWorker } = navigator;
  if (!(await serviceWorker?.getRegistration().catch(() => null))) return false;
  const { port1, port2 } = new MessageChannel();
  return new Promise((resolve) => {
    setTimeout(() => resolve(false), KEEPING); // it was not installed, or is an older one that does not answer
    port1.onmessage = ({ data }) => resolve(data);
    serviceWorker.ready.then(({ active }) => active.postMessage({ paths }, [port2]));
  });
}

/** Wait until the service worker answers this page's requests, or patience ends. */
function controlled() {
  const { serviceWorker } = navigator;
  if (serviceWorker.controller) return Promise.resolve();
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, PATIENCE);
    const done = () => {
      clearTimeout(timer);
      resolve(undefined);
    };
    serviceWorker.addEventListener("controllerchange", done, { once: true });
    // A forced reload leaves an active worker that does not control the page: loading once more helps.
    serviceWorker.getRegistration().then((found) => found?.active && !found.installing && !found.waiting && done());
  });
}
