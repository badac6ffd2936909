"""``tfx bench --plot``: a picture, or an error before anything is timed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tfx.cli import main
from tfx.errors import InputError
from tfx.runtime.plot import check_plot, plot


def report(mode="latency", floor=True):
    rows = [
        {
            "engine": engine, "batch": batch, "sequence": length, "tokens": batch * length, "texts": batch,
            "p50_ms": batch * length * factor, "p90_ms": 2 * batch * length * factor, "tokens_per_s": 1e3 / factor,
            "floor_ms": 1.0 if floor else None,
            "above_floor": {"ratio": factor, "low": factor, "high": factor + 1} if floor else None,
        }
        for engine, factor in (("tfx", 1), ("torch", 3))
        for batch in (1, 8)
        for length in (16, 128)
    ]  # fmt: skip
    return {"results": rows, "mode": mode, "threads": 2, "environment": {"cpu": "some CPU", "onnxruntime": "1.0"}}


@pytest.mark.parametrize(("mode", "floor"), [("latency", True), ("throughput", False)])
def test_lines_are_where_the_figures_are(tmp_path, monkeypatch, mode, floor):
    from matplotlib.figure import Figure

    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: figures.append(self) or save(self, *a, **k))
    plot(report(mode, floor), tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    (figure,) = figures
    assert len(figure.axes) == 2 + floor
    latency, throughput = figure.axes[:2]
    drawn = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in latency.lines}
    assert drawn == {"tfx": ([16, 128], [16, 128]), "torch": ([16, 128], [48, 384])}
    assert [list(line.get_xdata()) for line in throughput.lines] == [[1, 8], [1, 8]]
    assert latency.get_ylabel() == ("ms a call of 1, p50 to p90" if mode == "latency" else "ms for 1 texts")
    if floor:
        assert list(figure.axes[2].lines[1].get_ydata()) == [3] * 4


def test_other_endings_and_folders(tmp_path):
    with pytest.raises(InputError, match=r"found the ending '.jpg', wanted one of .png, .svg, .pdf"):
        check_plot(tmp_path / "out.jpg")
    with pytest.raises(InputError, match="its folder does not exist"):
        check_plot(tmp_path / "nowhere" / "out.png")
    (tmp_path / "taken.png").mkdir()
    with pytest.raises(InputError, match=r"taken.png: cannot be written: Is a directory"):
        plot(report(), tmp_path / "taken.png")


def test_the_command_draws(tmp_path, shared_bundle):
    pytest.importorskip("onnx_ir", reason="the floor is made by what exports")
    out = tmp_path / "out.svg"
    arguments = ["bench", str(shared_bundle.path), "--batch", "1", "--seq", "4", "--rounds", "2", "--threads", "1"]
    done = CliRunner().invoke(main, [*arguments, "--plot", str(out)])
    assert done.exit_code == 2  # the tiny model has no product with weights
    assert done.stderr == "error: floor: the bundle has no product with weights\n"
    assert not out.exists()


def test_without_matplotlib(tmp_path, shared_bundle, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    done = CliRunner().invoke(main, ["bench", str(shared_bundle.path), "--plot", str(Path(tmp_path / "a.png"))])
    assert done.exit_code == 3
    assert done.stderr == 'error: matplotlib is not installed; install it with: pip install "tfx-onnx[plot]"\n'
