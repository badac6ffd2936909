"""The report of ``tfx bench`` as one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError

__all__ = ["check_plot", "plot"]

_FORMATS = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Say before anything is timed that a picture cannot be made.

    Raises:
        InputError: another ending than .png, .svg or .pdf, or no such folder.
        ModuleNotFoundError: matplotlib is not installed.
    """
    if path.suffix.lower() not in _FORMATS:
        raise InputError(f"{path}: found the ending {path.suffix!r}, wanted one of {', '.join(_FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise InputError(f"{path}: its folder does not exist")
    import matplotlib  # noqa: F401 # pyright: ignore[reportMissingImports]


def plot(found: Mapping[str, Any], path: Path) -> None:
    """Draw latency against length, throughput against batch, and, where it was timed, the distance to the floor.

    Args:
        found: what ``bench`` returns.
        path: the file to write; an existing one is replaced.

    Raises:
        InputError: the file cannot be written.
        ModuleNotFoundError: matplotlib is not installed.
    """
    # Without pyplot, which would choose a window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # pyright: ignore[reportMissingImports]
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    rows = found["results"]
    floor = any(row["floor_ms"] is not None for row in rows)
    figure = Figure(figsize=(5 * (2 + floor), 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Sequence[Any] = figure.subplots(1, 2 + floor)
    batch = min(row["batch"] for row in rows)
    length = max(row["sequence"] for row in rows)
    whole = found["mode"] == "throughput"
    for name in dict.fromkeys(row["engine"] for row in rows):
        own = [row for row in rows if row["engine"] == name]
        _line(axes[0], name, [row for row in own if row["batch"] == batch], "sequence", "p50_ms", ("p50_ms", "p90_ms"))
        _line(axes[1], name, [row for row in own if row["sequence"] == length], "batch", "tokens_per_s")
        if floor:
            distance = [{"tokens": row["tokens"], **row["above_floor"]} for row in own]
            _line(axes[2], name, distance, "tokens", "ratio", ("low", "high"))
    texts = found["results"][0]["texts"]
    _finish(axes[0], "longest row, tokens", f"ms for {texts} texts" if whole else f"ms a call of {batch}, p50 to p90")
    _finish(axes[1], f"rows a batch, up to {length} tokens each", "attended tokens per second")
    if floor:
        _finish(axes[2], "attended tokens a call", "times the matrix-product floor")
        axes[2].axhline(1, color="black", linewidth=0.8)
    here = found["environment"]
    figure.suptitle(f"{here['cpu']}, {found['threads']} threads, onnxruntime {here['onnxruntime']}", fontsize=9)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error


def _line(
    axis: Any, name: str, rows: Sequence[Mapping[str, Any]], x: str, y: str, band: tuple[str, str] | None = None
) -> None:
    rows = sorted(rows, key=lambda row: row[x])
    places = [row[x] for row in rows]
    (line,) = axis.plot(places, [row[y] for row in rows], marker="o", label=name)
    if band is not None:
        low, high = ([row[key] for row in rows] for key in band)
        axis.fill_between(places, low, high, color=line.get_color(), alpha=0.2)


def _finish(axis: Any, x: str, y: str) -> None:
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
