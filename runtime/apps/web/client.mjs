/** The page's side of worker.mjs: questions with an answer, and progress on the way. */

/** A message of the worker's, as an error. */
export class WorkerError extends Error {
  /**
   * @param {string} message
   * @param {{exitCode?: number, url?: string | null}} [more] url: the exact address that is missing
   */
  constructor(message, { exitCode = 3, url = null } = {}) {
    super(message);
    this.name = "WorkerError";
    this.exitCode = exitCode;
    this.url = url;
  }
}

/** One worker; ask it one thing after the other. */
export class Client {
  /** @param {(state: object) => void} onProgress */
  constructor(onProgress) {
    this.pending = new Map();
    this.last = 0;
    /** @type {WorkerError | null} why the worker answers nothing any more */
    this.dead = null;
    this.worker = new Worker(new URL("worker.mjs", import.meta.url), { type: "module" });
    this.worker.onmessage = ({ data }) => {
      const waiting = this.pending.get(data.id);
      if (waiting === undefined) return;
      if (data.type === "progress") {
        onProgress(data);
        return;
      }
      this.pending.delete(data.id);
      if (data.type === "error") waiting.reject(new WorkerError(data.message, data));
      else waiting.resolve(data.result);
    };
    this.worker.onerror = (event) => {
      event.preventDefault();
      const where = event.filename ? ` (${event.filename}:${event.lineno})` : "";
      this.dead = new WorkerError(
        `worker.mjs stopped: ${event.message || "a file of the page could not be loaded"}${where}; load the page again`,
      );
      this.fail(this.dead);
    };
    this.worker.onmessageerror = () => this.fail(new WorkerError("worker.mjs: an answer could not be read"));
  }

  /**
   * @param {"open" | "embed" | "check" | "forget"} type
   * @param {object} [content] as worker.mjs describes it
   * @returns {Promise<any>}
   */
  ask(type, content = {}) {
    if (this.dead !== null) return Promise.reject(this.dead);
    const id = ++this.last;
    return new Promise((resolve, reject) => {
      this.pending.set(id, { resolve, reject });
      this.worker.postMessage({ id, type, ...content });
    });
  }

  /** End the worker, whatever it is doing; its memory goes back. */
  close() {
    this.worker.terminate();
    this.fail(new WorkerError("stopped", { exitCode: 0 }));
  }

  /** @param {WorkerError} error for everything that waits */
  fail(error) {
    for (const { reject } of this.pending.values()) reject(error);
    this.pending.clear();
  }
}
