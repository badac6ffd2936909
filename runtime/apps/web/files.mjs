/**
 * Where a bundle's files come from: a folder of this server, or files that somebody dropped.
 *
 * Files of a server are kept in this browser by address and sha256, once they were found right, so that the next visit
 * loads nothing and works offline; another sha256 under the same address replaces the older one.
 */

import { EXIT, TfxError, reason } from "./core/errors.mjs";

const CACHE = "tfx-bundles-1";
const MANIFEST = "tfx.json";

/**
 * @typedef {object} Source
 * @property {string} label where it is, for people
 * @property {string | null} missing the address of the last file that was not there
 * @property {(name: string) => Promise<Uint8Array | null>} read for readBundle
 * @property {() => Promise<void>} settle keep what was read, once it was found right
 * @property {() => boolean} kept whether all of it is kept in this browser
 * @property {() => Promise<boolean>} forget drop what was kept; whether there was any
 */

/**
 * Return the files of a folder of this server.
 *
 * @param {string} folder its address
 * @param {(state: {file: string, done: number, total: number}) => void} onProgress bytes of all files of the bundle
 * @returns {Source}
 */
export function serverFolder(folder, onProgress) {
  const base = new URL(folder.endsWith("/") ? folder : `${folder}/`, self.location.href);
  /** @type {Record<string, {bytes: number, sha256: string}>} */
  let listed = {};
  let done = 0;
  /** @type {Map<string, Uint8Array<ArrayBuffer>>} by cache key */
  const fresh = new Map();
  const used = new Set();
  /** @type {Uint8Array<ArrayBuffer> | null} kept for the service worker, which gives it where the server does not */
  let manifest = null;
  const manifestKey = new URL(MANIFEST, base).href;

  const keyOf = (name) => `${new URL(encodeURIComponent(name), base)}?sha256=${listed[name]?.sha256}`;
  const filesKept = () => Object.keys(listed).every((name) => used.has(keyOf(name)));
  const total = () => Object.values(listed).reduce((sum, { bytes }) => sum + (Number(bytes) || 0), 0);

  const source = {
    label: base.pathname,
    missing: null,

    async read(name) {
      const url = new URL(encodeURIComponent(name), base).href;
      if (name === MANIFEST) {
        const bytes = await download(url, () => {});
        fresh.clear();
        manifest = bytes;
        listed = bytes === null ? {} : filesOf(bytes);
        done = 0;
        if (bytes === null) source.missing = url;
        return bytes;
      }
      const key = keyOf(name);
      const had = fresh.get(key);
      if (had !== undefined) return had; // read before, by who hashed it
      const kept = await (await storage())?.match(key);
      let bytes = kept ? new Uint8Array(await kept.arrayBuffer()) : null;
      if (bytes === null) {
        let here = 0;
        bytes = await download(url, (count) => {
          here += count;
          onProgress({ file: name, done: done + here, total: total() });
        });
        if (bytes !== null && name in listed) fresh.set(key, bytes);
      } else {
        used.add(key);
      }
      if (bytes === null) source.missing = url;
      done += bytes?.length ?? 0;
      onProgress({ file: name, done, total: total() });
      return bytes;
    },

    async settle() {
      const cache = await storage();
      if (cache === null) return;
      const put = (key, bytes) =>
        cache.put(key, new Response(bytes)).then(
          () => used.add(key),
          () => undefined, // a full disk must not stop the page: it loads the file again next time
        );
      for (const [key, bytes] of fresh) await put(key, bytes);
      fresh.clear();
      if (!filesKept()) return; // an older manifest and its files stay
      if (manifest !== null) await put(manifestKey, manifest);
      for (const request of await cache.keys()) {
        const { href } = new URL(".", request.url);
        if (href === base.href && !used.has(request.url)) await cache.delete(request);
      }
    },

    kept: () => used.has(manifestKey) && filesKept(),

    async forget() {
      const cache = await storage();
      const keys = [...used];
      for (const key of keys) await cache?.delete(key);
      used.clear();
      fresh.clear();
      return keys.length > 0;
    },
  };
  return source;
}

/**
 * Return files that were dropped or chosen.
 *
 * @param {Map<string, File>} files by bare name
 * @param {string} label the folder's name
 * @param {(state: {file: string, done: number, total: number}) => void} onProgress
 * @returns {Source}
 */
export function pickedFiles(files, label, onProgress) {
  const total = [...files.values()].reduce((sum, file) => sum + file.size, 0);
  let done = 0;
  const source = {
    label,
    missing: null,
    async read(name) {
      const file = files.get(name);
      if (file === undefined) {
        source.missing = `${label}/${name}`;
        return null;
      }
      if (name === MANIFEST) done = 0;
      try {
        const bytes = new Uint8Array(await file.arrayBuffer());
        done += bytes.length;
        onProgress({ file: name, done: Math.min(done, total), total });
        return bytes;
      } catch (error) {
        throw new TfxError(`${label}/${name}: cannot be read: ${reason(error)}`);
      }
    },
    settle: async () => {},
    kept: () => false,
    forget: async () => false,
  };
  return source;
}

/**
 * @param {string} url
 * @param {(count: number) => void} onBytes told how many bytes came in
 * @returns {Promise<Uint8Array<ArrayBuffer> | null>} null where the server has no such file
 * @throws {TfxError} names the address and what happened
 */
async function download(url, onBytes) {
  let answer;
  try {
    // The browser's own cache would hold it a second time.
    answer = await fetch(url, { cache: "no-store" });
  } catch (error) {
    throw new TfxError(`${url}: cannot be reached: ${reason(error)}`, EXIT.machine);
  }
  if (answer.status === 404 || answer.status === 410) return null;
  if (!answer.ok) throw new TfxError(`${url}: found answer ${answer.status}, wanted the file`, EXIT.machine);
  let count = 0;
  const counted = new TransformStream({
    transform(chunk, controller) {
      count += chunk.length;
      onBytes(chunk.length);
      controller.enqueue(chunk);
    },
  });
  try {
    const body = answer.body === null ? new Response() : new Response(answer.body.pipeThrough(counted));
    return new Uint8Array(await body.arrayBuffer());
  } catch (error) {
    throw new TfxError(`${url}: broke off after ${count} bytes: ${reason(error)}`, EXIT.machine);
  }
}

/** Return what a manifest lists; readBundle says what is wrong with it. */
function filesOf(bytes) {
  try {
    const { files } = JSON.parse(new TextDecoder().decode(bytes));
    return files !== null && typeof files === "object" ? files : {};
  } catch {
    return {};
  }
}

/** Return the store, null where this window has none (private windows of some browsers). */
async function storage() {
  try {
    return await caches.open(CACHE);
  } catch {
    return null;
  }
}
