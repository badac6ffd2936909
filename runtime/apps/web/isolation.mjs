/** The service worker, and through it cross-origin isolation, without which WebAssembly has one thread. */

const TRIED = "tfx-reloaded"; // in sessionStorage: no second reload when the first did not help
const PATIENCE = 5000; // ms to wait for the service worker; the page works without

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
    await navigator.serviceWorker.register("sw.js");
    await controlled();
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
