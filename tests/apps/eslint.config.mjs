// Run from the root of the repository: eslint --config tests/apps/eslint.config.mjs runtime/apps
import js from "@eslint/js";
import globals from "globals";

const core = "runtime/apps/js/**/*.mjs";
const node = "runtime/apps/node/**/*.mjs";
const web = "runtime/apps/web/**/*.{mjs,js}";
const workers = ["runtime/apps/web/sw.js", "runtime/apps/web/worker.mjs"];
const tools = "runtime/apps/web/vendor.mjs";

export default [
  { ignores: ["**/node_modules/", "**/build/", "**/vendor/"] },
  {
    files: [core, node, web],
    ...js.configs.recommended,
    languageOptions: { ecmaVersion: 2023, sourceType: "module" },
    linterOptions: { reportUnusedDisableDirectives: "error" },
    rules: {
      ...js.configs.recommended.rules,
      "no-unused-vars": ["error", { args: "after-used" }],
      "no-var": "error",
      "prefer-const": "error",
      "no-shadow": "error",
      "no-implicit-globals": "error",
      "object-shorthand": "error",
      "one-var": ["error", "never"],
      curly: ["error", "multi-line"],
      eqeqeq: ["error", "always", { null: "ignore" }],
    },
  },
  // What every host of the core has; anything else is passed in.
  { files: [core], languageOptions: { globals: { ...globals["shared-node-browser"] } } },
  { files: [node, tools], languageOptions: { globals: globals.node } },
  { files: [web], ignores: [...workers, tools], languageOptions: { globals: globals.browser } },
  { files: workers, languageOptions: { globals: { ...globals.worker, ...globals.serviceworker } } },
];
