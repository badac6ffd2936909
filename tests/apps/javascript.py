"""Pieces of JavaScript run beside a generated app, answering in JSON."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from .programs import Program

_PRELUDE = """
import fs from "node:fs";
const input = JSON.parse(fs.readFileSync(0, "utf8"));
const said = (error) => ({ error: error.message, code: error.exitCode ?? null });
// Calls a function; an error becomes a value.
const attempt = async (call) => { try { return { value: await call() }; } catch (error) { return said(error); } };
const answer = (value) =>
  process.stdout.write(JSON.stringify(value, (_, each) =>
    typeof each === "bigint" ? Number(each) : ArrayBuffer.isView(each) ? Array.from(each) : each));
"""


def evaluate(program: Program, code: str, value: Any = None, timeout: float = 240) -> Any:
    """Run code in a folder that is not the app's.

    Args:
        program: a Node app; in the code, ``@/`` is its folder.
        code: a module. It finds ``value`` as ``input`` and calls ``answer`` once; ``attempt`` turns errors to values.
        value: anything that JSON holds.
        timeout: in seconds.

    Returns:
        What was answered.
    """
    script = _PRELUDE + code.replace("@/", program.folder.as_uri() + "/")
    done = subprocess.run(
        [str(program.node), "--input-type=module", "--eval", script],
        input=json.dumps(value).encode(),
        cwd="/",
        capture_output=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return json.loads(done.stdout)
