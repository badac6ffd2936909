"""Targets: what a deployed graph may contain.

A target names the operator domains, the highest opset and IR version its runtimes load, and (in
:mod:`.lowering`) the rules that lower the canonical graph for it.
"""

from __future__ import annotations

import dataclasses

from ..errors import InputError

LAYOUTS = ("padded", "ragged")
"""How a batch lies in memory: (batch, sequence, d), or (tokens, d) with attended tokens only."""

DATA_SUFFIX = ".data"
"""A file of weights beside the model has the model's name and this."""

MAX_INLINE_BYTES = 1 << 30
"""Weights up to this size stay inside the file: one file is easier to deploy, and protobuf ends at 2 GiB."""

_WEB_INLINE_BYTES = 1900 << 20
"""A page fetches one file more easily than two, so it takes all that protobuf allows, with room for the graph."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A named profile.

    Attributes:
        name: ``cpu``, ``cuda``, ``web`` (onnxruntime-web) or ``portable``.
        domains: Operator domains a graph may use.
        default_opset: The ai.onnx opset when none is asked for; ``None``: the lowest the content allows.
        min_opset: Lowest ai.onnx opset that can be asked for.
        max_opset: Highest ai.onnx opset its runtimes load.
        max_ir: Highest IR version its runtimes load.
        layout: The layout that measures fastest, where a graph can have it.
        inline_bytes: Weights larger than this go to a file beside the model.
    """

    name: str
    domains: frozenset[str]
    default_opset: int | None
    min_opset: int = 17
    max_opset: int = 23
    max_ir: int = 13
    layout: str = "padded"
    inline_bytes: int = MAX_INLINE_BYTES

    def check_opset(self, opset: int | None) -> None:
        """Refuses an ai.onnx opset that cannot be asked for; ``None`` asks for none.

        Raises:
            InputError: It is out of range.
        """
        if opset is not None and not self.min_opset <= opset <= self.max_opset:
            raise InputError(f"opset: found {opset}, wanted {self.min_opset} to {self.max_opset}")


TARGETS = {
    target.name: target
    for target in (
        Target("cpu", frozenset({"", "com.microsoft"}), None, layout="ragged"),
        Target("cuda", frozenset({"", "com.microsoft"}), None),
        Target("web", frozenset({"", "com.microsoft"}), None, layout="ragged", inline_bytes=_WEB_INLINE_BYTES),
        Target("portable", frozenset({""}), 18),
    )
}


def get(name: str) -> Target:
    """Returns a target by its name.

    Raises:
        InputError: There is none of that name.
    """
    try:
        return TARGETS[name]
    except KeyError:
        raise InputError(f"target: found {name!r}, wanted one of {', '.join(TARGETS)}") from None
