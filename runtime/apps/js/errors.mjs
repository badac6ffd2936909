/** Errors that a user can act on: one line that names the thing, what was found and what was wanted. */

/** Exit codes of every app. */
export const EXIT = Object.freeze({ done: 0, check: 1, input: 2, machine: 3 });

export class TfxError extends Error {
  /**
   * @param {string} message one line
   * @param {number} [exitCode] one of EXIT: 1 a check failed, 2 input or bundle, 3 this machine cannot
   */
  constructor(message, exitCode = EXIT.input) {
    super(message);
    this.name = "TfxError";
    this.exitCode = exitCode;
  }
}

/**
 * @param {string} where
 * @param {unknown} found
 * @param {string} wanted
 * @returns {TfxError} "where: found ..., wanted ..."
 */
export function wrong(where, found, wanted) {
  return new TfxError(`${where}: found ${shown(found)}, wanted ${wanted}`);
}

/**
 * @param {unknown} value
 * @returns {string} the value, short and on one line
 */
export function shown(value) {
  let text;
  try {
    text = typeof value === "bigint" ? `${value}` : JSON.stringify(value);
  } catch {
    text = undefined; // a cycle or a bigint inside
  }
  text = String(text ?? value);
  return text.length > 80 ? `${text.slice(0, 77)}...` : text;
}

/**
 * @param {unknown} error
 * @returns {string} its message as one line
 */
export function reason(error) {
  const text = error instanceof Error ? error.message : String(error);
  // onnxruntime puts its own source line and function before what it says.
  const said = text.replace(/\S+\.(cc|h):\d+ .+?\) (?=[A-Z"'])/g, "");
  return said.replace(/\s+/g, " ").trim().slice(0, 500);
}
