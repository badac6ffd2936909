from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys

import numpy as np
import onnxruntime
import pytest

from tfx.runtime import doctor


def test_the_report_is_json_and_true():
    found = doctor.diagnose()
    json.dumps(found, allow_nan=False)
    assert found["environment"]["onnxruntime"] == onnxruntime.__version__
    assert found["providers"]["cpu"] == {"runs": True, "problem": None}
    assert found["providers"]["cuda"]["runs"] == (found["providers"]["cuda"]["problem"] is None)
    assert found["packages"]["run bundles"]["numpy"] == np.__version__


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flags\t\t: fpu avx avx2 avx512_vnni avx_vnni", ["avx", "avx2", "avx512_vnni", "avx_vnni"]),
        ("Features\t: fp asimd asimddp i8mm", ["asimd", "asimddp", "i8mm"]),
        ("nothing", []),
    ],
)
def test_cpu_features_of_linux(monkeypatch, line, expected):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(doctor.Path, "read_text", lambda self, **_: f"processor\t: 0\n{line}\n")
    assert doctor.cpu_features() == expected


def test_cpu_features_of_macos(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    text = "hw.optional.arm.FEAT_DotProd: 1\nhw.optional.arm.FEAT_BF16: 0\nhw.optional.arm.FEAT_I8MM: 1\n"
    monkeypatch.setattr(doctor, "_command_output", lambda command: text)
    assert doctor.cpu_features() == ["asimddp", "i8mm"]


def test_unknown_systems_have_no_features(monkeypatch):
    monkeypatch.setattr(sys, "platform", "plan9")
    assert doctor.cpu_features() == []


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "10000 100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({}, None),
    ],
)
def test_a_container_s_share_is_read(tmp_path, files, cores):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert doctor._quota(tmp_path) == cores


def test_default_threads_are_within_a_container_s_share(monkeypatch):
    monkeypatch.setattr(doctor, "_quota", lambda: 1)
    assert doctor.default_threads() == 1


def test_default_threads_are_usable_cores():
    assert 1 <= doctor.default_threads() <= doctor.environment()["cores_usable"]


def test_two_onnxruntimes_are_warned_of(monkeypatch):
    assert not [text for text in doctor._warnings() if "both installed" in text]
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "1.0" if name.startswith("onnxruntime") else version(name)
    )
    assert [text for text in doctor._warnings() if "both installed" in text]


@pytest.mark.parametrize(
    ("cpu", "gpu", "line"),
    [
        ("1.2", None, "numpy 2.0, onnxruntime 1.2 (onnxruntime-gpu is not needed beside it)"),
        (None, "1.3", "numpy 2.0, onnxruntime-gpu 1.3 (onnxruntime is not needed beside it)"),
        ("1.2", "1.3", "numpy 2.0, onnxruntime 1.2, onnxruntime-gpu 1.3"),
        (None, None, "numpy 2.0, onnxruntime or onnxruntime-gpu missing"),
    ],
)
def test_either_onnxruntime_is_enough(cpu, gpu, line):
    assert doctor.listing({"numpy": "2.0", "onnxruntime": cpu, "onnxruntime-gpu": gpu}) == line
    assert doctor.listing({"torch": None}) == "torch missing"


def test_peak_memory_is_the_process_s_own():
    """getrusage would report what the parent held before the exec."""
    hold = np.ones(300 << 20, np.uint8)
    code = "from tfx.runtime.doctor import peak_rss_mb; print(peak_rss_mb())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 5 < float(found.stdout) < 250
    assert (doctor.peak_rss_mb() or 0) > hold.nbytes / 1e6
