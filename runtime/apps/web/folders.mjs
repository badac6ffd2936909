/** Folders that somebody chose or dropped: the files of the bundle in them. */

const MANIFEST = "tfx.json";
const MOST_FILES = 2000; // a home folder dropped by mistake

/**
 * @param {FileList} list of an input with webkitdirectory
 * @returns {Promise<{files: Map<string, File>, label: string}>}
 * @throws {Error} there is no bundle in it
 */
export async function picked(list) {
  return bundleOf(Array.from(list, (file) => [file.webkitRelativePath || file.name, file]));
}

/**
 * @param {DataTransfer} transfer of a drop: a folder, or the files of one
 * @returns {Promise<{files: Map<string, File>, label: string}>}
 * @throws {Error} there is no bundle in it
 */
export async function dropped(transfer) {
  // The transfer is empty after the first await.
  const entries = Array.from(transfer.items, (item) => item.webkitGetAsEntry?.()).filter(Boolean);
  const loose = Array.from(transfer.files, (file) => [file.name, file]);
  if (entries.length === 0) return bundleOf(loose);
  const found = [];
  for (const entry of entries) await walk(entry, "", found);
  return bundleOf(found);
}

async function walk(entry, folder, found) {
  if (found.length >= MOST_FILES) throw new Error(`more than ${MOST_FILES} files: choose the bundle's own folder`);
  const path = folder + entry.name;
  if (entry.isFile) {
    found.push([path, await new Promise((resolve, reject) => entry.file(resolve, reject))]);
    return;
  }
  const reader = entry.createReader();
  for (;;) {
    // A reader gives up to 100 entries at a time.
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (some.length === 0) return;
    for (const child of some) await walk(child, `${path}/`, found);
  }
}

/** Return the files beside the manifest that lies highest. */
function bundleOf(files) {
  const depth = (path) => path.split("/").length;
  const manifests = files.map(([path]) => path).filter((path) => path.split("/").at(-1) === MANIFEST);
  if (manifests.length === 0) {
    throw new Error(`found ${files.length} ${files.length === 1 ? "file" : "files"} and no ${MANIFEST} among them: choose a bundle's folder`);
  }
  manifests.sort((one, other) => depth(one) - depth(other));
  if (manifests.length > 1 && depth(manifests[0]) === depth(manifests[1])) {
    throw new Error(`found several bundles (${manifests.slice(0, 3).join(", ")}): choose one bundle's folder`);
  }
  const folder = manifests[0].slice(0, -MANIFEST.length);
  const beside = files.filter(([path]) => path.startsWith(folder) && !path.slice(folder.length).includes("/"));
  const label = folder === "" ? "dropped files" : folder.split("/").at(-2);
  return { files: new Map(beside.map(([path, file]) => [path.slice(folder.length), file])), label };
}
