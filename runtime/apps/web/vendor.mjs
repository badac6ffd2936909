/**
 * Copy the few files of onnxruntime-web and @huggingface/tokenizers that the page needs into vendor/, with the
 * licences they come under. Run by `npm run setup`.
 */

import { cpSync, mkdirSync, readFileSync, rmSync, statSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const modules = process.argv[2] ?? join(here, "node_modules");

const FILES = [
  // WebAssembly, what the page runs on.
  ["onnxruntime-web", "dist/ort.wasm.bundle.min.mjs"],
  ["onnxruntime-web", "dist/ort-wasm-simd-threaded.wasm"],
  // WebGPU, loaded only when it is chosen.
  ["onnxruntime-web", "dist/ort.webgpu.bundle.min.mjs"],
  ["onnxruntime-web", "dist/ort-wasm-simd-threaded.asyncify.wasm"],
  ["@huggingface/tokenizers", "dist/tokenizers.min.mjs"],
  ["@huggingface/tokenizers", "LICENSE"],
];

const wanted = JSON.parse(readFileSync(join(here, "package.json"), "utf8")).dependencies;
const vendor = join(here, "vendor");
rmSync(vendor, { recursive: true, force: true });
mkdirSync(vendor);

for (const [name, version] of Object.entries(wanted)) {
  let found = "nothing";
  try {
    found = JSON.parse(readFileSync(join(modules, name, "package.json"), "utf8")).version;
  } catch {
    // said below
  }
  if (found !== version) {
    console.error(`error: ${join(modules, name)}: found ${found}, wanted version ${version}; run: npm install --ignore-scripts`);
    process.exit(3);
  }
  console.log(`${name} ${version}`);
}
for (const [name, path] of FILES) {
  const file = path.startsWith("dist/") ? path.slice("dist/".length) : `${name.split("/").at(-1)}-${path}`;
  cpSync(join(modules, name, path), join(vendor, file));
  console.log(`  vendor/${file}  ${(statSync(join(vendor, file)).size / 1e6).toFixed(2)} MB`);
}
